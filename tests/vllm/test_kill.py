"""Processes of an engine that are killed while they serve: the trace is whole, and the report says who did not end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_processes import (
    OFFLINE,
    below,
    end_all,
    environment,
    metas,
    phaseprof,
    run,
    titled,
    wait_until,
)

from phaseprof.trace.reader import open_trace

# Generates until it is killed, or its engine is. It notes the end of each call in a log that survives.
ENDLESS = (
    OFFLINE
    + """
import time
if __name__ == "__main__":
    llm = make(sys.argv[1])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        answers(llm, 9, 40, tokens=20)
        os.write(log, f"{time.time_ns()}\\n".encode())
"""
)

#: Requests of a call.
CALL = 2


def start(folder: Path, model: Path) -> subprocess.Popen[str]:
    (folder / "endless.py").write_text(ENDLESS)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            phaseprof("run", "--no-report", "-o", "t", "--", "endless.py", model),
            cwd=folder,
            env=environment(folder / "cache"),
            stdout=said,
            stderr=said,
            text=True,
        )


def ended_calls(folder: Path, before_ns: int | None = None) -> int:
    log = folder / "log"
    ends = [int(line) for line in log.read_text().split()] if log.exists() else []
    return sum(1 for end in ends if before_ns is None or end < before_ns)


@pytest.mark.parametrize("victim", ["Worker", "EngineCore", "program"])
def test_a_killed_process_leaves_a_whole_trace(
    victim: str, llama_folder: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, llama_folder)
    others: list[Any] = []
    try:
        wait_until(lambda: ended_calls(tmp_path) >= 20, process)
        others = below(process)
        (program,) = [p for p in others if p.cmdline()[1:2] == ["endless.py"]]
        worker = titled(process, "Worker")
        found = program if victim == "program" else titled(process, victim)
        time.sleep(1.5)
        killed_ns = time.time_ns()
        os.kill(found.pid, signal.SIGKILL)
        if victim == "EngineCore":
            # Without it the offline client of vLLM 0.32.0 waits for ever, also without phaseprof. The worker ends.
            worker.wait(60)
            program.kill()
        process.wait(120)
        if victim != "Worker":
            assert process.returncode == 128 + signal.SIGKILL
            # The engine would go on until it notices that its client is gone.
            for one in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    finally:
        end_all(process, others)
    assert process.returncode != 0
    trace = open_trace(tmp_path / "t")
    assert trace.damage == ()
    # What had ended a second before is there: in the worker's passes, and in the requests of the engine core.
    due = ended_calls(tmp_path, killed_ns - 1_000_000_000)
    assert due >= 20
    ended = [row for row in trace.requests.to_pylist() if row["finish"] == "length"]
    assert len(ended) >= due * CALL
    assert all(row["output_tokens"] == 20 for row in ended)
    decoded = sum(trace.passes["decode_tokens"].to_pylist())
    assert decoded >= due * CALL * 19
    assert sum(trace.passes["prefill_tokens"].to_pylist()) > 0
    # One that was killed could not say its end, and is named.
    cut = [meta["pid"] for meta in metas(tmp_path / "t") if not meta["complete"]]
    assert len(cut) == {"Worker": 1, "EngineCore": 1, "program": 2}[victim]
    report = run(phaseprof("report", "t"), tmp_path)
    assert report.returncode == 0, report.stderr
    assert f"The end of {len(cut)} of " in " ".join(report.stdout.split())
