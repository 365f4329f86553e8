"""Which tokens of a forward pass are prefill and which are decode: the labelling contract.

Work is counted in tokens, per sequence, by position. A label is derived from three numbers that an engine
knows before the pass runs, never guessed from the length of the query or from the names of kernels:

``prompt``
    tokens that the request came with (of this sequence, padding not counted);
``past``
    tokens whose keys and values (or state) are already in the cache;
``query``
    tokens that this pass computes, at the positions ``past .. past + query - 1``.

A token at position ``p`` is a **prefill** token if ``p < prompt``, or if the position had been computed before and
is computed again (``p < computed``: no cache, recompute after preemption). Every other token is a **decode** token.
A pass with prefill tokens alone is ``prefill``, with decode tokens alone ``decode``, with both ``mixed``.

=====================================================  ======  =====  =====  ========  =======  ======  ==========
case (one sequence)                                    prompt  past   query  computed  prefill  decode  the pass is
=====================================================  ======  =====  =====  ========  =======  ======  ==========
a prompt of nine tokens                                9       0      9      0         9        0       prefill
the next token                                         9       9      1      9         0        1       decode
chunked prefill, first chunk                           9       0      4      0         4        0       prefill
chunked prefill, last chunk of one token               9       8      1      8         1        0       prefill
a prompt of one token                                  1       0      1      0         1        0       prefill
a prefix hit: 6 of 9 tokens are cached                 9       6      3      0         3        0       prefill
a prefix hit on all but the last token                 9       8      1      0         1        0       prefill
a new turn of 5 tokens on a kept cache of 12           17      12     5      12        5        0       prefill
a draft of 4 is verified                               9       12     5      12        0        5       decode
the first pass verifies too: prompt and draft of 4     9       0      13     0         9        4       mixed
no cache: the third pass computes everything again     9       0      11     10        10       1       mixed
preempted after 3 output tokens, then resumed          9       0      12     11        11       1       mixed
preempted, resumed in chunks: first chunk              9       0      8      11        8        0       prefill
preempted, resumed in chunks: the rest                 9       8      4      11        3        1       mixed
=====================================================  ======  =====  =====  ========  =======  ======  ==========

A pass of unknown kind (a hand-written loop that feeds several tokens to a cache that has already been decoded from)
is ``extend`` until the next pass on that cache settles it: a cache that was cropped shows a verification (decode),
a cache that was kept shows a new turn (prefill). See :func:`settle_extend`.

Two identities hold over any complete run and are checked by :func:`check_invariants`::

    sum of prefill tokens                  = prompt - cached + recomputed
    sum of decode tokens - rejected drafts = generated - one per request

(The last token of a request is sampled and never computed.) All functions here are pure; none of them imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Phase(enum.StrEnum):
    """What a forward pass, or a part of one, does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    #: An encoder or a vision tower.
    ENCODE = "encode"
    #: Training, scoring, an empty or a dummy step.
    OTHER = "other"
    #: Several tokens on a cache that was decoded from, not settled yet.
    EXTEND = "extend"


class Role(enum.StrEnum):
    """Whose pass it is."""

    TARGET = "target"
    DRAFT = "draft"
    ENCODER = "encoder"


class TagSource(enum.StrEnum):
    """Where the label comes from, strongest first."""

    USER = "user"
    SCHEDULER = "scheduler"
    GENERATE = "generate"
    CACHE = "cache"
    ANNOTATION = "annotation"
    INFERRED = "inferred"


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """The tokens that one sequence computes in one pass.

    Attributes:
        prefill: Prompt tokens and recomputed tokens.
        decode: Tokens that were generated and are now fed back, drafts under verification included.
        recomputed: Those of ``prefill`` whose position had been computed before.
    """

    prefill: int
    decode: int
    recomputed: int


def split(*, prompt: int, past: int, query: int, computed: int = 0) -> TokenSplit:
    """Divide the ``query`` tokens of one sequence into prefill and decode.

    Args:
        prompt: Tokens that the request came with.
        past: Tokens in the cache before the pass.
        query: Tokens computed by the pass.
        computed: How many positions of this sequence had been computed before and still stand as they were: the
            high-water mark, lowered when tokens are rejected. Positions below it are recomputed, not generated.

    Raises:
        ValueError: If an argument is negative.
    """
    if min(prompt, past, query, computed) < 0:
        raise ValueError(
            f"token counts cannot be negative: {prompt=}, {past=}, {query=}, {computed=}"
        )
    prefill = _clamp(max(prompt, computed) - past, query)
    return TokenSplit(
        prefill=prefill,
        decode=query - prefill,
        recomputed=_clamp(computed - past, query),
    )


def phase_of(prefill_tokens: int, decode_tokens: int) -> Phase:
    """Name a pass by the tokens in it. A pass without tokens is ``other``."""
    if prefill_tokens and decode_tokens:
        return Phase.MIXED
    if prefill_tokens:
        return Phase.PREFILL
    if decode_tokens:
        return Phase.DECODE
    return Phase.OTHER


@dataclass(frozen=True, slots=True)
class ExtendOutcome:
    """What an ``extend`` pass turned out to be.

    Attributes:
        phase: ``decode`` (a draft was verified) or ``prefill`` (a new turn began).
        draft_tokens: Drafted tokens that the pass verified; 0 for a new turn.
        accepted_tokens: How many of them stayed in the cache.
        prompt: The prompt of the sequence from here on.
    """

    phase: Phase
    draft_tokens: int
    accepted_tokens: int
    prompt: int


def settle_extend(
    *, prompt: int, past: int, query: int, next_past: int, verified_before: bool = False
) -> ExtendOutcome:
    """Say what a pass of ``query`` tokens on a cache of ``past`` was, from the cache that the next pass finds.

    Verification feeds the last sampled token and ``query - 1`` drafted ones, then crops the cache to what was
    accepted; a new turn keeps all that it computed.

    Args:
        prompt: The prompt of the sequence before the pass.
        past: Tokens in the cache before the pass.
        query: Tokens computed by the pass.
        next_past: Tokens in the cache before the next pass on it.
        verified_before: An earlier pass on this cache was a verification. Then a pass that kept everything had all
            of its draft accepted, and is a verification too.
    """
    cropped = next_past < past + query
    if cropped or verified_before:
        kept = _clamp(next_past - past, query)
        return ExtendOutcome(
            phase=Phase.DECODE,
            draft_tokens=query - 1,
            accepted_tokens=max(kept - 1, 0),
            prompt=prompt,
        )
    return ExtendOutcome(
        phase=Phase.PREFILL, draft_tokens=0, accepted_tokens=0, prompt=past + query
    )


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """The tokens of one request over all its passes, for :func:`check_invariants`.

    Attributes:
        request_id: Which request.
        sequences: Sequences that were computed for it (beams, several returned sequences).
        prompt_tokens: Prompt of one sequence.
        cached_tokens: Tokens of one sequence that were in the cache at its first pass.
        recomputed_tokens: Over all sequences.
        prefill_tokens: Over all sequences.
        decode_tokens: Over all sequences.
        rejected_tokens: Drafted tokens that were not accepted.
        output_tokens: Generated tokens, over all sequences.
    """

    request_id: str
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    prefill_tokens: int
    decode_tokens: int
    rejected_tokens: int
    output_tokens: int


def check_invariants(requests: Iterable[RequestTokens]) -> list[str]:
    """Check the two identities of the contract; return one sentence for each that does not hold.

    Only complete requests can be judged: leave out those that were aborted.
    """
    broken: list[str] = []
    for request in requests:
        prompt = request.sequences * (request.prompt_tokens - request.cached_tokens)
        expected_prefill = prompt + request.recomputed_tokens
        if request.prefill_tokens != expected_prefill:
            broken.append(
                f"request {request.request_id}: {request.prefill_tokens} prefill tokens, but prompt - cached + "
                f"recomputed = {expected_prefill}"
            )
        decoded = request.decode_tokens - request.rejected_tokens
        expected_decode = request.output_tokens - request.sequences
        if decoded != expected_decode:
            broken.append(
                f"request {request.request_id}: {decoded} decode tokens kept, but generated - one per sequence = "
                f"{expected_decode}"
            )
    return broken


def _clamp(value: int, upper: int) -> int:
    return max(0, min(value, upper))
