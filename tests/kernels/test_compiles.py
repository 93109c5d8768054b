"""Every kernel is compiled for a GPU that need not be here: what the interpreter takes, the compiler may refuse.

In a process of its own, since triton is then told of a driver that can do nothing but name its target.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class NoDevice:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(NoDevice())
compiled = []
run = JITFunction.run

def compile_only(self, *arguments, grid, warmup, **options):
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    compiled.append(self.__name__)
    return kernel

JITFunction.run = compile_only
{launches}
print(*sorted(set(compiled)))
"""

LAUNCHES = {
    "blake3": (
        """
from xdkernels.jit import blake3
for chunks in (1, 3000):
    data = torch.zeros(chunks * 256 - 1, dtype=torch.int32)
    blake3.root(blake3.chunks(data[:1], data, 3, chunks * 1024 - 1))
""",
        "_chunks_kernel _trees_kernel",
    ),
    "logprob": (
        """
from xdkernels.jit import logprob, logsumexp
logits, ids, rows = torch.zeros(4, 1000, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
for temperature, entropy in ((1.0, False), (0.7, True)):
    *sums, selected = logprob.partials(logits, ids, temperature, 990, 0, 128, entropy)
    merged = logsumexp.merge(*sums, selected)
    logprob.gradient(logits, ids, merged[:3], rows, rows if entropy else None, temperature, 990)
""",
        "_gradient_kernel _merge_kernel _partials_kernel",
    ),
    "linear_logprob": (
        """
from xdkernels.jit import head as kernels
hidden, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(1000, 64, dtype=torch.bfloat16)
ids, rows, out = torch.zeros(4, dtype=torch.int64), torch.zeros(4), torch.zeros(4, 1024, dtype=torch.bfloat16)
for bias, temperature, softcap, entropy in ((None, 1.0, None, False), (torch.zeros(1000), 0.7, 30.0, True)):
    head = kernels.Head(weight, bias, temperature, softcap, 990)
    for direction in (False, True):
        into = kernels.Swept.empty(hidden, entropy=entropy, direction=direction)
        kernels.sweep(hidden, head, ids, into, product_rows=8)
    kernels.scale_rows(hidden, rows)
    pull = rows if entropy else None
    kernels.logit_gradients(hidden, head, ids, rows, rows, pull, rows, pull, slice(0, 1000), out)
""",
        "direction_kernel head_kernel logit_gradient_kernel merge_kernel rescale_kernel scale_rows_kernel "
        "selected_kernel",
    ),
    "paged_attention": (
        """
from xdkernels.paged_attention import TILINGS
from xdkernels.jit import paged_attention
tables, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.full((2,), 100, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float32):
    for head_dim, softcap, window in ((64, None, None), (96, 30.0, 50), (128, None, None), (256, None, None)):
        q, cache = torch.zeros(2, 8, head_dim, dtype=dtype), torch.zeros(8, 16, 2, head_dim, dtype=dtype)
        paged_attention.launch(
            q, cache, cache, tables, lengths, split_tokens=512, scale=0.1, softcap=softcap, window=window,
            tiling=TILINGS[q.element_size(), head_dim],
        )
""",
        "_merge_kernel _split_kernel",
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_for_hopper(name):
    launches, expected = LAUNCHES[name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(launches=launches)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == expected.split()
