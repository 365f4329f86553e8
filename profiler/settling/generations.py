"""Generate calls: the prompt is known before the first pass, so every label is certain when the pass ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phaseprof.events import GenerationBegan, GenerationEnded, PassSeen, PromptKnown
from phaseprof.phases import Role, TagSource
from phaseprof.records import ForwardPass
from phaseprof.requests import Served
from phaseprof.sequences import Batch, request_ids
from phaseprof.settling.rows import PassIds, Tag
from phaseprof.settling.serving import Serving, padding_of, past_of


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
    """

    began: GenerationBegan
    prefix: str
    role: Role = Role.TARGET
    served: Served | None = None
    known: PromptKnown | None = None
    verifying: tuple[ForwardPass, int] | None = None


class Generations:
    """The generate calls in progress."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        #: A pass fed ids that could not be read.
        self.padding_unread = False
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
        parent = self._running.get(generation.began.parent)
        prompt = event.prompt
        if parent is not None and parent.known is not None:
            # What the call around it has generated is not a prompt for the draft model either.
            prompt = min(prompt, parent.known.prompt)
        generation.known = event._replace(prompt=prompt)
        ids = request_ids(generation.prefix, event.rows, event.sequences_per_request)
        self._serve(
            generation,
            Batch(ids, prompt=prompt, padding=padding_of(event.mask)),
            max_output=event.max_output,
        )

    def passed(self, event: PassSeen, ids: PassIds, generation: Generation) -> None:
        """A pass of a call."""
        past = past_of(event, generation.served)
        served = generation.served
        if served is None:
            # A decoding method of its own that announced nothing: its first pass is the prompt.
            batch = Batch(request_ids(generation.prefix, event.rows), prompt=past + event.query)
            served = self._serve(generation, batch, max_output=None)
        if len(served.batch.request_ids) != event.rows:
            served.batch.request_ids = request_ids(generation.prefix, event.rows)
            served.batch.padding = None
            served.batch.finished.clear()
        self._settle(generation, past)
        known = generation.known
        if known is not None and known.end_ids and past >= known.prompt and event.fed is None:
            # The ids lie on the device: which rows have ended was not read.
            event = event._replace(mask_unread=True)
            self.padding_unread = True
        self._note_finished(event, generation, past)
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
        if generation.served is not None and generation.served.first_start_ns is not None:
            self._serving.put_requests(
                generation.served,
                finished_ns=event.end_ns,
                error=event.error is not None,
                known_end=True,
            )

    def _serve(self, generation: Generation, batch: Batch, *, max_output: int | None) -> Served:
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
        self._serving.rows.send(replace(row, accepted_tokens=accepted, may_change=False))
        if generation.served is not None:
            generation.served.accepted(accepted // row.sequences)

    @staticmethod
    def _note_finished(event: PassSeen, generation: Generation, past: int) -> None:
        """Rows that were fed an end token are padding from this pass on."""
        known, served = generation.known, generation.served
        if event.fed is None or known is None or served is None or past < known.prompt:
            return
        for row, token in enumerate(event.fed[:, -1].tolist()):
            if token in known.end_ids:
                served.batch.finished.add(row)
