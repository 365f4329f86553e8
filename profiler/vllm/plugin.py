"""The plugin that vLLM loads in each of its processes (entry point group ``vllm.general_plugins``).

It is dormant: of a run that nobody records it only leaves a method on two classes of vLLM, by which a later
`phaseprof.profile(llm)` reaches the engine core and the workers, and which nothing else calls. Where `PHASEPROF_TRACE`
names a trace, recording begins, unless the start-up hook of `phaseprof run` has seen to that; it does not reach the
workers that Ray starts on its own.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

#: The method that a client of the engine calls by its name.
METHOD = "phaseprof_session"

#: Classes that are asked for a method by its name: module and name.
_REACHED = (
    ("vllm.v1.engine.core", "EngineCore"),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase"),
)

#: The session of this process that a block in another one has asked for.
_begun: Any = None


def register() -> None:
    """Called by vLLM, in one process perhaps several times. Never raises into it."""
    try:
        _record_if_asked()
        from phaseprof.hooks.imports import when_imported

        for module, name in _REACHED:
            when_imported(module, partial(_leave_method, name))
    except Exception as error:
        import logging

        logging.getLogger("phaseprof").warning(
            "phaseprof: its plugin is left out, vLLM goes on: %s: %s", type(error).__name__, error
        )


def is_registered() -> bool:
    """Whether vLLM has loaded the plugin in this process."""
    module = sys.modules.get(_REACHED[0][0])
    return hasattr(getattr(module, _REACHED[0][1], None), METHOD)


def _record_if_asked() -> None:
    # The start-up hook of `phaseprof run` has imported this module, if there was one.
    if os.environ.get("PHASEPROF_TRACE") and "phaseprof.launch.autostart" not in sys.modules:
        from phaseprof.launch import autostart

        autostart.start("")


def _leave_method(name: str, module: Any) -> None:
    owner = getattr(module, name, None)
    if isinstance(owner, type) and METHOD not in vars(owner):
        setattr(owner, METHOD, phaseprof_session)


def phaseprof_session(owner: Any, action: str, trace: str, collect: str = "") -> str:
    """Begin or end the recording of this process, or part of it, for a block in another one.

    Args:
        owner: The engine core, or the wrapper of a worker. Not used.
        action: ``begin``; ``sync``: write what waits; ``warmup`` and ``measure``: what comes is a warm-up, and is none
            any more; ``look`` and ``unlook``: look at the kernels of what comes, and no longer; ``end``: end what
            ``begin`` has begun; ``close``: end whatever records here.
        trace: Absolute path of the trace's folder.
        collect: Which collectors run, as `--collect` takes it; empty for what the environment says, or the defaults.

    Returns:
        Empty, or why it did not work: what raises here would be logged by vLLM as an error of its own.
    """
    try:
        return _act(action, Path(trace), collect)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _act(action: str, trace: Path, collect: str) -> str:
    global _begun
    from phaseprof import session

    running = session.current()
    if action == "begin":
        if running is None:
            begun = session.Session(trace, collect=collect or None)
            begun.start(lazily=True)
            _begun = begun
        elif running.trace.absolute() != trace:
            return f"it is recorded already, into {running.trace}"
    elif running is None:
        _begun = None
    elif action == "sync":
        running.recorder.sync()
    elif action == "warmup":
        session.begin_warmup()
    elif action == "measure":
        session.end_warmup()
    elif action == "look":
        running.begin_look()
    elif action == "unlook":
        running.end_look()
    else:
        if action == "close" or running is _begun:
            running.stop()
        _begun = None
    return ""
