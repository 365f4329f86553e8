"""The KV cache of a vLLM worker: what a token takes in it by the specs of its layers, and what is allocated.

Each layer with a cache has a `KVCacheSpec` that says how large a block of it is and how many tokens that holds. Layers
with sliding windows or chunks keep what is still in reach; with the hybrid allocator switched off they keep everything
and read the window alone. Requests are counted by their tokens, not by the blocks that these lie in, and a prefix that
requests share once for each of them; the pool as a whole is what the tensors of the cache take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from phaseprof.vllm.mixers import is_kind, mixer_of
from phaseprof.vllm.model import Rank, chosen_keys, decoder_of, mixing_modules
from phaseprof.work.cost import AttentionCost
from phaseprof.work.count import Rows, Work
from phaseprof.work.kv import KvGroup, KvLayout
from phaseprof.work.paged import PagedPool
from phaseprof.work.parts import NotCovered
from phaseprof.work.structure import place

if TYPE_CHECKING:
    from torch import nn

#: Specs by which a layer keeps the newest tokens alone.
_FORGETTING = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
#: Specs of layers whose blocks hold something else than the keys and values of a request's own tokens.
_OTHER = ("CrossAttentionSpec", "RSWASpec", "SinkFullAttentionSpec", "CircularBufferSpec")


@dataclass(frozen=True, slots=True)
class BlockPool(PagedPool):
    """The block pool of a vLLM worker.

    Attributes:
        block_tokens: Tokens of a block, by group of layers.
    """

    block_tokens: tuple[int, ...] = ()

    def refine(self, work: Work, rows: tuple[Rows, ...]) -> Work:
        """The work of a step with what a pool does differently from a cache that grows: it never copies itself and is
        allocated as a whole. Blocks that fell out of a window are freed before the next step: after this one, a layer
        holds what its queries could see."""
        if not self.layout.covered or not self.holds:
            return work
        held = self.layout.state_bytes * sum(r.sequences for r in rows)
        for group in self.layout.groups:
            window = group.window_tokens if group.forgets else None
            held += (
                group.layers
                * group.bytes_per_token
                * sum(_held(window, r.past, r.query) * r.sequences for r in rows)
            )
        return replace(
            work,
            kv_held_bytes=held,
            kv_allocated_bytes=self.allocated_bytes,
            cache_copy_bytes=0,
        )


def block_pool(runner: Any, rank: Rank | None = None) -> BlockPool:
    """Read the KV cache of a model runner of vLLM, once it was set up. Only specs and sizes are read.

    A cache of another form gives a layout that is not covered, with the reason.
    """
    allocated = _allocated(getattr(runner, "kv_caches", None))
    try:
        config = runner.kv_cache_config
        specs = dict(_specs(config))
        layout, blocks = _layout(runner.get_model(), specs, Rank() if rank is None else rank)
    except NotCovered as unknown:
        return BlockPool(KvLayout((), (str(unknown),)), allocated)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"a cache in a form that is not known ({type(error).__name__}: {error})"
        return BlockPool(KvLayout((), (reason,)), allocated)
    return BlockPool(layout, allocated, blocks)


def _specs(config: Any) -> Iterator[tuple[str, Any]]:
    """The spec of each layer, by the layer's name."""
    for group in config.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield name, by_layer[name] if isinstance(by_layer, dict) else group.kv_cache_spec


def _layout(
    model: nn.Module, specs: dict[str, Any], rank: Rank
) -> tuple[KvLayout, tuple[int, ...]]:
    """The layers of the model alone: those of a draft model are in the same pool.

    Raises:
        NotCovered: If what a layer keeps is not known.
    """
    groups: dict[tuple[int, int | None, str, bool, int], list[int]] = {}
    states, top_k = 0, chosen_keys(model)
    for number, (_, module) in enumerate(mixing_modules(decoder_of(model))):
        name = str(getattr(module, "layer_name", "") or getattr(module, "prefix", ""))
        spec = specs.get(name)
        if spec is None or getattr(module, "kv_sharing_target_layer_name", None) is not None:
            continue
        if is_kind(spec, "EncoderOnlyAttentionSpec"):
            # Named for its metadata, and given no memory.
            continue
        if is_kind(spec, "MambaSpec"):
            states += sum(
                prod(shape) * int(dtype.itemsize)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            continue
        if any(is_kind(spec, kind) for kind in _OTHER) or not is_kind(spec, "AttentionSpec"):
            raise NotCovered(f"a cache of the kind {type(spec).__name__}")
        block = int(spec.block_size)
        size, rest = divmod(int(spec.real_page_size_bytes), block)
        if rest:
            raise NotCovered(f"blocks of {type(spec).__name__} that do not divide into tokens")
        forgets = any(is_kind(spec, kind) for kind in _FORGETTING)
        dtype = str(spec.dtype).removeprefix("torch.")
        at = place(name)
        key = (size, _window(module, spec, rank, top_k), dtype, forgets, block)
        groups.setdefault(key, []).append(number if at is None else at[1])
    found = tuple(
        KvGroup(tuple(layers), size, window, None, dtype, forgets=forgets)
        for (size, window, dtype, forgets, _), layers in groups.items()
    )
    return KvLayout(found, state_bytes=states), tuple(block for *_, block in groups)


def _window(module: nn.Module, spec: Any, rank: Rank, top_k: int | None) -> int | None:
    """What queries of a layer reach: as the cache says, or as the attention does where the cache keeps more."""
    if is_kind(spec, "SlidingWindowSpec"):
        return int(spec.sliding_window)
    if is_kind(spec, "ChunkedLocalAttentionSpec"):
        return int(spec.attention_chunk_size)
    mixer = mixer_of(module, rank.absorbs, top_k)
    if mixer is None or not isinstance(mixer.cost, AttentionCost):
        return None
    return mixer.cost.window_tokens or mixer.cost.chunk_tokens


def _allocated(caches: Any) -> int | None:
    """Bytes of the tensors of a cache, each stretch of memory once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(caches):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = int(storage.nbytes())
    return sum(sizes.values()) if sizes else None


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _held(window: int | None, past: int, query: int) -> int:
    return past + query if window is None else min(past, window - 1) + query
