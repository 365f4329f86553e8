"""`phaseprof compare` on traces of a real model, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Record = Callable[[Callable[[], Any]], Any]


def test_a_trace_compares_with_one_of_longer_prompts(
    record: Record, llama: Any, tmp_path: Path
) -> None:
    paths = []
    for tokens in (24, 48):
        prompt = torch.arange(3, 3 + tokens).reshape(1, -1)

        def run(prompt: torch.Tensor = prompt) -> None:
            for _ in range(6):
                llama.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=5,
                    min_new_tokens=5,
                    do_sample=False,
                )

        paths.append(str(record(run).trace.path))
    done = subprocess.run(
        [sys.executable, "-m", "phaseprof", "compare", paths[0], paths[1], paths[0], "--json"],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PHASEPROF_CACHE_DIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    longer, itself = json.loads(done.stdout)["comparisons"]
    assert longer["comparable"] == "comparable in part"
    assert "prompts of 24 tokens and of 48 tokens" in longer["reasons"][0]
    assert longer["metrics"]["requests.ttft_ms.p50"]["call"] == "not compared"
    assert itself["comparable"] == "comparable" and itself["differences"] == []
    metrics = itself["metrics"]
    assert metrics["decode.pass_ms.p50"]["change"] == 0.0
    assert metrics["decode.pass_ms.p50"]["a"]["blocks"] > 1
    calls = {each["call"] for each in metrics.values()}
    assert not calls & {"worse", "better"}
