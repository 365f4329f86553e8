"""How long a matrix product takes: tiles, waves of them, and the memory behind.

The library cuts the result into tiles, and may cut the inner dimension too. Of all ways in its menu the fastest is
taken. One way costs

    tile   = join(2 rows columns k / rate of a unit, (rows + columns) k bytes / load rate of a unit) + tile_s
    time   = fixed_s + join(waves x tile, bytes / bandwidth)

with bytes the inputs and the result once each, from memory: weights are cold, as they are in a model whose layers
follow each other. Few tiles leave units idle, which is why narrow matrices reach neither roof; the terms are those of
wave and tile quantization (NVIDIA, "Matrix Multiplication Background User's Guide", DU-09798-001).
"""

from __future__ import annotations

import math

from phaseprof.analyzers.efficiency.formulas import joined, waves
from phaseprof.analyzers.efficiency.parameters import GemmFit, Hardware, Tile
from phaseprof.work.ops import GemmShape

_RESULT_BYTES = 2
#: Partial sums are kept in 32 bits, written by one kernel and read by the next.
_PARTIAL_BYTES = 8
#: Less of the inner dimension is not worth a part of its own.
_SHORTEST_PART = 32
#: Blocks of the quantizing kernel that one multiprocessor works on at once.
_ROWS_A_UNIT = 2


def gemm_seconds(shape: GemmShape, fit: GemmFit, hardware: Hardware) -> float:
    """The time of one call.

    Args:
        shape: Of all groups together; weights may be narrower than the inputs.
        fit: Parameters of the dtype that is multiplied in.
        hardware: With the peak of that dtype.

    Returns:
        Seconds; never less than the FLOPs at the peak or the bytes at the peak bandwidth take.
    """
    moved = moved_bytes(shape, fit)
    memory_s = moved / (hardware.bytes_per_s * fit.bandwidth_share)
    stored = shape.weight_bytes / max(shape.n * shape.k, 1)
    best = math.inf
    for tile in fit.tiles:
        if tile.from_rows <= shape.m <= tile.to_rows:
            best = min(best, _tiled_s(shape, tile, stored, memory_s, fit, hardware))
    seconds = best + fit.fixed_s + _quantizing_s(shape, fit, hardware)
    floor_s = max(shape.flops / hardware.flops_per_s, moved / hardware.bytes_per_s)
    return max(seconds, floor_s)


def moved_bytes(shape: GemmShape, fit: GemmFit) -> float:
    """Weights as they are stored, inputs and results, once each."""
    inputs = shape.m * shape.k * fit.element_bytes
    results = shape.m * shape.n * _RESULT_BYTES
    return (shape.weight_bytes + inputs + results) * shape.groups


def _tiled_s(
    shape: GemmShape,
    tile: Tile,
    stored: float,
    memory_s: float,
    fit: GemmFit,
    hardware: Hardware,
) -> float:
    """The best way with tiles of one shape, without what every call costs."""
    rate = hardware.flops_per_s * fit.compute_share / hardware.units
    tiles = math.ceil(shape.m / tile.rows) * math.ceil(shape.n / tile.columns) * shape.groups
    best = math.inf
    for split in fit.splits:
        if split > 1 and tiles * split > 2 * hardware.units:
            break
        depth = max(shape.k / split, _SHORTEST_PART)
        computing = 2 * tile.rows * tile.columns * depth / rate
        loading = (tile.rows * fit.element_bytes + tile.columns * stored) * depth
        tile_s = fit.tile_s + joined(computing, loading / fit.load_bytes_per_s, fit.tile_overlap)
        busy = waves(tiles * split, hardware.units, fit.wave_rounding) * tile_s
        seconds = joined(busy, memory_s, fit.overlap)
        if split > 1:
            partial = split * shape.m * shape.n * shape.groups * _PARTIAL_BYTES
            seconds += fit.split_s + partial / fit.reduce_bytes_per_s
        best = min(best, seconds)
    return best


def _quantizing_s(shape: GemmShape, fit: GemmFit, hardware: Hardware) -> float:
    """The kernel before it, which brings the inputs to the narrow dtype, a row to a block."""
    if not fit.quantize_per_s:
        return 0.0
    at_once = _ROWS_A_UNIT * hardware.units
    rows = shape.m * shape.groups
    by_row = math.ceil(rows / at_once) * at_once * fit.quantize_row_s
    return joined(by_row, rows * shape.k / fit.quantize_per_s, 4)
