"""How many calls a workload makes: as many as were asked for, or until they have taken long enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvml_standin import standin

from phaseprof.cli.profile import _long_enough
from phaseprof.collectors.gpu_counters import samples_gpus
from phaseprof.errors import UsageError
from phaseprof.workload.plan import Cell, WorkloadPlan
from phaseprof.workload.rounds import Rounds

ONE = Cell(9, 3, 1)


class Clock:
    """Goes on by what calls take."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(plan: WorkloadPlan, took: dict[int, float]) -> tuple[list[int], list[int], Rounds]:
    """The batch of each call and what was planned before it, where a call of a batch takes so many seconds."""
    clock = Clock()
    rounds = Rounds(plan.cells, plan.repeats, plan.least_s, clock)
    batches, planned = [], []
    for cell, _ in rounds:
        batches.append(cell.batch)
        planned.append(rounds.planned)
        clock.now += took[cell.batch]
    return batches, planned, rounds


def test_without_a_time_there_are_as_many_as_were_asked_for() -> None:
    batches, planned, rounds = run(WorkloadPlan(batches=(1, 4), repeats=3), {1: 50.0, 4: 80.0})
    assert batches[:4] == [1, 4, 4, 1]
    assert sorted(batches) == [1, 1, 1, 4, 4, 4]
    assert planned == [6] * 6
    assert (rounds.calls, rounds.planned) == (6, 6)


def test_rounds_go_on_until_they_have_taken_long_enough() -> None:
    plan = WorkloadPlan(batches=(1, 4), repeats=2, least_s=10.0)
    batches, planned, rounds = run(plan, {1: 0.5, 4: 1.0})
    # 1.5 s a round: six of them are 9 s, so that there is a seventh, and none is cut.
    assert sorted(batches) == [1] * 7 + [4] * 7
    # Before the first round has ended nothing is known of its time.
    assert planned == [4, 4] + [14] * 12
    assert (rounds.calls, rounds.planned) == (14, 14)


def test_calls_that_take_longer_are_not_more_than_were_asked_for() -> None:
    batches, planned, rounds = run(WorkloadPlan(repeats=3, least_s=10.0), {1: 5.0})
    assert batches == [1] * 3
    assert planned == [3] * 3
    assert rounds.planned == 3


def test_what_will_be_planned_follows_calls_that_get_slower() -> None:
    clock = Clock()
    rounds = Rounds((ONE,), 1, 10.0, clock)
    planned = []
    for _ in rounds:
        clock.now += 1.0 if rounds.calls < 2 else 4.0
        planned.append(rounds.planned)
    assert planned == [1, 10, 10, 5]
    assert (rounds.calls, rounds.planned) == (4, 4)


def test_a_call_that_is_interrupted_is_not_done() -> None:
    rounds = Rounds((ONE,), 5)
    for _ in rounds:
        if rounds.calls == 2:
            break
    assert (rounds.calls, rounds.planned) == (2, 5)


def test_a_steady_drift_reaches_all_cells_alike() -> None:
    plan = WorkloadPlan(prompt_tokens=(8, 16, 32), batches=(1, 2, 4), repeats=8)
    places: dict[Cell, list[int]] = {}
    order = [turn.cell for turn in Rounds(plan.cells, plan.repeats)]
    for place, cell in enumerate(order):
        places.setdefault(cell, []).append(place)
    assert set(places) == set(plan.cells)
    # Of 72 calls the mean place is 35.5.
    assert {sum(found) / len(found) for found in places.values()} == {35.5}
    # No cell always comes behind the same one.
    before = {
        cell: {order[place - 1] for place in found if place} for cell, found in places.items()
    }
    assert all(len(found) >= 3 for found in before.values())


def test_the_order_follows_the_seed() -> None:
    cells = WorkloadPlan(batches=(1, 2, 4, 8, 16)).cells
    first, again, other = (list(Rounds(cells, 6, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_run_goes_on_with_the_calls_that_it_lacks() -> None:
    cells = WorkloadPlan(batches=(1, 2)).cells
    done = {cells[0]: {0, 1, 3}, cells[1]: {0}}
    rounds = Rounds(cells, 4, done=done)
    assert rounds.planned == 4
    made = [(turn.cell.batch, turn.repeat) for turn in rounds]
    assert sorted(made) == [(1, 2), (2, 1), (2, 2), (2, 3)]
    assert rounds.cells == cells
    assert Rounds(cells, 2, done=done).cells == (cells[1],)
    assert Rounds(cells, 1, done=done).cells == ()
    assert list(Rounds(cells, 1, done=done)) == []


def test_seconds_that_an_earlier_run_has_taken_count() -> None:
    clock = Clock()
    rounds = Rounds((ONE,), 2, 10.0, clock, done={ONE: {0, 1, 2}}, spent_s=6.0)
    assert rounds.cells == (ONE,)
    made = []
    for turn in rounds:
        made.append(turn.repeat)
        clock.now += 2.0
    assert made == [3, 4]


def test_the_plan_says_how_much_there_will_be() -> None:
    assert WorkloadPlan(batches=(1, 4)).amount() == "16 calls"
    assert WorkloadPlan(least_s=12.0).amount() == "8 calls or more, for 12 s,"
    assert "least_s" not in WorkloadPlan().facts()
    assert WorkloadPlan(least_s=12.0).facts()["least_s"] == 12.0


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_no_length_of_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError):
        WorkloadPlan(least_s=seconds)


def test_a_run_is_long_where_the_driver_has_a_gpu_that_is_sampled(tmp_path: Path) -> None:
    with standin('clock set\ndevice 0 name="NVIDIA H200" memory_mib=143771\n', tmp_path):
        assert samples_gpus(None)
        assert samples_gpus("gpm")
        assert samples_gpus("nvml,kernels")
        assert not samples_gpus("none")
        assert not samples_gpus("host")
        assert _long_enough(WorkloadPlan(batches=(1, 4)), None) == WorkloadPlan(
            batches=(1, 4), least_s=24.0
        )
        assert _long_enough(WorkloadPlan(), "none") == WorkloadPlan()


def test_a_run_is_as_it_was_where_the_driver_has_no_gpu(tmp_path: Path) -> None:
    with standin("clock set\n", tmp_path):
        assert not samples_gpus(None)
        assert _long_enough(WorkloadPlan(), None) == WorkloadPlan()
