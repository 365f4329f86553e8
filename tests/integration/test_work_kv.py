"""What a cache holds and hands to attention, against the tensors of the caches of transformers themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, MistralConfig, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.kv import KvLayout, cache_bytes, read_layout, with_layout
from phaseprof.work.walk import model_cost

LAYERS, KV_HEADS, HEAD_DIM, SLOTS, WINDOW = 3, 2, 8, 40, 6
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
}
FULL = LlamaConfig(**SIZES)
SLIDING = MistralConfig(**SIZES, sliding_window=WINDOW)
#: Whether sdpa cuts the empty slots off a prefill into a new static cache, as it does in 5.17 and not yet in 5.10.
CUTS_EMPTY_SLOTS = "kv_length" in sdpa_attention_forward.__code__.co_varnames
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cost_of(window: int | None) -> ModelCost:
    group = AttentionCost(LAYERS, 4, KV_HEADS, HEAD_DIM, HEAD_DIM, window, 1, (0, 1, 2))
    return ModelCost(1, 0, (group,), 1, 0, 0, 1, 1, "float32")


def fill(cache: Any, query: int, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> int:
    """Put tokens into every layer; give the bytes of the keys and values that come back for attention."""
    size = 0
    for layer in range(LAYERS):
        keys, values = (torch.ones(batch, KV_HEADS, query, HEAD_DIM, dtype=dtype) for _ in range(2))
        for given_back in cache.update(keys, values, layer):
            size += given_back.numel() * given_back.element_size()
    return size


def caches() -> dict[str, Any]:
    return {
        "dynamic": DynamicCache(config=FULL),
        "dynamic, no config": DynamicCache(),
        "dynamic, sliding": DynamicCache(config=SLIDING),
        "static": StaticCache(config=FULL, max_cache_len=SLOTS),
        "static, sliding": StaticCache(config=SLIDING, max_cache_len=SLOTS),
        "static, shorter than its window": StaticCache(config=SLIDING, max_cache_len=WINDOW - 2),
    }


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", caches())
@given(queries=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_what_is_read_is_what_the_layers_hand_out(name: str, queries: list[int]) -> None:
    cache = caches()[name]
    if name.endswith("its window"):
        queries = [1] * min(len(queries), WINDOW - 2)
    past = 0
    for query in queries:
        handed_out = fill(cache, query)
        layout = read_layout(cache)
        assert layout is not None
        cost = cost_of(WINDOW if "sliding" in name else None)
        # With a mask: what sdpa cuts off an empty static cache is another matter, tested below.
        work = count(cost, [Rows(past, query, 2)], logits_tokens=0, layout=layout, masked=True)
        assert work.kv_read_bytes == handed_out
        past += query


@pytest.mark.parametrize("name", caches())
def test_the_layout_says_what_the_cache_is(name: str) -> None:
    cache = caches()[name]
    assert read_layout(cache) is None
    assert cache_bytes(cache) == 0
    fill(cache, 2, dtype=torch.bfloat16)
    layout = read_layout(cache)
    assert layout is not None and layout.covered and layout.layers == LAYERS
    (group,) = layout.groups
    slots = {"static": SLOTS, "static, sliding": WINDOW, "static, shorter than its window": 4}
    windows = {"dynamic, sliding": WINDOW, "static, sliding": WINDOW}
    assert group.layer_indices == (0, 1, 2)
    assert group.bytes_per_token == 2 * KV_HEADS * HEAD_DIM * 2
    assert layout.bytes_per_token == LAYERS * group.bytes_per_token
    assert group.allocated_tokens == slots.get(name)
    if name != "static, shorter than its window":
        assert group.window_tokens == windows.get(name)
    assert group.dtype == "bfloat16"
    held = slots.get(name, 2)
    assert cache_bytes(cache) == 2 * held * layout.bytes_per_token
    assert with_layout(cost_of(None), layout).attention[0].kv_bytes_per_token == 64


def test_what_a_dynamic_cache_holds_grows_by_what_is_written() -> None:
    cache = DynamicCache(config=FULL)
    past = 0
    for query in (7, 3, 1, 1):
        before = cache_bytes(cache)
        fill(cache, query)
        work = count(
            cost_of(None), [Rows(past, query, 2)], logits_tokens=0, layout=read_layout(cache)
        )
        assert cache_bytes(cache) - before == work.kv_write_bytes
        assert cache_bytes(cache) == work.kv_read_bytes
        past += query


def test_a_sliding_cache_holds_one_token_less_than_its_window() -> None:
    cache = DynamicCache(config=SLIDING)
    fill(cache, 20)
    layout = read_layout(cache)
    assert layout is not None
    assert cache_bytes(cache) == 2 * (WINDOW - 1) * layout.bytes_per_token


def test_a_reset_static_cache_keeps_its_slots() -> None:
    cache = StaticCache(config=FULL, max_cache_len=SLOTS)
    fill(cache, 3)
    before = read_layout(cache), cache_bytes(cache)
    cache.reset()
    assert (read_layout(cache), cache_bytes(cache)) == before


def test_no_cache_has_no_layout() -> None:
    assert read_layout(None) is None
    assert cache_bytes(None) == 0


def test_tensors_that_two_layers_share_count_once() -> None:
    cache = DynamicCache()
    fill(cache, 5)
    alone = cache_bytes(cache)
    cache.layers[1].keys = cache.layers[0].keys
    assert cache_bytes(cache) == alone * 5 // 6


def test_of_an_encoder_decoder_cache_the_self_attention_counts() -> None:
    own, cross = DynamicCache(), DynamicCache()
    fill(own, 3)
    fill(cross, 50)
    both = EncoderDecoderCache(own, cross)
    assert read_layout(both) == read_layout(own)
    assert cache_bytes(both) == cache_bytes(own)


class Evicting(DynamicLayer):  # type: ignore[misc]
    """A user's layer, which may keep what it likes."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys[:, :, -1:], values[:, :, -1:], *args, **kwargs)


class Named(DynamicLayer):  # type: ignore[misc]
    """A user's layer, which keeps what every dynamic layer keeps."""


def test_a_layer_with_an_update_of_its_own_is_not_guessed() -> None:
    cache = DynamicCache(config=FULL)
    cache.layers = [Evicting() for _ in range(LAYERS)]
    assert read_layout(cache) == KvLayout((), ("cache layers of class Evicting",))
    cache.layers = [Named() for _ in range(LAYERS)]
    fill(cache, 3)
    layout = read_layout(cache)
    assert layout is not None and layout.covered


def test_other_kinds_of_cache_are_not_guessed() -> None:
    kinds = transformers.cache_utils
    cache = DynamicCache(config=FULL)
    if hasattr(kinds, "Fp8QuantizedLayer"):
        cache.layers = [kinds.Fp8QuantizedLayer() for _ in range(LAYERS)]
        fill(cache, 3)
        layout = read_layout(cache)
        assert layout is not None
        assert layout.not_covered == ("cache layers of class Fp8QuantizedLayer",)
    if hasattr(kinds, "LinearAttentionAndFullAttentionLayer"):
        cache.layers = [kinds.LinearAttentionAndFullAttentionLayer()]
        layout = read_layout(cache)
        assert layout is not None and not layout.covered
    layout = read_layout(((torch.ones(1), torch.ones(1)),))
    assert layout == KvLayout((), ("a cache of class tuple",))


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_static_caches_under_a_model_read_what_sdpa_is_given(
    sliding: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (
        transformers.MistralForCausalLM(SLIDING) if sliding else transformers.LlamaForCausalLM(FULL)
    ).eval()
    cost = model_cost(model)
    lengths: list[int] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def recording(query: Any, key: Any, value: Any, **named: Any) -> Any:
        lengths.append(key.shape[2])
        return sdpa(query, key, value, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    for first in (4, 9):
        cache = StaticCache(config=model.config, max_cache_len=SLOTS)
        past = 0
        for query in (first, 3, 1, 1):
            lengths.clear()
            mask = torch.ones(2, past + query, dtype=torch.long)
            mask[0, : int(padded)] = 0
            with torch.no_grad():
                model(torch.ones(2, query, dtype=torch.long), attention_mask=mask, **{CACHE: cache})
            layout = read_layout(cache)
            assert layout is not None
            rows = [Rows(past, query, 2)]
            masked = padded or not CUTS_EMPTY_SLOTS
            work = count(cost, rows, logits_tokens=2, layout=layout, masked=masked)
            assert work.kv_read_bytes == sum(lengths) * 2 * 2 * KV_HEADS * HEAD_DIM * 4
            # All slots that there are: what a decode step reads.
            if query == 1:
                assert work.kv_read_bytes == cache_bytes(cache)
            past += query
