"""What a change does to a run, worked out by hand: bytes, roofs, steps, requests, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import COST, GPU, MS, Timeline, healthy, meta, model, roofs
from what_if_runs import (
    A100,
    COST_8B,
    H100,
    H200,
    KV_TOKEN,
    LAYERS,
    decode_step,
    gpu,
    mixed_step,
    on_cpu,
    prefill_step,
    run,
)

from phaseprof.analyzers.advice import advise
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.what_if.apply import evaluate
from phaseprof.analyzers.what_if.changes import (
    Batch,
    Change,
    Chunk,
    Graphs,
    Hardware,
    KvCache,
    KvFormat,
    KvHeads,
    Mla,
    OtherDevice,
    Setting,
    Speculate,
    Speculation,
    TensorParallel,
    WeightFormat,
    Weights,
)
from phaseprof.analyzers.what_if.limits import refused
from phaseprof.analyzers.what_if.measured import Measured, PartKind
from phaseprof.analyzers.what_if.ranking import asked, ranked
from phaseprof.analyzers.what_if.results import Outcome, Unit
from phaseprof.analyzers.what_if.speculation import measured_acceptance, tokens_of_step
from phaseprof.analyzers.what_if.work import factors
from phaseprof.errors import PhaseprofError, UsageError
from phaseprof.phases import Phase


def one(measured: Measured, change: Change) -> Outcome:
    return evaluate(measured, change.to(Setting()), change.title)


def tpot(outcome: Outcome) -> float:
    assert outcome.tpot_ms is not None
    return outcome.tpot_ms.value


def term(outcome: Outcome, name: str, phase: str = "decode") -> tuple[float, float]:
    (found,) = [each for each in outcome.terms if (each.name, each.phase) == (name, phase)]
    return found.before, found.after


# --- the run taken apart --------------------------------------------------------------------------


def test_a_trace_is_taken_apart_into_what_was_counted() -> None:
    measured = build_report(healthy().trace()).measured
    assert measured is not None and measured.missing == ""
    prefill, decode = measured.steps
    assert (prefill.phase, decode.phase) == (Phase.PREFILL, Phase.DECODE)
    assert decode.step_s == pytest.approx(0.004)
    # 1 ms to the next step of the same request: the last of the seven has none.
    assert decode.between_s == pytest.approx(0.001 * 6 / 7)
    assert decode.idle_s is None
    # 0.22 GB, of which 0.2 are weights: 0.18 of matrices and 0.02 of the head.
    assert decode.moved_bytes == pytest.approx(0.22e9)
    assert decode.of(PartKind.MATRICES).weight_bytes == pytest.approx(0.18e9)
    assert decode.of(PartKind.HEAD).weight_bytes == pytest.approx(0.02e9)
    assert decode.of(PartKind.ATTENTION).kv_bytes == pytest.approx(0.02e9)
    assert sum(part.flops for part in prefill.parts) == pytest.approx(60e9)
    assert prefill.of(PartKind.MATRICES).flops == pytest.approx(512 * 90e6)
    assert (measured.ttft_ms, measured.tpot_ms) == (20.0, 10.0)


def test_idle_time_comes_from_the_timeline_and_only_where_it_can_be_believed() -> None:
    for busy, idle_ms in ((0.8, 0.8), (0.2, None)):
        timeline = healthy()
        for _ in range(3):
            timeline.add("decode", 6, gflop=0.1, gb=0.22, busy=busy, past=512, prompt=512)
        measured = build_report(timeline.trace()).measured
        assert measured is not None
        step = measured.step(Phase.DECODE)
        assert step is not None
        found = None if step.idle_s is None else step.idle_s * 1e3
        assert found == (None if idle_ms is None else pytest.approx(idle_ms))


def test_drafts_are_counted_from_the_passes() -> None:
    timeline = Timeline()
    for _ in range(6):
        timeline.add("prefill", 20, gflop=6, gb=0.2, tokens=64)
        for accepted in (2, 1, 3):
            timeline.add(
                "decode",
                4,
                gflop=0.4,
                gb=0.22,
                tokens=4,
                past=64,
                prompt=64,
                draft_tokens=3,
                accepted_tokens=accepted,
            )
        timeline.add("decode", 1, model_id="d", role="draft", tokens=1)
        timeline.request("r0")
    measured = build_report(timeline.trace()).measured
    assert measured is not None
    step = measured.step(Phase.DECODE)
    assert step is not None
    assert step.drafts == pytest.approx(3.0)
    assert step.accepted == pytest.approx(2.0)
    assert measured.draft_s == pytest.approx(6 * 0.001 / 18)


def test_a_sweep_is_judged_by_its_largest_batch() -> None:
    timeline = Timeline()
    for batch, ms in ((1, 4), (8, 5)):
        for i in range(5):
            timeline.add(
                "prefill", 20 * batch, gflop=6 * batch, gb=0.2, tokens=64 * batch, sequences=batch
            )
            for _ in range(5):
                timeline.add(
                    "decode", ms, gflop=0.1 * batch, gb=0.22, tokens=batch, sequences=batch
                )
            timeline.request(f"r{batch}.{i}")
    metas = meta(workload={"batch": [1, 8]})
    measured = build_report(timeline.trace(metas)).measured
    assert measured is not None
    step = measured.step(Phase.DECODE)
    assert step is not None and step.sequences == 8
    assert measured.tpot_ms == pytest.approx(5.0)
    assert (measured.of_sweep, ranked(measured).of_sweep) == (8, 8)
    assert advise(measured).about == "for batch 8, the largest of the sweep"


# --- one change, by hand --------------------------------------------------------------------------


def test_weights_in_four_bits_scale_the_matrices_and_leave_the_head() -> None:
    outcome = one(run(), Weights(WeightFormat.INT4))
    before, after = term(outcome, "weights read")
    assert before == pytest.approx(15e9)
    assert after == pytest.approx(14e9 * 4.125 / 16 + 1e9)
    # M: 15.13 GB at 3.35 TB/s, of a device at work for 6 ms; g = 2 - M / B.
    kv = 1000 * LAYERS * KV_TOKEN
    m_before, m_after = (15e9 + kv) / 3.35e12, (after + kv) / 3.35e12
    g = 2 - m_before / 0.006
    step_ms = 6 + g * (m_after - m_before) * 1e3
    assert tpot(outcome) == pytest.approx(step_ms + 0.5, rel=1e-9)
    assert outcome.tpot_ms is not None
    # At best all of the excess follows the bytes, and the roofs are a hard floor.
    assert outcome.tpot_ms.low >= m_after * 1e3 + 0.5
    assert outcome.tpot_ms.high < 6.5


def test_eight_bits_raise_the_peak_only_where_the_device_has_one() -> None:
    """Prefill computes: FP8 helps it on an H100; INT8 there, and FP8 weights of an A100, do not."""
    hopper, ampere = run(), run(hardware=gpu("A100", A100, board="A100 SXM 80 GB"))
    ampere = replace(ampere, basis=replace(ampere.basis, ceilings=A100["bfloat16"]))
    fp8, int8 = one(hopper, Weights(WeightFormat.FP8)), one(hopper, Weights(WeightFormat.INT8))
    assert fp8.ttft_ms is not None and int8.ttft_ms is not None
    assert fp8.ttft_ms.value < 30.0
    assert int8.ttft_ms.value == 30.0
    ampere_int8 = one(ampere, Weights(WeightFormat.INT8))
    assert ampere_int8.ttft_ms is not None and ampere_int8.ttft_ms.value < 30.0
    assert refused(hopper, Weights(WeightFormat.FP8)) is None
    no = refused(ampere, Weights(WeightFormat.FP8))
    assert no is not None and no.why == "A100 has no FP8 matmul that is known of"


def test_keys_and_values_in_eight_bits_gain_what_they_are_of_the_bytes() -> None:
    # 32 sequences of 4000 tokens: 16.8 GB of keys and values beside 15 GB of weights.
    measured = run(decode_step(12.0, sequences=32, context=4000.0))
    outcome = one(measured, KvCache(KvFormat.FP8))
    before, after = term(outcome, "keys and values")
    assert before == pytest.approx(32 * 4000 * LAYERS * KV_TOKEN)
    assert after == pytest.approx(before / 2)
    assert 1.1 < outcome.gain.value < 1.4
    # 6 us in each layer and a tenth of the old time for converting.
    conversions = term(outcome, "conversions (C)")[1]
    assert conversions == pytest.approx(32 * 6e-6 + 0.1 * before / 3.35e12)


def test_a_batch_reads_the_weights_once() -> None:
    outcome = one(run(), Batch(8))
    weights, kv = term(outcome, "weights read"), term(outcome, "keys and values")
    assert weights[0] == weights[1]
    assert kv[1] == pytest.approx(8 * kv[0])
    # 7 sequences more: 0.92 GB, and g is the root of 6 ms over 4.52 at the roofs.
    assert tpot(outcome) == pytest.approx(6.5 + 0.917504e9 / 3.35e9 * (6 / 4.517) ** 0.5, rel=1e-3)
    assert outcome.ttft_ms is not None and outcome.ttft_ms.value == 30.0


def test_a_batch_of_a_plain_generate_prefills_its_prompts_together() -> None:
    measured = run(engine="transformers 5.24.0")
    outcome = one(measured, Batch(4))
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms.value > 3 * 25.0


def test_memory_says_whether_a_batch_fits() -> None:
    measured = run(decode_step(8.0, context=8000.0))
    kv = 8000 * LAYERS * KV_TOKEN
    small, large = one(measured, Batch(32)), one(measured, Batch(128))
    assert small.memory_bytes == pytest.approx(16e9 + 32 * kv)
    assert (small.fits, large.fits) == (True, False)
    packed = evaluate(measured, Setting(weights=WeightFormat.INT8, sequences=32))
    assert packed.memory_bytes == pytest.approx(9e9 + 32 * kv)


def test_graphs_remove_the_measured_gaps() -> None:
    measured = run(decode_step(16.0, idle=0.6, bound=Bound.OVERHEAD), prefill_step())
    outcome = one(measured, Graphs())
    # 6.4 ms of work, a tenth of 9.6 ms, and 300 gaps of 1 us.
    assert tpot(outcome) == pytest.approx(6.4 + 0.96 + 0.3 + 0.5)
    assert outcome.tpot_ms is not None
    assert outcome.tpot_ms.low == pytest.approx(6.4 + 0.15 + 0.5)
    assert outcome.bound is Bound.BANDWIDTH


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (on_cpu(), "a CPU has no CUDA graphs"),
        (run(decode_step(idle=None)), "the gaps between its kernels were not measured"),
        (
            run(decode_step(idle=0.3, graph_share=0.97)),
            "graphs launch 97 % of the kernels of decode already",
        ),
        (run(decode_step(idle=0.01)), "the device idles 1 % of a decode step"),
        (run(prefill_step()), "the run has no step of decode alone, whose shapes repeat"),
    ],
)
def test_why_graphs_do_not_help(measured: Measured, why: str) -> None:
    no = refused(measured, Graphs())
    assert no is not None and no.why == why
    assert bool(no.fix) == ("not measured" in why)


def test_speculation_yields_what_leviathan_says() -> None:
    # k = 4, a = 0.8: (1 - 0.8^5) / 0.2.
    assert tokens_of_step(0.8, 4) == pytest.approx(3.3616)
    assert tokens_of_step(0.0, 4) == 1.0
    assert tokens_of_step(0.5, 1) == pytest.approx(1.5)
    outcome = one(run(), Speculate(Speculation(4, 0.8, 0.0)))
    # The step hardly changes: five tokens compute 75 GFLOP, far below the roof.
    assert tpot(outcome) == pytest.approx(6.5 / 3.3616, rel=0.03)
    dearer = one(run(), Speculate(Speculation(4, 0.8, 0.1)))
    assert tpot(dearer) - tpot(outcome) == pytest.approx(4 * 0.1 * 6.0 / 3.3616)


def test_a_run_that_speculates_tells_its_own_acceptance() -> None:
    accepted = tokens_of_step(0.7, 3) - 1
    measured = run(decode_step(drafts=3.0, accepted=accepted), prefill_step())
    assert measured_acceptance(measured) == pytest.approx(0.7)
    assert measured_acceptance(run()) is None
    # Without drafts a step yields one token, and is as long but for what it computes.
    plain = one(measured, Speculate(Speculation(0)))
    assert tpot(plain) == pytest.approx(6.5 * tokens_of_step(0.7, 3), rel=0.02)
    assert any("Acceptance as measured: 0.7" in note for note in plain.notes)


def test_speculation_of_a_step_that_computes_gains_nothing() -> None:
    # 512 sequences: 15 FLOPs x 512 take 7.7 ms at 1000 TFLOP/s.
    full = decode_step(12.0, sequences=512, context=100.0, bound=Bound.COMPUTE)
    found = ranked(run(full))
    (why,) = [no.why for no in found.hopeless if no.title.startswith("speculation")]
    assert why == "decode is compute-bound: verifying drafts costs what they save"


def test_chunks_trade_the_tail_against_the_first_token() -> None:
    measured = run(decode_step(8.0, sequences=16), mixed_step(20.0, chunk=512.0))
    half, double = one(measured, Chunk(256)), one(measured, Chunk(1000))
    for outcome in (half, double):
        assert outcome.itl_ms is not None and outcome.ttft_ms is not None
    assert half.itl_ms and double.itl_ms and half.ttft_ms and double.ttft_ms
    assert half.itl_ms.value < 20.0 < double.itl_ms.value
    assert double.ttft_ms.value < 30.0 < half.ttft_ms.value
    no = refused(run(), Chunk(256))
    assert no is not None and "no step of this run holds prefill beside decode" in no.why


def test_fewer_heads_and_latents_shrink_keys_and_values() -> None:
    measured = run(decode_step(12.0, sequences=32, context=4000.0))
    step = measured.step(Phase.DECODE)
    assert step is not None
    by_heads = factors(measured, KvHeads(2).to(Setting()), step)
    latent = factors(measured, Mla().to(Setting()), step)
    assert by_heads.kv == pytest.approx(1 / 4)
    # DeepSeek-V2: 4.5 widths of a head against 2 x 8 of them; 2 (2 x 4 + 1/2) FLOPs against 2 x 2.
    assert latent.kv == pytest.approx(4.5 / 16)
    assert latent.attention_flops == pytest.approx(4.25)
    bad = refused(measured, KvHeads(5))
    assert bad is not None and bad.why == "5 is no divisor of its 32 query heads"


def test_another_device_is_the_ratio_of_its_roofs() -> None:
    """An H200 has the H100's peak and 1.43 times its bandwidth: decode gains, prefill does not."""
    outcome = one(run(), OtherDevice(gpu("NVIDIA H200", H200, 141e9, "H200 SXM")))
    before, after = term(outcome, "at the roofs (M)")
    assert before / after == pytest.approx(4.8 / 3.35)
    assert 1.2 < outcome.gain.value < 4.8 / 3.35
    assert outcome.ttft_ms is not None and outcome.ttft_ms.value == pytest.approx(30.0, rel=0.01)


def test_measured_roofs_are_scaled_and_not_replaced_by_a_datasheet() -> None:
    sustained = replace(H100["bfloat16"], bytes_per_s=3.0e12, source="measured")
    measured = run()
    measured = replace(measured, basis=replace(measured.basis, ceilings=sustained))
    outcome = one(measured, OtherDevice(gpu("NVIDIA H200", H200, 141e9, "H200 SXM")))
    before, after = term(outcome, "at the roofs (M)")
    assert before / after == pytest.approx(4.8 / 3.35)


def test_a_device_without_the_dtype_is_refused() -> None:
    lacking = Hardware("Odd GPU", "cuda", None, {}, {"float16": H100["bfloat16"]})
    no = refused(run(), OtherDevice(lacking))
    assert no is not None and no.why == "its roofs are known for float16, not for bfloat16"


def test_a_float32_model_runs_in_16_bits_where_nothing_else_is_known() -> None:
    wide = replace(COST_8B, dtype="float32", stored=(("float32", 16_000_000_000),))
    measured = on_cpu(cost=wide, dtype="float32")
    outcome = one(measured, OtherDevice(gpu("NVIDIA H100 80GB HBM3", H100)))
    weights, kv = term(outcome, "weights read"), term(outcome, "keys and values")
    assert weights[1] == pytest.approx(weights[0] / 2)
    assert kv[1] == pytest.approx(kv[0] / 2)
    # 1.6 times (1.1 to 3) the time of 7.57 GB at 3.35 TB/s, and 0.5 ms between the steps.
    floor_ms = (7.5e9 + kv[1]) / 3.35e12 * 1e3
    assert tpot(outcome) == pytest.approx(1.6 * floor_ms + 0.5)
    assert any("bfloat16 there" in note for note in outcome.notes)


def test_tensor_parallel_splits_and_adds_collectives() -> None:
    outcome = one(run(), TensorParallel(4))
    weights, kv = term(outcome, "weights read"), term(outcome, "keys and values")
    assert weights[1] == pytest.approx(weights[0] / 4)
    assert kv[1] == pytest.approx(kv[0] / 4)
    comm = term(outcome, "exposed collectives")
    # 64 all-reduces of 8 kB: some microseconds each.
    assert comm[0] == 0.0 and 64 * 2e-6 < comm[1] < 64 * 20e-6
    # 16 ranks share 8 heads of keys and values: two hold the same.
    kv16 = term(one(run(), TensorParallel(16)), "keys and values")
    assert kv16[1] == pytest.approx(kv16[0] / 8)
    assert outcome.memory_bytes == pytest.approx((16e9 + kv[0]) / 4)
    for no, why in (
        (refused(on_cpu(), TensorParallel(2)), "collectives between CPUs are not modelled"),
        (refused(run(), TensorParallel(3)), "32 query heads cannot be shared out evenly"),
    ):
        assert no is not None and no.why.startswith(why)


def test_on_a_cpu_unpacking_may_take_all_that_fewer_bytes_save() -> None:
    outcome = one(on_cpu(), Weights(WeightFormat.INT8))
    assert outcome.tpot_ms is not None and outcome.tpot_ms.high == pytest.approx(400.5)
    assert outcome.tpot_ms.value < 320.0
    assert refused(on_cpu(), Weights(WeightFormat.FP8)) is not None


def test_where_the_host_sets_the_pace_little_of_what_the_device_saves_is_seen() -> None:
    busy = run(decode_step(6.0, idle=0.0), prefill_step())
    waiting = run(decode_step(16.0, idle=0.625), prefill_step())
    saved = [
        (measured.tpot_ms or 0.0) - tpot(one(measured, Weights(WeightFormat.INT8)))
        for measured in (busy, waiting)
    ]
    assert saved[1] == pytest.approx(0.375 * saved[0])
    worst = one(waiting, Weights(WeightFormat.INT8)).tpot_ms
    assert worst is not None and worst.high == 16.5


# --- ranking and refusals -------------------------------------------------------------------------


def test_an_overhead_bound_decode_is_told_what_cannot_help() -> None:
    step = decode_step(16.0, idle=0.625, bound=Bound.OVERHEAD)
    found = ranked(run(step, prefill_step()))
    reasons = {no.title: no.why for no in found.hopeless}
    assert reasons["FP8 KV cache"] == (
        "decode is overhead-bound, reading keys and values is 0.2 % of a step"
    )
    titles = [outcome.title for outcome in found.outcomes]
    assert titles.index("CUDA graphs") < titles.index("INT4 weights")
    gains = [outcome.gain.value for outcome in found.outcomes]
    assert gains == sorted(gains, reverse=True)


def test_packed_weights_are_not_packed_again() -> None:
    packed = replace(
        COST_8B,
        parameter_bytes=4_800_000_000,
        body_weight_bytes=3_800_000_000,
        stored=(("int32", 3_800_000_000), ("bfloat16", 1_000_000_000)),
    )
    measured = run(decode_step(3.0, cost=packed), cost=packed)
    for form in WeightFormat:
        assert refused(measured, Weights(form)) is not None
    (same,) = asked(measured, [Weights(WeightFormat.INT4)]).outcomes
    assert same.cannot == "that is what the run has"


def test_several_changes_are_worked_out_alone_and_together() -> None:
    found = asked(run(), [Weights(WeightFormat.INT4), Batch(8), Graphs()])
    assert [outcome.title for outcome in found.outcomes] == ["INT4 weights", "batch 8"]
    assert [no.title for no in found.hopeless] == ["CUDA graphs"]
    assert found.combined is not None
    assert found.combined.gain.value > max(outcome.gain.value for outcome in found.outcomes)


def test_what_is_not_known_is_said_with_its_remedy() -> None:
    unknown = run(
        missing="the roofs of this device are not known", fix="`phaseprof calibrate` measures them"
    )
    with pytest.raises(PhaseprofError, match="roofs of this device are not known") as raised:
        ranked(unknown)
    assert raised.value.remedy == "`phaseprof calibrate` measures them."
    measured = build_report(healthy().trace(meta(ceilings=()))).measured
    assert measured is not None and "are not known" in measured.missing
    measured = build_report(healthy().trace(meta(models=(model(cost=None),)))).measured
    assert measured is not None and "could not be read" in measured.missing
    assert measured.fix == ""
    imported = healthy()
    for row in imported.passes:
        row["tag_source"] = "annotation"
    measured = build_report(imported.trace(meta(models=(model(cost=None),)))).measured
    assert measured is not None and measured.fix.startswith("import the recording with")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Batch(0),
        lambda: Chunk(0),
        lambda: KvHeads(0),
        lambda: TensorParallel(0),
        lambda: Speculation(-1),
        lambda: Speculation(4, 1.0),
        lambda: Speculation(4, 0.5, -0.1),
    ],
)
def test_changes_that_mean_nothing_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError):
        wrong()


def test_the_arithmetic_adds_up() -> None:
    outcome = one(run(decode_step(16.0, idle=0.625), prefill_step()), Weights(WeightFormat.FP8))
    for place in (0, 1):
        parts = [term(outcome, name)[place] for name in ("device at work (B)", "device idle")]
        assert sum(parts) == pytest.approx(term(outcome, "step")[place])
    assert {each.unit for each in outcome.terms} <= set(Unit)
    assert all(each.formula for each in outcome.terms)


def test_a_trace_of_a_gpu_goes_through_the_report() -> None:
    cost = replace(COST, dtype="bfloat16", stored=(("bfloat16", 200_000_000),))
    timeline = healthy()
    for row in timeline.passes:
        row["dtype"] = "bfloat16"
    here = roofs(GPU, dtype="bfloat16")
    report = build_report(
        timeline.trace(
            meta(devices=(GPU,), models=(model(device=GPU, cost=cost),), ceilings=(here,))
        )
    )
    assert report.advice is not None and report.advice.what_if is not None
    assert report.measured is not None and report.measured.hardware.name == "Stand-in GPU"
    assert report.measured.tpot_ms == 10 * MS / 1e6
