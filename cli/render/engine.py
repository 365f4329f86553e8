"""A serving engine: what it does besides running the model, its load over time, interference, and goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from phaseprof.analyzers.serving import (
    Cause,
    EngineFigures,
    Goodput,
    Interference,
    Objective,
    RequestLoss,
    SlowToken,
)
from phaseprof.cli.render import units
from phaseprof.cli.render.layout import KEY_WIDTH, MARGIN, key_of, keyed

#: Requests that are named, and tokens of each cause.
_NAMED = 3
_NAMED_TOKENS = 2
#: Fewer stretches are no course over time.
_FEW = 6
_LEVELS = "▁▂▃▄▅▆▇█"
_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "queue": "queue"}


def engine_section(engine: EngineFigures | None, width: int) -> list[Text]:
    """The steps of the scheduler and its load; nothing without an engine."""
    if engine is None:
        return []
    parts = [f"schedule {units.duration(engine.schedule_ms.p50)}"]
    if engine.update_ms is not None:
        parts.append(f"update {units.duration(engine.update_ms.p50)}")
    if engine.between_ms is not None:
        parts.append(f"between steps {units.duration(engine.between_ms.p50)}")
    who = f" of {units.count(engine.engines)} engines" if engine.engines > 1 else ""
    text = (
        f"{units.counted(engine.steps, 'step')}{who}; in {units.percent(engine.overhead_share)} of "
        f"{units.duration(engine.busy_ms)} none executes: {', '.join(parts)} (p50)"
    )
    lines = keyed("Engine", [text], width)
    return lines + _load(engine, width)


def _load(engine: EngineFigures, width: int) -> list[Text]:
    """A line each for what runs, what waits and the cache, with its course over time where there is room."""
    stretches = engine.over_time
    rows: list[tuple[str, str, Sequence[float | None], float]] = [
        (
            "Running",
            f"p50 {units.count(engine.running_p50)}, most {units.count(engine.running_max)}",
            [each.running for each in stretches],
            engine.running_max,
        ),
        (
            "Waiting",
            f"p50 {units.count(engine.waiting_p50)}, most {units.count(engine.waiting_max)}",
            [each.waiting for each in stretches],
            engine.waiting_max,
        ),
    ]
    if engine.kv_usage_max is not None:
        used = (
            f"p50 {units.percent(engine.kv_usage_p50)}, most {units.percent(engine.kv_usage_max)}"
        )
        # The whole cache is the scale: what matters is how near it is to full.
        rows.append(("KV cache", used, [each.kv_usage for each in stretches], 1.0))
    room = max(len(text) for _, text, _, _ in rows)
    drawn = len(stretches) >= _FEW and MARGIN + KEY_WIDTH + room + 2 + len(stretches) <= width
    lines = []
    for name, text, values, most in rows:
        line = key_of(name).append(text)
        if drawn:
            line.append(" " * (room - len(text) + 2)).append(course(values, most), style="cyan")
        lines.append(line)
    if engine.preemptions:
        times = "once" if engine.preemptions == 1 else f"{units.count(engine.preemptions)} times"
        said = f"{times}: a running request gave its KV cache up and is computed again"
        lines += keyed("Preempted", [said], width)
    return lines


def course(values: Iterable[float | None], most: float) -> str:
    """Values as bars of eight heights, the highest for ``most``; a space where one is not known."""
    bars = []
    for value in values:
        if value is None:
            bars.append(" ")
            continue
        share = value / most if most else 0.0
        bars.append(_LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)])
    return "".join(bars)


def interference_section(found: Interference | None, width: int) -> list[Text]:
    """Whose prefills slowed whose tokens; nothing where no token was slowed or held back."""
    if found is None or not (found.slowed or found.held):
        return []
    lines: list[Text] = []
    if found.slowed_ms is not None:
        took = f"{units.latency(found.slowed_ms.p50)} (p99 {units.latency(found.slowed_ms.p99)})"
        text = (
            f"{units.count(found.slowed)} of {units.count(found.tokens)} later tokens came from steps that also "
            f"computed another request's prompt: {took} against {units.latency(found.typical_ms)}. "
            f"{units.counted(found.requests, 'request')} lost {units.duration(found.lost_ms)} of decode time to it, "
            f"{units.percent(found.lost_share)} of all (modelled)."
        )
        lines += keyed("Interference", [text], width)
    if found.held:
        text = (
            f"{units.counted(found.held, 'token')} came {units.duration(found.held_ms)} late in all: steps ran without "
            "their requests, which were preempted or left out."
        )
        lines += keyed("Held back", [text], width)
    lines += keyed("Lost most", map(_loss, found.worst[:_NAMED]), width)
    slowest = [
        each
        for cause in Cause
        for each in [token for token in found.slowest if token.cause is cause][:_NAMED_TOKENS]
    ]
    return lines + keyed("Slowest tokens", map(_slow, slowest), width)


def _loss(each: RequestLoss) -> str:
    name = each.client_id or each.request_id
    return (
        f"{name}: {units.duration(each.lost_ms)}, {units.percent(each.share)} of its decode time, in "
        f"{units.counted(each.tokens, 'token')}"
    )


def _slow(each: SlowToken) -> str:
    name = each.client_id or each.request_id
    text = (
        f"{name}, token {units.count(each.token)}: {units.latency(each.itl_ms)}, step {each.step}"
    )
    if each.cause is Cause.HELD:
        return f"{text}, after steps without it"
    by = each.by[0] if each.by else "another request"
    more = f" and {len(each.by) - 1} more" if len(each.by) > 1 else ""
    return f"{text}, with {units.counted(each.prefill_tokens, 'prompt token')} of {by}{more}"


def goodput_section(found: Goodput | None, width: int) -> list[Text]:
    """How many requests met the objectives; nothing if none were given."""
    if found is None:
        return []
    limits = " and ".join(_limit(met.objective, met.share) for met in found.each)
    rate = "" if found.per_s is None else f", {units.rate(found.per_s)} a second,"
    text = f"{units.percent(found.share)} of {units.counted(found.requests, 'request')}{rate} met {limits}."
    if found.tokens_per_s is not None:
        text += f" They got {units.rate(found.tokens_per_s)} output tokens/s."
    if found.left_out:
        text += (
            f" {units.counted(found.left_out, 'request')} that did not end by itself is left out."
        )
        if found.left_out > 1:
            text = text.replace(
                "that did not end by itself is", "that did not end by themselves are"
            )
    return keyed("Goodput", [text], width)


def _limit(objective: Objective, share: float) -> str:
    limit = units.duration(objective.limit_ms)
    return f"{_METRICS[objective.metric]} ≤ {limit} ({units.percent(share)})"
