"""Steps of vLLM's workers against an engine that is played through token by token, with random decisions.

The engine here knows the truth of each position: whose it is, whether it was computed before, whether it stands. The
scheduler that it plays knows less: under asynchronous scheduling it decides before it has seen the last step's tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.phases import Phase, TagSource
from phaseprof.records import EngineStep, ForwardPass, Request
from phaseprof.settling.rows import PassRows
from phaseprof.settling.steps import Steps
from phaseprof.vllm.events import Sampled, StepFetched, StepRan, StepSkipped

STOP = 99


class Rows:
    """Takes what is settled."""

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []

    def put_pass(self, row: ForwardPass) -> None:
        self.passes.append(row)

    def put_request(self, row: Request) -> None:
        raise AssertionError("requests are the scheduler's")

    def put_step(self, row: EngineStep) -> None:
        raise AssertionError("so are the steps of the engine")


@dataclass
class Played:
    """A request, as it really is.

    Attributes:
        name: Its id.
        prompt: Tokens that it comes with.
        total: Tokens that it gets.
        stops: Its last token is a stop token; else its limit ends it.
        end: Positions in the cache.
        best: Positions that were ever computed, or found, and stand.
        believed: What the scheduler takes for `end`.
        got: Tokens that it has got.
        known: Tokens that the scheduler has seen.
        sent: It was sent to the worker.
        away: It was preempted, and is to come back.
        held: Its tokens when it was sent last, output included.
        flying: Steps of it whose tokens the scheduler has not seen.
    """

    name: str
    prompt: int
    total: int
    stops: bool
    end: int = 0
    best: int = 0
    believed: int = 0
    got: int = 0
    known: int = 0
    sent: bool = False
    away: bool = False
    held: int = 0
    flying: int = 0


@dataclass
class Expected:
    """What a step is, by the truth of its tokens.

    Attributes:
        parts: Of each request its id, its past, and how many prefill, decode and recomputed tokens it computes.
        told: Of each, what it finds in the cache, its drafts, and those that are kept.
        drafts, accepted, cached, padding: As in the table.
    """

    parts: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    told: list[tuple[int, int, int]] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    cached: int = 0
    padding: int = 0


class Engine:
    """Plays an engine.

    Args:
        seed: Of its decisions.
        lag: Steps that are under way before the first one's tokens are seen.
        v2: Requests that resume are sent as if they were new.
    """

    def __init__(self, seed: int, lag: int, v2: bool) -> None:
        self.draw = random.Random(seed)
        self.lag = lag
        self.v2 = v2
        self.sink = Rows()
        self.steps = Steps(PassRows(self.sink, offset_ns=0, first_pass_id=0))
        self.expected: list[Expected] = []
        self.requests: list[Played] = []
        self.over: set[str] = set()
        self.flying: list[tuple[int, Sampled, dict[str, int], list[Played]]] = []
        self.count = 0

    def play(self, requests: int) -> None:
        """Serve so many requests to their end."""
        for number in range(requests):
            self.requests.append(
                Played(
                    f"r{number}",
                    prompt=self.draw.choice([1, 2, 9, 30]),
                    total=self.draw.choice([1, 2, 7, 20]),
                    stops=self.draw.random() < 0.5,
                )
            )
        while self.requests:
            self._preempt()
            chosen = [one for one in self.requests if self._may_run(one)]
            chosen = [one for one in chosen if self.draw.random() < 0.8]
            if chosen:
                self._step(chosen)
            if len(self.flying) > (self.lag if chosen else 0):
                self._see()
            if self.over and self.draw.random() < 0.2:
                self.steps.handle(StepSkipped(1, frozenset(self.over)))
                self.over = set()
        while self.flying:
            self._see()
        self.steps.finish()

    def _named(self, name: str) -> Played:
        return next(one for one in self.requests if one.name == name)

    def _may_run(self, one: Played) -> bool:
        # What is under way may bring a request to its limit, which the scheduler foresees; a stop token it does not.
        if not one.flying:
            return True
        return not one.away and (one.stops or one.got < one.total)

    def _preempt(self) -> None:
        for one in self.requests:
            idle = one.sent and not one.away and not one.flying
            if idle and one.end and self.draw.random() < 0.08:
                one.away = True
                one.end = one.believed = 0

    def _step(self, chosen: list[Played]) -> None:
        draw = self.draw
        expected = Expected()
        scheduled: dict[str, int] = {}
        drafts: dict[str, int] = {}
        new: list[Any] = []
        cached: list[str] = []
        computed: list[int] = []
        outputs: list[int] = []
        resumed: set[str] = set()
        tokens: dict[str, list[int]] = {}
        rejected: dict[str, int] = {}
        for one in chosen:
            before = expected.cached
            if not one.sent or one.away:
                self._begin(one, expected, new, resumed)
            met = expected.cached - before
            if one.sent and not (self.v2 and any(n.req_id == one.name for n in new)):
                cached.append(one.name)
                computed.append(one.believed)
                outputs.append(one.known)
            one.sent, one.away = True, False
            left = one.prompt + one.got - one.end
            if one.got >= one.total:
                # The scheduler does not know yet that it has ended.
                query, asked = 1, 0
                expected.padding += 1
                expected.parts.append((one.name, one.end, 0, 0, 0))
                expected.told.append((met, 0, 0))
                tokens[one.name] = [5]
            else:
                whole = left == 1 or draw.random() < 0.5
                query = left if whole else draw.randint(1, left - 1)
                asked = draw.choice([0, 0, 2, 3]) if whole and one.got else 0
                query += asked
                positions = range(one.end, one.end + query)
                prefill = sum(p < one.prompt or p < one.best for p in positions)
                again = sum(p < one.best for p in positions)
                expected.parts.append((one.name, one.end, prefill, query - prefill, again))
                right = draw.randint(0, asked)
                tokens[one.name] = self._sample(one, right + 1) if whole else []
                kept = min(len(tokens[one.name]), one.total - one.got)
                expected.drafts += asked
                expected.accepted += max(kept - 1, 0) if asked else 0
                expected.told.append((met, asked, max(kept - 1, 0) if asked else 0))
                rejected[one.name] = asked - right
                one.end += query - (asked - right)
                one.best = max(one.best, one.end)
                one.got += kept
            if asked:
                drafts[one.name] = asked
            scheduled[one.name] = query
            one.believed += query
            one.flying += 1
        # A runner has an order of its own.
        names = draw.sample(list(tokens), len(tokens))
        sampled = Sampled(names, [len(tokens[n]) for n in names], [tokens[n] for n in names])
        padded = sum(scheduled.values()) + draw.choice([0, 3])
        expected.padding += padded - sum(scheduled.values())
        self.expected.append(expected)
        self.steps.handle(
            StepRan(
                runner=1,
                step=self.count,
                model_id="m",
                thread_id=1,
                start_ns=self.count * 10,
                executed_ns=self.count * 10 + 1,
                sample_ns=self.count * 10 + 2,
                end_ns=self.count * 10 + 3,
                span=None,
                scheduled=scheduled,
                drafts=drafts or None,
                new=new,
                prompts=[one.prompt_len for one in new],
                tokens=[self._named(one.req_id).held for one in new] if self.v2 else None,
                cached=cached,
                computed=computed,
                outputs=outputs,
                resumed=resumed,
                finished=frozenset(self.over),
                sampled=None if self.lag else sampled,
                awaited=self.lag > 0,
                ends="sample",
                padded=padded,
                graph=False,
                compiled=False,
                encodes=False,
                warmup=False,
                profiled=False,
                error=None,
            )
        )
        self.over = set()
        self.flying.append((self.count, sampled, rejected, chosen))
        self.count += 1

    def _begin(self, one: Played, expected: Expected, new: list[Any], resumed: set[str]) -> None:
        """Send a request, or send it again: some of what it needs may be in the cache."""
        need = one.held = one.prompt + one.got
        found = self.draw.choice([0, 0, min(need - 1, one.best), min(need - 1, one.prompt - 1)])
        expected.cached += max(found - one.best, 0)
        one.end = one.believed = found
        one.best = max(one.best, found)
        if one.sent and not self.v2:
            resumed.add(one.name)
            return
        limit = one.total + (5 if one.stops else 0)
        parameters = SimpleNamespace(
            max_tokens=limit, stop_token_ids=[STOP], eos_token_id=None, prompt_logprobs=None
        )
        new.append(
            SimpleNamespace(
                req_id=one.name,
                prompt_len=one.prompt,
                num_computed_tokens=found,
                sampling_params=parameters,
            )
        )

    def _sample(self, one: Played, count: int) -> list[int]:
        tokens = [5] * count
        last = one.total - one.got
        if one.stops and last <= count:
            tokens[last - 1] = STOP
        return tokens

    def _see(self) -> None:
        """The scheduler gets the tokens of the step that has been under way longest."""
        step, sampled, rejected, requests = self.flying.pop(0)
        if self.lag:
            self.steps.handle(StepFetched(1, step, step * 10 + 15, sampled, None))
        for one in requests:
            one.flying -= 1
            one.believed -= rejected.get(one.name, 0)
            one.known = one.got
            if one.got >= one.total and one in self.requests:
                self.requests.remove(one)
                self.over.add(one.name)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(25))
def test_labels_are_those_of_the_tokens(seed: int, lag: int, v2: bool) -> None:
    engine = Engine(seed, lag, v2)
    engine.play(5)
    rows = engine.sink.passes
    assert [row.step for row in rows] == list(range(engine.count))
    for row, expected in zip(rows, engine.expected, strict=True):
        assert [(s.request_id, s.past) for s in row.slices] == [p[:2] for p in expected.parts]
        assert [(s.cached, s.drafts, s.accepted) for s in row.slices] == expected.told
        assert [s.recomputed for s in row.slices] == [p[4] for p in expected.parts]
        assert row.prefill_tokens == sum(p[2] for p in expected.parts)
        assert row.decode_tokens == sum(p[3] for p in expected.parts)
        assert row.recomputed_tokens == sum(p[4] for p in expected.parts)
        for one, (_, _, prefill, decode, _) in zip(row.slices, expected.parts, strict=True):
            label = (
                Phase.MIXED
                if prefill and decode
                else Phase.PREFILL
                if prefill
                else Phase.DECODE
                if decode
                else Phase.OTHER
            )
            assert (one.phase, one.query) == (label, prefill + decode)
        assert (row.draft_tokens, row.accepted_tokens) == (expected.drafts, expected.accepted)
        assert row.cached_tokens == expected.cached
        assert row.padding_tokens == expected.padding
        assert row.tag_source is TagSource.SCHEDULER


def test_the_engine_that_is_played_does_all_of_it() -> None:
    """What the test above means to hold does happen in it."""
    seen: dict[str, int] = {}
    for lag in (0, 1, 2):
        for seed in range(25):
            engine = Engine(seed, lag, v2=False)
            engine.play(5)
            for row in engine.sink.passes:
                for what, count in (
                    ("mixed", row.phase is Phase.MIXED),
                    ("recomputed", row.recomputed_tokens),
                    ("cached", row.cached_tokens),
                    ("rejected", row.draft_tokens - (row.accepted_tokens or 0)),
                    ("accepted", row.accepted_tokens or 0),
                    ("ended", any(s.phase is Phase.OTHER for s in row.slices)),
                ):
                    seen[what] = seen.get(what, 0) + int(count)
    assert all(count > 20 for count in seen.values()), seen
