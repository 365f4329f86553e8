"""Weights that are not there between passes (accelerate's offloading, the meta device, fake tensors): counted by
their shape, each once, as the same model in memory is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.work.walk import model_cost

#: The fixture that runs a function under a session.
Record = Callable[[Callable[[], Any]], Any]

# Some versions of transformers compare the device of the ids with that of weights that are not there.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

PROMPT = torch.arange(3, 10).unsqueeze(0)


def llama(*, tied: bool = False, implementation: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        pad_token_id=0,
        tie_word_embeddings=tied,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).eval()


def on_cpu(model: LlamaForCausalLM, _: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: LlamaForCausalLM, path: Path) -> Any:
    return accelerate.disk_offload(model, str(path), execution_device=torch.device("cpu"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_offloaded_weights_count_by_shape_and_are_brought_for_each_pass(
    offload: Callable[[LlamaForCausalLM, Path], Any], tied: bool, tmp_path: Path, record: Record
) -> None:
    plain = model_cost(llama(tied=tied))
    stored = sum(
        size for size in {p.data_ptr(): p.nbytes for p in llama(tied=tied).parameters()}.values()
    )
    expected = llama(tied=tied).generate(PROMPT, max_new_tokens=3, do_sample=False)
    model = offload(llama(tied=tied), tmp_path / "offloaded")
    assert all(p.is_meta for p in model.parameters())
    cost = model_cost(model)
    assert cost.offloaded_bytes == cost.parameter_bytes == stored
    assert replace(cost, offloaded_bytes=0) == plain
    recorded = record(lambda: model.generate(PROMPT, max_new_tokens=3, do_sample=False))
    assert torch.equal(recorded.output, expected)
    rows = recorded.passes("phase", "weight_bytes")
    step = plain.body_weight_bytes + plain.head_weight_bytes
    lookups = plain.lookup_bytes_per_token - plain.tied_lookup_bytes_per_token
    assert rows == [
        ("prefill", step + 7 * lookups),
        ("decode", step + lookups),
        ("decode", step + lookups),
    ]
    assert all(p.is_meta for p in model.parameters())
    assert [
        "brought for each of them" in note.why for note in recorded.trace.metas[0].not_measured
    ] == [True]


def test_only_what_lies_elsewhere_is_offloaded(tmp_path: Path) -> None:
    model = llama()
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layer = sum(p.nbytes for p in model.model.layers[1].parameters())
    placed = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(tmp_path / "disk"), force_hooks=True
    )
    cost = model_cost(placed)
    assert cost.not_covered == ()
    assert cost.offloaded_bytes == layer
    assert replace(cost, offloaded_bytes=0) == model_cost(llama())


@pytest.mark.parametrize("tied", [False, True])
def test_the_meta_device_and_fake_tensors_count_by_shape(tied: bool) -> None:
    plain = model_cost(llama(tied=tied))
    with torch.device("meta"):
        assert model_cost(llama(tied=tied)) == plain
    with FakeTensorMode():
        fake = llama(tied=tied)
        assert model_cost(fake) == plain
    assert plain.offloaded_bytes == 0


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    """A group of one process, and a mesh over it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_distributed_weights_of_one_rank_are_the_whole_model(one_process: Any) -> None:
    model = llama()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            shards = distribute_tensor(module.weight.data, one_process, [Shard(0)])
            module.weight = torch.nn.Parameter(shards, requires_grad=False)
    assert isinstance(model.lm_head.weight.data, DTensor)
    assert model_cost(model) == model_cost(llama())
