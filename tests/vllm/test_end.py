"""A server that is told to end while it serves: each of its processes writes its end, though vLLM kills its engine."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
from vllm_processes import metas, phaseprof, run, titled
from vllm_server import Server, recorded, serve, stream

from phaseprof.trace.reader import open_trace


def stream_until_it_ends(server: Server, name: str) -> None:
    # Of an engine that is gone vLLM's server may not tell: it waits for its clients to leave.
    with contextlib.suppress(OSError, HTTPException):
        for number in itertools.count():
            stream(server, f"{name}{number}", 20, 230, patience_s=10)


@pytest.mark.parametrize("to_all", [False, True], ids=["asked", "from a terminal"])
def test_a_server_that_is_told_to_end_writes_all_it_did(
    to_all: bool, served_folder: Path, tmp_path: Path
) -> None:
    """Ctrl-C at a terminal reaches every process; what asks a server to end otherwise reaches the first alone."""
    with ThreadPoolExecutor(2) as pool, serve(served_folder, tmp_path) as server:
        stream(server, "first", 20, 4)
        running = [pool.submit(stream_until_it_ends, server, name) for name in ("a", "b")]

        recorded(server, "a0", "b0")
        told_ns = time.time_ns()
        if to_all:
            # The worker is the first to go, in the middle of a step, and its engine core waits for it.
            worker = titled(server.process, "Worker")
            worker.send_signal(signal.SIGINT)
            time.sleep(0.3)
            for one in (server.process, *server.processes):
                if one != worker:
                    one.send_signal(signal.SIGINT)
        else:
            server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        for one in running:
            one.result(60)
        assert not [
            p for p in server.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
    found = metas(server.trace)
    assert [meta["complete"] for meta in found] == [True] * 2
    rows = open_trace(server.trace).requests.to_pylist()
    cut = [row for row in rows if row["finish"] != "length"]
    assert len(rows) >= 4
    assert 1 <= len(cut) <= 2
    for row in cut:
        if to_all:
            # Nobody got to drop them.
            assert (row["finish"], row["finished_ns"]) == (None, None)
        else:
            assert row["finish"] == "abort"
            assert row["finished_ns"] >= told_ns
    report = run(phaseprof("report", server.trace), tmp_path)
    assert report.returncode == 0, report.stderr
    assert "is not in the trace" not in report.stdout
