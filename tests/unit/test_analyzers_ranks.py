"""Several ranks: which of them count, the figures of each, and their skew, on timelines built by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from traces import MS, START_NS, Timeline, meta, model

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.ranks import groups_of
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Parallelism, Report
from phaseprof.process import first_pass_id
from phaseprof.trace.meta import ClockPair, Host, ProcessMeta
from phaseprof.trace.reader import Trace

Times = dict[int, tuple[int, ...]]

HOST = Host("node-a", "c10c5a", "8f5cc7")
OTHER = Host("node-b", "0ther0", "00beef")

#: Begin and length of four decode steps in ms, by rank. Rank 1 begins last in the last three.
STARTS: Times = {0: (0, 10, 20, 30), 1: (0, 11, 22, 34)}
SPANS: Times = {0: (5, 5, 5, 5), 1: (5, 4, 3, 1)}


def process(rank: int, **changes: Any) -> ProcessMeta:
    """A rank of a job of two, whose Unix clock is `rank` seconds behind that of rank 0."""
    unix_ns = START_NS - rank * 10**9
    changes = {
        "rank": rank,
        "pid": 100 + rank,
        "host": HOST,
        "world_size": 2,
        "restart": 0,
        "clock": (ClockPair(unix_ns, 5_000), ClockPair(unix_ns + 10**9, 5_000 + 10**9)),
        "models": (model(),),
        **changes,
    }
    return meta(**changes)


def split(rank: int, *ranks: int, **changes: Any) -> ProcessMeta:
    """A rank whose model is split over some ranks."""
    return process(rank, models=(replace(model(), tensor_ranks=ranks),), **changes)


def timeline(
    metas: tuple[ProcessMeta, ...],
    starts: Times = STARTS,
    spans: Times = SPANS,
    tokens: dict[int, int] | None = None,
) -> Timeline:
    """Each process writes its steps on its own Unix axis."""
    built = Timeline()
    for each in metas:
        first = first_pass_id(each.rank, each.pid, each.host_token)
        for step, (start, span) in enumerate(zip(starts[each.rank], spans[each.rank], strict=True)):
            built.now_ns = each.clock[0].unix_ns + start * MS
            built.add(
                "decode",
                span,
                tokens=(tokens or {}).get(each.rank, 1),
                request=f"p{each.pid}.r0",
                rank=each.rank,
                pass_id=first + step,
                step=step,
            )
        built.request(f"p{each.pid}.r0", rank=each.rank)
    return built


def report(*metas: ProcessMeta, **how: Any) -> Report:
    return build_report(timeline(metas, **how).trace(*metas))


def test_one_rank_has_no_section() -> None:
    one = process(0, world_size=None)
    made = report(one)
    assert made.ranks is None
    assert to_json(made)["ranks"] is None
    assert not [entry for entry in made.not_measured if "rank" in entry.what]


def test_data_parallel_ranks_add_up() -> None:
    made = report(process(0), process(1))
    assert made.phases["decode"].passes == 8
    assert made.phases["decode"].decode_tokens == 8
    assert made.requests.count == 2
    ranks = made.ranks
    assert ranks is not None
    assert ranks.groups == ((0,), (1,)) and ranks.leaders == (0, 1)
    assert ranks.kinds == (Parallelism.DATA,)
    first, second = ranks.ranks
    assert (first.passes, first.tokens, first.span_ms, first.decode_ms_p50) == (4, 4, 20, 5)
    assert (second.passes, second.tokens, second.span_ms, second.decode_ms_p50) == (4, 4, 13, 3)
    # 5 ms lie between two steps of rank 0, and 6 + 7 + 9 ms between those of rank 1.
    assert (first.between_ms, second.between_ms) == (15, 22)
    assert first.output_tokens_per_s == pytest.approx(4 / 0.035)
    assert second.output_tokens_per_s == pytest.approx(4 / 0.035)
    assert ranks.output_tokens_per_s == pytest.approx(8 / 0.035)
    assert dict(made.provenance)["ranks"] == (
        "2: passes, tokens, requests and time are sums over them, rates are per rank"
    )
    assert first.host == second.host == "node-a"
    assert ranks.hosts == ("node-a",)
    assert ranks.missing == ()


def test_the_slowest_of_data_parallel_ranks_is_the_one_that_takes_longest_in_all() -> None:
    made = report(process(0), process(1), spans={0: (5, 5, 5, 5), 1: (5, 9, 4, 9)})
    assert made.ranks is not None
    (skew,) = made.ranks.skews
    assert (skew.kind, skew.ranks, skew.steps) == (Parallelism.DATA, (0, 1), 4)
    # They differ by 0, 4, 1 and 4 ms.
    assert (skew.duration_ms.p50, skew.duration_ms.p90) == (1, 4)
    assert skew.start_ms is not None
    # On the one clock of their host they begin 0, 1, 2 and 4 ms apart, although their Unix clocks were a second apart.
    assert (skew.start_ms.p50, skew.start_ms.p90) == (1, 4)
    assert skew.laggard.rank == 1
    assert skew.laggard.last_share == 0.5
    assert skew.laggard.lost_ms == 7  # 27 ms against 20 ms
    assert skew.laggard.lost_share == pytest.approx(7 / 27)


def test_a_tensor_parallel_pass_counts_once() -> None:
    made = report(split(0, 0, 1), split(1, 0, 1))
    assert made.phases["decode"].passes == 4
    assert made.phases["decode"].decode_tokens == 4
    assert made.phases["decode"].span_ms == 20
    assert made.requests.count == 1
    assert made.facts.ranks == 2
    ranks = made.ranks
    assert ranks is not None
    assert ranks.groups == ((0, 1),) and ranks.leaders == (0,)
    assert ranks.kinds == (Parallelism.TENSOR,)
    assert [each.tokens for each in ranks.ranks] == [4, 4]
    assert ranks.output_tokens_per_s == ranks.ranks[0].output_tokens_per_s
    said = dict(made.provenance)["ranks"]
    assert said == "2 share the passes, which count once: figures are those of rank 0"


def test_the_last_to_begin_holds_up_a_tensor_parallel_step() -> None:
    made = report(split(0, 0, 1), split(1, 0, 1))
    assert made.ranks is not None
    (skew,) = made.ranks.skews
    assert (skew.kind, skew.steps, skew.by_start) == (Parallelism.TENSOR, 4, True)
    assert skew.start_ms is not None
    assert (skew.start_ms.p50, skew.start_ms.p90) == (1, 4)
    assert (skew.duration_ms.p50, skew.duration_ms.p90) == (1, 4)
    assert skew.laggard.rank == 1
    assert skew.laggard.last_share == 0.75
    assert skew.laggard.lost_ms == 7  # 1 + 2 + 4
    assert skew.laggard.lost_share == pytest.approx(7 / 20)


def test_what_a_rank_costs_ends_where_the_one_before_it_stands() -> None:
    """Three ranks: where two are late together, the later one costs only what it is behind the other."""
    made = report(
        *(split(rank, 0, 1, 2, world_size=3) for rank in range(3)),
        starts={0: (0, 10, 20), 1: (3, 10, 24), 2: (5, 10, 24)},
        spans={0: (9, 9, 9), 1: (6, 9, 5), 2: (4, 9, 5)},
    )
    assert made.ranks is not None
    (skew,) = made.ranks.skews
    assert skew.laggard.rank == 2
    assert skew.laggard.lost_ms == 2
    assert skew.laggard.last_share == pytest.approx(1 / 3)
    assert skew.start_ms is not None and skew.start_ms.p90 == 5


def test_over_hosts_durations_alone_are_compared() -> None:
    made = report(split(0, 0, 1), split(1, 0, 1, host=OTHER))
    assert made.ranks is not None
    assert made.ranks.hosts == ("node-a", "node-b")
    (skew,) = made.ranks.skews
    assert skew.start_ms is None and skew.by_start is False
    # All ranks of a step end together: rank 1, whose passes are shorter, began last.
    assert (skew.laggard.rank, skew.laggard.lost_ms) == (1, 7)
    (said,) = [e for e in made.not_measured if e.what == "how far apart ranks begin a step"]
    assert "the clocks of node-a and node-b" in said.why


def test_two_containers_of_one_machine_have_one_clock() -> None:
    made = report(process(0), process(1, host=replace(HOST, name="pod-2", token="00beef")))
    assert made.ranks is not None
    assert made.ranks.skews[0].start_ms is not None


def test_groups_of_split_models_are_data_parallel_to_each_other() -> None:
    four = [
        split(rank, *((0, 1) if rank < 2 else (2, 3)), world_size=4, pid=100 + rank)
        for rank in range(4)
    ]
    made = report(
        *four,
        starts=dict.fromkeys(range(4), (0, 10, 20, 30)),
        spans={0: (5,) * 4, 1: (5,) * 4, 2: (6,) * 4, 3: (6,) * 4},
    )
    assert made.phases["decode"].decode_tokens == 8
    assert made.ranks is not None
    assert made.ranks.groups == ((0, 1), (2, 3)) and made.ranks.leaders == (0, 2)
    assert made.ranks.kinds == (Parallelism.DATA, Parallelism.TENSOR)
    assert [(skew.kind, skew.ranks) for skew in made.ranks.skews] == [
        (Parallelism.TENSOR, (0, 1)),
        (Parallelism.TENSOR, (2, 3)),
        (Parallelism.DATA, (0, 2)),
    ]
    assert made.ranks.skews[2].laggard.rank == 2
    assert made.ranks.skews[0].laggard.lost_ms == 0
    leader = dict(made.provenance)["ranks"]
    assert leader.endswith("figures are those of ranks 0 and 2, summed, and rates are per group")


def test_ranks_with_other_work_are_not_compared() -> None:
    made = report(process(0), process(1), tokens={0: 1, 1: 2})
    assert made.ranks is not None
    assert made.ranks.skews == ()
    assert made.phases["decode"].decode_tokens == 4 + 8
    (said,) = [entry for entry in made.not_measured if entry.what == "skew between ranks"]
    assert "did not run the same sequence" in said.why


def test_fewer_steps_are_other_work_unless_the_rank_was_cut_off() -> None:
    starts = {0: (0, 10, 20, 30), 1: (0, 10, 20)}
    spans = {0: (5, 5, 5, 5), 1: (5, 6, 7)}
    ended = report(process(0), process(1), starts=starts, spans=spans)
    killed = process(1, complete=False, ended_ns=None)
    cut_off = report(process(0), killed, starts=starts, spans=spans)
    assert ended.ranks is not None and cut_off.ranks is not None
    assert ended.ranks.skews == ()
    assert cut_off.ranks.skews[0].steps == 3
    assert cut_off.ranks.skews[0].laggard.lost_ms == 3
    assert [each.ended for each in cut_off.ranks.ranks] == [True, False]
    assert any("1 of 2 processes" in sentence for sentence in cut_off.answer)


def test_steps_of_a_restarted_worker_are_those_of_its_restart() -> None:
    """Both workers were restarted: the first time rank 0 came to its third step and rank 1 to its second."""
    metas = tuple(
        process(rank, restart=restart, pid=100 + 10 * restart + rank, complete=restart == 1)
        for restart in (0, 1)
        for rank in (0, 1)
    )
    built = Timeline()
    for each in metas:
        first = first_pass_id(each.rank, each.pid, each.host_token)
        steps = 3 if (each.rank, each.restart) == (0, 0) else 2
        for step in range(steps):
            built.now_ns = each.clock[0].unix_ns + (100 * (each.restart or 0) + 10 * step) * MS
            slow = 2 if each.rank == 1 and each.restart == 1 else 0
            built.add("decode", 4 + slow, rank=each.rank, pass_id=first + step, step=step)
    made = build_report(built.trace(*metas))
    assert made.ranks is not None
    (skew,) = made.ranks.skews
    assert skew.steps == 4
    assert (skew.laggard.rank, skew.laggard.lost_ms, skew.laggard.last_share) == (1, 4, 0.5)
    assert [(r.processes, r.restarts, r.ended) for r in made.ranks.ranks] == [(2, 1, True)] * 2


def test_several_processes_at_once_as_one_rank_are_not_compared() -> None:
    """Workers that were spawned without ranks are all of rank 0."""
    metas = (process(0), process(0, pid=200), process(1))
    made = report(*metas)
    assert made.ranks is not None
    assert made.ranks.skews == ()
    assert made.ranks.ranks[0].processes == 2
    assert made.ranks.ranks[0].passes == 8


def test_warm_up_has_no_skew() -> None:
    metas = (process(0), process(1))
    built = timeline(metas)
    for row in built.passes:
        if row["step"] == 3:
            row["warmup"] = "first"
    made = build_report(built.trace(*metas))
    assert made.ranks is not None
    assert made.ranks.skews[0].steps == 3
    assert made.ranks.skews[0].start_ms is not None
    assert made.ranks.skews[0].start_ms.p90 == 2


@pytest.mark.parametrize(
    ("world_size", "what"),
    [(2, "rank 1 of 2"), (3, "ranks 1 and 2 of 3"), (8, "7 ranks of 8")],
)
def test_a_rank_without_a_pass_is_said(world_size: int, what: str) -> None:
    made = report(process(0, world_size=world_size))
    (said,) = [entry for entry in made.not_measured if "rank" in entry.what]
    assert said.what == what
    assert made.ranks is None


def test_the_leader_of_killed_ranks_is_the_one_that_came_furthest() -> None:
    metas = tuple(split(rank, 0, 1, complete=False) for rank in (0, 1))
    starts = {0: (0, 10), 1: (0, 10, 20, 30)}
    made = report(*metas, starts=starts, spans={0: (5, 5), 1: (5, 5, 5, 5)})
    assert made.phases["decode"].passes == 4
    assert made.ranks is not None
    assert made.ranks.leaders == (1,)


def test_a_trace_that_names_no_host_is_compared_by_durations() -> None:
    metas = (process(0, host=None), process(1, host=None))
    trace: Trace = timeline(metas).trace(*metas)
    assert groups_of(trace, "m") == ((0,), (1,))
    made = build_report(trace)
    assert made.ranks is not None
    assert made.ranks.skews[0].start_ms is None
    assert made.ranks.hosts == ()


def test_as_json() -> None:
    made = report(split(0, 0, 1), split(1, 0, 1))
    data = json.loads(json.dumps(to_json(made), allow_nan=False))["ranks"]
    assert data["kinds"] == ["tensor-parallel"]
    assert data["groups"] == [[0, 1]]
    assert [each["rank"] for each in data["ranks"]] == [0, 1]
    (skew,) = data["skews"]
    assert skew["kind"] == "tensor-parallel"
    assert skew["start_ms"] == {"count": 4, "p50": 1.0, "p90": 4.0, "p99": 4.0}
    assert skew["laggard"] == {
        "rank": 1,
        "last_share": 0.75,
        "lost_ms": 7.0,
        "lost_share": 0.35,
    }
    assert data["ranks"][0]["clock_drift_ms"] == 0
