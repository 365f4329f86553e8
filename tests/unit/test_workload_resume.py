"""Going on with a run: what its trace holds, and when it is a run of something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rows import START_NS, request

from phaseprof.errors import TraceError, UsageError
from phaseprof.process import this_host
from phaseprof.records import Call, CallKind
from phaseprof.schema import CALLS
from phaseprof.trace.meta import Device, ProcessMeta
from phaseprof.trace.writer import TraceWriter, to_arrow
from phaseprof.workload.plan import Cell, WorkloadPlan
from phaseprof.workload.resume import FRESH, Progressed, check_devices, progressed

PLAN = WorkloadPlan(prompt_tokens=(9, 20), new_tokens=(3,), batches=(1, 2), repeats=2)
FACTS: dict[str, object] = {
    **PLAN.facts(),
    "engine": "hf",
    "model": "SmolLM2",
    "parameters": 135,
    "device": "cpu|a",
    "dtype": "float32",
    "threads": 2,
}
MS = 1_000_000


def device(key: str) -> Device:
    return Device(f"CPU {key}", "cpu", 0, 2, 2, None, key)


def write(
    folder: Path, calls: tuple[Call, ...] = (), firsts: tuple[int, ...] = (), **meta: Any
) -> None:
    """A trace with calls, and requests that have their first tokens so many ms after the begin."""
    pid = meta.pop("pid", 7)
    host = meta.pop("host", None)
    token = "" if host is None else host.token
    writer = TraceWriter(folder, rank=0, pid=pid, host=token)
    for number, ms in enumerate(firsts):
        writer.put_request(request(f"r{number}", first_token_ns=START_NS + ms * MS))
    writer.put_rows("calls", to_arrow(calls, CALLS.arrow))
    facts: dict[str, Any] = {"complete": True, "workload": FACTS, "ended_ns": START_NS, **meta}
    writer.write_meta(ProcessMeta(1, "0", 0, pid, (), {}, START_NS, host=host, **facts))
    writer.close()


def call(kind: CallKind, cell: Cell, repeat: int, start_ms: int) -> Call:
    """It takes 10 ms."""
    start_ns = START_NS + start_ms * MS
    return Call(
        kind, cell.prompt_tokens, cell.new_tokens, cell.batch, repeat, start_ns, start_ns + 10 * MS
    )


def test_nothing_was_done_where_there_is_no_trace(tmp_path: Path) -> None:
    assert progressed(tmp_path / "none", FACTS) is FRESH
    assert progressed(tmp_path, FACTS) is FRESH
    assert FRESH.rounds(PLAN).planned == 8
    assert list(FRESH.unseen(PLAN)) == list(PLAN.cells)
    assert not FRESH.is_whole(PLAN)


def test_calls_count_whose_requests_are_all_there(tmp_path: Path) -> None:
    one, two = Cell(9, 3, 1), Cell(9, 3, 2)
    calls = (
        call(CallKind.WARMUP, one, 0, 0),
        call(CallKind.COUNTED, one, 0, 100),
        call(CallKind.COUNTED, two, 0, 200),
        # Of its two requests one was lost with the process.
        call(CallKind.COUNTED, two, 1, 300),
        call(CallKind.LOOK, two, 0, 400),
    )
    write(tmp_path, calls, (5, 105, 205, 206, 305, 405, 406))
    done = progressed(tmp_path, FACTS)
    assert done.calls == {one: {0}, two: {0}}
    assert done.looked == {(9, 2)}
    assert done.spent_s == pytest.approx(0.020)
    assert done.rounds(PLAN).planned == 6
    assert list(done.unseen(PLAN)) == [Cell(9, 3, 1), Cell(20, 3, 1), Cell(20, 3, 2)]


def test_what_is_warmed_up_is_what_is_left() -> None:
    assert FRESH.to_warm(PLAN) == PLAN.cells
    run = {cell: {0, 1} for cell in PLAN.cells}
    assert Progressed({**run, PLAN.cells[1]: {0}}).to_warm(PLAN) == (PLAN.cells[1],)
    # All calls are there, and no kernel was seen: the process is new, and must not look at its first passes.
    assert Progressed(run).to_warm(PLAN) == PLAN.cells
    assert not Progressed(run).is_whole(PLAN)
    seen = frozenset((cell.prompt_tokens, cell.batch) for cell in PLAN.cells)
    assert Progressed(run, seen).to_warm(PLAN) == ()
    assert Progressed(run, seen).is_whole(PLAN)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batch", [1, 4], "batch sizes 1, 2 there, 1, 4 here."),
        ("prompt_tokens", 9, "prompt tokens 9, 20 there, 9 here."),
        ("seed", 3, "seed 0 there, 3 here."),
        ("model", "Other", "model SmolLM2 there, Other here."),
        ("parameters", 360, "number of parameters 135 there, 360 here."),
        ("engine", "vllm", "engine hf there, vllm here."),
        ("dtype", "bfloat16", "dtype float32 there, bfloat16 here."),
        ("device", "cuda|b", "device cpu|a there, cuda|b here."),
        ("threads", 1, "threads 2 there, 1 here."),
        ("cache_implementation", "static", "cache the default there, static here."),
        ("draft_tokens", 4, "drafted tokens the default there, 4 here."),
    ],
)
def test_another_run_is_refused(tmp_path: Path, name: str, value: object, said: str) -> None:
    write(tmp_path)
    with pytest.raises(UsageError) as caught:
        progressed(tmp_path, {**FACTS, name: value})
    assert caught.value.message == f"The trace {tmp_path} is of another run: {said}"


def test_more_repeats_are_no_other_run(tmp_path: Path) -> None:
    write(tmp_path)
    assert progressed(tmp_path, {**FACTS, "repeats": 9}) == FRESH


def test_a_trace_of_something_else_cannot_be_continued(tmp_path: Path) -> None:
    write(tmp_path, workload=None)
    with pytest.raises(TraceError, match="is none that `phaseprof profile` wrote"):
        progressed(tmp_path, FACTS)


def test_a_run_that_still_goes_on_is_not_joined(tmp_path: Path) -> None:
    here = this_host()
    # The parent of this process runs, under the same numbering.
    write(tmp_path, pid=os.getppid(), host=here, complete=False, ended_ns=None)
    with pytest.raises(UsageError, match=f"Process {os.getppid()} still writes the trace"):
        progressed(tmp_path, FACTS)


def test_a_process_that_was_killed_does_not_hold_its_trace(tmp_path: Path) -> None:
    # No process has a number above the greatest that Linux gives.
    write(tmp_path, pid=1 << 22, host=this_host(), complete=False, ended_ns=None)
    assert progressed(tmp_path, FACTS) == FRESH


def test_two_processes_of_one_number_do_not_share_a_trace(tmp_path: Path) -> None:
    write(tmp_path, pid=os.getpid(), host=this_host())
    with pytest.raises(UsageError, match="with the same number"):
        progressed(tmp_path, FACTS)


def test_devices_that_an_engine_shows_late_are_compared(tmp_path: Path) -> None:
    write(tmp_path, devices=(device("a"),))
    check_devices(tmp_path)
    write(tmp_path, pid=8, devices=(device("b"),))
    with pytest.raises(UsageError, match="CPU a, CPU b"):
        check_devices(tmp_path)
