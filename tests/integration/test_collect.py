"""Collectors beside a real model: what they are given and leave, and that none of their failures reaches the model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import phaseprof
from phaseprof.collectors import known as known_module
from phaseprof.collectors.base import Availability
from phaseprof.collectors.known import KNOWN, Known
from phaseprof.collectors.sampler_thread import SamplerThread
from phaseprof.collectors.sampling import SampledCollector
from phaseprof.errors import UsageError
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.metrics import Metric
from phaseprof.records import Sample
from phaseprof.schema import SAMPLES
from phaseprof.session import Session
from phaseprof.trace.meta import Device
from phaseprof.trace.reader import Trace, open_trace
from phaseprof.trace.writer import to_arrow

MODULE = "phaseprof_test_collectors"
PROMPT = torch.arange(3, 19).reshape(1, 16)


def generate(model: Any) -> list[int]:
    tokens: list[int] = model.generate(PROMPT, max_new_tokens=6, do_sample=False)[0].tolist()
    return tokens


def recorded(path: Path, model: Any, collect: str | None) -> tuple[list[int], Trace]:
    """What the model answers, and the trace."""
    session = Session(path, collect=collect)
    session.start()
    try:
        tokens = generate(model)
    finally:
        session.stop()
    return tokens, open_trace(path)


def whys(trace: Trace) -> list[tuple[str, str]]:
    return [(missing.what, missing.why) for meta in trace.metas for missing in meta.not_measured]


# What fails


class Faulty:
    """Fails at one of its methods, or of its window's."""

    name = "faulty"
    what = "what the faulty one collects"

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def _tell(self, call: str) -> None:
        if call == self.fails:
            raise ZeroDivisionError(f"in {call}")

    @property
    def window(self) -> PassWindow | None:
        self._tell("window")
        return self if self.fails in ("begins", "ended") else None

    def begins(self, wide: bool, warmup: bool) -> bool:
        self._tell("begins")
        return False

    def ended(self) -> None:
        self._tell("ended")

    def hold(self, on: bool) -> None: ...

    def probe(self) -> Availability:
        return Availability(True, "")

    def start(self, sink: EvidenceSink) -> None:
        self._tell("start")

    def device_seen(self, device: Device) -> None:
        self._tell("device_seen")

    def stop(self) -> None:
        self._tell("stop")


class FaultySampler:
    """Fails when it reads, or when it lets go."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def sample(self) -> Sequence[Sample]:
        if self.fails == "sample":
            raise ZeroDivisionError("in sample")
        if self.fails == "nonsense":
            return [Sample(1, 2, "cpu", "faulty", "no such metric", 1.0)]
        return []

    def close(self) -> None:
        if self.fails == "close":
            raise ZeroDivisionError("in close")


def sampled(fails: str) -> SampledCollector:
    def opens(device: Device, sink: EvidenceSink) -> FaultySampler:
        if fails == "open":
            raise ZeroDivisionError("in open")
        return FaultySampler(fails)

    return SampledCollector(
        "faulty",
        Faulty.what,
        opens,
        lambda: Availability(True, ""),
        watches=lambda device: True,
    )


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Adds a collector of the test's own to those that there are."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    added = Known("faulty", MODULE, "make", True, "nothing")
    monkeypatch.setattr(known_module, "KNOWN", (*KNOWN, added))

    def use(make: Callable[[], Any]) -> None:
        vars(module)["make"] = make

    yield use


@pytest.fixture(scope="module")
def expected(llama: Any) -> list[int]:
    """What the model answers when nothing looks on."""
    return generate(llama)


@pytest.mark.parametrize(
    "fails", ["make", "start", "window", "device_seen", "begins", "ended", "stop"]
)
def test_a_collector_that_fails_at_any_method_changes_nothing_and_is_in_the_report(
    fails: str,
    llama: Any,
    expected: list[int],
    tmp_path: Path,
    faulty: Callable[[Callable[[], Any]], None],
) -> None:
    def make() -> Faulty:
        if fails == "make":
            raise ZeroDivisionError("in make")
        return Faulty(fails)

    faulty(make)
    tokens, trace = recorded(tmp_path / "t", llama, "faulty,host")
    assert tokens == expected
    what = "what faulty collects" if fails == "make" else Faulty.what
    why = f"the collector faulty failed (ZeroDivisionError: in {fails})"
    assert whys(trace) == [(what, why)]
    # Everything else was recorded as ever.
    assert trace.passes.num_rows == 6
    assert {row["source"] for row in trace.samples.to_pylist()} >= {f"host.p{os.getpid()}"}
    assert not any(trace.passes.column("profiled").to_pylist())


@pytest.mark.parametrize("fails", ["open", "sample", "nonsense", "close"])
def test_a_sampler_that_fails_changes_nothing(
    fails: str,
    llama: Any,
    expected: list[int],
    tmp_path: Path,
    faulty: Callable[[Callable[[], Any]], None],
) -> None:
    faulty(lambda: sampled(fails))
    tokens, trace = recorded(tmp_path / "t", llama, "faulty,host")
    assert tokens == expected and trace.passes.num_rows == 6
    said = [why for what, why in whys(trace) if what == Faulty.what]
    if fails == "close":
        assert said == []
    else:
        assert len(said) == 1 and said[0].startswith("the collector faulty failed (")
    assert Metric.PROCESS_CPU in trace.samples.column("metric").to_pylist()


def test_a_sampler_that_hangs_holds_up_neither_the_model_nor_the_end(
    llama: Any,
    expected: list[int],
    tmp_path: Path,
    faulty: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "phaseprof.collectors.collection.SamplerThread", lambda: SamplerThread(end_s=1.0)
    )
    free, hangs = threading.Event(), threading.Event()

    class Hanging(FaultySampler):
        def sample(self) -> Sequence[Sample]:
            hangs.set()
            assert free.wait(60)
            return []

    faulty(
        lambda: SampledCollector(
            "faulty",
            Faulty.what,
            lambda device, sink: Hanging(""),
            lambda: Availability(True, ""),
            watches=lambda device: True,
        )
    )
    session = Session(tmp_path / "t", collect="faulty,host")
    session.start()
    try:
        tokens = generate(llama)
        assert hangs.wait(30)
        tokens_beside = generate(llama)
    finally:
        session.stop()
        assert not free.is_set()
        free.set()
    for thread in threading.enumerate():
        if thread.name.startswith("phaseprof-sampler"):
            thread.join(20)
    trace = open_trace(tmp_path / "t")
    assert tokens == tokens_beside == expected and trace.passes.num_rows == 12
    ((what, why),) = whys(trace)
    assert what == Faulty.what and "had no answer" in why
    # The host shares the thread that hung.
    assert Metric.PROCESS_CPU in trace.samples.column("metric").to_pylist()


# What is chosen


def test_none_leaves_no_samples_and_no_thread(llama: Any, tmp_path: Path) -> None:
    session = Session(tmp_path / "t", collect="none")
    session.start()
    try:
        generate(llama)
        names = [thread.name for thread in threading.enumerate()]
    finally:
        session.stop()
    assert not [name for name in names if name.startswith("phaseprof-sampler")]
    trace = open_trace(tmp_path / "t")
    assert trace.samples.num_rows == 0
    (meta,) = trace.metas
    assert meta.self_cost is not None and meta.self_cost.sampler_cpu_ns == 0


def test_the_host_is_sampled_by_default_and_the_last_sample_is_of_the_end(
    llama: Any, tmp_path: Path
) -> None:
    _, trace = recorded(tmp_path / "t", llama, None)
    rows = [row for row in trace.samples.to_pylist() if row["metric"] == Metric.PROCESS_CPU]
    (meta,) = trace.metas
    last_pass = max(trace.passes.column("end_ns").to_pylist())
    assert rows and meta.ended_ns is not None
    assert all(row["start_ns"] < row["end_ns"] for row in rows)
    assert meta.self_cost is not None and meta.self_cost.sampler_cpu_ns > 0
    assert meta.started_ns <= rows[0]["start_ns"]
    assert last_pass <= rows[-1]["end_ns"] <= meta.ended_ns
    # Nothing that needs a GPU says that there is none.
    assert whys(trace) == []


def test_one_that_is_asked_for_and_has_no_gpu_says_so(llama: Any, tmp_path: Path) -> None:
    _, trace = recorded(tmp_path / "t", llama, "gpm,nvml")
    assert sorted(why for _, why in whys(trace)) == ["no model ran on a CUDA device"] * 2


def test_a_recording_is_in_the_trace_as_if_it_had_been_measured(llama: Any, tmp_path: Path) -> None:
    rows = [
        Sample(10**9 + n * 1000, 10**9 + n * 1000 + 1000, "GPU-1", "gpm", Metric.SM_ACTIVE, n / 10)
        for n in range(5)
    ]
    file = tmp_path / "recorded.parquet"
    pq.write_table(to_arrow(rows, SAMPLES.arrow), file)
    path = tmp_path / "t"
    with phaseprof.profile(llama, path, collect=f"replay={file}"):
        generate(llama)
    trace = open_trace(path)
    found = sorted(trace.samples.to_pylist(), key=lambda row: row["start_ns"])
    assert [row["value"] for row in found] == [0.0, 0.1, 0.2, 0.3, 0.4]
    (device,) = trace.metas[0].devices
    assert {(row["device"], row["source"]) for row in found} == {(device.key, "gpm")}
    assert [row["start_ns"] - found[0]["start_ns"] for row in found] == [0, 1000, 2000, 3000, 4000]
    (meta,) = trace.metas
    assert abs(found[0]["start_ns"] - meta.started_ns) < 10**9


def test_an_unknown_name_is_an_error_before_anything_is_recorded(
    llama: Any, tmp_path: Path
) -> None:
    with (
        pytest.raises(UsageError, match="no collector 'gmp'"),
        phaseprof.profile(llama, tmp_path / "t", collect="gmp"),
    ):
        raise AssertionError("the block began")
    assert not (tmp_path / "t").exists()


# Processes

_FORKING = """
import os, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, vocab_size=64)).eval()
def run():
    model.generate(torch.arange(3, 9).reshape(1, 6), max_new_tokens=3, do_sample=False)
run()
child = os.fork()
if child == 0:
    run()
    import atexit
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run()
"""


def _run(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "phaseprof", "run", "--no-report", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PHASEPROF_")}
    return subprocess.run(
        [*command, "--", sys.executable, str(file)],
        capture_output=True,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        check=False,
    )


def test_a_forked_child_has_samplers_of_its_own_and_one_process_reads_the_machine(
    tmp_path: Path,
) -> None:
    done = _run(tmp_path, _FORKING, "-o", "t", "--collect", "host")
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert len(trace.metas) == 2 and trace.passes.num_rows == 9
    rows = trace.samples.to_pylist()
    own = {row["source"] for row in rows if row["metric"] == Metric.PROCESS_CPU}
    assert own == {f"host.p{meta.pid}" for meta in trace.metas}
    # Files of locks are gone, and nothing is said to be missing.
    assert list((tmp_path / "t" / "meta").glob("*.lock")) == []
    assert whys(trace) == []


def test_a_wrong_name_is_said_before_the_command_is_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "open('ran', 'w')", "-o", "t", "--collect", "host,nvlm")
    assert done.returncode == 2
    assert "There is no collector 'nvlm'." in done.stderr
    assert "Use " in done.stderr and "replay=PATH" in done.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "t").exists()
