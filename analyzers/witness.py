"""The second witness of a verdict: what it is asked, and the forms of what it answers. `hearing` has the rules."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.analyzers.counters.counter_results import DeviceState, PhaseCounters
from phaseprof.analyzers.kernels.kernel_results import KernelFigures
from phaseprof.analyzers.results import Bound, Confidence, Evidence, Lever
from phaseprof.analyzers.roofline import RoofTimes
from phaseprof.trace.meta import Ceilings


class Outcome(enum.StrEnum):
    """What comes of hearing the counters. The value is its name in the docs."""

    #: Measured and modelled share of the bound's own resource lie within their errors.
    AGREES = "agrees"
    MORE_TENSOR = "more tensor activity than the FLOPs need"
    LESS_TENSOR = "less tensor activity than the FLOPs need"
    MORE_TRAFFIC = "more memory traffic than the bytes need"
    LESS_TRAFFIC = "less memory traffic than the bytes need"
    #: The class stays, and another resource is near its peak as well.
    OTHER_ROOF = "another resource near its peak"
    #: The SMs were active for less time than the work needs at its roof.
    INACTIVE = "too little SM activity for the roof"
    AT_MEMORY = "memory near its peak"
    AT_TENSOR_CORES = "tensor cores near their peak"
    IDLE = "few SMs active"
    WORKING = "SMs active, no roof near"
    #: Kernels ran, and few SMs were active.
    FEW_SMS = "kernels that fill few SMs"
    MORE_ACTIVE = "more SM activity than the timeline has busy time"
    UNDECIDED = "SM activity in between"
    LOW_CLOCK = "clock below that of the peak"
    HIGH_CLOCK = "clock above that of the peak"
    THROTTLED = "throttled"


@dataclass(frozen=True, slots=True)
class Witness:
    """What is heard of one phase.

    Attributes:
        counters: Its counters.
        state: The state of the device that it ran on; None if it was not sampled.
        kernels: Its kernels, which may tell why counters and model differ; None without a timeline.
    """

    counters: PhaseCounters
    state: DeviceState | None = None
    kernels: KernelFigures | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What is held against the counters.

    Attributes:
        bound: The class by work and timeline.
        time_s: Time of the passes.
        flops, moved_bytes: Their work; None if not known.
        roofs: Times of that work at the roofs; None without work or roofs.
        ceilings: The roofs.
        busy_share: Share of the time in which the timeline has kernels; None without one.
    """

    bound: Bound
    time_s: float
    flops: float | None
    moved_bytes: float | None
    roofs: RoofTimes | None
    ceilings: Ceilings | None
    busy_share: float | None

    @property
    def explained(self) -> float:
        """Share of the time that the nearer roof accounts for, at most 1; 0 without one."""
        return 0.0 if self.roofs is None else min(self.roofs.floor_s / self.time_s, 1.0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the counters say.

    Attributes:
        outcome: What.
        text: As a clause with its figures.
        bound: The class that follows; None if it stays.
        cap: Confidence is at most this; None if it stays.
        confirms: It makes up for roofs that are not measured.
        lever: What to try first, if that is not what the class tells.
    """

    outcome: Outcome
    text: str
    bound: Bound | None = None
    cap: Confidence | None = None
    confirms: bool = False
    lever: Lever | None = None


@dataclass(frozen=True, slots=True)
class Hearing:
    """What is left of a verdict when the counters have been heard.

    Attributes:
        bound: The class; None if nothing was heard.
        evidence: Measured and modelled figures beside each other.
        findings: What follows from them.
    """

    bound: Bound | None = None
    evidence: tuple[Evidence, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def confirmed(self) -> bool:
        """Whether something confirms the class and nothing speaks against it."""
        return any(f.confirms for f in self.findings) and not any(f.cap for f in self.findings)

    @property
    def ruling(self) -> Finding | None:
        """The finding that changed the class."""
        return next((f for f in self.findings if f.bound is not None), None)


NOTHING_HEARD = Hearing()
