"""Power and energy by phase, against boards that measure in their own ways, and the state that a device was in."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from scripted import DEVICE, ON_GPU, UUID, Ran, Script, generate_loop, samples, trace_of
from traces import GPU, MS, model

from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    DeviceState,
    PhaseCounters,
)
from phaseprof.analyzers.counters.energy import check_energy
from phaseprof.analyzers.counters.sampled import Series
from phaseprof.analyzers.counters.weights import Window
from phaseprof.analyzers.report import build_report
from phaseprof.metrics import Metric
from phaseprof.trace.reader import Trace

WATTS = {"prefill": 640.0, "decode": 430.0}
IDLE_W = 120.0


def powered(passes: list[Ran]) -> Script:
    """A board that takes 640 W in prefill, 430 in decode, 120 in pauses and 400 between passes."""
    return Script([replace(ran, value=WATTS[ran.phase]) for ran in passes], IDLE_W, 400.0)


def loop(**changes: Any) -> list[Ran]:
    times = {"seconds": 30.0, "new": 12, "pause_ms": 60.0, **changes}
    return generate_loop(Random(1), values={"prefill": 0.9, "decode": 0.4}, **times)


def readings(
    script: Script, mean: float, late: float, *, every: float = 100 * MS, noise: float = 6.0
) -> list[tuple[int, int, float]]:
    """Readings that are a mean over some time, and late by some; their window is the time since the one before."""
    random = Random(2)
    found = []
    at = 3 * every
    while at < script.end:
        watts = script.mean(at - late - mean, at - late) + random.gauss(0, noise)
        found.append((round(at - every), round(at), watts))
        at += every
    return found


def found(trace: Trace, phase: str) -> PhaseCounters:
    counters = build_report(trace).phases[phase].counters
    assert counters is not None
    return counters


def sure(figure: CounterFigure | None) -> float:
    assert figure is not None and figure.sure is not None, figure
    return figure.sure


@pytest.mark.parametrize(
    ("mean_ms", "late_ms"),
    # Its sample window; the moment; 100 ms, late; a second, as some boards give it.
    [(100, 0), (25, 0), (100, 40), (1000, 0)],
)
def test_power_is_that_of_the_phases_however_the_board_averages(mean_ms: int, late_ms: int) -> None:
    long = mean_ms == 1000
    # A mean over a second tells little of requests that take half of one.
    passes = loop(seconds=60.0, new=60, pause_ms=900.0, prefill_ms=200.0) if long else loop()
    rows = samples(
        readings(powered(passes), mean_ms * MS, late_ms * MS), Metric.POWER, source="nvml"
    )
    trace = trace_of(passes, rows)

    for phase, watts in WATTS.items():
        power = found(trace, phase).power_w
        assert power is not None and power.value is not None and power.error is not None
        assert abs(power.value - watts) <= max(power.error, 0.02 * watts)
    assert sure(found(trace, "decode").power_w) == pytest.approx(430, rel=0.05)


def test_energy_is_power_over_the_time_and_the_tokens_that_the_report_counts() -> None:
    passes = loop()
    trace = trace_of(passes, samples(readings(powered(passes), 100 * MS, 0), Metric.POWER))
    figures = build_report(trace).phases

    for phase, watts in WATTS.items():
        mine = [ran for ran in passes if ran.phase == phase]
        joules = watts * sum(ran.end - ran.start for ran in mine) / 1e9
        # A prefill computes 512 prompt tokens, a decode step one output token.
        tokens = len(mine) * (512 if phase == "prefill" else 1)
        counters = figures[phase].counters
        assert counters is not None
        assert sure(counters.energy_j) == pytest.approx(joules, rel=0.05)
        assert sure(counters.joules_per_token) == pytest.approx(joules / tokens, rel=0.05)


def test_devices_that_make_each_pass_together_all_pay_for_its_tokens() -> None:
    passes = loop()
    other = "GPU-00000000-0000-0000-0000-000000000002"
    metas, rows = [], []
    for rank, uuid in enumerate((UUID, other)):
        device = replace(DEVICE, uuid=uuid, key=f"{GPU.key}-{rank}", index=rank)
        shared = replace(model(device=device), tensor_ranks=(0, 1))
        metas.append(replace(ON_GPU, rank=rank, pid=rank + 1, devices=(device,), models=(shared,)))
        rows += samples(readings(powered(passes), 100 * MS, 0), Metric.POWER, device=uuid)
    twice = [ran for ran in passes for _ in (0, 1)]

    trace = trace_of(twice, rows, *metas, columns=lambda i, ran: {"rank": i % 2})

    steps = [ran for ran in passes if ran.phase == "decode"]
    each = 2 * 430 * sum(ran.end - ran.start for ran in steps) / 1e9 / len(steps)
    assert sure(found(trace, "decode").joules_per_token) == pytest.approx(each, rel=0.05)


def test_of_a_model_on_several_devices_of_a_process_one_tells_no_energy() -> None:
    passes = loop()
    meta = replace(ON_GPU, models=(replace(model(device=DEVICE), devices=4),))
    rows = samples(readings(powered(passes), 100 * MS, 0), Metric.POWER)

    counters = found(trace_of(passes, rows, meta), "decode")

    assert sure(counters.power_w) == pytest.approx(430, rel=0.05)
    for figure in (counters.energy_j, counters.joules_per_token):
        assert figure is not None and figure.state is CounterState.INSUFFICIENT
        assert figure.reason == (
            "the model lies on 4 devices of its process, of which one was sampled"
        )


def test_too_few_readings_give_no_energy() -> None:
    passes = loop(seconds=0.9)
    trace = trace_of(passes, samples(readings(powered(passes), 100 * MS, 0), Metric.POWER))

    counters = found(trace, "decode")

    for figure in (counters.power_w, counters.energy_j, counters.joules_per_token):
        assert figure is not None and figure.state is CounterState.INSUFFICIENT
        assert figure.reason


def series(*watts: float, length_ms: int = 100, begin_ms: int = 0) -> Series:
    windows = tuple(
        Window((begin_ms + i * length_ms) * MS, (begin_ms + (i + 1) * length_ms) * MS)
        for i in range(len(watts))
    )
    return Series("nvml", windows, tuple(watts), len(watts))


def test_energy_by_power_and_by_the_counter_agree() -> None:
    # 400 W for 5 s are 2,000 J; the counter moved by 2,050.
    check = check_energy([series(*[400.0] * 50)], [series(*[41.0] * 50)])

    assert check is not None and check.consistent
    assert check.by_power_j == pytest.approx(2_000)
    assert check.by_counter_j == pytest.approx(2_050)
    assert check.seconds == pytest.approx(5)
    assert check.text == (
        "power adds up to 2,000 J in 5 s, the energy counter to 2,050 J: they agree"
    )


def test_energy_by_power_and_by_the_counter_disagree() -> None:
    check = check_energy([series(*[400.0] * 50)], [series(*[60.0] * 50)])

    assert check is not None and not check.consistent
    assert check.text.endswith("they disagree: energy per phase may be off by as much")


@pytest.mark.parametrize(
    ("power", "energy"),
    [
        ([], [series(40.0)]),
        ([series(400.0)], []),
        # 1 s: the counter may be a tenth of that behind.
        ([series(*[400.0] * 10)], [series(*[40.0] * 10)]),
        # Power was sampled in the first half alone.
        ([series(*[400.0] * 20)], [series(*[40.0] * 40)]),
    ],
)
def test_what_cannot_be_compared_is_not(power: list[Series], energy: list[Series]) -> None:
    assert check_energy(power, energy) is None


def state(rows: list[dict[str, Any]], passes: list[Ran]) -> DeviceState:
    (only,) = build_report(trace_of(passes, rows)).devices
    return only


def test_clocks_and_throttling_are_those_of_a_device_at_work() -> None:
    """A second of work, a second of pause in which the clock falls; a power cap in every fourth window of work."""
    passes: list[Ran] = []
    for second in range(0, 12, 2):
        for step in range(100):
            start = (second + step / 100) * 1e9
            passes.append(Ran(start, start + 10 * MS, "decode", 0.5))
    clock, reasons, used = [], [], []
    for i in range(120):
        window = (i * 100 * MS, (i + 1) * 100 * MS)
        working = i // 10 % 2 == 0
        capped = working and i % 4 == 0
        clock.append((*window, 0.345e9 if not working else 1.6e9 if capped else 1.98e9))
        reasons.append((*window, float(0x4 if capped else 0 if working else 0x1)))
        used.append((*window, 70e9 + i * 1e6))
    rows = samples(clock, Metric.SM_CLOCK, source="nvml")
    rows += samples(reasons, Metric.THROTTLE, source="nvml")
    rows += samples(used, Metric.MEMORY_USED, source="nvml")

    found = state(rows, passes)

    assert found.sm_clock_hz is not None
    assert (found.sm_clock_hz.least, found.sm_clock_hz.greatest) == (1.6e9, 1.98e9)
    assert found.throttle is not None
    # 18 of the 60 windows of work; that an idle device is idle is none of it.
    assert [(each.name, each.slows) for each in found.throttle] == [("software power cap", True)]
    assert found.throttle[0].share == pytest.approx(18 / 60)
    assert found.memory_used_bytes == pytest.approx(70e9 + 109e6)
    assert found.memory_clock_hz is None and found.energy is None
    assert found.source == "nvml"


def test_the_power_of_pauses_is_told() -> None:
    passes = loop(pause_ms=300.0)

    found = state(samples(readings(powered(passes), 100 * MS, 0, noise=2.0), Metric.POWER), passes)

    assert sure(found.idle_power_w) == pytest.approx(IDLE_W, rel=0.1)
