"""Which columns the phase table has, and which it gives up first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phaseprof.analyzers.results import (
    Bound,
    Confidence,
    PhaseFigures,
    Roof,
    SetAside,
    Verdict,
)
from phaseprof.cli.render.phase_table import phase_table
from phaseprof.phases import Phase

FIGURES = PhaseFigures(
    phase=Phase.DECODE,
    passes=504,
    sequences_per_pass=1.0,
    prefill_tokens=0,
    decode_tokens=504,
    padding_tokens=0,
    recomputed_tokens=0,
    cached_tokens=0,
    tokens=504,
    span_ms=27_010.0,
    pass_ms_p50=53.4,
    pass_ms_p90=55.0,
    pass_ms_p99=60.8,
    between_ms=None,
    busy_ms=None,
    share=0.818,
    prompt_tokens_per_s=None,
    output_tokens_per_s=18.66,
    flops=1,
    weight_bytes=1,
    kv_read_bytes=1,
    kv_write_bytes=1,
    tflops=0.00526,
    gb_per_s=10.51,
    intensity=0.5003,
    mfu=0.0199,
    mbu=0.5503,
    weight_byte_share=0.955,
    attention_flop_share=0.041,
    verdict=Verdict(Bound.BANDWIDTH, Confidence.HIGH, Roof.BANDWIDTH, 0.5503, (), ""),
)
EVERYTHING = replace(
    FIGURES, phase=Phase.MIXED, sequences_per_pass=4.5, busy_ms=20_000.0, prompt_tokens_per_s=100.0
)
#: What goes as the terminal narrows, in this order.
DROPPED = [
    ["pass", "p50"],
    ["FLOP/B"],
    ["TFLOP/s"],
    ["GB/s"],
    ["tokens"],
    ["passes"],
    ["batch"],
    ["busy"],
    ["prompt/s"],
    ["output/s"],
    ["MFU"],
    ["MBU"],
    ["share"],
]


def table(*figures: PhaseFigures, width: int = 200, aside: tuple[SetAside, ...] = ()) -> list[str]:
    phases = {f.phase.value: f for f in figures}
    return [line.plain for line in phase_table(phases, {}, aside, width)]


def titles(lines: list[str]) -> list[str]:
    return lines[0].split()


def test_a_plain_run_has_no_columns_without_values() -> None:
    shown = titles(table(FIGURES))
    assert "batch" not in shown
    assert "busy" not in shown
    assert "tok/s" in shown
    assert shown[-2:] == ["bound", "explained"]


def test_columns_come_with_their_values() -> None:
    shown = titles(table(EVERYTHING))
    assert {"batch", "busy", "prompt/s", "output/s"} <= set(shown)
    assert "tok/s" not in shown


def test_a_missing_figure_is_a_dash_and_a_missing_column_is_gone() -> None:
    unknown = Verdict(Bound.UNKNOWN, Confidence.LOW, None, None, (), "")
    bare = replace(FIGURES, phase=Phase.PREFILL, tflops=None, mfu=None, mbu=None, verdict=unknown)
    lines = table(bare, replace(FIGURES, mfu=None))
    shown = titles(lines)
    assert "MFU" not in shown
    assert lines[1].count("\N{EN DASH}") == 2  # TFLOP/s and MBU, which decode has
    assert lines[1].rstrip().endswith("unknown")


@pytest.mark.parametrize("given_up", range(len(DROPPED) + 1))
def test_columns_are_given_up_in_order(given_up: int) -> None:
    """There is a width for each step at which exactly the first so many columns are gone."""
    everything = titles(table(EVERYTHING, width=300))
    expected = list(everything)
    for words in DROPPED[:given_up]:
        for word in words:
            expected.remove(word)
    seen = [titles(table(EVERYTHING, width=width)) for width in range(30, 180)]
    assert expected in seen


def test_no_line_is_wider_than_asked() -> None:
    aside = (SetAside("first", 3, 12.0), SetAside("compile", 12, 90_000.0))
    for width in range(48, 160):
        for line in table(FIGURES, EVERYTHING, width=width, aside=aside):
            assert len(line.rstrip()) <= width, width


def test_what_was_left_out_is_named() -> None:
    *_, last = table(FIGURES, width=70)
    assert last == "  Left out at 70 columns: tokens, TFLOP/s, GB/s, FLOP/B."


def test_set_aside_passes_stand_under_their_columns() -> None:
    head, decode, warm, failed = table(
        FIGURES, width=120, aside=(SetAside("requested", 2, 805.0), SetAside("error", 1, 2.0))
    )
    for line, passes, time in (
        (decode, "504", "27.0 s"),
        (warm, "2", "805 ms"),
        (failed, "1", "2.00 ms"),
    ):
        assert line[: head.index("passes") + 6].endswith(f" {passes}")
        assert line[: head.index("time") + 4].endswith(f" {time}")
    assert warm.endswith("  not counted above")
    assert failed.endswith("  not counted above: ended by an exception")


def test_set_aside_passes_keep_their_number_on_a_narrow_terminal() -> None:
    lines = table(FIGURES, width=50, aside=(SetAside("requested", 1, 805.0),))
    assert any(line.endswith("1 pass, not counted above") for line in lines)


def test_only_set_aside_passes_still_make_a_table() -> None:
    (line,) = table(aside=(SetAside("requested", 2, 805.0),))
    assert line == "  warm-up  2 passes, not counted above"


def test_no_passes_no_table() -> None:
    assert table() == []
