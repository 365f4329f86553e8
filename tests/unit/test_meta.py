"""The meta file: to JSON and back, and what newer or damaged ones hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phaseprof.errors import NotMeasured
from phaseprof.trace.meta import (
    Ceilings,
    ClockPair,
    Device,
    Host,
    ModelMeta,
    ProcessMeta,
    SelfCost,
)
from phaseprof.work.cost import AttentionCost, ModelCost

COST = ModelCost(
    linear_flops_per_token=211_000_000,
    head_flops_per_token=56_000_000,
    attention=(
        AttentionCost(15, 9, 3, 64, 64, None, 768, (0, 2, 4)),
        AttentionCost(15, 9, 3, 64, 64, 512, 768),
    ),
    body_weight_bytes=424_000_000,
    head_weight_bytes=113_000_000,
    lookup_bytes_per_token=2304,
    parameter_bytes=538_000_000,
    parameters=134_515_008,
    dtype="float32",
    not_covered=("a layer of the class Mamba",),
    tied_lookup_bytes_per_token=2304,
)

FULL = ProcessMeta(
    schema=1,
    phaseprof="0.1.0",
    rank=3,
    pid=4242,
    command=("python", "serve.py", "--name", "é \udcff"),
    versions={"python": "3.11.7", "torch": "2.13.0"},
    started_ns=1_700_000_000_000_000_001,
    ended_ns=1_700_000_009_000_000_001,
    complete=True,
    clock=(ClockPair(1_700_000_000_000_000_001, 77), ClockPair(1_700_000_009_000_000_001, 99)),
    devices=(
        Device("A CPU", "cpu", 0, 2, 2, 8 * 10**9, "cpu:a"),
        Device("A GPU", "cuda", 1, 132, None, None, "cuda:b"),
    ),
    models=(
        ModelMeta(
            "m0",
            "org/model",
            "LlamaForCausalLM",
            "transformers",
            "cpu:a",
            COST,
            "sdpa",
            None,
            (2, 3),
        ),
        ModelMeta("m1", "X", "X", "transformers", "cuda:b", None, None, "DynamicCache"),
    ),
    ceilings=(
        Ceilings("cpu:a", "float32", 2.64e11, 1.91e10, "measured", 5, 0.04, "phaseprof calibrate"),
        Ceilings("cuda:b", "bfloat16", 9.89e14, 4.8e12, "datasheet", None, None, "the datasheet"),
    ),
    hooks=("GenerationMixin.generate",),
    not_measured=(NotMeasured("counters", "no GPU", ""), NotMeasured("x", "y", "z")),
    self_cost=SelfCost(
        passes=504, hook_ns=3_024_000, writer_cpu_ns=80_000_000, sampler_cpu_ns=9_000_000
    ),
    workload={"prompt_tokens": 512, "batches": [1, 4], "seed": None},
    world_size=4,
    local_rank=1,
    rank_source="RANK",
    restart=0,
    host=Host("node-1", "802214", "8f5cc7"),
)
BARE = ProcessMeta(schema=1, phaseprof="0", rank=0, pid=1, command=(), versions={}, started_ns=0)


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    """As it is after a file."""
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read


@pytest.mark.parametrize("meta", [FULL, BARE], ids=["full", "bare"])
def test_it_comes_back(meta: ProcessMeta) -> None:
    assert ProcessMeta.from_json(through_json(meta.to_json())) == meta


def test_a_few_entries_by_name() -> None:
    """What other tools look up."""
    data = through_json(FULL.to_json())
    assert data["schema"] == 1
    assert data["clock"][0] == {"unix_ns": 1_700_000_000_000_000_001, "monotonic_ns": 77}
    assert data["models"][0]["cost"]["attention"][0]["layer_indices"] == [0, 2, 4]
    assert data["not_measured"][0] == {"what": "counters", "why": "no GPU", "fix": ""}
    assert data["self_cost"]["passes"] == 504


def test_what_an_older_version_did_not_write_is_unknown() -> None:
    data = through_json(FULL.to_json())
    required = {"schema", "phaseprof", "rank", "pid", "command", "versions", "started_ns"}
    bare = ProcessMeta.from_json({name: data[name] for name in required})
    assert (bare.complete, bare.ended_ns, bare.self_cost, bare.workload) == (
        False,
        None,
        None,
        None,
    )
    assert (bare.models, bare.devices, bare.not_measured) == ((), (), ())


def test_a_model_without_later_fields_of_its_cost() -> None:
    data = through_json(FULL.to_json())
    cost = data["models"][0]["cost"]
    del cost["tied_lookup_bytes_per_token"], cost["attention"][0]["layer_indices"]
    read = ProcessMeta.from_json(data).models[0].cost
    assert read is not None
    assert read.tied_lookup_bytes_per_token == 0
    assert read.attention[0].layer_indices == ()


def test_unknown_keys_are_ignored_at_every_depth() -> None:
    def add(data: Any) -> Any:
        if isinstance(data, list):
            return [add(item) for item in data]
        if isinstance(data, dict):
            return {name: add(value) for name, value in data.items()} | {"of_a_newer_version": 1}
        return data

    data = through_json(FULL.to_json())
    # Free-form entries keep what is in them.
    free = {name: data.pop(name) for name in ("versions", "workload")}
    assert ProcessMeta.from_json({**add(data), **free}) == FULL


@pytest.mark.parametrize("name", ["schema", "command", "versions", "started_ns", "pid"])
def test_what_must_be_there(name: str) -> None:
    data = through_json(FULL.to_json())
    del data[name]
    with pytest.raises((KeyError, TypeError), match=name):
        ProcessMeta.from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clock", [{"unix_ns": 1}]),
        ("clock", 5),
        ("devices", ["cpu"]),
        ("models", [{"model_id": "m0"}]),
        ("models", [None]),
        ("self_cost", {"passes": 1}),
        ("command", None),
    ],
)
def test_another_form_is_refused(name: str, value: Any) -> None:
    data = {**through_json(FULL.to_json()), name: value}
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        ProcessMeta.from_json(data)
