"""The live view of a growing trace, by constructed moments."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from traces import META, MS, START_NS, Timeline, meta

from phaseprof.analyzers.viewing.live import live_view
from phaseprof.cli.main import main
from phaseprof.cli.render.live import live_line, live_lines
from phaseprof.cli.watch import watch
from phaseprof.errors import TraceError
from phaseprof.trace.reader import open_trace

WINDOW_NS = 1_000 * MS


def _run() -> Timeline:
    """A second of decode at 10 ms and 4 sequences a step, behind a second at 20 ms."""
    timeline = Timeline()
    for _ in range(50):
        timeline.add("decode", 20, tokens=4, sequences=4)
    for _ in range(100):
        timeline.add("decode", 10, tokens=4, sequences=4)
    return timeline


def test_only_the_window_counts() -> None:
    timeline = _run()
    view = live_view(timeline.trace(), timeline.now_ns, WINDOW_NS)
    # The step that ended as the window began is in it.
    assert view.output_tokens_per_s == pytest.approx(404)
    (decode,) = view.phases
    assert decode.pass_ms_p50 == pytest.approx(10)
    assert view.idle_s == 0
    assert view.facts is not None
    assert sum(view.course) / len(view.course) == pytest.approx(404)


def test_a_run_that_stands_still() -> None:
    timeline = _run()
    running = timeline.trace(meta(complete=False, ended_ns=None))
    view = live_view(running, timeline.now_ns + 5_000 * MS, WINDOW_NS)
    assert view.output_tokens_per_s == 0
    assert view.idle_s == pytest.approx(5)
    assert view.phases == ()
    assert "no pass for 5" in "\n".join(line.plain for line in live_lines(view, "t", 80))


def test_requests_that_ended_in_the_window() -> None:
    timeline = _run()
    end = timeline.now_ns
    timeline.request("old", finished_ns=end - 1_500 * MS, ttft_ns=900 * MS)
    timeline.request("new", finished_ns=end - 10 * MS, ttft_ns=30 * MS)
    timeline.request("open", finished_ns=None, ttft_ns=None)
    view = live_view(timeline.trace(), end, WINDOW_NS)
    assert (view.finished, view.open) == (1, 1)
    assert view.ttft_ms is not None
    assert view.ttft_ms.p99 == 30


def test_drafts_are_no_output() -> None:
    timeline = Timeline()
    for _ in range(10):
        timeline.add("decode", 100, tokens=4, sequences=1, draft_tokens=3)
        timeline.add("decode", 0, tokens=3, role="draft")
    view = live_view(timeline.trace(), timeline.now_ns, WINDOW_NS)
    assert view.output_tokens_per_s == pytest.approx(10)


def test_no_pass_yet() -> None:
    trace = replace(Timeline().trace(meta(complete=False)))
    view = live_view(trace, START_NS, WINDOW_NS)
    assert view.facts is None
    assert view.idle_s is None
    assert "no pass yet" in live_lines(view, "trace", 80)[0].plain
    assert live_line(view).startswith("0 output tokens/s")


def test_watch_ends_with_the_run(tmp_path: Path) -> None:
    """A trace that is complete is looked at once."""
    _written(tmp_path / "trace")
    told = StringIO()
    watch(tmp_path / "trace", told, sleep=_never)
    (line,) = told.getvalue().splitlines()
    assert "output tokens/s" in line
    assert "decode" in line


def test_watch_waits_for_a_trace(tmp_path: Path) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            _written(tmp_path / "trace")

    told = StringIO()
    watch(tmp_path / "trace", told, sleep=sleep, every_s=0.5)
    assert waited == [0.5, 0.5, 0.5]
    assert told.getvalue()


def test_watch_refuses_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError):
        watch(tmp_path / "notes.txt", StringIO(), sleep=_never)


def _never(seconds: float) -> None:
    raise AssertionError("it should not have waited")


def _written(folder: Path) -> None:
    """A whole trace on disk, as the writer lays it out."""
    import pyarrow.parquet as pq

    from phaseprof.schema import PASSES
    from phaseprof.trace.writer import meta_path, write_json

    timeline = _run()
    table = timeline.trace().passes.select([column.name for column in PASSES.columns])
    part = folder / "passes" / "rank=0" / "part-1-000000-000000.parquet"
    part.parent.mkdir(parents=True)
    pq.write_table(table, part, row_group_size=20)
    (folder / "meta").mkdir()
    write_json(meta_path(folder, 0, 1, ""), replace(META, ended_ns=timeline.now_ns).to_json())


def test_what_is_long_past_is_not_read(tmp_path: Path) -> None:
    """Groups of 20 rows: the last ten steps of 10 ms are in one of them."""
    _written(tmp_path / "trace")
    since_ns = START_NS + 1_900 * MS
    trace = open_trace(tmp_path / "trace", since_ns=since_ns)
    assert trace.passes.num_rows == 10
    assert open_trace(tmp_path / "trace").passes.num_rows == 150


def test_watch_takes_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--watch", "--json"]) == 2
    assert "--watch shows the moment" in capsys.readouterr().err


def test_the_command_shows_the_end_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _written(tmp_path / "trace")
    assert main(["report", str(tmp_path / "trace"), "--watch"]) == 0
    # The last 30 s of a run of two: 600 tokens.
    assert capsys.readouterr().out.startswith("20.0 output tokens/s")
