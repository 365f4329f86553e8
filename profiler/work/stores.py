"""What the layers of a cache hold, hand to attention and copy, in bytes of one sequence. Pure arithmetic.

Checked against the layers of transformers: what `update` returns, and what its operations read and write.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache

from phaseprof.work.cache_layers import Packing
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.kv import KvLayout


@dataclass(frozen=True, slots=True)
class Store:
    """Cache layers that hold the same tokens.

    Attributes:
        bytes_per_token: Of one token, summed over the layers.
        window: Sliding window in tokens; None for layers that keep every token.
        allocated: Slots of static layers; None for layers that grow.
        always_masked: Their attention is given a mask even in a prefill without padding.
        borrowed: Layers that read what others hold: nothing is written, held or copied for them.
    """

    bytes_per_token: int
    window: int | None
    allocated: int | None
    always_masked: bool
    borrowed: bool = False

    def read_bytes(self, past: int, query: int, *, cached: bool, masked: bool) -> int:
        """What the layers hand to attention, as their `update` in transformers does."""
        return self.bytes_per_token * self._read(past, query, cached=cached, masked=masked)

    def write_bytes(self, past: int, query: int) -> int:
        """What the tokens of the pass add."""
        return 0 if self.borrowed else self.bytes_per_token * query

    def held_bytes(self, past: int, query: int) -> int:
        """What the layers keep after the pass."""
        return 0 if self.borrowed else self.bytes_per_token * self._held(past, query)

    def allocated_bytes(self, past: int, query: int) -> int:
        """What the layers take after the pass, empty slots included."""
        if self.allocated is None or self.borrowed:
            return self.held_bytes(past, query)
        return self.bytes_per_token * self.allocated

    def copied_bytes(self, past: int, query: int) -> int:
        """What `update` reads and writes beside the tokens of the pass: a growing layer is joined with them into a new
        tensor; a full sliding one is moved along and copied back."""
        return 0 if self.borrowed else self.bytes_per_token * self._copied(past, query)

    def _read(self, past: int, query: int, *, cached: bool, masked: bool) -> int:
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

    def _held(self, past: int, query: int) -> int:
        if self.window is None:
            return past + query
        if self.allocated is not None:
            return min(past + query, self.allocated)
        return min(past + query, max(self.window - 1, 0))

    def _copied(self, past: int, query: int) -> int:
        if self.allocated is None:
            return 2 * (past if self.window is None else min(past, max(self.window - 1, 0)))
        if self.window is None or past == 0 or past + query <= self.allocated:
            return 0
        if past < self.allocated:
            return 2 * past + 2 * self.allocated
        moved = self.allocated if query == 1 else self.allocated - 1
        return 2 * moved + 2 * self.allocated


@dataclass(frozen=True, slots=True)
class PackedStore:
    """Layers of a quantized cache: tokens are stored packed, and unpacked again for each pass.

    Attributes:
        bytes_per_token: Of one token as attention is given it, summed over the layers.
        layers: How many there are.
        packing: Of one of them.
    """

    bytes_per_token: int
    layers: int
    packing: Packing

    def read_bytes(self, past: int, query: int, *, cached: bool, masked: bool) -> int:
        """What attention is given: everything in full precision."""
        return self.bytes_per_token * (past + query)

    def write_bytes(self, past: int, query: int) -> int:
        """What the tokens of the pass add: packed, or as they are while they wait to be packed."""
        packed = self.packing.packed_tokens(past + query) == past + query
        return self._packed(query) if packed else self.bytes_per_token * query

    def held_bytes(self, past: int, query: int) -> int:
        """What is stored after the pass: the packed tokens, and those that wait."""
        held = past + query
        packed = self.packing.packed_tokens(held)
        return self._packed(packed) + self.bytes_per_token * (held - packed)

    def allocated_bytes(self, past: int, query: int) -> int:
        """As much as is held."""
        return self.held_bytes(past, query)

    def copied_bytes(self, past: int, query: int) -> int:
        """What unpacking, joining and packing again take at least: each tensor read and written once."""
        if not past:
            return 0
        if not self.packing.residual_tokens:
            # Joined in packed form, then read whole and written in full precision.
            return (
                3 * self._packed(past)
                + self._packed(query)
                + self.read_bytes(past, query, cached=True, masked=False)
            )
        held, packed = past + query, self.packing.packed_tokens(past)
        waiting = past - packed
        unpacked = self._packed(packed) + self.bytes_per_token * packed
        joined = self.bytes_per_token * (past + held)
        if self.packing.packed_tokens(held) == held:
            again = self.bytes_per_token * held + self._packed(past)
        else:
            again = 2 * self.bytes_per_token * waiting
        return unpacked + joined + again

    def _packed(self, tokens: int) -> int:
        return round(self.layers * self.packing.bytes_per_token * tokens)


@lru_cache(maxsize=64)
def stores_of(cost: ModelCost, layout: KvLayout | None) -> tuple[Store | PackedStore, ...]:
    """The layers of a cache, joined where they hold the same tokens.

    Args:
        cost: The model, which says what its attention reaches.
        layout: Of the real cache; None: layers grow, with the bytes of the weights' dtype.
    """
    merged: dict[tuple[int | None, int | None, Packing | None], tuple[int, int]] = {}
    borrowed: list[Store] = []

    def add(key: tuple[int | None, int | None, Packing | None], layers: int, size: int) -> None:
        count, total = merged.get(key, (0, 0))
        merged[key] = (count + layers, total + layers * size)

    if layout is None:
        for group in cost.attention:
            if not group.borrows:
                add((_kept(group), None, None), group.layers, group.kv_bytes_per_token)
    else:
        for cached in layout.groups:
            key = (cached.window_tokens, cached.allocated_tokens, cached.packing)
            add(key, cached.layers, cached.bytes_per_token)
    windows = {_kept(group) for group in cost.attention}
    for group in cost.attention:
        if group.borrows:
            borrowed.append(_borrowed(group, merged, windows))
    # A static layer as long as the window is given a sliding mask, always; a shorter one has no use for it.
    own = (
        Store(size, window, allocated, window is not None and window in windows)
        if packing is None
        else PackedStore(size, layers, packing)
        for (window, allocated, packing), (layers, size) in merged.items()
    )
    return (*own, *borrowed)


def _kept(group: AttentionCost) -> int | None:
    """The window that a growing cache of the layers has. A chunk is kept like a window."""
    return (group.window_tokens or group.chunk_tokens) if group.forgets else None


def _borrowed(
    group: AttentionCost,
    own: Iterable[tuple[int | None, int | None, Packing | None]],
    windows: Container[int | None],
) -> Store:
    """What layers read that use the keys and values of others: the cache layers of the same reach."""
    kept = _kept(group)
    alike = [(window, slots) for window, slots, _ in own if (window is None) == (kept is None)]
    window, allocated = next(iter(alike), (kept, None))
    size = group.layers * group.kv_bytes_per_token
    return Store(size, window, allocated, window is not None and window in windows, borrowed=True)
