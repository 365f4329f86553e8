"""What is not the same around two runs, and which of their figures therefore do not compare."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.comparing.metrics import SAME_BATCH
from phaseprof.analyzers.comparing.results import Difference, Level, Metric, Topic
from phaseprof.analyzers.comparing.sample import Sample
from phaseprof.analyzers.counters.counter_results import DeviceState
from phaseprof.analyzers.results import Report
from phaseprof.analyzers.wording import number, percent, sentence
from phaseprof.trace.meta import ModelMeta, ProcessMeta
from phaseprof.work.cost import ModelCost

#: Mean lengths that differ by less are the same workload: a server's clients stop where they stop.
SAME_LENGTH = 0.02
#: What a cache holds may differ by this much before decode steps are of other work: its reads are a part of a step.
_SAME_CONTEXT = 0.05

#: Facts of the plan that say what was asked for; others say how often.
_PLAN = {
    "prompt_tokens": "prompt tokens",
    "new_tokens": "new tokens",
    "batch": "batch",
    "cache_implementation": "cache implementation",
    "max_batched_tokens": "tokens of a step",
    "prefix_caching": "prefix caching",
    "speculate": "speculation",
    "tensor_parallel": "tensor-parallel ranks",
}
_OF_HOW = {"repeats": "repeats", "warmup": "warm-up calls", "seed": "seed"}
#: Shares of a device and of its roofs: they say how well it is used, whatever it works on.
_OF_ANY_WORK = ("mfu", "mbu", "busy_share", "sm_", "tensor_", "dram_")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What two runs share, and what they do not.

    Attributes:
        differences: What is not the same, by topic.
        level: How far they compare. reasons: Why not further, as sentences.
        other_model: Why times are those of another model, as a clause; empty if they are not.
        prompts, outputs, contexts, batches: Why figures that depend on these do not compare; empty if they do.
    """

    differences: tuple[Difference, ...]
    level: Level
    reasons: tuple[str, ...]
    other_model: str
    prompts: str
    outputs: str
    contexts: str
    batches: str

    def why_not(self, metric: Metric) -> str:
        """Why the figure of the two traces does not compare, as a clause; empty if it does."""
        return "" if _is_share(metric) else self.other_work(metric)

    def other_work(self, metric: Metric) -> str:
        """Why the figure is not one of the same work in both, as a clause; empty if it is. Of a share that is no reason
        not to compare it, but neither way is then better."""
        if self.other_model:
            return self.other_model
        name = metric.name.partition(".")[0]
        if metric.group == "requests":
            if name in ("ttft_ms", "queue_ms"):
                return self.prompts or self.batches
            if name == "e2e_ms":
                return self.prompts or self.outputs or self.batches
            return self.contexts or self.batches
        by_batch = metric.batch is not None or metric.name == SAME_BATCH
        batches = "" if by_batch else self.batches
        of_phase = self.contexts if metric.group == "decode" else self.prompts
        return of_phase or batches


def _is_share(metric: Metric) -> bool:
    return any(metric.name.startswith(start) for start in _OF_ANY_WORK)


def surroundings(a: Sample, b: Sample) -> Surroundings:
    """Compare what two traces say of their runs."""
    differences = [
        *_models(a, b),
        *_workloads(a, b),
        *_software(a.metas, b.metas),
        *_machines(a, b),
        *_commands(a, b),
    ]
    other_model = _other_model(a, b)
    prompts, outputs, contexts = _lengths(a, b)
    batches = _batches(a.report, b.report)
    reasons = []
    if other_model:
        reasons.append(
            f"These are two models: {other_model}. Times, latencies and rates are not those of the same work, and only "
            "shares of the roofs and of the device are compared"
        )
    else:
        if prompts or outputs:
            reasons.append(
                f"These are two workloads: {prompts or outputs}. What depends on it is not compared"
            )
        if batches:
            reasons.append(
                f"These are two workloads: {batches}. Only batch sizes that both ran are compared"
            )
    level = Level.SHARES if other_model else Level.PART if reasons else Level.ALL
    return Surroundings(
        differences=tuple(differences),
        level=level,
        reasons=tuple(sentence(reason) for reason in reasons),
        other_model=other_model,
        prompts=prompts,
        outputs=outputs,
        contexts=contexts,
        batches=batches,
    )


# --- the model ------------------------------------------------------------------------------------


def model_of(sample: Sample) -> ModelMeta | None:
    """What the trace says of the model that its report is about."""
    found = [m for meta in sample.metas for m in meta.models if m.model_id == sample.model_id]
    return next((each for each in found if each.cost is not None), found[0] if found else None)


def _models(a: Sample, b: Sample) -> Iterator[Difference]:
    yield from _differ(Topic.MODEL, "model", a.report.facts.model, b.report.facts.model)
    one, other = model_of(a), model_of(b)
    if one is None or other is None:
        return
    for topic, what, x, y in (
        (Topic.MODEL, "model class", one.class_name, other.class_name),
        (
            Topic.SETUP,
            "attention implementation",
            one.attn_implementation or "",
            other.attn_implementation or "",
        ),
        (Topic.SETUP, "cache", one.cache_class or "", other.cache_class or ""),
        (Topic.SETUP, "quantization", one.quantization or "", other.quantization or ""),
        (
            Topic.SETUP,
            "tensor-parallel ranks",
            str(len(one.tensor_ranks) or 1),
            str(len(other.tensor_ranks) or 1),
        ),
        (Topic.SETUP, "devices of the model", str(one.devices), str(other.devices)),
    ):
        yield from _differ(topic, what, x, y)
    facts = a.report.facts, b.report.facts
    yield from _differ(Topic.SETUP, "dtype", facts[0].dtype, facts[1].dtype)
    if one.cost is None or other.cost is None:
        return
    yield from _differ(
        Topic.MODEL, "parameters", f"{one.cost.parameters:,}", f"{other.cost.parameters:,}"
    )
    if one.cost.parameters == other.cost.parameters:
        yield from _differ(
            Topic.SETUP,
            "bytes of the weights",
            f"{one.cost.parameter_bytes:,}",
            f"{other.cost.parameter_bytes:,}",
        )


def _other_model(a: Sample, b: Sample) -> str:
    """Why two models are not one, as a clause: their structure where it is known, else their name."""
    one, other = model_of(a), model_of(b)
    names = f"{a.report.facts.model or 'a model'} and {b.report.facts.model or 'a model'}"
    if one is None or other is None or one.cost is None or other.cost is None:
        same = a.report.facts.model == b.report.facts.model
        return "" if same else f"{names}, of which the structure is not known"
    if one.cost.parameters != other.cost.parameters:
        return f"{names} have {one.cost.parameters:,} and {other.cost.parameters:,} parameters"
    if _shape(one.cost) != _shape(other.cost):
        return f"{names} have as many parameters, and their layers differ"
    return ""


def _shape(cost: ModelCost) -> tuple[object, ...]:
    """The form of a model, whatever its weights are stored in."""
    return tuple(
        (g.layers, g.query_heads, g.kv_heads, g.qk_head_dim, g.v_head_dim, g.window_tokens)
        for g in cost.attention
    )


# --- the workload ---------------------------------------------------------------------------------


def _workloads(a: Sample, b: Sample) -> Iterator[Difference]:
    plans = a.report.facts.workload, b.report.facts.workload
    for key, what in {**_PLAN, **_OF_HOW}.items():
        topic = Topic.WORKLOAD if key in _PLAN else Topic.SETUP
        if plans[0].get(key) != plans[1].get(key):
            yield Difference(topic, what, _value(plans[0], key), _value(plans[1], key))
    if not (plans[0] and plans[1]) and a.requests is not None and b.requests is not None:
        for what, one, other in (
            ("mean prompt tokens", a.requests.prompt_tokens, b.requests.prompt_tokens),
            ("mean output tokens", a.requests.output_tokens, b.requests.output_tokens),
        ):
            if _apart(one, other) > SAME_LENGTH:
                yield Difference(Topic.WORKLOAD, what, number(one), number(other))


def _value(plan: Mapping[str, object], key: str) -> str:
    value = plan.get(key)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value)
    return "" if value is None else str(value)


def _lengths(a: Sample, b: Sample) -> tuple[str, str, str]:
    """Why prompts, outputs and what the cache holds are not the same, as clauses; empty where they are."""
    one, other = a.requests, b.requests
    if one is None or other is None:
        return "", "", ""
    prompts = outputs = contexts = ""
    if _apart(one.prompt_tokens, other.prompt_tokens) > SAME_LENGTH:
        prompts = f"prompts of {_tokens(one.prompt_tokens)} and of {_tokens(other.prompt_tokens)}"
    if _apart(one.output_tokens, other.output_tokens) > SAME_LENGTH:
        outputs = f"outputs of {_tokens(one.output_tokens)} and of {_tokens(other.output_tokens)}"
    # Plans of several lengths each may have the same mean.
    plans = a.report.facts.workload, b.report.facts.workload
    prompts = prompts or _asked(plans, "prompt_tokens", "prompts")
    outputs = outputs or _asked(plans, "new_tokens", "outputs")
    held = [each.prompt_tokens + each.output_tokens / 2 for each in (one, other)]
    if _apart(*held) > _SAME_CONTEXT:
        contexts = f"decode steps over {_tokens(held[0])} and over {_tokens(held[1])} in the cache"
    if any(isinstance(plan.get("prompt_tokens"), list) for plan in plans) and prompts:
        contexts = contexts or prompts
    return prompts, outputs, contexts


def _asked(plans: Sequence[Mapping[str, object]], key: str, what: str) -> str:
    """Why the lengths that two plans go through are not the same, as a clause; empty if they are."""
    one, other = (plan.get(key) for plan in plans)
    if one is None or other is None or not (isinstance(one, list) or isinstance(other, list)):
        return ""
    lengths = [sorted(each) if isinstance(each, list) else [each] for each in (one, other)]
    if lengths[0] == lengths[1]:
        return ""
    told = [", ".join(map(str, each)) for each in lengths]
    return f"{what} of {told[0]} tokens and of {told[1]} tokens were asked for"


def _tokens(mean: float) -> str:
    return f"{number(round(mean, 1))} token{'' if mean == 1 else 's'}"


def _batches(a: Report, b: Report) -> str:
    one, other = (_batch_list(each.facts.workload) for each in (a, b))
    if one is None or other is None or sorted(one) == sorted(other):
        return ""
    return f"batch {', '.join(map(str, one))} and batch {', '.join(map(str, other))} were asked for"


def _batch_list(workload: Mapping[str, object]) -> Sequence[int] | None:
    found = workload.get("batch")
    return found if isinstance(found, (list, tuple)) and found else None


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(one, other) if max(one, other) else 0.0


# --- software, machine, command -------------------------------------------------------------------


def _software(a: Sequence[ProcessMeta], b: Sequence[ProcessMeta]) -> Iterator[Difference]:
    one, other = _versions(a), _versions(b)
    for package in sorted({*one, *other}, key=lambda name: (name != "phaseprof", name)):
        yield from _differ(Topic.SOFTWARE, package, one.get(package, ""), other.get(package, ""))


def _versions(metas: Sequence[ProcessMeta]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for meta in metas:
        for package, version in {**meta.versions, "phaseprof": meta.phaseprof}.items():
            if version not in found.setdefault(package, []):
                found[package].append(version)
    return {package: ", ".join(sorted(versions)) for package, versions in found.items()}


def _machines(a: Sample, b: Sample) -> Iterator[Difference]:
    one, other = a.report.facts.device, b.report.facts.device
    if one is not None and other is not None:
        yield from _differ(Topic.MACHINE, "device", one.name, other.name)
        for what, x, y in (
            ("cores of the device", one.cores, other.cores),
            ("threads", one.threads, other.threads),
        ):
            yield from _differ(Topic.MACHINE, what, _text(x), _text(y))
        if one.name == other.name and one.key != other.key:
            yield from _keys(one.key, other.key)
        if one.uuid and other.uuid and one.uuid != other.uuid and one.name == other.name:
            yield Difference(Topic.MACHINE, "board of the same kind", one.uuid, other.uuid)
    elif one is not other:
        yield from _differ(
            Topic.MACHINE,
            "device",
            "" if one is None else one.name,
            "" if other is None else other.name,
        )
    yield from _differ(Topic.MACHINE, "host", _hosts(a.metas), _hosts(b.metas))
    yield from _differ(Topic.MACHINE, "ranks", str(a.report.facts.ranks), str(b.report.facts.ranks))
    yield from _clocks(a.report.devices, b.report.devices)


def _keys(one: str, other: str) -> Iterator[Difference]:
    """What of a device's identity differs (driver, power limit, precision of matrix products, versions)."""
    parts = set(one.split("|")), set(other.split("|"))
    mine, theirs = (
        ", ".join(sorted(each for each in own if not each.startswith(("torch=", "threads="))))
        for own in (parts[0] - parts[1], parts[1] - parts[0])
    )
    yield from _differ(Topic.MACHINE, "setting of the device", mine, theirs)


def _clocks(one: Sequence[DeviceState], other: Sequence[DeviceState]) -> Iterator[Difference]:
    """Median clocks and what held them down, where both were sampled: a difference of clocks is one of speed."""
    for x, y in zip(one, other, strict=False):
        for what, p, q in (
            ("SM clock", x.sm_clock_hz, y.sm_clock_hz),
            ("memory clock", x.memory_clock_hz, y.memory_clock_hz),
        ):
            if p is not None and q is not None and _apart(p.median, q.median) > 0.01:
                yield Difference(
                    Topic.MACHINE, what, f"{p.median / 1e6:,.0f} MHz", f"{q.median / 1e6:,.0f} MHz"
                )
        held = _throttled(x), _throttled(y)
        if held[0] != held[1]:
            yield Difference(Topic.MACHINE, "clocks held down", *held)


def _throttled(state: DeviceState) -> str:
    found = [
        f"{t.name} {percent(t.share)}" for t in state.throttle or () if t.slows and t.share > 0.1
    ]
    return ", ".join(found) or ("no" if state.throttle is not None else "")


def _hosts(metas: Sequence[ProcessMeta]) -> str:
    return ", ".join(sorted({meta.host.name for meta in metas if meta.host is not None}))


def _commands(a: Sample, b: Sample) -> Iterator[Difference]:
    one, other = a.report.facts.command, b.report.facts.command
    shared = [_without_output(one), _without_output(other)]
    if shared[0] != shared[1]:
        yield Difference(Topic.COMMAND, "command", shlex.join(one), shlex.join(other))
    # Its version is among those of packages.
    engines = [each.report.facts.engine.partition(" ")[0] for each in (a, b)]
    yield from _differ(Topic.SOFTWARE, "engine", *engines)


def _without_output(command: Sequence[str]) -> list[str]:
    """The command without the place of its trace, which differs between any two runs."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip:
            skip = False
        elif word in ("-o", "--output"):
            skip = True
        elif not word.startswith("--output="):
            kept.append(word)
    return kept


def _differ(topic: Topic, what: str, one: str, other: str) -> Iterator[Difference]:
    if one != other:
        yield Difference(topic, what, one, other)


def _text(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
