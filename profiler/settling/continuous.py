"""Continuous batching: a scheduler says who is in each step, so every label is certain once it has taken the tokens.

A step packs tokens of many requests into one row. It is put when the scheduler takes its tokens: only then is it known
whether a request had ended before it (asynchronous batching, and transformers 5.0, run some requests once more after
their last token; what is computed for those is padding). A step whose tokens are never taken is put as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from phaseprof.engine_events import (
    EngineEvent,
    EngineGone,
    RequestDropped,
    RequestQueued,
    StepBegan,
    StepEnded,
    StepTaken,
)
from phaseprof.events import PassSeen
from phaseprof.phases import Phase, TagSource, TokenSplit, phase_of, split
from phaseprof.records import Finish, ForwardPass, Request, Slice, Warmup
from phaseprof.sequences import PassTokens
from phaseprof.settling.rows import PackedRow, PassIds, PassRows, Tag
from phaseprof.work.count import Rows
from phaseprof.work.paged import PagedPool


@dataclass(slots=True)
class _Request:
    """A request, while it is served.

    Attributes:
        request_id: Its id in the tables.
        arrival_ns: Monotonic clock.
        prompt: Tokens that it came with.
        max_output: Limit of tokens; None if not known.
        outputs: Tokens that it got.
        model_id: The model; empty before its first step.
        children: Requests that are still to be forked from it.
        seen_late: It had got tokens before it was seen: when the first came is not known.
        computed: Positions below it were computed, or were found in the cache.
        cached: Tokens of the prompt that were in the cache; None before its first step.
        first_start_ns: Begin of its first pass.
        token_ns: When each token was there.
        token_steps: The step of the pass that yielded it.
        finish: How it ended.
        warmup: The strongest reason of its passes to keep them out of steady-state figures.
        profiled: A costly collector ran during one of them.
    """

    request_id: str
    arrival_ns: int
    prompt: int
    max_output: int | None
    outputs: int = 0
    model_id: str = ""
    children: int = 0
    seen_late: bool = False
    computed: int = 0
    cached: int | None = None
    first_start_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    finish: Finish | None = None
    warmup: Warmup | None = None
    profiled: bool = False

    def meets(self, past: int) -> int:
        """Tokens of the prompt that a step finds in the cache though they were never computed for this request.

        They are cached tokens: at its first step, and where it was preempted before its prompt was done and finds more
        of it when it resumes.
        """
        reach = self.computed if self.cached is not None else 0
        found = max(min(past, self.prompt) - min(reach, self.prompt), 0)
        self.cached = (self.cached or 0) + found
        return found

    def row(self, *, offset_ns: int, finished_ns: int | None) -> Request:
        """As a row of the table; ``finished_ns`` is None while it runs."""
        times = self.token_ns
        first = times[0] if times and not self.seen_late else None
        return Request(
            request_id=self.request_id,
            model_id=self.model_id,
            arrival_ns=self.arrival_ns + offset_ns,
            queue_ns=None
            if self.first_start_ns is None or self.seen_late
            else self.first_start_ns - self.arrival_ns,
            first_token_ns=None if first is None else first + offset_ns,
            finished_ns=None if finished_ns is None else finished_ns + offset_ns,
            sequences=1,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached or 0,
            output_tokens=self.outputs,
            ttft_ns=None if first is None else first - self.arrival_ns,
            tpot_ns=(times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else None,
            itl_ns=tuple(after - before for before, after in pairwise(times)),
            itl_steps=tuple(self.token_steps[1:]),
            finish=self.finish,
            warmup=self.warmup,
            profiled=self.profiled,
        )


@dataclass(slots=True)
class _Step:
    """A step, from its begin until its row is put.

    Attributes:
        began: Its begin.
        parts: Its requests, with the query and the past of each.
        seen: The pass of the model in it; None if none was seen.
        ids: The numbers of that pass.
    """

    began: StepBegan
    parts: tuple[tuple[_Request, int, int], ...]
    seen: PassSeen | None = None
    ids: PassIds | None = None


@dataclass(slots=True)
class _Engine:
    """A scheduler.

    Attributes:
        number: Its number.
        requests: Those that have not ended, by the id that the user gave.
        count: Requests so far.
        waiting: Steps whose tokens were not taken yet.
        pool: Its cache.
    """

    number: int
    requests: dict[str, _Request] = field(default_factory=dict)
    count: int = 0
    waiting: dict[int, _Step] = field(default_factory=dict)
    pool: PagedPool | None = None


class Continuous:
    """The schedulers of continuous batching in this process.

    Args:
        rows: Takes the passes.
        put_request: Takes the requests.
        offset_ns: From the monotonic clock to Unix ns.
        process: Names this process in request ids.
    """

    def __init__(
        self,
        rows: PassRows,
        put_request: Callable[[Request], None],
        *,
        offset_ns: int,
        process: str,
    ) -> None:
        self._rows = rows
        self._put_request = put_request
        self._offset_ns = offset_ns
        self._process = process
        self._engines: dict[int, _Engine] = {}
        #: By thread, and by number.
        self._running: dict[int, _Step] = {}
        self._steps: dict[int, _Step] = {}

    def handle(self, event: EngineEvent) -> None:
        """Take one event."""
        match event:
            case StepBegan():
                self._began(event)
            case StepEnded():
                self._ended(event)
            case StepTaken():
                self._taken(event)
            case RequestQueued():
                self._queued(event)
            case RequestDropped():
                self._dropped(event)
            case EngineGone():
                self._gone(event)

    def claim(self, event: PassSeen, ids: PassIds) -> bool:
        """Take a packed pass, if it is known to be the one of a step.

        Returns:
            False for a pass outside of any step, of a warm-up, or for a second one in a step: it serves nobody.
        """
        step = self._running.get(event.thread_id)
        if step is None or step.began.dummy or step.seen is not None:
            return False
        step.seen, step.ids = event, ids
        return True

    def explains(self, event: PassSeen) -> bool:
        """Whether a pass that was not claimed is known to serve nobody: a warm-up of the scheduler, or a second pass
        of a step."""
        return event.thread_id in self._running

    def finish(self) -> None:
        """The session ends. Steps that wait are put as they stand, requests that run stay open."""
        for engine in self._engines.values():
            self._flush(engine)

    def _queued(self, event: RequestQueued) -> _Request:
        engine = self._engine(event.engine)
        engine.count += 1
        request = _Request(
            request_id=f"{self._process}.b{event.engine}.r{engine.count}:{event.request}",
            arrival_ns=event.arrival_ns,
            prompt=event.prompt,
            max_output=event.max_output,
            outputs=event.generated,
            children=event.children,
            seen_late=event.generated > 0,
        )
        parent = engine.requests.get(event.request.rpartition("__child#")[0])
        if parent is not None and parent.children:
            # It was asked for with its parent, and its prompt was computed there.
            parent.children -= 1
            request.arrival_ns = parent.arrival_ns
            request.first_start_ns = parent.first_start_ns
        if event.max_output is not None:
            request.max_output = event.max_output + event.generated
        engine.requests[event.request] = request
        return request

    def _began(self, event: StepBegan) -> None:
        engine = self._engine(event.engine)
        if event.pool is not None:
            engine.pool = event.pool
        parts = []
        for name, query, past in event.requests:
            request = engine.requests.get(name)
            if request is not None:
                parts.append((request, query, past))
        step = _Step(event, tuple(parts))
        self._running[event.thread_id] = self._steps[event.step] = step

    def _ended(self, event: StepEnded) -> None:
        step = self._steps.pop(event.step, None)
        if step is None:
            return
        self._running.pop(step.began.thread_id, None)
        if step.began.dummy:
            return
        if step.seen is None:
            step.seen = _pass_of(step, event)
            step.ids = self._rows.begin(step.seen)
        engine = self._engine(step.began.engine)
        if event.error is not None or step.seen.error is not None:
            # Nobody takes its tokens.
            self._settle(engine, step, None)
        else:
            engine.waiting[event.step] = step

    def _taken(self, event: StepTaken) -> None:
        engine = self._engine(event.engine)
        for number in [number for number in engine.waiting if number < event.step]:
            self._settle(engine, engine.waiting.pop(number), None)
        step = engine.waiting.pop(event.step, None)
        if step is not None:
            self._settle(engine, step, event)

    def _dropped(self, event: RequestDropped) -> None:
        engine = self._engine(event.engine)
        request = engine.requests.pop(event.request, None)
        if request is None:
            return
        request.finish = Finish.ABORT
        self._put_request(request.row(offset_ns=self._offset_ns, finished_ns=event.at_ns))

    def _gone(self, event: EngineGone) -> None:
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return
        self._flush(engine)
        for request in engine.requests.values():
            request.finish = Finish.ABORT
            self._put_request(request.row(offset_ns=self._offset_ns, finished_ns=event.at_ns))

    def _flush(self, engine: _Engine) -> None:
        while engine.waiting:
            number = min(engine.waiting)
            self._settle(engine, engine.waiting.pop(number), None)

    def _engine(self, number: int) -> _Engine:
        engine = self._engines.get(number)
        if engine is None:
            engine = self._engines[number] = _Engine(number)
        return engine

    def _settle(self, engine: _Engine, step: _Step, taken: StepTaken | None) -> None:
        """Put the row of a step, and account its requests."""
        event, ids = step.seen, step.ids
        assert event is not None and ids is not None
        failed = event.error is not None
        slices: list[Slice] = []
        prefill = decode = recomputed = cached = 0
        for index, (request, query, past) in enumerate(step.parts):
            surplus = _surplus(request, index, taken)
            met = 0 if surplus else request.meets(past)
            cached += met
            part = TokenSplit(0, 0, 0)
            if not surplus:
                part = split(
                    prompt=request.prompt, past=past, query=query, computed=request.computed
                )
            prefill += part.prefill
            decode += part.decode
            recomputed += part.recomputed
            phase = phase_of(part.prefill, part.decode)
            tokens = part.prefill + part.decode
            slices.append(
                Slice(request.request_id, phase, tokens, past, request.prompt, met, part.recomputed)
            )
            if not surplus and not failed:
                request.computed = max(request.computed, past + query)
        packed = sum(query for _, query, _ in step.parts)
        label = Phase.OTHER if not step.parts else phase_of(prefill, decode)
        row = self._rows.put(
            event,
            ids,
            PassTokens(
                label,
                prefill,
                decode,
                recomputed,
                event.query - prefill - decode,
                cached,
                tuple(slices),
            ),
            Tag(TagSource.SCHEDULER),
            past=0,
            packing=PackedRow(
                rows=tuple(Rows(past, query, 1) for _, query, past in step.parts),
                padding=max(event.query - packed, 0),
                pool=engine.pool,
                graph=step.began.graph,
            ),
        )
        for changed in self._account(engine, step, row, event, taken):
            self._put_request(changed)

    def _account(
        self,
        engine: _Engine,
        step: _Step,
        row: ForwardPass,
        event: PassSeen,
        taken: StepTaken | None,
    ) -> Iterator[Request]:
        """What a step means for its requests; gives the rows of those that began or ended with it."""
        for index, (request, _, _) in enumerate(step.parts):
            if request.finish is not None:
                continue
            began = not request.model_id
            request.model_id = event.model_id
            if request.first_start_ns is None:
                request.first_start_ns = event.start_ns
            if row.warmup is not None and request.warmup is not Warmup.REQUESTED:
                request.warmup = row.warmup
            request.profiled |= row.profiled
            ended = False
            if taken is not None:
                request.outputs += taken.tokens[index]
                request.token_ns += [taken.at_ns] * taken.tokens[index]
                request.token_steps += [row.step] * taken.tokens[index]
                ended = taken.ended[index]
            if ended:
                full = request.outputs == request.max_output
                request.finish = Finish.LENGTH if full else Finish.STOP
                name = step.began.requests[index][0]
                if engine.requests.get(name) is request:
                    del engine.requests[name]
            if began or ended:
                assert taken is not None or not ended
                yield request.row(
                    offset_ns=self._offset_ns,
                    finished_ns=taken.at_ns if ended and taken is not None else None,
                )


def _surplus(request: _Request, index: int, taken: StepTaken | None) -> bool:
    """Whether a request had got its last token before the step: what is computed for it is of no use to anybody."""
    if request.finish is not None:
        # One that was cancelled had not ended when the step ran.
        return request.finish is not Finish.ABORT
    return taken is not None and taken.ended[index] and not taken.tokens[index]


def _pass_of(step: _Step, ended: StepEnded) -> PassSeen:
    """The pass that a step stands for, where the model was not seen: in a CUDA graph, or in a compiled function."""
    began = step.began
    packed = sum(query for _, query, _ in step.parts)
    return PassSeen(
        model_id=began.model_id,
        generation=0,
        thread_id=began.thread_id,
        start_ns=ended.start_ns,
        end_ns=ended.end_ns,
        span=ended.span,
        rows=1,
        query=packed if began.slots is None else began.slots,
        past=None,
        cache=began.cache,
        mask=None,
        # How many slots are padding is not known then.
        mask_unread=began.slots is None,
        fed=None,
        logits=packed if began.logits is None else began.logits,
        layout=None,
        encoder=False,
        aside="packed",
        warmup=ended.warmup,
        compiled=ended.compiled,
        compiling=ended.compiling,
        profiled=ended.profiled,
        override=None,
        error=ended.error,
    )
