"""What the analyses of a serving engine yield: its overhead, its load over time, whose prefills slowed whose tokens,
and how many requests met their objectives. Figures that are not known are None; shares are fractions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.analyzers.results import Percentiles


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine had to do in one stretch of the run; means over its steps.

    Attributes:
        start_ms: Begin of the stretch, from that of the first step.
        running: Requests that were being served.
        waiting: Requests that waited.
        kv_usage: Share of the KV cache in use; None if not known.
    """

    start_ms: float
    running: float
    waiting: float
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The steps of an engine's scheduler; of several engines (data parallelism) their sums.

    Attributes:
        engines: Engines.
        steps: Steps that count: no warm-up, no costly collector.
        busy_ms: Time in which there was a request to serve, from the first step to the last.
        overhead_share: Share of it in which no step executed: the scheduler, what surrounds it, and what lies between.
        schedule_ms: Time of a step to decide. update_ms: To hand the tokens over.
        execute_ms: From the decision until the output was there.
        between_ms: From the end of a step to the begin of the next, while a request was there; None without any.
        queue_ms: Time that requests waited until they were first run.
        running_p50, running_max, waiting_p50, waiting_max: Requests after each decision.
        kv_usage_p50, kv_usage_max: Share of the KV cache in use after each decision; None if not known.
        preemptions: Requests that were preempted, each as often as it was.
        over_time: The load in stretches of equal length.
    """

    engines: int
    steps: int
    busy_ms: float
    overhead_share: float
    schedule_ms: Percentiles
    update_ms: Percentiles | None
    execute_ms: Percentiles | None
    between_ms: Percentiles | None
    queue_ms: Percentiles | None
    running_p50: int
    running_max: int
    waiting_p50: int
    waiting_max: int
    kv_usage_p50: float | None
    kv_usage_max: float | None
    preemptions: int
    over_time: tuple[Load, ...]


class Cause(enum.StrEnum):
    """Why a token was slow."""

    #: Its step also computed the prompt of another request.
    PREFILL = "prefill"
    #: Steps ran in between that did not serve its request: it was preempted, or left out.
    HELD = "held back"


@dataclass(frozen=True, slots=True)
class SlowToken:
    """A token that came late, and the step that yielded it.

    Attributes:
        request_id: Of which request. client_id: The id that its client knows; None if not known.
        token: Which of its tokens, from 0.
        itl_ms: Its inter-token latency. typical_ms: That of a token from a step of decode alone.
        rank: Where. step: The step, as in the tables `passes` and `steps`.
        cause: Why.
        prefill_tokens: Prompt tokens of others that the step computed.
        by: The requests whose prompts they are, by the ids that clients know.
    """

    request_id: str
    client_id: str | None
    token: int
    itl_ms: float
    typical_ms: float
    rank: int
    step: int
    cause: Cause
    prefill_tokens: int
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestLoss:
    """Decode time that a request lost to the prefills of others.

    Attributes:
        request_id: Which. client_id: The id that its client knows; None if not known.
        tokens: Its tokens that came from such steps.
        lost_ms: What they took beyond the usual. share: That over all of its inter-token latencies.
    """

    request_id: str
    client_id: str | None
    tokens: int
    lost_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Interference:
    """What the steps that mix prefill with decode cost those that decode.

    Attributes:
        tokens: Tokens after the first of their request, without those that came together with another one.
        slowed: Those of them whose step also computed another request's prompt.
        typical_ms: Inter-token latency of a token from a step of decode alone (p50).
        slowed_ms: That of the slowed ones; None if there are none.
        lost_ms: What the slowed ones took beyond a token from a step of decode alone with about as many sequences,
            summed over the requests. lost_share: That over all inter-token latencies.
        requests: Requests that lost time.
        held: Tokens before which more steps than usual passed without their request. held_ms: Their latencies beyond
            the typical one, summed.
        worst: The requests that lost the most.
        slowest: The tokens that came latest, by cause.
    """

    tokens: int
    slowed: int
    typical_ms: float
    slowed_ms: Percentiles | None
    lost_ms: float
    lost_share: float
    requests: int
    held: int
    held_ms: float
    worst: tuple[RequestLoss, ...]
    slowest: tuple[SlowToken, ...]


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit that a request should keep.

    Attributes:
        metric: ``ttft``, ``tpot``, ``e2e`` or ``queue``.
        limit_ms: At most so long.
    """

    metric: str
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Met:
    """How many requests met one objective.

    Attributes:
        objective: Which.
        share: Of the requests counted.
    """

    objective: Objective
    share: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met all objectives.

    Attributes:
        requests: Requests counted: those that ended by themselves, without warm-up.
        good: Those of them that met every objective. share: Their share.
        per_s: Good requests a second, from the first arrival to the last end. tokens_per_s: Their output tokens.
        left_out: Requests that were aborted or have no end.
        each: The objectives one by one.
    """

    requests: int
    good: int
    share: float
    per_s: float | None
    tokens_per_s: float | None
    left_out: int
    each: tuple[Met, ...]
