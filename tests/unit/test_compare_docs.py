"""docs/compare.md: its workflow is the sample, and what it says of rules and figures is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phaseprof.analyzers.comparing.metrics import ALIASES, catalogue
from phaseprof.analyzers.comparing.resampling import DRAWS
from phaseprof.analyzers.comparing.rules import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
WORKFLOW = (ROOT / "samples" / "compare_in_ci.yml").read_text(encoding="utf-8")


def test_the_workflow_is_the_sample() -> None:
    assert f"```yaml\n{WORKFLOW}```\n" in PAGE


@pytest.mark.parametrize("text", [PAGE, WORKFLOW])
def test_every_rule_that_is_shown_is_one(text: str) -> None:
    rules = re.findall(r"[`'\"]((?:[\w.]+) [<>] [^`'\"]+)[`'\"]", text)
    assert len(rules) >= 2
    for rule in rules:
        parse(rule)


def test_every_alias_leads_to_a_figure_and_every_figure_is_named() -> None:
    for alias in ALIASES:
        parse(f"{alias} > +5%")
    for metric in catalogue():
        name = metric.name.split(".")[0]
        assert name in PAGE


def test_the_number_of_draws_is_the_one_that_is_said() -> None:
    assert f"with replacement, {DRAWS} times" in PAGE
