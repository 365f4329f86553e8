"""An engine in processes of its own: its core writes the requests and the steps, its worker the passes; they join."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phaseprof.analyzers.report import build_report
from phaseprof.trace.reader import Trace, open_trace

SCRIPT = """
import json, sys
sys.path.insert(0, {support!r})
from vllm_engines import generate, make_engine, prompts, sampling

if __name__ == "__main__":
    engine = make_engine({folder!r}, max_num_batched_tokens=32, max_num_seqs=8)
    outputs = generate(engine, prompts(9, 40, 70), sampling(6))
    outputs += generate(engine, prompts(6, first=99), sampling(4, n=2, temperature=1.0, seed=1))
    told = [
        dict(
            id=output.request_id,
            prompt=len(output.prompt_token_ids),
            outputs=[len(one.token_ids) for one in output.outputs],
            first_token_latency=output.metrics.first_token_latency,
            arrival=output.metrics.arrival_time,
        )
        for output in outputs
    ]
    print("TOLD", json.dumps(told), flush=True)
"""


@dataclass(frozen=True)
class Run:
    """What vLLM told its client, and the trace."""

    told: list[dict[str, Any]]
    trace: Trace


@pytest.fixture(scope="module")
def run(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("processes")
    script = folder / "offline.py"
    support = str(Path(__file__).parent / "support")
    script.write_text(SCRIPT.format(support=support, folder=str(llama_folder)), encoding="utf-8")
    command = [sys.executable, "-m", "phaseprof", "run", "-o", str(folder / "trace"), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    return Run(json.loads(line.removeprefix("TOLD ")), open_trace(folder / "trace"))


def test_the_core_and_the_worker_are_processes_of_their_own(run: Run) -> None:
    with_model = [meta for meta in run.trace.metas if meta.models]
    with_scheduler = [
        meta for meta in run.trace.metas if any("Scheduler.schedule" in hook for hook in meta.hooks)
    ]
    assert len(with_model) == 1
    assert {meta.pid for meta in with_scheduler} - {meta.pid for meta in with_model}


def test_requests_are_those_that_the_client_sent(run: Run) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in run.trace.requests.to_pylist():
        rows.setdefault(row["client_id"], []).append(row)
    assert set(rows) == {each["id"] for each in run.told}
    for each in run.told:
        own = rows[each["id"]]
        assert [row["output_tokens"] for row in own] == each["outputs"]
        assert {row["prompt_tokens"] for row in own} == {each["prompt"]}
        assert {row["finish"] for row in own} == {"length"}
        for row in own:
            assert abs(row["arrival_ns"] - round(each["arrival"] * 1e9)) < 1000
            # The client sees the first token once it has come through the queue between the two processes.
            seen_ns = round(each["first_token_latency"] * 1e9)
            assert 0 < row["queue_ns"] <= row["ttft_ns"]
            if len(own) == 1:
                assert row["ttft_ns"] <= seen_ns + 1_000_000


def test_steps_and_passes_join(run: Run) -> None:
    steps = {
        (row["rank"], row["model_id"], row["step"]): row for row in run.trace.steps.to_pylist()
    }
    passes = {
        (row["rank"], row["model_id"], row["step"]): row for row in run.trace.passes.to_pylist()
    }
    assert set(steps) == set(passes)
    for key, row in passes.items():
        step = steps[key]
        assert step["scheduled_tokens"] == sum(part["query"] for part in row["slices"])
        begun = step["start_ns"] + step["schedule_ns"]
        # Both clocks are the machine's monotonic one, placed by a pair of readings of each process.
        slack = 1_000_000
        assert begun - slack <= row["start_ns"]
        assert row["end_ns"] <= begun + step["execute_ns"] + slack
    served = {part["request_id"] for row in passes.values() for part in row["slices"]}
    assert served == set(run.trace.requests.column("request_id").to_pylist())


def test_the_report_counts_each_once(run: Run) -> None:
    report = build_report(run.trace)
    assert report.engine is not None
    assert report.engine.engines == 1
    assert report.facts.ranks == 1
    # The first requests are cold, and the last question has two answers.
    assert report.requests.count + run.trace.requests.column("warmup").drop_null().length() == 5
