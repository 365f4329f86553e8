"""What the hooks on vLLM hand over: the steps that a worker runs, and what became known of each afterwards.

Hooks run on the engine's own threads. They keep references to what vLLM makes anew for each step and never changes,
copy what may change, and derive nothing: `phaseprof.settling.steps` does. Times are readings of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from phaseprof.timers import Span


class Sampled(NamedTuple):
    """The tokens that a step gave, once they are on the host.

    Attributes:
        requests: The engine's ids, in the order of the model runner, which is not the scheduler's.
        counts: Tokens that each got: 0 for a chunk of a prompt that is not its last.
        tokens: The tokens themselves, to see where a request stops; they are looked at and never stored. The scheduler
            may cut these lists, so the counts are taken before it sees them.
    """

    requests: Sequence[str]
    counts: Sequence[int]
    tokens: Sequence[Sequence[int]]


class StepRan(NamedTuple):
    """A worker has run a step of its engine: of more than no token, and no dummy or warm-up.

    Attributes:
        runner: Number of the model runner in this process; each engine has one in each of its workers.
        step: Number of the step in its engine, from 0: the same in every worker and in the scheduler.
        model_id: The model.
        thread_id: Native id of the thread.
        start_ns: `execute_model` was called.
        executed_ns: It returned.
        sample_ns: `sample_tokens` (or `pool`) was called; None where the step ended with `execute_model`.
        end_ns: The last call of the step returned.
        span: Device time from the first forward operation to the end of sampling; None without.
        scheduled: Tokens scheduled for each request, by its id.
        drafts: Of those, the drafted ones; None without speculation.
        new: The `NewRequestData` of requests that begin here; the V2 runner is sent resumed ones here as well.
        cached: The ids of the others, parallel with `computed`.
        computed: Their tokens in the cache before the step, as the scheduler believes: without the rejections that it
            does not know yet.
        outputs: Tokens that they have got, parallel with `cached`, by the same belief.
        resumed: Those of `cached` that come back after they were preempted.
        finished: Requests that ended since the last step.
        sampled: The tokens that it gave; None where they are not there yet (`fetched`), or where there are none.
        awaited: They come later, with a `StepFetched` or a `StepLost`.
        ends: How the step ends: ``sample``, ``pool`` (no token is sampled), or ``stage`` (a pipeline stage that is not
            the last, whose result goes to the next stage).
        padded: Slots that the model computed, padding of CUDA graphs included; None if not known.
        graph: It replayed one whole CUDA graph.
        compiled: The model is compiled.
        encodes: The model attends in both directions: its tokens are neither prefill nor decode.
        warmup: The caller declared it a warm-up.
        profiled: A costly collector ran.
        error: Class name of the exception that ended it.
        prompts: Tokens that the `new` ones came with: in one process with the scheduler, their lists may grow.
        tokens: Tokens that they have by now, output included; None of a V1 runner, which is not told.
    """

    runner: int
    step: int
    model_id: str
    thread_id: int
    start_ns: int
    executed_ns: int
    sample_ns: int | None
    end_ns: int
    span: Span | None
    scheduled: Mapping[str, int]
    drafts: Mapping[str, int] | None
    new: Sequence[Any]
    cached: Sequence[str]
    computed: Sequence[int]
    outputs: Sequence[int]
    resumed: AbstractSet[str]
    finished: AbstractSet[str]
    sampled: Sampled | None
    awaited: bool
    ends: str
    padded: int | None
    graph: bool
    compiled: bool
    encodes: bool
    warmup: bool
    profiled: bool
    error: str | None
    prompts: Sequence[int]
    tokens: Sequence[int] | None


class StepFetched(NamedTuple):
    """The output of a step that was awaited is on the host: asynchronous scheduling.

    Attributes:
        runner: Number of the model runner.
        step: The step.
        at_ns: When.
        sampled: Its tokens; None for a pooling model.
        error: Class name of the exception that fetching raised.
    """

    runner: int
    step: int
    at_ns: int
    sampled: Sampled | None
    error: str | None


class StepLost(NamedTuple):
    """Nobody fetched the output of a step before it was freed: only one of the tensor-parallel ranks is asked.

    Attributes:
        runner: Number of the model runner.
        step: The step.
    """

    runner: int
    step: int


class StepSkipped(NamedTuple):
    """A step of no token: it tells which requests ended.

    Attributes:
        runner: Number of the model runner.
        finished: Requests that ended since the last step.
    """

    runner: int
    finished: AbstractSet[str]


WorkerEvent = StepRan | StepFetched | StepLost | StepSkipped
