"""Files of torch.profiler of all years: what a reader takes out of hand-written ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseprof.collectors.files import kineto
from phaseprof.collectors.files.contents import Contents, Marker
from phaseprof.collectors.files.joinery import (
    EventRow,
    Joinery,
    LaunchRow,
    OperatorRow,
    correlation_of,
)
from phaseprof.collectors.files.source import Bytes


class Read:
    """A file's contents, launches and events, with times on the axis of the trace."""

    def __init__(self, folder: Path, events: list[dict[str, Any]], **header: Any) -> None:
        path = folder / "trace.json"
        before = {key: value for key, value in header.items() if key != "behind"}
        text = json.dumps({**before, "traceEvents": events, **header.get("behind", {})})
        path.write_text(text)
        self.joinery = Joinery(folder)
        self.contents: Contents = kineto.read(
            Bytes(path),
            self.joinery,
            function_kind=lambda name: "step" if name.endswith(": execute_model") else "",
            wants_marker=lambda name: name.startswith("reshape_and_cache"),
        )
        self.markers: list[Marker] = self.joinery.markers()
        partitions = list(self.joinery.partitions())
        shift = self.joinery.shift_ns
        self.events: list[EventRow] = [
            row._replace(start_ns=row.start_ns + shift)
            for partition in partitions
            for row in partition.event_rows()
        ]
        self.launches: list[LaunchRow] = [
            row._replace(start_ns=row.start_ns + shift)
            for partition in partitions
            for row in partition.launch_rows()
        ]

    def names(self, rows: list[EventRow] | list[LaunchRow]) -> list[str]:
        return [self.joinery.names[row.name] for row in rows]


def event(cat: str, name: str, ts: Any, dur: Any, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 11, "tid": 12, "ts": ts, "dur": dur, **more}


def test_the_schema_of_2021(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [
            event("Operator", "aten::mm", 1623142623460111, 25, tid="12"),
            event("Operator", "ProfilerStep#3", 1623142623460000, 900, tid="12"),
            event("Operator", "MmBackward0", 1623142623460200, 90, tid="12"),
            event(
                "Runtime",
                "cudaLaunchKernel",
                1623142623460120,
                7,
                tid="12",
                args={"cbid": 211, "correlation": 34, "external id": 5},
            ),
            event(
                "Kernel",
                "volta_sgemm",
                1623142623460140,
                0,
                pid=0,
                tid="stream 7",
                args={"device": 0, "stream": 7, "correlation": 34, "external id": 5},
            ),
            event(
                "Memcpy",
                "Memcpy HtoD",
                1623142623460160,
                3,
                pid=0,
                tid="stream 9",
                args={"correlation": 35},
            ),
        ],
    )
    assert read.contents.epoch
    assert [span.name for span in read.contents.annotations] == ["ProfilerStep#3"]
    assert read.launches == [LaunchRow(34, 1623142623460120000, 12, read.launches[0].name)]
    kernel, copy = read.events
    assert (kernel.start_ns, kernel.duration_ns, kernel.device, kernel.stream) == (
        1623142623460140000,
        0,
        0,
        7,
    )
    # Its stream and device stand beside its arguments.
    assert (copy.device, copy.stream, copy.duration_ns) == (0, 9, 3000)
    assert read.names(read.events) == ["volta_sgemm", "Memcpy HtoD"]


@pytest.mark.parametrize("behind", [True, False])
def test_times_from_a_base_that_may_stand_behind_the_events(tmp_path: Path, behind: bool) -> None:
    base = {"baseTimeNanoseconds": 1767189312000000000}
    header: dict[str, Any] = {"behind": base} if behind else base
    read = Read(
        tmp_path,
        [
            event("user_annotation", "step", 1365.125, 10.25),
            event("cuda_runtime", "cudaLaunchKernel", 1366.5, 1, args={"correlation": 1}),
            event("kernel", "k", 1370.001, 2.5, args={"device": 0, "stream": 7, "correlation": 1}),
        ],
        **header,
    )
    (span,) = read.contents.annotations
    assert (span.start_ns, span.end_ns) == (1767189312001365125, 1767189312001375375)
    assert read.launches[0].start_ns == 1767189312001366500
    assert (read.events[0].start_ns, read.events[0].duration_ns) == (1767189312001370001, 2500)
    assert read.contents.start_ns == 1767189312001365125
    assert read.contents.end_ns == 1767189312001375375


def test_a_base_is_not_added_to_times_that_count_from_the_epoch(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [event("user_annotation", "step", 1661203462598772, 10)],
        baseTimeNanoseconds=1661203462000000000,
    )
    assert read.contents.start_ns == 1661203462598772000


def test_without_a_base_the_epoch_is_not_known(tmp_path: Path) -> None:
    read = Read(tmp_path, [event("user_annotation", "step", 5.0, 10)])
    assert not read.contents.epoch
    assert read.contents.start_ns == 5000


def test_devices_of_rocm_are_told_by_their_description(tmp_path: Path) -> None:
    alike = [
        {"id": number, "name": "", "totalGlobalMem": 206141652992, "numSms": 304}
        for number in (0, 1)
    ]
    read = Read(
        tmp_path,
        [
            event("cuda_runtime", "hipLaunchKernel", 1.0, 1, args={"correlation": 1}),
            event("kernel", "k", 2.0, 1, args={"device": 9, "stream": 1 << 40, "correlation": 1}),
        ],
        deviceProperties=alike,
        baseTimeNanoseconds=1767189312000000000,
    )
    (device,) = read.contents.devices
    assert (device.number, device.name, device.cores) == (9, "", 304)
    assert read.contents.rocm
    # A stream that is an address has a number that fits its column.
    assert 0 <= read.events[0].stream < 1 << 31


def test_ranks_and_versions(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [event("user_annotation", "step", 1.0, 1)],
        distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8},
        cuda_runtime_version=12090,
    )
    assert (read.contents.rank, read.contents.world_size) == (3, 8)
    assert read.contents.versions == {"cuda_runtime": "12090"}
    lone = Read(tmp_path, [event("user_annotation", "s", 1.0, 1)], distributedInfo={"rank": "?"})
    assert lone.contents.rank is None


def test_spans_drawn_on_a_device_and_calls_that_launch_nothing_are_left_out(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [
            event("gpu_user_annotation", "step", 1.0, 100, args={"device": 0}),
            event("cuda_runtime", "cudaEventRecord", 1.0, 1, args={"correlation": 5}),
            event("ac2g", "ac2g", 1.0, 0),
        ],
    )
    assert (read.events, read.launches, read.contents.annotations) == ([], [], ())


def test_what_is_no_whole_event_is_counted(tmp_path: Path) -> None:
    given = {"device": 0, "stream": 7, "correlation": 1}
    read = Read(
        tmp_path,
        [
            event("kernel", "whole", 1.0, 1, args=given),
            event("kernel", "no time", None, 1, args=given),
            event("kernel", "no length", 1.0, "N/A", args=given),
            event("kernel", "negative", 1.0, -1, args=given),
            event("kernel", "no device", 1.0, 1, args={"device": "?", "correlation": 1}),
            {**event("kernel", "begins", 1.0, 1, args=given), "ph": "B"},
        ],
    )
    assert read.names(read.events) == ["whole"]
    left = read.contents.left_out
    assert (left.no_time, left.bad_device, left.unmatched) == (3, 1, 1)


def test_functions_and_markers_that_are_asked_for(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [
            event("python_function", "gpu_model_runner.py(7): execute_model", 1.0, 5, tid=3),
            event("python_function", "other.py(7): f", 1.0, 5, tid=3),
            event(
                "kernel",
                "reshape_and_cache_flash",
                2.0,
                1,
                args={"device": 0, "stream": 7, "correlation": 9, "grid": [888, 1, 1]},
            ),
        ],
        baseTimeNanoseconds=1767189312000000000,
    )
    assert [span.thread_id for span in read.contents.functions] == [3]
    (marker,) = read.markers
    assert marker.grid == (888, 1, 1)
    assert marker.start_ns == 1767189312000002000


def test_calls_within_calls_of_their_kind_are_not_held(tmp_path: Path) -> None:
    name = "gpu_model_runner.py(7): execute_model"
    layers = [event("python_function", name, 2.0 + 0.1 * n, 0.05, tid=3) for n in range(50)]
    read = Read(
        tmp_path,
        [
            event("python_function", name, 1.0, 9, tid=3),
            *layers,
            event("python_function", name, 3.0, 1, tid=4),
            event("python_function", name, 10.0, 2, tid=3),
        ],
    )
    assert [(span.start_ns, span.thread_id) for span in read.contents.functions] == [
        *((1000, 3), (3000, 4), (10000, 3)),
    ]


def test_look_ups_end_with_the_last_product_before_the_next(tmp_path: Path) -> None:
    def look_up(ts: float, *shape: int, tid: int = 3) -> dict[str, Any]:
        dims = {"Input Dims": [[256, 64], list(shape), [], [], []]}
        return event("cpu_op", "aten::embedding", ts, 1, tid=tid, args=dims)

    def product(ts: float, dur: float) -> dict[str, Any]:
        return event("cpu_op", "aten::linear", ts, dur, tid=3)

    read = Read(
        tmp_path,
        [
            look_up(10.0, 2, 9),
            look_up(12.0, 1, 9),  # of positions
            product(20.0, 5.0),
            product(30.0, 5.0),
            product(31.0, 1.0),  # within the one before
            event("cpu_op", "aten::argmax", 40.0, 1, tid=3),
            look_up(50.0, 2, 1),
            look_up(52.0, 4, 1, tid=4),
            product(60.0, 5.0),
        ],
        baseTimeNanoseconds=1767189312000000000,
    )
    base = 1767189312000000000
    assert [
        (each.start_ns - base, each.thread_id, each.shape, each.end_ns and each.end_ns - base)
        for each in read.contents.lookups
    ] == [
        (10_000, 3, (2, 9), 35_000),
        (50_000, 3, (2, 1), 65_000),
        (52_000, 4, (4, 1), None),
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (7, 7),
        ("7", 7),
        (7.0, 7),
        (0, 0),
        (-1, 0),
        (None, 0),
        ("N/A", 0),
        (True, 0),
        ((1 << 63) + 5, 5),
        (1 << 63, 0),
    ],
)
def test_correlation_ids(given: object, kept: int) -> None:
    assert correlation_of(given) == kept


def test_what_goes_to_disk_comes_back_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phaseprof.collectors.files.joinery._HELD", 100)
    joinery = Joinery(tmp_path)
    name = joinery.name("k")
    ids = [1, 2, 40_000, 3, 9_999_999, 1 << 62, 40_000]
    rows = []
    for place, correlation in enumerate(ids * 20):
        rows.append(EventRow(correlation, place, 1, name, 0, 7))
        joinery.add_marker(rows[-1], (place, 1, 1) if place % 2 else None)
        joinery.add_launch(correlation, place, 5, name)
        joinery.add_event(correlation, place, 1, name, 0, 7)
    assert [path.name[:8] for path in tmp_path.iterdir()] == [".import-"]
    launches = [row for part in joinery.partitions() for row in part.launch_rows()]
    events = [row for part in joinery.partitions() for row in part.event_rows()]
    assert sorted(row.start_ns for row in launches) == list(range(140))
    assert sorted(row.start_ns for row in events) == list(range(140))
    assert [(each.launch, each.start_ns, each.grid) for each in joinery.markers()] == [
        (row.correlation, row.start_ns, (row.start_ns, 1, 1) if row.start_ns % 2 else None)
        for row in rows
    ]
    for part in joinery.partitions():
        assert {row.correlation for row in part.launch_rows()} == {
            row.correlation for row in part.event_rows()
        }
    joinery.close()
    assert list(tmp_path.iterdir()) == []


def test_operators_that_lie_in_others_are_no_outermost_ones(tmp_path: Path) -> None:
    read = Read(
        tmp_path,
        [
            event("cpu_op", "aten::linear", 1.0, 10),
            event("cpu_op", "aten::addmm", 2.0, 5),
            event("cpu_op", "aten::mul", 20.0, 5),
            event("cpu_op", "aten::outer", 19.0, 9),
            event("cpu_op", "aten::mm", 2.0, 5, tid=99),
        ],
    )
    found = [read.joinery.names[row.name] for row in read.joinery.operators()]
    assert found == ["aten::linear", "aten::mm", "aten::outer"]


@pytest.mark.parametrize("turned", [False, True])
def test_operators_that_went_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    monkeypatch.setattr("phaseprof.collectors.files.joinery._HELD", 20)
    joinery = Joinery(tmp_path)
    rows = [OperatorRow(10 * at, 9, 1 + at % 2, joinery.name("op")) for at in range(50)]
    within = [row._replace(start_ns=row.start_ns + 2, duration_ns=3) for row in rows]
    both = [row for pair in zip(rows, within, strict=True) for row in pair]
    for row in reversed(both) if turned else both:
        joinery.add_operator(*row)
    assert list(joinery.operators()) == rows
    assert list(joinery.operators()) == rows
    joinery.drop_operators()
    assert not joinery.has_operators and list(joinery.operators()) == []
    joinery.close()
    assert list(tmp_path.iterdir()) == []
