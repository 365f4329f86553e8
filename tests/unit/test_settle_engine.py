"""From what the hooks on vLLM's scheduler hand over to requests and steps, on constructed events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.records import EngineStep, Finish, ForwardPass, Request, Warmup
from phaseprof.settling.engine import RENEW_NS, Engines
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

MS = 1_000_000
#: From the monotonic clock to Unix ns.
OFFSET = 1_700_000_000 * 10**9


class Rows:
    """The last version of each row."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.steps: list[EngineStep] = []

    def put_pass(self, row: ForwardPass) -> None:
        raise AssertionError("the passes are the workers'")

    def put_request(self, row: Request) -> None:
        self.requests[row.request_id] = row

    def put_step(self, row: EngineStep) -> None:
        self.steps.append(row)


class Core:
    """A scheduler whose steps take 10 ms each: 1 to decide, 8 to execute, 1 to hand over."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.engines = Engines(self.rows, offset_ns=OFFSET)
        self.now_ns = 0
        self.step_number = 0
        self.handle(EngineSeen(1, "vllm-Tiny-1"))

    def handle(self, *events: CoreEvent) -> None:
        for event in events:
            self.engines.handle(event)

    def add(self, name: str, prompt: int = 9, **changes: Any) -> None:
        """A request that came 2 ms before it was handed on."""
        fields: dict[str, Any] = {
            "engine": 1,
            "request": name,
            "client_id": f"client-{name}",
            "arrival_s": (OFFSET + self.now_ns - 2 * MS) / 1e9,
            "at_ns": self.now_ns,
            "prompt": prompt,
            "turn": False,
            "resumable": False,
            "stops_on_text": False,
            "generated": 0,
            "late": False,
        }
        self.handle(RequestAdded(**{**fields, **changes}))

    def schedule(
        self,
        new: Mapping[str, tuple[int, int]] | None = None,
        cached: Mapping[str, tuple[int, int]] | None = None,
        *,
        prompts: Sequence[int] | None = None,
        resumed: Sequence[str] = (),
        **changes: Any,
    ) -> int:
        """Decide on a step; of each request past and query. Gives its number."""
        new, cached = new or {}, cached or {}
        queries = {name: query for name, (_, query) in [*new.items(), *cached.items()]}
        fields: dict[str, Any] = {
            "engine": 1,
            "step": self.step_number,
            "start_ns": self.now_ns,
            "end_ns": self.now_ns + MS,
            "running": len(queries),
            "waiting": 0,
            "preempted": 0,
            "tokens": sum(queries.values()),
            "kv_usage": 0.5,
            "scheduled": queries,
            "new": [
                SimpleNamespace(req_id=n, num_computed_tokens=past) for n, (past, _) in new.items()
            ],
            "prompts": prompts or [9] * len(new),
            "cached": list(cached),
            "computed": [past for past, _ in cached.values()],
            "resumed": set(resumed),
            "warmup": False,
            "profiled": False,
        }
        self.handle(StepScheduled(**{**fields, **changes}))
        self.step_number += 1
        self.now_ns += 9 * MS
        return self.step_number - 1

    def update(self, step: int | None, *ended: RequestEnd, **tokens: int) -> None:
        """Hand over the tokens of a step."""
        self.handle(
            StepUpdated(
                1, step, self.now_ns, self.now_ns + MS, list(tokens), list(tokens.values()), ended
            )
        )
        self.now_ns += MS


@pytest.fixture
def core() -> Core:
    return Core()


def test_a_request_from_arrival_to_end(core: Core) -> None:
    core.add("a")
    assert core.rows.requests["a"].finish is None
    core.update(core.schedule({"a": (0, 9)}), a=1)
    core.update(core.schedule(cached={"a": (9, 1)}), a=1)
    core.update(core.schedule(cached={"a": (10, 1)}), RequestEnd("a", "LENGTH", True), a=1)
    row = core.rows.requests["a"]
    assert (row.request_id, row.client_id, row.model_id) == ("a", "client-a", "vllm-Tiny-1")
    # Seconds as a float are good to a quarter of a microsecond.
    assert row.arrival_ns == pytest.approx(OFFSET - 2 * MS, abs=300)
    assert row.queue_ns == pytest.approx(3 * MS, abs=300)
    assert row.ttft_ns == pytest.approx(12 * MS, abs=300)
    assert (row.first_token_ns, row.finished_ns) == (OFFSET + 10 * MS, OFFSET + 30 * MS)
    assert (row.itl_ns, row.itl_steps, row.tpot_ns) == ((10 * MS, 10 * MS), (1, 2), 10 * MS)
    assert (row.prompt_tokens, row.output_tokens, row.cached_tokens) == (9, 3, 0)
    assert (row.finish, row.preemptions, row.warmup) == (Finish.LENGTH, 0, Warmup.FIRST)
    step = core.rows.steps[1]
    assert (step.engine, step.step, step.model_id) == (1, 1, "vllm-Tiny-1")
    assert (step.start_ns, step.schedule_ns) == (OFFSET + 10 * MS, MS)
    assert (step.execute_ns, step.update_ns, step.scheduled_tokens) == (8 * MS, MS, 1)


def test_a_clock_that_is_ahead_does_not_make_a_request_wait_less_than_nothing(core: Core) -> None:
    core.add("a", arrival_s=(OFFSET + 5 * 10**9) / 1e9)
    core.update(core.schedule({"a": (0, 9)}), a=1)
    row = core.rows.requests["a"]
    assert (row.arrival_ns, row.queue_ns, row.ttft_ns) == (OFFSET, MS, 10 * MS)


def test_tokens_that_come_together(core: Core) -> None:
    """Two drafts are accepted, then one: the first token of each step has waited for it."""
    core.add("a")
    core.update(core.schedule({"a": (0, 9)}), a=1)
    core.update(core.schedule(cached={"a": (9, 4)}), a=3)
    core.update(core.schedule(cached={"a": (12, 4)}), RequestEnd("a", "STOP", True), a=2)
    row = core.rows.requests["a"]
    assert row.itl_ns == (10 * MS, 0, 0, 10 * MS, 0)
    assert row.itl_steps == (1, 1, 1, 2, 2)
    assert (row.output_tokens, row.tpot_ns) == (6, 4 * MS)
    assert row.first_token_ns is not None
    assert row.first_token_ns + sum(row.itl_ns) == row.finished_ns


def test_steps_that_overlap(core: Core) -> None:
    """The second is decided before the first has ended."""
    core.add("a")
    first = core.schedule({"a": (0, 9)})
    core.now_ns -= 5 * MS
    second = core.schedule(cached={"a": (9, 1)})
    core.update(first, a=1)
    core.update(second, RequestEnd("a", "LENGTH", True), a=1)
    assert [(step.step, step.execute_ns) for step in core.rows.steps] == [(0, 12 * MS), (1, 9 * MS)]
    assert core.rows.requests["a"].itl_steps == (1,)


def test_what_is_found_in_the_cache(core: Core) -> None:
    """6 of 20 tokens at first; after a preemption 16, of which it had computed 11 itself."""
    core.add("a", 20)
    core.update(core.schedule({"a": (6, 5)}, prompts=[20]))
    core.handle(RequestPreempted(1, "a"))
    core.update(core.schedule(cached={"a": (16, 2)}, resumed=["a"]))
    core.update(core.schedule(cached={"a": (18, 2)}), a=1)
    # All of the prompt is computed: nothing that it finds from now on was spared.
    core.handle(RequestPreempted(1, "a"))
    core.update(core.schedule(cached={"a": (16, 5)}, resumed=["a"]), a=1)
    core.engines.finish()
    row = core.rows.requests["a"]
    assert (row.cached_tokens, row.preemptions, row.output_tokens) == (6 + 5, 2, 2)


def test_the_v2_runner_is_sent_resumed_requests_as_new_ones(core: Core) -> None:
    core.add("a", 20)
    core.update(core.schedule({"a": (0, 12)}, prompts=[20]))
    queued = 3 * MS
    core.handle(RequestPreempted(1, "a"))
    core.update(core.schedule({"a": (16, 4)}, prompts=[20]), a=1)
    row = core.rows.requests["a"]
    assert row.cached_tokens == 4
    assert row.queue_ns == pytest.approx(queued, abs=300)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("STOP", Finish.STOP),
        ("LENGTH", Finish.LENGTH),
        ("REPETITION", Finish.STOP),
        ("ABORT", Finish.ABORT),
        ("ERROR", Finish.ABORT),
        ("NEW", Finish.UNKNOWN),
    ],
)
def test_how_a_request_ends(core: Core, reason: str, finish: Finish) -> None:
    core.add("a")
    core.update(core.schedule({"a": (0, 9)}), RequestEnd("a", reason, True), a=1)
    assert core.rows.requests["a"].finish is finish


@pytest.mark.parametrize(
    ("stops_on_text", "by_text", "outputs", "finish"),
    [
        (False, False, 1, Finish.ABORT),
        (True, True, 1, Finish.STOP),
        # The frontend is elsewhere: it has found the string, or the client has left.
        (True, False, 1, Finish.UNKNOWN),
        (True, False, 0, Finish.ABORT),
    ],
)
def test_what_an_end_from_outside_is(
    core: Core, stops_on_text: bool, by_text: bool, outputs: int, finish: Finish
) -> None:
    core.add("a", stops_on_text=stops_on_text)
    core.update(core.schedule({"a": (0, 9)}), a=outputs)
    core.handle(RequestsDropped(1, core.now_ns, ["a"], {"a"} if by_text else set()))
    row = core.rows.requests["a"]
    assert (row.finish, row.finished_ns) == (finish, OFFSET + core.now_ns)
    # Whatever comes of it afterwards is nobody's.
    core.update(core.schedule(cached={"a": (9, 1)}), a=1)
    assert core.rows.requests["a"] == row


def test_turns_of_a_session(core: Core) -> None:
    """8 and 5 tokens; 7 s between the two, in which it waits for its client."""
    core.add("a", 8, resumable=True)
    core.update(core.schedule({"a": (0, 8)}, prompts=[8]), a=1)
    core.update(core.schedule(cached={"a": (8, 1)}), RequestEnd("a", "LENGTH", False), a=1)
    core.now_ns += 7 * 10**9
    core.add("a", 5, turn=True, resumable=True)
    # Behind its own first token; its last is not computed.
    core.update(core.schedule({"a": (9, 5)}, prompts=[14]), a=1)
    core.update(core.schedule(cached={"a": (14, 1)}), RequestEnd("a", "STOP", False), a=1)
    assert core.rows.requests["a"].finish is None
    core.handle(RequestsDropped(1, core.now_ns, ["a"], set()))
    row = core.rows.requests["a"]
    assert (row.prompt_tokens, row.output_tokens, row.cached_tokens) == (13, 4, 0)
    assert (row.itl_ns, row.itl_steps) == ((10 * MS, 10 * MS), (1, 3))
    assert (row.tpot_ns, row.finish) == (10 * MS, Finish.STOP)


def test_one_that_ran_before_it_was_seen(core: Core) -> None:
    core.add("a", late=True, generated=4, client_id=None)
    core.update(core.schedule(cached={"a": (12, 1)}), a=1)
    core.update(core.schedule(cached={"a": (13, 1)}), RequestEnd("a", "STOP", True), a=1)
    row = core.rows.requests["a"]
    assert (row.output_tokens, row.cached_tokens, row.itl_ns) == (6, 0, (10 * MS,))
    assert (row.queue_ns, row.first_token_ns, row.ttft_ns) == (None, None, None)


def test_the_first_steps_of_each_phase_are_cold(core: Core) -> None:
    for name in "abcd":
        core.add(name)
    core.update(core.schedule({"a": (0, 9)}), a=1)
    core.update(core.schedule({"b": (0, 9)}), b=1)
    core.update(core.schedule(cached={"b": (9, 1)}), b=1)
    core.update(core.schedule({"c": (0, 9)}, {"a": (9, 1)}), a=1, c=1)
    core.update(core.schedule({"d": (0, 9)}, {"c": (9, 1)}), c=1, d=1)
    core.engines.finish()
    warm = {name: row.warmup for name, row in core.rows.requests.items()}
    assert warm == {"a": Warmup.FIRST, "b": Warmup.FIRST, "c": Warmup.FIRST, "d": None}


def test_what_the_caller_declares_a_warmup(core: Core) -> None:
    core.add("a")
    core.update(core.schedule({"a": (0, 9)}, warmup=True, profiled=True), a=1)
    row = core.rows.requests["a"]
    assert (row.warmup, row.profiled) == (Warmup.REQUESTED, True)


def test_the_model_is_called_as_its_worker_calls_it(core: Core) -> None:
    """In one process: with a second engine of the same class the numbers may differ."""

    def ran(model_id: str) -> Any:
        return SimpleNamespace(runner=2, scheduled={"a": 9}, model_id=model_id)

    core.add("a")
    step = core.schedule({"a": (0, 9)})
    core.engines.ran(ran("vllm-Tiny-2"))
    core.update(step, a=1)
    assert core.rows.requests["a"].model_id == core.rows.steps[0].model_id == "vllm-Tiny-2"
    # A runner is joined once.
    core.engines.ran(ran("another"))
    core.update(core.schedule(cached={"a": (9, 1)}), a=1)
    assert core.rows.steps[1].model_id == "vllm-Tiny-2"


def test_a_scheduler_that_is_freed(core: Core) -> None:
    core.add("a")
    core.schedule({"a": (0, 9)})
    core.handle(SchedulerGone(1, core.now_ns))
    assert core.rows.requests["a"].finish is Finish.ABORT
    (step,) = core.rows.steps
    assert (step.execute_ns, step.update_ns) == (None, None)
    # What comes of it later is of no engine that is known.
    core.add("b")
    assert set(core.rows.requests) == {"a"}


def test_the_end_of_a_session_puts_what_runs_as_it_stands(core: Core) -> None:
    core.add("a")
    core.update(core.schedule({"a": (0, 9)}), a=1)
    core.update(core.schedule(cached={"a": (9, 1)}), a=1)
    core.schedule(cached={"a": (10, 1)})
    core.engines.finish()
    row = core.rows.requests["a"]
    assert (row.finish, row.output_tokens, row.itl_ns) == (None, 2, (10 * MS,))
    assert [step.execute_ns for step in core.rows.steps] == [8 * MS, 8 * MS, None]


def test_a_long_answer_is_put_again_meanwhile(core: Core) -> None:
    core.add("a")
    core.add("waits")
    core.update(core.schedule({"a": (0, 9)}), a=1)
    core.update(core.schedule(cached={"a": (9, 1)}), a=1)
    assert core.rows.requests["a"].output_tokens == 1
    core.now_ns += RENEW_NS
    core.update(core.schedule(cached={"a": (10, 1)}), a=1)
    row = core.rows.requests["a"]
    assert (row.output_tokens, row.finish, row.itl_steps) == (3, None, (1, 2))
    core.update(core.schedule(cached={"a": (11, 1)}), a=1)
    assert core.rows.requests["a"].output_tokens == 3


def test_ends_without_a_step(core: Core) -> None:
    """A grammar that does not compile: the request fails with an update of no token."""
    core.add("a")
    core.update(None, RequestEnd("a", "ERROR", True), a=0)
    row = core.rows.requests["a"]
    assert (row.finish, row.queue_ns, row.output_tokens) == (Finish.ABORT, None, 0)
    assert core.rows.steps == []
