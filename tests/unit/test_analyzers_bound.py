"""Classes that follow by construction: round work on a device of round roofs, and times that are chosen."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import CPU, GB, GFLOP, GPU, roofs

from phaseprof.analyzers.bound import classify
from phaseprof.analyzers.remedies import Circumstances
from phaseprof.analyzers.results import Bound, Confidence, Provenance, Roof, Verdict
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings


def verdict(
    ms: float,
    *,
    gflop: float | None,
    gb: float | None,
    busy: float | None = None,
    comm: float | None = None,
    phase: Phase = Phase.DECODE,
    ceilings: Ceilings | None = roofs(),  # noqa: B008
    **circumstances: Any,
) -> Verdict:
    """Class one pass. At the stand-in's roofs 1 GFLOP takes 1 ms, and 0.1 GB takes 1 ms."""
    return classify(
        time_s=ms / 1e3,
        flops=None if gflop is None else gflop * GFLOP,
        bytes=None if gb is None else gb * GB,
        ceilings=ceilings,
        busy_share=busy,
        exposed_comm_share=comm,
        phase=phase,
        circumstances=Circumstances(**circumstances),
    )


def texts(found: Verdict) -> str:
    return "\n".join(e.text for e in found.evidence)


# Work at the roofs: (10 ms compute, 1 ms memory) for "prefill", (0.1 ms, 10 ms) for "decode".
PREFILL: dict[str, Any] = {"gflop": 10.0, "gb": 0.1}
DECODE: dict[str, Any] = {"gflop": 0.1, "gb": 1.0}


@pytest.mark.parametrize(
    ("ms", "work", "busy", "comm", "bound", "roof", "explained"),
    [
        (16.0, PREFILL, None, None, Bound.COMPUTE, Roof.COMPUTE, 0.625),
        (18.0, DECODE, None, None, Bound.BANDWIDTH, Roof.BANDWIDTH, 0.5556),
        (20.0, DECODE, None, None, Bound.BANDWIDTH, Roof.BANDWIDTH, 0.5),
        # A CPU in bfloat16: a quarter of the roof, and the device busy.
        (40.0, DECODE, 0.95, None, Bound.LATENCY, Roof.BANDWIDTH, 0.25),
        # Eager decode on a GPU: 27 % of the floor, idle for 70 %.
        (37.0, DECODE, 0.30, None, Bound.OVERHEAD, Roof.BANDWIDTH, 0.27),
        # Both roofs small, device idle for 90 %, in either phase.
        (200.0, DECODE, 0.10, None, Bound.OVERHEAD, Roof.BANDWIDTH, 0.05),
        (200.0, PREFILL, 0.10, None, Bound.OVERHEAD, Roof.COMPUTE, 0.05),
        (200.0, PREFILL, 0.95, None, Bound.LATENCY, Roof.COMPUTE, 0.05),
        # Nothing tells whether the device was busy.
        (40.0, DECODE, None, None, Bound.OVERHEAD_OR_LATENCY, Roof.BANDWIDTH, 0.25),
        # Collectives take more than either roof.
        (40.0, DECODE, 0.95, 0.45, Bound.COMMUNICATION, Roof.BANDWIDTH, 0.25),
        (40.0, DECODE, None, 0.45, Bound.COMMUNICATION, Roof.BANDWIDTH, 0.25),
        # Less than the roof, less than idle, or too little to matter: not communication.
        (18.0, DECODE, 0.95, 0.40, Bound.BANDWIDTH, Roof.BANDWIDTH, 0.5556),
        (100.0, DECODE, 0.50, 0.30, Bound.OVERHEAD, Roof.BANDWIDTH, 0.1),
        (100.0, DECODE, 0.95, 0.20, Bound.LATENCY, Roof.BANDWIDTH, 0.1),
    ],
)
def test_class_by_construction(
    ms: float,
    work: dict[str, Any],
    busy: float | None,
    comm: float | None,
    bound: Bound,
    roof: Roof,
    explained: float,
) -> None:
    found = verdict(ms, busy=busy, comm=comm, **work)
    assert found.bound is bound
    assert found.nearest_roof is roof
    assert found.explained == pytest.approx(explained, abs=5e-4)
    assert found.remedy and found.lever is not None
    assert not found.excess


def test_evidence_holds_the_figures_with_units_and_where_they_come_from() -> None:
    found = verdict(18, busy=0.95, profiled_passes=4, passes=1, **DECODE)
    assert [e.text for e in found.evidence[:3]] == [
        "1 GB a step take 10 ms at 100 GB/s, 0.1 GFLOP a step take 100 µs at 1 TFLOP/s: the bandwidth roof is nearer.",
        "A step took 18 ms, of which that roof explains 56 %.",
        "The device worked 95 % of the time (kernel timeline of 4 passes).",
    ]
    assert [e.provenance for e in found.evidence[:3]] == [
        Provenance.MODELLED,
        Provenance.MEASURED,
        Provenance.MEASURED,
    ]


def test_evidence_is_per_pass() -> None:
    # 10 passes: 10 GFLOP and 0.1 GB each, 16 ms each.
    found = verdict(160, gflop=100, gb=1, phase=Phase.PREFILL, passes=10)
    assert "10 GFLOP a pass take 10 ms" in texts(found)
    assert "A pass took 16 ms, of which that roof explains 62 %." in texts(found)


def test_without_busy_it_says_what_would_tell() -> None:
    found = verdict(40, **DECODE)
    assert "a few passes recorded with torch.profiler would tell" in texts(found)
    assert "kernel timeline" in found.remedy


@pytest.mark.parametrize(
    ("gflop", "gb", "ceilings", "reason"),
    [
        (None, None, roofs(), "FLOPs and bytes of these passes are not known."),
        (1.0, None, roofs(), "FLOPs and bytes of these passes are not known."),
        (0.0, 0.0, roofs(), "These passes did no counted work."),
        (1.0, 1.0, None, "The roofs of this device are not known."),
        (1.0, 1.0, roofs(flops_per_s=0.0), "The roofs of this device are not known."),
    ],
)
def test_unknown_says_the_reason_and_gives_no_share(
    gflop: float | None, gb: float | None, ceilings: Ceilings | None, reason: str
) -> None:
    found = verdict(10, gflop=gflop, gb=gb, ceilings=ceilings)
    assert found.bound is Bound.UNKNOWN
    assert found.nearest_roof is None
    assert found.explained is None
    assert found.evidence[0].text == reason
    assert "%" not in texts(found)


def test_unknown_takes_the_reason_it_is_given() -> None:
    found = verdict(10, gflop=None, gb=None, no_work="the closed form does not cover it")
    assert found.evidence[0].text == "The closed form does not cover it."


def test_missing_roofs_are_remedied_by_calibration() -> None:
    assert "phaseprof calibrate" in verdict(10, gflop=1, gb=1, ceilings=None).remedy
    assert verdict(10, gflop=None, gb=None, ceilings=None).remedy == ""


def test_no_time_is_unknown() -> None:
    assert verdict(0, **DECODE).bound is Bound.UNKNOWN


def test_an_idle_device_is_overhead_even_without_roofs() -> None:
    idle = verdict(10, gflop=1, gb=1, ceilings=None, busy=0.1)
    assert idle.bound is Bound.OVERHEAD
    assert idle.explained is None
    assert idle.confidence is Confidence.MEDIUM
    busy = verdict(10, gflop=1, gb=1, ceilings=None, busy=0.9)
    assert busy.bound is Bound.UNKNOWN


@pytest.mark.parametrize(
    ("compute_ms", "memory_ms", "confidence"),
    [
        (10.0, 5.0, Confidence.HIGH),
        (10.0, 8.5, Confidence.MEDIUM),
        (8.5, 10.0, Confidence.MEDIUM),
        (10.0, 9.9, Confidence.LOW),
        (10.0, 10.0, Confidence.LOW),
    ],
)
def test_near_the_ridge_the_nearer_roof_is_less_sure(
    compute_ms: float, memory_ms: float, confidence: Confidence
) -> None:
    found = verdict(13, gflop=compute_ms, gb=memory_ms / 10)
    assert found.confidence is confidence
    assert ("near the ridge" in texts(found)) is (confidence is not Confidence.HIGH)


@pytest.mark.parametrize(
    ("change", "confidence", "reason"),
    [
        ({}, Confidence.HIGH, ""),
        ({"ceilings": roofs(source="datasheet")}, Confidence.MEDIUM, "datasheet values"),
        ({"ceilings": roofs(spread=0.15)}, Confidence.MEDIUM, "spread by ±15 %"),
        ({"ceilings": roofs(spread=0.30)}, Confidence.LOW, "spread by ±30 %"),
        ({"passes": 4}, Confidence.MEDIUM, "only 4 passes"),
        ({"passes": 1}, Confidence.LOW, "only 1 pass "),
        ({"passes": 9, "cold_passes": 1}, Confidence.MEDIUM, "cold caches"),
        ({"passes": 9, "pass_spread": 2.0}, Confidence.MEDIUM, "2x the median"),
        ({"passes": 9, "pass_spread": 5.0}, Confidence.LOW, "5x the median"),
        ({"passes": 9, "known_share": 0.5}, Confidence.MEDIUM, "known for 50 % of the time"),
    ],
)
def test_confidence_falls_with_a_reason(
    change: dict[str, Any], confidence: Confidence, reason: str
) -> None:
    ceilings = change.pop("ceilings", roofs()) if change else roofs()
    # 7 ms of 10: far from the threshold and from the ridge.
    found = verdict(10, gflop=0.1, gb=0.7, ceilings=ceilings, **change)
    assert found.bound is Bound.BANDWIDTH
    assert found.confidence is confidence
    assert reason.lower() in texts(found).lower()


def test_close_to_the_threshold_is_said() -> None:
    assert verdict(19.5, **DECODE).confidence is Confidence.MEDIUM
    assert "just above the 50 %" in texts(verdict(19.5, **DECODE))
    assert "just below the 50 %" in texts(verdict(20.5, busy=0.9, **DECODE))
    # A wide spread of the roofs widens what is too close.
    wide = verdict(17, ceilings=roofs(spread=0.2), **DECODE)
    assert "above, by less than the error of the roofs, the 50 %" in texts(wide)


def test_a_timeline_that_lacks_kernels_is_not_believed() -> None:
    """Idle 99 % while the work alone needs 30 % at the roofs: kernels are missing, the device was not idle."""
    found = verdict(33, busy=0.01, **DECODE)
    assert found.bound is Bound.OVERHEAD_OR_LATENCY
    assert found.confidence is Confidence.LOW
    assert "lacks kernels" in texts(found)


# --- above 100 % ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "gflop", "gb", "ceilings", "confidence", "reason"),
    [
        (9.9, 0.1, 1.0, roofs(spread=0.02), Confidence.HIGH, "within the ±2 %"),
        (9.0, 10.0, 0.1, roofs(), Confidence.MEDIUM, "higher clock"),
        (9.0, 10.0, 0.1, roofs(source="datasheet"), Confidence.MEDIUM, "boosts above the clock"),
        (9.0, 0.1, 1.0, roofs(), Confidence.MEDIUM, "a part of the bytes stayed in a cache"),
        (0.5, 0.01, 0.1, roofs(), Confidence.LOW, "last-level cache"),
        (0.5, 0.01, 0.1, roofs(source="datasheet"), Confidence.LOW, "last-level cache"),
    ],
)
def test_above_the_roof_is_explained(
    ms: float, gflop: float, gb: float, ceilings: Ceilings, confidence: Confidence, reason: str
) -> None:
    found = verdict(ms, gflop=gflop, gb=gb, ceilings=ceilings)
    assert found.explained is not None and found.explained > 1
    assert reason in found.excess
    assert found.excess in texts(found)
    assert found.confidence is confidence


def test_both_roofs_above_are_both_explained() -> None:
    found = verdict(5, gflop=10, gb=0.9)
    assert "200 % of the compute roof" in found.excess
    assert "180 % of the bandwidth roof" in found.excess


# --- remedies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "work", "phase", "known", "lever", "how"),
    [
        (18, DECODE, Phase.DECODE, {"weight_byte_share": 0.9}, "batch", "quantize the weights"),
        (18, DECODE, Phase.DECODE, {"weight_byte_share": 0.1}, "a smaller KV cache", "quantize"),
        (16, PREFILL, Phase.PREFILL, {}, "fewer prompt tokens", "lower-precision matmul"),
        (
            16,
            PREFILL,
            Phase.PREFILL,
            {"attention_flop_share": 0.7},
            "shorter contexts",
            "attention is 70 % of the FLOPs",
        ),
        (16, PREFILL, Phase.DECODE, {}, "cheaper matmuls", "the batch fills the device already"),
        (16, PREFILL, Phase.MIXED, {}, "smaller prefill chunks", "in which decode waits"),
        (18, DECODE, Phase.MIXED, {"recomputed_share": 0.9}, "the KV cache", "computed again"),
        # 10 tokens need 0.1 ms of compute and 10 ms of memory: 1,000 would need as much of both.
        (
            18,
            DECODE,
            Phase.PREFILL,
            {"weight_byte_share": 1.0, "tokens_per_pass": 10.0},
            "more tokens a pass",
            "below about 1,000 tokens",
        ),
    ],
)
def test_levers_fit_class_and_phase(
    ms: float,
    work: dict[str, Any],
    phase: Phase,
    known: dict[str, Any],
    lever: str,
    how: str,
) -> None:
    found = verdict(ms, phase=phase, **work, **known)
    assert found.lever is not None
    assert found.lever.name == lever
    assert how in found.lever.how
    assert found.remedy.lower().startswith(lever.lower())


@pytest.mark.parametrize(("kind", "says"), [("cuda", "CUDA graphs"), ("cpu", "torch.compile")])
def test_overhead_is_remedied_by_what_the_device_has(kind: str, says: str) -> None:
    found = verdict(200, busy=0.1, device_kind=kind, **DECODE)
    assert says in found.remedy
    assert ("CUDA" in found.remedy) is (kind == "cuda")


def test_a_faster_dtype_is_named_from_its_measured_roof() -> None:
    other = roofs(dtype="bfloat16", flops_per_s=5e12)
    found = verdict(16, phase=Phase.PREFILL, other_roofs=(other,), **PREFILL)
    assert "bfloat16, whose matmuls reach 5 TFLOP/s against 1 TFLOP/s (measured)" in found.remedy


def test_slow_kernels_of_a_narrow_dtype_point_to_the_wider_one() -> None:
    """bfloat16 decode at a quarter of its roof: float32 moves twice the bytes, and still may take half the time."""
    bf16 = roofs(dtype="bfloat16")
    found = verdict(
        40, busy=0.95, ceilings=bf16, device_kind="cpu", other_roofs=(roofs(),), passes=1, **DECODE
    )
    assert found.bound is Bound.LATENCY
    assert found.lever is not None and found.lever.name == "another dtype"
    # 2 GB at 100 GB/s.
    assert "allow 20 ms a step, against 40 ms in bfloat16 now (modelled)" in found.remedy


@pytest.mark.parametrize(("current", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_no_dtype_is_named_when_its_roofs_do_not_allow_less(current: str, other: str) -> None:
    # 21 ms at 10 ms of roof: float32 would need 20 ms at least, and bfloat16's lower floor proves nothing.
    found = verdict(
        21,
        busy=0.99,
        ceilings=roofs(dtype=current),
        other_roofs=(roofs(dtype=other),),
        device_kind="cpu",
        **DECODE,
    )
    assert found.bound is Bound.LATENCY
    assert found.lever is not None and found.lever.name == "better kernels"


# --- properties ----------------------------------------------------------------------------------

SHARES = st.floats(0.0, 1.0)
TIMES = st.floats(0.2, 2000.0)
ROOF_CLASSES = (Bound.COMPUTE, Bound.BANDWIDTH)


@settings(max_examples=80, deadline=None)
@given(gflop=st.floats(0.01, 50), gb=st.floats(0.001, 5), ms=TIMES, shorter=st.floats(0.1, 1.0))
def test_less_time_for_the_same_work_never_leaves_the_roof(
    gflop: float, gb: float, ms: float, shorter: float
) -> None:
    before = verdict(ms, gflop=gflop, gb=gb)
    after = verdict(ms * shorter, gflop=gflop, gb=gb)
    assert before.explained is not None and after.explained is not None
    assert after.explained >= before.explained
    assert after.nearest_roof is before.nearest_roof
    if before.bound in ROOF_CLASSES:
        assert after.bound is before.bound


@settings(max_examples=80, deadline=None)
@given(ms=TIMES, busy=SHARES, less=SHARES)
def test_a_less_busy_device_is_never_less_bound_by_overhead(
    ms: float, busy: float, less: float
) -> None:
    before = verdict(ms, busy=busy, **DECODE)
    after = verdict(ms, busy=busy * less, **DECODE)
    assert after.explained == before.explained
    if before.bound is Bound.OVERHEAD:
        assert after.bound is not Bound.LATENCY
    if before.bound in ROOF_CLASSES:
        assert after.bound is before.bound


@settings(max_examples=80, deadline=None)
@given(ms=TIMES, busy=SHARES, comm=SHARES, more=SHARES)
def test_more_exposed_communication_never_leaves_communication(
    ms: float, busy: float, comm: float, more: float
) -> None:
    before = verdict(ms, busy=busy, comm=comm, **DECODE)
    after = verdict(ms, busy=busy, comm=comm + (1 - comm) * more, **DECODE)
    if before.bound is Bound.COMMUNICATION:
        assert after.bound is Bound.COMMUNICATION


@settings(max_examples=80, deadline=None)
@given(
    ms=TIMES,
    gflop=st.one_of(st.none(), st.floats(0, 50)),
    gb=st.one_of(st.none(), st.floats(0, 5)),
    busy=st.one_of(st.none(), SHARES),
    comm=st.one_of(st.none(), SHARES),
    phase=st.sampled_from(list(Phase)),
    device=st.sampled_from([CPU, GPU]),
    known=st.booleans(),
)
def test_every_verdict_has_reasons_and_no_unexplained_excess(
    ms: float,
    gflop: float | None,
    gb: float | None,
    busy: float | None,
    comm: float | None,
    phase: Phase,
    device: object,
    known: bool,
) -> None:
    found = verdict(
        ms,
        gflop=gflop,
        gb=gb,
        busy=busy,
        comm=comm,
        phase=phase,
        ceilings=roofs(GPU if device is GPU else CPU) if known else None,
        device_kind="cuda" if device is GPU else "cpu",
    )
    assert found.evidence
    assert all(e.text.endswith(".") and e.text[0] == e.text[0].upper() for e in found.evidence)
    assert (found.explained is None) is (found.nearest_roof is None)
    assert bool(found.excess) is (found.explained is not None and found.explained > 1)
    if found.bound in (Bound.OVERHEAD, Bound.LATENCY):
        assert busy is not None
    if found.bound in ROOF_CLASSES:
        assert found.explained is not None and found.explained >= 0.5
        assert found.bound.value == (found.nearest_roof and found.nearest_roof.value)
