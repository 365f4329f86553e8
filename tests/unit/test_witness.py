"""The second witness: what counters make of a verdict, in every combination, on a device of round roofs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.analyzers.bound import Question, classify
from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    DeviceState,
    PhaseCounters,
    Spread,
    ThrottleShare,
)
from phaseprof.analyzers.hearing import hear
from phaseprof.analyzers.kernels.kernel_results import (
    ClassShare,
    KernelClass,
    KernelFigures,
    TensorCores,
)
from phaseprof.analyzers.remedies import Circumstances
from phaseprof.analyzers.results import Bound, Confidence, Provenance, Verdict
from phaseprof.analyzers.roofline import roof_times
from phaseprof.analyzers.testimony import state_for
from phaseprof.analyzers.witness import Claim, Outcome, Witness
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings, Device

#: 1 TFLOP takes 1 ms, and 4 GB take 1 ms; the peak holds at 2 GHz.
ROOFS = Ceilings("gpu", "bfloat16", 1e15, 4e12, "datasheet", None, None, "by hand", clock_hz=2e9)
MEASURED_ROOFS = replace(ROOFS, source="measured", spread=0.02, measured_ns=1, clock_hz=None)


def figure(metric: str, value: float, error: float = 0.02, *, sure: bool = True) -> CounterFigure:
    state = CounterState.SURE if sure else CounterState.INSUFFICIENT
    return CounterFigure(metric, value, error, state, "" if sure else "too few windows", 40, "gpm")


def counters(
    *,
    sm: float | None = None,
    tensor: float | None = None,
    dram: float | None = None,
    rate: float | None = None,
    error: float = 0.02,
    sure: bool = True,
) -> PhaseCounters:
    """Counters as shares; ``rate`` in TB/s."""

    def share(name: str, value: float | None) -> CounterFigure | None:
        return None if value is None else figure(name, value, error, sure=sure)

    return PhaseCounters(
        sm_active=share("sm_active_share", sm),
        tensor_active=share("tensor_active_share", tensor),
        dram_active=share("dram_active_share", dram),
        dram_bytes_per_s=None
        if rate is None
        else figure("dram_bytes_per_s", rate * 1e12, error * 4e12, sure=sure),
        sampled_s=1.0,
    )


def state(
    ghz: float | None = None, throttle: tuple[ThrottleShare, ...] = (), uuid: str = "GPU-1"
) -> DeviceState:
    clock = None if ghz is None else Spread(ghz * 0.9e9, ghz * 1e9, ghz * 1.05e9)
    return DeviceState(
        uuid, "GPU", 0, clock, None, None, None, throttle, None, None, None, 40, "nvml"
    )


def claim(
    bound: Bound,
    ms: float,
    *,
    tflop: float | None,
    gb: float | None,
    busy: float | None = None,
    ceilings: Ceilings | None = ROOFS,
) -> Claim:
    flops = None if tflop is None else tflop * 1e12
    moved = None if gb is None else gb * 1e9
    roofs = None
    if flops is not None and moved is not None and ceilings is not None:
        roofs = roof_times(flops=flops, moved_bytes=moved, ceilings=ceilings)
    return Claim(bound, ms / 1e3, flops, moved, roofs, ceilings, busy)


# 100 ms: a prefill that needs 80 ms of the tensor cores and 5 of memory; a decode step that needs 80 of memory and 4 of
# the tensor cores; a step far from both roofs (20 and 4 ms).
COMPUTE = claim(Bound.COMPUTE, 100, tflop=80, gb=20)
BANDWIDTH = claim(Bound.BANDWIDTH, 100, tflop=4, gb=320)
LATENCY = claim(Bound.LATENCY, 100, tflop=4, gb=80, busy=0.95)
OVERHEAD = claim(Bound.OVERHEAD, 100, tflop=4, gb=80, busy=0.30)
EITHER = claim(Bound.OVERHEAD_OR_LATENCY, 100, tflop=4, gb=80)
UNKNOWN = claim(Bound.UNKNOWN, 100, tflop=None, gb=None)
COLLECTIVES = claim(Bound.COMMUNICATION, 100, tflop=4, gb=80, busy=0.95)


@pytest.mark.parametrize(
    ("given", "seen", "outcomes", "bound", "cap"),
    [
        # At a roof, and the counters of that resource beside it.
        (COMPUTE, {"tensor": 0.78}, [Outcome.AGREES], Bound.COMPUTE, None),
        (COMPUTE, {"tensor": 0.80, "sm": 0.97, "dram": 0.3}, [Outcome.AGREES], Bound.COMPUTE, None),
        # 80 ±12 by the model against 98 ±2 or 62 ±2: outside of both errors.
        (COMPUTE, {"tensor": 0.98}, [Outcome.MORE_TENSOR], Bound.COMPUTE, Confidence.MEDIUM),
        (COMPUTE, {"tensor": 0.62}, [Outcome.LESS_TENSOR], Bound.COMPUTE, Confidence.MEDIUM),
        # FP32 maths beside the tensor cores.
        (COMPUTE, {"tensor": 0.02}, [Outcome.LESS_TENSOR], Bound.COMPUTE, Confidence.LOW),
        (BANDWIDTH, {"dram": 0.81}, [Outcome.AGREES], Bound.BANDWIDTH, None),
        (BANDWIDTH, {"rate": 3.2}, [Outcome.AGREES], Bound.BANDWIDTH, None),
        # 3.2 TB/s are counted.
        (BANDWIDTH, {"rate": 3.9}, [Outcome.MORE_TRAFFIC], Bound.BANDWIDTH, Confidence.MEDIUM),
        (BANDWIDTH, {"rate": 2.4}, [Outcome.LESS_TRAFFIC], Bound.BANDWIDTH, Confidence.MEDIUM),
        (BANDWIDTH, {"dram": 0.2}, [Outcome.LESS_TRAFFIC], Bound.BANDWIDTH, Confidence.LOW),
        # Bytes go before shares: the share is of the interface, and may be of another board's.
        (BANDWIDTH, {"rate": 3.2, "dram": 0.5}, [Outcome.AGREES], Bound.BANDWIDTH, None),
        # Tiles that are not full keep the tensor cores of a decode step busier than its FLOPs: no matter.
        (BANDWIDTH, {"dram": 0.8, "tensor": 0.15}, [Outcome.AGREES], Bound.BANDWIDTH, None),
        # Both resources near their peaks.
        (
            COMPUTE,
            {"tensor": 0.8, "dram": 0.75},
            [Outcome.AGREES, Outcome.OTHER_ROOF],
            Bound.COMPUTE,
            Confidence.MEDIUM,
        ),
        (
            BANDWIDTH,
            {"tensor": 0.7, "dram": 0.8},
            [Outcome.AGREES, Outcome.OTHER_ROOF],
            Bound.BANDWIDTH,
            Confidence.MEDIUM,
        ),
        (COLLECTIVES, {"dram": 0.8}, [Outcome.OTHER_ROOF], Bound.COMMUNICATION, Confidence.MEDIUM),
        (COLLECTIVES, {"dram": 0.3, "sm": 0.9}, [], Bound.COMMUNICATION, None),
        # Work that takes 80 % of the time at its roof, on SMs that were active for half of it.
        (COMPUTE, {"sm": 0.5}, [Outcome.INACTIVE], Bound.COMPUTE, Confidence.LOW),
        (BANDWIDTH, {"sm": 0.5}, [Outcome.INACTIVE], Bound.BANDWIDTH, Confidence.LOW),
        (BANDWIDTH, {"sm": 0.75}, [], Bound.BANDWIDTH, None),
        # Busy by the timeline, near no roof by the model.
        (
            LATENCY,
            {"sm": 0.9, "tensor": 0.05, "dram": 0.3},
            [Outcome.WORKING],
            Bound.LATENCY,
            None,
        ),
        (LATENCY, {"sm": 0.9}, [], Bound.LATENCY, None),
        (LATENCY, {"sm": 0.2, "tensor": 0.05, "dram": 0.2}, [Outcome.FEW_SMS], Bound.LATENCY, None),
        (
            LATENCY,
            {"sm": 0.95, "dram": 0.85},
            [Outcome.AT_MEMORY],
            Bound.BANDWIDTH,
            Confidence.MEDIUM,
        ),
        (
            LATENCY,
            {"sm": 0.95, "tensor": 0.7},
            [Outcome.AT_TENSOR_CORES],
            Bound.COMPUTE,
            Confidence.MEDIUM,
        ),
        # Of two, the one nearer to its peak.
        (
            LATENCY,
            {"tensor": 0.7, "dram": 0.9},
            [Outcome.AT_MEMORY],
            Bound.BANDWIDTH,
            Confidence.MEDIUM,
        ),
        (
            LATENCY,
            {"tensor": 0.9, "dram": 0.7},
            [Outcome.AT_TENSOR_CORES],
            Bound.COMPUTE,
            Confidence.MEDIUM,
        ),
        # 60 % less its error is not near.
        (
            LATENCY,
            {"sm": 0.9, "tensor": 0.05, "dram": 0.61},
            [],
            Bound.LATENCY,
            None,
        ),
        # Idle by the timeline.
        (OVERHEAD, {"sm": 0.28}, [Outcome.IDLE], Bound.OVERHEAD, None),
        (OVERHEAD, {"sm": 0.10}, [Outcome.IDLE], Bound.OVERHEAD, None),
        # Unexplained are 80 %: overhead from 40 % idle.
        (OVERHEAD, {"sm": 0.50}, [Outcome.MORE_ACTIVE], Bound.OVERHEAD, Confidence.MEDIUM),
        (OVERHEAD, {"sm": 0.85}, [Outcome.MORE_ACTIVE], Bound.LATENCY, Confidence.MEDIUM),
        (
            OVERHEAD,
            {"sm": 0.9, "dram": 0.8},
            [Outcome.AT_MEMORY],
            Bound.BANDWIDTH,
            Confidence.MEDIUM,
        ),
        # Without a timeline the SMs tell.
        (EITHER, {"sm": 0.25}, [Outcome.IDLE], Bound.OVERHEAD, Confidence.MEDIUM),
        (
            EITHER,
            {"sm": 0.95, "tensor": 0.05, "dram": 0.3},
            [Outcome.WORKING],
            Bound.LATENCY,
            None,
        ),
        (EITHER, {"sm": 0.95}, [Outcome.WORKING], Bound.LATENCY, Confidence.MEDIUM),
        (EITHER, {"sm": 0.60}, [Outcome.UNDECIDED], Bound.OVERHEAD_OR_LATENCY, None),
        (EITHER, {"tensor": 0.05, "dram": 0.3}, [], Bound.OVERHEAD_OR_LATENCY, None),
        (EITHER, {"dram": 0.8}, [Outcome.AT_MEMORY], Bound.BANDWIDTH, Confidence.MEDIUM),
        # Without work or roofs.
        (UNKNOWN, {"sm": 0.2}, [Outcome.IDLE], Bound.OVERHEAD, Confidence.MEDIUM),
        (
            UNKNOWN,
            {"sm": 0.95, "tensor": 0.1, "dram": 0.2},
            [Outcome.WORKING],
            Bound.LATENCY,
            Confidence.MEDIUM,
        ),
        (UNKNOWN, {"sm": 0.95}, [], Bound.UNKNOWN, None),
        (UNKNOWN, {"dram": 0.8}, [Outcome.AT_MEMORY], Bound.BANDWIDTH, Confidence.MEDIUM),
        (UNKNOWN, {"tensor": 0.8}, [Outcome.AT_TENSOR_CORES], Bound.COMPUTE, Confidence.MEDIUM),
    ],
)
def test_every_combination(
    given: Claim,
    seen: dict[str, Any],
    outcomes: list[Outcome],
    bound: Bound,
    cap: Confidence | None,
) -> None:
    hearing = hear(given, Witness(counters(**seen), state(2.0)))
    assert [finding.outcome for finding in hearing.findings] == outcomes
    assert hearing.bound is bound
    caps = [finding.cap for finding in hearing.findings if finding.cap is not None]
    assert (caps[0] if caps else None) is cap
    # A class that changes says so in one finding, and is never as sure as one that was confirmed.
    changed = bound is not given.bound
    assert changed == (hearing.ruling is not None)
    assert not (hearing.confirmed and caps)


#: What each class may become by counters alone.
MAY_BECOME = {
    Bound.COMPUTE: set(),
    Bound.BANDWIDTH: set(),
    Bound.COMMUNICATION: set(),
    Bound.LATENCY: {Bound.COMPUTE, Bound.BANDWIDTH},
    Bound.OVERHEAD: {Bound.COMPUTE, Bound.BANDWIDTH, Bound.LATENCY},
    Bound.OVERHEAD_OR_LATENCY: {Bound.COMPUTE, Bound.BANDWIDTH, Bound.LATENCY, Bound.OVERHEAD},
    Bound.UNKNOWN: {Bound.COMPUTE, Bound.BANDWIDTH, Bound.LATENCY, Bound.OVERHEAD},
}
_maybe_share = st.none() | st.floats(0, 1)


@given(
    claimed=st.sampled_from([COMPUTE, BANDWIDTH, LATENCY, OVERHEAD, EITHER, UNKNOWN, COLLECTIVES]),
    sm=_maybe_share,
    tensor=_maybe_share,
    dram=_maybe_share,
    error=st.floats(0, 0.05),
    ghz=st.none() | st.floats(0.3, 2.5),
)
def test_a_class_changes_only_where_physics_leaves_no_other(
    claimed: Claim,
    sm: float | None,
    tensor: float | None,
    dram: float | None,
    error: float,
    ghz: float | None,
) -> None:
    hearing = hear(
        claimed, Witness(counters(sm=sm, tensor=tensor, dram=dram, error=error), state(ghz))
    )
    ruling = hearing.ruling
    if ruling is None:
        assert hearing.bound is claimed.bound
        return
    assert hearing.bound in MAY_BECOME[claimed.bound]
    # It was seen, by the counter that it rests on.
    if ruling.outcome is Outcome.AT_MEMORY:
        assert dram is not None and dram - error >= 0.6
    elif ruling.outcome is Outcome.AT_TENSOR_CORES:
        assert tensor is not None and tensor - error >= 0.6
    elif ruling.outcome is Outcome.LOW_CLOCK:
        assert ghz is not None and ghz < 0.95 * 2
    elif ruling.bound is Bound.OVERHEAD:
        assert sm is not None and sm + error <= 0.6
    else:
        assert sm is not None and sm - error >= 0.5


@pytest.mark.parametrize("given", [COMPUTE, BANDWIDTH, LATENCY, OVERHEAD, EITHER, UNKNOWN])
@pytest.mark.parametrize("seen", [{}, {"sm": 0.99, "tensor": 0.99, "dram": 0.99, "sure": False}])
def test_what_is_not_sure_has_no_say(given: Claim, seen: dict[str, Any]) -> None:
    """Neither in the class, nor in the confidence, nor as a figure."""
    hearing = hear(given, Witness(counters(**seen)))
    assert (hearing.bound, hearing.evidence, hearing.findings) == (given.bound, (), ())


def test_both_figures_are_shown_with_where_they_come_from() -> None:
    hearing = hear(COMPUTE, Witness(counters(sm=0.97, tensor=0.78, dram=0.31, rate=1.2), state(2)))
    measured, modelled = hearing.evidence
    assert measured.provenance is Provenance.MEASURED
    assert measured.text == (
        "Counters (gpm, 40 windows): SMs active 97 % ±2, tensor cores 78 % ±2 and DRAM 31 % ±2 (1,200 GB/s)."
    )
    assert modelled.provenance is Provenance.MODELLED
    assert modelled.text == (
        "By the model the FLOPs keep the tensor cores active for 80 % ±12 of the time and the bytes take 5 % ±5 of the "
        "bandwidth (200 GB/s)."
    )


def test_only_what_was_measured_is_compared() -> None:
    hearing = hear(BANDWIDTH, Witness(counters(sm=0.97)))
    assert [e.text for e in hearing.evidence] == ["Counters (gpm, 40 windows): SMs active 97 % ±2."]


def test_the_peak_is_that_of_the_real_clock() -> None:
    """40 TFLOP in 100 ms are 40 % of the peak at 2 GHz, and 80 % of what the tensor cores can at 1 GHz."""
    given = claim(Bound.COMPUTE, 100, tflop=40, gb=20)
    at = {ghz: hear(given, Witness(counters(tensor=0.8), state(ghz))) for ghz in (1.0, 2.0)}
    assert at[1.0].findings[0].outcome is Outcome.AGREES
    assert at[2.0].findings[0].outcome is Outcome.MORE_TENSOR


def test_float32_may_run_beside_the_tensor_cores() -> None:
    given = claim(Bound.COMPUTE, 100, tflop=80, gb=20, ceilings=replace(ROOFS, dtype="float32"))
    assert hear(given, Witness(counters(tensor=0.0))).findings == ()


@pytest.mark.parametrize(
    ("ceilings", "agrees"), [(ROOFS, False), (MEASURED_ROOFS, True)], ids=["datasheet", "measured"]
)
def test_a_measured_roof_leaves_more_room(ceilings: Ceilings, agrees: bool) -> None:
    """80 % of a roof that a kernel reached may be 65 % of the peak that the counter's share is of."""
    given = claim(Bound.COMPUTE, 100, tflop=80, gb=20, ceilings=ceilings)
    (finding,) = hear(given, Witness(counters(tensor=0.65), state(2.0))).findings
    assert (finding.outcome is Outcome.AGREES) == agrees


def kernels(**shares: float) -> KernelFigures:
    """Kernels of a phase by the share of each class; half of the busy time is on tensor cores by their names."""
    classes = tuple(
        ClassShare(KernelClass(name), 100 * share, share, 10, TensorCores.NO, 0.0, "kernel", 1.0)
        for name, share in shares.items()
    )
    return KernelFigures(
        on_cpu=False,
        passes=3,
        kernels=30,
        span_ms=120.0,
        busy_ms=100.0,
        gap_ms=20.0,
        overlap_ms=0.0,
        classes=classes,
        tensor_core_share=0.48,
        tensor_core_unknown_share=0.0,
        collective_ms=0.0,
        exposed_collective_ms=0.0,
        exposed_comm_share=0.0,
        copies=0,
        copy_ms=0.0,
        unclassed_share=0.0,
        launch_delay_ms=None,
        graph_kernels=0,
    )


@pytest.mark.parametrize(
    ("given", "seen", "says"),
    [
        (
            COMPUTE,
            {"tensor": 0.4},
            "; by their names, kernels with 48 % of the busy time use tensor cores",
        ),
        (
            BANDWIDTH,
            {"rate": 3.9},
            "; copies, element-wise kernels and the like take 40 % of the busy time",
        ),
        (
            LATENCY,
            {"dram": 0.9},
            "; copies, element-wise kernels and the like take 40 % of the busy time",
        ),
        (BANDWIDTH, {"rate": 3.2}, ""),
    ],
)
def test_kernels_tell_what_a_difference_comes_from(
    given: Claim, seen: dict[str, Any], says: str
) -> None:
    known = kernels(gemm=0.55, copy=0.25, elementwise=0.15, other=0.05)
    (finding,) = hear(given, Witness(counters(**seen), None, known)).findings
    (without,) = hear(given, Witness(counters(**seen))).findings
    assert finding.text == without.text + says
    assert (finding.bound, finding.cap) == (without.bound, without.cap)


# --- clocks and throttling ------------------------------------------------------------------------


def test_a_device_below_its_clock_may_be_at_its_roof() -> None:
    """36 % of the peak at 2 GHz are 60 % of that at 1.2."""
    given = claim(Bound.OVERHEAD_OR_LATENCY, 100, tflop=36, gb=20)
    hearing = hear(given, Witness(counters(), state(1.2)))
    (finding,) = hearing.findings
    assert (finding.outcome, hearing.bound) == (Outcome.LOW_CLOCK, Bound.COMPUTE)
    assert finding.text.startswith(
        "the SMs ran at 1.20 GHz, below the 2.00 GHz of the compute roof: at the real clock the FLOPs take 60 % of the "
        "time, not 36 %"
    )
    # SMs that were active for a third of the time cannot have made 60 %.
    hearing = hear(given, Witness(counters(sm=0.3), state(1.2)))
    assert [f.outcome for f in hearing.findings] == [Outcome.IDLE, Outcome.LOW_CLOCK]
    assert hearing.bound is Bound.OVERHEAD


@pytest.mark.parametrize("given", [COMPUTE, BANDWIDTH, LATENCY, UNKNOWN])
def test_a_low_clock_is_said_of_any_phase(given: Claim) -> None:
    hearing = hear(given, Witness(counters(), state(1.2)))
    assert hearing.bound is given.bound
    assert [f.outcome for f in hearing.findings] == [Outcome.LOW_CLOCK]
    assert "1.20 GHz" in hearing.findings[0].text
    assert not hear(given, Witness(counters(), state(1.95))).findings


def test_a_boosted_clock_explains_a_share_above_the_roof() -> None:
    given = claim(Bound.COMPUTE, 100, tflop=106, gb=20)
    (finding,) = hear(given, Witness(counters(), state(2.2))).findings
    assert finding.outcome is Outcome.HIGH_CLOCK
    assert "at the real clock the FLOPs take 96 % of the time" in finding.text
    assert not hear(COMPUTE, Witness(counters(), state(2.2))).findings


def test_without_the_clock_of_the_peak_none_is_compared() -> None:
    given = claim(Bound.COMPUTE, 100, tflop=80, gb=20, ceilings=MEASURED_ROOFS)
    assert hear(given, Witness(counters(), state(1.0))).findings == ()


def test_throttling_names_what_held_the_clocks_down() -> None:
    reasons = (
        ThrottleShare("idle", 0.5, slows=False),
        ThrottleShare("hardware thermal slowdown", 0.15, slows=True),
        ThrottleShare("software power cap", 0.62, slows=True),
        ThrottleShare("sync boost", 0.02, slows=True),
    )
    (finding,) = hear(BANDWIDTH, Witness(counters(), state(None, reasons))).findings
    assert finding.outcome is Outcome.THROTTLED
    assert finding.text == (
        "the driver held the clocks down: software power cap 62 % of the time and hardware thermal slowdown 15 % of "
        "the time"
    )
    assert finding.cap is None


def test_the_slowest_of_several_devices_sets_the_pace() -> None:
    device = Device("GPU", "cuda", 0, 132, None, None, "gpu", "GPU-1")
    states = [state(1.9, uuid="GPU-1"), state(1.3, uuid="GPU-2"), state(None, uuid="GPU-3")]
    assert state_for(states, device) is states[1]
    assert state_for(states[:1], device) is states[0]
    assert state_for(states[1:2], None) is states[1]
    assert state_for([], device) is None


# --- the page -----------------------------------------------------------------------------------


def test_the_page_names_every_outcome() -> None:
    """In the last column of its table, each spelled as here; and no other."""
    page = (Path(__file__).parents[2] / "docs" / "classes.md").read_text(encoding="utf-8")
    table = page.partition("## The second witness")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    named = {row.strip("|").rpartition("|")[2].strip() for row in rows} - {"outcome", "---"}
    assert named == {outcome.value for outcome in Outcome}


# --- the verdict ----------------------------------------------------------------------------------


def verdict(
    ms: float,
    tflop: float | None,
    gb: float | None,
    witness: Witness | None = None,
    *,
    busy: float | None = None,
    ceilings: Ceilings = ROOFS,
) -> Verdict:
    return classify(
        time_s=ms / 1e3,
        flops=None if tflop is None else tflop * 1e12,
        bytes=None if gb is None else gb * 1e9,
        ceilings=ceilings,
        busy_share=busy,
        phase=Phase.DECODE,
        circumstances=Circumstances(passes=50, device_kind="cuda"),
        witness=witness,
    )


def texts(found: Verdict) -> str:
    return "\n".join(e.text for e in found.evidence)


def test_agreement_makes_up_for_the_roofs_of_a_datasheet() -> None:
    assert verdict(100, 4, 320).confidence is Confidence.MEDIUM
    heard = verdict(100, 4, 320, Witness(counters(dram=0.8, sm=0.95)))
    assert (heard.bound, heard.confidence, heard.doubt) == (Bound.BANDWIDTH, Confidence.HIGH, "")
    # The doubt is still said.
    assert "datasheet values" in texts(heard)
    assert "agree on the memory traffic" in texts(heard)


def test_disagreement_lowers_the_confidence_and_is_the_doubt() -> None:
    heard = verdict(100, 4, 320, Witness(counters(dram=0.2)), ceilings=MEASURED_ROOFS)
    assert (heard.bound, heard.confidence) == (Bound.BANDWIDTH, Confidence.LOW)
    assert "0.25x the counted bytes" in heard.doubt
    assert "DRAM 20 % ±2" in texts(heard) and "80 % ±20 of the bandwidth" in texts(heard)
    assert heard.ruling == ""


def test_overhead_or_latency_is_resolved_and_no_longer_called_open() -> None:
    alone = verdict(100, 4, 80)
    assert alone.bound is Bound.OVERHEAD_OR_LATENCY
    heard = verdict(100, 4, 80, Witness(counters(sm=0.25)))
    assert (heard.bound, heard.confidence) == (Bound.OVERHEAD, Confidence.MEDIUM)
    assert "was not seen" not in texts(heard)
    assert heard.lever is not None and heard.lever.name == "fewer launches"
    assert heard.ruling.startswith("the SMs were active only 25 % ±2 of the time")


def test_memory_that_is_busy_with_other_bytes_names_another_lever() -> None:
    heard = verdict(100, 4, 80, Witness(counters(dram=0.9, sm=0.95)), busy=0.95)
    assert heard.bound is Bound.BANDWIDTH
    assert heard.lever is not None and heard.lever.name == "less memory traffic"
    assert "4.5x what the counted bytes need" in heard.ruling


def test_a_timeline_that_lacks_kernels_is_made_up_for_by_the_sms() -> None:
    """Busy 20 %, while the roofs need 45 %: not believed. The SMs say that the device worked."""
    alone = verdict(100, 4, 180, busy=0.2)
    assert (alone.bound, alone.confidence) == (Bound.OVERHEAD_OR_LATENCY, Confidence.LOW)
    heard = verdict(100, 4, 180, Witness(counters(sm=0.95, tensor=0.1, dram=0.45)), busy=0.2)
    assert (heard.bound, heard.confidence) == (Bound.LATENCY, Confidence.MEDIUM)


def test_a_model_that_is_not_covered_is_judged_by_its_counters() -> None:
    alone = verdict(100, None, None)
    assert (alone.bound, alone.confidence) == (Bound.UNKNOWN, Confidence.LOW)
    heard = verdict(100, None, None, Witness(counters(dram=0.8)))
    assert (heard.bound, heard.confidence) == (Bound.BANDWIDTH, Confidence.MEDIUM)
    assert (heard.explained, heard.nearest_roof) == (None, None)
    assert heard.evidence[0].text.startswith("FLOPs and bytes of these passes are not known")
    assert heard.lever is not None


def test_no_time_leaves_nothing_to_hear() -> None:
    assert verdict(0, 4, 80, Witness(counters(sm=0.9))).bound is Bound.UNKNOWN


def test_a_question_can_be_asked_again() -> None:
    question = Question(0.1, 4e12, 80e9, ROOFS, None, Phase.DECODE, None, Circumstances(passes=50))
    assert question.answer().bound is Bound.OVERHEAD_OR_LATENCY
    assert question.answer(Witness(counters(sm=0.2))).bound is Bound.OVERHEAD
