"""Where the busy time of each phase goes: classes of kernels, tensor cores, collectives, copies, gaps, launches.

Only passes that were flagged `profiled` have kernels in a trace. They are joined by rank and pass. All figures are of
these passes; a profiler slows them, on a CPU most, so they are held against their own time and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    groups,
    int_column,
    named,
    names,
    percentiles_ms,
    scalar,
)
from phaseprof.analyzers.kernels.busy import on_device, split_time
from phaseprof.analyzers.kernels.kernel_results import (
    ClassShare,
    KernelClass,
    KernelFigures,
    TensorCores,
    Unattributed,
)
from phaseprof.phases import Phase
from phaseprof.trace.columns import to_column

_I64, _F64, _BOOL = pa.int64(), pa.float64(), pa.bool_()
#: Ranks and passes are put into one number: a pass has fewer than this.
_PASSES = 2**40


class Breakdown:
    """The kernels of the profiled passes of a trace, ready to be summed for any phase.

    Args:
        profiled: Profiled passes of the model: rank, pass_id, phase, sequences, span_ns.
        kernels: The `kernels` table.
        device_kind: As `busy.on_device` takes it.
    """

    def __init__(self, profiled: pa.Table, kernels: pa.Table, device_kind: str) -> None:
        rows = kernels.filter(on_device(kernels, device_kind))
        self._on_cpu = rows.num_rows > 0 and _all_on_cpu(rows)
        self._profiled = profiled
        self._names = names(rows, "name")
        self._kinds = _kinds(self._names.dictionary.to_pylist(), on_cpu=self._on_cpu)
        self._rows = self._timed(rows)

    def _timed(self, rows: pa.Table) -> pa.Table:
        """Row of its pass (null without one), code of its name, begin, end, its time, and its launch, by kernel."""
        start, end = int_column(rows, "start_ns"), int_column(rows, "end_ns")
        code = pc.cast(self._names.indices, _I64)
        split = split_time(
            _device_numbers(rows), start, end, self._flag(code, self._kinds.collective)
        )
        key = _key(int_column(rows, "rank"), int_column(rows, "pass_id"))
        passes = _key(int_column(self._profiled, "rank"), int_column(self._profiled, "pass_id"))
        return pa.table(
            {
                "pass": pc.cast(pc.index_in(key, value_set=passes, skip_nulls=True), _I64),
                "joined": pc.is_valid(rows.column("pass_id")),
                "code": code,
                "start": start,
                "end": pc.max_element_wise(start, end),
                "own": split.own,
                "alone": split.alone,
                "launched": _launched(rows),
            }
        )

    def figures(self, phase: Phase, sequences: int | None = None) -> KernelFigures | None:
        """The figures of one phase, over all its passes or over those of one batch; None without kernels.

        Args:
            phase: Which.
            sequences: Only passes of so many; None for all.
        """
        wanted = named(names(self._profiled, "phase"), phase.value)
        if sequences is not None:
            same = pc.equal(int_column(self._profiled, "sequences"), scalar(sequences, _I64))
            wanted = pc.and_(wanted, same)
        return self._sum(pc.indices_nonzero(wanted))

    @cached_property
    def unattributed(self) -> Unattributed | None:
        """Kernels that belong to no pass; None if there are none."""
        lost = self._rows.filter(pc.invert(self._rows["joined"]))
        if lost.num_rows == 0:
            return None
        # An operator of a CPU has no launch: where it lies is certain.
        launched = pc.is_valid(lost["launched"])
        seen = lost if self._on_cpu else lost.filter(launched)
        launchless = lost.slice(0, 0) if self._on_cpu else lost.filter(pc.invert(launched))
        whole_ms = _ms(self._rows["own"])
        launchless_ms = _ms(launchless["own"])
        return Unattributed(
            between=seen.num_rows,
            between_ms=_ms(seen["own"]),
            launchless=launchless.num_rows,
            launchless_ms=launchless_ms,
            launchless_share=launchless_ms / whole_ms if whole_ms else 0.0,
        )

    def _sum(self, wanted: pa.Array) -> KernelFigures | None:
        of_passes = pc.is_in(self._rows["pass"], value_set=pc.cast(wanted, _I64), skip_nulls=True)
        rows = self._rows.filter(of_passes)
        if rows.num_rows == 0:
            return None
        rows = rows.sort_by([("pass", "ascending"), ("start", "ascending")])
        code, own = column(rows, "code"), column(rows, "own")
        busy_ms = _ms(own)
        seen = column(rows, "pass").unique()
        span_ms = _ms(int_column(self._profiled, "span_ns").take(seen))
        union_ms, extent_ms = _extents(rows)
        by_name = list(_by_name(code, own))
        classes = tuple(self._classes(by_name, busy_ms))
        alone_ms = _ms(rows["alone"])
        copies = rows.filter(self._flag(code, self._kinds.driver_copy))
        cores = {each: self._time(by_name, self._kinds.cores, each) for each in TensorCores}
        # A pass on a GPU may be longer than its call on the host.
        whole_ms = max(span_ms, extent_ms)
        return KernelFigures(
            on_cpu=self._on_cpu,
            passes=len(seen),
            kernels=rows.num_rows,
            span_ms=span_ms,
            busy_ms=busy_ms,
            gap_ms=max(extent_ms - union_ms, 0.0),
            overlap_ms=max(_ms(pc.subtract(rows["end"], rows["start"])) - busy_ms, 0.0),
            classes=classes,
            tensor_core_share=None if self._on_cpu else _share(cores[TensorCores.YES], busy_ms),
            tensor_core_unknown_share=(
                None if self._on_cpu else _share(cores[TensorCores.UNKNOWN], busy_ms)
            ),
            collective_ms=sum(
                each.busy_ms for each in classes if each.kernel_class is KernelClass.COLLECTIVE
            ),
            exposed_collective_ms=alone_ms,
            exposed_comm_share=min(alone_ms / whole_ms, 1.0) if whole_ms else None,
            copies=copies.num_rows,
            copy_ms=_ms(copies["own"]),
            unclassed_share=_share(
                self._time(by_name, self._kinds.classes, KernelClass.OTHER), busy_ms
            ),
            launch_delay_ms=percentiles_ms(_delays(rows)),
            graph_kernels=_launched_together(rows),
            by_word_share=_share(self._time(by_name, self._kinds.by_word, True), busy_ms),
        )

    def _classes(
        self, by_name: Sequence[tuple[int, int, float]], busy_ms: float
    ) -> Iterator[ClassShare]:
        """A share for each class that has kernels, the longest first."""
        found: dict[KernelClass, list[tuple[int, int, float]]] = {}
        for entry in by_name:
            found.setdefault(self._kinds.classes[entry[0]], []).append(entry)
        shares = [self._class(name, entries, busy_ms) for name, entries in found.items()]
        # The name settles a tie, so that a report does not depend on the order of rows.
        yield from sorted(shares, key=lambda each: (-each.busy_ms, each.kernel_class))

    def _class(
        self, kernel_class: KernelClass, entries: Sequence[tuple[int, int, float]], busy_ms: float
    ) -> ClassShare:
        time_ms = sum(ms for _, _, ms in entries)
        cores = {each: self._time(entries, self._kinds.cores, each) for each in TensorCores}
        longest, _, longest_ms = max(entries, key=lambda entry: (entry[2], -entry[0]))
        return ClassShare(
            kernel_class=kernel_class,
            busy_ms=time_ms,
            share=_share(time_ms, busy_ms),
            calls=sum(calls for _, calls, _ in entries),
            tensor_cores=max(cores, key=lambda each: (cores[each], each)),
            tensor_core_ms=cores[TensorCores.YES],
            longest=self._kinds.short[longest],
            longest_share=_share(longest_ms, time_ms),
        )

    def _time(
        self, entries: Sequence[tuple[int, int, float]], of: Sequence[object], value: object
    ) -> float:
        """The time of the names for which a list of the kinds holds a value, in ms."""
        return sum(ms for code, _, ms in entries if of[code] == value)

    def _flag(self, code: pa.Array, flags: Sequence[bool]) -> pa.Array:
        """Whether each kernel's name has a flag set."""
        return to_column(flags, _BOOL).take(code)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """What the distinct names of a trace say, each list in their order."""

    classes: Sequence[KernelClass]
    cores: Sequence[TensorCores]
    collective: Sequence[bool]
    driver_copy: Sequence[bool]
    by_word: Sequence[bool]
    short: Sequence[str]


def _kinds(distinct: Sequence[str], *, on_cpu: bool) -> _Kinds:
    # Their tables take 30 ms to read, which a report without kernels need not wait for.
    from phaseprof.analyzers.kernels.kernel_classes import classify_names, short_name

    kinds = classify_names(distinct, on_cpu=on_cpu)
    return _Kinds(
        classes=[kind.kernel_class for kind in kinds],
        cores=[kind.tensor_cores for kind in kinds],
        collective=[kind.kernel_class is KernelClass.COLLECTIVE for kind in kinds],
        driver_copy=[kind.driver_copy for kind in kinds],
        by_word=[kind.by_word for kind in kinds],
        short=[short_name(name) for name in distinct],
    )


def breakdown(profiled: pa.Table, kernels: pa.Table, device_kind: str) -> Breakdown | None:
    """The kernels of the profiled passes; None where a trace has none of either."""
    if profiled.num_rows == 0 or kernels.num_rows == 0:
        return None
    return Breakdown(profiled, kernels, device_kind)


def _by_name(code: pa.Array, own: pa.Array) -> Iterator[tuple[int, int, float]]:
    """Code, number of kernels and time in ms of each distinct name."""
    order, runs = groups(code)
    own = own.take(order)
    for value, begin, length in runs:
        yield value, length, _ms(own.slice(begin, length))


def _extents(rows: pa.Table) -> tuple[float, float]:
    """Of rows that are sorted by pass and begin: the unions of the passes, and the times from first begin to last end,
    in ms, summed."""
    _, runs = groups(column(rows, "pass"))
    start, end = column(rows, "start"), column(rows, "end")
    union = extent = 0
    for _, begin, length in runs:
        starts, ends = start.slice(begin, length), pc.cumulative_max(end.slice(begin, length))
        covered = pa.concat_arrays([starts.slice(0, 1), ends.slice(0, length - 1)])
        fresh = pc.subtract(ends, pc.max_element_wise(starts, covered))
        union += pc.sum(pc.max_element_wise(fresh, scalar(0, _I64))).as_py()
        extent += ends[length - 1].as_py() - starts[0].as_py()
    return union / 1e6, extent / 1e6


def _delays(rows: pa.Table) -> pa.Array:
    """Time from launch to begin; null without a launch, and 0 where a clock is off by a hair."""
    delay = pc.subtract(column(rows, "start"), column(rows, "launched"))
    return pc.max_element_wise(delay, scalar(0, _I64), skip_nulls=False)


def _launched_together(rows: pa.Table) -> int:
    """Kernels that share the moment of their launch with others: one launch of a graph has many kernels."""
    launched = column(rows, "launched").drop_null()
    launched = launched.take(pc.sort_indices(launched))
    if len(launched) < 2:
        return 0
    as_before = pc.equal(launched.slice(1), launched.slice(0, len(launched) - 1))
    alone = pa.repeat(scalar(False, _BOOL), 1)
    shared = pc.or_(pa.concat_arrays([alone, as_before]), pa.concat_arrays([as_before, alone]))
    return int(pc.sum(shared).as_py())


def _launched(rows: pa.Table) -> pa.Array:
    """When each was launched; null in a trace that was written before there was such a column."""
    if "launched_ns" not in rows.column_names:
        return pa.nulls(rows.num_rows, _I64)
    return int_column(rows, "launched_ns")


def _device_numbers(rows: pa.Table) -> pa.Array:
    """A number for each device of each rank: two ranks each call theirs ``cuda:0``."""
    devices = names(rows, "device")
    many = scalar(len(devices.dictionary) + 1, _I64)
    return pc.add(pc.multiply(int_column(rows, "rank"), many), pc.cast(devices.indices, _I64))


def _key(rank: pa.Array, pass_id: pa.Array) -> pa.Array:
    return pc.add(pc.multiply(rank, scalar(_PASSES, _I64)), pass_id)


def _all_on_cpu(rows: pa.Table) -> bool:
    return bool(pc.all(pc.starts_with(column(rows, "device"), "cpu"), min_count=0).as_py())


def _ms(values_ns: pa.Array | pa.ChunkedArray) -> float:
    return float(pc.sum(values_ns, min_count=0).as_py()) / 1e6


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole else 0.0
