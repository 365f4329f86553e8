"""Counters of a trace by phase: which passes and windows count, whose device it is, what is put together of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from scripted import DEVICE, ON_GPU, UUID, Ran, Script, generate_loop, samples, trace_of
from traces import CPU, GPU, MS, model, roofs

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.counters.counter_results import CounterState, Method, PhaseCounters
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Provenance
from phaseprof.metrics import Metric
from phaseprof.trace.meta import Device, ProcessMeta
from phaseprof.trace.reader import Trace

SM = {"prefill": 0.92, "decode": 0.55}
DRAM = {"prefill": 0.22, "decode": 0.81}


def loop(seed: int = 1, **changes: Any) -> list[Ran]:
    return generate_loop(Random(seed), **{"values": SM, "new": 12, "pause_ms": 40.0, **changes})


def shown(
    passes: Sequence[Ran], metric: Metric, values: dict[str, float] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Samples of a counter that has these values in the phases; the passes' own without."""
    if values is not None:
        passes = [replace(ran, value=values[ran.phase]) for ran in passes]
    device = changes.pop("device", UUID)
    source = changes.pop("source", "gpm")
    windows = Script(passes).sampled(Random(3), **{"noise": 0.01, **changes})
    return samples(windows, metric, source=source, device=device)


def counters(trace: Trace, phase: str) -> PhaseCounters:
    found = build_report(trace).phases[phase].counters
    assert found is not None
    return found


def test_each_counter_of_each_phase_is_what_the_passes_did() -> None:
    passes = loop()
    rows = shown(passes, Metric.SM_ACTIVE) + shown(passes, Metric.DRAM_ACTIVE, DRAM)
    report = build_report(trace_of(passes, rows))

    for phase in ("prefill", "decode"):
        found = report.phases[phase].counters
        assert found is not None and found.sm_active is not None and found.dram_active is not None
        assert found.sm_active.sure == pytest.approx(SM[phase], abs=0.02)
        assert found.dram_active.sure == pytest.approx(DRAM[phase], abs=0.02)
        assert found.sm_active.source == "gpm"
        assert found.sm_active.provenance is Provenance.MEASURED
        assert found.tensor_active is None and found.power_w is None
        time_s = sum(ran.end - ran.start for ran in passes if ran.phase == phase) / 1e9
        # All of it but what lies before the first window.
        assert found.sampled_s == pytest.approx(time_s, rel=0.1)
    assert ("counters", "gpm (") in [(name, text[:5]) for name, text in report.provenance]


def test_without_samples_nothing_is_said() -> None:
    report = build_report(trace_of(loop(seconds=2), []))

    assert report.devices == ()
    assert all(figures.counters is None for figures in report.phases.values())
    assert "counters" not in dict(report.provenance)
    plain = json.loads(json.dumps(to_json(report)))
    assert plain["devices"] == [] and plain["phases"]["decode"]["counters"] is None


def test_samples_of_the_host_are_no_counters_of_a_phase() -> None:
    passes = loop(seconds=2)
    rows = shown(passes, Metric.HOST_CPU, device="cpu", source="host")

    assert counters_or_none(trace_of(passes, rows)) is None


def counters_or_none(trace: Trace) -> PhaseCounters | None:
    return build_report(trace).phases["decode"].counters


def test_windows_with_passes_that_do_not_count_are_left_out() -> None:
    """Warm-up, profiled and failed passes do something else to the device: none of it is in the figures."""
    passes = loop(seconds=24)
    odd: dict[int, dict[str, Any]] = {
        i: {"warmup": "requested"} for i, ran in enumerate(passes) if ran.start < 3e9
    }
    odd |= {300: {"profiled": True}, 500: {"error": "RuntimeError"}, 700: {"profiled": True}}
    passes = [replace(ran, value=0.05) if i in odd else ran for i, ran in enumerate(passes)]
    rows = shown(passes, Metric.SM_ACTIVE)

    found = counters(
        trace_of(passes, rows, columns=lambda i, ran: odd.get(i, {})), "decode"
    ).sm_active

    assert found is not None
    assert found.sure == pytest.approx(SM["decode"], abs=0.01)


def test_when_every_window_holds_one_of_them_it_says_so() -> None:
    passes = loop(seconds=4)
    rows = shown(passes, Metric.SM_ACTIVE)

    trace = trace_of(passes, rows, columns=lambda i, ran: {"profiled": i % 2 == 0, "warmup": None})

    found = counters(trace, "decode").sm_active
    assert found is not None and found.state is CounterState.INSUFFICIENT
    assert found.reason == (
        "every sample window holds warm-up, profiled or failed passes, or none at all"
    )
    assert found.value is None and found.sure is None


def test_a_pass_is_where_the_device_ran_it_not_where_it_was_called() -> None:
    """The call of a prefill returns after 4 ms; the device takes 80 and the next step waits for it."""
    passes = loop(pause_ms=0.0)

    def called(i: int, ran: Ran) -> dict[str, Any]:
        if ran.phase != "prefill":
            return {}
        start = 1_700_000_000 * 10**9 + round(ran.start)
        return {"end_ns": start + 4 * MS, "host_ns": 4 * MS}

    found = counters(
        trace_of(passes, shown(passes, Metric.SM_ACTIVE), columns=called), "prefill"
    ).sm_active

    assert found is not None and found.sure == pytest.approx(SM["prefill"], abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_without_device_times_a_phase_is_not_taken_for_what_its_calls_took(seed: int) -> None:
    """The device works on after the call of a prefill has returned, in what looks like a pause."""
    passes = loop(seed, pause_ms=0.0)

    def called(i: int, ran: Ran) -> dict[str, Any]:
        if ran.phase != "prefill":
            return {"device_ns": None}
        start = 1_700_000_000 * 10**9 + round(ran.start)
        return {"device_ns": None, "end_ns": start + 4 * MS, "host_ns": 4 * MS}

    trace = trace_of(passes, shown(passes, Metric.SM_ACTIVE), columns=called)

    for phase, value in SM.items():
        found = counters(trace, phase).sm_active
        assert found is not None
        if found.sure is not None:
            assert found.sure == pytest.approx(value, abs=0.05)
    assert found is not None and found.sure is not None


def test_a_draft_model_is_not_the_target() -> None:
    """Drafting between the steps has its own value, and neither phase gets any of it."""
    passes: list[Ran] = []
    for ran in loop(seconds=30, new=10, spread=0.2):
        passes.append(ran)
    drafts = [i for i, ran in enumerate(passes) if ran.phase == "decode" and i % 3 == 0]
    passes = [replace(ran, value=0.05) if i in drafts else ran for i, ran in enumerate(passes)]

    trace = trace_of(
        passes,
        shown(passes, Metric.SM_ACTIVE),
        columns=lambda i, ran: {"role": "draft"} if i in drafts else {},
    )

    found = counters(trace, "decode").sm_active
    assert found is not None and found.value is not None and found.error is not None
    assert abs(found.value - SM["decode"]) <= found.error


OTHER_UUID = "GPU-00000000-0000-0000-0000-000000000002"


def on(rank: int, uuid: str) -> ProcessMeta:
    device = replace(DEVICE, uuid=uuid, key=f"{GPU.key}-{uuid[-1]}", index=rank)
    return replace(
        ON_GPU, rank=rank, pid=rank + 1, devices=(device,), models=(model(device=device),)
    )


def test_ranks_on_devices_of_their_own_are_put_together_by_time() -> None:
    first, second = loop(1), loop(2, seconds=10)
    both = [*((0, ran) for ran in first), *((1, ran) for ran in second)]
    rows = shown(first, Metric.SM_ACTIVE) + shown(
        second, Metric.SM_ACTIVE, {"prefill": 0.7, "decode": 0.25}, device=OTHER_UUID
    )
    trace = trace_of(
        [ran for _, ran in both],
        rows,
        on(0, UUID),
        on(1, OTHER_UUID),
        columns=lambda i, ran: {"rank": both[i][0]},
    )

    report = build_report(trace)

    times = [
        sum(ran.end - ran.start for ran in run if ran.phase == "decode") for run in (first, second)
    ]
    mean = (times[0] * 0.55 + times[1] * 0.25) / sum(times)
    found = report.phases["decode"].counters
    assert found is not None and found.sm_active is not None
    assert found.sm_active.sure == pytest.approx(mean, abs=0.02)
    assert [state.uuid for state in report.devices] == [UUID, OTHER_UUID]


def test_two_models_of_a_process_are_each_on_their_own_board() -> None:
    """Boards of one kind share the key of their ceilings; their names in the driver tell them apart."""
    passes = loop(seconds=12)
    other = replace(DEVICE, uuid=OTHER_UUID, index=1)
    # The board of a second model, which is not the report's, does something else all the while.
    elsewhere = {"prefill": 0.1, "decode": 0.1}
    rows = shown(passes, Metric.SM_ACTIVE) + shown(
        passes, Metric.SM_ACTIVE, elsewhere, device=OTHER_UUID
    )
    meta = replace(
        ON_GPU,
        devices=(DEVICE, other),
        models=(
            replace(model(device=DEVICE), device_uuid=UUID),
            replace(model("second", device=DEVICE), device_uuid=OTHER_UUID),
        ),
    )

    found = counters(trace_of(passes, rows, meta), "decode").sm_active

    assert found is not None and found.source == "gpm"
    assert found.sure == pytest.approx(SM["decode"], abs=0.02)


def test_ranks_that_share_a_device_are_on_one_timeline() -> None:
    """Two processes take turns: what one does is in the windows of the other."""
    passes = loop(seconds=30)
    rank_of = [0]
    for ran in passes[1:]:
        rank_of.append(1 - rank_of[-1] if ran.phase == "prefill" else rank_of[-1])
    trace = trace_of(
        passes,
        shown(passes, Metric.SM_ACTIVE),
        on(0, UUID),
        on(1, UUID),
        columns=lambda i, ran: {"rank": rank_of[i]},
    )

    report = build_report(trace)

    assert len(report.devices) == 1
    for phase, value in SM.items():
        found = report.phases[phase].counters
        assert found is not None and found.sm_active is not None
        assert found.sm_active.sure == pytest.approx(value, abs=0.02)


@pytest.mark.parametrize(
    ("device", "matched"),
    [
        # torch did not say which device it is, and only one was sampled.
        (replace(DEVICE, uuid=""), True),
        (replace(DEVICE, uuid=OTHER_UUID), False),
    ],
)
def test_whose_samples_they_are(device: Device, matched: bool) -> None:
    passes = loop(seconds=8)
    meta = replace(ON_GPU, devices=(device,), models=(model(device=device),))

    report = build_report(trace_of(passes, shown(passes, Metric.SM_ACTIVE), meta))

    assert (report.phases["decode"].counters is not None) == matched
    said = [each.why for each in report.not_measured if UUID in each.what]
    assert said == ([] if matched else [_NOBODY])


_NOBODY = "it was sampled, but no model of this trace is known to have run on it"


def test_a_recording_that_is_replayed_beside_a_cpu_is_taken_for_its_own() -> None:
    passes = loop(seconds=8)
    meta = replace(ON_GPU, devices=(CPU,), models=(model(device=CPU),))
    rows = shown(passes, Metric.SM_ACTIVE, device=CPU.key)

    report = build_report(trace_of(passes, rows, meta, columns=lambda i, ran: {"device_ns": None}))

    found = report.phases["decode"].counters
    assert found is not None and found.sm_active is not None
    assert found.sm_active.sure == pytest.approx(SM["decode"], abs=0.02)
    assert not any("no NVIDIA GPU" in each.why for each in report.not_measured)


def test_windows_of_a_millisecond_are_joined_before_they_are_solved() -> None:
    passes = loop(seconds=12)
    rows = shown(passes, Metric.SM_ACTIVE, window=1 * MS, noise=0.1, source="pm")

    found = counters(trace_of(passes, rows), "prefill").sm_active

    assert found is not None and found.source == "pm"
    assert found.sure == pytest.approx(SM["prefill"], abs=0.05)


def test_of_two_collectors_the_one_that_tells_more_counts() -> None:
    passes = loop(seconds=12)
    rows = shown(passes, Metric.SM_ACTIVE, noise=0.3) + shown(
        passes, Metric.SM_ACTIVE, noise=0.01, source="pm"
    )

    found = counters(trace_of(passes, rows), "decode").sm_active

    assert found is not None and found.source == "pm" and found.sure is not None


def test_each_batch_has_its_own_counters() -> None:
    one, eight = loop(1, seconds=15), loop(2, seconds=15)
    later = one[-1].end + 200 * MS
    eight = [
        replace(ran, start=ran.start + later, end=ran.end + later, value=ran.value - 0.2)
        for ran in eight
    ]
    passes = [*one, *eight]
    trace = trace_of(
        passes,
        shown(passes, Metric.SM_ACTIVE),
        columns=lambda i, ran: {"sequences": 1 if i < len(one) else 8},
    )

    report = build_report(trace)

    for batch, less in ((1, 0.0), (8, 0.2)):
        for phase, value in SM.items():
            found = report.by_batch[batch][phase].counters
            assert found is not None and found.sm_active is not None
            assert found.sm_active.sure == pytest.approx(value - less, abs=0.03)


def test_bytes_per_second_need_a_peak_of_the_interface() -> None:
    passes = loop()
    rows = shown(passes, Metric.DRAM_ACTIVE, DRAM)
    peak = roofs(DEVICE, bytes_per_s=4.8e12, source="datasheet")

    found = counters(trace_of(passes, rows, replace(ON_GPU, ceilings=(peak,))), "decode")
    rate = found.dram_bytes_per_s
    assert rate is not None and rate.sure == pytest.approx(0.81 * 4.8e12, rel=0.03)
    assert rate.method is Method.DERIVED and rate.provenance is Provenance.DATASHEET

    # A measured roof is what a kernel reached of the interface: the share is not one of it.
    measured = replace(ON_GPU, ceilings=(roofs(DEVICE),))
    assert counters(trace_of(passes, rows, measured), "decode").dram_bytes_per_s is None


def test_counted_bytes_are_read_and_written_ones() -> None:
    passes = loop()
    read = {"prefill": 0.9e12, "decode": 3.8e12}
    rows = shown(passes, Metric.DRAM_READ, read, noise=3e10, greatest=1e13, source="pm")
    written = {"prefill": 0.3e12, "decode": 0.1e12}
    rows += shown(passes, Metric.DRAM_WRITE, written, noise=1e9, greatest=1e13, source="pm")

    rate = counters(trace_of(passes, rows), "decode").dram_bytes_per_s

    assert rate is not None and rate.sure == pytest.approx(3.9e12, rel=0.03)
    assert rate.provenance is Provenance.MEASURED


def test_that_some_kernel_ran_is_no_evidence() -> None:
    passes = loop(seconds=8)
    rows = shown(passes, Metric.GPU_UTILIZATION, {"prefill": 1.0, "decode": 1.0}, source="nvml")

    report = build_report(trace_of(passes, rows))

    assert "utilization" not in json.dumps(to_json(report))


def test_the_figures_go_into_the_json() -> None:
    passes = loop()

    report = build_report(trace_of(passes, shown(passes, Metric.SM_ACTIVE)))
    plain = json.loads(json.dumps(to_json(report)))

    found = plain["phases"]["decode"]["counters"]["sm_active"]
    assert found["state"] == "sure" and found["reason"] == ""
    assert found["value"] == pytest.approx(0.55, abs=0.02)
    assert 0 < found["error"] <= 0.05
    assert plain["phases"]["decode"]["counters"]["tensor_active"] is None
    assert plain["devices"][0]["uuid"] == UUID
