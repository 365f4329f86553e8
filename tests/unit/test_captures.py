"""Which graphs are being captured: counted in the two methods of torch that begin and end a capture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.hooks.captures import CaptureHook
from phaseprof.timers import Captures


class Graph:
    """Like `torch.cuda.CUDAGraph`."""

    fails: str = ""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> str:
        if self.fails == "begin":
            raise RuntimeError("a capture is under way")
        return f"{pool} {capture_error_mode}"

    def capture_end(self) -> None:
        if self.fails == "end":
            raise RuntimeError("the capture was broken")


@pytest.fixture
def captures() -> Captures:
    return Captures()


@pytest.fixture
def hook(captures: Captures) -> Iterator[CaptureHook]:
    before = dict(vars(Graph))
    hook = CaptureHook(captures)
    hook.set(SimpleNamespace(CUDAGraph=Graph))
    yield hook
    hook.remove()
    assert dict(vars(Graph)) == before


@pytest.mark.usefixtures("hook")
def test_captures_are_counted(captures: Captures) -> None:
    one, two = Graph(), Graph()
    assert one.capture_begin("pool", capture_error_mode="relaxed") == "pool relaxed"
    two.capture_begin()
    assert (captures.underway, captures.begun) == (2, 2)
    one.capture_end()
    assert (captures.underway, captures.begun) == (1, 2)
    two.capture_end()
    one.capture_begin()
    one.capture_end()
    assert (captures.underway, captures.begun) == (0, 3)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_capture_that_fails_is_under_way_no_more(captures: Captures, fails: str) -> None:
    graph = Graph()
    graph.fails = fails
    with pytest.raises(RuntimeError, match="capture"):
        graph.capture_begin()
        graph.capture_end()
    assert captures.underway == 0


@pytest.mark.usefixtures("hook")
def test_the_end_of_a_capture_from_before_is_no_end(captures: Captures) -> None:
    Graph().capture_end()
    assert captures.underway == 0


def test_a_capture_that_outlives_the_hook(captures: Captures, hook: CaptureHook) -> None:
    graph = Graph()
    begin = Graph.capture_begin
    graph.capture_begin()
    hook.remove()
    assert captures.underway == 0
    graph.capture_end()
    # Somebody may have kept the wrapper.
    begin(graph)
    assert (captures.underway, captures.begun) == (0, 1)


@pytest.mark.usefixtures("hook")
def test_the_methods_look_as_they_did() -> None:
    assert list(inspect.signature(Graph.capture_begin).parameters) == [
        "self",
        "pool",
        "capture_error_mode",
    ]


def test_nothing_to_count(captures: Captures) -> None:
    hook = CaptureHook(captures)
    hook.set(SimpleNamespace())
    hook.remove()
    assert captures.begun == 0


def test_the_methods_of_torch() -> None:
    """They are where they are looked for, and are called as they are wrapped."""
    graph = pytest.importorskip("torch").cuda.CUDAGraph
    assert list(inspect.signature(graph.capture_end).parameters) == ["self"]
    assert next(iter(inspect.signature(graph.capture_begin).parameters)) == "self"
