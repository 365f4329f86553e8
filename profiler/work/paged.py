"""The paged KV cache of continuous batching: what a token takes in it, and what it has allocated.

One pool of pages serves all requests; the attention layers of a kind share it. Up to transformers 5.17 the pool is a
list of key and value tensors, each shared by one layer of every group; from 5.22 on it is one tensor that an allocator
for each kind of attention views as (tokens, keys and values, heads, head dim). Both are read from the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phaseprof.work.count import Rows, Work
from phaseprof.work.kv import KvGroup, KvLayout


@dataclass(frozen=True, slots=True)
class PagedPool:
    """A paged cache.

    Attributes:
        layout: What one token of one request takes in each layer.
        allocated_bytes: All pages, used or not; None if the cache is of a kind that is not covered.
    """

    layout: KvLayout
    allocated_bytes: int | None

    @property
    def holds(self) -> bool:
        """Whether anything is kept in it; True where that is not known."""
        layout = self.layout
        return bool(layout.groups or layout.state_bytes or layout.not_covered)

    def refine(self, work: Work, rows: tuple[Rows, ...]) -> Work:
        """The work of a pass with what a pool does differently from a cache that grows: it never copies itself, it is
        allocated as a whole, and a sliding layer keeps a ring of ``window`` tokens.

        Args:
            work: Counted with the pool's layout.
            rows: The requests of the pass; what is held counts them alone, shared pages once for each.
        """
        if not self.layout.covered:
            return work
        held = sum(
            group.layers
            * group.bytes_per_token
            * sum(_held(group.window_tokens, r.past + r.query) * r.sequences for r in rows)
            for group in self.layout.groups
        )
        return replace(
            work,
            kv_held_bytes=held,
            kv_allocated_bytes=self.allocated_bytes,
            cache_copy_bytes=0,
        )


def read_pool(cache: Any) -> PagedPool:
    """Read a `PagedAttentionCache` of transformers 5. Shapes and dtypes are read, no element.

    A cache of another form gives a layout that is not covered, with the reason.
    """
    try:
        allocators = getattr(cache, "cache_allocators", None)
        if isinstance(allocators, Mapping):
            groups = tuple(_allocator_group(allocator) for allocator in allocators.values())
            tensor = cache.cache_tensor
            size = int(tensor.numel()) * int(tensor.element_size())
        else:
            groups = tuple(_paired_groups(cache))
            size = sum(
                int(t.numel()) * int(t.element_size())
                for t in (*cache.key_cache, *cache.value_cache)
            )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"a cache of class {type(cache).__name__} in a form that is not known ({error})"
        return PagedPool(KvLayout(groups=(), not_covered=(reason,)), None)
    return PagedPool(KvLayout(groups), size)


def _allocator_group(allocator: Any) -> KvGroup:
    """The layers of one kind of attention, from 5.22 on."""
    view = allocator.cache_tensor
    _, both, heads, width = view.shape
    window = getattr(allocator, "sliding_window", None)
    return KvGroup(
        layer_indices=tuple(int(index) for index in allocator.layer_indices),
        bytes_per_token=int(both) * int(heads) * int(width) * int(view.element_size()),
        window_tokens=None if window is None else int(window),
        allocated_tokens=None,
        dtype=str(view.dtype).removeprefix("torch."),
    )


def _paired_groups(cache: Any) -> Iterator[KvGroup]:
    """The layers by what one token takes in them and by their window, up to 5.17."""
    found: dict[tuple[int, int | None, str], list[int]] = {}
    for layer, (_, place) in cache.layer_index_to_group_indices.items():
        pair = cache.key_cache[place], cache.value_cache[place]
        size = sum(int(t.shape[-2]) * int(t.shape[-1]) * int(t.element_size()) for t in pair)
        # A window of 1 stands for none.
        window = int(cache.sliding_windows[layer])
        dtype = str(pair[0].dtype).removeprefix("torch.")
        key = (size, None if window == 1 else window, dtype)
        found.setdefault(key, []).append(int(layer))
    for (size, window_tokens, dtype), layers in found.items():
        yield KvGroup(tuple(sorted(layers)), size, window_tokens, None, dtype)


def _held(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(tokens, window)
