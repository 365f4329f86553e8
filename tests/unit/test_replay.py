"""Recordings that are replayed: their times, their devices, and what cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phaseprof.clock import Clock
from phaseprof.collectors.replay import Replayed, load, probe, replay_collector
from phaseprof.collectors.sampling import CannotSample, SamplingTask
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.schema import SAMPLES
from phaseprof.trace.meta import ClockPair, CollectorCost, Device
from phaseprof.trace.writer import to_arrow

GPU = Device("NVIDIA Test", "cuda", 0, 132, None, 80 * 10**9, "cuda|test", "GPU-now")
SECOND = Device("NVIDIA Test", "cuda", 1, 132, None, 80 * 10**9, "cuda|test", "GPU-second")
CPU = Device("CPU", "cpu", 0, 4, 4, 16 * 10**9, "cpu|test")
BEGIN = 5_000


@dataclass(frozen=True)
class SetClock(Clock):
    """A clock that a test sets; the session began at 5000."""

    at: list[int] = field(default_factory=lambda: [BEGIN], kw_only=True)

    def now_unix_ns(self) -> int:
        return self.at[0]


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.clock = SetClock(ClockPair(BEGIN, 0))
        self.rows: list[Sample] = []
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows += rows

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


RECORDED = [
    Sample(100_300, 100_400, "GPU-b", "gpm", Metric.SM_ACTIVE, 0.7),
    Sample(100_000, 100_100, "GPU-a", "nvml", Metric.POWER, 500.0),
    Sample(100_000, 100_200, "GPU-a", "gpm", Metric.SM_ACTIVE, 0.5),
    Sample(100_050, 100_250, "cpu", "host", Metric.HOST_CPU, 0.25),
    Sample(100_200, 100_900, "GPU-a", "gpm", Metric.SM_ACTIVE, 0.6),
]


def write(path: Path, rows: Sequence[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(to_arrow(rows, SAMPLES.arrow), path)
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write(tmp_path / "recorded.parquet", RECORDED)


def test_rows_come_when_their_time_has_come_on_the_axis_of_this_session(recording: Path) -> None:
    sink = Sink()
    replayed = Replayed(load(recording), 0, GPU, sink)
    came = []
    for now in (BEGIN + 99, BEGIN + 250, BEGIN + 260, BEGIN + 10_000):
        sink.clock.at[0] = now
        came.append([(r.start_ns, r.end_ns, r.device, r.value) for r in replayed.sample()])
    assert came == [
        [],
        [
            (5000, 5100, "GPU-now", 500.0),
            (5000, 5200, "GPU-now", 0.5),
            (5050, 5250, "cpu", 0.25),
        ],
        [],
        [(5200, 5900, "GPU-now", 0.6)],
    ]


def test_devices_stand_for_those_of_this_run_in_their_order(recording: Path) -> None:
    loaded, sink = load(recording), Sink()
    assert loaded.devices == ("GPU-a", "GPU-b")
    sink.clock.at[0] = BEGIN + 10_000
    first = Replayed(loaded, 0, CPU, sink).sample()
    second = Replayed(loaded, 1, SECOND, sink).sample()
    # Beside a model on a CPU, what a GPU showed stands apart from what the host showed.
    assert [(row.device, row.source) for row in first] == [
        ("cpu|test", "nvml"),
        ("cpu|test", "gpm"),
        ("cpu", "host"),
        ("cpu|test", "gpm"),
    ]
    assert [(row.device, row.value) for row in second] == [("GPU-second", 0.7)]
    with pytest.raises(CannotSample, match="has 2 devices, and models ran on more"):
        Replayed(loaded, 2, GPU, sink)


def test_what_lies_beyond_the_end_of_the_run_is_left_out(recording: Path) -> None:
    sink = Sink()
    task = SamplingTask(replay_collector(str(recording)), GPU, sink)
    task.step(0)
    sink.clock.at[0] = BEGIN + 300
    task.end()
    assert [row.value for row in sink.rows] == [500.0, 0.5, 0.25]
    assert sink.notes == []


def test_a_trace_is_a_recording_and_parts_that_were_merged_count_once(tmp_path: Path) -> None:
    folder = tmp_path / "trace" / "samples" / "rank=0"
    write(folder / "part-0000aa-7-000001-000002.parquet", RECORDED[:3])
    write(folder / "part-0000aa-7-000002-000002.parquet", RECORDED[2:3])
    write(folder / "part-0000aa-8-000001-000001.parquet", RECORDED[3:])
    for source in (tmp_path / "trace", tmp_path / "trace" / "samples"):
        loaded = load(source)
        assert sorted(loaded.rows, key=repr) == sorted(RECORDED, key=repr)
        assert loaded.begin_ns == 100_000


def test_metrics_of_another_version_are_left_out(tmp_path: Path) -> None:
    other = Sample(100_000, 100_100, "GPU-a", "gpm", "quantum_active_share", 0.5)
    assert (
        load(write(tmp_path / "r.parquet", [*RECORDED, other])).rows
        == load(write(tmp_path / "s.parquet", RECORDED)).rows
    )


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("no parquet")
    table = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), table)
    empty = write(tmp_path / "empty.parquet", [])
    for source, said in [
        (text, "cannot be replayed"),
        (table, "cannot be replayed"),
        (empty, "holds no samples"),
        (tmp_path / "nothing", "cannot be replayed"),
    ]:
        with pytest.raises(CannotSample, match=said):
            load(source)
        assert not probe(source).available
    sink = Sink()
    task = SamplingTask(replay_collector(str(empty)), GPU, sink)
    task.step(0)
    assert task.ended
    assert [(note.what, note.why) for note in sink.notes] == [
        ("the samples of a recording", f"{empty} holds no samples")
    ]
