"""The work of imported steps from a config of their model: the closed form of live runs, where steps tell enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import ModelError
from phaseprof.importing.forms import StepWork
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, Work, count, pairs

#: Sequences of several lengths are counted by their mean, if that misses the pairs that attention has by no more.
_PAIRS_OFF = 0.02


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model that the user names for a recording.

    Attributes:
        name: What to call it.
        class_name: Class of its module.
        dtype: What it computes in, as its config says.
        cost: Its structure.
    """

    name: str
    class_name: str
    dtype: str
    cost: ModelCost


def load_given(path: Path) -> GivenModel:
    """Read the structure of a model from its ``config.json``. torch builds it without data: it takes no memory.

    Args:
        path: The file, or its folder.

    Raises:
        MissingPackageError: If transformers is not installed.
        ModelError: If there is no such config, or it is none of a model that generates text.
    """
    from phaseprof.work.walk import model_cost
    from phaseprof.workload.load import Placement, config_name, random_model, read_config

    content = read_config(path)
    text = content.get("text_config")
    inner = text if isinstance(text, dict) else {}
    told = next(
        (
            str(each[key])
            for each in (content, inner)
            for key in ("dtype", "torch_dtype")
            if each.get(key)
        ),
        "bfloat16",
    )
    dtype = told.removeprefix("torch.")
    if content.get("quantization_config"):
        raise ModelError(
            f"The weights of {config_name(path)} are quantized, and a config does not tell their bytes.",
            "Import without --model-config; kernels and phases do not need it.",
        )
    model = random_model(content, Placement("meta", dtype), name=config_name(path))
    return GivenModel(config_name(path), type(model).__name__, dtype, model_cost(model))


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
