"""`phaseprof report --html`: a file that is whole or not there, and calls that make no sense."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from html_pages import Dom
from traces import START_NS, healthy, meta

from phaseprof.cli.main import main
from phaseprof.schema import PASSES, REQUESTS
from phaseprof.trace.writer import meta_path, write_json


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A constructed trace on disk, with a name in its meta that no encoding of text has."""
    import pyarrow.parquet as pq

    folder = tmp_path / "trace"
    made = healthy().trace()
    for spec, table in ((PASSES, made.passes), (REQUESTS, made.requests)):
        part = folder / spec.name / "rank=0" / "part-a-1-000000-000000.parquet"
        part.parent.mkdir(parents=True)
        # What a constructed row leaves out is null.
        schema = pa.schema([field.with_nullable(True) for field in table.schema])
        pq.write_table(table.cast(schema).drop_columns(["rank"]), part)
    path = meta_path(folder, 0, 1, "a")
    path.parent.mkdir(parents=True)
    write_json(path, meta(command=("python", "\ud800.py"), started_ns=START_NS).to_json())
    return folder


@pytest.fixture
def browsers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a browser was asked to open."""
    import webbrowser

    seen: list[str] = []

    def open_(url: str) -> bool:
        seen.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_)
    yield seen


def test_a_page_is_written_and_its_path_is_said(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "page.html"
    assert main(["report", str(trace), "--html", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    dom = Dom(target.read_text(encoding="utf-8"))
    assert [e.text for e in dom.named("h1")] == ["Stand-in-50M"]
    assert os.listdir(target.parent) == ["page.html"]


def test_a_page_that_is_there_is_replaced(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    assert main(["report", str(trace), "--html", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_open_asks_the_browser_for_the_file(
    trace: Path, tmp_path: Path, browsers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a page.html"
    assert main(["report", str(trace), "--html", str(target), "--open"]) == 0
    assert browsers == [target.as_uri()]
    assert capsys.readouterr().out == f"{target}\n"


def test_without_a_browser_that_is_said(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import webbrowser

    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    target = tmp_path / "page.html"
    assert main(["report", str(trace), "--html", str(target), "--open"]) == 0
    assert capsys.readouterr().out == f"{target} (no browser was found to open it)\n"


def test_a_place_that_cannot_be_written_is_an_error_with_a_remedy(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["report", str(trace), "--html", str(blocked / "page.html")]) == 1
    error = capsys.readouterr().err
    assert "cannot be written" in error and "--html FILE" in error
    assert blocked.read_text() == ""


@pytest.mark.parametrize("options", [["--open"], ["--html", "x.html", "--json"]])
def test_calls_that_make_no_sense_are_refused(
    trace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trace), *options]) == 2
    assert "--html" in capsys.readouterr().err
