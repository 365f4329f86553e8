"""FLOPs and bytes of the steps of real engines: against torch's counter, and what vLLM says of its own cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vllm_engines import Recorded, generate, make_engine, prompts, sampling

Record = Callable[[Callable[[], Any]], Recorded]

WINDOW = 16


@pytest.fixture(scope="module")
def visible_matrices() -> Iterator[None]:
    """Engines that are made now multiply with torch's own linear, which its counter sees, and not with oneDNN's."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


@pytest.fixture(scope="module")
def sliding_engine(visible_matrices: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two layers with a window of 16 tokens and one without, and a tied head."""
    from transformers import Gemma3TextConfig

    folder = tmp_path_factory.mktemp("gemma3")
    Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=250,
        max_position_embeddings=512,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(folder)
    return make_engine(folder, max_num_batched_tokens=48, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def latent_engine(visible_matrices: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Latent attention, and no experts: those of the CPU are not seen by the counter."""
    from transformers import DeepseekV3Config

    folder = tmp_path_factory.mktemp("deepseek")
    DeepseekV3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=512,
        architectures=["DeepseekV3ForCausalLM"],
    ).save_pretrained(folder)
    return make_engine(folder, block_size=16)


RANK, ROOM = 4, 8


@pytest.fixture(scope="module")
def adapted_engine(
    visible_matrices: None, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """An engine with room for two adapters of rank 8, and an adapter of rank 4 for all linear layers."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapter")
    shapes = {
        "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (128, 64),
        "self_attn.v_proj": (128, 64),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (128, 256),
        "mlp.up_proj": (128, 256),
        "mlp.down_proj": (256, 128),
    }
    tensors = {}
    for layer in range(2):
        for name, (inputs, outputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.ones(RANK, inputs) / inputs
            tensors[f"{path}.lora_B.weight"] = torch.ones(outputs, RANK) / RANK
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    engine = make_engine(llama_folder, enable_lora=True, max_loras=2, max_lora_rank=ROOM)
    return engine, LoRARequest("adapter", 7, str(folder))


def runner_of(engine: Any) -> Any:
    """The model runner of an engine in this process."""
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    return runner


def cache_tensors(engine: Any) -> list[torch.Tensor]:
    """All memory of its cache, once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in runner_of(engine).kv_caches
    }
    return [torch.tensor([], dtype=torch.float32).set_(storage) for storage in storages.values()]


def pairs(past: int, query: int, window: int = 1 << 30) -> int:
    """Query by query, each key that it attends to."""
    return sum(min(position + 1, window) for position in range(past, past + query))


def counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the FLOPs that torch's counter sees in it."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops()


def test_flops_are_those_of_torchs_counter(sliding_engine: Any, record: Record) -> None:
    """Two prompts in chunks of at most 48 tokens, then 4 tokens more of each. The kernel of attention is not one of
    torch's: its part is 4 Hq d for each pair of each layer."""
    flops: list[int] = []

    def run() -> Any:
        result, seen = counted(
            lambda: generate(sliding_engine, prompts(40, 30, first=7), sampling(5))
        )
        flops.append(seen)
        return result

    recorded = record(run)
    rows = [(part.past, part.query) for parts in recorded.parts() for part in parts if part.query]
    # Positions 0 to 43 and 0 to 33 were computed, however they were cut into steps.
    assert sum(query for _, query in rows) == 44 + 34
    attention = 4 * 4 * 32 * sum(2 * pairs(0, n, WINDOW) + pairs(0, n) for n in (44, 34))
    assert recorded.sum("flops") == flops[0] + attention
    assert len(recorded.passes("phase")) > 5


def test_logits_of_prompts_are_computed_where_they_were_asked_for(
    sliding_engine: Any, record: Record
) -> None:
    """One row for each request and step, and one for each token of the prompt that another one follows."""
    flops: list[int] = []

    def run() -> Any:
        result, seen = counted(
            lambda: generate(sliding_engine, prompts(60, first=91), sampling(3, prompt_logprobs=1))
        )
        flops.append(seen)
        return result

    recorded = record(run)
    assert recorded.passes("logits_tokens") == [(48 + 1,), (11 + 1,), (1,), (1,)]
    attention = 4 * 4 * 32 * (2 * pairs(0, 62, WINDOW) + pairs(0, 62))
    assert recorded.sum("flops") == flops[0] + attention


def test_latent_attention_by_torchs_counter(
    latent_engine: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt has its keys and values expanded, and attends in a whole rectangle on a CPU; its tokens attend to
    latents in a kernel that is none of torch's. The counter is told of what runs inside vLLM's operation."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    flops: list[int] = []
    inside: list[int] = []
    original = MLAAttention.forward_impl

    def forward_impl(*args: Any, **kwargs: Any) -> Any:
        result, seen = counted(lambda: original(*args, **kwargs))
        inside.append(seen)
        return result

    monkeypatch.setattr(MLAAttention, "forward_impl", forward_impl)

    def run() -> Any:
        result, seen = counted(lambda: generate(latent_engine, prompts(24, first=5), sampling(4)))
        flops.append(seen)
        return result

    recorded = record(run)
    assert [phase for (phase,) in recorded.passes("phase")] == ["prefill"] + ["decode"] * 3
    per_prefill_pair, per_decode_pair = 2 * 4 * (32 + 64 + 32), 2 * 4 * (512 + 64 + 512)
    masked = 2 * per_prefill_pair * (24 * 24 - pairs(0, 24))
    kernels = 2 * per_decode_pair * pairs(24, 3)
    assert recorded.sum("flops") == flops[0] + sum(inside) + kernels - masked
    # One latent and one rotary key for all heads.
    assert recorded.passes("kv_write_bytes") == [(2 * 576 * 4 * n,) for n in (24, 1, 1, 1)]
    assert recorded.passes("kv_read_bytes") == [(2 * 576 * 4 * n,) for n in (24, 25, 26, 27)]


def test_adapters_of_requests_by_torchs_counter(
    adapted_engine: tuple[Any, Any], record: Record
) -> None:
    """Matrices of an adapter are padded to the rank that there is room for, and multiplied like that."""
    engine, adapter = adapted_engine
    flops: list[int] = []

    def run() -> Any:
        result, seen = counted(
            lambda: engine.generate(
                prompts(20, first=33), sampling(3), lora_request=adapter, use_tqdm=False
            )
        )
        flops.append(seen)
        return result

    with_adapter = record(run)
    attention = 2 * 4 * 4 * 32 * pairs(0, 22)
    assert with_adapter.sum("flops") == flops[0] + attention
    without = record(lambda: generate(engine, prompts(20, first=34), sampling(3)))
    # Fused layers have an adapter for each of their parts; of the table of tokens, one side is looked up.
    widths = 2 * (128 + 128 + 2 * (128 + 64) + (128 + 128) + 3 * (128 + 256))
    head = 128 + 256
    assert with_adapter.sum("flops") - without.sum("flops") == 2 * ROOM * (
        22 * (widths + 128) + 3 * head
    )
    assert with_adapter.sum("weight_bytes") - without.sum("weight_bytes") == 4 * ROOM * (
        3 * (widths + 128 + head) + 22
    )


def test_what_a_prompt_writes_is_in_the_cache(engine: Any, record: Record) -> None:
    """No element of a key or value is exactly zero."""
    caches = cache_tensors(engine)
    engine.reset_prefix_cache()
    for cache in caches:
        cache.zero_()
    recorded = record(lambda: generate(engine, prompts(21, first=57), sampling(1)))
    written = sum(int(cache.count_nonzero()) * cache.element_size() for cache in caches)
    assert recorded.passes("kv_write_bytes", "kv_read_bytes", "kv_held_bytes") == [
        (written, written, written)
    ]


def test_a_sliding_layer_writes_all_and_reads_its_window(
    sliding_engine: Any, record: Record
) -> None:
    caches = cache_tensors(sliding_engine)
    for cache in caches:
        cache.zero_()
    recorded = record(lambda: generate(sliding_engine, prompts(40, first=3), sampling(1)))
    written = sum(int(cache.count_nonzero()) * cache.element_size() for cache in caches)
    assert recorded.passes("kv_write_bytes") == [(written,)]
    token = 2 * 2 * 32 * 4
    assert written == 3 * 40 * token
    recorded = record(lambda: generate(sliding_engine, prompts(40, first=4), sampling(3)))
    assert recorded.passes("kv_read_bytes", "kv_held_bytes") == [
        (3 * 40 * token, 3 * 40 * token),
        ((2 * WINDOW + 41) * token, (2 * WINDOW + 41) * token),
        ((2 * WINDOW + 42) * token, (2 * WINDOW + 42) * token),
    ]


@pytest.mark.parametrize("name", ["engine", "sliding_engine", "latent_engine"])
def test_the_pool_is_what_the_engine_allocated(
    name: str, record: Record, request: pytest.FixtureRequest
) -> None:
    """By its own count of blocks and their size, which is within a block of the memory that it was given."""
    engine = request.getfixturevalue(name)
    recorded = record(lambda: generate(engine, prompts(5, first=77), sampling(1)))
    ((allocated,),) = recorded.passes("kv_allocated_bytes")
    config = runner_of(engine).kv_cache_config
    assert allocated == config.kv_cache_tensors[0].size
    pages = max(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        for group in config.kv_cache_groups
    )
    assert allocated == config.num_blocks * pages
    assert 0 <= (1 << 22) - allocated < pages


def test_what_is_stored_about_the_model(engine: Any, record: Record) -> None:
    recorded = record(lambda: generate(engine, prompts(5, first=66), sampling(1)))
    (meta,) = recorded.trace.metas
    (model,) = meta.models
    assert (model.engine, model.attn_implementation, model.quantization) == (
        "vllm",
        "CPU_ATTN",
        None,
    )
    assert model.cost is not None and model.cost.covered
    assert model.cost.attention[0].kv_bytes_per_token == 2 * 2 * 32 * 4
    config = runner_of(engine).kv_cache_config
    spec = config.kv_cache_groups[0].kv_cache_spec
    assert model.cost.attention[0].kv_bytes_per_token == spec.page_size_bytes // spec.block_size
    assert recorded.passes("weight_bytes") == [
        (
            model.cost.body_weight_bytes
            + model.cost.head_weight_bytes
            + 5 * model.cost.lookup_bytes_per_token,
        )
    ]
    assert not {what for what in recorded.notes() if "bytes" in what}
