"""From raw events to rows: labels, work and requests are derived here, in the order of the events.

A `Settler` runs on the background thread. It knows three kinds of batches: a generate call (its prompt is known before
the first pass), a hand-written loop on a cache (the cache tells), and a hand-written loop without a cache (only the
shapes tell). A row that later events may change is put at once and put again when it is settled, so that a kill never
loses it.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from phaseprof.attribution import PassWindow
from phaseprof.events import (
    CacheGone,
    Event,
    GenerationBegan,
    GenerationEnded,
    ModelSeen,
    PassSeen,
    PromptKnown,
)
from phaseprof.phases import ExtendOutcome, Phase, Role, TagSource, settle_extend
from phaseprof.records import ForwardPass, Request, Warmup
from phaseprof.requests import Served
from phaseprof.sequences import Batch, Padding, PassTokens, request_ids
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, Work, count, pairs


class Sink(Protocol):
    """Where rows go. A row with the id of an earlier one replaces it."""

    def put_pass(self, row: ForwardPass) -> None:
        """Take a pass."""
        ...

    def put_request(self, row: Request) -> None:
        """Take a request."""
        ...


@dataclass(slots=True)
class _Model:
    cost: ModelCost | None = None
    dtype: str = ""
    steps: int = 0
    seen: set[Phase] = field(default_factory=set)
    layout: Any = None
    masked: bool = False


@dataclass(slots=True)
class _Generation:
    began: GenerationBegan
    prefix: str
    served: Served | None = None
    known: PromptKnown | None = None
    #: A verification whose accepted drafts the next pass tells.
    verifying: _Verifying | None = None
    role: Role = Role.TARGET


@dataclass(frozen=True, slots=True)
class _Verifying:
    row: ForwardPass
    end: int
    drafts: int


@dataclass(slots=True)
class _Loop:
    prefix: str
    served: Served
    turn: int = 0
    pending: _Pending | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    event: PassSeen
    ids: _Ids
    past: int


@dataclass(frozen=True, slots=True)
class _Ids:
    pass_id: int
    step: int


class Settler:
    """Turns events into rows.

    Args:
        sink: Takes the rows.
        offset_ns: From the monotonic clock to Unix ns.
        process: Names this process in request ids.
        first_pass_id: Id of the first pass; later ones count up.
    """

    def __init__(self, sink: Sink, *, offset_ns: int, process: str, first_pass_id: int) -> None:
        self._sink = sink
        self._offset_ns = offset_ns
        self._process = process
        self._next_pass_id = first_pass_id
        self._models: dict[str, _Model] = {}
        self._layouts: dict[int, Any] = {}
        self._generations: dict[int, _Generation] = {}
        #: By model and cache, or by model, None and thread without a cache.
        self._loops: dict[tuple[str, int | None, int], _Loop] = {}
        #: The batch that last ran on a cache, whether a generate call's or a loop's.
        self._on_cache: dict[int, Batch] = {}
        #: Passes whose device time is not known yet, in order, and the last version of each.
        self._waiting: deque[tuple[int, Any]] = deque()
        self._unresolved: dict[int, ForwardPass] = {}
        self._profiled: list[PassWindow] = []
        self.padding_unread = False

    def handle(self, event: Event) -> None:
        """Take one event."""
        match event:
            case PassSeen():
                self._pass(event)
            case GenerationBegan():
                self._generations[event.generation] = _Generation(
                    event, f"{self._process}.g{event.generation}"
                )
            case PromptKnown():
                self._prompt(event)
            case GenerationEnded():
                self._ended(event)
            case ModelSeen():
                model = self._models.setdefault(event.model_id, _Model())
                model.cost = event.cost
                model.dtype = event.dtype
                model.masked = event.masked
            case CacheGone():
                self._gone(event)

    def poll(self) -> None:
        """Put the passes again whose device time has become known."""
        while self._waiting and self._waiting[0][1].device_ns is not None:
            pass_id, span = self._waiting.popleft()
            row = self._unresolved.pop(pass_id, None)
            if row is not None:
                self._sink.put_pass(replace(row, device_ns=span.device_ns, may_change=False))

    def take_profiled(self) -> list[PassWindow]:
        """When the passes ran that were flagged `profiled` since the last call."""
        taken, self._profiled = self._profiled, []
        return taken

    def finish(self, now_ns: int) -> None:
        """The session ends: nothing follows on any cache. Calls that still run stay open.

        Args:
            now_ns: Monotonic clock.
        """
        self.poll()
        for loop in self._loops.values():
            self._close_loop(loop, now_ns)
        self._loops.clear()

    # Passes

    def _pass(self, event: PassSeen) -> None:
        model = self._models.setdefault(event.model_id, _Model())
        if event.layout is not None:
            self._layouts[event.cache] = event.layout
            model.layout = event.layout
        ids = _Ids(self._next_pass_id, model.steps)
        self._next_pass_id += 1
        model.steps += 1
        self.padding_unread |= event.mask_unread
        generation = self._generations.get(event.generation)
        if event.encoder or event.training:
            self._aside(event, ids, generation)
        elif generation is not None:
            self._generated(event, ids, generation)
        elif event.cache:
            self._looped(event, ids)
        else:
            self._uncached(event, ids)

    def _aside(self, event: PassSeen, ids: _Ids, generation: _Generation | None) -> None:
        """An encoder, a tower, a training or a scoring pass: no prefill and no decode tokens."""
        prefix = f"{self._process}.p{ids.pass_id & 0xFFFFFFFF}"
        prefix = generation.prefix if generation is not None else prefix
        batch = Batch(request_ids(prefix, event.rows), prompt=event.query)
        forced = Phase.ENCODE if event.encoder else Phase.OTHER
        forced = event.override.phase if event.override else forced
        tokens = batch.divide(past=0, query=event.query, forced=forced)
        role = Role.ENCODER if event.encoder else Role.TARGET
        self._put(event, ids, tokens, past=0, role=role, source=TagSource.INFERRED)

    def _generated(self, event: PassSeen, ids: _Ids, generation: _Generation) -> None:
        past = self._past(event, generation.served)
        if generation.served is None:
            self._serve_unannounced(event, generation, past)
        served = generation.served
        assert served is not None
        batch = served.batch
        if len(batch.request_ids) != event.rows:
            batch.request_ids = request_ids(generation.prefix, event.rows)
            batch.padding = None
            batch.finished.clear()
        self._settle_verification(generation, past)
        self._note_finished(event, generation, past)
        self._serve(event, ids, served, past, source=TagSource.GENERATE, generation=generation)

    def _serve_unannounced(self, event: PassSeen, generation: _Generation, past: int) -> None:
        """A decoding method of its own that did not announce its prompt: its first pass is the prompt."""
        batch = Batch(request_ids(generation.prefix, event.rows), prompt=past + event.query)
        generation.served = Served(batch, event.model_id, generation.began.arrival_ns)

    def _note_finished(self, event: PassSeen, generation: _Generation, past: int) -> None:
        """Rows that were fed an end token (or what follows one) are padding from this pass on."""
        known = generation.known
        served = generation.served
        if event.fed is None or known is None or served is None or past < known.prompt:
            return
        for row, token in enumerate(event.fed[:, -1].tolist()):
            if token in known.end_ids:
                served.batch.finished.add(row)

    def _looped(self, event: PassSeen, ids: _Ids) -> None:
        key = (event.model_id, event.cache, 0)
        loop = self._loops.get(key)
        past = self._past(event, loop.served if loop else None)
        if loop is not None:
            self._settle_pending(loop, past)
        earlier = self._on_cache.get(event.cache)
        kind = _loop_kind(earlier, past, event.query)
        if loop is None:
            loop = self._new_loop(key, f"{self._process}.c{event.cache}", event, past)
            if kind is not _LoopPass.TURN:
                # The loop goes on where a generate call stopped, or where nobody was watching.
                loop.served.batch.prompt = earlier.prompt if earlier else past
        elif kind is _LoopPass.TURN:
            self._new_turn(loop, event, past)
        if kind is _LoopPass.EXTEND and event.override is None:
            loop.pending = _Pending(event, ids, past)
            tokens = loop.served.batch.divide(past=past, query=event.query, forced=Phase.EXTEND)
            self._put(event, ids, tokens, past=past, source=TagSource.INFERRED, may_change=True)
            if event.error is None:
                loop.served.batch.end = past + event.query
                self._on_cache[event.cache] = loop.served.batch
            return
        if kind is _LoopPass.CHUNK:
            # What the chunk before yielded was not the first token yet.
            loop.served.retract()
            loop.served.batch.prompt = past + event.query
        self._set_padding(loop.served.batch, event)
        self._serve(event, ids, loop.served, past, source=TagSource.CACHE)

    def _uncached(self, event: PassSeen, ids: _Ids) -> None:
        """No generate call and no cache: a pass that is one token longer than the last one computes it again."""
        key = (event.model_id, None, event.thread_id)
        loop = self._loops.get(key)
        grown = (
            loop is not None
            and len(loop.served.batch.request_ids) == event.rows
            and event.query == loop.served.batch.end + 1
        )
        if loop is None:
            loop = self._new_loop(key, f"{self._process}.n{event.thread_id}", event, 0)
        elif not grown:
            self._new_turn(loop, event, 0)
        self._set_padding(loop.served.batch, event)
        self._serve(event, ids, loop.served, 0, source=TagSource.INFERRED)

    def _serve(
        self,
        event: PassSeen,
        ids: _Ids,
        served: Served,
        past: int,
        *,
        source: TagSource,
        generation: _Generation | None = None,
    ) -> None:
        """Divide, put and account a pass whose batch is known."""
        batch = served.batch
        if event.override is not None:
            source = TagSource.USER
            if event.override.prompt_tokens is not None:
                batch.prompt = event.override.prompt_tokens
        forced = event.override.phase if event.override else None
        tokens = batch.divide(past=past, query=event.query, forced=forced)
        first = served.first_start_ns is None
        served.began_pass(event.start_ns)
        known = generation.known if generation is not None else None
        drafts = _drafts(tokens, past, batch) if known is not None and known.speculative else 0
        row = self._put(
            event,
            ids,
            tokens,
            past=past,
            role=generation.role if generation else Role.TARGET,
            source=source,
            drafts=drafts,
            accepted=None if drafts else 0,
            may_change=drafts > 0,
        )
        served.note(row)
        if event.error is None:
            batch.advance(past=past, query=event.query, cached=event.cache > 0)
            if event.cache:
                self._on_cache[event.cache] = batch
            if generation is not None and drafts:
                generation.verifying = _Verifying(row, batch.end, drafts)
            if batch.end >= batch.prompt:
                served.yielded(event.end_ns)
        if first:
            self._put_requests(served, finished_ns=None)

    # Settling

    def _settle_verification(self, generation: _Generation, past: int) -> None:
        verifying = generation.verifying
        if verifying is None:
            return
        rejected = max(verifying.end - past, 0) * verifying.row.sequences
        accepted = max(verifying.drafts - rejected, 0)
        self._send(replace(verifying.row, accepted_tokens=accepted, may_change=False))
        if generation.served is not None and generation.served.outputs:
            for row in range(len(generation.served.outputs)):
                generation.served.outputs[row] += accepted // verifying.row.sequences
        generation.verifying = None

    def _settle_pending(self, loop: _Loop, next_past: int) -> None:
        """The pass before was an `extend`: this pass's cache says what it was."""
        pending = loop.pending
        if pending is None:
            return
        loop.pending = None
        batch = loop.served.batch
        outcome = settle_extend(
            prompt=batch.prompt,
            past=pending.past,
            query=pending.event.query,
            next_past=next_past,
            verified_before=batch.verified,
        )
        if outcome.phase is Phase.PREFILL:
            self._new_turn(loop, pending.event, pending.past)
            self._set_padding(loop.served.batch, pending.event)
            self._serve(
                pending.event, pending.ids, loop.served, pending.past, source=TagSource.CACHE
            )
        else:
            self._verified(loop, pending, outcome)

    def _verified(self, loop: _Loop, pending: _Pending, outcome: ExtendOutcome) -> None:
        event, batch = pending.event, loop.served.batch
        batch.verified = True
        tokens = batch.divide(past=pending.past, query=event.query, forced=Phase.DECODE)
        self._put(
            event,
            pending.ids,
            tokens,
            past=pending.past,
            source=TagSource.CACHE,
            drafts=outcome.draft_tokens * event.rows,
            accepted=outcome.accepted_tokens * event.rows,
        )
        if event.error is None:
            batch.advance(past=pending.past, query=event.query, cached=True)
            loop.served.yielded(event.end_ns, outcome.accepted_tokens + 1)

    # Generate calls

    def _prompt(self, event: PromptKnown) -> None:
        generation = self._generations.get(event.generation)
        if generation is None:
            return
        parent = self._generations.get(generation.began.parent)
        prompt = event.prompt
        if parent is not None:
            # A draft model proposes for the call around it: what that one has generated is not a prompt here.
            generation.role = Role.DRAFT
            if parent.known is not None:
                prompt = min(prompt, parent.known.prompt)
        generation.known = event._replace(prompt=prompt)
        ids = request_ids(generation.prefix, event.rows, event.sequences_per_request)
        batch = Batch(ids, prompt=prompt, padding=_padding(event.mask))
        generation.served = Served(
            batch, generation.began.model_id, generation.began.arrival_ns, event.max_output
        )

    def _ended(self, event: GenerationEnded) -> None:
        generation = self._generations.pop(event.generation, None)
        if generation is None:
            return
        if generation.verifying is not None:
            self._send(replace(generation.verifying.row, may_change=False))
        if generation.served is not None and generation.served.first_start_ns is not None:
            self._put_requests(
                generation.served,
                finished_ns=event.end_ns,
                error=event.error is not None,
                known_end=True,
            )

    def _put_requests(
        self,
        served: Served,
        *,
        finished_ns: int | None,
        error: bool = False,
        known_end: bool = False,
    ) -> None:
        rows = served.rows(
            offset_ns=self._offset_ns, finished_ns=finished_ns, error=error, known_end=known_end
        )
        for row in rows:
            self._sink.put_request(row)

    # Loops

    def _new_loop(
        self, key: tuple[str, int | None, int], prefix: str, event: PassSeen, past: int
    ) -> _Loop:
        batch = _turn_batch(f"{prefix}.t0", event, past)
        loop = _Loop(prefix, Served(batch, event.model_id, event.start_ns))
        self._loops[key] = loop
        return loop

    def _new_turn(self, loop: _Loop, event: PassSeen, past: int) -> None:
        self._put_loop_requests(loop, event.start_ns)
        loop.turn += 1
        batch = _turn_batch(f"{loop.prefix}.t{loop.turn}", event, past)
        loop.served = Served(batch, event.model_id, event.start_ns)

    def _close_loop(self, loop: _Loop, now_ns: int) -> None:
        if loop.pending is not None:
            event, ids = loop.pending.event, loop.pending.ids
            tokens = loop.served.batch.divide(
                past=loop.pending.past, query=event.query, forced=Phase.EXTEND
            )
            self._put(event, ids, tokens, past=loop.pending.past, source=TagSource.INFERRED)
            loop.pending = None
        self._put_loop_requests(loop, now_ns)

    def _put_loop_requests(self, loop: _Loop, now_ns: int) -> None:
        served = loop.served
        if served.first_start_ns is not None:
            ended = served.token_ns[-1] if served.token_ns else now_ns
            self._put_requests(served, finished_ns=ended)

    def _gone(self, event: CacheGone) -> None:
        self._layouts.pop(event.cache, None)
        self._on_cache.pop(event.cache, None)
        for key in [key for key in self._loops if key[1] == event.cache]:
            self._close_loop(self._loops.pop(key), event.at_ns)

    # Rows

    def _put(
        self,
        event: PassSeen,
        ids: _Ids,
        tokens: PassTokens,
        *,
        past: int,
        source: TagSource,
        role: Role = Role.TARGET,
        drafts: int = 0,
        accepted: int | None = 0,
        may_change: bool = False,
    ) -> ForwardPass:
        model = self._models[event.model_id]
        work = self._work(event, past, model, masked=model.masked or tokens.padding > 0)
        unresolved = event.span is not None and event.span.device_ns is None
        row = ForwardPass(
            pass_id=ids.pass_id,
            step=ids.step,
            model_id=event.model_id,
            role=role,
            phase=tokens.phase,
            tag_source=TagSource.USER if event.override else source,
            start_ns=event.start_ns + self._offset_ns,
            end_ns=event.end_ns + self._offset_ns,
            host_ns=event.end_ns - event.start_ns,
            device_ns=None if event.span is None else event.span.device_ns,
            sequences=event.rows,
            prefill_tokens=tokens.prefill,
            decode_tokens=tokens.decode,
            draft_tokens=drafts,
            accepted_tokens=accepted,
            cached_tokens=tokens.cached,
            recomputed_tokens=tokens.recomputed,
            padding_tokens=None if event.mask_unread else tokens.padding,
            context_tokens=(past + event.query) * event.rows,
            attention_pairs=pairs(past, event.query, None) * event.rows,
            logits_tokens=event.logits,
            slices=tokens.slices,
            flops=None if work is None else work.flops,
            weight_bytes=None if work is None else work.weight_bytes,
            kv_read_bytes=None if work is None else work.kv_read_bytes,
            kv_write_bytes=None if work is None else work.kv_write_bytes,
            dtype=model.dtype,
            thread_id=event.thread_id,
            warmup=self._warmup(event, tokens.phase, model),
            compiled=event.compiled,
            profiled=event.profiled,
            error=event.error,
            may_change=may_change or unresolved,
        )
        if unresolved and ids.pass_id not in self._unresolved:
            self._waiting.append((ids.pass_id, event.span))
            self._unresolved[ids.pass_id] = row
        self._send(row)
        if row.profiled:
            self._profiled.append(PassWindow(row.pass_id, row.thread_id, row.start_ns, row.end_ns))
        return row

    def _send(self, row: ForwardPass) -> None:
        """Put a row; one whose device time is still to come stays open until it has."""
        if row.pass_id in self._unresolved:
            row = replace(row, may_change=True)
            self._unresolved[row.pass_id] = row
        self._sink.put_pass(row)

    def _work(self, event: PassSeen, past: int, model: _Model, *, masked: bool) -> Work | None:
        if model.cost is None or not model.cost.covered:
            return None
        return count(
            model.cost,
            (Rows(past=past, query=event.query, sequences=event.rows),),
            logits_tokens=event.logits,
            layout=self._layouts.get(event.cache, model.layout) if event.cache else None,
            cached=event.cache > 0,
            masked=masked,
        )

    def _warmup(self, event: PassSeen, phase: Phase, model: _Model) -> Warmup | None:
        if event.warmup:
            model.seen.add(phase)
            return Warmup.REQUESTED
        if event.compiling:
            return Warmup.COMPILE
        if phase not in model.seen and phase is not Phase.EXTEND:
            model.seen.add(phase)
            return Warmup.FIRST
        return None

    @staticmethod
    def _past(event: PassSeen, served: Served | None) -> int:
        if event.past is not None:
            return event.past
        return 0 if served is None else served.batch.end

    def _set_padding(self, batch: Batch, event: PassSeen) -> None:
        if event.mask is not None:
            batch.padding = _padding(event.mask)


class _LoopPass(enum.Enum):
    """What a pass of a hand-written loop on a cache is, as far as it can be said when it begins."""

    TURN = enum.auto()
    CHUNK = enum.auto()
    STEP = enum.auto()
    EXTEND = enum.auto()


def _loop_kind(batch: Batch | None, past: int, query: int) -> _LoopPass:
    """Judge a pass by the batch that last ran on its cache (None: nothing is known of it)."""
    if batch is None and past:
        # The cache was filled before the recording began.
        return _LoopPass.STEP if query == 1 else _LoopPass.EXTEND
    if batch is None:
        return _LoopPass.TURN
    if past == 0 or (past < batch.prompt and past < batch.end):
        return _LoopPass.TURN
    if query == 1:
        return _LoopPass.STEP
    return _LoopPass.EXTEND if batch.decoded else _LoopPass.CHUNK


def _turn_batch(prefix: str, event: PassSeen, past: int) -> Batch:
    return Batch(request_ids(prefix, event.rows), prompt=past + event.query)


def _drafts(tokens: PassTokens, past: int, batch: Batch) -> int:
    """Drafted tokens of a verification: all decode tokens but the last sampled one, which leads unless the pass begins
    inside the prompt."""
    leading = len(batch.request_ids) if past >= batch.prompt else 0
    return max(tokens.decode - leading, 0)


def _padding(mask: Any) -> Padding | None:
    if mask is None:
        return None
    padding = Padding(tuple(bytes(row) for row in mask.tolist()))
    return padding if padding.any else None
