"""predict's text, compared exactly: for one GPU and several, narrow and wide, with the operations, and in ASCII."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from test_step_model import LINK, machine, model

from phaseprof.analyzers.steps.prediction import Load, PredictionReport, predict
from phaseprof.analyzers.steps.restructured import fused, tensor_parallel
from phaseprof.analyzers.steps.step_model import EAGER, GRAPHS
from phaseprof.cli.render.prediction import boards, render
from phaseprof.trace.meta import Ceilings

Golden = Callable[[str, str], None]

#: 20 TFLOP/s, 400 GB/s, 8 GB.
ROOFS = Ceilings("key", "bfloat16", 2e13, 4e11, "datasheet", None, None, "a board of round numbers")
COST = model(layers=24, heads=16, kv_heads=4, dim=128, inner=6144)
MEMORY = 8 * 10**9


def _loads(*batches: int) -> list[Load]:
    return [Load(batch, 1024, 129, 8192) for batch in batches]


@pytest.fixture
def one() -> PredictionReport:
    on = machine(GRAPHS, roofs=ROOFS)
    cost = fused(COST)
    return PredictionReport(
        model="small-llama",
        class_name="LlamaForCausalLM",
        parameters=COST.parameters,
        weights="bfloat16",
        kv="bfloat16",
        device="Board",
        machine=on,
        predictions=tuple(predict(cost, load, on, MEMORY) for load in _loads(1, 16, 256)),
        notes=("A request needs 1,152 positions; the model was made for 1,024.",),
    )


@pytest.fixture
def four() -> PredictionReport:
    link = replace(LINK, name="Line", bytes_per_s=2e10)
    on = machine(EAGER, ranks=4, link=link, roofs=ROOFS)
    cost = tensor_parallel(COST, 4)
    return PredictionReport(
        model="small-llama",
        class_name="LlamaForCausalLM",
        parameters=COST.parameters,
        weights="bfloat16",
        kv="fp8",
        device="Board",
        machine=on,
        predictions=(predict(cost, Load(1, 1024, 129), on, MEMORY),),
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_one_gpu(width: int, one: PredictionReport, golden: Golden) -> None:
    text = render(one, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    golden(f"prediction-{width}.txt", text)


@pytest.mark.parametrize("width", [80, 120])
def test_four_gpus_explained(width: int, four: PredictionReport, golden: Golden) -> None:
    golden(f"prediction-ranks-{width}.txt", render(four, width=width, explain=True))


def test_ascii(four: PredictionReport, golden: Golden) -> None:
    text = render(four, width=100, explain=True, unicode=False)
    assert text.isascii()
    golden("prediction-ascii.txt", text)


def test_one_new_token_has_no_decode(one: PredictionReport) -> None:
    only = predict(fused(COST), Load(1, 1024, 1), one.machine, None)
    text = render(replace(one, predictions=(only,), notes=()), width=80, explain=True)
    assert "decode" not in text
    lines = [line.split() for line in text.splitlines()]
    assert any(line[:1] == ["1"] and "\N{EN DASH}" in line for line in lines)


def test_a_list_of_boards() -> None:
    assert boards([("a", "Board A"), ("bcd", "Board B")]).splitlines() == [
        "a      Board A",
        "bcd    Board B",
        "this   the device of this machine, as calibrated",
    ]
