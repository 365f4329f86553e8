"""`phaseprof run -- CMD …`: record whatever the command's Python processes do, then report."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from phaseprof.cli.options import Collect, Output
from phaseprof.cli.render import errors
from phaseprof.collectors import known
from phaseprof.errors import PhaseprofError

# Options end where the command begins: `phaseprof run python x.py -o y` gives -o to x.py.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CMD",
            help="The command, after `--`: a script.py, python …, -m module, a console script, any program.",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    collect: Collect = None,
    report: Annotated[
        bool, typer.Option(help="Print the report to stderr when the command has ended.")
    ] = True,
) -> None:
    """Run a command and record the model calls of all its Python processes.

    Its streams, signals and exit code are its own; what phaseprof says goes to stderr after it has ended.
    """
    from phaseprof.launch.wrap import run_wrapped

    outcome = run_wrapped(command or [], output, known.asked_for(collect))
    for failure in outcome.failures if outcome.nothing is None else ():
        _say(f"phaseprof: a process was not recorded: {failure}")
    if outcome.nothing is not None:
        _say(_error(outcome.nothing))
    elif report and outcome.first:
        _report(outcome.trace)
    else:
        _say(f"phaseprof: the trace is in {outcome.trace} · phaseprof report {outcome.trace}")
    raise typer.Exit(outcome.exit_code)


def _report(trace: Path) -> None:
    # What goes wrong here is said here and not by main: the exit code that must stand is the command's.
    try:
        from phaseprof.api import load_report
        from phaseprof.cli.render.progress import TerminalProgress
        from phaseprof.cli.render.stream import render_for

        with TerminalProgress() as progress:
            progress("Reading the trace")
            loaded = load_report(
                trace,
                calibrate=True,
                progress=lambda done, total, what: progress(what, done, total),
            )
        text = "\n" + render_for(loaded, sys.stderr)
    except PhaseprofError as error:
        text = _error(error)
    except KeyboardInterrupt:
        text = f"phaseprof: the report was interrupted · phaseprof report {trace}"
    except Exception as error:
        if os.environ.get("PHASEPROF_DEBUG"):
            traceback.print_exc()
        text = f"phaseprof: the report failed, the trace is in {trace}: {type(error).__name__}: {error}"
    _say(text)


def _error(error: PhaseprofError) -> str:
    from phaseprof.cli.render.stream import takes_color

    return errors.render(error, color=takes_color(sys.stderr))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
