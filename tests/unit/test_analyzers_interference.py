"""Decode time lost to the prefills of others, on constructed steps in which every loss is put in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from traces import MS, Timeline

from phaseprof.analyzers.interference import interference
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.serving import Cause, Interference, SlowToken

PRIMARY = Primary("m", ("target",), 0.0)


class Engine:
    """Steps with the requests that each served, and the requests with the tokens that each step gave them."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.tokens: dict[str, list[tuple[int, float]]] = {}
        self.now_ms = 0.0

    def step(
        self,
        ms: float,
        decode: tuple[str, ...] = (),
        prefill: dict[str, int] | None = None,
        **columns: Any,
    ) -> None:
        """A step of some milliseconds. Who is in `decode` gets a token; of `prefill` each has so many tokens computed,
        the whole of its prompt, and gets its first token."""
        prompts = prefill or {}
        number = len(self.timeline.passes)
        self.now_ms += ms
        phase = "mixed" if decode and prompts else "decode" if decode else "prefill"
        self.timeline.add(
            phase,
            ms,
            step=number,
            prefill_tokens=sum(prompts.values()),
            decode_tokens=len(decode),
            sequences=len(decode) + len(prompts),
            slices=[
                {"request_id": name, "phase": "decode", "query": 1, "past": 9, "prompt": 9}
                for name in decode
            ]
            + [
                {"request_id": name, "phase": "prefill", "query": n, "past": 0, "prompt": n}
                for name, n in prompts.items()
            ],
            **columns,
        )
        for name in (*decode, *prompts):
            self.tokens.setdefault(name, []).append((number, self.now_ms))

    def analyse(self, **requests: dict[str, Any]) -> Interference | None:
        """The figures; `requests` sets columns of single ones."""
        for name, tokens in self.tokens.items():
            pairs = list(pairwise(tokens))
            self.timeline.request(
                name,
                client_id=f"client-{name}",
                itl_ns=[round((after[1] - before[1]) * MS) for before, after in pairs],
                itl_steps=[after[0] for _, after in pairs],
                **requests.get(name, {}),
            )
        trace = self.timeline.trace()
        return interference(trace.requests, trace.passes, PRIMARY)


def test_a_long_prompt_slows_those_that_decode() -> None:
    """Two requests decode at 10 ms a step. A prompt of 900 tokens makes one step of theirs 110 ms long, one of 100
    tokens another 30 ms: they lose 100 and 20 ms each."""
    engine = Engine()
    engine.step(20, prefill={"a": 9, "b": 9})
    for _ in range(3):
        engine.step(10, ("a", "b"))
    engine.step(110, ("a", "b"), {"c": 900})
    engine.step(10, ("a", "b", "c"))
    engine.step(30, ("a", "b", "c"), {"d": 100})
    for _ in range(2):
        engine.step(10, ("a", "b", "c", "d"))
    found = engine.analyse()
    assert found is not None
    assert (found.tokens, found.slowed, found.held) == (8 + 8 + 4 + 2, 5, 0)
    assert found.typical_ms == 10
    assert found.slowed_ms is not None
    assert (found.slowed_ms.count, found.slowed_ms.p50, found.slowed_ms.p99) == (5, 30, 110)
    assert found.lost_ms == 2 * 100 + 3 * 20
    # 200 + 200 + 60 + 20 ms of inter-token latencies.
    assert found.lost_share == pytest.approx(260 / (200 + 200 + 60 + 20))
    assert found.requests == 3
    lost = {each.request_id: (each.tokens, each.lost_ms) for each in found.worst}
    assert lost == {"a": (2, 120), "b": (2, 120), "c": (1, 20)}
    assert found.worst[0].share == pytest.approx(120 / 200)
    slowest = {(each.request_id, each.step): each for each in found.slowest}
    assert set(slowest) == {("a", 4), ("b", 4), ("a", 6), ("b", 6), ("c", 6)}
    assert slowest["a", 4] == SlowToken(
        request_id="a",
        client_id="client-a",
        token=4,
        itl_ms=110,
        typical_ms=10,
        rank=0,
        step=4,
        cause=Cause.PREFILL,
        prefill_tokens=900,
        by=("client-c",),
    )
    assert (slowest["c", 6].token, slowest["c", 6].by) == (2, ("client-d",))


def test_the_usual_is_that_of_steps_of_about_the_same_size() -> None:
    """Steps of 8 sequences take 40 ms, of 1 they take 10: a mixed step of 8 that takes 60 ms costs 20 ms each."""
    engine = Engine()
    many = tuple("bcdefghi")
    engine.step(20, prefill={"a": 9})
    for _ in range(9):
        engine.step(10, ("a",))
    engine.step(20, prefill=dict.fromkeys(many, 9))
    for _ in range(2):
        engine.step(40, many)
    engine.step(60, many, {"z": 500})
    found = engine.analyse()
    assert found is not None
    assert found.typical_ms == 40
    assert (found.slowed, found.lost_ms) == (8, 8 * 20)


def test_a_token_that_was_held_back_is_no_interference() -> None:
    """It was preempted for two steps of others, and computes its own prompt again in the third."""
    engine = Engine()
    engine.step(20, prefill={"a": 9, "b": 9})
    for _ in range(6):
        engine.step(10, ("a", "b"))
    engine.step(10, ("a",))
    engine.step(10, ("a",))
    # Its own recomputation slows the other one.
    engine.step(35, ("a",), {"b": 16})
    engine.step(10, ("a", "b"))
    found = engine.analyse()
    assert found is not None
    assert (found.slowed, found.lost_ms) == (1, 25)
    # 10 + 10 + 35 ms in place of 10.
    assert (found.held, found.held_ms) == (1, 45)
    held = next(each for each in found.slowest if each.cause is Cause.HELD)
    assert (held.request_id, held.step, held.itl_ms, held.by) == ("b", 9, 55, ())


def test_a_pipeline_serves_a_request_every_other_step() -> None:
    """Two batches in turns: a gap of two steps is the usual one."""
    engine = Engine()
    engine.step(20, prefill={"a": 9})
    engine.step(20, prefill={"b": 9})
    for _ in range(6):
        engine.step(10, ("a",))
        engine.step(10, ("b",))
    found = engine.analyse()
    assert found is not None
    assert (found.held, found.slowed, found.typical_ms) == (0, 0, 20)


def test_accepted_drafts_wait_for_nothing() -> None:
    engine = Engine()
    engine.step(20, prefill={"a": 9})
    for _ in range(5):
        engine.step(10, ("a",))
    engine.step(50, ("a",), {"b": 70})
    # Two more of the same step.
    engine.tokens["a"] += [(6, engine.now_ms)] * 2
    found = engine.analyse()
    assert found is not None
    assert (found.tokens, found.slowed, found.lost_ms) == (6, 1, 40)


def test_a_mixed_step_that_is_quicker_costs_nothing() -> None:
    engine = Engine()
    engine.step(20, prefill={"a": 9})
    for _ in range(5):
        engine.step(10, ("a",))
    engine.step(9, ("a",), {"b": 1})
    found = engine.analyse()
    assert found is not None
    assert (found.slowed, found.lost_ms, found.requests, found.worst) == (1, 0, 0, ())


def test_without_a_step_of_decode_alone_nothing_tells() -> None:
    engine = Engine()
    engine.step(20, prefill={"a": 9})
    engine.step(50, ("a",), {"b": 70})
    assert engine.analyse() is None


def test_warm_requests_and_those_that_do_not_tell_are_left_out() -> None:
    engine = Engine()
    engine.step(20, prefill={"a": 9, "b": 9, "c": 9})
    for _ in range(3):
        engine.step(10, ("a", "b", "c"))
    found = engine.analyse(a={"warmup": "first"}, b={"profiled": True})
    assert found is not None and found.tokens == 3
    timeline = Timeline()
    timeline.add("decode", 10)
    timeline.request("old")
    trace = timeline.trace()
    assert interference(trace.requests, trace.passes, PRIMARY) is None


def test_one_that_decodes_beside_it_is_not_to_blame() -> None:
    """It is left out as warm-up; the prompt is that of another one, which is left out as well."""
    engine = Engine()
    engine.step(20, prefill={"a": 9, "b": 9})
    for _ in range(5):
        engine.step(10, ("a", "b"))
    engine.step(60, ("a", "b"), {"c": 400})
    engine.step(10, ("a", "b", "c"))
    found = engine.analyse(b={"warmup": "first"}, c={"warmup": "first"})
    assert found is not None
    assert [(each.client_id, each.by) for each in found.slowest] == [("client-a", ("client-c",))]


def test_the_same_step_of_two_ranks_is_two_steps() -> None:
    """Rank 1 computes a prompt in its step 4, rank 0 does not."""
    engine = Engine()
    engine.step(20, prefill={"a": 9})
    for _ in range(6):
        engine.step(10, ("a",))
    for number in range(7):
        engine.timeline.add(
            "mixed", 10, step=number, rank=1, prefill_tokens=500, decode_tokens=1, slices=[]
        )
    found = engine.analyse()
    assert found is not None
    assert (found.tokens, found.slowed) == (6, 0)
