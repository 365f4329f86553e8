"""Fitting the parameters of one table: which are free, within which bounds, and what is minimized."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from efficiency_kit.search import minimum
from efficiency_kit.tables import AttentionPoint, GemmPoint
from phaseprof.analyzers.efficiency.attention import attention_seconds
from phaseprof.analyzers.efficiency.gemm import gemm_seconds
from phaseprof.analyzers.efficiency.parameters import AttentionFit, GemmFit, Hardware, Tile
from phaseprof.analyzers.efficiency.size_classes import attention_class

Fit = TypeVar("Fit", GemmFit, AttentionFit)
Point = TypeVar("Point", GemmPoint, AttentionPoint)

#: Bounds keep a parameter what it is called: no share above what a board was seen to sustain, no time below zero.
_SHARE = (0.3, 0.97)
_COMPUTE = (0.05, 0.95)
_SECONDS = (1e-8, 2e-5)
GEMM_BOUNDS: Mapping[str, tuple[float, float]] = {
    "compute_share": _COMPUTE,
    "bandwidth_share": _SHARE,
    "load_bytes_per_s": (1e10, 1e12),
    "tile_s": _SECONDS,
    "fixed_s": _SECONDS,
    "overlap": (1.0, 20.0),
    "tile_overlap": (1.0, 20.0),
    "wave_rounding": (0.02, 1.0),
    "split_s": _SECONDS,
    "reduce_bytes_per_s": (1e11, 2e13),
    "quantize_row_s": (1e-9, 1e-6),
    "quantize_per_s": (1e10, 1e13),
}
ATTENTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "bandwidth_share": _SHARE,
    "cache_bytes_per_s": (1e12, 1e13),
    "load_bytes_per_s": (1e10, 1e12),
    "tile_s": _SECONDS,
    "query_bytes_per_s": (1e9, 1e12),
    "window_s": _SECONDS,
    "fixed_s": _SECONDS,
    "overlap": (1.0, 20.0),
    "tile_overlap": (1.0, 20.0),
    "wave_rounding": (0.02, 1.0),
    "split_s": _SECONDS,
    "write_bytes_per_s": (1e10, 1e13),
    "write_token_s": (1e-11, 1e-7),
}
#: Errors below this do not pull: the tables repeat to a few percent.
_NOISE = 0.03

_BIG_TILES = (Tile(128, 128), Tile(128, 256), Tile(256, 128))
_SMALL_TILES = (Tile(64, 32), Tile(64, 64), Tile(128, 64), Tile(64, 128))
#: vLLM picks the tiles of its own FP8 kernels by the rows (csrc/quantization/w8a8/cutlass, sm90).
_BY_ROWS = (Tile(64, 64, 1, 64), Tile(64, 128, 65, 128), Tile(128, 128, 129))

CUBLAS_HOPPER = GemmFit(
    tiles=(Tile(64, 16), *_SMALL_TILES, *_BIG_TILES),
    splits=(1, 2, 4, 8, 16),
    element_bytes=2.0,
    compute_share=0.84,
    bandwidth_share=0.885,
    load_bytes_per_s=148e9,
    tile_s=0.63e-6,
    fixed_s=2.2e-6,
    overlap=2.4,
    tile_overlap=8.0,
    wave_rounding=0.05,
    split_s=2.4e-6,
    reduce_bytes_per_s=8e12,
)
CUBLAS_AMPERE = replace(
    CUBLAS_HOPPER,
    tiles=(*_SMALL_TILES, *_BIG_TILES),
    compute_share=0.94,
    bandwidth_share=0.86,
    load_bytes_per_s=67e9,
    tile_s=2.5e-6,
    fixed_s=1.2e-6,
    overlap=1.8,
    wave_rounding=0.95,
)
CUTLASS_FP8 = replace(
    CUBLAS_HOPPER,
    tiles=_BY_ROWS,
    splits=(1,),
    element_bytes=1.0,
    compute_share=0.72,
    bandwidth_share=0.83,
    load_bytes_per_s=500e9,
    tile_s=0.7e-6,
    fixed_s=3e-6,
    overlap=2.2,
    wave_rounding=0.95,
    split_s=0.0,
    reduce_bytes_per_s=0.0,
    quantize_row_s=7e-9,
    quantize_per_s=450e9,
)
PREFILL = AttentionFit(
    compute_share={64: 0.53, 128: 0.76, 192: 0.9, 256: 0.9, 512: 0.43},
    bandwidth_share=0.93,
    cache_bytes_per_s=3.7e12,
    load_bytes_per_s=100e9,
    tile_s=1.7e-6,
    query_bytes_per_s=57e9,
    window_s=0.1e-6,
    fixed_s=9.3e-6,
    overlap=1.2,
    tile_overlap=2.2,
    wave_rounding=0.8,
    split_s=15e-6,
    write_bytes_per_s=2.2e12,
    write_token_s=0.6e-9,
)
DECODE = replace(
    PREFILL,
    compute_share={64: 0.9, 128: 0.85, 192: 0.77, 256: 0.62},
    load_bytes_per_s=50e9,
    tile_s=1.1e-6,
    query_bytes_per_s=300e9,
    window_s=2.3e-6,
    fixed_s=9e-6,
    overlap=2.9,
    tile_overlap=10.0,
    split_s=2.5e-6,
    write_bytes_per_s=0.15e12,
    write_token_s=11e-9,
)


def fit_gemm(
    start: GemmFit,
    points: Sequence[GemmPoint],
    hardware: Hardware,
    *,
    free: Sequence[str],
    sample: int,
    evaluations: int,
) -> tuple[GemmFit, float]:
    """The parameters that fit a sample of the points best, and the loss."""
    return _fitted(
        start,
        [(name, *GEMM_BOUNDS[name]) for name in free],
        _sample(points, sample),
        lambda point, fit: gemm_seconds(point.shape, fit, hardware),
        evaluations,
    )


def fit_attention(
    start: AttentionFit,
    points: Sequence[AttentionPoint],
    hardware: Hardware,
    *,
    sample: int,
    evaluations: int,
) -> tuple[AttentionFit, float]:
    """As `fit_gemm`; the benchmark repeats its calls, so that small caches stay in the device's."""
    bounds = [(name, *limits) for name, limits in ATTENTION_BOUNDS.items()]
    bounds += [(f"compute_share {size}", *_COMPUTE) for size in start.compute_share]
    return _fitted(
        start,
        bounds,
        _by_times(points, sample),
        lambda point, fit: attention_seconds(point.shape, fit, hardware, resident=True),
        evaluations,
    )


def _sample(points: Sequence[Point], size: int) -> list[Point]:
    return random.Random(7).sample(points, min(size, len(points)))


def _by_times(points: Sequence[AttentionPoint], size: int) -> list[AttentionPoint]:
    """As many points of each class of times, as far as there are: most of a table are calls that only cost their start,
    and what costs a user most are the long ones."""
    classes: dict[str, list[AttentionPoint]] = defaultdict(list)
    for point in points:
        classes[attention_class(point.seconds)].append(point)
    each = size // len(classes)
    return [point for name in sorted(classes) for point in _sample(classes[name], each)]


def _fitted(
    start: Fit,
    bounds: Sequence[tuple[str, float, float]],
    points: Sequence[Point],
    seconds: Callable[[Point, Fit], float],
    evaluations: int,
) -> tuple[Fit, float]:
    def fit_of(logs: Sequence[float]) -> Fit:
        values = {
            name: min(max(math.exp(value), low), high)
            for (name, low, high), value in zip(bounds, logs, strict=True)
        }
        return _with(start, values)

    def loss(logs: Sequence[float]) -> float:
        fit = fit_of(logs)
        errors = (math.log(seconds(point, fit) / point.seconds) for point in points)
        return sum(math.hypot(error, _NOISE) for error in errors) / len(points)

    logs = [math.log(_value(start, name)) for name, _, _ in bounds]
    value = math.inf
    for step, share in ((0.25, 0.6), (0.1, 0.4)):
        logs, value = minimum(loss, logs, step=step, evaluations=round(evaluations * share))
    return _rounded(fit_of(logs)), value


def _value(fit: GemmFit | AttentionFit, name: str) -> float:
    field, _, size = name.partition(" ")
    value: Any = getattr(fit, field)
    return float(value[int(size)] if size else value)


def _with(fit: Fit, values: Mapping[str, float]) -> Fit:
    plain: dict[str, Any] = {name: value for name, value in values.items() if " " not in name}
    if isinstance(fit, AttentionFit):
        plain["compute_share"] = {
            size: values[f"compute_share {size}"] for size in fit.compute_share
        }
    return replace(fit, **plain)


def _rounded(fit: Fit) -> Fit:
    """To three digits, before any error is taken: what is written down is what was judged."""
    names = GEMM_BOUNDS if isinstance(fit, GemmFit) else ATTENTION_BOUNDS
    changed: dict[str, Any] = {name: float(f"{getattr(fit, name):.3g}") for name in names}
    if isinstance(fit, AttentionFit):
        changed["compute_share"] = {
            size: float(f"{share:.3g}") for size, share in fit.compute_share.items()
        }
    return replace(fit, **changed)
