"""`phaseprof what-if` on a recorded run of transformers, as a user calls it, and what it says of a wrong call."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phaseprof.cli.main import main
from phaseprof.session import Session
from phaseprof.trace.meta import Ceilings
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import meta_path, write_json
from phaseprof.workload.generate import run_workload
from phaseprof.workload.load import choose_placement, random_model
from phaseprof.workload.plan import WorkloadPlan

Captured = pytest.CaptureFixture[str]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model, with roofs in its trace as `profile` leaves them there."""
    trace = tmp_path_factory.mktemp("what-if") / "trace"
    model = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    plan = WorkloadPlan(prompt_tokens=(16,), new_tokens=(6,), batches=(1,), repeats=3)
    session = Session(trace, model=model, workload=plan.facts())
    session.start()
    run_workload(model, plan)
    session.stop()
    (meta,) = open_trace(trace).metas
    (device,) = meta.devices
    roofs = Ceilings(device.key, "float32", 1e11, 1e10, "measured", 0, 0.02, "by hand")
    keep(trace, roofs)
    return trace


def keep(trace: Path, *roofs: Ceilings) -> None:
    """Put roofs in the place of those that a trace holds."""
    (meta,) = open_trace(trace).metas
    path = meta_path(trace, meta.rank, meta.pid, meta.host_token)
    write_json(path, replace(meta, ceilings=roofs).to_json())


def said(*args: str | Path, capsys: Captured) -> str:
    assert main([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


def test_all_changes_of_a_recorded_run(recorded: Path, capsys: Captured) -> None:
    text = said("what-if", recorded, "--width", "100", capsys=capsys)
    assert text.startswith("phaseprof what-if · tiny (random weights) · transformers")
    assert "CUDA graphs: a CPU has no CUDA graphs." in text
    data = json.loads(said("what-if", recorded, "--json", capsys=capsys))
    report = json.loads(said("report", recorded, "--json", capsys=capsys))
    # The run without a change is the run as the report has it.
    assert data["measured"]["tpot_ms"]["value"] == report["requests"]["tpot_ms"]["p50"]
    assert data["measured"]["ttft_ms"]["value"] == report["requests"]["ttft_ms"]["p50"]
    assert data["measured"]["gain"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    batch = [each for each in data["outcomes"] if each["title"].startswith("batch")]
    assert batch and batch[0]["gain"]["value"] > 1


def test_the_arithmetic_of_what_was_asked_for(recorded: Path, capsys: Captured) -> None:
    args = ("--batch", "4", "--speculate", "3:0.5", "--explain")
    text = said("what-if", recorded, *args, capsys=capsys)
    assert "all together" in text
    # (1 - 0.5^4) / 0.5
    assert "tokens a step" in text and "1.88" in text
    assert "B + g (M' - M)" in text


def test_another_device_by_its_name(recorded: Path, capsys: Captured) -> None:
    text = said("what-if", recorded, "--device", "h100-sxm", capsys=capsys)
    assert "H100 SXM" in text and "bfloat16 there" in text
    assert "h200-sxm" in said("what-if", recorded, "--device", "list", capsys=capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--weights", "int3"], "--weights 'int3' is not one of fp8, int8, int4."),
        (["--speculate", "many"], "--speculate 'many' is not of the form K[:A[:COST]]."),
        (["--speculate", "4:1.5"], "an acceptance of 1.5 is not from 0 up to 1."),
        (["--mla", "--kv-heads", "1"], "--mla and --kv-heads are two models."),
        (["--batch", "0"], "a batch of 0 is less than one sequence."),
        (["--device", "abacus"], "The device 'abacus' is not known."),
    ],
)
def test_wrong_calls(recorded: Path, args: list[str], message: str, capsys: Captured) -> None:
    assert main(["what-if", str(recorded), *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_without_roofs_it_says_what_to_do(
    recorded: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path / "cache"))
    bare = tmp_path / "bare"
    shutil.copytree(recorded, bare)
    keep(bare)
    assert main(["what-if", str(bare)]) == 1
    err = capsys.readouterr().err
    assert "what a change would do cannot be worked out" in err
    assert "`phaseprof calibrate` measures them." in err
    # The report of the same trace says so in a line, and is a report all the same.
    assert "No change can be worked out" in said("report", bare, capsys=capsys)
