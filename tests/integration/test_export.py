"""Exports read back: by Perfetto's own protobuf classes, by json and by DuckDB, against the trace's Parquet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phaseprof.cli.main import main
from phaseprof.trace.reader import open_trace

HOSTILE = "</script><script>alert(1)</script> \u202e \x07 'quoted' \"twice\""


@dataclass
class Track:
    """What was read back of a track."""

    name: str = ""
    parent: int = 0
    process: str = ""
    counter: bool = False
    spans: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)
    points: list[tuple[int, float]] = field(default_factory=list)


def read_perfetto(path: Path) -> dict[int, Track]:
    """The tracks of a file, each begin with the end that closes it."""
    perfetto_trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = perfetto_trace_pb2.Trace()
    trace.ParseFromString(path.read_bytes())
    event_type = perfetto_trace_pb2.TrackEvent
    found: dict[int, Track] = {}
    open_: dict[int, list[tuple[str, int, dict[str, Any]]]] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            found[told.uuid] = Track(
                told.name, told.parent_uuid, told.process.process_name, told.HasField("counter")
            )
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = found[event.track_uuid]
        if event.type == event_type.TYPE_COUNTER:
            track.points.append((packet.timestamp, event.double_counter_value))
        elif event.type == event_type.TYPE_SLICE_BEGIN:
            notes = {
                note.name: getattr(note, note.WhichOneof("value"))
                for note in event.debug_annotations
            }
            open_.setdefault(event.track_uuid, []).append((event.name, packet.timestamp, notes))
        else:
            name, begin, notes = open_[event.track_uuid].pop()
            track.spans.append((name, begin, packet.timestamp, notes))
    assert not any(open_.values())
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a real model with kernels of a CPU, and counters."""
    folder = tmp_path_factory.mktemp("export") / "trace"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    path = folder.parent / "config.json"
    path.write_text(json.dumps(config))
    code = main(
        [
            *("profile", "--model-config", str(path), "--device", "cpu", "--prompt-tokens", "8"),
            *("--new-tokens", "4", "--batch", "1,2", "--repeats", "2", "--no-calibrate"),
            *("-o", str(folder), "--json"),
        ]
    )
    assert code == 0
    return folder


def test_perfetto_holds_what_the_trace_holds(recorded: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.pftrace"
    assert main(["export", str(recorded), "--to", "perfetto", "-o", str(target)]) == 0
    trace = open_trace(recorded)
    found = read_perfetto(target)
    spans = [(track, *span) for track in found.values() for span in track.spans]
    passes = [each for each in spans if each[0].name.startswith("passes of ")]
    assert Counter(each[1] for each in passes) == Counter(trace.passes["phase"].to_pylist())
    assert sorted(each[2] for each in passes) == sorted(trace.passes["start_ns"].to_pylist())
    assert sorted(each[3] for each in passes) == sorted(trace.passes["end_ns"].to_pylist())
    flops = {each[4]["pass_id"]: each[4]["flops"] for each in passes}
    expected = zip(trace.passes["pass_id"], trace.passes["flops"], strict=True)
    assert flops == {key.as_py(): value.as_py() for key, value in expected}
    kernels = [each for each in spans if each[0].name.startswith("cpu")]
    assert Counter(each[1] for each in kernels) == Counter(trace.kernels["name"].to_pylist())
    assert sum(each[3] - each[2] for each in kernels) == sum(
        end - start
        for start, end in zip(
            trace.kernels["start_ns"].to_pylist(), trace.kernels["end_ns"].to_pylist(), strict=True
        )
    )
    requests = [each for each in spans if "request_id" in each[4]]
    assert len(requests) == trace.requests.num_rows
    points = [point for track in found.values() if track.counter for point in track.points]
    windows = len({_series(row) for row in trace.samples.to_pylist()})
    # A point for each window, and one for the end of each series.
    assert len(points) == trace.samples.num_rows + windows


def _series(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["rank"], row["device"], row["source"], row["metric"]


def test_trace_processor_opens_it(recorded: Path, tmp_path: Path) -> None:
    """Where Perfetto's own reader is installed: it counts as many spans."""
    shell = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    if not shell:
        pytest.skip("no trace_processor_shell on PATH or in TRACE_PROCESSOR_SHELL")
    target = tmp_path / "run.pftrace"
    assert main(["export", str(recorded), "--to", "perfetto", "-o", str(target)]) == 0
    query = "select count(*) from slice where name in ('prefill', 'decode')"
    told = subprocess.run(
        [shell, "-Q", query, str(target)], capture_output=True, text=True, check=True, timeout=60
    )
    assert str(open_trace(recorded).passes.num_rows) in told.stdout


def test_chrome_holds_the_same(recorded: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    assert main(["export", str(recorded), "--to", "chrome", "-o", str(target)]) == 0
    told = json.loads(target.read_text(encoding="utf-8"))
    trace = open_trace(recorded)
    passes = [event for event in told["traceEvents"] if event.get("cat") == "passes"]
    assert Counter(event["name"] for event in passes) == Counter(trace.passes["phase"].to_pylist())
    base_ns = told["baseTimeNanoseconds"]
    starts = sorted(base_ns + round(event["ts"] * 1e3) for event in passes)
    assert starts == sorted(trace.passes["start_ns"].to_pylist())
    assert {event["pid"] for event in told["traceEvents"]} == {0}


def test_csv_tables_hold_every_row(recorded: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    target = tmp_path / "tables"
    assert main(["export", str(recorded), "--to", "csv", "-o", str(target)]) == 0
    trace = open_trace(recorded)
    for name in ("passes", "requests", "kernels"):
        path = target / f"{name}.csv"
        ((count,),) = duckdb.sql(f"select count(*) from '{path}'").fetchall()
        assert count == getattr(trace, name).num_rows
    ((flops,),) = duckdb.sql(f"select sum(flops) from '{target / 'passes.csv'}'").fetchall()
    assert flops == sum(trace.passes["flops"].to_pylist())
    ((lengths,),) = duckdb.sql(
        f"select sum(json_array_length(slices::json)) from '{target / 'passes.csv'}'"
    ).fetchall()
    assert lengths == sum(len(slices) for slices in trace.passes["slices"].to_pylist())


def test_hostile_names_stay_names(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(recorded, folder)
    trace = open_trace(recorded)
    part = next((folder / "kernels").rglob("*.parquet"))
    table = pq.read_table(part, partitioning=None)
    place = table.schema.get_field_index("name")
    names = table.column("name").to_pylist()
    names[0] = HOSTILE
    pq.write_table(table.set_column(place, "name", pa.array(names)), part)
    for to, ending in (("perfetto", "a.pftrace"), ("chrome", "a.json")):
        target = tmp_path / ending
        assert main(["export", str(folder), "--to", to, "-o", str(target)]) == 0
    spans = [s for t in read_perfetto(tmp_path / "a.pftrace").values() for s in t.spans]
    assert sum(name == HOSTILE for name, *_ in spans) == 1
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert sum(event["name"] == HOSTILE for event in told["traceEvents"]) == 1
    assert trace.kernels.num_rows == sum(e.get("cat") == "kernels" for e in told["traceEvents"])


def test_nothing_is_replaced_unless_asked(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "run.json"
    target.write_text("mine")
    assert main(["export", str(recorded), "--to", "chrome", "-o", str(target)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["export", str(recorded), "--to", "chrome", "-o", str(target), "--overwrite"]) == 0
    assert target.read_text() != "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--to", "csv"]) == 1
    assert "holds no trace" in capsys.readouterr().err


def test_the_default_target_lies_beside_the_trace(recorded: Path) -> None:
    assert main(["export", str(recorded), "--to", "csv"]) == 0
    target = recorded.with_name("trace-csv")
    assert (target / "passes.csv").is_file()
    shutil.rmtree(target)
