"""The collectors beside a model on a CUDA device: what they record, and that the output stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.collectors.collection import make
from phaseprof.collectors.known import KNOWN, Chosen
from phaseprof.metrics import Metric, is_possible
from phaseprof.session import Session
from phaseprof.trace.reader import Trace, open_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Two layers of an 8B model: passes of a millisecond."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16).eval()


def generate(model: LlamaForCausalLM, new: int = 64) -> torch.Tensor:
    ids = torch.arange(3, 3 + 1024, device="cuda").reshape(1, 1024)
    out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return torch.as_tensor(out)


def needs(name: str) -> None:
    (known,) = (each for each in KNOWN if each.name == name)
    answer = make(Chosen(known, asked=True)).probe()
    if not answer.available:
        pytest.skip(f"{name}: {answer.detail}")


def record(model: LlamaForCausalLM, path: Path, collect: str, times: int) -> Trace:
    """Generate under a session, with the same output as without one."""
    alone = generate(model)
    session = Session(path, collect=collect)
    session.start()
    try:
        outputs = [generate(model) for _ in range(times)]
        torch.cuda.synchronize()
    finally:
        session.stop()
    assert all(torch.equal(alone, out) for out in outputs)
    return open_trace(path)


def samples(trace: Trace, source: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by metric; all of them possible, of the model's device, and inside the run."""
    (device,) = trace.metas[0].devices
    begin, end = trace.metas[0].started_ns, trace.metas[0].ended_ns
    assert end is not None
    found: dict[str, list[dict[str, Any]]] = {}
    for row in trace.samples.to_pylist():
        if row["source"] == source:
            assert row["device"] == device.uuid
            assert begin - 10**9 < row["start_ns"] <= row["end_ns"] < end + 10**9
            assert is_possible(Metric(row["metric"]), row["value"])
            found.setdefault(row["metric"], []).append(row)
    return found


def test_nvml_sees_a_device_at_work(model: LlamaForCausalLM, tmp_path: Path) -> None:
    needs("nvml")
    found = samples(record(model, tmp_path / "t", "nvml", 20), "nvml")
    assert max(row["value"] for row in found[Metric.POWER]) > 20
    assert max(row["value"] for row in found[Metric.SM_CLOCK]) > 200e6
    used = torch.cuda.memory_allocated()
    assert max(row["value"] for row in found[Metric.MEMORY_USED]) > used


def test_gpm_sees_the_sms(model: LlamaForCausalLM, tmp_path: Path) -> None:
    needs("gpm")
    found = samples(record(model, tmp_path / "t", "gpm", 40), "gpm")
    for metric in (Metric.SM_ACTIVE, Metric.TENSOR_ACTIVE, Metric.DRAM_ACTIVE):
        assert max(row["value"] for row in found[metric]) > 0.01, metric


def test_pm_tells_prefill_from_decode(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Windows of a millisecond are shorter than a prefill of 1024 tokens."""
    needs("pm")
    trace = record(model, tmp_path / "t", "pm", 10)
    if not trace.samples.num_rows:
        pytest.skip("; ".join(note.why for note in trace.metas[0].not_measured))
    found = samples(trace, "pm")
    windows = found[Metric.SM_ACTIVE]
    assert all(0.9e6 < row["end_ns"] - row["start_ns"] < 10e6 for row in windows[:-1])
    assert max(row["value"] for row in windows) > 0.3


def test_kernels_belong_to_their_passes(model: LlamaForCausalLM, tmp_path: Path) -> None:
    needs("kernels")
    trace = record(model, tmp_path / "t", "kernels", 4)
    passes = {row["pass_id"]: row for row in trace.passes.to_pylist()}
    kernels = [row for row in trace.kernels.to_pylist() if row["pass_id"] is not None]
    assert kernels, "; ".join(note.why for note in trace.metas[0].not_measured)
    seen = {passes[row["pass_id"]]["phase"] for row in kernels}
    assert seen == {"prefill", "decode"}
    for pass_id in {row["pass_id"] for row in kernels}:
        own = [row for row in kernels if row["pass_id"] == pass_id]
        extent = max(row["end_ns"] for row in own) - min(row["start_ns"] for row in own)
        assert passes[pass_id]["profiled"]
        device_ns = passes[pass_id]["device_ns"]
        assert device_ns is None or extent < 1.2 * device_ns + 50_000
        # Two layers: four projections, three of the MLP, attention; and the head.
        assert len(own) > 15
