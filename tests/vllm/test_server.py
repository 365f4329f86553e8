"""A server under `phaseprof run`, with streaming clients: its requests as the clients see them, read while it runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from vllm_engines import generate, make_engine, sampling
from vllm_processes import phaseprof, run, wait_until
from vllm_server import API, Server, Streamed, prompt_of, recorded, serve, stream

from phaseprof.trace.reader import open_trace

#: Clocks are read in processes of their own and tied to Unix time at their starts.
SLACK_NS = 20_000_000


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serve(served_folder, folder, "--max-num-batched-tokens=64") as started:
        yield started


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


def measured(server: Server, *names: str) -> list[float]:
    """Sums of histograms that the server itself publishes, in seconds, and over how many requests (the last)."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    ends = [f"{name}_seconds_sum" for name in names] + ["time_to_first_token_seconds_count"]
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{end}"))
        for end in ends
    ]


def test_vllms_own_figures_lie_between_ours_and_the_clients(server: Server) -> None:
    """Its TTFT is taken where the server's process gets the token: after the engine core handed it over, and before the
    client reads it. Its TPOT is of the engine core's own times, as ours is; so is the end of its queue, which begins
    when the core was given the request."""
    figures = "time_to_first_token", "request_time_per_output_token", "request_queue_time"
    before = measured(server, *figures)
    seen = [stream(server, f"m{number}", 24 + number, 12) for number in range(4)]
    # The last request is counted after its client has its last token.
    wait_until(lambda: measured(server)[0] == before[-1] + len(seen), server.process, 30)
    wait_until(lambda: measured(server, *figures)[1] > before[1], server.process, 30)
    ttft, tpot, queue, _ = (
        (after - then) * 1e9 for after, then in zip(measured(server, *figures), before, strict=True)
    )
    rows = recorded(server, *(one.name for one in seen)).values()
    slack = len(seen) * SLACK_NS
    assert sum(row["ttft_ns"] for row in rows) <= ttft + slack
    assert ttft <= sum(one.chunk_ns[0] - one.sent_ns for one in seen) + slack
    assert sum(row["tpot_ns"] for row in rows) == pytest.approx(tpot, abs=slack / 11)
    assert queue <= sum(row["queue_ns"] for row in rows) + slack


def test_a_text_is_the_same_without(server: Server, served_folder: Path) -> None:
    """Held against an engine in this process that nobody records."""
    engine = make_engine(served_folder, skip_tokenizer_init=False, max_num_batched_tokens=64)
    sent = stream(server, "same", 21, 9)
    parameters = sampling(9, detokenize=True)
    (answer,) = generate(engine, [{"prompt_token_ids": prompt_of(21)}], parameters)
    assert sent.text == answer.outputs[0].text
    assert sent.text.strip()


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
