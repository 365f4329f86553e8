"""Hand-written loops: no call announces a prompt, so the cache has to tell, or else the shapes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.events import CacheGone, PassSeen, VirtualTokens
from phaseprof.phases import ExtendOutcome, Phase, TagSource, settle_extend
from phaseprof.requests import Served
from phaseprof.sequences import Batch, request_ids
from phaseprof.settling.rows import PassIds, Tag
from phaseprof.settling.serving import Serving, padding_of, past_of


class LoopPass(enum.Enum):
    """What a pass on a cache is, as far as it can be said when it begins."""

    #: A prompt begins, on an empty cache or behind a kept prefix.
    TURN = enum.auto()
    #: More of a prompt that has not been decoded from.
    CHUNK = enum.auto()
    #: One token.
    STEP = enum.auto()
    #: Several tokens on a cache that was decoded from: a new turn or a verification, as the next pass tells.
    EXTEND = enum.auto()


def kind_of(batch: Batch | None, past: int, query: int) -> LoopPass:
    """Judge a pass by the batch that last ran on its cache (None: nothing is known of it)."""
    if batch is None and past:
        # The cache was filled before the recording began.
        return LoopPass.STEP if query == 1 else LoopPass.EXTEND
    if batch is None:
        return LoopPass.TURN
    if past == 0 or (past < batch.prompt and past < batch.end):
        return LoopPass.TURN
    if query == 1:
        return LoopPass.STEP
    return LoopPass.EXTEND if batch.decoded else LoopPass.CHUNK


@dataclass(frozen=True, slots=True)
class _Pending:
    """An `extend` pass that waits to be settled."""

    event: PassSeen
    ids: PassIds
    past: int


@dataclass(slots=True)
class _Loop:
    prefix: str
    served: Served
    turn: int = 0
    pending: _Pending | None = None
    #: The generate call inside which it runs (guidance); 0 if none. It serves no request of a user's then.
    guest_of: int = 0


#: Model and cache; or model, None and thread for a loop without a cache, or the negative number of the generate call
#: that it is a guest of.
_Key = tuple[str, int | None, int]


#: Threads whose loops without a cache are followed at a time. A program may make one for each pass, and nothing tells
#: that a thread is gone.
_MAX_THREADS = 64


class Loops:
    """The loops in progress."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._loops: dict[_Key, _Loop] = {}
        self._given_up = 0
        # Slots of caches that an adapter filled without a pass.
        self._given: dict[int, int] = {}

    def passed(self, event: PassSeen, ids: PassIds, guest_of: int = 0) -> None:
        """A pass outside of generate; or inside it, for something else than its request.

        Args:
            event: The pass.
            ids: Its numbers.
            guest_of: The generate call inside which it ran; 0 if none.
        """
        if event.cache:
            self._passed_cached(event, ids, guest_of)
        else:
            self._passed_uncached(event, ids, guest_of)

    def virtual(self, event: VirtualTokens) -> None:
        """An adapter made a cache that holds its own tokens: what is put behind them is a prompt."""
        if event.cache:
            self._given[event.cache] = event.slots

    def generation_ended(self, number: int, now_ns: int) -> None:
        """A generate call ended: so did its guests."""
        for key in [key for key, loop in self._loops.items() if loop.guest_of == number]:
            self._close(self._loops.pop(key), now_ns)

    def _passed_cached(self, event: PassSeen, ids: PassIds, guest_of: int) -> None:
        key = (event.model_id, event.cache, 0)
        loop = self._loops.get(key)
        past = past_of(event, loop.served if loop else None)
        if loop is not None:
            self._settle(loop, past)
        earlier = self._serving.on_cache.get(event.cache)
        kind = kind_of(earlier, past, event.query)
        if earlier is None and past and past == self._given.get(event.cache):
            kind = LoopPass.TURN
        if loop is None:
            loop = self._begin(key, f"c{event.cache}", event, past, guest_of)
            if kind is not LoopPass.TURN:
                # The loop goes on where a generate call stopped, or where nobody was watching.
                loop.served.batch.prompt = earlier.prompt if earlier else past
        elif kind is LoopPass.TURN:
            self._new_turn(loop, event, past)
        if kind is LoopPass.EXTEND and event.override is None:
            self._extend(loop, event, ids, past)
            return
        if kind is LoopPass.CHUNK:
            # What the chunk before yielded was not the first token yet.
            loop.served.retract()
            loop.served.batch.prompt = past + event.query
        self._serve(loop, event, ids, past, TagSource.CACHE)

    def _passed_uncached(self, event: PassSeen, ids: PassIds, guest_of: int) -> None:
        """A pass without a cache: one that is a token longer than the last computes that one again."""
        key = (event.model_id, None, -guest_of or event.thread_id)
        loop = self._loops.get(key)
        if loop is None:
            self._make_room(event.start_ns)
            # A thread that was given up may come back: its requests are others.
            again = f"e{self._given_up}" if self._given_up else ""
            loop = self._begin(key, f"n{event.thread_id}{again}", event, 0, guest_of)
        elif (
            len(loop.served.batch.request_ids) != event.rows
            or event.query != loop.served.batch.end + 1
        ):
            self._new_turn(loop, event, 0)
        # The one that was used last is given up last.
        self._loops[key] = self._loops.pop(key)
        self._serve(loop, event, ids, 0, TagSource.INFERRED)

    def _make_room(self, now_ns: int) -> None:
        """Give up the thread whose loop without a cache has rested longest, if there are many."""
        threads = [key for key in self._loops if key[1] is None and key[2] > 0]
        if len(threads) >= _MAX_THREADS:
            self._given_up += 1
            self._close(self._loops.pop(threads[0]), now_ns)

    def cache_gone(self, event: CacheGone) -> None:
        """A cache was freed: nothing follows on it."""
        self._serving.on_cache.pop(event.cache, None)
        self._given.pop(event.cache, None)
        for key in [key for key in self._loops if key[1] == event.cache]:
            self._close(self._loops.pop(key), event.at_ns)

    def finish(self, now_ns: int) -> None:
        """The session ends: nothing follows on any cache."""
        for loop in self._loops.values():
            self._close(loop, now_ns)
        self._loops.clear()

    def _serve(
        self, loop: _Loop, event: PassSeen, ids: PassIds, past: int, source: TagSource
    ) -> None:
        if event.mask is not None:
            loop.served.batch.padding = padding_of(event.mask)
        self._serving.serve(event, ids, loop.served, Tag(source), past=past)

    def _extend(self, loop: _Loop, event: PassSeen, ids: PassIds, past: int) -> None:
        loop.pending = _Pending(event, ids, past)
        self._put_extend(loop, loop.pending, may_change=True)
        if event.error is None:
            loop.served.batch.end = past + event.query
            self._serving.on_cache[event.cache] = loop.served.batch

    def _put_extend(self, loop: _Loop, pending: _Pending, *, may_change: bool) -> None:
        tokens = loop.served.batch.divide(
            past=pending.past, query=pending.event.query, forced=Phase.EXTEND
        )
        tag = Tag(TagSource.INFERRED, may_change=may_change)
        self._serving.rows.put(pending.event, pending.ids, tokens, tag, past=pending.past)

    def _settle(self, loop: _Loop, next_past: int) -> None:
        """The pass before was an `extend`: the cache that this pass finds says what it was."""
        pending = loop.pending
        if pending is None:
            return
        loop.pending = None
        outcome = settle_extend(
            prompt=loop.served.batch.prompt,
            past=pending.past,
            query=pending.event.query,
            next_past=next_past,
            verified_before=loop.served.batch.verified,
        )
        if outcome.phase is Phase.PREFILL:
            self._new_turn(loop, pending.event, pending.past)
            self._serve(loop, pending.event, pending.ids, pending.past, TagSource.CACHE)
        else:
            self._verified(loop, pending, outcome)

    def _verified(self, loop: _Loop, pending: _Pending, outcome: ExtendOutcome) -> None:
        event, batch = pending.event, loop.served.batch
        batch.verified = True
        tokens = batch.divide(past=pending.past, query=event.query, forced=Phase.DECODE)
        tag = Tag(
            TagSource.CACHE,
            drafts=outcome.draft_tokens * event.rows,
            accepted=outcome.accepted_tokens * event.rows,
        )
        self._serving.rows.put(event, pending.ids, tokens, tag, past=pending.past)
        if event.error is None:
            batch.advance(past=pending.past, query=event.query, cached=True)
            loop.served.yielded(
                event.end_ns,
                pending.ids.step,
                outcome.accepted_tokens + 1,
                start_ns=event.start_ns,
                span=event.span,
            )

    def _begin(self, key: _Key, name: str, event: PassSeen, past: int, guest_of: int) -> _Loop:
        host = f"{self._serving.process}.g{guest_of}" if guest_of else self._serving.process
        prefix = f"{host}.{name}"
        batch = _turn_batch(f"{prefix}.t0", event, past)
        served = Served(batch, event.model_id, event.start_ns, hidden=guest_of > 0)
        loop = _Loop(prefix, served, guest_of=guest_of)
        self._loops[key] = loop
        return loop

    def _new_turn(self, loop: _Loop, event: PassSeen, past: int) -> None:
        self._put_requests(loop, event.start_ns)
        loop.turn += 1
        batch = _turn_batch(f"{loop.prefix}.t{loop.turn}", event, past)
        hidden = loop.guest_of > 0
        loop.served = Served(batch, event.model_id, event.start_ns, hidden=hidden)

    def _close(self, loop: _Loop, now_ns: int) -> None:
        if loop.pending is not None:
            self._put_extend(loop, loop.pending, may_change=False)
            loop.pending = None
        self._put_requests(loop, now_ns)

    def _put_requests(self, loop: _Loop, now_ns: int) -> None:
        served = loop.served
        if served.first_start_ns is not None:
            ended = served.token_ns[-1] if served.token_ns else now_ns
            self._serving.put_requests(served, finished_ns=ended)


def _turn_batch(prefix: str, event: PassSeen, past: int) -> Batch:
    return Batch(request_ids(prefix, event.rows), prompt=past + event.query)
