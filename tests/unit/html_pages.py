"""Pages of constructed traces, and a reader of HTML that keeps what a browser would make of it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.viewing.details import build_details
from phaseprof.cli.render.html.page import render_html
from phaseprof.trace.reader import Trace


def page_of(trace: Trace) -> str:
    """The page of a trace."""
    report = build_report(trace)
    return render_html(report, build_details(trace, report))


@dataclass
class Element:
    """An element: its name, its attributes, and the text directly in it."""

    name: str
    attributes: dict[str, str | None]
    text: str = ""
    parents: tuple[str, ...] = field(default=())


class Dom(HTMLParser):
    """All elements of a page, in order. The content of scripts and styles is not looked into, as in a browser."""

    VOID = frozenset(["meta", "br", "hr", "img", "input", "link", "base", "embed"])

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), parents=tuple(each.name for each in self._open))
        self.elements.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].name == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data

    def named(self, name: str) -> list[Element]:
        """All elements of a name."""
        return [element for element in self.elements if element.name == name]

    @property
    def text(self) -> str:
        """All that is text for a reader."""
        skipped = {"script", "style"}
        return "\n".join(e.text for e in self.elements if e.name not in skipped)

    def directory(self) -> dict[str, Any]:
        """The directory of the timeline."""
        found: dict[str, Any] = json.loads(self._by_id("timeline-directory").text)
        return found

    def column(self, entry: dict[str, Any]) -> list[int]:
        """A column of the timeline, unpacked as its description says, by other code than the page's."""
        data = zlib.decompress(base64.b64decode(self._by_id("timeline-columns").text.strip()))
        count, width = entry["count"], entry["width"]
        stored = [
            sum(data[entry["at"] + plane * count + i] << (8 * plane) for plane in range(width))
            for i in range(count)
        ]
        if entry["signed"]:
            stored = [-(v + 1) // 2 if v % 2 else v // 2 for v in stored]
        if entry["summed"]:
            total = 0
            for i, value in enumerate(stored):
                total += value
                stored[i] = total
        return stored

    def _by_id(self, name: str) -> Element:
        (found,) = [e for e in self.elements if e.attributes.get("id") == name]
        return found


def css_colours(style: str) -> dict[str, tuple[str, str]]:
    """The colours that a style names, in light and in dark."""
    pattern = r"--([\w-]+):\s*light-dark\((#[0-9a-f]{6}),\s*(#[0-9a-f]{6})\)"
    return {name: (light, dark) for name, light, dark in re.findall(pattern, style)}
