"""The shape of the code, read from the syntax tree: who may import whom, lazy imports included."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBXD = sorted((ROOT / "libxd").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))

#: where the command line's own library may be used
SHELL = ("libxd.cmd", "libxd.console")
#: what plan, resume, compare and seal reach must work where no torch is
TORCH_FREE_TOOLS = ("plan", "resume", "compare", "seal", "report")
HEAVY = {"torch", "transformers", "vllm", "triton", "xdkernels"}
#: imported by the tools that read tensors only
NUMPY_FREE_TOOLS = ("plan", "resume", "seal", "materialize")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "kernels" if path in KERNELS else ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path, when_loaded: bool = False) -> set[str]:
    """Every module a file imports, at any depth, and by importlib.import_module of a literal.

    when_loaded: what importing the file imports alone, without functions and `if TYPE_CHECKING`.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if not when_loaded else loaded_nodes(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


def loaded_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield node
        yield from loaded_nodes(node)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offences(rule_of: dict[str, tuple[str, ...]], files: list[Path]) -> list[str]:
    """`package -> what its files may not import`, as a list of violations."""
    found = []
    for path in files:
        for package, forbidden in rule_of.items():
            if not within(module_name(path), package):
                continue
            for name in sorted(imports(path)):
                if any(within(name, other) and not within(name, package) for other in forbidden):
                    found.append(f"{module_name(path)} imports {name}")
    return found


def test_library_does_not_import_the_tools():
    library = [path for path in LIBXD if not within(module_name(path), "libxd.cmd")]
    assert offences({"libxd": ("libxd.cmd",)}, library) == []
    assert [p for p in library if any(within(name, "libxd.cmd") for name in imports(p))] == []


def test_tools_do_not_import_each_other():
    found = []
    for path in (ROOT / "libxd" / "cmd").glob("*.py"):
        # its own parts, and what no tool is
        allowed = (module_name(path), "libxd.cmd.policy_options", "libxd.cmd.difference_operands")
        others = [name for name in imports(path) if within(name, "libxd.cmd")]
        found += [f"{path.name}: {name}" for name in others if not any(within(name, own) for own in allowed)]
    assert found == []


def test_kernels_import_no_libxd():
    assert [path for path in KERNELS if any(within(name, "libxd") for name in imports(path))] == []


def test_triton_stays_in_its_room_and_is_entered_when_launched():
    outside = [path for path in (*LIBXD, *KERNELS) if not within(module_name(path), "xdkernels.jit")]
    inside = [path for path in KERNELS if path not in outside]
    assert any("triton" in imports(path) for path in inside)
    found = [module_name(path) for path in outside if any(within(name, "triton") for name in imports(path))]
    found += [
        f"{module_name(path)} imports {name} when it is imported"
        for path in outside
        for name in imports(path, when_loaded=True)
        if within(name, "xdkernels.jit")
    ]
    assert found == []
    assert imports(ROOT / "kernels" / "xdkernels" / "jit" / "__init__.py") == set()


@pytest.mark.parametrize(
    ("operator", "entrance"),
    [("triton_logp", "xdkernels.logprob"), ("fused_linear_logp", "xdkernels.linear_logprob")],
)
def test_an_operators_build_covers_the_kernels_it_reaches(operator, entrance):
    """It names every module of xdkernels that its public function imports, at any depth."""
    descriptor = importlib.import_module(f"libxd.operators.{operator}").DESCRIPTOR
    files = {module_name(path): path for path in KERNELS if path.name != "__init__.py"}
    reached: set[str] = set()
    waiting = {entrance}
    while waiting:
        reached |= waiting
        waiting = {name for module in waiting for name in imports(files[module]) if name in files} - reached
    assert set(descriptor.sources) == reached


def test_runtimes_and_operators_are_reached_by_entry_point_only():
    found = []
    for path in LIBXD:
        for name in imports(path):
            for kind in ("cpu_smoke", "hf"):
                package = f"libxd.runtimes.{kind}"
                if within(name, package) and not within(module_name(path), package):
                    found.append(f"{module_name(path)} imports {name}")
            for concrete in ("native", "reference", "triton_logp", "fused_linear_logp", "smoke_ops"):
                package = f"libxd.operators.{concrete}"
                if within(name, package) and not within(module_name(path), package):
                    found.append(f"{module_name(path)} imports {name}")
    assert found == []


def test_click_stays_in_the_shell():
    found = [
        module_name(path)
        for path in LIBXD
        if any(within(name, "click") for name in imports(path))
        and not any(within(module_name(path), allowed) for allowed in SHELL)
    ]
    assert found == []


def really_loaded(*modules: str) -> set[str]:
    """Top-level names in sys.modules once these are imported: whatever way it went."""
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"  # import.py is no identifier
        "print('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_below_the_shell_ends_up_with_it():
    """A direct import is not the only way: what the engine's child and all of the library load holds no click."""
    assert "click" not in really_loaded("libxd.scoring.child")
    adapters = ("libxd.runtimes.cpu_smoke", "libxd.runtimes.hf", "libxd.operators")
    library = [
        module_name(path)
        for path in LIBXD
        if not any(within(module_name(path), other) for other in (*SHELL, *adapters))
        and not imports(path) & HEAVY
    ]
    assert {"libxd.materialize", "libxd.policy", "libxd.scoring.task", "libxd.comparison"} <= set(library)
    assert "click" not in really_loaded(*library)
    assert "click" in really_loaded("libxd.console"), "the control"


def test_the_rules_can_fail(tmp_path):
    """Negative control: the reader of imports sees lazy and indirect ones."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    from libxd.cmd import plan\n    import importlib\n"
        "    importlib.import_module('libxd.runtimes.hf')\n"
    )
    assert {"libxd.cmd", "libxd.cmd.plan", "libxd.runtimes.hf"} <= imports(bad)
    assert imports(bad, when_loaded=True) == set()
    bad.write_text("try:\n    import triton\nfinally:\n    pass\nclass A:\n    import torch\n")
    assert imports(bad, when_loaded=True) == {"triton", "torch"}


@pytest.mark.parametrize(
    "tool", [*TORCH_FREE_TOOLS, "rollout", "materialize", "score", "impact", "import", "doctor"]
)
def test_no_tool_loads_torch_to_start(tool):
    assert really_loaded(f"libxd.cmd.{tool}") & HEAVY == set()


def test_operators_are_described_and_digested_where_no_torch_is():
    """A base install plans with them: their builds are taken from sources that are not imported."""
    code = (
        "import sys\nfor name in ('torch', 'triton', 'numpy'): sys.modules[name] = None\n"
        "from libxd.operators import catalog\nprint(catalog.load(False).digest)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    from libxd.operators import catalog

    assert done.stdout.strip() == catalog.load(False).digest


@pytest.mark.parametrize("tool", NUMPY_FREE_TOOLS)
def test_tools_without_arrays_start_without_numpy(tool):
    assert "numpy" not in really_loaded(f"libxd.cmd.{tool}")


def test_every_package_is_shipped():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {module_name(path) for path in (*LIBXD, *KERNELS) if path.name == "__init__.py"}
    assert there == {name for name in listed if name != "xdschemas"}
    assert "xdschemas" in listed


def test_transformers_is_not_fooled_by_the_kernels_folder():
    """`kernels/` at the root bears the name of a Hugging Face package; the answer must be the same from anywhere."""
    pytest.importorskip("transformers")
    code = "from transformers.utils.import_utils import is_kernels_available as f; print(f())"
    answers = {
        place: subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=place
        ).stdout
        for place in (str(ROOT), "/")
    }
    assert answers[str(ROOT)] == answers["/"]
    if not any(name == "kernels" for name in importlib.metadata.packages_distributions()):  # the real one
        assert answers["/"] == "False\n"
    assert not (ROOT / "kernels" / "__init__.py").exists()
