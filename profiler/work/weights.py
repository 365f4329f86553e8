"""The weights of a model as they are stored: each storage once, by its real bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phaseprof.work.modules import class_name, own_parameters
from phaseprof.work.packed import (
    PLAIN_DTYPES,
    Packed,
    Stored,
    dtype_of,
    is_known_tensor,
    leaves,
    packed_experts,
    packed_matrix,
    packed_table,
    stored_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, each storage once.

    Attributes:
        unique: What is stored, by what tells it apart.
        offloaded_bytes: The part of it that lies elsewhere between passes and is brought for each of them.
    """

    unique: dict[Key, Stored]
    offloaded_bytes: int
    _of_module: dict[int, tuple[Key, ...]]
    _numbers: _Numbers
    _odd: dict[str, None]

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Read the weights of a model: parameters, and what packed layers hold besides."""
        reading = _Reading(_tied_names(model))
        for path, module in model.named_modules():
            reading.add(path, module)
        offloaded = (
            sum(reading.unique[key].bytes for key in reading.meta) if _offloads(model) else 0
        )
        return cls(reading.unique, offloaded, reading.of_module, reading.numbers, reading.odd)

    def of_modules(self, modules: Iterable[nn.Module]) -> set[Key]:
        """What the modules themselves read, without the modules inside them."""
        return {key for module in modules for key in self._of_module.get(id(module), ())}

    def of_tensors(self, tensors: Iterable[Tensor]) -> set[Key]:
        """The same of single parameters."""
        return {part.key for tensor in tensors for part in stored_of(tensor)} & self.unique.keys()

    def bytes(self, keys: set[Key] | None = None) -> int:
        """Bytes of the weights under the keys, or of all."""
        chosen = self.unique.values() if keys is None else (self.unique[key] for key in keys)
        return sum(stored.bytes for stored in chosen)

    def row_bytes(self, table: Any) -> int:
        """Bytes of one row of a lookup table."""
        packed = packed_table(table)
        rows = int(table.weight.shape[0]) if packed is None else packed.rows
        return self.bytes(self.of_modules([table])) // max(rows, 1)

    def elements(self) -> int:
        """Numbers that the weights stand for, however they are packed; each once."""
        return sum(self._numbers.elements.values())

    def by_dtype(self) -> tuple[tuple[str, int], ...]:
        """Bytes by the dtype that they are stored in, most first."""
        sizes: Counter[str] = Counter()
        for stored in self.unique.values():
            sizes[stored.dtype] += stored.bytes
        return tuple(sizes.most_common())

    def dtype(self) -> str:
        """The dtype that most of the weights are multiplied in, spelt without the prefix: their own, that which packed
        ones are unpacked to, or that of the units for products of two quantized operands."""
        return self._numbers.dtype()

    @property
    def activation_dtype(self) -> str:
        """The dtype of most weights that are plain numbers outside of packed layers, as hidden states have it."""
        return self._numbers.activations()

    def odd(self) -> Iterator[str]:
        """Why some parameters do not say what a pass reads or computes."""
        yield from self._odd


@dataclass(slots=True)
class _Numbers:
    """How many numbers the weights stand for, and what they are computed in."""

    elements: dict[Key, int] = field(default_factory=dict)
    plain: Counter[str] = field(default_factory=Counter)
    packed: Counter[str | None] = field(default_factory=Counter)

    def activations(self) -> str:
        common = self.plain.most_common(1)
        return common[0][0] if common else "unknown"

    def dtype(self) -> str:
        sizes = Counter(self.plain)
        for computes_in, number in self.packed.items():
            sizes[computes_in or self.activations()] += number
        common = sizes.most_common(1)
        return common[0][0] if common else "unknown"


@dataclass(slots=True)
class _Reading:
    """One pass over the modules."""

    tied: dict[str, str]
    unique: dict[Key, Stored] = field(default_factory=dict)
    of_module: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    meta: set[Key] = field(default_factory=set)
    numbers: _Numbers = field(default_factory=_Numbers)
    odd: dict[str, None] = field(default_factory=dict)

    def add(self, path: str, module: nn.Module) -> None:
        packed = packed_matrix(module) or packed_table(module) or packed_experts(module)
        if packed is not None:
            self._add_packed(module, packed)
            return
        keys: list[Key] = []
        for name, parameter in own_parameters(module).items():
            self._check(module, parameter)
            keys += self._add_plain(f"{path}.{name}".lstrip("."), parameter)
        if keys:
            self.of_module[id(module)] = tuple(keys)

    def _add_packed(self, module: nn.Module, packed: Packed) -> None:
        self.of_module[id(module)] = tuple(part.key for part in packed.stored)
        known = packed.stored[0].key in self.unique
        self.unique.update((part.key, part) for part in packed.stored)
        if not known:
            self.numbers.elements[packed.stored[0].key] = packed.elements
            self.numbers.packed[packed.computes_in] += packed.elements
        if any(parameter.is_meta for parameter in own_parameters(module).values()):
            self.meta.update(part.key for part in packed.stored)

    def _add_plain(self, path: str, parameter: Tensor) -> Iterator[Key]:
        parts = tuple(stored_of(parameter))
        if parameter.is_meta:
            # Tensors that were tied have lost what they shared; their names tell.
            identity = ("name", self.tied.get(path, path), tuple(parameter.shape))
            if path in self.tied or path in self.tied.values():
                parts = tuple(Stored((*identity, i), p.dtype, p.bytes) for i, p in enumerate(parts))
            self.meta.update(part.key for part in parts)
        if parts and parts[0].key not in self.unique:
            number = sum(int(leaf.numel()) for leaf in leaves(parameter))
            self.numbers.elements[parts[0].key] = number
            self.numbers.plain[dtype_of(parameter)] += number
        for part in parts:
            self.unique[part.key] = part
            yield part.key

    def _check(self, module: nn.Module, parameter: Tensor) -> None:
        name = type(parameter).__name__
        if name == "DTensor" and all(leaf.shape == parameter.shape for leaf in leaves(parameter)):
            return  # This rank holds all of it.
        if name == "DTensor":
            self.odd["weights that are distributed over ranks"] = None
        elif not is_known_tensor(parameter):
            self.odd[f"parameters of class {name} (quantized or distributed)"] = None
        elif dtype_of(parameter) not in PLAIN_DTYPES:
            self.odd[
                f"parameters of dtype {dtype_of(parameter)} in {class_name(module)} (quantized or packed)"
            ] = None


def _tied_names(model: Any) -> dict[str, str]:
    """Names of tied parameters, and the name of the one that they share."""
    tied: dict[str, str] = {}
    for path, module in model.named_modules():
        keys = getattr(module, "all_tied_weights_keys", None)
        for target, source in keys.items() if isinstance(keys, dict) else ():
            tied[f"{path}.{target}".lstrip(".")] = f"{path}.{source}".lstrip(".")
    return tied


def _offloads(model: Any) -> bool:
    """Whether accelerate brings weights for each pass: one of its hooks says that it offloads."""
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        hooks = getattr(hook, "hooks", None) or (hook,)
        if any(getattr(one, "offload", False) is True for one in hooks):
            return True
    return False
