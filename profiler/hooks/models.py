"""The models that were seen: what is read from each of them once, at its first pass."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.hooks.containers import is_bare, running_container
from phaseprof.hooks.parallel import tensor_ranks
from phaseprof.hooks.placement import device_of, devices_of
from phaseprof.hooks.replicas import Replicas
from phaseprof.hooks.state import Generation
from phaseprof.hooks.variants import AdapterState
from phaseprof.timers import DeviceTimer, together
from phaseprof.trace.meta import Device, ModelMeta
from phaseprof.work.cost import ModelCost
from phaseprof.work.kv import KvLayout
from phaseprof.work.paged import PagedPool


@dataclass(slots=True)
class SeenModel:
    """A model, as a hook knows it.

    Attributes:
        model_id: Its id in the tables.
        encoder: Its passes encode: it attends in both directions, or it is a part of the model that generates.
        encoder_decoder: Its own tokens are the decoder's.
        has_head: It computes logits.
        aside: Why none of its passes is prefill or decode: ``scoring`` (its head gives a score of the text); else None.
        timer: Times its passes on its device; None where the host's time is the device's.
        meta: What is stored about it.
        device: The device that it runs on.
        ref: The model.
        layouts: Layout of its KV cache, by the classes of the cache and of its layers.
        adapters: The adapters that it runs with; None without any.
        pool: The cache of its engine, which serves all of its requests; None without one.
    """

    model_id: str
    encoder: bool
    encoder_decoder: bool
    has_head: bool
    timer: DeviceTimer | None
    meta: ModelMeta
    device: Device | None
    ref: weakref.ref[Any]
    aside: str | None = None
    layouts: dict[tuple[str, tuple[str, ...]], KvLayout] = field(default_factory=dict)
    adapters: AdapterState | None = None
    pool: PagedPool | None = None


def unread(class_name: str, error: Exception) -> NotMeasured:
    """What a model's figures lack if reading its structure raised."""
    return NotMeasured(
        f"FLOPs and bytes of {class_name}",
        f"its structure could not be read ({type(error).__name__}: {error})",
        "please report it with the model's config.json",
    )


class ModelBook:
    """Knows models by identity, without keeping them alive or marking them.

    Args:
        describe: Gives the `Device` of a torch device.
        make_timer: Gives the timer for a torch device; None where the host's time is the device's.
        count: Counts a model's structure.
        on_new: Told of each new model.
        note: Told of what could not be read.
        on_container: Told of a model whose part was called from its `forward` while its own call was not seen.

    Attributes:
        replicas: Knows the replicas of DataParallel.
        pretrained: The class of transformers models; None before the library is there.
    """

    def __init__(
        self,
        *,
        describe: Callable[[Any], Device],
        make_timer: Callable[[Any], DeviceTimer | None],
        count: Callable[[Any], ModelCost],
        on_new: Callable[[SeenModel], None],
        note: Callable[[NotMeasured], None],
        on_container: Callable[[Any], None] | None = None,
    ) -> None:
        self._describe = describe
        self._make_timer = make_timer
        self._count = count
        self._on_new = on_new
        self._note = note
        self._on_container = on_container
        self.replicas = Replicas()
        self.pretrained: type | None = None
        #: By identity, of modules that live and whose calls are always their own.
        self.seen: dict[int, SeenModel] = {}
        #: The same of models whose call may be a part of another's: looked up anew for each pass.
        self._bare: dict[int, SeenModel] = {}
        # Two threads may come with a new model at once.
        self._lock = threading.Lock()
        #: Models with adapters, in each state that they were seen in, the last one first.
        self._adapted: dict[int, list[SeenModel]] = {}
        self._numbers: Counter[str] = Counter()
        self._devices: dict[str, tuple[Device, DeviceTimer | None]] = {}
        #: Time spent on models at first sight.
        self.setup_ns = 0

    def find(self, model: Any, generation: Generation | None) -> SeenModel:
        """The entry of a model; made at first sight.

        Args:
            model: The module that is called.
            generation: The generate call in progress; None in a hand-written loop.
        """
        seen = self.seen.get(id(model)) or self._with_adapters(model)
        if seen is not None:
            return seen
        original = self.replicas.original(model)
        if original is not None:
            return self._replica(model, self.find(original, generation))
        bare = self._bare.get(id(model))
        if bare is not None and bare.adapters is not None and not bare.adapters.holds():
            self._bare.pop(id(model), None)
            bare = None
        if self.pretrained is not None and (bare is not None or isinstance(model, self.pretrained)):
            # A model with a head is asked at first sight alone: what calls it is whole from then on.
            outer = running_container(model, self.pretrained)
            if outer is not None:
                if self._on_container is not None:
                    self._on_container(outer)
                return self.find(outer, generation)
        return bare or self._first_sight(model, generation)

    def _first_sight(self, model: Any, generation: Generation | None) -> SeenModel:
        with self._lock:
            # Another thread may have been quicker.
            seen = self.seen.get(id(model)) or self._bare.get(id(model))
            seen = seen or self._with_adapters(model)
            if seen is None:
                began = time.perf_counter_ns()
                seen = self._add(model, generation.model if generation is not None else None)
                self.setup_ns += time.perf_counter_ns() - began
        return seen

    def _replica(self, replica: Any, original: SeenModel) -> SeenModel:
        """A replica is its original on another device."""
        device, timer = self._device(replica)
        if device is None or device == original.device:
            return original
        # The layouts are shared: they are the same on every device.
        return replace(original, device=device, timer=timer)

    def _with_adapters(self, model: Any) -> SeenModel | None:
        """The entry of a model with adapters, in the state that it is in."""
        states = self._adapted.get(id(model), [])
        for place, seen in enumerate(states):
            if seen.adapters is not None and seen.adapters.holds():
                if place:
                    states.insert(0, states.pop(place))
                return seen
        return None

    def changed(self, model: Any) -> None:
        """A module was given adapters: what it is a part of is another model from now on."""
        books: tuple[dict[int, Any], ...] = (self.seen, self._bare, self._adapted)
        for book in books:
            for key, held in tuple(book.items()):
                owner = (held[0] if isinstance(held, list) else held).ref()
                if owner is not None and any(part is model for part in owner.modules()):
                    book.pop(key, None)

    @property
    def timers(self) -> tuple[DeviceTimer, ...]:
        """The timers in use."""
        return tuple(timer for _, timer in self._devices.values() if timer is not None)

    def beside(self, model: Any, what: str) -> SeenModel:
        """Another entry of a model that is changed for the time being. Whoever asks for it puts it in its place.

        Args:
            model: The module, as it is now.
            what: What is different, for its name.
        """
        with self._lock:
            began = time.perf_counter_ns()
            seen = self._make(model, model, what)
            self.setup_ns += time.perf_counter_ns() - began
        self._on_new(seen)
        return seen

    def _add(self, model: Any, generating: Any) -> SeenModel:
        seen = self._make(model, generating)
        bare = self.pretrained is not None and isinstance(model, self.pretrained) and is_bare(model)
        if seen.adapters is not None and not bare:
            # Not in the book that hooks look into first: its state is asked for at each pass.
            self._adapted.setdefault(id(model), []).insert(0, seen)
        else:
            (self._bare if bare else self.seen)[id(model)] = seen
        self._on_new(seen)
        return seen

    def _make(self, model: Any, generating: Any, what: str = "") -> SeenModel:
        class_name = type(model).__name__
        self._numbers[class_name] += 1
        model_id = f"{class_name}-{self._numbers[class_name]}"
        ranks = _tensor_ranks(model)
        cost = self._cost(model, class_name, len(ranks))
        device, timer = self._device(model)
        config = getattr(model, "config", None)
        adapters = AdapterState.of(model)
        meta = ModelMeta(
            model_id=model_id,
            name=_name(model, class_name, adapters) + what,
            class_name=class_name,
            engine="transformers",
            device_key=device.key if device else "",
            device_uuid=device.uuid if device else "",
            cost=cost,
            attn_implementation=getattr(config, "_attn_implementation", None),
            cache_class=None,
            tensor_ranks=ranks,
            devices=max(len(devices_of(model)), 1),
        )
        return SeenModel(
            model_id=model_id,
            encoder=_encodes(model, generating),
            encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
            has_head=cost is None or not cost.covered or cost.head_flops_per_token > 0,
            timer=timer,
            meta=meta,
            device=device,
            ref=weakref.ref(model, partial(self._gone, id(model))),
            aside="scoring" if _scores(model) else None,
            adapters=adapters,
        )

    def _gone(self, key: int, _: weakref.ref[Any]) -> None:
        # Runs before the address can be used again, so that an entry always is of a module that lives.
        self.seen.pop(key, None)
        self._bare.pop(key, None)
        self._adapted.pop(key, None)

    def _cost(self, model: Any, class_name: str, ranks: int) -> ModelCost | None:
        try:
            cost = self._count(model)
            if ranks and cost.covered:
                # Shards that are plain tensors: what a rank holds is seen, what it computes is not.
                cost = replace(cost, not_covered=(f"layers that are split over {ranks} ranks",))
        except Exception as error:
            self._note(unread(class_name, error))
            return None
        if not cost.covered:
            reasons = "; ".join(cost.not_covered)
            self._note(NotMeasured(f"FLOPs and bytes of {class_name}", reasons))
        if cost.offloaded_bytes:
            self._note(
                NotMeasured(
                    f"how {class_name} is brought to its device",
                    f"{cost.offloaded_bytes / 1e9:.3g} GB of its weights lie elsewhere between passes and are brought "
                    "for each of them; only what the device then reads is counted",
                    "fit the model on the device",
                )
            )
        return cost

    def _device(self, model: Any) -> tuple[Device | None, DeviceTimer | None]:
        device = device_of(model)
        if device is None:
            return None, None
        described, timer = self._timed(device)
        others = devices_of(model)
        if described is not None and others:
            timer = together([self._timed(other)[1] for other in others])
        return described, timer

    def _timed(self, device: Any) -> tuple[Device | None, DeviceTimer | None]:
        key = str(device)
        if key not in self._devices:
            try:
                self._devices[key] = (self._describe(device), self._make_timer(device))
            except Exception as error:
                self._note(NotMeasured(f"the device {key}", f"{type(error).__name__}: {error}"))
                return None, None
        return self._devices[key]


def _tensor_ranks(model: Any) -> tuple[int, ...]:
    try:
        return tensor_ranks(model)
    except Exception:
        return ()  # a kind of mesh that is not known


def _name(model: Any, class_name: str, adapters: AdapterState | None) -> str:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or class_name
    active = "" if adapters is None else ", ".join(adapters.active)
    return f"{name} with {active}" if active else name


def _encodes(model: Any, generating: Any) -> bool:
    """Whether a module's passes encode rather than prefill and decode.

    Inside a generate call it is any other module that is a part of the generating model (an encoder, a vision tower).
    Else it is a model that cannot generate and none of whose attention layers is causal.
    """
    if model is generating:
        return False
    if generating is not None and any(part is model for part in generating.modules()):
        return True
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and can_generate():
        # Some attend to their prompt in both directions (PaliGemma).
        return False
    parts = list(model.modules())
    causal = [part.is_causal for part in parts if hasattr(part, "is_causal")]
    if not causal:
        # The attention of T5 says it in this way, where it does not in the other.
        decoders = (getattr(part, "is_decoder", None) for part in parts)
        causal = [decoder for decoder in decoders if isinstance(decoder, bool)]
    return bool(causal) and not any(causal)


def _scores(model: Any) -> bool:
    """Whether a model has a head that scores or classifies its text, in place of one that goes on with it."""
    return any(
        kind.__name__.endswith(
            ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
        )
        for kind in type(model).__mro__
    )
