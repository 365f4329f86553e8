"""The recorder: what it sheds when too much comes, what it survives, and that it keeps nothing of what has ended."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phaseprof import recorder as recording
from phaseprof.clock import Clock
from phaseprof.errors import NotMeasured
from phaseprof.events import (
    CacheGone,
    GenerationBegan,
    GenerationEnded,
    ModelSeen,
    PassSeen,
    PromptKnown,
)
from phaseprof.process import ProcessPlace
from phaseprof.recorder import Recorder
from phaseprof.records import ForwardPass
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.settling.settler import Settler
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import TraceWriter

META = ProcessMeta(
    schema=SCHEMA_VERSION,
    phaseprof="0",
    rank=0,
    pid=7,
    command=("x",),
    versions={},
    started_ns=1,
    complete=True,
)
#: The fields of a pass behind its times, by name: those of a decode step of one row, on the CPU.
STEP: dict[str, Any] = {
    **dict.fromkeys(PassSeen._fields),
    "model_id": "m0",
    "thread_id": 1,
    "rows": 1,
    "query": 1,
    "logits": 1,
    **dict.fromkeys(
        ["mask_unread", "encoder", "warmup", "compiled", "compiling", "profiled"], False
    ),
    **PassSeen._field_defaults,
}


def generation(number: int, steps: int) -> Iterator[Any]:
    """The events of a call with a prompt of 4 tokens: a pass is a plain tuple, as the hooks emit it."""
    begun = number * 10**9
    yield GenerationBegan(number, 0, "m0", begun)
    yield PromptKnown(
        generation=number,
        prompt=4,
        rows=1,
        sequences_per_request=1,
        mask=None,
        end_ids=(),
        max_output=steps,
        speculative=False,
    )
    for step in range(steps):
        facts = STEP | {"generation": number, "cache": number, "start_ns": begun + 2 * step}
        facts |= {"end_ns": begun + 2 * step + 1, "query": 1 if step else 4}
        yield tuple(PassSeen(**facts | {"past": step + 3 if step else 0}))
    yield CacheGone(number, begun + 2 * steps)
    yield GenerationEnded(number, begun + 2 * steps, None)


class Run:
    """A recorder, and what was told to it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.notes: list[NotMeasured] = []
        self.passes = 0
        self.recorder = Recorder(
            trace,
            place=ProcessPlace(),
            host="",
            clock=Clock.start(),
            meta=lambda: META,
            note=self.notes.append,
            passes_seen=lambda: self.passes,
        )
        self.recorder.start()

    def emit(self, events: Iterator[Any]) -> None:
        for event in events:
            self.passes += type(event) is tuple
            self.recorder.emit(event)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    # It drains when it is asked to.
    monkeypatch.setattr(recording, "DRAIN_S", 60.0)
    running = Run(tmp_path / "trace")
    yield running
    running.recorder.close()


def test_passes_are_shed_and_what_they_are_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SHED_ABOVE", 40)
    monkeypatch.setattr(recording, "SHED_TO", 20)
    run.emit(generation(1, steps=90))
    run.recorder.close()
    trace = open_trace(run.trace)
    # 94 events waited: 74 passes too many.
    assert trace.passes.num_rows == 16
    assert set(trace.passes.column("tag_source").to_pylist()) == {"generate"}
    assert set(trace.passes.column("phase").to_pylist()) == {"decode"}
    assert trace.requests.column("finish").to_pylist() == ["stop"]
    assert [note.what for note in run.notes] == ["74 passes"]


def test_few_events_are_never_shed(run: Run) -> None:
    run.emit(generation(1, steps=90))
    run.recorder.close()
    assert open_trace(run.trace).passes.num_rows == 90
    assert run.notes == []


def test_rows_of_a_long_queue_do_not_pile_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "PENDING_ROWS", 10)
    run.emit(generation(1, steps=90))
    pending = []
    put = TraceWriter.put_pass

    def put_and_look(writer: TraceWriter, row: ForwardPass) -> None:
        put(writer, row)
        pending.append(writer.pending_rows)

    monkeypatch.setattr(TraceWriter, "put_pass", put_and_look)
    run.recorder.close()
    assert max(pending) <= 20
    assert open_trace(run.trace).passes.num_rows == 90


def test_what_was_emitted_is_on_disk_after_a_sync(run: Run) -> None:
    for number in (1, 2):
        run.emit(generation(number, steps=3))
        run.recorder.sync()
        trace = open_trace(run.trace)
        assert trace.passes.num_rows == 3 * number
        assert trace.requests.num_rows == number


def test_an_event_that_cannot_be_read_is_named_and_ends_nothing(run: Run) -> None:
    run.emit(iter([("m0", 1)]))
    run.emit(generation(1, steps=3))
    run.recorder.close()
    assert open_trace(run.trace).passes.num_rows == 3
    assert [note.what for note in run.notes] == ["some tuple events", "1 passes"]


def reachable(*roots: Any) -> int:
    """Objects that are reachable from some, code and types aside."""
    left = (type, types.ModuleType, types.FunctionType, types.CodeType, types.BuiltinFunctionType)
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, left):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return len(seen)


@pytest.mark.parametrize("known_end", [True, False])
def test_nothing_is_kept_of_calls_and_loops_that_have_ended(
    tmp_path: Path, known_end: bool
) -> None:
    """Generate calls, or hand-written loops whose caches are freed: a hundred leave as much behind as ten."""
    writer = TraceWriter(tmp_path / "trace", rank=0, pid=7)
    settler = Settler(writer, offset_ns=0, process="p7", first_pass_id=0)
    settler.handle(ModelSeen("m0", None, "float32"))
    kept = []
    for number in range(1, 101):
        for event in generation(number, steps=3):
            taken = PassSeen._make(event) if type(event) is tuple else event
            if known_end or isinstance(taken, CacheGone):
                settler.handle(taken)
            elif isinstance(taken, PassSeen):
                settler.handle(taken._replace(generation=0))
        settler.poll()
        writer.flush()
        if number in (10, 100):
            # Parts have names, which are not what this is about.
            for table in writer._tables.values():
                table._parts.clear()
            gc.collect()
            kept.append(reachable(settler, writer))
    assert kept[1] <= kept[0] + 8
