"""What the report takes from a trace: model, device, roofs, cost, provenance, and what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from traces import (
    CPU,
    GPU,
    META,
    START_NS,
    Timeline,
    healthy,
    meta,
    missing,
    model,
    roofs,
)

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.report import build_report, primary_device
from phaseprof.analyzers.results import Bound, OwnCost, Report
from phaseprof.errors import EmptyRunError, NotMeasured
from phaseprof.trace.meta import SelfCost


def report_of(timeline: Timeline, **changes: Any) -> Report:
    return build_report(timeline.trace(meta(**changes) if changes else META))


def test_facts() -> None:
    facts = report_of(healthy(), workload={"prompt_tokens": 512, "batch": [1]}).facts
    assert (facts.model, facts.model_class) == ("Stand-in-50M", "StandInForCausalLM")
    assert facts.engine == "transformers 5.24.0"
    assert (facts.device, facts.dtype) == (CPU, "float32")
    assert facts.command == ("python", "serve.py")
    assert (facts.ranks, facts.processes, facts.incomplete) == (1, 1, 0)
    assert facts.models == ()
    assert facts.workload == {"prompt_tokens": 512, "batch": [1]}
    assert (facts.trace_path, facts.trace_bytes) == ("trace", 41_000)


def test_the_primary_model_is_the_one_with_the_most_target_time() -> None:
    timeline = healthy()  # 1024 ms of "m"
    timeline.add("decode", 2000, model_id="d", role="draft")
    timeline.add("decode", 1025, gflop=1, gb=1, model_id="n")
    report = report_of(timeline, models=(model(), model("d"), model("n", name="Larger")))
    assert report.facts.model == "Larger"
    assert list(report.phases) == ["decode"]


def test_primary_device_and_dtype() -> None:
    timeline = healthy()
    assert primary_device(timeline.trace()) == (CPU, "float32")
    for row in timeline.passes[2:]:
        row["dtype"] = "bfloat16"
    on_gpu = timeline.trace(meta(models=(model(device=GPU),)))
    assert primary_device(on_gpu) == (GPU, "bfloat16")
    assert primary_device(Timeline().trace()) == (None, "")


# --- roofs ---------------------------------------------------------------------------------------


def test_given_roofs_come_before_those_of_the_trace() -> None:
    report = build_report(healthy().trace(), ceilings=roofs(bytes_per_s=60e9))
    assert report.phases["decode"].mbu == pytest.approx(55 / 60)
    assert report.ceilings == roofs(bytes_per_s=60e9)


def test_roofs_are_those_of_device_and_dtype_measured_before_datasheet() -> None:
    sheet = roofs(source="datasheet", bytes_per_s=1e12)
    other = roofs(GPU, bytes_per_s=4e12)
    half = roofs(dtype="bfloat16", flops_per_s=4e12)
    older = replace(roofs(bytes_per_s=90e9), measured_ns=1)
    report = report_of(healthy(), ceilings=(sheet, other, half, older, roofs()))
    assert report.ceilings == roofs()
    assert "bfloat16, whose matmuls reach 4 TFLOP/s" in report.phases["prefill"].verdict.remedy
    assert report_of(healthy(), ceilings=(sheet, other)).ceilings == sheet


def test_roofs_of_another_dtype_are_no_roofs() -> None:
    report = report_of(healthy(), ceilings=(roofs(dtype="bfloat16"),))
    assert report.ceilings is None
    assert report.phases["decode"].bound is Bound.UNKNOWN
    assert [n.why for n in report.not_measured if n.what == "share of the roofs"] == [
        "the roofs of Stand-in CPU for float32 are not known (known for bfloat16)"
    ]


@pytest.mark.parametrize(
    ("before_s", "says"),
    [
        (180, "phaseprof calibrate, 3 min before the run, ±2 %"),
        (0, "phaseprof calibrate, with the run, ±2 %"),
        (-5, "phaseprof calibrate, with the run, ±2 %"),
        (40, "phaseprof calibrate, 40 s before the run, ±2 %"),
        (5 * 3600, "phaseprof calibrate, 5 hours before the run, ±2 %"),
        (10 * 86400, "phaseprof calibrate, 10 days before the run, ±2 %"),
    ],
)
def test_the_age_of_roofs(before_s: int, says: str) -> None:
    roof = replace(roofs(), measured_ns=START_NS - before_s * 10**9)
    assert dict(report_of(healthy(), ceilings=(roof,)).provenance)["roofs"] == says


def test_provenance_names_every_source() -> None:
    timeline = healthy()
    timeline.add("decode", 9, gflop=0.1, gb=0.2, busy=0.9, tag_source="cache")
    assert report_of(timeline).provenance == (
        ("time", "host clock"),
        ("labels", "generate 98 %, cache 2 %"),
        ("FLOPs, bytes", "closed form (docs/work-model)"),
        ("roofs", "phaseprof calibrate, 3 min before the run, ±2 %"),
        ("busy", "kernel timeline of 1 pass"),
    )
    sheet = report_of(healthy(), ceilings=(roofs(source="datasheet"),))
    assert dict(sheet.provenance)["roofs"] == "datasheet: stand-in"
    assert "busy" not in dict(sheet.provenance)


# --- what is missing -----------------------------------------------------------------------------


def test_not_measured_joins_the_processes_and_the_analysis() -> None:
    trace = healthy().trace(
        meta(not_measured=(missing("energy"), missing("queue"))),
        meta(pid=2, not_measured=(missing("energy"),)),
    )
    entries = build_report(trace).not_measured
    assert entries[:2] == (missing("energy"), missing("queue"))
    assert [entry.what for entry in entries[2:]] == [
        "busy time of the device in prefill, decode",
        "SM, tensor-core and DRAM counters",
    ]
    assert entries[3] == NotMeasured(
        "SM, tensor-core and DRAM counters", "no NVIDIA GPU in this run"
    )


def test_a_gpu_is_not_told_that_there_is_none() -> None:
    report = report_of(healthy(), models=(model(device=GPU),), ceilings=(roofs(GPU),))
    assert not any("no NVIDIA GPU" in entry.why for entry in report.not_measured)


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ((), "the trace does not describe this model, so that its FLOPs and bytes are not known"),
        ((model(cost=None),), "the structure of StandInForCausalLM could not be read"),
    ],
)
def test_missing_work_is_said(models: tuple[Any, ...], why: str) -> None:
    report = report_of(healthy(), models=models)
    assert [n.why for n in report.not_measured if n.what == "FLOPs and bytes"] == [why]


# --- own cost ------------------------------------------------------------------------------------


def test_own_cost_is_of_the_processes_that_wrote_it() -> None:
    # 600 us of hooks over 100 passes, in 1024 ms of passes; then 1.6 ms over 200 passes.
    assert report_of(healthy(8, 56)).own_cost == OwnCost(6.0, 0.6 / 1024, 2.0)
    trace = healthy(8, 56).trace(META, meta(pid=2, self_cost=SelfCost(100, 1_000_000, 0)))
    assert build_report(trace).own_cost == OwnCost(8.0, 1.6 / 1024, 2.0)
    assert report_of(healthy(), self_cost=None).own_cost is None


# --- empty runs ----------------------------------------------------------------------------------


def test_an_empty_run_says_what_was_hooked() -> None:
    with pytest.raises(EmptyRunError) as caught:
        build_report(Timeline().trace())
    assert caught.value.message == (
        "no forward pass was seen. Hooks were set on transformers 5.24.0 (generate); 1 model class; the script never "
        "called a model that they watch."
    )
    assert "phaseprof run -- " in caught.value.remedy
    assert "phaseprof doctor" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hooks": ()}, "No hooks were set: the process loaded no engine that phaseprof knows."),
        ({"complete": False}, "was killed, before a first pass was written"),
        (
            {"not_measured": (NotMeasured("hooks", "the package is too old"),)},
            "Hooks: the package is too old.",
        ),
    ],
)
def test_an_empty_run_says_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EmptyRunError) as caught:
        build_report(Timeline().trace(meta(**changes)))
    assert says in caught.value.message


def test_an_empty_folder_and_an_unreadable_one() -> None:
    trace = Timeline().trace()
    object.__setattr__(trace, "metas", ())
    with pytest.raises(EmptyRunError, match="the trace is empty"):
        build_report(trace)
    damaged = Timeline().trace(damage=("passes/rank=0/part-0.parquet: cut short",))
    with pytest.raises(EmptyRunError, match="can be read: passes/rank=0/part-0"):
        build_report(damaged)


# --- JSON ----------------------------------------------------------------------------------------


def test_json_has_the_agreed_keys() -> None:
    data = json.loads(json.dumps(to_json(report_of(healthy(8, 56))), allow_nan=False))
    assert data["schema"] == 1
    assert {"device", "phases", "requests", "overhead", "not_measured"} <= set(data)
    assert data["device"]["name"] == "Stand-in CPU"
    assert list(data["phases"]) == ["prefill", "decode"]
    decode = data["phases"]["decode"]
    agreed = {
        "passes", "tokens", "span_ms", "busy_ms", "tflops", "gb_per_s", "mfu", "mbu", "intensity", "explained",
        "nearest_roof", "bound", "confidence", "evidence",
    }  # fmt: skip
    assert agreed <= set(decode)
    assert decode["bound"] == "bandwidth"
    assert decode["nearest_roof"] == "bandwidth"
    assert decode["confidence"] == "high"
    assert decode["passes"] == 56
    assert decode["explained"] == pytest.approx(0.55)
    assert decode["evidence"][1] == {
        "text": "A step took 4 ms, of which that roof explains 55 %.",
        "provenance": "measured",
    }
    assert data["requests"]["ttft_ms"] == {"count": 8, "p50": 20.0, "p90": 20.0, "p99": 20.0}
    assert data["overhead"]["hook_us_per_pass"] == 6.0
    assert data["not_measured"][0].keys() == {"what", "why", "fix"}
    assert data["answer"] == list(report_of(healthy(8, 56)).answer)


def test_json_of_little_has_nulls_and_no_infinities() -> None:
    timeline = Timeline()
    timeline.add("decode", 0, gflop=1, gb=1)
    report = report_of(
        timeline,
        models=(),
        devices=(),
        ceilings=(),
        self_cost=None,
        workload={"rate": float("inf"), 3: ("a", None), "path": CPU.kind},
    )
    data = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert data["device"] is None
    assert data["ceilings"] is None
    assert data["overhead"] == dict.fromkeys(
        ("hook_us_per_pass", "share", "writer_cpu_ms", "windows", "sampler_cpu_ms")
    )
    assert data["run"]["workload"] == {"rate": None, "3": ["a", None], "path": "cpu"}
    assert data["phases"]["decode"]["tflops"] is None
    assert data["phases"]["decode"]["bound"] == "unknown"
    assert data["requests"]["tpot_ms"] is None


def test_json_names_batches_as_text() -> None:
    timeline = Timeline()
    for batch in (1, 4):
        timeline.add("decode", 4, tokens=batch, sequences=batch)
    data = json.loads(json.dumps(to_json(report_of(timeline))))
    assert list(data["by_batch"]) == ["1", "4"]
    assert data["by_batch"]["4"]["decode"]["tokens"] == 4
