"""A sweep over sizes, from traces in which the fixed cost of a step and what each sequence adds are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sweeps import Cell, grid, sweep_trace
from traces import META, meta, model, roofs

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.sweeping.sweep import knee_of
from phaseprof.analyzers.sweeping.sweep_results import Oddity, Place, Sweep
from phaseprof.records import CallKind
from phaseprof.trace.reader import Trace

BATCHES = (1, 2, 4, 8, 16)


def sweep_of(trace: Trace) -> Sweep:
    found = build_report(trace).sweep
    assert found is not None
    return found


def flat(cell: Cell, repeat: int) -> float:
    """Prefill at the compute roof of the stand-in: 0.1 ms a token, and 1 ms of its own."""
    return 1.0 + 0.1 * cell[0] * cell[2]


def steps(cell: Cell, repeat: int, number: int) -> float:
    """4 ms and half a millisecond for each sequence: the knee is at batch 8."""
    return 4.0 + 0.5 * cell[2]


def test_the_knee_is_where_what_is_added_has_grown_to_the_fixed_cost() -> None:
    sweep = sweep_of(sweep_trace(grid((100,), (9,), BATCHES), steps, flat))
    (series,) = sweep.decode
    knee = series.knee
    assert knee is not None
    assert (knee.place, knee.by_line) == (Place.INSIDE, True)
    assert knee.at == pytest.approx(8.0)
    assert knee.low == pytest.approx(8.0)
    assert knee.high == pytest.approx(8.0)
    assert knee.fixed_ms == pytest.approx(4.0)
    assert knee.each_ms == pytest.approx(0.5)
    assert knee.misfit == pytest.approx(0.0, abs=1e-9)
    # 16 / 12 ms against 1 / 4.5 ms.
    assert series.gain == pytest.approx(16 / 12 * 4.5)
    assert series.slowdown == pytest.approx(12 / 4.5)
    # At the knee throughput is half of what it can be at most: 8 / 8 ms of 1 / 0.5 ms.
    at_knee = next(cell.decode for cell in sweep.cells if cell.batch == 8)
    assert at_knee is not None
    assert at_knee.tokens_per_s == pytest.approx(1000.0)


def test_the_roofs_of_the_steps_are_those_of_their_context() -> None:
    sweep = sweep_of(sweep_trace(grid((95,), (9,), BATCHES), steps, flat))
    found = sweep.decode[0].roofs
    assert found is not None
    # 95 tokens of prompt, and 3 of the 7 that steps find beside them in the mean.
    assert found.context_tokens == 98
    assert found.ridge == pytest.approx(23.689, abs=0.001)


def test_passes_belong_to_calls_by_time_and_not_by_their_size() -> None:
    """Cells of the same prompt and batch differ in their output alone."""

    def by_output(cell: Cell, repeat: int, number: int) -> float:
        return 10.0 if cell[1] == 5 else 20.0

    sweep = sweep_of(sweep_trace(grid((10,), (5, 9), (1, 2, 4)), by_output, flat))
    found = {(cell.new_tokens, cell.batch): cell.decode for cell in sweep.cells}
    assert len(found) == 6
    for (new, batch), phase in found.items():
        assert phase is not None
        assert phase.time_ms.median == pytest.approx(10.0 if new == 5 else 20.0)
        assert phase.tokens == batch


def test_warm_up_calls_do_not_count() -> None:
    trace = sweep_trace(grid((10,), (5,), (1, 2, 4)), steps, flat, repeats=3)
    sweep = sweep_of(trace)
    assert {cell.repeats for cell in sweep.cells} == {3}
    assert sum(kind == CallKind.WARMUP for kind in trace.calls.column("kind").to_pylist()) == 3


def test_time_between_steps_is_part_of_them() -> None:
    trace = sweep_trace(grid((10,), (5,), (1, 2, 4)), steps, flat)
    passes = trace.passes
    # Halve the time of each pass: the step is still from its begin to the begin of the next one.
    halved = [ns // 2 for ns in passes.column("host_ns").to_pylist()]
    place = passes.schema.get_field_index("host_ns")
    shorter = passes.set_column(place, passes.schema.field(place), [halved])
    sweep = sweep_of(replace(trace, passes=shorter))
    phase = sweep.cells[0].decode
    assert phase is not None
    assert phase.time_ms.median == pytest.approx(4.5)


def test_steps_that_take_the_same_at_any_batch_have_no_knee() -> None:
    sweep = sweep_of(sweep_trace(grid((10,), (5,), BATCHES), lambda c, r, n: 5.0, flat))
    (series,) = sweep.decode
    assert series.knee is not None
    assert series.knee.place is Place.NOWHERE
    assert series.gain == pytest.approx(16.0)
    assert sweep.conclusion[0].startswith(
        "Batching still helps at batch 16, the largest that was run, where decode is bound by overhead or latency: "
        "batch 16 decodes 16 times the tokens/s of batch 1 in steps that take as long"
    )
    assert any("--batch …,32" in each for each in sweep.missing)


def test_a_knee_beyond_the_largest_batch_is_said_to_be_extrapolated() -> None:
    sweep = sweep_of(
        sweep_trace(grid((10,), (5,), (1, 2, 4)), lambda c, r, n: 4.0 + 0.1 * c[2], flat)
    )
    knee = sweep.decode[0].knee
    assert knee is not None
    assert knee.place is Place.BEYOND
    assert knee.at == pytest.approx(40.0)
    assert "would stop at about 40" in sweep.conclusion[0]


def test_steps_without_a_fixed_cost_gain_nothing() -> None:
    sweep = sweep_of(sweep_trace(grid((10,), (5,), BATCHES), lambda c, r, n: 5.0 * c[2], flat))
    knee = sweep.decode[0].knee
    assert knee is not None
    assert knee.place is Place.BELOW
    assert sweep.conclusion[0].startswith("Batching hardly helps, from batch 1 on")


def test_repeats_that_scatter_leave_the_knee_open() -> None:
    scattered = {0: 0.5, 1: 2.0, 2: 0.4, 3: 1.0, 4: 2.6}

    def wild(cell: Cell, repeat: int, number: int) -> float:
        return (6.0 + 0.5 * cell[2]) * scattered[(repeat + cell[2]) % 5]

    sweep = sweep_of(sweep_trace(grid((10,), (5,), (2, 4, 8)), wild, flat))
    knee = sweep.decode[0].knee
    assert knee is not None
    assert knee.place is Place.OPEN
    assert "cannot be told" in sweep.conclusion[0]


def test_one_repeat_does_not_tell_how_sure_a_knee_is() -> None:
    sweep = sweep_of(sweep_trace(grid((10,), (5,), BATCHES), steps, flat, repeats=1))
    knee = sweep.decode[0].knee
    assert knee is not None
    assert (knee.place, knee.low, knee.high) == (Place.OPEN, None, None)
    assert "a cell with one repeat shows no spread" in sweep.conclusion[0]


def test_two_batches_are_too_few_for_a_knee() -> None:
    sweep = sweep_of(sweep_trace(grid((10,), (5,), (1, 4)), steps, flat))
    assert sweep.decode[0].knee is None
    assert "takes 3 batch sizes or more to tell" in sweep.conclusion[0]
    assert any("--batch 1,2,4,8" in each for each in sweep.missing)


def test_one_size_is_no_sweep() -> None:
    assert build_report(sweep_trace(grid((10,), (5,), (4,)), steps, flat)).sweep is None


def test_a_trace_without_calls_has_no_sweep() -> None:
    trace = sweep_trace(grid((10,), (5,), (1, 4)), steps, flat)
    assert build_report(replace(trace, calls=trace.calls.slice(0, 0))).sweep is None


def test_outputs_of_one_token_have_no_decode() -> None:
    sweep = sweep_of(sweep_trace(grid((10, 20, 40), (1,), (1,)), steps, flat))
    assert sweep.decode == ()
    assert all(cell.decode is None and cell.tpot_ms is None for cell in sweep.cells)
    assert len(sweep.conclusion) == 1


def test_prefill_saturates_where_its_tokens_weigh_as_much_as_its_fixed_cost() -> None:
    """8 ms and 0.1 ms a token: the knee is at 80 tokens, over lengths and batches alike."""

    def prefill(cell: Cell, repeat: int) -> float:
        return 8.0 + 0.1 * cell[0] * cell[2]

    sweep = sweep_of(sweep_trace(grid((10, 40, 160), (3,), (1, 4)), steps, prefill))
    series = sweep.prefill
    assert series is not None
    assert series.tokens == (10, 40, 40, 160, 160, 640)
    assert series.knee is not None
    assert series.knee.place is Place.INSIDE
    assert series.knee.at == pytest.approx(80.0)
    # 0.1 GFLOP a token in 0.1 ms: the peak of the stand-in.
    assert series.rate_flops == pytest.approx(1e12)
    assert series.best_tokens == 640
    assert series.best_tokens_per_s == pytest.approx(640 / 72 * 1e3)
    # 0.1 GFLOP a token at the roof explains 1 of 9 ms, 4 of 12, 16 of 24 and 64 of 72.
    bounds = [cell.prefill.bound for cell in sweep.cells if cell.prefill is not None]
    assert bounds[-1] is Bound.COMPUTE
    assert [(turn.after, turn.low, turn.high) for turn in series.turns] == [
        (Bound.COMPUTE, 40, 160)
    ]
    assert "from about 80 tokens" in sweep.conclusion[-1]
    assert "compute-bound at 640 tokens a pass" in sweep.conclusion[-1]


def test_prefill_in_proportion_from_the_first_size_on() -> None:
    sweep = sweep_of(
        sweep_trace(grid((64, 256), (3,), (1, 4)), steps, lambda c, r: 0.1 * c[0] * c[2])
    )
    assert sweep.prefill is not None and sweep.prefill.knee is not None
    assert sweep.prefill.knee.place is Place.BELOW
    assert sweep.conclusion[-1].startswith("Prefill is compute-bound and computes 10,000 tokens/s")
    assert "gain nothing from being batched" in sweep.conclusion[-1]


def test_classes_turn_between_the_cells_where_they_change() -> None:
    """A step needs 2 ms for its weights and 0.1 ms to compute each sequence."""

    def step(cell: Cell, repeat: int, number: int) -> float:
        return 5.0 if cell[2] < 8 else 3.0 if cell[2] < 64 else 0.11 * cell[2]

    sweep = sweep_of(sweep_trace(grid((10,), (5,), (2, 4, 8, 16, 64)), step, flat))
    turns = [(turn.before, turn.after, turn.low, turn.high) for turn in sweep.decode[0].turns]
    # 2 of 5 ms is too little; 2 of 3 ms is bandwidth; 6.4 of 7.04 ms compute.
    assert turns == [
        (Bound.OVERHEAD_OR_LATENCY, Bound.BANDWIDTH, 4, 8),
        (Bound.BANDWIDTH, Bound.COMPUTE, 16, 64),
    ]


@pytest.mark.parametrize(
    ("odd", "oddity", "detail"),
    [
        ([4.5] * 3 + [30.0] + [4.5] * 4, Oddity.ONE_PASS, "one of its 7 steps took 30 ms"),
        ([9.0] * 8, Oddity.THROUGHOUT, "longer throughout"),
        ([4.5, 12.0, 4.5, 4.5, 13.0, 4.5, 12.5, 4.5], Oddity.SOME_PASSES, "3 of its 7 steps"),
    ],
)
def test_a_repeat_far_off_is_named_with_what_was_odd(
    odd: list[float], oddity: Oddity, detail: str
) -> None:
    def with_odd(cell: Cell, repeat: int, number: int) -> float:
        if cell[2] == 1 and repeat == 3:
            return odd[number]
        return steps(cell, repeat, number)

    sweep = sweep_of(sweep_trace(grid((10,), (9,), (1, 2, 4)), with_odd, flat))
    (found,) = sweep.outliers
    assert (found.batch, found.repeat, found.figure) == (1, 3, "decode step")
    assert found.oddity is oddity
    assert detail in found.detail
    # It stays in, and the median does not mind.
    cell = sweep.cells[0]
    assert cell.repeats == 5
    assert cell.decode is not None
    assert cell.decode.time_ms.median == pytest.approx(4.5)
    assert cell.decode.time_ms.repeats == 5


def test_calls_beside_each_other_that_are_slow_are_said_to_be() -> None:
    def busy(cell: Cell, repeat: int, number: int) -> float:
        # The last call of one round and the first of the next one.
        slow = (repeat, cell[2]) in ((2, 4), (3, 1))
        return steps(cell, repeat, number) * (3 if slow else 1)

    sweep = sweep_of(sweep_trace(grid((10,), (9,), (1, 2, 4)), busy, flat))
    told = {(each.batch, each.repeat): each.detail for each in sweep.outliers}
    assert told[4, 2].endswith("; so was the call after it")
    assert told[1, 3].endswith("; so was the call before it")


def test_a_busy_machine_is_said_to_be_one() -> None:
    def scattered(cell: Cell, repeat: int, number: int) -> float:
        return steps(cell, repeat, number) * (1, 1.9, 1.2, 2.4, 1.5)[repeat]

    sweep = sweep_of(sweep_trace(grid((10,), (9,), (1, 2, 4)), scattered, flat))
    # They are 0.5, 0.4, 0.3, 0.9 and 0 from the median of 1.5: 1.4826 x 0.4 / 1.5.
    assert any("scatter by 40 % (1.48 MAD)" in each for each in sweep.missing)


def test_a_first_call_without_warm_up_is_named_as_that() -> None:
    def cold(cell: Cell, repeat: int, number: int) -> float:
        return 50.0 if repeat == 0 and cell[2] == 1 else steps(cell, repeat, number)

    kinds = (CallKind.COUNTED,)
    sweep = sweep_of(sweep_trace(grid((10,), (9,), (1, 2, 4)), cold, flat, kinds=kinds))
    assert [each.oddity for each in sweep.outliers] == [Oddity.FIRST]


def test_a_call_in_which_something_was_compiled_is_named_as_that() -> None:
    def slow(cell: Cell, repeat: int) -> float:
        return 80.0 if repeat == 2 and cell[2] == 2 else flat(cell, repeat)

    trace = sweep_trace(grid((10,), (9,), (1, 2, 4)), steps, slow)
    passes = trace.passes
    warmup = passes.column("warmup").to_pylist()
    (place,) = [i for i, ns in enumerate(passes.column("host_ns").to_pylist()) if ns == 80_000_000]
    warmup[place] = "compile"
    column = passes.schema.get_field_index("warmup")
    marked = passes.set_column(column, passes.schema.field(column), [warmup])
    sweep = sweep_of(replace(trace, passes=marked))
    (found,) = sweep.outliers
    assert (found.figure, found.oddity) == ("prefill", Oddity.COMPILED)


def test_calls_that_are_missing_are_counted() -> None:
    trace = sweep_trace(grid((10,), (5,), (1, 2, 4)), steps, flat)
    cut = replace(trace, calls=trace.calls.slice(0, trace.calls.num_rows - 2))
    sweep = sweep_of(cut)
    assert sweep.missing[0] == "2 calls of the plan are missing: --resume goes on with them."
    gone = replace(trace, calls=trace.calls.slice(0, 3 + 2))
    assert sweep_of(gone).missing[0].startswith("13 calls of the plan are missing")


def test_without_a_cost_there_are_knees_and_no_roofs() -> None:
    trace = sweep_trace(
        grid((10,), (5,), BATCHES), steps, flat, meta=meta(models=(model(cost=None),))
    )
    sweep = sweep_of(trace)
    assert sweep.decode[0].roofs is None
    assert sweep.decode[0].knee is not None
    assert sweep.decode[0].knee.at == pytest.approx(8.0)
    assert sweep.conclusion[0].startswith("Batching stops paying at about batch 8.0")


def test_the_conclusion_says_why() -> None:
    sweep = sweep_of(sweep_trace(grid((95,), (9,), BATCHES), steps, flat))
    assert sweep.conclusion[0] == (
        "Batching stops paying at about batch 8.0 (90 %: 8.0 to 8.0), with half of the 2,000 tokens/s that more of "
        "them tend to: up to there they share the 4 ms that any step takes (2 ms to read the weights at the roof), "
        "beyond it each adds its own 500 µs (only 101 µs to compute at the roof); the roofs cross at batch 24."
    )
    assert len(sweep.conclusion) == 2


def test_kv_that_keeps_it_at_the_memory_roof_is_said() -> None:
    sweep = sweep_of(sweep_trace(grid((2_000,), (3,), BATCHES), steps, flat))
    assert "KV reads keep it bandwidth-bound at any batch" in sweep.conclusion[0]
    assert "weigh as much as the weights at batch 6.1" in sweep.conclusion[0]


def test_the_json_has_the_sweep() -> None:
    report = build_report(sweep_trace(grid((10,), (5,), BATCHES), steps, flat))
    plain = json.loads(json.dumps(to_json(report)))["sweep"]
    assert plain["decode"][0]["knee"]["at"] == pytest.approx(8.0)
    assert [cell["batch"] for cell in plain["cells"]] == list(BATCHES)
    assert plain["conclusion"] == list(report.sweep.conclusion if report.sweep else ())
    assert to_json(build_report(META_TRACE))["sweep"] is None


META_TRACE = sweep_trace(grid((10,), (5,), (1,)), steps, flat, meta=META)


def test_a_line_that_misses_the_cells_is_not_used() -> None:
    sizes = (1, 2, 4, 8, 16)
    # 10, 14, 14, 14 and 30 ms: no line comes within 15 %.
    knee = knee_of(sizes, [[value] * 5 for value in (10.0, 14.0, 14.0, 14.0, 30.0)])
    assert knee is not None
    assert not knee.by_line
    assert knee.at is not None
    # Scores 20, 21, 17.5, 15.75, 31.9: it passes 20 between 8 and 16.
    assert 8 < knee.at < 16


def test_a_step_of_one_sequence_with_kernels_of_its_own_is_no_part_of_the_line() -> None:
    """As on a CPU: 65 ms for one, and 85 ms and 3 ms for each from two on."""

    def gemv(cell: Cell, repeat: int, number: int) -> float:
        return 65.0 if cell[2] == 1 else 85.0 + 3.0 * cell[2]

    sweep = sweep_of(sweep_trace(grid((10,), (5,), (1, 2, 4, 8, 16, 32)), gemv, flat))
    knee = sweep.decode[0].knee
    assert knee is not None
    assert (knee.by_line, knee.begin, knee.place) == (True, 2, Place.INSIDE)
    assert knee.at == pytest.approx(85 / 3)
    assert knee.fixed_ms == pytest.approx(85.0)
    assert knee.aside == pytest.approx(65 / 88 - 1)


def test_sizes_that_are_run_twice_are_one() -> None:
    knee = knee_of((1, 2, 2, 4), [[5.0, 5.0], [6.0], [6.0], [8.0, 8.0]])
    assert knee is not None
    assert knee.at == pytest.approx(4.0)
    assert knee.low == pytest.approx(4.0)
    assert knee_of((1, 2, 2), [[5.0], [6.0], [6.0]]) is None


def test_roofs_are_those_that_the_report_uses() -> None:
    trace = sweep_trace(grid((95,), (9,), BATCHES), steps, flat)
    fast = build_report(trace, ceilings=roofs(bytes_per_s=200e9)).sweep
    assert fast is not None and fast.decode[0].roofs is not None
    assert fast.decode[0].roofs.weights_ms == pytest.approx(1.0)
