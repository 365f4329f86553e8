"""Tell the passes of logits processors from those of the request, and see which rows a stopping criterion ends.

Guidance, and processors that somebody wrote, call a model between two steps of generate: often the same model, and
without a cache with the same shapes. So the lists that generate calls are wrapped (class attributes, for the time of
the session): while one that may call a model runs, the passes of the thread belong to a guest of the call. The lists of
most calls hold nothing of that kind: they are told once a call, and cost a comparison a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phaseprof.events import Event, RowsEnded
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import Generation, ThreadState

#: Criteria that end all rows at once, or by an end token, which is seen among the ids that are fed.
_PLAIN_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria", "ConfidenceCriteria")


class ProcessorsHook:
    """Observes logits processors and stopping criteria.

    Args:
        emit: Takes the events.
        state: Of the threads.
        failed: Told of an exception in our own code.

    Attributes:
        active: Set to False, the wrappers that somebody else still holds hand calls on.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event], None],
        state: ThreadState,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._state = state
        self._failed = failed
        self.active = True

    def patches(self, mixin: type, processors: type | None, criteria: type | None) -> list[Patch]:
        """Wrap the seams of a `GenerationMixin`, its `LogitsProcessorList` and its `StoppingCriteriaList`; those that
        this version lacks are left out."""
        patches = []
        if processors is not None and hasattr(mixin, "_get_logits_processor"):
            patches.append(Patch(mixin, "_get_logits_processor", self._wrap_get_processors))
            patches.append(Patch(processors, "__call__", self._wrap_processors))
        if criteria is not None and hasattr(mixin, "_get_stopping_criteria"):
            patches.append(Patch(mixin, "_get_stopping_criteria", self._wrap_get_criteria))
            patches.append(Patch(criteria, "__call__", self._wrap_criteria))
        return patches

    def _wrap_get_processors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_logits_processor(*args: Any, **kwargs: Any) -> Any:
            processors = original(*args, **kwargs)
            generation = self._state.here.generation
            if self.active and generation is not None and any(map(_may_call, processors)):
                generation.processors = processors
            return processors

        return _get_logits_processor

    def _wrap_get_criteria(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_stopping_criteria(*args: Any, **kwargs: Any) -> Any:
            criteria = original(*args, **kwargs)
            generation = self._state.here.generation
            if self.active and generation is not None:
                names = (type(criterion).__name__ for criterion in criteria)
                if any(name not in _PLAIN_CRITERIA for name in names):
                    generation.criteria = criteria
            return criteria

        return _get_stopping_criteria

    def _wrap_processors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state = self._state

        @functools.wraps(original)
        def __call__(processors: Any, /, *args: Any, **kwargs: Any) -> Any:
            here = state.here
            generation = here.generation
            if generation is None or generation.processors is not processors or not self.active:
                return original(processors, *args, **kwargs)
            here.generation = generation.guest()
            try:
                return original(processors, *args, **kwargs)
            finally:
                here.generation = generation

        return __call__

    def _wrap_criteria(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state = self._state

        @functools.wraps(original)
        def __call__(criteria: Any, /, *args: Any, **kwargs: Any) -> Any:
            here = state.here
            generation = here.generation
            if generation is None or generation.criteria is not criteria or not self.active:
                return original(criteria, *args, **kwargs)
            here.generation = generation.guest()
            try:
                done = original(criteria, *args, **kwargs)
            finally:
                here.generation = generation
            if generation.rows_end_apart:
                self._ended(generation, done)
            return done

        return __call__

    def _ended(self, generation: Generation, done: Any) -> None:
        """Hand over the rows that ended at this step, or that they could not be read."""
        try:
            if done.device.type != "cpu":
                self._emit(RowsEnded(generation.number, None))
                return
            rows = tuple(row for row, ended in enumerate(done.tolist()) if ended)
            if rows:
                self._emit(RowsEnded(generation.number, rows))
        except Exception as failure:
            self._failed("reading which rows have ended", failure)


def _may_call(processor: Any) -> bool:
    """Whether a logits processor may call a model: it holds one, or is not of transformers."""
    return (
        getattr(processor, "model", None) is not None
        or type(processor).__module__ != "transformers.generation.logits_process"
    )
