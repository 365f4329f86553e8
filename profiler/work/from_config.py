"""The structure of a model from its ``config.json`` alone: torch builds it without data, so that it takes no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import ModelError, UsageError
from phaseprof.work.cost import ModelCost

#: Configs that say no dtype: what checkpoints are mostly published in.
_DTYPE = "bfloat16"


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


def load_given(path: Path, dtype: str | None = None) -> GivenModel:
    """Read the structure of a model from its ``config.json``.

    Args:
        path: The file, or its folder.
        dtype: What it computes in, in place of what the config says.

    Raises:
        MissingPackageError: If transformers is not installed.
        ModelError: If there is no such config, or it is none of a model that generates text.
        UsageError: If the dtype is not known.
    """
    from phaseprof.work.walk import model_cost
    from phaseprof.workload.load import DTYPES, Placement, config_name, random_model, read_config

    content = read_config(path)
    chosen = told_dtype(content) if dtype is None else DTYPES.get(dtype)
    if chosen is None:
        raise UsageError(f"Unknown dtype {dtype!r}.", "Use float32, bfloat16 or float16.")
    if content.get("quantization_config"):
        raise ModelError(
            f"The weights of {config_name(path)} are quantized, and a config does not tell their bytes.",
            "Import without --model-config; kernels and phases do not need it.",
        )
    model = random_model(content, Placement("meta", chosen), name=config_name(path))
    return GivenModel(config_name(path), type(model).__name__, chosen, model_cost(model))


def told_dtype(content: Mapping[str, object]) -> str:
    """The dtype that a config names for its weights, as torch spells it without the prefix."""
    text = content.get("text_config")
    inner = text if isinstance(text, dict) else {}
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
