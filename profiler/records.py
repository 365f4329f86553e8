"""What is recorded: one `ForwardPass` a pass, one `Request` a request.

Rows are immutable and know nothing of Arrow, torch or an engine. `phaseprof.schema` says how they are stored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from phaseprof.phases import Phase, Role, TagSource


class Warmup(enum.StrEnum):
    """Why a pass is kept out of the steady-state figures."""

    #: The user (or `phaseprof profile`) said so.
    REQUESTED = "requested"
    #: The first pass of its phase on this model in this process: caches are cold, memory is not allocated yet.
    FIRST = "first"
    #: Something was compiled during the pass.
    COMPILE = "compile"


class Finish(enum.StrEnum):
    """How a request ended."""

    #: The model ended it (an end-of-sequence token or a stop criterion).
    STOP = "stop"
    #: The limit of tokens was reached.
    LENGTH = "length"
    #: An exception, or the caller gave up.
    ABORT = "abort"
    #: A hand-written loop: nothing tells an end from a pause. Or a request with stop strings that was ended from
    #: outside its engine: by its frontend, which has found one, or because its client has left.
    UNKNOWN = "unknown"


class CallKind(enum.StrEnum):
    """Why `phaseprof profile` made a call."""

    #: To get ready: it does not count.
    WARMUP = "warmup"
    #: To be measured.
    COUNTED = "counted"
    #: To look at what runs, with a collector that slows it.
    LOOK = "look"


class Slice(NamedTuple):
    """The part of a pass that belongs to one sequence. Field names are those of the trace. A step of an engine has
    hundreds of them, hence no dataclass.

    Attributes:
        request_id: The request that the sequence belongs to.
        phase: The label of this part alone.
        query: Tokens computed (padding not counted).
        past: Tokens in the cache before the pass (padding not counted).
        prompt: Tokens that the request came with.
        cached: Tokens of the prompt that it found in the cache at this pass, computed for another request or call.
        recomputed: Those of `query` at positions that had been computed before.
        drafts: Those of `query` that are drafts under verification.
        accepted: Drafts that were accepted and kept; None if not known.
    """

    request_id: str
    phase: Phase
    query: int
    past: int
    prompt: int
    cached: int = 0
    recomputed: int = 0
    drafts: int = 0
    accepted: int | None = 0


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One call of a model. Its fields are the columns of the `passes` table; `phaseprof.schema` gives their meaning."""

    pass_id: int
    step: int
    model_id: str
    role: Role
    phase: Phase
    tag_source: TagSource
    start_ns: int
    end_ns: int
    host_ns: int
    device_ns: int | None
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    draft_tokens: int
    accepted_tokens: int | None
    cached_tokens: int
    recomputed_tokens: int
    padding_tokens: int | None
    context_tokens: int | None
    attention_pairs: int | None
    logits_tokens: int | None
    slices: tuple[Slice, ...]
    flops: int | None
    weight_bytes: int | None
    kv_read_bytes: int | None
    kv_write_bytes: int | None
    dtype: str
    thread_id: int
    kv_held_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    cache_copy_bytes: int | None = None
    experts_read: int | None = None
    warmup: Warmup | None = None
    compiled: bool = False
    graph: bool = False
    profiled: bool = False
    error: str | None = None
    #: Not a column: the row may be put again (it waits to be settled, or for its device time).
    may_change: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a row of the `requests` table. While it runs, `finish` and `finished_ns` are None."""

    request_id: str
    model_id: str
    arrival_ns: int
    queue_ns: int | None
    first_token_ns: int | None
    finished_ns: int | None
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ns: int | None
    tpot_ns: int | None
    itl_ns: tuple[int, ...]
    finish: Finish | None
    warmup: Warmup | None = None
    profiled: bool = False
    itl_steps: tuple[int, ...] | None = None
    client_id: str | None = None
    preemptions: int | None = None

    @property
    def may_change(self) -> bool:
        """A request that runs is put again when it ends."""
        return self.finish is None


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of a serving engine's scheduler: a row of the `steps` table."""

    engine: int
    step: int
    model_id: str
    start_ns: int
    schedule_ns: int
    execute_ns: int | None
    update_ns: int | None
    running: int
    waiting: int
    preempted: int
    scheduled_tokens: int
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, copy or (on a CPU) outermost operator: a row of the `kernels` table.

    `thread_id` is the host thread that ran or launched it; it is no column, and joins it to its pass, together with
    `launched_ns`.
    """

    name: str
    device: str
    start_ns: int
    end_ns: int
    source: str
    stream: int | None = None
    thread_id: int | None = None
    pass_id: int | None = None
    launched_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample window of a counter: a row of the `samples` table. `metric` is one of `phaseprof.metrics.Metric`."""

    start_ns: int
    end_ns: int
    device: str
    source: str
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the workload of `phaseprof profile`: a row of the `calls` table. Only those that ended are recorded.

    Attributes:
        kind: Why it was made.
        prompt_tokens, new_tokens: Of each of its sequences.
        sequences: How many at once.
        repeat: Its number among the calls of its kind and size, from 0.
        start_ns, end_ns: When it was made and when it returned, Unix ns: the passes in between are its own.
    """

    kind: CallKind
    prompt_tokens: int
    new_tokens: int
    sequences: int
    repeat: int
    start_ns: int
    end_ns: int
