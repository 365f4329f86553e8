"""The labelling contract: its published table, a walk over positions, and requests simulated token by token."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phaseprof import phases
from phaseprof.phases import (
    ExtendOutcome,
    Phase,
    RequestTokens,
    TokenSplit,
    check_invariants,
    phase_of,
    settle_extend,
    split,
)

PAGE = Path(__file__).parents[2] / "docs" / "labelling.md"


@dataclass(frozen=True)
class Row:
    """One row of the table of cases."""

    case: str
    prompt: int
    past: int
    query: int
    computed: int
    prefill: int
    decode: int
    phase: str


#: Worked out by hand: what the docstring and the docs page must say, and what the code must do.
PINNED = [
    Row("a prompt of nine tokens", 9, 0, 9, 0, 9, 0, "prefill"),
    Row("the next token", 9, 9, 1, 9, 0, 1, "decode"),
    Row("chunked prefill, first chunk", 9, 0, 4, 0, 4, 0, "prefill"),
    Row("chunked prefill, last chunk of one token", 9, 8, 1, 8, 1, 0, "prefill"),
    Row("a prompt of one token", 1, 0, 1, 0, 1, 0, "prefill"),
    Row("a prefix hit: 6 of 9 tokens are cached", 9, 6, 3, 0, 3, 0, "prefill"),
    Row("a prefix hit on all but the last token", 9, 8, 1, 0, 1, 0, "prefill"),
    Row("a new turn of 5 tokens on a kept cache of 12", 17, 12, 5, 12, 5, 0, "prefill"),
    Row("a draft of 4 is verified", 9, 12, 5, 12, 0, 5, "decode"),
    Row("the first pass verifies too: prompt and draft of 4", 9, 0, 13, 0, 9, 4, "mixed"),
    Row("no cache: the third pass computes everything again", 9, 0, 11, 10, 10, 1, "mixed"),
    Row("preempted after 3 output tokens, then resumed", 9, 0, 12, 11, 11, 1, "mixed"),
    Row("preempted, resumed in chunks: first chunk", 9, 0, 8, 11, 8, 0, "prefill"),
    Row("preempted, resumed in chunks: the rest", 9, 8, 4, 11, 3, 1, "mixed"),
]


def rows_of_docstring() -> list[Row]:
    """The table in the docstring of `phaseprof.phases`: columns are where its rulers have ``=``."""
    lines = (phases.__doc__ or "").splitlines()
    rulers = [place for place, line in enumerate(lines) if line.startswith("=====")]
    assert len(rulers) == 3
    begins = [
        place
        for place, sign in enumerate(lines[rulers[0]])
        if sign == "=" and (place == 0 or lines[rulers[0]][place - 1] == " ")
    ]
    ends = [*begins[1:], None]

    def cells(line: str) -> list[str]:
        return [line[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]

    assert cells(lines[rulers[0] + 1]) == [
        "case (one sequence)",
        "prompt",
        "past",
        "query",
        "computed",
        "prefill",
        "decode",
        "the pass is",
    ]
    return [_row(cells(line)) for line in lines[rulers[1] + 1 : rulers[2]]]


def rows_of_page() -> list[Row]:
    """The same table on the docs page: the one whose first column is headed ``case (one sequence)``."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| case (one sequence) |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(_row([cell.strip().strip("`") for cell in line.strip("|").split("|")]))
    return rows


def _row(cells: list[str]) -> Row:
    case, prompt, past, query, computed, prefill, decode, phase = cells
    return Row(
        case,
        int(prompt),
        int(past),
        int(query),
        int(computed),
        int(prefill),
        int(decode),
        phase,
    )


@pytest.mark.parametrize("row", PINNED, ids=lambda row: row.case)
def test_a_case_is_split_as_worked_out(row: Row) -> None:
    tokens = split(prompt=row.prompt, past=row.past, query=row.query, computed=row.computed)
    assert (tokens.prefill, tokens.decode) == (row.prefill, row.decode)
    assert phase_of(tokens.prefill, tokens.decode) == row.phase


def test_the_docstring_has_these_cases() -> None:
    assert rows_of_docstring() == PINNED


def test_the_docs_page_has_these_cases() -> None:
    assert rows_of_page() == PINNED


def test_the_example_of_the_docs_page_holds() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "assert check_invariants" in example
    exec(compile(example, str(PAGE), "exec"), {})


@pytest.mark.parametrize(
    ("row", "recomputed"),
    [
        (PINNED[5], 0),  # a prefix hit was computed by somebody else, and is not computed here
        (PINNED[10], 10),
        (PINNED[11], 11),
        (PINNED[12], 8),
        (PINNED[13], 3),
    ],
    ids=lambda value: value.case if isinstance(value, Row) else "",
)
def test_recomputed_tokens_are_those_below_the_mark(row: Row, recomputed: int) -> None:
    tokens = split(prompt=row.prompt, past=row.past, query=row.query, computed=row.computed)
    assert tokens.recomputed == recomputed


def test_a_pass_without_tokens_is_other() -> None:
    assert split(prompt=9, past=9, query=0) == TokenSplit(0, 0, 0)
    assert phase_of(0, 0) is Phase.OTHER


@pytest.mark.parametrize("name", ["prompt", "past", "query", "computed"])
def test_negative_counts_are_refused(name: str) -> None:
    counts = {"prompt": 4, "past": 0, "query": 4, "computed": 0}
    counts[name] = -1
    with pytest.raises(ValueError, match=f"{name}=-1"):
        split(**counts)


small = st.integers(0, 40)


@given(prompt=small, past=small, query=small, computed=small)
def test_split_is_a_walk_over_positions(prompt: int, past: int, query: int, computed: int) -> None:
    labels = []
    again = 0
    for position in range(past, past + query):
        was_computed = position < computed
        again += was_computed
        labels.append("prefill" if position < prompt or was_computed else "decode")
    tokens = split(prompt=prompt, past=past, query=query, computed=computed)
    assert tokens == TokenSplit(labels.count("prefill"), labels.count("decode"), again)
    expected = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode"}.get(
        ("prefill" in labels, "decode" in labels), "other"
    )
    assert phase_of(tokens.prefill, tokens.decode) == expected


@given(chunks=st.lists(st.integers(1, 12), min_size=1, max_size=12), cached=st.integers(0, 30))
def test_any_chunking_of_a_prompt_is_the_same_prefill(chunks: list[int], cached: int) -> None:
    prompt = cached + sum(chunks)
    past = cached
    parts = []
    for chunk in chunks:
        parts.append(split(prompt=prompt, past=past, query=chunk, computed=past))
        past += chunk
    assert all(phase_of(part.prefill, part.decode) is Phase.PREFILL for part in parts)
    assert sum(part.prefill for part in parts) == prompt - cached
    assert sum(part.recomputed for part in parts) == 0


# Requests, token by token. The simulator knows no formula: it moves single tokens and notes what happens to each.


@dataclass
class Pass:
    """What an engine would tell about one pass of a sequence, and the truth about each of its tokens."""

    past: int
    query: int
    computed: int
    labels: list[str]
    again: int
    rejected: int


@dataclass
class Simulated:
    """A request that was served: its passes, and the other side of the identities."""

    prompt: int
    cached: int = 0
    generated: int = 0
    passes: list[Pass] = field(default_factory=list)

    def tokens(self) -> RequestTokens:
        """Labelled by `split`, pass by pass."""
        parts = [
            split(prompt=self.prompt, past=one.past, query=one.query, computed=one.computed)
            for one in self.passes
        ]
        return RequestTokens(
            request_id="r",
            sequences=1,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            recomputed_tokens=sum(one.again for one in self.passes),
            prefill_tokens=sum(part.prefill for part in parts),
            decode_tokens=sum(part.decode for part in parts),
            rejected_tokens=sum(one.rejected for one in self.passes),
            output_tokens=self.generated,
        )


def serve(
    prompt: int, limit: int, draw: Callable[[str, int, int], int], *, drafts: bool = True
) -> Simulated:
    """Serve one request of ``prompt`` tokens until ``limit`` tokens are generated.

    Args:
        prompt: Tokens that it came with.
        limit: Tokens to generate.
        draw: Draws a number between two bounds, both included; the first argument says what for.
        drafts: Whether drafts are verified.
    """
    request = Simulated(prompt)
    known = ["prompt"] * prompt  # every token that exists, by origin
    # An engine computes at least the last token of a prompt, even if all of it is cached.
    in_cache = request.cached = draw("prefix hit", 0, prompt - 1)
    ever_computed = [True] * in_cache  # by position, of the tokens that stand there now
    preemptions = 0
    while request.generated < limit:
        if request.passes and preemptions < 3 and draw("preempt", 0, 3) == 0:
            preemptions += 1
            in_cache = draw("prefix hit after preemption", 0, prompt - 1)
            # Others may have computed more of the same prompt meanwhile: those tokens are cached, too.
            for _ in range(len(ever_computed), in_cache):
                ever_computed.append(True)
                request.cached += 1
        pending = len(known) - in_cache
        fed = pending if draw("whole", 0, 1) else draw("chunk", 1, pending)
        reaches_newest = fed == pending
        room = limit - request.generated - 1
        drafted = draw("drafts", 0, min(3, room)) if drafts and reaches_newest else 0
        labels: list[str] = []
        again = 0
        for token in (*known[in_cache : in_cache + fed], *["draft"] * drafted):
            position = in_cache + len(labels)
            was_computed = position < len(ever_computed)
            again += was_computed
            labels.append("prefill" if token == "prompt" or was_computed else "decode")
        past, mark = in_cache, len(ever_computed)
        in_cache += fed
        accepted = 0
        if reaches_newest:
            accepted = draw("accepted", 0, drafted)
            in_cache += accepted
            # The accepted drafts, and the token sampled behind them, which nobody has computed yet.
            known += ["generated"] * (accepted + 1)
            request.generated += accepted + 1
        # Rejected drafts leave nothing behind: what will stand at their positions was never computed.
        ever_computed += [True] * (in_cache - len(ever_computed))
        request.passes.append(
            Pass(past, fed + drafted, mark, labels, again, rejected=drafted - accepted)
        )
    return request


@st.composite
def requests(draw: st.DrawFn, *, drafts: bool = True, min_new: int = 1) -> Simulated:
    """A request with random chunks, prefix hits, preemptions and drafts."""
    return serve(
        draw(st.integers(1, 12), label="prompt"),
        draw(st.integers(min_new, 8), label="new tokens"),
        lambda what, low, high: draw(st.integers(low, high), label=what),
        drafts=drafts,
    )


@given(request=requests())
def test_simulated_requests_are_labelled_token_by_token(request: Simulated) -> None:
    for one in request.passes:
        tokens = split(prompt=request.prompt, past=one.past, query=one.query, computed=one.computed)
        assert tokens.prefill == one.labels.count("prefill")
        assert tokens.decode == one.labels.count("decode")
        assert tokens.recomputed == one.again
        # Prefill tokens come first: a label needs no more than a count.
        assert one.labels == sorted(one.labels, reverse=True)


@given(request=requests())
def test_simulated_requests_satisfy_the_invariants(request: Simulated) -> None:
    assert check_invariants([request.tokens()]) == []


def test_the_simulator_against_a_request_by_hand() -> None:
    """A prompt of 5 with a hit of 2: a chunk, a preemption, the rest, then a verified draft of 2 and a last step."""
    answers = iter(
        [
            ("prefix hit", 2),
            ("whole", 0),
            ("chunk", 2),  # positions 2 and 3
            ("preempt", 0),
            ("prefix hit after preemption", 1),
            ("whole", 1),  # positions 1, 2 and 3 again, 4 for the first time
            ("drafts", 0),
            ("accepted", 0),
            ("preempt", 1),
            ("whole", 1),  # position 5, and drafts at 6 and 7, of which the first is accepted
            ("drafts", 2),
            ("accepted", 1),
            ("preempt", 1),
            ("whole", 1),  # position 7, with another token than the rejected draft
            ("drafts", 0),
            ("accepted", 0),
        ]
    )

    def draw(what: str, low: int, high: int) -> int:
        expected, value = next(answers)
        assert what == expected and low <= value <= high
        return value

    request = serve(5, 4, draw)
    assert [(one.past, one.query, one.computed, one.rejected) for one in request.passes] == [
        (2, 2, 2, 0),
        (1, 4, 4, 0),
        (5, 3, 5, 1),
        (7, 1, 7, 0),
    ]
    assert request.tokens() == RequestTokens(
        request_id="r",
        sequences=1,
        prompt_tokens=5,
        cached_tokens=2,
        recomputed_tokens=3,
        prefill_tokens=6,
        decode_tokens=4,
        rejected_tokens=1,
        output_tokens=4,
    )


@given(prompt=st.integers(1, 12), data=st.data())
def test_one_new_token_has_no_decode(prompt: int, data: st.DataObject) -> None:
    request = serve(prompt, 1, lambda what, low, high: data.draw(st.integers(low, high), what))
    tokens = request.tokens()
    assert (tokens.decode_tokens, tokens.output_tokens) == (0, 1)
    assert check_invariants([tokens]) == []


@given(data=st.data())
def test_swapped_labels_of_two_passes_are_reported(data: st.DataObject) -> None:
    request = data.draw(requests(drafts=False, min_new=2))
    pure = [one for one in request.passes if len(set(one.labels)) == 1]
    prefills = [one for one in pure if one.labels[0] == "prefill"]
    decodes = [one for one in pure if one.labels[0] == "decode"]
    assume(prefills and decodes)
    first, second = data.draw(st.sampled_from(prefills)), data.draw(st.sampled_from(decodes))
    # Passes of one length cannot be told apart by sums.
    moved = first.query - second.query
    assume(moved)
    tokens = request.tokens()
    swapped = replace(
        tokens,
        prefill_tokens=tokens.prefill_tokens - moved,
        decode_tokens=tokens.decode_tokens + moved,
    )
    broken = check_invariants([swapped])
    assert len(broken) == 2
    assert "prefill tokens" in broken[0] and "decode tokens" in broken[1]


@given(request=requests(), lost=st.sampled_from(["prefill_tokens", "decode_tokens"]))
def test_a_lost_token_is_reported(request: Simulated, lost: str) -> None:
    tokens = request.tokens()
    count = getattr(tokens, lost)
    assume(count)
    broken = check_invariants([replace(tokens, **{lost: count - 1})])
    assert len(broken) == 1
    assert broken[0].startswith("request r: ")


def test_a_broken_identity_is_said_in_figures() -> None:
    """Two beams of a prompt of 9 with 2 cached, 3 recomputed, 4 new tokens a beam, and two rejected drafts."""
    good = RequestTokens(
        request_id="g1.r0",
        sequences=2,
        prompt_tokens=9,
        cached_tokens=2,
        recomputed_tokens=3,
        prefill_tokens=17,
        decode_tokens=8,
        rejected_tokens=2,
        output_tokens=8,
    )
    assert check_invariants([good]) == []
    bad = replace(good, prefill_tokens=16, decode_tokens=9)
    assert check_invariants([good, bad]) == [
        "request g1.r0: 16 prefill tokens, but prompt - cached + recomputed = 17",
        "request g1.r0: 7 decode tokens kept, but generated - one per sequence = 6",
    ]


@pytest.mark.parametrize(
    ("next_past", "verified_before", "expected"),
    [
        # A prompt of 6, one token decoded, then 4 tokens on a cache of 7: the last sampled one and three drafts.
        pytest.param(11, False, ExtendOutcome(Phase.PREFILL, 0, 0, 11), id="kept: a new turn"),
        pytest.param(11, True, ExtendOutcome(Phase.DECODE, 3, 3, 6), id="kept, it verified before"),
        pytest.param(10, False, ExtendOutcome(Phase.DECODE, 3, 2, 6), id="one draft rejected"),
        pytest.param(9, False, ExtendOutcome(Phase.DECODE, 3, 1, 6), id="two drafts rejected"),
        pytest.param(8, False, ExtendOutcome(Phase.DECODE, 3, 0, 6), id="all drafts rejected"),
        pytest.param(8, True, ExtendOutcome(Phase.DECODE, 3, 0, 6), id="all rejected, once more"),
        # Nothing of the pass stayed: by the cache alone that is a verification that accepted nothing.
        pytest.param(7, False, ExtendOutcome(Phase.DECODE, 3, 0, 6), id="all of it taken back"),
        pytest.param(3, False, ExtendOutcome(Phase.DECODE, 3, 0, 6), id="more than it is gone"),
        # Somebody else went on with the cache, unseen.
        pytest.param(15, False, ExtendOutcome(Phase.PREFILL, 0, 0, 11), id="the cache has grown"),
    ],
)
def test_an_extend_is_settled_by_the_cache_that_follows(
    next_past: int, verified_before: bool, expected: ExtendOutcome
) -> None:
    outcome = settle_extend(
        prompt=6, past=7, query=4, next_past=next_past, verified_before=verified_before
    )
    assert outcome == expected


@given(
    past=st.integers(1, 30),
    query=st.integers(2, 9),
    rejected=st.integers(1, 9),
    prompt=st.integers(1, 30),
)
def test_what_stays_in_the_cache_was_accepted(
    past: int, query: int, rejected: int, prompt: int
) -> None:
    assume(rejected < query)
    outcome = settle_extend(
        prompt=min(prompt, past), past=past, query=query, next_past=past + query - rejected
    )
    assert outcome.phase is Phase.DECODE
    assert outcome.draft_tokens - outcome.accepted_tokens == rejected
