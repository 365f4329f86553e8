"""What generate calls and hand-written loops have in common: a pass of a batch is divided, put and accounted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from phaseprof.events import PassSeen
from phaseprof.records import ForwardPass, Request
from phaseprof.requests import Served
from phaseprof.sequences import Batch, Padding
from phaseprof.settling.rows import PassIds, PassRows, Tag


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves batches.

    Attributes:
        rows: Takes the passes.
        put_request: Takes the requests.
        offset_ns: From the monotonic clock to Unix ns.
        process: Names this process in request ids.
        on_cache: The batch that last ran on a cache, whether a generate call's or a loop's.
    """

    rows: PassRows
    put_request: Callable[[Request], None]
    offset_ns: int
    process: str
    on_cache: dict[int, Batch]

    def serve(
        self,
        event: PassSeen,
        ids: PassIds,
        served: Served,
        tag: Tag,
        *,
        past: int,
        speculative: bool = False,
    ) -> ForwardPass:
        """Take a pass whose batch is known.

        Args:
            event: The pass.
            ids: Its numbers.
            served: The requests that it serves.
            tag: What is known of it.
            past: Slots in the cache before it.
            speculative: It may verify drafts; how many is counted here.
        """
        batch = served.batch
        if event.override is not None and event.override.prompt_tokens is not None:
            batch.prompt = event.override.prompt_tokens
        forced = event.override.phase if event.override else None
        tokens = batch.divide(past=past, query=event.query, forced=forced)
        if speculative:
            drafts = _drafts(tokens.decode, past, batch)
            if drafts:
                tag = replace(tag, drafts=drafts, accepted=None, may_change=True)
        first = served.first_start_ns is None
        served.began_pass(event.start_ns)
        row = self.rows.put(event, ids, tokens, tag, past=past)
        served.note(row)
        if event.error is None:
            batch.advance(past=past, query=event.query, cached=event.cache > 0)
            if event.cache:
                self.on_cache[event.cache] = batch
            if batch.end >= batch.prompt:
                served.yielded(event.end_ns, ids.step, start_ns=event.start_ns, span=event.span)
        if first:
            self.put_requests(served, finished_ns=None)
        return row

    def put_requests(
        self,
        served: Served,
        *,
        finished_ns: int | None,
        error: bool = False,
        known_end: bool = False,
    ) -> None:
        """Put the requests of a batch as they stand; see `Served.rows`."""
        if served.hidden:
            return
        for row in served.rows(
            offset_ns=self.offset_ns, finished_ns=finished_ns, error=error, known_end=known_end
        ):
            self.put_request(row)


def past_of(event: PassSeen, served: Served | None) -> int:
    """Slots in the cache before a pass: as read, or as counted where they could not be."""
    if event.past is not None:
        return event.past
    return 0 if served is None else served.batch.end


def padding_of(mask: Any) -> Padding | None:
    """The padding that a mask shows, or None; the mask is a CPU tensor, uint8, (rows, slots)."""
    if mask is None:
        return None
    padding = Padding(tuple(bytes(row) for row in mask.tolist()))
    return padding if padding.any else None


def _drafts(decode_tokens: int, past: int, batch: Batch) -> int:
    """Drafted tokens of a verification: all decode tokens but the last sampled one, which leads unless the pass begins
    inside the prompt."""
    leading = len(batch.request_ids) if past >= batch.prompt else 0
    return max(decode_tokens - leading, 0)
