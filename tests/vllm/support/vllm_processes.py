"""Programs that run vLLM in processes of its own, for tests: what they run with, and how they are watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

#: A server with a tiny model of dummy weights.
SERVER_OPTIONS = (
    "--load-format=dummy",
    "--enforce-eager",
    "--dtype=float32",
    "--block-size=32",
    "--kv-cache-memory-bytes=4194304",
    "--max-model-len=256",
)

#: The beginning of a program with a tiny offline engine, whose processes are those that vLLM gives it.
OFFLINE = """
import os, sys
from pathlib import Path

def make(folder, **changes):
    from vllm import LLM
    return LLM(folder, **{**dict(load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        kv_cache_memory_bytes=1 << 22, max_model_len=256, dtype="float32", block_size=32), **changes})

def answers(llm, *lengths, tokens=6, first=3):
    from vllm import SamplingParams
    sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(first + 17 * n + 5 * i) % 250 + 3 for i in range(length)]}
               for n, length in enumerate(lengths)]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
"""


def environment(cache: Path, **more: str) -> dict[str, str]:
    """That of this process, without what the tests in it set for engines of their own."""
    own = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PHASEPROF_CACHE_DIR": str(cache),
        **more,
    }


def phaseprof(*arguments: str | Path) -> list[str]:
    """A phaseprof command."""
    return [sys.executable, "-m", "phaseprof", *map(str, arguments)]


def run(command: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and keep what it printed."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(cwd / "cache", **more),
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def metas(trace: Path) -> list[Any]:
    """The meta files of a trace."""
    return [json.loads(file.read_text()) for file in sorted(trace.glob("meta/*.json"))]


def wait_until(met: Callable[[], Any], process: subprocess.Popen[Any], limit_s: float = 240) -> Any:
    """Wait for a condition while a process lives; give what it gave."""
    end = time.monotonic() + limit_s
    while not (found := met()):
        assert process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)
    return found


def below(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """All processes below one."""
    try:
        found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def titled(process: subprocess.Popen[Any], part: str) -> psutil.Process:
    """The process below one whose title says that it is a part of vLLM: ``EngineCore``, ``Worker``."""
    (found,) = [p for p in below(process) if f"VLLM::{part}" in " ".join(p.cmdline())]
    return found


def end_all(process: subprocess.Popen[Any], others: list[psutil.Process]) -> None:
    """End what a test has started and what that has started, if anything is left."""
    for one in {*others, *below(process)}:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    if process.poll() is None:
        process.kill()
    process.wait(30)
