"""A long run of samples on a simulated clock, from the sampler through the recorder into Parquet: nothing piles up."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phaseprof.clock import Clock
from phaseprof.collectors.base import Availability
from phaseprof.collectors.sampling import HAND_OVER_NS, PERIOD_NS, SampledCollector, SamplingTask
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink
from phaseprof.metrics import Metric
from phaseprof.process import ProcessPlace
from phaseprof.recorder import Recorder
from phaseprof.records import Kernel, Sample
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.meta import CollectorCost, Device, ProcessMeta
from phaseprof.trace.reader import open_trace

GPU = Device("NVIDIA Test", "cuda", 0, 132, None, 80 * 10**9, "cuda|test", "GPU-1")
MINUTES = 8
METRICS = tuple(Metric)[:16]
MINUTE_NS = 60 * 10**9


@dataclass(frozen=True)
class SetClock(Clock):
    at: list[int] = field(default_factory=lambda: [0], kw_only=True)

    def now_unix_ns(self) -> int:
        return self.at[0]


class Sink:
    """Hands samples to a recorder."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.clock = clock
        self.recorder = recorder

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.recorder.put_samples(rows)

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        raise AssertionError(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


class Steady:
    """One row a metric and turn."""

    def __init__(self, sink: EvidenceSink) -> None:
        self.clock = sink.clock
        self.last = sink.clock.now_unix_ns()

    def sample(self) -> Sequence[Sample]:
        begin, self.last = self.last, self.clock.now_unix_ns()
        return [Sample(begin, self.last, GPU.uuid, "steady", m, 0.5) for m in METRICS]

    def close(self) -> None: ...


def alive() -> int:
    gc.collect()
    return sum(type(each) is Sample for each in gc.get_objects())


def test_a_long_run_keeps_no_samples_and_loses_none(tmp_path: Path) -> None:
    meta = ProcessMeta(SCHEMA_VERSION, "0", 0, 7, ("x",), {}, 1, complete=True)
    clock = SetClock(Clock.start().pair)
    recorder = Recorder(
        tmp_path,
        place=ProcessPlace({}),
        host="0000aa",
        clock=clock,
        meta=lambda: meta,
        note=lambda missing: None,
        passes_seen=lambda: 0,
    )
    recorder.start()
    sink = Sink(recorder, clock)
    made = SampledCollector(
        "steady", "", lambda device, sink: Steady(sink), lambda: Availability(True, "")
    )
    task = SamplingTask(made, GPU, sink)
    before = alive()
    most, turns = 0, 0
    task.step(0)
    for minute in range(1, MINUTES + 1):
        while clock.at[0] < minute * MINUTE_NS:
            clock.at[0] += PERIOD_NS
            task.step(clock.at[0])
            turns += 1
        recorder.sync()
        if minute % 2 == 0:
            most = max(most, alive() - before)
    task.end()
    recorder.close()
    # What waits to be handed over, and nothing else.
    assert most <= len(METRICS) * (HAND_OVER_NS // PERIOD_NS + 1)
    samples = open_trace(tmp_path).samples
    assert samples.num_rows == (turns + 1) * len(METRICS)
    assert len(list(tmp_path.rglob("part-*.parquet"))) == 1
