"""What transformers does in each mode, against passes written down by hand from the inputs.

Each case of `cases/hf_table.py` is run without and with the profiler: the output must be the same, the passes must be
those of the table, and the invariants of the contract must hold over the requests.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hf_case import Case, check
from hf_table import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, record: Any) -> None:
    if case.not_here:
        pytest.skip(case.not_here)
    check(case, record)


def test_the_table_can_be_published() -> None:
    """Names are unique, and each case says in one sentence what it shows."""
    assert len(CASES) >= 60
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [
        case.name for case in CASES if not case.says.endswith(".") or len(case.says) > 110
    ] == []
