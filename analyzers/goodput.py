"""Goodput: how many requests met their service-level objectives, and at which rate.

A request is good if it meets every objective. One that has no figure for an objective (a single token has no time per
output token) meets it. Only requests that ended by themselves are judged: one that its client gave up, or that still
runs, has no final figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, named, names, scalar, total, unsteady
from phaseprof.analyzers.serving import Goodput, Met, Objective
from phaseprof.errors import UsageError
from phaseprof.records import Finish

#: What an objective may be about.
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "e2e": "time from arrival to the end",
    "queue": "time until it was first run",
}
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_OBJECTIVE = re.compile(r"\s*(?P<metric>\w+)\s*=\s*(?P<limit>\d+(?:\.\d+)?)\s*(?P<unit>\w*)\s*")


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Read objectives as they are written on a command line: ``ttft=500ms,tpot=50ms``. A bare number is ms.

    Raises:
        UsageError: If one cannot be read, is of an unknown metric or unit, or comes twice.
    """
    found: dict[str, Objective] = {}
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part)
        scale = _UNITS_MS.get(match["unit"] or "ms") if match else None
        if match is None or scale is None or match["metric"] not in METRICS:
            raise UsageError(
                f"the objective {part.strip()!r} cannot be read.",
                f"Give a limit for each of {', '.join(METRICS)} that matters: --slo ttft=500ms,tpot=50ms.",
            )
        if match["metric"] in found:
            raise UsageError(
                f"there are two objectives for {match['metric']}.", "Give each of them once."
            )
        found[match["metric"]] = Objective(match["metric"], float(match["limit"]) * scale)
    return tuple(found.values())


def goodput(requests: pa.Table, model_id: str, objectives: Sequence[Objective]) -> Goodput | None:
    """How many requests of a model met the objectives; None if none ended by itself.

    Args:
        requests: The `requests` table.
        model_id: Which model.
        objectives: What a request should keep.
    """
    own = requests.filter(named(names(requests, "model_id"), model_id))
    steady = own.filter(pc.invert(unsteady(own)))
    if steady.num_rows == 0:
        steady = own
    ended = named(names(steady, "finish"), Finish.STOP, Finish.LENGTH, Finish.UNKNOWN)
    judged = steady.filter(ended)
    if judged.num_rows == 0:
        return None
    met = [(each, _meets(judged, each)) for each in objectives]
    good = _all(met[0][1], *(flags for _, flags in met[1:]))
    begun, ended_ns = pc.min(column(judged, "arrival_ns")), pc.max(column(judged, "finished_ns"))
    seconds = (ended_ns.as_py() - begun.as_py()) / 1e9
    tokens = total(column(judged.filter(good), "output_tokens"))
    count = _true(good)
    return Goodput(
        requests=judged.num_rows,
        good=count,
        share=count / judged.num_rows,
        per_s=count / seconds if seconds > 0 else None,
        tokens_per_s=tokens / seconds if seconds > 0 else None,
        left_out=steady.num_rows - judged.num_rows,
        each=tuple(Met(each, _true(flags) / judged.num_rows) for each, flags in met),
    )


def _all(first: pa.Array, *others: pa.Array) -> pa.Array:
    """Where all flags are set."""
    for flags in others:
        first = pc.and_(first, flags)
    return first


def _meets(requests: pa.Table, objective: Objective) -> pa.Array:
    if objective.metric == "e2e":
        values = pc.subtract(column(requests, "finished_ns"), column(requests, "arrival_ns"))
    else:
        values = column(requests, f"{objective.metric}_ns")
    limit = scalar(round(objective.limit_ms * 1e6), pa.int64())
    return pc.fill_null(pc.less_equal(values, limit), scalar(True, pa.bool_()))


def _true(flags: pa.Array) -> int:
    return total(pc.cast(flags, pa.int64()))
