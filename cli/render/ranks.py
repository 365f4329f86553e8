"""The ranks: how they work together, a row each, and how far apart they are in the steps that correspond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.results import (
    Parallelism,
    Percentiles,
    RankFigures,
    RanksReport,
    Skew,
)
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.layout import MARGIN, keyed, paragraph, plain

#: Of more ranks than this only the slowest, the fastest and those without an end have a row.
_ROWS = 8
#: Skews that are shown.
_SKEWS = 3
#: Names of hosts in the head line.
_HOSTS = 3

_GAP = 2
_DROP_ORDER = ("busy", "host", "between", "passes", "tokens", "time", "output/s")


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[RankFigures], str]
    #: Shown only if a rank has a value in it.
    known: Callable[[RankFigures], bool] = lambda _: True


_COLUMNS = (
    _Column("rank", lambda r: str(r.rank)),
    _Column("host", lambda r: r.host or units.DASH),
    _Column("passes", lambda r: units.count(r.passes)),
    _Column("tokens", lambda r: units.count(r.tokens)),
    _Column("time", lambda r: units.duration(r.span_ms)),
    _Column("between", lambda r: units.duration(r.between_ms), lambda r: r.between_ms is not None),
    _Column("busy", lambda r: units.duration(r.busy_ms), lambda r: r.busy_ms is not None),
    _Column(
        "exposed comm",
        lambda r: units.percent(r.exposed_comm_share),
        lambda r: r.exposed_comm_share is not None,
    ),
    _Column(
        "prefill p50",
        lambda r: units.latency(r.prefill_ms_p50),
        lambda r: r.prefill_ms_p50 is not None,
    ),
    _Column(
        "decode p50",
        lambda r: units.latency(r.decode_ms_p50),
        lambda r: r.decode_ms_p50 is not None,
    ),
    _Column(
        "output/s",
        lambda r: units.rate(r.output_tokens_per_s),
        lambda r: r.output_tokens_per_s is not None,
    ),
)


def ranks_section(ranks: RanksReport | None, width: int) -> list[Text]:
    """The section; nothing for a trace of one rank."""
    if ranks is None:
        return []
    lines = keyed("Ranks", [_head(ranks)], width)
    lines += _table(ranks, width)
    said = [sentence for skew in _worst(ranks.skews) for sentence in _skew(skew, ranks)]
    hidden = len(ranks.skews) - _SKEWS
    if hidden > 0:
        said.append(f"In {units.counted(hidden, 'group')} more there is less time lost.")
    return lines + keyed("Skew", said, width)


def ranks_grid(ranks: RanksReport) -> Grid:
    """All ranks with every column that has a value."""
    columns = [c for c in _COLUMNS[1:] if any(c.known(each) for each in ranks.ranks)]
    return Grid(
        "rank",
        tuple(column.title for column in columns),
        tuple(
            GridRow(str(each.rank), tuple(c.cell(each) for c in columns), note=_note(each))
            for each in ranks.ranks
        ),
    )


def _head(ranks: RanksReport) -> str:
    number, groups = len(ranks.ranks), len(ranks.groups)
    where = ""
    if ranks.hosts:
        few = ", ".join(ranks.hosts) if len(ranks.hosts) <= _HOSTS else f"{len(ranks.hosts)} hosts"
        where = f" on {few}"
    rate = ""
    if groups > 1 and ranks.output_tokens_per_s is not None:
        rate = f" Together {units.rate(ranks.output_tokens_per_s)} output tokens/s."
    if Parallelism.TENSOR not in ranks.kinds:
        return f"{number}{where}, data-parallel: each makes passes of its own.{rate}"
    if groups == 1:
        return (
            f"{number}{where}, tensor-parallel: they make each pass together, and it counts once."
        )
    return (
        f"{number}{where} in {groups} groups, data-parallel: the ranks of a group are tensor-parallel, make each pass "
        f"together, and it counts once.{rate}"
    )


def _table(ranks: RanksReport, width: int) -> list[Text]:
    shown = _chosen(ranks.ranks)
    notes = [_note(each) for each in shown]
    notes_width = max(map(len, notes))
    columns = [c for c in _COLUMNS if any(c.known(each) for each in ranks.ranks)]
    if len(ranks.hosts) < 2:
        columns = [column for column in columns if column.title != "host"]
    cells = {column.title: [column.cell(each) for each in shown] for column in columns}
    widths = {title: max(map(cell_len, [title, *values])) for title, values in cells.items()}
    room = width - MARGIN - (notes_width + _GAP if notes_width else 0)
    for title in _DROP_ORDER:
        if sum(widths[c.title] + _GAP for c in columns) - _GAP <= room:
            break
        columns = [column for column in columns if column.title != title]
    head = (" " * _GAP).join(column.title.rjust(widths[column.title]) for column in columns)
    lines = [Text(" " * MARGIN + head, style="dim")]
    for row, note in enumerate(notes):
        line = Text(" " * MARGIN)
        for place, column in enumerate(columns):
            cell = cells[column.title][row].rjust(widths[column.title])
            line.append((" " * _GAP if place else "") + cell, style="" if place else "bold")
        lines.append(line.append(" " * _GAP + note, style="yellow") if note else line)
    hidden = len(ranks.ranks) - len(shown)
    if hidden:
        said = f"{units.counted(hidden, 'rank')} more, between the fastest and the slowest."
        lines += paragraph(said, width, paint=plain("dim"))
    return lines


def _chosen(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """All of a few; of many those at both ends, and those that did not end."""
    if len(ranks) <= _ROWS:
        return list(ranks)
    by_time = sorted(ranks, key=lambda r: (r.decode_ms_p50 or 0.0, r.prefill_ms_p50 or 0.0, r.rank))
    ends = [*by_time[: _ROWS // 2], *by_time[-_ROWS // 2 :]]
    cut = [each for each in ranks if not each.ended][:_ROWS]
    wanted = {each.rank for each in (*ends, *cut)}
    return [each for each in ranks if each.rank in wanted]


def _note(each: RankFigures) -> str:
    notes = []
    if not each.ended:
        notes.append("no end")
    if each.restarts:
        notes.append("restarted" if each.restarts == 1 else f"restarted {each.restarts}x")
    return ", ".join(notes)


def _worst(skews: Sequence[Skew]) -> list[Skew]:
    """What is between the groups, then the groups in which the most time is lost."""
    return sorted(skews, key=lambda s: (s.kind is not Parallelism.DATA, -s.laggard.lost_ms))[
        :_SKEWS
    ]


def _skew(skew: Skew, ranks: RanksReport) -> list[str]:
    who = _named(skew.ranks)
    if skew.kind is Parallelism.DATA and _leads(ranks):
        who += ", one of each group,"
    apart = [f"passes differ by {_typical(skew.duration_ms)}"]
    if skew.start_ms is not None:
        apart.insert(0, f"begin {_typical(skew.start_ms, ' apart')}")
    steps = units.counted(skew.steps, "step")
    return [f"{who} in {steps}: {', '.join(apart)}.", _laggard(skew)]


def _typical(figures: Percentiles, what: str = "") -> str:
    return f"{units.duration(figures.p50)}{what} (p90 {units.duration(figures.p90)})"


def _laggard(skew: Skew) -> str:
    last = skew.laggard
    if not last.lost_ms:
        return "No rank is behind the others."
    often, share = units.percent(last.last_share), units.percent(last.lost_share)
    cost = units.duration(last.lost_ms)
    if skew.kind is Parallelism.DATA:
        return (
            f"Rank {last.rank} is the slowest: it takes longest in {often} of them, and {cost} more than the next in "
            f"all, {share} of its time."
        )
    if skew.by_start:
        return f"Rank {last.rank} begins last in {often} of them: the others lose {cost} to it, {share} of the time."
    return (
        f"Rank {last.rank} has the shortest passes in {often} of them. All end together, so that it begins last: the "
        f"others lose {cost} to it, {share} of the time."
    )


def _leads(ranks: RanksReport) -> bool:
    return any(len(group) > 1 for group in ranks.groups)


def _named(ranks: Sequence[int]) -> str:
    """``Ranks 0 and 1``, ``Ranks 0 to 7``, ``12 ranks``."""
    if len(ranks) == 2:
        return f"Ranks {ranks[0]} and {ranks[1]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"Ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 4:
        return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"{len(ranks)} ranks"
