"""torch.compile: passes are seen, the graph stays whole, the output is what it is without the profiler."""

from __future__ import annotations

import copy
import inspect
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


@pytest.mark.parametrize("build", WAYS, ids=lambda build: build.__name__)
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


@pytest.mark.parametrize("method", ["forward", "__call__"])
@pytest.mark.parametrize("before", [False, True], ids=["during", "before"])
def test_what_a_compiled_function_holds(
    method: str, before: bool, llama: LlamaForCausalLM, record: Any
) -> None:
    """A compiled bound method is seen as one pass with its head, and holds after the session what it held before."""

    def compile_method() -> Any:
        return torch.compile(getattr(llama, method), backend="eager", fullgraph=True)

    def held(function: Any) -> Any:
        return inspect.getclosurevars(function).nonlocals["fn"]

    kept = compile_method()
    original = held(kept)
    made: list[Any] = [kept]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if not before:
            made.append(compile_method())
        return run_twice(lambda: made[-1](IDS, use_cache=False).logits)

    if before:
        run()
    counters.clear()
    recorded = record(run)
    assert counters["stats"]["unique_graphs"] == (0 if before else 1)
    assert not counters["graph_break"]
    columns = ("model_id", "phase", "prefill_tokens", "logits_tokens", "compiled")
    assert recorded.passes(*columns) == [("LlamaForCausalLM-1", "prefill", 8, 8, True)] * 2
    assert held(kept) is original
    if method == "forward":
        assert "phaseprof" not in held(made[-1]).__func__.__code__.co_filename
    with torch.no_grad():
        assert torch.equal(made[-1](IDS, use_cache=False).logits, recorded.output[0])


def test_layers_compiled_one_by_one(llama: LlamaForCausalLM, record: Any) -> None:
    """Regional compilation: the model's own call is seen, the compiled layers are a part of it."""
    own = copy.deepcopy(llama)
    for layer in own.model.layers:
        layer.compile(backend="eager", fullgraph=True)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return run_twice(lambda: own(IDS, use_cache=False).logits)

    alone = run()
    graphs = counters["stats"]["unique_graphs"]
    recorded = record(run)
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded.output, strict=True))
    assert (
        recorded.passes("model_id", "phase", "logits_tokens")
        == [("LlamaForCausalLM-1", "prefill", 8)] * 2
    )


def test_graphs_with_and_without_us(llama: LlamaForCausalLM, record: Any) -> None:
    """A compiled function around generate breaks its graph where it does without us, and nowhere else."""

    def around(ids: torch.Tensor) -> torch.Tensor:
        first = torch.as_tensor(llama(ids, use_cache=False).logits) + 1
        print(end="")
        return first + torch.as_tensor(llama(ids, use_cache=False).logits)

    def run() -> tuple[torch.Tensor, int, dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(around, backend="eager")
        with torch.no_grad():
            result = compiled(IDS)
        return result, counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    alone = run()
    recorded = record(run)
    assert torch.equal(alone[0], recorded.output[0])
    assert alone[1:] == recorded.output[1:]


def test_call_inlined_into_a_larger_graph(llama: LlamaForCausalLM, record: Any) -> None:
    """The call is a part of somebody's graph: it is handed on, the graph stays whole, and the run says so."""

    def around(ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(llama(ids, use_cache=False).logits) + 1

    compiled = torch.compile(around, backend="eager", fullgraph=True)
    counters.clear()
    recorded = record(lambda: run_twice(lambda: compiled(IDS)))
    assert counters["stats"]["unique_graphs"] == 1
    assert recorded.passes("phase") == []
    (note,) = recorded.trace.metas[0].not_measured
    assert note.what == "calls of LlamaForCausalLM inside a function that is compiled"
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
