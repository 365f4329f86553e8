"""What a comparison says: of constructed runs in which it is known what changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from comparisons import compared, quietly, run, sample
from traces import COST, CPU, GPU, META, model, roofs

from phaseprof.analyzers.comparing.as_json import to_json
from phaseprof.analyzers.comparing.compare import RUN_NOISE_CPU, RUN_NOISE_GPU, compare
from phaseprof.analyzers.comparing.results import Call, Level, Outcome
from phaseprof.analyzers.comparing.rules import parse
from phaseprof.analyzers.report import build_report
from phaseprof.trace.meta import Host


def test_eight_percent_in_decode_alone_are_found_and_named() -> None:
    found = compared(run(1), run(2, decode=1.08))
    assert found.verdict[0] == "Decode is slower, prefill is unchanged."
    decode = found.delta("decode.pass_ms.p50")
    prefill = found.delta("prefill.pass_ms.p50")
    assert decode is not None and prefill is not None
    assert decode.call is Call.WORSE and prefill.call is Call.UNCHANGED
    assert decode.low is not None and decode.high is not None and decode.change is not None
    assert decode.low < 0.08 < decode.high
    assert decode.change == pytest.approx(0.08, abs=0.01)
    assert prefill.within is not None and prefill.within < 0.08
    (line,) = (line for line in found.verdict if line.startswith("Decode steps"))
    assert "% longer: 4" in line and "95 % interval" in line
    assert any(line.startswith("Prefill passes are unchanged within") for line in found.verdict)


def test_eight_percent_in_prefill_alone_are_found_and_named() -> None:
    found = compared(run(1), run(2, prefill=1.08))
    assert found.verdict[0] == "Prefill is slower, decode is unchanged."


def test_a_faster_run_is_called_faster() -> None:
    found = compared(run(1), run(2, decode=0.8, prefill=0.8))
    assert found.verdict[0] == "Prefill and decode are faster."
    rate = found.delta("decode.output_tokens_per_s")
    assert rate is not None and rate.call is Call.BETTER


def test_the_same_thing_is_unchanged() -> None:
    found = compared(run(1), run(2))
    assert found.verdict[0] == "Prefill and decode are unchanged."
    assert found.verdict[-1] == "Versions, device, model and workload are the same in both."
    assert found.level is Level.ALL and found.reasons == () and found.differences == ()


def test_the_figures_are_those_of_the_report() -> None:
    trace = run(3, profiled=True).trace()
    report = build_report(trace)
    found = compared(run(3, profiled=True), run(3, profiled=True))

    def value(path: str) -> float | None:
        delta = found.delta(path)
        assert delta is not None
        assert delta.a.value == delta.b.value
        return delta.a.value

    decode, requests = report.phases["decode"], report.requests
    assert value("decode.pass_ms.p50") == pytest.approx(decode.pass_ms_p50)
    assert value("decode.pass_ms.p99") == pytest.approx(decode.pass_ms_p99)
    assert value("decode.output_tokens_per_s") == pytest.approx(decode.output_tokens_per_s)
    assert value("decode.mbu") == pytest.approx(decode.mbu)
    assert value("decode.mfu") == pytest.approx(decode.mfu)
    assert value("decode.gb_per_s") == pytest.approx(decode.gb_per_s)
    assert value("decode.busy_share") == pytest.approx(0.8)
    assert requests.ttft_ms is not None and requests.itl_ms is not None
    assert value("requests.ttft_ms.p90") == pytest.approx(requests.ttft_ms.p90)
    assert value("requests.itl_ms.p99") == pytest.approx(requests.itl_ms.p99)
    assert value("requests.e2e_ms.p50") == pytest.approx(100 + 30 * 5, rel=0.02)


def test_few_repeats_have_a_wide_interval_and_it_is_said() -> None:
    few = compared(run(1, repeats=2), run(2, repeats=2))
    many = compared(run(1, repeats=16), run(2, repeats=16))
    narrow, wide = (each.delta("prefill.pass_ms.p50") for each in (many, few))
    assert narrow is not None and wide is not None
    assert narrow.within is not None and wide.within is not None
    assert wide.within > narrow.within
    assert any("has 2 repeats: intervals are wide" in note for note in few.notes)
    assert many.notes == ()
    assert few.method.a_units == "2 repeats"


def test_a_single_call_says_that_its_noise_is_from_within() -> None:
    found = compared(run(1, repeats=1, steps=64), run(2, repeats=1, steps=64, decode=1.2))
    assert any("stretches of its time" in note for note in found.notes)
    prefill, decode = found.delta("prefill.pass_ms.p50"), found.delta("decode.pass_ms.p50")
    assert prefill is not None and prefill.call is Call.UNSURE and prefill.low is None
    assert decode is not None and decode.call is Call.WORSE


def test_the_noise_between_runs_is_that_of_the_device() -> None:
    assert compare(sample(run(1)), sample(run(2), side=1)).method.run_noise == RUN_NOISE_CPU
    on_gpu = replace(META, models=(model(device=GPU),), ceilings=(roofs(GPU),))
    a, b = (sample(run(n), on_gpu, side=n) for n in (0, 1))
    assert compare(a, b).method.run_noise == RUN_NOISE_GPU
    assert compare(a, b, run_noise=0.1).method.run_noise == 0.1


def test_batch_sizes_are_compared_one_by_one_and_together() -> None:
    found = compared(run(1, batches=(1, 16)), run(2, batches=(1, 16), decode=1.08))
    for path in ("by_batch.1.decode.pass_ms.p50", "by_batch.16.decode.pass_ms.p50"):
        delta = found.delta(path)
        assert delta is not None and delta.call is Call.WORSE
        assert delta.change == pytest.approx(0.08, abs=0.01)
    together = found.delta("decode.pass_ms.same_batch")
    assert together is not None and together.change == pytest.approx(0.08, abs=0.01)
    assert any("at equal batch sizes" in line for line in found.verdict)


def test_another_mix_of_batch_sizes_is_no_slowdown() -> None:
    more_large = run(2, batches=(1, 16, 16))
    found = compared(run(1, batches=(1, 1, 16)), more_large)
    mean, same = found.delta("decode.pass_ms.mean"), found.delta("decode.pass_ms.same_batch")
    assert mean is not None and mean.change is not None and mean.change > 0.2
    assert same is not None and same.call is Call.UNCHANGED
    assert any("mean batch of decode went from 6 to 11" in note for note in found.notes)


# --- what does not compare ------------------------------------------------------------------------


def test_another_model_is_said_first_and_only_shares_are_compared() -> None:
    larger = replace(COST, parameters=500_000_000)
    other = replace(META, models=(model(name="Large-500M", cost=larger),))
    found = compared(run(1), run(2, decode=3), other, rules=[parse("decode.step_ms > +5%")])
    assert found.level is Level.SHARES
    assert "50,000,000 and 500,000,000 parameters" in found.reasons[0]
    decode, mbu = found.delta("decode.pass_ms.p50"), found.delta("decode.mbu")
    assert decode is not None and decode.call is Call.NOT_COMPARED and decode.change is None
    assert mbu is not None and mbu.change is not None
    assert not any(line.startswith(("Decode is", "Decode steps")) for line in found.verdict)
    assert found.judged[0].outcome is Outcome.NOT_JUDGED
    assert found.failed(strict=True) and not found.failed()


def test_quantized_weights_are_the_same_model() -> None:
    packed = replace(COST, parameter_bytes=50_000_000, body_weight_bytes=45_000_000)
    found = compared(run(1), run(2, decode=0.6), replace(META, models=(model(cost=packed),)))
    assert found.level is Level.ALL
    assert found.verdict[0].startswith("Decode is faster")
    assert any("bytes of the weights 200,000,000 → 50,000,000" in line for line in found.verdict)


def test_other_prompts_are_not_compared_and_decode_only_over_the_same_cache() -> None:
    found = compared(run(1, prompt=512), run(2, prompt=1024))
    assert found.level is Level.PART
    assert "prompts of 512 tokens and of 1,024 tokens" in found.reasons[0]
    for path in ("prefill.pass_ms.p50", "requests.ttft_ms.p50", "decode.pass_ms.p50"):
        delta = found.delta(path)
        assert delta is not None and delta.call is Call.NOT_COMPARED
    share = found.delta("prefill.mfu")
    assert share is not None and share.change is not None
    # Half of it, of prompts twice as long in the same time of a pass times two: a fact, and neither better nor worse.
    assert share.call in (Call.CHANGED, Call.UNCHANGED)
    a_little_longer = compared(run(1, prompt=512), run(2, prompt=530))
    ttft, decode = (
        a_little_longer.delta(p) for p in ("requests.ttft_ms.p50", "decode.pass_ms.p50")
    )
    assert ttft is not None and ttft.call is Call.NOT_COMPARED
    assert decode is not None and decode.call is Call.UNCHANGED


def test_plans_of_other_lengths_with_the_same_mean_are_two_workloads() -> None:
    plans = [replace(META, workload={"prompt_tokens": each}) for each in ([256, 768], 512)]
    found = quietly(sample(run(1), plans[0]), sample(run(2), plans[1], side=1))
    assert "prompts of 256, 768 tokens and of 512 tokens were asked for" in found.reasons[0]
    for path in ("prefill.pass_ms.p50", "decode.pass_ms.p50"):
        delta = found.delta(path)
        assert delta is not None and delta.call is Call.NOT_COMPARED
    again = quietly(sample(run(1), plans[0]), sample(run(2), plans[0], side=1))
    assert again.level is Level.ALL


def test_of_other_batch_sizes_only_the_common_ones_are_compared() -> None:
    plans = [replace(META, workload={"batch": list(batches)}) for batches in ((1, 4), (4, 16))]
    a = sample(run(1, batches=(1, 4)), plans[0])
    b = sample(run(2, batches=(4, 16)), plans[1], side=1)
    found = quietly(a, b)
    assert "batch 1, 4 and batch 4, 16 were asked for" in found.reasons[0]
    whole, common = found.delta("decode.pass_ms.p50"), found.delta("by_batch.4.decode.pass_ms.p50")
    assert whole is not None and whole.call is Call.NOT_COMPARED
    assert common is not None and common.call is Call.UNCHANGED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"transformers": "5.30.0"}}, "transformers 5.24.0 → 5.30.0"),
        ({"phaseprof": "0.2"}, "phaseprof 0.1 → 0.2"),
        ({"devices": (replace(CPU, threads=8), GPU)}, "threads 2 → 8"),
        ({"devices": (replace(CPU, name="Other CPU"), GPU)}, "device Stand-in CPU → Other CPU"),
        ({"host": Host("worker-7", "c", "t")}, "host not recorded → worker-7"),
        (
            {"models": (replace(model(), attn_implementation="eager"),)},
            "attention implementation sdpa → eager",
        ),
        ({"models": (replace(model(), cache_class="StaticCache"),)}, "cache DynamicCache → Static"),
        ({"workload": {"cache_implementation": "static"}}, "cache implementation not recorded"),
    ],
)
def test_what_changed_around_the_runs_is_named(changes: dict[str, Any], said: str) -> None:
    found = compared(run(1), run(2), replace(META, **changes))
    assert found.level is Level.ALL
    assert said in found.verdict[-1]


def test_the_place_of_a_trace_is_no_difference_of_commands() -> None:
    first = replace(META, command=("phaseprof", "profile", "-o", "one", "m"))
    a = sample(run(1), first)
    same = sample(run(2), replace(first, command=("phaseprof", "profile", "-o", "two", "m")))
    other = sample(run(2), replace(first, command=("phaseprof", "profile", "-o", "two", "n")))
    assert quietly(a, same).differences == ()
    assert [each.what for each in quietly(a, other).differences] == ["command"]


def test_a_class_that_changed_is_named_with_both() -> None:
    # A decode step of 4 ms spends 2.2 ms at the memory roof, one of 8 ms not half of it.
    found = compared(run(1, profiled=True), run(2, decode=2.0, profiled=True))
    (change,) = (each for each in found.bounds if each.phase == "decode")
    assert (change.a.value, change.b.value) == ("bandwidth", "latency")
    assert any(
        line.startswith("What bounds decode went from bandwidth to latency")
        for line in found.verdict
    )


def test_the_kernels_that_grew_are_named() -> None:
    a, b = run(1, profiled=True), run(2, decode=1.5, profiled=True)
    for timeline, gemm in ((a, 1.0), (b, 3.0)):
        for row in timeline.passes:
            if row["phase"] == "decode" and row["profiled"]:
                begin = row["start_ns"]
                for kernel, ms in (("aten::mm", gemm), ("aten::softmax", 0.5)):
                    timeline.kernels.append(
                        {**timeline.kernels[0], "pass_id": row["pass_id"], "name": kernel}
                        | {"start_ns": begin, "end_ns": begin + round(ms * 1e6)}
                    )
                    begin += round(ms * 1e6)
        timeline.kernels = [k for k in timeline.kernels if k["name"] != "op"]
    found = compared(a, b)
    first = next(each for each in found.kernels if each.phase == "decode")
    assert (first.kernel_class, first.part) == ("gemm", 1.0)
    assert first.a_ms == pytest.approx(1.0)
    assert first.b_ms == pytest.approx(3.0)
    assert any("in decode the kernels of class gemm moved most: 1 ms to 3 ms a step" in line.lower()
               for line in found.verdict)  # fmt: skip


def test_json_is_finite_and_has_every_figure() -> None:
    a, b = sample(run(1)), sample(run(2, decode=1.08), name="new", side=1)
    found = quietly(a, b, rules=[parse("decode.step_ms > +1%")])
    data = json.loads(
        json.dumps(to_json([found], [a.report, b.report], failed=True), allow_nan=False)
    )
    assert data["schema"] == 1 and data["failed"] is True
    (one,) = data["comparisons"]
    assert one["metrics"]["decode.pass_ms.p50"]["call"] == "worse"
    assert one["metrics"]["decode.pass_ms.p50"]["low"] < 0.08
    assert one["rules"][0]["outcome"] in ("breach", "not certain")
    assert one["comparable"] == "comparable" and one["bounds"]["decode"]["a"] == "bandwidth"
    assert [each["path"] for each in data["traces"]] == ["base", "new"]
