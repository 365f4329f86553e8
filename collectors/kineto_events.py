"""What a torch.profiler session holds, read from kineto's own events: launches, kernels and operators.

`kineto_results.events()` costs a hundredth of what `profile.events()` does. Its times are Unix ns of the system clock
while the session ran; a host event's resource is the native id of its thread, a device event's is its stream. A kernel
has the correlation id of the runtime or driver call that launched it; under a CUDA graph all of its kernels do.

Left out: `gpu_user_annotation`, which is a span and no work, and what an operator calls, which lies inside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phaseprof.attribution import DeviceEvent, Launch

#: `at::RecordScope::FUNCTION`: an operator, not an annotation that a user or a library placed.
_OPERATOR_SCOPE = 0
#: How torch.profiler names a call of code that the inductor backend of torch.compile generated.
_COMPILED_CALL = "CompiledFxGraph"
#: Kineto's types of activities, as it names them.
_DEVICE_TYPES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_HOST_TYPES = frozenset(("cuda_runtime", "cuda_driver"))
#: Calls that give a device work; others carry a correlation id as well.
_LAUNCHING = ("Launch", "Memcpy", "Memset")
#: Where torch does not tell the type of an activity, the name tells the calls of the runtime and of the driver.
_CALLS = ("cuda", "cu", "hip")

#: After so many events the other threads have the interpreter for a moment.
_STRETCH = 256
_PAUSE_S = 0.0001


@dataclass(frozen=True, slots=True)
class OperatorEvent:
    """One operator that no other operator called.

    Attributes:
        name: As torch names it: ``aten::mm``.
        start_ns: Begin, Unix ns.
        end_ns: End, Unix ns.
        thread_id: Native id of the host thread that called it.
    """

    name: str
    start_ns: int
    end_ns: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class WindowEvents:
    """What a session held.

    Attributes:
        operators: The outermost operators of all threads, by begin.
        compiled: Calls of code that torch.compile generated, which computes outside of operators on a CPU.
        launches: Calls that gave a device work.
        device_events: What devices ran.
        count: All events that kineto had.
    """

    operators: tuple[OperatorEvent, ...]
    compiled: tuple[OperatorEvent, ...]
    launches: tuple[Launch, ...]
    device_events: tuple[DeviceEvent, ...]
    count: int

    @property
    def on_device(self) -> bool:
        """Something was launched on a device, or ran there."""
        return bool(self.device_events) or bool(self.launches)


def read(
    results: Any, *, shift_ns: int, name_device: Callable[[int], str], polite: bool = False
) -> WindowEvents:
    """Read the events of a session.

    Args:
        results: `kineto_results` of torch's profiler.
        shift_ns: What to add to its times to place them on the axis of the trace.
        name_device: Gives torch's name of a device by kineto's index.
        polite: Let other threads have the interpreter now and then.
    """
    events = results.events()
    operators: list[OperatorEvent] = []
    compiled: list[OperatorEvent] = []
    launches: list[Launch] = []
    device_events: list[DeviceEvent] = []
    for number, event in enumerate(events):
        if polite and number % _STRETCH == 0:
            time.sleep(_PAUSE_S)
        kind = activity_type(event)
        name = event.name()
        start_ns = event.start_ns() + shift_ns
        if kind in _DEVICE_TYPES:
            device_events.append(
                DeviceEvent(
                    name,
                    name_device(event.device_index()),
                    start_ns,
                    event.end_ns() + shift_ns,
                    event.device_resource_id(),
                    event.correlation_id(),
                )
            )
        elif kind in _HOST_TYPES:
            if any(part in name for part in _LAUNCHING):
                launches.append(
                    Launch(event.correlation_id(), start_ns, event.device_resource_id(), name)
                )
        elif kind == "cpu_op":
            is_operator = _is_operator(event, name)
            if is_operator or _COMPILED_CALL in name:
                taken = OperatorEvent(
                    name, start_ns, event.end_ns() + shift_ns, event.device_resource_id()
                )
                (operators if is_operator else compiled).append(taken)
        elif _COMPILED_CALL in name and kind == "user_annotation":
            compiled.append(
                OperatorEvent(name, start_ns, event.end_ns() + shift_ns, event.device_resource_id())
            )
    return WindowEvents(
        outermost(operators),
        outermost(compiled),
        tuple(launches),
        tuple(device_events),
        len(events),
    )


def activity_type(event: Any) -> str:
    """Kineto's type of an event; guessed from what else it tells where torch does not give it (before 2.8)."""
    told = getattr(event, "activity_type", None)
    if told is not None:
        return str(told())
    name = event.name()
    annotation = bool(getattr(event, "is_user_annotation", bool)())
    if event.device_type().name in ("CPU",):
        if annotation:
            return "user_annotation"
        # An operator's name has a namespace; a call of the runtime is one word.
        if name.startswith(_CALLS) and name.isidentifier():
            return (
                "cuda_driver" if name.startswith("cu") and name[2:3].isupper() else "cuda_runtime"
            )
        return "cpu_op"
    if annotation:
        return "gpu_user_annotation"
    if name.startswith(("Memcpy", "CopyDeviceToHost", "CopyHostToDevice")):
        return "gpu_memcpy"
    return "gpu_memset" if name.startswith("Memset") else "kernel"


def outermost(events: Iterable[OperatorEvent]) -> tuple[OperatorEvent, ...]:
    """The events that lie in no other event of their thread, by begin.

    An event that begins inside another belongs to it even if it seems to end later: that is the clock's last digit.
    """
    kept: list[OperatorEvent] = []
    covered_to: dict[int, int] = {}
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        if event.start_ns >= covered_to.get(event.thread_id, event.start_ns):
            kept.append(event)
            covered_to[event.thread_id] = event.end_ns
    return tuple(kept)


class DeviceNames:
    """Names devices as torch does.

    Kineto counts the devices of CUDA as torch does in this process. Of ROCm it counts all agents of the machine, CPUs
    too, so that an index says which of several devices is meant, but not its name.

    Args:
        seen: Names of the devices that models run on.
        counts_agents: Kineto's index is not torch's (ROCm).
    """

    def __init__(self, seen: Sequence[str], *, counts_agents: bool) -> None:
        self._seen = sorted(seen)
        self._counts_agents = counts_agents

    def name(self, index: int) -> str:
        """Torch's name; where it cannot be told, one by kineto's index."""
        if self._counts_agents and len(self._seen) == 1:
            return self._seen[0]
        return f"cuda:{index}"


def _is_operator(event: Any, name: str) -> bool:
    if event.scope() != _OPERATOR_SCOPE or event.is_async():
        return False
    namespace, separator, _ = name.partition("::")
    # torch.compile marks its regions in the scope of operators; their names are sentences.
    return bool(separator) and namespace.isidentifier()
