"""What vLLM's own modules cost: the same as those of transformers, padded, split over ranks, and packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_models import load_model

from phaseprof.session import Session
from phaseprof.vllm.model import Rank, attention_backends, decoder_of, vllm_cost
from phaseprof.vllm.storage import WeightsAsLoaded
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.walk import model_cost

Load = Callable[..., Any]

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 512,
}


def make(kind: str, architecture: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**settings)
    config.architectures = [architecture]
    return config


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make("Llama", "LlamaForCausalLM", **SMALL),
    "tied": lambda: make("Llama", "LlamaForCausalLM", **SMALL, tie_word_embeddings=True),
    "qwen3": lambda: make("Qwen3", "Qwen3ForCausalLM", **SMALL),
    "gemma3": lambda: make(
        "Gemma3Text",
        "Gemma3ForCausalLM",
        **{**SMALL, "num_hidden_layers": 6},
        sliding_window=16,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "mixtral": lambda: make(
        "Mixtral", "MixtralForCausalLM", **SMALL, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: make(
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        **SMALL,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        mlp_only_layers=[0],
    ),
    "gemma3n": lambda: make(
        "Gemma3nText",
        "Gemma3nForCausalLM",
        **{**SMALL, "num_hidden_layers": 4},
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "gpt-oss": lambda: make(
        "GptOss",
        "GptOssForCausalLM",
        **SMALL,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "opt": lambda: make(
        "OPT",
        "OPTForCausalLM",
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
    ),
    "deepseek": lambda: make("DeepseekV3", "DeepseekV3ForCausalLM", **LATENT),
    "mamba": lambda: make(
        "Mamba",
        "MambaForCausalLM",
        hidden_size=128,
        num_hidden_layers=2,
        state_size=16,
        vocab_size=256,
    ),
    "mamba2": lambda: make(
        "Mamba2",
        "Mamba2ForCausalLM",
        hidden_size=128,
        num_hidden_layers=2,
        state_size=16,
        num_heads=8,
        head_dim=32,
        n_groups=1,
        vocab_size=256,
    ),
    "qwen3-next": lambda: make(
        "Qwen3Next",
        "Qwen3NextForCausalLM",
        **{**SMALL, "num_hidden_layers": 4},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a model of vLLM."""
    numbers = iter(range(1000))

    def one(config: Any, **how: Any) -> Any:
        folder = tmp_path / f"model-{next(numbers)}"
        folder.mkdir()
        return load_model(folder, config, **how)

    return one


def reference(config: Any) -> ModelCost:
    """The cost of the same config as a model of transformers, which is held against torch's counter elsewhere."""
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return model_cost(model)


def differences(cost: ModelCost, other: ModelCost) -> dict[str, tuple[Any, Any]]:
    """Fields that differ; of the matrices, which vLLM merges, the sums for each role."""
    return {
        name: (ours, theirs)
        for name in (*(f.name for f in fields(ModelCost) if f.name != "matmuls"), "roles")
        if (ours := _figure(cost, name)) != (theirs := _figure(other, name))
    }


def _figure(cost: ModelCost, name: str) -> Any:
    return roles(cost) if name == "roles" else getattr(cost, name)


def roles(cost: ModelCost) -> dict[str, tuple[int, int]]:
    """Elements and bytes of the matrices, by role."""
    found: dict[str, tuple[int, int]] = {}
    for matrix in cost.matmuls:
        elements, size = found.get(matrix.role, (0, 0))
        found[matrix.role] = (
            elements + matrix.count * matrix.inputs * matrix.outputs,
            size + matrix.count * matrix.weight_bytes,
        )
    return found


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "tied",
        "qwen3",
        "gemma3",
        "gemma3n",
        "mixtral",
        "qwen3-moe",
        "gpt-oss",
        "opt",
    ],
)
def test_a_model_costs_what_it_does_in_transformers(load: Load, name: str) -> None:
    config = CONFIGS[name]()
    model = load(config)
    assert differences(vllm_cost(model), reference(config)) == {}
    assert attention_backends(model) == ("CPU_ATTN",)


def test_a_model_that_vllm_takes_from_transformers(load: Load) -> None:
    """Its attention is kept beside its modules. vLLM changes the class of the model for good."""
    config = make("Qwen2", "Qwen2ForCausalLM", **SMALL)
    expected = reference(config)
    model = load(config, model_impl="transformers")
    assert type(model).__name__ == "TransformersForCausalLM"
    assert differences(vllm_cost(model), expected) == {}
    assert attention_backends(model) == ("CPU_ATTN",)


def test_latent_attention_attends_to_latents_when_it_decodes(load: Load) -> None:
    config = CONFIGS["deepseek"]()
    cost, expected = vllm_cost(load(config)), reference(config)
    assert set(differences(cost, expected)) == {"attention"}
    (ours,), (theirs,) = cost.attention, expected.attention
    assert replace(ours, kv_heads=4, absorbed_query_tokens=0, absorbed_flops_per_pair=0) == replace(
        theirs
    )
    # The cache holds one latent of 512 elements and a rotary key of 64, for all heads.
    assert (ours.kv_heads, ours.kv_bytes_per_token) == (1, (512 + 64) * 4)
    heads, layers = 4, 2
    rest = cost.linear_flops_per_token + sum(
        e.layers * e.top_k * e.expert_flops_per_token for e in cost.experts
    )
    decode = count(cost, (Rows(100, 1, 1),), logits_tokens=1, layout=None)
    # Scores over 512 + 64 elements, values over 512, and nothing is expanded.
    assert decode.flops == rest + cost.head_flops_per_token + layers * 101 * 2 * heads * (
        512 + 64 + 512
    )
    chunk = count(cost, (Rows(100, 4, 1),), logits_tokens=0, layout=None)
    expanded = 100 * 2 * 512 * heads * (32 + 32)
    pairs = 101 + 102 + 103 + 104
    assert chunk.flops == 4 * rest + layers * (expanded + pairs * 2 * heads * (32 + 64 + 32))


@pytest.mark.parametrize(
    ("name", "channels", "taps", "layers"),
    [("mamba", 256, 4, 2), ("mamba2", 256 + 2 * 16, 4, 2), ("qwen3-next", 256, 4, 3)],
)
def test_states(load: Load, name: str, channels: int, taps: int, layers: int) -> None:
    """The convolution before a state is a linear layer in vLLM: its FLOPs are the same, elsewhere. Of its taps, the
    state keeps those before the newest token."""
    config = CONFIGS[name]()
    cost, expected = vllm_cost(load(config)), reference(config)
    assert set(differences(cost, expected)) == {"linear_flops_per_token", "states", "roles"}
    merged, apart = roles(cost), roles(expected)
    assert {role for role in merged if merged[role] != apart[role]} == {"other"}
    assert merged["other"][0] - apart["other"][0] == layers * channels * taps
    (ours,), (theirs,) = cost.states, expected.states
    convolution = 2 * channels * taps
    assert ours.layers == theirs.layers == layers
    assert ours.flops_per_token == theirs.flops_per_token - convolution
    assert cost.linear_flops_per_token - expected.linear_flops_per_token == layers * convolution
    assert theirs.state_bytes - ours.state_bytes == channels * 4


def test_padding_of_the_vocabulary_is_computed(load: Load) -> None:
    """250 entries are stored, and multiplied with, as 256."""
    config = make("Llama", "LlamaForCausalLM", **{**SMALL, "vocab_size": 250})
    cost, expected = vllm_cost(load(config)), reference(config)
    assert cost.head_flops_per_token == 2 * 128 * 256
    assert cost.head_weight_bytes == 128 * 256 * 4
    assert cost.parameters - expected.parameters == 2 * 6 * 128
    assert cost.linear_flops_per_token == expected.linear_flops_per_token


def test_weights_are_those_of_the_checkpoint(load: Load, tmp_path: Path) -> None:
    """By the file that transformers writes, though the matrices have left the parameters when vLLM has loaded them."""
    from safetensors.torch import load_file

    config = CONFIGS["llama"]()
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    weights = load_file(tmp_path / "checkpoint" / "model.safetensors")
    model = load(config)
    cost = vllm_cost(model)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    assert cost.parameter_bytes == stored
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < stored / 2
    tables = 256 * 128 * 4
    assert (cost.body_weight_bytes, cost.head_weight_bytes) == (stored - 2 * tables, tables)


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral", "deepseek", "qwen3-next"])
def test_ranks_together_are_the_whole(load: Load, name: str) -> None:
    """Two tensor-parallel ranks hold half of each matrix; what both have whole are routers, latents and norms."""
    config = CONFIGS[name]()
    whole = vllm_cost(load(config))
    first, second = (vllm_cost(load(config, rank=rank, tensor=2)) for rank in range(2))
    assert first == second
    both = {
        "llama": 0,
        "tied": 0,
        # Routers.
        "mixtral": 2 * 128 * 4 * 2,
        # One router; of both layers what compresses queries, and keys and values.
        "deepseek": 2 * 128 * 8 + 2 * 2 * 128 * (32 + 512 + 64),
        # Routers, and gates of shared experts.
        "qwen3-next": 4 * 2 * 128 * (4 + 1),
    }[name]
    assert 2 * first.linear_flops_per_token == whole.linear_flops_per_token + both
    halves, wholes = roles(first), roles(whole)
    split = {role for role in wholes if 2 * halves[role][0] == wholes[role][0]}
    assert {"lm_head", "o"} <= split and {"router", "latent"}.isdisjoint(split)
    assert sum(2 * halves[role][0] - wholes[role][0] for role in wholes) == both // 2
    assert first.hidden_size == whole.hidden_size == 128
    assert 2 * first.head_flops_per_token == whole.head_flops_per_token
    assert 2 * first.head_weight_bytes == whole.head_weight_bytes
    assert [2 * a.query_heads for a in first.attention] == [a.query_heads for a in whole.attention]
    assert [2 * s.flops_per_token for s in first.states] == [
        s.flops_per_token for s in whole.states
    ]
    assert [2 * e.expert_bytes for e in first.experts] == [e.expert_bytes for e in whole.experts]
    shares = 1 if name == "deepseek" else 2
    assert [shares * a.kv_bytes_per_token for a in first.attention] == [
        a.kv_bytes_per_token for a in whole.attention
    ]


def test_more_ranks_than_key_heads_copy_them(load: Load) -> None:
    """Two key heads on four ranks: each has one, and one query head."""
    config = CONFIGS["llama"]()
    cost = vllm_cost(load(config, tensor=4))
    (attention,) = cost.attention
    assert (attention.query_heads, attention.kv_heads) == (1, 1)
    shapes = [(m.role, m.count, m.inputs, m.outputs, m.weight_bytes) for m in cost.matmuls]
    assert shapes == [
        ("qkv", 2, 128, 32 + 2 * 32, 4 * 128 * 96),
        ("o", 2, 32, 128, 4 * 32 * 128),
        ("gate_up", 2, 128, 2 * 256 // 4, 4 * 128 * 128),
        ("down", 2, 256 // 4, 128, 4 * 64 * 128),
        ("lm_head", 1, 128, 256 // 4, 4 * 128 * 64),
    ]
    assert cost.linear_flops_per_token == 2 * 2 * (
        128 * (32 + 2 * 32) + 32 * 128 + 3 * 128 * (256 // 4)
    )


def test_expert_parallel_ranks_hold_some_experts_whole(load: Load) -> None:
    config = CONFIGS["mixtral"]()
    whole = vllm_cost(load(config))
    cost = vllm_cost(load(config, tensor=2, enable_expert_parallel=True))
    (experts,), (all_experts,) = cost.experts, whole.experts
    assert (experts.experts, experts.held, experts.top_k) == (4, 2, 2)
    assert experts.expert_bytes == all_experts.expert_bytes == 3 * 128 * 256 * 4
    # A token needs two of four experts, and half of them are here.
    assert experts.flops(1) == all_experts.flops(1) // 2 == 2 * 3 * 128 * 256
    assert experts.expected_distinct(1) == 1
    assert experts.expected_distinct(1000) == pytest.approx(2)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_stages_of_a_pipeline(load: Load, name: str) -> None:
    """The first looks tokens up, the last makes logits, and each has its own layers."""
    config = CONFIGS[name]()
    whole = vllm_cost(load(config))
    first = vllm_cost(load(config, rank=0, stages=2), Rank(first=True, last=False))
    last = vllm_cost(load(config, rank=1, stages=2), Rank(first=False, last=True))
    assert (first.head_flops_per_token, first.head_weight_bytes) == (0, 0)
    assert last.head_flops_per_token == whole.head_flops_per_token
    assert (first.lookup_bytes_per_token, last.lookup_bytes_per_token) == (128 * 4, 0)
    assert [a.layer_indices for a in (*first.attention, *last.attention)] == [(0,), (1,)]
    assert (
        first.linear_flops_per_token + last.linear_flops_per_token == whole.linear_flops_per_token
    )
    assert first.body_weight_bytes + last.body_weight_bytes == whole.body_weight_bytes
    assert last.head_weight_bytes == whole.head_weight_bytes


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
#: Elements of the matrices of a layer, their inputs and outputs.
SHAPES = ((128, 256), (128, 128), (128, 512), (256, 128))


def test_four_bits_of_gptq(load: Load) -> None:
    config = make("Llama", "LlamaForCausalLM", **SMALL, quantization_config=GPTQ)
    cost = vllm_cost(load(config, dtype="bfloat16"))
    packed = 2 * sum(i * o // 2 for i, o in SHAPES)
    scales = 2 * sum(i // 32 * o * 2 for i, o in SHAPES)
    norms, tables = 5 * 128 * 2, 256 * 128 * 2
    assert cost.body_weight_bytes == packed + scales + norms
    assert [m.weight_bytes for m in cost.matmuls] == [
        *(i * o // 2 + i // 32 * o * 2 for i, o in SHAPES),
        tables,
    ]
    assert cost.head_weight_bytes == tables
    assert cost.linear_flops_per_token == 2 * 2 * sum(i * o for i, o in SHAPES)
    assert (cost.dtype, cost.parameters) == (
        "bfloat16",
        2 * sum(i * o for i, o in SHAPES) + 5 * 128 + 2 * 256 * 128,
    )


def test_eight_bits_are_remembered_from_before_they_are_repacked(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN takes the matrix and leaves the scales: what is known of it is from the loader's own call, which a session
    wraps, or from what the layer declares."""
    from vllm.model_executor.model_loader import base_loader

    config = make("Llama", "LlamaForCausalLM", **SMALL, quantization_config=INT8)
    original = base_loader.process_weights_after_loading
    loaded = WeightsAsLoaded()

    def process(model: Any, *rest: Any) -> Any:
        loaded.remember(model)
        return original(model, *rest)

    monkeypatch.setattr(base_loader, "process_weights_after_loading", process)
    model = load(config, dtype="bfloat16")
    matrices = 2 * sum(i * o for i, o in SHAPES)
    scales = 2 * sum(4 * o for _, o in SHAPES)
    norms = 5 * 128 * 2
    cost = vllm_cost(model, None, loaded)
    assert cost.body_weight_bytes == matrices + scales + norms
    assert (cost.dtype, dict(cost.stored)["int8"]) == ("int8", matrices)
    late = vllm_cost(model)
    assert (late.dtype, dict(late.stored)["int8"]) == ("int8", matrices)
    assert late.covered


def test_a_session_looks_at_weights_as_they_are_loaded(load: Load, tmp_path: Path) -> None:
    from vllm.model_executor.model_loader import base_loader

    before = base_loader.process_weights_after_loading
    session = Session(tmp_path / "trace")
    session.start()
    try:
        assert base_loader.process_weights_after_loading is not before
        hooks: Any = next(h for h in session._hooks if type(h).__name__ == "VllmHooks")
        config = make("Llama", "LlamaForCausalLM", **SMALL, quantization_config=INT8)
        model = load(config, dtype="bfloat16")
        layer = model.model.layers[0].mlp.down_proj
        seen = hooks._worker._work._loaded.of(layer)
    finally:
        session.stop()
    assert base_loader.process_weights_after_loading is before
    assert [(part.dtype, part.bytes) for part in seen] == [
        ("int8", 128 * 256),
        ("float32", 128 * 4),
    ]


def test_what_is_not_known_makes_a_model_not_covered(load: Load) -> None:
    model = load(CONFIGS["llama"]())
    model.model.layers[1].mlp.mystery = torch.nn.Bilinear(4, 4, 4)
    cost = vllm_cost(model)
    assert cost.not_covered == (
        "model.layers.*.mlp.mystery (Bilinear) has parameters of unknown use: weight",
    )
    assert (cost.linear_flops_per_token, cost.body_weight_bytes) == (0, 0)
    assert vllm_cost(load(CONFIGS["llama"]()), Rank(splits_tokens=True)).not_covered == (
        "tokens or their keys are split over ranks (context parallelism)",
    )


def test_a_decoder_that_attends_to_a_source_is_not_covered(load: Load) -> None:
    """Its encoder is part of what is stored, and of no step of the decoder."""
    config = make(
        "Whisper",
        "WhisperForConditionalGeneration",
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=256,
        max_source_positions=32,
        max_target_positions=256,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = load(config)
    assert decoder_of(model) is not model
    cost, expected = vllm_cost(model), reference(config)
    assert cost.not_covered == (
        "CrossAttention attends to a source, whose length a step does not tell",
    )
    # vLLM gives keys a bias, in five attentions.
    assert cost.parameters == expected.parameters + 5 * 64
