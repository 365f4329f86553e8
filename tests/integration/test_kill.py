"""A killed run: the trace opens, and at most the last second of it is missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phaseprof.trace.reader import open_trace

# Imports the libraries once, then forks a child for each line "trace log" on its input. A child runs passes as fast as
# it can, and notes the end of each in a log that survives the kill.
NURSERY = """
import inspect, os, signal, sys, time
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from phaseprof.session import Session

torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=64, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(1, 64, (1, 4))

@torch.no_grad()
def live(trace, log):
    log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Session(Path(trace)).start()
    os.write(1, f"{os.getpid()}\\n".encode())
    # The nursery goes when the test goes, whatever the reason.
    while os.getppid() == nursery:
        out = model(ids, use_cache=True)
        for _ in range(20):
            os.write(log, f"{time.time_ns()}\\n".encode())
            out = model(ids[:, :1], **{name: dict.get(out, name)})

nursery = os.getpid()
for line in sys.stdin:
    if os.fork() == 0:
        try:
            live(*line.split())
        finally:
            os._exit(1)
"""

KILLS = 50
AT_ONCE = 5


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks children on demand."""
    script = tmp_path / "nursery.py"
    script.write_text(NURSERY)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_traces_of_killed_runs_are_whole(nursery: subprocess.Popen[str], tmp_path: Path) -> None:
    """Fifty runs, each killed at a random moment: every trace opens, and none lacks more than its last second."""
    chance = random.Random(20)
    assert nursery.stdin is not None and nursery.stdout is not None
    seen = 0
    for group in range(KILLS // AT_ONCE):
        places = [
            (tmp_path / f"trace-{group}-{n}", tmp_path / f"log-{group}-{n}") for n in range(AT_ONCE)
        ]
        waits = sorted(chance.uniform(0.0, 2.5) for _ in places)
        children = []
        for trace, log in places:
            nursery.stdin.write(f"{trace} {log}\n")
            nursery.stdin.flush()
            children.append((int(nursery.stdout.readline()), trace, log))
        began = time.monotonic()
        for (pid, trace, log), wait in zip(children, waits, strict=True):
            time.sleep(max(began + wait - time.monotonic(), 0))
            killed_ns = time.time_ns()
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            seen += check(trace, log, killed_ns)
    # Some were killed late enough to have rows, or the test would show nothing.
    assert seen > 1000


def check(trace: Path, log: Path, killed_ns: int) -> int:
    """Every pass that ended a second before the kill is in the trace, and nothing of it is damaged."""
    opened = open_trace(trace)
    assert opened.damage == ()
    assert len(opened.metas) == 1
    assert opened.metas[0].complete is False
    due = sum(1 for line in log.read_text().splitlines() if int(line) < killed_ns - 1_000_000_000)
    ids = opened.passes.column("pass_id").to_pylist()
    assert len(ids) >= due
    assert len(set(ids)) == len(ids)
    return due
