"""The shell around every tool: common options, messages, operands, exit statuses.

A tool's module (libxd/cmd/<name>.py) defines a click command whose function takes `console: Console` and names its
`main` with `entry`. Results go to stdout by `console.emit`, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import click

from libxd import __version__, signals, streams, strictjson
from libxd.errors import Status, XdError, of_exception
from libxd.plain import plain


class _Path(click.Path):
    """A path that can be named on a line of its own, as every tool hands paths on."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        text = os.fsdecode(value)
        if not text:
            self.fail("an empty path; the working directory is .", param, context)
        if any(char in text for char in "\n\r"):
            self.fail("a path with a line break in it, which no line of a pipe can hold.", param, context)
        return super().convert(value, param, context)


#: an option or operand that is a path; whether it can be read or written is found out, and said, where that is done
PATH = _Path(path_type=Path, readable=False)

#: colours of words on a terminal, whichever tool says them; a heading is bold
_COLOURS = {"PASS": "green", "MISMATCH": "yellow", "above": "yellow", "unsupported": "bright_black",
            "refused": "bright_black", "incomplete": "red", "missing": "red", "INVALID_IDENTITY": "red",
            "INVALID_ARTIFACT": "red", "ZERO_ACTIVE_TOKENS": "red", "bug": "red", "rounding": "green",
            "undecided": "yellow", "nothing": "green", "cause": "cyan", "bad": "red", "good": "green",
            "unmeasured": "bright_black", "pending": "cyan"}  # fmt: skip


class Console:
    """One run of one tool: its name, how much it says, and the exit status so far."""

    def __init__(self, tool: str, *, quiet: bool = False, verbose: bool = False, log_json: bool = False) -> None:
        self.tool = tool
        self.quiet = quiet
        self.verbose = verbose
        self.log_json = log_json
        self._failures: list[Status] = []

    @property
    def status(self) -> Status:
        """The first failure other than 69, else 1 if "no" is the answer, else 69 if something was refused, else 0."""
        hard = [status for status in self._failures if status not in (Status.REFUSED, Status.NO)]
        if hard:
            return hard[0]
        for status in (Status.NO, Status.REFUSED):
            if status in self._failures:
                return status
        return Status.DONE

    def answer_no(self) -> None:
        """The question that was asked is answered "no": status 1, unless something failed."""
        self._failures.append(Status.NO)

    # -- results and messages

    def emit(self, line: str | bytes) -> None:
        """One result line on stdout, at once: the next tool of a pipe waits for it. Paths leave as they came in."""
        streams.write_line(line)

    def error(self, error: XdError) -> None:
        """Report a failure (a line an issue) and remember its status."""
        for issue in error.issues:
            if self.log_json:
                self._log(issue.record())
            else:
                streams.say(f"{self.tool}: {issue.line()}")
        self._failures.append(error.status)
        if os.environ.get("XD_DEBUG") == "1":
            streams.say("".join(traceback.format_exception(error)).rstrip())

    def paint(self, text: str, what: str) -> str:
        """`text` in the colour of the word `what`, where stdout is a terminal that wants colours."""
        if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
            return text
        if what == "heading":
            return click.style(text, bold=True)
        return click.style(text, fg=_COLOURS[what]) if what in _COLOURS else text

    def info(self, message: str) -> None:
        if not self.quiet:
            self._note("info", message)

    def debug(self, message: str) -> None:
        if self.verbose:
            self._note("debug", message)

    def _note(self, level: str, message: str) -> None:
        if self.log_json:
            self._log({"level": level, "message": message})
        else:
            streams.say(plain(f"{self.tool}: {message}"))

    def _log(self, record: dict[str, Any]) -> None:
        streams.say(json.dumps({"tool": self.tool, **record}))

    # -- work

    @contextlib.contextmanager
    def guard(self, where: str = "") -> Iterator[None]:
        """One item's work: its failure is reported and does not stop the others.

        What is no XdError gets its status from `errors.of_exception`; XD_DEBUG=1 shows the traceback. A stdout that
        takes nothing more ends the tool.
        """
        try:
            yield
        except (BrokenPipeError, streams.StdoutLost, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            signals.leave_if_asked()
            failure = of_exception(error, where)
            if failure is not error:
                failure.__cause__ = error
            elif not failure.where and len(failure.issues) == 1:
                failure.where = where
            self.error(failure)

    def operands(self, given: Iterable[str], what: str) -> Iterator[str]:
        """The operands, or the lines of stdin as they come; blank lines are passed over.

        They are paths, which are bytes: what is not UTF-8 is escaped as `os.fsdecode` does, and `emit` writes it back.
        """
        given = list(given)
        if given and given != ["-"]:
            yield from given
            return
        yield from streams.paths(_stdin(what))

    def rows(self, files: Iterable[str], what: str) -> Iterator[tuple[str, bytes]]:
        """(place, line) of the JSON lines in files, or on stdin, as they come; blank lines are passed over.

        Nothing is decoded here: a row that is no text, or too long (it is cut off just past strictjson.MAX_BYTES, and
        so refused by its reader), fails where the caller guards that row. A file that cannot be read is reported, and
        the next one read.
        """
        for name in list(files) or ["-"]:
            with self.guard("stdin" if name == "-" else name):
                if name == "-":
                    yield from _lines_of_objects(self.rows_of_stdin(what), what)
                else:
                    with open(name, "rb") as file:
                        yield from _lines_of_objects(streams.rows(name, file, strictjson.MAX_BYTES), what)

    def rows_of_stdin(self, what: str) -> Iterator[tuple[str, bytes]]:
        """`rows` of stdin alone, where one that cannot be read ends it all."""
        return streams.rows("stdin", _stdin(what), strictjson.MAX_BYTES)


def _lines_of_objects(rows: Iterator[tuple[str, bytes]], what: str) -> Iterator[tuple[str, bytes]]:
    """The rows as they come. XdError 65 for one JSON document over many lines: each of them would be a bad row."""
    for number, (place, line) in enumerate(rows):
        if number == 0 and line.strip() in (b"{", b"["):
            hint = "xd-plan makes rows of an experiment" if what == "plan rows" else ""
            raise XdError(f"is one JSON document, and {what} are a JSON object a line", code="not-lines", where=place,
                          hint=hint)  # fmt: skip
        yield place, line


def _stdin(what: str) -> BinaryIO:
    file = streams.stdin()
    if file is None:
        raise click.UsageError(f"give {what} as operands or on stdin")
    return file


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options every tool has; they arrive as one `console` argument."""

    def with_console(*, quiet: bool, verbose: bool, log_json: bool, **arguments: Any) -> Any:
        context = click.get_current_context()
        console = Console(context.info_name or "xd", quiet=quiet, verbose=verbose, log_json=log_json)
        context.obj = console
        return function(console=console, **arguments)

    with_console.__name__ = function.__name__
    with_console.__doc__ = function.__doc__
    with_console.__click_params__ = getattr(function, "__click_params__", [])
    wrapped = click.version_option(__version__, message="%(prog)s %(version)s")(with_console)
    wrapped = click.option("--log-json", is_flag=True, help="Messages on stderr as one JSON object a line.")(wrapped)
    wrapped = click.option("-v", "--verbose", is_flag=True, help="Say what is done, too.")(wrapped)
    return click.option("-q", "--quiet", is_flag=True, help="Errors only.")(wrapped)


def command(name: str, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A tool's click command: common options, and `examples` (two, worked) at the foot of --help."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        return click.command(
            name,
            cls=_Tool,
            examples=examples,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )(options(function))

    return decorate


class _Tool(click.Command):
    """A click command that ends its help with worked examples."""

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text("Examples:")
        formatter.write_paragraph()
        for line in self.examples.strip("\n").splitlines():
            formatter.write(f"  {line.strip()}\n" if line.strip() else "\n")


def entry(tool: click.Command) -> Callable[[], NoReturn]:
    """The `main` of a tool: runs it and leaves with the right status, whatever happens."""

    def main() -> NoReturn:
        try:
            signals.by_exception()
            status = _run(tool)
            signals.by_default()
        except signals.Ended as ended:
            status = 128 + ended.signum
        sys.exit(status)

    main.__doc__ = f"Run {tool.name}."
    return main


def _run(tool: click.Command) -> int:
    variable = f"_{str(tool.name).replace('-', '_').upper()}_COMPLETE"
    if instruction := os.environ.get(variable):
        from click.shell_completion import shell_complete

        return shell_complete(tool, {}, str(tool.name), variable, instruction)
    context: click.Context | None = None
    try:
        streams.require_stdout()
        with tool.make_context(tool.name, sys.argv[1:]) as context:
            tool.invoke(context)
        return _status_of(context)
    except click.exceptions.Exit as error:  # --help, --version
        return error.exit_code
    except BrokenPipeError:
        streams.silence_stdout()
        return 128 + signal.SIGPIPE
    except click.Abort:
        return 128 + signal.SIGINT
    except click.UsageError as error:
        _report(
            context,
            tool,
            XdError(error.format_message(), status=Status.USAGE, code="usage", hint=f"see {tool.name} --help"),
        )
        return Status.USAGE
    except click.ClickException as error:
        _report(context, tool, XdError(error.format_message(), status=Status.MISSING, code="missing"))
        return Status.MISSING
    except Exception as error:
        signals.leave_if_asked()
        failure = of_exception(error)
        if failure is not error:
            failure.__cause__ = error
        _report(context, tool, failure)
        if isinstance(error, OSError | streams.StdoutLost):
            streams.silence_stdout()
        return _status_of(context) or failure.status


def _status_of(context: click.Context | None) -> int:
    console = context.obj if context is not None else None
    return int(console.status) if isinstance(console, Console) else 0


def _report(context: click.Context | None, tool: click.Command, error: XdError) -> None:
    console = context.obj if context is not None and isinstance(context.obj, Console) else None
    (console or Console(tool.name or "xd", log_json="--log-json" in sys.argv)).error(error)
