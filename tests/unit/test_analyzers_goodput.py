"""Service-level objectives: how they are written, and which requests meet them."""

from __future__ import annotations

from typing import Any

import pytest
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.goodput import goodput, parse_objectives
from phaseprof.analyzers.serving import Goodput, Met, Objective
from phaseprof.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500ms,tpot=50ms", (Objective("ttft", 500), Objective("tpot", 50))),
        ("e2e=2s", (Objective("e2e", 2_000),)),
        (" queue = 250us , ttft=1.5 s", (Objective("queue", 0.25), Objective("ttft", 1_500))),
        ("ttft=300", (Objective("ttft", 300),)),
    ],
)
def test_objectives_are_read(text: str, expected: tuple[Objective, ...]) -> None:
    assert parse_objectives(text) == expected


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=fast", "ttft=-5ms", "itl=5ms", "ttft=5min", "ttft=5ms,"]
)
def test_others_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_objectives(text)


def test_none_is_given_twice() -> None:
    with pytest.raises(UsageError, match="two objectives for ttft"):
        parse_objectives("ttft=5ms,ttft=6ms")


def judged(timeline: Timeline, text: str) -> Goodput | None:
    return goodput(timeline.trace().requests, "m", parse_objectives(text))


def asked(timeline: Timeline, ttft_ms: float, tpot_ms: float | None, **columns: Any) -> None:
    """A request each second, of 3 tokens, that ends half a second after it came."""
    number = len(timeline.requests)
    timeline.request(
        f"r{number}",
        **{
            "arrival_ns": START_NS + number * 1_000 * MS,
            "finished_ns": START_NS + (number * 1_000 + 500) * MS,
            "ttft_ns": round(ttft_ms * MS),
            "tpot_ns": None if tpot_ms is None else round(tpot_ms * MS),
            **columns,
        },
    )


def test_a_request_is_good_if_it_meets_every_objective() -> None:
    """Of four one is late with its first token, one with the others, and one is just in time."""
    timeline = Timeline()
    for ttft_ms, tpot_ms in ((100, 10), (600, 10), (100, 60), (500, 50)):
        asked(timeline, ttft_ms, tpot_ms)
    found = judged(timeline, "ttft=500ms,tpot=50ms")
    assert found is not None
    assert (found.requests, found.good, found.share, found.left_out) == (4, 2, 0.5, 0)
    # From the first arrival to the last end: 3.5 s.
    assert found.per_s == pytest.approx(2 / 3.5)
    assert found.tokens_per_s == pytest.approx(6 / 3.5)
    assert found.each == (Met(Objective("ttft", 500), 0.75), Met(Objective("tpot", 50), 0.75))


def test_a_single_token_has_no_tpot_to_miss() -> None:
    timeline = Timeline()
    asked(timeline, 100, None, output_tokens=1)
    found = judged(timeline, "tpot=1ms")
    assert found is not None and found.good == 1


def test_from_arrival_to_end() -> None:
    timeline = Timeline()
    asked(timeline, 1, 1)
    assert judged(timeline, "e2e=500ms").good == 1  # type: ignore[union-attr]
    assert judged(timeline, "e2e=499ms").good == 0  # type: ignore[union-attr]
    assert judged(timeline, "queue=0ms").good == 1  # type: ignore[union-attr]


def test_what_has_no_end_of_its_own_is_left_out() -> None:
    timeline = Timeline()
    asked(timeline, 100, 10)
    asked(timeline, 900, 90, finish="abort")
    asked(timeline, 900, 90, finish=None, finished_ns=None)
    asked(timeline, 900, 90, warmup="first")
    asked(timeline, 900, 90, model_id="another")
    found = judged(timeline, "ttft=500ms")
    assert found is not None
    assert (found.requests, found.good, found.left_out) == (1, 1, 2)


def test_nothing_to_judge() -> None:
    timeline = Timeline()
    assert judged(timeline, "ttft=500ms") is None
    asked(timeline, 100, 10, finish="abort")
    assert judged(timeline, "ttft=500ms") is None


def test_warm_requests_count_for_want_of_others() -> None:
    timeline = Timeline()
    asked(timeline, 100, 10, warmup="first")
    found = judged(timeline, "ttft=500ms")
    assert found is not None and found.requests == 1
