"""The structure of a model from its ``config.json`` alone: torch builds it without data, so that it takes no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import UsageError
from phaseprof.work.cost import ModelCost
from phaseprof.work.formats import Rules, named_rules, rules_of

#: Configs that say no dtype: what checkpoints are mostly published in.
_DTYPE = "bfloat16"
#: How long torch's counter may take where no formula covers a model. Nothing waits for it but the user.
_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model that the user names by its config.

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


def load_given(path: Path, dtype: str | None = None, quantization: str | None = None) -> GivenModel:
    """Read the structure of a model from its ``config.json``.

    Args:
        path: The file, or its folder.
        dtype: What it computes in, in place of what the config says.
        quantization: How its matrices are stored, in place of what the config says: a name of
            `phaseprof.work.formats.NAMED`, or ``none``.

    Raises:
        MissingPackageError: If transformers is not installed.
        ModelError: If there is no such config, or it is none of a model that generates text, or its weights are
            quantized in a way whose bytes it does not tell.
        UsageError: If the dtype or the quantization is not known.
    """
    from phaseprof.work.counter import counted_cost
    from phaseprof.work.packing import pack
    from phaseprof.work.walk import model_cost
    from phaseprof.workload.load import DTYPES, Placement, config_name, random_model, read_config

    content = read_config(path)
    chosen = told_dtype(content) if dtype is None else DTYPES.get(dtype)
    if chosen is None:
        raise UsageError(f"Unknown dtype {dtype!r}.", "Use float32, bfloat16 or float16.")
    name = config_name(path)
    rules = _rules(content, name, quantization)
    model = random_model(content, Placement("meta", chosen), name=name)
    if rules is not None:
        pack(model, rules, name)
    cost = counted_cost(model, model_cost(model), limit_s=_LIMIT_S)
    return GivenModel(name, type(model).__name__, chosen, cost)


def _rules(content: Mapping[str, object], name: str, asked: str | None) -> Rules | None:
    if asked is not None:
        return None if asked == "none" else named_rules(asked)
    found = [each.get("quantization_config") for each in (content, _text(content))]
    told = next((config for config in found if isinstance(config, dict) and config), None)
    return None if told is None else rules_of(told, name)


def _text(content: Mapping[str, object]) -> Mapping[str, object]:
    text = content.get("text_config")
    return text if isinstance(text, dict) else {}


def told_dtype(content: Mapping[str, object]) -> str:
    """The dtype that a config names for its weights, as torch spells it without the prefix."""
    inner = _text(content)
    told = next(
        (
            str(each[key])
            for each in (content, inner)
            for key in ("dtype", "torch_dtype")
            if each.get(key)
        ),
        _DTYPE,
    )
    return told.removeprefix("torch.")
