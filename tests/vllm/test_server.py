"""A server under `phaseprof run`, with streaming clients: its requests as the clients see them, read while it runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_processes import phaseprof, run
from vllm_server import API, Server, Streamed, recorded, serve, stream

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
