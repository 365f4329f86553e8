"""The slowest requests, and what ran while they waited.

They are those with the longest time to first token, the longest time per output token, or the longest wait for a single
token; for the longest waits of each it is looked up which passes ran on its rank from the begin of the wait to its end,
whomever they served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, nearest_ranks, plain, scalar
from phaseprof.analyzers.gaps import ends_ns
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.viewing.distributions import steady_requests

_I64 = pa.int64()
#: Requests of each sort that are named, waits of each that are explained, and steps of each wait.
_NAMED, _WAITS, _STEPS = 5, 2, 3


@dataclass(frozen=True, slots=True)
class StepMeanwhile:
    """A pass that ran while a request waited.

    Attributes:
        step, phase, sequences, prefill_tokens, decode_tokens: As in the table `passes`.
        pass_ms: Its time. overlap_ms: How much of it lies in the wait.
        yielded: Whether it yielded the token that was waited for; None if that is not recorded.
    """

    step: int
    phase: str
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    pass_ms: float
    overlap_ms: float
    yielded: bool | None


@dataclass(frozen=True, slots=True)
class Wait:
    """A time that a request waited for a token.

    Attributes:
        token: Which, from 0: the wait for the first one is the time to first token.
        begin_ms: When it began, from the begin of the first pass of the run.
        wait_ms: How long. usual_ms: The median of such waits over all requests that count.
        queue_ms: The part of the first one in which the request was queued; None if not known.
        steps: Passes that ran meanwhile, those with the most time in it first. steps_in_all: How many there are.
        passes_share: Part of the wait in which a pass ran.
    """

    token: int
    begin_ms: float
    wait_ms: float
    usual_ms: float
    queue_ms: float | None
    steps: tuple[StepMeanwhile, ...]
    steps_in_all: int
    passes_share: float


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """A request that is among the slowest.

    Attributes:
        request_id: Which. client_id: The id that its client knows; None if not known.
        rank: Where.
        slow_by: In which respects: ``ttft``, ``tpot``, ``itl``.
        arrival_ms: When it came, from the begin of the first pass of the run.
        prompt_tokens, output_tokens: Its size.
        ttft_ms, tpot_ms, longest_itl_ms, queue_ms: None if it has none, or that is not known.
        preemptions: How often it was preempted; None if not known.
        waits: Its longest waits in these respects, the longest first.
    """

    request_id: str
    client_id: str | None
    rank: int
    slow_by: tuple[str, ...]
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    longest_itl_ms: float | None
    queue_ms: float | None
    preemptions: int | None
    waits: tuple[Wait, ...]


def worst_requests(
    requests: pa.Table, passes: pa.Table, primary: Primary
) -> tuple[WorstRequest, ...]:
    """The requests that were slow in one respect or several, those with the longest wait first.

    Args:
        requests: The `requests` table; with `itl_steps` if it is to be said which step yielded a token.
        passes: The `passes` table.
        primary: Which model.
    """
    rows = steady_requests(requests, primary)
    if rows.num_rows == 0 or passes.num_rows == 0:
        return ()
    itl = _Itl.of(rows)
    slow_by: dict[int, list[str]] = {}
    for name, ranking in (
        ("ttft", column(rows, "ttft_ns")),
        ("tpot", column(rows, "tpot_ns")),
        ("itl", itl.longest_ns),
    ):
        # Among a few requests of about the same time none is the worst.
        for row in _largest(ranking):
            slow_by.setdefault(row, []).append(name)
    usual_ttft, usual_itl = _median(column(rows, "ttft_ns")), _median(itl.values_ns)
    first_ns = pc.min(passes.column("start_ns")).as_py()
    by_rank: dict[int, _Ran] = {}
    found = []
    for row, respects in slow_by.items():
        entry = rows.slice(row, 1).to_pylist()[0]
        if entry["rank"] not in by_rank:
            by_rank[entry["rank"]] = _Ran.of(passes, entry["rank"])
        ran = by_rank[entry["rank"]]
        found.append(_worst(entry, respects, ran, usual_ttft, usual_itl, first_ns))
    return tuple(sorted(found, key=lambda each: -max((w.wait_ms for w in each.waits), default=0.0)))


def _largest(values: pa.Array) -> list[int]:
    """The rows of the greatest values, those beyond the median of all only."""
    median = _median(values)
    order = pc.select_k_unstable(values, k=min(_NAMED, len(values)), sort_keys=[("", "descending")])
    return [
        row
        for row in order.to_pylist()
        if values[row].as_py() is not None and values[row].as_py() / 1e6 > median
    ]


def _median(values_ns: pa.Array) -> float:
    """The median of times above 0, in ms; 0 without any."""
    found = nearest_ranks(values_ns.filter(pc.greater(values_ns, scalar(0, _I64))), 0.5)
    return found[0] / 1e6 if found else 0.0


@dataclass(frozen=True, slots=True)
class _Itl:
    """Inter-token latencies: all of them, and the longest of each request (null without any)."""

    values_ns: pa.Array
    longest_ns: pa.Array

    @classmethod
    def of(cls, rows: pa.Table) -> _Itl:
        lists = plain(rows.column("itl_ns"))
        values = pc.cast(pc.list_flatten(lists), _I64)
        owner = pc.cast(pc.list_parent_indices(lists), _I64)
        order = pc.sort_indices(
            pa.table({"owner": owner, "value": values}),
            sort_keys=[("owner", "ascending"), ("value", "ascending")],
        )
        owners = owner.take(order)
        following = pa.concat_arrays([owners.slice(1), pa.nulls(min(len(owners), 1), _I64)])
        last = pc.fill_null(pc.not_equal(owners, following), scalar(True, pa.bool_()))
        place = pc.index_in(
            pc.cast(pc.indices_nonzero(pc.is_valid(rows.column("request_id"))), _I64),
            value_set=owners.filter(last),
        )
        return cls(values, values.take(order).filter(last).take(place))


def _worst(
    entry: dict[str, object],
    respects: Sequence[str],
    ran: _Ran,
    usual_ttft_ms: float,
    usual_itl_ms: float,
    first_ns: int,
) -> WorstRequest:
    arrival_ns, ttft_ns = _whole(entry["arrival_ns"]) or 0, _whole(entry["ttft_ns"])
    gaps_ns = [value for value in _list(entry.get("itl_ns")) if value is not None]
    steps = _list(entry.get("itl_steps"))
    waits = []
    if ttft_ns is not None:
        if "ttft" in respects:
            meanwhile = ran.between(arrival_ns, arrival_ns + ttft_ns, None)
            queue_ms = _ms(entry["queue_ns"])
            begin_ms = (arrival_ns - first_ns) / 1e6
            waits.append(Wait(0, begin_ms, ttft_ns / 1e6, usual_ttft_ms, queue_ms, *meanwhile))
        if set(respects) & {"itl", "tpot"}:
            longest = sorted(range(len(gaps_ns)), key=lambda place: -gaps_ns[place])[:_WAITS]
            ends = list(_running(arrival_ns + ttft_ns, gaps_ns))
            for place in longest:
                end_ns, gap_ns = ends[place], gaps_ns[place]
                step = steps[place] if place < len(steps) else None
                meanwhile = ran.between(end_ns - gap_ns, end_ns, step)
                begin_ms = (end_ns - gap_ns - first_ns) / 1e6
                waits.append(
                    Wait(place + 1, begin_ms, gap_ns / 1e6, usual_itl_ms, None, *meanwhile)
                )
    client = entry.get("client_id")
    return WorstRequest(
        request_id=str(entry["request_id"]),
        client_id=None if client is None else str(client),
        rank=_whole(entry["rank"]) or 0,
        slow_by=tuple(respects),
        arrival_ms=(arrival_ns - first_ns) / 1e6,
        prompt_tokens=_whole(entry["prompt_tokens"]) or 0,
        output_tokens=_whole(entry["output_tokens"]) or 0,
        ttft_ms=_ms(entry["ttft_ns"]),
        tpot_ms=_ms(entry["tpot_ns"]),
        longest_itl_ms=max(gaps_ns) / 1e6 if gaps_ns else None,
        queue_ms=_ms(entry["queue_ns"]),
        preemptions=_whole(entry.get("preemptions")),
        waits=tuple(sorted(waits, key=lambda each: -each.wait_ms)),
    )


def _running(begin: int, values: Iterable[int]) -> Iterator[int]:
    for value in values:
        begin += value
        yield begin


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _list(value: object) -> list[int | None]:
    return list(value) if isinstance(value, list) else []


def _ms(value_ns: object) -> float | None:
    return value_ns / 1e6 if isinstance(value_ns, int) else None


@dataclass(frozen=True, slots=True)
class _Ran:
    """The passes of one rank by their begin; of a rank without any (an engine's core) those of all."""

    rows: pa.Table
    starts_ns: pa.Array
    ends_ns: pa.Array

    @classmethod
    def of(cls, passes: pa.Table, rank: int) -> _Ran:
        mine = pc.equal(int_column(passes, "rank"), scalar(rank, _I64))
        rows = passes.filter(mine) if pc.any(mine, min_count=0).as_py() else passes
        order = pc.sort_indices(column(rows, "start_ns"))
        kept = rows.select(
            [
                *("step", "phase", "sequences", "prefill_tokens", "decode_tokens"),
                *("start_ns", "end_ns", "host_ns", "device_ns"),
            ]
        ).take(order)
        return cls(kept, column(kept, "start_ns"), ends_ns(kept))

    def between(
        self, begin_ns: int, end_ns: int, step: int | None
    ) -> tuple[tuple[StepMeanwhile, ...], int, float]:
        """The passes with the most time in a stretch, how many reach into it, and how much of it passes take."""
        begin, end = scalar(begin_ns, _I64), scalar(end_ns, _I64)
        into = pc.and_(pc.less(self.starts_ns, end), pc.greater(self.ends_ns, begin))
        rows, starts, ends = (
            each.filter(into) for each in (self.rows, self.starts_ns, self.ends_ns)
        )
        from_ns, to_ns = pc.max_element_wise(starts, begin), pc.min_element_wise(ends, end)
        overlap = pc.subtract(to_ns, from_ns)
        if rows.num_rows == 0:
            return (), 0, 0.0
        longest = pc.array_sort_indices(overlap, order="descending").slice(0, _STEPS)
        named_rows = rows.take(longest).to_pylist()
        steps = tuple(
            StepMeanwhile(
                step=row["step"],
                phase=str(row["phase"]),
                sequences=row["sequences"],
                prefill_tokens=row["prefill_tokens"],
                decode_tokens=row["decode_tokens"],
                pass_ms=(row["host_ns"] if row["device_ns"] is None else row["device_ns"]) / 1e6,
                overlap_ms=overlap_ns / 1e6,
                yielded=None if step is None else row["step"] == step,
            )
            for row, overlap_ns in zip(named_rows, overlap.take(longest).to_pylist(), strict=True)
        )
        covered = 0
        reached = begin_ns
        for start, stop in zip(from_ns.to_pylist(), to_ns.to_pylist(), strict=True):
            covered += max(stop - max(start, reached), 0)
            reached = max(reached, stop)
        return steps, rows.num_rows, covered / max(end_ns - begin_ns, 1)
