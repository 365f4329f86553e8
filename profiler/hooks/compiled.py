"""See calls that torch.compile made: those that run a model without running its `__call__`.

`get_compiled_call` is where generate compiles its decode steps, and keeps them on the model. `torch.compile` of
`model.forward` or `model.__call__` gives a function that holds the bound method in a cell: for the time of the session
the cell holds an observed one, whether the function was made before or in it.

A function that somebody compiles with a model's call inside it becomes one graph, in which no call is left to see.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from phaseprof.hooks.forward import ForwardHook
from phaseprof.hooks.patching import Patch

#: The closure variable of a compiled function that holds what it calls.
_HELD = "fn"


class CompiledCalls:
    """Observes compiled calls of transformers models.

    Args:
        forward: Observes.
        pretrained: The class of transformers models, its calls hooked.
        call: What its `__call__` was before.
    """

    def __init__(
        self,
        forward: ForwardHook,
        pretrained: type,
        call: Callable[..., Any],
    ) -> None:
        self._forward = forward
        self._pretrained = pretrained
        self._call = call
        self._held: list[weakref.ref[FunctionType]] = []

    def patch_compiled_call(self) -> Patch:
        """Wrap `get_compiled_call`.

        What is kept on the model must not hold our wrapper, and may be older than the session: so the call that is
        compiled is the bare one, and it is observed from outside.

        Raises:
            AttributeError: If this transformers has none.
        """
        forward, call = self._forward, self._call
        hooked = vars(self._pretrained).get("__call__")

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_compiled_call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
                # A class with a call of its own is compiled with that.
                bare = forward.active and type(model).__call__ is hooked
                asked = _BareCall(model, call) if bare else model
                compiled = original(asked, *args, **kwargs)
                if not forward.active:
                    return compiled
                if type(compiled) is MethodType:
                    # It is not compiled, for a reason of the model's own.
                    return model.__call__
                return forward.around(compiled, model)

            return get_compiled_call

        return Patch(self._pretrained, "get_compiled_call", make)

    def patch_compile(self, module: Any) -> Patch:
        """Wrap what makes a compiled function of a function, to see those of a model's bound methods.

        Args:
            module: `torch._dynamo.eval_frame`.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(context: Any, fn: Any) -> Any:
                function = original(context, fn)
                if self._forward.active:
                    self._watch(function)
                return function

            return __call__

        return Patch(module._TorchDynamoContext, "__call__", make)

    def watch_earlier(self, module: Any) -> None:
        """See the calls of functions that were compiled before the session.

        Args:
            module: `torch._dynamo.eval_frame`.
        """
        if not getattr(module, "cached_backends", True):
            # Nothing was given to a backend yet, which spares the search.
            return
        code = _code_named(module._TorchDynamoContext.__call__, "compile_wrapper")
        if code is not None:
            for function in gc.get_referrers(code):
                self._watch(function)

    def release(self) -> None:
        """Let the watched functions hold again what they held."""
        for reference in self._held:
            function = reference()
            cell = None if function is None else _cell(function)
            if cell is not None and hasattr(cell.cell_contents, "_phaseprof_held"):
                cell.cell_contents = cell.cell_contents._phaseprof_held
        self._held = []

    def _watch(self, function: Any) -> None:
        cell = _cell(function)
        held = None if cell is None else cell.cell_contents
        if cell is None or type(held) is not MethodType:
            return
        model = held.__self__
        if not isinstance(model, self._pretrained) or held.__func__.__name__ not in _CALLS:
            return
        if held.__func__ is vars(self._pretrained).get("__call__"):
            # Ours already.
            return
        if model.__dict__.get("forward") is function:
            # The model's own call leads to it.
            return
        observed = self._forward.around(held, model)
        observed._phaseprof_held = held  # type: ignore[attr-defined]
        cell.cell_contents = observed
        self._held.append(weakref.ref(function))


#: What a bound call of a model is called: `__call__` is a name for the second.
_CALLS = frozenset({"__call__", "_wrapped_call_impl", "forward"})


class _BareCall:
    """Stands for a model whose `__call__` is what it is without us: everything else is the model's own."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_phaseprof", (model, call))

    def __getattribute__(self, name: str) -> Any:
        model, call = object.__getattribute__(self, "_phaseprof")
        return MethodType(call, model) if name == "__call__" else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_phaseprof")[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_phaseprof")[0], name)


def _cell(function: Any) -> CellType | None:
    """The cell in which a compiled function holds what it calls; None if it is no such function."""
    if type(function) is not FunctionType or function.__code__.co_name != "compile_wrapper":
        return None
    names = function.__code__.co_freevars
    if _HELD not in names or function.__closure__ is None:
        return None
    return function.__closure__[names.index(_HELD)]


def _code_named(function: Any, name: str) -> CodeType | None:
    """The code of a function that another one makes."""
    function = getattr(function, "__wrapped__", function)
    for constant in function.__code__.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    return None
