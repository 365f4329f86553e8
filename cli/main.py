"""The `phaseprof` command: its subcommands, and the one place where errors are caught and printed.

Nothing heavy is imported here or by the modules of the commands, so that ``phaseprof --help`` stays instant: torch,
pyarrow, transformers and rich come in when a command runs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import phaseprof
from phaseprof.cli import (
    calibrate,
    compare,
    doctor,
    export,
    import_trace,
    predict,
    profile,
    report,
    run,
    what_if,
)
from phaseprof.cli.render import errors
from phaseprof.errors import PhaseprofError, UsageError

#: 128 + SIGINT: what a shell reports for a program that this signal ended.
_INTERRUPTED = 130
#: As Python and rich end when the reader of a pipe has gone.
_BROKEN_PIPE = 1

app = typer.Typer(
    name="phaseprof",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: [bold]phaseprof profile[/] runs a small model and reports on it.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"phaseprof {phaseprof.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Profile LLM inference: which time goes to prefill and which to decode, and what bounds each."""


def _register(
    command: Callable[..., None],
    panel: str,
    example: str,
    context_settings: dict[str, Any] | None = None,
    name: str | None = None,
) -> None:
    """Add a command under its function's name (`name`, where Python has a word of that form), with its docstring as
    help and an example below."""
    # The help keeps the line breaks of a docstring, which suit the source and not the terminal.
    paragraphs = inspect.getdoc(command) or ""
    app.command(
        name=name,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs.split("\n\n")),
        epilog=f"Example: [bold]{example}[/]",
        rich_help_panel=panel,
        context_settings=context_settings,
    )(command)


_register(
    profile.profile,
    "Record",
    "phaseprof profile --prompt-tokens 512 --new-tokens 64 --batch 1,4,16",
)
_register(
    run.run,
    "Record",
    "phaseprof run -o trace -- python serve_batch.py --limit 8",
    context_settings=run.CONTEXT_SETTINGS,
)
_register(
    import_trace.import_trace,
    "Record",
    "phaseprof import rank*.pt.trace.json.gz -o trace",
    name="import",
)
_register(report.report, "Read", "phaseprof report trace --json | jq .phases.decode.bound")
_register(
    compare.compare,
    "Read",
    "phaseprof compare base new --fail-on 'decode.tpot_ms.p50 > +5%'",
)
_register(export.export, "Read", "phaseprof export trace --to perfetto")
_register(
    what_if.what_if,
    "Read",
    "phaseprof what-if trace --weights fp8 --batch 16 --explain",
    name="what-if",
)
_register(
    predict.predict,
    "Predict",
    "phaseprof predict config.json --device h100-sxm --batch 1,16,128",
)
_register(calibrate.calibrate, "This machine", "phaseprof calibrate --device cpu --dtype bfloat16")
_register(doctor.doctor, "This machine", "phaseprof doctor")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 for an error, 2 for a wrong call, else what a command returns.

    Args:
        args: The arguments after the program's name; None for those of this process. None given shows the help.
    """
    arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        code = _invoke(arguments)
        # Here, and not when the interpreter ends: a closed pipe must be noticed where it can be handled.
        sys.stdout.flush()
    except PhaseprofError as error:
        _trace_if_asked()
        _say(error)
        code = error.exit_code
    except KeyboardInterrupt:
        _say(PhaseprofError("interrupted."))
        code = _INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        code = _BROKEN_PIPE
    except Exception as error:
        _trace_if_asked()
        _say(_unforeseen(error, arguments))
        code = 1
    return code


def _invoke(arguments: list[str]) -> int:
    """Parse and run. typer's own `main` would catch Ctrl-C and closed pipes, and print errors in its own form."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("phaseprof", arguments) as context:
            result = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        wrong_call = _usage_error(error)
        if wrong_call is None:
            raise
        raise wrong_call from error
    return result if isinstance(result, int) else 0


def _usage_error(error: Exception) -> PhaseprofError | None:
    """The parser's complaint as one of ours; None if it is not the parser that complains.

    The class of its complaints is not part of typer's interface; what it offers to show itself is stable.
    """
    show_message = getattr(error, "format_message", None)
    if show_message is None or not hasattr(error, "exit_code"):
        return None
    message = str(show_message())
    context = getattr(error, "ctx", None)
    path = "phaseprof" if context is None else context.command_path
    return UsageError(message[:1].lower() + message[1:], f"See `{path} --help`.")


def _unforeseen(error: Exception, arguments: Sequence[str]) -> PhaseprofError:
    """What can be said of an error that nobody foresaw: what was tried, what happened, and how to see where."""
    detail = f": {error}" if str(error) else ""
    what = f"`phaseprof {arguments[0]}` failed: {type(error).__name__}{detail}"
    if isinstance(error, OSError):
        remedy = "Look at the path, its permissions and the space on its disk"
    else:
        remedy = "This is a bug in phaseprof; please report it"
    where = "the traceback is above" if _debugging() else "PHASEPROF_DEBUG=1 shows the traceback"
    return PhaseprofError(what, f"{remedy}; {where}.")


def _debugging() -> bool:
    return bool(os.environ.get("PHASEPROF_DEBUG"))


def _trace_if_asked() -> None:
    if _debugging():
        traceback.print_exc()


def _discard_stdout() -> None:
    """Nobody reads any more: what is still buffered must not raise again when the interpreter flushes it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _say(error: PhaseprofError) -> None:
    from phaseprof.cli.render.stream import takes_color

    print(errors.render(error, color=takes_color(sys.stderr)), file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
