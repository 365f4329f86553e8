"""Cases: drafts, guidance, and decoding functions of the user's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from flop_truth import CACHE
from hf_case import Case, Pass, Served, decode, mixed, prefill, verify
from hf_models import (
    counter,
    counter_and_skipper,
    counting,
    drafting,
    endless,
    generate,
    ids,
    llama,
)
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

#: 10, 11, … 18.
COUNT = torch.arange(10, 19).reshape(1, 9)


def draft(tokens: int, prompt: bool = False) -> Pass:
    return prefill(tokens, role="draft") if prompt else decode(tokens, role="draft")


def assisted(pair: Any, input_ids: torch.Tensor = COUNT, **kwargs: Any) -> Any:
    target, assistant = pair
    return generate(target, input_ids, assistant_model=assistant, min_new_tokens=None, **kwargs)


def lookup(model: Any, prompt: Sequence[int], new: int, **kwargs: Any) -> Any:
    """Drafts copied from where the last two tokens stood before."""
    return generate(
        model,
        torch.tensor([prompt]),
        max_new_tokens=new,
        min_new_tokens=None,
        prompt_lookup_num_tokens=3,
        max_matching_ngram_size=2,
        **kwargs,
    )


def lookup_turns(model: Any) -> Any:
    """A turn without drafts, then a new one on its cache, whose first pass verifies."""
    cache = DynamicCache(config=model.config)
    first = lookup(model, [10, 20, 30], 2, **{CACHE: cache})
    whole = torch.cat([first, torch.tensor([[10, 11, 12, 13, 10, 11]])], dim=1)
    mask = torch.ones_like(whole)
    # 32 was never fed: 32, 10, 11, 12, 13, 10, 11.
    given = whole[0, cache.get_seq_length() :].tolist()
    return first, lookup(model, given, 3, **{CACHE: cache}, attention_mask=mask)


@functools.cache
def early_exit() -> Any:
    return drafting(counting(), 2)


class Judge(LogitsProcessor):  # type: ignore[misc]  # its types are not followed
    """Asks a model about the sequence so far, and changes nothing."""

    def __init__(self, model: Any) -> None:
        self.judge = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.judge(input_ids, use_cache=False)
        return scores


def judged(model: Any, by: Callable[[Any], Any] = lambda model: model, **kwargs: Any) -> Any:
    judges = LogitsProcessorList([Judge(by(model))])
    return generate(model, ids(1, 5), max_new_tokens=3, logits_processor=judges, **kwargs)


@functools.cache
def stranger(model: Any) -> Any:
    return copy.deepcopy(model)


def own_decoding(
    model: Any, input_ids: torch.Tensor, generation_config: Any, **model_kwargs: Any
) -> torch.Tensor:
    """A prompt in two chunks, the second of one token; then greedy steps, the last token not fed."""
    cache = DynamicCache(config=model.config)
    chunks = [input_ids[:, :-1], input_ids[:, -1:]]
    for _ in range(3):
        for chunk in chunks:
            logits = model(chunk, **{CACHE: cache}).logits
        chunks = [logits[:, -1].argmax(dim=-1, keepdim=True)]
        input_ids = torch.cat([input_ids, *chunks], dim=1)
    return input_ids


def case(
    name: str,
    says: str,
    run: Callable[[Any], Any],
    passes: Sequence[Pass],
    *,
    group: str,
    make: Callable[[], Any],
    **more: Any,
) -> Case:
    return Case(name, group, says, make, run, passes, **more)


DRAFTS = [
    case(
        "a draft model that is wrong after fours",
        "The first pass verifies with the prompt (mixed); rejected drafts were computed, and are decode.",
        partial(assisted, max_new_tokens=8),
        [
            # 19, 20 and, wrongly, 22: two accepted, and 21 from the target.
            draft(9, prompt=True),
            draft(1),
            draft(1),
            verify(3, 2, prompt=9),
            # It is fed 20, which it had not computed, and 21: drafts 22, 23, 24, all accepted, and 25.
            draft(2),
            draft(1),
            draft(1),
            verify(3, 3),
            # One token is left, and no draft.
            decode(1),
        ],
        requests=[Served(9, 8)],
        group="drafts",
        make=counter_and_skipper,
    ),
    case(
        "assisted, ended by an accepted draft",
        "An end token among the drafts ends the request behind it.",
        partial(assisted, max_new_tokens=8, eos_token_id=20),
        [
            draft(9, prompt=True),
            draft(1),
            # It proposed 19 and the end token.
            verify(2, 1, prompt=9),
        ],
        requests=[Served(9, 2, finish="stop")],
        group="drafts",
        make=counter_and_skipper,
    ),
    case(
        "assisted, by sampling",
        "Drafts that are accepted by chance are the same passes: here each token is certain.",
        partial(assisted, max_new_tokens=4, do_sample=True),
        [
            draft(9, prompt=True),
            draft(1),
            draft(1),
            verify(3, 2, prompt=9),
            decode(1),
        ],
        requests=[Served(9, 4)],
        group="drafts",
        make=counter_and_skipper,
    ),
    case(
        "assisted, static cache",
        "A static cache is cropped by its count.",
        partial(assisted, max_new_tokens=4, cache_implementation="static"),
        [
            draft(9, prompt=True),
            draft(1),
            draft(1),
            verify(3, 2, prompt=9),
            decode(1),
        ],
        requests=[Served(9, 4)],
        group="drafts",
        make=counter_and_skipper,
        since=("5.24", "older versions refuse a static cache here"),
    ),
    case(
        "early exit: the model drafts with its first layer",
        "The same module drafts in a generate call of its own, within its own.",
        lambda m: generate(m, COUNT, max_new_tokens=6, min_new_tokens=None, assistant_early_exit=1),
        [
            draft(9, prompt=True),
            draft(1),
            verify(2, 2, prompt=9),
            draft(2),
            draft(1),
            verify(2, 2),
        ],
        requests=[Served(9, 6)],
        since=("5.24", "it calls its own draft model with an argument too few"),
        group="drafts",
        make=early_exit,
    ),
    case(
        "prompt lookup, partly right",
        "Drafts copied from the prompt need no draft model.",
        # 12, 13 and 20 followed 10, 11 before; the model says 12, 13, 14.
        partial(lookup, prompt=[10, 11, 12, 13, 20, 10, 11], new=5),
        [verify(3, 2, prompt=7), decode(1), decode(1)],
        requests=[Served(7, 5)],
        group="drafts",
        make=counter,
    ),
    case(
        "prompt lookup, nothing found",
        "A pass without drafts is prefill, and then decode.",
        partial(lookup, prompt=[10, 20, 30, 40], new=3),
        [prefill(4), decode(1), decode(1)],
        requests=[Served(4, 3)],
        group="drafts",
        make=counter,
    ),
    case(
        "prompt lookup, all wrong",
        "A first pass whose drafts are all rejected is mixed all the same.",
        partial(lookup, prompt=[10, 11, 30, 31, 32, 10, 11], new=2),
        [verify(3, 0, prompt=7), decode(1)],
        requests=[Served(7, 2)],
        group="drafts",
        make=counter,
    ),
    case(
        "prompt lookup on a kept cache",
        "A new turn whose first pass verifies: its prefix is cached.",
        lookup_turns,
        # 12, 13 and 10 are proposed; the model says 12, 13, 14.
        [prefill(3), decode(1), verify(3, 2, prompt=7, cached=4)],
        requests=[Served(3, 2), Served(11, 3, cached=4)],
        since=("5.24", "it looks for all tokens in those that are given"),
        group="drafts",
        make=counter,
    ),
]

GUESTS = [
    case(
        "guidance",
        "The unconditional sequence is prefilled with its own prompt (one token), then decoded.",
        lambda m: generate(m, ids(1, 5), max_new_tokens=3, guidance_scale=1.5),
        [prefill(5), prefill(1), decode(1), decode(1), decode(1), decode(1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "guidance with a negative prompt",
        "Its prompt is the negative one.",
        lambda m: generate(
            m, ids(1, 5), max_new_tokens=3, guidance_scale=1.5, negative_prompt_ids=ids(1, 8)
        ),
        [prefill(5), prefill(8), decode(1), decode(1), decode(1), decode(1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "guidance with padded negative prompts",
        "Padding of negative prompts is counted apart, too.",
        lambda m: generate(
            m,
            ids(2, 5),
            max_new_tokens=2,
            guidance_scale=1.5,
            negative_prompt_ids=ids(2, 4),
            negative_prompt_attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        ),
        [prefill(10), prefill(6, padding=2), decode(2), decode(2)],
        requests=[Served(5, 2), Served(5, 2)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "guidance with beams",
        "Each beam has an unconditional sequence.",
        lambda m: generate(m, ids(1, 5), max_new_tokens=2, guidance_scale=1.5, num_beams=2),
        [prefill(10), prefill(2), decode(2), decode(2)],
        requests=[Served(5, 4, sequences=2)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "guidance without a cache, prompts of one length",
        "Both sequences are computed again each time, and kept apart though their shapes are the same.",
        lambda m: generate(
            m,
            ids(1, 5),
            max_new_tokens=3,
            guidance_scale=1.5,
            use_cache=False,
            negative_prompt_ids=ids(1, 6),
        ),
        [prefill(5), prefill(6), mixed(5, 1), mixed(6, 1), mixed(6, 1), mixed(7, 1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "a processor that calls the same model",
        "What a logits processor computes is not the request's.",
        judged,
        [prefill(5), prefill(5), decode(1), mixed(5, 1), decode(1), mixed(6, 1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "a processor that calls the same model, no cache",
        "Not even where every shape is the same.",
        partial(judged, use_cache=False),
        [prefill(5), prefill(5), mixed(5, 1), mixed(5, 1), mixed(6, 1), mixed(6, 1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "a processor that calls another model",
        "Nor what another model computes.",
        partial(judged, by=stranger),
        [prefill(5), prefill(5), decode(1), mixed(5, 1), decode(1), mixed(6, 1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=llama,
    ),
    case(
        "a decoding function of the user's own",
        "generate hands its prompt to the function, so that a last chunk of one token is prefill.",
        lambda m: generate(m, ids(1, 5), max_new_tokens=3, custom_generate=own_decoding),
        [prefill(4), prefill(1), decode(1), decode(1)],
        requests=[Served(5, 3)],
        group="guests of generate",
        make=endless,
    ),
]

CASES = DRAFTS + GUESTS
