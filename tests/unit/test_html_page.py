"""The page of constructed traces: what it says is what the analyses say, and it needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

import pytest
from html_pages import Dom, page_of
from traces import MS, START_NS, Timeline, healthy, meta, missing, model, roofs

from phaseprof.analyzers.passes import Status
from phaseprof.analyzers.report import build_report
from phaseprof.cli.render import units
from phaseprof.cli.render.html.page import render_html
from phaseprof.trace.reader import Trace


def healthy_trace() -> Trace:
    made = healthy()
    made.request(
        "slow", ttft_ns=900 * MS, itl_ns=[10 * MS, 400 * MS], arrival_ns=START_NS, tpot_ns=205 * MS
    )
    return made.trace()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return healthy_trace()


@pytest.fixture(scope="module")
def page(trace: Trace) -> str:
    return page_of(trace)


@pytest.fixture(scope="module")
def dom(page: str) -> Dom:
    return Dom(page)


def test_the_answer_comes_first(dom: Dom, trace: Trace) -> None:
    report = build_report(trace)
    answers = [e.text for e in dom.named("p") if e.attributes.get("class") == "answer"]
    assert answers == list(report.answer) and answers
    order = [e.attributes["id"] for e in dom.named("section") if "id" in e.attributes]
    assert order[:3] == ["answer", "phases", "roofline"]


def test_phases_have_their_figures_class_and_evidence(dom: Dom, trace: Trace) -> None:
    report = build_report(trace)
    for name, figures in report.phases.items():
        assert name in dom.text
        assert units.duration(figures.span_ms) in dom.text
        assert figures.bound.value in [e.text for e in dom.named("span")]
        for evidence in figures.verdict.evidence:
            assert evidence.text in dom.text


def test_what_is_missing_and_how_it_was_measured_is_said(dom: Dom) -> None:
    for text in (
        "SM, tensor-core and DRAM counters",
        "transformers 5.24.0",
        "python serve.py",
        "Stand-in CPU, cpu 0, 2 cores, 2 threads, 8.0 GB",
        "float32: 1.00 TFLOP/s, 100 GB/s, measured ±2 %, stand-in",
    ):
        assert text in dom.text


def test_the_page_asks_for_nothing(dom: Dom, page: str) -> None:
    for element in dom.elements:
        assert not {"src", "srcset", "action", "data", "poster"} & set(element.attributes)
        assert (element.attributes.get("href") or "#").startswith("#")
        assert element.name not in {"link", "iframe", "object", "embed", "img", "base"}
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert "url(" not in page and "@import" not in page


def test_the_policy_allows_its_own_script_and_style_alone(dom: Dom) -> None:
    (policy,) = [
        str(e.attributes["content"])
        for e in dom.named("meta")
        if e.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    (style,) = dom.named("style")
    (script,) = [e for e in dom.named("script") if "type" not in e.attributes]
    for element, rule in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_no_element_carries_a_style_or_a_script(dom: Dom) -> None:
    for element in dom.elements:
        assert not [name for name in element.attributes if name == "style" or name.startswith("on")]


def test_names_in_the_page_are_used_once_and_links_lead_somewhere(dom: Dom) -> None:
    names = [str(e.attributes["id"]) for e in dom.elements if "id" in e.attributes]
    assert len(set(names)) == len(names)
    links = {str(e.attributes["href"])[1:] for e in dom.named("a")}
    assert links <= set(names) and len(links) > 5


def test_every_drawing_has_a_name_and_a_table(dom: Dom) -> None:
    drawings = [e for e in dom.elements if e.attributes.get("role") == "img"]
    assert len(drawings) >= 5
    for drawing in drawings:
        assert len(str(drawing.attributes["aria-label"])) > 20
        assert drawing.attributes["tabindex"] == "0"
    hidden = [e for e in dom.named("svg") if e.attributes.get("role") != "img"]
    assert all(e.attributes.get("aria-hidden") == "true" for e in hidden)
    captions = " ".join(e.text for e in dom.named("caption"))
    for caption in ("Phases", "Roofline", "Passes over time", "Histogram"):
        assert caption in captions


def test_the_timeline_holds_the_passes(dom: Dom, trace: Trace) -> None:
    directory = dom.directory()
    (lane,) = directory["lanes"]
    rows = {name: dom.column(entry) for name, entry in lane["rows"].items()}
    passes = trace.passes.to_pylist()
    now = 0
    for place, row in enumerate(passes):
        begin = now + rows["gap"][place]
        now = begin + rows["span"][place]
        assert begin * 1_000 == row["start_ns"] - START_NS
        assert now * 1_000 == row["end_ns"] - START_NS
        assert directory["phases"][rows["phase"][place]] == row["phase"]
        assert rows["step"][place] == row["step"]
        assert rows["prefill"][place] == row["prefill_tokens"]
        assert rows["decode"][place] == row["decode_tokens"]
        assert rows["status"][place] == Status.STEADY
    assert now == directory["spanUs"] == 8 * 101_000 + 56 * 5_000 - 1_000
    assert lane["passes"] == len(passes) == 64


def test_the_slowest_request_shows_where_it_waited(dom: Dom) -> None:
    shown = [e for e in dom.named("button") if e.attributes.get("class") == "show"]
    # From the first token at 900 ms and one more at 910 ms on.
    ends = {(e.attributes["data-from"], e.attributes["data-to"]) for e in shown}
    assert ("910000", "1310000") in ends and ("0", "900000") in ends
    assert "400 ms for token 2 (usual: 10.0 ms)" in dom.text


def test_a_run_without_roofs_says_so_and_draws_none() -> None:
    dom = Dom(page_of(healthy().trace(meta(ceilings=()))))
    assert "No roof is known for this device and dtype" in dom.text
    assert not [e for e in dom.named("svg") if e.attributes.get("class") == "roofline"]


def test_a_run_of_unknown_work_says_so() -> None:
    made = Timeline()
    for _ in range(6):
        made.add("decode", 5)
    dom = Dom(page_of(made.trace(meta(models=(model(cost=None),)))))
    assert "The FLOPs and bytes of no phase are known" in dom.text
    assert "No request counts" in dom.text


def test_damage_is_said_before_the_answer() -> None:
    dom = Dom(page_of(healthy().trace(damage=("passes/x cannot be read: cut off.",))))
    assert dom.text.index("This trace is not whole") < dom.text.index("The answer")


def test_a_server_has_its_engine_and_ranks_their_table() -> None:
    made = healthy()
    for at in range(40):
        made.step(at * 20, running=3, waiting=at % 5)
    dom = Dom(page_of(made.trace()))
    assert any(e.attributes.get("id") == "engine" for e in dom.named("section"))
    assert "Requests running and waiting" in dom.text
    both = healthy()
    both.passes += [
        {**row, "rank": 1, "pass_id": 1000 + place} for place, row in enumerate(both.passes)
    ]
    dom = Dom(page_of(both.trace(meta(), meta(rank=1, pid=2))))
    assert [lane["rank"] for lane in dom.directory()["lanes"]] == [0, 1]
    assert "data-parallel" in dom.text


def test_lines_that_nobody_can_read_are_left_out_of_the_drawing() -> None:
    # A phase without work has no place on a log axis, and the others keep theirs.
    made = healthy()
    for _ in range(5):
        made.add("other", 5, gflop=0.0, gb=0.0)
    dom = Dom(page_of(made.trace()))
    points = [e for e in dom.named("g") if str(e.attributes.get("class", "")).startswith("point")]
    tips = [str(e.attributes["data-tip"]) for e in points]
    assert any(tip.startswith("prefill:") for tip in tips)
    assert not any(tip.startswith("other:") for tip in tips)


def test_what_could_not_be_measured_has_its_remedy() -> None:
    dom = Dom(page_of(healthy().trace(meta(not_measured=(missing("power"),)))))
    assert "nothing" in [e.text for e in dom.named("span") if e.attributes.get("class") == "fix"]


def test_a_page_is_the_same_each_time(trace: Trace, page: str) -> None:
    assert page_of(trace) == page


def test_a_page_shows_the_roofs_that_a_report_was_given() -> None:
    from phaseprof.analyzers.viewing.details import build_details

    trace = healthy().trace(meta(ceilings=()))
    given = replace(roofs(), flops_per_s=2e12, source="datasheet", spread=None)
    report = build_report(trace, ceilings=given)
    dom = Dom(render_html(report, build_details(trace, report)))
    assert "2.00 TFLOP/s float32, datasheet" in dom.text
