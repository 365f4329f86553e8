"""The second witness: what hardware counters say of a verdict that was reached from modelled work and a timeline.

The model says how many FLOPs and bytes a phase needs, the counters say how active the tensor cores, the SMs and the
memory were. Where both speak of the same thing they are held against each other; where the model and the timeline
leave a question open, the counters may answer it. `docs/classes.md` has the table of `Outcome`s.

A class changes by counters only where physics leaves no other reading:

- A resource that was measured near its peak is what limits, whatever the work needed of it (`AT_MEMORY`,
  `AT_TENSOR_CORES`).
- A device cannot have been idle while its SMs were active (`MORE_ACTIVE`, `WORKING`), nor busy while they were not, but
  for kernels that fill few of them (`IDLE`).
- Arithmetic can go no faster than the clock that the device had (`LOW_CLOCK`).

Only figures that are `sure` are heard. ``utilization.gpu`` is never: it says that some kernel ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.results import Bound, Confidence, Lever, Roof
from phaseprof.analyzers.shares import Share, Shares
from phaseprof.analyzers.witness import Claim, Finding, Hearing, Outcome, Witness
from phaseprof.analyzers.wording import joined, number, percent


def hear(claim: Claim, witness: Witness) -> Hearing:
    """Hold a verdict against the counters."""
    seen = Shares(claim, witness)
    findings = tuple(_Rules(claim, seen).findings())
    hearing = Hearing(claim.bound, tuple(seen.figures()), findings)
    ruling = hearing.ruling
    return hearing if ruling is None else replace(hearing, bound=ruling.bound)


class _Rules:
    def __init__(self, claim: Claim, seen: Shares) -> None:
        self.claim = claim
        self.seen = seen

    def findings(self) -> Iterator[Finding]:
        of_class = list(self._of_class())
        yield from of_class
        if all(finding.outcome is not Outcome.LOW_CLOCK for finding in of_class):
            yield from self._of_clock()
        yield from self._of_throttling()

    def _of_class(self) -> Iterator[Finding]:
        bound = self.claim.bound
        if bound in (Bound.COMPUTE, Bound.BANDWIDTH):
            yield from self._at_a_roof(bound)
        elif bound is Bound.COMMUNICATION:
            yield from self._near_as_well(None)
        else:
            ruling = self._measured_roof() or self._roof_at_real_clock() or self._idle_or_working()
            if ruling is not None:
                yield ruling

    def _at_a_roof(self, bound: Bound) -> Iterator[Finding]:
        sm = self.seen.sm
        compute = bound is Bound.COMPUTE
        compared = self._compare_tensor() if compute else self._compare_traffic()
        if compared is not None:
            yield compared
        least = thresholds.TIMELINE_COVERAGE.value * self.claim.explained
        if sm is not None and sm.high < least:
            yield Finding(
                Outcome.INACTIVE,
                f"the SMs were active {sm} of the time, less than the {percent(self.claim.explained)} that the work "
                "needs at its roof: the work is counted too high, or other passes were sampled than those that count",
                cap=Confidence.LOW,
            )
        yield from self._near_as_well(Roof.COMPUTE if compute else Roof.BANDWIDTH)

    def _compare_tensor(self) -> Finding | None:
        measured, needed = self.seen.tensor, self.seen.needs_tensor
        if measured is None or needed is None:
            return None
        if _agree(measured, needed):
            return Finding(
                Outcome.AGREES,
                "counters and model agree on the tensor cores",
                confirms=True,
            )
        if measured.value > needed.value:
            return Finding(
                Outcome.MORE_TENSOR,
                "the tensor cores were more active than the counted FLOPs need: padding or recompute that is not "
                "counted, tiles that are not full, matmuls in a dtype with a lower peak than that of the roof, or "
                "other processes on the device",
                cap=Confidence.MEDIUM,
            )
        return Finding(
            Outcome.LESS_TENSOR,
            "the tensor cores were less active than the counted FLOPs need: a part of them ran off the tensor cores "
            f"(as FP32 maths does), in a dtype with a higher peak, or not at all{self.seen.by_tensor_kernels()}",
            cap=_below(measured, needed),
        )

    def _compare_traffic(self) -> Finding | None:
        # Bytes with bytes, where they are known: the share is of the interface's peak, which may not be the roof.
        measured, needed = self.seen.rate_of_roof or self.seen.dram, self.seen.needs_dram
        if measured is None or needed is None:
            return None
        if _agree(measured, needed):
            return Finding(
                Outcome.AGREES,
                "counters and model agree on the memory traffic",
                confirms=True,
            )
        if measured.value > needed.value:
            return Finding(
                Outcome.MORE_TRAFFIC,
                f"memory moved {number(measured.value / needed.value)}x the counted bytes: activations, which are not "
                "counted, weights read more than once, copies of the cache, spilled registers, or other processes on "
                f"the device{self.seen.by_moving_kernels()}",
                cap=Confidence.MEDIUM,
            )
        return Finding(
            Outcome.LESS_TRAFFIC,
            f"memory moved {number(max(measured.value, 0.0) / needed.value)}x the counted bytes: a part of them stays "
            "in the L2 cache, or is not read (experts that no token chose)",
            cap=_below(measured, needed),
        )

    def _near_as_well(self, own: Roof | None) -> Iterator[Finding]:
        near = [
            f"{name} {share}"
            for roof, name, share in (
                (Roof.COMPUTE, "the tensor cores were active", self.seen.tensor),
                (Roof.BANDWIDTH, "DRAM was at", self.seen.dram),
            )
            if roof is not own and share is not None and share.near_peak
        ]
        if near:
            yield Finding(
                Outcome.OTHER_ROOF,
                f"{joined(near)} of the peak as well: relief of one alone gains little",
                cap=Confidence.MEDIUM,
            )

    def _measured_roof(self) -> Finding | None:
        """A resource near its peak, in a phase that the model has near none."""
        near = [
            (share.value, roof, share)
            for roof, share in ((Roof.COMPUTE, self.seen.tensor), (Roof.BANDWIDTH, self.seen.dram))
            if share is not None and share.near_peak
        ]
        if not near:
            return None
        _, roof, share = max(near, key=lambda each: each[0])
        if roof is Roof.COMPUTE:
            much = _times(share, self.seen.needs_tensor)
            than = f", {much} what the counted FLOPs need" if much else ""
            return Finding(
                Outcome.AT_TENSOR_CORES,
                f"the tensor cores were active {share} of the cycles{than}: they are what limits, with work "
                "that is not counted (padding, recompute, tiles that are not full) or in a dtype with a lower peak",
                bound=Bound.COMPUTE,
                cap=Confidence.MEDIUM,
                lever=_WASTED_FLOPS if much else None,
            )
        much = _times(share, self.seen.needs_dram)
        than = f", {much} what the counted bytes need" if much else ""
        return Finding(
            Outcome.AT_MEMORY,
            f"DRAM was at {share} of its peak{than}: memory is what limits, with traffic that is not counted "
            "(activations, copies, weights read more than once, spills, other processes on the device)"
            f"{self.seen.by_moving_kernels()}",
            bound=Bound.BANDWIDTH,
            cap=Confidence.MEDIUM,
            lever=_WASTED_BYTES if much else None,
        )

    def _idle_or_working(self) -> Finding | None:
        if self.seen.sm is None:
            return None
        bound = self.claim.bound
        if bound is Bound.LATENCY:
            return self._seen_busy()
        if bound is Bound.OVERHEAD and self.claim.busy_share is not None:
            return self._seen_idle()
        return self._without_timeline()

    def _seen_busy(self) -> Finding | None:
        sm = self.seen.sm
        assert sm is not None
        busy = 1.0 if self.claim.busy_share is None else self.claim.busy_share
        if sm.high < thresholds.FEW_SMS.value * busy:
            return Finding(
                Outcome.FEW_SMS,
                f"kernels ran {percent(busy)} of the time, and only {sm} of the SMs' time was active: they are "
                "too small to fill the device",
            )
        if self._no_roof_near():
            return Finding(
                Outcome.WORKING,
                f"the SMs were active {sm} of the time, with tensor cores and memory far from their peaks: slow "
                "kernels, no waiting",
                confirms=True,
            )
        return None

    def _seen_idle(self) -> Finding:
        sm = self.seen.sm
        assert sm is not None and self.claim.busy_share is not None
        busy = self.claim.busy_share
        if sm.low <= busy + thresholds.WITNESS_POINTS.value:
            return Finding(
                Outcome.IDLE,
                f"the SMs were active {sm} of the time, no more than the timeline has kernels: the device waits",
                confirms=True,
            )
        lead = (
            f"the SMs were active {sm} of the time, the timeline has kernels in {percent(busy)}: passes under a "
            "profiler are launched more slowly than the others"
        )
        if 1 - sm.low < self._half_unexplained():
            return Finding(
                Outcome.MORE_ACTIVE,
                f"{lead}, and what is left of the idle time is the smaller part of what no roof explains",
                bound=Bound.LATENCY,
                cap=Confidence.MEDIUM,
            )
        return Finding(Outcome.MORE_ACTIVE, lead, cap=Confidence.MEDIUM)

    def _without_timeline(self) -> Finding | None:
        """Overhead or latency, or a class that is not known."""
        sm = self.seen.sm
        assert sm is not None
        half = self._half_unexplained()
        if 1 - sm.high >= half:
            return Finding(
                Outcome.IDLE,
                f"the SMs were active only {sm} of the time: the device waits (kernels that fill few SMs would "
                "look the same; a kernel timeline would tell)",
                bound=Bound.OVERHEAD,
                cap=Confidence.MEDIUM,
            )
        if 1 - sm.low >= half:
            return Finding(
                Outcome.UNDECIDED,
                f"the SMs were active {sm} of the time, which leaves open whether more of the rest is idle or "
                "slow",
            )
        known = self._no_roof_near()
        if self.claim.bound is Bound.UNKNOWN and not known:
            # Without work only the counters could tell that no roof is near.
            return None
        return Finding(
            Outcome.WORKING,
            f"the SMs were active {sm} of the time: the device works, and is not waiting"
            + (", while tensor cores and memory were far from their peaks" if known else ""),
            bound=Bound.LATENCY,
            cap=None if known and self.claim.bound is not Bound.UNKNOWN else Confidence.MEDIUM,
        )

    def _half_unexplained(self) -> float:
        return thresholds.IDLE_OF_UNEXPLAINED.value * (1 - self.claim.explained)

    def _no_roof_near(self) -> bool:
        """Whether both resources were seen, and far from their peaks."""
        seen = (self.seen.tensor, self.seen.dram)
        return all(share is not None and share.below_peak for share in seen)

    # The state of the device

    def _roof_at_real_clock(self) -> Finding | None:
        """A device that works below the clock of its peak may be at the roof that it has."""
        sm = self.seen.sm
        text, share = self._low_clock()
        least = thresholds.TIMELINE_COVERAGE.value * min(share, 1.0)
        idle = sm is not None and sm.high < least
        if share < thresholds.ENOUGH_EXPLAINED.value or idle:
            return None
        return Finding(
            Outcome.LOW_CLOCK,
            f"{text}, which is the larger part of it",
            bound=Bound.COMPUTE,
            cap=Confidence.MEDIUM,
            lever=_CLOCK,
        )

    def _low_clock(self) -> tuple[str, float]:
        """In words, and the share of the time that the nearer roof takes at the clock that the device had, if that is
        the compute roof. Empty if the clock was no lower than that of the peak."""
        ratio, compared = self.seen.clock_ratio, self._clocks()
        if ratio is None or ratio >= thresholds.LOW_CLOCK.value:
            return "", 0.0
        text = f"{compared[0]}, below {compared[1]}"
        if self.claim.roofs is None or self.claim.roofs.nearest is not Roof.COMPUTE:
            return text, 0.0
        share = self.claim.roofs.compute_s / self.claim.time_s
        real = share / ratio
        text += (
            f": at the real clock the FLOPs take {percent(real)} of the time, not {percent(share)}"
        )
        return text, real

    def _clocks(self) -> tuple[str, str]:
        state, roofs = self.seen.state, self.claim.ceilings
        if state is None or state.sm_clock_hz is None or roofs is None or roofs.clock_hz is None:
            return "", ""
        ran = f"the SMs ran at {_clock(state.sm_clock_hz.median)}"
        return ran, f"the {_clock(roofs.clock_hz)} of the compute roof"

    def _of_clock(self) -> Iterator[Finding]:
        text, _ = self._low_clock()
        if text:
            yield Finding(Outcome.LOW_CLOCK, text)
            return
        ratio, roofs = self.seen.clock_ratio, self.claim.roofs
        if ratio is None or ratio <= 1 / thresholds.LOW_CLOCK.value or roofs is None:
            return
        share = roofs.compute_s / self.claim.time_s
        if share > 1:
            ran, peak = self._clocks()
            yield Finding(
                Outcome.HIGH_CLOCK,
                f"{ran}, above {peak}: at the real clock the FLOPs take {percent(share / ratio)} of the time",
            )

    def _of_throttling(self) -> Iterator[Finding]:
        if self.seen.state is None or not self.seen.state.throttle:
            return
        held = [
            f"{reason.name} {percent(reason.share)} of the time"
            for reason in sorted(self.seen.state.throttle, key=lambda each: -each.share)
            if reason.slows and reason.share >= thresholds.THROTTLED.value
        ]
        if held:
            yield Finding(Outcome.THROTTLED, f"the driver held the clocks down: {joined(held)}")


_WASTED_BYTES = Lever(
    "less memory traffic",
    "the kernels move more than the work needs: fuse element-wise operators (torch.compile, fused attention and MLP), "
    "write the KV cache in place (a static cache), and see that no other process uses the device",
)
_WASTED_FLOPS = Lever(
    "less padding",
    "the tensor cores multiply more than the work needs: batch prompts of like length or pack them, and see that the "
    "matmuls run in the dtype that is meant",
)

_CLOCK = Lever(
    "a higher clock",
    "see what holds it down (`nvidia-smi -q -d PERFORMANCE`): a power limit, heat, or clocks that were locked",
)


def _agree(measured: Share, needed: Share) -> bool:
    return abs(measured.value - needed.value) <= measured.error + needed.error


def _below(measured: Share, needed: Share) -> Confidence:
    """How far a resource that was used less than needed puts the class in question."""
    far = measured.high < thresholds.FAR_BELOW_MODEL.value * needed.value
    return Confidence.LOW if far else Confidence.MEDIUM


def _times(measured: Share, needed: Share | None) -> str:
    """How many times what is needed was used; empty if that is within the errors, or not known."""
    if needed is None or needed.value <= 0 or _agree(measured, needed):
        return ""
    return f"{number(measured.value / needed.value)}x"


def _clock(hz: float) -> str:
    return f"{hz / 1e9:.2f} GHz"
