"""`phaseprof profile` as a user runs it: a report or JSON, refusals of what cannot be run, Ctrl-C, no network."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from phaseprof.cli.main import main
from phaseprof.trace.reader import open_trace
from phaseprof.workload.load import choose_placement, random_model

PROGRAM = (sys.executable, "-m", "phaseprof", "profile")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = ("--prompt-tokens", "12", "--new-tokens", "4", "--repeats", "2", "--no-calibrate")


@pytest.fixture
def config(tmp_path: Path) -> str:
    folder = tmp_path / "Tiny-1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args], capture_output=True, encoding="utf-8", timeout=300, check=False
    )


def test_the_report_goes_to_stdout_and_one_line_to_stderr(config: str, tmp_path: Path) -> None:
    done = run("--model-config", config, *SMALL, "--batch", "1,3", "-o", "t")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "phaseprof: profiling Tiny-1 (random weights) on cpu in float32: "
        "4 calls of 12 prompt + 4 new tokens, batch 1, 3"
    ]
    assert done.stdout.startswith("phaseprof · Tiny-1 (random weights) · transformers ")
    assert "12 prompt + 4 new tokens, batch 1, 3" in " ".join(done.stdout.split())
    trace = open_trace(tmp_path / "t")
    assert trace.metas[0].complete
    assert trace.damage == ()


def test_json_holds_the_passes_of_the_plan(config: str, tmp_path: Path) -> None:
    done = run("--model-config", config, *SMALL, "--batch", "2", "-o", "t", "--json")
    assert done.returncode == 0, done.stderr
    phases = json.loads(done.stdout)["phases"]
    # Two counted calls of a batch of 2: each one prefill pass of 24 tokens and three decode passes of 2.
    assert (phases["prefill"]["passes"], phases["prefill"]["tokens"]) == (2, 48)
    assert (phases["decode"]["passes"], phases["decode"]["tokens"]) == (6, 12)
    workload = open_trace(tmp_path / "t").metas[0].workload
    assert workload is not None
    assert (workload["prompt_tokens"], workload["new_tokens"]) == (12, 4)
    assert (workload["batch"], workload["repeats"], workload["seed"]) == ([2], 2, 0)


def test_each_phase_has_a_busy_figure_on_a_cpu(config: str, tmp_path: Path) -> None:
    done = run("--model-config", config, *SMALL, "-o", "t", "--json")
    phases = json.loads(done.stdout)["phases"]
    assert phases["prefill"]["busy_ms"] > 0
    assert phases["decode"]["busy_ms"] > 0
    passes = open_trace(tmp_path / "t").passes
    flagged = passes.filter(passes["profiled"])
    assert set(flagged["phase"].to_pylist()) == {"prefill", "decode"}


def test_a_local_model_is_called_by_its_folder(tmp_path: Path) -> None:
    made: Any = random_model(CONFIG, choose_placement("cpu"), name="x")
    made.save_pretrained(tmp_path / "my-model")
    done = run("my-model", *SMALL, "--dtype", "bf16", "--attn", "eager", "--cache", "static")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("phaseprof · my-model · ")
    (trace,) = tmp_path.glob("phaseprof-*")
    (model,) = open_trace(trace).metas[0].models
    assert (model.name, model.attn_implementation) == ("my-model", "eager")
    assert model.cache_class == "StaticCache"
    assert model.cost is not None and model.cost.dtype == "bfloat16"


def test_without_network_the_embedded_model_has_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEPROF_OFFLINE", "1")
    small = ("--prompt-tokens", "8", "--new-tokens", "2", "--repeats", "1", "--warmup", "0")
    done = run(*small, "--no-calibrate", "-o", "t")
    assert done.returncode == 0, done.stderr
    assert "phaseprof: SmolLM2-135M-Instruct cannot be had here: " in done.stderr
    assert done.stdout.startswith("phaseprof · SmolLM2-135M-Instruct (random weights) · ")
    trace = open_trace(tmp_path / "t")
    assert trace.metas[0].workload is not None
    assert "Random weights" in trace.metas[0].workload["note"]
    cost = trace.metas[0].models[0].cost
    assert cost is not None and cost.parameters == 134_515_008


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prompt-tokens", "0"], "Prompt tokens: 0 is less than 1."),
        (["--new-tokens", "-5"], "New tokens: -5 is less than 1."),
        (["--repeats", "0"], "Repeats: 0 is less than 1."),
        (["--warmup", "-1"], "Warm-up calls: -1 is less than 0."),
        (["--batch", "1,,2"], "--batch '1,,2': '' is not a whole number."),
        (["--batch", "1,x"], "--batch '1,x': 'x' is not a whole number."),
        (["--batch", "0"], "Batch size: 0 is less than 1."),
        (["--batch", "2,2"], "A batch size is named twice."),
        (["--dtype", "int4"], "Unknown dtype 'int4'."),
        (["--device", "tpu"], "Unknown device 'tpu'."),
        (["--attn", "magic"], "Unknown attention implementation 'magic'."),
        (["--cache", "magic"], "Unknown cache implementation 'magic'."),
        (["--threads", "0"], "Threads: 0 is less than 1."),
        (["model", "--model-config", "x"], "MODEL and --model-config exclude each other."),
        (["-o", "taken"], "The folder taken is not empty."),
        (["-o", "taken/file"], "taken/file is a file."),
        (["--prompt-tokens", "many"], "--prompt-tokens 'many': 'many' is not a whole number."),
        (["--new-tokens", "4,4"], "A number of new tokens is named twice."),
        (["--resume"], "--resume does not say with which trace."),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_what_cannot_be_run_is_refused(
    args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("", encoding="utf-8")
    assert main(["profile", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[0]
    assert not (tmp_path / "cache").exists()  # nothing was fetched or measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--device", "cuda"]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_a_prompt_longer_than_the_positions_is_refused(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model-config", config, "--prompt-tokens", "63", "--new-tokens", "3"]
    assert main(["profile", *args, "-o", "t"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "phaseprof: 63 prompt + 3 new tokens need 65 positions; the model has 64.",
        "Use --prompt-tokens 62 or fewer.",
    ]
    assert not Path("t").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["./nowhere"], "There is no folder ./nowhere."),
        (["--model-config", "nowhere.json"], "No file nowhere.json."),
        (["empty"], "The folder empty has no config.json."),
    ],
)
def test_a_model_that_is_not_there_is_said(
    args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["profile", *args]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == f"phaseprof: {said}"


def interrupt_when(
    process: subprocess.Popen[str],
    ready: Path,
    pattern: str,
    wanted: Callable[[Path], bool] = Path.exists,
) -> None:
    """Send SIGINT once something matches that is wanted."""
    deadline = time.monotonic() + 120
    while not any(map(wanted, ready.glob(pattern))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)


def test_ctrl_c_reports_what_was_recorded(config: str, tmp_path: Path) -> None:
    args = ["--model-config", config, "--prompt-tokens", "8", "--new-tokens", "32"]
    process = subprocess.Popen(
        [*PROGRAM, *args, "--repeats", "100000", "--no-calibrate", "-o", "t"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    interrupt_when(process, tmp_path / "t", "requests/**/*.parquet")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("phaseprof · Tiny-1 (random weights)")
    assert "calls; the report covers those" in err.splitlines()[-1]
    assert "Traceback" not in err
    trace = open_trace(tmp_path / "t")
    assert trace.metas[0].complete
    assert trace.passes.num_rows > 0


GRID = ("--prompt-tokens", "6,12", "--new-tokens", "4", "--batch", "1,2", "--no-calibrate")


def test_a_sweep_goes_on_where_it_was_interrupted(config: str, tmp_path: Path) -> None:
    args = ["--model-config", config, *GRID, "--repeats", "400", "-o", "t"]
    process = subprocess.Popen(
        [*PROGRAM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    interrupt_when(process, tmp_path / "t", "calls/**/*.parquet", has_counted)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "--resume -o t goes on with the rest" in err.splitlines()[-1]
    made = [call for call in open_trace(tmp_path / "t").calls.to_pylist() if is_counted(call)]

    more = str(max(call["repeat"] for call in made) + 2)
    done = run("--model-config", config, *GRID, "--repeats", more, "-o", "t", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"the trace has {len(made)} of these calls" in done.stderr
    trace = open_trace(tmp_path / "t")
    assert len(trace.metas) == 2
    calls = [call for call in trace.calls.to_pylist() if is_counted(call)]
    sizes = [(call["prompt_tokens"], call["sequences"], call["repeat"]) for call in calls]
    assert sorted(sizes) == [(p, b, n) for p in (6, 12) for b in (1, 2) for n in range(int(more))]
    passes = trace.passes.to_pylist()
    assert len({row["pass_id"] for row in passes}) == len(passes)

    again = run("--model-config", config, *GRID, "--repeats", more, "-o", "t", "--resume")
    assert again.returncode == 0, again.stderr
    assert "nothing is left to run" in again.stderr
    assert len(open_trace(tmp_path / "t").metas) == 2

    refused = run("--model-config", config, *GRID, "--batch", "1,4", "-o", "t", "--resume")
    assert refused.returncode == 2
    assert "batch sizes 1, 2 there, 1, 4 here." in refused.stderr


def has_counted(part: Path) -> bool:
    # Parts are merged meanwhile.
    with contextlib.suppress(FileNotFoundError):
        return "counted" in pq.read_table(part).column("kind").to_pylist()
    return False


def is_counted(call: dict[str, Any]) -> bool:
    return bool(call["kind"] == "counted")
