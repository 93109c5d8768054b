"""make prove: break every rule of docs/contract.md in turn and see its test fail.

dev/rules.toml names, a rule each, the line that holds it, the line that breaks it, and the test that must notice. The
tree is copied to a temporary directory, where an environment of its own imports the copy and nothing of the checkout;
each test passes there, the rule is broken, the test must fail.

    python -P dev/break_rules.py [WORD]        only the rules that have WORD in their text, file or test
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("docs", "experiments", "kernels", "libxd", "schemas", "tests", "tools")
#: import name -> its place in the tree (pyproject.toml, package-dir)
PACKAGES = {"libxd": "libxd", "xdkernels": "kernels/xdkernels", "xdschemas": "schemas"}
TIMEOUT_S = 300
PASSED, FAILED = 0, 1  # pytest's exit statuses; any other one is no verdict


@dataclass(frozen=True)
class Rule:
    """One rule: in `file`, `old` (there just once) holds it and `new` breaks it; `test` must notice."""

    rule: str
    test: str
    file: str
    old: str
    new: str


class Copy:
    """A copy of the tree with an interpreter that imports it: no variable is needed, and none can be overridden."""

    def __init__(self, place: Path) -> None:
        self.tree = place / "tree"
        self.tree.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, self.tree)
        packages = place / "packages"
        packages.mkdir()
        for name, there in PACKAGES.items():
            (packages / name).symlink_to(self.tree / there)
        venv.create(place / "venv", symlinks=True)
        self.python = place / "venv" / "bin" / "python"
        # By path alone: a .pth file in there, such as that of an editable install, is not read again.
        installed = dict.fromkeys(sysconfig.get_path(scheme) for scheme in ("purelib", "platlib"))
        site = Path(self._output("import sysconfig; print(sysconfig.get_path('purelib'))"))
        (site / "copy.pth").write_text("\n".join([str(packages), *installed]) + "\n")
        for name, there in PACKAGES.items():
            found = self._output(f"import {name}; print({name}.__path__[0])")
            assert Path(found).resolve() == (self.tree / there).resolve(), f"{name} is imported from {found}"

    def pytest(self, tests: list[str], *options: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        return subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)], cwd=self.tree, env=self._environment(),
            capture_output=True, text=True, timeout=TIMEOUT_S * (1 if len(tests) == 1 else 6),
        )  # fmt: skip

    def not_passing(self, tests: list[str]) -> list[str]:
        """What of the tests fails or is skipped as things are: a test that does not pass shows nothing."""
        report = self.tree / "report.xml"
        ran = self.pytest(tests, f"--junitxml={report}")
        if ran.returncode not in (PASSED, FAILED) or not report.exists():
            return ran.stdout.splitlines()[-20:] + ran.stderr.splitlines()[-5:]
        cases = ElementTree.parse(report).iter("testcase")
        return [f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case)]

    def write(self, rule: Rule, text: str) -> None:
        path = self.tree / rule.file
        path.write_text(text)
        # Python takes a cached module for current by its size and the whole second of its change.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def notices(self, rule: Rule) -> str:
        """ "yes" when the rule's test fails once it is broken, "NO" when it does not, else what went wrong."""
        sound = (self.tree / rule.file).read_text()
        if sound.count(rule.old) != 1:
            return f"ERROR: {rule.file} holds its line {sound.count(rule.old)} times"
        self.write(rule, sound.replace(rule.old, rule.new))
        try:
            status = self.pytest([rule.test], "-x").returncode
        except subprocess.TimeoutExpired:
            return "ERROR: hangs"
        finally:
            self.write(rule, sound)
        return {PASSED: "NO", FAILED: "yes"}.get(status, f"ERROR: pytest ended with {status}")

    def _output(self, code: str) -> str:
        command = [self.python, "-P", "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.tree,
                              env=self._environment()).stdout.strip()  # fmt: skip

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XD_PYTHON")}
        return {**kept, "VIRTUAL_ENV": str(self.python.parent.parent), "OMP_NUM_THREADS": "1"}


def load() -> list[Rule]:
    """The rules of dev/rules.toml."""
    table = tomllib.loads((Path(__file__).parent / "rules.toml").read_text())
    return [Rule(**entry) for entry in table["rule"]]


def main(word: str = "") -> int:
    """Print the table; 1 when a rule can be broken unnoticed."""
    rules = [rule for rule in load() if word in f"{rule.rule} {rule.file} {rule.test}"]
    with tempfile.TemporaryDirectory(prefix="xd-prove-") as place:
        copy = Copy(Path(place))
        if wrong := copy.not_passing(sorted({rule.test for rule in rules})):
            print("these do not pass with every rule in force:", *wrong, sep="\n  ", file=sys.stderr)
            return 1
        width, unnoticed = max((len(rule.rule) for rule in rules), default=0), 0
        print(f"{'rule':{width}}  fails without it  test")
        for rule in rules:
            verdict = copy.notices(rule)
            unnoticed += verdict != "yes"
            print(f"{rule.rule:{width}}  {verdict:16}  {rule.test}", flush=True)
    print(f"{len(rules)} rules, {unnoticed} unnoticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
