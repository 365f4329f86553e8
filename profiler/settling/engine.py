"""The schedulers of vLLM in this process: the requests that they serve, and their steps.

A token is there when the scheduler hands it over, which is when vLLM's own metrics count it. Several tokens of one step
(accepted drafts) come together: the first of them waited for the step, the others for nothing.

A session whose input streams in is one request of several turns. Its queue time and its time to first token are those
of the first turn; between the last token of a turn and the first of the next it waits for its client, and no
inter-token latency is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseprof.phases import Phase, phase_of
from phaseprof.records import EngineStep, Finish, Request, Warmup
from phaseprof.settling.rows import Sink
from phaseprof.vllm.core_events import (
    CoreEvent,
    EngineSeen,
    RequestAdded,
    RequestEnd,
    RequestPreempted,
    RequestsDropped,
    SchedulerGone,
    StepScheduled,
    StepUpdated,
)
from phaseprof.vllm.events import StepRan

#: Phases of a step whose first one is kept out of the steady-state figures, as its pass is.
_FIRST = frozenset((Phase.PREFILL, Phase.DECODE, Phase.MIXED))

#: How often the rows of requests that run are put again.
RENEW_NS = 5_000_000_000

#: How vLLM names the reason, and what it is here. Its own limit on the length of a prompt counts as a length as well.
_FINISH = {
    "STOP": Finish.STOP,
    "LENGTH": Finish.LENGTH,
    "REPETITION": Finish.STOP,
    "ABORT": Finish.ABORT,
    "ERROR": Finish.ABORT,
}


@dataclass(slots=True)
class _Request:
    """A request, while it is served. Times are Unix ns.

    Attributes:
        added: How it came.
        arrival_ns: When its frontend took it.
        prompt: Tokens that it came with, those of later turns included.
        reach: Positions of the prompt below it were computed for this request, or were found in the cache.
        target: Positions of the prompt, as of its present turn.
        cached: Tokens of the prompt that were found in the cache.
        scheduled_ns: It was first decided to run it.
        first_ns, last_ns: Its first and its last token.
        apart: What comes next is the first token of a turn.
        outputs: Tokens that it got.
        itl_ns, itl_steps: As in the table.
        preemptions: How often it was preempted.
        turn_end: How its last turn ended.
        warmup, profiled: As in the table.
    """

    added: RequestAdded
    arrival_ns: int
    prompt: int
    reach: int = 0
    target: int = 0
    cached: int = 0
    scheduled_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    apart: bool = False
    outputs: int = 0
    itl_ns: list[int] = field(default_factory=list)
    itl_steps: list[int] = field(default_factory=list)
    preemptions: int = 0
    turn_end: Finish | None = None
    warmup: Warmup | None = None
    profiled: bool = False

    def computes(self, past: int, query: int) -> None:
        """A step computes ``query`` tokens of it behind the ``past`` that are in the cache."""
        # At its first step, and where it was preempted before its prompt was done and finds more of it than it had.
        self.cached += max(min(past, self.target) - min(self.reach, self.target), 0)
        self.reach = max(self.reach, past + query)

    def got(self, count: int, step: int, at_ns: int) -> None:
        """It got the tokens of a step."""
        self.outputs += count
        gaps = [0] * count
        if self.last_ns is None or self.apart:
            gaps.pop()
        else:
            gaps[0] = at_ns - self.last_ns
        if self.first_ns is None:
            self.first_ns = at_ns
        self.last_ns, self.apart = at_ns, False
        self.itl_ns += gaps
        self.itl_steps += [step] * len(gaps)

    def row(self, model_id: str, *, finish: Finish | None, finished_ns: int | None) -> Request:
        """As a row of the table; both are None while it runs."""
        # Of a request that was running when it was first seen nothing tells when it got its first token.
        known = not self.added.late
        first = self.first_ns if known else None
        return Request(
            request_id=self.added.request,
            model_id=model_id,
            arrival_ns=self.arrival_ns,
            queue_ns=self.scheduled_ns - self.arrival_ns
            if known and self.scheduled_ns is not None
            else None,
            first_token_ns=first,
            finished_ns=finished_ns,
            sequences=1,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            output_tokens=self.outputs,
            ttft_ns=None if first is None else first - self.arrival_ns,
            tpot_ns=sum(self.itl_ns) // len(self.itl_ns) if self.itl_ns else None,
            itl_ns=tuple(self.itl_ns),
            finish=finish,
            warmup=self.warmup,
            profiled=self.profiled,
            itl_steps=tuple(self.itl_steps),
            client_id=self.added.client_id,
            preemptions=self.preemptions,
        )


@dataclass(slots=True)
class _Engine:
    """A scheduler.

    Attributes:
        number: Its number in this process.
        model_id: Its model.
        requests: Those that have not ended.
        prefilling: Those of them whose prompt is not computed yet.
        open: Steps whose output has not come, by their numbers.
        seen: The phases that its steps have had.
        renewed_ns: When the rows of the requests that run were put again, Unix ns.
    """

    number: int
    model_id: str
    requests: dict[str, _Request] = field(default_factory=dict)
    prefilling: set[str] = field(default_factory=set)
    open: dict[int, StepScheduled] = field(default_factory=dict)
    seen: set[Phase] = field(default_factory=set)
    renewed_ns: int = 0


class Engines:
    """The schedulers of vLLM in this process.

    Args:
        sink: Takes the rows.
        offset_ns: From the monotonic clock to Unix ns.
    """

    def __init__(self, sink: Sink, *, offset_ns: int) -> None:
        self._sink = sink
        self._offset_ns = offset_ns
        self._engines: dict[int, _Engine] = {}
        #: Model runners of this process whose engine is known.
        self._joined: set[int] = set()

    def handle(self, event: CoreEvent) -> None:
        """Take one event."""
        if isinstance(event, EngineSeen):
            self._engines[event.engine] = _Engine(event.engine, event.model_id)
            return
        engine = self._engines.get(event.engine)
        if engine is None:
            return
        match event:
            case StepScheduled():
                self._scheduled(engine, event)
            case StepUpdated():
                self._updated(engine, event)
            case RequestAdded():
                self._added(engine, event)
            case RequestPreempted():
                self._preempted(engine, event)
            case RequestsDropped():
                self._dropped(engine, event)
            case SchedulerGone():
                self._gone(engine, event)

    def ran(self, event: StepRan) -> None:
        """A worker in this process ran a step: its model is that of the engine whose request it computed."""
        if event.runner in self._joined:
            return
        name = next(iter(event.scheduled), "")
        for engine in self._engines.values():
            if name in engine.requests:
                self._joined.add(event.runner)
                engine.model_id = event.model_id

    def finish(self) -> None:
        """The session ends. Requests that run are put as they stand, steps without their output likewise."""
        for engine in self._engines.values():
            self._put_open_steps(engine)
            for request in engine.requests.values():
                self._put(engine, request)

    def _added(self, engine: _Engine, event: RequestAdded) -> None:
        given_ns = event.at_ns + self._offset_ns
        # The clock of the frontend may be another one, and is not steady: nothing arrives after it was handed on.
        arrival_ns = min(round(event.arrival_s * 1e9), given_ns)
        request = engine.requests.get(event.request)
        if event.turn and request is not None:
            request.prompt += event.prompt
            return
        request = _Request(
            event, arrival_ns, event.prompt, target=event.prompt, outputs=event.generated
        )
        if event.late:
            # What it has in the cache was computed for it, or is not known to have been found there.
            request.reach = event.prompt
        engine.requests[event.request] = request
        self._put(engine, request)

    def _scheduled(self, engine: _Engine, event: StepScheduled) -> None:
        engine.open[event.step] = event
        prefills = self._follow_prompts(engine, event)
        phase = None
        if len(engine.seen) < len(_FIRST):
            phase = phase_of(prefills, len(event.scheduled) - prefills)
        first = phase in _FIRST and phase not in engine.seen
        if phase is not None:
            engine.seen.add(phase)
        if first or event.warmup or event.profiled:
            for name in event.scheduled:
                request = engine.requests.get(name)
                if request is None:
                    continue
                request.profiled |= event.profiled
                if event.warmup:
                    request.warmup = Warmup.REQUESTED
                elif first and request.warmup is None:
                    request.warmup = Warmup.FIRST

    def _follow_prompts(self, engine: _Engine, event: StepScheduled) -> int:
        """Count what is found in the cache.

        Returns:
            How many requests of the step have a token of a prompt in it, or one that is computed again.
        """
        requests, scheduled = engine.requests, event.scheduled
        going_on = [name for name in engine.prefilling if name in scheduled]
        for new, target in zip(event.new, event.prompts, strict=True):
            request = requests.get(new.req_id)
            if request is None:
                continue
            if request.scheduled_ns is None:
                request.scheduled_ns = event.end_ns + self._offset_ns
            past = int(new.num_computed_tokens)
            if request.turn_end is not None:
                # Another turn begins: what it computed so far, its own tokens included, is a part of the prompt now.
                request.reach, request.turn_end = past, None
            request.target = target
            request.computes(past, scheduled[new.req_id])
            if request.reach < target:
                engine.prefilling.add(new.req_id)
        if going_on or event.resumed:
            pasts = dict(zip(event.cached, event.computed, strict=True))
            for name in going_on:
                request = requests[name]
                if name in pasts:
                    request.computes(pasts[name], scheduled[name])
                if request.reach >= request.target:
                    engine.prefilling.discard(name)
        begun = {new.req_id for new in event.new}
        return len(begun.union(going_on, event.resumed))

    def _updated(self, engine: _Engine, event: StepUpdated) -> None:
        at_ns = event.end_ns + self._offset_ns
        if event.step is not None:
            scheduled = engine.open.pop(event.step, None)
            if scheduled is not None:
                self._put_step(engine, scheduled, event)
            for name, count in zip(event.requests, event.counts, strict=True):
                request = engine.requests.get(name)
                if request is None or not count:
                    continue
                begins = request.first_ns is None
                request.got(count, event.step, at_ns)
                if begins:
                    self._put(engine, request)
        for end in event.ended:
            self._ended(engine, end, at_ns)
        if at_ns >= engine.renewed_ns + RENEW_NS:
            # What a kill loses of a long answer, and a report misses of it meanwhile.
            engine.renewed_ns = at_ns
            for request in engine.requests.values():
                if request.last_ns is not None:
                    self._put(engine, request)

    def _ended(self, engine: _Engine, end: RequestEnd, at_ns: int) -> None:
        request = engine.requests.get(end.request)
        if request is None:
            return
        finish = _FINISH.get(end.reason, Finish.UNKNOWN)
        if end.over:
            self._end(engine, end.request, finish, at_ns)
            return
        request.apart, request.turn_end = True, finish
        self._put(engine, request)

    def _preempted(self, engine: _Engine, event: RequestPreempted) -> None:
        request = engine.requests.get(event.request)
        if request is not None:
            request.preemptions += 1

    def _dropped(self, engine: _Engine, event: RequestsDropped) -> None:
        for name in event.requests:
            request = engine.requests.get(name)
            if request is not None:
                finish = _dropped_as(request, by_text=name in event.by_text)
                self._end(engine, name, finish, event.at_ns + self._offset_ns)

    def _gone(self, engine: _Engine, event: SchedulerGone) -> None:
        self._put_open_steps(engine)
        for name in list(engine.requests):
            self._end(engine, name, Finish.ABORT, event.at_ns + self._offset_ns)
        del self._engines[engine.number]

    def _end(self, engine: _Engine, name: str, finish: Finish, at_ns: int) -> None:
        request = engine.requests.pop(name)
        engine.prefilling.discard(name)
        self._sink.put_request(request.row(engine.model_id, finish=finish, finished_ns=at_ns))

    def _put(self, engine: _Engine, request: _Request) -> None:
        self._sink.put_request(request.row(engine.model_id, finish=None, finished_ns=None))

    def _put_open_steps(self, engine: _Engine) -> None:
        for scheduled in engine.open.values():
            self._put_step(engine, scheduled, None)
        engine.open.clear()

    def _put_step(
        self, engine: _Engine, scheduled: StepScheduled, updated: StepUpdated | None
    ) -> None:
        self._sink.put_step(
            EngineStep(
                engine=engine.number,
                step=scheduled.step,
                model_id=engine.model_id,
                start_ns=scheduled.start_ns + self._offset_ns,
                schedule_ns=scheduled.end_ns - scheduled.start_ns,
                execute_ns=None if updated is None else updated.start_ns - scheduled.end_ns,
                update_ns=None if updated is None else updated.end_ns - updated.start_ns,
                running=scheduled.running,
                waiting=scheduled.waiting,
                preempted=scheduled.preempted,
                scheduled_tokens=scheduled.tokens,
                kv_usage=scheduled.kv_usage,
            )
        )


def _dropped_as(request: _Request, *, by_text: bool) -> Finish:
    """How a request ended that was ended from outside of the scheduler."""
    if by_text:
        return Finish.STOP
    if request.turn_end is not None:
        # Its last turn had ended, and its client has no other one.
        return request.turn_end
    if request.added.stops_on_text and request.outputs:
        # The frontend is in another process: it has found a stop string, or its client has left.
        return Finish.UNKNOWN
    return Finish.ABORT
