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
from typing import Any, NoReturn

import click

from libxd import __version__
from libxd.errors import Status, XdError


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
        """The first failure other than 69, else 69 when something was refused, else 0."""
        hard = [status for status in self._failures if status not in (Status.REFUSED, Status.NO)]
        if hard:
            return hard[0]
        for status in (Status.REFUSED, Status.NO):
            if status in self._failures:
                return status
        return Status.DONE

    def answer_no(self) -> None:
        """The question that was asked is answered "no": status 1, unless something failed."""
        self._failures.append(Status.NO)

    # -- results and messages

    def emit(self, line: str) -> None:
        """One result line on stdout, at once: the next tool of a pipe waits for it."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def error(self, error: XdError) -> None:
        """Report a failure (a line an issue) and remember its status."""
        for issue in error.issues:
            if self.log_json:
                self._log(issue.record())
            else:
                self._say(f"{self.tool}: {issue.line()}")
        self._failures.append(error.status)
        if os.environ.get("XD_DEBUG") == "1":
            traceback.print_exception(error)

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
            self._say(f"{self.tool}: {message}")

    def _log(self, record: dict[str, Any]) -> None:
        self._say(json.dumps({"tool": self.tool, **record}, ensure_ascii=False))

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    # -- work

    @contextlib.contextmanager
    def guard(self, where: str = "") -> Iterator[None]:
        """One item's work: its failure is reported and does not stop the others.

        An exception that nobody foresaw is a bug of xd (70); XD_DEBUG=1 shows its traceback.
        """
        try:
            yield
        except XdError as error:
            if not error.where and len(error.issues) == 1:
                error.where = where
            self.error(error)
        except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            self.error(bug(error, where))

    def operands(self, given: Iterable[str], what: str) -> Iterator[str]:
        """The operands, or the lines of stdin as they come; blank lines are passed over."""
        given = list(given)
        if given and given != ["-"]:
            yield from given
            return
        if not given and sys.stdin.isatty():
            raise click.UsageError(f"give {what} as operands or on stdin")
        yield from stdin_lines()


def stdin_lines() -> Iterator[str]:
    """The non-blank lines of stdin, each as soon as it is complete."""
    while line := sys.stdin.buffer.readline():
        try:
            text = line.decode("utf-8").strip("\r\n")
        except UnicodeDecodeError as error:
            raise XdError(f"not UTF-8 at byte {error.start} of a line", code="not-utf8", where="stdin") from error
        if text.strip():
            yield text


def bug(error: BaseException, where: str = "") -> XdError:
    """What xd did not foresee, as one line with status 70."""
    detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return XdError(
        f"a bug in xd or a broken installation: {detail}",
        status=Status.BUG,
        code="bug",
        where=where,
        hint="XD_DEBUG=1 shows the traceback",
    )


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
        sys.exit(_run(tool))

    main.__doc__ = f"Run {tool.name}."
    return main


def _run(tool: click.Command) -> int:
    variable = f"_{str(tool.name).replace('-', '_').upper()}_COMPLETE"
    if instruction := os.environ.get(variable):
        from click.shell_completion import shell_complete

        return shell_complete(tool, {}, str(tool.name), variable, instruction)
    signal.signal(signal.SIGTERM, _terminated)
    context: click.Context | None = None
    try:
        with tool.make_context(tool.name, sys.argv[1:]) as context:
            tool.invoke(context)
            sys.stdout.flush()
        return _status_of(context)
    except click.exceptions.Exit as error:  # --help, --version
        return error.exit_code
    except BrokenPipeError:
        _silence_stdout()
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except _Terminated as error:
        return 128 + error.signum
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
    except XdError as error:
        _report(context, tool, error)
        return _status_of(context) or error.status
    except OSError as error:
        where = str(error.filename or "")
        _report(
            context, tool, XdError(str(error.strerror or error), status=Status.CONFLICT, code="os-error", where=where)
        )
        return _status_of(context) or Status.CONFLICT
    except Exception as error:
        failure = bug(error)
        failure.__cause__ = error
        _report(context, tool, failure)
        return Status.BUG


def _status_of(context: click.Context | None) -> int:
    console = context.obj if context is not None else None
    return int(console.status) if isinstance(console, Console) else 0


def _report(context: click.Context | None, tool: click.Command, error: XdError) -> None:
    console = context.obj if context is not None and isinstance(context.obj, Console) else None
    (console or Console(tool.name or "xd", log_json="--log-json" in sys.argv)).error(error)


class _Terminated(BaseException):
    def __init__(self, signum: int) -> None:
        self.signum = signum


def _terminated(signum: int, _frame: Any) -> NoReturn:
    raise _Terminated(signum)


def _silence_stdout() -> None:
    """Keep the interpreter's own flush at exit from complaining about the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
