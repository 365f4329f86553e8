"""The step model fitted to passes of known factors: it finds them, says what stays open, and is not led astray."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step_model import BARE, machine, model

from phaseprof.analyzers.steps.calibrated import MeasuredPass, calibrate, measured_passes
from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.analyzers.steps.step_model import CPU, Machine, step_time
from phaseprof.errors import PhaseprofError
from phaseprof.work.count import Rows

COST = model(layers=4, heads=8, dim=64, inner=2048)
ON_CPU = machine(CPU)


def _rows(batch: int, past: int = 50) -> tuple[Rows, ...]:
    return (Rows(past, 1, batch),)


def cpu_seconds(batch: int, *, past: int = 50, one: float, several: float, flops: float) -> float:
    """A step of a CPU that is made of roof times and known factors; what attention and the rest take counts once."""
    step = step_time(COST, (), _rows(batch, past), machine=ON_CPU, logits_tokens=batch)
    seconds = step.host.seconds
    for term in step.terms:
        read, compute = term.moved_bytes / 1e9, term.flops / 1e12
        if term.gemm is None:
            seconds += read + compute if term.attention else term.time.seconds
        elif batch == 1:
            seconds += one * read
        else:
            seconds += several * read + flops * compute
    return seconds


def measured(batch: int, seconds: float, times: int = 5) -> list[MeasuredPass]:
    return [MeasuredPass((), _rows(batch), batch, seconds) for _ in range(times)]


@pytest.mark.parametrize(
    ("one", "several", "flops"), [(1.0, 1.5, 1.0), (2.0, 3.0, 1.5), (3.0, 1.2, 1.2)]
)
def test_other_batches_of_a_cpu_from_two(one: float, several: float, flops: float) -> None:
    """Products of one row have another kernel: batch 1 alone would not tell what batch 2 takes."""

    def truth(batch: int) -> float:
        return cpu_seconds(batch, one=one, several=several, flops=flops)

    fitted = calibrate([*measured(1, truth(1)), *measured(4, truth(4))], COST, ON_CPU)
    assert fitted.error < 0.02
    for batch in (2, 8, 16):
        found = fitted.time((), _rows(batch), logits_tokens=batch)
        assert found.low <= truth(batch) <= found.high
        assert found.seconds == pytest.approx(truth(batch), rel=0.15)


def test_what_was_not_seen_stays_open() -> None:
    """Of batch 1 alone the factor of several rows is what it was before, and batch 8 has a wide interval."""
    seconds = cpu_seconds(1, one=2.0, several=3.0, flops=1.5)
    alone = calibrate(measured(1, seconds), COST, ON_CPU)
    told = {factor.name: factor.told for factor in alone.factors}
    assert told["weights, several rows"] == pytest.approx(0, abs=1e-9)
    assert told["weights, one row"] > 0.5
    both = calibrate(
        [*measured(1, seconds), *measured(4, cpu_seconds(4, one=2.0, several=3.0, flops=1.5))],
        COST,
        ON_CPU,
    )

    def width(of: float, low: float) -> float:
        return of / low

    wide, narrow = (each.time((), _rows(8), logits_tokens=8) for each in (alone, both))
    assert width(wide.high, wide.low) > 1.5 * width(narrow.high, narrow.low)


def test_disturbed_passes_do_no_harm() -> None:
    seconds = cpu_seconds(4, one=2.0, several=3.0, flops=1.5)
    disturbed = [*measured(4, seconds, 6), *measured(4, 9 * seconds, 4)]
    found = calibrate(disturbed, COST, ON_CPU).time((), _rows(4), logits_tokens=4)
    assert found.seconds == pytest.approx(seconds, rel=0.02)


def test_a_length_that_fits_badly_counts_less() -> None:
    """One of eight lengths of the cache was measured while something else ran, three times as long."""
    passes = []
    for past in range(50, 58):
        seconds = cpu_seconds(4, past=past, one=2.0, several=3.0, flops=1.5)
        slow = 3.0 if past == 53 else 1.0
        passes.append(MeasuredPass((), _rows(4, past), 4, slow * seconds))
    truth = cpu_seconds(4, past=60, one=2.0, several=3.0, flops=1.5)
    found = calibrate(passes, COST, ON_CPU).time((), _rows(4, 60), logits_tokens=4)
    assert found.seconds == pytest.approx(truth, rel=0.08)


@settings(deadline=None, max_examples=20)
@given(factor=st.floats(0.6, 1.8), batch=st.integers(1, 64))
def test_what_was_measured_is_predicted(factor: float, batch: int) -> None:
    """On a device with an efficiency model, that is off by one factor in all of its parts."""
    on = machine()
    modelled = step_time(COST, (), _rows(batch), machine=on, logits_tokens=batch).step.seconds
    fitted = calibrate(measured(batch, factor * modelled), COST, on)
    found = fitted.time((), _rows(batch), logits_tokens=batch)
    assert found.seconds == pytest.approx(factor * modelled, rel=0.03)
    assert found.low < found.seconds < found.high


def test_a_host_that_is_slower_than_the_device_is_what_is_fitted() -> None:
    on = machine(replace(BARE, ahead=True, launch_s=1e-2))
    step = step_time(COST, (), _rows(1), machine=on, logits_tokens=1)
    assert step.host.seconds > step.device.seconds
    fitted = calibrate(measured(1, 2 * step.host.seconds), COST, on)
    factors = {factor.name: factor.value for factor in fitted.factors}
    assert factors["host"] == pytest.approx(2, rel=0.03)
    assert factors["products of few rows"] == pytest.approx(1)


@settings(deadline=None, max_examples=20)
@given(
    seconds=st.lists(st.floats(1e-3, 10), min_size=2, max_size=2),
    on=st.sampled_from([machine(), ON_CPU]),
)
def test_a_larger_batch_never_takes_less_time(seconds: list[float], on: Machine) -> None:
    """Whatever was measured: factors are positive. (Batch 1 to 2 on a CPU changes the kernel, which may be faster.)"""
    passes = [*measured(1, seconds[0]), *measured(4, seconds[1])]
    fitted = calibrate(passes, COST, on)
    times = [fitted.time((), _rows(batch), logits_tokens=batch).seconds for batch in (2, 3, 8, 64)]
    assert times == sorted(times)


def test_recorded_passes_are_taken_as_they_are() -> None:
    rows = PassRows((Rows(0, 9, 1),), (), 1, 2_000_000, 1, 1, None)
    assert measured_passes([rows]) == [MeasuredPass((Rows(0, 9, 1),), (), 1, 0.002)]
    assert calibrate(measured_passes([rows]), COST, machine()).passes == 1


def test_without_passes_there_is_nothing_to_fit() -> None:
    with pytest.raises(PhaseprofError, match="no measured pass"):
        calibrate([MeasuredPass((), _rows(1), 1, 0.0)], COST, ON_CPU)
