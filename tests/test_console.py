"""The shell around every tool: one line an error, the right status, closed pipes, signals."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import venv

import pytest

from libxd.console import Console
from libxd.errors import Status, XdError, XdErrors

TOOL = """
import errno, os, sys, time
from libxd import console, streams, strictjson
from libxd.errors import XdError

def fail(word):
    if word == "memory":
        raise MemoryError
    raise OSError(getattr(errno, word), os.strerror(getattr(errno, word)), "some/file")

@console.command("xd-test", examples='''
# one
xd-test a
# two
xd-test b
''')
@console_argument
@__import__('click').option('--rows', is_flag=True)
@__import__('click').option('--unguarded', is_flag=True)
def cli(console, words, rows, unguarded):
    '''Print words.'''
    if unguarded:
        fail(words[0])
    for place, line in console.rows(words, "rows") if rows else ():
        with console.guard(place):
            console.emit(f"{place} {strictjson.loads(line, place)}")
    for word in () if rows else console.operands(words, "words"):
        with console.guard(word):
            if word.startswith("fail-"):
                raise XdError("refused to", status=int(word[5:]), path="/a/b", hint="do another thing")
            if word == "bug":
                raise KeyError("oops")
            if word == "memory" or word[0] == "E":
                fail(word)
            if word == "wait":
                print("waiting", flush=True)
                time.sleep(60)
            console.emit(word)

streams.make_sound()
console.entry(cli)()
""".replace("@console_argument", "@__import__('click').argument('words', nargs=-1)")


@pytest.fixture
def tool(tmp_path):
    path = tmp_path / "tool.py"
    path.write_text(TOOL)

    def run(*words, stdin="", env=None, **options):
        return subprocess.run(
            [sys.executable, "-P", path, *words], input=stdin, capture_output=True, text=True,
            env={**os.environ, **(env or {})}, **options,
        )  # fmt: skip

    run.path = path
    return run


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["a"], 0),
        (["fail-69", "a"], 69),
        (["fail-69", "fail-65", "fail-73"], 65),
        (["fail-73", "fail-69"], 73),
        (["bug", "a"], 70),
        (["--no-such-option"], 2),
    ],
)
def test_statuses(tool, words, status):
    done = tool(*words)
    assert done.returncode == status
    assert done.stdout == "a\n" * ("a" in words)
    assert "Traceback" not in done.stderr
    failing = [word for word in words if word != "a"]
    assert len(done.stderr.splitlines()) == len(failing)


@pytest.mark.parametrize(
    ("word", "status", "what"),
    [
        ("ENOENT", 66, "cannot be read"),
        ("EACCES", 66, "cannot be read"),
        ("EIO", 66, "cannot be read"),
        ("ENOSPC", 73, "cannot be written"),
        ("EROFS", 73, "cannot be written"),
        ("memory", 75, "out of memory"),
    ],
)
def test_what_the_system_refuses_has_one_status_wherever_it_is_met(tool, word, status, what):
    guarded, unguarded = tool(word, "a"), tool("--unguarded", word)
    assert (guarded.returncode, guarded.stdout) == (status, "a\n")
    assert unguarded.returncode == status
    for done in (guarded, unguarded):
        assert what in done.stderr and len(done.stderr.splitlines()) == 1
        assert word == "memory" or "some/file" in done.stderr


def test_a_stdout_that_takes_nothing_is_73_and_said_once(tool):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-P", tool.path, "a", "b"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, len(done.stderr.splitlines())) == (73, 1)
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -P {tool.path} a b >&-"], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (73, "xd-test: stdout: is closed\n")


def test_a_path_that_is_no_utf8_leaves_as_it_came(tool):
    path = b"runs/\xff\xfe/a0001\n"
    done = subprocess.run([sys.executable, "-P", tool.path], input=path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, path, b"")


ROWS = b'1\n\n"\xff"\n{"a": 1\n2\r\n3'


@pytest.mark.parametrize("stdin", [True, False])
def test_a_bad_row_costs_no_other_row(tool, tmp_path, stdin):
    """Bytes that are no text, and what is no JSON: reported with their line, the rows around them are handed on."""
    (tmp_path / "rows").write_bytes(ROWS)
    words = ["--rows"] if stdin else ["--rows", "rows", "none", "rows"]
    done = subprocess.run(
        [sys.executable, "-P", tool.path, *words], input=ROWS if stdin else b"", capture_output=True, cwd=tmp_path
    )
    name = "stdin" if stdin else "rows"
    good, bad = [f"{name}:1 1", f"{name}:5 2", f"{name}:6 3"], [f"xd-test: {name}:3: not UTF-8", f"xd-test: {name}:4: "]
    if not stdin:
        good, bad = good * 2, [*bad, "xd-test: none: cannot be read: No such file", *bad]
    assert done.stdout.decode().splitlines() == good
    said = done.stderr.decode().splitlines()
    assert len(said) == len(bad) and all(map(str.startswith, said, bad))
    assert done.returncode == 65


def test_a_folder_for_a_file_of_rows_is_66(tool, tmp_path):
    done = tool("--rows", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (66, 1)


def unprivileged():
    """Take from root what lets it read and write whatever it likes (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; refused to those who have nothing to lose


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_place_without_permission_is_66_to_read_and_73_to_write(xd, tmp_path, root):
    """Whatever the option or operand is called: the command line was in order, so never 2."""
    locked, config, row = tmp_path / "locked", tmp_path / "config.json", tmp_path / "row"
    locked.mkdir()
    shutil.copy(root / "experiments" / "s0.json", config)
    row.write_text(xd("xd-plan", "-q", root / "experiments" / "s0.json").out.splitlines()[0] + "\n")
    policy = ("--runtime", "cpu-smoke", "--allow-smoke-operators")
    config.chmod(0)
    locked.chmod(0)
    for words, status in (
        (("xd-plan", config), 66),
        (("xd-plan", root / "experiments" / "s0.json", "--runs", locked), 73),
        (("xd-materialize", *policy, "--runs", locked, row), 73),
        (("xd-resume", *policy, "--runs", locked, row), 66),
        (("xd-resume", *policy, "--runs", tmp_path / "none", "--groups", locked, row), 73),
        (("xd-resume", *policy, "--runs", tmp_path / "none", config), 66),
        (("xd-seal", locked / "s0" / "cases" / "c-0123456789abcdef" / "a0001"), 66),
        (("xd-rollout", "--model", "none", "--out", locked / "x", row), 73),
    ):
        done = subprocess.run(
            [root / "tools" / words[0], *words[1:], "-q"], capture_output=True, text=True, preexec_fn=unprivileged,
            env={**os.environ, "XD_PYTHON": sys.executable},
        )  # fmt: skip
        assert (done.returncode, len(done.stderr.splitlines())) == (status, 1), (words, done.stderr)
        assert "ermission denied" in done.stderr
    locked.chmod(0o700)


def test_an_experiment_given_for_its_rows_is_one_line(xd, root, tmp_path):
    config = root / "experiments" / "s0.json"
    for words in (("xd-resume", "--runs", tmp_path, "--runtime", "cpu-smoke"), ("xd-materialize", "--runs", tmp_path,
                  "--runtime", "cpu-smoke")):  # fmt: skip
        for operands, stdin in (([config], ""), ([], config.read_text())):
            ran = xd(*words, *operands, stdin=stdin)
            (line,) = [line for line in ran.err.splitlines() if "to score" not in line]
            assert (ran.status, ran.out) == (65, "")
            assert "is one JSON document" in line and "xd-plan makes rows" in line


@pytest.mark.parametrize("stdin", [True, False])
def test_a_row_without_end_is_refused_in_constant_memory(tool, tmp_path, stdin):
    """Far more bytes than the cap (64 MiB), in an address space that could not hold them; the next row is read."""
    size = 1 << 29
    if stdin:
        words = f"(head -c {size} /dev/zero; printf '\\n7\\n') |"
    else:
        words = f"truncate -s {size} {tmp_path}/rows; printf '\\n7\\n' >> {tmp_path}/rows; "
    command = f"{words} (ulimit -v {3 << 17}; exec {sys.executable} -P {tool.path} --rows {'-' if stdin else 'rows'})"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    name = "stdin" if stdin else "rows"
    assert done.stdout == f"{name}:2 7\n", done.stderr
    assert done.returncode == 65
    assert done.stderr.startswith(f"xd-test: {name}:1: JSON is too large")


def test_the_line_says_who_where_what_and_what_next(tool):
    assert tool("fail-65").stderr == "xd-test: fail-65#/a/b: refused to (do another thing)\n"


def test_log_json_is_one_object_a_line(tool):
    done = tool("--log-json", "fail-65", "bug")
    first, second = map(json.loads, done.stderr.splitlines())
    assert (first["code"], first["path"], first["message"], first["hint"]) == (
        "invalid", "/a/b", "refused to", "do another thing",
    )  # fmt: skip
    assert (second["code"], second["status"]) == ("bug", 70)
    assert json.loads(tool("--log-json", "--bad").stderr)["status"] == 2


def test_debug_shows_the_traceback(tool):
    assert "KeyError: 'oops'" in tool("bug", env={"XD_DEBUG": "1"}).stderr


def test_stdin_streams(tool):
    process = subprocess.Popen(
        [sys.executable, "-P", tool.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for word in ("one", "two"):
        process.stdin.write(word + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == word + "\n"  # before the next is sent
    process.stdin.close()
    assert process.wait() == 0


def test_a_closed_pipe_is_no_traceback(tool):
    done = subprocess.run(
        f"yes | {sys.executable} -P {tool.path} | head -n 1; echo ${{PIPESTATUS[1]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "y\n141\n"
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(tool, number):
    process = subprocess.Popen(
        [sys.executable, "-P", tool.path, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell's background job ignores SIGINT
    )  # fmt: skip
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err == b""


def test_completion_for_the_shell(tool):
    done = tool(env={"_XD_TEST_COMPLETE": "bash_source"})
    assert done.returncode == 0 and "_xd_test_completion" in done.stdout


@pytest.mark.parametrize("broken", ["raise ImportError('broken')", "raise RuntimeError('broken\\nin two')", "1 +"])
def test_a_failed_import_is_a_bug_not_a_no(xd, tmp_path, broken):
    """Status 1 only ever means "no": a broken installation is 70, in whatever way it is broken."""
    (tmp_path / "blake3.py").write_text(f"{broken}\n")
    done = xd("xd-plan", env={"PYTHONPATH": str(tmp_path)})
    assert done.status == 70
    assert done.err.startswith("xd-plan: cannot be imported:") and len(done.err.splitlines()) == 1
    assert "broken" in done.err or "syntax" in done.err


@pytest.mark.parametrize("module", ["re", "typing", "types", "functools", "importlib", "signal", "json", "click"])
def test_a_module_that_stands_before_another_is_70_in_one_line(xd, tmp_path, module):
    """Of the standard library, too, which what sets up the environment needs."""
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('not the one that was meant')\n")
    for tool in ("xd-plan", "xd-score"):
        done = xd(tool, "--version", env={"PYTHONPATH": str(tmp_path)})
        assert (done.status, done.out, len(done.err.splitlines())) == (70, "", 1)
        assert done.err.startswith(f"{tool}: ")


# -- the stubs of the checkout


@pytest.fixture
def checkout(tmp_path, root):
    """A copy of tools/ in a place with a space, and `checkout(tool, **environment)` to run one there."""
    place = tmp_path / "check out"
    shutil.copytree(root / "tools", place / "tools")

    def run(**environment):
        clean = {name: value for name, value in os.environ.items() if name not in ("XD_PYTHON", "VIRTUAL_ENV")}
        command = [place / "tools" / "xd-plan", "--version"]
        return subprocess.run(command, capture_output=True, text=True, env=clean | environment)

    run.place = place
    return run


def environment_at(place, text):
    """A virtual environment whose interpreter is a shell script."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text(f"#!/bin/sh\n{text}\n")
    (place / "bin" / "python").chmod(0o755)
    return str(place)


WITH = f'exec {sys.executable} "$@"'


def bare_environment_at(place):
    """A virtual environment with nothing installed."""
    venv.create(place, with_pip=False, symlinks=True)
    return str(place)


def test_a_stub_finds_an_interpreter_that_has_libxd(checkout, tmp_path):
    """$XD_PYTHON, the active environment, the checkout's own; an unrelated active environment is not in the way."""
    unrelated, active = bare_environment_at(tmp_path / "unrelated"), environment_at(tmp_path / "active", WITH)
    assert checkout(VIRTUAL_ENV=active).stdout.startswith("xd-plan ")
    assert checkout(XD_PYTHON=sys.executable, VIRTUAL_ENV=unrelated).stdout.startswith("xd-plan ")
    assert checkout(VIRTUAL_ENV=unrelated).returncode == 70
    environment_at(checkout.place / ".venv", WITH)
    for environment in ({}, {"VIRTUAL_ENV": unrelated}, {"VIRTUAL_ENV": str(tmp_path / "gone")}):
        done = checkout(**environment)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("xd-plan ")
    assert checkout(XD_PYTHON=f"{unrelated}/bin/python").returncode == 70  # what is named is meant


@pytest.mark.parametrize("named", ["XD_PYTHON", "VIRTUAL_ENV", ""])
@pytest.mark.parametrize("there", [True, False])
def test_no_interpreter_with_libxd_is_one_line_and_70(checkout, tmp_path, named, there):
    place = bare_environment_at(tmp_path / "unrelated") if there else str(tmp_path / "unrelated")
    environment = {"XD_PYTHON": f"{place}/bin/python", "VIRTUAL_ENV": place}
    if there:
        bare_environment_at(checkout.place / ".venv")
    done = checkout(**({named: environment[named]} if named else {}))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (70, "", 1)
    assert done.stderr.startswith("xd-plan: ") and "make setup" in done.stderr


def test_status_is_the_first_failure_other_than_69():
    console = Console("t", quiet=True)
    assert console.status == 0
    console.error(XdError("x", status=Status.REFUSED))
    assert console.status == 69
    console.answer_no()
    assert console.status == 1  # the question was asked, and what was refused is no yes
    console.error(XdErrors([XdError("x", status=Status.MISSING), XdError("y")]))
    console.error(XdError("x", status=Status.INVALID))
    assert console.status == 66


def test_an_error_survives_the_way_from_a_child():
    error = XdError("m", status=Status.RETRY, code="c", where="w", path="/p", found=[1], expected="e", hint="h")
    again = XdError.from_record(json.loads(json.dumps(error.record())))
    assert again.line() == error.line() and again.status == Status.RETRY


def test_a_message_is_one_line_whatever_it_holds():
    assert "\n" not in XdError("a\nb", where="x\ny", found="1\n2", hint="h\nh").line()
