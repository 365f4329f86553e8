"""What the names of ranges say of the steps that an engine or a user announced with them.

What a name says is taken as it is said, and nothing is added:

=============================================================  =====================================================
name                                                           engine, and where its source writes it
=============================================================  =====================================================
``execute_context_2(6144)_generation_3(3)``                    vLLM, ``Worker.annotate_profile``: requests, and their
                                                               tokens in brackets
``execute_context_1(888_788544)_generation_0(0)``              the same, with a sum of squares behind the tokens
``execute_6147_context_2(sq…sk…sqsq…sqsk…)_generation_3(…)``   vLLM with ``detailed_trace_annotation``, and SGLang of
                                                               AMD's images: all tokens, then for each kind of request
                                                               the sums of q, k, q q and q k
``execute_new_1_cached_7``                                     vLLM before that: requests that are new to the worker,
                                                               and others
``step[EXTEND bs=15 toks=15360 …]``, ``step[DECODE bs=32 …]``  SGLang, ``build_step_span_name``: ``ForwardMode``, then
                                                               sequences, and the same sums with ``c_`` and ``g_``
``prefill[bs=2 tok=14721 …]``, ``decode[bs=117/128 tok=117]``  ATOM, ``ModelRunner.run_model``
``[Executor] _forward_step 12: 2 ctx reqs, 3 gen reqs``        TensorRT-LLM, ``PyExecutor._forward_step``
``capture_32_FULL``                                            vLLM while it captures a graph
=============================================================  =====================================================

vLLM's context requests are those without an output token, so that the last chunk of a prompt is one of them however
short it is: that cannot be told from counts, and is why its word is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phaseprof.importing.forms import StepWork
from phaseprof.phases import Phase, Role, phase_of

#: Why a step of vLLM before the counts of tokens has no phase.
NOT_SPLIT = (
    "the annotation counts requests that go on without saying whether their prompts are done"
)
#: Numbers with more digits are no counts: nothing that runs computes as much.
_DIGITS = r"(\d{1,18})"
_SUMS = rf"sq{_DIGITS}sk{_DIGITS}sqsq{_DIGITS}sqsk{_DIGITS}"
_VLLM = re.compile(
    rf"execute_context_{_DIGITS}\({_DIGITS}(?:_\d+)*\)_generation_{_DIGITS}\({_DIGITS}(?:_\d+)*\)"
)
_VLLM_SUMS = re.compile(
    rf"execute_{_DIGITS}_context_{_DIGITS}\({_SUMS}\)_generation_{_DIGITS}\({_SUMS}\)"
)
_VLLM_NEW = re.compile(rf"execute_new_{_DIGITS}_cached_{_DIGITS}")
_VLLM_CAPTURE = re.compile(r"capture_\d+_[A-Z_]+")
_SGLANG = re.compile(r"step\[([A-Z][A-Z0-9_]*)((?: \w+=\d{1,18})*)\]")
_ATOM = re.compile(r"(?:eager_)?(prefill|decode)\[bs=(\d{1,18})(?:/\d+)?( .*)?\]", re.DOTALL)
_FIELD = re.compile(r"(?<!\S)(\w+)=(\d{1,18})(?!\S)")
_TRTLLM = re.compile(
    rf"(?:\[Executor\] )?_forward_step(?: \d+)?: {_DIGITS} ctx reqs"
    rf"(?:, {_DIGITS} ctx tokens)?, {_DIGITS} gen reqs\b.*",
    re.DOTALL,
)
#: Ranges within a step of vLLM, in their order (``VLLM_CUSTOM_SCOPES_FOR_PROFILING``, or the same as NVTX).
_PART = re.compile(r"gpu_model_runner: ")
FIRST_PART = "gpu_model_runner: preprocess"
#: Steps of SGLang that compute nothing of a request.
_NOTHING = frozenset({"IDLE", "PREBUILT", "DUMMY_FIRST"})


@dataclass(frozen=True, slots=True)
class Announced:
    """What the name of a range says.

    Attributes:
        work: What the step computes.
        role: Whose it is.
    """

    work: StepWork
    role: Role = Role.TARGET


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the sequences of one kind: of query lengths q, KV lengths k after the step, q q and q k."""

    q: int
    k: int
    qq: int
    qk: int

    @property
    def pairs(self) -> int | None:
        """Causal query x key pairs: the i-th of q queries sees k - q + i keys, and over i = 1..q that is
        q k - (q q - q) / 2. None where the sums cannot be those of whole sequences."""
        twice = 2 * self.qk - self.qq + self.q
        fits = self.q <= self.qq <= self.qk and self.q <= self.k <= self.qk and twice % 2 == 0
        return twice // 2 if fits else None


def announced(name: str) -> Announced | None:
    """What the name of a range announces; None if it announces no step. Never raises."""
    for parse in _PARSERS:
        found = parse(name)
        if found is not None:
            return found
    return None


def is_part(name: str) -> bool:
    """Whether a range is a part of a step of vLLM."""
    return _PART.match(name) is not None


def phase_named(name: str, named: Mapping[str, Phase]) -> Phase | None:
    """The phase that a user gave to a name: the name itself first, then patterns in their order.

    In a pattern ``*`` stands for anything and ``?`` for one character, so that ``decode*`` is a prefix. Brackets
    stand for themselves: names of steps have them.
    """
    if name in named:
        return named[name]
    for pattern, phase in named.items():
        if ("*" in pattern or "?" in pattern) and _pattern(pattern).fullmatch(name):
            return phase
    return None


def _pattern(text: str) -> re.Pattern[str]:
    signs = {"*": ".*", "?": "."}
    return re.compile("".join(signs.get(sign, re.escape(sign)) for sign in text), re.DOTALL)


def as_user_says(name: str, phase: Phase) -> Announced:
    """The phase of the user's, with the counts of the name where it has any of the same phase."""
    own = announced(name)
    if own is not None and own.work.phase is phase:
        return Announced(replace(own.work, unknown=""), own.role)
    return Announced(StepWork(phase))


def _counted(
    context: tuple[int, int | None], generation: tuple[int, int | None], sums: Sequence[_Sums] = ()
) -> StepWork:
    """Work of context and generation requests: how many there are, and their tokens."""
    pairs = [each.pairs for each in sums if each.q]
    return StepWork(
        phase_of(context[0], generation[0]),
        prefill_sequences=context[0],
        prefill_tokens=context[1],
        decode_sequences=generation[0],
        decode_tokens=generation[1],
        context_tokens=sum(each.k for each in sums) if sums else None,
        attention_pairs=sum(pair for pair in pairs if pair is not None)
        if sums and None not in pairs
        else None,
    )


def _vllm(name: str) -> Announced | None:
    match = _VLLM.fullmatch(name)
    if match is None:
        return None
    requests, tokens, going_on, their_tokens = map(int, match.groups())
    return Announced(_counted((requests, tokens), (going_on, their_tokens)))


def _vllm_sums(name: str) -> Announced | None:
    match = _VLLM_SUMS.fullmatch(name)
    if match is None:
        return None
    _, requests, q, k, qq, qk, going_on, *rest = map(int, match.groups())
    context, generation = _Sums(q, k, qq, qk), _Sums(*rest)
    return Announced(
        _counted((requests, context.q), (going_on, generation.q), (context, generation))
    )


def _vllm_new(name: str) -> Announced | None:
    match = _VLLM_NEW.fullmatch(name)
    if match is None:
        return None
    new, others = map(int, match.groups())
    if others:
        return Announced(StepWork(Phase.OTHER, unknown=NOT_SPLIT))
    return Announced(
        StepWork(phase_of(new, 0), prefill_sequences=new, decode_sequences=0, decode_tokens=0)
    )


def _vllm_capture(name: str) -> Announced | None:
    return Announced(StepWork(Phase.OTHER)) if _VLLM_CAPTURE.fullmatch(name) else None


def _sglang(name: str) -> Announced | None:
    match = _SGLANG.fullmatch(name)
    if match is None:
        return None
    mode, fields = match.group(1), _fields(match.group(2))
    sequences = fields.get("bs")
    if mode in ("EXTEND", "SPLIT_PREFILL"):
        return Announced(_sglang_prefill(sequences, fields))
    if mode == "DECODE":
        return Announced(_sglang_decode(sequences, fields))
    if mode in ("TARGET_VERIFY", "VERIFY"):
        # The KV length of the sums is that before the drafts, and drafts may be a tree: neither gives pairs.
        return Announced(_of_decode(sequences, fields.get("g_sq")))
    if mode.startswith("DRAFT_EXTEND"):
        # The draft model takes in what was verified: by the phase of its request, decode.
        return Announced(_of_decode(sequences, fields.get("c_sq")), Role.DRAFT)
    if mode == "MIXED":
        return Announced(_sglang_mixed(fields))
    if mode in _NOTHING:
        return Announced(StepWork(Phase.OTHER))
    return Announced(
        StepWork(Phase.OTHER, unknown=f"SGLang's mode {mode} is neither prefill nor decode")
    )


def _sglang_prefill(sequences: int | None, fields: Mapping[str, int]) -> StepWork:
    tokens = fields.get("toks", fields.get("c_sq"))
    sums = _sums(fields, "c_", tokens)
    return StepWork(
        Phase.PREFILL,
        prefill_sequences=sequences,
        prefill_tokens=tokens,
        decode_sequences=0,
        decode_tokens=0,
        context_tokens=fields.get("c_sk"),
        attention_pairs=None if sums is None else sums.pairs,
    )


def _sglang_decode(sequences: int | None, fields: Mapping[str, int]) -> StepWork:
    tokens = fields.get("g_sq", sequences)
    # More than one token a sequence are alternatives of a draft model, which do not see one another.
    plain = tokens == sequences
    sums = _sums(fields, "g_", tokens) if plain else None
    return StepWork(
        Phase.DECODE,
        prefill_sequences=0,
        prefill_tokens=0,
        decode_sequences=sequences,
        decode_tokens=tokens,
        context_tokens=fields.get("g_sk") if plain else None,
        attention_pairs=None if sums is None else sums.pairs,
    )


def _sglang_mixed(fields: Mapping[str, int]) -> StepWork:
    if not {"c", "g", "c_sq", "g_sq"} <= fields.keys():
        return StepWork(Phase.MIXED)
    context = _sums(fields, "c_", fields["c_sq"])
    generation = _sums(fields, "g_", fields["g_sq"])
    sums = () if context is None or generation is None else (context, generation)
    work = _counted((fields["c"], fields["c_sq"]), (fields["g"], fields["g_sq"]), sums)
    # It counts requests of one token as generation: without any, none decodes. Where all are of one token, one of
    # them is a prompt or the step would not be mixed, and which is not said.
    if fields["c"] or not fields["g"]:
        return work
    return StepWork(
        Phase.MIXED,
        context_tokens=work.context_tokens,
        attention_pairs=work.attention_pairs,
    )


def _of_decode(sequences: int | None, tokens: int | None) -> StepWork:
    return StepWork(
        Phase.DECODE,
        prefill_sequences=0,
        prefill_tokens=0,
        decode_sequences=sequences,
        decode_tokens=tokens,
    )


def _atom(name: str) -> Announced | None:
    match = _ATOM.fullmatch(name)
    if match is None:
        return None
    sequences, fields = int(match.group(2)), _fields(match.group(3) or "")
    tokens = fields.get("tok")
    sums = _sums(fields, "", tokens)
    pairs = None if sums is None else sums.pairs
    if match.group(1) == "prefill":
        work = StepWork(Phase.PREFILL, sequences, tokens, 0, 0, fields.get("sk"), pairs)
    elif fields.get("p"):
        work = StepWork(
            phase_of(fields["p"], fields.get("d", 0)),
            prefill_sequences=fields["p"],
            decode_sequences=fields.get("d"),
            context_tokens=fields.get("sk"),
            attention_pairs=pairs,
        )
    else:
        work = StepWork(Phase.DECODE, 0, 0, sequences, tokens, fields.get("sk"), pairs)
    return Announced(work)


def _trtllm(name: str) -> Announced | None:
    match = _TRTLLM.fullmatch(name)
    if match is None:
        return None
    requests, tokens, going_on = (None if text is None else int(text) for text in match.groups())
    context = (requests or 0, 0 if not requests else tokens)
    # Drafts make more than one token of a request that goes on: how many is not said.
    return Announced(_counted(context, (going_on or 0, None if going_on else 0)))


#: What each engine writes.
_PARSERS: tuple[Callable[[str], Announced | None], ...] = (
    _vllm_sums,
    _vllm,
    _sglang,
    _trtllm,
    _atom,
    _vllm_new,
    _vllm_capture,
)


def _fields(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(text)}


def _sums(fields: Mapping[str, int], prefix: str, tokens: int | None) -> _Sums | None:
    if tokens is None or not {f"{prefix}{key}" for key in ("sk", "sqsq", "sqsk")} <= fields.keys():
        return None
    return _Sums(tokens, *(fields[f"{prefix}{key}"] for key in ("sk", "sqsq", "sqsk")))
