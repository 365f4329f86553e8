"""From events to rows, on constructed events: roles, verification, settling, overrides, device time, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from phaseprof.events import (
    CacheGone,
    GenerationBegan,
    GenerationEnded,
    ModelSeen,
    Override,
    PassSeen,
    PromptKnown,
    RowsEnded,
)
from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import EngineStep, Finish, ForwardPass, Request, Warmup
from phaseprof.settling.settler import Settler
from phaseprof.work.cost import AttentionCost, ModelCost

MS = 1_000_000
OFFSET = 10**18

# Two layers of 4 query heads on 2 key heads of width 16; 1,000 FLOPs a token in the body and 100 in the head.
COST = ModelCost(
    linear_flops_per_token=1000,
    head_flops_per_token=100,
    attention=(AttentionCost(2, 4, 2, 16, 16, None, 256),),
    body_weight_bytes=5000,
    head_weight_bytes=700,
    lookup_bytes_per_token=10,
    parameter_bytes=6000,
    parameters=1500,
    dtype="float32",
)


@dataclass
class Rows:
    """A sink that keeps the last version of each row, and how often each was put."""

    passes: dict[int, ForwardPass] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    history: list[ForwardPass] = field(default_factory=list)

    def put_pass(self, row: ForwardPass) -> None:
        self.passes[row.pass_id] = row
        self.history.append(row)

    def put_request(self, row: Request) -> None:
        self.requests[row.request_id] = row

    def put_step(self, row: EngineStep) -> None:
        raise AssertionError("transformers has no steps of an engine")

    def phases(self) -> list[Phase]:
        return [row.phase for row in self.passes.values()]


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def settler(rows: Rows) -> Settler:
    made = Settler(rows, offset_ns=OFFSET, process="p7", first_pass_id=100)
    made.handle(ModelSeen("m", COST, "float32"))
    return made


_clock = iter(range(0, 10**15, 10 * MS))


def seen(**changes: Any) -> PassSeen:
    """A pass of one row, one token, 4 ms; passes are 10 ms apart."""
    start = next(_clock)
    fields: dict[str, Any] = {
        "model_id": "m",
        "generation": 0,
        "thread_id": 11,
        "start_ns": start,
        "end_ns": start + 4 * MS,
        "span": None,
        "rows": 1,
        "query": 1,
        "past": 0,
        "cache": 1,
        "mask": None,
        "mask_unread": False,
        "fed": None,
        "logits": 1,
        "layout": None,
        "encoder": False,
        "aside": None,
        "warmup": False,
        "compiled": False,
        "compiling": False,
        "profiled": False,
        "override": None,
        "error": None,
    }
    return PassSeen(**{**fields, **changes})


def generation(settler: Settler, number: int, *, parent: int = 0, model: str = "m") -> int:
    """Begin a generate call; gives when."""
    at = next(_clock)
    settler.handle(GenerationBegan(number, parent, model, at))
    return at


def prompt(settler: Settler, number: int, slots: int, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "generation": number,
        "prompt": slots,
        "rows": 1,
        "sequences_per_request": 1,
        "mask": None,
        "end_ids": (),
        "max_output": None,
        "speculative": False,
    }
    settler.handle(PromptKnown(**{**fields, **changes}))


def test_a_row_in_full(settler: Settler, rows: Rows) -> None:
    """Every figure of one prefill of five tokens, by hand."""
    generation(settler, 1)
    prompt(settler, 1, 5)
    event = seen(generation=1, query=5, logits=1)
    settler.handle(event)
    (row,) = rows.passes.values()
    # 15 causal pairs x 2 layers x (2 x 4 heads x 32 wide); the head for one position.
    assert row.flops == 5 * 1000 + 100 + 15 * 2 * 256
    assert row.weight_bytes == 5000 + 700 + 5 * 10
    assert row.kv_write_bytes == row.kv_read_bytes == 5 * 2 * 256
    assert (row.context_tokens, row.attention_pairs, row.logits_tokens) == (5, 15, 1)
    assert (row.pass_id, row.step, row.model_id, row.role) == (100, 0, "m", Role.TARGET)
    assert (row.start_ns, row.end_ns) == (event.start_ns + OFFSET, event.end_ns + OFFSET)
    assert (row.host_ns, row.device_ns) == (4 * MS, None)
    assert row.tag_source is TagSource.GENERATE
    assert row.warmup is Warmup.FIRST


def test_latencies_of_a_request(settler: Settler, rows: Rows) -> None:
    """Arrival, 3 passes, end: TTFT, TPOT, ITL and queue time by hand."""
    arrival = generation(settler, 1)
    prompt(settler, 1, 5, max_output=3)
    events = [seen(generation=1, query=5)] + [seen(generation=1, past=p) for p in (5, 6)]
    for event in events:
        settler.handle(event)
    assert rows.requests["p7.g1.r0"].finish is None
    ended = next(_clock)
    settler.handle(GenerationEnded(1, ended, None))
    request = rows.requests["p7.g1.r0"]
    assert request.arrival_ns == arrival + OFFSET
    assert request.queue_ns == events[0].start_ns - arrival
    assert request.ttft_ns == events[0].end_ns - arrival
    assert request.itl_ns == (10 * MS, 10 * MS)
    assert request.itl_steps == (1, 2)
    assert request.tpot_ns == 10 * MS
    assert request.output_tokens == 3
    assert request.finished_ns == ended + OFFSET
    assert request.finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("max_output", "error", "finish"),
    [(9, None, Finish.STOP), (2, None, Finish.LENGTH), (2, "ValueError", Finish.ABORT)],
)
def test_how_a_request_ends(
    settler: Settler, rows: Rows, max_output: int, error: str | None, finish: Finish
) -> None:
    generation(settler, 1)
    prompt(settler, 1, 5, max_output=max_output)
    settler.handle(seen(generation=1, query=5))
    settler.handle(seen(generation=1, past=5))
    settler.handle(GenerationEnded(1, next(_clock), error))
    assert rows.requests["p7.g1.r0"].finish is finish


def test_one_token_has_no_tpot(settler: Settler, rows: Rows) -> None:
    generation(settler, 1)
    prompt(settler, 1, 5)
    settler.handle(seen(generation=1, query=5))
    settler.handle(GenerationEnded(1, next(_clock), None))
    request = rows.requests["p7.g1.r0"]
    assert (request.output_tokens, request.tpot_ns, request.itl_ns) == (1, None, ())


def test_assisted_generation(settler: Settler, rows: Rows) -> None:
    """Prompt of 9. The target's first pass holds prompt and 4 drafts (2 accepted), the next verifies 4 (all accepted).

    After the first pass the cache is cropped to 9 + 2; the second feeds the sampled token and 4 drafts. The draft model
    has a tokenizer of its own: the prompt is 11 tokens to it, and its second call is given 14.
    """
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    generation(settler, 2, parent=1, model="d")
    prompt(settler, 2, 11)
    settler.handle(seen(generation=2, model_id="d", past=0, query=11, cache=2))
    settler.handle(GenerationEnded(2, next(_clock), None))
    settler.handle(seen(generation=1, query=13, past=0))
    generation(settler, 3, parent=1, model="d")
    prompt(settler, 3, 14)
    settler.handle(seen(generation=3, model_id="d", past=12, query=2, cache=2))
    settler.handle(GenerationEnded(3, next(_clock), None))
    settler.handle(seen(generation=1, query=5, past=11))
    settler.handle(seen(generation=1, query=1, past=16))
    reads, first, draft, second, last = rows.passes.values()
    # The draft model works for the request of the call around it, and has none of its own.
    assert draft.slices[0].request_id == "p7.g1.r0"
    assert set(rows.requests) == {"p7.g1.r0"}
    assert (reads.role, reads.phase, reads.prefill_tokens) == (Role.DRAFT, Phase.PREFILL, 11)
    assert (draft.role, draft.phase, draft.decode_tokens) == (Role.DRAFT, Phase.DECODE, 2)
    # What it finds in its cache is its own work.
    assert draft.cached_tokens == 0
    assert (first.phase, first.prefill_tokens, first.decode_tokens) == (Phase.MIXED, 9, 4)
    assert (first.draft_tokens, first.accepted_tokens) == (4, 2)
    assert (second.phase, second.decode_tokens) == (Phase.DECODE, 5)
    assert (second.draft_tokens, second.accepted_tokens) == (4, 4)
    assert (last.draft_tokens, last.accepted_tokens) == (0, 0)
    settler.handle(GenerationEnded(1, next(_clock), None))
    request = rows.requests["p7.g1.r0"]
    # The three passes yield 3, 5 and 1 tokens: the first of each waits for its pass, the others for nothing.
    gaps = second.end_ns - first.end_ns, last.end_ns - second.end_ns
    assert request.itl_ns == (0, 0, gaps[0], 0, 0, 0, 0, gaps[1])
    assert request.itl_steps == (0, 0, 1, 1, 1, 1, 1, 2)
    assert (request.output_tokens, request.tpot_ns) == (9, sum(gaps) // 8)


def test_a_pass_on_another_cache_is_a_guest_of_the_call(settler: Settler, rows: Rows) -> None:
    """Somebody runs the model on a cache of its own between two steps: a prompt of 3, and no request."""
    generation(settler, 1)
    prompt(settler, 1, 5)
    settler.handle(seen(generation=1, query=5))
    settler.handle(seen(generation=1, query=3, cache=2))
    settler.handle(seen(generation=1, past=5))
    settler.handle(GenerationEnded(1, next(_clock), None))
    own, guest, step = rows.passes.values()
    assert (own.prefill_tokens, step.decode_tokens) == (5, 1)
    assert (guest.phase, guest.prefill_tokens) == (Phase.PREFILL, 3)
    assert guest.slices[0].request_id == "p7.g1.c2.t0.r0"
    assert set(rows.requests) == {"p7.g1.r0"}
    assert rows.requests["p7.g1.r0"].output_tokens == 2


def test_rows_that_a_criterion_ended(settler: Settler, rows: Rows) -> None:
    """The first of two rows is ended after its first token; then nothing can be read any more."""
    generation(settler, 1)
    prompt(settler, 1, 5, rows=2)
    settler.handle(seen(generation=1, rows=2, query=5))
    settler.handle(RowsEnded(1, (0,)))
    settler.handle(seen(generation=1, rows=2, past=5))
    settler.handle(RowsEnded(1, None))
    settler.handle(seen(generation=1, rows=2, past=6))
    _, ended, unread = rows.passes.values()
    assert (ended.decode_tokens, ended.padding_tokens) == (1, 1)
    assert unread.padding_tokens is None
    assert settler.padding_unread


def test_a_state_without_a_cache_goes_on(settler: Settler, rows: Rows) -> None:
    """The second pass computes one token, which without a cache it could not unless the state was kept."""
    generation(settler, 1)
    prompt(settler, 1, 5)
    settler.handle(seen(generation=1, query=5, cache=0))
    settler.handle(seen(generation=1, query=1, cache=0))
    _, step = rows.passes.values()
    assert (step.phase, step.slices[0].past, step.recomputed_tokens) == (Phase.DECODE, 5, 0)


def test_a_module_that_drafts_without_a_call_of_its_own(settler: Settler, rows: Rows) -> None:
    """Heads that propose several tokens: they read the prompt, and serve no request."""
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    settler.handle(seen(generation=1, query=9))
    settler.handle(seen(generation=1, model_id="d", query=9, cache=2))
    settler.handle(seen(generation=1, past=9, query=3))
    settler.handle(GenerationEnded(1, next(_clock), None, slots=11))
    own, draft, verified = rows.passes.values()
    assert (own.role, draft.role, draft.phase) == (Role.TARGET, Role.DRAFT, Phase.PREFILL)
    assert (verified.draft_tokens, verified.accepted_tokens) == (2, 1)
    assert set(rows.requests) == {"p7.g1.r0"}
    assert rows.requests["p7.g1.r0"].output_tokens == 3


def test_a_verification_waits_for_the_next_pass(settler: Settler, rows: Rows) -> None:
    """Until then accepted is unknown, and the row says that it may change."""
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    settler.handle(seen(generation=1, query=13))
    (row,) = rows.passes.values()
    assert (row.accepted_tokens, row.may_change) == (None, True)
    settler.handle(GenerationEnded(1, next(_clock), None))
    (row,) = rows.passes.values()
    assert (row.accepted_tokens, row.may_change) == (None, False)


def loop_until_extend(settler: Settler) -> None:
    """A hand-written loop: 6 tokens, a step, then 4 tokens whose meaning is open."""
    settler.handle(seen(query=6))
    settler.handle(seen(past=6))
    settler.handle(seen(past=7, query=4))


def test_extend_is_written_before_it_is_settled(settler: Settler, rows: Rows) -> None:
    loop_until_extend(settler)
    row = rows.passes[102]
    assert (row.phase, row.tag_source, row.may_change) == (Phase.EXTEND, TagSource.INFERRED, True)
    assert (row.prefill_tokens, row.decode_tokens) == (0, 0)


def test_extend_on_a_kept_cache_is_a_new_turn(settler: Settler, rows: Rows) -> None:
    loop_until_extend(settler)
    settler.handle(seen(past=11))
    row = rows.passes[102]
    assert (row.phase, row.prefill_tokens, row.cached_tokens) == (Phase.PREFILL, 4, 7)
    assert (row.tag_source, row.may_change) == (TagSource.CACHE, False)
    assert row.slices[0].request_id == "p7.c1.t1.r0"
    assert rows.requests["p7.c1.t0.r0"].output_tokens == 2
    assert rows.requests["p7.c1.t1.r0"].prompt_tokens == 11


def test_extend_on_a_cropped_cache_is_a_verification(settler: Settler, rows: Rows) -> None:
    """Kept: the sampled token and one draft of three."""
    loop_until_extend(settler)
    settler.handle(seen(past=9))
    row = rows.passes[102]
    assert (row.phase, row.decode_tokens) == (Phase.DECODE, 4)
    assert (row.draft_tokens, row.accepted_tokens) == (3, 1)
    # Once verified, a pass that keeps everything had its whole draft accepted.
    settler.handle(seen(past=10, query=4))
    settler.handle(seen(past=14))
    row = rows.passes[104]
    assert (row.phase, row.draft_tokens, row.accepted_tokens) == (Phase.DECODE, 3, 3)


def test_extend_that_nothing_follows_stays_one(settler: Settler, rows: Rows) -> None:
    loop_until_extend(settler)
    settler.finish(next(_clock))
    row = rows.passes[102]
    assert (row.phase, row.may_change) == (Phase.EXTEND, False)


def test_a_freed_cache_ends_its_loop(settler: Settler, rows: Rows) -> None:
    settler.handle(seen(query=6))
    assert rows.requests["p7.c1.t0.r0"].finish is None
    settler.handle(CacheGone(1, next(_clock)))
    request = rows.requests["p7.c1.t0.r0"]
    assert (request.finish, request.output_tokens) == (Finish.UNKNOWN, 1)


def test_a_loop_on_a_cache_filled_before_recording(settler: Settler, rows: Rows) -> None:
    settler.handle(seen(past=30))
    assert rows.phases() == [Phase.DECODE]


def test_encoder_and_training_have_no_prefill(settler: Settler, rows: Rows) -> None:
    generation(settler, 1)
    settler.handle(seen(generation=1, encoder=True, query=50, cache=0))
    settler.handle(seen(aside="training", query=50, cache=0))
    encode, other = rows.passes.values()
    assert (encode.phase, encode.role) == (Phase.ENCODE, Role.ENCODER)
    assert (other.phase, other.role) == (Phase.OTHER, Role.TARGET)
    assert encode.prefill_tokens == other.prefill_tokens == 0
    assert encode.slices[0].query == 50


def test_the_user_overrules(settler: Settler, rows: Rows) -> None:
    settler.handle(seen(query=6, override=Override(Phase.DECODE, None)))
    row = rows.passes[100]
    assert (row.phase, row.decode_tokens, row.tag_source) == (Phase.DECODE, 6, TagSource.USER)


def test_warmup_reasons(settler: Settler, rows: Rows) -> None:
    """The strongest reason is given; the first pass of a phase is one, unless a warm-up had that phase."""
    generation(settler, 1)
    prompt(settler, 1, 5)
    settler.handle(seen(generation=1, query=5, warmup=True))
    settler.handle(seen(generation=1, past=5, compiling=True))
    settler.handle(seen(generation=1, past=6))
    settler.handle(seen(generation=1, past=7))
    assert [row.warmup for row in rows.passes.values()] == [
        Warmup.REQUESTED,
        Warmup.COMPILE,
        Warmup.FIRST,
        None,
    ]


@dataclass
class Later:
    """Device time that becomes known later."""

    device_ns: int | None = None
    lost: bool = False
    captured: bool = False


def test_device_time_comes_late(settler: Settler, rows: Rows) -> None:
    span = Later()
    settler.handle(seen(query=5, span=span))
    settler.poll()
    assert (rows.passes[100].device_ns, rows.passes[100].may_change) == (None, True)
    span.device_ns = 3 * MS
    settler.poll()
    assert (rows.passes[100].device_ns, rows.passes[100].may_change) == (3 * MS, False)


def test_device_time_does_not_undo_what_was_settled(settler: Settler, rows: Rows) -> None:
    """The device time of an extend pass may come before or after the pass that settles it."""
    span = Later()
    settler.handle(seen(query=6))
    settler.handle(seen(past=6))
    settler.handle(seen(past=7, query=4, span=span))
    settler.handle(seen(past=9))
    span.device_ns = 3 * MS
    settler.poll()
    row = rows.passes[102]
    assert (row.phase, row.accepted_tokens, row.device_ns) == (Phase.DECODE, 1, 3 * MS)


def test_device_time_does_not_undo_what_was_accepted(settler: Settler, rows: Rows) -> None:
    span = Later()
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    settler.handle(seen(generation=1, query=13, span=span))
    settler.handle(seen(generation=1, past=11))
    span.device_ns = 3 * MS
    settler.poll()
    assert (rows.passes[100].accepted_tokens, rows.passes[100].device_ns) == (2, 3 * MS)


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_what_was_accepted_does_not_undo_the_device_time(
    settler: Settler, rows: Rows, early: bool
) -> None:
    """The device time of a verification may come before or after the pass that settles it."""
    span = Later()
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    settler.handle(seen(generation=1, query=13, span=span))
    span.device_ns = 3 * MS if early else None
    settler.poll()
    assert rows.passes[100].may_change
    settler.handle(seen(generation=1, past=11))
    span.device_ns = 3 * MS
    settler.poll()
    row = rows.passes[100]
    assert (row.accepted_tokens, row.device_ns, row.may_change) == (2, 3 * MS, False)


@pytest.mark.parametrize("last", [9 * MS, None], ids=["known", "not known yet"])
def test_tokens_are_there_when_the_device_has_computed_them(
    settler: Settler, rows: Rows, last: int | None
) -> None:
    """Calls of 4 ms every 10 ms, and 9 ms on the device for each: a token is 9 ms after the call of its pass. What is
    not known of the last one is taken to be as it was before."""
    arrival = generation(settler, 1)
    prompt(settler, 1, 5)
    spans = [Later(), Later(), Later()]
    settler.handle(seen(generation=1, query=5, span=spans[0]))
    assert rows.requests["p7.g1.r0"].ttft_ns == 14 * MS
    for past, span in enumerate(spans[1:], start=5):
        spans[past - 5].device_ns = 9 * MS
        settler.handle(seen(generation=1, past=past, span=span))
    spans[2].device_ns = last
    end = next(_clock)
    settler.handle(GenerationEnded(1, end, None))
    request = rows.requests["p7.g1.r0"]
    assert request.first_token_ns == OFFSET + arrival + 19 * MS
    assert (request.ttft_ns, request.tpot_ns, request.itl_ns) == (
        19 * MS,
        10 * MS,
        (10 * MS, 10 * MS),
    )


def test_a_token_that_is_estimated_is_not_later_than_the_end(settler: Settler, rows: Rows) -> None:
    generation(settler, 1)
    prompt(settler, 1, 5)
    first, second = Later(30 * MS), Later()
    settler.handle(seen(generation=1, query=5, span=first))
    for _ in range(2):
        next(_clock)
    event = seen(generation=1, past=5, span=second)
    settler.handle(event)
    settler.handle(GenerationEnded(1, event.end_ns + 3 * MS, None))
    request = rows.requests["p7.g1.r0"]
    assert request.ttft_ns == 40 * MS
    assert request.itl_ns == (7 * MS,)


def test_accepted_drafts_are_there_with_their_pass(settler: Settler, rows: Rows) -> None:
    generation(settler, 1)
    prompt(settler, 1, 9, speculative=True)
    span = Later()
    settler.handle(seen(generation=1, query=9, span=Later(4 * MS)))
    settler.handle(seen(generation=1, past=9, query=4, span=span))
    settler.handle(seen(generation=1, past=12, span=Later(4 * MS)))
    span.device_ns = 8 * MS
    settler.handle(GenerationEnded(1, next(_clock), None))
    # One with the prompt, three with the verification 4 ms late, one with the last pass.
    assert rows.requests["p7.g1.r0"].itl_ns == (14 * MS, 0, 0, 6 * MS)


def test_a_slow_device_does_not_hold_up_the_passes_of_another(settler: Settler, rows: Rows) -> None:
    slow, quick = Later(), Later()
    settler.handle(seen(query=5, span=slow, cache=1))
    settler.handle(seen(query=5, span=quick, cache=2))
    quick.device_ns = 2 * MS
    settler.poll()
    assert (rows.passes[101].device_ns, rows.passes[101].may_change) == (2 * MS, False)
    assert rows.passes[100].may_change
    slow.device_ns = 3 * MS
    settler.poll()
    assert (rows.passes[100].device_ns, rows.passes[100].may_change) == (3 * MS, False)


def test_a_device_time_that_never_comes_closes_the_pass(settler: Settler, rows: Rows) -> None:
    span = Later()
    settler.handle(seen(query=5, span=span))
    settler.poll()
    assert rows.passes[100].may_change
    span.lost = True
    settler.poll()
    assert (rows.passes[100].device_ns, rows.passes[100].may_change) == (None, False)


def test_a_pass_that_went_into_a_graph_is_no_steady_one(settler: Settler, rows: Rows) -> None:
    settler.handle(seen(query=5))
    settler.handle(seen(past=5, span=Later(lost=True, captured=True)))
    settler.handle(seen(past=6, span=Later(device_ns=MS)))
    found = [(row.warmup, row.device_ns, row.may_change) for row in rows.passes.values()]
    assert found[1:] == [(Warmup.COMPILE, None, False), (Warmup.FIRST, MS, False)]


def test_a_failed_pass_does_not_advance(settler: Settler, rows: Rows) -> None:
    generation(settler, 1)
    prompt(settler, 1, 5)
    settler.handle(seen(generation=1, query=5, error="RuntimeError"))
    settler.handle(GenerationEnded(1, next(_clock), "RuntimeError"))
    assert rows.passes[100].error == "RuntimeError"
    request = rows.requests["p7.g1.r0"]
    assert (request.finish, request.output_tokens, request.ttft_ns) == (Finish.ABORT, 0, None)


def test_a_decoding_method_that_announces_nothing(settler: Settler, rows: Rows) -> None:
    """Its first pass is the prompt."""
    generation(settler, 1)
    settler.handle(seen(generation=1, query=5))
    settler.handle(seen(generation=1, past=5))
    assert rows.phases() == [Phase.PREFILL, Phase.DECODE]


def test_an_unread_mask_leaves_padding_unknown(settler: Settler, rows: Rows) -> None:
    settler.handle(seen(query=5, mask_unread=True))
    assert rows.passes[100].padding_tokens is None
    assert settler.padding_unread


def test_rows_that_may_have_ended_unread(settler: Settler, rows: Rows) -> None:
    """Ids on a device are not read: which rows of a batch have ended is not known, and no padding is claimed."""
    generation(settler, 1)
    prompt(settler, 1, 5, rows=2, end_ids=(2,))
    settler.handle(seen(generation=1, rows=2, query=5))
    settler.handle(seen(generation=1, rows=2, past=5, fed=None))
    assert [row.padding_tokens for row in rows.passes.values()] == [0, None]
    assert settler.padding_unread


def test_an_uncovered_model_has_no_work(rows: Rows) -> None:
    settler = Settler(rows, offset_ns=0, process="p7", first_pass_id=0)
    settler.handle(ModelSeen("x", None, ""))
    settler.handle(seen(model_id="x", query=5))
    row = rows.passes[0]
    assert (row.flops, row.weight_bytes, row.kv_read_bytes) == (None, None, None)
    assert (row.context_tokens, row.attention_pairs) == (5, 15)


def test_threads_without_a_cache_are_given_up_the_longest_at_rest_first(
    settler: Settler, rows: Rows
) -> None:
    """200 threads of one pass each, beside one that computes a token more each time."""
    settler.handle(seen(cache=0, query=5, thread_id=1))
    for number in range(200):
        settler.handle(seen(cache=0, query=9, thread_id=1000 + number))
        settler.handle(seen(cache=0, query=6 + number, thread_id=1))
    # The thread that goes on is never given up: all its passes but the first are mixed.
    of_one = [row.phase for row in rows.passes.values() if row.thread_id == 1]
    assert of_one == [Phase.PREFILL] + [Phase.MIXED] * 200
    # What was given up is a request of its own, and so is what comes back.
    settler.handle(seen(cache=0, query=10, thread_id=1000))
    assert list(rows.passes.values())[-1].phase is Phase.PREFILL
    settler.finish(next(_clock))
    assert len(rows.requests) == 1 + 200 + 1
    assert len(settler._loops._loops) == 0
