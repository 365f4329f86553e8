"""What the walk makes of models that are no plain decoder, and of decoders in other clothes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from phaseprof.work.cost import ModelCost
from phaseprof.work.walk import model_cost

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BERT = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
T5 = {"vocab_size": 97, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()


def chunked_llama() -> Any:
    model = llama()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    return model


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).eval()


def listed_experts() -> Any:
    """Experts with no router that could say how many of them a token is sent to."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    return model


def misrouted_experts() -> Any:
    """A router with a choice more than there are experts: to skip them."""
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.gate.weight = nn.Parameter(torch.zeros(5, 32))
    return model


def contradicting_experts() -> Any:
    model = mixtral()
    model.config.num_experts_per_tok = 3
    return model


def of(family: str, ending: str = "ForCausalLM", **given: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(transformers, f"{family}Config")(**given)
        return getattr(transformers, f"{family}{ending}")(config)

    return build


# Not covered, and why.


@pytest.mark.parametrize(
    ("build", "why"),
    [
        # A kind of encoder that nothing is known of.
        (of("MegatronBert", "Model", **BERT), "how often it is used is not known"),
        (
            of("LongT5", "ForConditionalGeneration", **T5),
            "an encoder-decoder of a kind that is not",
        ),
        (
            of(
                "GPT2",
                "LMHeadModel",
                vocab_size=97,
                n_embd=32,
                n_layer=2,
                n_head=4,
                add_cross_attention=True,
            ),
            "cross",
        ),
        (of("DiffLlama", **SIZES), "parameters of unknown use: lambda_q1"),
        (
            of(
                "Dinov2",
                "Model",
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=8,
            ),
            "a vision tower",
        ),
        (lambda: nn.Linear(4, 4), "no attention layers that are known"),
        (chunked_llama, "chunked layers without a size in the config"),
        (lambda: llama(attention_chunk_size=8), "layers of type chunked_attention"),
        (
            of("Moshi", **SIZES, sliding_window=8, ffn_dim=96),
            "a sliding window in the config of a model",
        ),
        (listed_experts, "does not say how many experts"),
        (misrouted_experts, "chooses among other things than its 4 experts"),
        (contradicting_experts, "contradicts its config about how many experts"),
        (lambda: llama(sliding_window=8), "a sliding window in the config of a model"),
    ],
)
def test_not_covered_is_said_with_its_reason(build: Callable[[], Any], why: str) -> None:
    model = build()
    cost = model_cost(model)
    assert not cost.covered
    assert any(why in reason for reason in cost.not_covered), cost.not_covered
    assert len(cost.not_covered) <= 8
    # No figure that depends on the structure is given; sizes are facts.
    assert (cost.linear_flops_per_token, cost.head_flops_per_token, cost.attention) == (0, 0, ())
    assert (cost.body_weight_bytes, cost.head_weight_bytes, cost.lookup_bytes_per_token) == (
        0,
        0,
        0,
    )
    assert cost.parameters == sum(p.numel() for p in model.parameters())


def int8_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.int8), requires_grad=False)
    return layer


def packed_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    packed = torch.zeros(outputs * inputs // 2, 1, dtype=torch.uint8)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    return layer


def test_quantized_weights_are_not_covered() -> None:
    for make in (int8_linear, packed_linear):
        model = llama()
        model.model.layers[1].mlp.up_proj = make(32, 48)
        reasons = model_cost(model).not_covered
        assert any("quantized or packed" in reason for reason in reasons)


class Wrapped(torch.Tensor):
    """A tensor of another class, as quantization and tensor parallelism make them."""


def test_weights_of_another_tensor_class_are_not_covered() -> None:
    model = llama()
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(up.weight.data.as_subclass(Wrapped))
    assert any("class Wrapped" in reason for reason in model_cost(model).not_covered)


def test_weights_that_are_not_loaded_count_by_their_shape() -> None:
    with torch.device("meta"):
        model = llama()
    assert model_cost(model) == model_cost(llama())


class Scaled(nn.Module):
    """A linear layer and something else with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48, bias=False)
        self.mixing = nn.Parameter(torch.ones(3, 3))


def test_a_module_with_parameters_of_unknown_use_is_not_covered() -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj = Scaled()
    (reason,) = model_cost(model).not_covered
    assert reason == "model.layers.*.mlp.up_proj (Scaled) has parameters of unknown use: mixing"


def test_an_adapter_is_not_covered() -> None:
    model = llama()
    adapter = nn.Module()
    adapter.lora_A = nn.Linear(32, 4, bias=False)
    adapter.lora_B = nn.Linear(4, 48, bias=False)
    model.model.layers[0].mlp.up_adapter = adapter
    (reason,) = model_cost(model).not_covered
    assert reason == "an adapter that is not one of PEFT's (model.layers.*.mlp.up_adapter.lora_A)"


def test_a_layer_that_runs_twice_is_not_covered() -> None:
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    assert not model_cost(model).covered


def _without_sizes(cost: ModelCost) -> ModelCost:
    return replace(cost, parameters=0, parameter_bytes=0, stored=())


def test_a_stack_that_is_not_run_to_its_end_counts_the_layers_that_are_run() -> None:
    """Early exit of assisted decoding lowers the number in the config for the passes that draft."""
    model, short = llama(num_hidden_layers=3), llama(num_hidden_layers=1)
    model.config.num_hidden_layers = 1
    cost, expected = model_cost(model), model_cost(short)
    assert cost.not_covered == ()
    assert _without_sizes(cost) == _without_sizes(expected)
    assert cost.parameters == sum(p.numel() for p in model.parameters())


class Endless(nn.Module):
    """Runs all its layers, whatever the config says."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.layers = model.model.layers


@pytest.mark.parametrize("layers", [1, 5])
def test_a_number_of_layers_that_says_nothing_is_not_believed(layers: int) -> None:
    model = Endless(llama(num_hidden_layers=3))
    model.config.num_hidden_layers = layers
    assert model_cost(model).not_covered == (f"the config says {layers} layers, the model has 3",)


def test_a_config_that_does_not_fit_the_weights_is_not_believed() -> None:
    model = llama()
    model.config.num_attention_heads = 8
    (reason,) = model_cost(model).not_covered
    assert reason.startswith("LlamaAttention")


# Decoders in other clothes.


class Holder(nn.Module):
    """A wrapper that adds nothing of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap",
    [
        Holder,
        lambda m: nn.ModuleList([m]),
        lambda m: torch.compile(m, backend="eager"),
        lambda m: Holder(Holder(m)),
    ],
    ids=["holder", "list", "compiled", "nested"],
)
def test_a_wrapper_costs_what_it_wraps(wrap: Callable[[Any], Any]) -> None:
    model = llama(tie_word_embeddings=True)
    assert model_cost(wrap(model)) == model_cost(model)


def test_a_wrapper_that_adds_a_layer_is_not_covered() -> None:
    holder = Holder(llama())
    holder.value_head = nn.Linear(32, 1)
    assert model_cost(holder).not_covered == (
        "value_head (Linear): how often it is used is not known",
    )


def test_a_bare_decoder_is_its_causal_model_without_a_head() -> None:
    whole = llama()
    bare = model_cost(whole.model)
    full = model_cost(whole)
    assert bare.covered and bare.head_flops_per_token == bare.head_weight_bytes == 0
    assert bare.linear_flops_per_token == full.linear_flops_per_token
    assert bare.attention == full.attention
    assert bare.parameter_bytes == full.parameter_bytes - 97 * 32 * 4


def test_a_classifier_scores_every_token() -> None:
    config = transformers.LlamaConfig(**SIZES, num_labels=3)
    cost = model_cost(transformers.LlamaForSequenceClassification(config))
    assert cost.covered and cost.head_flops_per_token == 0
    assert cost.linear_flops_per_token == model_cost(llama()).linear_flops_per_token + 2 * 32 * 3


# Figures by hand: hidden 32, 4 query and 2 KV heads of 8, MLP 48, 2 layers, vocabulary 97.

LINEAR = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48)
NORMS = 5 * 32
TABLE = 97 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_and_an_untied_llama_by_hand(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    untied = model_cost(llama().to(dtype))
    tied = model_cost(llama(tie_word_embeddings=True).to(dtype))
    for cost in (untied, tied):
        assert cost.dtype == str(dtype).removeprefix("torch.")
        assert cost.linear_flops_per_token == 2 * LINEAR
        assert cost.head_flops_per_token == 2 * TABLE
        assert cost.body_weight_bytes == (LINEAR + NORMS) * size
        assert cost.head_weight_bytes == TABLE * size
        assert cost.lookup_bytes_per_token == 32 * size
        (group,) = cost.attention
        assert (group.query_heads, group.kv_heads) == (4, 2)
        assert (group.qk_head_dim, group.v_head_dim) == (8, 8)
        assert group.kv_bytes_per_token == 2 * 2 * 8 * size
        assert group.layer_indices == (0, 1)
    assert untied.parameters == LINEAR + NORMS + 2 * TABLE
    assert tied.parameters == LINEAR + NORMS + TABLE
    assert untied.tied_lookup_bytes_per_token == 0
    assert tied.tied_lookup_bytes_per_token == 32 * size


def test_values_may_be_wider_than_keys() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Linear(32, 2 * 12, bias=False)
        layer.self_attn.o_proj = nn.Linear(4 * 12, 32, bias=False)
    cost = model_cost(model)
    (group,) = cost.attention
    assert (group.qk_head_dim, group.v_head_dim) == (8, 12)
    assert group.flops_per_pair == 2 * 4 * (8 + 12)
    assert group.kv_bytes_per_token == 2 * (8 + 12) * 4
    assert cost.linear_flops_per_token == 2 * (LINEAR + 2 * (8 * 32 + 16 * 32))


def test_mixed_dtypes_count_at_their_own_size() -> None:
    model = llama().to(torch.bfloat16)
    model.lm_head.float()
    cost = model_cost(model)
    assert cost.dtype == "bfloat16"
    assert cost.head_weight_bytes == TABLE * 4
    assert cost.body_weight_bytes == (LINEAR + NORMS) * 2


def test_views_of_one_storage_count_once() -> None:
    model = llama()
    # Tied by hand: another parameter over the same memory, as some loaders make it.
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())
    cost = model_cost(model)
    assert cost.parameters == LINEAR + NORMS + TABLE
    assert cost.tied_lookup_bytes_per_token == 32 * 4


def test_layers_of_several_windows_are_grouped() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 3}, head_dim=8, sliding_window=16, layer_types=kinds
    )
    cost = model_cost(transformers.Gemma3ForCausalLM(config))
    groups = [(g.layer_indices, g.window_tokens) for g in cost.attention]
    assert groups == [((0, 2), 16), ((1,), None)]


def test_the_model_is_only_read() -> None:
    model = llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    names = set(vars(model))
    cost = model_cost(model)
    assert isinstance(cost, ModelCost)
    assert set(vars(model)) == names
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
