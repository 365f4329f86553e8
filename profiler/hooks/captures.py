"""Which CUDA graphs are being captured, on any thread: asking the device for an event would break such a capture.

torch tells only of the calling thread's current stream. Every capture of torch begins and ends in two methods of
`torch.cuda.CUDAGraph` (also those of torch.compile's mode reduce-overhead), where they are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from phaseprof.hooks.patching import Patch
from phaseprof.timers import CAPTURES, Captures


class CaptureHook:
    """Counts captures while it is set.

    Args:
        captures: Takes the counts.
    """

    def __init__(self, captures: Captures = CAPTURES) -> None:
        self._captures = captures
        self._patches: list[Patch] = []
        self._active = False
        #: Captures under way whose begin was seen.
        self._mine: set[int] = set()

    def set(self, cuda: Any) -> None:
        """Begin to count.

        Args:
            cuda: The module `torch.cuda`, or a stand-in with `CUDAGraph`.
        """
        kind = getattr(cuda, "CUDAGraph", None)
        if self._active or kind is None:
            return
        self._active = True
        self._patches = [
            Patch(kind, "capture_begin", self._wrap_begin),
            Patch(kind, "capture_end", self._wrap_end),
        ]

    def remove(self) -> None:
        """Count no more."""
        self._active = False
        for patch in reversed(self._patches):
            patch.remove()
        self._patches = []
        self._captures.underway -= len(self._mine)
        self._mine.clear()

    def _wrap_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._active:
                # Before the call: nobody may ask once it is under way.
                self._began(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._ended(graph)
                raise

        return capture_begin

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._ended(graph)

        return capture_end

    def _began(self, graph: Any) -> None:
        self._mine.add(id(graph))
        self._captures.begun += 1
        self._captures.underway += 1

    def _ended(self, graph: Any) -> None:
        if id(graph) in self._mine:
            self._mine.discard(id(graph))
            self._captures.underway -= 1
