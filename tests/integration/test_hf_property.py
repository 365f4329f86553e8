"""Whatever is asked of generate: outputs stay identical, the identities of the contract hold, no slot is lost.

The other side of each comparison is read without the profiler: what the model is called with, by a hook of torch on the
model alone, and how many tokens each row got, by the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flop_truth import CACHE
from hf_case import Served, assert_same, check_trace, served
from hf_models import PAD, counter_and_skipper, generate, llama, sliding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from phaseprof.session import Session
from phaseprof.trace.reader import Trace, open_trace

#: Ends a row by chance: each is drawn by a random model now and then.
ENDS = list(range(3, 128, 4))
GROWS, STATIC, NONE, KEPT = "dynamic", "static", "no cache", "kept over turns"
PLAIN, LOOKUP, ASSISTED = "plain", "prompt lookup", "assisted"


@dataclass(frozen=True)
class Setting:
    """A call of generate, or two of them on one cache."""

    lengths: tuple[int, ...]
    new: int
    decoding: str = PLAIN
    cache: str = GROWS
    beams: int = 1
    returned: int = 1
    sample: bool = False
    chunk: int | None = None
    ends: bool = False
    slides: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Sequences that are computed for each prompt."""
        return max(self.beams, self.returned)


@st.composite
def plain_settings(draw: st.DrawFn) -> Setting:
    beams = draw(st.sampled_from([1, 1, 1, 2, 3]))
    sample = draw(st.booleans())
    cache = draw(st.sampled_from([GROWS, GROWS, STATIC, NONE, KEPT]))
    returned = draw(st.integers(1, 2 if sample else beams)) if cache != KEPT else 1
    # transformers 5.0 takes chunks with a cache that it is given, and that is empty.
    chunk = draw(st.one_of(st.none(), st.integers(1, 5))) if cache == GROWS else None
    return Setting(
        lengths=tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))),
        new=draw(st.integers(1, 5)),
        cache=cache,
        beams=1 if cache == KEPT else beams,
        returned=max(returned, 1) if beams == 1 else min(returned, beams),
        sample=sample,
        chunk=chunk,
        # A second turn begins behind what every row has got.
        ends=draw(st.booleans()) and cache != KEPT,
        slides=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def drafting_settings(draw: st.DrawFn) -> Setting:
    return Setting(
        lengths=(draw(st.integers(3, 9)),),
        new=draw(st.integers(1, 9)),
        decoding=draw(st.sampled_from([LOOKUP, ASSISTED])),
        sample=draw(st.booleans()),
        ends=draw(st.booleans()),
        seed=draw(st.integers(0, 7)),
    )


def model_of(setting: Setting) -> Any:
    if setting.decoding != PLAIN:
        # Of these the fate of drafts varies: some are accepted, some are not.
        return counter_and_skipper()[0]
    return sliding() if setting.slides else llama()


def prompt_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    width = max(setting.lengths)
    torch.manual_seed(setting.seed)
    shape = (len(setting.lengths), width)
    # Of few different ones, so that lookups find something; none of them ends a counter.
    tokens = torch.randint(40, 46 if setting.decoding != PLAIN else 128, shape)
    mask = torch.ones_like(tokens)
    for row, length in enumerate(setting.lengths):
        mask[row, : width - length] = 0
    return tokens * mask + PAD * (1 - mask), mask


def ends_of(setting: Setting) -> list[int] | None:
    if not setting.ends:
        return None
    return [47, 48] if setting.decoding != PLAIN else ENDS


def run(setting: Setting, model: Any) -> list[torch.Tensor]:
    """What each call gives."""
    tokens, mask = prompt_of(setting)
    kwargs: dict[str, Any] = {
        "max_new_tokens": setting.new,
        "min_new_tokens": None,
        "num_beams": setting.beams,
        "num_return_sequences": setting.returned,
        "do_sample": setting.sample,
        "eos_token_id": ends_of(setting) or 2,
    }
    if not setting.ends and setting.decoding == PLAIN:
        # A counter never says its end token; and transformers 5.0 refuses the argument with a draft model.
        kwargs["min_new_tokens"] = setting.new
    if setting.cache == NONE:
        kwargs["use_cache"] = False
    elif setting.cache == STATIC:
        kwargs["cache_implementation"] = "static"
    elif setting.cache == KEPT or setting.chunk is not None:
        kwargs[CACHE] = DynamicCache(config=model.config)
        kwargs["prefill_chunk_size"] = setting.chunk
    if setting.decoding == LOOKUP:
        kwargs["prompt_lookup_num_tokens"] = 3
    elif setting.decoding == ASSISTED:
        kwargs["assistant_model"] = counter_and_skipper()[1]
    first = generate(model, tokens, attention_mask=mask, **kwargs)
    if setting.cache != KEPT:
        return [first]
    more = torch.full((first.shape[0], 2), 50)
    whole = torch.cat([first, more], dim=1)
    longer = torch.cat([mask, torch.ones(mask.shape[0], setting.new + 2, dtype=mask.dtype)], dim=1)
    return [first, generate(model, whole, attention_mask=longer, **kwargs)]


@contextmanager
def shapes_of(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Rows and slots of each call of the model, seen by torch."""
    shapes: list[tuple[int, int]] = []

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["input_ids"]
        shapes.append(tuple(tokens.shape))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


def record(setting: Setting, model: Any, folder: Path) -> tuple[list[torch.Tensor], Trace]:
    session = Session(folder)
    session.start()
    try:
        output = run(setting, model)
    finally:
        session.stop()
    return output, open_trace(folder)


def expected_requests(setting: Setting, outputs: list[torch.Tensor]) -> list[Served]:
    """By the output: what each row got, its end token included. Beams are all as long as the search went on, which the
    output of the best of them does not tell: they are left to the identities."""
    width = max(setting.lengths)
    ends = ends_of(setting) or [2]
    requests = []
    for number, length in enumerate(setting.lengths):
        got = []
        for row in range(setting.rows):
            tokens = outputs[0][number * setting.rows + row, width:].tolist()
            stop = next((n for n, token in enumerate(tokens, 1) if token in ends), len(tokens))
            got.append(stop)
        finish = "length" if max(got) == setting.new else "stop"
        requests.append(Served(length, sum(got), sequences=setting.rows, finish=finish))
    if setting.cache == KEPT:
        # The last token of the first turn was not fed.
        kept = setting.new - 1
        requests += [
            Served(length + setting.new + 2, setting.new, cached=length + kept)
            for length in setting.lengths
        ]
    return requests


def hold(setting: Setting, folder: Path) -> None:
    model = model_of(setting)
    with shapes_of(model) as shapes:
        alone = run(setting, model)
    output, trace = record(setting, model, folder)
    assert_same(alone, output)
    check_trace(trace)
    rows = trace.passes.sort_by("pass_id").to_pylist()
    passes = [row for row in rows if row["role"] == "target"]
    # No slot is lost: each is a token of a sequence, or padding.
    assert [(row["sequences"], slots_of(row)) for row in passes] == [
        (rows, rows * query) for rows, query in shapes
    ]
    assert all(row["phase"] in ("prefill", "decode", "mixed") for row in rows)
    if setting.beams == 1:
        assert served(trace) == expected_requests(setting, alone)


def slots_of(row: dict[str, Any]) -> int:
    return int(sum(part["query"] for part in row["slices"]) + row["padding_tokens"])


BOUNDED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.filterwarnings("ignore")  # what these libraries warn of is not our subject
@settings(BOUNDED, max_examples=40)
@given(plain_settings())
def test_any_setting(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> None:
    hold(setting, tmp_path_factory.mktemp("any") / "trace")


@pytest.mark.filterwarnings("ignore")
@settings(BOUNDED, max_examples=20)
@given(drafting_settings())
def test_any_drafts(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> None:
    hold(setting, tmp_path_factory.mktemp("drafts") / "trace")
