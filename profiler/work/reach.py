"""What a query of a layer can reach: everything before it, a window, or its own chunk.

As the caches and masks of transformers decide it: by ``config.layer_types``, or, where there is none, by what the
attention or the config say for all layers alike.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from phaseprof.work.parts import NotCovered

#: Attentions whose cache has a window, but not their mask: a long prefill attends to everything, a chunk does not.
_MASKLESS = frozenset({"MoshiAttention", "MoshiSdpaAttention", "MoshiFlashAttention2"})


@dataclass(frozen=True, slots=True)
class Reach:
    """Field names as in `phaseprof.work.cost.AttentionCost`."""

    window_tokens: int | None = None
    chunk_tokens: int | None = None
    forgets: bool = True


def reach_of(module: object, config: object, layer: int) -> Reach:
    """What one layer of attention can reach.

    Args:
        module: The attention.
        config: The config of the decoder that it belongs to.
        layer: Its place in the stack of layers.

    Raises:
        NotCovered: If its kind is not known, or if attention and cache disagree about it.
    """
    layer_types: Any = getattr(config, "layer_types", None)
    if layer_types is not None:
        kind = layer_types[layer] if layer < len(layer_types) else "not given"
        return _of_kind(kind, module, config)
    if _positive(config, "attention_chunk_size") is not None:
        raise NotCovered("layers of type chunked_attention, which the config does not tell apart")
    local: Any = getattr(config, "attention_layers", None)
    if local is not None and (window := _positive(config, "window_size")) is not None:
        # GPT-Neo: the mask knows of the window, the cache keeps everything.
        return Reach(window, forgets=False) if local[layer] == "local" else Reach()
    owner = module if hasattr(module, "sliding_window") else config
    window = _positive(owner, "sliding_window")
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return Reach()
    if owner is config and (
        type(module).__name__ in _MASKLESS or not _declares(config, "sliding_window")
    ):
        # The cache forgets what the attention would still look at.
        raise NotCovered("a sliding window in the config of a model that does not know of one")
    return Reach(window)


def _of_kind(kind: str, module: object, config: object) -> Reach:
    if kind in ("full_attention", "attention", "hybrid"):
        return Reach()
    if kind == "sliding_attention":
        window = _positive(config, "sliding_window") or _positive(module, "sliding_window")
        if window is None:
            raise NotCovered("sliding layers without a window in the config")
        return Reach(window)
    if kind == "chunked_attention":
        chunk = _positive(config, "attention_chunk_size")
        if chunk is None:
            raise NotCovered("chunked layers without a size in the config")
        return Reach(chunk_tokens=chunk)
    raise NotCovered(f"layers of type {kind}")


def _positive(owner: object, name: str) -> int | None:
    value = getattr(owner, name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if value > 0 else None


def _declares(config: object, name: str) -> bool:
    """Whether a config's class knows a field. Any key of a config.json becomes an attribute, known or not."""
    kind = type(config)
    if hasattr(kind, name):
        return True
    try:
        return name in inspect.signature(kind.__init__).parameters
    except (TypeError, ValueError):
        return False
