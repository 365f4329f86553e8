"""Alternating updates (AltUp, Gemma 3n): several streams of hidden states, mixed before and after each layer.

Baykal et al., *Alternating Updates for Efficient Transformers*, arXiv 2301.13310.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaseprof.work.cost import MatmulCost
from phaseprof.work.modules import class_name, matrix_of, own_bytes
from phaseprof.work.ops import OpKind
from phaseprof.work.parts import NotCovered, Part

if TYPE_CHECKING:
    from torch import nn


def read_altup(module: nn.Module, config: object, layer: int) -> Part | None:
    """Read the mixing of one layer. A `phaseprof.work.parts.Reader`.

    With n streams of d elements: the router (d x n) runs twice, before the layer and after it; its n figures give the
    n x n coefficients that mix the streams before (n x n^2 to make them, n x n x d to apply them), and n after.

    Raises:
        NotCovered: If the widths do not fit together.
    """
    children = [
        module._modules.get(n) for n in ("modality_router", "prediction_coefs", "correction_coefs")
    ]
    if any(child is None for child in children):
        return None
    router, predict, correct = (matrix_of(child) for child in children)
    if router is None or predict is None or correct is None:
        raise NotCovered(f"{class_name(module)} is not made of plain linear layers")
    streams = router.outputs
    if predict.outputs != streams**2 or correct.outputs != streams:
        raise NotCovered(f"{class_name(module)} mixes other than {streams} streams")
    mixing = 2 * streams * streams * router.inputs
    flops = 2 * router.flops_per_token + predict.flops_per_token + correct.flops_per_token + mixing
    accounted = (module, *(child for child in children if child is not None))
    matmuls = [
        MatmulCost(OpKind.OTHER.value, 1, matrix.inputs, matrix.outputs, own_bytes(child))
        for child, matrix in zip(children, (router, predict, correct), strict=True)
        if child is not None
    ]
    # Its weights are read once.
    again = MatmulCost(OpKind.OTHER.value, 1, router.inputs, router.outputs, 0)
    return Part(
        cost=None,
        accounted=accounted,
        linear_flops_per_token=flops,
        matmuls=(*matmuls, again),
    )
