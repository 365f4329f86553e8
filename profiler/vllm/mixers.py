"""What mixes tokens in a model of vLLM: attention of each kind, and layers that keep a state.

vLLM's attention is a module beside the projections that make its queries, keys and values, and says all that matters:
heads and widths on this rank, window or chunk, whose cache it reads. So nothing is derived from projections here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import AttentionCost, StateCost
from phaseprof.work.modules import class_name
from phaseprof.work.parts import NotCovered

if TYPE_CHECKING:
    from torch import nn

#: FLOPs of a recurrence for each element of its state and each token, by `mamba_type`: see `phaseprof.work.state`.
_PER_ELEMENT = {"MAMBA1": 4, "MAMBA2": 4, "GDN_ATTN": 6, "LINEAR": 4, "SHORT_CONV": 0}
#: Attention that reaches something else than what lies before a query.
_OTHER_REACH = {
    "StaticSinkAttention": "tokens that no request holds",
    "RSWAAttention": "its whole prompt, and to a window of the rest",
    "PrefillPrefixLMAttention": "its prompt in both directions",
}
#: Where each query attends to what was chosen for it, every row is run on latents.
_ALL_ROWS = 1 << 62


@dataclass(frozen=True, slots=True)
class Mixer:
    """One layer that mixes tokens.

    Attributes:
        name: vLLM's name of the layer, under which its cache is known.
        cost: What it costs, for one layer.
        indexer: The scorer that chooses keys for it, as an attention of its own; None without.
    """

    name: str
    cost: AttentionCost | StateCost
    indexer: AttentionCost | None = None


def is_kind(module: object, name: str) -> bool:
    """Whether a module derives from a class of vLLM of that name (or is one of a plugin that took its place)."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def mixer_of(module: nn.Module, absorbs: int, top_k: int | None) -> Mixer | None:
    """Read a layer that mixes tokens.

    Args:
        module: Any module.
        absorbs: Query tokens of a row up to which latent attention is run on latents.
        top_k: Keys that an indexer chooses for each query, as the config says.

    Returns:
        None for a module of another kind.

    Raises:
        NotCovered: If it is one whose work is not known.
    """
    if is_kind(module, "MLAAttention"):
        return _latent(module, absorbs, top_k)
    if is_kind(module, "MambaBase"):
        return Mixer(_name(module), _state(module))
    if is_kind(module, "Attention") and is_kind(module, "AttentionLayerBase"):
        return Mixer(_name(module), _attention(module))
    if is_kind(module, "DeepseekV32IndexerCache"):
        return None  # The keys of an indexer, which is read with the attention that it chooses for.
    if is_kind(module, "AttentionLayerBase"):
        raise NotCovered(f"{class_name(module)} is an attention of unknown form")
    return None


def backend_of(module: Any) -> str | None:
    """The name of an attention's backend."""
    backend = getattr(module, "attn_backend", None)
    name = getattr(backend, "get_name", None)
    return str(name()) if callable(name) else None


def _name(module: Any) -> str:
    return str(getattr(module, "layer_name", "") or getattr(module, "prefix", ""))


def _attention(module: Any) -> AttentionCost:
    kind = str(getattr(module.attn_type, "value", module.attn_type))
    if kind == "encoder_decoder":
        raise NotCovered(
            f"{class_name(module)} attends to a source, whose length a step does not tell"
        )
    for name, why in _OTHER_REACH.items():
        if is_kind(module, name):
            raise NotCovered(f"{class_name(module)} attends to {why}")
    window = module.sliding_window
    if isinstance(window, tuple):
        window = window[0] + 1
    chunk = getattr(module, "attention_chunk_size", None)
    heads, kv_heads = int(module.num_heads), int(module.num_kv_heads)
    elements = kv_heads * (int(module.head_size) + int(module.head_size_v))
    return AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=kv_heads,
        qk_head_dim=int(module.head_size),
        v_head_dim=int(module.head_size_v),
        window_tokens=None if not window or int(window) < 0 else int(window),
        kv_bytes_per_token=elements * int(module.kv_cache_torch_dtype.itemsize),
        causal=kind == "decoder",
        chunk_tokens=None if not chunk else int(chunk),
        borrows=getattr(module, "kv_sharing_target_layer_name", None) is not None,
    )


def _latent(module: Any, absorbs: int, top_k: int | None) -> Mixer:
    """Latent attention. The cache holds latents; rows of few query tokens attend to the latents themselves, with the
    expansion moved into queries and outputs, and for all others they are expanded again."""
    heads, rank = int(module.num_heads), int(module.kv_lora_rank)
    nope, rope = int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)
    v_head_dim = int(module.v_head_dim)
    indexer = getattr(module, "indexer", None)
    sparse = indexer is not None or _is_sparse(module)
    if sparse:
        top_k = getattr(indexer, "topk_tokens", None) or top_k
        absorbs = _ALL_ROWS
        if not top_k:
            raise NotCovered(f"{class_name(module)} attends to what an indexer chooses")
    window = top_k if sparse else getattr(module, "sliding_window", None)
    cost = AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=1,
        qk_head_dim=nope + rope,
        v_head_dim=v_head_dim,
        window_tokens=int(window) if window else None,
        kv_bytes_per_token=(rank + rope) * _element_bytes(module),
        expand_flops_per_token=2 * rank * heads * (nope + v_head_dim),
        forgets=not sparse,
        absorbed_query_tokens=absorbs,
        absorbed_flops_per_pair=2 * heads * (2 * rank + rope),
    )
    return Mixer(_name(module), cost, None if indexer is None else _indexer(indexer))


def _indexer(indexer: Any) -> AttentionCost:
    """The scorer of DeepSeek-V3.2: see `phaseprof.work.indexer`. Each rank has all of it."""
    heads, width = getattr(indexer, "n_head", None), getattr(indexer, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        raise NotCovered(f"{class_name(indexer)} chooses keys in a way that is not known")
    cache = getattr(indexer, "k_cache", None)
    size = int(getattr(cache, "head_dim", width))
    return AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=1,
        qk_head_dim=width,
        v_head_dim=1,
        window_tokens=None,
        kv_bytes_per_token=size * int(getattr(getattr(cache, "dtype", None), "itemsize", 1)),
    )


def _is_sparse(module: Any) -> bool:
    ask = getattr(getattr(module, "attn_backend", None), "is_sparse", None)
    return bool(ask()) if callable(ask) else False


def _element_bytes(module: Any) -> int:
    """Of a cached latent; the cache itself tells better."""
    if str(module.kv_cache_dtype).startswith("fp8"):
        return 1
    weight = getattr(module.kv_b_proj, "params_dtype", None)
    return int(getattr(weight, "itemsize", 2))


def _state(module: Any) -> StateCost:
    kind = str(getattr(module.mamba_type, "name", module.mamba_type))
    flops = _PER_ELEMENT.get(kind)
    if flops is None:
        raise NotCovered(f"{class_name(module)} keeps a state of a kind that is not known ({kind})")
    shapes = [tuple(int(size) for size in shape) for shape in module.get_state_shape()]
    dtypes = tuple(module.get_state_dtype())
    # A convolution comes first where there are two; it is a linear layer of its own.
    recurrent = 0 if kind == "SHORT_CONV" else prod(shapes[min(1, len(shapes) - 1)])
    size = sum(
        prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=False)
    )
    return StateCost(layers=1, flops_per_token=flops * recurrent, state_bytes=size)
