"""Kernels of recordings to their steps: constructed launches whose owners are known; the work of steps by hand."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from phaseprof.attribution import PassWindow
from phaseprof.collectors.files.joinery import EventRow, Joinery
from phaseprof.importing.forms import Step, StepWork
from phaseprof.importing.joining import (
    Joined,
    StepKernels,
    join_events,
    join_operators,
    step_windows,
    under_recorded,
    with_launches,
)
from phaseprof.importing.model import work_of
from phaseprof.phases import Phase, TagSource
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.from_config import GivenModel

BASE = 10**18


def step(start: int, end: int, thread: int | None = 7, sequences: int = 4) -> Step:
    work = StepWork(Phase.DECODE, decode_sequences=sequences, decode_tokens=sequences)
    return Step(BASE + start, BASE + end, thread, TagSource.ANNOTATION, "step", work)


class Recording:
    """Launches and kernels of one thread and one device."""

    def __init__(self, folder: Path) -> None:
        self.joinery = Joinery(folder)
        self.joinery.shift_ns = BASE
        self.rows: list[dict[str, object]] = []
        self.sizes: list[int] = []

    def launch(
        self, correlation: int, at: int, name: str = "cudaLaunchKernel", thread: int = 7
    ) -> None:
        self.joinery.add_launch(correlation, at, thread, self.joinery.name(name))

    def kernel(self, correlation: int, start: int, length: int = 5, stream: int = 7) -> None:
        self.joinery.add_event(correlation, start, length, self.joinery.name("k"), 1, stream)

    def join(self, *steps: Step) -> Joined:
        def write(rows: pa.Table) -> None:
            self.rows += rows.to_pylist()
            self.sizes.append(rows.num_rows)

        return join_events(
            self.joinery,
            steps,
            range(100, 100 + len(steps)),
            source="test",
            device_name=lambda number: f"cuda:{number}",
            write=write,
        )


def test_kernels_are_those_of_the_step_that_launched_them(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(1, 10)
    recording.launch(2, 110)
    recording.kernel(1, 150)  # while the host is in the second step
    recording.kernel(2, 160, 15)
    joined = recording.join(step(0, 50), step(100, 200))
    assert {row["start_ns"]: row["pass_id"] for row in recording.rows} == {
        BASE + 150: 100,
        BASE + 160: 101,
    }
    assert (joined.steps[0].span_ns, joined.steps[1].span_ns) == (5, 15)
    assert (joined.between, joined.launchless, joined.unanswered) == (0, 0, 0)
    assert {row["device"] for row in recording.rows} == {"cuda:1"}


def test_all_kernels_of_a_graph_are_its_launch_s(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(5, 10, "cudaGraphLaunch")
    for start in (100, 110, 190):
        recording.kernel(5, start)
    joined = recording.join(step(0, 50))
    assert (joined.steps[0].events, joined.steps[0].in_graphs) == (3, 3)
    assert joined.steps[0].span_ns == 95


def test_what_cannot_be_joined_is_counted_and_keeps_no_step(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(1, 70)
    recording.kernel(1, 20)  # launched between steps
    recording.kernel(0, 20)  # no correlation
    recording.kernel(9, 20, stream=-1)  # its launch is not there
    joined = recording.join(step(0, 50), step(100, 150))
    assert (joined.events, joined.between, joined.launchless) == (3, 1, 2)
    assert joined.steps == {}
    assert {row["pass_id"] for row in recording.rows} == {None}
    assert None in {row["stream"] for row in recording.rows}


def test_the_outer_one_of_two_calls_with_an_id_is_the_launch(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(1, 55, "cuLaunchKernel")  # inside of the other, and past the end of the step
    recording.launch(1, 45)
    recording.kernel(1, 60)
    recording.join(step(0, 50))
    assert [row["launched_ns"] for row in recording.rows] == [BASE + 45]


def test_launches_without_kernels_make_a_step_incomplete(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(1, 10)
    recording.launch(2, 20)
    recording.launch(3, 30, "cudaMemcpyAsync")  # the host may have done it
    recording.launch(4, 400)  # in no step
    recording.kernel(1, 30)
    steps = step(0, 50), step(100, 150)
    joined = recording.join(*steps)
    assert joined.unanswered == 2
    assert under_recorded(steps, joined.steps) == (0,)


def test_replays_with_far_fewer_kernels_than_others_of_their_kind_are_incomplete() -> None:
    steps = [step(100 * place, 100 * place + 50) for place in range(6)]
    steps.append(step(600, 650, sequences=1))  # of another kind: fewer are right
    counts = [400, 401, 400, 150, 399, 398, 90]
    kernels = {place: StepKernels(0, 10, number, number) for place, number in enumerate(counts)}
    assert under_recorded(steps, kernels) == (3,)


def test_a_step_of_an_unknown_thread_takes_launches_by_time_alone(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(1, 10)
    recording.kernel(1, 30)
    recording.join(step(0, 50, thread=None))
    assert [row["pass_id"] for row in recording.rows] == [100]
    assert step_windows([step(0, 50, None)], [3]) == (PassWindow(3, -1, BASE, BASE + 50),)


def test_a_graph_of_many_kernels_is_joined_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held of a partition does not grow with what its launches replay."""
    for module in ("joining", "kernel_rows"):
        monkeypatch.setattr(f"phaseprof.importing.{module}.ROWS", 10)
    recording = Recording(tmp_path)
    recording.launch(1, 10, "cudaGraphLaunch")
    recording.launch(2, 110, "cudaGraphLaunch")
    for at in range(95):
        recording.kernel(1 if at < 60 else 2, 1000 - 10 * at)
    joined = recording.join(step(0, 50), step(100, 200))
    assert recording.sizes == [10] * 9 + [5]
    assert [own.events for own in joined.steps.values()] == [60, 35]
    assert joined.steps[0].span_ns == 1005 - (1000 - 590)
    passes = [row["pass_id"] for row in recording.rows]
    assert (passes.count(100), passes.count(101)) == (60, 35)
    assert joined.unanswered == 0


def test_markers_get_their_launch(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.launch(4, 40)
    recording.launch(3, 30, thread=9)

    name = recording.joinery.name("m")
    for launch in (8, 4, 3, 0):
        recording.joinery.add_marker(EventRow(launch, 90, 5, name, 0, 7), None)
    found = with_launches(recording.joinery)
    assert [(each.launch, each.launched_ns, each.thread_id) for each in found] == [
        (3, BASE + 30, 9),
        (4, BASE + 40, 7),
        (8, None, None),
        (0, None, None),
    ]


def test_operators_of_a_cpu_lie_in_their_step(tmp_path: Path) -> None:
    joinery = Joinery(tmp_path)
    joinery.shift_ns = BASE
    name = joinery.name("aten::mm")
    joinery.add_operator(10, 20, 7, name)
    joinery.add_operator(60, 5, 7, name)
    joinery.add_operator(20, 5, 8, name)
    rows: list[dict[str, object]] = []
    joined = join_operators(
        joinery, [step(0, 50)], [5], source="test", write=lambda each: rows.extend(each.to_pylist())
    )
    rows.sort(key=lambda row: str(row["start_ns"]))
    assert [(row["start_ns"], row["pass_id"], row["device"]) for row in rows] == [
        (BASE + 10, 5, "cpu"),
        (BASE + 20, None, "cpu"),
        (BASE + 60, None, "cpu"),
    ]
    assert (joined.events, joined.between, joined.on_cpu) == (3, 2, True)


#: Two layers of three heads of five values: 60 FLOPs a pair, in each.
MODEL = GivenModel(
    "tiny",
    "Tiny",
    "bfloat16",
    ModelCost(
        linear_flops_per_token=1000,
        head_flops_per_token=100,
        attention=(AttentionCost(2, 3, 1, 5, 5, None, 20),),
        body_weight_bytes=7000,
        head_weight_bytes=70,
        lookup_bytes_per_token=10,
        parameter_bytes=7080,
        parameters=3540,
        dtype="bfloat16",
    ),
)


def test_the_work_of_decode_needs_only_sums() -> None:
    told = StepWork(Phase.DECODE, 0, 0, 3, 3, context_tokens=40)
    work = work_of(MODEL, told)
    assert work is not None
    # Three tokens, three logits, and 40 pairs in each of two layers, however the 40 are spread.
    assert work.flops == 3 * 1000 + 3 * 100 + 40 * 2 * 60
    assert (work.context_tokens, work.attention_pairs) == (40, 40)


def test_the_work_of_one_prompt_is_exact() -> None:
    work = work_of(MODEL, StepWork(Phase.PREFILL, 1, 8, 0, 0, context_tokens=10))
    assert work is not None
    # Queries at the positions 2 to 9 see 3 to 10 keys.
    assert work.flops == 8 * 1000 + 100 + sum(range(3, 11)) * 2 * 60


@pytest.mark.parametrize(
    "told",
    [
        StepWork(Phase.PREFILL, 1, 8, 0, 0),  # no lengths
        StepWork(Phase.MIXED, 1, 8, 2, 2, context_tokens=30),  # whose they are is not told
        StepWork(Phase.OTHER, context_tokens=30),
        StepWork(Phase.DECODE, 0, 0, 3, 3, context_tokens=2),  # impossible
        StepWork(Phase.DECODE, 0, 0, 0, 3, context_tokens=9),
        # 2 and 14 tokens have 3 + 105 pairs; two of 8 would have 72.
        StepWork(Phase.PREFILL, 2, 16, 0, 0, context_tokens=16, attention_pairs=108),
    ],
)
def test_work_that_is_not_told_is_not_made_up(told: StepWork) -> None:
    assert work_of(MODEL, told) is None


def test_prompts_of_one_length_are_counted_by_their_mean() -> None:
    told = StepWork(Phase.PREFILL, 2, 16, 0, 0, context_tokens=16, attention_pairs=72)
    work = work_of(MODEL, told)
    assert work is not None
    assert work.flops == 16 * 1000 + 2 * 100 + 72 * 2 * 60
