"""What the hooks on vLLM's scheduler hand over: requests that come and go, and the steps that it decides.

They are settled by `phaseprof.settling.engine`, in the order in which they came. As in `phaseprof.vllm.events`, hooks
keep references to what vLLM makes anew for each step and copy the rest. Times are readings of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple


class EngineSeen(NamedTuple):
    """A scheduler was seen for the first time.

    Attributes:
        engine: Its number in this process, from 1.
        model_id: What its workers are expected to call its model.
    """

    engine: int
    model_id: str


class RequestAdded(NamedTuple):
    """A scheduler was given a request, or (for a session whose input streams in) another turn of one that it has.

    Attributes:
        engine: Number of the scheduler.
        request: The engine's id.
        client_id: The id under which the client sent it; None if not known.
        arrival_s: When the frontend took it, Unix seconds by the frontend's clock.
        at_ns: When the scheduler was given it.
        prompt: Tokens that it came with.
        turn: It is another turn.
        resumable: Turns may follow.
        stops_on_text: It has stop strings, which only the frontend sees: it ends such a request as if it were aborted.
        generated: Tokens that it had got before it was seen.
        late: It was in the scheduler before it was seen.
    """

    engine: int
    request: str
    client_id: str | None
    arrival_s: float
    at_ns: int
    prompt: int
    turn: bool
    resumable: bool
    stops_on_text: bool
    generated: int
    late: bool


class StepScheduled(NamedTuple):
    """A scheduler has decided on a step of more than no token.

    Attributes:
        engine: Number of the scheduler.
        step: Number of the step, from 0: the same that the workers count.
        start_ns: It was asked.
        end_ns: It had decided.
        running, waiting: Requests that are being served, and that wait, after the decision.
        preempted: Requests that were preempted since the step before.
        tokens: Tokens of the step.
        kv_usage: Share of the KV cache's blocks in use after the decision; None if not known.
        scheduled: Tokens of each request, by its id.
        new: The `NewRequestData` of requests that begin here; the V2 runner is sent resumed ones here as well.
        prompts: Tokens of their prompts as they are now: another turn makes the list longer.
        cached: The ids of the others, parallel with `computed`.
        computed: Their tokens in the cache before the step.
        resumed: Those of `cached` that come back after they were preempted.
        warmup: The caller declared it a warm-up.
        profiled: A costly collector ran.
    """

    engine: int
    step: int
    start_ns: int
    end_ns: int
    running: int
    waiting: int
    preempted: int
    tokens: int
    kv_usage: float | None
    scheduled: Mapping[str, int]
    new: Sequence[Any]
    prompts: Sequence[int]
    cached: Sequence[str]
    computed: Sequence[int]
    resumed: AbstractSet[str]
    warmup: bool
    profiled: bool


class RequestEnd(NamedTuple):
    """A request got its last token, or (`over` is False) the last one of a turn.

    Attributes:
        request: Its id.
        reason: vLLM's name of the reason: ``STOP``, ``LENGTH``, ``ABORT``, ``ERROR``, ``REPETITION``.
        over: It is over; else it waits for another turn.
    """

    request: str
    reason: str
    over: bool


class StepUpdated(NamedTuple):
    """A scheduler has taken the output of a step and hands the tokens over.

    Attributes:
        engine: Number of the scheduler.
        step: The step; None for one of no token.
        start_ns: The output was there.
        end_ns: The tokens are handed over.
        requests: Those that got something.
        counts: Tokens that each got, as its client will see them: what comes after a stop token is cut.
        ended: Those that ended with it.
    """

    engine: int
    step: int | None
    start_ns: int
    end_ns: int
    requests: Sequence[str]
    counts: Sequence[int]
    ended: Sequence[RequestEnd]


class RequestPreempted(NamedTuple):
    """The cache of a running request was taken away, and it waits again.

    Attributes:
        engine: Number of the scheduler.
        request: Its id.
    """

    engine: int
    request: str


class RequestsDropped(NamedTuple):
    """Requests were ended from outside of the scheduler: by the client, by the frontend, or because something failed.

    Attributes:
        engine: Number of the scheduler.
        at_ns: When.
        requests: Which.
        by_text: Those of them in whose text the frontend has found a stop string.
    """

    engine: int
    at_ns: int
    requests: Sequence[str]
    by_text: AbstractSet[str]


class SchedulerGone(NamedTuple):
    """A scheduler was freed.

    Attributes:
        engine: Its number.
        at_ns: When.
    """

    engine: int
    at_ns: int


CoreEvent = (
    EngineSeen
    | RequestAdded
    | StepScheduled
    | StepUpdated
    | RequestPreempted
    | RequestsDropped
    | SchedulerGone
)
