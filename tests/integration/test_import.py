"""`phaseprof import` on real recordings: kernels and busy time of each step as their own notes give them."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phaseprof.api import load_report
from phaseprof.cli.main import main
from phaseprof.trace.reader import Trace, open_trace

#: Kept beside the tests, and a folder of more of them that not every checkout has.
KEPT = Path(__file__).parents[1] / "data" / "traces"
MORE = Path(__file__).parents[3] / "shared" / "traces"

DEVICE_COPIES = ("Memcpy", "Memset", "CopyDevice", "CopyHost")


def more(name: str) -> Path:
    path = MORE / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in this checkout")
    return path


def imported(tmp_path: Path, *arguments: str | Path) -> Trace:
    folder = tmp_path / "trace"
    assert main(["import", *map(str, arguments), "-o", str(folder)]) == 0
    # Nothing is left of what was kept aside.
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    return open_trace(folder)


def kernels_of(trace: Trace, pass_id: int) -> list[dict[str, Any]]:
    return [
        row
        for row in trace.kernels.to_pylist()
        if row["pass_id"] == pass_id and not row["name"].startswith(DEVICE_COPIES)
    ]


def busy_ms(rows: list[dict[str, Any]]) -> float:
    """Time in which at least one ran, in ms."""
    covered, whole = 0, 0
    for start, end in sorted((row["start_ns"], row["end_ns"]) for row in rows):
        whole += max(end - max(start, covered), 0)
        covered = max(covered, end)
    return whole / 1e6


def sum_ms(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["end_ns"] - row["start_ns"] for row in rows)) / 1e6


def damaged(path: Path, target: Path, keep: float) -> Path:
    """The first part of the unpacked recording."""
    text = gzip.decompress(path.read_bytes())
    target.write_bytes(text[: int(len(text) * keep)])
    return target


def as_rank(path: Path, target: Path, rank: int, shift_us: float = 0.0) -> Path:
    """The recording as if another rank had made it, a little later."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["distributedInfo"] = {**trace.get("distributedInfo", {}), "rank": rank}
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] += shift_us
    target.write_text(json.dumps(trace))
    return target


def test_a_user_s_own_names_say_what_steps_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def span(name: str, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur}

    def kernel(ts: float, correlation: int) -> dict[str, Any]:
        args = {"device": 0, "stream": 7, "correlation": correlation}
        return {**span("gemm", ts, 10.0, "kernel"), "args": args}

    def launch(ts: float, correlation: int) -> dict[str, Any]:
        return {
            **span("cudaLaunchKernel", ts, 1.0, "cuda_runtime"),
            "args": {"correlation": correlation},
        }

    events = [
        span("my prefill", 0.0, 100.0),
        span("my prefill", 10.0, 20.0),  # inside of itself
        span("decode 17", 200.0, 50.0),
        launch(5.0, 1),
        launch(210.0, 2),
        launch(300.0, 3),
        # The first kernel runs while the host is in the decode step.
        *(kernel(220.0, 1), kernel(230.0, 2), kernel(310.0, 3), kernel(0.0, 4)),
    ]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**18}))
    names = ["--annotation", "my prefill=prefill", "--annotation", "decode *=decode"]
    trace = imported(tmp_path, file, *names)
    rows = trace.passes.to_pylist()
    assert [(row["phase"], row["tag_source"]) for row in rows] == [
        ("prefill", "annotation"),
        ("decode", "annotation"),
    ]
    assert [row["device_ns"] for row in rows] == [10_000, 10_000]
    assert [row["start_ns"] for row in rows] == [10**18, 10**18 + 200_000]
    by_launch = {row["launched_ns"]: row["pass_id"] for row in trace.kernels.to_pylist()}
    assert by_launch == {
        10**18 + 5_000: rows[0]["pass_id"],
        10**18 + 210_000: rows[1]["pass_id"],
        10**18 + 300_000: None,
        None: None,
    }
    said = capsys.readouterr().out
    assert "1 decode, 1 prefill (annotation)" in said
    assert "2 in steps, 1 outside, 1 whose launch was not recorded" in said
    assert said.rstrip().endswith(f"phaseprof report {tmp_path / 'trace'}")


@pytest.mark.parametrize(
    ("name", "phase", "kernels", "summed_ms", "sequences", "tokens"),
    [
        ("vllm-b200-tp8-prefill", "prefill", 768, 10.863, 1, 888),
        ("vllm-mi300x-decode-full-graph", "decode", 425, 10.675, 32, 32),
        ("sglang-mi300x-extend", "prefill", 527, 492.774, 15, 15360),
    ],
)
def test_kernels_and_time_of_real_steps(
    tmp_path: Path,
    name: str,
    phase: str,
    kernels: int,
    summed_ms: float,
    sequences: int,
    tokens: int,
) -> None:
    trace = imported(tmp_path, KEPT / f"{name}.json.gz")
    (step,) = trace.passes.to_pylist()
    own = kernels_of(trace, step["pass_id"])
    assert len(own) == kernels
    assert sum_ms(own) == pytest.approx(summed_ms, rel=1e-3)
    assert (step["phase"], step["tag_source"]) == (phase, "annotation")
    assert step["sequences"] == sequences
    assert step["prefill_tokens"] + step["decode_tokens"] == tokens
    assert [row for row in trace.kernels.to_pylist() if row["pass_id"] is None] == []
    report = load_report(tmp_path / "trace")
    figures = report.phases[step["phase"]].kernels
    assert figures is not None
    assert figures.busy_ms == pytest.approx(busy_ms(trace.kernels.to_pylist()), rel=1e-6)
    assert figures.busy_ms >= busy_ms(own)


def test_recordings_of_several_ranks_are_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    source = KEPT / "vllm-mi300x-decode-full-graph.json.gz"
    as_rank(source, folder / "a.json", 1, 40.0)
    as_rank(source, folder / "b.json", 0)
    (folder / "notes.txt").write_text("no recording")
    trace = imported(tmp_path, folder)
    rows = trace.passes.to_pylist()
    assert sorted((row["rank"], row["step"], row["phase"]) for row in rows) == [
        (0, 0, "decode"),
        (1, 0, "decode"),
    ]
    assert len({row["pass_id"] for row in rows}) == 2
    assert sorted(meta.rank for meta in trace.metas) == [0, 1]
    assert trace.kernels.num_rows == 2 * 434
    assert "a.json, rank 1: 1 decode" in capsys.readouterr().out


def front_end(target: Path, *more: dict[str, Any]) -> Path:
    """What vLLM writes of the process that serves, beside the files of its ranks."""
    call = {"ph": "X", "cat": "python_function", "name": "asyncio/events.py(78): _run", "pid": 7}
    events = [{**call, "tid": 7, "ts": 5.0, "dur": 1.0}, *more]
    target.write_text(json.dumps({"traceEvents": events}))
    return target


def test_files_of_a_folder_that_are_of_no_rank_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    as_rank(KEPT / "vllm-mi300x-decode-full-graph.json.gz", folder / "rank0.json", 0)
    front_end(folder / "async_llm.json")
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7}
    front_end(folder / "other.json", {**operator, "ts": 6.0, "dur": 1.0})
    (folder / "config.json").write_text('{"hidden_size": 5}')
    (folder / "rank1.json").write_bytes(b"")
    trace = imported(tmp_path, folder)
    assert [(meta.rank, meta.world_size) for meta in trace.metas] == [(0, None)]
    assert trace.kernels.num_rows == 434
    said = {entry.what: entry.why for meta in trace.metas for entry in meta.not_measured}
    left = {
        "async_llm.json": "holds no event of torch.profiler",
        "other.json": "has no steps, and nothing in it ran on a device",
        "config.json": "is no trace that can be imported: it has no list `traceEvents`",
        "rank1.json": "is empty",
    }
    assert {name: said[f"anything of {name}"] for name in left} == left
    out = capsys.readouterr().out
    assert all(f"left out: {name}: {why}\n" in out for name, why in left.items())


def test_files_in_which_nothing_was_done_are_imported_if_there_are_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7}
    files = [
        front_end(tmp_path / f"{name}.json", {**operator, "ts": at, "dur": 1.0})
        for name, at in (("a", 6.0), ("b", 7.0))
    ]
    trace = imported(tmp_path, *files, front_end(tmp_path / "c.json"))
    assert sorted(meta.rank for meta in trace.metas) == [0, 1]
    assert trace.kernels.num_rows == 2
    assert "left out: c.json: holds no event" in capsys.readouterr().out
    # None of several is a recording at all.
    bad = [front_end(tmp_path / f"{name}.json") for name in "de"]
    assert main(["import", *map(str, bad), "-o", str(tmp_path / "none")]) == 1
    assert "d.json holds no event of torch.profiler" in " ".join(capsys.readouterr().err.split())


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = KEPT / "vllm-mi300x-decode-full-graph.json.gz"

    class Input:
        buffer = io.BytesIO(path.read_bytes())

    monkeypatch.setattr("sys.stdin", Input)
    trace = imported(tmp_path, "-")
    assert trace.kernels.num_rows == 434


def test_a_truncated_recording_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = damaged(KEPT / "vllm-b200-tp8-prefill.json.gz", tmp_path / "cut.json", 0.9)
    trace = imported(tmp_path, file)
    assert "damaged: its list of events ends before its end" in capsys.readouterr().out
    said = [entry for meta in trace.metas for entry in meta.not_measured]
    assert any(entry.what == "all of cut.json: it is damaged" for entry in said)


@pytest.mark.parametrize(
    ("name", "kernels", "launchless"),
    [
        ("hf-h100-qwen-forward", 1465, 436),
        ("odd-launchless-kernels", 6080, 705),
        ("old-2021-schema", 8772, 0),
    ],
)
def test_kernels_without_a_launch_belong_to_no_step(
    tmp_path: Path, name: str, kernels: int, launchless: int
) -> None:
    trace = imported(tmp_path, more(name), "--annotation", "ProfilerStep*=prefill")
    rows = [row for row in trace.kernels.to_pylist() if not row["name"].startswith(DEVICE_COPIES)]
    assert len(rows) == kernels
    without = [row for row in rows if row["launched_ns"] is None]
    assert len(without) == launchless
    assert {row["pass_id"] for row in without} <= {None}
    report = load_report(tmp_path / "trace")
    if launchless:
        assert report.unattributed is not None
        assert report.unattributed.launchless >= launchless
        assert any("their launch was not recorded" in each.why for each in report.not_measured)


def test_whole_recordings_say_the_same_as_reduced_ones(tmp_path: Path) -> None:
    trace = imported(tmp_path, more("vllm-b200-tp8-prefill"))
    (step,) = trace.passes.to_pylist()
    assert (step["phase"], step["prefill_tokens"]) == ("prefill", 888)
    own = kernels_of(trace, step["pass_id"])
    assert len(own) == 768
    assert sum_ms(own) == pytest.approx(10.863, rel=1e-3)
    said = [entry.what for meta in trace.metas for entry in meta.not_measured]
    assert "7 ranks of 8" in said


def test_a_forward_without_an_announcement_is_inferred_from_its_stack(tmp_path: Path) -> None:
    trace = imported(tmp_path, more("hf-h100-qwen-forward"))
    (step,) = trace.passes.to_pylist()
    assert (step["phase"], step["tag_source"]) == ("prefill", "inferred")
    said = [entry.what for meta in trace.metas for entry in meta.not_measured]
    assert "a certain label of 1 pass" in said


def test_a_recording_of_generate_has_the_passes_that_were_made(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.ones((2, 9), dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    file = tmp_path / "recorded.json"
    recorded.export_chrome_trace(str(file))
    trace = imported(tmp_path, file)
    rows = sorted(trace.passes.to_pylist(), key=lambda row: row["start_ns"])
    assert [row["phase"] for row in rows] == ["prefill"] + ["decode"] * 4
    # Both layers of each pass, and its head, multiply matrices: seven and one.
    for row in rows:
        own = kernels_of(trace, row["pass_id"])
        products = [kernel for kernel in own if kernel["name"] == "aten::linear"]
        assert len(products) == 2 * 7 + 1


@pytest.mark.parametrize("name", ["odd-cpu-only", "odd-no-rank", "odd-no-distributed-info"])
def test_recordings_without_kernels_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    trace = imported(tmp_path, more(name))
    assert trace.passes.num_rows == 0
    assert set(trace.kernels.column("device").to_pylist()) <= {"cpu"}
    said = capsys.readouterr().out
    assert "no steps found" in said
    assert "Nothing announces prefill or decode" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"PAR1", "a Parquet file"),
        (b'{"a": 1}', "it has no list `traceEvents`"),
        (b"hello", "it has no list `traceEvents`"),
        (b'{"traceEvents": []}', "holds no event of torch.profiler"),
        (b'{"traceEvents": [{"ph": "X", "name": "x"}]}', "holds no event of torch.profiler"),
    ],
)
def test_what_is_no_recording_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert main(["import", str(file), "-o", str(tmp_path / "trace")]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("given", ["prefill", "=prefill", "x=training", "x="])
def test_a_wrong_annotation_is_a_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    file = KEPT / "vllm-mi300x-decode-full-graph.json.gz"
    call = ["import", str(file), "--annotation", given, "-o", str(tmp_path / "trace")]
    assert main(call) == 2
    assert "--annotation takes NAME=PHASE" in " ".join(capsys.readouterr().err.split())


def test_importing_needs_no_torch(tmp_path: Path) -> None:
    file = KEPT / "vllm-mi300x-decode-full-graph.json.gz"
    code = (
        "import sys; from phaseprof.cli.main import main; "
        f"code = main(['import', {str(file)!r}, '-o', {str(tmp_path / 'trace')!r}]); "
        "assert code == 0; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("whole", [True, False])
def test_sglang_is_told_from_vllm_whose_form_of_ranges_it_has_too(
    tmp_path: Path, whole: bool
) -> None:
    name = "sglang-mi300x-extend"
    (meta,) = imported(tmp_path, more(name) if whole else KEPT / f"{name}.json.gz").metas
    assert [model.engine for model in meta.models] == ["sglang"]
