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

from phaseprof.analyzers.counters.counters import Solution, solve
from phaseprof.analyzers.counters.device_work import DeviceUse, work_of
from phaseprof.analyzers.counters.sampled import Series
from phaseprof.analyzers.counters.weights import Window
from phaseprof.analyzers.passes import Primary
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


def passes_table(passes: Sequence[Ran]) -> pa.Table:
    """The columns of `passes` that say where passes ran; quicker to make than all of them."""
    starts = [START_NS + round(ran.start) for ran in passes]
    ends = [START_NS + round(ran.end) for ran in passes]
    spans = [end - start for start, end in zip(starts, ends, strict=True)]
    n = len(passes)
    columns = {
        "rank": [0] * n,
        "thread_id": [7] * n,
        "start_ns": starts,
        "end_ns": ends,
        "host_ns": spans,
        "device_ns": spans,
        "sequences": [1] * n,
    }
    texts = {"model_id": ["m"] * n, "role": ["target"] * n, "phase": [ran.phase for ran in passes]}
    return pa.table(
        {
            **{name: pa.array(values, pa.int64()) for name, values in columns.items()},
            **{name: pa.array(values, pa.string()) for name, values in texts.items()},
            "profiled": pa.array([False] * n),
            "warmup": pa.nulls(n, pa.string()),
            "error": pa.nulls(n, pa.string()),
        }
    )


def solved_for(
    passes: Sequence[Ran], windows: Sequence[tuple[int, int, float]], source: str = "gpm"
) -> Solution:
    """What `analyzers.counters` makes of one counter's windows, in ns from the start of the run."""
    series = Series(
        source,
        tuple(Window(START_NS + start, START_NS + end) for start, end, _ in windows),
        tuple(value for _, _, value in windows),
        len(windows),
    )
    use = DeviceUse(DEVICE, UUID, frozenset({(0, "m")}))
    primary = Primary("m", ("target",), 0.0)
    work = work_of(passes_table(passes), use, primary, series.windows)
    return solve(use, work, series, Metric.SM_ACTIVE, {})


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


def engine_loop(
    random: Random,
    *,
    seconds: float = 20.0,
    prefill_ms: float = 60.0,
    mixed_ms: float = 30.0,
    decode_ms: float = 12.0,
    between: float = 20.0,
    gap_ms: float = 0.2,
    pause_ms: float = 0.0,
    values: dict[str, float],
    spread: float = 0.05,
    within: float = 0.0,
) -> list[Ran]:
    """A serving engine: decode steps, in which prompts arrive that make a few steps mixed, or a whole step prefill.

    Args:
        between: Decode steps from one prompt to the next, on average.
    """
    at, found = 0.0, []

    def add(phase: str, ms: float) -> None:
        nonlocal at
        end = at + max(ms * (1 + random.gauss(0, spread)), 0.3) * MS
        value = min(max(values[phase] + random.gauss(0, within), 0.0), 1.0)
        found.append(Ran(at, end, phase, value))
        at = end + gap_ms * MS

    while at < seconds * 1e9:
        if random.random() < 0.25:
            add("prefill", prefill_ms)
        for _ in range(random.choice((0, 1, 2, 3))):
            add("mixed", mixed_ms)
        for _ in range(1 + round(random.expovariate(1 / between))):
            add("decode", decode_ms)
        if pause_ms and random.random() < 0.2:
            at += random.expovariate(1 / pause_ms) * MS
    return found


@dataclass(frozen=True, slots=True)
class Draw:
    """A run whose conditions were drawn, and its samples.

    Attributes:
        plain: Nothing speaks against a sure answer: 20 s, moderate noise, enough of every phase.
        passes: As a trace has them, where the script cuts them into parts that do different things.
    """

    script: Script
    windows: list[tuple[int, int, float]]
    plain: bool
    passes: Sequence[Ran] | None = None


def drawn(seed: int) -> Draw:
    """Draw a run: its kind, its times, what a counter is in each phase, and everything that disturbs its samples.

    Steps take 3 to 60 ms, prefills 15 to 200; noise is up to 5 points, the clocks are up to 4 ms apart, edges jitter by
    up to 1.5 ms, passes of one phase differ by up to 10 points, long ones may lie higher, and decode may drift by 10.
    """
    random = Random(seed)
    values = {phase: random.random() for phase in ("prefill", "decode", "mixed")}
    decode_ms, seconds = random.uniform(3, 60), random.choice((3.0, 8.0, 20.0, 20.0, 60.0))
    times: dict[str, Any] = {
        "seconds": seconds,
        "decode_ms": decode_ms,
        "prefill_ms": random.uniform(15, 200),
        "gap_ms": random.choice((0.0, 0.2, 0.5, 1.5)),
        "pause_ms": random.choice((0.0, 0.0, 20.0, 300.0)),
        "spread": random.choice((0.003, 0.01, 0.05, 0.2)),
        "within": random.choice((0.0, 0.02, 0.1)),
        "values": values,
    }
    kind = random.choice(("generate", "engine", "rare"))
    if kind == "engine":
        between = random.choice((4.0, 16.0, 64.0))
        passes = engine_loop(random, mixed_ms=random.uniform(8, 80), between=between, **times)
    else:
        # Rare: hardly a prefill in the windows.
        new = random.choice((4, 16, 64, 256)) if kind == "generate" else round(5e3 / decode_ms)
        passes = generate_loop(random, new=new, **times)
    drift, slope = random.choice((0.0, 0.0, 0.1)), random.choice((0.0, 0.0, 0.1))
    passes = [_bent(ran, drift, slope, times, seconds) for ran in passes]
    script = Script(passes, random.choice((0.0, 0.0, 0.05, 0.1, 0.3)), random.uniform(0, 0.3))
    noise, missing = random.choice((0.0, 0.01, 0.02, 0.05)), random.choice((0.0, 0.0, 0.2))
    windows = script.sampled(
        random,
        noise=noise,
        offset=random.uniform(-4, 4) * MS,
        jitter=random.choice((0.0, 0.5, 1.5)) * MS,
        missing=missing,
    )
    plain = seconds >= 20 and noise <= 0.02 and times["within"] <= 0.02
    return Draw(script, windows, plain)


def _bent(ran: Ran, drift: float, slope: float, times: dict[str, Any], seconds: float) -> Ran:
    value = ran.value
    if ran.phase == "decode":
        value += drift * (ran.start / (seconds * 1e9) - 0.5)
    elif ran.phase == "prefill":
        value += slope * ((ran.end - ran.start) / (times["prefill_ms"] * MS) - 1)
    return replace(ran, value=min(max(value, 0.0), 1.0))
