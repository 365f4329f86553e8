"""Requests as they are served: tokens and their times, per request of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from phaseprof.records import Finish, ForwardPass, Request, Warmup
from phaseprof.sequences import Batch, rows_of


@dataclass(slots=True)
class Served:
    """The requests of one batch, while they are served.

    Attributes:
        batch: Their rows.
        model_id: The model.
        arrival_ns: When the caller asked, monotonic clock.
        max_output: Limit of tokens for a row; None if not known.
        first_start_ns: Begin of the first pass; None before it.
        token_ns: When each token of a row that went on to the end was there, monotonic clock.
        token_steps: The step of the pass that yielded it.
        outputs: Tokens that each row got.
        warmup: The strongest reason of its passes to keep them out of steady-state figures.
        profiled: A costly collector ran during one of them.
        hidden: They are no requests of a user (a draft model's): no row is put.
    """

    batch: Batch
    model_id: str
    arrival_ns: int
    max_output: int | None = None
    first_start_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    warmup: Warmup | None = None
    profiled: bool = False
    hidden: bool = False

    def began_pass(self, start_ns: int) -> None:
        """A pass of the batch began."""
        if self.first_start_ns is None:
            self.first_start_ns = start_ns
            self.outputs = [0] * len(self.batch.request_ids)

    def yielded(self, end_ns: int, step: int, tokens: int = 1) -> None:
        """A pass ended that yields tokens for every row that goes on."""
        self.token_ns += [end_ns] * tokens
        self.token_steps += [step] * tokens
        for row in range(len(self.outputs)):
            if row not in self.batch.finished:
                self.outputs[row] += tokens

    def accepted(self, tokens: int) -> None:
        """The pass before yielded that many accepted drafts besides its own token."""
        self.token_ns += self.token_ns[-1:] * tokens
        self.token_steps += self.token_steps[-1:] * tokens
        for row in range(len(self.outputs)):
            if row not in self.batch.finished:
                self.outputs[row] += tokens

    def retract(self) -> None:
        """The prompt goes on: what was yielded so far were not its tokens."""
        self.token_ns.clear()
        self.token_steps.clear()
        self.outputs = [0] * len(self.outputs)

    def note(self, row: ForwardPass) -> None:
        """Take note of what keeps a pass out of steady-state figures."""
        if row.warmup is not None and self.warmup is not Warmup.REQUESTED:
            self.warmup = row.warmup
        self.profiled |= row.profiled

    def rows(
        self, *, offset_ns: int, finished_ns: int | None, error: bool, known_end: bool
    ) -> Iterator[Request]:
        """The requests as rows of the table.

        Args:
            offset_ns: From the monotonic clock to Unix ns.
            finished_ns: When they ended, monotonic clock; None while they run.
            error: They ended by an exception.
            known_end: An engine said that they ended; else (a hand-written loop) nothing did.
        """
        for request_id, rows in rows_of(self.batch.request_ids).items():
            outputs = [self.outputs[row] for row in rows] if self.outputs else [0]
            longest = max(outputs)
            times = self.token_ns[:longest] if longest else []
            first_ns = times[0] if times else None
            yield Request(
                request_id=request_id,
                model_id=self.model_id,
                arrival_ns=self.arrival_ns + offset_ns,
                queue_ns=_minus(self.first_start_ns, self.arrival_ns),
                first_token_ns=None if first_ns is None else first_ns + offset_ns,
                finished_ns=None if finished_ns is None else finished_ns + offset_ns,
                sequences=len(rows),
                prompt_tokens=self.batch.prompt_tokens(rows[0]),
                cached_tokens=self.batch.cached_tokens(rows[0]),
                output_tokens=sum(outputs),
                ttft_ns=_minus(first_ns, self.arrival_ns),
                tpot_ns=(times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else None,
                itl_ns=tuple(after - before for before, after in pairwise(times)),
                itl_steps=tuple(self.token_steps[1 : len(times)]),
                finish=self._finish(longest, finished_ns, error, known_end),
                warmup=self.warmup,
                profiled=self.profiled,
            )

    def _finish(
        self, longest: int, finished_ns: int | None, error: bool, known_end: bool
    ) -> Finish | None:
        if finished_ns is None:
            return None
        if error:
            return Finish.ABORT
        if not known_end:
            return Finish.UNKNOWN
        return Finish.LENGTH if longest == self.max_output else Finish.STOP


def _minus(later: int | None, earlier: int) -> int | None:
    return None if later is None else later - earlier
