"""Passes as the work model takes them: rows of prefill and of decode, from the slices that a trace stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import named, names, scalar
from phaseprof.analyzers.passes import Primary, steady_passes
from phaseprof.phases import Phase
from phaseprof.trace.columns import to_column
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows
from phaseprof.work.ops import Op, ops_of

#: Passes of a phase that its operations are worked out from: their mix hardly changes with more.
_SAMPLED = 64
_COLUMNS = (
    "phase",
    "slices",
    "logits_tokens",
    "experts_read",
    "flops",
    "weight_bytes",
    "kv_read_bytes",
    "kv_write_bytes",
    "sequences",
    "span_ns",
)


@dataclass(frozen=True, slots=True)
class PassRows:
    """One pass.

    Attributes:
        prefill, decode: Its rows, those of one length as one entry.
        logits_tokens: Positions for which the head was computed; one a sequence where that is not known.
        span_ns: Its time.
        flops: As recorded; None if they are not known.
        moved_bytes: Weights, keys and values, as recorded; None if a part is not known.
        experts_read: As recorded.
        prompts: Prompt lengths of the sequences that it prefills.
    """

    prefill: tuple[Rows, ...]
    decode: tuple[Rows, ...]
    logits_tokens: int
    span_ns: int
    flops: int | None
    moved_bytes: int | None
    experts_read: int | None
    prompts: tuple[int, ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prefill rows."""
        return sum(row.query * row.sequences for row in self.prefill)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rows."""
        return sum(row.query * row.sequences for row in self.decode)

    def ops(self, cost: ModelCost) -> tuple[Op, ...]:
        """Its operations.

        Raises:
            ValueError: If the model is not covered, or the pass has no rows.
        """
        return ops_of(
            cost,
            self.prefill,
            self.decode,
            logits_tokens=self.logits_tokens,
            experts_read=self.experts_read,
        )


def rows_of_phases(
    passes: pa.Table, primary: Primary, *, at_most: int = _SAMPLED
) -> dict[Phase, list[PassRows]]:
    """Steady passes of each phase, evenly over the run; those without slices are left out.

    Args:
        passes: The `passes` table.
        primary: Which model.
        at_most: Passes of each phase.
    """
    steady = steady_passes(passes, primary)
    found: dict[Phase, list[PassRows]] = {}
    for phase in Phase:
        mine = steady.filter(named(names(steady, "phase"), phase.value)).select(_COLUMNS)
        mine = mine.filter(
            pc.greater(pc.list_value_length(mine.column("slices")), scalar(0, pa.int32()))
        )
        rows = [_pass_rows(row) for row in _evenly(mine, at_most).to_pylist()]
        if rows:
            found[phase] = rows
    return found


def _evenly(table: pa.Table, at_most: int) -> pa.Table:
    if table.num_rows <= at_most:
        return table
    places = [place * table.num_rows // at_most for place in range(at_most)]
    return table.take(to_column(places, pa.int64()))


def _pass_rows(row: Mapping[str, Any]) -> PassRows:
    slices = row["slices"]
    moved = [row[name] for name in ("weight_bytes", "kv_read_bytes", "kv_write_bytes")]
    logits = row["logits_tokens"]
    prefill = [part for part in slices if part["phase"] != Phase.DECODE.value]
    return PassRows(
        prefill=_joined(prefill),
        decode=_joined(part for part in slices if part["phase"] == Phase.DECODE.value),
        logits_tokens=int(row["sequences"]) if logits is None else int(logits),
        span_ns=int(row["span_ns"] or 0),
        flops=row["flops"],
        moved_bytes=None if None in moved else sum(moved),
        experts_read=row["experts_read"],
        prompts=tuple(int(part["prompt"]) for part in prefill if part["prompt"]),
    )


def _joined(slices: Iterable[Mapping[str, Any]]) -> tuple[Rows, ...]:
    lengths: dict[tuple[int, int], int] = {}
    for part in slices:
        if part["query"]:
            key = int(part["past"]), int(part["query"])
            lengths[key] = lengths.get(key, 0) + 1
    return tuple(Rows(past, query, number) for (past, query), number in lengths.items())
