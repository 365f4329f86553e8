"""Cases: loops that somebody wrote by hand, without generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from flop_truth import CACHE
from hf_case import Case, Pass, Served, decode, mixed, other, prefill, verify
from hf_models import endless, generate, ids, llama, tiny
from transformers import DynamicCache, StaticCache

import phaseprof
from phaseprof.hooks.inputs import cache_of_output


def step(model: Any, tokens: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens, **{CACHE: cache}, **kwargs).logits
    return torch.as_tensor(logits[:, -1])


def loop(model: Any, chunks: Sequence[int], rows: int = 1, cache: Any = None) -> Any:
    """Feed chunks of tokens to one cache, by hand."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    return [step(model, ids(rows, chunk), cache) for chunk in chunks]


def returned_cache(model: Any) -> Any:
    """The model makes the cache and returns it."""
    with torch.no_grad():
        out = model(ids(1, 6), use_cache=True)
        logits = [out.logits[:, -1]]
        for _ in range(2):
            out = model(ids(1, 1), **{CACHE: cache_of_output(out)})
            logits.append(out.logits[:, -1])
    return logits


def tuples(model: Any) -> Any:
    """return_dict=False: the cache comes in a tuple."""
    with torch.no_grad():
        first = model(ids(1, 6), use_cache=True, return_dict=False)
        second = model(ids(1, 1), **{CACHE: first[1]}, return_dict=False)
    return first[0], second[0]


def crop(cache: DynamicCache, tokens: int) -> None:
    """Take tokens off its end; what a positive argument means has changed between versions."""
    cache.crop(-tokens)


def verifies(model: Any) -> Any:
    """Prompt of 6, one step, then 4 tokens of which two drafts are rejected (the cache is cropped by 2), a step; then 3
    tokens whose drafts are accepted, a step."""
    cache = DynamicCache(config=model.config)
    out = [step(model, ids(1, 6), cache), step(model, ids(1, 1), cache)]
    out.append(step(model, ids(1, 4), cache))
    crop(cache, 2)
    out.append(step(model, ids(1, 1), cache))
    out.append(step(model, ids(1, 3), cache))
    out.append(step(model, ids(1, 1), cache))
    return out


def padded(model: Any) -> Any:
    """A padded batch by hand, with its mask."""
    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = [step(model, ids(2, 5) * mask, cache, attention_mask=mask)]
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    out.append(step(model, ids(2, 1), cache, attention_mask=longer))
    return out


def without_cache(model: Any) -> Any:
    """Everything is computed again for each token, by hand."""
    with torch.no_grad():
        return [model(ids(1, n), use_cache=False).logits[:, -1] for n in (5, 6, 7)]


def static(model: Any) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=16)
    return loop(model, (5, 1, 1), cache=cache)


def goes_on_after_generate(model: Any) -> Any:
    """A hand-written step on the cache that a generate call filled with 6 + 2 tokens."""
    cache = DynamicCache(config=model.config)
    out = generate(model, ids(1, 6), max_new_tokens=3, **{CACHE: cache})
    return out, step(model, out[:, -1:], cache)


def suffixes(model: Any) -> Any:
    """A prefix of 6 is kept, and two different suffixes of 3 are prefilled behind it."""
    cache = DynamicCache(config=model.config)
    out = [step(model, ids(1, 6), cache)]
    for shift in (0, 5):
        out.append(step(model, ids(1, 3) + shift, cache))
        out.append(step(model, ids(1, 1), cache))
        crop(cache, 4)
    return out


def declared(model: Any) -> Any:
    """The last chunk has one token, which nothing but the user can tell from a step."""
    cache = DynamicCache(config=model.config)
    with phaseprof.phase("prefill", prompt_tokens=7):
        out = loop(model, (3, 3, 1), cache=cache)
    return out, step(model, ids(1, 1), cache)


def declared_other(model: Any) -> Any:
    with torch.no_grad(), phaseprof.phase("other"):
        return model(ids(1, 6)).logits


def trains_and_scores(model: Any) -> Any:
    """A step of training, one with a loss alone, and a prompt on the same model."""
    model.train()
    model(ids(1, 6)).logits.sum()
    model.eval()
    with torch.no_grad():
        loss = model(ids(1, 5), labels=ids(1, 5)).loss
    return loss, generate(model, ids(1, 4), max_new_tokens=2)


def trains_checkpointed(model: Any) -> Any:
    """Layers that are computed again in the backward pass are no passes."""
    model.train()
    model.gradient_checkpointing_enable()
    loss = model(ids(1, 6), labels=ids(1, 6)).loss
    loss.backward()
    model.zero_grad()
    model.gradient_checkpointing_disable()
    model.eval()
    return loss.detach()


def generates_in_training_mode(model: Any) -> Any:
    model.train()
    out = generate(model, ids(1, 4), max_new_tokens=2)
    model.eval()
    return out


def in_other_modes(model: Any) -> Any:
    """Under inference_mode and autocast."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = generate(model, ids(1, 4), max_new_tokens=2)
    return out.clone()


def classifies(model: Any) -> Any:
    with torch.no_grad():
        return model(ids(1, 6)).logits


def case(
    name: str,
    says: str,
    run: Callable[[Any], Any],
    passes: Sequence[Pass],
    *,
    group: str = "by hand",
    make: Callable[[], Any] = llama,
    **more: Any,
) -> Case:
    return Case(name, group, says, make, run, passes, **more)


LOOPS = [
    case(
        "by hand",
        "A prompt on an empty cache, then single tokens.",
        partial(loop, chunks=[6, 1, 1]),
        [prefill(6), decode(1), decode(1)],
        requests=[Served(6, 3, finish="unknown")],
    ),
    case(
        "by hand, batch",
        "The same with three rows.",
        partial(loop, chunks=[6, 1], rows=3),
        [prefill(18), decode(3)],
    ),
    case(
        "by hand, chunks",
        "Several tokens on a cache that has not been decoded from are one more chunk.",
        partial(loop, chunks=[4, 4, 2, 1]),
        [prefill(4), prefill(4), prefill(2), decode(1)],
        requests=[Served(10, 2, finish="unknown")],
    ),
    case(
        "by hand, the model makes the cache",
        "A cache that the first pass returns is followed from there.",
        returned_cache,
        [prefill(6), decode(1), decode(1)],
    ),
    case(
        "by hand, tuples",
        "A cache that comes in a tuple is found, too.",
        tuples,
        [prefill(6), decode(1)],
    ),
    case(
        "by hand, verifications",
        "A cache that was cropped shows that drafts were verified; later ones are then known as such.",
        verifies,
        [prefill(6), decode(1), verify(3, 1), decode(1), verify(2, 2), decode(1)],
        requests=[Served(6, 9, finish="unknown")],
    ),
    case(
        "by hand, a new turn",
        "A cache that was kept whole shows that a new turn began.",
        partial(loop, chunks=[6, 1, 4, 1]),
        [prefill(6), decode(1), prefill(4, cached=7), decode(1)],
        requests=[Served(6, 2, finish="unknown"), Served(11, 2, cached=7, finish="unknown")],
    ),
    case(
        "by hand, padded",
        "The mask of a hand-written pass shows its padding.",
        padded,
        [prefill(8, padding=2), decode(2)],
    ),
    case(
        "by hand, no cache",
        "A pass that is one token longer than the last computes that one again.",
        without_cache,
        [prefill(5), mixed(5, 1), mixed(6, 1)],
    ),
    case(
        "by hand, static cache",
        "A static cache is counted by its own length.",
        static,
        [prefill(5), decode(1), decode(1)],
    ),
    case(
        "by hand after generate",
        "A loop goes on where generate stopped, with the prompt of that call.",
        goes_on_after_generate,
        # Its six prompt tokens are cached.
        [prefill(6), decode(1), decode(1), decode(1, cached=6)],
        complete=False,
    ),
    case(
        "by hand, suffixes behind a kept prefix",
        "A prefix that is kept counts as cached for what is prefilled behind it.",
        suffixes,
        [prefill(6), prefill(3), decode(1), prefill(3, cached=6), decode(1)],
    ),
    case(
        "by hand, a label that the user gives",
        "phaseprof.phase says what nothing shows: a last chunk of one token.",
        declared,
        [prefill(3), prefill(3), prefill(1), decode(1)],
        requests=[Served(7, 2, finish="unknown")],
    ),
    case(
        "by hand, declared as other",
        "A pass that is said to be other serves no request.",
        declared_other,
        [other(6)],
        requests=[],
    ),
]

BESIDE = [
    case(
        "training and scoring beside inference",
        "Passes with gradients in training mode, or with labels, are other.",
        trains_and_scores,
        [other(6), other(5), prefill(4), decode(1)],
        requests=[Served(4, 2)],
        group="training and modes",
        make=endless,
    ),
    case(
        "gradient checkpointing",
        "Layers that are computed again for their gradients are no passes.",
        trains_checkpointed,
        [other(6)],
        requests=[],
        group="training and modes",
        make=endless,
    ),
    case(
        "generate in training mode",
        "A model left in training mode generates like any other.",
        generates_in_training_mode,
        [prefill(4), decode(1)],
        group="training and modes",
        make=endless,
    ),
    case(
        "inference_mode and autocast",
        "The modes of torch change no label.",
        in_other_modes,
        [prefill(4), decode(1)],
        group="training and modes",
        make=endless,
    ),
    case(
        "a decoder that classifies",
        "A decoder with a head for classes scores its text: other.",
        classifies,
        [other(6)],
        requests=[],
        group="training and modes",
        make=tiny("LlamaForSequenceClassification", "LlamaConfig"),
    ),
]

CASES = LOOPS + BESIDE
