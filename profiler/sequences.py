"""The sequences of one batch and where each of them stands: from slots to labelled tokens.

The rows of a batch advance together, slot by slot; padding makes their tokens differ. A `Batch` follows one such group
(one generate call, or one cache of a hand-written loop) over its passes and divides every pass by the contract of
`phaseprof.phases`. Nothing here knows torch: masks come as `Padding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phaseprof.phases import Phase, TokenSplit, phase_of, split
from phaseprof.records import Slice


@dataclass(frozen=True, slots=True)
class Padding:
    """Which slots of each row are padding.

    Attributes:
        rows: One byte a slot for each row: 0 where the slot is padding, anything else where it is a token.
    """

    rows: tuple[bytes, ...]

    def count(self, row: int, begin: int, end: int) -> int:
        """Padding slots of a row in ``begin <= slot < end``; slots beyond the mask are none."""
        return self.rows[row].count(0, begin, max(begin, end))

    def behind(self, slots: int) -> Padding:
        """The same behind so many more slots, none of which is padding."""
        return Padding(tuple(b"\x01" * slots + row for row in self.rows))

    @property
    def any(self) -> bool:
        """Whether a slot is padding at all."""
        return any(0 in row for row in self.rows)


@dataclass(frozen=True, slots=True)
class PassTokens:
    """A pass of a batch, divided. All figures are sums over the rows, in tokens.

    Attributes:
        phase: The label.
        prefill, decode, recomputed, padding, cached: As in the `passes` table.
        slices: One a row.
    """

    phase: Phase
    prefill: int
    decode: int
    recomputed: int
    padding: int
    cached: int
    slices: tuple[Slice, ...]


@dataclass(slots=True)
class Batch:
    """Rows that advance together.

    Attributes:
        request_ids: The request of each row.
        prompt: Slots of the prompt, padding included.
        cached_slots: Slots of the prompt that were in the cache before the first pass.
        end: Slots after the last pass.
        computed: Slots that had been computed before and are computed again when a pass begins below them: used
            without a cache. With a cache, what lies in it is never computed again.
        padding: Where padding lies; None if no slot is.
        finished: Rows that ended before the others: what is computed for them is padding.
        passes: Passes so far.
        decoded: A pass has computed decode tokens.
        verified: A pass turned out to be a verification of drafts.
    """

    request_ids: tuple[str, ...]
    prompt: int
    cached_slots: int = 0
    end: int = 0
    computed: int = 0
    padding: Padding | None = None
    finished: set[int] = field(default_factory=set)
    passes: int = 0
    decoded: bool = False
    verified: bool = False

    def divide(self, *, past: int, query: int, forced: Phase | None = None) -> PassTokens:
        """Divide a pass of ``query`` slots after ``past`` slots, without advancing.

        Args:
            past: Slots in the cache before the pass.
            query: Slots computed for every row.
            forced: The label that a user gave: all tokens follow it (`mixed` is divided by position). `encode`,
                `other` and `extend` passes have tokens in their slices, and none that is prefill or decode.
        """
        if self.padding is None and not self.finished:
            return self._divide_alike(past, query, forced)
        slices = []
        prefill = decode = recomputed = padding = cached = 0
        for row, request_id in enumerate(self.request_ids):
            one = self._divide_row(row, past, query, forced)
            padding += query - one.tokens
            prefill += one.split.prefill
            decode += one.split.decode
            recomputed += one.split.recomputed
            met = min(one.past, one.prompt) if self.passes == 0 else 0
            cached += met
            phase = _label(forced, one.split)
            slices.append(
                Slice(
                    request_id,
                    phase,
                    one.tokens,
                    one.past,
                    one.prompt,
                    cached=met,
                    recomputed=one.split.recomputed,
                )
            )
        phase = _label(forced, TokenSplit(prefill, decode, recomputed))
        return PassTokens(phase, prefill, decode, recomputed, padding, cached, tuple(slices))

    def advance(self, *, past: int, query: int, cached: bool) -> None:
        """Take note that the pass was computed."""
        if self.passes == 0:
            self.cached_slots = min(past, self.prompt)
        self.end = past + query
        self.passes += 1
        self.computed = 0 if cached else max(self.computed, self.end)
        if self.end > self.prompt:
            self.decoded = True

    def prompt_tokens(self, row: int) -> int:
        """Prompt of a row in tokens."""
        return self.prompt - self._pads(row, 0, self.prompt)

    def cached_tokens(self, row: int) -> int:
        """Tokens of a row that were in the cache before the first pass."""
        return self.cached_slots - self._pads(row, 0, self.cached_slots)

    def _divide_alike(self, past: int, query: int, forced: Phase | None) -> PassTokens:
        rows = len(self.request_ids)
        one = self._split(past, query, self.prompt, self.computed, forced)
        phase = _label(forced, one)
        met = min(past, self.prompt) if self.passes == 0 else 0
        slices = tuple(
            Slice(request_id, phase, query, past, self.prompt, met, one.recomputed)
            for request_id in self.request_ids
        )
        return PassTokens(
            phase,
            one.prefill * rows,
            one.decode * rows,
            one.recomputed * rows,
            0,
            met * rows,
            slices,
        )

    def _divide_row(self, row: int, past: int, query: int, forced: Phase | None) -> _RowPart:
        pads_before = self._pads(row, 0, past)
        tokens = query - self._pads(row, past, past + query)
        if row in self.finished:
            tokens = 0
        real_past = past - pads_before
        prompt = self.prompt_tokens(row)
        computed = max(self.computed - self._pads(row, 0, self.computed), 0)
        return _RowPart(
            tokens, real_past, prompt, self._split(real_past, tokens, prompt, computed, forced)
        )

    def _pads(self, row: int, begin: int, end: int) -> int:
        return 0 if self.padding is None else self.padding.count(row, begin, end)

    @staticmethod
    def _split(
        past: int, query: int, prompt: int, computed: int, forced: Phase | None
    ) -> TokenSplit:
        if forced is Phase.PREFILL:
            return TokenSplit(prefill=query, decode=0, recomputed=0)
        if forced is Phase.DECODE:
            return TokenSplit(prefill=0, decode=query, recomputed=0)
        if forced in (Phase.ENCODE, Phase.OTHER, Phase.EXTEND):
            return TokenSplit(prefill=0, decode=0, recomputed=0)
        return split(prompt=prompt, past=past, query=query, computed=computed)


@dataclass(frozen=True, slots=True)
class _RowPart:
    tokens: int
    past: int
    prompt: int
    split: TokenSplit


def _label(forced: Phase | None, tokens: TokenSplit) -> Phase:
    return forced if forced is not None else phase_of(tokens.prefill, tokens.decode)


def with_drafts(slices: tuple[Slice, ...], drafts: int, accepted: int | None) -> tuple[Slice, ...]:
    """The slices of a pass in which every row verifies as many drafts and keeps as many, with that in each."""
    rows = len(slices)
    if not drafts or not rows or drafts % rows:
        return slices
    kept = None if accepted is None or accepted % rows else accepted // rows
    return tuple(one._replace(drafts=drafts // rows, accepted=kept) for one in slices)


def request_ids(prefix: str, rows: int, sequences_per_request: int = 1) -> tuple[str, ...]:
    """Ids of the requests behind the rows of a batch: consecutive rows of a request share one."""
    return tuple(f"{prefix}.r{row // sequences_per_request}" for row in range(rows))


def rows_of(ids: Sequence[str]) -> dict[str, list[int]]:
    """The rows of each request, in order."""
    rows: dict[str, list[int]] = {}
    for row, request_id in enumerate(ids):
        rows.setdefault(request_id, []).append(row)
    return rows
