"""Sessions: hooks come off, what fails of ours never reaches the workload, threads and forks are told apart."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
)

import phaseprof
from phaseprof.errors import UsageError
from phaseprof.session import Session, current
from phaseprof.trace.reader import open_trace

IDS = torch.arange(3, 12).reshape(1, 9)


def greedy(model: LlamaForCausalLM, new_tokens: int = 3) -> Any:
    return model.generate(
        IDS, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )


def test_everything_is_as_it_was(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """Classes, the model and its modules carry the same attributes after a session as before."""
    classes = [cls for cls in type(llama).__mro__ if cls is not object]
    modules = list(llama.modules())
    before = [dict(vars(thing)) for thing in (*classes, *modules, GenerationMixin)]
    with phaseprof.profile(llama, tmp_path / "t"):
        greedy(llama)
    after = [dict(vars(thing)) for thing in (*classes, *modules, GenerationMixin)]
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] is other[name] for name in one)


def test_hooks_come_off_when_the_block_raises(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), phaseprof.profile(llama, tmp_path / "t"):
        greedy(llama)
        raise ZeroDivisionError
    assert current() is None
    assert open_trace(tmp_path / "t").passes.num_rows == 3


def test_signatures_stay(llama: LlamaForCausalLM, record: Any) -> None:
    """transformers asks its own methods for their parameters."""
    import inspect

    before = [inspect.signature(f) for f in (GenerationMixin.generate, GenerationMixin._prefill)]
    recorded = record(
        lambda: [inspect.signature(f) for f in (GenerationMixin.generate, GenerationMixin._prefill)]
    )
    assert recorded.output == before


def test_somebody_wraps_over_us(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """A wrapper that was set over ours stays when we go, and ours passes calls through."""
    session = Session(tmp_path / "t")
    session.start()
    ours = PreTrainedModel.__call__
    calls = []

    def theirs(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return ours(module, *args, **kwargs)

    PreTrainedModel.__call__ = theirs
    try:
        greedy(llama)
        session.stop()
        seen = open_trace(tmp_path / "t").passes.num_rows
        greedy(llama)
        assert PreTrainedModel.__call__ is theirs
        assert calls.count("LlamaForCausalLM") == 6
        assert seen == open_trace(tmp_path / "t").passes.num_rows == 3
    finally:
        del PreTrainedModel.__call__


def test_our_failure_is_noted_once_and_the_workload_goes_on(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """A bug in our own reading of inputs: one warning, an entry in the trace, the same output."""
    alone = greedy(llama)

    def broken(*_: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("phaseprof.hooks.observer.logits_positions", broken)
    with caplog.at_level(logging.WARNING), phaseprof.profile(llama, tmp_path / "t"):
        assert torch.equal(greedy(llama), alone)
    assert len([r for r in caplog.records if "the workload goes on" in r.message]) == 1
    trace = open_trace(tmp_path / "t")
    assert [note.what for note in trace.metas[0].not_measured] == ["some passes"]


def test_sessions_do_not_nest(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with phaseprof.profile(llama, tmp_path / "a"):
        nested = phaseprof.profile(llama, tmp_path / "b")
        with pytest.raises(UsageError, match="runs in this process already"), nested:
            pass
        greedy(llama)
    assert open_trace(tmp_path / "a").passes.num_rows == 3


def test_a_vanished_folder_stops_the_recording_alone(
    llama: LlamaForCausalLM, tmp_path: Path, caplog: Any
) -> None:
    alone = greedy(llama, 40)
    with caplog.at_level(logging.WARNING), phaseprof.profile(llama, tmp_path / "t") as prof:
        greedy(llama)
        prof._session.recorder.sync()
        shutil.rmtree(tmp_path / "t")
        again = [greedy(llama, 40)]
        prof._session.recorder.sync(2.0)
        again.append(greedy(llama, 40))
    assert all(torch.equal(out, alone) for out in again)
    warnings = [r.message for r in caplog.records if r.name == "phaseprof"]
    assert len(warnings) == 1
    assert "recording stopped, the workload goes on" in warnings[0]
    assert not (tmp_path / "t").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import phaseprof

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=64, eos_token_id=None, pad_token_id=0)).eval()
ids = torch.arange(1, 9).reshape(1, 8)
with phaseprof.profile(model, sys.argv[1]):
    # From here on no file can grow beyond 2,000 bytes: writes fail as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    for _ in range(40):
        out = model.generate(ids, max_new_tokens=30, do_sample=False)
print(out.shape[1])
"""


def test_a_full_disk_stops_the_recording_alone(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL_DISK)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "t")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "38\n"
    assert done.stderr.count("recording stopped, the workload goes on") == 1
    assert not list((tmp_path / "t").rglob("*.tmp"))


def test_threads_on_one_model(llama: LlamaForCausalLM, record: Any) -> None:
    """Four threads generate at once: each keeps its own calls apart."""

    def run() -> Any:
        results: dict[int, Any] = {}

        def work(number: int) -> None:
            prompt = IDS[:, : 4 + number]
            results[number] = llama.generate(
                prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False
            )

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[n] for n in range(4)]

    alone = run()
    recorded = record(run)
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded.output, strict=True))
    by_thread: dict[int, list[tuple[str, int]]] = {}
    for thread, phase, tokens in recorded.passes("thread_id", "phase", "prefill_tokens"):
        by_thread.setdefault(thread, []).append((phase, tokens))
    assert sorted(by_thread.values()) == [
        [("prefill", 4 + n), ("decode", 0), ("decode", 0)] for n in range(4)
    ]
    assert recorded.trace.requests.num_rows == 4


def test_a_copied_model_is_a_model_of_its_own(llama: LlamaForCausalLM, record: Any) -> None:
    copied = copy.deepcopy(llama)
    recorded = record(lambda: (greedy(llama), greedy(copied)))
    models = [model for (model,) in recorded.passes("model_id")]
    assert models == ["LlamaForCausalLM-1"] * 3 + ["LlamaForCausalLM-2"] * 3


def test_declared_phases(llama: LlamaForCausalLM, record: Any) -> None:
    """What the user says overrules what the inputs suggest."""

    def run() -> None:
        with torch.no_grad():
            with phaseprof.phase("other"):
                llama(IDS, use_cache=False)
            with phaseprof.phase("decode"):
                llama(IDS[:, :5], use_cache=False)
            with phaseprof.phase(phaseprof.Phase.MIXED, prompt_tokens=6):
                llama(IDS, use_cache=False)

    recorded = record(run)
    assert recorded.passes("phase", "prefill_tokens", "decode_tokens", "tag_source") == [
        ("other", 0, 0, "user"),
        ("decode", 0, 5, "user"),
        ("mixed", 6, 3, "user"),
    ]
    # Scoring serves no request, and has no part in the latencies.
    assert recorded.trace.requests.num_rows == 2


@pytest.mark.parametrize("name", ["extend", "prefil", ""])
def test_undeclarable_phases(name: str) -> None:
    with pytest.raises(UsageError, match="no phase"), phaseprof.phase(name):
        pass


def test_warmup_is_flagged(llama: LlamaForCausalLM, record: Any) -> None:
    def run() -> None:
        with phaseprof.warmup():
            greedy(llama, 2)
        greedy(llama, 2)

    recorded = record(run)
    assert recorded.passes("phase", "warmup") == [
        ("prefill", "requested"),
        ("decode", "requested"),
        ("prefill", None),
        ("decode", None),
    ]
    assert sorted(recorded.trace.requests.column("warmup").to_pylist(), key=str) == [
        None,
        "requested",
    ]


def test_training_and_scoring_are_other(llama: LlamaForCausalLM, record: Any) -> None:
    own = copy.deepcopy(llama)

    def run() -> None:
        own.train()
        own(IDS, labels=IDS).loss.backward()
        own.eval()
        with torch.no_grad():
            own(IDS, labels=IDS)
            own(IDS)

    recorded = record(run)
    assert recorded.passes("phase") == [("other",), ("other",), ("prefill",)]


class Own(nn.Module):
    """A module of the user's own that is no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.out = nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.out(self.embed(input_ids)))


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    model = Own().eval()
    with phaseprof.profile(model, tmp_path / "t"), torch.no_grad():
        with phaseprof.phase("prefill"):
            model(IDS)
        with phaseprof.phase("decode"):
            model(IDS[:, :1])
    trace = open_trace(tmp_path / "t")
    assert trace.passes.column("phase").to_pylist() == ["prefill", "decode"]
    assert "__call__" not in vars(Own)


FORKS = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import phaseprof

torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=64, eos_token_id=None, pad_token_id=0)).eval()
ids = torch.arange(1, 9).reshape(1, 8)

def work(n):
    model.generate(ids, max_new_tokens=n, do_sample=False)

with phaseprof.profile(model, sys.argv[1]):
    work(2)
    import multiprocessing
    children = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in (3, 4)]
    children.append(multiprocessing.get_context("fork").Process(target=int))  # runs no model
    for child in children: child.start()
    for child in children: child.join()
    assert all(child.exitcode == 0 for child in children)
    work(5)
"""


def test_forked_children_write_files_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "t")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert len(trace.metas) == 3
    assert all(meta.complete for meta in trace.metas)
    assert trace.passes.num_rows == 2 + 3 + 4 + 5
    assert len(set(trace.passes.column("pass_id").to_pylist())) == 14
    assert sorted(trace.requests.column("output_tokens").to_pylist()) == [2, 3, 4, 5]


FORKS_INSIDE = (
    FORKS.split("with phaseprof")[0]
    + """
import multiprocessing

class Fork:
    children = []

    def __call__(self, ids, scores, **kwargs):
        if not self.children:
            child = multiprocessing.get_context("fork").Process(target=work, args=(3,))
            self.children.append(child)
            child.start()
            child.join()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

with phaseprof.profile(model, sys.argv[1]):
    model.generate(ids, max_new_tokens=4, do_sample=False, stopping_criteria=[Fork()])
    assert Fork.children[0].exitcode == 0
"""
)


def test_a_child_forked_inside_a_generate_call_begins_anew(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS_INSIDE)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "t")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    sources = set(trace.passes.column("tag_source").to_pylist())
    assert (trace.passes.num_rows, sources) == (3 + 4, {"generate"})
    assert sorted(trace.requests.column("output_tokens").to_pylist()) == [3, 4]


def test_nothing_is_written_by_an_unused_import() -> None:
    code = "import sys, phaseprof; print(sorted(m for m in ('torch','transformers','pyarrow') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.stdout == "[]\n"
