"""The hooks of vLLM, together: set on each module when it is there, or as soon as it is imported.

A process imports what it needs: the frontend neither a worker nor (as a client) a scheduler that runs. So all seams are
waited for everywhere, and what is never imported costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.events import Event, RawPass
from phaseprof.hooks.imports import Removal, when_imported
from phaseprof.hooks.models import SeenModel
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import Flags, ThreadState
from phaseprof.vllm.core import CoreHook
from phaseprof.vllm.ending import EndHook
from phaseprof.vllm.seams import Seam, UnknownForm, unknown, version
from phaseprof.vllm.worker import WorkerHook


class VllmHooks:
    """Sets and removes every hook on vLLM.

    Args:
        emit: Takes the events.
        state: Of the threads.
        flags: Of the session.
        on_model: Told of each model at first sight.
        note: Told of what cannot be measured.
        failed: Told of an exception in our own code.
        trace: The trace's folder.
        end: Ends the session of this process.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event | RawPass], None],
        state: ThreadState,
        flags: Flags,
        on_model: Callable[[SeenModel], None],
        note: Callable[[NotMeasured], None],
        failed: Callable[[str, Exception], None],
        trace: Path,
        end: Callable[[], None],
    ) -> None:
        self._note = note
        self._worker = WorkerHook(
            emit=emit, state=state, flags=flags, on_model=on_model, note=note, failed=failed
        )
        self._core = CoreHook(emit=emit, flags=flags, note=note, failed=failed)
        self._end = EndHook(trace=trace, end=end, failed=failed)
        self._patches: list[Patch] = []
        self._waiting: list[Removal] = []

    @property
    def passes(self) -> int:
        """Steps seen."""
        return self._worker.steps

    @property
    def handed_over(self) -> int:
        """Steps that the recorder was given."""
        return self._worker.handed_over

    @property
    def own_ns(self) -> int:
        """Time in the hooks on the engine's threads, without `setup_ns`."""
        return self._worker.own_ns + self._core.own_ns

    @property
    def setup_ns(self) -> int:
        """Time to read the structure of models at first sight."""
        return self._worker.setup_ns

    @property
    def labels(self) -> tuple[str, ...]:
        """What is hooked, for people: one entry for the engine, or none."""
        if not self._patches:
            return ()
        names = ", ".join(patch.label for patch in self._patches)
        return (f"vllm {version()} ({names})",)

    def seams(self) -> tuple[Seam, ...]:
        """Every place of vLLM that is wrapped."""
        return (*self._worker.seams(), *self._core.seams(), *self._end.seams())

    def install(self, model: Any = None) -> None:
        """Set the hooks on what is imported, and on the rest as soon as it is.

        Args:
            model: Not used: an engine is seen by its classes.
        """
        for seam in self.seams():
            self._waiting.append(when_imported(seam.module, partial(self._set, seam)))

    def remove(self) -> None:
        """Take every hook off. One that somebody else has wrapped since passes calls through from now on."""
        for waiting in self._waiting:
            waiting.remove()
        self._waiting = []
        self._worker.remove()
        self._core.remove()
        self._end.remove()
        for patch in reversed(self._patches):
            patch.remove()

    def _set(self, seam: Seam, module: Any) -> None:
        try:
            self._patches += seam.patch(module)
        except UnknownForm as problem:
            self._note(unknown(seam.lost, str(problem)))
        except Exception as problem:
            self._note(unknown(seam.lost, f"{type(problem).__name__}: {problem}"))
