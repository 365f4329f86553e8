"""The work of imported steps from a config of their model: the closed form of live runs, where steps tell enough."""

from __future__ import annotations

from phaseprof.importing.forms import StepWork
from phaseprof.work.count import Rows, Work, count, pairs
from phaseprof.work.from_config import GivenModel

#: Sequences of several lengths are counted by their mean, if that misses the pairs that attention has by no more.
_PAIRS_OFF = 0.02


def work_of(model: GivenModel, told: StepWork) -> Work | None:
    """The work of a step; None where what is told of it is not enough.

    Lengths of single sequences are not told, only their sums. In decode these are enough: without a window attention is
    linear in them. In prefill several sequences are counted by their mean length where the pairs that are told agree
    with that, and not at all elsewhere; nor are steps with both.
    """
    if not model.cost.covered or told.context_tokens is None:
        return None
    prefill, decode = told.prefill_tokens or 0, told.decode_tokens or 0
    if bool(prefill) == bool(decode):
        return None
    sequences = (told.prefill_sequences if prefill else told.decode_sequences) or 0
    rows = _rows(sequences, prefill or decode, told.context_tokens)
    if rows is None:
        return None
    if told.attention_pairs is not None:
        meant = sum(pairs(row.past, row.query) * row.sequences for row in rows)
        if abs(meant - told.attention_pairs) > _PAIRS_OFF * told.attention_pairs:
            return None
    return count(model.cost, rows, logits_tokens=sequences, layout=None)


def _rows(sequences: int, tokens: int, context: int) -> tuple[Rows, ...] | None:
    """Sequences as alike as whole numbers allow, with the given sums."""
    past = context - tokens
    if not 0 < sequences <= tokens or past < 0:
        return None
    rows = []
    # Some sequences have one token more than others, some a cache longer by one.
    for query, those in _split(tokens, sequences):
        share = past * those // sequences
        past -= share
        sequences -= those
        rows += [Rows(each, query, number) for each, number in _split(share, those)]
    return tuple(rows)


def _split(whole: int, parts: int) -> list[tuple[int, int]]:
    """Parts that add up to a whole: a size, and how many have it."""
    size, more = divmod(whole, parts)
    return [(value, n) for value, n in ((size, parts - more), (size + 1, more)) if n]
