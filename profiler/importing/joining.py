"""Kernels of a recording to the steps that launched them: by launch correlation and by nothing else.

What has no launch in sight, or one outside of all steps, keeps no pass: it is counted, and never spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import pyarrow as pa

from phaseprof.attribution import PassJoin, PassWindow, always_has_events
from phaseprof.collectors.files.contents import Marker
from phaseprof.collectors.files.joinery import EventRow, Joinery, LaunchRow, Partition
from phaseprof.importing.drawn import Drawn
from phaseprof.importing.forms import Step
from phaseprof.importing.kernel_rows import ROWS, Devices, KernelRows


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
    join = _Join(joinery, steps, pass_ids, drawn)
    rows = KernelRows(joinery, source, write)
    names = Devices(device_name)
    for partition in joinery.partitions():
        launched = _launches(partition)
        answered: set[int] = set()
        # Under graphs few ids launch many kernels: a partition may be large.
        events = partition.event_rows()
        while some := sorted(islice(events, ROWS), key=_start_of):
            for event in some:
                launch = launched.get(event.correlation) if event.correlation else None
                if launch is not None:
                    answered.add(event.correlation)
                place = join.place(event, launch)
                start_ns = event.start_ns + joinery.shift_ns
                launched_ns = None if launch is None else launch.start_ns + joinery.shift_ns
                number = None if place is None else pass_ids[place]
                rows.add(event, start_ns, number, launched_ns, names[event.device])
        for correlation, launch in launched.items():
            if correlation not in answered and always_has_events(joinery.names[launch.name]):
                join.add_unanswered(launch)
    rows.flush()
    return join.joined


class _Join:
    """Which step each device event is of, and what all of them come to."""

    def __init__(
        self,
        joinery: Joinery,
        steps: Sequence[Step],
        pass_ids: Sequence[int],
        drawn: Drawn | None,
    ) -> None:
        self.joined = Joined()
        self._shift_ns = joinery.shift_ns
        self._names = joinery.names
        self._drawn = drawn
        self._join = PassJoin(step_windows(steps, pass_ids))
        self._place_of = {number: place for place, number in enumerate(pass_ids)}
        #: The launch that was looked at last, and what was found: those of a graph follow one another.
        self._last: tuple[LaunchRow | None, int | None] = (None, None)

    def place(self, event: EventRow, launch: LaunchRow | None) -> int | None:
        """The place of the step that an event is of, which it is counted for; None if of none."""
        joined, start_ns = self.joined, event.start_ns + self._shift_ns
        joined.events += 1
        place: int | None = None
        if self._drawn is not None:
            middle_ns = start_ns + event.duration_ns // 2
            place = self._drawn.of(event.device, event.stream, middle_ns)
        elif launch is not None:
            place = self._of_launch(launch)
        if place is not None:
            own = joined.steps.setdefault(place, StepKernels())
            in_graph = launch is not None and "Graph" in self._names[launch.name]
            own.add(start_ns, start_ns + event.duration_ns, in_graph)
        elif launch is None:
            joined.launchless += 1
        else:
            joined.between += 1
        return place

    def add_unanswered(self, launch: LaunchRow) -> None:
        """A launch of which nothing came."""
        self.joined.unanswered += 1
        place = None if self._drawn is not None else self._of_launch(launch)
        if place is not None:
            self.joined.steps.setdefault(place, StepKernels()).unanswered += 1

    def _of_launch(self, launch: LaunchRow) -> int | None:
        if self._last[0] is launch:
            return self._last[1]
        found = self._join.of_launch(launch.start_ns + self._shift_ns, launch.thread_id)
        place = None if found is None else self._place_of[found.pass_id]
        self._last = launch, place
        return place


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
    rows = KernelRows(joinery, source, write)
    threads: dict[int, int] = {}
    for row in joinery.operators():
        start = row.start_ns + joinery.shift_ns
        found = join.on_thread(row.thread_id, start, start + row.duration_ns)
        joined.events += 1
        joined.between += found is None
        thread = threads.setdefault(row.thread_id, len(threads))
        event = EventRow(0, row.start_ns, row.duration_ns, row.name, 0, thread)
        rows.add(event, start, None if found is None else found.pass_id, None, "cpu")
    rows.flush()
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
