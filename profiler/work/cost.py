"""The structure of a model that its work depends on: what `ModelCost` holds, and its JSON form.

A `ModelCost` is counted once from a model's modules (`phaseprof.work.walk`) and stored in the trace's meta, so that a
trace can be analysed again without the model. `phaseprof.work.count` turns it into FLOPs and bytes of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

_Group = TypeVar("_Group")

#: Dtypes whose elements are the weights themselves.
_PLAIN = frozenset({"float32", "bfloat16", "float16", "float64"})


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """A group of identical attention layers.

    Attributes:
        layers: How many layers are like this.
        query_heads: Hq.
        kv_heads: Hkv; equal to ``query_heads`` for MHA, 1 for MQA.
        qk_head_dim: Width of a query or key head.
        v_head_dim: Width of a value head.
        window_tokens: Sliding window: a query attends to itself and ``window - 1`` tokens before it (where it is
            not causal, as many behind it); None for full.
        kv_bytes_per_token: Bytes of keys and values that one token adds to one layer's cache, by the real cache once
            one was seen, before that by the dtype of the model.
        layer_indices: Which layers they are, in the order of the cache; empty if that was not recorded.
        causal: A query attends to itself and what lies before it; False for an encoder, where it attends to all.
        chunk_tokens: Chunked attention (Llama 4): a query attends to its own chunk of that many positions alone; None
            for none.
        expand_flops_per_token: FLOPs to turn one cached latent into keys and values again, in one layer. Spent in each
            pass on every token that the cache holds, where it holds latents (MLA); 0 otherwise. What the tokens of the
            pass take is in ``linear_flops_per_token``.
        forgets: The cache drops what lies outside of the window; False where only the mask knows of it (GPT-Neo).
        borrows: Its keys and values are those of a layer before it: it reads them and writes none.
        absorbed_query_tokens: Rows of at most so many query tokens attend to cached latents as they are, and expand
            none: what would expand them is applied to queries and outputs instead (MLA in vLLM); 0: no row does.
        absorbed_flops_per_pair: FLOPs of a query x key pair of such a row: 2 Hq (2 r + d_rope).
    """

    layers: int
    query_heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    kv_bytes_per_token: int
    layer_indices: tuple[int, ...] = ()
    causal: bool = True
    chunk_tokens: int | None = None
    expand_flops_per_token: int = 0
    forgets: bool = True
    borrows: bool = False
    absorbed_query_tokens: int = 0
    absorbed_flops_per_pair: int = 0

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query x key pair in one layer: scores 2 Hq d_qk and values 2 Hq d_v."""
        return 2 * self.query_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class ExpertsCost:
    """A group of identical mixtures of experts. Shared experts and the router are no part of it: every token uses them,
    so they count like any other linear layer.

    Attributes:
        layers: How many layers are like this.
        experts: Routed experts of a layer, E.
        top_k: Experts that each token is sent to, k.
        expert_flops_per_token: FLOPs of one expert for one token.
        expert_bytes: Bytes of the weights of one expert.
        held: Experts of a layer that this rank holds, where the others are on other ranks (expert parallelism); None:
            all of them.
        sources: Data-parallel engines that send tokens to the experts of this rank, this one included; each is taken
            to send as many as this one.
    """

    layers: int
    experts: int
    top_k: int
    expert_flops_per_token: int
    expert_bytes: int
    held: int | None = None
    sources: int = 1

    def expected_distinct(self, tokens: int) -> float:
        """Experts of one layer on this rank that so many tokens are sent to, if the router spreads them evenly:
        ``E (1 - (1 - k/E)^tokens)``."""
        here = self.experts if self.held is None else self.held
        return here * (1 - (1 - self.top_k / self.experts) ** (tokens * self.sources))

    def flops(self, tokens: int) -> int:
        """FLOPs of one layer on this rank for so many tokens: each needs k, of which an even share is here."""
        whole = self.top_k * self.expert_flops_per_token * tokens * self.sources
        return whole if self.held is None else round(whole * self.held / self.experts)


@dataclass(frozen=True, slots=True)
class StateCost:
    """A group of identical layers that keep a state of constant size: state spaces, linear attention, short
    convolutions.

    Attributes:
        layers: How many layers are like this.
        flops_per_token: FLOPs of the recurrence for one token, without the linear layers around it.
        state_bytes: Bytes of the state of one sequence in one layer, by the weights' dtype; a real cache tells better.
        layer_indices: Which layers they are; empty if that was not recorded.
    """

    layers: int
    flops_per_token: int
    state_bytes: int
    layer_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CrossAttentionCost:
    """A group of identical layers in which every query attends to all tokens of a source (an encoder's output).

    Attributes:
        layers: How many layers are like this.
        query_heads: Hq.
        qk_head_dim: Width of a query or key head.
        v_head_dim: Width of a value head.
        kv_flops_per_source_token: FLOPs to project one source token to keys and values, in one layer. Spent once, by
            the pass that fills the cache (by every pass without one).
        kv_weight_bytes: Weights of those projections, in one layer; read by the same passes.
        kv_bytes_per_source_token: Keys and values of one source token in one layer.
    """

    layers: int
    query_heads: int
    qk_head_dim: int
    v_head_dim: int
    kv_flops_per_source_token: int
    kv_weight_bytes: int
    kv_bytes_per_source_token: int

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query x source token pair in one layer."""
        return 2 * self.query_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """One LoRA adapter of an engine in which each request may have its own (vLLM). Its matrices have the rank that the
    engine makes room for, whatever the adapter's own.

    Attributes:
        flops_per_token: 2 r (inputs + outputs) of every layer.
        head_flops_per_token: The same of the output head, for positions that need logits.
        body_bytes: Bytes of its matrices that a step reads whole, without those beside the head.
        head_bytes: Bytes of those beside the head.
        lookup_bytes_per_token: Bytes of its rows in lookup tables that are read for one token.
    """

    flops_per_token: int = 0
    head_flops_per_token: int = 0
    body_bytes: int = 0
    head_bytes: int = 0
    lookup_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class MatmulCost:
    """Identical matrices that every token of a pass is multiplied with.

    Attributes:
        role: What they are for: ``qkv``, ``o``, ``gate_up``, ``down``, ``router``, ``latent``, ``other``, or
            ``lm_head``, which is multiplied with the positions that need logits.
        count: How many there are, over all layers.
        inputs, outputs: Of one: its k and n.
        weight_bytes: Of one, as it is stored, with scales and biases.
    """

    role: str
    count: int
    inputs: int
    outputs: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one pass of a model costs, per token, per attended pair and per pass.

    Attributes:
        linear_flops_per_token: 2 x the elements of every matrix that each token is multiplied with, the output head
            not counted.
        head_flops_per_token: The same for the output head, spent on positions that need logits only.
        attention: The attention layers, grouped.
        body_weight_bytes: Bytes of parameters that a pass reads whole, whatever its tokens: tied tensors once, without
            output head, lookup tables, routed experts and the projections of ``cross``.
        head_weight_bytes: Bytes of the output head (of the embedding table, where it is tied to it).
        lookup_bytes_per_token: Bytes of lookup-table rows (token and learned position embeddings) read for one token.
        parameter_bytes: All parameters, each storage once.
        parameters: Number of parameters, each storage once.
        dtype: The dtype that most matrices are multiplied in, as torch spells it without the prefix (``float32``,
            ``bfloat16``): packed weights that are unpacked first have that of the activations; ``int8`` or
            ``float8_e4m3fn`` only where both operands are quantized.
        not_covered: Why the closed form does not hold for this model, one clause each; empty when it does. With
            entries here, no FLOPs or bytes are given.
        tied_lookup_bytes_per_token: The part of ``lookup_bytes_per_token`` whose table is the output head as well: a
            pass that computes the head reads those rows with it.
        experts: The mixtures of experts, grouped.
        states: The layers with a state of constant size, grouped.
        cross: The layers that attend to a source, grouped.
        encoder: The encoder of an encoder-decoder, for passes that run it inside; its tokens are the source's.
        offloaded_bytes: The part of ``parameter_bytes`` that lies elsewhere between passes (on the host, on a disk)
            and is brought for each of them.
        stored: Bytes of ``parameter_bytes`` by the dtype that they are stored in, most first; empty if that was not
            recorded.
        row_flops: FLOPs spent once for each sequence and not for each token: a pooler, a classifier on top of it;
            negative where a class token needs less than another one.
        counted: The FLOPs come from torch's counter on a stand-in without data, and not from a closed form.
        adapter: What the adapter of a request adds, where each may have its own; None where there is no room for any.
        matmuls: The matrices behind ``linear_flops_per_token`` and ``head_flops_per_token``, grouped; empty if they
            were not recorded one by one. What they leave out of the two (a router inside of a mixer) has no shape.
        hidden_size: Width of the hidden state; 0 if it was not recorded.
        norms: Norms over the hidden state in a pass; 0 if they were not recorded.
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
    experts: tuple[ExpertsCost, ...] = ()
    states: tuple[StateCost, ...] = ()
    cross: tuple[CrossAttentionCost, ...] = ()
    encoder: ModelCost | None = None
    offloaded_bytes: int = 0
    stored: tuple[tuple[str, int], ...] = ()
    counted: bool = False
    row_flops: int = 0
    adapter: AdapterCost | None = None
    matmuls: tuple[MatmulCost, ...] = ()
    hidden_size: int = 0
    norms: int = 0

    @property
    def covered(self) -> bool:
        """Whether the closed form holds for this model."""
        return not self.not_covered

    @property
    def bits_per_weight(self) -> float | None:
        """Bits that a weight takes on average, scales and the like included; None where no weights are packed."""
        if all(dtype in _PLAIN for dtype, _ in self.stored) or not self.parameters:
            return None
        return 8 * self.parameter_bytes / self.parameters

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
        fields["attention"] = _groups(AttentionCost, fields["attention"])
        fields["experts"] = _groups(ExpertsCost, fields.get("experts", ()))
        fields["states"] = _groups(StateCost, fields.get("states", ()))
        fields["cross"] = _groups(CrossAttentionCost, fields.get("cross", ()))
        fields["matmuls"] = _groups(MatmulCost, fields.get("matmuls", ()))
        fields["not_covered"] = tuple(fields.get("not_covered", ()))
        fields["stored"] = tuple((str(d), int(size)) for d, size in fields.get("stored", ()))
        adapter = fields.get("adapter")
        fields["adapter"] = None if adapter is None else AdapterCost(**adapter)
        encoder = fields.get("encoder")
        fields["encoder"] = None if encoder is None else cls.from_json(encoder)
        return cls(**fields)


def _groups(kind: type[_Group], data: Iterable[Mapping[str, Any]]) -> tuple[_Group, ...]:
    return tuple(
        kind(**{k: tuple(v) if k == "layer_indices" else v for k, v in group.items()})
        for group in data
    )
