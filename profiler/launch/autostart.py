"""What phaseprof does in a Python process of a wrapped command: wait for an engine, then record.

Called by ``launch/startup/sitecustomize.py`` before the program's own first line. A process that never imports an
engine pays for this module and `phaseprof.hooks.imports` alone, so both import only what the interpreter has loaded.
"""

from __future__ import annotations

import os
import sys

from phaseprof.hooks.imports import when_imported

TRACE_VARIABLE = "PHASEPROF_TRACE"

# Package of an engine: the module whose import says that a model can now be built.
ENGINES = {"transformers": "transformers.modeling_utils"}


def start(note: str) -> None:
    """Begin to wait for an engine.

    Args:
        note: Path of this process's launch note; events are appended to it.
    """
    trace = os.environ.get(TRACE_VARIABLE, "")
    if not trace:
        return
    for package, trigger in ENGINES.items():
        _watch(package, trigger, note, trace)


def _watch(package: str, trigger: str, note: str, trace: str) -> None:
    when_imported(package, lambda module: append(note, "engine", package))
    when_imported(trigger, lambda module: _start_recording(note, trace, package))


def append(note: str, event: str, *facts: str) -> None:
    """Add a line to a launch note: a literal tuple (event, pid, *facts). A note that is gone is no error."""
    try:
        file = os.open(note, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    try:
        os.write(file, (ascii((event, os.getpid(), *facts)) + "\n").encode("ascii"))
    except OSError:
        pass
    finally:
        os.close(file)


def _start_recording(note: str, trace: str, engine: str) -> None:
    # The phaseprof command itself (`phaseprof run -- phaseprof profile …`) keeps its own trace.
    if "phaseprof.cli" in sys.modules:
        append(note, "phaseprof")
        return
    try:
        from pathlib import Path

        from phaseprof import session

        session.start_process_session(Path(trace))
        running = session.current()
        if running is None:
            raise RuntimeError("the session did not start; the command's own stderr says why")
        if running.trace != Path(trace):
            raise RuntimeError(f"the process records itself already, to {running.trace}")
    except Exception as error:
        append(note, "failed", engine, f"{type(error).__name__}: {error}")
        raise
    append(note, "recording", engine)
