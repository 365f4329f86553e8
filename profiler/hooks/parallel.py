"""Which ranks make the passes of a model together: read from its device mesh, without a collective."""

from __future__ import annotations

import sys
from typing import Any

#: How meshes name the dimension over which layers are split (transformers, torchtitan, Megatron, DeepSpeed).
_TENSOR_DIMENSIONS = ("tp", "tensor", "tensor_parallel", "model")


def tensor_ranks(model: Any) -> tuple[int, ...]:
    """The ranks over which the layers of a model are split, the own one included; empty if they are whole.

    Fully sharded data parallelism keeps its weights as DTensors as well, but gathers them: its ranks make passes of
    their own. A mesh says which of its dimensions splits layers by their names; of one without names it does so
    unless the module is one that is gathered (`FSDPModule`).

    Raises:
        Whatever a mesh of a kind not known here raises.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1:
        # transformers keeps the mesh that it has split the weights over.
        mesh = getattr(model, "_device_mesh", None)
        if mesh is not None:
            return _along(mesh, named=mesh.ndim > 1)
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return ()
    for parameter in model.parameters():
        if isinstance(parameter, tensors.DTensor):
            return _along(parameter.device_mesh, named=_is_gathered(model))
    return ()


def _along(mesh: Any, *, named: bool) -> tuple[int, ...]:
    """The ranks along the dimension that splits layers, through this process; `named`: only one that says so."""
    names = tuple(mesh.mesh_dim_names or ())
    dimension = next((i for i, name in enumerate(names) if name in _TENSOR_DIMENSIONS), None)
    if dimension is None and (named or names or mesh.ndim > 1):
        return ()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    line = mesh.mesh[
        tuple(slice(None) if i == (dimension or 0) else at for i, at in enumerate(coordinate))
    ]
    ranks = tuple(int(rank) for rank in line.tolist())
    return ranks if len(ranks) > 1 else ()


def _is_gathered(model: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(part, kind) for part in model.modules())
