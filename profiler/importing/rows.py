"""Steps with what ran for them, as rows of the `passes` table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from phaseprof.importing.forms import Step, StepWork
from phaseprof.importing.joining import StepKernels
from phaseprof.records import ForwardPass
from phaseprof.work.count import Work

#: Every imported recording is taken to be of one model: none of them names it in its steps.
MODEL_ID = "imported"


def pass_rows(
    steps: Sequence[Step],
    kernels: Mapping[int, StepKernels],
    *,
    pass_ids: Sequence[int],
    first_step: int,
    dtype: str,
    work_of: Callable[[StepWork], Work | None],
) -> Iterator[ForwardPass]:
    """One row a step.

    The whole recording was made under a profiler, which slows the host. Its passes are not flagged `profiled` for
    that: nothing else is known of them. Their time is that of their kernels (`device_ns`), which a profiler of launches
    and kernels hardly changes, wherever they have any.

    Args:
        steps: Of one rank, by begin.
        kernels: What ran for them, by their place.
        pass_ids: Their ids.
        first_step: The number of the first one.
        dtype: What the model computes in; empty if it is not known.
        work_of: Gives the work of a step; None where it cannot be told.
    """
    for place, (step, number) in enumerate(zip(steps, pass_ids, strict=True)):
        own = kernels.get(place, StepKernels())
        told, work = step.work, work_of(step.work)
        host_ns = max(step.end_ns - step.start_ns, 0)
        yield ForwardPass(
            pass_id=number,
            step=first_step + place,
            model_id=MODEL_ID,
            role=step.role,
            phase=told.phase,
            tag_source=step.tag_source,
            start_ns=step.start_ns,
            end_ns=step.start_ns + host_ns,
            host_ns=host_ns,
            device_ns=own.span_ns,
            sequences=(told.prefill_sequences or 0) + (told.decode_sequences or 0),
            prefill_tokens=told.prefill_tokens or 0,
            decode_tokens=told.decode_tokens or 0,
            draft_tokens=0,
            accepted_tokens=None,
            cached_tokens=0,
            recomputed_tokens=0,
            padding_tokens=None,
            context_tokens=told.context_tokens,
            attention_pairs=told.attention_pairs,
            logits_tokens=None,
            slices=(),
            flops=None if work is None else work.flops,
            weight_bytes=None if work is None else work.weight_bytes,
            kv_read_bytes=None if work is None else work.kv_read_bytes,
            kv_write_bytes=None if work is None else work.kv_write_bytes,
            dtype=dtype,
            thread_id=0 if step.thread_id is None else step.thread_id,
            graph=own.in_graphs > 0,
        )
