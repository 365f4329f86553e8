"""The experts that a pass really reads: what a router chose, and how many of a layer's experts that is.

The hook (`phaseprof.hooks.routing`) hands over the choice of each layer as a reference to the router's own tensor, and
nothing is read on the workload's threads. Here, on the recorder's thread, the distinct experts are counted and joined
to the pass that they were chosen in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Up to so many choices are counted faster as Python integers than by a call of torch.
_FEW = 256
#: Layers of a pass that did not come through are dropped when there are more than any model has.
_MAX_WAITING = 4096


class ExpertsChosen(NamedTuple):
    """A router has sent tokens to the experts of one layer.

    Attributes:
        thread_id: Native id of the thread.
        at_ns: Monotonic clock.
        layer: Identity of the module that holds the experts.
        experts: Experts that it holds; ids outside of them are not run here.
        index: The ids that were chosen: a tensor of whole numbers on the CPU, shape (tokens, k).
        version: How often the tensor had been written to; -1 if torch does not count it.
    """

    thread_id: int
    at_ns: int
    layer: int
    experts: int
    index: Any
    version: int


class Routing:
    """Joins the choices of the routers to passes."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[ExpertsChosen]] = {}

    def chose(self, event: ExpertsChosen) -> None:
        """Take the choice of one layer."""
        waiting = self._waiting.setdefault(event.thread_id, [])
        if len(waiting) >= _MAX_WAITING:
            waiting.clear()
        waiting.append(event)

    def take(self, thread_id: int, start_ns: int, layers: int) -> int | None:
        """Distinct experts of the pass that has just ended on a thread, summed over its layers.

        Args:
            thread_id: Native id of the thread.
            start_ns: When the pass began, monotonic clock.
            layers: Mixtures of experts that the model has.

        Returns:
            None if not every layer told its choice exactly once, or if a choice was written over since.
        """
        chosen = [e for e in self._waiting.pop(thread_id, ()) if e.at_ns >= start_ns]
        if not chosen or len(chosen) != layers or len({e.layer for e in chosen}) != layers:
            return None
        counts = [distinct_experts(e) for e in chosen]
        return None if None in counts else sum(n for n in counts if n is not None)


def distinct_experts(event: ExpertsChosen) -> int | None:
    """How many experts of a layer are among the chosen ones; None if the choice was written over since."""
    index = event.index
    if event.version >= 0 and index._version != event.version:
        return None
    if index.numel() <= _FEW:
        return len({i for i in index.flatten().tolist() if 0 <= i < event.experts})
    held = index[(index >= 0) & (index < event.experts)]
    return int(held.bincount(minlength=event.experts).count_nonzero())
