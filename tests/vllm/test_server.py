"""A server under `phaseprof run`, with streaming clients: its requests as the clients see them, read while it runs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_processes import SERVER_OPTIONS, below, end_all, environment, phaseprof, run, wait_until

from phaseprof.trace.reader import open_trace

API = ("-m", "vllm.entrypoints.openai.api_server")
#: Clocks are read in processes of their own and tied to Unix time at their starts.
SLACK_NS = 20_000_000


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    port: int
    trace: Path
    processes: list[psutil.Process] = field(default_factory=list)


@dataclass(frozen=True)
class Streamed:
    """What a client saw, in Unix ns."""

    name: str
    prompt: int
    sent_ns: int
    chunk_ns: tuple[int, ...]


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = (
        f"--model={served_folder}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--served-model-name=tiny",
        "--max-num-batched-tokens=64",
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            phaseprof("run", "-o", "t", "--", sys.executable, *API, *place, *SERVER_OPTIONS),
            cwd=folder,
            env=environment(folder / "cache"),
            stdout=log,
            stderr=log,
            text=True,
        )
    started = Server(process, port, folder / "t")
    try:
        wait_until(lambda: answers(port), process)
        started.processes = below(process)
        yield started
    finally:
        end_all(process, started.processes)


def answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream(
    server: Server, name: str, prompt: int, new_tokens: int, leave_after: int | None = None
) -> Streamed:
    """Send a request; note when each piece of the answer comes. A client may leave after some."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [5 + (prompt * 31 + place * 7) % 80 for place in range(prompt)],
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    sent_ns = time.time_ns()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    times: list[int] = []
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.time_ns())
            if leave_after is not None and len(times) >= leave_after:
                break
    response.close()
    connection.close()
    return Streamed(name, prompt, sent_ns, tuple(times))


def recorded(server: Server, *names: str) -> dict[str, dict[str, Any]]:
    """Rows of requests by the client's name for them, once all of them have ended in the trace."""

    def look() -> dict[str, dict[str, Any]] | None:
        rows = {row["client_id"]: row for row in open_trace(server.trace).requests.to_pylist()}
        mine = {name: rows.get(f"cmpl-{name}-0") for name in names}
        return (
            {name: row for name, row in mine.items() if row is not None}
            if all(row is not None and row["finish"] for row in mine.values())
            else None
        )

    found: dict[str, dict[str, Any]] = wait_until(look, server.process, 30)
    return found


@pytest.fixture(scope="module")
def streamed(server: Server) -> dict[str, Streamed]:
    """Six requests, at most three at once; the first of all is a warm-up."""
    stream(server, "first", 20, 4)
    sizes = {"a": (16, 12), "b": (150, 12), "c": (1, 12), "d": (40, 1), "e": (64, 9), "f": (100, 5)}
    with ThreadPoolExecutor(3) as pool:
        seen = pool.map(lambda item: stream(server, item[0], *item[1]), sizes.items())
        return {one.name: one for one in seen}


def test_requests_are_joined_to_their_clients(
    server: Server, streamed: dict[str, Streamed]
) -> None:
    rows = recorded(server, *streamed)
    assert {name: row["prompt_tokens"] for name, row in rows.items()} == {
        name: one.prompt for name, one in streamed.items()
    }
    assert [rows[name]["output_tokens"] for name in "abcdef"] == [12, 12, 12, 1, 9, 5]
    assert {row["finish"] for row in rows.values()} == {"length"}
    assert rows["d"]["tpot_ns"] is None


def test_the_client_sees_each_token_after_the_engine(
    server: Server, streamed: dict[str, Streamed]
) -> None:
    """sent <= arrived, first token of the engine <= first piece at the client: so the client's TTFT is ours and what
    lies outside of the engine. Tokens of an answer come in the same order and not before the engine has them."""
    rows = recorded(server, *streamed)
    for name, one in streamed.items():
        row = rows[name]
        assert one.sent_ns <= row["arrival_ns"] + SLACK_NS
        first_ns = row["first_token_ns"]
        assert first_ns <= one.chunk_ns[0] + SLACK_NS
        assert one.chunk_ns[0] - one.sent_ns >= row["ttft_ns"] - 2 * SLACK_NS
        token_ns = first_ns
        # A piece may hold several tokens, so there are as many or fewer; the last holds the last token.
        assert len(one.chunk_ns) <= row["output_tokens"] + 1
        for gap in row["itl_ns"]:
            token_ns += gap
        assert token_ns <= one.chunk_ns[-1] + SLACK_NS
        if row["tpot_ns"] is not None:
            assert row["tpot_ns"] * (row["output_tokens"] - 1) == pytest.approx(
                sum(row["itl_ns"]), abs=row["output_tokens"]
            )


def test_steps_hold_the_tokens_of_the_requests(
    server: Server, streamed: dict[str, Streamed]
) -> None:
    recorded(server, *streamed)
    trace = open_trace(server.trace)
    passes = trace.passes.to_pylist()
    # A step computes at most 64 tokens: the prompt of 150 takes three at least.
    ids = {row["client_id"]: row["request_id"] for row in trace.requests.to_pylist()}
    of_b = [
        part for row in passes for part in row["slices"] if part["request_id"] == ids["cmpl-b-0"]
    ]
    assert sum(part["query"] for part in of_b if part["phase"] == "prefill") == 150
    assert len([part for part in of_b if part["phase"] == "prefill"]) >= 3
    assert sum(part["query"] for part in of_b if part["phase"] == "decode") == 11
    assert all(row["prefill_tokens"] + row["decode_tokens"] <= 64 for row in passes)
    assert {row["step"] for row in trace.steps.to_pylist()} == {row["step"] for row in passes}


def test_a_client_that_leaves_aborts_its_request(server: Server) -> None:
    stream(server, "left", 24, 200, leave_after=3)
    (row,) = recorded(server, "left").values()
    assert row["finish"] == "abort"
    assert 3 <= row["output_tokens"] < 200


def test_the_report_can_be_read_while_it_runs(
    server: Server, streamed: dict[str, Streamed], tmp_path: Path
) -> None:
    recorded(server, *streamed)
    done = run(phaseprof("report", server.trace, "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"]["count"] >= 1
    assert server.process.poll() is None


def test_a_killed_server_leaves_the_trace_whole(
    server: Server, streamed: dict[str, Streamed]
) -> None:
    """The last test of the module. SIGTERM is what the sample ends its server by."""
    rows = recorded(server, *streamed)
    (api,) = [p for p in server.processes if p.cmdline()[1:3] == list(API)]
    api.kill()
    server.process.wait(120)
    assert server.process.returncode == 128 + signal.SIGKILL
    trace = open_trace(server.trace)
    assert trace.damage == ()
    assert {row["client_id"] for row in trace.requests.to_pylist()} >= {
        row["client_id"] for row in rows.values()
    }
    # `phaseprof run` reports all the same.
    said = " ".join((server.trace.parent / "log").read_text().split())
    assert "phaseprof · tiny · vllm " in said
    assert "The end of 2 of 2 processes is not in the trace" in said
