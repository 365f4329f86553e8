"""What ran on a device, from the passes of a trace: its timeline, and which phase each stretch of it belongs to.

Passes of the model that a report is about have the label of their phase; those of other models, of a draft model, and
moments at which passes of different phases run together are one label more. Passes that do not count (warm-up, under a
costly collector, failed) have a label of their own: windows that hold any of them are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, named, names, scalar
from phaseprof.analyzers.counters.device_time import BETWEEN, IDLE, Stretch, Timeline, placed
from phaseprof.analyzers.counters.weights import Window
from phaseprof.analyzers.passes import Primary, phase_named
from phaseprof.phases import Phase
from phaseprof.trace.columns import to_column
from phaseprof.trace.meta import Device, ProcessMeta

#: Passes that are looked at before and after each stretch of windows: as long as a stream may be behind its host.
_BEFORE_NS = 1_000_000_000
#: Windows further apart than this are looked at apart.
_HOLE_NS = 10_000_000_000
#: Short and long passes of a phase are told apart where the mean time of the long ones is this multiple of the others'.
_UNLIKE = 1.2
#: Fewer passes of a phase are not told apart.
_FEW = 10


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A sampled device and who ran models on it.

    Attributes:
        device: Which. sampled_as: As `samples.device` names it.
        users: Pairs of rank and model.
    """

    device: Device
    sampled_as: str
    users: frozenset[tuple[int, str]]

    def runs(self, model_id: str) -> bool:
        """Whether a model ran on it."""
        return any(name == model_id for _, name in self.users)


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The time of a device, labelled.

    Attributes:
        timeline: In fine labels.
        groups: The fine labels of each coarse one.
        phases: The coarse label of each phase.
        left_out: The fine label of passes that do not count; it is in no group.
        on_host: Passes of a GPU have no device time: they are placed by their calls.
    """

    timeline: Timeline
    groups: tuple[tuple[int, ...], ...]
    phases: dict[Phase, int]
    left_out: int
    on_host: bool

    def counted(self, windows: Iterable[Window], margin_ns: int) -> list[bool]:
        """Which windows count: those near the run that hold nothing which is left out."""
        edges = self.timeline.edges_ns
        if not edges:
            return [False for _ in windows]
        begin, end = edges[0] - margin_ns, edges[-1] + margin_ns
        kept = []
        for window in windows:
            inside = begin <= window.start_ns and window.end_ns <= end
            kept.append(inside and not self._holds_left_out(window, margin_ns))
        return kept

    def _holds_left_out(self, window: Window, margin_ns: int) -> bool:
        shares = self.timeline.shares(window.start_ns - margin_ns, window.end_ns + margin_ns)
        return shares[self.left_out] > 0

    def busy_shares(self, windows: Iterable[Window]) -> list[float]:
        """How much of each window passes have."""
        return [
            1.0 - shares[IDLE] - shares[BETWEEN]
            for shares in (self.timeline.shares(*window) for window in windows)
        ]


def uses_of(metas: Sequence[ProcessMeta], sampled: Sequence[str]) -> tuple[DeviceUse, ...]:
    """The sampled devices that models ran on; a CPU is one where a recording is replayed beside it.

    A device whose driver's name is not known is the sampled one where there is but one of either.
    """
    found: dict[str, tuple[Device, set[tuple[int, str]]]] = {}
    for meta in metas:
        for device in meta.devices:
            users = {
                (meta.rank, model.model_id)
                for model in meta.models
                if model.device_key == device.key
                # Boards of one kind have the same key.
                and model.device_uuid in ("", device.uuid)
            }
            known = found.setdefault(device.uuid or device.key, (device, set()))
            known[1].update(users)
    others = [name for name in sampled if name != "cpu" and name not in found]
    gpus = [name for name, (device, _) in found.items() if device.kind != "cpu"]
    if len(others) == len(gpus) == 1 and not found[gpus[0]][0].uuid:
        found[others[0]] = found.pop(gpus[0])
    return tuple(
        DeviceUse(device, name, frozenset(users))
        for name, (device, users) in sorted(found.items())
        if name in sampled and users
    )


def work_of(
    passes: pa.Table,
    use: DeviceUse,
    primary: Primary,
    windows: Iterable[Window],
    *,
    batch: int | None = None,
) -> DeviceWork:
    """The time of a device around its sample windows.

    Args:
        passes: The `passes` table, with the rows of all ranks.
        use: Which device.
        primary: The model whose phases are told apart.
        windows: All windows that will be looked at.
        batch: Only passes with so many sequences count; None for all.
    """
    rows = _rows(passes, use, _ranges(windows), primary, batch)
    label_of, groups, cuts = _labels(rows)
    other, left_out = label_of[Phase.OTHER], sum(len(group) for group in groups)
    stretches = []
    for start, end, phase, mine, counts in _placed(rows):
        if not counts:
            label = left_out
        elif not mine or phase is Phase.OTHER:
            label = groups[other][0]
        else:
            group = groups[label_of[phase]]
            label = group[len(group) > 1 and end - start >= cuts[phase]]
        stretches.append(Stretch(start, end, label))
    timeline = Timeline.of(stretches, left_out + 1, groups[other][0], over=left_out)
    unknown = column(rows, "device_ns").null_count
    del label_of[Phase.OTHER]
    on_host = use.device.kind != "cpu" and 10 * unknown > rows.num_rows
    return DeviceWork(timeline, groups, label_of, left_out, on_host)


def _ranges(windows: Iterable[Window]) -> list[tuple[int, int]]:
    """The stretches of time in which there are windows."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(set(windows)):
        if found and start - found[-1][1] < _HOLE_NS:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _rows(
    passes: pa.Table,
    use: DeviceUse,
    ranges: Sequence[tuple[int, int]],
    primary: Primary,
    batch: int | None,
) -> pa.Table:
    """The passes of a device around its windows, as ``rank``, ``thread_id``, ``start_ns``, ``end_ns``, ``device_ns``,
    ``span_ns``, ``phase``, ``mine`` and ``counts``."""
    model = names(passes, "model_id")
    rank = int_column(passes, "rank")
    used = scalar(False, pa.bool_())
    for number in sorted({rank for rank, _ in use.users}):
        models = [model_id for its, model_id in use.users if its == number]
        of_rank = pc.equal(rank, scalar(number, pa.int64()))
        used = pc.or_(used, pc.and_(of_rank, named(model, *models)))
    near = scalar(False, pa.bool_())
    starts = column(passes, "start_ns")
    for begin, end in ranges:
        inside = pc.and_(
            pc.greater_equal(starts, scalar(begin - _BEFORE_NS, pa.int64())),
            pc.less_equal(starts, scalar(end + _BEFORE_NS, pa.int64())),
        )
        near = pc.or_(near, inside)
    wanted = pc.and_(used, near)
    if not isinstance(wanted, pa.Array):
        wanted = to_column([bool(wanted.as_py())] * passes.num_rows, pa.bool_())
    mine = pc.and_(named(model, primary.model_id), named(names(passes, "role"), *primary.roles))
    counts = pc.and_(pc.invert(column(passes, "profiled")), pc.is_null(passes["warmup"]))
    counts = pc.and_(counts, pc.is_null(passes["error"]))
    if batch is not None:
        same = pc.equal(int_column(passes, "sequences"), scalar(batch, pa.int64()))
        counts = pc.and_(counts, same)
    device_ns = int_column(passes, "device_ns")
    rows = pa.table(
        {
            "rank": rank,
            "thread_id": int_column(passes, "thread_id"),
            "start_ns": starts,
            "end_ns": column(passes, "end_ns"),
            "device_ns": device_ns,
            "span_ns": pc.coalesce(device_ns, int_column(passes, "host_ns")),
            "phase": names(passes, "phase"),
            "mine": mine,
            "counts": counts,
        }
    ).filter(wanted)
    return rows.take(pc.sort_indices(column(rows, "start_ns")))


def _labels(
    rows: pa.Table,
) -> tuple[dict[Phase, int], tuple[tuple[int, ...], ...], dict[Phase, int]]:
    """The coarse label of each phase that counts, the fine ones of each coarse one, and the time from which on a pass
    of a phase is a long one."""
    groups: list[tuple[int, ...]] = [(IDLE,), (BETWEEN,)]
    label_of: dict[Phase, int] = {}
    cuts: dict[Phase, int] = {}
    fine = len(groups)
    counted = rows.filter(pc.and_(column(rows, "counts"), column(rows, "mine")))
    phase = names(counted, "phase")
    seen = {phase_named(str(value)) for value in phase.unique().to_pylist()}
    for each in Phase:
        if each is Phase.OTHER or each not in seen:
            continue
        spans = column(counted.filter(named(phase, each.value)), "span_ns")
        cut = _cut(spans)
        parts = 1 if cut is None else 2
        label_of[each] = len(groups)
        cuts[each] = cut or 0
        groups.append(tuple(range(fine, fine + parts)))
        fine += parts
    label_of[Phase.OTHER] = len(groups)
    groups.append((fine,))
    return label_of, tuple(groups), cuts


def _cut(spans: pa.Array) -> int | None:
    """The time from which on passes are long ones, which then take about half of the time of all; None where passes are
    alike, or too few."""
    if len(spans) < _FEW:
        return None
    ascending = spans.take(pc.sort_indices(spans))
    sums = pc.cumulative_sum(ascending)
    whole = sums[-1].as_py()
    below = pc.sum(pc.less(sums, scalar(whole // 2, pa.int64()))).as_py()
    cut = int(ascending[below].as_py())
    short = int(pc.sum(pc.less(ascending, scalar(cut, pa.int64()))).as_py())
    if not short:
        return None
    mean = sums[short - 1].as_py() / short
    long = (whole - sums[short - 1].as_py()) / (len(spans) - short)
    return cut if long > _UNLIKE * mean else None


def _placed(rows: pa.Table) -> Iterable[tuple[int, int, Phase, bool, bool]]:
    """Each pass on its device: begin, end, phase, whether it is of the report's model, whether it counts."""
    streams: dict[tuple[int, int], list[int]] = {}
    keys = zip(column(rows, "rank").to_pylist(), column(rows, "thread_id").to_pylist(), strict=True)
    for place, key in enumerate(keys):
        streams.setdefault(key, []).append(place)
    starts, ends = column(rows, "start_ns").to_pylist(), column(rows, "end_ns").to_pylist()
    device = column(rows, "device_ns").to_pylist()
    kinds: dict[str, Phase] = {}
    phases = [
        kinds.setdefault(value, phase_named(value)) for value in column(rows, "phase").to_pylist()
    ]
    mine, counts = column(rows, "mine").to_pylist(), column(rows, "counts").to_pylist()
    for places in streams.values():
        spans = placed(
            [starts[i] for i in places], [ends[i] for i in places], [device[i] for i in places]
        )
        for i, (begin, end) in zip(places, spans, strict=True):
            yield begin, end, phases[i], mine[i], counts[i]
