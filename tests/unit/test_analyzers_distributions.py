"""The spread of latencies and the slowest requests, by hand and for any values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.viewing.distributions import distribution, histogram
from phaseprof.analyzers.viewing.worst import WorstRequest, worst_requests

PRIMARY = Primary("m", ("target",), 0.0)
I64 = pa.int64()


def of(values_ms: list[float | None]) -> pa.Array:
    return pa.array([None if v is None else round(v * MS) for v in values_ms], I64)


def test_values_of_about_the_same_size_have_bins_of_equal_width() -> None:
    # 10 to 16 ms in six bins of 1 ms; a value on an edge is in the bin that begins there.
    found = histogram(of([10, 10.5, 11, 12.2, 13, 15.9, 16, None]))
    assert found is not None and not found.equal_ratio
    assert found.edges_ms == pytest.approx((10, 11, 12, 13, 14, 15, 16))
    assert found.counts == (2, 1, 1, 1, 0, 2)


def test_values_that_span_more_have_bins_of_equal_ratio() -> None:
    found = histogram(of([1, 10, 1_000_000]))
    assert found is not None and found.equal_ratio
    assert found.edges_ms == pytest.approx((1, 10, 100, 1_000, 10_000, 100_000, 1_000_000))
    assert found.counts == (1, 1, 0, 0, 0, 1)


def test_zeros_are_counted_apart() -> None:
    found = histogram(of([0, 0, 5, 6]))
    assert found is not None and found.zeros == 2 and sum(found.counts) == 2


def test_there_is_nothing_to_show_of_nothing() -> None:
    assert histogram(of([None, 0])) is None
    assert distribution("ttft", of([])) is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=300))
def test_every_value_is_in_one_bin(values: list[int]) -> None:
    found = histogram(pa.array(values, I64))
    assert found is not None
    assert sum(found.counts) == len(values)
    assert list(found.edges_ms) == sorted(found.edges_ms)
    assert found.edges_ms[0] == min(values) / 1e6 and found.edges_ms[-1] == max(values) / 1e6
    assert len(found.edges_ms) == len(found.counts) + 1


def test_the_percentiles_are_of_the_same_values() -> None:
    found = distribution("ttft", of([10, 20, 30, 40, 1_000]))
    assert found is not None
    assert (found.percentiles.count, found.percentiles.p50, found.percentiles.p99) == (5, 30, 1_000)
    assert (found.least_ms, found.greatest_ms) == (10, 1_000)


class Server:
    """Steps one after another, and requests whose tokens come from them."""

    def __init__(self) -> None:
        self.timeline = Timeline()

    def request(
        self, name: str, arrival_ms: float, ttft_ms: float, gaps: Sequence[float], **more: Any
    ) -> None:
        whole = round(sum(gaps) * MS)
        self.timeline.request(
            name,
            arrival_ns=START_NS + round(arrival_ms * MS),
            ttft_ns=round(ttft_ms * MS),
            itl_ns=[round(gap * MS) for gap in gaps],
            tpot_ns=whole // len(gaps) if gaps else None,
            output_tokens=len(gaps) + 1,
            **more,
        )

    def worst(self) -> dict[str, WorstRequest]:
        trace = self.timeline.trace()
        return {w.request_id: w for w in worst_requests(trace.requests, trace.passes, PRIMARY)}


@pytest.fixture
def server() -> Server:
    """Ten decode steps of 10 ms, a prefill of 300 ms of 4,096 tokens, ten decode steps again: 0, 100, 400, 500 ms."""
    made = Server()
    for _ in range(10):
        made.timeline.add("decode", 10, sequences=2, tokens=2)
    made.timeline.add("prefill", 300, tokens=4096, request="long")
    for _ in range(10):
        made.timeline.add("decode", 10, sequences=3, tokens=3)
    for name in "abcd":
        made.request(name, 0, 10, [10] * 5)
    return made


def test_the_step_that_a_token_waited_for_is_named(server: Server) -> None:
    # Tokens at 10, 20 … 100 ms, and the next one at 410 ms, after the prefill and a step.
    server.request("slow", 0, 10, [10] * 9 + [310, 10], itl_steps=[*range(1, 10), 11, 12])
    found = server.worst()["slow"]
    assert set(found.slow_by) == {"tpot", "itl"}
    longest = found.waits[0]
    assert (longest.token, longest.wait_ms, longest.usual_ms) == (10, 310, 10)
    assert longest.begin_ms == 100
    first, second = longest.steps
    assert (first.step, first.phase, first.prefill_tokens) == (10, "prefill", 4096)
    assert (first.pass_ms, first.overlap_ms, first.yielded) == (300, 300, False)
    assert (second.step, second.phase, second.yielded) == (11, "decode", True)
    assert longest.steps_in_all == 2 and longest.passes_share == pytest.approx(1)


def test_what_ran_before_the_first_token_is_named(server: Server) -> None:
    server.request("late", 90, 330, [10], queue_ns=310 * MS, client_id="user-7")
    found = server.worst()["late"]
    assert found.client_id == "user-7" and found.slow_by == ("ttft",)
    (wait,) = found.waits
    assert (wait.token, wait.wait_ms, wait.usual_ms, wait.queue_ms) == (0, 330, 10, 310)
    assert [step.phase for step in wait.steps] == ["prefill", "decode", "decode"]
    # A step of 10 ms before the prefill, and two after it.
    assert wait.steps_in_all == 4
    assert all(step.yielded is None for step in wait.steps)


def test_a_wait_beside_the_passes_is_said_to_be_one(server: Server) -> None:
    # It arrived 100 ms before the first pass and got a token at 20 ms.
    server.request("early", -100, 120, [10])
    (wait,) = server.worst()["early"].waits
    assert wait.begin_ms == -100
    assert wait.passes_share == pytest.approx(20 / 120)


def test_none_is_the_worst_of_equals() -> None:
    server = Server()
    server.timeline.add("decode", 10)
    for name in "abc":
        server.request(name, 0, 10, [10, 10])
    assert server.worst() == {}


def test_warm_up_is_not_among_the_worst(server: Server) -> None:
    server.request("warm", 0, 5_000, [10], warmup="requested")
    assert "warm" not in server.worst()


def test_requests_of_one_token_have_no_later_waits(server: Server) -> None:
    server.request("one", 0, 900, [])
    found = server.worst()["one"]
    assert found.longest_itl_ms is None and found.tpot_ms is None
    assert [wait.token for wait in found.waits] == [0]
