"""FLOPs and bytes of one forward pass, in closed form. Pure arithmetic on integers.

With ``n = sequences x query`` tokens, over the rows of the batch::

    pairs(past, query)      = query past + query (query + 1) / 2
    flops                   = n linear + logits head + sum over layers of 2 Hq (d_qk + d_v) pairs
    weight_bytes            = body + n lookup rows + the head, if it was computed
    kv_read_bytes           = sum over layers of (tokens held + query) x bytes per token
    kv_write_bytes          = sum over layers of query x bytes per token

A multiply-add is 2 FLOPs, a window w caps the pairs of each query at w. docs/work-model.md has the conventions and
where the formulas come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phaseprof.work.cost import ModelCost
from phaseprof.work.kv import KvLayout


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
class Work:
    """What one forward pass computes and has to move. Fields are columns of the `passes` table.

    Attributes:
        flops: 2 for each multiply-add of linear layers, attention and output head.
        weight_bytes: Weights that have to be read.
        kv_read_bytes: Keys and values that attention reads; None if the cache is of a kind that is not covered.
        kv_write_bytes: Keys and values that are added to the cache; None likewise.
        context_tokens: Sum over the rows of the KV length after the pass.
        attention_pairs: Exact causal query x key pairs over the rows, for a layer without a window.
    """

    flops: int
    weight_bytes: int
    kv_read_bytes: int | None
    kv_write_bytes: int | None
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


def count(
    cost: ModelCost,
    rows: Sequence[Rows],
    *,
    logits_tokens: int,
    layout: KvLayout | None,
    cached: bool = True,
    masked: bool = False,
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

    Raises:
        ValueError: If the closed form does not hold for the model.
    """
    if not cost.covered:
        raise ValueError(f"the model is not covered: {'; '.join(cost.not_covered)}")
    tokens = sum(r.query * r.sequences for r in rows)
    flops = cost.linear_flops_per_token * tokens + cost.head_flops_per_token * logits_tokens
    for window, flops_per_pair in _attention(cost):
        flops += flops_per_pair * sum(pairs(r.past, r.query, window) * r.sequences for r in rows)
    weight_bytes = cost.body_weight_bytes + cost.lookup_bytes_per_token * tokens
    if logits_tokens > 0:
        # Rows of a tied table are read with it, once.
        weight_bytes += cost.head_weight_bytes - cost.tied_lookup_bytes_per_token * tokens
    read: int | None = None
    write: int | None = None
    if layout is None or layout.covered:
        stores = _stores(cost, layout)
        read = _read(stores, rows, cached=cached, masked=masked)
        write = tokens * sum(store.bytes_per_token for store in stores) if cached else 0
    return Work(
        flops=flops,
        weight_bytes=weight_bytes,
        kv_read_bytes=read,
        kv_write_bytes=write,
        context_tokens=sum((r.past + r.query) * r.sequences for r in rows),
        attention_pairs=sum(pairs(r.past, r.query) * r.sequences for r in rows),
    )


@dataclass(frozen=True, slots=True)
class _Store:
    """Cache layers that hold the same tokens: `bytes_per_token` is summed over them."""

    bytes_per_token: int
    window: int | None
    allocated: int | None
    always_masked: bool

    def read_tokens(self, past: int, query: int, *, cached: bool, masked: bool) -> int:
        """How many tokens of one sequence the layer hands to attention, as its `update` in transformers does."""
        if not cached or self.allocated is None:
            # A sliding layer keeps what the next query can see: window - 1 tokens.
            held = past if self.window is None else min(past, max(self.window - 1, 0))
            return held + query
        if self.window is not None and past + query > self.allocated:
            # Full, or about to be: what is still in reach, and the query beside it.
            return (past if past < self.allocated else self.allocated - 1) + query
        if past == 0 and query > 1 and not masked and not self.always_masked:
            # An empty static layer needs no mask, and what lies behind the query is cut off.
            return query
        return self.allocated


def _read(stores: Iterable[_Store], rows: Sequence[Rows], *, cached: bool, masked: bool) -> int:
    return sum(
        store.bytes_per_token
        * sum(
            store.read_tokens(r.past, r.query, cached=cached, masked=masked) * r.sequences
            for r in rows
        )
        for store in stores
    )


@lru_cache(maxsize=64)
def _attention(cost: ModelCost) -> tuple[tuple[int | None, int], ...]:
    """(window, FLOPs for each pair summed over the layers with it)."""
    merged: dict[int | None, int] = {}
    for group in cost.attention:
        merged[group.window_tokens] = (
            merged.get(group.window_tokens, 0) + group.layers * group.flops_per_pair
        )
    return tuple(merged.items())


@lru_cache(maxsize=64)
def _stores(cost: ModelCost, layout: KvLayout | None) -> tuple[_Store, ...]:
    merged: dict[tuple[int | None, int | None], int] = {}
    if layout is None:
        for group in cost.attention:
            key = (group.window_tokens, None)
            merged[key] = merged.get(key, 0) + group.layers * group.kv_bytes_per_token
    else:
        for cached in layout.groups:
            slots = (cached.window_tokens, cached.allocated_tokens)
            merged[slots] = merged.get(slots, 0) + cached.layers * cached.bytes_per_token
    windows = {group.window_tokens for group in cost.attention}
    # A static layer as long as the window is given a sliding mask, always; a shorter one has no use for it.
    return tuple(
        _Store(size, window, allocated, always_masked=window is not None and window in windows)
        for (window, allocated), size in merged.items()
    )
