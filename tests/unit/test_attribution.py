"""Operators and kernels, and the passes that they belong to, on constructed timelines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.attribution import (
    DeviceEvent,
    Launch,
    Launches,
    PassJoin,
    PassWindow,
    join,
    lost,
)
from phaseprof.records import Kernel

#: Two passes on thread 7 with a gap between them, and one on thread 8 that overlaps both.
WINDOWS = [
    PassWindow(pass_id=1, thread_id=7, start_ns=100, end_ns=200),
    PassWindow(pass_id=2, thread_id=7, start_ns=300, end_ns=400),
    PassWindow(pass_id=3, thread_id=8, start_ns=150, end_ns=350),
]


def operator(start_ns: int, end_ns: int, thread_id: int | None = 7) -> Kernel:
    return Kernel("mm", "cpu", start_ns, end_ns, "test", thread_id=thread_id)


def joined(start_ns: int, end_ns: int, thread_id: int | None = 7) -> int | None:
    (kernel,) = join([operator(start_ns, end_ns, thread_id)], WINDOWS)
    return kernel.pass_id


@pytest.mark.parametrize(
    ("start_ns", "end_ns", "pass_id"),
    [
        pytest.param(110, 120, 1, id="inside"),
        pytest.param(100, 200, 1, id="as long as the pass"),
        pytest.param(200, 200, 1, id="no time, at its end"),
        pytest.param(90, 120, None, id="begins before it"),
        pytest.param(190, 210, None, id="ends after it"),
        pytest.param(220, 280, None, id="between two passes"),
        pytest.param(190, 310, None, id="from one into the next"),
        pytest.param(0, 50, None, id="before all"),
        pytest.param(500, 510, None, id="after all"),
        pytest.param(399, 400, 2, id="in the last one"),
    ],
)
def test_by_thread_and_time(start_ns: int, end_ns: int, pass_id: int | None) -> None:
    assert joined(start_ns, end_ns) == pass_id


def test_the_thread_decides_between_passes_of_the_same_time() -> None:
    assert joined(160, 170, thread_id=7) == 1
    assert joined(160, 170, thread_id=8) == 3
    assert joined(160, 170, thread_id=9) is None


def test_without_a_thread_time_decides_where_it_can() -> None:
    assert joined(110, 120, thread_id=None) == 1
    # Thread 8 began later, and its pass is over: only pass 2 can be meant.
    assert joined(360, 370, thread_id=None) == 2
    assert joined(220, 280, thread_id=None) == 3
    # Two passes ran then.
    assert joined(160, 170, thread_id=None) is None
    assert joined(190, 310, thread_id=None) == 3


def test_back_to_back_passes() -> None:
    windows = [PassWindow(1, 7, 0, 10), PassWindow(2, 7, 10, 20)]
    kernels = join([operator(9, 10), operator(10, 11), operator(10, 20)], windows)
    assert [kernel.pass_id for kernel in kernels] == [1, 2, 2]


def test_order_and_everything_else_stay() -> None:
    given_ = [operator(310, 320), operator(0, 1), operator(110, 120)]
    kernels = join(iter(given_), list(reversed(WINDOWS)))
    assert [kernel.pass_id for kernel in kernels] == [2, None, 1]
    assert [(k.start_ns, k.end_ns, k.thread_id) for k in kernels] == [
        (310, 320, 7),
        (0, 1, 7),
        (110, 120, 7),
    ]


def test_without_passes_nothing_is_joined() -> None:
    (kernel,) = join([operator(110, 120)], [])
    assert kernel.pass_id is None
    assert join([], WINDOWS) == ()


@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), max_size=12
    ),
    operators=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(1, 3)), max_size=20
    ),
)
def test_any_timeline_is_what_a_look_at_every_pass_finds(
    lengths: list[tuple[int, int, int]], operators: list[tuple[int, int, int]]
) -> None:
    """Passes of three threads, one after another on each, against a search over all of them."""
    now = {1: 0, 2: 0, 3: 0}
    windows = []
    for number, (gap, length, thread) in enumerate(lengths):
        start = now[thread] + gap + 1
        now[thread] = start + length
        windows.append(PassWindow(number, thread, start, now[thread]))
    ran = [operator(start, start + length, thread) for start, length, thread in operators]
    for kernel in join(ran, windows):
        around: list[int | None] = [
            window.pass_id
            for window in windows
            if window.thread_id == kernel.thread_id
            and window.start_ns <= kernel.start_ns
            and kernel.end_ns <= window.end_ns
        ]
        assert [kernel.pass_id] == (around or [None])


# Kernels by their launch


def launch(correlation: int, start_ns: int, thread_id: int | None = 7, name: str = "") -> Launch:
    return Launch(correlation, start_ns, thread_id, name or "cudaLaunchKernel")


def event(correlation: int | None, start_ns: int, end_ns: int, name: str = "gemm") -> DeviceEvent:
    return DeviceEvent(name, "cuda:0", start_ns, end_ns, 7, correlation)


def test_a_kernel_belongs_to_the_pass_that_launched_it_wherever_it_ran() -> None:
    """Launched in pass 1, they run while pass 2 launches, and after all passes: an asynchronous scheduler."""
    launches = Launches([launch(1, 110), launch(2, 190), launch(3, 310)])
    rows = list(
        launches.link([event(1, 320, 330), event(2, 900, 950), event(3, 960, 970)], source="t")
    )
    assert [row.pass_id for row in join(rows, WINDOWS)] == [1, 1, 2]
    assert [row.launched_ns for row in rows] == [110, 190, 310]
    assert (launches.events, launches.launchless, launches.unanswered()) == (3, 0, ())


def test_all_kernels_of_a_graph_belong_to_its_launch() -> None:
    launches = Launches([launch(5, 120, name="cudaGraphLaunch")])
    kernels = [event(5, 1_000 + 10 * i, 1_005 + 10 * i) for i in range(421)]
    rows = join(launches.link(kernels, source="t"), WINDOWS)
    assert [row.pass_id for row in rows] == [1] * 421


@pytest.mark.parametrize("correlation", [None, 0, 99])
def test_a_kernel_without_a_launch_is_counted_and_never_given_to_a_pass(
    correlation: int | None,
) -> None:
    launches = Launches([launch(1, 110)])
    # It ran inside of pass 1 alone.
    rows = join(launches.link([event(correlation, 120, 130)], source="t"), WINDOWS)
    assert [(row.pass_id, row.launched_ns) for row in rows] == [(None, None)]
    assert launches.launchless == 1
    assert launches.unanswered() == (launch(1, 110),)


def test_a_launch_between_two_passes_belongs_to_none() -> None:
    launches = Launches([launch(1, 250)])
    (row,) = join(launches.link([event(1, 310, 320)], source="t"), WINDOWS)
    assert (row.pass_id, row.launched_ns) == (None, 250)


@pytest.mark.parametrize(
    ("launched_ns", "pass_id"),
    [
        pytest.param(120, 1, id="in one pass"),
        pytest.param(160, None, id="two threads run passes"),
        pytest.param(250, 3, id="only the other thread does"),
        pytest.param(500, None, id="after all"),
    ],
)
@pytest.mark.parametrize("thread_id", [99, None])
def test_a_helper_thread_is_joined_where_one_pass_can_be_meant(
    thread_id: int | None, launched_ns: int, pass_id: int | None
) -> None:
    launches = Launches([launch(1, launched_ns, thread_id)])
    (row,) = join(launches.link([event(1, 600, 700)], source="t"), WINDOWS)
    assert row.pass_id == pass_id


def test_a_thread_that_runs_passes_never_helps_another() -> None:
    """Thread 8 launches before its own pass, while thread 7 is in one: for itself."""
    launches = Launches([launch(1, 120, thread_id=8)])
    (row,) = join(launches.link([event(1, 130, 140)], source="t"), WINDOWS)
    assert row.pass_id is None


def test_a_pass_that_is_awaited_gives_way_to_the_next_on_its_thread() -> None:
    awaited = [PassWindow(1, 7, 0, 100), PassWindow(2, 7, 40, 140)]
    launches = Launches([launch(1, 30), launch(2, 50), launch(3, 120), launch(4, 60, thread_id=9)])
    rows = join(launches.link([event(i, 200, 201) for i in (1, 2, 3, 4)], source="t"), awaited)
    assert [row.pass_id for row in rows] == [1, 2, 2, 2]


def test_a_driver_call_inside_of_a_runtime_call_changes_nothing() -> None:
    launches = Launches([launch(1, 110), launch(1, 250, name="cuLaunchKernel")])
    (row,) = join(launches.link([event(1, 300, 310)], source="t"), WINDOWS)
    assert (row.pass_id, row.launched_ns) == (1, 110)


def test_passes_that_lost_kernels_are_known() -> None:
    launches = Launches(
        [
            launch(1, 110),
            launch(2, 120, name="cudaGraphLaunch"),
            launch(3, 310, name="cudaMemcpyAsync"),
            launch(4, 320, name="cudaLaunchHostFunc"),
            launch(5, 250, name="cuLaunchKernelEx"),
        ]
    )
    list(launches.link([event(1, 130, 140)], source="t"))
    # A copy may be done by the host, and no pass was running at 250.
    assert lost(launches, WINDOWS) == {1}


@given(
    windows=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 3)), max_size=12
    ),
    start=st.integers(0, 60),
    length=st.integers(0, 8),
)
def test_by_time_is_what_a_look_at_every_pass_finds(
    windows: list[tuple[int, int, int]], start: int, length: int
) -> None:
    passes = [PassWindow(i, thread, at, at + long) for i, (at, long, thread) in enumerate(windows)]
    around = [w for w in passes if w.start_ns <= start and start + length <= w.end_ns]
    found = PassJoin(passes).by_time(start, start + length)
    if len({w.thread_id for w in around}) != 1:
        assert found is None
    else:
        assert found in around
        assert found.start_ns == max(w.start_ns for w in around)
