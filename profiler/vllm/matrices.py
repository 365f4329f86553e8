"""The matrices of a model of vLLM on one rank: what they stand in, what they are for, and their bytes, each once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phaseprof.vllm.mixers import is_kind
from phaseprof.vllm.storage import Held
from phaseprof.work.cost import MatmulCost
from phaseprof.work.packed import Stored
from phaseprof.work.roles import Inside, joined

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class HeldMatrix:
    """One matrix that every token of a step is multiplied with.

    Attributes:
        role: As in `MatmulCost`.
        inputs, outputs: On this rank.
        held: What it holds; None where its bytes are another's.
    """

    role: str
    inputs: int
    outputs: int
    held: Held | None


@dataclass(slots=True)
class Places:
    """What linear layers stand in: a layer with a state, or beside the attention that they are projections of."""

    _inside: dict[str, Inside] = field(default_factory=dict)

    @classmethod
    def of(cls, decoder: nn.Module) -> Places:
        """Find the layers of a decoder that mix tokens."""
        places = cls()
        for path, module in decoder.named_modules():
            if is_kind(module, "MambaBase"):
                places._inside[path] = Inside.STATE
            elif is_kind(module, "AttentionLayerBase"):
                places._inside.setdefault(path.rpartition(".")[0], Inside.ATTENTION)
        return places

    def around(self, path: str) -> Inside:
        """What the module of a path stands in. The attention of some hybrids lies in the layer itself, so that only
        what lies right beside it belongs to it."""
        owner = path.rpartition(".")[0]
        if self._inside.get(owner) is Inside.ATTENTION:
            return Inside.ATTENTION
        while owner:
            if self._inside.get(owner) is Inside.STATE:
                return Inside.STATE
            owner = owner.rpartition(".")[0]
        return Inside.REST


def matmuls_of(
    matrices: Iterable[HeldMatrix], elsewhere: set[tuple[object, ...]]
) -> tuple[MatmulCost, ...]:
    """The matrices with their bytes. Bytes that several share are the first one's.

    Args:
        matrices: In the order of the model.
        elsewhere: Keys of bytes that are counted with something else (lookup tables).
    """
    seen = set(elsewhere)
    matmuls = []
    for matrix in matrices:
        stored = () if matrix.held is None else matrix.held.stored
        new = {part.key: part.bytes for part in stored if part.key not in seen}
        seen |= new.keys()
        matmuls.append(MatmulCost(matrix.role, 1, matrix.inputs, matrix.outputs, sum(new.values())))
    return joined(matmuls)


def unique(held: Iterable[Held]) -> dict[tuple[object, ...], Stored]:
    """What is stored, each once."""
    return {part.key: part for one in held for part in one.stored}


def elements_of(everything: Iterable[Held]) -> int:
    """Numbers that are held, those that several modules share once."""
    numbers: dict[tuple[object, ...], int] = {}
    for held in everything:
        if held.stored:
            numbers.setdefault(held.stored[0].key, held.elements)
    return sum(numbers.values())


def products_in(everything: Iterable[Held], activations: str) -> str:
    """The dtype that most numbers are multiplied in."""
    numbers: dict[str, int] = {}
    for held in everything:
        plain = held.stored[0].dtype if len(held.stored) == 1 else activations
        if plain not in ("float32", "float16", "bfloat16", "float64"):
            plain = activations
        name = held.computes_in or plain
        numbers[name] = numbers.get(name, 0) + held.elements
    return max(numbers, key=lambda name: numbers[name], default="unknown")
