"""The text of `phaseprof doctor`."""

from __future__ import annotations

import json

from phaseprof.cli.render.doctor import render, to_json
from phaseprof.collectors.findings import Finding, Section, State

SECTIONS = (
    Section(
        "Versions",
        (
            Finding("python", State.OK, "3.11.7"),
            Finding("transformers", State.LIMITED, "4.57.1: passes are seen from 5.0 on", "pip it"),
        ),
    ),
    Section(
        "What can be measured here",
        (Finding("counters", State.MISSING, "no NVIDIA GPU on this machine", "Use one that has."),),
    ),
)


def test_a_line_a_finding_and_its_fix_below() -> None:
    assert render(SECTIONS).splitlines() == [
        "Versions",
        "  ok       python        3.11.7",
        "  limited  transformers  4.57.1: passes are seen from 5.0 on",
        "                         → pip it",
        "",
        "What can be measured here",
        "  missing  counters      no NVIDIA GPU on this machine",
        "                         → Use one that has.",
    ]


def test_long_details_hang_under_their_first_word() -> None:
    lines = render(SECTIONS, width=52).splitlines()
    assert lines[2:5] == [
        "  limited  transformers  4.57.1: passes are seen",
        "                         from 5.0 on",
        "                         → pip it",
    ]
    assert all(len(line) <= 52 for line in lines)


def test_colour_only_when_asked_for() -> None:
    assert "\x1b[" not in render(SECTIONS)
    assert "\x1b[32mok" in render(SECTIONS, color=True)
    assert "\x1b[31mmissing" in render(SECTIONS, color=True)


def test_nothing_found_is_nothing_shown() -> None:
    assert render(()) == ""
    assert render((Section("Devices", ()),)) == "Devices"


def test_json_holds_every_finding() -> None:
    document = json.loads(to_json(SECTIONS))
    assert document["schema"] == 1
    assert document["sections"][0]["findings"][0] == {
        "subject": "python",
        "state": "ok",
        "detail": "3.11.7",
        "fix": "",
    }
    assert [section["title"] for section in document["sections"]] == [
        "Versions",
        "What can be measured here",
    ]
