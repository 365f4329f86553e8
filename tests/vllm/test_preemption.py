"""Preemption by a tiny KV cache: what is computed again is prefill, and recomputed; what was never computed is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from vllm_engines import Recorded, counter, generate, make_engine, prompts, sampling, tokens_of

Record = Callable[[Callable[[], Any]], Recorded]


@pytest.fixture(scope="module")
def cramped(llama_folder: Any) -> Any:
    """An engine with room for five blocks of 32 tokens, which keeps no prefixes."""
    return make_engine(
        llama_folder,
        num_gpu_blocks_override=6,
        max_model_len=128,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )


def test_a_preempted_request_computes_its_tokens_again(
    cramped: Any, record: Record, engine: Any
) -> None:
    """Two requests of 40 tokens need two blocks each, and a third at 64: one block is left, so the second must yield
    when both come to their 65th token."""
    inputs = prompts(40, 40, first=13)
    before = counter(cramped, "vllm:num_preemptions")
    recorded = record(lambda: generate(cramped, inputs, sampling(40)))
    assert counter(cramped, "vllm:num_preemptions") - before == 1
    assert tokens_of(recorded.output) == tokens_of(generate(engine, inputs, sampling(40)))

    parts = [part for row in recorded.parts() for part in row if part.request == "b"]
    (again,) = [n for n, part in enumerate(parts) if n and part.past == 0]
    # 64 positions were in the cache. All of them come again, with the token that was sampled last and never computed.
    assert (parts[again - 1].past, parts[again - 1].query) == (63, 1)
    assert (parts[again].phase, parts[again].query, parts[again].prompt) == ("mixed", 65, 40)
    assert {part.phase for part in parts[again + 1 :]} == {"decode"}
    index = [n for n, row in enumerate(recorded.parts()) if parts[again] in row]
    assert [
        recorded.passes("recomputed_tokens", "prefill_tokens", "decode_tokens")[n] for n in index
    ] == [(64, 64, 1)]
    assert recorded.sum("recomputed_tokens") == 64
    of_each = [[s["recomputed"] for s in row] for (row,) in recorded.passes("slices")]
    assert [sum(row) for row in of_each if any(row)] == [64]
    assert recorded.broken({"a": 40, "b": 40}, cached=0) == []


def test_a_preempted_request_finds_its_own_blocks(llama_folder: Any, record: Record) -> None:
    """With prefixes kept, two whole blocks of the second request are still there when the first has ended: nothing is
    computed again, what it finds of its own is not cached for it, and the token that comes is decode."""
    keeping = make_engine(
        llama_folder, num_gpu_blocks_override=6, max_model_len=128, max_num_batched_tokens=64
    )
    recorded = record(lambda: generate(keeping, prompts(40, 40, first=13), sampling(40)))
    assert counter(keeping, "vllm:num_preemptions") == 1
    parts = [part for row in recorded.parts() for part in row if part.request == "b"]
    assert [(part.phase, part.past, part.query) for part in parts] == [
        ("prefill", 0, 24),
        ("prefill", 24, 16),
        *[("decode", past, 1) for past in range(40, 79)],
    ]
    steps = [n for n, row in enumerate(recorded.parts()) if any(p.request == "b" for p in row)]
    (waited,) = [n for n, (one, after) in enumerate(pairwise(steps)) if after - one > 1]
    assert parts[waited + 1].past == 64
    assert (recorded.sum("recomputed_tokens"), recorded.sum("cached_tokens")) == (0, 0)
    assert recorded.broken({"a": 40, "b": 40}, cached=0) == []
