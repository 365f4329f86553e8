"""Batches of rows that advance together: padding, finished rows, growth without a cache, by hand-written numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.phases import Phase
from phaseprof.records import Slice
from phaseprof.sequences import Batch, Padding, PassTokens, request_ids, rows_of


def padding(*rows: str) -> Padding:
    """Masks as text: ``.`` is padding, anything else a token."""
    return Padding(tuple(bytes(slot != "." for slot in row) for row in rows))


def figures(tokens: PassTokens) -> tuple[str, int, int, int, int, int]:
    """(phase, prefill, decode, recomputed, padding, cached)."""
    return (
        tokens.phase.value,
        tokens.prefill,
        tokens.decode,
        tokens.recomputed,
        tokens.padding,
        tokens.cached,
    )


def run(batch: Batch, *passes: tuple[int, int], cached: bool = True) -> list[PassTokens]:
    """Divide and compute passes of (past, query) slots, one after another."""
    divided = []
    for past, query in passes:
        divided.append(batch.divide(past=past, query=query))
        batch.advance(past=past, query=query, cached=cached)
    return divided


def test_rows_without_padding_are_alike() -> None:
    batch = Batch(("a", "b", "c"), prompt=5)
    first, second = run(batch, (0, 5), (5, 1))
    assert figures(first) == ("prefill", 15, 0, 0, 0, 0)
    assert first.slices == tuple(Slice(name, Phase.PREFILL, 5, 0, 5) for name in "abc")
    assert figures(second) == ("decode", 0, 3, 0, 0, 0)
    assert second.slices == tuple(Slice(name, Phase.DECODE, 1, 5, 5) for name in "abc")
    assert (batch.end, batch.passes, batch.decoded) == (6, 2, True)


def test_left_padding() -> None:
    batch = Batch(("a", "b"), prompt=5, padding=padding("..xxx", "xxxxx"))
    first, second = run(batch, (0, 5), (5, 1))
    assert figures(first) == ("prefill", 8, 0, 0, 2, 0)
    assert first.slices == (
        Slice("a", Phase.PREFILL, query=3, past=0, prompt=3),
        Slice("b", Phase.PREFILL, query=5, past=0, prompt=5),
    )
    assert figures(second) == ("decode", 0, 2, 0, 0, 0)
    assert second.slices == (
        Slice("a", Phase.DECODE, query=1, past=3, prompt=3),
        Slice("b", Phase.DECODE, query=1, past=5, prompt=5),
    )
    assert [batch.prompt_tokens(row) for row in (0, 1)] == [3, 5]


def test_right_padding_and_padding_in_the_middle() -> None:
    batch = Batch(("a", "b"), prompt=6, padding=padding("xxx...", "x..xx."))
    first, second = run(batch, (0, 6), (6, 1))
    assert figures(first) == ("prefill", 6, 0, 0, 6, 0)
    assert [(part.query, part.past, part.prompt) for part in first.slices] == [(3, 0, 3), (3, 0, 3)]
    assert figures(second) == ("decode", 0, 2, 0, 0, 0)
    assert [(part.query, part.past) for part in second.slices] == [(1, 3), (1, 3)]


def test_chunks_cut_through_padding() -> None:
    """Prompts of 3 and 7 in chunks of 3 slots: 4 slots of padding lie in the first chunk and in the second."""
    batch = Batch(("a", "b"), prompt=7, padding=padding("....xxx", "xxxxxxx"))
    chunks = run(batch, (0, 3), (3, 3), (6, 1), (7, 1))
    assert [figures(one) for one in chunks] == [
        ("prefill", 3, 0, 0, 3, 0),
        ("prefill", 5, 0, 0, 1, 0),
        ("prefill", 2, 0, 0, 0, 0),
        ("decode", 0, 2, 0, 0, 0),
    ]
    # A row of which a chunk holds padding alone computes nothing in it.
    assert chunks[0].slices[0] == Slice("a", Phase.OTHER, query=0, past=0, prompt=3)
    assert [one.slices[0].past for one in chunks] == [0, 0, 2, 3]
    assert [one.slices[1].past for one in chunks] == [0, 3, 6, 7]


def test_a_pass_of_padding_alone_is_other() -> None:
    batch = Batch(("a",), prompt=4, padding=padding("..xx"))
    assert figures(batch.divide(past=0, query=2)) == ("other", 0, 0, 0, 2, 0)


def test_slots_beyond_the_mask_are_tokens() -> None:
    batch = Batch(("a",), prompt=3, padding=padding(".xx"))
    verified = batch.divide(past=3, query=4)
    assert figures(verified)[:5] == ("decode", 0, 4, 0, 0)
    assert padding(".xx").count(0, 3, 9) == 0
    assert padding(".x.").count(0, 2, 1) == 0


def test_a_mask_without_padding_has_none() -> None:
    assert padding("xx", "xx").any is False
    assert padding("xx", "x.").any is True
    # A mask may hold any number but 0 where a token is.
    assert Padding((bytes([7, 255, 0]),)).count(0, 0, 3) == 1


def test_cached_tokens_are_those_at_the_first_pass() -> None:
    """A prefix of 4 slots is cached; the first of them is padding of row b."""
    batch = Batch(("a", "b"), prompt=6, padding=padding("xxxxxx", ".xxxxx"))
    first, second = run(batch, (4, 2), (6, 1))
    assert figures(first) == ("prefill", 4, 0, 0, 0, 7)
    assert [(part.query, part.past, part.prompt) for part in first.slices] == [(2, 4, 6), (2, 3, 5)]
    assert second.cached == 0
    assert [batch.cached_tokens(row) for row in (0, 1)] == [4, 3]


def test_a_cache_that_holds_more_than_the_prompt() -> None:
    """A loop goes on where another one stopped: 9 slots are cached, 6 of them are prompt."""
    batch = Batch(("a", "b"), prompt=6)
    (first,) = run(batch, (9, 1))
    assert figures(first) == ("decode", 0, 2, 0, 0, 12)
    assert batch.cached_tokens(1) == 6


def test_a_padded_cache_that_holds_more_than_the_prompt() -> None:
    """Of 9 slots in the cache the first 6 were prompt, two of them padding of row a."""
    batch = Batch(("a", "b"), prompt=6, padding=padding("..xxxx", "xxxxxx"))
    (first,) = run(batch, (9, 1))
    assert figures(first) == ("decode", 0, 2, 0, 0, 10)


def test_a_batch_has_decoded_once_it_went_beyond_its_prompt() -> None:
    batch = Batch(("a",), prompt=5)
    run(batch, (0, 3), (3, 2))
    assert batch.decoded is False
    run(batch, (5, 1))
    assert batch.decoded is True


def test_finished_rows_are_padding() -> None:
    batch = Batch(("a", "b", "c"), prompt=5)
    run(batch, (0, 5), (5, 1))
    batch.finished.add(1)
    tokens = batch.divide(past=6, query=1)
    assert figures(tokens) == ("decode", 0, 2, 0, 1, 0)
    assert tokens.slices == (
        Slice("a", Phase.DECODE, query=1, past=6, prompt=5),
        Slice("b", Phase.OTHER, query=0, past=6, prompt=5),
        Slice("c", Phase.DECODE, query=1, past=6, prompt=5),
    )


def test_a_finished_row_with_padding() -> None:
    batch = Batch(("a", "b"), prompt=4, padding=padding("..xx", "xxxx"))
    run(batch, (0, 4))
    batch.finished.add(0)
    tokens = batch.divide(past=4, query=3)
    assert figures(tokens) == ("decode", 0, 3, 0, 3, 0)
    assert [(part.query, part.past) for part in tokens.slices] == [(0, 2), (3, 4)]


def test_growth_without_a_cache() -> None:
    """Every pass computes everything again and one token more."""
    batch = Batch(("a", "b"), prompt=5)
    passes = run(batch, (0, 5), (0, 6), (0, 7), cached=False)
    assert [figures(one) for one in passes] == [
        ("prefill", 10, 0, 0, 0, 0),
        ("mixed", 10, 2, 10, 0, 0),
        ("mixed", 12, 2, 12, 0, 0),
    ]
    assert [one.slices[1] for one in passes[1:]] == [
        Slice("b", Phase.MIXED, query=6, past=0, prompt=5, recomputed=5),
        Slice("b", Phase.MIXED, query=7, past=0, prompt=5, recomputed=6),
    ]


def test_growth_without_a_cache_and_with_padding() -> None:
    batch = Batch(("a", "b"), prompt=5, padding=padding("...xx", "xxxxx"))
    passes = run(batch, (0, 5), (0, 6), (0, 7), cached=False)
    assert [figures(one) for one in passes] == [
        ("prefill", 7, 0, 0, 3, 0),
        ("mixed", 7, 2, 7, 3, 0),
        ("mixed", 9, 2, 9, 3, 0),
    ]


def test_with_a_cache_nothing_is_computed_again() -> None:
    """After a verification the cache is cropped: the same slots are computed for other tokens."""
    batch = Batch(("a",), prompt=5)
    passes = run(batch, (0, 5), (5, 4), (6, 4))
    assert [figures(one)[:4] for one in passes] == [
        ("prefill", 5, 0, 0),
        ("decode", 0, 4, 0),
        ("decode", 0, 4, 0),
    ]
    assert batch.end == 10


def test_a_prompt_and_a_draft_in_one_pass() -> None:
    batch = Batch(("a", "b"), prompt=5, padding=padding(".xxxx", "xxxxx"))
    tokens = batch.divide(past=0, query=8)
    assert figures(tokens) == ("mixed", 9, 6, 0, 1, 0)
    assert tokens.slices[0] == Slice("a", Phase.MIXED, query=7, past=0, prompt=4)


def test_dividing_does_not_advance() -> None:
    batch = Batch(("a",), prompt=5)
    assert batch.divide(past=0, query=5) == batch.divide(past=0, query=5)
    assert (batch.end, batch.passes, batch.decoded) == (0, 0, False)


@pytest.mark.parametrize(
    ("forced", "prefill", "decode"),
    [
        (Phase.PREFILL, 8, 0),
        (Phase.DECODE, 0, 8),
        # Divided by position: three slots of each row lie in the prompt, one behind it.
        (Phase.MIXED, 6, 2),
        (Phase.ENCODE, 0, 0),
        (Phase.OTHER, 0, 0),
        (Phase.EXTEND, 0, 0),
    ],
)
def test_forced_labels(forced: Phase, prefill: int, decode: int) -> None:
    batch = Batch(("a", "b"), prompt=5, passes=1)
    tokens = batch.divide(past=2, query=4, forced=forced)
    assert figures(tokens) == (forced, prefill, decode, 0, 0, 0)
    assert tokens.slices == (Slice("a", forced, 4, 2, 5), Slice("b", forced, 4, 2, 5))


@pytest.mark.parametrize(
    ("forced", "prefill", "decode"),
    [
        (Phase.PREFILL, 9, 0),
        (Phase.DECODE, 0, 9),
        # Prompts of 2 and 5, and one token more in each row.
        (Phase.MIXED, 7, 2),
        (Phase.ENCODE, 0, 0),
        (Phase.OTHER, 0, 0),
        (Phase.EXTEND, 0, 0),
    ],
)
def test_forced_labels_leave_padding_alone(forced: Phase, prefill: int, decode: int) -> None:
    batch = Batch(("a", "b"), prompt=5, padding=padding("x...x", "xxxxx"))
    tokens = batch.divide(past=0, query=6, forced=forced)
    assert figures(tokens) == (forced, prefill, decode, 0, 3, 0)
    assert tokens.slices == (Slice("a", forced, 3, 0, 2), Slice("b", forced, 6, 0, 5))


def test_request_ids_of_beams() -> None:
    assert request_ids("p7.g2", 3) == ("p7.g2.r0", "p7.g2.r1", "p7.g2.r2")
    beams = request_ids("p7.g2", 6, 3)
    assert beams == ("p7.g2.r0",) * 3 + ("p7.g2.r1",) * 3
    assert rows_of(beams) == {"p7.g2.r0": [0, 1, 2], "p7.g2.r1": [3, 4, 5]}
    tokens = Batch(beams, prompt=4).divide(past=0, query=4)
    assert tokens.prefill == 24
    assert [part.request_id for part in tokens.slices] == list(beams)


masks = st.integers(1, 4).flatmap(
    lambda rows: st.integers(1, 8).flatmap(
        lambda slots: st.lists(
            st.lists(st.booleans(), min_size=slots, max_size=slots), min_size=rows, max_size=rows
        )
    )
)


@given(mask=masks, data=st.data())
def test_any_padding_and_any_chunks_are_a_walk_over_slots(
    mask: list[list[bool]], data: st.DataObject
) -> None:
    """Prompt slots in random chunks, then steps with rows that end at random, against a walk over single slots."""
    rows, slots = len(mask), len(mask[0])
    ids = tuple(f"r{row}" for row in range(rows))
    batch = Batch(ids, prompt=slots, padding=Padding(tuple(bytes(row) for row in mask)))
    past = data.draw(st.integers(0, slots - 1), "cached slots")
    first = True
    while past < slots + 3:
        room = slots - past if past < slots else 2
        query = data.draw(st.integers(1, room), "query")
        if past >= slots:
            batch.finished |= data.draw(st.sets(st.integers(0, rows - 1)), "ends")
        counts = {"prefill": 0, "decode": 0, "padding": 0, "cached": 0}
        for row in range(rows):
            for slot in range(past, past + query):
                token = slot >= slots or mask[row][slot]
                if not token or row in batch.finished:
                    counts["padding"] += 1
                else:
                    counts["prefill" if slot < slots else "decode"] += 1
            counts["cached"] += sum(mask[row][:past]) if first else 0
        tokens = batch.divide(past=past, query=query)
        assert (tokens.prefill, tokens.decode) == (counts["prefill"], counts["decode"])
        assert (tokens.padding, tokens.cached) == (counts["padding"], counts["cached"])
        assert tokens.recomputed == 0
        assert sum(part.query for part in tokens.slices) == tokens.prefill + tokens.decode
        batch.advance(past=past, query=query, cached=True)
        past += query
        first = False
