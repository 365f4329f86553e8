"""An excerpt of the tables that tests carry: held points only, drawn by chance, as one CSV."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efficiency_kit.tables import AttentionPoint, GemmPoint, Part

COLUMNS = (
    "gpu", "operation", "dtype", "m", "n", "k", "batch", "query", "past", "heads", "kv_heads",
    "head_dim", "window", "latency_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Points of one table: which, and as what they are written down."""

    gpu: str
    operation: str
    dtype: str
    points: Sequence[GemmPoint | AttentionPoint]


def write(path: Path, tables: Sequence[Excerpt], each: int) -> None:
    """Write so many held points of each table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        for table in tables:
            apart = [point for point in table.points if point.part is not Part.FIT]
            for point in random.Random(11).sample(apart, each):
                row: dict[str, object] = {
                    "gpu": table.gpu,
                    "operation": table.operation,
                    "dtype": table.dtype,
                    "latency_ms": f"{point.seconds * 1e3:.6g}",
                }
                out.writerow(row | _sizes(point))


def _sizes(point: GemmPoint | AttentionPoint) -> dict[str, object]:
    if isinstance(point, GemmPoint):
        return {"m": point.shape.m, "n": point.shape.n, "k": point.shape.k}
    shape = point.shape
    return {
        "batch": shape.rows[0].sequences,
        "query": shape.rows[0].query,
        "past": shape.rows[0].past,
        "heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.qk_head_dim,
        "window": shape.window_tokens or 0,
    }
