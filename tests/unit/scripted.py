"""Runs on a device with known counters: passes, what each did to the device, and the samples that a collector takes.

The truth of every test of counters comes from here: the value that each pass has is drawn or given, the value of a
window is the integral of what ran in it, and the mean of a phase is that of its passes by their time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any

import pyarrow as pa
from traces import GPU, META, MS, START_NS, Timeline, model

from phaseprof.metrics import Metric
from phaseprof.schema import SAMPLES
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import Trace

UUID = "GPU-00000000-0000-0000-0000-000000000001"
DEVICE = replace(GPU, uuid=UUID)
#: The process of a model on that device.
ON_GPU = replace(META, devices=(DEVICE,), models=(model(device=DEVICE),), ceilings=())


@dataclass(frozen=True, slots=True)
class Ran:
    """One pass on the device, ns from the start of the run, and the value that a counter has during it."""

    start: float
    end: float
    phase: str
    value: float


@dataclass
class Script:
    """What ran, and what a counter shows of it.

    Attributes:
        passes: In order, none over another.
        idle: The counter's value in pauses. between: In the times of less than 5 ms between passes.
    """

    passes: Sequence[Ran]
    idle: float = 0.0
    between: float = 0.0
    _starts: list[float] = field(init=False)
    _sums: list[float] = field(init=False)
    _pieces: list[tuple[float, float, float]] = field(init=False)

    def __post_init__(self) -> None:
        pieces: list[tuple[float, float, float]] = []
        at = -1e15
        for ran in self.passes:
            if ran.start > at:
                short = ran.start - at < 5 * MS
                pieces.append((at, ran.start, self.between if short else self.idle))
            pieces.append((ran.start, ran.end, ran.value))
            at = ran.end
        pieces.append((at, 1e15, self.idle))
        self._pieces = pieces
        self._starts = [start for start, _, _ in pieces]
        self._sums = list(accumulate(((e - s) * v for s, e, v in pieces), initial=0.0))

    @property
    def end(self) -> float:
        """When the last pass ends."""
        return self.passes[-1].end

    def mean(self, start: float, end: float) -> float:
        """The counter's mean over a window."""
        return (self._until(end) - self._until(start)) / (end - start)

    def _until(self, at: float) -> float:
        place = bisect_right(self._starts, at) - 1
        start, _, value = self._pieces[place]
        return self._sums[place] + (at - start) * value

    def truth(self, phase: str) -> float:
        """The mean of a phase over its time."""
        mine = [ran for ran in self.passes if ran.phase == phase]
        whole = sum(ran.end - ran.start for ran in mine)
        return sum((ran.end - ran.start) * ran.value for ran in mine) / whole

    def sampled(
        self,
        random: Random | None = None,
        *,
        window: float = 100 * MS,
        noise: float = 0.0,
        offset: float = 0.0,
        jitter: float = 0.0,
        missing: float = 0.0,
        greatest: float = 1.05,
    ) -> list[tuple[int, int, float]]:
        """Windows one after another, as begin, end and value.

        Args:
            random: For what is random.
            window: Length; each is up to a few ms longer.
            noise: Standard deviation of the value. offset: Of the windows' clock.
            jitter: Standard deviation of the recorded edges.
            missing: Share of windows that are lost.
            greatest: Values beyond it are cut.
        """
        random = random or Random(0)
        found = []
        at = random.uniform(0, window)
        while at < self.end:
            end = at + window + abs(random.gauss(0, 1)) * MS
            value = self.mean(at, end) + random.gauss(0, noise)
            edges = [round(edge + offset + random.gauss(0, jitter)) for edge in (at, end)]
            if random.random() >= missing:
                found.append((edges[0], edges[1], min(max(value, 0.0), greatest)))
            at = end
        return found


def samples(
    windows: Sequence[tuple[int, int, float]],
    metric: Metric,
    *,
    source: str = "gpm",
    device: str = UUID,
) -> list[dict[str, Any]]:
    """Rows of the `samples` table from windows in ns from the start of the run."""
    return [
        {
            "start_ns": START_NS + start,
            "end_ns": START_NS + end,
            "device": device,
            "source": source,
            "metric": metric.value,
            "value": value,
            "rank": 0,
        }
        for start, end, value in windows
    ]


def trace_of(
    passes: Sequence[Ran],
    rows: Sequence[dict[str, Any]],
    *metas: ProcessMeta,
    columns: Callable[[int, Ran], dict[str, Any]] = lambda i, ran: {},
) -> Trace:
    """A trace with these passes, each with the device time that it took, and these samples."""
    timeline = Timeline()
    for i, ran in enumerate(passes):
        timeline.now_ns = START_NS + round(ran.start)
        span = round(ran.end) - round(ran.start)
        decodes = ran.phase in ("decode", "mixed")
        timeline.add(
            ran.phase,
            span / MS,
            tokens=1 if decodes else 512,
            **{"device_ns": span, **columns(i, ran)},
        )
    schema = SAMPLES.arrow.append(pa.field("rank", pa.int64()))
    table = pa.Table.from_pylist(list(rows), schema=schema)
    return replace(timeline.trace(*(metas or (ON_GPU,))), samples=table)


def generate_loop(
    random: Random,
    *,
    seconds: float = 20.0,
    prefill_ms: float = 80.0,
    decode_ms: float = 12.0,
    new: int = 32,
    gap_ms: float = 0.5,
    pause_ms: float = 0.0,
    values: dict[str, float],
    spread: float = 0.05,
    within: float = 0.0,
) -> list[Ran]:
    """Requests one after another: a prefill, its decode steps, perhaps a pause."""
    at, found = 0.0, []

    def add(phase: str, ms: float) -> None:
        nonlocal at
        end = at + max(ms * (1 + random.gauss(0, spread)), 0.3) * MS
        value = min(max(values[phase] + random.gauss(0, within), 0.0), 1.0)
        found.append(Ran(at, end, phase, value))
        at = end + gap_ms * MS

    while at < seconds * 1e9:
        add("prefill", prefill_ms)
        for _ in range(max(round(new * random.uniform(0.5, 1.5)), 1)):
            add("decode", decode_ms)
        if pause_ms:
            at += random.expovariate(1 / pause_ms) * MS
    return found
