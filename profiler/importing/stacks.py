"""Steps from calls of Python functions in a recording with stacks, where nothing was announced.

A call says when a step was made, and not what it computed. What tells more, and is marked inferred: that it is made in
transformers' prefill, or after it in the same loop, with a cache or without one.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phaseprof.importing.annotations import outermost, step_of
from phaseprof.importing.forms import Span, Step, StepWork
from phaseprof.phases import Phase, TagSource

#: Why a step that a call shows has no phase.
CALL_ALONE = "a call of a function does not say what it computes"
#: Why a pass after a prefill has none: without a cache it computes the whole sequence again, and one token is new.
NO_CACHE = "no call of a KV cache was recorded, without which a pass computes all tokens again"
#: Why a step of continuous batching has none, whatever the shape of its tokens is.
PACKED = "transformers' continuous batching computes the tokens of all requests in one row"


@dataclass(frozen=True, slots=True)
class _Maker:
    """Functions of which each outermost call is a step.

    Attributes:
        engine: Whose they are.
        pattern: Their names, as profilers write them: ``file.py(line): function``.
    """

    engine: str
    pattern: re.Pattern[str]


def _function(file: str, names: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*[/\\])?{file}\(\d+\): (?:{names})")


#: By engine, the functions that launch one step whole; if one kind is there, those after it of the same engine are
#: parts of it, or only hand it over to another thread.
_MAKERS = (
    _Maker("vLLM", _function(r"worker[/\\]\w*model_runner\.py", "execute_model|_dummy_run")),
    _Maker("vLLM", _function(r"worker[/\\]gpu[/\\]model_runner\.py", "execute_model|_dummy_run")),
    _Maker(
        "SGLang",
        _function(r"managers[/\\]tp_worker\.py", "forward_batch_(?:generation|embedding|idle)"),
    ),
    _Maker("SGLang", _function(r"srt[/\\]model_executor[/\\]model_runner\.py", "forward")),
    _Maker("SGLang", _function(r"managers[/\\]scheduler\.py", "run_batch")),
    _Maker("TensorRT-LLM", _function(r"pyexecutor[/\\]py_executor\.py", "_forward_step")),
)
#: Whole models of transformers and of those who build on it; within their steps are those of their layers.
_MODEL = re.compile(
    r"(?:.*[/\\])?modeling_\w+\.py\(\d+\): forward"
    r"|nn\.Module: \w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel)_\d+"
)
_PREFILL = _function(r"generation[/\\]utils\.py", "_prefill")
#: Loops that decode a token a pass. Assisted decoding is none of them.
_LOOP = _function(r"generation[/\\]utils\.py", "_sample|_beam_search")
#: What is called of a cache when one is made or asked, in each pass: calls of it show that there is one.
_CACHE = _function(r"transformers[/\\]cache_utils\.py", "__init__|get_seq_length")
#: A step of continuous batching, around the call of its model.
_PACKED = _function(
    r"generation[/\\]continuous_batching[/\\]\w+\.py",
    "_generation_step|_forward_process_and_sample",
)
_DUMMY = re.compile(r".*: _dummy_run")
_KINDS = (
    *((f"maker {place}", maker.pattern) for place, maker in enumerate(_MAKERS)),
    ("model", _MODEL),
    ("prefill", _PREFILL),
    ("loop", _LOOP),
    ("cache", _CACHE),
    ("packed", _PACKED),
)


@lru_cache(maxsize=4096)
def function_kind(name: str) -> str:
    """What a Python function is of those by which steps are known; empty if it is none.

    Of calls of one kind within one another on a thread only the outermost counts.
    """
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), "")


def steps_of_calls(functions: Sequence[Span]) -> tuple[Step, ...]:
    """The steps that calls of an engine's functions, or of a model's, show, by begin.

    Args:
        functions: Calls of functions that have a `function_kind`.
    """
    of_engines: set[str] = set()
    found: list[Step] = []
    for maker in _MAKERS:
        calls = _calls(functions, maker.pattern.fullmatch)
        if maker.engine in of_engines or not calls:
            continue
        # vLLM's two runners are never in one process, so that the first kind that is there is the only one.
        of_engines.add(maker.engine)
        found += [
            step_of(span, _engine_work(span), TagSource.INFERRED) for span in outermost(calls)
        ]
    if found:
        return tuple(sorted(found, key=_start_of))
    return _steps_of_models(functions)


def _engine_work(span: Span) -> StepWork:
    if _DUMMY.fullmatch(span.name):
        return StepWork(Phase.OTHER)
    return StepWork(Phase.OTHER, unknown=CALL_ALONE)


def _steps_of_models(functions: Sequence[Span]) -> tuple[Step, ...]:
    """The passes of models. transformers prefills in a function of its own (since 5.0) and decodes in the loop around
    it. A loop without one is of an older version, or had begun before the recording: its passes stay unknown."""
    models = outermost(_calls(functions, _MODEL.fullmatch))
    prefills = _Calls(_calls(functions, _PREFILL.fullmatch))
    loops = _Calls(_calls(functions, _LOOP.fullmatch))
    caches = _Calls(_calls(functions, _CACHE.fullmatch))
    packed = _Calls(_calls(functions, _PACKED.fullmatch))
    found: list[Step] = []
    for span in models:
        work, how = StepWork(Phase.OTHER, unknown=CALL_ALONE), ""
        loop = loops.around(span)
        if packed.around(span) is not None:
            work = StepWork(Phase.OTHER, unknown=PACKED)
        elif prefills.around(span) is not None:
            work, how = StepWork(Phase.PREFILL), ", in the prefill of generate"
        elif loop is not None and prefills.within(loop):
            # A cache is made in front of the loop, after the one before it.
            begin = loops.end_before(loop)
            if caches.any_between(loop, begin, loop.end_ns):
                work, how = StepWork(Phase.DECODE), ", after the prefill of generate"
            else:
                work = StepWork(Phase.OTHER, unknown=NO_CACHE)
        found.append(step_of(span, work, TagSource.INFERRED, name=span.name + how))
    return tuple(found)


class _Calls:
    """Calls of one function, by thread, to find the one around a moment."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._threads: dict[tuple[int, int], list[Span]] = {}
        for span in outermost(spans):
            self._threads.setdefault((span.process, span.thread_id), []).append(span)

    def around(self, span: Span) -> Span | None:
        """The call that the span lies in."""
        own = self._threads.get((span.process, span.thread_id), [])
        place = bisect.bisect_right(own, span.start_ns, key=_start_of) - 1
        return own[place] if place >= 0 and span.end_ns <= own[place].end_ns else None

    def within(self, span: Span) -> bool:
        """Whether a call lies in the span."""
        own = self._threads.get((span.process, span.thread_id), [])
        place = bisect.bisect_left(own, span.start_ns, key=_start_of)
        return place < len(own) and own[place].end_ns <= span.end_ns

    def any_between(self, span: Span, start_ns: int, end_ns: int) -> bool:
        """Whether a call on the thread of the span begins between two moments."""
        own = self._threads.get((span.process, span.thread_id), [])
        place = bisect.bisect_left(own, start_ns, key=_start_of)
        return place < len(own) and own[place].start_ns < end_ns

    def end_before(self, span: Span) -> int:
        """When the call before the span, which is one of these, ended; before all times if there is none."""
        own = self._threads.get((span.process, span.thread_id), [])
        place = bisect.bisect_left(own, span.start_ns, key=_start_of) - 1
        return own[place].end_ns if place >= 0 else -(1 << 63)


def _calls(functions: Iterable[Span], wanted: Callable[[str], re.Match[str] | None]) -> list[Span]:
    names: dict[str, bool] = {}
    found: list[Span] = []
    for span in functions:
        if span.name not in names:
            names[span.name] = wanted(span.name) is not None
        if names[span.name]:
            found.append(span)
    return found


def _start_of(each: Span | Step) -> int:
    return each.start_ns
