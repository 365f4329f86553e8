"""WorkloadPlan: which requests it accepts, and how a plan is checked against a model's positions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phaseprof.errors import UsageError
from phaseprof.workload.generate import check_fits
from phaseprof.workload.plan import Cell, WorkloadPlan, parse_sizes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_tokens": (0,)}, "Prompt tokens: 0 is less than 1."),
        ({"prompt_tokens": (8, -3)}, "Prompt tokens: -3 is less than 1."),
        ({"new_tokens": (0,)}, "New tokens: 0 is less than 1."),
        ({"warmup": -1}, "Warm-up calls: -1 is less than 0."),
        ({"repeats": 0}, "Repeats: 0 is less than 1."),
        ({"seed": -1}, "Seed: -1 is less than 0."),
        ({"batches": ()}, "No batch size is given."),
        ({"prompt_tokens": (8, 8)}, "A number of prompt tokens is named twice."),
        ({"new_tokens": ()}, "No number of new tokens is given."),
        ({"batches": (4, 0)}, "Batch size: 0 is less than 1."),
        ({"batches": (4, 4)}, "A batch size is named twice."),
        ({"cache_implementation": "statik"}, "Unknown cache implementation 'statik'."),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        WorkloadPlan(**options)
    assert caught.value.message == said


def test_the_cells_are_every_combination() -> None:
    plan = WorkloadPlan(prompt_tokens=(8, 4), new_tokens=(2,), batches=(1, 3))
    assert plan.cells == (Cell(8, 2, 1), Cell(8, 2, 3), Cell(4, 2, 1), Cell(4, 2, 3))
    assert plan.longest_tokens == 10
    assert plan.facts()["prompt_tokens"] == [8, 4]
    assert plan.facts()["new_tokens"] == 2
    assert plan.named(Cell(8, 2, 3)) == "batch 3, 8 prompt + 2 new tokens"
    assert WorkloadPlan(batches=(1, 3)).named(Cell(512, 64, 3)) == "batch 3"
    assert plan.sizes() == "8/4 prompt + 2 new tokens"


def test_sizes_are_read() -> None:
    assert parse_sizes("1, 4,16", "--batch") == (1, 4, 16)
    with pytest.raises(UsageError) as caught:
        parse_sizes("128,x", "--prompt-tokens")
    assert caught.value.message == "--prompt-tokens '128,x': 'x' is not a whole number."


def test_no_warmup_is_allowed() -> None:
    assert WorkloadPlan(warmup=0).warmup == 0


def test_facts_survive_json() -> None:
    plan = WorkloadPlan(
        prompt_tokens=(7,), new_tokens=(2,), batches=(1, 4), cache_implementation="static"
    )
    facts = json.loads(json.dumps(plan.facts()))
    assert facts == {
        "prompt_tokens": 7,
        "new_tokens": 2,
        "batch": [1, 4],
        "warmup": 1,
        "repeats": 8,
        "seed": 0,
        "cache_implementation": "static",
    }


def model_with(positions: object) -> Any:
    """Only what the check reads of a model: its config."""
    return cast(Any, SimpleNamespace(config=SimpleNamespace(max_position_embeddings=positions)))


@pytest.mark.parametrize(
    ("positions", "prompt", "new", "fits"),
    [
        (16, 16, 1, True),  # the only new token is sampled, never computed
        (16, 16, 2, False),
        (16, 10, 7, True),
        (16, 10, 8, False),
        (16, 17, 1, False),
        (-1, 10_000, 64, True),  # no limit
        (0, 10_000, 64, True),
        (None, 10_000, 64, True),
    ],
)
def test_the_last_token_needs_no_position(
    positions: object, prompt: int, new: int, fits: bool
) -> None:
    plan = WorkloadPlan(prompt_tokens=(prompt,), new_tokens=(new,))
    if fits:
        check_fits(model_with(positions), plan)
        return
    with pytest.raises(UsageError) as caught:
        check_fits(model_with(positions), plan)
    assert f"the model has {positions}" in caught.value.message


def test_the_remedy_names_the_longest_prompt_that_fits() -> None:
    with pytest.raises(UsageError) as caught:
        check_fits(model_with(16), WorkloadPlan(prompt_tokens=(14,), new_tokens=(4,)))
    assert caught.value.remedy == "Use --prompt-tokens 13 or fewer."
    check_fits(model_with(16), WorkloadPlan(prompt_tokens=(13,), new_tokens=(4,)))
    with pytest.raises(UsageError):
        check_fits(model_with(16), WorkloadPlan(prompt_tokens=(14,), new_tokens=(4,)))
