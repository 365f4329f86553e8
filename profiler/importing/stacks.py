"""Steps from calls of Python functions in a recording with stacks, where nothing was announced.

A call says when a step was made, and not what it computed. What tells more, and is marked inferred: that it is made
in transformers' prefill, or after it in the same loop, and the shape of the tokens that were looked up in it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from phaseprof.importing.annotations import outermost, step_of
from phaseprof.importing.forms import Span, Step, StepWork
from phaseprof.phases import Phase, TagSource

#: Why a step that a call shows has no phase.
CALL_ALONE = "a call of a function does not say what it computes"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A look-up of embeddings, the first thing that a language model computes.

    Attributes:
        start_ns: When the host did it.
        thread_id: Where.
        ids: Shape of the token ids: ``(sequences, tokens)``, or ``(tokens,)`` of a packed step.
    """

    start_ns: int
    thread_id: int
    ids: tuple[int, ...]


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
_DUMMY = re.compile(r".*: _dummy_run")


@lru_cache(maxsize=4096)
def wants_function(name: str) -> bool:
    """Whether a Python function is one of those by which steps are known."""
    return any(
        pattern.fullmatch(name)
        for pattern in (*(maker.pattern for maker in _MAKERS), _MODEL, _PREFILL, _LOOP)
    )


def steps_of_calls(functions: Sequence[Span]) -> tuple[Step, ...]:
    """The steps that calls of an engine's functions, or of a model's, show, by begin.

    Args:
        functions: Calls of functions that `wants_function` wants.
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


def settle_by_lookups(steps: Sequence[Step], lookups: Iterable[Lookup]) -> tuple[Step, ...]:
    """The steps, with what the shape of the first look-up in each of them tells.

    Rows of several tokens are taken for a prompt, and rows of one for a token that is fed back: which is what shapes
    can say, and is wrong for drafts under verification and for a prompt of one token. Of a packed step only the
    number of tokens is known, which says nothing of its phase. Steps whose phase is known stay as they are.
    """
    threads: dict[int, list[Lookup]] = {}
    for lookup in sorted(lookups, key=lambda lookup: lookup.start_ns):
        threads.setdefault(lookup.thread_id, []).append(lookup)
    found: list[Step] = []
    for step in steps:
        own = threads.get(step.thread_id, []) if step.thread_id is not None else []
        place = bisect.bisect_left(own, step.start_ns, key=lambda lookup: lookup.start_ns)
        if step.work.unknown and place < len(own) and own[place].start_ns < step.end_ns:
            step = _with_shape(step, own[place].ids)
        found.append(step)
    return tuple(found)


def _with_shape(step: Step, ids: tuple[int, ...]) -> Step:
    if len(ids) != 2 or 0 in ids:
        return step
    sequences, length = ids
    tokens = sequences * length
    # Padding is among them, so that tokens are not those of the sequences for certain, if there are several.
    counted = tokens if sequences == 1 or length == 1 else None
    if length == 1:
        work = StepWork(Phase.DECODE, 0, 0, sequences, counted)
    else:
        work = StepWork(Phase.PREFILL, sequences, counted, 0, 0)
    return replace(
        step,
        tag_source=TagSource.INFERRED,
        name=f"{step.name}, by the shape of its tokens",
        work=work,
    )


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
    found: list[Step] = []
    for span in models:
        work, how = StepWork(Phase.OTHER, unknown=CALL_ALONE), ""
        loop = loops.around(span)
        if prefills.around(span) is not None:
            work, how = StepWork(Phase.PREFILL), ", in the prefill of generate"
        elif loop is not None and prefills.within(loop):
            work, how = StepWork(Phase.DECODE), ", after the prefill of generate"
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
