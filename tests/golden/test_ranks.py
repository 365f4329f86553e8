"""The section on ranks, compared exactly: the figures are made up by hand, the layout is what is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from phaseprof.analyzers.results import (
    Laggard,
    Parallelism,
    Percentiles,
    RankFigures,
    RanksReport,
    Skew,
)
from phaseprof.cli.render.ranks import ranks_section

Golden = Callable[[str, str], None]

RANK = RankFigures(
    rank=0,
    host="node-a",
    processes=1,
    restarts=0,
    ended=True,
    passes=504,
    tokens=4_600,
    span_ms=27_010.0,
    between_ms=178.0,
    busy_ms=None,
    prefill_ms_p50=751.6,
    decode_ms_p50=53.4,
    output_tokens_per_s=18.7,
    clock_drift_ms=0.02,
)
SLOW = replace(
    RANK,
    rank=1,
    span_ms=29_140.0,
    prefill_ms_p50=760.0,
    decode_ms_p50=58.2,
    output_tokens_per_s=17.3,
)
DATA = RanksReport(
    ranks=(RANK, SLOW),
    groups=((0,), (1,)),
    leaders=(0, 1),
    world_size=2,
    missing=(),
    hosts=("node-a",),
    output_tokens_per_s=36.0,
    skews=(
        Skew(
            kind=Parallelism.DATA,
            ranks=(0, 1),
            steps=502,
            start_ms=Percentiles(502, 1_044.0, 1_900.0, 2_080.0),
            duration_ms=Percentiles(502, 3.11, 9.4, 22.0),
            by_start=False,
            laggard=Laggard(1, 0.83, 2_130.0, 0.0731),
        ),
    ),
)
TENSOR = replace(
    DATA,
    ranks=(replace(RANK, busy_ms=22_400.0), replace(SLOW, busy_ms=23_100.0, span_ms=26_400.0)),
    groups=((0, 1),),
    leaders=(0,),
    output_tokens_per_s=18.7,
    skews=(
        Skew(
            kind=Parallelism.TENSOR,
            ranks=(0, 1),
            steps=502,
            start_ms=Percentiles(502, 0.412, 1.9, 6.2),
            duration_ms=Percentiles(502, 0.407, 1.88, 6.1),
            by_start=True,
            laggard=Laggard(1, 0.62, 310.0, 0.0115),
        ),
    ),
)


def grid() -> RanksReport:
    """Two hosts, each with a group of two; one rank was killed, and one was restarted before."""
    ranks = tuple(
        replace(RANK if rank % 2 == 0 else SLOW, rank=rank, host="node-a" if rank < 2 else "node-b")
        for rank in range(4)
    )
    ranks = (*ranks[:2], replace(ranks[2], restarts=1), replace(ranks[3], ended=False, restarts=2))
    (inner,) = TENSOR.skews
    (between,) = DATA.skews
    return replace(
        DATA,
        ranks=ranks,
        groups=((0, 1), (2, 3)),
        leaders=(0, 2),
        world_size=4,
        hosts=("node-a", "node-b"),
        skews=(
            inner,
            replace(inner, ranks=(2, 3), laggard=Laggard(2, 0.0, 0.0, 0.0)),
            replace(between, ranks=(0, 2), start_ms=None, laggard=Laggard(2, 0.5, 88.0, 0.003)),
        ),
    )


def over_hosts() -> RanksReport:
    """One model over two hosts: nothing is known of when its ranks begin."""
    (skew,) = TENSOR.skews
    return replace(
        TENSOR,
        ranks=(RANK, replace(SLOW, host="node-b")),
        hosts=("node-a", "node-b"),
        skews=(replace(skew, start_ms=None, by_start=False),),
    )


def many() -> RanksReport:
    """Sixty-four ranks on eight hosts, one of them killed; a prefill alone in each."""
    ranks = tuple(
        replace(
            RANK,
            rank=rank,
            host=f"node-{rank // 8}",
            between_ms=None,
            decode_ms_p50=None,
            output_tokens_per_s=None,
            prefill_ms_p50=700.0 + rank * 7 % 64,
            ended=rank != 40,
        )
        for rank in range(64)
    )
    (skew,) = TENSOR.skews
    return replace(
        DATA,
        ranks=ranks,
        groups=tuple(tuple(range(n, n + 8)) for n in range(0, 64, 8)),
        leaders=tuple(range(0, 64, 8)),
        world_size=64,
        hosts=tuple(f"node-{n}" for n in range(8)),
        output_tokens_per_s=None,
        skews=tuple(
            replace(
                skew,
                ranks=tuple(range(n, n + 8)),
                laggard=Laggard(n + 3, 0.31, 40.0 + n, 0.001 * n),
            )
            for n in range(0, 64, 8)
        ),
    )


CASES: dict[str, RanksReport] = {
    "ranks-data": DATA,
    "ranks-tensor": TENSOR,
    "ranks-grid": grid(),
    "ranks-over-hosts": over_hosts(),
    "ranks-many": many(),
}


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("name", CASES)
def test_the_section_is_laid_out_as_before(name: str, width: int, golden: Golden) -> None:
    lines = [line.plain.rstrip() for line in ranks_section(CASES[name], width)]
    assert max(map(len, lines)) <= width
    golden(f"{name}-{width}.txt", "\n".join(lines))


def test_exposed_collectives_have_a_column(golden: Golden) -> None:
    """The rank that the others wait for is the one that waits least."""
    first, second = TENSOR.ranks
    ranks = (replace(first, exposed_comm_share=0.312), replace(second, exposed_comm_share=0.104))
    lines = [line.plain.rstrip() for line in ranks_section(replace(TENSOR, ranks=ranks), 100)]
    assert max(map(len, lines)) <= 100
    golden("ranks-exposed-100.txt", "\n".join(lines))


def test_one_rank_has_no_section() -> None:
    assert ranks_section(None, 80) == []
