"""Nsight Systems exports (SQLite): ranges, launches, kernels and counters, a process at a time.

Versions of 2020 to 2026 differ in their tables and columns; each is looked up, and what is missing is said. Each
process counts correlation ids by itself, so that equal ones of two processes mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from phaseprof.collectors.files.contents import Contents, LeftOut, Span
from phaseprof.collectors.files.joinery import EventRow, Joinery
from phaseprof.collectors.files.nsys_database import Database
from phaseprof.collectors.files.nsys_gpus import Gpus
from phaseprof.collectors.files.nsys_metrics import Sampled, SampleRow, read_samples
from phaseprof.collectors.files.nsys_tables import (
    CALLS,
    COPIES,
    GRAPHS,
    INT32,
    KERNELS,
    LATEST_NS,
    PID_BITS,
    RANGES,
    SETS,
    TID_MASK,
    Process,
    Strings,
    clock_of,
    copy_name,
    processes,
    set_name,
)
from phaseprof.errors import NotMeasured

#: What a graph that was traced as a whole is called among the kernels.
WHOLE_GRAPH = "cuda_graph_traced_as_a_whole"
#: Ranges of NVTX and of NVTX text files: pushed and popped, started and ended; and what names a domain.
_RANGE_TYPES = frozenset((59, 60, 70, 71))
_DOMAIN_TYPE = 75
#: Domains of libraries, whose ranges are calls of theirs.
_LIBRARIES = frozenset(("NCCL", "CCCL", "cuBLAS", "cuBLASLt", "cuDNN", "cuSPARSE", "NVSHMEM"))
_LAUNCHING = ("Launch", "Memcpy", "Memset")
#: Ranges that are held, at most.
_SPANS = 500_000
#: What emit_nvtx appends to the name of an operator.
_APPENDED = re.compile(r", (?:op_id|seq|sizes|input_op_ids) = .*$")
#: CUDA appends the version that a function came with.
_VERSION = re.compile(r"_v\d+$")

__all__ = ["WHOLE_GRAPH", "Process", "processes", "read", "samples"]

Progress = Callable[[int], None]


def read(
    database: Database,
    process: Process,
    joinery: Joinery,
    *,
    wants_marker: Callable[[str], bool],
    wants_annotation: Callable[[str], bool] = lambda name: True,
    progress: Progress = lambda done: None,
) -> Contents:
    """Read what one process did.

    Args:
        database: The export.
        process: One of `processes`.
        joinery: Takes launches and device events.
        wants_marker: Whether kernels of that name are kept as markers as well.
        wants_annotation: Whether ranges of that name are kept.
        progress: Told of rows read.

    Returns:
        What is little.
    """
    return _Reading(database, process, joinery, wants_marker, wants_annotation, progress).run()


def samples(database: Database, sampled: Sampled) -> Iterator[SampleRow]:
    """The counters of all devices; times are on the axis of the contents."""
    shift, _ = clock_of(database)
    for row in read_samples(database, Gpus(database), sampled):
        if abs(row.start_ns) < LATEST_NS and row.end_ns < LATEST_NS:
            yield row._replace(start_ns=row.start_ns + shift, end_ns=row.end_ns + shift)


class _Reading:
    """One process, while it is read."""

    def __init__(
        self,
        database: Database,
        process: Process,
        joinery: Joinery,
        wants_marker: Callable[[str], bool],
        wants_annotation: Callable[[str], bool],
        progress: Progress,
    ) -> None:
        self._database = database
        self._process = process
        self._joinery = joinery
        self._wants_marker = wants_marker
        self._wants_annotation = wants_annotation
        self._progress = progress
        self._gpus = Gpus(database)
        self._strings = Strings(database)
        self._shift, self._epoch = clock_of(database)
        self._left_out = LeftOut()
        self._devices: dict[int, None] = {}
        self._lacking: list[NotMeasured] = []
        self._first: int | None = None
        self._last = 0
        self._done = 0

    def run(self) -> Contents:
        self._joinery.shift_ns = self._shift
        annotations = tuple(self._ranges())
        self._calls()
        self._kernels()
        self._copies()
        self._whole_graphs()
        export = self._database.value(
            "META_DATA_EXPORT", "value", where="name = ?", of=("EXPORT_PRODUCT_VERSION",)
        )
        some = self._first is not None
        return Contents(
            source="nsys",
            annotations=annotations,
            devices=tuple(map(self._gpus.described, sorted(self._devices))),
            described=len(self._gpus),
            process=self._process.pid,
            rank=self._process.rank,
            versions={"nsight_systems": export} if isinstance(export, str) else {},
            epoch=self._epoch,
            start_ns=(self._first or 0) + self._shift if some else 0,
            end_ns=self._last + self._shift if some else 0,
            left_out=self._left_out,
            damage=tuple(self._database.damage),
            lacking=tuple(self._lacking),
        )

    # Host

    def _ranges(self) -> Iterator[Span]:
        if not self._database.has(RANGES):
            self._lacks(
                "ranges of NVTX",
                "the export has no table of them",
                "nsys profile --trace=cuda,nvtx",
            )
            return
        domains = self._library_domains()
        held = dropped = 0
        columns = ("start", "end", "eventType", "text", "textId", "globalTid", "domainId")
        for start, end, kind, text, text_id, thread, domain in self._rows(
            RANGES, columns, "globalTid", needs=("start",)
        ):
            if kind is not None and kind not in _RANGE_TYPES:
                continue
            name = text if isinstance(text, str) and text else self._strings.get(text_id)
            if not name or "::" in name or domain in domains:
                continue
            if end is None:
                self._left_out.unmatched += 1
                continue
            if not self._in_time(start, end):
                continue
            name = _APPENDED.sub("", name)
            if not self._wants_annotation(name):
                continue
            if held == _SPANS:
                dropped += 1
                continue
            held += 1
            yield Span(
                name,
                start + self._shift,
                end + self._shift,
                thread & TID_MASK if isinstance(thread, int) else 0,
                self._process.pid,
            )
        if dropped:
            self._lacks(
                f"{dropped:,} ranges of NVTX", f"only the first {_SPANS:,} are held", "record less"
            )

    def _library_domains(self) -> frozenset[int]:
        """The domains of libraries, by their numbers in this process."""
        found = set()
        columns = ("eventType", "text", "textId", "domainId", "globalTid")
        if "eventtype" not in self._database.columns(RANGES):
            return frozenset()
        where, own = self._own(RANGES, "globalTid")
        for _, text, text_id, domain, _ in self._database.rows(
            RANGES,
            columns,
            needs=("domainId",),
            where=f'"eventType" = {_DOMAIN_TYPE}' + (f" AND {where}" if where else ""),
            parameters=own,
        ):
            if (text or self._strings.get(text_id)) in _LIBRARIES and isinstance(domain, int):
                found.add(domain)
        return frozenset(found)

    def _calls(self) -> None:
        if not self._database.has(CALLS):
            self._lacks("which step a kernel is of", "the export has no calls of CUDA", _ALL_TABLES)
            return
        if self._process.key is None and self._mixed():
            self._lacks(
                "which step a kernel is of",
                "several processes have equal correlation ids, and kernels do not tell their process",
                "export with a newer version of nsys",
            )
            return
        launching: dict[int, int] = {}
        for start, end, thread, correlation, name_id in self._rows(
            CALLS,
            ("start", "end", "globalTid", "correlationId", "nameId"),
            "globalTid",
            needs=("start", "correlationId", "nameId"),
        ):
            place = launching.get(name_id) if isinstance(name_id, int) else -1
            if place is None:
                name = _VERSION.sub("", self._strings.get(name_id))
                launches = any(part in name for part in _LAUNCHING)
                place = launching[name_id] = self._joinery.name(name) if launches else -1
            if place >= 0 and self._in_time(start, start if end is None else end):
                own = thread & TID_MASK if isinstance(thread, int) else -1
                self._joinery.add_launch(_correlation(correlation), start, own, place)

    def _mixed(self) -> bool:
        keys = self._database.distinct(CALLS, f'"globalTid" >> {PID_BITS}', "globalTid")
        return len(keys) > 1

    # Devices

    def _kernels(self) -> None:
        if not self._database.has(KERNELS):
            if not self._database.has(GRAPHS):
                self._lacks("kernels", "the export has no table of them", _ALL_TABLES)
            return
        columns = self._database.columns(KERNELS)
        named = next(
            (each for each in ("demangledName", "shortName") if each.lower() in columns), "name"
        )
        places: dict[Any, tuple[int, bool]] = {}
        for start, end, device, stream, correlation, name_id, x, y, z in self._rows(
            KERNELS,
            (
                "start",
                "end",
                "deviceId",
                "streamId",
                "correlationId",
                named,
                "gridX",
                "gridY",
                "gridZ",
            ),
            "globalPid",
            needs=("start", "end"),
        ):
            if name_id not in places:
                name = self._strings.get(name_id) or "kernel without a name"
                places[name_id] = self._joinery.name(name), self._wants_marker(name)
            place, marks = places[name_id]
            number = self._add(start, end, device, stream, correlation, place)
            if marks and number is not None:
                grid = (x, y, z) if all(isinstance(each, int) for each in (x, y, z)) else None
                row = EventRow(
                    _correlation(correlation), start, end - start, place, number, _stream(stream)
                )
                self._joinery.add_marker(row, grid)

    def _copies(self) -> None:
        columns = ("start", "end", "deviceId", "streamId", "correlationId")
        for start, end, device, stream, correlation, kind, source, target in self._rows(
            COPIES,
            (*columns, "copyKind", "srcKind", "dstKind"),
            "globalPid",
            needs=("start", "end"),
        ):
            name = copy_name(kind, source, target)
            self._add(start, end, device, stream, correlation, self._joinery.name(name))
        for start, end, device, stream, correlation, kind in self._rows(
            SETS, (*columns, "memKind"), "globalPid", needs=("start", "end")
        ):
            place = self._joinery.name(set_name(kind))
            self._add(start, end, device, stream, correlation, place)

    def _whole_graphs(self) -> None:
        place = self._joinery.name(WHOLE_GRAPH)
        count = 0
        for event in self._rows(
            GRAPHS,
            ("start", "end", "deviceId", "streamId", "correlationId"),
            "globalPid",
            needs=("start", "end"),
        ):
            start, end, device, stream, correlation = event
            count += self._add(start, end, device, stream, correlation, place) is not None
        if count:
            self._lacks(
                f"the kernels inside of CUDA graphs ({count:,} launched)",
                "Nsight Systems traced each graph as a whole: its time is busy, its kernels are not known",
                "nsys profile --cuda-graph-trace=node",
            )

    def _add(
        self, start: Any, end: Any, device: Any, stream: Any, correlation: Any, place: int
    ) -> int | None:
        if not self._in_time(start, end):
            return None
        if device is None:
            device = 0  # a version that has no such column has one device
        if not isinstance(device, int) or not -1 <= device < INT32:
            self._left_out.bad_device += 1
            return None
        number = self._gpus.number(self._process.pid, device)
        self._devices[number] = None
        self._joinery.add_event(
            _correlation(correlation), start, end - start, place, number, _stream(stream)
        )
        return number

    # Rows

    def _rows(
        self, table: str, columns: tuple[str, ...], own: str, *, needs: tuple[str, ...]
    ) -> Iterator[tuple[Any, ...]]:
        missing = [each for each in needs if each.lower() not in self._database.columns(table)]
        if self._database.has(table) and missing:
            self._lacks(f"the rows of {table}", f"it has no column {' and '.join(missing)}")
            return
        where, parameters = self._own(table, own)
        for row in self._database.rows(
            table, columns, needs=needs, where=where, parameters=parameters
        ):
            self._done += 1
            if self._done & 0xFFFF == 0:
                self._progress(self._done)
            yield row

    def _own(self, table: str, column: str) -> tuple[str, tuple[int, ...]]:
        if self._process.key is None or column.lower() not in self._database.columns(table):
            return "", ()
        return f'"{column}" >> {PID_BITS} = ?', (self._process.key,)

    def _in_time(self, start: Any, end: Any) -> bool:
        """Whether these are times; they are counted where they are not."""
        if (
            not isinstance(start, int)
            or not isinstance(end, int)
            or not -LATEST_NS < start <= end < LATEST_NS
        ):
            self._left_out.no_time += 1
            return False
        if self._first is None or start < self._first:
            self._first = start
        if end > self._last:
            self._last = end
        return True

    def _lacks(self, what: str, why: str, fix: str = "") -> None:
        entry = NotMeasured(what, why, fix)
        if entry not in self._lacking:
            self._lacking.append(entry)


def _correlation(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 62 else 0


def _stream(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < INT32 else -1


_ALL_TABLES = "export all tables: nsys export --type sqlite REPORT.nsys-rep"
