"""Ctrl-C and SIGTERM at any moment: 128 + N, not a word, and nothing temporary left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

#: ended by the signal itself, or by a tool that cleaned up first; a shell tells both as 130
INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)

#: a tool whose words are what becomes of a signal while it works
TOOL = """
import os, signal, sys
import click
from libxd import console, signals, streams

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

@console.command("xd-test", examples='')
@click.argument("words", nargs=-1)
def cli(console, words):
    '''Say words.'''
    for word in console.operands(words, "words"):
        with console.guard(word):
            if word == "turned":
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                except KeyboardInterrupt as error:
                    raise ImportError("cannot load") from error
            if word == "swallowed":
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                except BaseException:
                    raise OSError(2, "none") from None
            if word == "dropped":
                Dropped()
            if word == "twice":
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)
            console.emit(word)

streams.make_sound()
console.entry(cli)()
"""


def interruptible():
    """A test runner in the background may have handed on an ignored Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted_by(module, tool, root, place):
    """The tool, with a module on its path that is interrupted while it is imported."""
    (place / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    return subprocess.run(
        [root / "tools" / tool, "--help"], capture_output=True, text=True, preexec_fn=interruptible,
        env={**os.environ, "XD_PYTHON": sys.executable, "PYTHONPATH": str(place)},
    )  # fmt: skip


@pytest.mark.parametrize("module", ["sitecustomize", "contextlib", "libxd", "click", "blake3"])
@pytest.mark.parametrize("tool", ["xd-plan", "xd-score"])
def test_ctrl_c_while_something_is_imported_is_silent(tool, module, root, tmp_path):
    done = interrupted_by(module, tool, root, tmp_path)
    assert (done.returncode in INTERRUPTED, done.stdout, done.stderr) == (True, "", "")


def test_ctrl_c_at_any_moment_is_silent(root, tmp_path):
    """From the shell's first instruction on, and anew each run, for the moments are drawn."""
    for moment in (random.random() * 0.2 for _ in range(40)):
        process = subprocess.Popen(
            [root / "tools" / "xd-plan", "-q", root / "experiments" / "s0.json"], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=interruptible,
            env={**os.environ, "XD_PYTHON": sys.executable},
        )  # fmt: skip
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert err == "" and process.returncode in (0, *INTERRUPTED), f"after {moment} s"


def test_an_ignored_ctrl_c_stays_ignored(root, tmp_path):
    """A shell starts what runs in the background with SIGINT ignored."""
    (tmp_path / "click.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['click']\nimport click\nsys.modules['click'] = click\n"
    )
    done = subprocess.run(
        [root / "tools" / "xd-plan", "--version"], capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        env={**os.environ, "XD_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("xd-plan ")


@pytest.mark.parametrize("word", ["turned", "swallowed", "dropped", "twice"])
def test_a_signal_counts_whatever_became_of_its_exception(tmp_path, word):
    """A library turned it into an error of its own, or it fell into a destructor, where nothing catches it."""
    path = tmp_path / "tool.py"
    path.write_text(TOOL)
    done = subprocess.run([sys.executable, "-P", path, "a", word, "b"], capture_output=True, text=True)
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert (done.returncode in ended, done.stdout, done.stderr) == (True, "a\n", "")
