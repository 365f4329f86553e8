"""Read from a forward call of transformers what it is about to compute, without touching a value.

transformers 5.0 to 5.24 name the cache argument differently (`cache`, `past_key_values`, `cache_params`); all are read.
Everything here runs on the workload's thread for each pass: shapes and attributes only, no tensor operation beyond a
copy of a CPU mask that may hold padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phaseprof.work.count import Source

#: The names of the cache argument, newest first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def token_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int, Any]:
    """Rows, slots a row, and the input ids (None when embeddings were passed) of a call.

    Returns:
        (rows, query, ids). (0, 0, None) when the call has neither token ids nor embeddings of a sequence.
    """
    for name in ("decoder_input_ids", "input_ids"):
        ids = kwargs.get(name)
        if ids is not None:
            shape = ids.shape
            return (shape[0], shape[1], ids) if len(shape) == 2 else (1, shape[0], None)
    for name in ("decoder_inputs_embeds", "inputs_embeds"):
        embeds = kwargs.get(name)
        if embeds is not None:
            return embeds.shape[0], embeds.shape[1], None
    if args:
        shape = getattr(args[0], "shape", ())
        if len(shape) == 2:
            return shape[0], shape[1], args[0]
        if len(shape) == 3:
            return shape[0], shape[1], None
    return 0, 0, None


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache that was passed, or None."""
    for name in CACHE_NAMES:
        cache = kwargs.get(name)
        if cache is not None:
            return cache
    return None


def cache_of_output(output: Any) -> Any:
    """The cache that a call returned, or None. A model's output is a dict or, with return_dict=False, a tuple."""
    if isinstance(output, dict):
        # dict.get by name: attribute access would run the deprecation warnings of renamed fields.
        for name in CACHE_NAMES:
            cache = dict.get(output, name)
            if cache is not None:
                return cache
        return None
    if isinstance(output, tuple):
        return next((item for item in output if hasattr(item, "get_seq_length")), None)
    return None


def past_length(cache: Any) -> int | None:
    """Slots in a cache, or None where reading them would make a device wait or the cache has no length.

    A static cache keeps its length in a tensor: on the CPU that is read, elsewhere the caller counts for itself. Older
    ones (transformers 5.0) keep none and would count the slots that are not zero, which is no length: padding is zero.
    """
    try:
        # Of an encoder-decoder's pair, the one that grows.
        cache = getattr(cache, "self_attention_cache", cache)
        layers = getattr(cache, "layers", None)
        if layers and hasattr(layers[0], "max_cache_len"):
            # A sliding layer counts in an integer; its tensor stands still once the window is full.
            length = getattr(layers[0], "cumulative_length_int", None)
            if length is None:
                length = getattr(layers[0], "cumulative_length", None)
        else:
            length = cache.get_seq_length()
    except Exception:
        # Pure state-space caches raise; what a foreign cache class does is not ours to judge.
        return None
    if length is None or isinstance(length, int):
        return length
    return int(length) if getattr(getattr(length, "device", None), "type", "") == "cpu" else None


def first_position(kwargs: Mapping[str, Any]) -> int | None:
    """Where the query begins, by `cache_position` (transformers before 5.10) if it lies on the CPU."""
    positions = kwargs.get("cache_position")
    if positions is None or positions.device.type != "cpu" or not positions.numel():
        return None
    return int(positions.flatten()[0])


def logits_positions(keep: Any, query: int) -> int:
    """Positions of each row for which the head is computed, by the value of `logits_to_keep`: None or 0 is all."""
    if keep is None:
        return query
    if isinstance(keep, int):
        return min(keep, query) if keep else query
    return int(keep.numel())


def mask_of(kwargs: Mapping[str, Any], rows: int, slots: int | None) -> tuple[Any, bool]:
    """The padding mask of a call, copied, and whether there is one that could not be read.

    Args:
        kwargs: Of the call.
        rows: Sequences.
        slots: Width that the mask should have (past + query).

    Returns:
        (mask, unread): a CPU tensor, uint8, (rows, slots), or None.
    """
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None, False
    shape = tuple(getattr(mask, "shape", ()))
    if len(shape) != 2:
        return None, False
    if shape != (rows, slots):
        return None, True
    return copy_mask(mask)


def copy_mask(mask: Any) -> tuple[Any, bool]:
    """A copy of a two-dimensional mask, or (None, True) if it lies on a device that would have to be waited for."""
    if mask.device.type != "cpu":
        return None, True
    return (mask != 0).byte(), False


def encoded_tokens(output: Any) -> tuple[int, int] | None:
    """Rows and tokens that an encoder gave out, by its hidden states; None if it gave none of the shape (rows, tokens,
    width), or (tokens, width) where it packs its images into one row. What it was given says less: features and pixels
    are joined to fewer tokens."""
    if isinstance(output, dict):
        states = dict.get(output, "last_hidden_state")
    else:
        states = output[0] if isinstance(output, tuple) and output else output
    shape = tuple(getattr(states, "shape", ()))
    if len(shape) == 3:
        return shape[0], shape[1]
    # The first of a tuple may be scores of shape (rows, classes).
    packed = len(shape) == 2 and not isinstance(output, tuple)
    return (1, shape[0]) if packed else None


def source_is_new(cache: Any) -> bool:
    """Whether the decoder of an encoder-decoder is about to project its source to keys and values: without a cache, and
    as long as the cache holds none."""
    updated = getattr(cache, "is_updated", None)
    return not (isinstance(updated, dict) and any(updated.values()))


def source_of(kwargs: Mapping[str, Any], output: Any, *, new: bool) -> Source | None:
    """What the decoder of an encoder-decoder attended to; None if that cannot be read.

    Args:
        kwargs: Of the call.
        output: Of the call.
        new: What :func:`source_is_new` said before it.
    """
    given = kwargs.get("encoder_outputs")
    states = None
    if isinstance(given, dict):
        states = dict.get(given, "last_hidden_state")
    elif isinstance(given, tuple | list):
        states = given[0] if given else None
    elif given is None and isinstance(output, dict):
        states = dict.get(output, "encoder_last_hidden_state")
    shape: tuple[int, ...] = getattr(states, "shape", ())
    return Source(int(shape[1]), new, given is None) if len(shape) == 3 else None
