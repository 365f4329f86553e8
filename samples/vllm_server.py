"""Load a vLLM server with streaming requests, and hold what the client sees against the trace.

    python samples/vllm_server.py MODEL [--requests N] [--at-once N] [--trace FOLDER] [-- SERVER OPTIONS]
    python samples/vllm_server.py MODEL --url http://127.0.0.1:8000 --trace FOLDER

The first form starts ``python -m vllm.entrypoints.openai.api_server`` under ``phaseprof run``, waits until it is
ready, sends the requests and ends it. The second takes a server that runs already, under ``phaseprof run -o FOLDER``;
its trace is read while it runs. MODEL is the name that the server serves, or the folder.

For each request: time to first token (TTFT) and time per token after it (TPOT), here and in the trace. The client's
TTFT also holds what lies outside of the engine: HTTP, the tokenizer, and the way to the engine's process and back.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import phaseprof

READY_S = 300
END_S = 60
#: What a process has seen is on disk within a second.
ON_DISK_S = 1.2


@dataclass
class Seen:
    """What the client saw of a request."""

    name: str
    ttft_ms: float
    tpot_ms: float
    tokens: int


def send(url: str, model: str, tokens: list[int], new_tokens: int, name: str) -> Seen:
    """Send a request, and take the time of each token that is streamed back."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=300)
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server answers {response.status}: {response.read(500)!r}")
    times = []
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    after = times[-1] - times[0]
    return Seen(
        name=name,
        ttft_ms=(times[0] - began) * 1e3,
        tpot_ms=after * 1e3 / (new_tokens - 1) if new_tokens > 1 else 0.0,
        tokens=new_tokens,
    )


def load(url: str, arguments: argparse.Namespace) -> list[Seen]:
    """Send all requests, so many at once, and no more."""
    run = uuid.uuid4().hex[:6]

    def one(number: int) -> Seen:
        length = arguments.prompt_tokens + 8 * (number % 4)
        tokens = [5 + (number * 31 + place * 7) % 80 for place in range(length)]
        return send(url, arguments.model, tokens, arguments.new_tokens, f"{run}-{number}")

    with ThreadPoolExecutor(arguments.at_once) as pool:
        return list(pool.map(one, range(arguments.requests)))


def start(arguments: argparse.Namespace, trace: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server under `phaseprof run`, and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    wrapped = [sys.executable, "-m", "phaseprof", "run", "--no-report", "-o", trace, "--"]
    process = subprocess.Popen(
        [*wrapped, sys.executable, *server, *place, *arguments.server],
        env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
        stdout=sys.stderr,
    )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + READY_S
    while not is_ready(url):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        if time.monotonic() > until:
            end(process)
            raise SystemExit(f"the server was not ready after {READY_S} s")
        time.sleep(0.5)
    return process, url


def is_ready(url: str) -> bool:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def end(process: subprocess.Popen[bytes]) -> None:
    # `phaseprof run` hands it on to the server, which ends its engine.
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def compare(seen: list[Seen], trace: str) -> None:
    """Print each request as the client and as the trace have it."""
    # The server makes its own id of the client's, with the number of the prompt in the request.
    rows = {row["client_id"]: row for row in phaseprof.open_trace(trace).requests.to_pylist()}
    print("request     tokens   TTFT ms: client   trace    TPOT ms: client   trace   queue ms")
    for one in seen:
        row = rows[f"cmpl-{one.name}-0"]
        tpot = row["tpot_ns"] or 0
        print(
            f"{one.name:10}  {row['prompt_tokens']:3}+{row['output_tokens']:<3}"
            f"  {one.ttft_ms:14.2f}  {row['ttft_ns'] / 1e6:6.2f}"
            f"  {one.tpot_ms:16.2f}  {tpot / 1e6:6.2f}  {(row['queue_ns'] or 0) / 1e6:9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=4, help="requests in flight")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--trace", help="the trace's folder; with --url, that of the server")
    parser.add_argument("--url", help="a server that runs already")
    words = sys.argv[1:]
    mine = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:mine])
    arguments.server = words[mine + 1 :]
    if arguments.url and not arguments.trace:
        parser.error("--url needs --trace, the folder that the server is recorded to")

    trace = arguments.trace or os.path.join(tempfile.mkdtemp(), "trace")
    if arguments.url:
        seen = load(arguments.url, arguments)
        time.sleep(ON_DISK_S)
    else:
        process, url = start(arguments, trace)
        try:
            seen = load(url, arguments)
        finally:
            end(process)
    compare(seen, trace)
    print()
    print(phaseprof.load_report(trace))


if __name__ == "__main__":
    main()
