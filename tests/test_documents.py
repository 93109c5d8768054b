"""The documents say what the programs do: pages from --help, the option list, links, names of files."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import click
import pytest
from comparison_fixtures import floats, rewrite_json, score_path, scored

from libxd import comparison, seal, tensors
from libxd.cmd import TOOLS
from libxd.tensors import TensorFile

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "dev" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(tool: str) -> click.Command:
    return importlib.import_module(f"libxd.cmd.{tool}").cli


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_of_a_tool_is_its_help(tool):
    path = ROOT / "docs" / "tools" / f"xd-{tool}.md"
    assert path.read_text() == make_docs().page(tool), "run `make docs`"


def test_the_page_of_the_knobs_is_the_catalog():
    assert (ROOT / "docs" / "knobs.md").read_text() == make_docs().knobs_page(), "run `make docs`"


def test_every_shipped_experiment_has_its_policy_in_the_makefile():
    """`make run EXP=name` works of each that `make help` lists."""
    makefile = (ROOT / "Makefile").read_text()
    names = [path.stem for path in (ROOT / "experiments").glob("*.json")]
    assert len(names) > 10
    assert [name for name in names if f"\nPOLICY_{name} ?= " not in makefile] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_options_are_the_reviewed_ones(tool):
    """A new, renamed or dropped option shows up here and is looked at: tests/golden/options.json."""
    golden = json.loads((ROOT / "tests" / "golden" / "options.json").read_text())
    found = sorted(
        "/".join(sorted([*parameter.opts, *parameter.secondary_opts]))
        for parameter in command(tool).params
        if isinstance(parameter, click.Option)
    )
    assert found == golden[f"xd-{tool}"]


@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_complete(tool):
    """Every option is explained, and two worked examples stand at the foot."""
    for parameter in command(tool).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"
    examples = [line for line in command(tool).examples.strip().splitlines() if line.strip().startswith("#")]
    assert len(examples) == 2


def test_links_between_documents_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = {
        name
        for page in PAGES
        for line in page.read_text().splitlines()
        for name in re.findall(r"(?:^\s*|`)make (?:-\S+ )*([a-z][a-z-]*)", line)
    }
    assert named - known == set()


def test_the_variables_of_the_tools_stand_in_the_readme():
    """Whatever variable the code or the Makefile reads, by its own name or by the pattern that it follows."""
    section = (ROOT / "README.md").read_text().split("## Environment variables\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `(XD_[A-Z_<>]+)`", section, re.M))
    patterns = [re.compile(name.replace("<RUNTIME>", "[A-Z_]+") + r"\Z") for name in named]
    sources = [*(ROOT / "libxd").rglob("*.py"), *(ROOT / "tools").glob("*"), ROOT / "Makefile"]
    texts = [path.read_text() for path in sources if path.is_file()]
    read = {name for text in texts for name in re.findall(r"\bXD_[A-Z]+[A-Z_]*[A-Z]\b", text)}
    assert {"XD_PYTHON", "XD_DEBUG", "XD_PYTHON_VLLM", "XD_SERVER_URL"} <= read
    assert [name for name in sorted(read) if not any(pattern.match(name) for pattern in patterns)] == []


def test_documented_files_exist():
    """What the contract table and the design name as a place is a place."""
    missing = []
    for page in (ROOT / "docs" / "contract.md", ROOT / "docs" / "design.md"):
        for name in re.findall(
            r"`((?:libxd|tests|schemas|dev|kernels|tools|experiments)/[A-Za-z0-9_./-]+)`", page.read_text()
        ):
            if not (ROOT / name).exists():
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_tests_named_in_the_contract_table_exist():
    """`test_x.py::test_a` and, in the same cell, `::test_b` of the same file."""
    missing, file = [], ""
    for name in re.findall(r"`((?:test_\w+\.py)?::\w+)`", (ROOT / "docs" / "contract.md").read_text()):
        found, _, test = name.partition("::")
        file = found or file
        path = ROOT / "tests" / file
        if not path.exists() or f"def {test}(" not in path.read_text():
            missing.append(f"{file}::{test}")
    assert missing == []


def test_rules_that_are_broken_stand_in_the_contract_table():
    """dev/rules.toml beside docs/contract.md; each line that `make prove` breaks is still there, and just once."""
    page = (ROOT / "docs" / "contract.md").read_text()
    rules = tomllib.loads((ROOT / "dev" / "rules.toml").read_text())["rule"]
    assert len({rule["rule"] for rule in rules}) == len(rules) >= 100
    astray = [
        rule["rule"]
        for rule in rules
        if not re.search(rf"^\| {re.escape(rule['rule'])} \| `{rule['file']}`[^|]* \| `{rule['test']}` \|$", page, re.M)
        or (ROOT / rule["file"]).read_text().count(rule["old"]) != 1
    ]
    assert astray == []


def test_the_scorer_of_the_format_page_writes_what_is_compared(tmp_path):
    """The example for people who replace a stage, as it stands on the page, in the place of the training side."""
    page = (ROOT / "docs" / "formats.md").read_text()
    namespace: dict = {}
    exec(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1], namespace)
    same = floats(-1, -2, -3)
    attempt = scored(tmp_path, same, same, lengths=(2, 1))
    score_path(attempt, "training").unlink()
    readback = attempt.readback("training")
    attempt.file("readback_training.json").unlink()
    sequences = tmp_path / "sequences.safetensors"
    with TensorFile(score_path(attempt, "rollout")) as frozen:
        tensors.write(sequences, {name: frozen.array(name) for name in ("cu_seqlens", "token_ids", "active_mask")}, {})
    locations = {"checkpoint": None, "tokenizer": None, "sequences": str(sequences)}
    rewrite_json(attempt, "requested.json", locations=locations)
    observed = readback["observed"]
    seen = {knob["knob"]: knob["actual"] for knob in readback["knobs"]}
    dtypes = {"parameters": "float32", "logits": "float32"}
    namespace["write_scores"](attempt.path, "training", same, observed, dtypes)
    said = (seen, observed, readback["parameters"], readback["operator"])
    namespace["write_readback"](attempt.path, "training", *said)
    assert comparison.compare(attempt)["status"] == "PASS"
    assert seal.seal(attempt)
    with pytest.raises(FileExistsError):
        namespace["write_scores"](attempt.path, "training", same, observed, dtypes)
    with pytest.raises(FileExistsError):
        namespace["write_readback"](attempt.path, "training", *said)


def test_the_rooms_of_the_design_are_those_of_the_code():
    page = (ROOT / "docs" / "design.md").read_text()
    tree = page[page.index("## 1.") : page.index("Who may import whom")]
    named = set(re.findall(r"\b(\w+)\.py\b", tree))
    modules = {path for path in (ROOT / "libxd").rglob("*.py") if not path.name.startswith("__")}
    modules |= set((ROOT / "kernels").rglob("[a-z]*.py"))
    inside = {"cmd", "cpu_smoke", "doctor", "formats", "hf", "server", "vllm"}  # folders that the page names as a whole
    assert {path.stem for path in modules if path.parent.name not in inside} == named
    folders = {path.name for path in (ROOT / "libxd").rglob("*") if (path / "__init__.py").exists()}
    assert {folder for folder in folders if f"{folder}/" not in tree} == set()
