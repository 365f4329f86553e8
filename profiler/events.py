"""What a hook hands over: raw facts of a pass or of a generate call, before anything is derived from them.

Hooks run on the workload's threads and must be cheap, so they only collect; `phaseprof.settle` derives labels, work
and requests from these events on a background thread. Times are readings of the monotonic clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from phaseprof.engine_events import EngineEvent
from phaseprof.phases import Phase
from phaseprof.routing import ExpertsChosen
from phaseprof.timers import Span
from phaseprof.vllm.core_events import CoreEvent
from phaseprof.vllm.events import StepRan, WorkerEvent
from phaseprof.work.count import Source


class Override(NamedTuple):
    """What `phaseprof.phase(...)` says of the passes inside it."""

    phase: Phase
    prompt_tokens: int | None


class PassSeen(NamedTuple):
    """One forward pass.

    Attributes:
        model_id: The model.
        generation: Number of the generate call that it belongs to; 0 in a hand-written loop; negative inside the logits
            processors and stopping criteria of the call of that number.
        thread_id: Native id of the thread.
        start_ns, end_ns: Monotonic clock.
        span: Device time, resolved later; None if the device has none of its own.
        rows: Sequences in the batch.
        query: Slots computed for each row, padding included.
        past: Slots in the cache before the pass; None if it could not be read.
        cache: Number of the cache; 0 without one.
        mask: Attention mask of the pass on the CPU, uint8 of shape (rows, past + query), where the pass may contain
            padding; None where there is none.
        mask_unread: There is a mask, and reading it would have made the device wait.
        fed: The input ids (a CPU tensor) of a decode pass of several rows, to see which rows had ended; else None.
        logits: Positions for which the head was computed, over all rows; 0 without a head.
        layout: Layout of the cache, when it was read after this pass; else None.
        encoder: The module is an encoder or a tower.
        aside: Why it is neither prefill nor decode: ``training`` (gradients were recorded in training mode, or a loss
            was asked for), ``scoring`` (the model classifies) or ``packed`` (several requests in one row, which ones is
            not known); None otherwise.
        warmup: The caller declared it a warm-up.
        compiled: The module's forward is compiled.
        compiling: Something was compiled during the pass.
        profiled: A costly collector ran.
        override: The label that the user gave; None without.
        error: Class name of the exception that ended the pass.
        source: What the decoder of an encoder-decoder attends to beside its own tokens: a `Source`; None for another
            model, or if it could not be read.
    """

    model_id: str
    generation: int
    thread_id: int
    start_ns: int
    end_ns: int
    span: Span | None
    rows: int
    query: int
    past: int | None
    cache: int
    mask: Any
    mask_unread: bool
    fed: Any
    logits: int
    layout: Any
    encoder: bool
    aside: str | None
    warmup: bool
    compiled: bool
    compiling: bool
    profiled: bool
    override: Override | None
    error: str | None
    source: Source | None = None


class GenerationBegan(NamedTuple):
    """A generate call began.

    Attributes:
        generation: Its number.
        parent: Number of the generate call that it is nested in (a draft model's); 0 if none.
        model_id: The model whose method was called.
        arrival_ns: Monotonic clock.
    """

    generation: int
    parent: int
    model_id: str
    arrival_ns: int


class PromptKnown(NamedTuple):
    """A generate call is about to compute its prompt.

    Attributes:
        generation: Its number.
        prompt: Slots of the prompt in every row, cached ones and padding included.
        rows: Sequences that will be computed.
        sequences_per_request: Beams or returned sequences for each row that the caller passed.
        mask: Attention mask over the prompt's slots where some are padding: a CPU tensor, uint8, (rows, prompt).
        end_ids: Token ids after which a row of the batch is only padding; empty where rows never are.
        max_output: Tokens that may be generated for a row; None if not known.
        speculative: Passes verify drafts.
        custom: The decoding function is the user's own.
    """

    generation: int
    prompt: int
    rows: int
    sequences_per_request: int
    mask: Any
    end_ids: tuple[int, ...]
    max_output: int | None
    speculative: bool
    custom: bool = False


class RowsEnded(NamedTuple):
    """Rows of a generate call were ended by a stopping criterion: what is computed for them from now on is padding.

    Attributes:
        generation: Its number.
        rows: The rows; None if they could not be read without making the device wait.
    """

    generation: int
    rows: tuple[int, ...] | None


class GenerationEnded(NamedTuple):
    """A generate call returned or raised.

    Attributes:
        generation: Its number.
        end_ns: Monotonic clock.
        error: Class name of the exception; None if it returned.
        slots: Slots that a verifying call left in its cache: they tell what its last pass accepted; else None.
    """

    generation: int
    end_ns: int
    error: str | None
    slots: int | None = None


class ModelSeen(NamedTuple):
    """A model was seen for the first time.

    Attributes:
        model_id: Its id in the tables.
        cost: Its `ModelCost`; None if it could not be read.
        dtype: Dtype of its weights, without prefix.
        masked: Attention is always given an explicit mask, even where a causal one would do.
        pool: The cache of its engine, a `PagedPool`; None without one.
    """

    model_id: str
    cost: Any
    dtype: str
    masked: bool = False
    pool: Any = None


class CacheGone(NamedTuple):
    """A cache was freed: nothing can follow on it.

    Attributes:
        cache: Its number.
        at_ns: When, monotonic clock.
    """

    cache: int
    at_ns: int


class VirtualTokens(NamedTuple):
    """An adapter puts tokens of its own before those of the caller.

    Attributes:
        generation: The generate call that is about to compute its prompt; 0 in a hand-written loop.
        cache: Number of the cache that holds their keys and values already; 0 if they are embeddings, to be computed.
        slots: How many, in each row.
    """

    generation: int
    cache: int
    slots: int


#: The events that are passes, of which the hooks tell how many there were.
PASSES = (PassSeen, StepRan)

#: The fields of a `PassSeen` in their order: a plain tuple costs the hot path less to make.
RawPass = tuple[Any, ...]

Event = (
    PassSeen
    | GenerationBegan
    | PromptKnown
    | RowsEnded
    | GenerationEnded
    | ModelSeen
    | CacheGone
    | VirtualTokens
    | ExpertsChosen
    | EngineEvent
    | WorkerEvent
    | CoreEvent
)
