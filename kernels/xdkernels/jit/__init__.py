"""Triton kernels and their launchers; the one room that imports triton."""

from triton import knobs

if knobs.runtime.interpret:
    from xdkernels.jit import interpreted

    interpreted.repair()
