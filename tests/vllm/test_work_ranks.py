"""Work of the ranks of a real engine: two tensor-parallel workers, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phaseprof.trace.meta import ModelMeta
from phaseprof.trace.reader import Trace, open_trace

SCRIPT = """
import os, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 21,
        max_model_len=256,
        dtype="float32",
        block_size=32,
        tensor_parallel_size=2,
    )
    prompts = [{"prompt_token_ids": [5 + n] * length} for n, length in enumerate((9, 30))]
    parameters = SamplingParams(max_tokens=3, temperature=0, detokenize=False, ignore_eos=True)
    answers = llm.generate(prompts, parameters, use_tqdm=False)
    print("TOKENS", [list(one.token_ids) for answer in answers for one in answer.outputs])
"""
LINEAR, HEAD = 589_824, 65_536


def tokens_of(script: Path, model: Path, *prefix: str) -> str:
    """Run the script; give the tokens that it got."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # Each rank on a core of its own.
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    command = [*prefix, sys.executable, str(script), str(model)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("TOKENS ")]
    return line


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def recorded(script: Path, llama_folder: Path) -> tuple[Trace, str]:
    """The trace, and the tokens."""
    folder = script.parent / "trace"
    prefix = (sys.executable, "-m", "phaseprof", "run", "-o", str(folder), "--")
    tokens = tokens_of(script, llama_folder, *prefix)
    return open_trace(folder), tokens


@pytest.fixture(scope="module")
def trace(recorded: tuple[Trace, str]) -> Trace:
    return recorded[0]


def models(trace: Trace) -> dict[int, ModelMeta]:
    """The model of each rank."""
    found = {meta.rank: meta.models for meta in trace.metas if meta.models}
    return {rank: model for rank, (model,) in found.items()}


def test_each_rank_counts_its_half(trace: Trace) -> None:
    """All matrices of a Llama are halved; norms are whole on both."""
    seen = models(trace)
    assert sorted(seen) == [0, 1]
    for model in seen.values():
        cost = model.cost
        assert cost is not None and cost.covered
        assert (cost.linear_flops_per_token, cost.head_flops_per_token) == (LINEAR // 2, HEAD // 2)
        (attention,) = cost.attention
        assert (attention.query_heads, attention.kv_heads) == (2, 1)
        assert attention.kv_bytes_per_token == 2 * 32 * 4
        assert model.tensor_ranks == (0, 1)
        assert cost.parameter_bytes == 4 * (LINEAR // 2 // 2 + 5 * 128 + 2 * 256 * 128 // 2)


def test_each_step_is_half_of_the_work(trace: Trace) -> None:
    rows: list[dict[str, Any]] = trace.passes.sort_by("pass_id").to_pylist()
    for rank in range(2):
        own = [row for row in rows if row["rank"] == rank]
        assert [(row["phase"], row["flops"]) for row in own] == [
            ("prefill", 39 * LINEAR // 2 + 2 * HEAD // 2 + 2 * 4 * 2 * 32 * (45 + 465)),
            ("decode", 2 * LINEAR // 2 + 2 * HEAD // 2 + 2 * 4 * 2 * 32 * (10 + 31)),
            ("decode", 2 * LINEAR // 2 + 2 * HEAD // 2 + 2 * 4 * 2 * 32 * (11 + 32)),
        ]
        token = 2 * 2 * 32 * 4
        assert [row["kv_write_bytes"] for row in own] == [39 * token, 2 * token, 2 * token]
        assert {row["kv_allocated_bytes"] for row in own} == {1 << 21}


def test_each_process_writes_its_end(trace: Trace) -> None:
    """vLLM kills its engine core after 5 s, which workers that end take up: the core is done before."""
    assert len(trace.metas) == 3
    assert all(meta.complete for meta in trace.metas)
    assert trace.requests.column("finish").to_pylist() == ["length"] * 2


def test_tokens_are_the_same_without(
    recorded: tuple[Trace, str], script: Path, llama_folder: Path
) -> None:
    assert recorded[1] == tokens_of(script, llama_folder)
