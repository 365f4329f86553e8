"""Choices of routers joined to passes: which belong to one, and how many experts they name."""

from __future__ import annotations

import pytest
import torch

from phaseprof.routing import ExpertsChosen, Routing, distinct_experts


def choice(
    index: list[list[int]], *, layer: int = 0, at_ns: int = 10, thread_id: int = 1, version: int = 0
) -> ExpertsChosen:
    return ExpertsChosen(thread_id, at_ns, layer, 8, torch.tensor(index), version)


def test_distinct_experts_are_counted_once() -> None:
    assert distinct_experts(choice([[0, 1], [1, 2], [7, 0]])) == 4
    assert distinct_experts(choice([[5, 5]])) == 1
    # More choices than are counted one by one, to the experts 0 to 6.
    assert distinct_experts(choice([[t % 7, (t + 1) % 7] for t in range(500)])) == 7


@pytest.mark.parametrize("tokens", [1, 300])
def test_experts_of_other_ranks_are_not_read_here(tokens: int) -> None:
    """Expert parallelism gives them ids outside of those that are held."""
    assert distinct_experts(choice([[3, 8], [-1, 9]] * tokens)) == 1


def test_a_choice_that_was_written_to_since_is_not_known() -> None:
    event = choice([[0, 1]])
    event.index.add_(1)
    assert distinct_experts(event) is None
    with torch.inference_mode():
        untold = choice([[0, 1]], version=-1)
    assert distinct_experts(untold) == 2


def test_the_layers_of_a_pass_add_up_and_are_taken_once() -> None:
    routing = Routing()
    routing.chose(choice([[0, 1], [2, 3]], layer=1))
    routing.chose(choice([[4, 5], [4, 5]], layer=2))
    assert routing.take(1, 5, layers=2) == 4 + 2
    assert routing.take(1, 5, layers=2) is None


def test_threads_do_not_mix() -> None:
    routing = Routing()
    routing.chose(choice([[0, 1]], thread_id=1))
    routing.chose(choice([[0, 1], [2, 3]], thread_id=2))
    assert routing.take(2, 5, layers=1) == 4
    assert routing.take(1, 5, layers=1) == 2


def test_what_an_unseen_pass_left_is_not_taken_for_the_next() -> None:
    routing = Routing()
    routing.chose(choice([[0, 1], [2, 3]], at_ns=3))
    routing.chose(choice([[6, 7]], at_ns=10))
    assert routing.take(1, 5, layers=1) == 2


@pytest.mark.parametrize("layers", [[1], [1, 1], [1, 2, 2]])
def test_a_layer_that_is_missing_or_ran_twice_leaves_the_pass_unknown(layers: list[int]) -> None:
    routing = Routing()
    for layer in layers:
        routing.chose(choice([[0, 1]], layer=layer))
    assert routing.take(1, 5, layers=2) is None


def test_choices_that_no_pass_takes_do_not_pile_up() -> None:
    routing = Routing()
    event = choice([[0, 1]])
    for _ in range(10_000):
        routing.chose(event)
    assert len(routing._waiting[1]) <= 4096
