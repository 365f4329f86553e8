"""See which experts a router chooses, without reading anything while the model runs.

The experts of transformers are modules that are given the router's choice, right after the hidden states. Their class
is wrapped from the first pass of a model that has some to the end of the session, and hands a reference to the choice
to the recorder. On a GPU it is left alone: counting distinct experts there means to wait for the device. So is a model
that is compiled: its graphs hold the class as it was.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.hooks.dynamo import Dynamo, graphs_compiled
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import ThreadState
from phaseprof.routing import ExpertsChosen

#: What the router's choice is called, right after the hidden states.
_CHOICE = frozenset(
    {"top_k_index", "topk_indices", "selected_experts", "router_indices", "indices"}
)
_WHAT = "the experts that each pass reads"
_EXPECTED = "their weights count with the number that an even spread of the tokens gives"


class RoutingHook:
    """Observes what routers choose.

    Args:
        emit: Takes the events.
        state: Of the threads.
        failed: Told of an exception in our own code.
        note: Told of what cannot be measured.

    Attributes:
        active: Set to False, the wrappers that somebody else still holds hand calls on.
    """

    def __init__(
        self,
        *,
        emit: Callable[[ExpertsChosen], None],
        state: ThreadState,
        failed: Callable[[str, Exception], None],
        note: Callable[[NotMeasured], None],
    ) -> None:
        self._emit = emit
        self._state = state
        self._failed = failed
        self._note = note
        self._known: set[type] = set()
        self.active = True

    def patches(self, model: Any) -> list[Patch]:
        """Wrap the classes of a model's experts that are not wrapped yet; none for a model without experts, on a device
        or compiled.

        Args:
            model: A model at its first pass.
        """
        kinds = {type(m): m for m in model.modules() if "Experts" in type(m).__name__}
        readable = {kind: m for kind, m in kinds.items() if _takes_choice(kind)}
        if not readable:
            return []
        device = _device(next(iter(readable.values())))
        if device not in ("cpu", "meta"):
            self._note(
                NotMeasured(
                    _WHAT,
                    f"what the router chose lies on {device}, and reading it would make the device wait; {_EXPECTED}",
                )
            )
            return []
        if _is_compiled(model):
            self._note(
                NotMeasured(
                    _WHAT,
                    f"torch compiled code in this process, and must not see a wrapper in it; {_EXPECTED}",
                )
            )
            return []
        new = [kind for kind in readable if kind not in self._known]
        self._known.update(new)
        return [self._patch(kind) for kind in new]

    def _patch(self, owner: type) -> Patch:
        state, emit, now = self._state, self._emit, time.perf_counter_ns
        is_tracing = Dynamo().is_tracing

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(experts: Any, /, *args: Any, **kwargs: Any) -> Any:
                # Traced, this is the original and nothing else.
                if is_tracing() or not self.active or not state.here.in_pass:
                    return original(experts, *args, **kwargs)
                try:
                    index = args[1] if len(args) > 1 else _named(kwargs)
                    if index is not None and index.device.type == "cpu":
                        version = -1 if index.is_inference() else index._version
                        number = experts.num_experts
                        thread = state.here.native_id
                        emit(ExpertsChosen(thread, now(), id(experts), number, index, version))
                except Exception as error:
                    self._failed("reading what a router chose", error)
                return original(experts, *args, **kwargs)

            return forward

        return Patch(owner, "forward", make)


def _takes_choice(kind: type) -> bool:
    try:
        names = list(inspect.signature(inspect.unwrap(kind.forward)).parameters)  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError):
        return False
    return len(names) > 2 and names[2] in _CHOICE


def _named(kwargs: dict[str, Any]) -> Any:
    return next((kwargs[name] for name in _CHOICE if name in kwargs), None)


def _device(experts: Any) -> str:
    parameter = next(iter(experts.parameters()), None)
    return "cpu" if parameter is None else str(parameter.device.type)


def _is_compiled(model: Any) -> bool:
    """Whether a graph may have been made of the model, or of a part of it, or of anything in this process."""
    own = any(m.__dict__.get("_compiled_call_impl") is not None for m in model.modules())
    return own or "forward" in model.__dict__ or graphs_compiled() > 0
