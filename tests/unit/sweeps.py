"""Traces of sweeps built in memory: every step takes what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from traces import META, MS, Timeline

from phaseprof.records import Call, CallKind
from phaseprof.schema import CALLS
from phaseprof.trace.columns import to_column
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import Trace
from phaseprof.trace.writer import to_arrow

Cell = tuple[int, int, int]
#: What one decode step of a cell takes in a repeat, in ms: called with cell, repeat and the number of the step.
Steps = Callable[[Cell, int, int], float]
Prefills = Callable[[Cell, int], float]


def sweep_trace(
    cells: Sequence[Cell],
    step_ms: Steps,
    prefill_ms: Prefills,
    *,
    repeats: int = 5,
    kinds: Sequence[CallKind] = (CallKind.WARMUP, CallKind.COUNTED),
    meta: ProcessMeta = META,
    **columns: Any,
) -> Trace:
    """A trace in which each call is a prefill pass and the steps of its output, with 3 ms between calls.

    Args:
        cells: Prompt tokens, new tokens, batch.
        step_ms, prefill_ms: What passes take.
        repeats: Counted calls of each cell, in rounds.
        kinds: Which calls are made, one warm-up of each cell.
        meta: Of the process; its workload becomes that of the cells.
        **columns: Set in every decode pass.
    """
    timeline = Timeline()
    calls: list[Call] = []

    def call(kind: CallKind, cell: Cell, repeat: int) -> None:
        prompt, new, batch = cell
        warmup = "requested" if kind is CallKind.WARMUP else None
        name = f"r{len(calls)}"
        begun = timeline.now_ns
        timeline.now_ns += MS // 2
        tokens = batch * prompt
        took = prefill_ms(cell, repeat)
        timeline.add(
            "prefill",
            took,
            gflop=0.1 * tokens,
            gb=0.2,
            tokens=tokens,
            sequences=batch,
            request=name,
            warmup=warmup,
        )
        first_token = timeline.now_ns
        steps = [step_ms(cell, repeat, number) for number in range(new - 1)]
        for ms in steps:
            timeline.add(
                "decode",
                ms,
                gflop=0.1 * batch,
                gb=0.2,
                tokens=batch,
                sequences=batch,
                request=name,
                past=prompt,
                warmup=warmup,
                **columns,
            )
        for row in range(batch):
            timeline.request(
                f"{name}.{row}",
                arrival_ns=begun,
                first_token_ns=first_token,
                ttft_ns=first_token - begun,
                tpot_ns=round(sum(steps) / len(steps) * MS) if steps else None,
                prompt_tokens=prompt,
                output_tokens=new,
                warmup=warmup,
            )
        calls.append(Call(kind, prompt, new, batch, repeat, begun, timeline.now_ns))
        timeline.now_ns += 3 * MS

    if CallKind.WARMUP in kinds:
        for cell in cells:
            call(CallKind.WARMUP, cell, 0)
    for repeat in range(repeats):
        for cell in cells:
            call(CallKind.COUNTED, cell, repeat)
    workload = {
        "prompt_tokens": sorted({cell[0] for cell in cells}),
        "new_tokens": sorted({cell[1] for cell in cells}),
        "batch": sorted({cell[2] for cell in cells}),
        "repeats": repeats,
    }
    trace = timeline.trace(replace(meta, workload=workload))
    table = to_arrow(calls, CALLS.arrow)
    ranks = to_column([0] * len(calls), CALLS.arrow.field("repeat").type)
    return replace(trace, calls=table.append_column("rank", ranks))


def grid(prompts: Sequence[int], news: Sequence[int], batches: Sequence[int]) -> list[Cell]:
    """Every combination."""
    return [(p, n, b) for p in prompts for n in news for b in batches]
