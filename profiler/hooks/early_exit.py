"""Early exit: a model that drafts for itself with its first layers counts as a model of its own while it does.

Assisted generation with ``assistant_early_exit`` lowers ``config.num_hidden_layers`` and calls `generate` of the same
model again, inside of itself. For as long as that call lasts, the entry of the model is that of its first layers, with
their cost; whatever else runs the model meanwhile runs as few. The hot path looks into the same book as always.
"""

from __future__ import annotations

from typing import Any

from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.state import Generation


class EarlyExits:
    """Exchanges the entries of models that draft for themselves.

    Args:
        models: Knows the models.
    """

    def __init__(self, models: ModelBook) -> None:
        self._models = models
        #: Layers that a model runs in its own generate call, by identity.
        self._depths: dict[int, int | None] = {}
        #: Entries of the first layers of a model, by identity and their number.
        self._shallow: dict[tuple[int, int], SeenModel] = {}
        #: Entries that were exchanged, by the number of the generate call.
        self._whole: dict[int, SeenModel | None] = {}

    def enter(self, generation: Generation) -> None:
        """A generate call begins: called before its model is looked up."""
        model, outer = generation.model, generation.parent
        layers = _layers(model)
        if outer is None or outer.model is not model:
            self._depths[id(model)] = layers
            return
        if layers is None or layers == self._depths.get(id(model)):
            return
        shallow = self._shallow.get((id(model), layers))
        if shallow is None or shallow.ref() is not model or not _as_before(shallow):
            shallow = self._models.beside(model, f", its first {layers} layers")
            self._shallow[id(model), layers] = shallow
        # A model with adapters is in another book, that is looked into where this one has nothing.
        self._whole[generation.number] = self._models.seen.get(id(model))
        self._models.seen[id(model)] = shallow

    def leave(self, generation: Generation) -> None:
        """A generate call has ended."""
        if generation.number not in self._whole:
            return
        whole = self._whole.pop(generation.number)
        if whole is None:
            self._models.seen.pop(id(generation.model), None)
        else:
            self._models.seen[id(generation.model)] = whole


def _as_before(seen: SeenModel) -> bool:
    """Whether the adapters of a model are still those that it was counted with."""
    return seen.adapters is None or seen.adapters.holds()


def _layers(model: Any) -> int | None:
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None
