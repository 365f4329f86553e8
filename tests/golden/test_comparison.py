"""Comparisons as text and as Markdown, compared exactly: the figures come from constructed runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from comparisons import quietly, run, sample
from traces import META, model

from phaseprof.analyzers.comparing.rules import parse
from phaseprof.cli.render.comparison import render
from phaseprof.cli.render.comparison_markdown import render_markdown

Golden = Callable[[str, str], None]

RULES = tuple(
    parse(text)
    for text in (
        "decode.tpot_ms.p50 > +1%",
        "requests.ttft_ms.p50 > 200ms",
        "decode.mbu < -3%",
        "decode.joules_per_token > +5%",
    )
)
NEWER = replace(
    META,
    versions={"transformers": "5.30.0", "torch": "2.14.0"},
    models=(replace(model(), attn_implementation="eager"),),
)
BASE = sample(run(1, repeats=16, profiled=True), name="runs/base")
SLOWER = sample(
    run(2, repeats=16, decode=1.12, profiled=True), NEWER, name="runs/new-attention", side=1
)
FASTER = sample(run(3, repeats=4, decode=0.7), name="runs/quantized", side=2)
LONGER = sample(run(4, prompt=1024, prefill=2.0), name="runs/longer", side=1)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_two_traces(width: int, golden: Golden) -> None:
    text = render(
        [quietly(BASE, SLOWER, rules=RULES)],
        [BASE.report, SLOWER.report],
        width=width,
        rules_from="pyproject.toml",
    )
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    golden(f"comparison-{width}.txt", text)


@pytest.mark.parametrize("width", [80, 160])
def test_several_traces(width: int, golden: Golden) -> None:
    others = (SLOWER, FASTER)
    text = render(
        [quietly(BASE, each, rules=RULES[:1]) for each in others],
        [each.report for each in (BASE, *others)],
        width=width,
    )
    assert max(map(len, text.splitlines())) <= width
    golden(f"comparison-several-{width}.txt", text)


def test_what_does_not_compare(golden: Golden) -> None:
    text = render([quietly(BASE, LONGER)], [BASE.report, LONGER.report], width=80)
    golden("comparison-part.txt", text)


def test_every_figure(golden: Golden) -> None:
    batches = [sample(run(n, batches=(1, 16)), name=f"run-{n}", side=n) for n in (0, 1)]
    text = render(
        [quietly(*batches)], [each.report for each in batches], width=100, everything=True
    )
    golden("comparison-all.txt", text)


def test_a_stream_that_takes_ascii_alone() -> None:
    text = render([quietly(BASE, SLOWER)], [BASE.report, SLOWER.report], width=80, unicode=False)
    assert text.isascii()


def test_colours_are_those_of_the_terminal() -> None:
    text = render([quietly(BASE, SLOWER)], [BASE.report, SLOWER.report], width=80, color=True)
    assert "\x1b[31mworse" in text


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    hostile = replace(
        META,
        models=(replace(model(name="m\x1b[31mred\x07\x9b2J"), attn_implementation="\x1b]0;x"),),
    )
    other = sample(run(2), hostile, name="b\x1bc", side=1)
    text = render([quietly(BASE, other)], [BASE.report, other.report], width=80)
    assert not any((ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 for char in text)
    assert "[31mred" in text


def test_a_pull_request(golden: Golden) -> None:
    found = quietly(BASE, SLOWER, rules=RULES)
    text = render_markdown([found], [BASE.report, SLOWER.report], failed=True)
    golden("comparison.md", text.rstrip("\n"))
