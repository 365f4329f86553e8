"""The collector `kernels` on a CPU: windows of torch.profiler over real passes, and in nobody's way."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import GenerationConfig, LlamaForCausalLM

from phaseprof.api import load_report
from phaseprof.clock import Clock
from phaseprof.collectors import windows as windows_module
from phaseprof.collectors.torch_profiler import KernelsCollector
from phaseprof.collectors.windows import Schedule, Windows
from phaseprof.devices import describe
from phaseprof.errors import NotMeasured
from phaseprof.records import Kernel
from phaseprof.session import Session
from phaseprof.trace.meta import CollectorCost
from phaseprof.trace.reader import Trace, open_trace

#: What the two clocks may differ by. Another epoch would be off by days.
_CLOCK_SLACK_NS = 1_000_000
_CPU = describe("cpu")


class Sink:
    """Keeps what a collector hands over."""

    def __init__(self) -> None:
        self.clock = Clock.start()
        self.kernels: list[Kernel] = []
        self.notes: list[NotMeasured] = []
        self.costs: list[CollectorCost] = []

    def put_samples(self, rows: Any) -> None:
        raise AssertionError(rows)

    def put_kernels(self, rows: Any) -> None:
        self.kernels += rows

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None:
        self.costs.append(cost)

    def sampling_of(self, key: str) -> bool:
        raise AssertionError(key)

    @property
    def names(self) -> list[str]:
        return [kernel.name for kernel in sorted(self.kernels, key=lambda k: k.start_ns)]


@contextmanager
def looking(plan: Schedule | None = None) -> Iterator[tuple[Sink, Windows]]:
    """A collector whose window is held open; with a schedule, one that follows it."""
    sink, collector = Sink(), KernelsCollector(plan)
    collector.start(sink)
    collector.device_seen(_CPU)
    window = collector.window
    assert isinstance(window, Windows)
    if plan is None:
        window.hold(True)
    try:
        yield sink, window
    finally:
        collector.stop()


@contextmanager
def one_pass(window: Windows, *, wide: bool = False) -> Iterator[bool]:
    inside = window.begins(wide, False)
    try:
        yield inside
    finally:
        window.ended()


def profiler_is_on() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def names(session: profile) -> set[str]:
    assert session.profiler is not None
    assert session.profiler.kineto_results is not None
    return {event.name() for event in session.profiler.kineto_results.events()}


# What is seen


def test_operators_lie_on_the_axis_of_the_trace() -> None:
    left = torch.ones(256, 256)
    with looking() as (sink, window), one_pass(window):
        before_ns = sink.clock.now_unix_ns()
        torch.mm(left, left)
        between_ns = sink.clock.now_unix_ns()
        time.sleep(0.02)
        torch.mm(left, left)
        after_ns = sink.clock.now_unix_ns()
    first, second = sink.kernels
    assert before_ns - _CLOCK_SLACK_NS <= first.start_ns < first.end_ns
    assert first.end_ns <= between_ns + _CLOCK_SLACK_NS
    assert between_ns + 20_000_000 - _CLOCK_SLACK_NS <= second.start_ns
    assert second.end_ns <= after_ns + _CLOCK_SLACK_NS


def test_only_outermost_operators_are_kept_and_no_annotations() -> None:
    x, weight, bias = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)
    with (
        looking() as (sink, window),
        one_pass(window),
        torch.no_grad(),
        record_function("aten::not_an_operator"),
    ):
        functional.gelu(functional.linear(x, weight, bias))
    assert sink.names == ["aten::linear", "aten::gelu"]
    assert sink.notes == []


def test_operators_of_other_threads_carry_their_native_ids() -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        pytest.skip("this torch profiles one thread")
    x = torch.ones(4)
    ids: dict[str, int] = {}

    def work(name: str, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operator(x)
        ids[name] = threading.get_native_id()

    with looking() as (sink, window), one_pass(window):
        work("aten::neg", torch.neg)
        other = threading.Thread(target=work, args=("aten::exp", torch.exp))
        other.start()
        other.join()
    assert {kernel.name: kernel.thread_id for kernel in sink.kernels} == ids
    assert len(set(ids.values())) == 2


def test_compiled_code_leaves_its_pass_out_and_the_others_in() -> None:
    """Placed as torch's inductor backend places it around the code that it generated."""
    x = torch.ones(4)
    with looking() as (sink, window):
        with one_pass(window):
            torch.sin(x)
        with one_pass(window):
            with torch._C._profiler._RecordFunctionFast("## Call CompiledFxGraph fabcdef ##"):
                torch.neg(x)
                time.sleep(0.005)
            torch.exp(x)
        with one_pass(window):
            with torch._C._profiler._RecordFunctionFast("## Call CompiledFxGraph fabcdef ##"):
                torch.neg(x)
            # A small function of an eager model is compiled: the rest of the pass says something.
            time.sleep(0.05)
            torch.cos(x)
    assert sink.names == ["aten::sin", "## Call CompiledFxGraph fabcdef ##", "aten::cos"]
    (note,) = sink.notes
    assert note.what == "operators of 1 profiled passes on the CPU"
    assert "torch.compile" in note.why


def test_what_it_took_is_told() -> None:
    x = torch.ones(4)
    with looking() as (sink, window):
        for _ in range(3):
            with one_pass(window):
                torch.neg(x)
    (cost,) = sink.costs
    assert (cost.name, cost.windows, cost.passes, cost.rows) == ("kernels", 1, 3, 3)
    assert min(cost.start_ns, cost.stop_ns, cost.read_ns) > 0


# When it is on


def test_passes_of_each_kind_are_looked_at_in_turn() -> None:
    x = torch.ones(4)
    inside = []
    with looking(Schedule(skip=1, passes=2, every=5)) as (sink, window):
        for number in range(14):
            # Passes 0 and 7 are of the other kind.
            with one_pass(window, wide=number % 7 == 0) as on:
                torch.neg(x)
                inside.append(on)
            if not on:
                assert not profiler_is_on()
    # Passes of one token are 1-6 and 8-13: the second and third of them, the seventh and eighth, and the twelfth.
    assert [number for number, on in enumerate(inside) if on] == [2, 3, 7, 8, 9, 13]
    assert len(sink.kernels) == 6


def test_a_window_that_may_hold_too_much_ends_and_the_next_one_goes_on() -> None:
    x = torch.ones(4)
    with looking(Schedule(skip=0, passes=4, every=100, most_events=10)) as (sink, window):
        for _ in range(4):
            with one_pass(window) as on:
                assert on
                for _ in range(50):
                    torch.neg(x)
    assert sink.costs[0].windows == 4
    assert len(sink.kernels) == 200


def test_there_is_a_last_window() -> None:
    with looking(Schedule(skip=0, passes=1, every=2, most_windows=3)) as (sink, window):
        for _ in range(20):
            with one_pass(window):
                torch.ones(4)
    assert sink.costs[0].windows == 3


def test_a_warm_up_is_not_looked_at_unless_the_window_is_held() -> None:
    with looking(Schedule(skip=0)) as (_, window):
        assert not window.begins(False, True)
        window.ended()
        window.hold(True)
        assert window.begins(False, True)
        window.ended()


def test_a_pass_inside_of_a_pass_is_a_part_of_it() -> None:
    x = torch.ones(4)
    with looking(Schedule(skip=0, passes=1, every=100)) as (sink, window):
        with one_pass(window), one_pass(window), one_pass(window) as innermost:
            torch.neg(x)
            assert innermost
        with one_pass(window) as on:
            assert not on
    assert (sink.costs[0].windows, sink.costs[0].passes) == (1, 1)


def test_an_exception_in_a_pass_ends_it() -> None:
    with looking() as (sink, window):
        with pytest.raises(ValueError, match="of the workload"), one_pass(window):
            torch.neg(torch.ones(4))
            raise ValueError("of the workload")
        with one_pass(window):
            torch.exp(torch.ones(4))
    assert {"aten::neg", "aten::exp"} <= set(sink.names)
    assert not profiler_is_on()


def test_a_window_is_not_begun_across_a_pass_of_another_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def other(window: Windows) -> None:
        with one_pass(window) as on:
            assert not on
            begun.set()
            go_on.wait(10)

    with looking(Schedule(skip=1, passes=2)) as (_, window):
        thread = threading.Thread(target=other, args=(window,))
        thread.start()
        begun.wait(10)
        with one_pass(window) as on:
            assert not on
        go_on.set()
        thread.join()
        with one_pass(window) as on:
            assert on


def test_a_window_over_which_nothing_happens_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_IDLE_NS", 1)
    with looking(Schedule(skip=0, passes=1, every=100)) as (sink, window):
        with one_pass(window):
            torch.neg(torch.ones(4))
        # A pass of the other kind is awaited.
        assert profiler_is_on()
        window.look_after()
        assert not profiler_is_on()
    assert "aten::neg" in sink.names


# Others' profilers


def test_it_steps_aside_for_a_running_profiler() -> None:
    x = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with looking() as (sink, window), one_pass(window) as on:
            torch.neg(x)
            assert not on
        torch.exp(x)
    assert sink.kernels == []
    (note,) = sink.notes
    assert "another torch.profiler session" in note.why
    assert {"aten::neg", "aten::exp"} <= names(theirs)


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_started_inside_of_a_window_has_it(all_threads: bool) -> None:
    from torch._C._profiler import _ExperimentalConfig

    x = torch.ones(4)
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with looking() as (sink, window):
        with one_pass(window):
            torch.sin(x)
        with one_pass(window):
            torch.cos(x)
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as theirs:
                torch.neg(x)
            torch.exp(x)
        with one_pass(window) as on:
            torch.tan(x)
            assert on
    assert "aten::neg" in names(theirs)
    # The pass in which theirs began was not seen to its end.
    assert sink.names == ["aten::sin", "aten::tan"]


def test_a_profiler_that_warms_up_is_given_way_to() -> None:
    """A schedule of torch.profiler prepares a session some steps before it starts it."""
    x = torch.ones(4)
    seen: list[set[str]] = []
    with looking() as (sink, window):
        theirs = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda session: seen.append(names(session)),
        )
        with theirs:
            for operator in (torch.neg, torch.exp):
                with one_pass(window) as on:
                    operator(x)
                    assert not on
                theirs.step()
        with one_pass(window) as on:
            torch.tan(x)
            assert on
    assert len(seen) == 1
    assert "aten::exp" in seen[0]
    assert sink.names == ["aten::tan"]


def test_nothing_is_left_on_torchs_profiler() -> None:
    before = dict(vars(torch.autograd.profiler.profile))
    with looking() as (_, window), one_pass(window):
        assert dict(vars(torch.autograd.profiler.profile)) != before
    assert dict(vars(torch.autograd.profiler.profile)) == before


def test_a_fork_ends_the_window_first() -> None:
    with looking() as (sink, window):
        with one_pass(window):
            torch.neg(torch.ones(4))
        assert profiler_is_on()
        child = os.fork()
        if child == 0:
            os._exit(int(profiler_is_on()))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        with one_pass(window) as on:
            torch.exp(torch.ones(4))
            assert on
    assert {"aten::neg", "aten::exp"} <= set(sink.names)


_WORKLOAD = """
import os, sys, torch
from phaseprof.collectors import kineto
for _ in range(2):
    session = kineto.start(cuda=False)
    torch.ones(4).neg()
    found = [event.name() for event in kineto.stop(session).events()]
print(found.count("aten::neg"), os.environ.get("KINETO_LOG_LEVEL"))
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
    assert done.returncode == 0, done.stderr
    # Where kineto starts with CUDA on import, its lines cannot be kept away; this machine's build decides.
    if not torch.cuda.is_available():
        assert done.stderr == "the workload's own line\n"
    assert done.stdout == f"1 {level}\n"


# In a session


def generate(model: LlamaForCausalLM, new_tokens: int = 8) -> torch.Tensor:
    ids = torch.arange(5, 25).unsqueeze(0)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    assert isinstance(output, torch.Tensor)
    return output


def recorded(path: Path, collect: str, run: Callable[[Session], object]) -> Trace:
    session = Session(path, collect=collect)
    session.start()
    try:
        run(session)
    finally:
        session.stop()
    return open_trace(path)


def operators_of(trace: Trace) -> Counter[int | None]:
    return Counter(trace.kernels.column("pass_id").to_pylist())


def test_a_session_flags_the_passes_inside_and_joins_their_operators(
    tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    model = llama
    plain = generate(model)
    outputs: list[torch.Tensor] = []
    trace = recorded(
        tmp_path / "trace",
        "kernels",
        lambda _: outputs.extend(generate(model) for _ in range(3)),
    )
    assert all(torch.equal(output, plain) for output in outputs)
    rows = trace.passes.sort_by("pass_id").to_pylist()
    profiled = [place for place, row in enumerate(rows) if row["profiled"]]
    # Of three calls of a prefill and seven decode passes: the second to fifth decode pass, and the prefills but the
    # first one. While a prefill is awaited the window of the decode passes is not kept open.
    assert profiled == [2, 3, 4, 5, 8, 16]
    counts = operators_of(trace)
    # Every operator of these passes, two layers of each: projections of two layers and of the head.
    for place in profiled:
        names_of = [
            row["name"]
            for row in trace.kernels.to_pylist()
            if row["pass_id"] == rows[place]["pass_id"]
        ]
        assert Counter(names_of)["aten::linear"] == 2 * 7 + 1
        assert Counter(names_of)["aten::scaled_dot_product_attention"] == 2
    for place, row in enumerate(rows):
        assert (counts[row["pass_id"]] > 0) == (place in profiled)
    (meta,) = trace.metas
    assert meta.not_measured == ()
    assert meta.self_cost is not None
    (cost,) = meta.self_cost.collectors
    assert (cost.name, cost.passes, cost.rows) == ("kernels", 6, trace.kernels.num_rows)
    report = load_report(tmp_path / "trace")
    assert report.own_cost is not None
    assert report.own_cost.windows is not None
    assert report.own_cost.windows.passes == 6
    assert report.own_cost.windows.slowdown is not None
    shown = " ".join(str(report).split())
    assert f"{cost.windows} windows of a profiler took" in shown
    assert "the 6 passes inside took" in shown


def test_a_look_flags_all_passes_inside_and_no_other(
    tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    model = llama

    def run(session: Session) -> None:
        generate(model, 3)
        session.begin_look()
        generate(model, 3)
        session.end_look()
        generate(model, 3)

    trace = recorded(tmp_path / "trace", "none", run)
    rows = trace.passes.sort_by("pass_id").to_pylist()
    assert [row["profiled"] for row in rows] == [False] * 3 + [True] * 3 + [False] * 3
    assert {row["pass_id"] for row in rows if row["profiled"]} == set(operators_of(trace)) - {None}


def test_a_look_in_a_session_that_looks_already_uses_its_window(
    tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    model = llama

    def run(session: Session) -> None:
        session.begin_look()
        generate(model, 3)
        session.end_look()
        generate(model, 1)

    trace = recorded(tmp_path / "trace", "kernels", run)
    rows = trace.passes.sort_by("pass_id").to_pylist()
    assert [row["profiled"] for row in rows] == [True, True, True, False]


def test_passes_of_other_threads_are_joined_to_their_own(
    tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    models = []
    for layers in (1, 3):
        config = copy.deepcopy(llama.config)
        config.num_hidden_layers = layers
        models.append(LlamaForCausalLM(config).eval())

    def run(session: Session) -> None:
        for model in models:
            generate(model, 2)
        session.begin_look()
        threads = [threading.Thread(target=generate, args=(model, 4)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        session.end_look()

    trace = recorded(tmp_path / "trace", "none", run)
    linears: dict[str, set[int]] = {}
    for row in trace.passes.to_pylist():
        if row["profiled"]:
            linear = sum(
                kernel["name"] == "aten::linear"
                for kernel in trace.kernels.to_pylist()
                if kernel["pass_id"] == row["pass_id"]
            )
            linears.setdefault(row["model_id"], set()).add(linear)
    # A pass in the middle of which the window ended has none: of others all are there.
    assert [found - {0} for _, found in sorted(linears.items())] in (
        [{7 + 1}, {3 * 7 + 1}],
        [{3 * 7 + 1}, {7 + 1}],
    )


def test_continuous_batching_is_looked_at_by_step(
    tmp_path: Path, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=6)
    extra: dict[str, Any] = {}
    library = importlib.import_module("transformers.generation.configuration_utils")
    if hasattr(library, "ContinuousBatchingConfig"):
        extra["continuous_batching_config"] = library.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, use_cuda_graph=False
        )
    else:
        config.num_blocks, config.block_size, config.max_batch_tokens = 64, 16, 64
        # 5.0 asks for the memory of an accelerator even on a CPU, and gets None.
        cache = importlib.import_module("transformers.generation.continuous_batching.cache")
        breakdown = (torch.device("cpu"), 1 << 30, 0, 0)
        monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: breakdown)
    prompts = [list(range(5, 25)), list(range(30, 40))]
    trace = recorded(
        tmp_path / "trace",
        "kernels",
        lambda _: llama.generate_batch(prompts, generation_config=config, **extra),
    )
    rows = trace.passes.sort_by("pass_id").to_pylist()
    counts = operators_of(trace)
    profiled = [row for row in rows if row["profiled"]]
    assert {row["phase"] for row in profiled} == {"decode"}
    assert all(counts[row["pass_id"]] for row in profiled)
    assert {row["tag_source"] for row in profiled} == {"scheduler"}
