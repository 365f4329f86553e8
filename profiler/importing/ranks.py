"""Which rank each file is of, and which steps of several ranks are the same ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from phaseprof.importing.forms import Step

#: ``rank0``, ``rank-12``, else ``TP-3``, as engines and frameworks name the files of their ranks.
_NAMED = (
    re.compile(r"(?:^|[^a-z])rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])tp[-_]?(\d{1,6})(?!\d)", re.IGNORECASE),
)
#: Steps by which two ranks may be out of line: recordings begin within a few of each other.
_MOST_APART = 64


def rank_of_name(name: str) -> int | None:
    """The rank that a file is named after; None if it is not."""
    for pattern in _NAMED:
        found = pattern.findall(name)
        if found:
            return int(found[-1])
    return None


def assign_rank(
    told: int | None,
    file_name: str,
    taken: Mapping[int, Sequence[tuple[int, int]]],
    span: tuple[int, int],
) -> tuple[int, str]:
    """The rank of a file, and what has to be said of it as a clause (empty if nothing).

    Args:
        told: The rank that the file itself names.
        file_name: Its name.
        taken: The ranks of the files before it, with the stretches of time of these.
        span: Its own begin and end.
    """
    rank = told if told is not None else rank_of_name(file_name)
    if rank is None:
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        said = f"it names none, and is counted as rank {number}" if taken else ""
        return number, said
    before = taken.get(rank, ())
    if not before:
        return rank, ""
    if all(span[1] <= begin or end <= span[0] for begin, end in before):
        return rank, f"{file_name} is another window of rank {rank}"
    number = next(number for number in range(len(taken) + 1) if number not in taken)
    return number, (
        f"{file_name} names rank {rank} as another file does, at the same time: it is counted as rank {number}"
    )


def align(reference: Sequence[Step], steps: Sequence[Step]) -> int | None:
    """How many steps of the reference lie before the first one of ``steps``; negative if it begins later.

    Steps are the same where they have the same name. Of several ways the one counts in which steps begin nearest to
    each other, as steps of ranks that wait for each other do.

    Returns:
        None where they cannot be aligned: most steps that lie beside each other differ.
    """
    if not reference or not steps:
        return 0
    best: tuple[float, int] | None = None
    most = min(_MOST_APART, max(len(reference), len(steps)))
    for offset in sorted(range(-most, most + 1), key=abs):
        pairs = list(zip(reference[max(offset, 0) :], steps[max(-offset, 0) :], strict=False))
        same = [(one, other) for one, other in pairs if one.name == other.name]
        # A few steps beside each other prove nothing where many could lie so.
        if (
            not pairs
            or len(same) < 0.9 * len(pairs)
            or 2 * len(pairs) < min(len(reference), len(steps))
        ):
            continue
        apart = sum(abs(one.start_ns - other.start_ns) for one, other in same) / len(same)
        if best is None or apart < best[0]:
            best = apart, offset
    return None if best is None else best[1]


def made_together(by_rank: Sequence[Sequence[Step]]) -> bool:
    """Whether the ranks make every step together: their engine announces the same tokens in the same order."""
    first, *others = by_rank
    told = [step for step in first if step.work.prefill_tokens or step.work.decode_tokens]
    if not others or not told:
        return False
    announced = [step.name for step in first]
    return all([step.name for step in steps] == announced for steps in others)
