"""What phaseprof does in a Python process of a wrapped command: wait for an engine, then record.

Called by ``launch/startup/sitecustomize.py`` before the program's own first line. A process that never imports an
engine pays for this module and `phaseprof.hooks.imports` alone, so both import only what the interpreter has loaded.
"""

from __future__ import annotations

import os
import sys

from phaseprof.hooks.imports import when_imported

TRACE_VARIABLE = "PHASEPROF_TRACE"

# Package of an engine: the modules whose import says that a model can now be built, or that requests are scheduled.
# vLLM imports its scheduler in its frontend as well, which runs it only with VLLM_ENABLE_V1_MULTIPROCESSING=0.
ENGINES = {
    "transformers": ("transformers.modeling_utils",),
    "vllm": (
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
    ),
}


def start(note: str) -> None:
    """Begin to wait for an engine.

    Args:
        note: Path of this process's launch note; events are appended to it.
    """
    trace = os.environ.get(TRACE_VARIABLE, "")
    if not trace:
        return
    for package, triggers in ENGINES.items():
        _watch(package, triggers, note, trace)


def _watch(package: str, triggers: tuple[str, ...], note: str, trace: str) -> None:
    when_imported(package, lambda module: append(note, "engine", package))
    for trigger in triggers:
        when_imported(trigger, lambda module: _start_recording(note, trace, package))


def _is_spawned() -> bool:
    """Whether this is a child of multiprocessing, which may have imported its parent's main module."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


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
    if "phaseprof.cli" in sys.modules and not _is_spawned():
        append(note, "phaseprof")
        return
    try:
        from pathlib import Path

        from phaseprof import session

        running = session.current()
        if running is None or not running.whole_process:
            # Of vLLM's processes most run no model, and need leave no file: they begin with their first event.
            session.start_process_session(Path(trace), lazily="vllm" in sys.modules)
            running = session.current()
        if running is None:
            raise RuntimeError("the session did not start; the command's own stderr says why")
        if running.trace != Path(trace):
            raise RuntimeError(f"the process records itself already, to {running.trace}")
    except Exception as error:
        append(note, "failed", engine, f"{type(error).__name__}: {error}")
        raise
    append(note, "recording", engine)
    if engine == "vllm":
        from phaseprof.vllm.allowed import left_out

        missing = left_out()
        if missing is not None:
            running.note(missing)
