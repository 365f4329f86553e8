"""Kernels of a recording to the steps that launched them: by launch correlation and by nothing else.

What has no launch in sight, or one outside of all steps, keeps no pass: it is counted, and never spread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from phaseprof.attribution import PassJoin, PassWindow, always_has_events
from phaseprof.collectors.files.contents import Marker
from phaseprof.collectors.files.joinery import EventRow, Joinery, LaunchRow, Partition
from phaseprof.importing.drawn import Drawn
from phaseprof.importing.forms import Step
from phaseprof.schema import KERNELS
from phaseprof.trace.columns import to_column


@dataclass(slots=True)
class StepKernels:
    """What ran on devices for one step.

    Attributes:
        first_ns, last_ns: Begin of the first and end of the last kernel or copy, Unix ns.
        events: Kernels and copies. in_graphs: Those of them that a launch of a graph has.
        unanswered: Launches of kernels or graphs of which nothing came.
    """

    first_ns: int = 0
    last_ns: int = 0
    events: int = 0
    in_graphs: int = 0
    unanswered: int = 0

    def add(self, start_ns: int, end_ns: int, in_graph: bool) -> None:
        """One more kernel or copy."""
        self.first_ns = min(self.first_ns, start_ns) if self.events else start_ns
        self.last_ns = max(self.last_ns, end_ns) if self.events else end_ns
        self.events += 1
        self.in_graphs += in_graph

    @property
    def span_ns(self) -> int | None:
        """From the first begin to the last end; None without kernels."""
        return self.last_ns - self.first_ns if self.events else None


@dataclass(slots=True)
class Joined:
    """What came of the join of one rank.

    Attributes:
        steps: By the place of the step; a step without kernels has no entry.
        events: Kernels and copies in all, or operators of a recording without devices.
        between: Those that were launched outside of every step.
        launchless: Those whose launch was not seen.
        unanswered: Launches of kernels or graphs, in a step or not, of which nothing came.
        on_cpu: What was joined are operators of a CPU.
    """

    steps: dict[int, StepKernels] = field(default_factory=dict)
    events: int = 0
    between: int = 0
    launchless: int = 0
    unanswered: int = 0
    on_cpu: bool = False


def step_windows(steps: Sequence[Step], pass_ids: Sequence[int]) -> tuple[PassWindow, ...]:
    """The steps as attribution takes them. A step of an unknown thread has one that nothing launches on."""
    return tuple(
        PassWindow(number, -1 if step.thread_id is None else step.thread_id, *_times(step))
        for number, step in zip(pass_ids, steps, strict=True)
    )


def join_events(
    joinery: Joinery,
    steps: Sequence[Step],
    pass_ids: Sequence[int],
    *,
    source: str,
    device_name: Callable[[int], str],
    write: Callable[[pa.Table], None],
    drawn: Drawn | None = None,
) -> Joined:
    """Join all device events of a rank, and hand over their rows, some thousands at a time.

    Args:
        joinery: The launches and events.
        steps: The steps of the rank.
        pass_ids: Their ids.
        source: What the rows come from: ``kineto``, ``nsys``.
        device_name: Names a device of the file as torch would.
        write: Takes rows of the `kernels` table.
        drawn: The steps on devices, where nothing else tells which kernels are theirs.
    """
    join = PassJoin(step_windows(steps, pass_ids))
    place_of = {number: place for place, number in enumerate(pass_ids)}
    joined = Joined()
    names = _Devices(device_name)
    for partition in joinery.partitions():
        launched = _launches(partition)
        places: dict[int, int | None] = {}
        answered: set[int] = set()
        rows = _Rows(joinery, source)
        for event in sorted(partition.event_rows(), key=_start_of):
            launch = launched.get(event.correlation) if event.correlation else None
            start = event.start_ns + joinery.shift_ns
            launched_ns = None if launch is None else launch.start_ns + joinery.shift_ns
            joined.events += 1
            place: int | None = None
            if drawn is not None:
                place = drawn.of(event.device, event.stream, start + event.duration_ns // 2)
            elif launch is not None:
                if event.correlation not in places:
                    found = join.of_launch(launch.start_ns + joinery.shift_ns, launch.thread_id)
                    places[event.correlation] = None if found is None else place_of[found.pass_id]
                place = places[event.correlation]
            if launch is not None:
                answered.add(event.correlation)
            if place is not None:
                own = joined.steps.setdefault(place, StepKernels())
                in_graph = launch is not None and "Graph" in joinery.names[launch.name]
                own.add(start, start + event.duration_ns, in_graph)
            elif launch is None:
                joined.launchless += 1
            else:
                joined.between += 1
            number = None if place is None else pass_ids[place]
            rows.add(event, start, number, launched_ns, names[event.device])
        for correlation, launch in launched.items():
            if correlation not in answered and always_has_events(joinery.names[launch.name]):
                joined.unanswered += 1
                if drawn is not None:
                    continue
                found = join.of_launch(launch.start_ns + joinery.shift_ns, launch.thread_id)
                if found is not None:
                    own = joined.steps.setdefault(place_of[found.pass_id], StepKernels())
                    own.unanswered += 1
        rows.write(write)
    return joined


def join_operators(
    joinery: Joinery,
    steps: Sequence[Step],
    pass_ids: Sequence[int],
    *,
    source: str,
    write: Callable[[pa.Table], None],
) -> Joined:
    """Join the outermost operators of a recording without devices, by containment on their thread."""
    join = PassJoin(step_windows(steps, pass_ids))
    joined = Joined(on_cpu=True)
    rows = _Rows(joinery, source)
    threads: dict[int, int] = {}
    for row in joinery.operators:
        start = row.start_ns + joinery.shift_ns
        found = join.on_thread(row.thread_id, start, start + row.duration_ns)
        joined.events += 1
        joined.between += found is None
        thread = threads.setdefault(row.thread_id, len(threads))
        event = EventRow(0, row.start_ns, row.duration_ns, row.name, 0, thread)
        rows.add(event, start, None if found is None else found.pass_id, None, "cpu")
    rows.write(write)
    return joined


def with_launches(joinery: Joinery) -> tuple[Marker, ...]:
    """The markers with the time and the thread of their launch, by launch; those without one come last."""
    listed = joinery.markers()
    wanted = {each.launch for each in listed if each.launch}
    seen: dict[int, LaunchRow] = {}
    for partition in joinery.partitions() if wanted else ():
        for correlation, launch in _launches(partition).items():
            if correlation in wanted:
                seen[correlation] = launch
    found = []
    for each in listed:
        own = seen.get(each.launch)
        if own is not None:
            launched_ns = own.start_ns + joinery.shift_ns
            each = replace(each, launched_ns=launched_ns, thread_id=own.thread_id)
        found.append(each)
    found.sort(key=lambda each: (each.launched_ns is None, each.launched_ns or 0, each.start_ns))
    return tuple(found)


def under_recorded(steps: Sequence[Step], kernels: Mapping[int, StepKernels]) -> tuple[int, ...]:
    """Steps of which kernels are missing: they launched what never came, or their graphs had far fewer kernels than
    those of most steps of the same kind.

    The kernels of a replayed graph are the same each time; a profiler that runs out of buffers drops some of them.
    """
    found = {place for place, own in kernels.items() if own.unanswered}
    alike: dict[object, list[int]] = {}
    for place, own in kernels.items():
        if own.in_graphs:
            work = steps[place].work
            key = work.phase, work.prefill_tokens, work.decode_sequences
            alike.setdefault(key, []).append(place)
    for places in alike.values():
        usual = sorted(kernels[place].in_graphs for place in places)[len(places) // 2]
        found.update(place for place in places if 2 * kernels[place].in_graphs < usual)
    return tuple(sorted(found))


def _times(step: Step) -> tuple[int, int]:
    return step.start_ns, max(step.start_ns, step.end_ns)


def _start_of(event: EventRow) -> int:
    return event.start_ns


def _launches(partition: Partition) -> dict[int, LaunchRow]:
    """The launch of each id. A driver call inside of a runtime call has its id: the outer one, which begins first,
    stands."""
    found: dict[int, LaunchRow] = {}
    for launch in partition.launch_rows():
        before = found.get(launch.correlation)
        if before is None or launch.start_ns < before.start_ns:
            found[launch.correlation] = launch
    return found


class _Devices(dict[int, str]):
    """Names of devices by their numbers."""

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, number: int) -> str:
        found = self[number] = self._name(number)
        return found


class _Rows:
    """Rows of the `kernels` table, as columns."""

    def __init__(self, joinery: Joinery, source: str) -> None:
        self._joinery = joinery
        self._source = source
        self._passes: list[int | None] = []
        self._names: list[str] = []
        self._devices: list[str] = []
        self._streams: list[int | None] = []
        self._starts = array("q")
        self._ends = array("q")
        self._launched: list[int | None] = []

    def add(
        self,
        event: EventRow,
        start_ns: int,
        pass_id: int | None,
        launched_ns: int | None,
        device: str,
    ) -> None:
        self._passes.append(pass_id)
        self._names.append(self._joinery.names[event.name])
        self._devices.append(device)
        self._streams.append(event.stream if event.stream >= 0 else None)
        self._starts.append(start_ns)
        self._ends.append(start_ns + event.duration_ns)
        self._launched.append(launched_ns)

    def write(self, write: Callable[[pa.Table], None]) -> None:
        if self._starts:
            write(pa.Table.from_arrays(list(self._columns()), schema=KERNELS.arrow))

    def _columns(self) -> Iterator[pa.Array]:
        values: dict[str, Sequence[Any]] = {
            "pass_id": self._passes,
            "name": self._names,
            "device": self._devices,
            "stream": self._streams,
            "start_ns": self._starts.tolist(),
            "end_ns": self._ends.tolist(),
            "source": [self._source] * len(self._starts),
            "launched_ns": self._launched,
        }
        for column in KERNELS.arrow:
            yield to_column(values[column.name], column.type)
