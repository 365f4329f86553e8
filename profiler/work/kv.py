"""The layout of a real KV cache: what one token adds to it, read from the tensors that it holds.

Read from the caches of transformers 5, which are lists of layers with ``keys`` and ``values`` of the shape
(sequences, heads, tokens, head dim). Four kinds of layer are known; what each gives to attention is in
`phaseprof.work.count`. A layer of another kind (quantized, linear attention, indexed, of a user's own making) makes
the layout "not covered": its bytes are then null, not guessed from a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import AttentionCost, ModelCost

if TYPE_CHECKING:
    from torch import Tensor

#: The layers of transformers whose behaviour is known, by the class that defines their `update`, and whether they
#: allocate all their slots at once.
_STATIC = {
    "DynamicLayer": False,
    "DynamicSlidingWindowLayer": False,
    "StaticLayer": True,
    "StaticSlidingWindowLayer": True,
}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of identical cache layers.

    Attributes:
        layer_indices: Which layers, as the cache numbers them.
        bytes_per_token: Bytes of keys and values that one token of one sequence adds to one of them.
        window_tokens: Sliding window; None for a layer that keeps every token. For a static layer: its slots, which
            are the window or, if that is less, all that was asked for.
        allocated_tokens: Slots that a static layer allocates for each sequence; None for a layer that grows.
        dtype: As torch spells it, without the prefix.
    """

    layer_indices: tuple[int, ...]
    bytes_per_token: int
    window_tokens: int | None
    allocated_tokens: int | None
    dtype: str

    @property
    def layers(self) -> int:
        """How many layers are like this."""
        return len(self.layer_indices)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layers of a cache, grouped, in the order of their first layer.

    Attributes:
        groups: Empty if the layout is not covered.
        not_covered: Why the bytes of this cache are not known, one clause each; empty when they are.
        state_bytes: Bytes of the states of constant size (state spaces, linear attention) of one sequence, over all
            layers.
        cross_bytes_per_token: Bytes of keys and values of one token of a source, over all layers of cross attention.
    """

    groups: tuple[KvGroup, ...]
    not_covered: tuple[str, ...] = ()
    state_bytes: int = 0
    cross_bytes_per_token: int = 0

    @property
    def covered(self) -> bool:
        """Whether the bytes of the cache are known."""
        return not self.not_covered

    @property
    def layers(self) -> int:
        """Layers of the cache."""
        return sum(group.layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence adds to all layers."""
        return sum(group.layers * group.bytes_per_token for group in self.groups)


def read_layout(cache: object) -> KvLayout | None:
    """Read a cache of transformers; of an `EncoderDecoderCache`, the part for self-attention.

    Shapes and dtypes are read, no element and no length, so nothing waits for a device.

    Returns:
        None for no cache, or one that has not seen a token yet (its tensors are made by the first pass).
    """
    layers = _layers(cache)
    if layers is None:
        return None if cache is None else _unknown(f"a cache of class {type(cache).__name__}")
    groups: dict[tuple[int, int | None, int | None, str], list[int]] = {}
    for index, layer in enumerate(layers):
        static = _STATIC.get(_behaviour(layer))
        if static is None:
            return _unknown(f"cache layers of class {type(layer).__name__}")
        keys, values = layer.keys, layer.values
        # Before the first pass there is no tensor, or an empty one without axes.
        if keys is None or values is None or keys.dim() != 4 or values.dim() != 4:
            return None
        shape = _shape(layer, keys, values, static)
        groups.setdefault(shape, []).append(index)
    if not groups:
        return None
    return KvLayout(tuple(KvGroup(tuple(found), *shape) for shape, found in groups.items()))


def with_layout(cost: ModelCost, layout: KvLayout) -> ModelCost:
    """The cost with the bytes per token of a real cache in place of those derived from the weights.

    Attention layers and cache layers are matched by their number. A cost that does not record the numbers takes a
    figure that all cache layers share. Where the two do not match, the cost is returned as it is.
    """
    if not layout.covered or not cost.covered:
        return cost
    of_layer = {i: g.bytes_per_token for g in layout.groups for i in g.layer_indices}
    if sum(group.layers for group in cost.attention) != len(of_layer):
        return cost
    groups: list[AttentionCost] = []
    for group in cost.attention:
        indices = group.layer_indices or tuple(of_layer)
        sizes = {of_layer.get(i) for i in indices}
        if None in sizes or (len(sizes) > 1 and not group.layer_indices):
            return cost
        groups.extend(_split(group, of_layer))
    return replace(cost, attention=tuple(groups))


def cache_bytes(cache: object) -> int:
    """Bytes of the keys and values that a cache holds, each stretch of memory once.

    What a layer shows counts, not what lies behind it: after a long prefill the tensors of a sliding layer are a view
    of the last tokens in a larger block, which the next pass frees.
    """
    seen: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for layer in _layers(cache) or ():
        for tensor in _tensors(layer):
            key = (
                tensor.untyped_storage().data_ptr(),
                int(tensor.storage_offset()),
                tuple(tensor.shape),
            )
            seen[key] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _layers(cache: object) -> list[Any] | None:
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    return layers if isinstance(layers, list) else None


def _tensors(layer: object) -> Iterator[Tensor]:
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield tensor


def _unknown(reason: str) -> KvLayout:
    return KvLayout(groups=(), not_covered=(reason,))


def _behaviour(layer: object) -> str:
    """The class of transformers that says what `update` does: a subclass may have changed it."""
    for owner in type(layer).__mro__:
        if "update" in vars(owner):
            known = owner.__module__ == "transformers.cache_utils"
            return owner.__name__ if known and not _holds_more(layer) else ""
    return ""


def _holds_more(layer: object) -> bool:
    # An indexer's keys, or the state of a linear attention beside the keys and values.
    return hasattr(layer, "indexer_keys") or hasattr(layer, "conv_states")


def _shape(
    layer: object, keys: Tensor, values: Tensor, static: bool
) -> tuple[int, int | None, int | None, str]:
    size = sum(int(t.shape[1]) * int(t.shape[3]) * int(t.element_size()) for t in (keys, values))
    sliding = bool(getattr(layer, "is_sliding", False))
    allocated = int(keys.shape[2]) if static else None
    window = allocated if static else int(getattr(layer, "sliding_window", 0))
    dtype = str(keys.dtype).removeprefix("torch.")
    return size, window if sliding else None, allocated, dtype


def _split(group: AttentionCost, of_layer: dict[int, int]) -> Iterator[AttentionCost]:
    """Divide a group of attention layers by the bytes that their cache layers take."""
    if not group.layer_indices:
        yield replace(group, kv_bytes_per_token=next(iter(of_layer.values())))
        return
    by_size: dict[int, list[int]] = {}
    for index in group.layer_indices:
        by_size.setdefault(of_layer[index], []).append(index)
    for size, indices in by_size.items():
        yield replace(
            group,
            layers=len(indices),
            kv_bytes_per_token=size,
            layer_indices=tuple(indices),
        )
