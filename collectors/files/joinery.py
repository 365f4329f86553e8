"""Launches and device events of a recording, kept until they can be joined: a little in memory, the rest on disk.

Rows are runs of 64-bit integers, in partitions by their correlation id, so that a launch and all that it launched lie
in the same one: a partition is joined without the others. Profilers give ids in the order of calls; a partition is
thereby a stretch of time as well.
"""

from __future__ import annotations

import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from phaseprof.collectors.files.contents import Marker
from phaseprof.errors import TraceError

#: Ids of a partition that follow one another, and how many partitions there are at most: ids beyond are folded back.
_IDS_BITS = 15
_PARTITIONS = 128
#: Integers that are held before they go to disk: 24 MB.
_HELD = 3 << 20
#: Bytes of a file that are read at a time: whole integers.
_READ_BYTES = 1 << 20
_INT64 = 1 << 63
_NO_GRID = (-1, -1, -1)
#: The files of markers and operators, beside those of the partitions.
_MARKERS, _OPERATORS = "markers", "operators"


class EventRow(NamedTuple):
    """One device event: a kernel, a copy or a memset. Times in ns, of the file's own epoch."""

    correlation: int
    start_ns: int
    duration_ns: int
    name: int
    device: int
    stream: int


class LaunchRow(NamedTuple):
    """One call of the host that gives a device work."""

    correlation: int
    start_ns: int
    thread_id: int
    name: int


class OperatorRow(NamedTuple):
    """One operator on the host."""

    start_ns: int
    duration_ns: int
    thread_id: int
    name: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The launches and device events of some correlation ids, in the order of the file.

    Attributes:
        launches, events: Give their integers. Of a partition that lies on disk a little is in memory.
    """

    launches: Callable[[], Iterable[int]]
    events: Callable[[], Iterable[int]]

    def launch_rows(self) -> Iterator[LaunchRow]:
        """The launches, one by one."""
        return map(LaunchRow._make, _rows(self.launches(), 4))

    def event_rows(self) -> Iterator[EventRow]:
        """The device events, one by one: under graphs few ids have many."""
        return map(EventRow._make, _rows(self.events(), 6))


class Joinery:
    """Takes the launches, device events and operators of one rank.

    Args:
        folder: Where a temporary folder may be made.

    Attributes:
        names: The distinct names; rows hold their place.
        shift_ns: What to add to the times of all rows: known once the file is read.
        launches, events: How many there are.
    """

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._known: dict[str, int] = {}
        self.shift_ns = 0
        self.launches = 0
        self.events = 0
        self._parent = folder
        self._folder: Path | None = None
        self._launch_parts: dict[int, array[int]] = {}
        self._event_parts: dict[int, array[int]] = {}
        self._marker_rows: array[int] = array("q")
        self._operator_rows: array[int] = array("q")
        self._last_operators: dict[int, OperatorRow] = {}
        #: On each thread they came by begin, an outer one before those within it.
        self._operators_in_order = True
        self._held = 0

    def name(self, text: str) -> int:
        """The place of a name."""
        place = self._known.get(text)
        if place is None:
            place = self._known[text] = len(self.names)
            self.names.append(text)
        return place

    def add_launch(self, correlation: int, start_ns: int, thread_id: int, name: int) -> None:
        """A call; one without correlation launched nothing that could be found."""
        if correlation <= 0:
            return
        self.launches += 1
        part = (correlation >> _IDS_BITS) % _PARTITIONS
        rows = self._launch_parts.get(part)
        if rows is None:
            rows = self._launch_parts[part] = array("q")
        rows.extend((correlation, start_ns, thread_id, name))
        self._hold(4)

    def add_event(
        self,
        correlation: int,
        start_ns: int,
        duration_ns: int,
        name: int,
        device: int,
        stream: int,
    ) -> None:
        """A kernel, a copy or a memset. ``correlation`` is 0 without one; ``stream`` is -1 if it is not known."""
        self.events += 1
        part = (correlation >> _IDS_BITS) % _PARTITIONS
        rows = self._event_parts.get(part)
        if rows is None:
            rows = self._event_parts[part] = array("q")
        rows.extend((correlation, start_ns, duration_ns, name, device, stream))
        self._hold(6)

    def add_marker(self, event: EventRow, grid: tuple[int, int, int] | None) -> None:
        """A kernel by which steps can be told apart; it is a device event as well."""
        self._marker_rows.extend((*event, *(grid or _NO_GRID)))
        self._hold(len(event) + len(_NO_GRID))

    def markers(self) -> list[Marker]:
        """The markers in the order of the file, without their launches; on the axis of the trace. Each call makes them
        anew: they are many."""
        rows = self._read(_MARKERS, self._marker_rows)
        return [self._marker(row) for row in _rows(rows, 9)]

    def _marker(self, row: tuple[int, ...]) -> Marker:
        correlation, start, duration, name, device, stream, *grid = row
        start += self.shift_ns
        return Marker(
            self.names[name],
            None,
            None,
            start,
            start + duration,
            device,
            stream,
            None if tuple(grid) == _NO_GRID else (grid[0], grid[1], grid[2]),
            correlation,
        )

    def add_operator(self, start_ns: int, duration_ns: int, thread_id: int, name: int) -> None:
        """An operator, if it lies in none that came before it on its thread."""
        last = self._last_operators.get(thread_id)
        if last is not None:
            if start_ns < last.start_ns or (
                start_ns == last.start_ns and duration_ns > last.duration_ns
            ):
                self._operators_in_order = False
            elif start_ns + duration_ns <= last.start_ns + last.duration_ns:
                return
        row = OperatorRow(start_ns, duration_ns, thread_id, name)
        self._last_operators[thread_id] = row
        self._operator_rows.extend(row)
        self._hold(len(row))

    def drop_operators(self) -> None:
        """There is a device: what it ran is looked at, and no operator."""
        self._operator_rows = array("q")
        self._last_operators.clear()
        if self._folder is not None:
            (self._folder / _OPERATORS).unlink(missing_ok=True)

    @property
    def has_operators(self) -> bool:
        """Whether there are operators."""
        return bool(self._last_operators)

    def operators(self) -> Iterator[OperatorRow]:
        """The outermost operators of each thread, by begin."""
        rows: Iterator[OperatorRow] = map(
            OperatorRow._make, _rows(self._read(_OPERATORS, self._operator_rows), 4)
        )
        if not self._operators_in_order:
            rows = iter(sorted(rows, key=lambda row: (row.start_ns, -row.duration_ns)))
        covered: dict[int, int] = {}
        for row in rows:
            if row.start_ns >= covered.get(row.thread_id, row.start_ns):
                yield row
                covered[row.thread_id] = row.start_ns + row.duration_ns

    def partitions(self) -> Iterator[Partition]:
        """All rows, a partition at a time; they can be gone through more than once."""
        for part in sorted({*self._on_disk(), *self._launch_parts, *self._event_parts}):
            yield Partition(
                partial(self._read, f"launches-{part}", self._launch_parts.get(part, ())),
                partial(self._read, f"events-{part}", self._event_parts.get(part, ())),
            )

    def close(self) -> None:
        """Remove what lies on disk."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _hold(self, integers: int) -> None:
        self._held += integers
        if self._held >= _HELD:
            self._spill()

    def _spill(self) -> None:
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix=".import-", dir=self._parent))
            for kind, parts in (("launches", self._launch_parts), ("events", self._event_parts)):
                for part, rows in parts.items():
                    with open(self._folder / f"{kind}-{part}", "ab") as file:
                        rows.tofile(file)
                parts.clear()
            for name, rows in (
                (_MARKERS, self._marker_rows),
                (_OPERATORS, self._operator_rows),
            ):
                with open(self._folder / name, "ab") as file:
                    rows.tofile(file)
                del rows[:]
        except OSError as error:
            raise TraceError(
                f"The trace cannot be written to {self._parent}: {error.strerror or error}.",
                "Choose another folder with -o.",
            ) from error
        self._held = 0

    def _on_disk(self) -> set[int]:
        if self._folder is None:
            return set()
        names = (path.name for path in self._folder.iterdir())
        return {int(name.partition("-")[2]) for name in names if "-" in name}

    def _read(self, name: str, held: Iterable[int]) -> Iterator[int]:
        """What lies on disk by that name, and what is held."""
        return chain(chain.from_iterable(self._read_disk(name)), held)

    def _read_disk(self, name: str) -> Iterator[array[int]]:
        if self._folder is None or not (self._folder / name).exists():
            return
        with open(self._folder / name, "rb") as file:
            while piece := file.read(_READ_BYTES):
                yield array("q", piece)


def correlation_of(value: object) -> int:
    """A correlation id as rows hold it; 0 for what is none. Ids are unsigned, and may be larger than 2^63."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return 0
    return value if value < _INT64 else value % _INT64


def _rows(flat: Iterable[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(flat)] * width, strict=True)
