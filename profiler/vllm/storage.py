"""What a layer of vLLM stores, per rank, and how large its matrices are.

Layers declare their part of a matrix (``input_size_per_partition``, ``output_size_per_partition``), whatever form its
weights have; bytes are those of the parameters that a step reads. Loading may repack weights into objects that show no
tensor: on a CPU, oneDNN's copy leaves an empty ``weight`` behind. Then the size of plain numbers follows from what the
layer declares, and that of quantized ones is remembered from before they were repacked (`WeightsAsLoaded`).
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.modules import own_parameters
from phaseprof.work.packed import PLAIN_DTYPES, Stored, stored_of

if TYPE_CHECKING:
    from torch import nn

#: Scratch space of kernels: no weights.
_SCRATCH = frozenset({"workspace"})
#: A weight takes 1 to 64 bits, scales included. Less than that, and the data lie somewhere else.
_LEAST_BITS = 1
_WIDTHS = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_BYTE_EACH = frozenset({"int8", "float8_e4m3fn"})
#: What the products of a quantized layer are computed in, by the class of its method or of the scheme in it, where
#: both operands are quantized. Whatever else is packed is unpacked to the dtype of the activations first.
_MATHS = (
    (re.compile(r"weight_?only|wna16|w\d+a16|marlin", re.IGNORECASE), None),
    (re.compile(r"w8a8_?int8|int8_?w8a8|w4a8_?int", re.IGNORECASE), "int8"),
    (re.compile(r"nv_?fp4|w4a4", re.IGNORECASE), "float4_e2m1fn_x2"),
    (re.compile(r"fp8", re.IGNORECASE), "float8_e4m3fn"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """What one layer holds.

    Attributes:
        stored: What a step reads of it.
        elements: Numbers that it stands for.
        computes_in: Dtype of its products; None: that of the activations.
    """

    stored: tuple[Stored, ...]
    elements: int
    computes_in: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all that it holds."""
        return sum(part.bytes for part in self.stored)


class WeightsAsLoaded:
    """Remembers what quantized layers hold, from before their weights are repacked. Keeps no module alive."""

    def __init__(self) -> None:
        self._stored: weakref.WeakKeyDictionary[Any, tuple[Stored, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def remember(self, model: nn.Module) -> None:
        """Look at a model whose weights are loaded and not processed yet."""
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is None or is_plain(method):
                continue
            # Addresses may be given to others once the originals are freed.
            self._stored[module] = tuple(
                Stored(("loaded", id(module), i), part.dtype, part.bytes)
                for i, part in enumerate(stored_parts(module))
            )

    def of(self, module: nn.Module) -> tuple[Stored, ...]:
        """What a module held; nothing if it was not seen."""
        return self._stored.get(module, ())


def is_plain(method: object) -> bool:
    """Whether a layer's method multiplies with plain numbers."""
    return any(kind.__name__.startswith("Unquantized") for kind in type(method).__mro__)


def stored_parts(module: nn.Module, only: str = "") -> Iterator[Stored]:
    """What lies behind the parameters of a module itself, or behind those of a name, each storage once."""
    seen: set[tuple[object, ...]] = set()
    for name, parameter in own_parameters(module).items():
        if name in _SCRATCH or (only and name != only):
            continue
        for part in stored_of(parameter):
            if part.bytes and part.key not in seen:
                seen.add(part.key)
                yield part


def held_matrix(
    module: Any, elements: int, biases: int, loaded: WeightsAsLoaded | None
) -> Held | None:
    """What a layer holds whose matrices have so many elements.

    Args:
        module: A linear layer, a table or the experts of a layer.
        elements: Of its matrices, on this rank.
        biases: Of its biases.
        loaded: What was remembered of quantized layers.

    Returns:
        None if its data lie where they cannot be seen.
    """
    method = getattr(module, "quant_method", None)
    stored = tuple(stored_parts(module))
    dtype = str(getattr(module, "params_dtype", "")).removeprefix("torch.")
    if method is None or is_plain(method):
        width = _WIDTHS.get(dtype, 1)
        if sum(part.bytes for part in stored) >= elements * width:
            return Held(stored, elements + biases)
        if dtype not in _WIDTHS:
            return None
        size = (elements + biases) * width
        return Held((Stored(("declared", id(module)), dtype, size),), elements + biases)
    computes_in = computes(method, module)
    bias = set(stored_parts(module, only="bias"))
    for parts in (stored, () if loaded is None else loaded.of(module)):
        if 8 * sum(part.bytes for part in parts if part not in bias) >= _LEAST_BITS * elements:
            return Held(parts, elements + biases, computes_in)
    if computes_in in _BYTE_EACH:
        # Only the scales are left to be seen, and what was multiplied with takes a byte each.
        packed = Stored(("declared", id(module)), computes_in, elements)
        return Held((packed, *stored), elements + biases, computes_in)
    return None


def held_numbers(module: nn.Module) -> Held:
    """What a module holds whose parameters are what they seem: norms, tables, vectors."""
    stored = tuple(stored_parts(module))
    return Held(stored, sum(int(p.numel()) for p in own_parameters(module).values()))


def computes(method: Any, module: Any) -> str | None:
    """The dtype in which a quantized layer multiplies; None: that of the activations."""
    if getattr(method, "use_marlin", False) is True:
        return None
    holders = (method, getattr(method, "scheme", None), getattr(module, "scheme", None))
    for holder in holders[::-1]:
        name = "" if holder is None else type(holder).__name__
        for pattern, maths in _MATHS:
            if pattern.search(name):
                return maths
    return None


def activation_dtype(held: list[Held]) -> str:
    """The dtype of most plain numbers."""
    sizes: dict[str, int] = {}
    for one in held:
        for part in one.stored:
            if part.dtype in PLAIN_DTYPES:
                sizes[part.dtype] = sizes.get(part.dtype, 0) + part.bytes
    return max(sizes, key=lambda name: sizes[name], default="unknown")
