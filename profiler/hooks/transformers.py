"""The hooks of transformers, together: set when the library is there, or as soon as it is imported.

Each is set by itself. What a version of a library lacks costs what it would have shown, which is said with the version;
the rest is used.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from phaseprof.devices import describe
from phaseprof.errors import NotMeasured
from phaseprof.events import Event, RawPass
from phaseprof.hooks.adapters import AdapterHook
from phaseprof.hooks.captures import CaptureHook
from phaseprof.hooks.compiled import CompiledCalls
from phaseprof.hooks.containers import holds
from phaseprof.hooks.continuous import ContinuousHook
from phaseprof.hooks.forward import ForwardHook
from phaseprof.hooks.generate import GenerateHook
from phaseprof.hooks.imports import Removal, failures, when_imported
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.routing import RoutingHook
from phaseprof.hooks.state import CacheBook, Flags, ThreadState
from phaseprof.hooks.variants import patch_injection
from phaseprof.timers import DeviceTimer, finished, timer_of
from phaseprof.trace.meta import ModelMeta
from phaseprof.work.cost import ModelCost
from phaseprof.work.counter import counted_cost
from phaseprof.work.walk import model_cost

#: The methods of generate that tell its prompt, and what is lost without each.
_PROMPT_SEAMS = {
    "_prefill": "the prompts of generate calls: the first pass of each is taken for its prompt",
    "_assisted_decoding": "the drafts of assisted generation",
}


class TransformersHooks:
    """Sets and removes every hook on transformers, and on what wraps its models.

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
        self._note = note
        self._on_model = on_model
        self._captures = CaptureHook()
        self._models = ModelBook(
            describe=describe,
            make_timer=self._make_timer,
            count=partial(_count, state),
            on_new=self._new_model,
            note=note,
            on_container=self._hook_container,
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
            on_inlined=self._inlined,
        )
        self._forward_hook: ForwardHook | None = None
        self._generate = GenerateHook(
            emit=emit, models=self._models, caches=self._caches, state=state, failed=failed
        )
        self._adapters = AdapterHook(emit=emit, caches=self._caches, state=state, failed=failed)
        self._continuous = ContinuousHook(
            emit=emit,
            models=self._models,
            caches=self._caches,
            state=state,
            flags=flags,
            failed=failed,
            note=note,
        )
        self._routing = RoutingHook(emit=emit, state=state, failed=failed, note=note)
        self._compiled: CompiledCalls | None = None
        self._patches: list[Patch] = []
        self._waiting: list[Removal] = []
        self._generate_hooked = False
        self._compiled_hooked = False
        self._containers: set[type] = set()
        self._failures_before = len(failures())

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
            model: A module to watch besides, or several in a list; the class of one that is no transformers model, and
                has none in it, is hooked.
        """
        self._waiting = [
            when_imported("transformers.modeling_utils", self._hook_models),
            when_imported("transformers.generation.utils", self._hook_generate),
            when_imported(
                "transformers.generation.continuous_batching.continuous_api", self._hook_continuous
            ),
            when_imported("torch._dynamo.eval_frame", self._hook_compiled),
            when_imported("peft.tuners.tuners_utils", self._hook_tuners),
            when_imported("peft.peft_model", self._hook_adapters),
        ]
        if model is not None:
            self._hook_foreign(model)

    def remove(self) -> None:
        """Take every hook off. One that somebody else has wrapped since passes calls through from now on."""
        for waiting in self._waiting:
            waiting.remove()
        self._waiting = []
        if self._forward_hook is not None:
            self._forward_hook.active = False
        self._generate.active = False
        self._adapters.active = False
        self._continuous.active = False
        self._routing.active = False
        self._models.replicas.active = False
        if self._compiled is not None:
            self._compiled.release()
        for patch in reversed(self._patches):
            patch.remove()
        for lacking in finished(self._models.timers):
            self._note(lacking)
        self._captures.remove()
        for failure in failures()[self._failures_before :]:
            self._note(failure)

    def _make_timer(self, device: Any) -> DeviceTimer | None:
        timer = timer_of(device)
        if timer is not None:
            self._captures.set(sys.modules["torch"].cuda)
        return timer

    @property
    def _forward(self) -> ForwardHook:
        """Made once torch is there."""
        if self._forward_hook is None:
            self._forward_hook = self._make_forward()
        return self._forward_hook

    def _set(self, lost: str, make: Callable[[], Patch]) -> Patch | None:
        """Set a hook, or say what is lost without it."""
        try:
            patch = make()
        except Exception as error:
            self._missing(lost, f"{type(error).__name__}: {error}")
            return None
        self._patches.append(patch)
        return patch

    def _missing(self, lost: str, why: str) -> None:
        self._note(
            NotMeasured(
                lost,
                f"a hook could not be set under {_versions()} ({why})",
                "please report it with these versions; transformers 5.0 to 5.24 have what is looked for",
            )
        )

    def _hook_models(self, module: Any) -> None:
        if _version_numbers() < [5, 0]:
            self._note(
                NotMeasured(
                    "labels that can be relied on",
                    f"transformers {_version()} is older than 5.0, the oldest version that is supported: a prompt that "
                    "it computes in chunks or with assistance may be labelled wrongly",
                    "pip install -U 'transformers>=5.0'",
                )
            )
        owner = getattr(module, "PreTrainedModel", None)
        if not isinstance(owner, type):
            self._missing("the passes of transformers models", "PreTrainedModel is not there")
            return
        call = owner.__call__
        forward = self._forward
        if (
            self._set("the passes of transformers models", lambda: forward.patch_class(owner))
            is None
        ):
            return
        self._models.pretrained = owner
        forward.kinds += (owner,)
        self._set(
            "the replicas of DataParallel: each is taken for a model of its own",
            lambda: self._models.replicas.patch(owner),
        )
        self._compiled = compiled = CompiledCalls(forward, owner, call)
        self._set("decode steps that generate compiles by itself", compiled.patch_compiled_call)
        # Dynamo may have been imported before transformers.
        self._hook_compiled(sys.modules.get("torch._dynamo.eval_frame"))

    def _hook_generate(self, module: Any) -> None:
        mixin = getattr(module, "GenerationMixin", None)
        if mixin is None:
            self._missing(
                "the prompts of generate calls made before a model's first pass",
                "transformers.generation.utils has no GenerationMixin",
            )
            return
        self._hook_mixin(mixin)

    def _hook_mixin(self, mixin: type) -> None:
        self._generate_hooked = True
        try:
            self._patches += self._generate.patches(mixin)
        except Exception as error:
            self._missing("the prompts of generate calls", f"{type(error).__name__}: {error}")
            return
        for name, lost in _PROMPT_SEAMS.items():
            if not hasattr(mixin, name):
                self._missing(lost, f"{mixin.__name__} has no {name}")

    def _hook_continuous(self, module: Any) -> None:
        self._patches += self._continuous.patches(module)

    def _hook_compiled(self, module: Any) -> None:
        if module is None or self._compiled_hooked or not self._forward_hook:
            return
        self._compiled_hooked = True
        forward, compiled = self._forward_hook, self._compiled
        self._set(
            "the passes of torch.compile(model)",
            lambda: forward.patch_compiled_module(module.OptimizedModule),
        )
        if compiled is None:
            return
        functions = "the passes of torch.compile(model.forward)"
        self._set(functions, lambda: compiled.patch_compile(module))
        try:
            compiled.watch_earlier(module)
        except Exception as error:
            self._missing(functions, f"{type(error).__name__}: {error}")

    def _hook_adapters(self, module: Any) -> None:
        self._set(
            "the virtual tokens of PEFT's prompt learning",
            lambda: self._adapters.patch(module.PeftModel),
        )

    def _hook_tuners(self, module: Any) -> None:
        self._set(
            "adapters that are given to a model after its first pass",
            lambda: patch_injection(module.BaseTuner, self._models.changed),
        )

    def _hook_container(self, model: Any) -> None:
        """Hook the `forward` of a model whose own call is gone around."""
        owner = type(model)
        if owner in self._containers:
            return
        self._containers.add(owner)
        self._set(
            f"the time of the head of {owner.__name__}, whose forward is called directly",
            lambda: self._forward.patch_class(owner, "forward"),
        )

    def _hook_foreign(self, model: Any) -> None:
        """Modules of the user's own: their class is hooked, unless a transformers model in them will be seen anyway."""
        for module in _modules(model):
            owner = type(module)
            pretrained = self._models.pretrained
            if pretrained is not None and holds(module, pretrained):
                continue
            # Of a class of torch's own, like Sequential, others than the user's model are around.
            single = weakref.ref(module) if owner.__module__.partition(".")[0] == "torch" else None
            if single is None:
                self._forward.kinds += (owner,)
            self._set(
                f"the passes of {owner.__name__}",
                partial(self._forward.patch_class, owner, only=self._is_foreign(single)),
            )
        if self._forward_hook is not None:
            self._hook_compiled(sys.modules.get("torch._dynamo.eval_frame"))

    def _is_foreign(self, single: weakref.ref[Any] | None) -> Callable[[Any], bool]:
        """What says of a module of a hooked class whether its calls are passes: not if transformers' are in it."""
        known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

        def is_foreign(module: Any) -> bool:
            verdict = known.get(module)
            if verdict is None:
                pretrained = self._models.pretrained
                verdict = single is None or single() is module
                if verdict and pretrained is not None:
                    verdict = not holds(module, pretrained)
                known[module] = verdict
            return verdict

        return is_foreign

    def _new_model(self, seen: SeenModel) -> None:
        self._on_model(seen)
        self._watch_routers(seen)
        pretrained, model = self._models.pretrained, seen.ref()
        if pretrained is None or not isinstance(model, pretrained):
            return
        if type(model).__call__ is not vars(pretrained).get("__call__"):
            # A call of its own may go around the one that is hooked; if it does not, this hook is inside a pass.
            self._hook_container(model)
        if self._generate_hooked:
            return
        owners = [owner for owner in type(model).__mro__ if "generate" in vars(owner)]
        if owners:
            # Where it was looked for it is not: this model has it from somewhere.
            self._hook_mixin(owners[-1])

    def _watch_routers(self, seen: SeenModel) -> None:
        cost = seen.meta.cost
        if cost is None or not cost.experts:
            return
        try:
            self._patches += self._routing.patches(seen.ref())
        except Exception as error:
            self._missing("the experts that each pass reads", f"{type(error).__name__}: {error}")

    def _inlined(self, class_name: str) -> None:
        self._note(
            NotMeasured(
                f"calls of {class_name} inside a function that is compiled",
                "torch.compile made one graph of the function and the model in it: no call is left to be seen",
                "compile the model instead of the function around it: model.compile(), or torch.compile(model)",
            )
        )


def _modules(model: Any) -> Iterator[Any]:
    """The torch modules that a user asks to watch: one, several, or that of something that has one (a pipeline)."""
    for item in model if isinstance(model, list | tuple | set) else (model,):
        module = item if hasattr(item, "modules") else getattr(item, "model", None)
        module = getattr(module, "_orig_mod", module)
        if hasattr(module, "modules"):
            yield module


def always_masked(model: ModelMeta) -> bool:
    """Whether attention is given an explicit mask even where a causal one would do: by every implementation but sdpa,
    and by all of them up to transformers 5.10."""
    return model.attn_implementation != "sdpa" or _version_numbers() <= [5, 10]


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "0.0"))


def _version_numbers() -> list[int]:
    return [int(part) for part in _version().split(".")[:2] if part.isdecimal()]


def _versions() -> str:
    """The versions of the libraries that are hooked, for a report."""
    loaded = {name: sys.modules.get(name) for name in ("transformers", "peft", "torch")}
    return ", ".join(
        f"{name} {getattr(module, '__version__', '?')}" for name, module in loaded.items() if module
    )


def _count(state: ThreadState, model: Any) -> ModelCost:
    """What a model costs: by its structure or, where that is not known, by torch's counter. What that calls of its copy
    is no pass of anything."""
    cost = model_cost(model)
    if cost.covered:
        return cost
    here = state.here
    inside, here.in_pass = here.in_pass, True
    try:
        return counted_cost(model, cost)
    finally:
        here.in_pass = inside
