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
        self._whole: dict[int, SeenModel] = {}

    def enter(self, generation: Generation) -> None:
        """A generate call begins: called before its model is looked up."""
        model, outer = generation.model, generation.parent
        layers = _layers(model)
        if outer is None or outer.model is not model:
            self._depths[id(model)] = layers
            return
        if layers is None or layers == self._depths.get(id(model)):
            return
        seen = self._models.seen
        whole = seen.get(id(model))
        if whole is None:
            return
        shallow = self._shallow.get((id(model), layers))
        if shallow is None or shallow.ref() is not model:
            del seen[id(model)]
            try:
                shallow = self._models.find(model, outer)
            finally:
                seen[id(model)] = whole
            self._shallow[id(model), layers] = shallow
        self._whole[generation.number] = whole
        seen[id(model)] = shallow

    def leave(self, generation: Generation) -> None:
        """A generate call has ended."""
        whole = self._whole.pop(generation.number, None)
        if whole is not None:
            self._models.seen[id(generation.model)] = whole


def _layers(model: Any) -> int | None:
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None
