"""Know the virtual tokens that PEFT's prompt learning puts before a prompt.

`PeftModel.get_prompt` makes them, inside a generate call or a direct one, as embeddings (prompt and p-tuning) or as a
cache that already holds their keys and values (prefix tuning). Either stands before the tokens that the caller passed,
and nothing else tells a cache made this way from one that was filled before the recording began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phaseprof.events import Event, VirtualTokens
from phaseprof.hooks.inputs import past_length
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import CacheBook, ThreadState


class AdapterHook:
    """Observes the virtual tokens of PEFT.

    Args:
        emit: Takes the events.
        caches: Knows the caches.
        state: Of the threads.
        failed: Told of an exception in our own code.

    Attributes:
        active: Set to False, the wrapper hands calls on.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event], None],
        caches: CacheBook,
        state: ThreadState,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._caches = caches
        self._state = state
        self._failed = failed
        self.active = True

    def patch(self, owner: type) -> Patch:
        """Wrap `PeftModel.get_prompt`.

        Raises:
            AttributeError: If this peft has none.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_prompt(model: Any, /, *args: Any, **kwargs: Any) -> Any:
                prompt = original(model, *args, **kwargs)
                if self.active:
                    self._made(prompt)
                return prompt

            return get_prompt

        return Patch(owner, "get_prompt", make)

    def _made(self, prompt: Any) -> None:
        try:
            generation = self._state.here.generation
            number = 0 if generation is None else generation.number
            if hasattr(prompt, "get_seq_length"):
                track = self._caches.find(prompt) or self._caches.add(prompt)
                slots = past_length(prompt)
                if track is not None and slots:
                    track.end = slots
                    self._emit(VirtualTokens(number, track.number, slots))
            elif len(getattr(prompt, "shape", ())) == 3:
                self._emit(VirtualTokens(number, 0, int(prompt.shape[1])))
        except Exception as failure:
            self._failed("looking at the virtual tokens of an adapter", failure)
