"""Cases: what generate does with prompts, batches, caches and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from flop_truth import CACHE
from hf_case import Case, Pass, Served, decode, mixed, prefill
from hf_models import EOS, PAD, endless, generate, ids, llama, sliding, tiny
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer


def left_padded(model: Any, lengths: Sequence[int], **kwargs: Any) -> Any:
    """A batch of prompts of these lengths, padded on the left."""
    width = max(lengths)
    input_ids = ids(len(lengths), width)
    mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
        input_ids[row, : width - length] = PAD
    return generate(model, input_ids, attention_mask=mask, **kwargs)


def in_chunks(model: Any, length: int, chunk: int, new: int = 2) -> Any:
    """A prompt in chunks; transformers 5.0 wants a cache for that."""
    return generate(
        model,
        ids(1, length),
        max_new_tokens=new,
        prefill_chunk_size=chunk,
        **{CACHE: DynamicCache(config=model.config)},
    )


def padded_in_chunks(model: Any) -> Any:
    cache = {CACHE: DynamicCache(config=model.config)}
    return left_padded(model, [3, 7], max_new_tokens=2, prefill_chunk_size=3, **cache)


def ends_early(model: Any, **kwargs: Any) -> Any:
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
        **kwargs,
    )


def stops_alone(model: Any) -> Any:
    """One row that ends by itself after three tokens of ten."""

    def force(batch: int, sequence: torch.Tensor) -> list[int]:
        return [EOS] if sequence.shape[0] == 8 else [50]

    return generate(
        model, ids(1, 6), max_new_tokens=10, min_new_tokens=None, prefix_allowed_tokens_fn=force
    )


class FirstRowEnds(StoppingCriteria):  # type: ignore[misc]  # its types are not followed
    """Ends the first row at a length, and no other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        done[0] = input_ids.shape[1] >= self.length
        return done


def criterion(model: Any, rows: int) -> Any:
    return generate(
        model,
        ids(rows, 5),
        max_new_tokens=4,
        min_new_tokens=None,
        stopping_criteria=StoppingCriteriaList([FirstRowEnds(7)]),
    )


def kept_cache(model: Any, *, whole: bool, **kwargs: Any) -> Any:
    """Two turns on one cache: 6 tokens and 3 new; then 4 new tokens and 2 new.

    The cache then holds 8 of the first 9 tokens (the last one was never fed), so the second turn computes 5.
    """
    cache = DynamicCache(config=model.config)
    first = generate(model, ids(1, 6), max_new_tokens=3, **{CACHE: cache})
    turn = torch.cat([first, ids(1, 4)], dim=1)
    mask = torch.ones(1, turn.shape[1], dtype=torch.long)
    given = turn if whole else turn[:, cache.get_seq_length() :]
    second = generate(
        model, given, max_new_tokens=2, **{CACHE: cache}, attention_mask=mask, **kwargs
    )
    return first, second


def kept_padded_cache(model: Any) -> Any:
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


def streamed(model: Any) -> Any:
    streamer = Collect()
    out = generate(model, ids(1, 5), max_new_tokens=3, streamer=streamer)
    return out, torch.tensor(streamer.seen)


def fails_between_passes(model: Any) -> Any:
    """The streamer raises on the second token; the next call is as if nothing had been."""
    with pytest.raises(RuntimeError, match="client went away"):
        generate(model, ids(1, 5), max_new_tokens=6, streamer=Collect(fail_at=3))
    return generate(model, ids(1, 4), max_new_tokens=2)


def fails_inside_a_pass(model: Any) -> Any:
    """A token id beyond the vocabulary; the next call is as if nothing had been."""
    bad = ids(1, 5)
    bad[0, 2] = 9999
    with pytest.raises(IndexError):
        generate(model, bad, max_new_tokens=2)
    return generate(model, ids(1, 4), max_new_tokens=2)


def everything_returned(model: Any) -> Any:
    out = generate(
        model,
        ids(1, 5),
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    return out.sequences, list(out.scores), list(out.logits)


def embedded(model: Any, with_ids: bool = False, **kwargs: Any) -> Any:
    embeds = model.get_input_embeddings()(ids(1, 6)).detach()
    given = ids(1, 6) if with_ids else None
    return generate(model, given, inputs_embeds=embeds, max_new_tokens=3, **kwargs)


STEPS = [prefill(9), decode(1), decode(1)]


def case(
    name: str,
    says: str,
    run: Callable[[Any], Any],
    passes: Sequence[Pass],
    *,
    group: str = "prompts and batches",
    make: Callable[[], Any] = llama,
    **more: Any,
) -> Case:
    return Case(name, group, says, make, run, passes, **more)


def of(rows: int = 1, length: int = 9, new: int = 3, **kwargs: Any) -> Callable[[Any], Any]:
    """generate on so many rows of so many tokens."""
    return partial(generate, input_ids=ids(rows, length), max_new_tokens=new, **kwargs)


PROMPTS = [
    case(
        "greedy",
        "The prompt is prefill, each token fed back is decode; the last token is never fed.",
        of(),
        STEPS,
        requests=[Served(9, 3)],
    ),
    case("sampling", "How a token is drawn changes nothing.", of(do_sample=True, top_k=5), STEPS),
    case(
        "batch",
        "The tokens of all rows count.",
        of(3, 5),
        [prefill(15), decode(3), decode(3)],
        requests=[Served(5, 3)] * 3,
    ),
    case(
        "beams multiply sequences",
        "Each beam is computed, and counts: one request of four sequences.",
        of(1, 5, num_beams=4),
        [prefill(20), decode(4), decode(4)],
        requests=[Served(5, 12, sequences=4)],
    ),
    case(
        "beams over a batch",
        "Two requests of three beams each.",
        of(2, 5, 2, num_beams=3),
        [prefill(30), decode(6)],
        requests=[Served(5, 6, sequences=3)] * 2,
    ),
    case(
        "beam sampling",
        "Beams whose tokens are drawn at random.",
        of(1, 5, num_beams=2, do_sample=True),
        [prefill(10), decode(2), decode(2)],
    ),
    case(
        "several returned sequences",
        "Each returned sequence is computed, and counts.",
        of(1, 5, 2, do_sample=True, num_return_sequences=3),
        [prefill(15), decode(3)],
    ),
    case(
        "left padding",
        "Padding is counted apart: ten tokens in fourteen slots.",
        partial(left_padded, lengths=[3, 7], max_new_tokens=3),
        [prefill(10, padding=4), decode(2), decode(2)],
        requests=[Served(3, 3), Served(7, 3)],
    ),
    case(
        "left padding with beams",
        "Padding is multiplied by beams, too.",
        partial(left_padded, lengths=[3, 7], max_new_tokens=2, num_beams=2),
        [prefill(20, padding=8), decode(4)],
    ),
    case(
        "left padding, prefilled in chunks",
        "A chunk may hold padding alone for one row, and tokens for another.",
        padded_in_chunks,
        [prefill(3, padding=3), prefill(5, padding=1), prefill(2), decode(2)],
    ),
    case(
        "chunked prefill with a last chunk of one token",
        "The last chunk is prefill, although it is one token long.",
        partial(in_chunks, length=9, chunk=4, new=3),
        [prefill(4), prefill(4), prefill(1), decode(1), decode(1)],
    ),
    case(
        "chunked prefill, chunks of one token",
        "A prompt that is fed token by token is prefill to its end.",
        partial(in_chunks, length=3, chunk=1),
        [prefill(1), prefill(1), prefill(1), decode(1)],
    ),
    case(
        "one-token prompt",
        "A prompt of one token is prefill.",
        of(1, 1),
        [prefill(1), decode(1), decode(1)],
    ),
    case(
        "no prompt: the begin token alone",
        "Without a prompt the begin token is one.",
        partial(generate, input_ids=None, max_new_tokens=2),
        [prefill(1), decode(1)],
    ),
    case(
        "one new token: no decode",
        "A request of one output token has no decode pass.",
        of(new=1),
        [prefill(9)],
        requests=[Served(9, 1)],
    ),
    case(
        "embeddings instead of ids",
        "A prompt of embeddings is as long as they are.",
        embedded,
        [prefill(6), decode(1), decode(1)],
        requests=[Served(6, 3)],
    ),
    case(
        "embeddings with ids",
        "Ids that only accompany embeddings are not counted twice.",
        partial(embedded, with_ids=True),
        [prefill(6), decode(1), decode(1)],
    ),
    case(
        "embeddings with beams",
        "Embeddings are expanded to beams like ids.",
        partial(embedded, num_beams=2),
        [prefill(12), decode(2), decode(2)],
    ),
    case(
        "everything returned",
        "Scores, logits and hidden states that are asked for change no label.",
        everything_returned,
        [prefill(5), decode(1), decode(1)],
    ),
    case(
        "logits for the whole prompt",
        "So does the number of positions whose logits are computed.",
        of(1, 5, 2, logits_to_keep=0),
        [prefill(5), decode(1)],
    ),
]

ENDS = [
    case(
        "a row that ends early is padding",
        "What is computed for a row after its end token counts as padding.",
        ends_early,
        [prefill(12), decode(2), *[decode(1, padding=1)] * 3],
        requests=[Served(6, 2, finish="stop"), Served(6, 5)],
        group="ends",
    ),
    case(
        "a row that ends early, without a cache",
        "What is computed again for a row that has ended is padding, too.",
        partial(ends_early, use_cache=False),
        # 7 and 8 slots of the row that ended: all of them.
        [
            prefill(12),
            mixed(12, 2),
            mixed(7, 1, padding=8),
            mixed(8, 1, padding=9),
            mixed(9, 1, padding=10),
        ],
        requests=[Served(6, 2, finish="stop"), Served(6, 5)],
        group="ends",
    ),
    case(
        "stops by itself",
        "A request that ends before its limit was stopped.",
        stops_alone,
        [prefill(6), decode(1), decode(1)],
        requests=[Served(6, 3, finish="stop")],
        group="ends",
    ),
    case(
        "a stopping criterion",
        "A criterion of the user's own ends a request.",
        partial(criterion, rows=1),
        [prefill(5), decode(1)],
        requests=[Served(5, 2, finish="stop")],
        group="ends",
        make=endless,
    ),
    case(
        "a stopping criterion that ends one row of two",
        "The row that it ends is padding from then on, though no end token was fed.",
        partial(criterion, rows=2),
        [prefill(10), decode(2), *[decode(1, padding=1)] * 2],
        requests=[Served(5, 2, finish="stop"), Served(5, 4)],
        group="ends",
        make=endless,
    ),
    case(
        "a limit of time",
        "A limit of time that is not reached changes nothing.",
        of(max_time=1000.0),
        STEPS,
        group="ends",
    ),
    case(
        "streamer",
        "Tokens that are streamed are the same passes.",
        streamed,
        [prefill(5), decode(1), decode(1)],
        group="ends",
    ),
    case(
        "watermark",
        "A watermark changes logits, and no pass.",
        of(watermarking_config=WatermarkingConfig()),
        STEPS,
        group="ends",
    ),
    case(
        "exception between passes",
        "A streamer that raises aborts its request, and not the next.",
        fails_between_passes,
        [prefill(5), decode(1), prefill(4), decode(1)],
        requests=[Served(5, 2, finish="abort"), Served(4, 2)],
        complete=False,
        group="ends",
    ),
    case(
        "exception inside a pass",
        "A pass that raises is recorded, and its request is aborted.",
        fails_inside_a_pass,
        [prefill(5), prefill(4), decode(1)],
        requests=[Served(5, 0, finish="abort"), Served(4, 2)],
        complete=False,
        group="ends",
    ),
]

#: Heads wide enough to be quantized in groups.
wide = tiny(
    "LlamaForCausalLM",
    "LlamaConfig",
    hidden_size=128,
    num_attention_heads=2,
    num_key_value_heads=2,
)

CACHES = [
    case(
        "no cache",
        "Each pass computes everything again and one new token: mixed.",
        of(1, 5, use_cache=False),
        [prefill(5), mixed(5, 1), mixed(6, 1)],
        requests=[Served(5, 3)],
        group="caches",
    ),
    case(
        "no cache, batch of two",
        "The same for each row.",
        of(2, 5, 2, use_cache=False),
        [prefill(10), mixed(10, 2)],
        group="caches",
    ),
    case(
        "no cache, padded batch",
        "Padding that is computed again is padding again.",
        partial(left_padded, lengths=[2, 4], max_new_tokens=3, use_cache=False),
        [prefill(6, padding=2), mixed(6, 2, padding=2), mixed(8, 2, padding=2)],
        group="caches",
    ),
    case(
        "static cache",
        "A cache of fixed size is filled like one that grows.",
        of(cache_implementation="static"),
        STEPS,
        group="caches",
    ),
    case(
        "static cache, used again by the next call",
        "A static cache that generate keeps for the next call begins empty.",
        lambda m: [
            generate(m, ids(1, n), max_new_tokens=2, cache_implementation="static") for n in (9, 5)
        ],
        [prefill(9), decode(1), prefill(5), decode(1)],
        group="caches",
    ),
    case(
        "static cache, batch with padding",
        "Padding in a static cache is counted apart.",
        partial(left_padded, lengths=[2, 6], max_new_tokens=3, cache_implementation="static"),
        [prefill(8, padding=4), decode(2), decode(2)],
        group="caches",
    ),
    case(
        "static cache with beams",
        "Beams share a static cache.",
        of(1, 5, cache_implementation="static", num_beams=3),
        [prefill(15), decode(3), decode(3)],
        group="caches",
    ),
    case(
        "static cache, prefilled in chunks",
        "Chunks are counted by what the static cache holds.",
        of(1, 7, 2, cache_implementation="static", prefill_chunk_size=3),
        [prefill(3), prefill(3), prefill(1), decode(1)],
        group="caches",
        since=("5.24", "its chunks are longer than its static cache"),
    ),
    case(
        "sliding window",
        "What has slid out of the window was computed all the same.",
        of(),
        STEPS,
        group="caches",
        make=sliding,
    ),
    case(
        "sliding window, prefilled in chunks",
        "A window smaller than the prompt does not make its tokens new.",
        partial(in_chunks, length=7, chunk=3),
        [prefill(3), prefill(3), prefill(1), decode(1)],
        group="caches",
        make=sliding,
    ),
    case(
        "sliding window, static cache",
        "A static window that is full counts on.",
        of(cache_implementation="static"),
        STEPS,
        group="caches",
        make=sliding,
    ),
    case(
        "quantized cache",
        "A cache that quantizes what is old is as long as what went in.",
        of(
            new=4,
            cache_implementation="quantized",
            cache_config={"backend": "quanto", "q_group_size": 16, "residual_length": 4},
        ),
        [*STEPS, decode(1)],
        group="caches",
        make=wide,
    ),
    case(
        "a new turn, whole sequence given",
        "What a kept cache holds of the new turn is cached, and no work.",
        partial(kept_cache, whole=True),
        [prefill(6), decode(1), decode(1), prefill(5, cached=8), decode(1)],
        requests=[Served(6, 3), Served(13, 2, cached=8)],
        group="caches",
    ),
    case(
        "a new turn, only new tokens given",
        "The same when the caller passes new tokens alone.",
        partial(kept_cache, whole=False),
        [prefill(6), decode(1), decode(1), prefill(5, cached=8), decode(1)],
        requests=[Served(6, 3), Served(13, 2, cached=8)],
        since=("5.24", "it looks for all tokens in those that are given"),
        group="caches",
    ),
    case(
        "a new turn, prefilled in chunks",
        "The chunks of a new turn are prefill; the cached tokens are counted once.",
        partial(kept_cache, whole=True, prefill_chunk_size=2),
        [
            prefill(6),
            decode(1),
            decode(1),
            prefill(2, cached=8),
            prefill(2),
            prefill(1),
            decode(1),
        ],
        since=("5.24", "it feeds the cached tokens again, at the positions of others"),
        group="caches",
    ),
    case(
        "a new turn of a padded batch",
        "Cached slots that are padding are no cached tokens.",
        kept_padded_cache,
        # 6 slots are cached, two of them padding of the first row: 4 + 6 tokens; 4 new slots a row.
        [prefill(8, padding=2), decode(2), prefill(8, cached=10), decode(2)],
        group="caches",
    ),
]

CASES = PROMPTS + ENDS + CACHES
