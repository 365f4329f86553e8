"""The structure of a model that its work depends on: what `ModelCost` holds, and its JSON form.

A `ModelCost` is counted once from a model's modules (`phaseprof.work.walk`) and stored in the trace's meta, so that a
trace can be analysed again without the model. `phaseprof.work.count` turns it into FLOPs and bytes of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """A group of identical attention layers.

    Attributes:
        layers: How many layers are like this.
        query_heads: Hq.
        kv_heads: Hkv; equal to ``query_heads`` for MHA, 1 for MQA.
        qk_head_dim: Width of a query or key head.
        v_head_dim: Width of a value head.
        window_tokens: Sliding window: a query attends to itself and ``window - 1`` tokens before it; None for full.
        kv_bytes_per_token: Bytes of keys and values that one token adds to one layer's cache, by the real cache once
            one was seen, before that by the dtype of the model.
        layer_indices: Which layers they are, in the order of the cache; empty if that was not recorded.
    """

    layers: int
    query_heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    kv_bytes_per_token: int
    layer_indices: tuple[int, ...] = ()

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query x key pair in one layer: scores 2 Hq d_qk and values 2 Hq d_v."""
        return 2 * self.query_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one pass of a model costs, per token, per attended pair and per pass.

    Attributes:
        linear_flops_per_token: 2 x the elements of every matrix that each token is multiplied with, the output head
            not counted.
        head_flops_per_token: The same for the output head, spent on positions that need logits only.
        attention: The attention layers, grouped.
        body_weight_bytes: Bytes of parameters that a pass reads whole, whatever its tokens: tied tensors once, without
            output head and without lookup tables.
        head_weight_bytes: Bytes of the output head (of the embedding table, where it is tied to it).
        lookup_bytes_per_token: Bytes of lookup-table rows (token and learned position embeddings) read for one token.
        parameter_bytes: All parameters, each storage once.
        parameters: Number of parameters, each storage once.
        dtype: The dtype of the matrices, as torch spells it without the prefix (``float32``, ``bfloat16``).
        not_covered: Why the closed form does not hold for this model, one clause each; empty when it does. With
            entries here, no FLOPs or bytes are given.
        tied_lookup_bytes_per_token: The part of ``lookup_bytes_per_token`` whose table is the output head as well: a
            pass that computes the head reads those rows with it.
    """

    linear_flops_per_token: int
    head_flops_per_token: int
    attention: tuple[AttentionCost, ...]
    body_weight_bytes: int
    head_weight_bytes: int
    lookup_bytes_per_token: int
    parameter_bytes: int
    parameters: int
    dtype: str
    not_covered: tuple[str, ...] = field(default=())
    tied_lookup_bytes_per_token: int = 0

    @property
    def covered(self) -> bool:
        """Whether the closed form holds for this model."""
        return not self.not_covered

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, as stored under ``models[].cost`` in a meta file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelCost:
        """The inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError: If the data is not of that form.
        """
        fields = dict(data)
        fields["attention"] = tuple(_attention_from_json(group) for group in fields["attention"])
        fields["not_covered"] = tuple(fields.get("not_covered", ()))
        return cls(**fields)


def _attention_from_json(data: Mapping[str, Any]) -> AttentionCost:
    return AttentionCost(**{**data, "layer_indices": tuple(data.get("layer_indices", ()))})
