"""The run over time, on constructed passes and samples whose bins follow by hand."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.passes import Primary, Status
from phaseprof.analyzers.viewing.timeline import ONE_BY_ONE, timeline
from phaseprof.analyzers.viewing.timeline import Timeline as Drawn
from phaseprof.phases import Phase
from phaseprof.schema import SAMPLES

PRIMARY = Primary("m", ("target",), 0.0)


def drawn(made: Timeline, samples: list[dict[str, object]] | None = None) -> Drawn:
    trace = made.trace()
    schema = SAMPLES.arrow.append(pa.field("rank", pa.int64()))
    table = pa.Table.from_pylist(samples or [], schema=schema)
    return timeline(trace.passes, table, PRIMARY, {"GPU-1": "Stand-in GPU"})


def sample(begin_ms: float, end_ms: float, value: float, **changes: object) -> dict[str, object]:
    return {
        "rank": 0,
        "start_ns": START_NS + round(begin_ms * MS),
        "end_ns": START_NS + round(end_ms * MS),
        "device": "GPU-1",
        "source": "gpm",
        "metric": "power_w",
        "value": value,
        **changes,
    }


def test_few_passes_are_kept_one_by_one_and_need_no_bins() -> None:
    made = Timeline(gap_ns=2 * MS)
    made.add("prefill", 10, tokens=64)
    made.add("decode", 4, step=7, sequences=3, tokens=3)
    made.add("decode", 4, warmup="requested")
    found = drawn(made)
    (lane,) = found.lanes
    assert lane.levels == () and lane.rows is not None
    assert lane.rows.start_us.to_pylist() == [0, 12_000, 18_000]
    assert lane.rows.span_us.to_pylist() == [10_000, 4_000, 4_000]
    assert [found.phases[code] for code in lane.rows.phase.to_pylist()] == [
        *(Phase.PREFILL, Phase.DECODE, Phase.DECODE)
    ]
    assert lane.rows.status.to_pylist() == [Status.STEADY, Status.STEADY, Status.REQUESTED]
    assert lane.rows.step.to_pylist()[1] == 7
    assert lane.rows.prefill_tokens.to_pylist() == [64, 0, 0]
    assert lane.rows.decode_tokens.to_pylist() == [0, 3, 1]
    assert found.span_us == 22_000 and found.start_ns == START_NS


def test_passes_of_a_device_stand_where_it_ran_them() -> None:
    # Both calls return at once; the device takes 10 ms for the first, and begins the second after it.
    made = Timeline()
    made.add("decode", 1, device_ns=10 * MS)
    made.add("decode", 1, device_ns=5 * MS)
    (lane,) = drawn(made).lanes
    assert lane.rows is not None
    assert lane.rows.start_us.to_pylist() == [0, 10_000]
    assert lane.rows.span_us.to_pylist() == [10_000, 5_000]


@pytest.fixture(scope="module")
def long_run() -> Drawn:
    """So many passes that there are bins: a prefill of 3 ms and a decode step of 1 ms by turns, without a gap."""
    made = Timeline()
    for _ in range(ONE_BY_ONE // 2 + 1):
        made.add("prefill", 3, tokens=30)
        made.add("decode", 1)
    return drawn(made)


def test_every_level_holds_all_of_the_time_and_all_passes(long_run: Drawn) -> None:
    (lane,) = long_run.lanes
    turns = ONE_BY_ONE // 2 + 1
    assert len(lane.levels) == 4
    for level in lane.levels:
        busy = dict(level.busy_us)
        assert sum(busy[Phase.PREFILL]) == turns * 3_000
        assert sum(busy[Phase.DECODE]) == turns * 1_000
        assert sum(level.begun) == 2 * turns
        assert level.bin_us * len(level.begun) == pytest.approx(long_run.span_us)
    assert [len(level.begun) for level in lane.levels] == [512, 2048, 8192, 32768]


def test_a_bin_holds_what_lies_in_it(long_run: Drawn) -> None:
    # 32,004 ms in 32,768 bins: the first one ends after 0.977 ms of the first prefill, the fourth one after 3.907 ms.
    (lane,) = long_run.lanes
    busy = dict(lane.levels[-1].busy_us)
    width = long_run.span_us / 32_768
    assert busy[Phase.PREFILL][0] == int(width)
    assert busy[Phase.DECODE][0] == 0
    assert sum(busy[Phase.DECODE][:4]) == int(4 * width) - 3_000


def test_tokens_a_second_are_spread_over_each_pass(long_run: Drawn) -> None:
    by_metric = {track.metric: track for track in long_run.counters}
    # 30 prompt tokens and 1 output token in each 4 ms.
    assert by_metric["prefill_tokens_per_s"].mean == pytest.approx(7_500, rel=1e-3)
    assert by_metric["decode_tokens_per_s"].mean == pytest.approx(250, rel=1e-3)
    assert by_metric["prefill_tokens_per_s"].greatest == pytest.approx(10_000, rel=1e-2)
    # A bin of 1.953 ms has at least 0.953 ms of a prefill.
    assert by_metric["prefill_tokens_per_s"].least == pytest.approx(4_880, rel=1e-2)


def test_stretches_add_up_to_the_run(long_run: Drawn) -> None:
    parts = long_run.stretches
    assert parts[0].begin_ms == 0 and parts[-1].end_ms == pytest.approx(long_run.span_us / 1e3)
    assert all(one.end_ms == other.begin_ms for one, other in pairwise(parts))
    assert sum(part.passes for part in parts) == long_run.passes
    assert sum(dict(part.busy_ms)[Phase.DECODE] for part in parts) == ONE_BY_ONE // 2 + 1
    assert parts[3].decode_tokens_per_s == pytest.approx(250, rel=1e-2)


def test_ranks_have_lanes_of_their_own_as_far_as_there_is_room() -> None:
    made = Timeline()
    for rank in range(10):
        made.add("decode", 2, rank=rank)
    found = drawn(made)
    assert [lane.rank for lane in found.lanes] == list(range(8))
    assert found.left_out == (8, 9)
    assert found.span_us == 16_000


def test_the_mean_of_a_counter_is_by_time() -> None:
    made = Timeline()
    made.add("decode", 100)
    # 100 W for a quarter, 300 W for a half, and nothing sampled in the last quarter.
    found = drawn(made, [sample(0, 25, 100.0), sample(25, 75, 300.0)])
    (track,) = [each for each in found.counters if each.metric == "power_w"]
    assert (track.device, track.source, track.windows) == ("Stand-in GPU", "gpm", 2)
    assert track.mean == pytest.approx((25 * 100 + 50 * 300) / 75)
    assert (track.least, track.greatest) == (100.0, 300.0)
    level = track.levels[0]
    assert len(level.mean) == 1024
    assert level.mean[10] == pytest.approx(100) and level.mean[500] == pytest.approx(300)
    assert level.mean[900] is None


def test_a_bin_shows_the_extremes_of_short_windows() -> None:
    made = Timeline()
    made.add("decode", 1_000)
    # A window of 50 us at 900 W among windows at 100 W: shorter than a bin.
    samples = [sample(at, at + 1, 100.0) for at in range(1_000) if at != 500]
    samples += [sample(500, 500.05, 900.0), sample(500.05, 501, 100.0)]
    found = drawn(made, samples)
    (track,) = [each for each in found.counters if each.metric == "power_w"]
    coarse = track.levels[0]
    place = max(range(1024), key=lambda i: coarse.greatest[i] or 0.0)
    assert coarse.greatest[place] == 900.0 and coarse.least[place] == 100.0
    mean = coarse.mean[place]
    assert mean is not None and 100 < mean < 300
    assert place == int(500 / 1000 * 1024)


def test_of_two_collectors_the_one_with_more_windows_is_shown() -> None:
    made = Timeline()
    made.add("decode", 100)
    samples = [sample(0, 100, 1.0, source="nvml")]
    samples += [sample(at, at + 10, 2.0) for at in range(0, 100, 10)]
    (track,) = [c for c in drawn(made, samples).counters if c.metric == "power_w"]
    assert track.source == "gpm" and track.mean == pytest.approx(2.0)


def test_what_has_no_room_is_named_and_what_says_nothing_is_left_out() -> None:
    made = Timeline()
    made.add("decode", 10)
    named = [
        *("sm_active_share", "tensor_active_share", "dram_active_share", "power_w", "sm_clock_hz"),
        *("memory_used_bytes", "temperature_c", "host_cpu_share", "process_cpu_cores"),
    ]
    samples = [sample(0, 10, 0.5, metric=name) for name in (*named, "gpu_utilization_share")]
    found = drawn(made, samples)
    sampled = [each.metric for each in found.counters if each.source == "gpm"]
    assert sampled == named[:8]
    assert found.left_out_counters == ("process_cpu_cores of Stand-in GPU",)


def test_values_that_are_no_numbers_are_left_out() -> None:
    made = Timeline()
    made.add("decode", 10)
    found = drawn(made, [sample(0, 5, float("nan")), sample(5, 10, 40.0)])
    (track,) = [each for each in found.counters if each.metric == "power_w"]
    assert track.mean == pytest.approx(40.0)


def test_passes_of_another_model_are_shown_as_such() -> None:
    made = Timeline()
    made.add("decode", 5)
    made.add("decode", 5, model_id="draft", role="draft")
    (lane,) = drawn(made).lanes
    assert lane.rows is not None
    assert lane.rows.status.to_pylist() == [Status.STEADY, Status.ELSEWHERE]


def test_of_too_many_passes_the_bins_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phaseprof.analyzers.viewing.timeline.MOST_PASSES", 1_000)
    made = Timeline()
    for _ in range(1_500):
        made.add("decode", 1)
    made.add("decode", 1, rank=1)
    many, few = drawn(made).lanes
    assert many.rows is None and sum(many.levels[0].begun) == 1_500
    # A rank with a few passes has no bins, and so keeps them.
    assert few.rows is not None and few.levels == ()


def test_overlapping_passes_add_up() -> None:
    made = Timeline()
    for _ in range(ONE_BY_ONE // 2 + 1):
        row = made.add("decode", 2)
        made.passes.append(another_thread(row, len(made.passes)))
    (lane,) = drawn(made).lanes
    ((_, busy),) = lane.levels[0].busy_us
    assert sum(busy) == (ONE_BY_ONE // 2 + 1) * 2 * 2_000


def another_thread(row: dict[str, object], pass_id: int) -> dict[str, object]:
    return {**row, "pass_id": pass_id, "thread_id": 8}


def test_a_run_of_no_length_has_a_timeline() -> None:
    made = Timeline()
    made.add("decode", 0)
    found = drawn(made)
    assert (found.span_us, found.passes) == (1, 1)
    assert sum(part.passes for part in found.stretches) == 1
