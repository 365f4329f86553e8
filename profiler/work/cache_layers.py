"""One layer of a KV cache of transformers, read from the tensors that it holds: shapes and dtypes, no element.

The layers of transformers 5 hold ``keys`` and ``values`` of the shape (sequences, heads, tokens, head dim). A layer is
known by the class of transformers that defines its `update`, since that is what decides how it grows. Beside keys and
values it may hold an indexer's keys (sparse attention), states of constant size (state spaces, linear attention, short
convolutions), or keys and values in packed form (quantized caches).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: The layers whose `update` is known, by the class that defines it, and whether they allocate all slots at once.
_STATIC = {
    "DynamicLayer": False,
    "DynamicSlidingWindowLayer": False,
    "StaticLayer": True,
    "StaticSlidingWindowLayer": True,
}
#: Layers that keep keys and values in packed form; whether the newest tokens stay as they are for a while.
_PACKED = {"QuantizedLayer": True, "Fp8QuantizedLayer": False}
#: Attributes that hold states of constant size, in a layer and in the caches of transformers before 5.10.
STATES = ("conv_states", "recurrent_states", "ssm_states", "conv_cache", "linear_cache")
_UPDATES = ("update", "update_conv_state", "update_recurrent_state", "update_indexer")


@dataclass(frozen=True, slots=True)
class Packing:
    """How a quantized layer stores keys and values.

    Attributes:
        bytes_per_token: Bytes of the packed data, scales and zero points of one token of one sequence.
        residual_tokens: The newest tokens stay in full precision until there are so many, then all are packed again; 0
            where each token is packed as it comes.
        first_tokens: Tokens of the cache's first pass, which are packed at once; 0 where that makes no difference.
    """

    bytes_per_token: float
    residual_tokens: int
    first_tokens: int

    def packed_tokens(self, held: int) -> int:
        """How many of the tokens held are packed, if those after the first pass came one at a time."""
        if not self.residual_tokens or held <= self.first_tokens:
            return held
        return held - (held - self.first_tokens) % self.residual_tokens


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one cache layer holds.

    Attributes:
        bytes_per_token: Of keys and values of one token of one sequence, as attention is given them; 0 for a layer
            that holds none.
        window_tokens, allocated_tokens, dtype: As in `phaseprof.work.kv.KvGroup`.
        packing: Of a quantized layer.
        state_bytes: Bytes of the states of constant size of one sequence.
    """

    bytes_per_token: int
    window_tokens: int | None
    allocated_tokens: int | None
    dtype: str
    packing: Packing | None
    state_bytes: int


class UnknownLayer(Exception):
    """A layer of a kind that is not known; the message names it."""


def layer_shape(layer: Any) -> LayerShape | None:
    """Read one cache layer.

    Returns:
        None for a layer that holds nothing (yet).

    Raises:
        UnknownLayer: If what its `update` does is not known.
    """
    owner = _behaviour(layer)
    if owner in _PACKED:
        return _packed_shape(layer, residual=_PACKED[owner])
    if owner not in _STATIC and owner != "":
        raise UnknownLayer(type(layer).__name__)
    states = sum(bytes_of_sequence(t) for t in _states(layer))
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    # Before the first pass there is no tensor, or an empty one without axes.
    if owner == "" or keys is None or values is None or keys.dim() != 4 or values.dim() != 4:
        return LayerShape(0, None, None, "", None, states) if states else None
    size = sum(int(t.shape[1]) * int(t.shape[3]) * int(t.element_size()) for t in (keys, values))
    indexed = getattr(layer, "indexer_keys", None)
    if indexed is not None and indexed.dim() == 3:
        size += int(indexed.shape[2]) * int(indexed.element_size())
    static = _STATIC[owner]
    sliding = bool(getattr(layer, "is_sliding", False))
    allocated = int(keys.shape[2]) if static else None
    window = allocated if static else int(getattr(layer, "sliding_window", 0))
    return LayerShape(size, window if sliding else None, allocated, dtype_of(keys), None, states)


def layer_tensors(layer: Any) -> Iterator[Tensor]:
    """Every tensor of keys, values and states that a layer holds: of packed ones those that are stored."""
    for name in ("keys", "values", "indexer_keys"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield tensor
    for name in ("_quantized_keys", "_quantized_values"):
        yield from stored_tensors(getattr(layer, name, None))
    yield from _states(layer)


def stored_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside a tuple, a dict, or a tensor that wraps others."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from stored_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from stored_tensors(item)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from stored_tensors(getattr(value, name))
    elif hasattr(value, "untyped_storage"):
        yield value


def bytes_of_sequence(tensor: Tensor) -> int:
    """Bytes of a state for one sequence: its first axis is the batch."""
    if tensor.dim() < 2 or not tensor.shape[0]:
        return 0
    return int(tensor.numel()) * int(tensor.element_size()) // int(tensor.shape[0])


def dtype_of(tensor: Tensor) -> str:
    """As torch spells it, without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def _behaviour(layer: object) -> str:
    """The class of transformers that says what `update` does; "" if there is none to say it (a layer of states
    alone), "?" if a class from elsewhere says it."""
    owner = ""
    for name in _UPDATES:
        by = next((c for c in type(layer).__mro__ if name in vars(c)), None)
        if by is None:
            continue
        if by.__module__ != "transformers.cache_utils":
            return "?"
        if name == "update":
            owner = by.__name__
    if owner == "DummyLayer":
        return ""
    holds = owner or any(hasattr(layer, name) for name in STATES)
    return owner if holds else "?"


def _states(layer: Any) -> Iterator[Tensor]:
    """States of constant size. One that records the past, to be cropped, holds more for a while."""
    for name in STATES:
        for index, tensor in enumerate(tensors_in(getattr(layer, name, None))):
            kept = getattr(layer, "conv_kernel_size", None)
            if name == "conv_states" and isinstance(kept, dict) and kept.get(index):
                tensor = tensor[..., -kept[index] :]
            yield tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an attribute that is one, or holds several."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif value is not None:
        for item in value.values() if isinstance(value, dict) else value:
            if hasattr(item, "untyped_storage"):
                yield item


def _packed_shape(layer: Any, *, residual: bool) -> LayerShape | None:
    packed = (getattr(layer, "_quantized_keys", None), getattr(layer, "_quantized_values", None))
    shapes = [_dense_shape(value) for value in packed]
    if None in shapes or layer.keys is None:
        return None
    dense = [shape for shape in shapes if shape is not None]
    sequences, tokens = dense[0][0], dense[0][2]
    if not sequences or not tokens:
        return None
    # The scale of a whole tensor (fp8) is no token's.
    stored = sum(int(t.numel()) * int(t.element_size()) for t in stored_tensors(packed) if t.dim())
    element = int(layer.keys.element_size())
    return LayerShape(
        sum(shape[1] * shape[3] * element for shape in dense),
        None,
        None,
        dtype_of(layer.keys),
        Packing(
            stored / (sequences * tokens),
            int(layer.residual_length) if residual else 0,
            tokens if residual else 0,
        ),
        0,
    )


def _dense_shape(packed: Any) -> tuple[int, ...] | None:
    """(sequences, heads, tokens, head dim) of what was packed: by the tensor, or as its backend wrote it down."""
    shape = getattr(packed, "shape", None)
    if isinstance(packed, tuple) and len(packed) == 2:
        tensor, extra = packed
        shape = extra.get("shape") if isinstance(extra, dict) else getattr(tensor, "shape", None)
    return None if shape is None or len(shape) != 4 else tuple(int(n) for n in shape)
