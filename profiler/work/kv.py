"""The layout of a real KV cache: what one token adds to it, read from the tensors that it holds.

Two forms are read: the caches of transformers 5, which are lists of layers (`phaseprof.work.cache_layers`), and those
that single models bring along, which are lists of tensors: ``key_cache``, ``value_cache``, ``conv_states``,
``ssm_states``. A layer of another kind (of a user's own making) makes the layout "not covered": its bytes are then
null, not guessed from a config. What each layer gives to attention is in `phaseprof.work.stores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.cache_layers import (
    STATES,
    LayerShape,
    Packing,
    UnknownLayer,
    bytes_of_sequence,
    dtype_of,
    layer_shape,
    layer_tensors,
    tensors_in,
)
from phaseprof.work.cost import AttentionCost, CrossAttentionCost, ModelCost, StateCost

if TYPE_CHECKING:
    from torch import Tensor


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
        packing: How a quantized layer stores its tokens; ``bytes_per_token`` then is what attention is given.
        forgets: What lies outside of the window is dropped; False where only attention leaves it out.
    """

    layer_indices: tuple[int, ...]
    bytes_per_token: int
    window_tokens: int | None
    allocated_tokens: int | None
    dtype: str
    packing: Packing | None = None
    forgets: bool = True

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
    def of_one_cache(self) -> bool:
        """Whether another cache of the same class may be laid out otherwise: with other slots, or packed after another
        first pass."""
        return any(g.allocated_tokens is not None or g.packing is not None for g in self.groups)

    @property
    def layers(self) -> int:
        """Layers of the cache."""
        return sum(group.layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence adds to all layers."""
        return sum(group.layers * group.bytes_per_token for group in self.groups)


def read_layout(cache: object) -> KvLayout | None:
    """Read a cache of transformers.

    Shapes and dtypes are read, no element and no length, so nothing waits for a device.

    Returns:
        None for no cache, or one that has not seen a token yet (its tensors are made by the first pass).
    """
    if cache is None:
        return None
    crossed = getattr(cache, "cross_attention_cache", None)
    if crossed is not None:
        own = read_layout(getattr(cache, "self_attention_cache", None))
        source = read_layout(crossed)
        if own is None or not own.covered or source is None or not source.covered:
            return own if source is None or source.covered else source
        return replace(own, cross_bytes_per_token=source.bytes_per_token)
    try:
        shapes = dict(_shapes(cache))
    except UnknownLayer as kind:
        return KvLayout((), (f"cache layers of class {kind}",))
    except _UnknownCache as kind:
        return KvLayout((), (f"a cache of class {kind}",))
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, shape in shapes.items():
        if shape.bytes_per_token:
            key = (
                shape.bytes_per_token,
                shape.window_tokens,
                shape.allocated_tokens,
                shape.dtype,
                shape.packing,
            )
            groups.setdefault(key, []).append(index)
    if not shapes:
        return None
    return KvLayout(
        tuple(KvGroup(tuple(found), *key) for key, found in groups.items()),
        state_bytes=sum(shape.state_bytes for shape in shapes.values()),
    )


def with_layout(cost: ModelCost, layout: KvLayout) -> ModelCost:
    """The cost with the bytes of a real cache in place of those derived from the weights.

    Attention layers and cache layers are matched by their number. A cost that does not record the numbers takes a
    figure that all cache layers share. Where the two do not match, the cost is returned as it is.
    """
    if not layout.covered or not cost.covered:
        return cost
    return replace(
        cost,
        attention=_attention_with(cost.attention, layout),
        states=_states_with(cost.states, layout),
        cross=_cross_with(cost.cross, layout),
    )


def cache_bytes(cache: object) -> int:
    """Bytes of the keys, values and states that a cache holds, each stretch of memory once.

    What a layer shows counts, not what lies behind it: after a long prefill the tensors of a sliding layer are a view
    of the last tokens in a larger block, which the next pass frees.
    """
    seen: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for tensor in _tensors(cache):
        key = (
            tensor.untyped_storage().data_ptr(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
        )
        seen[key] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


class _UnknownCache(Exception):
    pass


def _shapes(cache: Any) -> Iterator[tuple[int, LayerShape]]:
    """The layers that hold something, with their numbers."""
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        for index, layer in enumerate(layers):
            shape = layer_shape(layer)
            if shape is not None:
                yield index, shape
        # Of a cache that keeps states beside its layers (MiniMax): numbers that no layer has.
        yield from ((-1 - i, shape) for i, shape in enumerate(_state_shapes(cache)))
    elif type(cache).__module__.startswith("transformers.models.") and _holds_lists(cache):
        yield from _listed_shapes(cache)
    else:
        raise _UnknownCache(type(cache).__name__)


def _holds_lists(cache: Any) -> bool:
    return any(hasattr(cache, name) for name in ("key_cache", *STATES))


def _listed_shapes(cache: Any) -> Iterator[tuple[int, LayerShape]]:
    """The caches of single models before transformers 5.10: lists of tensors, which grow as a dynamic layer does."""
    keys, values = (
        getattr(cache, "key_cache", None) or (),
        getattr(cache, "value_cache", None) or (),
    )
    for index, pair in enumerate(zip(keys, values, strict=False)):
        # A layer without attention has an empty tensor, or none.
        if all(t is not None and t.dim() == 4 for t in pair):
            size = sum(int(t.shape[1]) * int(t.shape[3]) * int(t.element_size()) for t in pair)
            yield index, LayerShape(size, None, None, dtype_of(pair[0]), None, 0)
    yield from ((-1 - i, shape) for i, shape in enumerate(_state_shapes(cache)))


def _state_shapes(cache: Any) -> Iterator[LayerShape]:
    for tensor in _listed_states(cache):
        size = bytes_of_sequence(tensor)
        if size:
            yield LayerShape(0, None, None, "", None, size)


def _listed_states(cache: Any) -> Iterator[Tensor]:
    for name in STATES:
        value: Any = getattr(cache, name, None)
        # All layers in one tensor (Mamba-2): the batch is its second axis.
        yield from value.unbind(0) if hasattr(value, "unbind") else tensors_in(value)


def _tensors(cache: Any) -> Iterator[Tensor]:
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, part):
            yield from _tensors(getattr(cache, part))
    layers = getattr(cache, "layers", None)
    for layer in layers if isinstance(layers, list) else ():
        yield from layer_tensors(layer)
    for name in ("key_cache", "value_cache"):
        yield from tensors_in(getattr(cache, name, None))
    yield from _listed_states(cache)


def _attention_with(
    attention: tuple[AttentionCost, ...], layout: KvLayout
) -> tuple[AttentionCost, ...]:
    of_layer = {i: g.bytes_per_token for g in layout.groups for i in g.layer_indices}
    if sum(group.layers for group in attention) != len(of_layer):
        return attention
    groups: list[AttentionCost] = []
    for group in attention:
        indices = group.layer_indices or tuple(of_layer)
        sizes = {of_layer.get(i) for i in indices}
        if None in sizes or (len(sizes) > 1 and not group.layer_indices):
            return attention
        groups.extend(_split(group, of_layer))
    return tuple(groups)


def _states_with(states: tuple[StateCost, ...], layout: KvLayout) -> tuple[StateCost, ...]:
    # Which layer holds how much is not recorded: only layers that are all alike can be told.
    if len(states) != 1 or not layout.state_bytes or layout.state_bytes % states[0].layers:
        return states
    return (replace(states[0], state_bytes=layout.state_bytes // states[0].layers),)


def _cross_with(
    cross: tuple[CrossAttentionCost, ...], layout: KvLayout
) -> tuple[CrossAttentionCost, ...]:
    size = layout.cross_bytes_per_token
    if len(cross) != 1 or not size or size % cross[0].layers:
        return cross
    return (replace(cross[0], kv_bytes_per_source_token=size // cross[0].layers),)


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
