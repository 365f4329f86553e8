"""What the hooks of a session share, and what each thread of the workload is in the middle of."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phaseprof.events import CacheGone, Override
from phaseprof.evidence import PassWindow


class Generation:
    """A generate call in progress on a thread.

    Attributes:
        number: Its number in the process.
        model: The model whose method was called.
        parent: The call around it; None if it is outermost.
        end_ids: Set once the prompt is known; read for each pass of several rows.
        speculative: It verifies drafts; a call nested in it drafts.
        slots: Slots in its cache at its end, where it verified drafts.
        processors: Its logits processors, if one of them may call a model.
        criteria: Its stopping criteria, if one of them is not a plain limit.
        rows_end_apart: It has several rows, each of which ends for itself.
    """

    __slots__ = (
        "_guest",
        "criteria",
        "end_ids",
        "model",
        "number",
        "parent",
        "processors",
        "rows_end_apart",
        "slots",
        "speculative",
    )

    def __init__(self, number: int, model: Any, parent: Generation | None) -> None:
        self.number = number
        self.model = model
        self.parent = parent
        self.end_ids: tuple[int, ...] = ()
        self.speculative = False
        self.slots: int | None = None
        self.processors: Any = None
        self.criteria: Any = None
        self.rows_end_apart = False
        self._guest: Generation | None = None

    def guest(self) -> Generation:
        """What passes belong to that run inside its processors and criteria: its number, negative. No model generates
        in it, so that each is judged as outside of generate."""
        if self._guest is None:
            self._guest = Generation(-self.number, None, self)
        return self._guest


class ThreadFacts:
    """What one thread is in the middle of.

    Attributes:
        in_pass: A pass is running: calls below it are part of it.
        generation: The innermost generate call; None in a hand-written loop.
        override: What `phaseprof.phase(...)` says; None outside of it.
        native_id: The operating system's id of the thread.
        step: The step of a vLLM worker whose model is about to run.
        warming: A vLLM worker warms up its kernels, by steps of requests that nobody sent.
    """

    __slots__ = ("generation", "in_pass", "native_id", "override", "step", "warming")

    def __init__(self) -> None:
        self.in_pass = False
        self.generation: Generation | None = None
        self.override: Override | None = None
        self.native_id = threading.get_native_id()
        self.step: Any = None
        self.warming = False


class ThreadState(threading.local):
    """Each thread's own facts.

    Attributes:
        here: Those of the calling thread.
    """

    def __init__(self) -> None:
        # Runs once in each thread.
        self.here = ThreadFacts()


@dataclass(slots=True)
class Flags:
    """What the session says of all passes that run now.

    Attributes:
        warmups: Nested `phaseprof.warmup()` blocks.
        profiled: A costly collector runs.
        window: Is told of every pass, and says whether a costly collector runs during it; None for most sessions.
    """

    warmups: int = 0
    profiled: bool = False
    window: PassWindow | None = None


def begin_window(window: PassWindow, flags: Flags, wide: bool) -> bool:
    """Tell a window of a pass; gives whether the pass is to be flagged `profiled`.

    A pass of a warm-up is no pass to look at, unless a window is held open over it.

    Args:
        window: What `flags.window` was just now: its `ended` is to be called, whatever comes.
        flags: Of the session.
        wide: It computes more than one token for some sequence.
    """
    return window.begins(wide, flags.warmups > 0) or flags.profiled


class CacheTrack:
    """A KV cache that was seen.

    Attributes:
        number: Its number in the process.
        end: Slots in it after the last pass, by our own count.
        layout_read: Its layout was handed over.
        packed: It holds many requests, and a pass packs several of them into one row (continuous batching).
        growing: A layer of it whose keys show the length; None if there is none, or before the first pass.
    """

    __slots__ = ("end", "growing", "layout_read", "number", "packed", "ref")

    def __init__(self, number: int, ref: weakref.ref[Any], *, packed: bool) -> None:
        self.number = number
        self.packed = packed
        self.ref = ref
        self.end = 0
        self.layout_read = False
        self.growing: Any = None


class CacheBook:
    """Numbers caches by identity, without keeping them alive or marking them.

    Args:
        emit: Takes a `CacheGone` when a cache is freed.
        now_ns: The monotonic clock.
    """

    def __init__(self, emit: Callable[[CacheGone], None], now_ns: Callable[[], int]) -> None:
        self._emit = emit
        self._now_ns = now_ns
        #: By identity, of caches that live.
        self.tracks: dict[int, CacheTrack] = {}
        self._numbers = itertools.count(1)

    def find(self, cache: Any) -> CacheTrack | None:
        """The track of a cache that was seen before."""
        return self.tracks.get(id(cache))

    def add(self, cache: Any) -> CacheTrack | None:
        """Begin to track a cache; None if it is of a kind that cannot be (a tuple)."""
        key = id(cache)
        number = next(self._numbers)

        def gone(_: weakref.ref[Any]) -> None:
            # Runs before the address can be used again, so that an entry always is of a cache that lives.
            self.tracks.pop(key, None)
            self._emit(CacheGone(number, self._now_ns()))

        try:
            packed = type(cache).__name__ == "PagedAttentionCache"
            track = CacheTrack(number, weakref.ref(cache, gone), packed=packed)
        except TypeError:
            return None
        self.tracks[key] = track
        return track
