"""Requests and the engine that serves them: latencies, their spread, the slowest ones, load over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaseprof.analyzers.results import Percentiles, Report
from phaseprof.analyzers.serving import EngineFigures
from phaseprof.analyzers.viewing.details import Details
from phaseprof.analyzers.viewing.distributions import Distribution
from phaseprof.analyzers.viewing.worst import StepMeanwhile, Wait, WorstRequest
from phaseprof.cli.render import units
from phaseprof.cli.render.engine import engine_section, goodput_section, interference_section
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.html.charts import (
    HistogramChart,
    LineChart,
    Value,
    histogram_chart,
    line_chart,
)
from phaseprof.cli.render.html.pairs import WIDE, Pair, pairs

_TITLES = {
    "queue": "Queue",
    "ttft": "TTFT, time to first token",
    "tpot": "TPOT, time per output token after the first",
    "itl": "ITL, time between two tokens",
}
_SHORT = {"queue": "Queue", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


@dataclass(frozen=True, slots=True)
class Spread:
    """One latency: a histogram, the same as a table, and what has to be said of it."""

    title: str
    chart: HistogramChart
    grid: Grid
    note: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ran during a wait."""

    words: str
    phase: str
    note: str


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait of a slow request.

    Attributes:
        words: Which token, how long, and how long is usual.
        begin_us, end_us: Where it lies on the timeline.
        steps: What ran meanwhile. more: What is said of the steps that are not shown.
    """

    words: str
    begin_us: int
    end_us: int
    steps: tuple[Step, ...]
    more: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow request: its name, in which respects it is slow, its figures, its longest waits."""

    name: str
    slow_by: str
    figures: str
    waits: tuple[Waited, ...]


@dataclass(frozen=True, slots=True)
class Requests:
    """The section of requests.

    Attributes:
        summary: How many, of how many tokens, and what is odd about some.
        grid: Percentiles. spreads: Histograms. slow: The slowest. pairs: Interference and goodput.
    """

    summary: str
    grid: Grid
    spreads: tuple[Spread, ...]
    slow: tuple[Slow, ...]
    pairs: Sequence[Pair]


def requests_of(report: Report, details: Details) -> Requests:
    """Latencies and the slowest requests."""
    figures = report.requests
    rows = [
        _percentiles(name, values, noun)
        for name, values, noun in (
            ("Queue", report.engine.queue_ms if report.engine else None, "request"),
            ("TTFT", figures.ttft_ms, "request"),
            ("TPOT", figures.tpot_ms, "request"),
            ("ITL", figures.itl_ms, "gap"),
        )
        if values is not None
    ]
    said = [
        *interference_section(report.interference, WIDE),
        *goodput_section(report.goodput, WIDE),
    ]
    return Requests(
        summary=_summary(report),
        grid=Grid("latency", ("p50", "p90", "p99", "of"), tuple(rows)),
        spreads=tuple(_spread(each) for each in details.distributions),
        slow=tuple(_slow(each) for each in details.worst),
        pairs=pairs(said),
    )


def _summary(report: Report) -> str:
    figures = report.requests
    if not figures.count:
        return "No request counts: there is no TTFT, TPOT or ITL."
    text = (
        f"{units.counted(figures.count, 'request')} of {units.count(figures.prompt_tokens)} prompt and "
        f"{units.count(figures.output_tokens)} output tokens in all."
    )
    odd = [
        f"{units.count(number)} {what}"
        for number, what in (
            (figures.unfinished, "with no end in the trace"),
            (figures.aborted, "aborted or failed"),
        )
        if number
    ]
    return f"{text} Of these: {', '.join(odd)}." if odd else text


def _percentiles(name: str, values: Percentiles, noun: str) -> GridRow:
    cells = (*map(units.latency, (values.p50, values.p90, values.p99)),)
    return GridRow(name, (*cells, units.counted(values.count, noun)))


def _spread(found: Distribution) -> Spread:
    spread, noun = found.histogram, "gap" if found.metric == "itl" else "request"
    shown = found.percentiles
    markers = [
        (name, value)
        for name, value in (("p50", shown.p50), ("p90", shown.p90), ("p99", shown.p99))
        if value > 0
    ]
    note = ""
    if spread.zeros and found.metric == "itl":
        note = (
            f"{units.counted(spread.zeros, 'token')} came together with the one before, and "
            f"{'is' if spread.zeros == 1 else 'are'} not shown."
        )
    edges = spread.edges_ms
    last = len(spread.counts)
    return Spread(
        title=_TITLES.get(found.metric, found.metric),
        chart=histogram_chart(
            edges,
            spread.counts,
            logarithmic=spread.equal_ratio,
            markers=markers,
            noun=noun,
        ),
        grid=Grid(
            "from",
            ("to", f"{noun}s"),
            tuple(
                GridRow(
                    units.latency(edges[place]),
                    (units.latency(edges[place + 1]), units.count(spread.counts[place])),
                )
                for place in range(last)
            ),
        ),
        note=note,
    )


def _slow(each: WorstRequest) -> Slow:
    name = each.request_id if each.client_id is None else each.client_id
    if each.client_id is not None and each.client_id != each.request_id:
        name = f"{name} ({each.request_id})"
    figures = [
        f"{units.count(each.prompt_tokens)} prompt and {units.count(each.output_tokens)} output tokens",
        f"arrived {units.duration(max(each.arrival_ms, 0.0))} after the first pass"
        if each.arrival_ms > 0
        else "arrived before the first pass",
    ]
    for title, value in (
        ("queued", each.queue_ms),
        ("TTFT", each.ttft_ms),
        ("TPOT", each.tpot_ms),
        ("longest ITL", each.longest_itl_ms),
    ):
        if value is not None:
            figures.append(f"{title} {units.latency(value)}")
    if each.preemptions:
        figures.append(f"preempted {units.counted(each.preemptions, 'time')}")
    return Slow(
        name=name,
        slow_by=", ".join(_SHORT.get(respect, respect) for respect in each.slow_by),
        figures=", ".join(figures),
        waits=tuple(_waited(wait) for wait in each.waits),
    )


def _waited(wait: Wait) -> Waited:
    token = "the first token" if wait.token == 0 else f"token {units.count(wait.token)}"
    usual = f" (usual: {units.latency(wait.usual_ms)})" if wait.usual_ms else ""
    queued = f", {units.latency(wait.queue_ms)} of it queued" if wait.queue_ms else ""
    hidden = wait.steps_in_all - len(wait.steps)
    taken = f"{units.percent(wait.passes_share)} of the wait is in passes"
    more = f"{taken}; {units.counted(hidden, 'pass')} more, shorter ones" if hidden else taken
    if not wait.steps_in_all:
        more = "no pass ran meanwhile"
    return Waited(
        words=f"{units.latency(wait.wait_ms)} for {token}{usual}{queued}",
        begin_us=round(wait.begin_ms * 1e3),
        end_us=round((wait.begin_ms + wait.wait_ms) * 1e3),
        steps=tuple(_step(step) for step in wait.steps),
        more=more,
    )


def _step(step: StepMeanwhile) -> Step:
    work = [units.counted(step.sequences, "sequence")]
    if step.prefill_tokens:
        work.append(units.counted(step.prefill_tokens, "prompt token"))
    if step.decode_tokens:
        work.append(units.counted(step.decode_tokens, "output token"))
    words = f"step {step.step}, {units.latency(step.pass_ms)}: {', '.join(work)}"
    return Step(words, step.phase, "yielded the token" if step.yielded else "")


# --- the engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """The section of the engine: sentences, its load over time as charts, and the same as a table."""

    pairs: Sequence[Pair]
    load: LineChart | None
    cache: LineChart | None
    grid: Grid


def engine_of(engine: EngineFigures | None) -> Engine | None:
    """The scheduler's steps and its load; None without an engine."""
    if engine is None:
        return None
    stretches = engine.over_time
    marks = [*stretches[:: max(len(stretches) // 5, 1)]]
    labels = [(each.start_ms, units.duration(each.start_ms)) for each in marks]
    most = max((max(e.running, e.waiting) for e in stretches), default=0.0)
    load = line_chart(
        [
            (
                "running",
                "prefill",
                [
                    Value(e.start_ms, e.running, f"{units.mean(e.running)} running")
                    for e in stretches
                ],
            ),
            (
                "waiting",
                "decode",
                [
                    Value(e.start_ms, e.waiting, f"{units.mean(e.waiting)} waiting")
                    for e in stretches
                ],
            ),
        ],
        x_title="from the first step",
        y_title="requests",
        x_labels=labels,
        top=most,
        top_label=units.mean(most),
    )
    cache = line_chart(
        [
            (
                "KV cache in use",
                "mixed",
                [
                    Value(
                        e.start_ms,
                        e.kv_usage,
                        f"{units.percent(e.kv_usage)} of the KV cache in use",
                    )
                    for e in stretches
                ],
            )
        ],
        x_title="from the first step",
        y_title="share of the KV cache",
        x_labels=labels,
        top=1.0,
        top_label="100 %",
    )
    grid = Grid(
        "from",
        ("running", "waiting", "KV cache in use"),
        tuple(
            GridRow(
                units.duration(each.start_ms),
                (
                    units.mean(each.running),
                    units.mean(each.waiting),
                    units.percent(each.kv_usage),
                ),
            )
            for each in stretches
        ),
    )
    return Engine(pairs(engine_section(engine, WIDE)), load, cache, grid)
