"""What a cache holds and hands to attention, against the tensors of the caches of transformers themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, MistralConfig, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from phaseprof.work.cache_layers import Packing
from phaseprof.work.cost import AttentionCost, CrossAttentionCost, ModelCost
from phaseprof.work.count import Rows, Source, count
from phaseprof.work.kv import KvGroup, KvLayout, cache_bytes, read_layout, with_layout
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


def test_an_encoder_decoder_cache_holds_its_source_beside_its_own_tokens() -> None:
    own, cross = DynamicCache(), DynamicCache()
    fill(own, 3)
    assert read_layout(EncoderDecoderCache(own, DynamicCache())) == read_layout(own)
    fill(cross, 50)
    both = EncoderDecoderCache(own, cross)
    layout, alone = read_layout(both), read_layout(own)
    assert layout is not None and alone is not None
    assert layout.groups == alone.groups
    assert layout.cross_bytes_per_token == LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert cache_bytes(both) == cache_bytes(own) + cache_bytes(cross)
    cross_cost = CrossAttentionCost(LAYERS, 4, HEAD_DIM, HEAD_DIM, 1, 1, 1)
    cost = with_layout(replace(cost_of(None), cross=(cross_cost,)), layout)
    assert cost.cross[0].kv_bytes_per_source_token == 2 * KV_HEADS * HEAD_DIM * 4
    source = Source(50, projected=False, encoded=False)
    work = count(cost, [Rows(2, 1, 2)], logits_tokens=0, layout=layout, source=source)
    assert work.kv_held_bytes == cache_bytes(both)


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
    layout = read_layout(((torch.ones(1), torch.ones(1)),))
    assert layout == KvLayout((), ("a cache of class tuple",))
    layout = read_layout(ForeignCache())
    assert layout == KvLayout((), ("a cache of class ForeignCache",))


class ForeignCache:
    """A user's cache, of the form that single models of transformers bring along."""

    def __init__(self) -> None:
        self.key_cache = self.value_cache = [torch.ones(1, 2, 3, 4)]


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums what the operations of a cache read and write, by the tensors that they are given and give back."""

    MOVERS = ("cat", "roll", "copy_", "index_copy_", "index_put_")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "cat":
            moved = [*args[0], out]
        elif name == "roll":
            moved = [args[0], out]
        elif name in self.MOVERS:
            # What is put in is read, and as much is written.
            source = args[{"copy_": 1, "index_copy_": 3, "index_put_": 2}[name]]
            moved = [source, source]
        else:
            moved = []
        self.bytes += sum(t.numel() * t.element_size() for t in moved if t.dtype != torch.int64)
        return torch.as_tensor(out)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", [n for n in caches() if not n.endswith("its window")])
@given(queries=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_what_a_cache_copies_is_what_its_operations_move(name: str, queries: list[int]) -> None:
    cache = caches()[name]
    cost, past, per_token = cost_of(WINDOW if "sliding" in name else None), 0, 0
    for query in queries:
        with Traffic() as traffic:
            fill(cache, query)
        layout = read_layout(cache)
        assert layout is not None
        per_token = layout.bytes_per_token * 2
        work = count(cost, [Rows(past, query, 2)], logits_tokens=0, layout=layout)
        # The tokens of the pass are read and written once. Of a prompt longer than a static window the rest is cut off.
        new = min(query, WINDOW) if name == "static, sliding" and not past else query
        assert work.cache_copy_bytes == traffic.bytes - 2 * new * per_token
        past += query
    slots = {"static": SLOTS, "static, sliding": WINDOW}.get(name)
    assert work.kv_allocated_bytes == (cache_bytes(cache) if slots is None else slots * per_token)
    assert cache_bytes(cache) == work.kv_allocated_bytes


KINDS = transformers.cache_utils


@pytest.mark.skipif(not hasattr(KINDS, "DynamicIndexedLayer"), reason="not in this transformers")
@pytest.mark.parametrize("static", [False, True])
def test_keys_of_an_indexer_are_part_of_the_cache(static: bool) -> None:
    cache = DynamicCache(config=FULL)
    kind = KINDS.StaticIndexedLayer if static else KINDS.DynamicIndexedLayer
    cache.layers = [kind(max_cache_len=SLOTS) for _ in range(LAYERS)]
    past = 0
    for query in (5, 1):
        fill(cache, query)
        for layer in cache.layers[:2]:
            # The last layer takes the choice of another one, and has no indexer of its own.
            layer.update_indexer(torch.ones(2, query, 16))
        layout = read_layout(cache)
        assert layout is not None and layout.covered
        work = count(cost_of(None), [Rows(past, query, 2)], logits_tokens=0, layout=layout)
        assert work.kv_allocated_bytes == cache_bytes(cache)
        per_token = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 + 2 * 16 * 4
        assert work.kv_write_bytes == 2 * query * per_token
        past += query
    assert layout is not None
    assert [g.layer_indices for g in layout.groups] == [(0, 1), (2,)]


def packed_layer(name: str) -> Any:
    if name == "fp8":
        return KINDS.Fp8QuantizedLayer()
    if name == "quanto":
        return KINDS.QuantoQuantizedLayer(nbits=4, q_group_size=16, residual_length=4)
    layer = object.__new__(KINDS.HQQQuantizedLayer)
    KINDS.QuantizedLayer.__init__(layer, nbits=8, q_group_size=16, residual_length=4)
    layer.quantizer = HalfQuantizer
    return layer


class HalfQuantizer:
    """Gives what HQQ gives: a packed tensor, and a dict with its shape, scales and zero points."""

    @staticmethod
    def quantize(tensor: Any, *, group_size: int, **_: Any) -> tuple[Any, dict[str, Any]]:
        groups = tensor.numel() // group_size
        meta = {
            "shape": tensor.shape,
            "scale": torch.ones(groups, 1),
            "zero": torch.ones(groups, 1),
        }
        return tensor.to(torch.int8), {**meta, "nbits": 8}

    @staticmethod
    def cuda(*_: Any, **__: Any) -> None:
        """Nothing is moved."""

    @staticmethod
    def dequantize(packed: Any, meta: dict[str, Any]) -> Any:
        return packed.to(meta["compute_dtype"])


def stored(cache: Any) -> int:
    """Bytes of every tensor below the layers, found by walking over their attributes."""
    total, todo = 0, [vars(layer) for layer in cache.layers]
    while todo:
        item: Any = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, tuple | list):
            todo.extend(item)
        elif hasattr(item, "__tensor_flatten__"):
            todo.extend(getattr(item, name) for name in item.__tensor_flatten__()[0])
        elif isinstance(item, torch.Tensor) and item.dim() > 0:
            total += item.numel() * item.element_size()
    return total


# Building its extension for unpacking is not what is tested here.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp8", "quanto", "hqq"])
def test_quantized_caches_hold_what_is_stored_and_hand_out_full_precision(name: str) -> None:
    if name == "fp8" and not hasattr(KINDS, "Fp8QuantizedLayer"):
        pytest.skip("not in this transformers")
    cache = DynamicCache(config=FULL)
    cache.layers = [packed_layer(name) for _ in range(LAYERS)]
    past = 0
    layout = None
    for query in (7, *[1] * 9):
        handed_out = fill(cache, query)
        # Read once, after the first pass, as the hooks do.
        layout = layout or read_layout(cache)
        assert layout is not None and layout.covered and layout.of_one_cache
        work = count(cost_of(None), [Rows(past, query, 2)], logits_tokens=0, layout=layout)
        assert work.kv_read_bytes == handed_out
        assert work.kv_held_bytes == work.kv_allocated_bytes == stored(cache)
        past += query
    # Whole tensors have a scale in fp8: 4 bytes for the keys and for the values of each layer.
    assert cache_bytes(cache) == stored(cache) + (LAYERS * 2 * 4 if name == "fp8" else 0)


def test_a_quantized_store_by_hand() -> None:
    group = KvGroup((0, 1), 64, None, None, "float32", Packing(10.0, 4, 7))
    layout = KvLayout((group,))

    def at(past: int, query: int) -> Any:
        return count(cost_of(None), [Rows(past, query, 1)], logits_tokens=0, layout=layout)

    # 7 tokens of the first pass are packed at once, in 10 bytes a layer; then 3 wait, and the 4th packs all.
    assert [at(p, q).kv_held_bytes for p, q in ((0, 7), (7, 1), (9, 1), (10, 1))] == [
        2 * 70,
        2 * (70 + 64),
        2 * (70 + 3 * 64),
        2 * 110,
    ]
    assert at(0, 7).cache_copy_bytes == 0
    # Unpacked: 7 x 10 read, 7 x 64 written; joined: 9 x 64 read, 10 x 64 written; 2 that wait: joined as well.
    assert at(9, 1).cache_copy_bytes == 2 * (70 + 7 * 64 + 19 * 64 + 4 * 64)
    # Full: all 11 are read again, and the 10 old ones packed again.
    assert at(10, 1).cache_copy_bytes == 2 * (70 + 7 * 64 + 21 * 64 + 11 * 64 + 100)
    assert (at(9, 1).kv_write_bytes, at(10, 1).kv_write_bytes) == (2 * 64, 2 * 10)


@pytest.mark.skipif(not hasattr(KINDS, "LinearAttentionLayer"), reason="not in this transformers")
def test_states_of_constant_size_are_read_beside_keys_and_values() -> None:
    cache = DynamicCache(config=FULL)
    both = KINDS.LinearAttentionAndFullAttentionLayer
    cache.layers = [KINDS.LinearAttentionLayer(), both(), DynamicLayer()]
    for layer in cache.layers[:2]:
        layer.update_conv_state(torch.ones(2, 6, 4))
        layer.update_recurrent_state(torch.ones(2, 3, 5))
    for layer in cache.layers[1:]:
        layer.update(*(torch.ones(2, KV_HEADS, 3, HEAD_DIM) for _ in range(2)))
    layout = read_layout(cache)
    assert layout is not None and layout.covered
    assert layout.state_bytes == 2 * (6 * 4 + 3 * 5) * 4
    assert [group.layer_indices for group in layout.groups] == [(1, 2)]
    assert cache_bytes(cache) == 2 * (layout.state_bytes + 3 * layout.bytes_per_token)


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
