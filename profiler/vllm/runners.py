"""The model runners of vLLM that were seen: what is read from each of them once, at its first step."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.hooks.models import SeenModel, unread
from phaseprof.process import say_rank
from phaseprof.timers import DeviceTimer
from phaseprof.trace.meta import Device, ModelMeta
from phaseprof.vllm.names import model_id_of
from phaseprof.vllm.reading import RunnerWork


class SeenRunner:
    """A model runner, as the hooks know it.

    Attributes:
        number: Its number in this process, from 1.
        model_id: Its model's id in the tables.
        timer: Times its steps on its device; None where the host's time is the device's.
        compiled: Its model is compiled.
        encodes: Its model attends in both directions: it has neither prefill nor decode.
        steps: Steps so far.
        open: The step between `execute_model` and what ends it; else None.
    """

    __slots__ = (
        "compiled",
        "encodes",
        "model_id",
        "number",
        "open",
        "ref",
        "steps",
        "timer",
    )

    def __init__(self, number: int, ref: weakref.ref[Any]) -> None:
        self.number = number
        self.ref = ref
        self.model_id = f"vllm-{number}"
        self.timer: DeviceTimer | None = None
        self.compiled = False
        self.encodes = False
        self.steps = 0
        self.open: Any = None


class RunnerBook:
    """Knows model runners by identity, without keeping them alive or marking them.

    Args:
        describe: Gives the `Device` of a torch device.
        make_timer: Gives the timer for a torch device; None where the host's time is the device's.
        read: Reads what the work of a runner's steps depends on.
        on_new: Told of each new model.
        note: Told of what could not be read.

    Attributes:
        seen: By identity, of runners that live.
        setup_ns: Time spent on runners at first sight.
    """

    def __init__(
        self,
        *,
        describe: Callable[[Any], Device],
        make_timer: Callable[[Any], DeviceTimer | None],
        read: Callable[[Any], RunnerWork],
        on_new: Callable[[SeenModel], None],
        note: Callable[[NotMeasured], None],
    ) -> None:
        self._describe = describe
        self._make_timer = make_timer
        self._read_work = read
        self._on_new = on_new
        self._note = note
        self._lock = threading.Lock()
        self._count = 0
        self._numbers: Counter[str] = Counter()
        self.timers: list[DeviceTimer] = []
        self.seen: dict[int, SeenRunner] = {}
        self.setup_ns = 0

    def find(self, runner: Any) -> SeenRunner:
        """The entry of a runner; made at first sight."""
        seen = self.seen.get(id(runner))
        if seen is not None:
            return seen
        with self._lock:
            seen = self.seen.get(id(runner))
            if seen is None:
                began = time.perf_counter_ns()
                seen = self._add(runner)
                self.setup_ns += time.perf_counter_ns() - began
        return seen

    def _add(self, runner: Any) -> SeenRunner:
        self._count += 1
        ref = weakref.ref(runner, partial(self._gone, id(runner)))
        seen = SeenRunner(self._count, ref)
        # From here on it is known, whatever cannot be read of it.
        self.seen[id(runner)] = seen
        try:
            self._read(runner, seen)
        except Exception as error:
            self._note(
                NotMeasured(
                    "the model of a vLLM engine",
                    f"it could not be read ({type(error).__name__}: {error})",
                    "please report it with the version of vLLM",
                )
            )
        return seen

    def _read(self, runner: Any, seen: SeenRunner) -> None:
        model = runner.get_model()
        class_name = type(model).__name__
        config = runner.model_config
        seen.model_id = model_id_of(config, self._numbers)
        seen.compiled = _is_compiled(runner)
        seen.encodes = getattr(config, "attn_type", None) == "encoder_only"
        work = self._work(runner, class_name)
        parallel = getattr(runner, "parallel_config", None)
        if parallel is not None:
            # The process group is that of one replica; the engine counts the workers of all.
            replica = int(getattr(parallel, "data_parallel_index", 0))
            say_rank(replica * int(parallel.world_size) + int(parallel.rank))
        device = self._describe(runner.device)
        seen.timer = self._make_timer(runner.device)
        if seen.timer is not None:
            self.timers.append(seen.timer)
        meta = ModelMeta(
            model_id=seen.model_id,
            name=str(getattr(config, "served_model_name", None) or config.model),
            class_name=class_name,
            engine="vllm",
            device_key=device.key,
            device_uuid=device.uuid,
            cost=work.cost,
            attn_implementation=work.attention,
            cache_class=None,
            tensor_ranks=_tensor_ranks(),
            quantization=work.quantization,
        )
        self._on_new(
            SeenModel(
                model_id=seen.model_id,
                encoder=seen.encodes,
                encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
                has_head=not getattr(runner, "is_pooling_model", False),
                timer=seen.timer,
                meta=meta,
                device=device,
                ref=weakref.ref(model),
                layouts={} if work.pool is None else {("BlockPool", ()): work.pool.layout},
                pool=work.pool,
            )
        )

    def _work(self, runner: Any, class_name: str) -> RunnerWork:
        try:
            work = self._read_work(runner)
        except Exception as error:
            self._note(unread(class_name, error))
            return RunnerWork()
        for note in work.notes:
            self._note(note)
        return work

    def _gone(self, key: int, _: weakref.ref[Any]) -> None:
        # Runs before the address can be used again, so that an entry always is of a runner that lives.
        self.seen.pop(key, None)


def _is_compiled(runner: Any) -> bool:
    mode = getattr(getattr(runner, "compilation_config", None), "mode", None)
    # The mode is an enumeration that counts from NONE, or None where nobody has chosen.
    return bool(getattr(mode, "value", 0)) and not runner.model_config.enforce_eager


def _tensor_ranks() -> tuple[int, ...]:
    """Ranks that hold a part of each layer, this one included; empty if the layers are whole."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        return ()
    try:
        ranks = tuple(int(rank) for rank in state.get_tp_group().ranks)
    except Exception:
        return ()  # no group was made, or of another form
    return ranks if len(ranks) > 1 else ()
