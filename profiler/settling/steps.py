"""The steps of vLLM's workers: the scheduler says whose tokens each of them computes, so every label is certain.

A step is put once its tokens are known, in the order of the steps: a drafted token that was rejected takes back the
position that it was computed at, and one that was sampled may be the last of its request. Under asynchronous scheduling
a step is scheduled before that is known of the one before it. So a request may be computed once more after its last
token, which serves nobody and is padding; and what the scheduler believes to be in the cache may hold drafts that the
step before has just rejected, which is set right here.

Positions that were computed are remembered over a preemption: what is computed again after it is `recomputed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phaseprof.events import PassSeen
from phaseprof.phases import Phase, Role, TagSource, phase_of, split
from phaseprof.records import Slice
from phaseprof.sequences import PassTokens
from phaseprof.settling.rows import PackedRow, PassIds, PassRows, Tag
from phaseprof.vllm.events import (
    Sampled,
    StepFetched,
    StepLost,
    StepRan,
    StepSkipped,
    WorkerEvent,
)
from phaseprof.work.count import Adapted, Rows
from phaseprof.work.paged import PagedPool


@dataclass(slots=True)
class _Request:
    """A request, as a worker knows it.

    Attributes:
        prompt: Tokens that it came with.
        computed: Positions below it were computed, or found in the cache, and stand.
        end: Tokens in the cache after its last step; None if not known, because nobody told what was rejected.
        begun: It was in a step.
        outputs: Tokens that it got, as far as they are told.
        limit: Most tokens that it may get; None if not known.
        stops: Tokens that end it.
        ended: It has got its last token.
        guessed: It was running before the session, and whether its prompt is longer than what was seen is not known.
        scored: Logits are computed for its prompt as well, until that is whole: it asked for their log probabilities.
        together: The runner (V2) then computes them for all tokens of a step.
        adapter: The number of its LoRA adapter; 0 without.
    """

    prompt: int
    computed: int = 0
    end: int | None = None
    begun: bool = False
    outputs: int = 0
    limit: int | None = None
    stops: frozenset[int] = frozenset()
    ended: bool = False
    guessed: bool = False
    scored: bool = False
    together: bool = False
    adapter: int = 0

    def decodes(self, past: int) -> bool:
        """Whether a step of one token goes on where the last one ended, behind all that was ever computed."""
        return (
            past == self.end
            and past == self.computed
            and past >= self.prompt
            and not self.ended
            and not self.scored
        )

    def scores(self, past: int, query: int) -> int:
        """Positions of its prompt that a step computes logits for, besides its last one: each that another token of
        the prompt follows. Once the prompt is whole they are known, also after a preemption."""
        self.scored = past + query < self.prompt
        return max(min(query, self.prompt - past - 1), 0)

    def meets(self, past: int) -> int:
        """Tokens of the prompt that it finds in the cache though they were never computed for it: at its first step,
        and where it was preempted before its prompt was done and finds more of it when it resumes."""
        reach = self.computed if self.begun else 0
        self.begun = True
        return max(min(past, self.prompt) - min(reach, self.prompt), 0)

    def sent_again(self, sent: _Request, outputs: int) -> None:
        """It comes back. Tokens of a step that was under way when it was preempted may have been thrown away.

        Args:
            sent: What it is now.
            outputs: Tokens that it has got, as the scheduler says.
        """
        self.prompt, self.limit, self.stops = sent.prompt, sent.limit, sent.stops
        self.scored, self.outputs = sent.scored, outputs
        self.end, self.ended = None, False
        self.computed = min(self.computed, self.prompt + outputs)

    def takes(self, count: int, tokens: Sequence[int]) -> int:
        """Take the tokens of a step; what comes after the one that ends it is of no use to anybody.

        Returns:
            How many of them it got.
        """
        kept = count
        if self.stops:
            kept = next((n for n, token in enumerate(tokens, 1) if token in self.stops), 0)
            self.ended |= kept > 0
            kept = kept or count
        if self.limit is not None and self.outputs + kept >= self.limit:
            kept = self.limit - self.outputs
            self.ended = True
        self.outputs += kept
        return kept


@dataclass(slots=True)
class _Step:
    """A step that was run and is not put yet.

    Attributes:
        ran: What was seen of it.
        ids: The numbers of its pass.
        ready: All is known that will be.
        sampled: Its tokens; None if there are none, or nobody told.
        end_ns: When it ended.
        error: Class name of the exception that ended it.
    """

    ran: StepRan
    ids: PassIds
    ready: bool
    sampled: Sampled | None
    end_ns: int
    error: str | None


@dataclass(slots=True)
class _Runner:
    """A model runner.

    Attributes:
        requests: Those that have not ended, by the engine's id.
        waiting: Steps that are not put yet, and what was skipped between them, in order.
        adapts: A request with an adapter was seen.
    """

    requests: dict[str, _Request] = field(default_factory=dict)
    waiting: deque[_Step | StepSkipped] = field(default_factory=deque)
    adapts: bool = False


class Steps:
    """The vLLM workers in this process.

    Args:
        rows: Takes the passes.

    Attributes:
        pools: The cache of each model.
    """

    def __init__(self, rows: PassRows) -> None:
        self._rows = rows
        self._runners: dict[int, _Runner] = {}
        self.pools: dict[str, PagedPool] = {}

    def handle(self, event: WorkerEvent) -> None:
        """Take one event."""
        runner = self._runners.setdefault(event.runner, _Runner())
        match event:
            case StepRan():
                # The step is the engine's own count, not that of this model in this process.
                ids = self._rows.begin(_pass_of(event, event.end_ns, event.error))
                ids = PassIds(ids.pass_id, event.step)
                ready = not event.awaited
                runner.waiting.append(
                    _Step(event, ids, ready, event.sampled, event.end_ns, event.error)
                )
            case StepFetched():
                for step in _awaited(runner, event.step):
                    step.sampled, step.end_ns, step.error = event.sampled, event.at_ns, event.error
                    step.ready = True
            case StepLost():
                for step in _awaited(runner, event.step):
                    step.ready = True
            case StepSkipped():
                runner.waiting.append(event)
        self._settle_ready(runner)

    def finish(self) -> None:
        """The session ends: steps whose tokens nobody fetched are put as they stand."""
        for runner in self._runners.values():
            for step in runner.waiting:
                if isinstance(step, _Step):
                    step.ready = True
            self._settle_ready(runner)

    def _settle_ready(self, runner: _Runner) -> None:
        waiting = runner.waiting
        while waiting:
            head = waiting[0]
            if isinstance(head, StepSkipped):
                _forget(runner, head)
            elif head.ready:
                self._settle(runner, head)
            else:
                return
            waiting.popleft()

    def _settle(self, runner: _Runner, step: _Step) -> None:
        """Put the row of a step, and move its requests on."""
        ran = step.ran
        _forget(runner, ran)
        pasts = _meet(runner, ran)
        requests = runner.requests
        got = _told(step.sampled)
        drafts = ran.drafts or {}
        slices: list[Slice] = []
        rows: list[Rows] = []
        prefill = decode = recomputed = cached = surplus = 0
        drafted = accepted = 0
        told = True
        scored = 0
        together = False
        # Nothing but one token of each can come of most steps, for most requests.
        plain = step.error is None and not drafts and not ran.encodes
        for name, query in ran.scheduled.items():
            request = requests[name]
            past = pasts[name]
            if plain and query == 1 and request.decodes(past) and name in got:
                rows.append(Rows(past, 1, 1))
                slices.append(Slice(name, Phase.DECODE, 1, past, request.prompt))
                decode += 1
                request.end = request.computed = past + 1
                request.takes(*got[name])
                continue
            if request.end is not None and past > request.end and name not in ran.resumed:
                past = request.end
            rows.append(Rows(past, query, 1))
            if request.scored:
                scored += request.scores(past, query)
                together |= request.together
            if request.ended:
                # Scheduled before its last token was known.
                surplus += query
                slices.append(Slice(name, Phase.OTHER, 0, past, request.prompt))
                continue
            if request.guessed and request.outputs == 0:
                request.prompt = max(request.prompt, past + query)
            met = again = 0
            if past != request.computed or not request.begun:
                met = request.meets(past)
                cached += met
            if ran.encodes:
                phase = Phase.ENCODE
            elif past >= request.prompt and past >= request.computed:
                # Most tokens are of requests that decode.
                decode += query
                phase = Phase.DECODE
            else:
                part = split(
                    prompt=request.prompt, past=past, query=query, computed=request.computed
                )
                prefill += part.prefill
                decode += part.decode
                again = part.recomputed
                recomputed += again
                phase = phase_of(part.prefill, part.decode)
            asked = drafts.get(name, 0)
            drafted += asked
            count, tokens = got.get(name, (None, ()))
            if asked and (step.error is not None or count is None):
                # Nobody told what was accepted: what stands for certain is what was computed without drafts.
                told = False
                taken = None
                if step.error is None:
                    request.computed = max(request.computed, past + query - asked)
                    request.end = None
            elif step.error is not None:
                taken = 0
            else:
                kept = request.takes(count, tokens) if count else 0
                rejected = asked - min(max((count or 0) - 1, 0), asked) if asked else 0
                taken = min(max(kept - 1, 0), asked)
                accepted += taken
                request.end = past + query - rejected
                request.computed = max(request.computed, request.end)
            slices.append(Slice(name, phase, query, past, request.prompt, met, again, asked, taken))
        self._put(
            step,
            PassTokens(
                Phase.ENCODE if ran.encodes else phase_of(prefill, decode),
                prefill,
                decode,
                recomputed,
                surplus + max((ran.padded or 0) - sum(ran.scheduled.values()), 0),
                cached,
                tuple(slices),
            ),
            Tag(
                TagSource.SCHEDULER,
                role=Role.ENCODER if ran.encodes else Role.TARGET,
                drafts=drafted,
                accepted=accepted if told else None,
            ),
            tuple(rows),
            0 if ran.ends != "sample" else sum(ran.scheduled.values()) if together else scored,
            _adapted(runner, ran) if runner.adapts else None,
        )

    def _put(
        self,
        step: _Step,
        tokens: PassTokens,
        tag: Tag,
        rows: tuple[Rows, ...],
        scored: int,
        adapted: Adapted | None,
    ) -> None:
        ran = step.ran
        packed = sum(ran.scheduled.values())
        seen = _pass_of(ran, step.end_ns, step.error)
        self._rows.put(
            seen._replace(logits=seen.logits + scored) if scored else seen,
            step.ids,
            tokens,
            tag,
            past=0,
            packing=PackedRow(
                rows=rows,
                padding=max((ran.padded or 0) - packed, 0),
                pool=self.pools.get(ran.model_id),
                graph=ran.graph,
                adapted=adapted,
            ),
        )


def _meet(runner: _Runner, ran: StepRan) -> dict[str, int]:
    """Make the requests that begin with a step; give what each of the step has in the cache, as the scheduler says."""
    requests = runner.requests
    pasts = dict(zip(ran.cached, ran.computed, strict=True))
    tokens = ran.tokens or (None,) * len(ran.new)
    for new, prompt, held in zip(ran.new, ran.prompts, tokens, strict=True):
        name, pasts[new.req_id] = new.req_id, new.num_computed_tokens
        request, sent = requests.get(name), _new_request(new, prompt)
        if request is not None:
            # It resumes (V2), or goes on with another turn, of whose prompt it has become a part.
            request.sent_again(sent, 0 if held is None else held - prompt)
        else:
            requests[name] = sent
            runner.adapts |= sent.adapter > 0
    if ran.resumed:
        got = dict(zip(ran.cached, ran.outputs, strict=True))
        for name in ran.resumed:
            if name in requests:
                requests[name].sent_again(requests[name], got[name])
    if len(requests) < len(pasts) or any(name not in requests for name in ran.cached):
        outputs = dict(zip(ran.cached, ran.outputs, strict=True))
        for name in ran.cached:
            if name not in requests:
                requests[name] = _running_request(pasts[name], outputs[name])
    return pasts


def _new_request(new: Any, prompt: int) -> _Request:
    sampling = new.sampling_params
    request = _Request(prompt=prompt)
    adapter = getattr(new, "lora_request", None)
    if adapter is not None:
        request.adapter = int(adapter.lora_int_id)
    if sampling is not None:
        request.limit = sampling.max_tokens
        request.scored = getattr(sampling, "prompt_logprobs", None) is not None
        # What only the scheduler of a V2 runner fills in.
        request.together = getattr(new, "prefill_token_ids", None) is not None
        stops = list(getattr(sampling, "stop_token_ids", None) or ())
        end = getattr(sampling, "eos_token_id", None)
        request.stops = frozenset(stops if end is None else [*stops, end])
    return request


def _running_request(past: int, outputs: int) -> _Request:
    """A request that ran before the session began. While it decodes, all but its newest token is in the cache."""
    if outputs:
        prompt = max(past + 1 - outputs, 1)
        return _Request(prompt=prompt, computed=past, begun=True, outputs=outputs)
    return _Request(prompt=past, computed=past, begun=True, guessed=True)


def _adapted(runner: _Runner, ran: StepRan) -> Adapted | None:
    """The tokens of a step whose requests have adapters."""
    tokens = logits = 0
    adapters: set[int] = set()
    for name, query in ran.scheduled.items():
        adapter = runner.requests[name].adapter
        if adapter:
            tokens += query
            logits += 1 + (ran.drafts or {}).get(name, 0)
            adapters.add(adapter)
    if not adapters:
        return None
    return Adapted(tokens, logits if ran.ends == "sample" else 0, len(adapters))


def _forget(runner: _Runner, event: StepRan | StepSkipped) -> None:
    for name in event.finished:
        runner.requests.pop(name, None)


def _awaited(runner: _Runner, number: int) -> list[_Step]:
    return [
        step
        for step in runner.waiting
        if isinstance(step, _Step) and step.ran.step == number and not step.ready
    ]


def _told(sampled: Sampled | None) -> Mapping[str, tuple[int, Any]]:
    """How many tokens each request got, and which."""
    if sampled is None:
        return {}
    return dict(
        zip(sampled.requests, zip(sampled.counts, sampled.tokens, strict=True), strict=True)
    )


def _pass_of(ran: StepRan, end_ns: int, error: str | None) -> PassSeen:
    """The pass that a step stands for: one row that packs its requests."""
    packed = sum(ran.scheduled.values())
    logits = 0
    if ran.ends == "sample":
        # The last position of each request, and those of its drafts.
        logits = len(ran.scheduled) + (sum(ran.drafts.values()) if ran.drafts else 0)
    return PassSeen(
        model_id=ran.model_id,
        generation=0,
        thread_id=ran.thread_id,
        start_ns=ran.start_ns,
        end_ns=end_ns,
        span=ran.span,
        rows=1,
        query=packed if ran.padded is None else ran.padded,
        past=None,
        cache=0,
        mask=None,
        # How many slots are padding is not known then.
        mask_unread=ran.padded is None,
        fed=None,
        logits=logits,
        layout=None,
        encoder=ran.encodes,
        aside="packed",
        warmup=ran.warmup,
        compiled=ran.compiled,
        compiling=False,
        profiled=ran.profiled,
        override=None,
        error=error,
    )
