"""Plain-torch twins of the kernels: the oracles they are tested against, and the path of a CPU."""
