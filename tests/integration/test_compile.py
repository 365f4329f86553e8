"""torch.compile: passes are seen, the graph stays whole, the output is what it is without the profiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaForCausalLM

IDS = torch.arange(3, 11).reshape(1, 8)

Build = Callable[[LlamaForCausalLM], Callable[[], torch.Tensor]]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_module(model: LlamaForCausalLM) -> Callable[[], torch.Tensor]:
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    return lambda: compiled(IDS, use_cache=False).logits


def compile_call(model: LlamaForCausalLM) -> Callable[[], torch.Tensor]:
    compiled: Any = torch.compile(model.__call__, backend="eager", fullgraph=True)
    return lambda: compiled(IDS, use_cache=False).logits


def compile_in_place(model: LlamaForCausalLM) -> Callable[[], torch.Tensor]:
    own = copy.deepcopy(model)
    own.compile(backend="eager", fullgraph=True)
    return lambda: own(IDS, use_cache=False).logits


def compile_forward(model: LlamaForCausalLM) -> Callable[[], torch.Tensor]:
    own = copy.deepcopy(model)
    own.forward = torch.compile(own.forward, backend="eager", fullgraph=True)
    return lambda: own(IDS, use_cache=False).logits


WAYS = [compile_module, compile_call, compile_in_place, compile_forward]


def run_twice(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return call(), call()


@pytest.mark.parametrize("build", WAYS, ids=lambda build: build.__name__)
def test_compiled_while_recording(build: Build, llama: LlamaForCausalLM, record: Any) -> None:
    """One whole graph, compiled in the first pass; both passes are seen."""
    alone = run_twice(build(llama))
    torch._dynamo.reset()
    counters.clear()
    recorded = record(lambda: run_twice(build(llama)))
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded.output, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert recorded.passes("phase", "prefill_tokens", "compiled", "warmup") == [
        ("prefill", 8, True, "compile"),
        ("prefill", 8, True, "first"),
    ]


SEEN = [way for way in WAYS if way is not compile_call]


@pytest.mark.parametrize("build", SEEN, ids=lambda build: build.__name__)
def test_compiled_before_recording(build: Build, llama: LlamaForCausalLM, record: Any) -> None:
    """A graph from before the session is not compiled again for it, nor after it."""
    call = build(llama)
    alone = run_twice(call)
    counters.clear()
    recorded = record(lambda: run_twice(call))
    after = run_twice(call)
    assert counters["stats"]["unique_graphs"] == 0
    assert recorded.passes("phase", "compiled") == [("prefill", True), ("prefill", True)]
    for results in (recorded.output, after):
        assert all(torch.equal(a, b) for a, b in zip(alone, results, strict=True))


def test_bare_call_compiled_before_recording(llama: LlamaForCausalLM, record: Any) -> None:
    """A bound call that was compiled before the session holds nothing of ours: it runs as it did, unseen."""
    call = compile_call(llama)
    alone = run_twice(call)
    recorded = record(lambda: run_twice(call))
    assert torch.equal(alone[1], recorded.output[1])
    assert recorded.passes("phase") == []


def test_call_inlined_into_a_larger_graph(llama: LlamaForCausalLM, record: Any) -> None:
    """The call is a part of somebody's graph: it is handed on, and the graph stays whole."""

    def around(ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(llama(ids, use_cache=False).logits) + 1

    compiled = torch.compile(around, backend="eager", fullgraph=True)
    counters.clear()
    recorded = record(lambda: run_twice(lambda: compiled(IDS)))
    assert counters["stats"]["unique_graphs"] == 1
    assert recorded.passes("phase") == []
    with torch.no_grad():
        assert torch.equal(recorded.output[1], around(IDS))


@pytest.mark.parametrize("before", [False, True], ids=["during", "before"])
def test_call_that_generate_compiles(llama: LlamaForCausalLM, record: Any, before: bool) -> None:
    """With a static cache generate compiles its decode steps by itself (on a CPU when it is told to), and keeps what it
    compiled on the model: its steps are seen whether that was before the session or in it."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    own = copy.deepcopy(llama)

    def run() -> Any:
        return own.generate(
            IDS,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
        )

    alone = run()
    if not before:
        del own._compiled_call
        torch._dynamo.reset()
    kept = getattr(own, "_compiled_call", None)
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    seen = recorded.passes("phase", "compiled")
    assert seen == [("prefill", False), ("decode", True), ("decode", True), ("decode", True)]
    if before:
        assert own._compiled_call is kept
    else:
        assert recorded.passes("warmup")[1] == ("compile",)
    # What is kept on the model calls the bare model: nothing of ours stays behind.
    graphs = counters["stats"]["unique_graphs"]
    assert torch.equal(run(), alone)
    # A graph that was made in the session is made once more after it: the classes inside are what they were again.
    assert counters["stats"]["unique_graphs"] <= graphs + (0 if before else 1)
    assert "phaseprof" not in repr(own._compiled_call.__wrapped__)
