"""What transformers does in each mode, against passes written down by hand from the inputs.

Each case of `cases/hf_table.py` is run without and with the profiler: the output must be the same, the passes must be
those of the table, and the invariants of the contract must hold over the requests. docs/cases.md is the table.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hf_case import Case, check
from hf_page import RULES, Wrong, page
from hf_table import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"

#: What simpler rules get wrong, by the name of the case; filled as the cases run.
WRONG: dict[str, Wrong] = {}


@pytest.fixture(scope="module")
def rules() -> Any:
    """The sample that judges a trace by simpler rules."""
    path = ROOT / "samples" / "label_rules.py"
    spec = importlib.util.spec_from_file_location("label_rules", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # Its dataclasses look their module up.
        patch.setitem(sys.modules, "label_rules", module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, record: Any, rules: Any) -> None:
    if case.not_here:
        pytest.skip(case.not_here)
    trace = check(case, record)
    counts = dict.fromkeys(RULES, 0)
    for judged in rules.judge(trace):
        for rule, prefill in judged.by_rule.items():
            counts[rule] += judged.label(prefill) != judged.phase
    WRONG[case.name] = counts


def test_the_page_shows_every_case(request: pytest.FixtureRequest) -> None:
    if len(WRONG) < len(CASES):
        pytest.skip("the page is compared where every case has run before it")
    made = page(WRONG)
    if request.config.getoption("--update-golden") and PAGE.read_text(encoding="utf-8") != made:
        PAGE.write_text(made, encoding="utf-8")
        pytest.fail("docs/cases.md was rewritten: look at the difference, then run again")
    assert PAGE.read_text(encoding="utf-8") == made


def test_the_table_can_be_published() -> None:
    """Names are unique, and each case says in one sentence what it shows."""
    assert len(CASES) >= 60
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [
        case.name for case in CASES if not case.says.endswith(".") or len(case.says) > 110
    ] == []
