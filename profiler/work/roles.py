"""What the matrices of a model are for: told by the module that they stand in, then by name, then by shape.

The same table serves the modules of transformers and those of vLLM: a merged projection (``qkv_proj``, ``c_attn``,
``gate_up_proj``) has the role of its parts. Where a name means several things (``dense``, ``c_proj``, ``out_proj``),
what is around it decides. Whatever is left is `other`: its work is counted all the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import MatmulCost
from phaseprof.work.modules import Matrix, class_name, own_parameters
from phaseprof.work.ops import OpKind
from phaseprof.work.weights import Key, Weights

if TYPE_CHECKING:
    from torch import nn


class Inside(enum.Enum):
    """What a matrix stands in."""

    ATTENTION = enum.auto()
    #: A state space, linear attention or short convolution.
    STATE = enum.auto()
    #: Anything else: an MLP, a block of experts, no layer at all.
    REST = enum.auto()


#: Names that mean one thing wherever they stand, most telling first.
_NAMES = (
    (OpKind.LATENT, re.compile(r"(fused_)?(q|kv|qkv)_[ab]_proj(_with_mqa)?|(q|kv)_(down|up)_proj")),
    (
        OpKind.QKV,
        re.compile(
            r"([qkv]|qkv|kv|qk)_proj|query_key_value|qkv|Wqkv|c_attn|W_pack|W[qkv]|query|key|value|[qkv]_lin|to_[qkv]|[qkv]"
        ),
    ),
    (OpKind.O, re.compile(r"o_proj|Wo_attn|to_out")),
    (OpKind.ROUTER, re.compile(r"router|gate|gate_weight|wg|shared_(expert_)?gate|moe_gate")),
    (
        OpKind.GATE_UP,
        re.compile(
            r"gate_proj|up_proj|gate_up_proj|fc1|fc_in|c_fc(_\d)?|w1|w3|w13|v1|wi(_\d)?|lin1|dense_h_to_4h|intermediate"
            r"|input_linear|linear_fc1|Wi|up_gate_proj|wi_fused|gate_up"
        ),
    ),
    (
        OpKind.DOWN,
        re.compile(r"down_proj|fc2|fc_out|w2|lin2|dense_4h_to_h|output_linear|linear_fc2|down"),
    ),
)
_OF_ATTENTION = frozenset({OpKind.LATENT, OpKind.QKV, OpKind.O})
#: Names of a last projection, of an attention or of an MLP.
_LAST = re.compile(r"o|out|wo|Wo|dense|[co]_proj|out_proj|out_lin|attn_out|output|proj_out")
_MLP = re.compile(r"mlp|ffn?|feed_?forward|DenseReluDense|expert|moe", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


def role_of(path: str, inside: Inside, *, inputs: int, outputs: int, hidden: int) -> str:
    """The role of a matrix, one of `MatmulCost.role`.

    Args:
        path: Of the module, as `torch.nn.Module.named_modules` gives it.
        inside: What it stands in.
        inputs, outputs: Its widths.
        hidden: Width of the hidden state.
    """
    names = [name for name in path.split(".") if not name.isdigit()]
    return _role(names, inside, inputs, outputs, hidden).value


def _role(names: list[str], inside: Inside, inputs: int, outputs: int, hidden: int) -> OpKind:
    if inside is Inside.STATE or "indexer" in names:
        return OpKind.OTHER
    attention = inside is Inside.ATTENTION
    # A linear layer may hide in a module that is called what it is (`router.layer`, `q_proj.linear`).
    for name in reversed(names[-2:]):
        found = next((role for role, pattern in _NAMES if pattern.fullmatch(name)), None)
        if found is OpKind.ROUTER and outputs > inputs:
            found = OpKind.GATE_UP
        if found is not None and (found in _OF_ATTENTION or not attention):
            return found
        if _LAST.fullmatch(name) and attention:
            return OpKind.O
        if _LAST.fullmatch(name) and outputs == hidden != inputs:
            return OpKind.DOWN
    return _by_shape(names, inside, inputs, outputs, hidden)


def _by_shape(names: list[str], inside: Inside, inputs: int, outputs: int, hidden: int) -> OpKind:
    to_hidden, from_hidden = outputs == hidden, inputs == hidden
    if inside is Inside.ATTENTION:
        # Gates of the output and the like are made from the hidden state, with the queries.
        return OpKind.O if to_hidden and not from_hidden else OpKind.QKV
    if not _is_mlp(names) or to_hidden == from_hidden:
        return OpKind.OTHER
    return OpKind.DOWN if to_hidden else OpKind.GATE_UP


def _is_mlp(names: list[str]) -> bool:
    return any(_MLP.search(name) for name in names)


def inside_by_name(path: str) -> Inside:
    """What a matrix stands in, where only names can tell (encoders)."""
    *around, _ = path.split(".")
    return Inside.ATTENTION if any(map(_ATTENTION.search, around)) else Inside.REST


def is_norm(module: Any, inside: Inside, hidden: int) -> bool:
    """Whether a module is a norm over the whole hidden state. One without weights tells its width only in part: in an
    attention it is taken to be one of heads."""
    if "norm" not in class_name(module).lower() or module._modules:
        return False
    own = own_parameters(module)
    if own:
        return any(int(p.numel()) == hidden for p in own.values())
    declared = getattr(module, "normalized_shape", None)
    if declared is None:
        return inside is Inside.REST
    return tuple(declared) == (hidden,)


@dataclass(frozen=True, slots=True)
class Found:
    """A matrix of a model: its role, and the module that holds it."""

    role: str
    matrix: Matrix
    module: nn.Module


def matmuls_of(
    found: Iterable[Found], weights: Weights, elsewhere: set[Key]
) -> tuple[MatmulCost, ...]:
    """The matrices with their bytes. Bytes that several share are the first one's.

    Args:
        found: In the order of the model.
        weights: Of the model.
        elsewhere: Bytes that are counted with something else (lookup tables).
    """
    seen = set(elsewhere)
    matmuls = []
    for one in found:
        keys = weights.of_modules([one.module]) - seen
        seen |= keys
        matrix = one.matrix
        matmuls.append(MatmulCost(one.role, 1, matrix.inputs, matrix.outputs, weights.bytes(keys)))
    return joined(matmuls)


def hidden_size(config: object, table: object = None) -> int:
    """Width of the hidden state: as the config says, or else that of the token table; 0 if neither does."""
    for owner, name in ((config, "hidden_size"), (table, "embedding_dim")):
        width = getattr(owner, name, None)
        if isinstance(width, int) and width > 0:
            return width
    return 0


def joined(found: Iterable[MatmulCost]) -> tuple[MatmulCost, ...]:
    """Join identical matrices, in the order of the first of them."""
    numbers: dict[MatmulCost, int] = {}
    for matrix in found:
        one = replace(matrix, count=1)
        numbers[one] = numbers.get(one, 0) + matrix.count
    return tuple(replace(one, count=number) for one, number in numbers.items())
