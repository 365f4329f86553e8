"""A session: hooks on, recording, hooks off.

A process has one session at a time. `phaseprof.profile` opens one for a block, `phaseprof run` one for the life of a
process (`start_process_session`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phaseprof.clock import Clock, read_pair
from phaseprof.errors import NotMeasured, PhaseprofError, UsageError
from phaseprof.events import ModelSeen, Override
from phaseprof.evidence import COLLECT_VARIABLE, LOOK, Evidence, load_evidence
from phaseprof.hooks.models import SeenModel
from phaseprof.hooks.sets import HookSet
from phaseprof.hooks.state import Flags, ThreadState
from phaseprof.hooks.transformers import TransformersHooks, always_masked
from phaseprof.phases import Phase
from phaseprof.process import ProcessPlace, this_host
from phaseprof.recorder import Recorder
from phaseprof.records import Call, CallKind
from phaseprof.sampled import SampledDevices
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.meta import CollectorCost, Device, ModelMeta, ProcessMeta, SelfCost
from phaseprof.vllm.hookset import VllmHooks
from phaseprof.work.kv import with_layout

log = logging.getLogger("phaseprof")

#: Packages whose versions matter to a reader, where they are loaded.
_VERSIONED = ("torch", "transformers", "vllm", "accelerate", "pyarrow")

_lock = threading.RLock()
_current: Session | None = None
_state = ThreadState()
_flags = Flags()


class Session:
    """Records the forward passes of this process into a trace.

    Args:
        trace: The trace's folder.
        model: A module to watch even if it is not a transformers model; None for transformers models alone.
        workload: Facts about the run that a reader should see.
        collect: Which collectors run, as `--collect` takes it; None for what the environment says, or the defaults.
    """

    def __init__(
        self,
        trace: Path,
        *,
        model: Any = None,
        workload: Mapping[str, Any] | None = None,
        collect: str | None = None,
    ) -> None:
        self.trace = trace
        self.collect = collect if collect is not None else os.environ.get(COLLECT_VARIABLE)
        self._place = ProcessPlace()
        self._host = this_host()
        self._model = model
        self._pid = os.getpid()
        self._clock = Clock.start()
        self._notes: dict[NotMeasured, None] = {}
        self._failures: set[str] = set()
        self._models: list[SeenModel] = []
        self._meta = ProcessMeta(
            schema=SCHEMA_VERSION,
            phaseprof=_version(),
            rank=self._place.now().rank,
            pid=self._pid,
            command=tuple(sys.orig_argv),
            versions={},
            started_ns=self._clock.now_unix_ns(),
            clock=(self._clock.pair,),
            workload=workload,
            host=self._host,
        )
        self._recorder: Recorder | None = None
        self._hooks: tuple[HookSet, ...] = ()
        self._evidence: Evidence | None = None
        self._devices: dict[str, Device] = {}
        self._costs: list[CollectorCost] = []
        #: Collectors for a block, where those of the session do not have what it asks for.
        self._look: Evidence | None = None
        self._sampled = SampledDevices(trace)
        #: It records the process until it ends, and blocks inside it join it.
        self.whole_process = False
        #: Tells other processes that this session is followed in what `warmup` says; None if there are none.
        self.elsewhere: Callable[[str], None] | None = None

    def start(self, *, lazily: bool = False) -> None:
        """Set the hooks and begin to record.

        Args:
            lazily: Make no file before the first pass.

        Raises:
            UsageError: If a session runs in this process already, or there is no collector of a name that is asked for.
            TraceError: If the trace cannot be written.
        """
        global _current
        with _lock:
            if _current is not None:
                raise UsageError(
                    f"A profiling session runs in this process already, into {_current.trace}.",
                    "End it first: sessions cannot be nested.",
                )
            evidence = load_evidence(self.collect)
            recorder = Recorder(
                self.trace,
                place=self._place,
                host=self._host.token,
                clock=self._clock,
                meta=self._current_meta,
                note=self.note,
                passes_seen=lambda: sum(hooks.handed_over for hooks in self._hooks),
            )
            self._recorder = recorder
            if not lazily:
                recorder.start()
            told: dict[str, Any] = {
                "emit": recorder.emit,
                "state": _state,
                "flags": _flags,
                "on_model": self._on_model,
                "note": self.note,
                "failed": self._failed,
            }
            self._hooks = (
                TransformersHooks(**told),
                VllmHooks(**told, trace=self.trace, end=self.stop),
            )
            self._evidence = evidence
            try:
                evidence.start(_Sink(self))
                _flags.window = evidence.window
                for hooks in self._hooks:
                    hooks.install(self._model)
            except BaseException:
                evidence.stop()
                self.abandon()
                recorder.close()
                raise
            _current = self
        recorder.meta_changed()

    def stop(self) -> None:
        """Take the hooks off, write what waits, and end the trace. Does nothing the second time."""
        global _current
        with _lock:
            if _current is not self:
                return
            _current = None
        recorder = self.recorder
        self.abandon()
        self._end_extra_look()
        if self._evidence is not None:
            self._evidence.stop()
        self._sampled.release()
        recorder.close()
        self._meta = replace(
            self._meta,
            ended_ns=self._clock.now_unix_ns(),
            complete=True,
            clock=(self._clock.pair, read_pair()),
            self_cost=SelfCost(
                passes=sum(hooks.passes for hooks in self._hooks),
                hook_ns=sum(hooks.own_ns for hooks in self._hooks),
                writer_cpu_ns=recorder.cpu_ns,
                setup_ns=sum(hooks.setup_ns for hooks in self._hooks),
                collectors=tuple(self._costs),
                sampler_cpu_ns=self._evidence.sampler_cpu_ns if self._evidence is not None else 0,
            ),
        )
        recorder.write_meta()

    def abandon(self) -> None:
        """Take the hooks off and leave the rest: in a forked child, the session is the parent process's."""
        _flags.window = None
        for hooks in self._hooks:
            hooks.remove()

    def begin_look(self) -> None:
        """Look at the kernels of every pass from the next one on, until `end_look`: those passes are flagged
        `profiled`."""
        window = _flags.window
        if window is None:
            look = self._look = load_evidence(LOOK)
            look.start(_Sink(self))
            for device in tuple(self._devices.values()):
                look.device_seen(device)
            window = _flags.window = look.window
        # Requests are flagged as well, which an engine may count in another process than their passes.
        _flags.profiled = True
        if window is not None:
            window.hold(True)

    def end_look(self) -> None:
        """What was seen is in the recorder when it returns. Does nothing if there was no look."""
        _flags.profiled = False
        if self._look is None and _flags.window is not None:
            _flags.window.hold(False)
        self._end_extra_look()

    def _end_extra_look(self) -> None:
        if self._look is not None:
            _flags.window = None
            _flags.profiled = False
            self._look.stop()
            self._look = None

    @property
    def self_cost(self) -> SelfCost:
        """What the session took; known once it has stopped.

        Raises:
            RuntimeError: If it has not.
        """
        if self._meta.self_cost is None:
            raise RuntimeError("the session has not stopped")
        return self._meta.self_cost

    @property
    def recorder(self) -> Recorder:
        """The recorder.

        Raises:
            RuntimeError: If the session was never started.
        """
        if self._recorder is None:
            raise RuntimeError("the session was not started")
        return self._recorder

    def note(self, what: NotMeasured) -> None:
        """Remember what could not be measured; a reason is kept once."""
        if what not in self._notes:
            self._notes[what] = None
            if self._recorder is not None:
                self._recorder.meta_changed()

    def _failed(self, what: str, error: Exception) -> None:
        """Our own code failed beside the workload: said once, recorded, and the pass goes unobserved."""
        if what in self._failures:
            return
        self._failures.add(what)
        debug = bool(os.environ.get("PHASEPROF_DEBUG"))
        log.warning(
            "phaseprof: %s failed, the workload goes on: %s: %s",
            what,
            type(error).__name__,
            error,
            exc_info=error if debug else None,
        )
        self.note(
            NotMeasured(
                "some passes",
                f"{what} failed ({type(error).__name__}: {error})",
                "please report it; PHASEPROF_DEBUG=1 shows where",
            )
        )

    def _on_model(self, model: SeenModel) -> None:
        cost = model.meta.cost
        dtype = cost.dtype if cost is not None else ""
        self._models.append(model)
        # A short script may leave its process group before the recorder looks again.
        self._place.now()
        device = model.device
        # Two boards of one kind have the same key, as they have the same ceilings.
        name = "" if device is None else device.uuid or device.key
        if device is not None and name not in self._devices and self._evidence is not None:
            self._devices[name] = device
            self._evidence.device_seen(device)
            if self._look is not None:
                self._look.device_seen(device)
        masked = always_masked(model.meta)
        self.recorder.emit(ModelSeen(model.model_id, cost, dtype, masked, model.pool))
        self.recorder.meta_changed()

    def _current_meta(self) -> ProcessMeta:
        models = [_with_cache(model) for model in tuple(self._models)]
        devices = {
            model.device.uuid or model.device.key: model.device
            for model in tuple(self._models)
            if model.device
        }
        place = self._place.now()
        return replace(
            self._meta,
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            rank_source=place.source,
            restart=place.restart,
            versions=_versions(),
            models=tuple(models),
            devices=tuple(devices.values()),
            hooks=tuple(label for hooks in self._hooks for label in hooks.labels),
            not_measured=tuple(self._notes),
        )


class _Sink:
    """What the collectors of a session see of it: a `phaseprof.evidence.EvidenceSink`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.clock = session._clock
        self.put_samples = session.recorder.put_samples
        self.put_kernels = session.recorder.put_kernels
        self.note = session.note
        self.spent = session._costs.append
        self.sampling_of = session._sampled.take


def _with_cache(model: SeenModel) -> ModelMeta:
    """What is stored of a model, with the bytes that its real cache takes once one was seen."""
    if not model.layouts:
        return model.meta
    (cache_class, _), layout = next(iter(model.layouts.items()))
    cost = model.meta.cost
    return replace(
        model.meta,
        cache_class=cache_class,
        cost=cost if cost is None else with_layout(cost, layout),
    )


def _version() -> str:
    return str(sys.modules["phaseprof"].__version__)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "phaseprof": _version()}
    for name in _VERSIONED:
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if version is not None:
            versions[name] = str(version)
    return versions


# What runs in this process


def current() -> Session | None:
    """The session that runs in this process, or None."""
    return _current


@contextlib.contextmanager
def warmup() -> Iterator[None]:
    """Mark the passes inside as warm-up: recorded, and kept out of the steady-state figures."""
    tell = _current.elsewhere if _current is not None else None
    begin_warmup()
    if tell is not None:
        tell("warmup")
    try:
        yield
    finally:
        end_warmup()
        if tell is not None:
            tell("measure")


def begin_warmup() -> None:
    """The first half of `warmup`, for a process that is told by another one."""
    _flags.warmups += 1


def end_warmup() -> None:
    """The second half. One without a first does nothing: a session may have begun in the middle."""
    _flags.warmups = max(_flags.warmups - 1, 0)


@contextlib.contextmanager
def workload_call(
    kind: CallKind, *, prompt_tokens: int, new_tokens: int, sequences: int, repeat: int
) -> Iterator[None]:
    """Mark the passes inside as those of one call of a workload. One that raises leaves no mark; without a session
    nothing does.

    Args: as the fields of `Call`.
    """
    session = _current
    if session is None:
        yield
        return
    start_ns = session._clock.now_unix_ns()
    yield
    end_ns = session._clock.now_unix_ns()
    session.recorder.put_call(
        Call(kind, prompt_tokens, new_tokens, sequences, repeat, start_ns, end_ns)
    )


@contextlib.contextmanager
def profiled_passes() -> Iterator[None]:
    """Mark the passes inside as slowed by a collector: their time is kept out of timing figures."""
    before = _flags.profiled
    _flags.profiled = True
    try:
        yield
    finally:
        _flags.profiled = before


@contextlib.contextmanager
def phase(name: Phase | str, *, prompt_tokens: int | None = None) -> Iterator[None]:
    """Say what the passes of this thread are, where nothing can be inferred: it overrules every other source.

    Args:
        name: ``prefill``, ``decode``, ``mixed``, ``encode`` or ``other``.
        prompt_tokens: Tokens that the sequences came with, where the caller knows.

    Raises:
        UsageError: If the name is none of these, or the count is negative.
    """
    try:
        label = Phase(name)
    except ValueError:
        label = Phase.EXTEND
    if label is Phase.EXTEND:
        names = ", ".join(p.value for p in Phase if p is not Phase.EXTEND)
        raise UsageError(f"There is no phase {str(name)!r} to declare.", f"Use one of {names}.")
    if prompt_tokens is not None and prompt_tokens < 0:
        raise UsageError(f"prompt_tokens cannot be negative: {prompt_tokens}.")
    before = _state.here.override
    _state.here.override = Override(label, prompt_tokens)
    try:
        yield
    finally:
        _state.here.override = before


def start_process_session(trace: Path, *, lazily: bool = False, collect: str | None = None) -> None:
    """Record this process until it ends. A failure is said once and leaves the process alone.

    Args:
        trace: The trace's folder.
        lazily: Make no file before the first pass.
        collect: As in `Session`.
    """
    session = Session(trace, collect=collect)
    session.whole_process = True
    try:
        session.start(lazily=lazily)
    except PhaseprofError as error:
        log.warning("phaseprof: this process is not recorded: %s", error)
        return
    atexit.register(session.stop)
    _stop_with_multiprocessing(session)


def _stop_with_multiprocessing(session: Session) -> None:
    """Children of multiprocessing leave by os._exit, without atexit; they run finalizers of its own before."""
    util = sys.modules.get("multiprocessing.util")
    if util is None:
        return
    util.Finalize(None, session.stop, exitpriority=0)
    # In a forked child this has run before the child's bootstrap clears all finalizers; it then runs these.
    util.register_after_fork(session, _stop_in_child)


def _stop_in_child(session: Session) -> None:
    if session is _current:
        sys.modules["multiprocessing.util"].Finalize(None, session.stop, exitpriority=0)


def _after_fork_in_child() -> None:
    """The parent's recorder thread is not here: record into files of our own, once a model runs."""
    global _current, _lock
    _lock = threading.RLock()
    _flags.warmups = 0
    _flags.profiled = False
    # It may have been forked in the middle of a generate call or of a pass, which go on in the parent.
    _state.here.in_pass = False
    _state.here.generation = None
    parent, _current = _current, None
    if parent is not None:
        parent.abandon()
        parent._sampled.forget()
        start_process_session(parent.trace, lazily=True, collect=parent.collect)


os.register_at_fork(after_in_child=_after_fork_in_child)
