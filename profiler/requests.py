"""Requests as they are served: tokens and their times, per request of a batch.

A token is there when the device has computed it, which may be long after the call of its pass has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from phaseprof.records import Finish, ForwardPass, Request, Warmup
from phaseprof.sequences import Batch, rows_of
from phaseprof.timers import Span


@dataclass(slots=True)
class _Late:
    """Tokens of a pass whose time on the device was not known when it ended: ``count`` of them from ``place`` on."""

    place: int
    count: int
    start_ns: int
    end_ns: int
    span: Span


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
        late: Tokens that may have been there later than `token_ns` says, in order.
        lag_ns: How much later the last token was there, of which that is known.
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
    late: deque[_Late] = field(default_factory=deque)
    lag_ns: int = 0

    def began_pass(self, start_ns: int) -> None:
        """A pass of the batch began."""
        if self.first_start_ns is None:
            self.first_start_ns = start_ns
            self.outputs = [0] * len(self.batch.request_ids)

    def yielded(
        self,
        end_ns: int,
        step: int,
        tokens: int = 1,
        *,
        start_ns: int = 0,
        span: Span | None = None,
    ) -> None:
        """A pass ended that yields tokens for every row that goes on.

        Args:
            end_ns: When its call returned, monotonic clock.
            step: Its step.
            tokens: For each row.
            start_ns: When it was called.
            span: Its time on the device, if that has one of its own.
        """
        if span is not None:
            self._know()
            self.late.append(_Late(len(self.token_ns), tokens, start_ns, end_ns, span))
        self.token_ns += [end_ns] * tokens
        self.token_steps += [step] * tokens
        for row in range(len(self.outputs)):
            if row not in self.batch.finished:
                self.outputs[row] += tokens

    def accepted(self, tokens: int) -> None:
        """The pass before yielded that many accepted drafts besides its own token."""
        if self.late and self.late[-1].place + self.late[-1].count == len(self.token_ns):
            self.late[-1].count += tokens
        self.token_ns += self.token_ns[-1:] * tokens
        self.token_steps += self.token_steps[-1:] * tokens
        for row in range(len(self.outputs)):
            if row not in self.batch.finished:
                self.outputs[row] += tokens

    def retract(self) -> None:
        """The prompt goes on: what was yielded so far were not its tokens."""
        self.token_ns.clear()
        self.token_steps.clear()
        self.late.clear()
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
        token_ns = self._times(finished_ns)
        for request_id, rows in rows_of(self.batch.request_ids).items():
            outputs = [self.outputs[row] for row in rows] if self.outputs else [0]
            longest = max(outputs)
            times = token_ns[:longest] if longest else []
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

    def _know(self) -> None:
        """Correct the times of tokens whose time on the device has become known."""
        while self.late and (self.late[0].span.device_ns is not None or self.late[0].span.lost):
            tokens = self.late.popleft()
            device_ns = tokens.span.device_ns
            if device_ns is not None:
                self.lag_ns = max(tokens.start_ns + device_ns - tokens.end_ns, 0)
                _delay(self.token_ns, tokens, self.lag_ns)

    def _times(self, finished_ns: int | None) -> list[int]:
        """When each token was there. Those whose time on the device is still to come are taken to be as late as the one
        before them, and no later than the end."""
        self._know()
        if not self.late or not self.lag_ns:
            return self.token_ns
        times = list(self.token_ns)
        for tokens in self.late:
            lag_ns = self.lag_ns
            if finished_ns is not None:
                lag_ns = min(lag_ns, max(finished_ns - tokens.end_ns, 0))
            _delay(times, tokens, lag_ns)
        return times

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


def _delay(times: list[int], tokens: _Late, lag_ns: int) -> None:
    """Set tokens back, but never before the one in front of them."""
    before = times[tokens.place - 1] if tokens.place else 0
    at = max(tokens.end_ns + lag_ns, before)
    times[tokens.place : tokens.place + tokens.count] = [at] * tokens.count


def _minus(later: int | None, earlier: int) -> int | None:
    return None if later is None else later - earlier
