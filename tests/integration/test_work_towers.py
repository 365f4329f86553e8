"""The text part of models with towers for images: passes without an image cost what the decoder alone would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE, counted, has, held_per_token, one_thread, weights_read
from shape_truth import check_shapes
from transformers import DynamicCache

from phaseprof.work.count import Rows, count
from phaseprof.work.kv import cache_bytes, read_layout
from phaseprof.work.walk import model_cost

BATCH = 2
_TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
#: Rotary angles of three axes: their sections divide half a head.
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_SLIDING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

#: What the config of the text part, that of the tower and the whole one are given.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Llava": (_TEXT | {"model_type": "llama"}, _TOWER | {"model_type": "clip_vision_model"}, {}),
    "LlavaNext": (_TEXT | {"model_type": "llama"}, _TOWER | {"model_type": "clip_vision_model"}, {}),
    "Gemma3": (_TEXT | _SLIDING, _TOWER, {"mm_tokens_per_image": 4}),
    "Mistral3": (
        _TEXT | {"model_type": "mistral", "sliding_window": None},
        _TOWER | {"model_type": "pixtral", "head_dim": 8},
        {},
    ),
    "Idefics3": (_TEXT | {"model_type": "llama"}, _TOWER, {"scale_factor": 2}),
    "InternVL": (
        _TEXT | {"model_type": "qwen2"},
        _TOWER | {"image_size": [16, 16], "patch_size": [8, 8]},
        {},
    ),
    "Qwen2VL": (_TEXT | _SECTIONS, {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64}, {}),
    "Qwen2_5_VL": (_TEXT | _SECTIONS, _QWEN_TOWER | {"fullatt_block_indexes": [1]}, {}),
    "Qwen3VL": (_TEXT | _SECTIONS, _QWEN_TOWER | {"deepstack_visual_indexes": [1]}, {}),
    "Qwen3VLMoe": (
        _TEXT | _SECTIONS | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        _QWEN_TOWER | {"deepstack_visual_indexes": [1]},
        {},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with one_thread():
        yield


def build(family: str) -> Any:
    name = f"{family}ForConditionalGeneration"
    assert has(name, new=False)
    text, tower, whole = MODELS[family]
    config_class = getattr(transformers, name).config_class
    torch.manual_seed(0)
    config = config_class(text_config=dict(text), vision_config=dict(tower), **whole)
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize("family", MODELS)
def test_passes_over_text(family: str) -> None:
    model = build(family)
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    # What is stored is all of it; what a pass over text reads is the decoder and its head.
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    decoder = getattr(model.model, "language_model", None) or model.model.text_model
    head = model.get_output_embeddings()
    cache = DynamicCache(config=model.config.get_text_config())
    past = 0
    for query in (24, 5, 1):
        held = cache_bytes(cache)
        with counted() as (truth, run):
            out = run(model, torch.randint(3, 80, (BATCH, query)), **{CACHE: cache}, use_cache=True)
        layout = read_layout(cache)
        logits = out.logits.shape[0] * out.logits.shape[1]
        work = count(cost, [Rows(past, query, BATCH)], logits_tokens=logits, layout=layout)
        assert work.flops == truth.flops
        resting = sum(e.layers * e.experts * e.expert_bytes for e in cost.experts)
        chosen = sum(
            e.layers * round(e.expected_distinct(BATCH * query) * e.expert_bytes)
            for e in cost.experts
        )
        tied = head.weight is decoder.get_input_embeddings().weight
        read = weights_read(decoder, BATCH * query, head=head)
        read += 0 if tied else head.weight.numel() * 4
        assert work.weight_bytes == read - resting + chosen
        assert work.kv_write_bytes == BATCH * query * sum(held_per_token(cache))
        assert work.kv_read_bytes == held + work.kv_write_bytes
        past += query


def test_a_prefix_that_is_read_in_both_directions_is_not_covered() -> None:
    """PaliGemma attends to its whole prompt from every position of it."""
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(
        text_config=_TEXT | {"model_type": "gemma"},
        vision_config=_TOWER | {"model_type": "siglip_vision_model"},
    )
    cost = model_cost(transformers.PaliGemmaForConditionalGeneration(config))
    assert any("in both directions" in reason for reason in cost.not_covered)
