"""The steps of real recordings of other people, by each kind of evidence that they hold."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phaseprof.importing.forms import LookedUp, Marker, Span
from phaseprof.importing.inferred import steps_of_kernels, wants_marker
from phaseprof.importing.stacks import function_kind, steps_of_calls
from phaseprof.importing.steps import Evidence, choose
from phaseprof.phases import Phase

_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@dataclass
class _Recorded:
    """A recording as a plain `json.load` gives it; no code under test reads it."""

    annotations: list[Span] = field(default_factory=list)
    functions: list[Span] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    lookups: list[LookedUp] = field(default_factory=list)


@cache
def _recorded(name: str) -> _Recorded:
    path = _TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"the recordings of other people are not here ({path.name})")
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    found = _Recorded()
    launches: dict[int, tuple[int, int]] = {}
    for event in events:
        args, start, end = event.get("args") or {}, *_times(event)
        span = (event["name"], start, end, event["tid"], event["pid"])
        match event.get("cat"):
            case "user_annotation":
                found.annotations.append(Span(*span))
            case "python_function" if function_kind(event["name"]):
                found.functions.append(Span(*span))
            case "cuda_runtime" | "cuda_driver" if (
                "correlation" in args and "aunch" in event["name"]
            ):
                launches.setdefault(args["correlation"], (start, event["tid"]))
            case "cpu_op" if event["name"] == "aten::embedding":
                found.lookups.append(LookedUp(start, event["tid"], tuple(args["Input Dims"][1])))
    for event in events:
        if event.get("cat") == "kernel" and wants_marker(event["name"]):
            found.markers.append(_marker(event, launches))
    return found


def _times(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _marker(event: dict[str, Any], launches: dict[int, tuple[int, int]]) -> Marker:
    args = event["args"]
    launch = launches.get(args["correlation"])
    start, end = _times(event)
    return Marker(
        event["name"],
        None if launch is None else launch[0],
        None if launch is None else launch[1],
        start,
        end,
        args["device"],
        args["stream"],
        (args["grid"][0], args["grid"][1], args["grid"][2]) if "grid" in args else None,
        args["correlation"],
    )


def _asked() -> list[Marker]:
    raise AssertionError("kernels are not needed")


@pytest.mark.parametrize(
    ("name", "phase", "prefill", "decode", "context", "pairs"),
    [
        ("vllm-b200-tp8-prefill", Phase.PREFILL, (1, 888), (0, 0), None, None),
        ("vllm-mi300x-decode-full-graph", Phase.DECODE, (0, 0), (32, 32), 55086, 55086),
        # 15 prompts of 1024 tokens on nothing: 1 + 2 + … + 1024 pairs each.
        ("sglang-mi300x-extend", Phase.PREFILL, (15, 15360), (0, 0), 15360, 15 * 1024 * 1025 // 2),
    ],
)
def test_announced_steps(
    name: str,
    phase: Phase,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    context: int | None,
    pairs: int | None,
) -> None:
    recorded = _recorded(name)
    chosen = choose(recorded.annotations, recorded.functions, _asked, {})
    assert chosen.evidence is Evidence.ANNOTATIONS
    assert not chosen.unknown
    (step,) = chosen.steps
    work = step.work
    assert work.phase is phase
    assert (work.prefill_sequences, work.prefill_tokens) == prefill
    assert (work.decode_sequences, work.decode_tokens) == decode
    assert (work.context_tokens, work.attention_pairs) == (context, pairs)
    # Calls were recorded as well, and show the same step.
    assert recorded.functions
    assert chosen.disagreements == ()


@pytest.mark.parametrize(
    "name", ["vllm-b200-tp8-prefill", "vllm-mi300x-decode-full-graph", "sglang-mi300x-extend"]
)
def test_calls_show_the_step_that_was_announced(name: str) -> None:
    recorded = _recorded(name)
    announced = choose(recorded.annotations, (), _asked, {}).steps[0]
    (step,) = steps_of_calls(recorded.functions)
    assert announced.start_ns < step.end_ns and step.start_ns < announced.end_ns
    assert step.thread_id == announced.thread_id


def test_forward_of_a_model_is_a_prefill_by_its_shape() -> None:
    recorded = _recorded("hf-h100-qwen-forward")
    chosen = choose(
        recorded.annotations, recorded.functions, lambda: recorded.markers, {}, recorded.lookups
    )
    assert chosen.evidence is Evidence.CALLS
    (step,) = chosen.steps
    assert (step.work.phase, step.work.prefill_sequences) == (Phase.PREFILL, 16)
    # Without shapes it is not guessed.
    (bare,) = choose((), recorded.functions, lambda: recorded.markers, {}).steps
    assert bare.work.phase is Phase.OTHER and bare.work.unknown


def test_grids_of_cache_writes_are_the_tokens() -> None:
    inferred = steps_of_kernels(_recorded("sglang-mi300x-extend").markers)
    assert [step.name.rpartition(": ")[2] for step in inferred.steps] == ["15360 tokens"]


def test_calls_with_kernels_tell_what_was_announced() -> None:
    recorded = _recorded("vllm-b200-tp8-prefill")
    chosen = choose((), recorded.functions, lambda: recorded.markers, {})
    assert chosen.evidence is Evidence.CALLS
    (step,) = chosen.steps
    assert (step.work.phase, step.work.prefill_tokens) == (Phase.PREFILL, 888)


def test_one_step_without_a_sampler_has_no_borders() -> None:
    for name in ("vllm-b200-tp8-prefill", "vllm-mi300x-decode-full-graph"):
        markers = _recorded(name).markers
        chosen = choose((), (), markers.copy, {})
        assert chosen.evidence is Evidence.NONE
        assert "cannot be seen" in chosen.why
