"""What the hook on a serving engine inside the process hands over: its requests and the steps that it packs them into.

They are settled by `phaseprof.settling.continuous`, in the order in which they came. Times are readings of the
monotonic clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from phaseprof.timers import Span


class RequestQueued(NamedTuple):
    """A scheduler of continuous batching has a request that was not seen before.

    Attributes:
        engine: Number of the scheduler.
        request: The id that the user or the library gave it.
        arrival_ns: Monotonic clock.
        prompt: Tokens that it came with.
        generated: Tokens that it had got before it was seen.
        max_output: Tokens that may be generated; None if not known.
        children: Requests that will be forked from it once its prompt is computed, all but its last token.
    """

    engine: int
    request: str
    arrival_ns: int
    prompt: int
    generated: int
    max_output: int | None
    children: int


class StepBegan(NamedTuple):
    """A scheduler of continuous batching is about to run the model. What the thread computes until `StepEnded` is this.

    Attributes:
        engine: Number of the scheduler.
        step: Number of the step in the process.
        thread_id: Native id of the thread.
        model_id: The model.
        cache: Number of the paged cache.
        requests: The id, the query and the past of each request in the step.
        slots: Slots of the packed row, padding included; None if not known. The pass tells, where it is seen.
        logits: Positions for which the head is computed; None likewise.
        graph: The step replays or captures a CUDA graph.
        dummy: It warms up, and computes nothing for a request.
        pool: The `PagedPool`, with the first step of the scheduler; else None.
    """

    engine: int
    step: int
    thread_id: int
    model_id: str
    cache: int
    requests: tuple[tuple[str, int, int], ...]
    slots: int | None
    logits: int | None
    graph: bool
    dummy: bool
    pool: Any


class StepEnded(NamedTuple):
    """A step has run, or raised. All but the error matters only where no pass was seen in it.

    Attributes:
        step: Its number.
        start_ns, end_ns: Of the computation, monotonic clock.
        span: Its device time; None without.
        compiled: A function around the model is compiled.
        compiling: Something was compiled, or a graph was captured.
        warmup: The caller declared it a warm-up.
        profiled: A costly collector ran.
        error: Class name of the exception that ended it.
    """

    step: int
    start_ns: int
    end_ns: int
    span: Span | None
    compiled: bool
    compiling: bool
    warmup: bool
    profiled: bool
    error: str | None


class StepTaken(NamedTuple):
    """The scheduler has taken the tokens of a step.

    Attributes:
        engine: Number of the scheduler.
        step: The step.
        at_ns: Monotonic clock.
        tokens: Tokens that each request of the step got.
        ended: Whether it ended with them.
    """

    engine: int
    step: int
    at_ns: int
    tokens: tuple[int, ...]
    ended: tuple[bool, ...]


class RequestDropped(NamedTuple):
    """A request of continuous batching was cancelled, or failed.

    Attributes:
        engine: Number of the scheduler.
        request: Its id.
        at_ns: Monotonic clock.
    """

    engine: int
    request: str
    at_ns: int


class EngineGone(NamedTuple):
    """A scheduler of continuous batching was freed.

    Attributes:
        engine: Its number.
        at_ns: Monotonic clock.
    """

    engine: int
    at_ns: int


EngineEvent = RequestQueued | StepBegan | StepEnded | StepTaken | RequestDropped | EngineGone
