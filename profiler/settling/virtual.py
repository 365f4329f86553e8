"""Tokens that an adapter puts before a prompt: they are a part of it, if the pass has them."""

from __future__ import annotations

from phaseprof.events import PassSeen, VirtualTokens
from phaseprof.sequences import Batch


def lengthen(batch: Batch, virtual: VirtualTokens, event: PassSeen, past: int) -> None:
    """Count virtual tokens as prompt, if the first pass of a generate call has them: peft makes them, and versions of
    transformers that it does not know may leave them out.

    Args:
        batch: What the call computes.
        virtual: What the adapter made for it.
        event: The first pass.
        past: Slots in the cache before it.
    """
    if virtual.cache:
        used = event.cache == virtual.cache and past == virtual.slots
    else:
        used = past + event.query >= batch.prompt + virtual.slots
    if used:
        batch.prompt += virtual.slots
        if batch.padding is not None:
            batch.padding = batch.padding.behind(virtual.slots)
