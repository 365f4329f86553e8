"""The operations of a pass, each with its FLOPs, its bytes and its shape: what `phaseprof.work.count` sums up, apart.

A pass is a row of operations of known shapes: the projections, the MLP, the experts, attention over the cache and the
output head. Their sums are the figures of the whole pass, exactly; what has no shape of its own (a pooler, biases, what
adapters add) is one operation `other` without one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Reach, Rows, Work, count
from phaseprof.work.kv import KvLayout

#: Bytes of an element of activations, by the dtype that matrices are multiplied in; of narrower ones activations are
#: kept in 16 bits between the products.
_WIDE = {"float32": 4, "float64": 8}
_ACTIVATION_BYTES = 2


class OpKind(enum.StrEnum):
    """What an operation is for, in the order of a layer."""

    EMBEDDING = "embedding"
    NORM = "norm"
    QKV = "qkv"
    LATENT = "latent"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    STATE = "state"
    O = "o"  # noqa: E741 - the field's own name of the projection
    GATE_UP = "gate_up"
    DOWN = "down"
    ROUTER = "router"
    EXPERTS = "experts"
    LM_HEAD = "lm_head"
    COLLECTIVE = "collective"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class GemmShape:
    """One matrix product: ``m`` rows of ``k`` elements with a matrix of ``k x n``.

    Attributes:
        m, n, k: As BLAS names them; m is the tokens.
        weight_bytes: The matrix as it is stored.
        groups: Products of this shape that one call makes at once (experts).
    """

    m: int
    n: int
    k: int
    weight_bytes: int
    groups: int = 1

    @property
    def flops(self) -> int:
        """2 m n k, of all groups."""
        return 2 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer over the rows of a pass.

    Attributes:
        rows: The batch.
        query_heads, kv_heads, qk_head_dim, v_head_dim, window_tokens: As in `AttentionCost`.
        kv_bytes_per_token: Keys and values of one token in this layer; 0 if the kind of cache is not covered.
        causal: As in `AttentionCost`.
    """

    rows: tuple[Rows, ...]
    query_heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    kv_bytes_per_token: int
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """Operations of one kind and shape in a pass. All figures are sums over ``calls``.

    Attributes:
        kind: What for.
        calls: How often the operation runs.
        flops: 2 for each multiply-add.
        weight_bytes: Weights that have to be read.
        kv_bytes: Keys, values and states read and written; None if the cache is of a kind that is not covered.
        activation_bytes: What goes in and comes out; a modelled figure, which `Work` has no part of.
        gemm: The shape of one call, where it is a matrix product.
        attention: The shape of one call, where it is attention.
    """

    kind: OpKind
    calls: int
    flops: int
    weight_bytes: int = 0
    kv_bytes: int | None = 0
    activation_bytes: int = 0
    gemm: GemmShape | None = None
    attention: AttentionShape | None = None


def activation_bytes_of(dtype: str) -> int:
    """Bytes of one element of the hidden state of a model that multiplies in a dtype."""
    return _WIDE.get(dtype, _ACTIVATION_BYTES)


def ops_of(
    cost: ModelCost,
    prefill: Sequence[Rows],
    decode: Sequence[Rows] = (),
    *,
    logits_tokens: int,
    layout: KvLayout | None = None,
    experts_read: int | None = None,
) -> tuple[Op, ...]:
    """The operations of a pass.

    Args:
        cost: A model that is covered.
        prefill: Rows of prefill tokens.
        decode: Rows of decode tokens; a pass with both is mixed.
        logits_tokens: Positions for which the output head is computed.
        layout: The cache as it is; None before one was seen.
        experts_read: As in `count`.

    Returns:
        Operations whose FLOPs, weight bytes and KV bytes add up to what `count` gives for all rows.

    Raises:
        ValueError: If the closed form does not hold for the model, or there are no rows.
    """
    rows = (*prefill, *decode)
    if not rows:
        raise ValueError("a pass has at least one row")
    whole = count(cost, rows, logits_tokens=logits_tokens, layout=layout, experts_read=experts_read)
    tokens = sum(row.query * row.sequences for row in rows)
    ops = [
        *_matmuls(cost, tokens, logits_tokens),
        *_experts(cost, tokens, experts_read),
        *_attention(cost, OpKind.ATTENTION_PREFILL, tuple(prefill), layout),
        *_attention(cost, OpKind.ATTENTION_DECODE, tuple(decode), layout),
        *_states(cost, rows, layout),
        *_tables_and_norms(cost, tokens, logits_tokens),
    ]
    return (*ops, *_rest(whole, ops))


def _matmuls(cost: ModelCost, tokens: int, logits_tokens: int) -> list[Op]:
    ops = []
    width = activation_bytes_of(cost.dtype)
    for matrix in cost.matmuls:
        head = matrix.role == OpKind.LM_HEAD.value
        m = logits_tokens if head else tokens
        if m == 0:
            continue
        ops.append(
            Op(
                kind=OpKind(matrix.role),
                calls=matrix.count,
                flops=2 * m * matrix.inputs * matrix.outputs * matrix.count,
                weight_bytes=matrix.weight_bytes * matrix.count,
                activation_bytes=m * (matrix.inputs + matrix.outputs) * width * matrix.count,
                gemm=GemmShape(m, matrix.outputs, matrix.inputs, matrix.weight_bytes),
            )
        )
    return ops


def _experts(cost: ModelCost, tokens: int, experts_read: int | None) -> list[Op]:
    ops = []
    width = activation_bytes_of(cost.dtype)
    known = experts_read is not None and len(cost.experts) == 1
    for experts in cost.experts:
        flops = experts.layers * experts.flops(tokens)
        if known and experts_read is not None:
            distinct = experts_read / experts.layers
            weight_bytes = experts_read * experts.expert_bytes
        else:
            distinct = experts.expected_distinct(tokens)
            weight_bytes = experts.layers * round(distinct * experts.expert_bytes)
        groups = max(round(distinct), 1)
        inputs = cost.hidden_size
        outputs = experts.expert_flops_per_token // (2 * inputs) if inputs else 0
        # Tokens meet the experts that any of them was sent to, and share them evenly.
        m = max(round(flops / experts.layers / groups / experts.expert_flops_per_token), 1)
        gemm = GemmShape(m, outputs, inputs, experts.expert_bytes, groups) if inputs else None
        ops.append(
            Op(
                kind=OpKind.EXPERTS,
                calls=experts.layers,
                flops=flops,
                weight_bytes=weight_bytes,
                activation_bytes=experts.layers * m * groups * (inputs + outputs) * width,
                gemm=gemm,
            )
        )
    return ops


def _attention(
    cost: ModelCost, kind: OpKind, rows: tuple[Rows, ...], layout: KvLayout | None
) -> list[Op]:
    """The attention layers over some of the rows; what expands latents for them stands apart."""
    if not rows:
        return []
    work = count(cost, rows, logits_tokens=0, layout=layout)
    kv = _kv_without_states(cost, rows, layout, work)
    touched = [_touched(group, rows) for group in cost.attention]
    width = activation_bytes_of(cost.dtype)
    tokens = sum(row.query * row.sequences for row in rows)
    ops, expanded, left, whole = [], 0, kv, sum(touched)
    for place, group in enumerate(cost.attention):
        share = None
        if kv is not None and left is not None:
            last = place == len(cost.attention) - 1
            share = left if last else (kv * touched[place] // whole if whole else 0)
            left -= share
        expanded += sum(
            group.layers * group.expand_flops_per_token * row.past * row.sequences
            for row in rows
            if row.query > group.absorbed_query_tokens
        )
        heads = group.query_heads * (group.qk_head_dim + group.v_head_dim)
        ops.append(
            Op(
                kind=kind,
                calls=group.layers,
                flops=group.layers * _pair_flops(group, rows),
                kv_bytes=share,
                activation_bytes=group.layers * tokens * heads * width,
                attention=AttentionShape(
                    rows=rows,
                    query_heads=group.query_heads,
                    kv_heads=group.kv_heads,
                    qk_head_dim=group.qk_head_dim,
                    v_head_dim=group.v_head_dim,
                    window_tokens=group.window_tokens,
                    kv_bytes_per_token=group.kv_bytes_per_token,
                    causal=group.causal,
                ),
            )
        )
    if expanded:
        layers = sum(group.layers for group in cost.attention if group.expand_flops_per_token)
        ops.append(Op(kind=OpKind.LATENT, calls=layers, flops=expanded))
    return ops


def _pair_flops(group: AttentionCost, rows: tuple[Rows, ...]) -> int:
    reach = Reach(group.window_tokens, group.chunk_tokens, group.causal)
    return sum(
        (
            group.absorbed_flops_per_pair
            if row.query <= group.absorbed_query_tokens
            else group.flops_per_pair
        )
        * reach.pairs(row.past, row.query)
        * row.sequences
        for row in rows
    )


def _touched(group: AttentionCost, rows: tuple[Rows, ...]) -> int:
    """Bytes of keys and values in reach of the rows: what the real figure is shared out by."""
    held = 0
    for row in rows:
        past = row.past if group.window_tokens is None else min(row.past, group.window_tokens)
        held += (past + row.query) * row.sequences
    return group.layers * group.kv_bytes_per_token * held


def _kv_without_states(
    cost: ModelCost, rows: tuple[Rows, ...], layout: KvLayout | None, work: Work
) -> int | None:
    if work.kv_read_bytes is None or work.kv_write_bytes is None:
        return None
    return work.kv_read_bytes + work.kv_write_bytes - _state_traffic(cost, rows, layout)


def _state_traffic(cost: ModelCost, rows: Sequence[Rows], layout: KvLayout | None) -> int:
    if not cost.states:
        return 0
    size = (
        sum(state.layers * state.state_bytes for state in cost.states)
        if layout is None
        else layout.state_bytes
    )
    # Read by every pass but the first, written by each.
    return size * sum(row.sequences * (2 if row.past else 1) for row in rows)


def _states(cost: ModelCost, rows: Sequence[Rows], layout: KvLayout | None) -> list[Op]:
    if not cost.states:
        return []
    tokens = sum(row.query * row.sequences for row in rows)
    return [
        Op(
            kind=OpKind.STATE,
            calls=sum(state.layers for state in cost.states),
            flops=sum(state.layers * state.flops_per_token for state in cost.states) * tokens,
            kv_bytes=_state_traffic(cost, rows, layout),
        )
    ]


def _tables_and_norms(cost: ModelCost, tokens: int, logits_tokens: int) -> list[Op]:
    looked_up = cost.lookup_bytes_per_token * tokens
    if logits_tokens:
        looked_up -= cost.tied_lookup_bytes_per_token * tokens
    width = activation_bytes_of(cost.dtype)
    ops = [
        Op(
            kind=OpKind.EMBEDDING,
            calls=1,
            flops=0,
            weight_bytes=looked_up,
            activation_bytes=tokens * cost.hidden_size * width,
        )
    ]
    if cost.norms:
        # Each reads the hidden state and writes it; adding the residual, mostly fused with it, does so once more.
        moved = 4 * tokens * cost.hidden_size * width * cost.norms
        ops.append(Op(kind=OpKind.NORM, calls=cost.norms, flops=0, activation_bytes=moved))
    return ops


def _rest(whole: Work, ops: Sequence[Op]) -> list[Op]:
    """What has no shape: the difference to the figures of the pass."""
    flops = whole.flops - sum(op.flops for op in ops)
    weight_bytes = whole.weight_bytes - sum(op.weight_bytes for op in ops)
    kv_bytes: int | None = None
    if whole.kv_read_bytes is not None and whole.kv_write_bytes is not None:
        kv_bytes = whole.kv_read_bytes + whole.kv_write_bytes
        kv_bytes -= sum(op.kv_bytes or 0 for op in ops)
    if not flops and not weight_bytes and not kv_bytes:
        return []
    return [
        Op(kind=OpKind.OTHER, calls=1, flops=flops, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    ]
