"""The structure of a model as it would be: a part of it on each of several ranks, other dtypes, fused projections.

All functions take a `ModelCost` and give another one; none changes what a model computes as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from phaseprof.errors import UsageError
from phaseprof.work.cost import AttentionCost, ExpertsCost, MatmulCost, ModelCost, StateCost
from phaseprof.work.ops import activation_bytes_of

#: Bits of a weight in formats that keep a scale for each group of so many weights, and the bits of that scale.
_GROUP, _SCALE_BITS = 128, 16
#: Products whose weights quantized checkpoints leave as they are.
_KEPT_WIDE = frozenset({"lm_head", "router"})
#: Products that are cut by columns, and by rows, of the matrix (Megatron-LM, arXiv 1909.08053).
_BY_OUTPUTS = frozenset({"qkv", "gate_up", "lm_head"})
_BY_INPUTS = frozenset({"o", "down"})


def tensor_parallel(cost: ModelCost, ranks: int) -> ModelCost:
    """What each of some ranks holds and computes under tensor parallelism.

    Heads and columns are cut (Megatron-LM, arXiv 1909.08053): of qkv and gate_up the outputs, of o and down the inputs,
    of each expert its inner width, of head and embedding the vocabulary. Where there are fewer key-value heads than
    ranks, ranks hold copies of them. Routers, latents (MLA) and what has no shape of its own stand whole on each rank.

    Args:
        cost: The whole model.
        ranks: How many; 1 gives the model as it is.

    Raises:
        UsageError: If the query heads cannot be shared out evenly, or the matrices of the model are not known.
    """
    if ranks == 1:
        return cost
    _check(cost, ranks)
    matmuls = tuple(_part(cost, matrix, ranks) for matrix in cost.matmuls)
    body_flops, body_bytes = _saved(cost.matmuls, matmuls, head=False)
    head_flops, head_bytes = _saved(cost.matmuls, matmuls, head=True)
    experts = tuple(_expert_part(group, ranks) for group in cost.experts)
    tables = cost.parameter_bytes - cost.body_weight_bytes - _experts_bytes(cost.experts)
    held = cost.parameter_bytes - body_bytes - tables + _shared(tables, ranks)
    held += _experts_bytes(experts) - _experts_bytes(cost.experts)
    return replace(
        cost,
        linear_flops_per_token=cost.linear_flops_per_token - body_flops,
        head_flops_per_token=cost.head_flops_per_token - head_flops,
        attention=tuple(_heads(group, ranks) for group in cost.attention),
        body_weight_bytes=cost.body_weight_bytes - body_bytes,
        head_weight_bytes=cost.head_weight_bytes - head_bytes,
        lookup_bytes_per_token=_shared(cost.lookup_bytes_per_token, ranks),
        tied_lookup_bytes_per_token=_shared(cost.tied_lookup_bytes_per_token, ranks),
        parameter_bytes=held,
        matmuls=matmuls,
        experts=experts,
        states=tuple(_state_part(group, ranks) for group in cost.states),
    )


def with_kv_bytes(cost: ModelCost, element_bytes: float) -> ModelCost:
    """With keys and values of another width, for example 1 byte (FP8); scales are left out, states keep theirs.

    Args:
        cost: A model whose cache has the width of its activations.
        element_bytes: Of one element.
    """
    factor = element_bytes / activation_bytes_of(cost.dtype)
    return replace(
        cost,
        attention=tuple(
            replace(group, kv_bytes_per_token=round(group.kv_bytes_per_token * factor))
            for group in cost.attention
        ),
    )


def with_weight_bits(cost: ModelCost, bits: int, *, grouped: bool) -> ModelCost:
    """With the matrices of all layers and the experts stored in fewer bits; head, router and tables stay as they are.

    Args:
        cost: A model whose weights have the width of its activations.
        bits: Of one weight.
        grouped: Every 128 weights have a 16-bit scale (formats of 4 bits); else a scale a channel, which is left out.
    """
    stored = bits + (_SCALE_BITS / _GROUP if grouped else 0.0)
    matmuls = tuple(
        matrix
        if matrix.role in _KEPT_WIDE
        else replace(matrix, weight_bytes=round(matrix.inputs * matrix.outputs * stored / 8))
        for matrix in cost.matmuls
    )
    _, saved = _saved(cost.matmuls, matmuls, head=False)
    factor = stored / (8 * activation_bytes_of(cost.dtype))
    experts = tuple(
        replace(group, expert_bytes=round(group.expert_bytes * factor)) for group in cost.experts
    )
    less = _experts_bytes(cost.experts) - _experts_bytes(experts)
    return replace(
        cost,
        body_weight_bytes=cost.body_weight_bytes - saved,
        parameter_bytes=cost.parameter_bytes - saved - less,
        matmuls=matmuls,
        experts=experts,
    )


def absorbed(cost: ModelCost) -> ModelCost:
    """With decode attending to latents as they are (MLA, DeepSeek-V2, arXiv 2405.04434), as serving engines do; a model
    without latents as it is.

    With r the latent's width, d what stands beside it for positions, a token keeps r + d elements, and expanding one
    takes 2 Hq r (d_qk - d + d_v) FLOPs. Both are known, so r is the positive root of
    r^2 + (d_qk + d_v - (r + d)) r = expansion / 2 Hq. A pair then takes 2 Hq (2 r + d) FLOPs.
    """
    width = activation_bytes_of(cost.dtype)
    return replace(cost, attention=tuple(_absorbed(group, width) for group in cost.attention))


def _absorbed(group: AttentionCost, width: int) -> AttentionCost:
    if not group.expand_flops_per_token or group.absorbed_query_tokens:
        return group
    kept = group.kv_bytes_per_token // width
    half = (group.qk_head_dim + group.v_head_dim - kept) / 2
    latent = math.sqrt(half * half + group.expand_flops_per_token / (2 * group.query_heads)) - half
    return replace(
        group,
        absorbed_query_tokens=1,
        absorbed_flops_per_pair=2 * group.query_heads * (round(latent) + kept),
    )


def fused(cost: ModelCost) -> ModelCost:
    """With q, k and v as one product and gate and up as one, as serving engines merge them; FLOPs and bytes stay."""
    layers = sum(group.layers for group in cost.attention)
    downs = {(matrix.inputs, matrix.count) for matrix in cost.matmuls if matrix.role == "down"}
    merged: list[MatmulCost] = []
    queries: dict[int, list[MatmulCost]] = {}
    for matrix in cost.matmuls:
        if matrix.role == "qkv" and layers and matrix.count % layers == 0:
            queries.setdefault(matrix.inputs, []).append(matrix)
        elif matrix.role == "gate_up" and (matrix.outputs, matrix.count // 2) in downs:
            merged.append(_joined([matrix], matrix.count // 2))
        else:
            merged.append(matrix)
    return replace(
        cost,
        matmuls=(*(_joined(group, layers) for group in queries.values()), *merged),
    )


def _joined(group: list[MatmulCost], count: int) -> MatmulCost:
    outputs = sum(matrix.outputs * matrix.count for matrix in group)
    size = sum(matrix.weight_bytes * matrix.count for matrix in group)
    first = group[0]
    return MatmulCost(first.role, count, first.inputs, outputs // count, size // count)


def _check(cost: ModelCost, ranks: int) -> None:
    if not cost.matmuls:
        raise UsageError(
            "The matrices of this model are not known one by one, so it cannot be cut among ranks.",
            "Leave out --tp, or record the run again with this version.",
        )
    for group in cost.attention:
        if group.query_heads % ranks:
            raise UsageError(
                f"{group.query_heads} query heads cannot be shared out evenly among {ranks} ranks.",
                f"Use --tp with a divisor of {group.query_heads}.",
            )
        if max(group.kv_heads, ranks) % min(group.kv_heads, ranks):
            raise UsageError(
                f"{group.kv_heads} key-value heads and {ranks} ranks: neither is a multiple of the other.",
                "Use another --tp.",
            )


def _shared(amount: int, ranks: int) -> int:
    return -(-amount // ranks)


def _part(cost: ModelCost, matrix: MatmulCost, ranks: int) -> MatmulCost:
    inputs, outputs = matrix.inputs, matrix.outputs
    if matrix.role == "qkv":
        outputs = _qkv_outputs(cost, outputs, ranks)
    elif matrix.role in _BY_OUTPUTS:
        outputs = _shared(outputs, ranks)
    elif matrix.role in _BY_INPUTS:
        inputs = _shared(inputs, ranks)
    elif matrix.role == "latent" and inputs != cost.hidden_size:
        # From a latent to heads: cut by heads. What makes the latent stands on every rank.
        outputs = _shared(outputs, ranks)
    elements = matrix.inputs * matrix.outputs
    size = matrix.weight_bytes * inputs * outputs // elements if elements else matrix.weight_bytes
    return MatmulCost(matrix.role, matrix.count, inputs, outputs, size)


def _qkv_outputs(cost: ModelCost, outputs: int, ranks: int) -> int:
    """Queries are cut by heads; keys and values as well, until there is one head a rank."""
    for group in cost.attention:
        queries = group.query_heads * group.qk_head_dim
        keys, values = group.kv_heads * group.qk_head_dim, group.kv_heads * group.v_head_dim
        copies = min(ranks, group.kv_heads)
        if group.kv_heads < group.query_heads and outputs in (keys, values, keys + values):
            return outputs // copies
        if outputs == queries + keys + values:
            return queries // ranks + (keys + values) // copies
    return _shared(outputs, ranks)


def _heads(group: AttentionCost, ranks: int) -> AttentionCost:
    kv_heads = max(group.kv_heads // ranks, 1)
    latent = bool(group.expand_flops_per_token or group.absorbed_query_tokens)
    kept = group.kv_bytes_per_token
    return replace(
        group,
        query_heads=group.query_heads // ranks,
        kv_heads=kv_heads,
        kv_bytes_per_token=kept if latent else kept * kv_heads // group.kv_heads,
        expand_flops_per_token=group.expand_flops_per_token // ranks,
        absorbed_flops_per_pair=group.absorbed_flops_per_pair // ranks,
    )


def _expert_part(group: ExpertsCost, ranks: int) -> ExpertsCost:
    return replace(
        group,
        expert_flops_per_token=_shared(group.expert_flops_per_token, ranks),
        expert_bytes=_shared(group.expert_bytes, ranks),
    )


def _state_part(group: StateCost, ranks: int) -> StateCost:
    return replace(
        group,
        flops_per_token=_shared(group.flops_per_token, ranks),
        state_bytes=_shared(group.state_bytes, ranks),
    )


def _saved(
    before: Iterable[MatmulCost], after: Iterable[MatmulCost], *, head: bool
) -> tuple[int, int]:
    """FLOPs for each token and bytes that matrices have less than before: of the head, or of all others."""
    flops = size = 0
    for old, new in zip(before, after, strict=True):
        if (old.role == "lm_head") is head:
            flops += 2 * old.count * (old.inputs * old.outputs - new.inputs * new.outputs)
            size += old.count * (old.weight_bytes - new.weight_bytes)
    return flops, size


def _experts_bytes(groups: Iterable[ExpertsCost]) -> int:
    return sum(
        group.layers * (group.experts if group.held is None else group.held) * group.expert_bytes
        for group in groups
    )
