"""The section on hardware counters, compared exactly: the figures are made up, the layout is what is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    DeviceState,
    EnergyCheck,
    PhaseCounters,
    Spread,
    ThrottleShare,
)
from phaseprof.cli.render.counters import Row, lay_out
from phaseprof.cli.render.layout import to_ascii

Golden = Callable[[str, str], None]


def figure(value: float, error: float, reason: str = "") -> CounterFigure:
    state = CounterState.INSUFFICIENT if reason else CounterState.SURE
    return CounterFigure("m", value, error, state, reason, 40, "gpm")


FEW = "only 4 of the sample windows hold enough of it"
PREFILL = PhaseCounters(
    sm_active=figure(0.9124, 0.0134),
    sm_occupancy=figure(0.2925, 0.0144),
    tensor_active=figure(0.7746, 0.0113),
    dram_active=figure(0.2154, 0.0178),
    dram_bytes_per_s=figure(1_033e9, 85e9),
    power_w=figure(636.5, 21.9),
    energy_j=figure(1_985.6, 68.2),
    joules_per_token=figure(0.09944, 0.00341),
    sampled_s=3.1,
)
DECODE = PhaseCounters(
    sm_active=figure(0.5499, 0.0123),
    sm_occupancy=figure(0.2, 0.0041),
    tensor_active=figure(0.0898, 0.004),
    dram_active=figure(0.8102, 0.0121),
    dram_bytes_per_s=figure(3_889e9, 58e9),
    power_w=figure(428.7, 13.5),
    energy_j=figure(6_348.9, 199.6),
    joules_per_token=figure(5.137, 0.162),
    sampled_s=14.8,
)
MIXED = PhaseCounters(
    sm_active=figure(0.7, 0.31, FEW),
    sm_occupancy=figure(0.2, 0.21, FEW),
    tensor_active=figure(0.4, 0.2, FEW),
    dram_active=figure(0.6, 0.3, FEW),
    dram_bytes_per_s=figure(2e12, 1e12, FEW),
    power_w=figure(470.0, 90.0, "its windows are too few for how much they differ"),
    energy_j=figure(90.0, 18.0, "its windows are too few for how much they differ"),
    joules_per_token=figure(0.7, 0.15, "its windows are too few for how much they differ"),
    sampled_s=0.2,
)
STATE = DeviceState(
    uuid="GPU-1",
    name="NVIDIA H200",
    index=0,
    sm_clock_hz=Spread(1.59e9, 1.755e9, 1.98e9),
    memory_clock_hz=Spread(3.201e9, 3.201e9, 3.201e9),
    temperature_c=Spread(58.0, 61.0, 64.0),
    power_w=Spread(402.0, 455.0, 692.0),
    throttle=(
        ThrottleShare("software power cap", 0.27, True),
        ThrottleShare("idle", 0.02, False),
    ),
    memory_used_bytes=80_300_000_000,
    idle_power_w=figure(118.0, 6.0),
    energy=EnergyCheck(
        8_741.0,
        8_690.0,
        20.2,
        True,
        "power adds up to 8,741 J in 20.2 s, the energy counter to 8,690 J: they agree",
    ),
    windows=202,
    source="gpm, nvml",
)
ROWS = [
    Row("prefill", PREFILL),
    Row("  batch 8", replace(PREFILL, dram_bytes_per_s=None, power_w=None), nested=True),
    Row("decode", DECODE),
    Row("mixed", MIXED),
]


@pytest.mark.parametrize("width", [120, 80, 60])
def test_counters_of_phases_are_laid_out_as_before(golden: Golden, width: int) -> None:
    lines = lay_out(ROWS, [STATE], width)

    assert all(line.cell_len <= width for line in lines)
    golden(f"counters-{width}.txt", "\n".join(line.plain.rstrip() for line in lines))


def test_several_devices_each_have_their_lines(golden: Golden) -> None:
    other = replace(STATE, index=1, throttle=(), energy=None, idle_power_w=None)

    lines = lay_out(ROWS[:1], [STATE, other], 100)

    golden("counters-devices.txt", "\n".join(line.plain.rstrip() for line in lines))


def test_power_alone_shows_no_columns_of_other_counters(golden: Golden) -> None:
    """An older GPU has power, clocks and no GPM."""
    decode = PhaseCounters(
        power_w=DECODE.power_w,
        energy_j=DECODE.energy_j,
        joules_per_token=DECODE.joules_per_token,
    )

    lines = lay_out([Row("decode", decode)], [replace(STATE, memory_clock_hz=None)], 80)

    golden("counters-power.txt", "\n".join(line.plain.rstrip() for line in lines))


def test_a_stream_that_takes_ascii_alone_gets_it(golden: Golden) -> None:
    lines = lay_out(ROWS, [STATE], 80)

    golden("counters-ascii.txt", to_ascii("\n".join(line.plain.rstrip() for line in lines)))


def test_without_samples_there_is_no_section() -> None:
    assert lay_out([], [], 80) == []
