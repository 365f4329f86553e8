"""FLOPs and bytes of one forward pass, in closed form. Pure arithmetic on integers.

With ``n = sequences x query`` tokens, over the rows of the batch::

    pairs(past, query)      = query past + query (query + 1) / 2
    flops                   = n linear + logits head + sum over layers of 2 Hq (d_qk + d_v) pairs
                              + n k expert + n recurrence + past x expansion of a latent
    weight_bytes            = body + n lookup rows + the head, if it was computed + E (1 - (1 - k/E)^n) experts
    kv_read_bytes           = sum over layers of (tokens held + query) x bytes per token, and the states
    kv_write_bytes          = sum over layers of query x bytes per token, and the states

A multiply-add is 2 FLOPs, a window w caps the pairs of each query at w. With a source of S tokens a row there are
query x S pairs more in each layer of cross attention. docs/work-model.md has the conventions and where the formulas
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from phaseprof.work.cost import ModelCost
from phaseprof.work.kv import KvLayout
from phaseprof.work.stores import PackedStore, Store, stores_of


@dataclass(frozen=True, slots=True)
class Rows:
    """Identical rows of a batch, in slots: padding counts like tokens, since it is computed like them.

    Attributes:
        past: Slots in the cache before the pass.
        query: Slots computed by the pass.
        sequences: How many rows are like this.
    """

    past: int
    query: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Source:
    """What the queries of a pass attend to beside their own sequence: an encoder's output.

    Attributes:
        tokens: Slots of the source for each row.
        projected: The pass projects the source to keys and values (the cache had none yet, or there is no cache).
        encoded: The encoder ran inside the pass.
    """

    tokens: int
    projected: bool
    encoded: bool


@dataclass(frozen=True, slots=True)
class Adapted:
    """Tokens of a pass whose requests have adapters, each its own.

    Attributes:
        tokens: How many.
        logits: Positions of them for which the head was computed.
        adapters: Different ones.
    """

    tokens: int
    logits: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward pass computes and has to move. Fields are columns of the `passes` table.

    Attributes:
        flops: 2 for each multiply-add of linear layers, attention and output head.
        weight_bytes: Weights that have to be read; of experts those that were, where that is known, or else those that
            are expected to be.
        kv_read_bytes: Keys, values and states that are read; None if the cache is of a kind that is not covered.
        kv_write_bytes: Keys, values and states that are written; None likewise.
        kv_held_bytes: Keys, values and states that the cache holds after the pass; 0 without one, None likewise.
        kv_allocated_bytes: What the cache takes for them, empty slots included; None likewise.
        cache_copy_bytes: What the cache reads and writes beyond that, since it copies itself as it grows; None
            likewise.
        context_tokens: Sum over the rows of the KV length after the pass.
        attention_pairs: Exact causal query x key pairs over the rows, for a layer without a window.
    """

    flops: int
    weight_bytes: int
    kv_read_bytes: int | None
    kv_write_bytes: int | None
    kv_held_bytes: int | None
    kv_allocated_bytes: int | None
    cache_copy_bytes: int | None
    context_tokens: int
    attention_pairs: int


def pairs(past: int, query: int, window: int | None = None) -> int:
    """Query x key pairs of one sequence in one layer: the query at position p attends to ``min(p + 1, window)`` keys.

    Args:
        past: Tokens in the cache before the pass.
        query: Tokens computed, at the positions ``past .. past + query - 1``.
        window: Sliding window in tokens, the query itself included; None for full causal attention.
    """
    if window is None or past + query <= window:
        return query * past + query * (query + 1) // 2
    if past >= window:
        return query * window
    growing = window - past
    return growing * past + growing * (growing + 1) // 2 + (query - growing) * window


def chunked_pairs(past: int, query: int, chunk: int) -> int:
    """Query x key pairs of one sequence in one layer of chunked attention: the query at position p attends to
    ``p mod chunk + 1`` keys, those of its own chunk."""
    return _chunked(past + query, chunk) - _chunked(past, chunk)


def _chunked(positions: int, chunk: int) -> int:
    """Pairs of the positions from 0 up to one."""
    whole, rest = divmod(positions, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def count(
    cost: ModelCost,
    rows: Sequence[Rows],
    *,
    logits_tokens: int,
    layout: KvLayout | None,
    cached: bool = True,
    masked: bool = False,
    source: Source | None = None,
    experts_read: int | None = None,
    adapted: Adapted | None = None,
) -> Work:
    """The work of one forward pass.

    Args:
        cost: A model that is covered.
        rows: The batch. One entry stands for all rows of one length.
        logits_tokens: Positions for which the output head was computed, over the batch; 0 if it was not.
        layout: The cache as it is; None before one was seen: then layers are taken to grow as `DynamicCache` makes
            them, with the bytes of the weights' dtype.
        cached: False for a pass without a cache: nothing is kept, attention reads the keys and values of the pass.
        masked: Attention is given an explicit mask even where a causal one would do (a padded batch, the eager
            implementation, transformers up to 5.10). Then a prefill into a new static cache reads all its slots, and
            not only those of the query.
        source: What the layers of cross attention attend to; None: they are not run.
        experts_read: Distinct routed experts that the pass reads, summed over the layers; None: the number that an even
            spread of its tokens gives.
        adapted: Tokens of requests with an adapter; None: there are none.

    Raises:
        ValueError: If the closed form does not hold for the model.
    """
    if not cost.covered:
        raise ValueError(f"the model is not covered: {'; '.join(cost.not_covered)}")
    tokens = sum(r.query * r.sequences for r in rows)
    flops = cost.linear_flops_per_token * tokens + cost.head_flops_per_token * logits_tokens
    flops += cost.row_flops * sum(r.sequences for r in rows)
    for shape, flops_per_pair in _attention(cost):
        flops += flops_per_pair * sum(shape.pairs(r.past, r.query) * r.sequences for r in rows)
    flops += _absorbed_flops(cost, rows)
    for state in cost.states:
        flops += state.layers * state.flops_per_token * tokens
    for experts in cost.experts:
        flops += experts.layers * experts.flops(tokens)
    if cached:
        flops += _expansion_flops(cost, rows)
    weights = _weight_bytes(cost, tokens, logits_tokens, experts_read)
    if adapted is not None and cost.adapter is not None:
        adapter = cost.adapter
        flops += adapter.flops_per_token * adapted.tokens
        flops += adapter.head_flops_per_token * adapted.logits
        weights += adapter.lookup_bytes_per_token * adapted.tokens
        weights += adapter.body_bytes * adapted.adapters
        weights += adapter.head_bytes * adapted.adapters if adapted.logits else 0
    work = Work(
        flops=flops,
        weight_bytes=weights,
        kv_read_bytes=None,
        kv_write_bytes=None,
        kv_held_bytes=None,
        kv_allocated_bytes=None,
        cache_copy_bytes=None,
        context_tokens=sum((r.past + r.query) * r.sequences for r in rows),
        attention_pairs=sum(pairs(r.past, r.query) * r.sequences for r in rows),
    )
    if (layout is None or layout.covered) and _keeps_known(cost):
        work = _with_kv(work, cost, layout, rows, cached=cached, masked=masked)
    return work if source is None else _with_source(work, cost, layout, rows, source, cached=cached)


def _keeps_known(cost: ModelCost) -> bool:
    """Whether it is known what attention reads: the counter does not see it of a model that fills no cache."""
    return (
        not cost.counted or bool(cost.states) or any(g.kv_bytes_per_token for g in cost.attention)
    )


def _weight_bytes(
    cost: ModelCost, tokens: int, logits_tokens: int, experts_read: int | None
) -> int:
    size = cost.body_weight_bytes + cost.lookup_bytes_per_token * tokens
    if logits_tokens > 0:
        # Rows of a tied table are read with it, once.
        size += cost.head_weight_bytes - cost.tied_lookup_bytes_per_token * tokens
    if experts_read is not None and can_count_experts(cost):
        return size + experts_read * cost.experts[0].expert_bytes
    for experts in cost.experts:
        size += experts.layers * round(experts.expected_distinct(tokens) * experts.expert_bytes)
    return size


def can_count_experts(cost: ModelCost) -> bool:
    """Whether a number of experts says how many bytes they are: those of all layers are of one size."""
    return len({experts.expert_bytes for experts in cost.experts}) == 1


def _expansion_flops(cost: ModelCost, rows: Sequence[Rows]) -> int:
    """Latents that a cache holds are expanded again in each pass."""
    return sum(
        group.layers * group.expand_flops_per_token * r.past * r.sequences
        for group in cost.attention
        if group.expand_flops_per_token
        for r in rows
        if r.query > group.absorbed_query_tokens
    )


def _absorbed_flops(cost: ModelCost, rows: Sequence[Rows]) -> int:
    """What rows that attend to latents as they are take beyond what their pairs would with keys and values."""
    flops = 0
    for group in cost.attention:
        if group.absorbed_query_tokens:
            reach = Reach(group.window_tokens, group.chunk_tokens, group.causal)
            flops += (
                group.layers
                * (group.absorbed_flops_per_pair - group.flops_per_pair)
                * sum(
                    reach.pairs(r.past, r.query) * r.sequences
                    for r in rows
                    if r.query <= group.absorbed_query_tokens
                )
            )
    return flops


def _with_kv(
    work: Work,
    cost: ModelCost,
    layout: KvLayout | None,
    rows: Sequence[Rows],
    *,
    cached: bool,
    masked: bool,
) -> Work:
    stores = stores_of(cost, layout)
    read = sum(
        r.sequences * store.read_bytes(r.past, r.query, cached=cached, masked=masked)
        for store in stores
        for r in rows
    )
    if not cached:
        return replace(
            work,
            kv_read_bytes=read,
            kv_write_bytes=0,
            kv_held_bytes=0,
            kv_allocated_bytes=0,
            cache_copy_bytes=0,
        )

    def over(figure: Callable[[Store | PackedStore, int, int], int]) -> int:
        return sum(r.sequences * figure(store, r.past, r.query) for store in stores for r in rows)

    state = _state_bytes(cost, layout)
    sequences = sum(r.sequences for r in rows)
    # The first pass begins with an empty state, and reads none.
    read += state * sum(r.sequences for r in rows if r.past)
    return replace(
        work,
        kv_read_bytes=read,
        kv_write_bytes=over(lambda s, past, query: s.write_bytes(past, query)) + state * sequences,
        kv_held_bytes=over(lambda s, past, query: s.held_bytes(past, query)) + state * sequences,
        kv_allocated_bytes=over(lambda s, past, query: s.allocated_bytes(past, query))
        + state * sequences,
        cache_copy_bytes=over(lambda s, past, query: s.copied_bytes(past, query)),
    )


def _with_source(
    work: Work,
    cost: ModelCost,
    layout: KvLayout | None,
    rows: Sequence[Rows],
    source: Source,
    *,
    cached: bool,
) -> Work:
    """Add cross attention, and the encoder if it ran inside."""
    sequences = sum(r.sequences for r in rows)
    tokens = source.tokens * sequences
    queries = sum(r.query * r.sequences for r in rows)
    flops, weights, size = work.flops, work.weight_bytes, 0
    for cross in cost.cross:
        flops += cross.layers * cross.flops_per_pair * queries * source.tokens
        if source.projected:
            flops += cross.layers * cross.kv_flops_per_source_token * tokens
            weights += cross.layers * cross.kv_weight_bytes
        size += cross.layers * cross.kv_bytes_per_source_token
    if layout is not None and layout.cross_bytes_per_token:
        size = layout.cross_bytes_per_token
    if source.encoded and cost.encoder is not None:
        inside = count(
            cost.encoder,
            (Rows(0, source.tokens, sequences),),
            logits_tokens=0,
            layout=None,
            cached=False,
        )
        flops += inside.flops
        weights += inside.weight_bytes
    held = size * tokens if cached else 0
    return replace(
        work,
        flops=flops,
        weight_bytes=weights,
        kv_read_bytes=_plus(work.kv_read_bytes, size * tokens),
        kv_write_bytes=_plus(work.kv_write_bytes, held if source.projected else 0),
        kv_held_bytes=_plus(work.kv_held_bytes, held),
        kv_allocated_bytes=_plus(work.kv_allocated_bytes, held),
    )


def _plus(figure: int | None, more: int) -> int | None:
    return None if figure is None else figure + more


@dataclass(frozen=True, slots=True)
class Reach:
    """What a query may attend to."""

    window: int | None
    chunk: int | None
    causal: bool

    def pairs(self, past: int, query: int) -> int:
        """Query x key pairs of one sequence."""
        if not self.causal and self.window is not None:
            # As far to the one side as to the other, and itself once.
            return 2 * pairs(0, query, self.window) - query
        if not self.causal:
            return query * (past + query)
        if self.chunk is not None:
            return chunked_pairs(past, query, self.chunk)
        return pairs(past, query, self.window)


@lru_cache(maxsize=64)
def _attention(cost: ModelCost) -> tuple[tuple[Reach, int], ...]:
    """(reach, FLOPs for each pair summed over the layers with it)."""
    merged: dict[Reach, int] = {}
    for group in cost.attention:
        reach = Reach(group.window_tokens, group.chunk_tokens, group.causal)
        merged[reach] = merged.get(reach, 0) + group.layers * group.flops_per_pair
    return tuple(merged.items())


def _state_bytes(cost: ModelCost, layout: KvLayout | None) -> int:
    """Bytes of the states of one sequence over all layers: of the real cache, once one was seen."""
    if layout is not None:
        return layout.state_bytes
    return sum(state.layers * state.state_bytes for state in cost.states)
