"""What a reader of one kind of module hands to the walk over a decoder.

A reader is asked about each module whether it is one of its own. If it is, it says what the module costs and which
modules it has accounted for: their own parameters are then not looked at again, while linear layers that it leaves
out count as linear, like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phaseprof.work.cost import ExpertsCost, MatmulCost, StateCost

if TYPE_CHECKING:
    from torch import nn


class NotCovered(Exception):
    """The closed form does not hold; the message says why, in one clause."""


@dataclass(frozen=True, slots=True)
class Part:
    """One module, read.

    Attributes:
        cost: What it costs, for one layer (``layers=1``); the walk joins identical ones and sets their indices. None
            if matrices that every token passes through are all there is.
        accounted: The modules whose own parameters ``cost`` stands for, or that multiply no token (a vector of
            decays). Their bytes belong to the body, which a pass reads whole, unless they are in ``apart``.
        apart: Those of ``accounted`` whose bytes are in ``cost`` and not in the body (routed experts).
        linear_flops_per_token: FLOPs of the matrices in ``accounted`` that every token passes through (a router).
        matmuls: Those matrices, as far as they have shapes of their own.
        routers: Linear layers that choose experts; they are counted by the walk.
    """

    cost: ExpertsCost | StateCost | None
    accounted: tuple[nn.Module, ...]
    apart: tuple[nn.Module, ...] = ()
    linear_flops_per_token: int = 0
    matmuls: tuple[MatmulCost, ...] = ()
    routers: tuple[nn.Module, ...] = ()


class Reader(Protocol):
    """Reads one kind of module."""

    def __call__(self, module: nn.Module, config: object, layer: int) -> Part | None:
        """Read a module if it is of this kind.

        Args:
            module: Any module of the decoder. It is only read.
            config: The config of the decoder that it belongs to.
            layer: Its place in the stack of layers.

        Returns:
            None if the module is of another kind.

        Raises:
            NotCovered: If it is of this kind and the closed form does not hold for it.
        """
