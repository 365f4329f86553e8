"""Times of passes on a CUDA device: streams, graphs that are captured and replayed, passes that raise, two devices."""

from __future__ import annotations

from collections.abc import Callable
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

IDS = torch.arange(3, 67).reshape(1, 64)


def make_llama(device: str | None = "cuda") -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=2048,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype=torch.bfloat16).eval()
    return model if device is None else model.to(device)


def recorded(path: Path, model: Any, run: Callable[[], Any]) -> Trace:
    with torch.no_grad(), phaseprof.profile(model, path):
        run()
    return open_trace(path)


def column(trace: Trace, name: str) -> list[Any]:
    return list(trace.passes.column(name).to_pylist())


def test_a_pass_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """While the default stream is busy with something else."""
    model, ids = make_llama(), IDS.cuda()
    other = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        for _ in range(5):
            other @ other
            with torch.cuda.stream(stream):
                model(ids, use_cache=False)

    times = column(recorded(tmp_path / "t", model, run), "device_ns")
    assert len(times) == 5 and all(time > 0 for time in times)


def test_passes_that_are_launched_ahead_do_not_overlap(tmp_path: Path) -> None:
    model, ids = make_llama(), IDS.repeat(32, 32).cuda()
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    torch.cuda.synchronize()
    trace = recorded(
        tmp_path / "t",
        model,
        lambda: [model(ids, use_cache=False, logits_to_keep=1) for _ in range(8)],
    )
    times = column(trace, "device_ns")
    (ended,) = {meta.ended_ns for meta in trace.metas}
    assert ended is not None
    assert sum(times) <= ended - column(trace, "start_ns")[0]
    # The call returns before the device has done the work.
    assert times[0] > column(trace, "host_ns")[0]


def test_a_pass_that_is_captured_is_set_aside(tmp_path: Path) -> None:
    model, ids = make_llama(), IDS.cuda()

    def run() -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            model(ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(ids, use_cache=False)
        graph.replay()
        model(ids, use_cache=False)

    trace = recorded(tmp_path / "t", model, run)
    timed = [value is not None for value in column(trace, "device_ns")]
    assert timed == [True, False, True]
    assert column(trace, "warmup") == ["first", "compile", None]


def test_a_capture_of_torch_compile_is_set_aside_and_its_replays_are_timed(tmp_path: Path) -> None:
    model, ids = make_llama(), IDS.cuda()
    before = vars(torch.cuda.CUDAGraph)["capture_begin"]
    compiled: Any = torch.compile(model, mode="reduce-overhead")
    begin_step: Any = torch.compiler.cudagraph_mark_step_begin

    def run() -> None:
        for _ in range(8):
            begin_step()
            compiled(ids, use_cache=False)

    trace = recorded(tmp_path / "t", model, run)
    assert all(value is not None for value in column(trace, "device_ns"))
    warmups = column(trace, "warmup")
    assert "compile" in warmups[:4] and set(warmups[4:]) == {None}
    assert vars(torch.cuda.CUDAGraph)["capture_begin"] is before


def test_a_pass_that_raises_keeps_its_time(tmp_path: Path) -> None:
    model, ids = make_llama(), IDS.cuda()

    def fails(*_: Any) -> None:
        raise ArithmeticError

    def run() -> None:
        hook = model.lm_head.register_forward_hook(fails)
        with pytest.raises(ArithmeticError):
            model(ids, use_cache=False)
        hook.remove()
        model(ids, use_cache=False)

    trace = recorded(tmp_path / "t", model, run)
    assert column(trace, "error") == ["ArithmeticError", None]
    assert all(value > 0 for value in column(trace, "device_ns"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_model_on_two_devices(tmp_path: Path) -> None:
    """Its time is no less than that of the same model on one of them, by much."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_llama(), IDS.repeat(16, 16).cuda()

    def run() -> None:
        for _ in range(6):
            spread(ids, use_cache=False, logits_to_keep=1)

    spread = model
    alone = sorted(column(recorded(tmp_path / "one", model, run), "device_ns"))[3]
    device_map = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    device_map |= {f"model.layers.{n}": n // 2 for n in range(4)}
    spread = accelerate.dispatch_model(make_llama(None), device_map)
    trace = recorded(tmp_path / "two", spread, run)
    assert sorted(column(trace, "device_ns"))[3] > 0.8 * alone
    assert trace.metas[0].models[0].devices == 2
