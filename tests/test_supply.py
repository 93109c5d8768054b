"""What xd is made of, and what it does not do: unpickle, make code of data, start a shell.

Dependencies are named, justified, pinned, and as they were shipped: dev/audit.py, as far as no network is needed.
"""

from __future__ import annotations

import ast
import base64
import email.message
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))

import audit  # noqa: E402

ROOMS = ("libxd", "tools", "dev", "examples", "kernels")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

#: modules that turn bytes into objects by running what the bytes say, or send objects between processes that way
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle",
              "copyreg", "multiprocessing"}  # fmt: skip
#: builtins that make code of a string
INTERPRETERS = {"eval", "exec", "compile", "__import__"}
#: functions that hand a string to a shell
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn",
          "asyncio.create_subprocess_shell"}  # fmt: skip
_SHELL_NAMES = {"sh", "bash", "dash", "ksh", "zsh"}


def offences(source: str) -> list[str]:
    """`line: what` for every place of a module that unpickles, makes code of data, or starts a shell."""
    tree = ast.parse(source)
    return [f"{node.lineno}: {what}" for node in ast.walk(tree) for what in _offences_of(node)]


def _offences_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        whole = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = [*whole, *(alias.name for alias in node.names)]
        yield from (f"imports {name}" for name in names if name.partition(".")[0] in UNPICKLERS)
        if whole in (["os"], ["subprocess"], ["builtins"], ["torch"], ["yaml"], ["pty"], ["asyncio"]):
            yield from (f"takes {name} by its bare name" for name in names[1:] if _bare(whole[0], name))
    elif isinstance(node, ast.Name) and node.id in INTERPRETERS:
        yield node.id
    elif isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        if name in SHELLS or name in {f"builtins.{word}" for word in INTERPRETERS}:
            yield name
        if node.attr.endswith(("_object", "_object_list")) and name.startswith(("dist.", "torch.distributed.")):
            yield f"{name} pickles"
        if name.startswith("yaml.") and "load" in node.attr and not node.attr.startswith("safe_load"):
            yield name
        if node.attr == "read_pickle" or name in ("torch.save", "tempfile.mktemp"):
            yield name
    elif isinstance(node, ast.Call):
        yield from _offences_of_call(node)
    elif isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
        words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        shell = isinstance(words[0], str) and words[0].rpartition("/")[2] in _SHELL_NAMES
        if shell and any(map(_is_minus_c, words[1:])):
            yield f"a shell string: {ast.unparse(node)[:60]}"


def _offences_of_call(node: ast.Call) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    name = ast.unparse(node.func)
    for option in ("shell", "allow_pickle", "trust_remote_code"):
        if option in given and not _is(given[option], False):
            yield f"{option}={ast.unparse(given[option])}"
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if re.search(r"Model\w*\.from_pretrained$", name) and not _is(given.get("use_safetensors"), True):
        yield f"{name} without use_safetensors=True"
    if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
        module = str(node.args[0].value)
        yield from [f"imports {module}"] if module.partition(".")[0] in UNPICKLERS else []


def _bare(module: str, name: str) -> bool:
    return f"{module}.{name}" in SHELLS or (module == "builtins" and name in INTERPRETERS) or (
        module in ("torch", "yaml") and name in ("load", "save", "unsafe_load", "full_load")
    )  # fmt: skip


def _is(value: ast.expr | None, wanted: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


def _is_minus_c(word: object) -> bool:
    return isinstance(word, str) and re.fullmatch(r"-[a-z]*c[a-z]*", word) is not None


def test_nothing_is_unpickled_no_code_is_made_of_data_no_shell_is_started():
    assert len(SOURCES) > 250
    found = [f"{path.relative_to(ROOT)}:{offence}" for path in SOURCES for offence in offences(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "def f():\n    import marshal",
        "from multiprocessing.connection import Client",
        "import shelve",
        "import dill",
        "importlib.import_module('cloudpickle')",
        "import_module('pickle')",
        "eval(text)",
        "run = exec",
        "code = compile(text, 'x', 'exec')",
        "__import__(name)",
        "builtins.eval(text)",
        "from builtins import exec as run",
        "os.system('ls')",
        "from os import popen",
        "subprocess.run('ls', shell=True)",
        "subprocess.Popen(words, shell=wanted)",
        "subprocess.getoutput('ls')",
        "asyncio.create_subprocess_shell('ls')",
        "run(['sh', '-c', text])",
        "run(('/bin/bash', '-euo', 'pipefail', '-c', text))",
        "run(['bash', '-lc', text])",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=given)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=only)",
        "from torch import load",
        "torch.save(value, path)",
        "pandas.read_pickle(path)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "from yaml import load",
        "dist.broadcast_object_list(found, src=0)",
        "torch.distributed.all_gather_object(found, mine)",
        "AutoModelForCausalLM.from_pretrained(path)",
        "AutoModel.from_pretrained(path, use_safetensors=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=given)",
        "tempfile.mktemp()",
    ],
)
def test_each_way_is_seen(source):
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(pattern)",
        "torch.compile(model)",
        "self.exec(value)",
        "subprocess.run(['ls', path], check=True)",
        "subprocess.run([sys.executable, '-c', CODE])",
        "subprocess.run(words, shell=False)",
        "run(['bash', script])",
        "np.load(path)",
        "np.load(path, allow_pickle=False)",
        "torch.load(path, weights_only=True)",
        "json.load(file)",
        "yaml.safe_load(text)",
        "dist.all_gather(parts, part)",
        "AutoTokenizer.from_pretrained(path)",
        "AutoModelForCausalLM.from_pretrained(path, use_safetensors=True)",
        "tempfile.mkdtemp()",
        "os.execv(path, words)",
    ],
)
def test_what_only_looks_like_it_is_not(source):
    assert offences(source) == []


# -- shell scripts


_EVALUATES = re.compile(r"(^|[\s;&|(`])(eval|(ba|da|k|z)?sh\s+([^|;&]*\s)?-[a-z]*c)(\s|$)")


def evaluated(script: str) -> list[str]:
    """Lines of a shell script that run a string as code."""
    return [
        line for line in script.splitlines()
        if not line.lstrip().startswith("#") and _EVALUATES.search(line)
    ]  # fmt: skip


def scripts() -> list[Path]:
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.is_file()]
    return [path for path in files if path.suffix in (".sh", ".sbatch") or _first_line(path).endswith(b"sh")]


def _first_line(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.readline(64).strip()


def test_no_shell_script_runs_a_string():
    assert len(scripts()) >= 14
    assert [f"{path.name}: {line}" for path in scripts() for line in evaluated(path.read_text())] == []


@pytest.mark.parametrize("line", ['eval "$x"', 'a=1; eval $x', 'sh -c "$x"', "  bash -o pipefail -c $x", "$(eval x)"])
def test_a_script_that_would_is_seen(line):
    assert evaluated(line)
    assert not evaluated(f"# {line}")


# -- dependencies


def documented() -> dict[str, list[str]]:
    """docs/dependencies.md: group -> the names in the first column of its table. The base is ""."""
    groups: dict[str, list[str]] = {}
    group = None
    for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines():
        if heading := re.match(r"## (The base|Extra `(\w+)`)", line):
            group = heading[2] or ""
            groups[group] = []
        elif line.startswith("## "):
            group = None
        elif group is not None and (cell := re.match(r"\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", line)):
            groups[group].append(cell[1])
    return groups


def test_every_dependency_is_justified_and_none_that_is_not_there():
    wanted = {group: sorted(item.name for item in items) for group, items in audit.requirements().items()}
    assert {group: sorted(names) for group, names in documented().items()} == wanted


def test_what_the_base_brings_along_is_documented():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    direct = {item.name for item in audit.requirements()[""]}
    brought = set(audit.closure(audit.requirements()[""])) - direct
    assert len(direct) <= 6
    assert brought <= {"typing-extensions"}
    assert "`typing-extensions`" in page


def test_the_library_imports_what_is_declared_and_nothing_else():
    """By import names: the base's, the extras', and two that transformers and torch themselves ask for."""
    names = {"blake3", "click", "jsonschema_rs", "numpy", "rfc8785", "tqdm"}
    extras = {"torch", "transformers", "vllm", "triton", "pyarrow", "matplotlib"}
    brought = {"tokenizers", "jinja2"}
    assert brought <= set(audit.closure(audit.requirements()["hf"]))
    own = {"libxd", "xdkernels", "xdschemas"}
    found = {
        name.partition(".")[0]
        for room in ("libxd", "kernels")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
    }
    assert found - set(sys.stdlib_module_names) - own == names | extras | brought


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.fixture(scope="module")
def installed():
    return audit.here()


def test_what_is_installed_is_what_is_pinned(installed):
    pinned = audit.pins()
    assert list(audit.out_of_range(pinned)) == []
    assert list(audit.unpinned(installed, pinned)) == []
    assert list(audit.stale(installed, pinned)) == []
    assert list(audit.unsatisfied(installed)) == []


def test_a_pin_that_is_missing_other_or_left_over_is_found(installed, monkeypatch):
    pinned = audit.pins()
    assert list(audit.unpinned(installed, {n: v for n, v in pinned.items() if n != "click"}))
    assert list(audit.unpinned(installed, pinned | {"click": Version("1.0")}))
    assert list(audit.stale(installed, pinned | {"left-pad": Version("1.3.0")}))
    assert list(audit.out_of_range(pinned | {"click": Version("1.0")}))
    assert list(audit.unsatisfied({name: found for name, found in installed.items() if name != "iniconfig"}))
    monkeypatch.setattr(audit, "requirements", lambda: {"": [Requirement("click>=8"), Requirement("left-pad")]})
    assert list(audit.out_of_range(pinned)) == ["left-pad of the base: pinned None"]


def test_the_bases_files_are_those_of_their_wheels_from_an_index_under_free_licences():
    for found in audit.closure(audit.requirements()[""]).values():
        assert [*audit.changed_files(found), *audit.foreign(found), *audit.unfree(found)] == []


class Made:
    """A distribution as importlib.metadata shows one, of one file."""

    def __init__(self, place: Path, licence: str = "MIT", url: str | None = None) -> None:
        (place / "a.py").write_bytes(b"sound")
        self._place, self._url = place, url
        self.metadata = email.message.Message()
        self.metadata["Name"] = "made"
        self.metadata["License"] = licence
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"sound").digest()).rstrip(b"=").decode()
        self.files = [importlib.metadata.PackagePath("a.py")]
        self.files[0].hash = importlib.metadata.FileHash(f"sha256={digest}")

    def locate_file(self, file: object) -> Path:
        return self._place / str(file)

    def read_text(self, name: str) -> str | None:
        return self._url and json.dumps({"url": self._url})


def test_a_changed_file_a_foreign_origin_and_an_unfree_licence_are_found(tmp_path):
    made = Made(tmp_path)
    assert [*audit.changed_files(made), *audit.foreign(made), *audit.unfree(made)] == []
    assert list(audit.unfree(Made(tmp_path, licence="Proprietary")))
    assert list(audit.unfree(Made(tmp_path, licence="")))
    assert list(audit.foreign(Made(tmp_path, url="https://example.org/made.zip")))
    (tmp_path / "a.py").write_bytes(b"other")
    assert list(audit.changed_files(made)) == ["made: a.py is not the wheel's"]
    (tmp_path / "a.py").unlink()
    assert list(audit.changed_files(made)) == ["made: a.py is not the wheel's"]
    made.files = []
    assert list(audit.changed_files(made)) == ["made: has no record of its files"]
