"""Steps of continuous batching on constructed events: asynchronous batching, graphs, preemption, requests that go."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from phaseprof.engine_events import (
    EngineGone,
    RequestDropped,
    RequestQueued,
    StepBegan,
    StepEnded,
    StepTaken,
)
from phaseprof.errors import NotMeasured
from phaseprof.events import ModelSeen, PassSeen
from phaseprof.hooks.continuous import ContinuousHook
from phaseprof.records import EngineStep, ForwardPass, Request
from phaseprof.settling.settler import Settler
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.kv import KvGroup, KvLayout
from phaseprof.work.paged import PagedPool

MS = 1_000_000
OFFSET = 10**18

# One layer of 4 query heads on 2 key heads of width 16; 1,000 FLOPs a token in the body and 100 in the head.
COST = ModelCost(
    linear_flops_per_token=1000,
    head_flops_per_token=100,
    attention=(AttentionCost(1, 4, 2, 16, 16, None, 256),),
    body_weight_bytes=5000,
    head_weight_bytes=700,
    lookup_bytes_per_token=10,
    parameter_bytes=6000,
    parameters=1500,
    dtype="float32",
)
POOL = PagedPool(KvLayout((KvGroup((0,), 256, None, None, "float32"),)), 8192)

Part = tuple[str, int, int]


@dataclass
class Run:
    """A settler, and what it puts."""

    passes: dict[int, ForwardPass] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.settler = Settler(self, offset_ns=OFFSET, process="p7", first_pass_id=100)
        self.settler.handle(ModelSeen("m", COST, "float32"))

    def put_pass(self, row: ForwardPass) -> None:
        self.passes[row.pass_id] = row

    def put_request(self, row: Request) -> None:
        self.requests[row.request_id.partition(":")[2]] = row

    def put_step(self, row: EngineStep) -> None:
        raise AssertionError("transformers has no steps of an engine")

    def queue(self, name: str, prompt: int, *, limit: int | None = 99, **changes: Any) -> None:
        fields: dict[str, Any] = {"generated": 0, "children": 0, "arrival_ns": self.now_ns}
        self.settler.handle(
            RequestQueued(1, name, prompt=prompt, max_output=limit, **{**fields, **changes})
        )

    def step(self, number: int, *parts: Part, seen: bool = True, **changes: Any) -> None:
        """A step of 4 ms, that begins and ends; its tokens are not taken yet."""
        self.now_ns += 10 * MS
        fields: dict[str, Any] = {"slots": None, "logits": None, "graph": False, "dummy": False}
        ended = {key: changes.pop(key) for key in ("error",) if key in changes}
        self.settler.handle(
            StepBegan(
                engine=1,
                step=number,
                thread_id=11,
                model_id="m",
                cache=3,
                requests=parts,
                pool=POOL if number == 1 else None,
                **{**fields, **changes},
            )
        )
        if seen:
            self.settler.handle(packed(self.now_ns, sum(query for _, query, _ in parts), **ended))
        flags: dict[str, Any] = dict.fromkeys(
            ("compiled", "compiling", "warmup", "profiled"), False
        )
        self.settler.handle(
            StepEnded(
                step=number,
                start_ns=self.now_ns,
                end_ns=self.now_ns + 4 * MS,
                span=None,
                **flags,
                **{"error": None, **ended},
            )
        )

    def take(self, number: int, tokens: tuple[int, ...], ended: tuple[bool, ...] = ()) -> None:
        self.now_ns += MS
        over = ended or (False,) * len(tokens)
        self.settler.handle(StepTaken(1, number, self.now_ns, tokens, over))

    def rows(self) -> list[tuple[Any, ...]]:
        return [
            (str(r.phase), r.prefill_tokens, r.decode_tokens, r.recomputed_tokens, r.padding_tokens)
            for r in self.passes.values()
        ]


def packed(start_ns: int, query: int, **changes: Any) -> PassSeen:
    fields: dict[str, Any] = {
        "model_id": "m",
        "generation": 0,
        "thread_id": 11,
        "start_ns": start_ns,
        "end_ns": start_ns + 4 * MS,
        "span": None,
        "rows": 1,
        "query": query,
        "past": None,
        "cache": 3,
        "mask": None,
        "mask_unread": False,
        "fed": None,
        "logits": 1,
        "layout": None,
        "encoder": False,
        "aside": "packed",
        "warmup": False,
        "compiled": False,
        "compiling": False,
        "profiled": False,
        "override": None,
        "error": None,
    }
    return PassSeen(**{**fields, **changes})


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_step_that_runs_ahead_of_the_last_token_is_padding(run: Run) -> None:
    """Asynchronous batching: step 3 is computed before the scheduler takes the last token from step 2."""
    run.queue("a", 5, limit=2)
    run.queue("b", 3)
    run.step(1, ("a", 5, 0), ("b", 3, 0))
    run.step(2, ("a", 1, 5), ("b", 1, 3))
    run.take(1, (1, 1))
    run.step(3, ("a", 1, 6), ("b", 1, 4))
    run.take(2, (1, 1), (True, False))
    run.take(3, (0, 1))
    assert run.rows() == [
        ("prefill", 8, 0, 0, 0),
        ("decode", 0, 2, 0, 0),
        ("decode", 0, 1, 0, 1),
    ]
    last = run.passes[102]
    assert [(part.query, part.past) for part in last.slices] == [(0, 6), (1, 4)]
    # It was computed all the same: 7 + 5 pairs of 2 x 4 x 32 FLOPs, two tokens, one position of logits.
    assert last.flops == 2 * 1000 + 100 + 12 * 256
    assert (last.sequences, last.context_tokens) == (2, 12)
    request = run.requests["a"]
    assert (request.output_tokens, request.finish) == (2, "length")
    assert request.first_token_ns is not None
    assert request.finished_ns == request.first_token_ns + request.itl_ns[0]


def test_a_step_is_put_once_its_tokens_are_taken_or_nothing_else_can_come(run: Run) -> None:
    run.queue("a", 5)
    run.step(1, ("a", 5, 0))
    assert run.passes == {}
    run.settler.finish(run.now_ns)
    assert run.rows() == [("prefill", 5, 0, 0, 0)]
    request = run.requests["a"]
    assert (request.finish, request.output_tokens, request.first_token_ns) == (None, 0, None)


def test_a_step_that_fails_is_put_at_once(run: Run) -> None:
    run.queue("a", 5)
    run.step(1, ("a", 5, 0), error="RuntimeError")
    assert [row.error for row in run.passes.values()] == ["RuntimeError"]
    run.settler.handle(RequestDropped(1, "a", run.now_ns))
    assert run.requests["a"].finish == "abort"


def test_preemption_computes_again_and_nothing_is_found_twice(run: Run) -> None:
    """Three of four pages of the prompt are lost; the first 4 tokens are found again when the request resumes."""
    run.queue("a", 10)
    run.step(1, ("a", 10, 0))
    run.take(1, (1,))
    run.step(2, ("a", 1, 10))
    run.take(2, (1,))
    run.step(3, ("a", 8, 4))
    run.take(3, (1,))
    assert run.rows() == [
        ("prefill", 10, 0, 0, 0),
        ("decode", 0, 1, 0, 0),
        ("mixed", 7, 1, 7, 0),
    ]
    request = run.requests["a"]
    assert [row.cached_tokens for row in run.passes.values()] == [0, 0, 0]
    assert request.cached_tokens == 0


def test_what_another_request_computed_meanwhile_is_cached(run: Run) -> None:
    """Preempted after 4 of 12 prompt tokens, it resumes with 8 in the cache: four of them were never its work."""
    run.queue("a", 12)
    run.step(1, ("a", 4, 0))
    run.take(1, (0,))
    run.step(2, ("a", 4, 8))
    run.take(2, (1,), (True,))
    assert run.rows() == [("prefill", 4, 0, 0, 0), ("prefill", 4, 0, 0, 0)]
    assert [row.cached_tokens for row in run.passes.values()] == [0, 4]
    assert run.requests["a"].cached_tokens == 4


def test_a_token_that_was_thrown_away_is_computed_again(run: Run) -> None:
    """Moved to the host while its step was in flight: the token of that step is dropped, and its position repeated."""
    run.queue("a", 5)
    run.step(1, ("a", 5, 0))
    run.take(1, (1,))
    run.step(2, ("a", 1, 5))
    run.take(2, (0,))
    run.step(3, ("a", 1, 5))
    run.take(3, (1,))
    assert run.rows()[1:] == [("decode", 0, 1, 0, 0), ("prefill", 1, 0, 1, 0)]


def test_a_step_without_a_pass_stands_for_it(run: Run) -> None:
    """A CUDA graph of 8 slots for 2 tokens: the model was not called."""
    run.queue("a", 5)
    run.queue("b", 3)
    run.step(1, ("a", 1, 5), ("b", 1, 3), seen=False, slots=8, logits=4, graph=True)
    run.take(1, (1, 1))
    (row,) = run.passes.values()
    assert run.rows() == [("decode", 0, 2, 0, 6)]
    assert (row.graph, row.host_ns, row.logits_tokens) == (True, 4 * MS, 4)
    # 6 + 4 pairs and 6 slots that attend to themselves; all 8 write.
    assert row.flops == 8 * 1000 + 4 * 100 + 16 * 256
    assert (row.kv_write_bytes, row.kv_held_bytes) == (8 * 256, 10 * 256)
    assert (row.kv_allocated_bytes, row.cache_copy_bytes) == (8192, 0)


def test_slots_that_are_not_known_are_not_made_up(run: Run) -> None:
    run.queue("a", 5)
    run.step(1, ("a", 5, 0), seen=False)
    run.take(1, (1,))
    assert [row.padding_tokens for row in run.passes.values()] == [None]


def test_a_warm_up_of_the_scheduler_serves_nobody_and_is_no_riddle(run: Run) -> None:
    run.settler.handle(StepBegan(1, 1, 11, "m", 3, (), None, None, False, True, None))
    run.settler.handle(packed(0, 64))
    run.settler.handle(StepEnded(1, 0, 1, None, False, False, False, False, None))
    assert run.rows() == [("other", 0, 0, 0, 0)]
    assert not run.settler.packed_seen
    assert run.requests == {}


def test_a_pass_outside_of_any_step_is_a_riddle(run: Run) -> None:
    run.settler.handle(packed(0, 64))
    assert run.rows() == [("other", 0, 0, 0, 0)]
    assert run.settler.packed_seen


def test_an_id_may_be_used_again(run: Run) -> None:
    ids = []
    for number in (1, 2):
        run.queue("a", 3, limit=1)
        run.step(number, ("a", 3, 0))
        run.take(number, (1,), (True,))
        ids.append(run.requests["a"].request_id)
    assert ids == ["p7.b1.r1:a", "p7.b1.r2:a"]


def test_children_came_with_their_parent(run: Run) -> None:
    run.queue("a", 5, limit=1, children=1)
    run.step(1, ("a", 4, 0))
    run.take(1, (0,))
    run.queue("a__child#0", 5, limit=1)
    run.step(2, ("a", 1, 4), ("a__child#0", 1, 4))
    run.take(2, (1, 1), (True, True))
    parent, child = run.requests["a"], run.requests["a__child#0"]
    assert (child.arrival_ns, child.queue_ns) == (parent.arrival_ns, parent.queue_ns)
    assert (parent.cached_tokens, child.cached_tokens) == (0, 4)
    assert [row.cached_tokens for row in run.passes.values()] == [0, 4]
    # A user's own id that merely looks like one is a request of its own.
    at = run.now_ns
    run.queue("b__child#0", 5)
    run.step(3, ("b__child#0", 5, 0))
    run.take(3, (1,))
    assert run.requests["b__child#0"].arrival_ns == at + OFFSET


def test_what_a_freed_scheduler_had_is_given_up(run: Run) -> None:
    run.queue("a", 5)
    run.queue("waits", 5)
    run.step(1, ("a", 5, 0))
    run.settler.handle(EngineGone(1, run.now_ns))
    assert len(run.passes) == 1
    assert {name: row.finish for name, row in run.requests.items()} == {
        "a": "abort",
        "waits": "abort",
    }


def test_a_cancelled_request_had_not_ended_when_its_step_ran(run: Run) -> None:
    run.queue("a", 5)
    run.step(1, ("a", 5, 0))
    run.settler.handle(RequestDropped(1, "a", run.now_ns))
    run.take(1, (1,))
    assert run.rows() == [("prefill", 5, 0, 0, 0)]
    assert (run.requests["a"].finish, run.requests["a"].output_tokens) == ("abort", 0)


def test_a_version_without_a_seam_is_left_alone_and_named() -> None:
    """None of the others is set either: half of the facts would make wrong labels."""
    notes: list[NotMeasured] = []
    nothing: Any = None
    hook = ContinuousHook(
        emit=nothing,
        models=nothing,
        caches=nothing,
        state=nothing,
        flags=nothing,
        failed=nothing,
        note=notes.append,
    )

    class ContinuousBatchProcessor:
        def _generation_step(self) -> None: ...
        def update_batch(self) -> None: ...
        def _handle_request_error(self) -> None: ...

    class Scheduler:
        def add_waiting_request(self) -> None: ...

    before = dict(vars(ContinuousBatchProcessor))
    module = types.SimpleNamespace(
        ContinuousBatchProcessor=ContinuousBatchProcessor,
        Scheduler=Scheduler,
        RequestStatus=types.SimpleNamespace(FINISHED=3),
    )
    assert hook.patches(module) == []
    assert dict(vars(ContinuousBatchProcessor)) == before
    (note,) = notes
    assert note.what == "prefill and decode under continuous batching"
    assert "Scheduler.clear_cancelled_requests" in note.why
    assert "5.0, 5.10, 5.17, 5.22 and 5.24" in note.why
