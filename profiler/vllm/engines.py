"""Reach the processes of an offline engine from the process that holds the `vllm.LLM`: for `phaseprof.profile(llm)`.

The engine core and the workers may be other processes. The core is called by a utility call of its client, the
workers by a collective call; both take the name of a method, which our plugin has left there (`phaseprof.vllm.plugin`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from phaseprof.errors import NotMeasured, UsageError
from phaseprof.session import Session
from phaseprof.vllm import allowed, plugin

#: An engine is idle when a block begins, so that each of its processes answers at once; a merge of parts takes longer.
_ANSWER_S = 60.0

_OFFLINE = (("vllm.entrypoints.llm", "LLM"), ("vllm.v1.engine.llm_engine", "LLMEngine"))
_ASYNCHRONOUS = (("vllm.v1.engine.async_llm", "AsyncLLM"),)


def is_engine(model: Any) -> bool:
    """Whether what the user asks to profile is an engine of vLLM.

    Raises:
        UsageError: If it is one that a block cannot follow.
    """
    if _is_one(model, _ASYNCHRONOUS):
        raise UsageError(
            "A block can follow an offline vllm.LLM, and this is an AsyncLLM.",
            "Start the program under `phaseprof run -- …`.",
        )
    return _is_one(model, _OFFLINE)


class EngineSessions:
    """The sessions in the other processes of an engine, for the time of a session in this one.

    Args:
        engine: A `vllm.LLM` or its `LLMEngine`.
        session: The one in this process, which has begun.
        owned: The engine ends with the block: so does what records in its processes, whoever began it.
    """

    def __init__(self, engine: Any, session: Session, *, owned: bool = False) -> None:
        self._client = getattr(engine, "llm_engine", engine).engine_core
        self._session = session
        self._last = "close" if owned else "end"
        self._reached = False

    def begin(self) -> None:
        """Begin to record there. What is out of reach is noted."""
        if self._in_this_process():
            return
        missing = self._why_not()
        if missing is not None:
            self._session.note(missing)
            return
        self._reached = True
        self._session.elsewhere = self._tell
        for problem in self._call("begin"):
            self._session.note(
                NotMeasured(
                    "a process of vLLM",
                    f"recording could not begin there ({problem})",
                    "start the program under `phaseprof run -- …`",
                )
            )

    def sync(self) -> None:
        """Have them write what they have seen so far."""
        if self._reached:
            self._call("sync")

    def end(self) -> None:
        """End them. An engine that has died in the block, or was shut down, does not answer any more."""
        if not self._reached:
            return
        self._reached = False
        self._session.elsewhere = None
        for problem in self._call(self._last):
            self._session.note(NotMeasured("the end of a process of vLLM", problem))

    def _tell(self, action: str) -> None:
        self._call(action)

    def _call(self, action: str) -> list[str]:
        arguments = (action, str(self._session.trace.absolute()), self._session.collect or "")
        problems = []
        if self._has_core_process():
            try:
                problems.append(self._client.call_utility(plugin.METHOD, *arguments))
            except Exception as error:
                problems.append(_said(error))
        try:
            problems += self._client.collective_rpc(plugin.METHOD, _ANSWER_S, arguments)
        except Exception as error:
            problems.append(_said(error))
        # Ranks that fail alike are said once.
        return list(dict.fromkeys(problem for problem in problems if problem))

    def _has_core_process(self) -> bool:
        return not hasattr(self._client, "engine_core")

    def _in_this_process(self) -> bool:
        """Whether all of the engine runs here."""
        if self._has_core_process():
            return False
        # Of one worker that is no process of its own.
        executor = getattr(self._client.engine_core, "model_executor", None)
        return type(executor).__name__ == "UniProcExecutor"

    def _why_not(self) -> NotMeasured | None:
        if not hasattr(self._client, "collective_rpc"):
            return NotMeasured(
                "the processes of a vLLM engine",
                "this vLLM has no collective_rpc, by which they are reached",
                "start the program under `phaseprof run -- …`",
            )
        if plugin.is_registered():
            return None
        return allowed.left_out() or NotMeasured(
            "the processes of a vLLM engine",
            "vLLM has not loaded phaseprof's plugin: it was installed after the engine began, or into another "
            f"environment than that of {sys.executable} (process {os.getpid()})",
            "pip install phaseprof there, and see `phaseprof doctor`",
        )


def _is_one(model: Any, kinds: tuple[tuple[str, str], ...]) -> bool:
    for module, name in kinds:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(model, kind):
            return True
    return False


def _said(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
