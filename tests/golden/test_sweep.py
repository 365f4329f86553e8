"""The section on a sweep, compared exactly, on narrow and wide terminals; its figures are those of built traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sweeps import Cell, grid, sweep_trace

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Report
from phaseprof.cli.render.layout import to_ascii
from phaseprof.cli.render.sweep import sweep_section
from phaseprof.cli.render.terminal import render

Golden = Callable[[str, str], None]

#: A few percent of noise, the same in every run.
NOISE = (1.0, 1.02, 0.99, 1.01, 0.985, 1.015)


def steps(cell: Cell, repeat: int, number: int) -> float:
    """2.4 ms and a quarter of one for each sequence, more for a longer context; one step of one repeat is slow."""
    prompt, _, batch = cell
    slow = 40.0 if (prompt, batch, repeat, number) == (2_000, 4, 2, 3) else 0.0
    return (2.4 + 0.25 * batch * (1 + prompt / 1_000)) * NOISE[(repeat + batch) % 6] + slow


def prefill(cell: Cell, repeat: int) -> float:
    return (6.0 + 0.12 * cell[0] * cell[2]) * NOISE[(repeat + cell[0]) % 6]


def report() -> Report:
    cells = grid((128, 2_000), (9,), (1, 2, 4, 8, 16, 32))
    return build_report(sweep_trace(cells, steps, prefill, repeats=6))


def few() -> Report:
    return build_report(sweep_trace(grid((16,), (4,), (1, 4)), steps, prefill, repeats=2))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_section_is_laid_out_as_before(width: int, golden: Golden) -> None:
    plain = [line.plain.rstrip() for line in sweep_section(report().sweep, width)]
    assert max(map(len, plain)) <= width
    golden(f"sweep-{width}.txt", "\n".join(plain))


def test_two_batches_and_two_repeats(golden: Golden) -> None:
    lines = [line.plain.rstrip() for line in sweep_section(few().sweep, 100)]
    golden("sweep-few.txt", "\n".join(lines))


def test_a_stream_of_ascii_has_bars(golden: Golden) -> None:
    text = "\n".join(line.plain.rstrip() for line in sweep_section(report().sweep, 80))
    golden("sweep-ascii.txt", to_ascii(text))


def test_the_report_has_the_section_and_names_the_sizes() -> None:
    text = render(report(), width=120)
    assert "128/2,000 prompt + 9 new tokens, batch 1, 2, 4, 8, 16, 32" in " ".join(text.split())
    assert "Decode, 2,000 prompt + 9 new tokens" in text
    assert sweep_section(None, 80) == []
