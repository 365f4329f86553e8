"""What-if held against operations that were measured both ways: in 16 bits and in FP8, of few rows and of more, on an
A100 and on an H100.

    python benchmarks/what_if_changes.py ../shared/measured -o benchmarks/results/what_if_changes.json

The folder holds tables of ai-dynamo/aiconfigurator (Apache-2.0). Each operation is taken for a step of its own, changed
by `phaseprof.analyzers.what_if`, and compared with the one that was measured so. Half a minute; no other packages.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficiency_kit.tables import Part as Half
from efficiency_kit.tables import attention_points, gemm_points, part_of

from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.what_if.after import step_after
from phaseprof.analyzers.what_if.changes import Hardware, KvFormat, Setting, WeightFormat
from phaseprof.analyzers.what_if.conversions import Case
from phaseprof.analyzers.what_if.measured import Measured, Part, PartKind, PhaseStep
from phaseprof.collectors.datasheet import DATASHEET
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost

#: Smaller matrices lie in the cache of the device when they are measured again and again, in a model they do not.
LEAST_ELEMENTS = 12_000_000
#: From one device to another only matrices that no cache holds.
LEAST_ELEMENTS_ELSEWHERE = 30_000_000
#: Bytes of keys and values of a layer from which on their format matters.
LEAST_KV_BYTES = 2_000_000
ROWS = ((1, 15), (16, 255), (256, 10**9))


@dataclass(frozen=True, slots=True)
class Pair:
    """An operation as it was, as it should be afterwards, and how it was judged.

    Attributes:
        group: What it is reported with.
        held: Whether it is in the half that `efficiency_fit` holds back.
        seconds: As measured after the change. likely, low, high: As what-if says.
    """

    group: str
    held: bool
    seconds: float
    likely: float
    low: float
    high: float


def hardware(board: str) -> Hardware:
    """A board by its datasheet."""
    row = next(row for row in DATASHEET if row.board == board)
    sheet = {
        dtype: Ceilings(
            board, dtype, tflops * 1e12, row.tb_per_s * 1e12, "datasheet", None, None, board
        )
        for dtype, tflops in row.tflops.items()
    }
    return Hardware(board, "cuda", None, sheet, sheet, board)


H100, A100 = hardware("H100 SXM"), hardware("A100 SXM 80 GB")


def judged(
    group: str,
    held: bool,
    part: Part,
    cost: ModelCost,
    before_s: float,
    after_s: float,
    setting: Setting,
    *,
    tokens: float,
    device: Hardware = H100,
) -> Pair:
    """One operation as a step, under a setting."""
    step = PhaseStep(
        phase=Phase.DECODE,
        passes=1,
        step_s=before_s,
        between_s=0.0,
        idle_s=0.0,
        comm_s=0.0,
        sequences=tokens,
        prefill_tokens=0.0,
        decode_tokens=tokens,
        parts=(part,),
        bound=Bound.BANDWIDTH,
    )
    measured = Measured(
        steps=(step,),
        ttft_ms=None,
        tpot_ms=before_s * 1e3,
        queue_ms=0.0,
        prompt_tokens=0.0,
        basis=Basis(cost=cost, ceilings=device.sheet["bfloat16"], device_kind="cuda"),
        hardware=device,
        dtype="bfloat16",
        engine="vllm",
    )
    likely, *ends = (step_after(measured, setting, step, case).device_s for case in Case)
    return Pair(group, held, after_s, likely, min(likely, *ends), max(likely, *ends))


def cost_of(n: int, k: int, *, heads: tuple[int, int, int] | None = None) -> ModelCost:
    """A model of one product, or of one layer of attention."""
    attention: tuple[AttentionCost, ...] = ()
    if heads is not None:
        queries, keys, size = heads
        attention = (AttentionCost(1, queries, keys, size, size, None, 4 * keys * size),)
    return ModelCost(
        linear_flops_per_token=2 * n * k,
        head_flops_per_token=0,
        attention=attention,
        body_weight_bytes=2 * n * k,
        head_weight_bytes=0,
        lookup_bytes_per_token=0,
        parameter_bytes=2 * n * k,
        parameters=n * k,
        dtype="bfloat16",
        stored=(("bfloat16", 2 * n * k),),
        matmuls=(MatmulCost("down", 1, k, n, 2 * n * k),),
        hidden_size=k,
    )


Products = dict[tuple[int, int, int], float]


def products(file: Path, dtype: str, weight_bytes: int) -> Products:
    """The fastest kernel of each shape, m, n and k."""
    found: Products = {}
    for point in gemm_points(file, dtype, weight_bytes):
        key = point.shape.m, point.shape.n, point.shape.k
        found[key] = min(found.get(key, point.seconds), point.seconds)
    return found


def of_products(
    before: Products,
    after: Products,
    setting: Callable[[int], Setting],
    name: str,
    *,
    times: int = 1,
    device: Hardware = H100,
    least: int = LEAST_ELEMENTS,
) -> Iterator[Pair]:
    """Products of one table against those of another, of so many times the rows."""
    for (m, n, k), seconds in before.items():
        then = after.get((m * times, n, k))
        if then is None or n * k < least:
            continue
        low, high = next(rows for rows in ROWS if rows[0] <= m <= rows[1])
        group = f"{name}, {f'{low} to {high}' if high < 10**9 else f'from {low}'} rows"
        part = Part(PartKind.MATRICES, 2.0 * m * n * k, 2.0 * n * k)
        held = part_of(n, k) is not Half.FIT
        yield judged(
            group, held, part, cost_of(n, k), seconds, then, setting(m), tokens=m, device=device
        )


def of_attention(folder: Path) -> Iterator[Pair]:
    """Decode attention over keys and values in 16 and in 8 bits."""
    file = folder / "h100-generation-attention.parquet"
    wide, narrow = (
        {
            (p.shape.rows, p.shape.query_heads, p.shape.kv_heads, p.shape.qk_head_dim): p.seconds
            for p in attention_points(file, name, width)
            if p.shape.window_tokens is None
        }
        for name, width in (("bfloat16", 2), ("fp8", 1))
    )
    for (rows, queries, keys, size), seconds in wide.items():
        then = narrow.get((rows, queries, keys, size))
        held = sum((row.past + row.query) * row.sequences for row in rows)
        kv = 4.0 * held * keys * size
        if then is None or kv < LEAST_KV_BYTES:
            continue
        part = Part(PartKind.ATTENTION, 4.0 * held * queries * size, 0.0, kv)
        group = "FP8 keys and values, " + (
            "under 100 MB a layer" if kv < 1e8 else "from 100 MB a layer"
        )
        yield judged(
            group,
            part_of(queries, keys, size) is not Half.FIT,
            part,
            cost_of(1, 1, heads=(queries, keys, size)),
            seconds,
            then,
            Setting(kv=KvFormat.FP8),
            tokens=sum(row.sequences for row in rows),
        )


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Errors of the likely figure, and how often the measured one lies in the interval."""
    errors = [abs(pair.likely / pair.seconds - 1) for pair in pairs]
    return {
        "pairs": len(pairs),
        "median_error": round(statistics.median(errors), 3),
        "p90_error": round(sorted(errors)[int(0.9 * len(errors))], 3),
        "within_interval": round(
            sum(pair.low <= pair.seconds <= pair.high for pair in pairs) / len(pairs), 3
        ),
        "interval_width": round(
            statistics.median((pair.high - pair.low) / pair.likely for pair in pairs), 2
        ),
    }


def main() -> None:
    """Judge, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    bf16 = products(folder / "h100-gemm.parquet", "bfloat16", 2)
    fp8 = products(folder / "h100-gemm.parquet", "fp8", 1)
    ampere = products(folder / "a100-gemm.parquet", "bfloat16", 2)
    pairs = [
        *of_products(bf16, fp8, lambda m: Setting(weights=WeightFormat.FP8), "FP8 products"),
        *of_attention(folder),
    ]
    for times in (2, 8):
        pairs += of_products(
            bf16,
            bf16,
            lambda m, times=times: Setting(sequences=m * times),  # type: ignore[misc]
            f"{times} times the rows",
            times=times,
        )
    pairs += of_products(
        ampere,
        bf16,
        lambda m: Setting(device=H100),
        "A100 to H100",
        device=A100,
        least=LEAST_ELEMENTS_ELSEWHERE,
    )
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    result = {
        "command": "python benchmarks/what_if_changes.py ../shared/measured -o benchmarks/results/what_if_changes.json",
        "python": platform.python_version(),
        "groups": {
            name: {
                "all": summary(found),
                "held": summary([pair for pair in found if pair.held] or found),
            }
            for name, found in groups.items()
        },
    }
    for name, found in groups.items():
        figures = summary(found)
        print(f"{name:<45}", *(f"{key} {value}" for key, value in figures.items()), sep="  ")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
