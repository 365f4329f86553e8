"""Kernels of real engines and the steps that launched them: counts and times as the recordings' own notes give them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from chrome_recordings import KEPT, MORE, Recording, read_recording

from phaseprof.attribution import Launches, PassWindow, join, lost
from phaseprof.records import Kernel


def joined(recording: Recording, steps: list[PassWindow]) -> tuple[tuple[Kernel, ...], Launches]:
    launches = Launches(recording.launches)
    return join(launches.link(recording.events, source="recording"), steps), launches


def kernels_of(recording: Recording, rows: Iterable[Kernel], step: PassWindow) -> list[Kernel]:
    names = {(kernel.name, kernel.start_ns) for kernel in recording.kernels}
    return [
        row for row in rows if row.pass_id == step.pass_id and (row.name, row.start_ns) in names
    ]


def sum_ms(rows: Iterable[Kernel]) -> float:
    return sum(row.end_ns - row.start_ns for row in rows) / 1e6


@pytest.mark.parametrize(
    ("name", "prefix", "kernels", "busy_ms", "copies"),
    [
        ("vllm-mi300x-decode-full-graph", "execute_32_context_0", 425, 10.675, 9),
        ("vllm-b200-tp8-prefill", "execute_context_1(888", 768, 10.863, 161),
        ("sglang-mi300x-extend", "execute_15360_context_15", 527, 492.774, 7),
    ],
)
def test_all_kernels_of_a_step_are_its_own(
    name: str, prefix: str, kernels: int, busy_ms: float, copies: int
) -> None:
    recording = read_recording(KEPT / f"{name}.json.gz")
    (step,) = [window for said, window in recording.annotations.items() if said.startswith(prefix)]
    rows, launches = joined(recording, [step])
    own = kernels_of(recording, rows, step)
    assert len(own) == kernels
    assert sum_ms(own) == pytest.approx(busy_ms, abs=0.001)
    assert sum(row.pass_id == step.pass_id for row in rows) == kernels + copies
    assert launches.launchless == 0
    # Every launch of a kernel in these three traces has one.
    assert lost(launches, [step]) == frozenset()


def test_under_a_full_graph_no_kernel_lies_in_the_time_of_its_step() -> None:
    recording = read_recording(KEPT / "vllm-mi300x-decode-full-graph.json.gz")
    (step,) = recording.annotations.values()
    assert all(kernel.start_ns > step.end_ns for kernel in recording.kernels)
    by_launch = Counter(kernel.correlation for kernel in recording.kernels)
    assert by_launch.most_common(1)[0][1] == 421


def test_a_step_whose_kernels_came_late_takes_none_of_the_next() -> None:
    """The recorded step twice, the second one while the kernels of the first one run."""
    recording = read_recording(KEPT / "vllm-mi300x-decode-full-graph.json.gz")
    (first,) = recording.annotations.values()
    shift = first.end_ns - first.start_ns
    second = PassWindow(99, first.thread_id, first.end_ns + 1, first.end_ns + 1 + 10 * shift)
    rows, _ = joined(recording, [first, second])
    assert {row.pass_id for row in rows} == {first.pass_id}


def more(name: str) -> Path:
    path = MORE / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in this checkout")
    return path


@pytest.mark.parametrize(
    ("name", "kernels", "launchless"),
    [
        # The session began while work was queued: a third of the kernels has no launch.
        ("hf-h100-qwen-forward", 1465, 436),
        ("odd-launchless-kernels", 6080, 705),
        ("old-2021-schema", 8772, 0),
    ],
)
def test_kernels_without_a_launch_are_counted(name: str, kernels: int, launchless: int) -> None:
    recording = read_recording(more(name))
    assert len(recording.kernels) == kernels
    launches = Launches(recording.launches)
    whole = PassWindow(1, 7, 0, 2**62)
    rows = join(launches.link(recording.kernels, source="recording"), [whole])
    without = [row for row in rows if row.launched_ns is None]
    assert len(without) == launches.launchless == launchless
    # No pass is given them, though one lasted all the time.
    assert {row.pass_id for row in without} <= {None}
    assert {row.pass_id for row in rows if row.launched_ns is not None} == {1}
    # And every launch that is there has its kernel.
    list(launches.link(recording.events, source="recording"))
    assert lost(launches, [whole]) == frozenset()


@pytest.mark.parametrize("name", ["odd-cpu-only", "odd-no-rank", "odd-no-distributed-info"])
def test_traces_without_kernels_have_nothing_to_join(name: str) -> None:
    recording = read_recording(more(name))
    assert joined(recording, [])[0] == ()
