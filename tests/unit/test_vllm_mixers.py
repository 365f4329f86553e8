"""Attention of vLLM that runs on a GPU alone, by modules that say the same as its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.vllm.mixers import Mixer, mixer_of
from phaseprof.work.cost import AttentionCost
from phaseprof.work.count import pairs
from phaseprof.work.parts import NotCovered


class AttentionLayerBase:
    """What vLLM's layers with a cache derive from."""


class MLAAttention(AttentionLayerBase):
    """DeepSeek-V3.2 on one of eight ranks: 16 of 128 heads, latents of 512 elements and a rotary key of 64."""

    layer_name = "model.layers.3.self_attn.attn"
    num_heads = 16
    kv_lora_rank = 512
    qk_nope_head_dim = 128
    qk_rope_head_dim = 64
    v_head_dim = 128
    kv_cache_dtype = "auto"
    sliding_window = None

    def __init__(self, indexer: Any, sparse: bool) -> None:
        self.indexer = indexer
        self.kv_b_proj = SimpleNamespace(params_dtype=SimpleNamespace(itemsize=2))
        self.attn_backend = SimpleNamespace(is_sparse=lambda: sparse)


class Attention(AttentionLayerBase):
    """An attention with keys and values of 8 heads."""

    layer_name = "model.layers.0.self_attn.attn"
    num_heads = 32
    num_kv_heads = 8
    head_size = 128
    head_size_v = 128
    kv_cache_torch_dtype = SimpleNamespace(itemsize=1)
    kv_sharing_target_layer_name = None

    def __init__(self, kind: str = "decoder", window: int | None = None) -> None:
        self.attn_type = kind
        self.sliding_window = window


class ChunkedLocalAttention(Attention):
    """Llama 4."""

    attention_chunk_size = 8192


class RSWAAttention(Attention):
    """A window of the tokens behind the prompt."""


class DeepseekV32IndexerCache(AttentionLayerBase):
    """Where an indexer keeps its keys."""


INDEXER = SimpleNamespace(
    topk_tokens=2048,
    n_head=64,
    head_dim=128,
    k_cache=SimpleNamespace(head_dim=132, dtype=SimpleNamespace(itemsize=1)),
)


def read(module: Any, top_k: int | None = None) -> Mixer | None:
    """As a runner of latent attention that takes rows of one token for decodes."""
    return mixer_of(module, 1, top_k)


def cost_of(module: Any, top_k: int | None = None) -> AttentionCost:
    mixer = read(module, top_k)
    assert mixer is not None and isinstance(mixer.cost, AttentionCost)
    return mixer.cost


def test_latents_that_an_indexer_chooses() -> None:
    """Every row attends to latents as they are: to 2048 of them at most, of which the cache holds all."""
    mixer = read(MLAAttention(INDEXER, sparse=True))
    assert mixer is not None and isinstance(mixer.cost, AttentionCost)
    assert (mixer.cost.window_tokens, mixer.cost.forgets) == (2048, False)
    assert mixer.cost.absorbed_query_tokens > 1_000_000
    assert mixer.cost.absorbed_flops_per_pair == 2 * 16 * (512 + 64 + 512)
    assert mixer.cost.kv_bytes_per_token == 576 * 2
    # The scorer is whole on each rank, looks at every key, and keeps 128 elements and a scale of each.
    assert mixer.indexer is not None
    assert mixer.indexer.flops_per_pair == 2 * 64 * (128 + 1)
    assert (mixer.indexer.window_tokens, mixer.indexer.kv_bytes_per_token) == (None, 132)
    assert pairs(4096, 1, mixer.cost.window_tokens) == 2048


def test_a_layer_that_uses_the_choice_of_one_before_it() -> None:
    mixer = read(MLAAttention(None, sparse=True), 1024)
    assert mixer is not None and isinstance(mixer.cost, AttentionCost)
    assert (mixer.cost.window_tokens, mixer.indexer) == (1024, None)
    with pytest.raises(NotCovered, match="what an indexer chooses"):
        read(MLAAttention(None, sparse=True))


def test_latents_without_an_indexer() -> None:
    cost = cost_of(MLAAttention(None, sparse=False))
    assert (cost.window_tokens, cost.absorbed_query_tokens) == (None, 1)
    assert cost.flops_per_pair == 2 * 16 * (128 + 64 + 128)
    assert cost.expand_flops_per_token == 2 * 512 * 16 * (128 + 128)


def test_chunks_windows_and_both_directions() -> None:
    assert cost_of(ChunkedLocalAttention()).chunk_tokens == 8192
    assert cost_of(Attention(window=512)).window_tokens == 512
    assert cost_of(Attention()).kv_bytes_per_token == 8 * 256
    assert not cost_of(Attention("encoder_only")).causal


def test_what_reaches_something_else_is_not_covered() -> None:
    with pytest.raises(NotCovered, match="attends to its whole prompt"):
        read(RSWAAttention())
    with pytest.raises(NotCovered, match="attends to a source"):
        read(Attention("encoder_decoder"))
    with pytest.raises(NotCovered, match="AttentionLayerBase is an attention of unknown form"):
        read(AttentionLayerBase())
    assert read(DeepseekV32IndexerCache()) is None
