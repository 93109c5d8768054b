# shellcheck shell=sh
# Read by the stubs, which set $self (their own file) and $tool. The interpreter is $XD_PYTHON, else the active
# environment's, else the one that `make setup` made; start.py turns to the last where the active one has no libxd.
: "${self:?}" "${tool:?}"
tools=${self%/*}
own=${tools%/*}/.venv/bin/python
python=${XD_PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
if [ -n "$XD_PYTHON" ]; then
    own=
elif [ ! -x "$python" ]; then
    python=$own own=
fi
if ! command -v -- "$python" > /dev/null; then
    echo "xd-$tool: $python: no interpreter there (run \`make setup\`, or name one in XD_PYTHON)" >&2
    exit 70
fi
if [ -d /dev/stdin ]; then # of which an interpreter would make a fatal error, and status 1
    echo "xd-$tool: stdin: is a directory" >&2
    exit 66
fi
block= # Ctrl-C waits until start.py is ready for it
case $python in
*=*) ;; # env would set a variable
*) if env --block-signal=INT true 2> /dev/null; then block='env --block-signal=INT'; fi ;;
esac
# shellcheck disable=SC2086 # words
exec $block "$python" -S "$tools/start.py" "$own" "$tool" "$@"
