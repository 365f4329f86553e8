"""Which file is of which rank, and which steps of two ranks are the same."""

from __future__ import annotations

import pytest

from phaseprof.importing.forms import Step, StepWork
from phaseprof.importing.ranks import align, assign_rank, made_together, rank_of_name
from phaseprof.phases import Phase, TagSource


def step(name: str, start_ns: int, tokens: int | None = None) -> Step:
    work = StepWork(Phase.DECODE, decode_tokens=tokens)
    return Step(start_ns, start_ns + 5, 1, TagSource.ANNOTATION, name, work)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json.gz", 3),
        ("dp0_pp0_tp1_dcp0_ep1_rank5.1768554939.pt.trace.json.gz", 5),
        ("1712-TP-2-EXTEND.trace.json.gz", 2),
        ("trace_rank-0012.json", 12),
        ("frank7.json", None),
        ("http3.json", None),
        ("worker.json", None),
    ],
)
def test_ranks_that_files_are_named_after(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


def test_the_rank_in_a_file_goes_before_its_name() -> None:
    assert assign_rank(4, "rank1.json", {}, (0, 9)) == (4, "")
    assert assign_rank(None, "rank1.json", {}, (0, 9)) == (1, "")


def test_files_without_a_rank_are_numbered_and_that_is_said() -> None:
    assert assign_rank(None, "a.json", {}, (0, 9)) == (0, "")
    rank, said = assign_rank(None, "b.json", {0: [(0, 9)], 2: [(0, 9)]}, (0, 9))
    assert rank == 1
    assert said == "it names none, and is counted as rank 1"


def test_two_files_of_a_rank_are_windows_or_another_rank() -> None:
    rank, said = assign_rank(0, "b.json", {0: [(0, 9)]}, (9, 12))
    assert (rank, said) == (0, "b.json is another window of rank 0")
    rank, said = assign_rank(0, "b.json", {0: [(0, 9)]}, (3, 12))
    assert rank == 1
    assert "at the same time" in said


def test_a_rank_that_begins_later_is_aligned_by_its_steps() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    reference = [step(name, 100 * place) for place, name in enumerate(names)]
    assert align(reference, reference[2:]) == 2
    assert align(reference[2:], reference) == -2
    assert align(reference, reference) == 0


def test_steps_of_one_name_are_aligned_by_when_they_begin() -> None:
    reference = [step("decode", 100 * place) for place in range(8)]
    other = [step("decode", 100 * place + 3) for place in range(3, 9)]
    assert align(reference, other) == 3


def test_other_steps_are_not_aligned() -> None:
    reference = [step(name, place) for place, name in enumerate("abcdef")]
    other = [step(name, place) for place, name in enumerate("uvwxyz")]
    assert align(reference, other) is None


def test_ranks_make_steps_together_if_these_have_the_same_tokens() -> None:
    told = [step("decode 4", 0, 4), step("decode 5", 10, 5)]
    assert made_together([told, told])
    assert not made_together([told, told[:1]])
    assert not made_together([told])
    # A name without tokens is the same in each replica.
    blank = [step("ProfilerStep#1", 0)]
    assert not made_together([blank, blank])
