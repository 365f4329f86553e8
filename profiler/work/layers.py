"""A stack of layers that repeat: of a copy of a model, as many of them as are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.modules import class_name, own_parameters

if TYPE_CHECKING:
    from torch import nn

#: Attributes that number a layer and change nothing about it.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index"})
#: Shorter stacks are run as they are.
_SHORTEST = 4


@dataclass(slots=True)
class Layers:
    """The layers of a model that may be made less deep.

    Attributes:
        stack: The list of them; None if they do not repeat.
        layers: All of them.
        period: After how many they repeat.
        configs: The configs that say how many there are, with what they said.
    """

    stack: Any
    layers: list[Any]
    period: int
    configs: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Find the stack of a model, and after how many layers it repeats."""
        lists = [m for m in model.modules() if class_name(m) == "ModuleList"]
        stack: Any = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
        layers = [] if stack is None else list(stack)
        period = _period(_kinds(model, layers))
        if len(layers) < max(3 * period, _SHORTEST):
            return cls(None, layers, max(len(layers), 1), [])
        configs = {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}
        said = [(c, _counts(c, len(layers))) for c in configs.values()]
        return cls(stack, layers, period, said)

    @property
    def depths(self) -> tuple[int, ...]:
        """How many layers to look at: one period and two, or all."""
        return (len(self.layers),) if self.stack is None else (self.period, 2 * self.period)

    def whole(self, at_depths: list[int]) -> int:
        """A figure for all layers, from those at `depths`: each period more adds the same."""
        if self.stack is None:
            return at_depths[0]
        first, second = at_depths
        return first + (len(self.layers) // self.period - 1) * (second - first)

    def keep(self, depth: int) -> None:
        """Let the model have its first layers only."""
        if self.stack is None:
            return
        self.stack._modules = {str(i): layer for i, layer in enumerate(self.layers[:depth])}
        for config, said in self.configs:
            for name, value in said.items():
                vars(config)[name] = depth if isinstance(value, int) else value[:depth]


def _period(kinds: list[object]) -> int:
    """The shortest stretch that a list is made of."""
    number = len(kinds)
    for period in range(1, number):
        if number % period == 0 and kinds[period:] == kinds[:-period]:
            return period
    return max(number, 1)


def _kinds(model: Any, layers: list[Any]) -> list[object]:
    types = getattr(getattr(model, "config", None), "layer_types", None)
    named = types if isinstance(types, list) and len(types) == len(layers) else [None] * len(layers)
    return [(kind, _signature(layer)) for kind, layer in zip(named, layers, strict=True)]


def _signature(layer: nn.Module) -> tuple[object, ...]:
    """What makes two layers the same: their modules, the shapes of their weights, and their settings."""
    return tuple(
        (
            path,
            class_name(module),
            tuple((name, tuple(p.shape), p.dtype) for name, p in own_parameters(module).items()),
            tuple(
                sorted(
                    (name, repr(value))
                    for name, value in vars(module).items()
                    if isinstance(value, bool | int | float | str | None) and name not in _NUMBERS
                )
            ),
        )
        for path, module in layer.named_modules()
    )


def _counts(config: Any, number: int) -> dict[str, Any]:
    """Fields of a config that say how many layers there are, or something about each of them."""
    return {
        name: value
        for name, value in vars(config).items()
        if (name in ("num_hidden_layers", "n_layer", "n_layers") and value == number)
        or (isinstance(value, list) and len(value) == number)
    }
