"""What all tests share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files that differ, and fail"
    )


def _is_ours(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "hooks/" in code.co_filename


def _vllm_hooks_left() -> list[str]:
    """The methods of vLLM's classes that are still wrapped, whichever they are. The one by which our plugin is reached
    sleeps there as long as the process lives (docs/vllm.md)."""
    ours = sys.modules.get("phaseprof.vllm")
    if ours is None or ours.__file__ is None:
        return []
    folder = str(Path(ours.__file__).parent)
    sleeping = getattr(sys.modules.get("phaseprof.vllm.plugin"), "phaseprof_session", None)
    kinds = {
        kind
        for name, module in tuple(sys.modules.items())
        if name.startswith("vllm.v1")
        for kind in tuple(vars(module).values())
        if isinstance(kind, type) and kind.__module__.startswith("vllm")
    }
    return [
        f"{kind.__name__}.{name} is wrapped"
        for kind in kinds
        for name, value in vars(kind).items()
        if getattr(getattr(value, "__code__", None), "co_filename", "").startswith(folder)
        and value is not sleeping
    ]


def _only_the_plugin_waits() -> bool:
    """Whether all that is awaited are the two modules of vLLM in which our plugin sleeps."""
    plugin = sys.modules.get("phaseprof.vllm.plugin")
    awaited = set(sys.modules["phaseprof.hooks.imports"]._waiting)
    return plugin is not None and awaited <= {module for module, _ in plugin._REACHED}


def _hooks_left() -> list[str]:
    """What of phaseprof is still attached to this process, in words."""
    left = []
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None and "__call__" in vars(modeling.PreTrainedModel):
        left.append("PreTrainedModel.__call__ is wrapped")
    generation = sys.modules.get("transformers.generation.utils")
    if generation is not None:
        for name, value in vars(generation.GenerationMixin).items():
            if _is_ours(value):
                left.append(f"GenerationMixin.{name} is wrapped")
        left += [
            f"{owner.__name__}.__call__ is wrapped"
            for owner in (generation.LogitsProcessorList, generation.StoppingCriteriaList)
            if _is_ours(vars(owner)["__call__"])
        ]
    batching = sys.modules.get("transformers.generation.continuous_batching.continuous_api")
    for owner in ("ContinuousBatchProcessor", "Scheduler", "ModelRunner"):
        for name, value in vars(getattr(batching, owner, object)).items():
            if _is_ours(value):
                left.append(f"{owner}.{name} is wrapped")
    left += _vllm_hooks_left()
    session = sys.modules.get("phaseprof.session")
    if session is not None:
        if session.current() is not None:
            left.append("a session runs")
        if session._flags.warmups or session._flags.profiled or session._state.here.override:
            left.append("a flag of the session is set")
    left += [
        f"{type(finder).__module__} waits on sys.meta_path"
        for finder in sys.meta_path
        if type(finder).__module__.startswith("phaseprof") and not _only_the_plugin_waits()
    ]
    left += [
        f"thread {thread.name} runs"
        for thread in threading.enumerate()
        if thread.name.startswith("phaseprof")
    ]
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which a hook, a session or a thread of ours is still there."""
    assert _hooks_left() == []
    yield
    assert _hooks_left() == []
