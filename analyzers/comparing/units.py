"""The parts of a run that are drawn: repeats where there are any, else stretches of time.

Requests that are there at the same time share passes and are one unit: a call of `generate` with its batch. A run that
never pauses between its requests, as a server does, is cut into stretches with equal numbers of passes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column

#: More units than this are joined: so many are enough to choose the length of blocks by.
MOST_UNITS = 128
#: Stretches that a run is cut into at most.
_STRETCHES = 64
#: Pauses that make a run one of repeats, though several requests arrive before each.
_PAUSES = 8
#: Passes of a stretch at least: fewer hold too little of a phase.
_PASSES = 4


class UnitKind(enum.StrEnum):
    """What a unit is."""

    REPEATS = "repeats"
    STRETCHES = "stretches of time"


@dataclass(frozen=True, slots=True)
class Units:
    """Where each unit of a run begins.

    Attributes:
        starts_ns: In ascending order; what lies before the first belongs to it.
        kind: What they are.
        repeats: Calls or groups of requests that were found, before any were joined.
    """

    starts_ns: tuple[int, ...]
    kind: UnitKind
    repeats: int

    def slices(self, times_ns: pa.Array) -> list[tuple[int, int]]:
        """Where the rows of each unit lie in a column of ascending times: begin and end."""
        n = len(times_ns)
        cuts = [0, *(_first_at(times_ns, start) for start in self.starts_ns[1:]), n]
        return list(pairwise(cuts))


def cut(passes: pa.Table, requests: pa.Table, workload: Mapping[str, object]) -> Units:
    """Cut a run.

    Args:
        passes: Those that count, by their begin.
        requests: Those that count.
        workload: As in `ProcessMeta.workload`: a round of several settings is one unit.
    """
    starts, arrivals = _pauses(requests)
    if len(starts) > 1 and (len(starts) == arrivals or len(starts) >= _PAUSES):
        of_a_round = _settings(workload)
        rounds = starts[::of_a_round] if len(starts) >= 2 * of_a_round else starts
        return Units(_thinned(rounds), UnitKind.REPEATS, len(starts))
    times = int_column(passes, "start_ns")
    n = max(min(_STRETCHES, len(times) // _PASSES), 1)
    found = [times[len(times) * number // n].as_py() for number in range(n)] if len(times) else [0]
    return Units(tuple(dict.fromkeys(found)), UnitKind.STRETCHES, len(starts))


def _pauses(requests: pa.Table) -> tuple[list[int], int]:
    """The arrivals at which no earlier request was still there, and how many different arrivals there are."""
    if requests.num_rows == 0:
        return [], 0
    arrival = int_column(requests, "arrival_ns")
    order = pc.sort_indices(arrival)
    arrival = arrival.take(order)
    gone = pc.coalesce(int_column(requests, "finished_ns").take(order), arrival)
    until = pc.cumulative_max(gone)
    fresh = pc.greater_equal(arrival[1:], until[:-1])
    # Those that arrive at the same time and are gone at once are one.
    fresh = pc.and_(fresh, pc.greater(arrival[1:], arrival[:-1]))
    starts = [arrival[0].as_py(), *arrival[1:].filter(fresh).to_pylist()]
    return starts, len(arrival.unique())


def _settings(workload: Mapping[str, object]) -> int:
    """Settings that the plan went through in each round: batch sizes, and lengths where there are several."""
    listed = (workload.get(key) for key in ("batch", "prompt_tokens", "new_tokens"))
    return math.prod(len(each) for each in listed if isinstance(each, (list, tuple)) and each)


def _thinned(starts: Sequence[int]) -> tuple[int, ...]:
    n = min(len(starts), MOST_UNITS)
    return tuple(starts[len(starts) * number // n] for number in range(n))


def _first_at(times_ns: pa.Array, start_ns: int) -> int:
    """The first row at or after a time."""
    low, high = 0, len(times_ns)
    while low < high:
        middle = (low + high) // 2
        if times_ns[middle].as_py() < start_ns:
            low = middle + 1
        else:
            high = middle
    return low


def by_start(passes: pa.Table) -> pa.Table:
    """The passes by their begin; the table itself if they are."""
    times = column(passes, "start_ns")
    if len(times) < 2 or pc.all(pc.greater_equal(times[1:], times[:-1])).as_py():
        return passes
    return passes.take(pc.sort_indices(times))
