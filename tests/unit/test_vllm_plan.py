"""`phaseprof profile --engine vllm`: its options, what they become, and what is refused without an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.cli.main import main
from phaseprof.errors import ModelError, UsageError
from phaseprof.session import Session
from phaseprof.vllm.engines import EngineSessions, is_engine
from phaseprof.workload.plan import WorkloadPlan
from phaseprof.workload.vllm_engine import EngineOutput, config_folder, failed_to_generate
from phaseprof.workload.vllm_plan import (
    EngineOptions,
    engine_arguments,
    engine_environment,
    parse_speculate,
)

PLAN = WorkloadPlan(prompt_tokens=(100,), new_tokens=(28,), batches=(1, 8, 4), seed=3)


def arguments(options: EngineOptions, *, cpu: bool = False, random: bool = False) -> dict[str, Any]:
    return engine_arguments(
        "folder", "name", PLAN, options, dtype="bfloat16", random_weights=random, cpu=cpu
    )


def test_the_engine_is_laid_out_for_the_requests() -> None:
    made = arguments(EngineOptions())
    assert made["max_model_len"] == 128
    assert made["max_num_seqs"] == 8
    assert made["enable_prefix_caching"] is False
    assert (made["model"], made["served_model_name"], made["seed"]) == ("folder", "name", 3)
    # On a GPU, what is not asked for is vLLM's own choice.
    assert not {
        "enforce_eager",
        "kv_cache_memory_bytes",
        "load_format",
        "speculative_config",
    } & set(made)
    assert "max_num_batched_tokens" not in made


def test_every_option_reaches_vllm() -> None:
    made = arguments(EngineOptions(64, True, 4, 2), cpu=True, random=True)
    assert made["max_num_batched_tokens"] == 64
    assert made["enable_prefix_caching"] is True
    assert made["tensor_parallel_size"] == 2
    assert made["speculative_config"]["method"] == "ngram"
    assert made["speculative_config"]["num_speculative_tokens"] == 4
    assert made["load_format"] == "dummy"
    assert 0 < made["kv_cache_memory_bytes"] <= 4 << 30


def test_on_a_cpu_one_process_and_for_ranks_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 6})
    one = engine_environment(EngineOptions(), cpu=True, threads=2, environment={})
    assert one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert one["OMP_NUM_THREADS"] == "2"
    two = EngineOptions(tensor_parallel=2)
    ranks = engine_environment(two, cpu=True, threads=None, environment={})
    assert ranks["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in ranks
    narrow = engine_environment(two, cpu=True, threads=1, environment={})
    assert narrow["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    with pytest.raises(UsageError, match="5 in all"):
        engine_environment(EngineOptions(tensor_parallel=6), cpu=True, threads=None, environment={})
    gpu = engine_environment(two, cpu=False, threads=None, environment={})
    assert set(gpu) == {"VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"}


def test_what_the_user_has_set_stands() -> None:
    own = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    made = engine_environment(EngineOptions(), cpu=True, threads=None, environment=own)
    assert not set(own) & set(made)


def test_speculation_is_read() -> None:
    assert parse_speculate(None) is None
    assert parse_speculate("ngram:4") == 4
    for text in ("ngram", "ngram:0", "eagle:3", "ngram:4x"):
        with pytest.raises(UsageError, match="not known"):
            parse_speculate(text)


def test_facts_hold_what_was_set() -> None:
    assert EngineOptions().facts() == {}
    assert EngineOptions(64, False, 4, 2).facts() == {
        "max_batched_tokens": 64,
        "prefix_caching": False,
        "draft_tokens": 4,
        "tensor_parallel": 2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "sglang"), "unknown engine 'sglang'"),
        (("--speculate", "ngram:3"), "are vLLM's"),
        (("--tensor-parallel", "2"), "are vLLM's"),
        (("--no-prefix-caching",), "are vLLM's"),
        (("--engine", "vllm", "--cache", "static"), "are of transformers"),
        (("--engine", "vllm", "--tensor-parallel", "0"), "0 is less than 1"),
        (("--engine", "vllm", "--speculate", "eagle"), "--speculate 'eagle' is not known"),
    ],
)
def test_wrong_calls(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *options]) == 2
    assert message.lower() in capsys.readouterr().err.lower()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_one_line_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--engine", "vllm"]) == 1
    error = capsys.readouterr().err
    assert "needs vLLM, which is not installed" in error
    assert 'pip install "phaseprof[vllm]"' in error
    assert len(error.splitlines()) == 2


def test_a_config_without_architectures_gets_one() -> None:
    with config_folder({"model_type": "llama", "quantization_config": {}}, "x") as folder:
        written = json.loads((folder / "config.json").read_text())
    assert written == {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert not folder.exists()
    with pytest.raises(ModelError, match="neither its architectures"):
        config_folder({"model_type": "vit"}, "x").__enter__()


def test_what_the_engine_prints_is_kept_off_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with EngineOutput(shown=False) as output:
        os.write(1, b"from C\n")
        os.system("echo '(Worker pid=7) ERROR x.py:3] a.b.ValueError: KV cache is too small.' >&2")
        os.write(2, b"RuntimeError: Engine core initialization failed. See root cause above.\n")
        output.terminal.write("progress\n")
        output.terminal.flush()
        assert output.cause() == "ValueError: KV cache is too small"
    print("after")
    sys.stdout.flush()
    assert capfd.readouterr() == ("after\n", "progress\n")


def test_the_check_that_failed_is_what_is_said() -> None:
    error = ValueError(
        "1 validation error for ModelConfig\n  Value error, max_model_len (104) is too large. "
        "[type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]\n    For further information visit"
    )
    said = failed_to_generate(error, 4, EngineOutput(shown=True))
    assert said.message == "vLLM failed at batch 4: max_model_len (104) is too large."


class Client:
    """The client of an engine core in another process, whose processes have no method of ours."""

    def collective_rpc(self, method: str, timeout: float, args: tuple[str, ...]) -> list[str]:
        raise AssertionError("nobody may be called who does not know the method")


@pytest.mark.parametrize(
    ("plugins", "why"),
    [("other", "VLLM_PLUGINS=other leaves"), (None, "has not loaded phaseprof's")],
)
def test_an_engine_without_the_plugin_is_noted(
    plugins: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setattr("phaseprof.vllm.plugin.is_registered", lambda: False)
    session = Session(tmp_path / "t")
    session.start()
    try:
        others = EngineSessions(SimpleNamespace(engine_core=Client()), session)
        others.begin()
        others.sync()
        others.end()
    finally:
        session.stop()
    (meta,) = (tmp_path / "t" / "meta").iterdir()
    (note,) = json.loads(meta.read_text())["not_measured"]
    assert why in note["why"]
    assert note["fix"]


def test_a_module_is_no_engine() -> None:
    assert not is_engine(None)
    assert not is_engine(SimpleNamespace(llm_engine=None))
