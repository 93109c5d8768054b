"""Runtime `cpu-smoke`: a synthetic decoder on which every knob has its real effect, in seconds on any CPU (S0)."""

from libxd.runtimes.cpu_smoke.runtime import CpuSmoke

RUNTIME = CpuSmoke()
