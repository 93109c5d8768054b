"""`python -P -m libxd.cmd plan …`: a tool from a checkout (tools/xd-* call this)."""

import sys

from libxd.cmd import TOOLS, run

if len(sys.argv) < 2 or sys.argv[1] not in TOOLS:
    sys.stderr.write(f"libxd.cmd: name a tool: {' '.join(TOOLS)}\n")
    sys.exit(2)
run(sys.argv.pop(1))
