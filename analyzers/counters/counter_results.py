"""What the hardware counters yield: figures per phase with their errors, and the state that a device was in.

A figure is `sure` when its error is small enough to build on, else `insufficient`, and then it says why. A counter that
nobody sampled is None: `Report.not_measured` says why. Shares are fractions (0.55), never percent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.analyzers.results import Provenance


class CounterState(enum.StrEnum):
    """Whether a figure may be built on."""

    SURE = "sure"
    INSUFFICIENT = "insufficient"


class Method(enum.StrEnum):
    """How a phase's figure was found."""

    #: Windows that held nothing but this phase.
    DIRECT = "direct"
    #: Windows that held several phases, solved for all of them together.
    SOLVED = "solved"
    #: From another figure: bytes/s from a share, energy from power.
    DERIVED = "derived"


@dataclass(frozen=True, slots=True)
class CounterFigure:
    """One counter of one phase.

    Attributes:
        metric: A `phaseprof.metrics.Metric`, or the name of what was derived (``dram_bytes_per_s``,
            ``joules_per_token``); the unit is in the name.
        value: The mean over the phase's device time; None where nothing can be said.
        error: Half of the 95 % interval, in the unit of the value; None where it is not known.
        state: Whether the figure may be built on. Nothing that is insufficient may be shown as a figure.
        reason: Why it may not, as a clause without capital and full stop; empty when it may.
        windows: Sample windows that hold a part of the phase.
        source: The collector that sampled, and what turned it into this figure.
        method: How it was found.
        provenance: `measured`; `datasheet` for what needs a peak from there.
    """

    metric: str
    value: float | None
    error: float | None
    state: CounterState
    reason: str
    windows: int
    source: str
    method: Method = Method.SOLVED
    provenance: Provenance = Provenance.MEASURED

    @property
    def sure(self) -> float | None:
        """The value if it may be built on, else None."""
        return self.value if self.state is CounterState.SURE else None


@dataclass(frozen=True, slots=True)
class PhaseCounters:
    """The counters of one phase, means over its device time. None: not sampled.

    Attributes:
        sm_active: Share of SM cycles with a warp resident. sm_occupancy: Resident warps over those that fit.
        tensor_active: Share of cycles in which a tensor pipe was active.
        dram_active: Share of the peak of the memory interface.
        dram_bytes_per_s: Bytes/s read and written: counted, or the share times the interface's known peak.
        power_w: Power. energy_j: Energy of all the phase's passes inside the sampled time.
        joules_per_token: Energy over tokens: prompt tokens of a prefill, output tokens of a decode step, both of a
            mixed one.
        sampled_s: Device time of the phase inside the windows.
    """

    sm_active: CounterFigure | None = None
    sm_occupancy: CounterFigure | None = None
    tensor_active: CounterFigure | None = None
    dram_active: CounterFigure | None = None
    dram_bytes_per_s: CounterFigure | None = None
    power_w: CounterFigure | None = None
    energy_j: CounterFigure | None = None
    joules_per_token: CounterFigure | None = None
    sampled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of what was sampled while passes ran."""

    least: float
    median: float
    greatest: float


@dataclass(frozen=True, slots=True)
class ThrottleShare:
    """One reason for lower clocks.

    Attributes:
        name: As people call it: ``software power cap``.
        share: Share of the sampled time of passes in which it was set.
        slows: Whether it holds a working device back (a power cap does, ``idle`` does not).
    """

    name: str
    share: float
    slows: bool


@dataclass(frozen=True, slots=True)
class EnergyCheck:
    """The energy of the run by two ways.

    Attributes:
        by_power_j: Power integrated over the compared time. by_counter_j: The device's energy counter.
        seconds: Time compared.
        consistent: Whether they lie within each other's errors.
        text: The comparison as a sentence.
    """

    by_power_j: float
    by_counter_j: float
    seconds: float
    consistent: bool
    text: str


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The state of a sampled device while passes ran on it.

    Attributes:
        uuid: `Device.uuid`. name: Its name. index: Its number.
        sm_clock_hz, memory_clock_hz, temperature_c, power_w: None if not sampled.
        throttle: Reasons for lower clocks, by share of the time; None if not sampled.
        memory_used_bytes: The most that was used.
        idle_power_w: Power between the passes, solved for like a phase; None if not known.
        energy: The energy by power and by counter; None without both.
        windows: Sample windows of its counters. source: The collectors.
    """

    uuid: str
    name: str
    index: int
    sm_clock_hz: Spread | None
    memory_clock_hz: Spread | None
    temperature_c: Spread | None
    power_w: Spread | None
    throttle: tuple[ThrottleShare, ...] | None
    memory_used_bytes: int | None
    idle_power_w: CounterFigure | None
    energy: EnergyCheck | None
    windows: int
    source: str
