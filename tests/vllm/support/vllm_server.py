"""A server of vLLM under `phaseprof run`, and clients that stream from it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
from vllm_processes import SERVER_OPTIONS, below, end_all, environment, phaseprof, wait_until

from phaseprof.trace.reader import open_trace

API = ("-m", "vllm.entrypoints.openai.api_server")


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
    text: str


@contextlib.contextmanager
def serve(model: Path, folder: Path, *options: str, **environ: str) -> Iterator[Server]:
    """Start a server and wait until it answers; kill what is left of it at the end.

    Args:
        model: A folder that can be served; it is served as `tiny`.
        folder: Where the trace `t` and the `log` are written.
        options: Of the server.
        environ: Variables of the environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = (
        f"--model={model}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--served-model-name=tiny",
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            phaseprof(
                "run", "-o", "t", "--", sys.executable, *API, *place, *SERVER_OPTIONS, *options
            ),
            cwd=folder,
            env=environment(folder / "cache", **environ),
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
    """Whether the server is ready."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def prompt_of(length: int) -> list[int]:
    """The prompt of a request of that length."""
    return [5 + (length * 31 + place * 7) % 80 for place in range(length)]


def stream(
    server: Server,
    name: str,
    prompt: int,
    new_tokens: int,
    leave_after: int | None = None,
    patience_s: float = 120,
    **changes: Any,
) -> Streamed:
    """Send a request; note when each piece of the answer comes. A client may leave after some."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt_of(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **changes,
    }
    connection = HTTPConnection("127.0.0.1", server.port, timeout=patience_s)
    sent_ns = time.time_ns()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise HTTPException(f"{response.status}: {response.read()!r}")
    times: list[int] = []
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.time_ns())
            # What tells of an error has none.
            choices = json.loads(line[6:]).get("choices")
            text += choices[0]["text"] if choices else ""
            if leave_after is not None and len(times) >= leave_after:
                break
    response.close()
    connection.close()
    return Streamed(name, prompt, sent_ns, tuple(times), text)


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
