"""Operators as torch.profiler sees them: on the Unix clock, outermost, of every thread, and never in anyone's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from phaseprof.collectors.operators import OperatorEvent, busy_ns, record_operators

#: What the two clocks may differ by. Another epoch would be off by days.
_CLOCK_SLACK_NS = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def _first_window() -> None:
    """The first session of a process is slow to start; the tests look at later ones."""
    with record_operators():
        pass


def _profiler_is_on() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def test_events_lie_on_the_unix_clock() -> None:
    left = torch.ones(256, 256)
    with record_operators() as window:
        before_ns = time.time_ns()
        torch.mm(left, left)
        between_ns = time.time_ns()
        time.sleep(0.02)
        torch.mm(left, left)
        after_ns = time.time_ns()
    first, second = window.events
    assert before_ns - _CLOCK_SLACK_NS <= first.start_ns < first.end_ns
    assert first.end_ns <= between_ns + _CLOCK_SLACK_NS
    assert between_ns + 20_000_000 - _CLOCK_SLACK_NS <= second.start_ns
    assert second.end_ns <= after_ns + _CLOCK_SLACK_NS


def test_only_outermost_operators_are_kept() -> None:
    x, weight, bias = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)
    with record_operators() as window, torch.no_grad():
        functional.gelu(functional.linear(x, weight, bias))
    assert [event.name for event in window.events] == ["aten::linear", "aten::gelu"]
    assert window.not_measured is None


def test_annotations_are_not_operators() -> None:
    x = torch.ones(4)
    with record_operators() as window, record_function("aten::not_an_operator"):
        torch.neg(x)
    assert [event.name for event in window.events] == ["aten::neg"]


def test_operators_of_other_threads_carry_their_native_ids() -> None:
    if not _sees_all_threads():
        pytest.skip("this torch profiles one thread")
    x = torch.ones(4)
    ids: dict[str, int] = {}

    def work(name: str, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operator(x)
        ids[name] = threading.get_native_id()

    with record_operators() as window:
        work("aten::neg", torch.neg)
        other = threading.Thread(target=work, args=("aten::exp", torch.exp))
        other.start()
        other.join()
    assert {event.name: event.thread_id for event in window.events} == ids
    assert len(set(ids.values())) == 2


def _sees_all_threads() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)


def _busy_share(events: tuple[OperatorEvent, ...], start_ns: int, end_ns: int) -> float:
    return busy_ns(events, start_ns, end_ns) / (end_ns - start_ns)


def test_one_large_matmul_is_busy() -> None:
    left = torch.randn(1024, 1024)
    with record_operators() as window:
        start_ns = time.time_ns()
        torch.mm(left, left)
        end_ns = time.time_ns()
    assert _busy_share(window.events, start_ns, end_ns) > 0.6


def test_small_operators_between_python_are_not_busy() -> None:
    """Each turn adds four numbers in torch, and some thousand in Python."""
    x = torch.ones(4)
    with record_operators() as window:
        start_ns = time.time_ns()
        for _ in range(200):
            torch.neg(x)
            sum(number for number in range(5_000))
        end_ns = time.time_ns()
    assert len(window.events) == 200
    assert _busy_share(window.events, start_ns, end_ns) < 0.3


def test_an_exception_of_the_block_passes_through() -> None:
    with pytest.raises(ValueError, match="of the workload"), record_operators() as window:
        torch.neg(torch.ones(4))
        raise ValueError("of the workload")
    assert "aten::neg" in {event.name for event in window.events}
    assert not _profiler_is_on()


def test_a_window_can_follow_a_window() -> None:
    x = torch.ones(4)
    for operator in (torch.neg, torch.exp):
        with record_operators() as window:
            operator(x)
        assert [event.name for event in window.events] == [f"aten::{operator.__name__}"]


def test_it_steps_aside_for_a_running_profiler() -> None:
    x = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with record_operators() as window:
            torch.neg(x)
        torch.exp(x)
    assert window.events == ()
    assert window.not_measured is not None
    assert "another torch.profiler session" in window.not_measured.why
    assert {"aten::neg", "aten::exp"} <= _names(theirs)


def test_a_profiler_started_inside_keeps_its_events() -> None:
    x = torch.ones(4)
    with record_operators() as window:
        with profile(activities=[ProfilerActivity.CPU]) as theirs:
            torch.neg(x)
        torch.exp(x)
    assert "aten::neg" in _names(theirs)
    assert window.events == ()
    assert window.not_measured is not None
    assert "took over" in window.not_measured.why


def test_a_profiler_that_outlives_the_window_keeps_its_events() -> None:
    x = torch.ones(4)
    theirs = profile(activities=[ProfilerActivity.CPU])
    with record_operators() as window:
        theirs.start()
        torch.neg(x)
    torch.exp(x)
    theirs.stop()
    assert {"aten::neg", "aten::exp"} <= _names(theirs)
    assert window.not_measured is not None


def _names(session: profile) -> set[str]:
    assert session.profiler is not None
    assert session.profiler.kineto_results is not None
    return {event.name() for event in session.profiler.kineto_results.events()}


def test_compiled_code_has_no_busy_figure() -> None:
    """Placed as torch's inductor backend places it around the code that it generated."""
    x = torch.ones(4)
    with record_operators() as window:
        with torch._C._profiler._RecordFunctionFast("## Call CompiledFxGraph fabcdef ##"):
            torch.neg(x)
        torch.exp(x)
    assert window.events == ()
    assert window.not_measured is not None
    assert "torch.compile" in window.not_measured.why


_WORKLOAD = """
import os, sys, torch
from phaseprof.collectors.operators import record_operators
for _ in range(2):
    with record_operators() as window:
        torch.ones(4) + 1
print(len(window.events), os.environ.get("KINETO_LOG_LEVEL"))
print("the workload's own line", file=sys.stderr)
"""


@pytest.mark.parametrize("level", [None, "6"])
def test_the_users_terminal_stays_clean(level: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    if level is not None:
        environment["KINETO_LOG_LEVEL"] = level
    done = subprocess.run(
        [sys.executable, "-c", _WORKLOAD], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    # Where kineto starts with CUDA on import, its lines cannot be kept away; this machine's build decides.
    if not torch.cuda.is_available():
        assert done.stderr == "the workload's own line\n"
    assert done.stdout == f"2 {level}\n"


def test_a_log_level_that_the_user_set_stands() -> None:
    environment = {**os.environ, "KINETO_LOG_LEVEL": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _WORKLOAD], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout == "2 0\n"
    assert len(done.stderr.splitlines()) > 1
