"""What transformers does in each mode, against passes written down by hand from the inputs.

Each case is run without and with the profiler: the output must be the same, the passes must be those of the table, and
the invariants of the contract must hold over the requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.generation.streamers import BaseStreamer

from phaseprof.hooks.inputs import cache_of_output
from phaseprof.phases import RequestTokens, check_invariants

EOS, PAD, BOS = 2, 0, 1
#: transformers renamed the argument in 5.24.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)

# A pass: (phase, prefill, decode, cached, padding) in tokens.
Expected = tuple[str, int, int, int, int]
Run = Callable[[LlamaForCausalLM], Any]


def ids(rows: int, length: int) -> torch.Tensor:
    """Token ids that are none of the special ones."""
    return (torch.arange(rows * length).reshape(rows, length) * 37 + 11) % 250 + 3


def prefill(tokens: int, cached: int = 0, padding: int = 0) -> Expected:
    return ("prefill", tokens, 0, cached, padding)


def decode(tokens: int, padding: int = 0) -> Expected:
    return ("decode", 0, tokens, 0, padding)


def mixed(pre: int, dec: int) -> Expected:
    return ("mixed", pre, dec, 0, 0)


@dataclass(frozen=True)
class Case:
    """One way to use transformers, and the passes that follow from its inputs."""

    name: str
    run: Run
    passes: Sequence[Expected]
    #: The invariants speak of complete requests of generate calls.
    complete: bool = True


def generate(model: LlamaForCausalLM, input_ids: torch.Tensor | None, **kwargs: Any) -> Any:
    """Generate a fixed number of tokens: an end token is not drawn unless the case asks for it."""
    kwargs.setdefault("do_sample", False)
    kwargs.setdefault("min_new_tokens", kwargs.get("max_new_tokens"))
    torch.manual_seed(3)
    return model.generate(input_ids, **kwargs)


def left_padded(model: LlamaForCausalLM, lengths: Sequence[int], **kwargs: Any) -> Any:
    """A batch of prompts of these lengths, padded on the left."""
    width = max(lengths)
    input_ids = ids(len(lengths), width)
    mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
        input_ids[row, : width - length] = PAD
    return generate(model, input_ids, attention_mask=mask, **kwargs)


def ends_early(model: LlamaForCausalLM) -> Any:
    """Two rows; the first ends after two tokens, the second goes on to five."""

    def force(batch: int, sequence: torch.Tensor) -> list[int]:
        new = sequence.shape[0] - 6
        if batch == 0 and new == 1:
            return [EOS]
        return [40 + new]

    return generate(
        model,
        ids(2, 6),
        max_new_tokens=5,
        min_new_tokens=None,
        prefix_allowed_tokens_fn=force,
    )


def stops_alone(model: LlamaForCausalLM) -> Any:
    """One row that ends by itself after three tokens of ten."""

    def force(batch: int, sequence: torch.Tensor) -> list[int]:
        return [EOS] if sequence.shape[0] == 8 else [50]

    return generate(
        model, ids(1, 6), max_new_tokens=10, min_new_tokens=None, prefix_allowed_tokens_fn=force
    )


def kept_cache(model: LlamaForCausalLM, *, whole: bool) -> Any:
    """Two turns on one cache: 6 tokens and 3 new; then 4 new tokens and 2 new.

    The cache then holds 8 of the first 9 tokens (the last one was never fed), so the second turn computes 5.
    """
    cache = DynamicCache(config=model.config)
    first = generate(model, ids(1, 6), max_new_tokens=3, **{CACHE: cache})
    turn = torch.cat([first, ids(1, 4)], dim=1)
    mask = torch.ones(1, turn.shape[1], dtype=torch.long)
    given = turn if whole else turn[:, cache.get_seq_length() :]
    second = generate(model, given, max_new_tokens=2, **{CACHE: cache}, attention_mask=mask)
    return first, second


def kept_padded_cache(model: LlamaForCausalLM) -> Any:
    """Two turns of a padded batch on one cache; both rows get 3 new tokens in the second turn."""
    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    first = generate(
        model, ids(2, 5) * mask, max_new_tokens=2, **{CACHE: cache}, attention_mask=mask
    )
    turn = torch.cat([first, ids(2, 3)], dim=1)
    longer = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
    second = generate(model, turn, max_new_tokens=2, **{CACHE: cache}, attention_mask=longer)
    return first, second


class Collect(BaseStreamer):  # type: ignore[misc]  # its types are not followed
    """Takes what is streamed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.seen = 0
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        self.seen += 1
        if self.seen == self.fail_at:
            raise RuntimeError("the client went away")

    def end(self) -> None:
        self.seen += 100


def streamed(model: LlamaForCausalLM) -> Any:
    streamer = Collect()
    out = generate(model, ids(1, 5), max_new_tokens=3, streamer=streamer)
    return out, torch.tensor(streamer.seen)


def fails_between_passes(model: LlamaForCausalLM) -> Any:
    """The streamer raises on the second token; the next call is as if nothing had been."""
    with pytest.raises(RuntimeError, match="client went away"):
        generate(model, ids(1, 5), max_new_tokens=6, streamer=Collect(fail_at=3))
    return generate(model, ids(1, 4), max_new_tokens=2)


def fails_inside_a_pass(model: LlamaForCausalLM) -> Any:
    """A token id beyond the vocabulary; the next call is as if nothing had been."""
    bad = ids(1, 5)
    bad[0, 2] = 9999
    with pytest.raises(IndexError):
        generate(model, bad, max_new_tokens=2)
    return generate(model, ids(1, 4), max_new_tokens=2)


def step(model: LlamaForCausalLM, tokens: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens, **{CACHE: cache}, **kwargs).logits
    return torch.as_tensor(logits[:, -1])


def loop(model: LlamaForCausalLM, chunks: Sequence[int], *, rows: int = 1) -> Any:
    """Feed chunks of tokens to one cache, by hand."""
    cache = DynamicCache(config=model.config)
    return [step(model, ids(rows, chunk), cache) for chunk in chunks]


def loop_returned_cache(model: LlamaForCausalLM) -> Any:
    """The model makes the cache and returns it."""
    with torch.no_grad():
        out = model(ids(1, 6), use_cache=True)
        logits = [out.logits[:, -1]]
        for _ in range(2):
            out = model(ids(1, 1), **{CACHE: cache_of_output(out)})
            logits.append(out.logits[:, -1])
    return logits


def loop_tuple(model: LlamaForCausalLM) -> Any:
    """return_dict=False: the cache comes in a tuple."""
    with torch.no_grad():
        first = model(ids(1, 6), use_cache=True, return_dict=False)
        second = model(ids(1, 1), **{CACHE: first[1]}, return_dict=False)
    return first[0], second[0]


def loop_verifies(model: LlamaForCausalLM) -> Any:
    """Prompt of 6, one step, then 4 tokens of which two drafts are rejected (the cache is cropped by 2), a step."""
    cache = DynamicCache(config=model.config)
    out = [step(model, ids(1, 6), cache), step(model, ids(1, 1), cache)]
    out.append(step(model, ids(1, 4), cache))
    cache.crop(-2)
    out.append(step(model, ids(1, 1), cache))
    return out


def loop_new_turn(model: LlamaForCausalLM) -> Any:
    """Prompt of 6, one step, a second prompt of 4 on the kept cache, a step."""
    return loop(model, [6, 1, 4, 1])


def loop_padded(model: LlamaForCausalLM) -> Any:
    """A padded batch by hand, with its mask."""
    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = [step(model, ids(2, 5) * mask, cache, attention_mask=mask)]
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    out.append(step(model, ids(2, 1), cache, attention_mask=longer))
    return out


def loop_without_cache(model: LlamaForCausalLM) -> Any:
    """Everything is computed again for each token, by hand."""
    with torch.no_grad():
        return [model(ids(1, n), use_cache=False).logits[:, -1] for n in (5, 6, 7)]


def loop_static(model: LlamaForCausalLM) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=16)
    return [step(model, ids(1, n), cache) for n in (5, 1, 1)]


def loop_goes_on_after_generate(model: LlamaForCausalLM) -> Any:
    """A hand-written step on the cache that a generate call filled with 6 + 2 tokens."""
    cache = DynamicCache(config=model.config)
    out = generate(model, ids(1, 6), max_new_tokens=3, **{CACHE: cache})
    return out, step(model, out[:, -1:], cache)


def cropped_prefix(model: LlamaForCausalLM) -> Any:
    """A prefix of 6 is kept, and two different suffixes of 3 are prefilled behind it."""
    cache = DynamicCache(config=model.config)
    out = [step(model, ids(1, 6), cache)]
    for shift in (0, 5):
        out.append(step(model, ids(1, 3) + shift, cache))
        out.append(step(model, ids(1, 1), cache))
        cache.crop(-4)
    return out


CASES = [
    Case(
        "greedy",
        lambda m: generate(m, ids(1, 9), max_new_tokens=3),
        [prefill(9), decode(1), decode(1)],
    ),
    Case(
        "sampling",
        lambda m: generate(m, ids(1, 9), max_new_tokens=3, do_sample=True, top_k=5),
        [prefill(9), decode(1), decode(1)],
    ),
    Case(
        "batch",
        lambda m: generate(m, ids(3, 5), max_new_tokens=3),
        [prefill(15), decode(3), decode(3)],
    ),
    Case(
        "beams multiply sequences",
        lambda m: generate(m, ids(1, 5), max_new_tokens=3, num_beams=4),
        [prefill(20), decode(4), decode(4)],
    ),
    Case(
        "beams over a batch",
        lambda m: generate(m, ids(2, 5), max_new_tokens=2, num_beams=3),
        [prefill(30), decode(6)],
    ),
    Case(
        "beam sampling",
        lambda m: generate(m, ids(1, 5), max_new_tokens=3, num_beams=2, do_sample=True),
        [prefill(10), decode(2), decode(2)],
    ),
    Case(
        "several returned sequences",
        lambda m: generate(m, ids(1, 5), max_new_tokens=2, do_sample=True, num_return_sequences=3),
        [prefill(15), decode(3)],
    ),
    Case(
        "left padding",
        lambda m: left_padded(m, [3, 7], max_new_tokens=3),
        [prefill(10, padding=4), decode(2), decode(2)],
    ),
    Case(
        "left padding with beams",
        lambda m: left_padded(m, [3, 7], max_new_tokens=2, num_beams=2),
        [prefill(20, padding=8), decode(4)],
    ),
    Case(
        "left padding, prefilled in chunks",
        lambda m: left_padded(m, [3, 7], max_new_tokens=2, prefill_chunk_size=3),
        [prefill(3, padding=3), prefill(5, padding=1), prefill(2), decode(2)],
    ),
    Case(
        "chunked prefill with a last chunk of one token",
        lambda m: generate(m, ids(1, 9), max_new_tokens=3, prefill_chunk_size=4),
        [prefill(4), prefill(4), prefill(1), decode(1), decode(1)],
    ),
    Case(
        "chunked prefill, chunks of one token",
        lambda m: generate(m, ids(1, 3), max_new_tokens=2, prefill_chunk_size=1),
        [prefill(1), prefill(1), prefill(1), decode(1)],
    ),
    Case(
        "one-token prompt",
        lambda m: generate(m, ids(1, 1), max_new_tokens=3),
        [prefill(1), decode(1), decode(1)],
    ),
    Case(
        "no prompt: the begin token alone",
        lambda m: generate(m, None, max_new_tokens=2),
        [prefill(1), decode(1)],
    ),
    Case(
        "one new token: no decode",
        lambda m: generate(m, ids(1, 9), max_new_tokens=1),
        [prefill(9)],
    ),
    Case(
        "no cache",
        lambda m: generate(m, ids(1, 5), max_new_tokens=3, use_cache=False),
        [prefill(5), mixed(5, 1), mixed(6, 1)],
    ),
    Case(
        "no cache, batch of two",
        lambda m: generate(m, ids(2, 5), max_new_tokens=2, use_cache=False),
        [prefill(10), mixed(10, 2)],
    ),
    Case(
        "static cache",
        lambda m: generate(m, ids(1, 9), max_new_tokens=3, cache_implementation="static"),
        [prefill(9), decode(1), decode(1)],
    ),
    Case(
        "static cache, used again by the next call",
        lambda m: [
            generate(m, ids(1, n), max_new_tokens=2, cache_implementation="static") for n in (9, 5)
        ],
        [prefill(9), decode(1), prefill(5), decode(1)],
    ),
    Case(
        "static cache, batch with padding",
        lambda m: left_padded(m, [2, 6], max_new_tokens=3, cache_implementation="static"),
        [prefill(8, padding=4), decode(2), decode(2)],
    ),
    Case(
        "embeddings instead of ids",
        lambda m: generate(
            m, None, inputs_embeds=m.get_input_embeddings()(ids(1, 6)), max_new_tokens=3
        ),
        [prefill(6), decode(1), decode(1)],
    ),
    Case(
        "embeddings with ids",
        lambda m: generate(
            m, ids(1, 6), inputs_embeds=m.get_input_embeddings()(ids(1, 6)), max_new_tokens=2
        ),
        [prefill(6), decode(1)],
    ),
    Case(
        "a row that ends early is padding",
        ends_early,
        [prefill(12), decode(2), decode(1, padding=1), decode(1, padding=1), decode(1, padding=1)],
    ),
    Case("stops by itself", stops_alone, [prefill(6), decode(1), decode(1)]),
    Case(
        "a new turn, whole sequence given",
        lambda m: kept_cache(m, whole=True),
        [prefill(6), decode(1), decode(1), prefill(5, cached=8), decode(1)],
    ),
    Case(
        "a new turn, only new tokens given",
        lambda m: kept_cache(m, whole=False),
        [prefill(6), decode(1), decode(1), prefill(5, cached=8), decode(1)],
    ),
    Case(
        "a new turn of a padded batch",
        kept_padded_cache,
        # 6 slots are cached, two of them padding of the first row: 4 + 6 tokens; 4 new slots a row.
        [prefill(8, padding=2), decode(2), prefill(8, cached=10), decode(2)],
    ),
    Case("streamer", streamed, [prefill(5), decode(1), decode(1)]),
    Case(
        "exception between passes",
        fails_between_passes,
        [prefill(5), decode(1), prefill(4), decode(1)],
        complete=False,
    ),
    Case(
        "exception inside a pass",
        fails_inside_a_pass,
        [prefill(5), prefill(4), decode(1)],
        complete=False,
    ),
    Case("by hand", lambda m: loop(m, [6, 1, 1]), [prefill(6), decode(1), decode(1)]),
    Case(
        "by hand, batch",
        lambda m: loop(m, [6, 1], rows=3),
        [prefill(18), decode(3)],
    ),
    Case(
        "by hand, chunks",
        lambda m: loop(m, [4, 4, 2, 1]),
        [prefill(4), prefill(4), prefill(2), decode(1)],
    ),
    Case(
        "by hand, the model makes the cache",
        loop_returned_cache,
        [prefill(6), decode(1), decode(1)],
    ),
    Case("by hand, tuples", loop_tuple, [prefill(6), decode(1)]),
    Case("by hand, a verification", loop_verifies, [prefill(6), decode(1), decode(4), decode(1)]),
    Case(
        "by hand, a new turn",
        loop_new_turn,
        [prefill(6), decode(1), prefill(4, cached=7), decode(1)],
    ),
    Case("by hand, padded", loop_padded, [prefill(8, padding=2), decode(2)]),
    Case("by hand, no cache", loop_without_cache, [prefill(5), mixed(5, 1), mixed(6, 1)]),
    Case("by hand, static cache", loop_static, [prefill(5), decode(1), decode(1)]),
    Case(
        "by hand after generate",
        loop_goes_on_after_generate,
        # Its six prompt tokens are cached.
        [prefill(6), decode(1), decode(1), ("decode", 0, 1, 6, 0)],
        complete=False,
    ),
    Case(
        "by hand, suffixes behind a kept prefix",
        cropped_prefix,
        [prefill(6), prefill(3), decode(1), prefill(3, cached=6), decode(1)],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, llama: LlamaForCausalLM, record: Any) -> None:
    """The passes are those of the table, and the output is what it is without the profiler."""
    alone = case.run(llama)
    recorded = record(lambda: case.run(llama))
    assert_same(alone, recorded.output)
    seen = recorded.passes(
        "phase", "prefill_tokens", "decode_tokens", "cached_tokens", "padding_tokens"
    )
    assert seen == list(case.passes)
    assert recorded.trace.damage == ()
    notes = [note for meta in recorded.trace.metas for note in meta.not_measured]
    assert notes == []
    if case.complete:
        assert check_invariants(request_tokens(recorded.trace)) == []


def assert_same(alone: Any, recorded: Any) -> None:
    """Bit-identical tensors in the same structure."""
    if isinstance(alone, torch.Tensor):
        assert torch.equal(alone, recorded)
        return
    assert len(alone) == len(recorded)
    for one, other in zip(alone, recorded, strict=True):
        assert_same(one, other)


def request_tokens(trace: Any) -> list[RequestTokens]:
    """Sum the slices of each request; the requests table gives the other side of the identities."""
    sums: dict[str, dict[str, int]] = {}
    for row in trace.passes.to_pylist():
        share = row["recomputed_tokens"] // row["sequences"]
        rejected = row["draft_tokens"] - (row["accepted_tokens"] or 0)
        for part in row["slices"]:
            total = sums.setdefault(
                part["request_id"], {"prefill": 0, "decode": 0, "recomputed": 0, "rejected": 0}
            )
            split = min(max(part["prompt"] + share - part["past"], 0), part["query"])
            if row["phase"] == "mixed":
                split = part["query"] - 1
            total["prefill"] += split
            total["decode"] += part["query"] - split
            total["recomputed"] += share
            total["rejected"] += rejected // row["sequences"]
    return [
        RequestTokens(
            request_id=row["request_id"],
            sequences=row["sequences"],
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            recomputed_tokens=sums[row["request_id"]]["recomputed"],
            prefill_tokens=sums[row["request_id"]]["prefill"],
            decode_tokens=sums[row["request_id"]]["decode"],
            rejected_tokens=sums[row["request_id"]]["rejected"],
            output_tokens=row["output_tokens"],
        )
        for row in trace.requests.to_pylist()
    ]
