"""The hooks of transformers, together: set when the library is there, or as soon as it is imported."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from phaseprof.devices import describe
from phaseprof.errors import NotMeasured
from phaseprof.events import Event, RawPass
from phaseprof.hooks.continuous import ContinuousHook
from phaseprof.hooks.forward import ForwardHook
from phaseprof.hooks.generate import GenerateHook
from phaseprof.hooks.imports import Removal, when_imported
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.routing import RoutingHook
from phaseprof.hooks.state import CacheBook, Flags, ThreadState
from phaseprof.timers import CudaEventTimer, DeviceTimer
from phaseprof.trace.meta import ModelMeta
from phaseprof.work.walk import model_cost


class TransformersHooks:
    """Sets and removes every hook on transformers.

    Args:
        emit: Takes the events.
        state: Of the threads.
        flags: Of the session.
        on_model: Told of each model at first sight.
        note: Told of what cannot be measured.
        failed: Told of an exception in our own code.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event | RawPass], None],
        state: ThreadState,
        flags: Flags,
        on_model: Callable[[SeenModel], None],
        note: Callable[[NotMeasured], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._on_model = on_model
        self._routing = RoutingHook(emit=emit, state=state, failed=failed, note=note)
        self._failed = failed
        self._models = ModelBook(
            describe=describe, make_timer=_timer, count=model_cost, on_new=self._new_model, note=note
        )
        self._caches = CacheBook(emit, time.perf_counter_ns)
        self._make_forward = partial(
            ForwardHook,
            emit=emit,
            models=self._models,
            caches=self._caches,
            state=state,
            flags=flags,
            failed=failed,
        )
        self._forward_hook: ForwardHook | None = None
        self._generate = GenerateHook(
            emit=emit, models=self._models, caches=self._caches, state=state, failed=failed
        )
        self._continuous = ContinuousHook(
            emit=emit,
            models=self._models,
            caches=self._caches,
            state=state,
            flags=flags,
            failed=failed,
            note=note,
        )
        self._patches: list[Patch] = []
        self._waiting: list[Removal] = []
        self._compiled_hooked = False

    @property
    def passes(self) -> int:
        """Passes seen."""
        return self._forward_hook.cost.passes if self._forward_hook else 0

    @property
    def handed_over(self) -> int:
        """Passes that the recorder was given."""
        cost = self._forward_hook.cost if self._forward_hook else None
        return cost.passes - cost.lost if cost else 0

    @property
    def own_ns(self) -> int:
        """Time in the hooks on the workload's threads, without `setup_ns`."""
        forward_ns = self._forward_hook.cost.hook_ns if self._forward_hook else 0
        return forward_ns + self._continuous.own_ns

    @property
    def setup_ns(self) -> int:
        """Time to read the structure of models at first sight."""
        return self._models.setup_ns

    @property
    def labels(self) -> tuple[str, ...]:
        """What is hooked, for people: one entry for the library, or none."""
        if not self._patches:
            return ()
        names = ", ".join(patch.label for patch in self._patches)
        return (f"transformers {_version()} ({names})",)

    def install(self, model: Any = None) -> None:
        """Set the hooks on what is imported, and on the rest as soon as it is.

        Args:
            model: A module to watch besides; its class is hooked if it is not a transformers model.
        """
        self._waiting = [
            when_imported("transformers.modeling_utils", self._hook_models),
            when_imported("transformers.generation.utils", self._hook_generate),
            when_imported(
                "transformers.generation.continuous_batching.continuous_api", self._hook_continuous
            ),
            when_imported("torch._dynamo.eval_frame", self._hook_compiled),
        ]
        pretrained = _loaded("transformers.modeling_utils", "PreTrainedModel")
        if model is not None and not (pretrained and isinstance(model, pretrained)):
            self._hook_foreign(model, pretrained)

    def remove(self) -> None:
        """Take every hook off. One that somebody else has wrapped since passes calls through from now on."""
        for waiting in self._waiting:
            waiting.remove()
        self._waiting = []
        if self._forward_hook is not None:
            self._forward_hook.active = False
        self._generate.active = False
        self._continuous.active = False
        self._routing.active = False
        for patch in reversed(self._patches):
            patch.remove()
        for timer in self._models.timers:
            timer.finish()

    @property
    def _forward(self) -> ForwardHook:
        """Made once torch is there."""
        if self._forward_hook is None:
            self._forward_hook = self._make_forward()
        return self._forward_hook

    def _hook_models(self, module: Any) -> None:
        owner = module.PreTrainedModel
        self._patches.append(self._forward.patch_class(owner))
        if hasattr(owner, "get_compiled_call"):
            self._patches.append(self._forward.patch_compiled_call(owner))
        # Dynamo may have been imported before transformers.
        self._hook_compiled(sys.modules.get("torch._dynamo.eval_frame"))

    def _hook_generate(self, module: Any) -> None:
        self._patches += self._generate.patches(module.GenerationMixin)

    def _hook_continuous(self, module: Any) -> None:
        self._patches += self._continuous.patches(module)

    def _hook_compiled(self, module: Any) -> None:
        pretrained = _loaded("transformers.modeling_utils", "PreTrainedModel")
        if module is None or pretrained is None or self._compiled_hooked:
            return
        self._compiled_hooked = True
        self._patches.append(
            self._forward.patch_compiled_module(module.OptimizedModule, pretrained)
        )

    def _new_model(self, seen: SeenModel) -> None:
        self._on_model(seen)
        self._watch_routers(seen)

    def _watch_routers(self, seen: SeenModel) -> None:
        cost = seen.meta.cost
        if cost is None or not cost.experts:
            return
        try:
            self._patches += self._routing.patches(seen.ref())
        except Exception as error:
            self._failed("watching what routers choose", error)

    def _hook_foreign(self, model: Any, pretrained: type | None) -> None:
        """A module of the user's own: its class is hooked, unless a transformers model in it will be seen anyway."""
        if pretrained and any(isinstance(part, pretrained) for part in model.modules()):
            return
        self._patches.append(self._forward.patch_class(type(model)))


def always_masked(model: ModelMeta) -> bool:
    """Whether attention is given an explicit mask even where a causal one would do: by every implementation but sdpa,
    and by all of them up to transformers 5.10."""
    numbers = [int(part) for part in _version().split(".")[:2] if part.isdecimal()]
    return model.attn_implementation != "sdpa" or numbers <= [5, 10]


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "0.0"))


def _loaded(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)


def _timer(device: Any) -> DeviceTimer | None:
    """The timer for a torch device; None where the host's time is the device's."""
    if device.type != "cuda":
        return None
    cuda = sys.modules["torch"].cuda
    return CudaEventTimer(cuda, cuda.current_device() if device.index is None else device.index)
