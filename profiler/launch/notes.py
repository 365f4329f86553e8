"""Launch notes: what the start-up hooks of a wrapped command's processes left behind.

Each Python process writes a file of literal tuples, one a line, so that writing needs nothing but builtins::

    ("python", pid, executable, argv0, version, problem, error)    first line; problem: "", "missing" or "broken"
    ("engine", pid, engine)                                        the engine's package was imported
    ("recording", pid, engine)                                     recording began
    ("failed", pid, engine, error)                                 recording could not begin
    ("phaseprof", pid)                                             the process is a phaseprof command itself
    ("nested", pid, trace)                                         another `phaseprof run` took over

A forked child shares its parent's file and writes its own pid.
"""

from __future__ import annotations

import ast
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PythonStarted:
    """A Python process ran our start-up hook.

    Attributes:
        pid: Process id.
        executable: The interpreter, as it names itself; empty if it does not.
        argv0: The script, ``-c`` or ``-m``.
        version: The interpreter's version.
        problem: ``missing``: no phaseprof there; ``broken``: there, and its import fails; empty: all is well.
        error: What the import said.
    """

    pid: int
    executable: str
    argv0: str
    version: str
    problem: str
    error: str


@dataclass(frozen=True, slots=True)
class LaunchNotes:
    """All notes of one run.

    Attributes:
        pythons: The processes, in the order of their notes' names.
        engines: Engines that were imported.
        recording: Process ids in which recording began.
        failures: Why recording could not begin, where it could not.
        phaseprof_itself: Whether a phaseprof command, which keeps its own trace, ran an engine.
        nested: Traces of `phaseprof run` commands inside the command.
    """

    pythons: tuple[PythonStarted, ...] = ()
    engines: frozenset[str] = frozenset()
    recording: frozenset[int] = frozenset()
    failures: tuple[str, ...] = ()
    phaseprof_itself: bool = False
    nested: tuple[str, ...] = ()


def read_notes(folder: Path) -> LaunchNotes:
    """Read the notes. A line that is no note (a process was killed while it wrote) is skipped."""
    pythons: list[PythonStarted] = []
    engines: set[str] = set()
    recording: set[int] = set()
    failures: list[str] = []
    phaseprof_itself = False
    nested: list[str] = []
    for file in sorted(folder.glob("*.note")):
        for line in _lines(file):
            match line:
                case (
                    "python",
                    int(pid),
                    str(executable),
                    str(argv0),
                    str(version),
                    str(problem),
                    str(error),
                ):
                    pythons.append(PythonStarted(pid, executable, argv0, version, problem, error))
                case ("engine", int(_), str(engine)):
                    engines.add(engine)
                case ("recording", int(pid), str(_)):
                    recording.add(pid)
                case ("failed", int(_), str(_), str(error)):
                    failures.append(error)
                case ("phaseprof", int(_)):
                    phaseprof_itself = True
                case ("nested", int(_), str(trace)):
                    nested.append(trace)
    return LaunchNotes(
        pythons=tuple(pythons),
        engines=frozenset(engines),
        recording=frozenset(recording),
        failures=tuple(failures),
        phaseprof_itself=phaseprof_itself,
        nested=tuple(nested),
    )


def leave_nested_note(folder: Path, trace: Path) -> None:
    """Tell an outer `phaseprof run`, whose notes folder this is, that the command inside records to `trace`."""
    try:
        note = folder / f"{os.getpid()}-{time.time_ns()}-nested.note"
        note.write_text(ascii(("nested", os.getpid(), str(trace))) + "\n", encoding="ascii")
    except OSError:
        pass  # the outer run has ended, or its folder is not ours to write to


def _lines(file: Path) -> list[tuple[object, ...]]:
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return []
    values = []
    for line in text.splitlines():
        try:
            value = ast.literal_eval(line)
        except (ValueError, SyntaxError):
            continue
        if isinstance(value, tuple):
            values.append(value)
    return values
