"""Passes on a CUDA device: labels, device time, and a workload that notices nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phaseprof
from phaseprof.trace.reader import Trace, open_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_llama(device: str) -> LlamaForCausalLM:
    """A model whose passes take some hundred microseconds on a device."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=2048,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()


def generate(model: LlamaForCausalLM, rows: int = 1, **kwargs: Any) -> torch.Tensor:
    ids = torch.arange(3, 3 + 64 * rows, device=model.device).reshape(rows, 64)
    out = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, **kwargs)
    return torch.as_tensor(out)


def recorded(path: Path, model: LlamaForCausalLM, **kwargs: Any) -> tuple[torch.Tensor, Trace]:
    with phaseprof.profile(model, path):
        out = generate(model, **kwargs)
    return out, open_trace(path)


@pytest.mark.parametrize(
    "kwargs", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"]
)
def test_labels_output_and_device_time(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """Every pass has a device time of its own, inside the run's; the output is the same."""
    model = make_llama("cuda")
    generate(model, **kwargs)
    alone = generate(model, **kwargs)
    out, trace = recorded(tmp_path / "t", model, **kwargs)
    assert torch.equal(alone, out)
    assert trace.passes.column("phase").to_pylist() == ["prefill"] + ["decode"] * 7
    device_ns = trace.passes.column("device_ns").to_pylist()
    assert all(value is not None and value > 0 for value in device_ns)
    begin, end = trace.passes.column("start_ns").to_pylist()[0], trace.metas[0].ended_ns
    assert end is not None and sum(device_ns) < end - begin
    (device,) = trace.metas[0].devices
    assert device.kind == "cuda"


def test_device_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    """A long pass: events and a synchronized clock agree within a fifth."""
    model = make_llama("cuda")
    ids = torch.randint(3, 2048, (8, 4096), device="cuda")
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        model(ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()
        expected_ns = time.perf_counter_ns() - begin
        with phaseprof.profile(model, tmp_path / "t"):
            model(ids, use_cache=False, logits_to_keep=1)
    (device_ns,) = open_trace(tmp_path / "t").passes.column("device_ns").to_pylist()
    assert 0.8 * expected_ns < device_ns < 1.2 * expected_ns


def test_a_batch_whose_rows_may_end_claims_no_padding(tmp_path: Path) -> None:
    """Which rows have ended is not read from the device: the padding is unknown, and the trace says why."""
    _, trace = recorded(tmp_path / "t", make_llama("cuda"), rows=3)
    assert trace.passes.column("padding_tokens").to_pylist() == [0] + [None] * 7
    assert [note.what for note in trace.metas[0].not_measured] == ["padding of some passes"]


def test_a_graph_captured_inside_a_session(tmp_path: Path) -> None:
    """Nothing of ours is captured, and the graph replays to what the model computes."""
    model = make_llama("cuda")
    ids = torch.arange(3, 35, device="cuda").reshape(1, 32)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with phaseprof.profile(model, tmp_path / "t"):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                model(ids, use_cache=False)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model(ids, use_cache=False).logits
            graph.replay()
            torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected)
    timed = [
        value is not None
        for value in open_trace(tmp_path / "t").passes.column("device_ns").to_pylist()
    ]
    assert timed == [True, False]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_model_on_another_device_than_the_current_one(tmp_path: Path) -> None:
    _, trace = recorded(tmp_path / "t", make_llama("cuda:1"))
    assert all(value > 0 for value in trace.passes.column("device_ns").to_pylist())
