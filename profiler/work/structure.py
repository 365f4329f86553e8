"""Where things stand in a model: the stack of layers, the text part, the output head, the lookup tables.

Only names, attributes and configs are read. Paths are those of `torch.nn.Module.named_modules`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phaseprof.work.adapters import base_of

if TYPE_CHECKING:
    from torch import nn

_HEADS = frozenset({"lm_head", "embed_out"})


def config_of(module: object) -> object:
    """The config that a module holds, or None."""
    config = getattr(module, "config", None)
    return None if callable(config) else config


def text_config(modules: Mapping[str, nn.Module], path: str) -> object:
    """The config of the nearest module around a path; of a composite config, its text part."""
    while True:
        config = config_of(modules.get(path))
        if config is not None or not path:
            return _text_part(config)
        path = path.rpartition(".")[0]


def text_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Of a model that has a text part beside others (towers for images or sound, and what projects their output), the
    modules of the text part and the output head; of any other model, all of them.

    The text part is the outermost module whose config is the text part of a composite one.
    """
    composite = next(
        (c for m in modules.values() if (c := config_of(m)) is not None and _text_part(c) is not c),
        None,
    )
    if composite is None:
        return dict(modules)
    wanted = type(_text_part(composite))
    root = next((p for p, m in modules.items() if type(config_of(m)) is wanted), None)
    if root is None:
        return dict(modules)
    head = output_head(modules)
    return {
        path: module
        for path, module in modules.items()
        if path == root or path.startswith(f"{root}." if root else "") or module is head
    }


def output_head(modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that makes logits."""
    for path, module in modules.items():
        get = getattr(module, "get_output_embeddings", None)
        try:
            head: nn.Module | None = base_of(get()) if callable(get) else None
        except (AttributeError, NotImplementedError):
            head = None
        if head is not None and head in modules.values():
            return head
        if path.rpartition(".")[2] in _HEADS:
            return module
    return None


def token_table(modules: Mapping[str, nn.Module]) -> object:
    """The table that tokens are looked up in."""
    for module in modules.values():
        get = getattr(module, "get_input_embeddings", None)
        try:
            table = base_of(get()) if callable(get) else None
        except (AttributeError, NotImplementedError):
            table = None
        if table is not None:
            return table
    return None


def stops_early(modules: Mapping[str, nn.Module], stack: str) -> bool:
    """Whether the module around a stack of layers runs only as many of them as its config says, as those of
    transformers do (``self.layers[: self.config.num_hidden_layers]``): early exit lowers that number."""
    owner = modules.get(stack.rpartition(".")[0])
    forward = inspect.unwrap(type(owner).forward) if owner is not None else None
    code = getattr(forward, "__code__", None)
    return code is not None and "num_hidden_layers" in code.co_names


def place(path: str) -> tuple[str, int] | None:
    """The stack that a path lies in and the number of its layer there: what the last number in the path says."""
    parts = path.split(".")
    at = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def layer_of(stack: str, path: str) -> tuple[int, str] | None:
    """The layer of a stack that a path lies in, and the path within it; None for a path outside of the stack."""
    if stack and not path.startswith(f"{stack}."):
        return None
    layer, _, rest = path.removeprefix(f"{stack}." if stack else "").partition(".")
    return (int(layer), rest) if layer.isdigit() else None


def numbered(path: str) -> bool:
    """Whether a path goes through a list."""
    return any(part.isdigit() for part in path.split("."))


def general(path: str) -> str:
    """A path with its numbers left out, so that the layers of a stack give one reason and not eighty."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _text_part(config: object) -> object:
    get_text = getattr(config, "get_text_config", None)
    return get_text() if callable(get_text) else config
