"""The samples for vLLM, run as a user would run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pyarrow.compute as pc
from vllm_processes import SERVER_OPTIONS, run

from phaseprof.trace.reader import open_trace

SAMPLES = Path(__file__).parents[2] / "samples"


def test_an_offline_engine_is_shown_by_request(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--random", "--requests", "3", "--new-tokens", "4", "--step-tokens", "48")
    command = [sys.executable, SAMPLES / "vllm_offline.py", llama_folder, *options, "--trace", "t"]
    done = run([str(word) for word in command], tmp_path)
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    rows = trace.requests.filter(pc.field("warmup").is_null()).to_pylist()
    # They share the first 32 tokens, which is one block of the cache.
    assert sorted((row["prompt_tokens"], row["cached_tokens"]) for row in rows)[1:] == [
        (64, 32),
        (80, 32),
    ]
    # Before and after it vLLM says what it likes.
    lines = done.stdout.splitlines()
    (head,) = [place for place, line in enumerate(lines) if line.startswith("prompt  cached")]
    *shown, last = lines[head + 1 : head + 5]
    assert [(line.split()[0], line.split()[2]) for line in shown] == [
        ("48", "4"),
        ("64", "4"),
        ("80", "4"),
    ]
    assert all(re.search(r"(mixed|decode), \d+ \+ \d+ tokens$", line) for line in shown)
    assert last == f"steps in the trace: {trace.passes.num_rows} (t)"


def test_a_server_is_held_against_its_clients(served_folder: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, SAMPLES / "vllm_server.py", served_folder, "--trace", "t"),
        *("--requests", "5", "--at-once", "2", "--new-tokens", "6", "--", *SERVER_OPTIONS),
    ]
    done = run([str(word) for word in command], tmp_path)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith(
        "request     tokens   TTFT ms: client   trace    TPOT ms: client   trace"
    )
    rows = [line.split() for line in lines[:5]]
    assert [row[1] for row in rows] == ["64+6", "72+6", "80+6", "88+6", "64+6"]
    # What the client waits for holds what the engine takes.
    for row in rows:
        assert float(row[2]) > float(row[3]) > 0
    assert lines[6].startswith(f"phaseprof · {served_folder.name} · vllm ")
