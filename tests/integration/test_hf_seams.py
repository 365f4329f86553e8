"""A version of transformers that is not as expected: it runs, what is there is used, and what is lost is said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel

from phaseprof.trace.reader import Trace, open_trace

Record = Callable[[Callable[[], Any]], Any]

IDS = torch.arange(3, 12).reshape(1, 9)
LABELS = [("prefill", 9, 0), ("decode", 0, 1), ("decode", 0, 1)]


def greedy(model: LlamaForCausalLM) -> torch.Tensor:
    result: torch.Tensor = model.generate(
        IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False, attention_mask=IDS * 0 + 1
    )
    return result


def labels(recorded: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = recorded.passes("phase", "prefill_tokens", "decode_tokens")
    return rows


def notes(trace: Trace) -> list[str]:
    return [note.what for meta in trace.metas for note in meta.not_measured]


def test_nothing_is_said_of_a_version_that_is_known(
    llama: LlamaForCausalLM, record: Record
) -> None:
    recorded = record(lambda: greedy(llama))
    assert labels(recorded) == LABELS
    assert notes(recorded.trace) == []


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (GenerationMixin, "_assisted_decoding", "the drafts of assisted generation"),
        (PreTrainedModel, "get_compiled_call", "decode steps that generate compiles by itself"),
    ],
)
def test_a_seam_that_is_missing(
    owner: Any, name: str, lost: str, llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    alone = greedy(llama)
    monkeypatch.delattr(owner, name)
    monkeypatch.setattr(LlamaForCausalLM, "_valid_auto_compile_criteria", lambda *_: False)
    recorded = record(lambda: greedy(llama))
    assert torch.equal(recorded.output, alone)
    assert labels(recorded) == LABELS
    (note,) = recorded.trace.metas[0].not_measured
    assert note.what == lost
    assert transformers.__version__ in note.why and name in note.why
    assert "report" in note.fix


def test_prefill_has_another_name(
    llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    """Without what announces the prompt, the first pass of a call is its prompt."""
    alone = greedy(llama)
    prefill = GenerationMixin._prefill

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return prefill(self, *args, **kwargs)

    monkeypatch.delattr(GenerationMixin, "_prefill")
    # The loop of this version asks the instance for it by the name that we do not look for.
    monkeypatch.setattr(LlamaForCausalLM, "_prefill", renamed, raising=False)
    recorded = record(lambda: greedy(llama))
    assert torch.equal(recorded.output, alone)
    assert labels(recorded) == LABELS
    assert [what.partition(":")[0] for what in notes(recorded.trace)] == [
        "the prompts of generate calls"
    ]


def test_the_mixin_is_elsewhere(llama: LlamaForCausalLM, record: Record, monkeypatch: Any) -> None:
    """The class with generate is not where it was: the first model that has it shows where it is."""
    monkeypatch.delattr("transformers.generation.utils.GenerationMixin")
    recorded = record(lambda: torch.cat([greedy(llama), greedy(llama)]))
    assert labels(recorded) == LABELS * 2
    sources = [row[0] for row in recorded.passes("tag_source")]
    assert sources[3:] == ["generate"] * 3
    assert len(notes(recorded.trace)) == 1
    assert "_prefill" in vars(GenerationMixin)
    assert not hasattr(GenerationMixin._prefill, "__wrapped__")


def test_there_is_no_pretrained_model(
    llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    """No pass can be seen: the calls to generate that had none are said, too."""
    monkeypatch.delattr("transformers.modeling_utils.PreTrainedModel")
    recorded = record(lambda: greedy(llama))
    monkeypatch.undo()
    assert torch.equal(recorded.output, greedy(llama))
    assert labels(recorded) == []
    assert notes(recorded.trace) == [
        "the passes of transformers models",
        "the passes of some generate calls",
    ]


def test_an_exception_while_hooking(
    llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    """One hook fails: the others are set, the session goes on, and everything comes off."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("phaseprof.hooks.generate.GenerateHook.patches", refuse)
    recorded = record(lambda: greedy(llama))
    assert labels(recorded) == LABELS
    (note,) = recorded.trace.metas[0].not_measured
    assert note.what == "the prompts of generate calls"
    assert "RuntimeError: no" in note.why


def test_a_version_that_is_too_old(
    llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    recorded = record(lambda: greedy(llama))
    assert labels(recorded) == LABELS
    (note,) = recorded.trace.metas[0].not_measured
    assert "4.57.1 is older than 5.0" in note.why
    assert note.fix == "pip install -U 'transformers>=5.0'"


def test_passes_around_the_class_are_said(
    llama: LlamaForCausalLM, record: Record, monkeypatch: Any
) -> None:
    """Something calls the model where nobody can see it: generate has no pass, and the run says so."""
    real = type(llama).__call__

    class Hidden:
        """What the loop of generate calls instead of the model."""

        def __get__(self, model: Any, _: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                from phaseprof.session import _state

                _state.here.in_pass = True
                try:
                    return real(model, *args, **kwargs)
                finally:
                    _state.here.in_pass = False

            return call

    alone = greedy(llama)
    monkeypatch.setattr(LlamaForCausalLM, "__call__", Hidden())
    recorded = record(lambda: greedy(llama))
    assert torch.equal(recorded.output, alone)
    assert labels(recorded) == []
    assert notes(recorded.trace) == ["the passes of some generate calls"]


class Odd:
    """An argument that no reader expects, which the model does not look at."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("ask somebody else")


def test_an_argument_that_cannot_be_read(
    llama: LlamaForCausalLM, record: Record, caplog: Any
) -> None:
    """The pass goes unseen and unharmed, once noted; the next ones are seen."""

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            odd = [llama(IDS, decoder_input_ids=Odd()).logits for _ in range(2)]
            return [*odd, llama(IDS).logits]

    class Takes(LlamaForCausalLM):  # type: ignore[misc]  # its types are not followed
        def forward(
            self, input_ids: Any = None, decoder_input_ids: Any = None, **kwargs: Any
        ) -> Any:
            return super().forward(input_ids, **kwargs)

    kept = llama.__class__
    llama.__class__ = Takes
    llama.config.is_encoder_decoder = True
    try:
        alone = run()
        with caplog.at_level(logging.WARNING):
            recorded = record(run)
    finally:
        llama.__class__ = kept
        llama.config.is_encoder_decoder = False
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded.output, strict=True))
    assert len(recorded.passes("phase")) == 1
    assert len([r for r in caplog.records if "the workload goes on" in r.message]) == 1
    assert notes(recorded.trace).count("some passes") == 1


# Processes

WORKER = """
import multiprocessing, os, sys

def work(number, trace):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, eos_token_id=None, pad_token_id=0)).eval()
    def run():
        ids = torch.arange(3, 8 + number).reshape(1, 5 + number)
        model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=ids * 0 + 1)
    if trace:
        import phaseprof
        with phaseprof.profile(model, trace + str(number)):
            run()
    else:
        run()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    trace = sys.argv[2] if len(sys.argv) > 2 else ""
    workers = [context.Process(target=work, args=(number, trace)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(sum(worker.exitcode for worker in workers))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def by_process(trace: Trace) -> list[list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = {}
    for row in trace.passes.sort_by("pass_id").to_pylist():
        entry = (row["phase"], row["prefill_tokens"] + row["decode_tokens"])
        found.setdefault(row["pass_id"] >> 32, []).append(entry)
    return sorted(found.values())


def expected(number: int) -> list[tuple[str, int]]:
    return [("prefill", 5 + number), ("decode", 1), ("decode", 1)]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_under_run_share_a_trace(method: str, tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "phaseprof", "run", "-o", str(tmp_path / "t"), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert by_process(trace) == [expected(0), expected(1)]
    assert all(meta.complete for meta in trace.metas)


def test_profile_inside_spawned_workers(tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, str(script), "spawn", str(tmp_path / "t")],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for number in range(2):
        assert by_process(open_trace(tmp_path / f"t{number}")) == [expected(number)]
