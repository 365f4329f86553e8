"""Fits the efficiency model to measured operations, and judges it on the half that the fit did not see.

    python benchmarks/efficiency_fit.py ../shared/measured -o benchmarks/results/efficiency_fit.json --write

The folder holds tables of ai-dynamo/aiconfigurator (Apache-2.0): products and attention under vLLM on an H100 SXM,
products on an A100 SXM. `--write` rewrites analyzers/efficiency/fitted.py. One core, some minutes; no other packages.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from efficiency_kit import excerpt, fitting, writing
from efficiency_kit.errors import Judged, by, coverage, held, spreads, summary
from efficiency_kit.tables import (
    AttentionPoint,
    GemmPoint,
    Part,
    attention_points,
    gemm_points,
)

from phaseprof.analyzers.efficiency import attention as attention_model
from phaseprof.analyzers.efficiency import gemm as gemm_model
from phaseprof.analyzers.efficiency.formulas import joined
from phaseprof.analyzers.efficiency.parameters import (
    FittedAttention,
    FittedGemm,
    FittedGpu,
    GemmFit,
    Hardware,
    Spread,
)
from phaseprof.analyzers.efficiency.size_classes import (
    ALL,
    attention_class,
    attention_spread,
    gemm_class,
    gemm_spread,
    row_band,
)

FITTED = Path(__file__).parents[1] / "analyzers" / "efficiency" / "fitted.py"
COMMAND = (
    "python benchmarks/efficiency_fit.py ../shared/measured"
    " -o benchmarks/results/efficiency_fit.json --write"
)
#: Dense datasheet peaks (16-bit) and bandwidths; L2 from NVIDIA's architecture papers.
H100 = Hardware(units=132, flops_per_s=989e12, bytes_per_s=3.35e12, cache_bytes=50 * 2**20)
A100 = Hardware(units=108, flops_per_s=312e12, bytes_per_s=2.04e12, cache_bytes=40 * 2**20)
FP8_PEAK = 1979e12

_SPLIT = ("split_s", "reduce_bytes_per_s")
_QUANTIZE = ("quantize_row_s", "quantize_per_s")
_COMMON = tuple(name for name in fitting.GEMM_BOUNDS if name not in (*_SPLIT, *_QUANTIZE))
#: From here on a block-scaled product's own time, not the host's, is what was measured.
_ABOVE_HOST = 1.5


@dataclass(frozen=True, slots=True)
class GemmTable:
    """One dtype of one table of products, and where its fit starts."""

    file: str
    dtype: str
    weight_bytes: int
    hardware: Hardware
    start: GemmFit
    free: tuple[str, ...]


GEMM_TABLES: Mapping[tuple[str, str], GemmTable] = {
    ("h100", "bfloat16"): GemmTable(
        "h100-gemm.parquet", "bfloat16", 2, H100, fitting.CUBLAS_HOPPER, (*_COMMON, *_SPLIT)
    ),
    ("h100", "float8_e4m3fn"): GemmTable(
        "h100-gemm.parquet",
        "fp8",
        1,
        replace(H100, flops_per_s=FP8_PEAK),
        fitting.CUTLASS_FP8,
        (*_COMMON, *_QUANTIZE),
    ),
    ("a100", "bfloat16"): GemmTable(
        "a100-gemm.parquet", "bfloat16", 2, A100, fitting.CUBLAS_AMPERE, (*_COMMON, *_SPLIT)
    ),
}
BLOCK = GemmTable(
    "h100-gemm.parquet",
    "fp8_block",
    1,
    replace(H100, flops_per_s=FP8_PEAK),
    fitting.CUTLASS_FP8,
    tuple(name for name in (*_COMMON, *_QUANTIZE) if name != "fixed_s"),
)
KV = {2: "bfloat16", 1: "fp8"}
PHASES = {
    "prefill": ("h100-context-attention.parquet", fitting.PREFILL),
    "decode": ("h100-generation-attention.parquet", fitting.DECODE),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, help="folder of the tables")
    parser.add_argument("-o", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--write", action="store_true", help="rewrite the fitted module")
    parser.add_argument("--sample", type=int, default=1200, help="points that a fit looks at")
    parser.add_argument("--evaluations", type=int, default=1200, help="about, for each table")
    parser.add_argument("--excerpt", type=Path, help="write points for the tests there instead")
    given = parser.parse_args()
    if given.excerpt:
        excerpt.write(given.excerpt, _excerpts(given.measured), each=40)
        return 0
    began = time.monotonic()
    effort = {"sample": given.sample, "evaluations": given.evaluations}
    result: dict[str, Any] = {
        "command": COMMAND,
        "python": platform.python_version(),
        "data": "ai-dynamo/aiconfigurator, Apache-2.0: vLLM 0.24.0 on H100 SXM, 0.14.0 on A100",
        "split": "GEMM by (n, k), attention by (heads, kv heads, head_dim)",
        **effort,
    }
    gemms, judged_gemms = {}, {}
    for (gpu, dtype), table in GEMM_TABLES.items():
        points = gemm_points(given.measured / table.file, table.dtype, table.weight_bytes)
        fit, judged = _gemm(table, points, effort)
        gemms[gpu, dtype], judged_gemms[gpu, dtype] = fit, judged
        result[f"{gpu} gemm {dtype}"] = _gemm_result(fit, judged)
        _say(f"{gpu} gemm {dtype}", result[f"{gpu} gemm {dtype}"], began)
    block, result["h100 gemm float8_block"] = _block(
        given.measured, gemms["h100", "float8_e4m3fn"].fit, effort
    )
    gemms["h100", "float8_block"] = block
    _say("h100 gemm float8_block", result["h100 gemm float8_block"], began)
    attentions: dict[str, dict[int, FittedAttention]] = {}
    for phase, (file, start) in PHASES.items():
        attentions[phase] = {}
        for size, name in KV.items():
            fitted, found = _attention(
                attention_points(given.measured / file, name, size), start, effort
            )
            attentions[phase][size] = fitted
            result[f"h100 {phase} attention, {name} KV"] = found
            _say(f"{phase} {name}", found, began)
    scaled, result["scaled"] = _scaled(gemms, judged_gemms)
    result["seconds"] = round(time.monotonic() - began)
    gpus = {
        "H100_SXM": FittedGpu(
            board="H100 SXM",
            hardware=H100,
            gemm={dtype: fit for (gpu, dtype), fit in gemms.items() if gpu == "h100"},
            prefill=attentions["prefill"],
            decode=attentions["decode"],
            source="products and attention under vLLM 0.24.0, aiconfigurator",
        ),
        "A100_SXM": FittedGpu(
            board="A100 SXM 80 GB",
            hardware=A100,
            gemm={dtype: fit for (gpu, dtype), fit in gemms.items() if gpu == "a100"},
            prefill={},
            decode={},
            source="products under vLLM 0.14.0, aiconfigurator",
        ),
    }
    if given.o:
        given.o.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if given.write:
        writing.write(FITTED, gpus, scaled, COMMAND)
        if shutil.which("ruff"):
            subprocess.run(["ruff", "format", "--quiet", str(FITTED)], check=True)
    return 0


def _excerpts(measured: Path) -> list[excerpt.Excerpt]:
    tables = []
    for (gpu, dtype), table in GEMM_TABLES.items():
        points = gemm_points(measured / table.file, table.dtype, table.weight_bytes)
        tables.append(excerpt.Excerpt(gpu, "gemm", dtype, points))
    for phase, (file, start) in PHASES.items():
        for size, name in KV.items():
            known = [
                point
                for point in attention_points(measured / file, name, size)
                if point.shape.qk_head_dim in start.compute_share
            ]
            tables.append(excerpt.Excerpt("h100", phase, name, known))
    return tables


def _say(name: str, found: Mapping[str, Any], began: float) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {name}: {found['held']}", file=sys.stderr)


def _gemm(
    table: GemmTable, points: Sequence[GemmPoint], effort: Mapping[str, int]
) -> tuple[FittedGemm, list[Judged[GemmPoint]]]:
    seen = [point for point in points if point.part is Part.FIT]
    fit, _ = fitting.fit_gemm(table.start, seen, table.hardware, free=table.free, **effort)
    judged = [
        Judged(point, gemm_model.gemm_seconds(point.shape, fit, table.hardware)) for point in points
    ]
    found = spreads(judged, _gemm_names)
    return FittedGemm(fit, table.hardware.flops_per_s, found), judged


def _gemm_names(each: Judged[GemmPoint]) -> tuple[str, ...]:
    rows = each.point.shape.m
    return gemm_class(rows, each.modelled_s), row_band(rows), ALL


def _gemm_result(fitted: FittedGemm, judged: Sequence[Judged[GemmPoint]]) -> dict[str, Any]:
    apart = held(judged)
    return {
        "points": len(judged),
        "fitted half": summary([each for each in judged if each.point.part is Part.FIT]),
        "held": {
            "m < 16": summary([each for each in apart if each.point.shape.m < 16]),
            "m >= 16": summary([each for each in apart if each.point.shape.m >= 16]),
        },
        "by class": _stated(fitted.spreads),
        "inside the 90 % interval": coverage(
            judged,
            lambda each: gemm_spread(fitted.spreads, each.point.shape.m, each.modelled_s),
            lambda each: gemm_class(each.point.shape.m, each.modelled_s),
        ),
        "by m": by(apart, lambda each: _band("m", each.point.shape.m, _ROWS)),
        "by weights": by(
            apart, lambda each: _band("MB", each.point.shape.weight_bytes / 1e6, _MEGABYTES)
        ),
        "by FLOPs": by(apart, lambda each: _band("GFLOP", each.point.shape.flops / 1e9, _GFLOPS)),
        "parameters": _parameters(fitted.fit),
    }


_ROWS = (1, 8, 16, 33, 65, 129, 257, 513, 1025, 2049, 4097)
_MEGABYTES = (0, 1, 8, 32, 128, 512)
_GFLOPS = (0, 0.1, 1, 10, 100, 1000, 10000)
_LENGTHS = (0, 2, 33, 129, 513, 2049, 8193, 32769)
_SEQUENCES = (1, 2, 8, 32, 128, 512)


def _band(unit: str, value: float, bounds: Sequence[float]) -> str:
    low = max(bound for bound in bounds if bound <= value)
    later = [bound for bound in bounds if bound > value]
    return f"{unit} {low:g} to below {later[0]:g}" if later else f"{unit} from {low:g}"


def _stated(found: Mapping[str, Spread]) -> dict[str, Any]:
    return {name: asdict(spread) for name, spread in found.items()}


def _parameters(fit: Any) -> dict[str, Any]:
    kept: dict[str, Any] = asdict(fit)
    if "tiles" in kept:
        kept["tiles"] = [f"{tile['rows']}x{tile['columns']}" for tile in kept["tiles"]]
    return kept


def _block(
    measured: Path, narrow: GemmFit, effort: Mapping[str, int]
) -> tuple[FittedGemm, dict[str, Any]]:
    """Block-scaled products: small ones take the same time whatever their size, which is the host's by all signs. Its
    floor is taken from the table, by kernel, and left out of the model; the kernel that serves shapes that blocks do
    not fit is left out altogether."""
    points = [
        point
        for point in gemm_points(measured / BLOCK.file, BLOCK.dtype, BLOCK.weight_bytes)
        if point.kernel != "CutlassFp8BlockScaledMMKernel"
    ]
    seen = [point for point in points if point.part is Part.FIT]
    host: dict[str, float] = {}
    for kernel in {point.kernel for point in points}:
        tiny = [p.seconds for p in seen if p.kernel == kernel and p.shape.flops < 1e9]
        host[kernel] = statistics.median(tiny)
    seen = [point for point in seen if point.seconds > _ABOVE_HOST * host[point.kernel]]
    start = replace(BLOCK.start, fixed_s=narrow.fixed_s, compute_share=0.7)
    fit, _ = fitting.fit_gemm(start, seen, BLOCK.hardware, free=BLOCK.free, **effort)
    judged = []
    for point in points:
        seconds = gemm_model.gemm_seconds(point.shape, fit, BLOCK.hardware)
        judged.append(Judged(point, joined(seconds, host[point.kernel], 8)))
    own = [each for each in judged if each.modelled_s > _ABOVE_HOST * host[each.point.kernel]]
    fitted = FittedGemm(fit, FP8_PEAK, spreads(own, _gemm_names))
    result = _gemm_result(fitted, judged)
    result["host_floor_s"] = {kernel: float(f"{host[kernel]:.3g}") for kernel in sorted(host)}
    result["held above the host's floor"] = summary(held(own))
    result["inside the 90 % interval"] = coverage(
        own,
        lambda each: gemm_spread(fitted.spreads, each.point.shape.m, each.modelled_s),
        lambda each: gemm_class(each.point.shape.m, each.modelled_s),
    )
    return fitted, result


def _attention(
    points: Sequence[AttentionPoint], start: Any, effort: Mapping[str, int]
) -> tuple[FittedAttention, dict[str, Any]]:
    sizes = {point.shape.qk_head_dim for point in points}
    known = {size: share for size, share in start.compute_share.items() if size in sizes}
    start = replace(start, compute_share=known)
    covered = [point for point in points if point.shape.qk_head_dim in known]
    seen = [point for point in covered if point.part is Part.FIT]
    fit, _ = fitting.fit_attention(start, seen, H100, **effort)
    judged = [
        Judged(point, attention_model.attention_seconds(point.shape, fit, H100, resident=True))
        for point in covered
    ]
    found = spreads(judged, lambda each: (attention_class(each.modelled_s), ALL))
    apart = held(judged)

    def banded(
        unit: str, value: Callable[[AttentionPoint], float], bounds: Sequence[float]
    ) -> dict[str, Any]:
        return by(apart, lambda each: _band(unit, value(each.point), bounds))

    result = {
        "points": len(judged),
        "fitted half": summary([each for each in judged if each.point.part is Part.FIT]),
        "held": summary(apart),
        "left out": {"head_dim 512 of decode (FlashAttention 4)": len(points) - len(covered)},
        "by class": _stated(found),
        "inside the 90 % interval": coverage(
            judged,
            lambda each: attention_spread(found, each.modelled_s),
            lambda each: attention_class(each.modelled_s),
        ),
        "by query": banded("query", lambda p: p.shape.rows[0].query, _LENGTHS),
        "by past": banded("past", lambda p: p.shape.rows[0].past, _LENGTHS),
        "by batch": banded("batch", lambda p: p.shape.rows[0].sequences, _SEQUENCES),
        "by head_dim": by(apart, lambda each: str(each.point.shape.qk_head_dim)),
        "by window": by(apart, lambda each: str(each.point.shape.window_tokens)),
        "parameters": _parameters(fit),
    }
    return FittedAttention(fit, found), result


def _scaled(
    gemms: Mapping[tuple[str, str], FittedGemm],
    tables: Mapping[tuple[str, str], Sequence[Judged[GemmPoint]]],
) -> tuple[dict[str, Spread], dict[str, Any]]:
    """What scaling is worth: the held points of each GPU by the parameters of the other."""
    judged = []
    for gpu, other in (("h100", "a100"), ("a100", "h100")):
        hardware = GEMM_TABLES[gpu, "bfloat16"].hardware
        fit = gemms[other, "bfloat16"].fit
        for each in tables[gpu, "bfloat16"]:
            seconds = gemm_model.gemm_seconds(each.point.shape, fit, hardware)
            judged.append(Judged(each.point, seconds))
    found = spreads(judged, _gemm_names)
    return found, {"held": summary(held(judged)), "by class": _stated(found)}


if __name__ == "__main__":
    raise SystemExit(main())
