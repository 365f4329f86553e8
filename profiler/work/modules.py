"""What kind of module something is, told by its class and its own parameters, without importing torch.

A kind is recognised by the names of the classes that a module derives from, so that subclasses (a scaled embedding, a
linear layer with a forward of its own) count as what they are.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.adapters import base_of
from phaseprof.work.packed import packed_matrix, packed_table, stored_of

if TYPE_CHECKING:
    from torch import Tensor, nn


class Kind(enum.Enum):
    """What a module does with its own parameters."""

    #: Multiplies every token with a matrix.
    MATRIX = enum.auto()
    #: Looks rows up.
    TABLE = enum.auto()
    #: Scales, normalises or activates, element by element.
    ELEMENTWISE = enum.auto()
    #: Has no parameters of its own.
    EMPTY = enum.auto()
    #: Anything else.
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Matrix:
    """The matrix of a linear layer: ``inputs`` x ``outputs`` elements of ``element_bytes`` bytes; 1 where it is packed,
    and what it gives is as wide as the activations."""

    inputs: int
    outputs: int
    element_bytes: int

    @property
    def flops_per_token(self) -> int:
        """2 FLOPs for each element: one multiplication, one addition. A bias adds none."""
        return 2 * self.inputs * self.outputs


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that belong to the module itself, not to one inside it."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def own_bytes(module: nn.Module) -> int:
    """Bytes of the weights that belong to the module itself, as they are stored."""
    packed = packed_matrix(module) or packed_table(module)
    if packed is not None:
        return sum(part.bytes for part in packed.stored)
    return sum(part.bytes for p in own_parameters(module).values() for part in stored_of(p))


def kind_of(module: nn.Module) -> Kind:
    """Tell what a module does with its own parameters."""
    if matrix_of(module) is not None:
        return Kind.MATRIX
    if packed_table(module) is not None:
        return Kind.TABLE
    parameters = own_parameters(module)
    if not parameters:
        return Kind.EMPTY
    if _derives(module, "Embedding", "torch.nn.modules.sparse"):
        return Kind.TABLE if set(parameters) == {"weight"} else Kind.UNKNOWN
    if _is_elementwise(module):
        return Kind.ELEMENTWISE
    return Kind.UNKNOWN


def matrix_of(module: object) -> Matrix | None:
    """The matrix of a linear layer: `torch.nn.Linear`, `Conv1D` of transformers, which stores it transposed, or a layer
    that stores it packed.

    Of a layer with adapters it is that of the layer alone.

    None if the module is something else, or if its weight does not have the shape that it declares.
    """
    module = base_of(module)
    packed = packed_matrix(module)
    if packed is not None:
        return Matrix(packed.rows, packed.columns, 1)
    linear = _derives(module, "Linear", "torch.nn.modules.linear")
    if not linear and not _derives(module, "Conv1D", "transformers.pytorch_utils"):
        return None
    own: dict[str, Any] = getattr(module, "_parameters", {})
    if {name for name, p in own.items() if p is not None} - {"weight", "bias"}:
        return None
    weight = own.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    outputs, inputs = weight.shape if linear else reversed(weight.shape)
    declared = getattr(module, "out_features" if linear else "nf", outputs)
    if declared != outputs or getattr(module, "in_features", inputs) != inputs:
        return None
    return Matrix(int(inputs), int(outputs), int(weight.element_size()))


def shared_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold parameters and are registered more than once, with one of their paths.

    How often such a module runs cannot be read from the structure.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if child is None:
                continue
            if id(child) in seen and next(child.parameters(), None) is not None:
                yield f"{path}.{name}".lstrip("."), child
            seen.add(id(child))


def class_name(module: object) -> str:
    """The name of the class of a module."""
    return type(module).__name__


def _derives(module: object, name: str, origin: str) -> bool:
    return any(c.__name__ == name and c.__module__ == origin for c in type(module).__mro__)


def _is_elementwise(module: nn.Module) -> bool:
    # Every norm of transformers has it in its name (LlamaRMSNorm, NemotronLayerNorm1P, CohereLayerNorm), and so have
    # the activations with parameters (XIELUActivation); none of them holds other modules.
    name = class_name(module).lower()
    return ("norm" in name or "activation" in name) and not module._modules
