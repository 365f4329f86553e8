"""How a run was measured: commands, versions, devices, hosts and clocks, from what each process wrote of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phaseprof.trace.meta import Ceilings, Device, ModelMeta, ProcessMeta


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model that was seen.

    Attributes:
        name, class_name, attention, cache_class, quantization: As in `ModelMeta`; empty if not known.
        parameters: How many; None if its structure could not be read. parameter_bytes: Their size.
    """

    name: str
    class_name: str
    attention: str
    cache_class: str
    quantization: str
    parameters: int | None
    parameter_bytes: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a run; what several processes share stands once.

    Attributes:
        commands: Command lines. versions: Pairs of package and version; a package with several has several pairs.
        phaseprof: Versions of phaseprof that recorded it. schemas: Versions of its tables.
        hosts: Names of the hosts. processes: How many. cut_off: Those of them whose end is missing.
        started_ns: Begin of the first process, Unix ns; None without processes. ended_ns: End of the last one; None
            where one has none.
        devices: All that were recorded. models: Likewise.
        ceilings: All roofs that are in the trace.
        hooks: Where passes were seen. workload: What a process was told to run, as pairs of words.
    """

    commands: tuple[tuple[str, ...], ...]
    versions: tuple[tuple[str, str], ...]
    phaseprof: tuple[str, ...]
    schemas: tuple[int, ...]
    hosts: tuple[str, ...]
    processes: int
    cut_off: int
    started_ns: int | None
    ended_ns: int | None
    devices: tuple[Device, ...]
    models: tuple[ModelFacts, ...]
    ceilings: tuple[Ceilings, ...]
    hooks: tuple[str, ...]
    workload: tuple[tuple[str, str], ...]


def setting_of(metas: Iterable[ProcessMeta]) -> Setting:
    """The setting of the processes of a trace."""
    known = tuple(metas)
    ends = [meta.ended_ns for meta in known]
    return Setting(
        commands=tuple(dict.fromkeys(meta.command for meta in known if meta.command)),
        versions=tuple(
            sorted({(str(k), str(v)) for meta in known for k, v in meta.versions.items()})
        ),
        phaseprof=tuple(sorted({meta.phaseprof for meta in known})),
        schemas=tuple(sorted({meta.schema for meta in known})),
        hosts=tuple(sorted({meta.host.name for meta in known if meta.host is not None})),
        processes=len(known),
        cut_off=sum(not meta.complete for meta in known),
        started_ns=min((meta.started_ns for meta in known), default=None),
        ended_ns=max((end for end in ends if end is not None), default=None)
        if None not in ends
        else None,
        devices=tuple({(d.key, d.uuid, d.index): d for m in known for d in m.devices}.values()),
        models=tuple(dict.fromkeys(_facts(model) for meta in known for model in meta.models)),
        ceilings=tuple(dict.fromkeys(roof for meta in known for roof in meta.ceilings)),
        hooks=tuple(dict.fromkeys(hook for meta in known for hook in meta.hooks)),
        workload=tuple(
            dict.fromkeys(
                (str(key), _words(value))
                for meta in known
                for key, value in (meta.workload or {}).items()
            )
        ),
    )


def _facts(model: ModelMeta) -> ModelFacts:
    cost = model.cost
    return ModelFacts(
        name=model.name,
        class_name=model.class_name,
        attention=model.attn_implementation or "",
        cache_class=model.cache_class or "",
        quantization=model.quantization or "",
        parameters=None if cost is None else cost.parameters,
        parameter_bytes=None if cost is None else cost.parameter_bytes,
    )


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_words(each) for each in value)
    return str(value)
