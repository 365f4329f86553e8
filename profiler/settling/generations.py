"""Generate calls: the prompt is known before the first pass, so every label is certain when the pass ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phaseprof.events import (
    GenerationBegan,
    GenerationEnded,
    PassSeen,
    PromptKnown,
    RowsEnded,
    VirtualTokens,
)
from phaseprof.phases import Role, TagSource
from phaseprof.records import ForwardPass
from phaseprof.requests import Served
from phaseprof.sequences import Batch, request_ids, with_drafts
from phaseprof.settling.rows import PassIds, Tag
from phaseprof.settling.serving import Serving, padding_of, past_of
from phaseprof.settling.virtual import lengthen


@dataclass(slots=True)
class Generation:
    """A generate call.

    Attributes:
        began: Its begin.
        prefix: Of the ids of its requests; a draft model's call has that of the call around it.
        role: Whose passes its are.
        served: Its requests, once the prompt is known.
        known: Its prompt.
        verifying: The verification whose accepted drafts the next pass tells, and the slots after it.
        cache: Number of its cache, as of the last pass; None before the first.
        draft_prompts: The prompt of each draft model, in its own tokens: that of its first call.
        drafters: Modules that draft for it without a generate call of their own (heads for several tokens).
        unread: Rows may have ended that could not be read.
        virtual: What an adapter put before its prompt, until the first pass tells whether that was used.
    """

    began: GenerationBegan
    prefix: str
    role: Role = Role.TARGET
    served: Served | None = None
    known: PromptKnown | None = None
    verifying: tuple[ForwardPass, int] | None = None
    cache: int | None = None
    draft_prompts: dict[str, int] = field(default_factory=dict)
    drafters: dict[str, Served] = field(default_factory=dict)
    unread: bool = False
    virtual: VirtualTokens | None = None


class Generations:
    """The generate calls in progress."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        #: A pass fed ids that could not be read.
        self.padding_unread = False
        #: A call announced its prompt, returned, and no pass of it was seen.
        self.passes_unseen = False
        self._running: dict[int, Generation] = {}

    def find(self, number: int) -> Generation | None:
        """A call in progress."""
        return self._running.get(number)

    def began(self, event: GenerationBegan) -> None:
        """A call began. Nested in one that verifies drafts, it drafts: for the requests of that one."""
        prefix = f"{self._serving.process}.g{event.generation}"
        generation = Generation(event, prefix)
        parent = self._running.get(event.parent)
        if parent is not None:
            generation.prefix = parent.prefix
            generation.role = Role.DRAFT
        self._running[event.generation] = generation

    def prompt(self, event: PromptKnown) -> None:
        """A call is about to compute its prompt."""
        generation = self._running.get(event.generation)
        if generation is None:
            return
        generation.cache = None
        ids = request_ids(generation.prefix, event.rows, event.sequences_per_request)
        batch = Batch(ids, prompt=event.prompt, padding=padding_of(event.mask))
        self._serve(generation, batch, max_output=event.max_output)
        generation.known = event._replace(prompt=batch.prompt)

    def virtual(self, event: VirtualTokens) -> None:
        """An adapter puts tokens of its own before the prompt of a call: they are a part of it."""
        generation = self._running.get(event.generation)
        if generation is not None:
            generation.virtual = event

    def rows_ended(self, event: RowsEnded) -> None:
        """A stopping criterion ended rows of a call."""
        generation = self._running.get(event.generation)
        if generation is None or generation.served is None:
            return
        if event.rows is None:
            generation.unread = True
        else:
            generation.served.batch.finished.update(event.rows)

    def owns(self, event: PassSeen, generation: Generation) -> bool:
        """Whether a pass within a call serves its request, or drafts for it. A pass of another model, or on another
        cache, that runs between its steps (to guide it, to judge it) does not.

        A decoding function of the user's own may change its cache; one that goes on where the last pass ended is
        its own anyway."""
        known, served = generation.known, generation.served
        if event.model_id != generation.began.model_id:
            return known is not None and known.speculative
        if known is None or served is None or known.custom or generation.cache is None:
            return True
        return event.cache == generation.cache or past_of(event, served) == served.batch.end

    def passed(self, event: PassSeen, ids: PassIds, generation: Generation) -> None:
        """A pass of a call."""
        if event.model_id != generation.began.model_id:
            self._drafted(event, ids, generation)
            return
        generation.cache = event.cache
        served = generation.served
        past = past_of(event, served)
        if not event.cache and served is not None and served.batch.passes:
            # Without a cache everything is computed again, and one token more. What computes less has its state in the
            # model, or in plain tensors (RWKV).
            end = served.batch.end
            past = 0 if event.query > end else end
        if served is None:
            # A decoding method of its own that announced nothing: its first pass is the prompt.
            batch = Batch(request_ids(generation.prefix, event.rows), prompt=past + event.query)
            served = self._serve(generation, batch, max_output=None)
        if len(served.batch.request_ids) != event.rows:
            served.batch.request_ids = request_ids(generation.prefix, event.rows)
            served.batch.padding = None
            served.batch.finished.clear()
        self._settle(generation, past)
        if generation.virtual is not None and not served.batch.passes:
            virtual, generation.virtual = generation.virtual, None
            lengthen(served.batch, virtual, event, past)
            if generation.known is not None:
                generation.known = generation.known._replace(prompt=served.batch.prompt)
        known = generation.known
        if known is not None and known.speculative and past and not served.batch.passes:
            _feed_again(event, past, served.batch)
        unseen = known is not None and known.end_ids and event.fed is None
        if known is not None and (unseen or generation.unread) and _feeds_back(known, served):
            # The ids lie on the device: which rows have ended was not read.
            event = event._replace(mask_unread=True)
            self.padding_unread = True
        self._note_finished(event, generation)
        row = self._serving.serve(
            event,
            ids,
            served,
            Tag(TagSource.GENERATE, role=generation.role),
            past=past,
            speculative=generation.known is not None and generation.known.speculative,
        )
        if row.draft_tokens and row.error is None:
            generation.verifying = (row, served.batch.end)

    def ended(self, event: GenerationEnded) -> None:
        """A call returned or raised."""
        generation = self._running.pop(event.generation, None)
        if generation is None:
            return
        if event.slots is not None:
            self._settle(generation, event.slots)
        if generation.verifying is not None:
            row, _ = generation.verifying
            self._serving.rows.send(replace(row, may_change=False))
        self.passes_unseen |= _unseen(event, generation)
        if generation.served is not None and generation.served.first_start_ns is not None:
            self._serving.put_requests(
                generation.served,
                finished_ns=event.end_ns,
                error=event.error is not None,
                known_end=True,
            )

    def _drafted(self, event: PassSeen, ids: PassIds, generation: Generation) -> None:
        """A pass of a module that drafts for a call: it reads the prompt, too."""
        served = generation.drafters.get(event.model_id)
        if served is None:
            prompt = generation.known.prompt if generation.known is not None else event.query
            batch = Batch(request_ids(generation.prefix, event.rows), prompt=prompt)
            served = Served(batch, event.model_id, event.start_ns, hidden=True)
            generation.drafters[event.model_id] = served
        past = past_of(event, served)
        tag = Tag(TagSource.GENERATE, role=Role.DRAFT)
        self._serving.serve(event, ids, served, tag, past=past)

    def _serve(self, generation: Generation, batch: Batch, *, max_output: int | None) -> Served:
        parent = self._running.get(generation.began.parent)
        if parent is not None:
            # What has been generated since its first call is not a prompt for the draft model either; and what it finds
            # in its cache in later calls, it has computed for this request.
            prompts, model_id = parent.draft_prompts, generation.began.model_id
            batch.passes = int(model_id in prompts)
            batch.prompt = min(batch.prompt, prompts.setdefault(model_id, batch.prompt))
        generation.served = Served(
            batch,
            generation.began.model_id,
            generation.began.arrival_ns,
            max_output=max_output,
            hidden=generation.role is Role.DRAFT,
        )
        return generation.served

    def _settle(self, generation: Generation, past: int) -> None:
        """The pass before verified drafts: what is missing in the cache now was rejected."""
        if generation.verifying is None:
            return
        row, end = generation.verifying
        generation.verifying = None
        rejected = max(end - past, 0) * row.sequences
        accepted = max(row.draft_tokens - rejected, 0)
        self._serving.rows.send(
            replace(
                row,
                accepted_tokens=accepted,
                slices=with_drafts(row.slices, row.draft_tokens, accepted),
                may_change=False,
            )
        )
        if generation.served is not None:
            generation.served.accepted(accepted // row.sequences)

    @staticmethod
    def _note_finished(event: PassSeen, generation: Generation) -> None:
        """Rows that were fed an end token are padding from this pass on."""
        known, served = generation.known, generation.served
        if event.fed is None or known is None or served is None or not _feeds_back(known, served):
            return
        for row, token in enumerate(event.fed[:, -1].tolist()):
            if token in known.end_ids:
                served.batch.finished.add(row)


def _feeds_back(known: PromptKnown, served: Served) -> bool:
    """Whether the prompt has been computed, so that the last token of each row is one that was generated."""
    return served.batch.passes > 0 and served.batch.end >= known.prompt


def _unseen(event: GenerationEnded, generation: Generation) -> bool:
    """Whether a call has computed its prompt, and no pass of it was seen."""
    served, known = generation.served, generation.known
    if event.error is not None or served is None or known is None or known.custom:
        return False
    return generation.role is Role.TARGET and served.first_start_ns is None


def _feed_again(event: PassSeen, past: int, batch: Batch) -> None:
    """Correct the prompt of assisted decoding that goes on with a kept cache: given the whole sequence, transformers
    computes all of it behind what the cache holds. Logits are asked for the drafts and the token before them."""
    drafts = event.logits // event.rows - 1
    if 0 <= drafts < event.query - 1:
        batch.prompt = max(batch.prompt, past + event.query - drafts)
