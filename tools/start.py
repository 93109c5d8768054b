"""What a stub starts: start.py OTHER TOOL ARGUMENT… runs the tool, under interpreter OTHER if this one has no libxd.

Ctrl-C ends it without a word from the first moment on: the stub starts it without `site` (-S) and, where `env` can,
with SIGINT blocked, until the default is in place. What is imported before that is built in, so that no PYTHONPATH can
put another in its place.
"""

import sys
from _signal import SIG_BLOCK, SIG_DFL, SIG_IGN, SIG_UNBLOCK, SIGINT, getsignal, pthread_sigmask, signal

if getsignal(SIGINT) != SIG_IGN:
    signal(SIGINT, SIG_DFL)
pthread_sigmask(SIG_UNBLOCK, [SIGINT])

import os  # noqa: E402


def add_packages():
    import site

    try:
        with open(os.devnull, "w") as sys.stderr:  # what it says of a broken .pth comes to: no libxd, in one line
            site.main()
    finally:
        sys.stderr = sys.__stderr__


def main(other, tool):
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != own]  # as -P does, which older interpreters do not know
    try:
        add_packages()
        from libxd.cmd import run
    except Exception as error:
        if os.access(other, os.X_OK):
            pthread_sigmask(SIG_BLOCK, [SIGINT])
            os.execv(other, [other, "-S", __file__, "", *sys.argv[2:]])
        what = " ".join(str(error).split()) or type(error).__name__
        hint = "run `make setup`, or name an interpreter in XD_PYTHON"
        try:
            sys.stderr.write("xd-%s: %s: %s (%s)\n" % (tool, sys.executable, what, hint))  # noqa: UP031
        except Exception:  # a closed or full stderr
            os._exit(70)
        sys.exit(70)
    sys.argv[:] = sys.argv[2:]
    run(tool)


if __name__ == "__main__":
    main(*sys.argv[1:3])
