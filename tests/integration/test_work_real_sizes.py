"""Published models at their real sizes, by their published configurations alone: no weights, no download.

The model is built whole, of tensors without data, for the walk and for what can be summed over its parameters. FLOPs
and caches are those of torch's counter and of real cache tensors on two shallow copies that differ by one period of
the layers (one layer; in Gemma 3 five that slide and one that does not). All periods are alike, so the whole model is
the first copy and as many periods as it has more: integers, no fit. One model is run whole to confirm that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE, held_per_token, one_thread
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.walk import model_cost

PROMPT = 2048
#: Pairs that the counter takes in a prompt and a mask leaves out, in a layer without a window.
MASKED = PROMPT * (PROMPT - 1) // 2


@dataclass(frozen=True)
class Published:
    """A model as published: parameters in all and for one token, 2 bytes each; keys and values of one token, and those
    where latents are expanded before they are cached (transformers 5.0)."""

    family: str
    config: dict[str, Any]
    parameters: int
    active: float
    kv_bytes: int
    first: int = 1
    period: int = 1
    expanded_kv_bytes: int | None = None


_QWEN3 = {
    "vocab_size": 151_936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_GEMMA3 = {"vocab_size": 262_208, "sliding_window": 1024}

MODELS = {
    "Llama-3.1-8B": Published(
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
        8_030_261_248,
        8.03e9,
        32 * 2 * 8 * 128 * 2,
    ),
    "Mixtral-8x7B": Published(
        "Mixtral",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        46_702_792_704,
        12.9e9,
        32 * 2 * 8 * 128 * 2,
    ),
    "Qwen3-30B-A3B": Published(
        "Qwen3Moe",
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "moe_intermediate_size": 768,
        },
        30_532_122_624,
        3.35e9,
        48 * 2 * 4 * 128 * 2,
    ),
    "Qwen3-235B-A22B": Published(
        "Qwen3Moe",
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "moe_intermediate_size": 1536,
        },
        235_093_634_560,
        22.2e9,
        94 * 2 * 4 * 128 * 2,
    ),
    "DeepSeek-V3": Published(
        "DeepseekV3",
        {
            "vocab_size": 129_280,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "tie_word_embeddings": False,
        },
        # 671,026,419,200 with the 58 x 256 correction biases of the routers, which are buffers.
        671_026_419_200 - 58 * 256,
        37.5e9,
        61 * (512 + 64) * 2,
        first=4,
        expanded_kv_bytes=61 * 128 * (192 + 128) * 2,
    ),
    "Gemma-3-4B, text": Published(
        "Gemma3",
        _GEMMA3
        | {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
        },
        3_880_263_168,
        3.88e9,
        34 * 2 * 4 * 256 * 2,
        first=4,
        period=6,
    ),
    "Gemma-3-27B, text": Published(
        "Gemma3",
        _GEMMA3
        | {
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
        },
        27_009_346_304,
        27.0e9,
        62 * 2 * 16 * 128 * 2,
        first=2,
        period=6,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with one_thread():
        yield


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors have shapes and no elements; those of a model are made in bfloat16."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def build(model: Published, layers: int | None = None) -> Any:
    """The model, or a shallow copy of it."""
    name = "Gemma3TextConfig" if model.family == "Gemma3" else f"{model.family}Config"
    depth = {} if layers is None else {"num_hidden_layers": layers}
    config = getattr(transformers, name)(**model.config | depth)
    built = getattr(transformers, f"{model.family}ForCausalLM")(config).eval()
    if "num_experts_per_tok" in model.config:
        # A loop over experts would have to know which of them were chosen.
        built.set_experts_implementation("grouped_mm")
    return built


def run(model: Any) -> tuple[list[int], int]:
    """FLOPs of a prompt and of the token after it, attention as whole rectangles; keys and values of one token."""
    aten = torch.ops.aten

    def rectangle(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))

    def bmm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        # An outer product: the angles of rotary embeddings.
        return 0 if a[2] == 1 else int(2 * a[0] * a[1] * a[2] * b[2])

    def grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        return int(2 * a[0] * a[1] * b[-1])

    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: rectangle,
        aten.bmm: bmm,
        aten._grouped_mm: grouped_mm,
    }
    cache = DynamicCache(config=model.config)
    flops: list[int] = []
    for query in (PROMPT, 1):
        ids = torch.zeros(1, query, dtype=torch.long)
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        flops.append(counter.get_total_flops())
    return flops, sum(held_per_token(cache))


def whole(model: Published) -> tuple[list[int], int]:
    """What :func:`run` gives for the model, from two shallow copies of it."""
    shallow, shallow_kv = run(build(model, model.first))
    deeper, deeper_kv = run(build(model, model.first + model.period))
    more, rest = divmod(model.config["num_hidden_layers"] - model.first, model.period)
    assert rest == 0
    flops = [a + more * (b - a) for a, b in zip(shallow, deeper, strict=True)]
    return flops, shallow_kv + more * (deeper_kv - shallow_kv)


def rectangles(cost: ModelCost) -> int:
    """What the counter takes more than causal pairs within the window, in a prompt."""
    surplus = 0
    for group in cost.attention:
        hidden = MASKED
        if group.window_tokens is not None and group.window_tokens < PROMPT:
            before = PROMPT - group.window_tokens
            hidden += before * (before + 1) // 2
        surplus += group.layers * group.flops_per_pair * hidden
    return surplus


@pytest.mark.parametrize("name", MODELS)
def test_published_figures_and_the_counter(name: str) -> None:
    published = MODELS[name]
    with without_data():
        model = build(published)
        cost = model_cost(model)
        sizes = {id(p): (p.numel(), p.element_size()) for p in model.parameters()}
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied, row = table.weight is head.weight, table.weight.shape[1] * 2
        unread = 0 if tied else table.weight.numel() * 2 - row
        flops, kv_bytes = whole(published)
    assert cost.not_covered == ()
    assert cost.parameters == sum(n for n, _ in sizes.values()) == published.parameters
    assert cost.parameter_bytes == sum(n * size for n, size in sizes.values())
    resting = sum(e.layers * (e.experts - e.top_k) * e.expert_bytes for e in cost.experts)
    assert cost.parameters - resting / 2 == pytest.approx(published.active, rel=0.005)

    prefill = count(cost, [Rows(0, PROMPT, 1)], logits_tokens=1, layout=None)
    decode = count(cost, [Rows(PROMPT, 1, 1)], logits_tokens=1, layout=None)
    assert prefill.flops + rectangles(cost) == flops[0]
    assert decode.flops == flops[1]
    # One token reads k experts a layer, and one row of the table.
    assert decode.weight_bytes == cost.parameter_bytes - resting - unread
    assert decode.kv_write_bytes == kv_bytes
    if published.expanded_kv_bytes is None or any(g.expand_flops_per_token for g in cost.attention):
        assert kv_bytes == published.kv_bytes
    else:
        assert kv_bytes == published.expanded_kv_bytes
    windows = {g.window_tokens for g in cost.attention}
    assert windows == ({1024, None} if published.family == "Gemma3" else {None})


def test_a_model_is_its_shallow_copies_and_their_difference() -> None:
    """Run whole: 30.787 TFLOP as rectangles for a prompt of 2048, 16.084 GFLOP for the token after it."""
    with without_data():
        flops, kv_bytes = run(build(MODELS["Llama-3.1-8B"]))
        assert (flops, kv_bytes) == whole(MODELS["Llama-3.1-8B"])
    assert [round(flops[0] / 1e12, 3), round(flops[1] / 1e9, 3)] == [30.787, 16.084]


def test_gemma_3_slides_in_five_layers_of_six() -> None:
    with without_data():
        cost = model_cost(build(MODELS["Gemma-3-27B, text"]))
    layers = {g.window_tokens: g.layer_indices for g in cost.attention}
    assert layers[None] == tuple(range(5, 62, 6))
    # What 8192 tokens read before the next one: 1024 of them in a layer that slides.
    work = count(cost, [Rows(8192, 1, 1)], logits_tokens=1, layout=None)
    assert work.kv_read_bytes == 8192 * (52 * 1024 + 10 * 8193)
