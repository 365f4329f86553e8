"""What a token takes in a cache of vLLM, by its own specs: windows, latents, states, quantized keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm_models import load_model

from phaseprof.vllm.kv import block_pool
from phaseprof.vllm.mixers import is_kind
from phaseprof.vllm.model import mixing_modules

BLOCK = 16


class Decoder(torch.nn.Module):
    """Holds layers that say what vLLM's own say, which cannot be made without an engine."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name.replace(".", "_"), layer)


class AttentionLayerBase:
    """What vLLM's layers with a cache derive from."""


class Attention(torch.nn.Module, AttentionLayerBase):
    """An attention of 8 query heads on 2 key heads of 64 elements."""

    def __init__(self, name: str, window: int | None = None, shares: str | None = None) -> None:
        super().__init__()
        self.layer_name = name
        self.attn_type = "decoder"
        self.num_heads, self.num_kv_heads = 8, 2
        self.head_size = self.head_size_v = 64
        self.sliding_window = window
        self.kv_cache_torch_dtype = torch.bfloat16
        self.kv_sharing_target_layer_name = shares


def runner_of(layers: Mapping[str, Any], specs: Mapping[str, Any], caches: Any = ()) -> Any:
    """A runner with a group for each layer."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    model = Decoder(layers)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    return SimpleNamespace(
        get_model=lambda: model,
        kv_cache_config=KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups),
        kv_caches=list(caches),
    )


def full(**changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    settings = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**settings, **changes})


def sliding(window: int, **changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    settings = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**{**settings, **changes}, sliding_window=window)


def test_windows_drop_what_lies_outside_where_the_cache_knows_of_them() -> None:
    names = [f"model.layers.{n}.self_attn.attn" for n in range(4)]
    layers = {
        names[0]: Attention(names[0]),
        names[1]: Attention(names[1], window=32),
        # The hybrid allocator is off.
        names[2]: Attention(names[2], window=32),
        names[3]: Attention(names[3], window=32, shares=names[1]),
    }
    specs = {
        names[0]: full(),
        names[1]: sliding(32),
        names[2]: full(sliding_window=32),
        names[3]: sliding(32),
    }
    pool = block_pool(runner_of(layers, specs))
    token = 2 * (64 + 64) * 2
    assert [
        (g.layer_indices, g.bytes_per_token, g.window_tokens, g.forgets) for g in pool.layout.groups
    ] == [((0,), token, None, False), ((1,), token, 32, True), ((2,), token, 32, False)]


def test_quantized_keys_and_values_take_what_is_stored() -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    name = "model.layers.0.self_attn.attn"
    specs = {
        "fp8": full(dtype=torch.float8_e4m3fn, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        # A scale of 4 bytes for each key and each value.
        "int8": full(
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            state_content_bytes=2 * 64 + 2 * 4,
        ),
        "padded": full(page_size_padded=1 << 16),
    }
    sizes = {
        kind: block_pool(runner_of({name: Attention(name)}, {name: spec})).layout.bytes_per_token
        for kind, spec in specs.items()
    }
    assert sizes == {"fp8": 2 * 128, "int8": 2 * (128 + 8), "padded": 2 * 128 * 2}


def test_latents_are_one_vector_a_token() -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    name = "model.layers.0.self_attn.attn"
    plain = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    packed = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656
    )
    pools = [block_pool(runner_of({name: Attention(name)}, {name: s})) for s in (plain, packed)]
    assert [pool.layout.bytes_per_token for pool in pools] == [576 * 2, 656]


def test_the_pool_is_its_tensors_each_once() -> None:
    name = "model.layers.0.self_attn.attn"
    memory = torch.zeros(4096, dtype=torch.int8)
    views = [memory[:1024].view(4, 256), [memory[1024:].view(12, 256), torch.zeros(8)]]
    pool = block_pool(runner_of({name: Attention(name)}, {name: full()}, views))
    assert pool.allocated_bytes == 4096 + 32


def test_what_is_not_known_is_said() -> None:
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    name = "model.layers.0.self_attn.attn"
    cross = CrossAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    pool = block_pool(runner_of({name: Attention(name)}, {name: cross}))
    assert pool.layout.not_covered == ("a cache of the kind CrossAttentionSpec",)
    assert pool.holds
    nothing = block_pool(SimpleNamespace(kv_caches=[]))
    assert "in a form that is not known" in nothing.layout.not_covered[0]


def test_a_hybrid_by_the_specs_of_its_own_layers(tmp_path: Path) -> None:
    """Falcon-H1 has an attention and a state space in each layer."""
    import transformers
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    config = transformers.FalconH1Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_expand=1,
        architectures=["FalconH1ForCausalLM"],
    )
    model = load_model(tmp_path, config)
    specs = {}
    for _, module in mixing_modules(model):
        layer: Any = module
        if is_kind(layer, "MambaBase"):
            specs[layer.prefix] = MambaSpec(
                block_size=256,
                shapes=tuple(layer.get_state_shape()),
                dtypes=layer.get_state_dtype(),
                page_size_padded=1 << 20,
            )
        else:
            specs[layer.layer_name] = full(
                num_kv_heads=layer.num_kv_heads, head_size=layer.head_size, dtype=torch.float32
            )
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    runner = SimpleNamespace(
        get_model=lambda: model,
        kv_cache_config=KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups),
        kv_caches=[],
    )
    layout = block_pool(runner).layout
    assert layout.covered
    assert layout.bytes_per_token == 2 * 2 * (32 + 32) * 4
    # The state of each head, and three taps of what the convolution runs over: x, and B and C of the groups.
    assert layout.state_bytes == 2 * (4 * 32 * 16 + 3 * (128 + 2 * 2 * 16)) * 4
