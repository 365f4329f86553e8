"""Run a command so that its Python processes record themselves, and say what came of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import EmptyRunError, TraceError
from phaseprof.launch.child import run_child
from phaseprof.launch.command import resolve
from phaseprof.launch.environment import NOTES_VARIABLE, child_environment
from phaseprof.launch.notes import leave_nested_note, read_notes
from phaseprof.launch.output import prepare_output
from phaseprof.launch.why import has_passes, why_nothing_recorded
from phaseprof.process import job_of, place_of


@dataclass(frozen=True, slots=True)
class WrappedRun:
    """A command that has ended.

    Attributes:
        exit_code: The command's own; 128 + N if signal N ended it.
        trace: The trace folder. It does not exist if nothing was recorded and we had made it.
        nothing: Why nothing was recorded; None if something was.
        failures: Processes in which recording could not begin although it did in others.
        first: Whether it is the first of the commands that share the trace, or the only one: it reports.
    """

    exit_code: int
    trace: Path
    nothing: EmptyRunError | None
    failures: tuple[str, ...]
    first: bool = True


def run_wrapped(
    typed: Sequence[str], output: Path | None, collect: str | None = None
) -> WrappedRun:
    """Run a command with phaseprof's start-up hook in its environment.

    Args:
        typed: The command and its arguments, as the user typed them.
        output: The trace folder; None for ``./phaseprof-<local time>``.
        collect: Which collectors run in its processes, as `--collect` takes it; None for the defaults.

    Raises:
        UsageError: No command, one that cannot be executed (exit codes 126, 127), or an output that is not empty.
        TraceError: The output or the temporary folder cannot be written to.
    """
    command = resolve(typed, os.environ)
    job = job_of(os.environ)
    folder = prepare_output(output, job)
    try:
        if outer := os.environ.get(NOTES_VARIABLE):
            leave_nested_note(Path(outer), folder.path)
        notes_folder = _make_notes_folder()
        try:
            environment = child_environment(os.environ, folder.path, notes_folder, collect)
            exit_code = run_child(command, environment)
            notes = read_notes(notes_folder)
        finally:
            shutil.rmtree(notes_folder, ignore_errors=True)
    finally:
        folder.remove_if_empty()
    nothing = None
    if not has_passes(folder.path):
        nothing = why_nothing_recorded(command, notes, folder.path)
    first = output is None or not job or place_of(os.environ).rank == 0
    return WrappedRun(exit_code, folder.path, nothing, notes.failures, first)


def _make_notes_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="phaseprof-notes-"))
    except OSError as error:
        raise TraceError(
            f"No temporary folder can be made: {error.strerror}.",
            "Set TMPDIR to a folder you may write to.",
        ) from error
