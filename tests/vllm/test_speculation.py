"""Drafts of a real engine that looks them up in what it has (n-gram), against the engine's own count of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_engines import Recorded, counter, generate, make_engine, prompts, sampling, tokens_of

Record = Callable[[Callable[[], Any]], Recorded]

DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def drafting(llama_folder: Any) -> Any:
    """An engine that drafts three tokens by what followed the last one before."""
    return make_engine(
        llama_folder,
        max_num_batched_tokens=64,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )


def test_drafts_are_decode_and_what_was_accepted_is_counted(
    drafting: Any, record: Record, engine: Any
) -> None:
    inputs = prompts(20, 33, 7, first=3)
    before = counter(drafting, DRAFTED), counter(drafting, ACCEPTED)
    recorded = record(lambda: generate(drafting, inputs, sampling(24)))
    drafted = counter(drafting, DRAFTED) - before[0]
    accepted = counter(drafting, ACCEPTED) - before[1]
    assert tokens_of(recorded.output) == tokens_of(generate(engine, inputs, sampling(24)))

    assert recorded.sum("draft_tokens") == drafted
    # What the model gives beyond the last token that was asked for was accepted by the engine, and serves nobody: all
    # tokens that it gave are one for each request and step that samples, and the accepted drafts.
    steps = sum(part.past + part.query >= part.prompt for row in recorded.parts() for part in row)
    surplus = steps + accepted - 3 * 24
    assert recorded.sum("accepted_tokens") == accepted - surplus
    assert 0 < accepted < drafted, "the case is to have both"
    assert recorded.broken({"a": 24, "b": 24, "c": 24}, cached=0) == []

    # The same of each request: its own drafts, those that it kept, and it got one token more than it kept.
    got: dict[str, int] = {}
    for drafts, kept, slices in recorded.passes("draft_tokens", "accepted_tokens", "slices"):
        assert (drafts, kept) == tuple(sum(s[n] for s in slices) for n in ("drafts", "accepted"))
        for one in slices:
            assert one["query"] == (one["prompt"] if one["past"] == 0 else 1 + one["drafts"])
            got[one["request_id"]] = got.get(one["request_id"], 0) + 1 + one["accepted"]
    assert list(got.values()) == [24] * 3

    for phase, drafts, kept, decode, sequences, logits in recorded.passes(
        "phase", "draft_tokens", "accepted_tokens", "decode_tokens", "sequences", "logits_tokens"
    ):
        assert 0 <= kept <= drafts
        assert decode == (0 if phase == "prefill" else decode)
        assert logits == sequences + drafts
        if phase == "decode":
            assert decode == sequences + drafts


def test_a_rejected_draft_takes_its_position_back(drafting: Any, record: Record) -> None:
    """Each step begins where the one before left what was accepted."""
    recorded = record(lambda: generate(drafting, prompts(20, first=103), sampling(30)))
    rows = recorded.passes("draft_tokens", "accepted_tokens")
    parts = [row[0] for row in recorded.parts()]
    assert {part.phase for part in parts[1:]} == {"decode"}
    for (drafts, accepted), part, after in zip(rows, parts, parts[1:], strict=False):
        assert part.query == (part.prompt if part.past == 0 else 1 + drafts)
        assert after.past == part.past + part.query - (drafts - accepted)
    assert any(drafts > accepted for drafts, accepted in rows)
    assert recorded.sum("recomputed_tokens") == 0
