"""What look-ups of embeddings tell of steps, on constructed timelines."""

from __future__ import annotations

import pytest

from phaseprof.importing.forms import LookedUp, Step, StepWork
from phaseprof.importing.lookups import settle_by_lookups, steps_of_lookups
from phaseprof.importing.stacks import CALL_ALONE, NO_CACHE, PACKED
from phaseprof.phases import Phase, TagSource

UNKNOWN = StepWork(Phase.OTHER, unknown=CALL_ALONE)


def _steps(
    number: int, work: StepWork = UNKNOWN, source: TagSource = TagSource.INFERRED
) -> list[Step]:
    """Steps of 90 ns, each 100 ns after the one before."""
    return [Step(100 * at, 100 * at + 90, 1, source, "forward", work) for at in range(number)]


def test_shapes_of_look_ups() -> None:
    lookups = [
        LookedUp(10, 1, (16, 559)),
        LookedUp(20, 1, (2, 1)),  # a second one in the same step
        LookedUp(110, 1, (4, 1)),
        LookedUp(210, 1, (888,)),  # packed
        LookedUp(310, 2, (1, 5)),  # another thread
        LookedUp(410, 1, (1, 5)),
        LookedUp(495, 1, (1, 1)),  # between steps
        LookedUp(510, 1, (0, 5)),
    ]
    steps = settle_by_lookups(_steps(7), lookups)
    told = [
        (step.work.phase, step.work.prefill_sequences, step.work.prefill_tokens) for step in steps
    ]
    unknown = (Phase.OTHER, None, None)
    assert told == [
        (Phase.PREFILL, 16, None),  # padding may be among 16 x 559
        (Phase.DECODE, 0, 0),
        unknown,
        unknown,
        (Phase.PREFILL, 1, 5),
        unknown,
        unknown,
    ]
    assert (steps[1].work.decode_sequences, steps[1].work.decode_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("phase", "shape", "expected"),
    [
        (Phase.PREFILL, (1, 9), StepWork(Phase.PREFILL, 1, 9, 0, 0)),
        (Phase.PREFILL, (4, 1), StepWork(Phase.PREFILL, 4, 4, 0, 0)),
        (Phase.PREFILL, (4, 9), StepWork(Phase.PREFILL, 4, None, 0, 0)),
        (Phase.DECODE, (4, 1), StepWork(Phase.DECODE, 0, 0, 4, 4)),
        # Rows of several tokens may be drafts, or a sequence without a cache.
        (Phase.DECODE, (4, 9), StepWork(Phase.DECODE)),
        (Phase.MIXED, (4, 9), StepWork(Phase.MIXED)),
    ],
)
def test_a_known_phase_is_kept_and_gets_its_tokens(
    phase: Phase, shape: tuple[int, int], expected: StepWork
) -> None:
    (step,) = settle_by_lookups(_steps(1, StepWork(phase)), [LookedUp(15, 1, shape)])
    assert step.work == expected


def test_tokens_that_were_announced_are_kept() -> None:
    announced = StepWork(Phase.PREFILL, 3, 12, 0, 0)
    (step,) = settle_by_lookups(_steps(1, announced), [LookedUp(15, 1, (1, 9))])
    assert step.work == announced


def test_a_range_of_several_passes_has_no_tokens_of_one() -> None:
    lookups = [LookedUp(15, 1, (2, 1)), LookedUp(55, 1, (2, 1))]
    (range_,) = settle_by_lookups(_steps(1, StepWork(Phase.DECODE), TagSource.ANNOTATION), lookups)
    assert range_.work == StepWork(Phase.DECODE)
    # A call is one pass, whatever else is looked up in it.
    (call,) = settle_by_lookups(_steps(1, StepWork(Phase.DECODE)), lookups)
    assert call.work.decode_tokens == 2


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 12), StepWork(Phase.MIXED, None, 11, 1, 1)),
        ((3, 12), StepWork(Phase.MIXED, None, None, 3, 3)),
        ((3, 1), StepWork(Phase.DECODE, 0, 0, 3, 3)),
    ],
)
def test_without_a_cache_all_tokens_but_the_new_ones_are_computed_again(
    shape: tuple[int, int], expected: StepWork
) -> None:
    steps = _steps(1, StepWork(Phase.OTHER, unknown=NO_CACHE))
    assert settle_by_lookups(steps, [LookedUp(15, 1, shape)])[0].work == expected


def test_packed_rows_say_nothing() -> None:
    steps = _steps(1, StepWork(Phase.OTHER, unknown=PACKED))
    assert settle_by_lookups(steps, [LookedUp(15, 1, (1, 9))]) == tuple(steps)


def test_passes_by_their_look_ups_alone() -> None:
    lookups = [
        LookedUp(100, 1, (2, 9), end_ns=180),
        LookedUp(200, 1, (2, 1), end_ns=270),
        LookedUp(300, 1, (7,), end_ns=370),  # packed
        LookedUp(400, 1, (2, 1)),  # nothing was computed after it
    ]
    steps = steps_of_lookups(lookups)
    assert [(step.start_ns, step.end_ns, step.work.phase) for step in steps] == [
        (100, 180, Phase.PREFILL),
        (200, 270, Phase.DECODE),
    ]
    assert {step.tag_source for step in steps} == {TagSource.INFERRED}
    assert steps_of_lookups(lookups[:1]) == ()
    assert steps_of_lookups([]) == ()
