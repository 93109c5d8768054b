"""What a stub starts: start.py OTHER TOOL ARGUMENT… runs the tool, under interpreter OTHER if this one has no libxd."""

import os
import sys


def main(other, tool):
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != own]  # as -P does, which older interpreters do not know
    try:
        from libxd.cmd import run
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.access(other, os.X_OK):
            os.execv(other, [other, __file__, "", *sys.argv[2:]])
        what = " ".join(str(error).split()) or type(error).__name__
        hint = "run `make setup`, or name an interpreter in XD_PYTHON"
        sys.stderr.write("xd-%s: %s: %s (%s)\n" % (tool, sys.executable, what, hint))  # noqa: UP031
        sys.exit(70)
    sys.argv[:] = sys.argv[2:]
    run(tool)


if __name__ == "__main__":
    main(*sys.argv[1:3])
