"""How a serving engine served its requests: the analyses of its steps and of its requests, and what they lack."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.engine import engine_figures
from phaseprof.analyzers.goodput import goodput
from phaseprof.analyzers.interference import interference
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.serving import EngineFigures, Goodput, Interference, Objective
from phaseprof.analyzers.wording import count, percent
from phaseprof.errors import NotMeasured
from phaseprof.phases import Phase
from phaseprof.trace.reader import Trace


@dataclass(frozen=True, slots=True)
class Served:
    """As in `Report`.

    Attributes:
        engine, interference, goodput: None where there is none.
        lacking: What could not be told.
    """

    engine: EngineFigures | None
    interference: Interference | None
    goodput: Goodput | None
    lacking: tuple[NotMeasured, ...]


def analyze_serving(
    trace: Trace,
    requests: pa.Table,
    primary: Primary,
    phases: Collection[str],
    objectives: Sequence[Objective],
) -> Served:
    """The figures of a serving engine. Goodput is told of any requests.

    Args:
        trace: The trace.
        requests: Its requests, each once.
        primary: The model that the report is about.
        phases: The phases that it has.
        objectives: What a request should keep; empty for no goodput.
    """
    engine = engine_figures(trace.steps, trace.passes, requests, primary)
    lost = None if engine is None else interference(requests, trace.passes, primary)
    good = goodput(requests, primary.model_id, objectives) if objectives else None
    lacking = []
    if engine is not None and lost is None and Phase.MIXED in phases:
        lacking.append(
            NotMeasured(
                "decode time lost to the prefills of others",
                "no step was of decode alone, so that nothing tells what a token takes without them",
            )
        )
    if objectives and good is None:
        lacking.append(NotMeasured("goodput", "no request ended by itself"))
    return Served(engine, lost, good, tuple(lacking))


def serving_sentences(served: Served | None) -> Iterator[str]:
    """What a serving engine loses beside its passes, for the answer."""
    if served is None or served.engine is None:
        return
    engine, lost = served.engine, served.interference
    if engine.overhead_share >= thresholds.ENGINE_OVERHEAD.value:
        yield (
            f"In {percent(engine.overhead_share)} of the time no step executes though a request is there: the "
            "scheduler, and what lies between steps, take it."
        )
    usage = engine.kv_usage_p50
    if usage is not None and usage >= thresholds.KV_FULL.value and engine.waiting_p50:
        again = ""
        if engine.preemptions:
            again = (
                f", and after {count(engine.preemptions, 'preemption')} tokens were computed again"
            )
        yield f"Requests wait for the KV cache: in half of the steps {percent(usage)} of it is in use{again}."
    if lost is not None and lost.lost_share >= thresholds.INTERFERENCE.value:
        yield (
            f"{percent(lost.lost_share)} of the decode time of requests is lost to the prompts of others (modelled): "
            "a smaller token budget a step would bound what a token waits for them."
        )
