"""Know the prompt of a generate call of transformers before its first pass.

Two seams of `GenerationMixin`, both class attributes for the time of the session: `generate`, which tells begin and
end and nests on a thread, and the method that computes the prompt, which is given the expanded batch, its mask and its
cache. `_prefill` is that method for sampling and beam search (transformers 5.0 to 5.24); a decoding method of its own
(assisted decoding) is told by its arguments.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from phaseprof.events import Event, GenerationBegan, GenerationEnded, PromptKnown
from phaseprof.hooks.early_exit import EarlyExits
from phaseprof.hooks.inputs import cache_of, copy_mask, past_length
from phaseprof.hooks.models import ModelBook
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.processors import ProcessorsHook
from phaseprof.hooks.state import CacheBook, Generation, ThreadState


class GenerateHook:
    """Observes generate calls.

    Args:
        emit: Takes the events.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        failed: Told of an exception in our own code.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event], None],
        models: ModelBook,
        caches: CacheBook,
        state: ThreadState,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._models = models
        self._caches = caches
        self._state = state
        self._failed = failed
        self._numbers = itertools.count(1)
        self._exits = EarlyExits(models)
        self._processors = ProcessorsHook(emit=emit, state=state, failed=failed)

    @property
    def active(self) -> bool:
        """Set to False, the wrappers that somebody else still holds hand calls on."""
        return self._processors.active

    @active.setter
    def active(self, active: bool) -> None:
        self._processors.active = active

    def patches(self, mixin: type) -> list[Patch]:
        """Wrap the seams of a `GenerationMixin`; one that this version lacks is left out."""
        patches = [Patch(mixin, "generate", self._wrap_generate)]
        if hasattr(mixin, "_prefill"):
            patches.append(Patch(mixin, "_prefill", self._wrap_prefill))
        if hasattr(mixin, "_assisted_decoding"):
            patches.append(Patch(mixin, "_assisted_decoding", self._wrap_assisted))
        names = vars(sys.modules[mixin.__module__])
        return patches + self._processors.patches(
            mixin, names.get("LogitsProcessorList"), names.get("StoppingCriteriaList")
        )

    def _wrap_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(model, *args, **kwargs)
            here = self._state.here
            outer = here.generation
            generation = Generation(next(self._numbers), model, outer)
            custom = kwargs.get("custom_generate")
            if callable(custom):
                kwargs["custom_generate"] = self._wrap_custom(custom)
            self._began(generation)
            here.generation = generation
            try:
                result = original(model, *args, **kwargs)
            except BaseException as raised:
                here.generation = outer
                self._ended(generation, type(raised).__name__)
                raise
            here.generation = outer
            self._ended(generation, None)
            return result

        return generate

    def _wrap_prefill(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _prefill(
            model: Any, input_ids: Any, config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._prompt(model, input_ids, config, model_kwargs, speculative=False)
            return original(model, input_ids, config, model_kwargs, *args, **kwargs)

        return _prefill

    def _wrap_assisted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _assisted_decoding(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config")
            generation = self._state.here.generation
            if generation is not None:
                generation.speculative = True
            prompt = self._prompt(model, input_ids, config, kwargs, speculative=True)
            result = original(model, input_ids, *args, **kwargs)
            if generation is not None:
                # The loop has cropped it to what was accepted. Where the model has made it (transformers 5.0), what was
                # generated tells: all but its last token lies in the cache.
                generation.slots = past_length(cache_of(kwargs))
                if generation.slots is None and prompt is not None:
                    generation.slots = prompt + _length(result) - input_ids.shape[1] - 1
            return result

        return _assisted_decoding

    def _wrap_custom(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a decoding function of the user's own for one call: generate hands it the prompt."""

        # generate asks it for its parameters: inspect.signature follows `__wrapped__`.
        @functools.wraps(original)
        def decode(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config")
            self._prompt(model, input_ids, config, kwargs, speculative=False, custom=True)
            return original(model, input_ids, *args, **kwargs)

        return decode

    def _began(self, generation: Generation) -> None:
        try:
            self._exits.enter(generation)
            seen = self._models.find(generation.model, None)
            outer = generation.parent
            # Nested in a call that verifies drafts, it drafts; nested otherwise, it is a call like any other.
            parent = outer.number if outer is not None and outer.speculative else 0
            # Read after the model was looked up: what that takes at first sight is not the request's time.
            now = time.perf_counter_ns()
            self._emit(GenerationBegan(generation.number, parent, seen.model_id, now))
        except Exception as failure:
            self._failed("recording the begin of generate", failure)

    def _ended(self, generation: Generation, error: str | None) -> None:
        try:
            now = time.perf_counter_ns()
            self._exits.leave(generation)
            self._emit(GenerationEnded(generation.number, now, error, generation.slots))
        except Exception as failure:
            self._failed("recording the end of generate", failure)

    def _prompt(
        self,
        model: Any,
        input_ids: Any,
        config: Any,
        model_kwargs: Any,
        *,
        speculative: bool,
        custom: bool = False,
    ) -> int | None:
        """Hand over the prompt of a call; gives its slots, None if they are not known."""
        generation = self._state.here.generation
        if generation is None or not self.active:
            return None
        try:
            prompt = self._prompt_slots(model, input_ids, config, model_kwargs)
            mask, _ = _prompt_mask(model, model_kwargs, input_ids.shape[0], prompt)
            beams = getattr(config, "num_beams", 1) or 1
            expanded = max(beams, getattr(config, "num_return_sequences", 1) or 1)
            if beams == 1 and input_ids.shape[0] > 1:
                generation.end_ids = _end_ids(config)
                generation.rows_end_apart = True
            limit = getattr(config, "max_length", None)
            fed = input_ids.shape[1]
            self._emit(
                PromptKnown(
                    generation=generation.number,
                    prompt=prompt,
                    rows=input_ids.shape[0],
                    sequences_per_request=expanded,
                    mask=mask,
                    end_ids=generation.end_ids,
                    max_output=limit - fed if isinstance(limit, int) else None,
                    speculative=speculative,
                    custom=custom,
                )
            )
            return prompt
        except Exception as failure:
            self._failed("reading the prompt of generate", failure)
            return None

    def _prompt_slots(self, model: Any, input_ids: Any, config: Any, model_kwargs: Any) -> int:
        """Slots of the prompt, those in the cache included.

        A call that goes on with a kept cache is given either the whole sequence or only what is new; in the latter
        case the mask is longer than the ids.
        """
        embeds = model_kwargs.get("inputs_embeds")
        if embeds is not None and not model.config.is_encoder_decoder:
            return int(embeds.shape[1])
        length = int(input_ids.shape[1])
        cache = cache_of(model_kwargs)
        past = 0
        if cache is not None:
            read = past_length(cache)
            track = self._caches.find(cache)
            past = read if read is not None else (track.end if track is not None else 0)
        if not past:
            return length
        mask = model_kwargs.get(_mask_name(model))
        covered = mask.shape[1] if mask is not None else getattr(config, "_mask_length", length)
        return length if covered == length else past + length


def _length(result: Any) -> int:
    """Tokens of a sequence that generate returns, its prompt included."""
    return int(getattr(result, "sequences", result).shape[1])


def _mask_name(model: Any) -> str:
    return "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"


def _prompt_mask(model: Any, model_kwargs: Any, rows: int, prompt: int) -> tuple[Any, bool]:
    """The mask over the prompt where it may show padding. generate has read it itself just before, so that on a
    device nothing more has to be waited for."""
    mask = model_kwargs.get(_mask_name(model))
    if mask is None or len(mask.shape) != 2 or tuple(mask.shape) != (rows, prompt):
        return None, False
    return copy_mask(mask.cpu())


def _end_ids(config: Any) -> tuple[int, ...]:
    """Ids that end a row of a batch. The id that fills it up afterwards is not one: a model may draw it, too."""
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
