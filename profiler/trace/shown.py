"""What a notebook shows for a trace: its processes and how many rows its tables have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from phaseprof.trace.meta import ProcessMeta


def trace_cell(
    path: str, metas: Iterable[ProcessMeta], rows: Mapping[str, int], damage: Iterable[str]
) -> str:
    """A piece of HTML without script or style. All names are escaped.

    Args:
        path: The folder.
        metas: The processes.
        rows: Rows of each table.
        damage: What could not be read.
    """
    title = _tag("p", _tag("strong", escape(f"phaseprof trace {path}")))
    warnings = "".join(_tag("p", escape(f"⚠ {sentence}")) for sentence in damage)
    processes = _table(
        ("rank", "command", "models", "devices", "state"),
        [
            (
                str(meta.rank),
                " ".join(meta.command),
                ", ".join(model.name for model in meta.models),
                ", ".join(device.name for device in meta.devices),
                "ended" if meta.complete else "no end: it runs, or was killed",
            )
            for meta in metas
        ],
    )
    tables = _table(("table", "rows"), [(name, f"{count:,}") for name, count in rows.items()])
    return _tag("div", title + warnings + processes + tables)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first = _tag("tr", "".join(_tag("th", escape(title)) for title in head))
    body = "".join(_tag("tr", "".join(_tag("td", escape(c)) for c in row)) for row in rows)
    return _tag("table", _tag("thead", first) + _tag("tbody", body))


def _tag(name: str, inside: str) -> str:
    return f"<{name}>{inside}</{name}>"
