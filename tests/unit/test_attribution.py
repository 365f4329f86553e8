"""Operators of a CPU and the passes that ran them, on constructed timelines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.attribution import PassWindow, join_operators
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
    (kernel,) = join_operators([operator(start_ns, end_ns, thread_id)], WINDOWS)
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
    kernels = join_operators([operator(9, 10), operator(10, 11), operator(10, 20)], windows)
    assert [kernel.pass_id for kernel in kernels] == [1, 2, 2]


def test_order_and_everything_else_stay() -> None:
    given_ = [operator(310, 320), operator(0, 1), operator(110, 120)]
    kernels = join_operators(iter(given_), list(reversed(WINDOWS)))
    assert [kernel.pass_id for kernel in kernels] == [2, None, 1]
    assert [(k.start_ns, k.end_ns, k.thread_id) for k in kernels] == [
        (310, 320, 7),
        (0, 1, 7),
        (110, 120, 7),
    ]


def test_without_passes_nothing_is_joined() -> None:
    (kernel,) = join_operators([operator(110, 120)], [])
    assert kernel.pass_id is None
    assert join_operators([], WINDOWS) == ()


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
    for kernel in join_operators(ran, windows):
        around: list[int | None] = [
            window.pass_id
            for window in windows
            if window.thread_id == kernel.thread_id
            and window.start_ns <= kernel.start_ns
            and kernel.end_ns <= window.end_ns
        ]
        assert [kernel.pass_id] == (around or [None])
