"""Hostile names in every text of a trace: none becomes an element, an attribute or a script of the page."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
from html_pages import Dom, page_of
from traces import CPU, MS, START_NS, Timeline, healthy, meta, model, roofs

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Report
from phaseprof.analyzers.viewing.details import Details, build_details
from phaseprof.cli.render.html.page import render_html
from phaseprof.errors import NotMeasured
from phaseprof.trace.meta import Host
from phaseprof.trace.reader import Trace

#: What ends a script, an attribute, a comment or a template, and what runs where it is let.
HOSTILE = (
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "' onmouseover='window.hacked=1",
    "<!--<script>",
    "]]><svg onload=window.hacked=1>",
    "</style></textarea></title><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "{{ 7 * 7 }}{% include 'page.html' %}",
    "javascript:window.hacked=1",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{LINE SEPARATOR}\u0000&lt;script&gt;",
)
#: What a name may do to the page: nothing but be longer text. So pages differ in text alone.
PLAIN = "harmless"


class Names:
    """Hostile names, each text field another one, with a number by which it is found again."""

    def __init__(self, hostile: bool) -> None:
        self._hostile = hostile
        self._numbers = itertools.count()
        self._pool = itertools.cycle(HOSTILE)
        self.given: list[str] = []

    def __call__(self) -> str:
        name = f"{next(self._pool) if self._hostile else PLAIN}#{next(self._numbers)}"
        self.given.append(name)
        return name


def hostile_trace(names: Names) -> Trace:
    """A trace of a served model in which everything that is text is a name of ours."""
    made = healthy()
    device = replace(CPU, name=names())
    roof = replace(roofs(), reference=names())
    for at in range(30):
        made.step(at * 10, running=2, waiting=1)
    for number in range(3):
        made.request(
            names(),
            client_id=names(),
            arrival_ns=START_NS,
            ttft_ns=(50 + 400 * number) * MS,
            itl_ns=[10 * MS, (20 + 300 * number) * MS],
            itl_steps=[1, 2],
            preemptions=1,
        )
    kernel = names()
    for number in range(4):
        row = made.add("decode", 10, gflop=0.2, gb=0.2, busy=0.5, request="p")
        row["profiled"] = True
        for entry in made.kernels[-2:]:
            entry["name"] = kernel if number % 2 else names()
    trace = made.trace(
        meta(
            command=("python", names(), names()),
            versions={"transformers": names(), names(): names()},
            phaseprof=names(),
            devices=(device,),
            models=(
                replace(
                    model(name=names()),
                    class_name=names(),
                    attn_implementation=names(),
                    cache_class=names(),
                    quantization=names(),
                ),
            ),
            ceilings=(roof,),
            hooks=(names(),),
            not_measured=(NotMeasured(names(), names(), names()),),
            workload={"batch": [names()], names(): names()},
            host=Host(names(), "c", "t"),
        ),
        damage=(names(),),
    )
    return replace(trace, path=trace.path / names())


@pytest.fixture(scope="module")
def names() -> Names:
    return Names(hostile=True)


@pytest.fixture(scope="module")
def page(names: Names) -> str:
    return page_of(hostile_trace(names))


def skeleton(page: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Each element: its name, where it lies, and the names of its attributes."""
    return [(e.name, e.parents, tuple(sorted(e.attributes))) for e in Dom(page).elements]


def test_the_elements_are_those_of_a_page_with_harmless_names(page: str) -> None:
    harmless = page_of(hostile_trace(Names(hostile=False)))
    assert skeleton(page) == skeleton(harmless)


def test_there_is_one_script_and_it_is_ours(page: str) -> None:
    scripts = [e for e in Dom(page).named("script") if "type" not in e.attributes]
    assert len(scripts) == 1
    assert "hacked" not in scripts[0].text
    assert page.count("<script") == 3 and page.count("</script") == 3


def test_no_attribute_is_one_that_runs(page: str) -> None:
    for element in Dom(page).elements:
        assert not [name for name in element.attributes if name.startswith("on")]
        assert "javascript:" not in str(element.attributes.get("href"))


def test_names_are_text_of_the_page(page: str, names: Names) -> None:
    """Most names are shown somewhere, and those that are stand there letter by letter."""
    text = Dom(page).text
    attributes = "\n".join(
        str(value) for element in Dom(page).elements for value in element.attributes.values()
    )
    shown = [name for name in names.given if name in text or name in attributes]
    assert len(shown) > len(names.given) * 0.6
    for hostile in HOSTILE[:3]:
        assert hostile in text


def test_templates_in_names_are_not_carried_out(page: str) -> None:
    assert "{{ 7 * 7 }}" in Dom(page).text


# --- every text of a report, whatever made it ------------------------------------------------------


def with_texts(value: Any, text: str) -> Any:
    """The same with every text replaced, as deep as dataclasses and tuples go. Enumerations stay."""
    if type(value) is str:
        return text
    if isinstance(value, tuple):
        return tuple(with_texts(each, text) for each in value)
    if isinstance(value, dict):
        return {key: with_texts(each, text) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        # What is worked out by a class itself is not stored in it.
        return replace(
            value,
            **{f.name: with_texts(getattr(value, f.name), text) for f in fields(value) if f.init},
        )
    return value


@dataclass(frozen=True)
class Case:
    """A report with its details, and the elements of its page with harmless texts."""

    report: Report
    details: Details
    elements: list[tuple[str, tuple[str, ...], tuple[str, ...]]]

    def page(self, text: str) -> str:
        return render_html(with_texts(self.report, text), with_texts(self.details, text))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    served = Timeline()
    for _ in range(8):
        served.add("mixed", 20, gflop=5, gb=0.3, prefill_tokens=50, decode_tokens=4, busy=0.6)
    served.request("r")
    for at in range(20):
        served.step(at * 8)
    found = []
    for trace in (healthy().trace(), served.trace(meta(), meta(rank=1, pid=2))):
        report = build_report(trace)
        case = Case(report, build_details(trace, report), [])
        found.append(replace(case, elements=skeleton(case.page(PLAIN))))
    return found


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_any_report_becomes_markup(cases: list[Case], hostile: str) -> None:
    for case in cases:
        assert skeleton(case.page(hostile)) == case.elements
