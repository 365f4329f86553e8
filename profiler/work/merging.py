"""Many decoding requests of one step as few rows that count the same.

A row of one token costs something that is linear in what it has in the cache, as long as no window begins to cut. So n
such rows are as good as n rows whose pasts differ by one at most and have the same sum, for which two entries are
enough; with windows, two for each stretch between them. So a step of hundreds of requests takes a few operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows
from phaseprof.work.kv import KvLayout

#: Fewer rows are counted as they are.
_WORTHWHILE = 8


def merged(rows: Sequence[Rows], cost: ModelCost, layout: KvLayout | None) -> tuple[Rows, ...]:
    """Rows for which `phaseprof.work.count.count` and `PagedPool.refine` give the same figures.

    Args:
        rows: The requests of a step. One with several tokens, or with nothing in the cache, stays as it is.
        cost: The model.
        layout: The cache; one that grows or a pool, not one with slots of its own.
    """
    breaks = _breaks(cost, layout) if len(rows) >= _WORTHWHILE else None
    if breaks is None:
        return tuple(rows)
    kept: list[Rows] = []
    numbers, sums = [0] * (len(breaks) + 1), [0] * (len(breaks) + 1)
    for row in rows:
        past = row.past
        if row.query != 1 or not past:
            kept.append(row)
            continue
        place = bisect_right(breaks, past) if breaks else 0
        numbers[place] += row.sequences
        sums[place] += past * row.sequences
    for number, total in zip(numbers, sums, strict=True):
        if number:
            past, more = divmod(total, number)
            kept.append(Rows(past, 1, number - more))
            if more:
                kept.append(Rows(past + 1, 1, more))
    return tuple(kept)


@lru_cache(maxsize=64)
def _breaks(cost: ModelCost, layout: KvLayout | None) -> tuple[int, ...] | None:
    """Lengths of a past from which a window cuts; None where figures are not linear between them."""
    groups = () if layout is None else layout.groups
    if any(group.chunk_tokens for group in cost.attention):
        return None
    if any(group.allocated_tokens is not None or group.packing is not None for group in groups):
        return None
    windows = {group.window_tokens for group in cost.attention}
    windows |= {group.window_tokens for group in groups}
    # From a past of w - 1 on, a token reads and keeps as much as a window of w allows.
    return tuple(sorted(window - 1 for window in windows if window))
