"""Mixtures of experts: how many experts a layer has, how many each token is sent to, and what one of them costs.

The experts of transformers come in four forms: three-dimensional parameters, one slice an expert (``gate_up_proj``,
``down_proj``); the same with one such parameter in each of several modules (Granite of transformers 5.0); flat
parameters that are cut into experts as they run (DBRX); and a list of small networks. Whatever way they are run (one
after the other, batched, grouped), the mathematics needs ``k`` of them for each token, and that is what counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import ExpertsCost, MatmulCost
from phaseprof.work.modules import (
    Kind,
    Matrix,
    class_name,
    kind_of,
    matrix_of,
    own_bytes,
    own_parameters,
)
from phaseprof.work.ops import OpKind
from phaseprof.work.packed import packed_experts
from phaseprof.work.parts import NotCovered, Part
from phaseprof.work.roles import Inside, role_of

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate", re.IGNORECASE)
_SHARED = re.compile(r"shared", re.IGNORECASE)
#: Where modules and configs say how many experts there are, and how many of them a token is sent to. `top_k` of a
#: config is about sampling.
_COUNT = (
    "num_experts",
    "num_local_experts",
    "num_routed_experts",
    "n_routed_experts",
    "moe_num_experts",
    "n_shared_experts",
)
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts that one module holds. FLOPs and bytes are those of one of them, ``matrices`` too: where they have
    modules of their own, with their names and bytes."""

    number: int
    flops_per_token: int
    bytes: int
    modules: tuple[nn.Module, ...]
    matrices: tuple[tuple[str, Matrix, int], ...] = ()


def read_experts(module: nn.Module, config: object, layer: int) -> Part | None:
    """Read a block that holds experts and their router. A `phaseprof.work.parts.Reader`.

    Matrices that every token passes through (a shared expert, its gate, a router that is a linear layer) are left to
    the walk; a router that holds a bare matrix is counted here.

    Raises:
        NotCovered: If it cannot be told how many experts a token is sent to.
    """
    found = {
        name: experts
        for name, child in module._modules.items()
        if child is not None and (experts := _experts(name, child)) is not None
    }
    if not found:
        return None
    routed = [experts for name, experts in found.items() if not _SHARED.search(name)]
    numbers = {experts.number for experts in routed}
    if len(numbers) != 1:
        raise NotCovered(f"{class_name(module)} has experts in groups of different sizes")
    number = numbers.pop()
    routers = [c for n, c in module._modules.items() if c is not None and _is_router(n, c)]
    top_k = _top_k(module, routers, config, layer, number)
    bare, accounted = _routers(module, routers, number)
    linear = sum(2 * matrix.inputs * matrix.outputs for matrix in bare)
    shared: list[MatmulCost] = []
    for name, experts in found.items():
        accounted.extend(experts.modules)
        if _SHARED.search(name):
            linear += experts.number * experts.flops_per_token
            shared += _matmuls(name, experts, config)
    return Part(
        cost=ExpertsCost(
            layers=1,
            experts=number,
            top_k=top_k,
            expert_flops_per_token=sum(experts.flops_per_token for experts in routed),
            expert_bytes=sum(experts.bytes for experts in routed),
        ),
        accounted=tuple(accounted),
        apart=tuple(m for experts in routed for m in experts.modules),
        linear_flops_per_token=linear,
        matmuls=(*bare, *shared),
        routers=tuple(p for r in routers for p in r.modules() if matrix_of(p) is not None),
    )


def _matmuls(name: str, experts: _Experts, config: object) -> Iterator[MatmulCost]:
    """The matrices of experts that every token passes through."""
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    for path, matrix, size in experts.matrices:
        role = role_of(
            f"{name}.{path}",
            Inside.REST,
            inputs=matrix.inputs,
            outputs=matrix.outputs,
            hidden=hidden,
        )
        yield MatmulCost(role, experts.number, matrix.inputs, matrix.outputs, size)


def _experts(name: str, module: nn.Module) -> _Experts | None:
    if not _EXPERTS.search(name) and not _EXPERTS.search(class_name(module)):
        return None
    packed = packed_experts(module)
    if packed is not None:
        size = sum(stored.bytes for stored in packed.stored)
        return _Experts(packed.rows, 2 * packed.columns, size // packed.rows, (module,))
    parameters = own_parameters(module)
    if any(p.dim() == 3 for p in parameters.values()):
        return _sliced(module, parameters)
    if parameters:
        return None
    children = [child for child in module._modules.values() if child is not None]
    holding = [child for child in children if next(child.parameters(), None) is not None]
    if holding and all(any(p.dim() == 3 for p in own_parameters(c).values()) for c in holding):
        return _joined(module, [_sliced(child, own_parameters(child)) for child in holding])
    if len(children) == 1 and _declared(module) is not None:
        return _flat(module, children[0])
    if len(children) > 1 and all(n.rpartition("_")[2].isdigit() for n in module._modules):
        return _listed(module, children)
    return None


def _sliced(module: nn.Module, parameters: dict[str, Tensor]) -> _Experts:
    """Parameters whose first axis is the expert: matrices with three axes, biases with two."""
    numbers = {int(p.shape[0]) for p in parameters.values() if p.dim() > 1}
    number = numbers.pop()
    declared = _declared(module)
    if numbers or (declared is not None and declared != number):
        raise NotCovered(f"{class_name(module)} says {declared} experts, but holds {number}")
    rest = [m for m in module.modules() if m is not module]
    if any(kind_of(m) not in (Kind.EMPTY, Kind.ELEMENTWISE) for m in rest):
        raise NotCovered(f"{class_name(module)} holds more than its experts")
    return _Experts(
        number=number,
        flops_per_token=sum(_flops(p) for p in parameters.values() if p.dim() == 3) // number,
        bytes=own_bytes(module) // number,
        modules=(module,),
    )


def _joined(module: nn.Module, parts: list[_Experts]) -> _Experts:
    """Experts whose matrices lie in a module each (Aria of transformers 5.0)."""
    if len({part.number for part in parts}) != 1:
        raise NotCovered(f"{class_name(module)} has experts in groups of different sizes")
    return _Experts(
        number=parts[0].number,
        flops_per_token=sum(part.flops_per_token for part in parts),
        bytes=sum(part.bytes for part in parts),
        modules=(module, *(m for part in parts for m in part.modules)),
    )


def _flat(module: nn.Module, inner: nn.Module) -> _Experts | None:
    """Matrices of all experts below one another, which the module around them cuts (DBRX)."""
    number = _declared(module) or 0
    parameters = own_parameters(inner)
    if not parameters or matrix_of(inner) is not None or number <= 0:
        return None
    if any(p.dim() != 2 or int(p.shape[0]) % number for p in parameters.values()):
        return None
    return _Experts(
        number=number,
        flops_per_token=sum(_flops(p) for p in parameters.values()) // number,
        bytes=own_bytes(inner) // number,
        modules=(module, inner),
    )


def _listed(module: nn.Module, children: list[nn.Module]) -> _Experts | None:
    """Networks of linear layers, all alike."""
    sizes: set[tuple[int, int]] = set()
    modules: list[nn.Module] = []
    matrices: list[tuple[str, Matrix, int]] = []
    for child in children:
        flops = size = 0
        matrices = []
        for path, part in child.named_modules():
            matrix = matrix_of(part)
            if matrix is not None:
                flops += matrix.flops_per_token
                matrices.append((path, matrix, own_bytes(part)))
            elif kind_of(part) not in (Kind.EMPTY, Kind.ELEMENTWISE):
                return None
            size += own_bytes(part)
            modules.append(part)
        sizes.add((flops, size))
    if len(sizes) != 1:
        raise NotCovered(f"{class_name(module)} holds experts of different sizes")
    flops, size = sizes.pop()
    if flops == 0:
        return None
    return _Experts(len(children), flops, size, tuple(modules), tuple(matrices))


def _is_router(name: str, module: nn.Module) -> bool:
    named = _ROUTER.search(name) is not None and not _SHARED.search(name)
    return named or _ROUTER.search(class_name(module)) is not None


def _routers(
    block: nn.Module, routers: list[nn.Module], number: int
) -> tuple[list[MatmulCost], list[nn.Module]]:
    """The matrices of routers that hold a bare one, and all routers whose parameters are accounted for.

    Raises:
        NotCovered: If a router chooses among more than the experts: then a token may be sent to fewer of them.
    """
    bare: list[MatmulCost] = []
    accounted: list[nn.Module] = []
    widths: set[int] = set()
    for router in routers:
        for part in router.modules():
            matrix = matrix_of(part)
            if matrix is not None:
                widths.add(matrix.outputs)
                continue
            parameters = own_parameters(part).values()
            # A bias may be a matrix of one row (Ernie).
            matrices = [p for p in parameters if p.dim() > 1 and 1 not in p.shape]
            if any(p.dim() > 2 for p in matrices) or len(matrices) > 1:
                continue
            for p in matrices:
                sizes = [int(size) for size in p.shape]
                widths.update(sizes)
                inputs, outputs = sizes if sizes[1] == number else reversed(sizes)
                role = OpKind.ROUTER.value
                bare.append(MatmulCost(role, 1, inputs, outputs, own_bytes(part)))
            accounted.append(part)
    if routers and number not in widths:
        raise NotCovered(
            f"{class_name(block)}: its router chooses among other things than its {number} experts"
        )
    return bare, accounted


def _top_k(
    block: nn.Module, routers: list[nn.Module], config: object, layer: int, number: int
) -> int:
    """Experts that a token is sent to: what the modules say and, where it says so too, the config."""
    around = [block, *(c for c in block._modules.values() if c is not None), *routers]
    said = {k for m in around for k in _numbers(m, ("top_k", *_CHOSEN), layer)}
    said |= set(_numbers(config, _CHOSEN, layer))
    if len(said) != 1:
        what = "does not say" if not said else "contradicts its config about"
        raise NotCovered(f"{class_name(block)} {what} how many experts a token is sent to")
    top_k = said.pop()
    if not 0 < top_k <= number:
        raise NotCovered(f"{class_name(block)} sends a token to {top_k} of {number} experts")
    return top_k


def _numbers(owner: object, names: tuple[str, ...], layer: int) -> Iterator[int]:
    for name in names:
        value: Any = getattr(owner, name, None)
        if isinstance(value, list | tuple) and layer < len(value):
            value = value[layer]
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def _declared(module: nn.Module) -> int | None:
    return next(_numbers(module, _COUNT, 0), None)


def _flops(matrix: Tensor) -> int:
    return 2 * int(matrix.numel())
