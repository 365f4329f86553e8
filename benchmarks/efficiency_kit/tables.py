"""Tables of measured operations, as points of a fit: which half each is in does not depend on its time.

A product belongs to a half by its (n, k), an attention by its heads, key-value heads and head dimension: all batches,
lengths and windows of one model's layer are on one side, so that no neighbour of a held point was seen by the fit.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from phaseprof.work.count import Rows
from phaseprof.work.ops import AttentionShape, GemmShape


class Part(enum.Enum):
    """What a point is for. The held half is halved again: one part gives the intervals, the other checks them."""

    FIT = "fit"
    INTERVALS = "intervals"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """One measured product."""

    shape: GemmShape
    seconds: float
    part: Part
    kernel: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """What its part goes by."""
        return self.shape.n, self.shape.k


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One measured attention of one layer."""

    shape: AttentionShape
    seconds: float
    part: Part

    @property
    def sizes(self) -> tuple[int, ...]:
        """What its part goes by."""
        return self.shape.query_heads, self.shape.kv_heads, self.shape.qk_head_dim


def part_of(*sizes: int) -> Part:
    """The part that everything of these sizes is in."""
    bits = zlib.crc32(",".join(map(str, sizes)).encode())
    if not bits & 1:
        return Part.FIT
    return Part.CHECK if bits & 2 else Part.INTERVALS


def gemm_points(file: Path, dtype: str, weight_bytes: int) -> list[GemmPoint]:
    """The products of one dtype.

    Args:
        file: A table of products; latency in milliseconds.
        dtype: As the table spells it.
        weight_bytes: Of one weight.
    """
    points = []
    for row in _rows(file):
        if row["gemm_dtype"] != dtype:
            continue
        m, n, k = row["m"], row["n"], row["k"]
        shape = GemmShape(m, n, k, n * k * weight_bytes)
        points.append(GemmPoint(shape, row["latency"] * 1e-3, part_of(n, k), row["kernel_source"]))
    return points


def attention_points(file: Path, kv_dtype: str, element_bytes: int) -> list[AttentionPoint]:
    """The attentions whose keys and values are kept in one dtype. A prefill starts on an empty cache; a decode step has
    one query behind `step` tokens."""
    points = []
    for row in _rows(file):
        if row["kv_cache_dtype"] != kv_dtype:
            continue
        heads, kv_heads, size = row["num_heads"], row["num_key_value_heads"], row["head_dim"]
        shape = AttentionShape(
            rows=(Rows(past=row["step"], query=row["isl"], sequences=row["batch_size"]),),
            query_heads=heads,
            kv_heads=kv_heads,
            qk_head_dim=size,
            v_head_dim=size,
            window_tokens=row["window_size"] or None,
            kv_bytes_per_token=kv_heads * 2 * size * element_bytes,
        )
        points.append(AttentionPoint(shape, row["latency"] * 1e-3, part_of(heads, kv_heads, size)))
    return points


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows
