"""Triton kernels and their launchers: the only modules that import triton, so each is imported where it is launched."""
