"""Numbers, units and shares as sentences spell them; roofline arithmetic; the table of thresholds in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import roofs

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.results import Bound, Roof
from phaseprof.analyzers.roofline import batch_cost_ratio, roof_times
from phaseprof.analyzers.wording import (
    count,
    data,
    duration,
    in_words,
    joined,
    number,
    percent,
    sentence,
    work,
)

CLASSES = Path(__file__).parents[2] / "docs" / "classes.md"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.54, "0.54"), (10.5, "10.5"), (3350.0, "3,350"), (0.0051234, "0.00512"), (999.7, "1,000"),
        (0.0000123, "0.000012"), (0.0, "0"), (12345678.0, "12,345,678"), (100.0, "100"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.55, "55 %"), (0.0, "0 %"), (1.0, "100 %"), (0.999, "over 99 %"), (0.994, "99 %"), (0.02, "2 %"),
        (0.004, "0.4 %"), (0.00001, "under 0.01 %"), (1.29, "129 %"),
    ],
)  # fmt: skip
def test_shares_never_round_to_a_whole(share: float, text: str) -> None:
    assert percent(share) == text


def test_units_suit_their_values() -> None:
    assert [duration(s) for s in (6.02, 1.0, 0.0536, 6.1e-6)] == [
        "6.02 s",
        "1 s",
        "53.6 ms",
        "6.1 µs",
    ]
    assert [data(b) for b in (0.54e9, 12.3e6, 4e3)] == ["0.54 GB", "12.3 MB", "4 kB"]
    assert [work(f) for f in (0.138e12, 270e6, 1.5e9)] == ["0.138 TFLOP", "0.27 GFLOP", "1.5 GFLOP"]


def test_words() -> None:
    assert [count(1, "pass"), count(504, "pass"), count(2000, "token")] == [
        "1 pass", "504 passes", "2,000 tokens",
    ]  # fmt: skip
    assert [in_words(8), in_words(12), in_words(32)] == ["eight", "twelve", "32"]
    assert [joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]
    assert sentence("a device") == "A device."


def test_roof_times_by_hand() -> None:
    times = roof_times(flops=3e9, moved_bytes=0.4e9, ceilings=roofs())
    assert times.compute_s == pytest.approx(3e-3)
    assert times.memory_s == pytest.approx(4e-3)
    assert times.nearest is Roof.BANDWIDTH
    assert times.floor_s == pytest.approx(4e-3)
    assert times.closeness == pytest.approx(0.75)


def test_a_larger_batch_shares_the_weights_only() -> None:
    # Now 1 + (2 + 1) ms; with four times the batch 4 + (2 + 4) ms.
    ratio = batch_cost_ratio(
        flops=1e9, fixed_bytes=0.2e9, per_sequence_bytes=0.1e9, factor=4, ceilings=roofs()
    )
    assert ratio == pytest.approx(10 / 4)


def test_the_docs_show_the_thresholds_that_are_used() -> None:
    assert thresholds.markdown() in CLASSES.read_text(encoding="utf-8")
    named = {v for v in vars(thresholds).values() if isinstance(v, thresholds.Threshold)}
    assert named == set(thresholds.ALL)


def test_the_docs_explain_every_class() -> None:
    headings = [
        line.removeprefix("## ").lower()
        for line in CLASSES.read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    ]
    for bound in Bound:
        assert bound.value in headings
