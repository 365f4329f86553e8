"""How long fused attention takes: tiles of queries that walk along keys and values.

FlashAttention (Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608) gives each tile of queries of a key-value head to
one multiprocessor, packs the query heads of a group into the tile, and walks over the keys in blocks. One tile costs

    tile = tile_s + query bytes / rate + blocks x join(block FLOPs / rate of a unit, block bytes / load rate of a unit)

where blocks holds half a block of rounding. Where tiles do not fill the device, keys are cut among multiprocessors
("split KV"). Behind all tiles stands the memory: keys, values, queries and results once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers.efficiency.formulas import joined, waves
from phaseprof.analyzers.efficiency.parameters import AttentionFit, Hardware
from phaseprof.work.count import Rows
from phaseprof.work.ops import AttentionShape

#: Rows and columns of a tile by head dimension, as FlashAttention 3 picks them on Hopper for causal attention.
_TILES = {64: (192, 128), 128: (128, 128), 192: (128, 96), 256: (128, 64), 512: (64, 64)}
_QUERY_BYTES = 2
#: A cache keeps all of what is read again up to this share of its size, and nothing of more than its size: reading in
#: a circle drives out what comes next.
_KEPT_WHOLE = 2 / 3


@dataclass(frozen=True, slots=True)
class _Part:
    """Tiles of rows that are alike: how many, seconds of one, seconds of its fixed part, and its blocks."""

    tiles: float
    tile_s: float
    fixed_s: float
    blocks: float


def attention_seconds(
    shape: AttentionShape, fit: AttentionFit, hardware: Hardware, *, resident: bool = False
) -> float:
    """The time of one layer's attention.

    Args:
        shape: One layer over the rows of a pass.
        fit: Parameters of the phase and of the width of keys and values.
        hardware: With the dense 16-bit peak.
        resident: The same call is repeated, so that what fits stays in the cache of the device: true of a benchmark,
            not of a model, which reads the rest of itself in between.

    Returns:
        Seconds; never less than the bytes at the peak bandwidth take.
    """
    parts = [_part(shape, row, fit, hardware) for row in shape.rows]
    tiles = sum(part.tiles for part in parts)
    mean_s = sum(part.tiles * part.tile_s for part in parts) / tiles
    longest_s = max(_alone_s(part, tiles, fit, hardware) for part in parts)
    if tiles > hardware.units:
        busy = max(waves(tiles, hardware.units, fit.wave_rounding) * mean_s, longest_s)
    else:
        busy = longest_s
    moved = moved_bytes(shape)
    hit = _hit(moved, hardware.cache_bytes) if resident else 0.0
    memory_s = (1 - hit) * moved / (hardware.bytes_per_s * fit.bandwidth_share)
    memory_s += hit * moved / fit.cache_bytes_per_s
    seconds = joined(busy, memory_s, fit.overlap) + fit.fixed_s + _writing_s(shape, fit)
    return max(seconds, (1 - hit) * moved / hardware.bytes_per_s)


def moved_bytes(shape: AttentionShape) -> float:
    """Keys and values in reach, queries and results, once each."""
    heads = shape.qk_head_dim + shape.v_head_dim
    moved = 0.0
    for row in shape.rows:
        kept = row.past + row.query
        if shape.window_tokens is not None:
            kept = min(kept, shape.window_tokens + row.query)
        moved += row.sequences * kept * _token_bytes(shape)
        moved += row.sequences * row.query * shape.query_heads * heads * _QUERY_BYTES
    return moved


def element_bytes(shape: AttentionShape) -> float:
    """Bytes of an element of keys and values."""
    elements = shape.kv_heads * (shape.qk_head_dim + shape.v_head_dim)
    return min(_token_bytes(shape) / elements, 4.0)


def _token_bytes(shape: AttentionShape) -> int:
    if shape.kv_bytes_per_token:
        return shape.kv_bytes_per_token
    return shape.kv_heads * (shape.qk_head_dim + shape.v_head_dim) * _QUERY_BYTES


def _part(shape: AttentionShape, row: Rows, fit: AttentionFit, hardware: Hardware) -> _Part:
    size = _size(max(shape.qk_head_dim, shape.v_head_dim), fit)
    tile_rows, tile_columns = _TILES[size]
    group = shape.query_heads / shape.kv_heads
    tiles = -(-row.query * group // tile_rows)
    # Query positions of a tile, and the keys that the tiles reach on average.
    span = min(tile_rows / group, row.query)
    reach = row.past + (min(row.query, (row.query + span) / 2) if shape.causal else row.query)
    windowed = shape.window_tokens is not None and row.past + row.query > shape.window_tokens
    if windowed and shape.window_tokens is not None:
        reach = min(reach, shape.window_tokens + span)
    blocks = max(1.0, reach / tile_columns + (0.5 if reach > tile_columns else 0.0))
    heads = shape.qk_head_dim + shape.v_head_dim
    rate = hardware.flops_per_s * fit.compute_share[size] / hardware.units
    computing = blocks * tile_rows * tile_columns * 2 * heads / rate
    loading = blocks * tile_columns * heads * element_bytes(shape) / fit.load_bytes_per_s
    valid_rows = row.query * group / tiles
    fixed_s = fit.tile_s + valid_rows * heads * _QUERY_BYTES / fit.query_bytes_per_s
    fixed_s += fit.window_s if windowed else 0.0
    return _Part(
        tiles=tiles * row.sequences * shape.kv_heads,
        tile_s=fixed_s + joined(computing, loading, fit.tile_overlap),
        fixed_s=fixed_s,
        blocks=blocks,
    )


def _alone_s(part: _Part, tiles: float, fit: AttentionFit, hardware: Hardware) -> float:
    """A tile whose keys may be cut among the units that have no tile."""
    cut = min(hardware.units / tiles, part.blocks)
    if cut <= 1:
        return part.tile_s
    return min(part.tile_s, part.fixed_s + (part.tile_s - part.fixed_s) / cut + fit.split_s)


def _size(head_dim: int, fit: AttentionFit) -> int:
    """The head dimension whose kernels serve this one: heads are padded to the next that there is."""
    known = sorted(fit.compute_share)
    return next((size for size in known if size >= head_dim), known[-1])


def _hit(moved: float, cache_bytes: int) -> float:
    if not cache_bytes:
        return 0.0
    kept = (cache_bytes - moved) / (cache_bytes * (1 - _KEPT_WHOLE))
    return min(max(kept, 0.0), 1.0)


def _writing_s(shape: AttentionShape, fit: AttentionFit) -> float:
    """New keys and values on their way to the cache: read in 16 bits, written as they are kept."""
    elements = shape.kv_heads * (shape.qk_head_dim + shape.v_head_dim)
    tokens = sum(row.query * row.sequences for row in shape.rows)
    moved = tokens * elements * (_QUERY_BYTES + element_bytes(shape))
    return moved / fit.write_bytes_per_s + tokens * fit.write_token_s
