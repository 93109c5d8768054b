"""The description of an interpreter: what is in it, what is not, and asking another one."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
import subprocess
import sys

import pytest

from libxd import canon, environment, schema
from libxd.errors import Status, XdError


@pytest.fixture(autouse=True)
def forget():
    """Each test asks anew."""
    environment._ask.cache_clear()
    yield
    environment._ask.cache_clear()


def described(**variables: str) -> dict:
    named = (*environment.VARIABLES, *environment.THREAD_VARIABLES)
    env = {k: v for k, v in os.environ.items() if k not in named and not k.startswith(environment.VARIABLE_PREFIXES)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "libxd.environment"], capture_output=True, check=True, env={**env, **variables}
    )
    return json.loads(done.stdout)


def test_it_fits_its_schema_and_is_canonical():
    done = subprocess.run([sys.executable, "-P", "-m", "libxd.environment"], capture_output=True, check=True)
    value = schema.validate("environment", json.loads(done.stdout), "described")
    assert canon.dumps(value) + b"\n" == done.stdout
    assert value == environment.describe()


def test_no_name_of_the_machine_and_no_place_is_in_it():
    text = canon.dumps(environment.describe()).decode()
    for secret in (socket.gethostname(), os.getcwd(), sys.prefix, sys.executable, os.path.expanduser("~")):
        assert len(secret) < 3 or secret not in text


def test_what_is_installed_is_listed_and_nothing_else():
    packages = environment.describe()["packages"]
    import numpy

    assert packages["numpy"] == numpy.__version__
    assert "click" not in packages
    assert set(packages) <= set(environment.PACKAGES)


@pytest.mark.parametrize("name", ["TRANSFORMERS_SDPA_FORCE_GQA", "TORCH_CUDNN_SDPA_ENABLED", "TORCHINDUCTOR_FREEZING",
                                  "TORCH_BLAS_PREFER_CUBLASLT", "TORCHDYNAMO_DISABLE"])  # fmt: skip
def test_what_chooses_attention_and_compiled_kernels_is_recorded(name):
    before = described()
    after = described(**{name: "1", "TORCHINDUCTOR_CACHE_DIR": "/some/place", "TORCHVISION": "1"})
    assert name not in before["variables"]
    assert after["variables"] == {**before["variables"], name: "1"}


def test_neither_torch_nor_numpy_is_loaded():
    code = (
        "import sys; from libxd import environment; environment.describe();"
        "print([m for m in ('torch', 'numpy', 'transformers', 'libxd.runtimes.hf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0", "variables"),
        ("VLLM_BATCH_INVARIANT", "1", "variables"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "variables"),
        ("ATEN_CPU_CAPABILITY", "avx2", "variables"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "variables"),
        ("MKL_CBWR", "COMPATIBLE", "variables"),
        ("OMP_NUM_THREADS", "3", "threads"),
        ("MKL_NUM_THREADS", "3", "threads"),
    ],
)
def test_a_variable_that_changes_numbers_shows(variable, value, place):
    without, with_it = described(), described(**{variable: value})
    assert variable not in without[place]
    assert with_it[place][variable] == value
    assert canon.digest(with_it) != canon.digest(without)


def test_a_variable_that_changes_nothing_does_not_show():
    assert described(TERM="dumb", HOSTNAME="node7") == described(TERM="xterm", HOSTNAME="node8")


CPUINFO_X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9454
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 ht

processor\t: 1
model name\t: another
flags\t\t: avx2
"""
CPUINFO_ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd sve bf16 paca\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        (CPUINFO_X86, "AMD EPYC 9454", ["amx_bf16", "avx2", "avx512_bf16", "avx512f"]),
        (CPUINFO_ARM, None, ["asimd", "bf16", "sve"]),
        ("", None, []),
    ],
)
def test_the_processor_is_read(text, model, flags):
    assert environment._cpu_of(text) == {"model": model, "flags": flags}


def script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_compiler_is_named_without_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._compiler({}) is None
    script(tmp_path / "clang++", "#!/bin/sh\necho 'Some clang version 17.0.6 (vendor)'\n")
    assert environment._compiler({}) == {"name": "clang++", "version": "17.0.6"}
    script(tmp_path / "g++", "#!/bin/sh\necho 'g++ (Vendor) 13.2.0'\n")
    assert environment._compiler({}) == {"name": "g++", "version": "13.2.0"}
    mine = script(tmp_path / "mine", "#!/bin/sh\necho 'mine 4.5'\n")
    assert environment._compiler({"CXX": str(mine)}) == {"name": "mine", "version": "4.5"}
    broken = script(tmp_path / "broken", "#!/bin/sh\nexit 1\n")
    assert environment._compiler({"CXX": str(broken)}) == {"name": "g++", "version": "13.2.0"}


def test_a_compiler_that_is_no_command_is_65(xd):
    ran = xd("xd-score", "--describe", env={"CXX": "g++ '"})
    assert (ran.status, ran.out, ran.err.startswith("xd-score: $CXX: is no command")) == (65, "", True)


def test_without_a_driver_there_are_no_devices(monkeypatch):
    monkeypatch.setattr(environment, "CUDA_LIBRARY", "libnosuchdriver.so.1")
    assert environment._cuda() == {"driver": None, "devices": []}


# -- builds


def test_each_runtime_has_a_scorer_build():
    described = environment.describe()
    assert {"cpu-smoke", "hf"} <= set(described["xd"]["scorers"])
    scorer = environment.scorer(described, "hf")
    assert scorer == {
        "name": "xd-score/hf", "version": described["xd"]["version"], "build": described["xd"]["scorers"]["hf"]
    }  # fmt: skip
    assert "xd" not in environment.numeric(described, "hf")


def test_an_interpreter_without_the_runtime_is_refused():
    with pytest.raises(XdError) as raised:
        environment.scorer(environment.describe(), "no-such")
    assert (raised.value.status, raised.value.code) == (Status.REFUSED, "no-runtime")


def test_every_part_of_the_scorer_is_there():
    """A module that was renamed away would drop out of the build unseen."""
    assert [module for module in environment.SCORER_MODULES if environment.sources_digest(module) is None] == []


def test_a_package_digest_covers_all_its_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "a_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    (package / "inner" / "part.py").write_text("x = 1\n")

    def digest():
        environment.sources_digest.cache_clear()
        return environment.sources_digest("a_package")

    first = digest()
    (package / "inner" / "part.py").write_text("x = 2\n")
    second = digest()
    (package / "inner" / "part.py").rename(package / "inner" / "other.py")
    assert len({first, second, digest()}) == 3
    assert environment.sources_digest("no_such_package.inner") is None


# -- other interpreters


def test_this_interpreter_is_described_in_process(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(environment, "_compiler", lambda _: None)
    assert environment.of()["python"] == platform.python_version()


def wrapper(path, body=""):
    return script(path, f'#!/bin/sh\necho x >> "{path}.runs"\n{body}exec "{sys.executable}" "$@"\n')


def test_another_interpreter_is_asked_once(tmp_path):
    other = wrapper(tmp_path / "python", "export MKL_CBWR=COMPATIBLE\n")
    assert environment.of(other)["variables"]["MKL_CBWR"] == "COMPATIBLE"
    environment.of(str(other))
    assert (tmp_path / "python.runs").read_text() == "x\n"


def test_a_link_to_the_same_binary_is_another_interpreter(tmp_path):
    """A virtual environment's python is a link; following it would describe the wrong packages."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert environment.interpreter(link) == str(link) != environment.interpreter()


def test_two_interpreters_are_asked_at_the_same_time(tmp_path):
    """Each waits until the other has started: one after the other would never end."""
    here, there = tmp_path / "a", tmp_path / "b"
    meet = 'touch "{mine}.up"; for _ in $(seq 300); do [ -e "{other}.up" ] && break; sleep 0.1; done\n'
    meet += '[ -e "{other}.up" ] || exit 9\n'
    pythons = [
        wrapper(here, meet.format(mine=here, other=there)), wrapper(there, meet.format(mine=there, other=here))
    ]  # fmt: skip
    found = environment.of_each(pythons)
    assert set(found) == {str(here), str(there)}


def test_an_interpreter_that_is_not_there():
    with pytest.raises(XdError) as raised:
        environment.of("/no/such/python")
    assert (raised.value.status, raised.value.code) == (Status.MISSING, "missing")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("echo 'No module named libxd' >&2; exit 1", "No module named libxd"),
        ("exit 3", "status 3"),
        ("echo nonsense", "not JSON"),
        ("echo '{}'", "schema_version"),
    ],
)
def test_an_interpreter_that_cannot_tell(tmp_path, body, what):
    with pytest.raises(XdError, match=what):
        environment.of(script(tmp_path / "python", f"#!/bin/sh\n{body}\n"))
