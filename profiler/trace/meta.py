"""The meta file of a process: what a reader needs to know besides the tables.

``TRACE/meta/rank-<R>-host-<H>-pid-<P>.json`` is written when recording begins, rewritten (to a temporary name, then
renamed) when a model or a fact is added, and once more at the end with ``complete: true``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from phaseprof.errors import NotMeasured
from phaseprof.work.cost import AttentionCost, ModelCost

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a model ran on.

    Attributes:
        name: What people call it: ``NVIDIA H200`` or the CPU's model name.
        kind: ``cpu`` or ``cuda``.
        index: Its number, as torch counts; 0 for a CPU.
        cores: CPU cores that the process may use; SMs of a GPU.
        threads: Threads torch computes with on a CPU; None for a GPU.
        memory_bytes: Its memory; None if not known.
        key: Identity under which ceilings are cached: everything that they depend on.
        uuid: The driver's name for this very device (``GPU-…`` or ``MIG-…``), as `samples.device` has it; empty for a
            CPU, or if it is not known.
    """

    name: str
    kind: str
    index: int
    cores: int | None
    threads: int | None
    memory_bytes: int | None
    key: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The two roofs of a device for one dtype.

    Attributes:
        device_key: `Device.key` of the device they belong to.
        dtype: As in `ModelCost.dtype`.
        flops_per_s: Dense peak of matrix multiplication.
        bytes_per_s: Memory read bandwidth.
        source: ``measured`` (by `phaseprof calibrate`) or ``datasheet``.
        measured_ns: When, Unix ns; None for a datasheet.
        spread: Half the range of the repeats over their median, the wider one of the two; None for a datasheet.
        reference: Where the figures come from, for people.
        clock_hz: The SM clock at which `flops_per_s` holds; None if it is not known.
    """

    device_key: str
    dtype: str
    flops_per_s: float
    bytes_per_s: float
    source: str
    measured_ns: int | None
    spread: float | None
    reference: str
    clock_hz: float | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """The host of a process.

    Attributes:
        name: Its name in the network.
        clock: Names the monotonic clock: processes with the same one can be compared to the microsecond.
        token: Names the space of process ids: two processes with the same one have different process ids.
    """

    name: str
    clock: str
    token: str


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """One model that was seen.

    Attributes:
        model_id: As in the tables.
        name: What the user calls it (`name_or_path`), or the class name.
        class_name: Class of the module whose call is a pass.
        engine: ``transformers`` or ``vllm``.
        device_key: `Device.key` of the device of its first parameter.
        cost: Its structure; None if it could not be read.
        attn_implementation: ``sdpa``, ``eager``, …, or the backends of an engine; None if not known.
        cache_class: Class of the KV cache first seen; None before. ``BlockPool``: vLLM's.
        tensor_ranks: Ranks that hold a part of each of its layers and make every pass together, this one included;
            empty if its layers are whole.
        quantization: How the engine quantizes its weights; None where they are not, or where the weights tell.
        devices: Devices of this process that its layers lie on; they work one after another.
        device_uuid: `Device.uuid` of the device of its first parameter: boards of one kind have the same key. Empty for
            a CPU, or if it is not known.
    """

    model_id: str
    name: str
    class_name: str
    engine: str
    device_key: str
    cost: ModelCost | None
    attn_implementation: str | None
    cache_class: str | None
    tensor_ranks: tuple[int, ...] = ()
    quantization: str | None = None
    devices: int = 1
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class ClockPair:
    """One reading of both clocks, to place monotonic times on the Unix axis."""

    unix_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class CollectorCost:
    """What a collector that runs in windows took in this process. The passes inside are slower on top of it.

    Attributes:
        name: The collector.
        windows: Windows that it opened.
        passes: Passes inside of them.
        start_ns, stop_ns: Time to open and to close them, on the workload's threads, between passes.
        read_ns: Time to read and to join what they held, on a thread of its own.
        rows: What was read.
    """

    name: str
    windows: int
    passes: int
    start_ns: int
    stop_ns: int
    read_ns: int
    rows: int


@dataclass(frozen=True, slots=True)
class SelfCost:
    """What the profiler itself took in this process.

    Attributes:
        passes: Passes seen.
        hook_ns: Time inside the hooks on the workload's threads, beyond the calls they wrap.
        writer_cpu_ns: CPU time of the background thread that settles and writes.
        setup_ns: Time to read the structure of each model, once at its first sight, outside any pass.
        collectors: What collectors took that run in windows.
        sampler_cpu_ns: CPU time of the thread that samples counters.
    """

    passes: int
    hook_ns: int
    writer_cpu_ns: int
    setup_ns: int = 0
    collectors: tuple[CollectorCost, ...] = ()
    sampler_cpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class ProcessMeta:
    """All that is stored about one process.

    Attributes:
        schema: Version of the tables.
        phaseprof: Version of phaseprof.
        rank: Rank of the process; 0 without ranks.
        pid: Process id.
        command: The command line, as the user gave it.
        versions: Versions of python, torch, transformers, … that were loaded.
        started_ns: Unix ns.
        ended_ns: Unix ns; None while it runs or if it was killed.
        complete: Whether the end was written: False after a kill.
        clock: Readings of both clocks at the begin (and at the end, once there).
        devices: Devices that models ran on.
        models: Models that were seen.
        ceilings: Roofs known for those devices.
        hooks: What was hooked, for the message of an empty run.
        not_measured: What is missing, why, and what would help.
        self_cost: The profiler's own cost; None while it runs.
        workload: Free-form facts that `phaseprof profile` knows about its own run (prompt, new tokens, batch, seed).
        world_size: Processes of the job; None if not known.
        local_rank: Rank among the processes of its host; None if not known.
        rank_source: What said the rank: a variable of the environment, ``torch.distributed``, or nothing.
        restart: How often torchrun had restarted the workers before this process; None if torchrun did not start it.
        host: Where it ran; None in a trace that was written without it.
    """

    schema: int
    phaseprof: str
    rank: int
    pid: int
    command: tuple[str, ...]
    versions: Mapping[str, str]
    started_ns: int
    ended_ns: int | None = None
    complete: bool = False
    clock: tuple[ClockPair, ...] = ()
    devices: tuple[Device, ...] = ()
    models: tuple[ModelMeta, ...] = ()
    ceilings: tuple[Ceilings, ...] = ()
    hooks: tuple[str, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    self_cost: SelfCost | None = None
    workload: Mapping[str, Any] | None = None
    world_size: int | None = None
    local_rank: int | None = None
    rank_source: str = ""
    restart: int | None = None
    host: Host | None = None

    @property
    def host_token(self) -> str:
        """`Host.token`; empty if the host is not known."""
        return "" if self.host is None else self.host.token

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessMeta:
        """The inverse of :meth:`to_json`. Unknown keys of a newer version are ignored.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: If the data is not of that form.
        """
        known = _known(cls, data)
        cost = known.get("self_cost")
        host = known.get("host")
        return cls(
            **{
                **known,
                "command": tuple(known["command"]),
                "clock": _all(ClockPair, known.get("clock", ())),
                "devices": _all(Device, known.get("devices", ())),
                "models": tuple(_model_from_json(m) for m in known.get("models", ())),
                "ceilings": _all(Ceilings, known.get("ceilings", ())),
                "hooks": tuple(known.get("hooks", ())),
                "not_measured": _all(NotMeasured, known.get("not_measured", ())),
                "self_cost": None if cost is None else _self_cost_from_json(cost),
                "host": None if host is None else Host(**_known(Host, host)),
            }
        )


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a dataclass has fields for."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _all(kind: type[_Row], entries: Iterable[Mapping[str, Any]]) -> tuple[_Row, ...]:
    return tuple(kind(**_known(kind, entry)) for entry in entries)


def _model_from_json(data: Mapping[str, Any]) -> ModelMeta:
    known = _known(ModelMeta, data)
    cost = known.get("cost")
    return ModelMeta(
        **{
            **known,
            "cost": None if cost is None else _cost_from_json(cost),
            "tensor_ranks": tuple(known.get("tensor_ranks", ())),
        }
    )


def _self_cost_from_json(data: Mapping[str, Any]) -> SelfCost:
    collectors = _all(CollectorCost, data.get("collectors", ()))
    return SelfCost(**{**_known(SelfCost, data), "collectors": collectors})


def _cost_from_json(data: Mapping[str, Any]) -> ModelCost:
    attention = [_known(AttentionCost, group) for group in data["attention"]]
    return ModelCost.from_json({**_known(ModelCost, data), "attention": attention})
