"""The parameters of a model as they are stored: each storage once, by its real bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.modules import own_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Dtypes whose elements are the numbers themselves. Anything else is packed or scaled.
_PLAIN_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
#: Classes of tensors that are what they seem. Others (quantized, distributed) wrap something.
_PLAIN_TENSORS = frozenset({"Parameter", "Tensor", "FakeTensor"})


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a model, each storage once."""

    unique: dict[tuple[object, ...], Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        # One parameter may hang in several modules: `parameters()` drops those, the key drops views of one storage.
        return cls({cls.key(p): p for p in model.parameters()})

    @staticmethod
    def key(tensor: Tensor) -> tuple[object, ...]:
        """What makes two tensors the same bytes: storage, offset and shape."""
        return (_storage(tensor), _offset(tensor), tuple(tensor.shape))

    def of_modules(self, modules: Iterable[nn.Module]) -> set[tuple[object, ...]]:
        return {self.key(p) for module in modules for p in own_parameters(module).values()}

    def bytes(self, keys: set[tuple[object, ...]] | None = None) -> int:
        """Bytes of the parameters under the keys, or of all."""
        chosen = self.unique.values() if keys is None else (self.unique[k] for k in keys)
        return sum(_tensor_bytes(p) for p in chosen)

    def elements(self) -> int:
        return sum(p.numel() for p in self.unique.values())

    def dtype(self) -> str:
        """The dtype that most bytes have, spelt without the prefix."""
        sizes: Counter[str] = Counter()
        for p in self.unique.values():
            sizes[_dtype(p)] += _tensor_bytes(p)
        return sizes.most_common(1)[0][0] if sizes else "unknown"

    def odd(self) -> Iterator[str]:
        """Why some parameters do not say what a pass reads or computes."""
        for p in self.unique.values():
            if type(p).__name__ not in _PLAIN_TENSORS:
                yield f"parameters of class {type(p).__name__} (quantized or distributed)"
            elif p.is_meta:
                yield "parameters on the meta device (not loaded, or offloaded)"
            elif _dtype(p) not in _PLAIN_DTYPES:
                yield f"parameters of dtype {_dtype(p)} (quantized or packed)"


def _storage(tensor: Tensor) -> object:
    """An identity of the bytes behind a tensor. Storages without an address are told apart by their handle."""
    try:
        storage = tensor.untyped_storage()
        address = (
            0 if tensor.is_meta or type(tensor).__name__ == "FakeTensor" else storage.data_ptr()
        )
        return address or ("handle", storage._cdata)
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))


def _offset(tensor: Tensor) -> int:
    try:
        return int(tensor.storage_offset())
    except (RuntimeError, NotImplementedError):
        return 0


def _tensor_bytes(tensor: Any) -> int:
    """Real bytes: of the tensors inside, where the tensor only wraps others (quantized weights)."""
    if type(tensor).__name__ not in _PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        return sum(_tensor_bytes(getattr(tensor, name)) for name in inner)
    return int(tensor.numel()) * int(tensor.element_size())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
