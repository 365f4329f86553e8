"""Hand each event to what it concerns."""

from __future__ import annotations

from dataclasses import replace

from phaseprof.attribution import PassWindow
from phaseprof.engine_events import EngineEvent
from phaseprof.events import (
    CacheGone,
    Event,
    GenerationBegan,
    GenerationEnded,
    ModelSeen,
    PassSeen,
    PromptKnown,
    RowsEnded,
    VirtualTokens,
)
from phaseprof.phases import Phase, Role, TagSource
from phaseprof.routing import ExpertsChosen
from phaseprof.sequences import Batch, request_ids
from phaseprof.settling.continuous import Continuous
from phaseprof.settling.engine import Engines
from phaseprof.settling.generations import Generation, Generations
from phaseprof.settling.loops import Loops
from phaseprof.settling.rows import PassIds, PassRows, Sink, Tag
from phaseprof.settling.serving import Serving
from phaseprof.settling.steps import Steps
from phaseprof.vllm.core_events import CoreEvent
from phaseprof.vllm.events import StepRan, WorkerEvent


class Settler:
    """Turns events into rows.

    Args:
        sink: Takes the rows.
        offset_ns: From the monotonic clock to Unix ns.
        process: Names this process in request ids.
        first_pass_id: Id of the first pass; later ones count up.

    Attributes:
        packed_seen: There were passes of continuous batching, whose requests are not known.
    """

    def __init__(self, sink: Sink, *, offset_ns: int, process: str, first_pass_id: int) -> None:
        self._rows = PassRows(sink, offset_ns=offset_ns, first_pass_id=first_pass_id)
        self._process = process
        serving = Serving(self._rows, sink.put_request, offset_ns, process, on_cache={})
        self._generations = Generations(serving)
        self._loops = Loops(serving)
        self._continuous = Continuous(
            self._rows, sink.put_request, offset_ns=offset_ns, process=process
        )
        self._steps = Steps(self._rows)
        self._engines = Engines(sink, offset_ns=offset_ns)
        self._mask_unread = False
        self.packed_seen = False

    @property
    def padding_unread(self) -> bool:
        """A pass may have had padding that could not be read without making the device wait."""
        return self._mask_unread or self._generations.padding_unread

    @property
    def passes_unseen(self) -> bool:
        """A generate call computed its prompt, and no pass of it was seen."""
        return self._generations.passes_unseen

    def handle(self, event: Event) -> None:
        """Take one event."""
        match event:
            case PassSeen():
                self._passed(event)
            case GenerationBegan():
                self._generations.began(event)
            case PromptKnown():
                self._generations.prompt(event)
            case RowsEnded():
                self._generations.rows_ended(event)
            case GenerationEnded():
                self._generations.ended(event)
                self._loops.generation_ended(event.generation, event.end_ns)
            case ModelSeen():
                self._rows.know(event)
                if event.pool is not None:
                    self._steps.pools[event.model_id] = event.pool
            case ExpertsChosen():
                self._rows.routing.chose(event)
            case VirtualTokens():
                self._generations.virtual(event)
                self._loops.virtual(event)
            case CacheGone():
                self._rows.forget_cache(event.cache)
                self._loops.cache_gone(event)
            case _ if isinstance(event, WorkerEvent):
                if isinstance(event, StepRan):
                    self._engines.ran(event)
                self._steps.handle(event)
            case _ if isinstance(event, CoreEvent):
                self._engines.handle(event)
            case _ if isinstance(event, EngineEvent):
                self._continuous.handle(event)

    def poll(self) -> None:
        """Put the passes again whose device time has become known."""
        self._rows.poll()

    def take_profiled(self) -> list[PassWindow]:
        """When the passes ran that were flagged `profiled` since the last call."""
        return self._rows.take_profiled()

    def finish(self, now_ns: int) -> None:
        """The session ends: nothing follows on any cache. Generate calls that still run stay open.

        Args:
            now_ns: Monotonic clock.
        """
        self._rows.poll()
        self._loops.finish(now_ns)
        self._continuous.finish()
        self._engines.finish()
        self._steps.finish()

    def _passed(self, event: PassSeen) -> None:
        ids = self._rows.begin(event)
        self._mask_unread |= event.mask_unread
        if event.aside == "packed":
            if self._continuous.claim(event, ids):
                return
            self.packed_seen |= not self._continuous.explains(event)
        generation = self._generations.find(abs(event.generation))
        declared = event.override.phase if event.override is not None else None
        if event.encoder or event.aside or declared in (Phase.OTHER, Phase.ENCODE):
            self._aside(event, ids, generation)
        elif generation is None:
            self._loops.passed(event, ids)
        elif event.generation > 0 and self._generations.owns(event, generation):
            self._generations.passed(event, ids, generation)
        else:
            self._loops.passed(event, ids, guest_of=generation.began.generation)

    def _aside(self, event: PassSeen, ids: PassIds, generation: Generation | None) -> None:
        """An encoder, a tower, a training, a scoring or a packed pass, or one that the user declares as such: it has no
        prefill and no decode tokens, and serves no request."""
        alone = f"{self._process}.p{ids.pass_id & 0xFFFFFFFF}"
        prefix = generation.prefix if generation is not None else alone
        forced = Phase.ENCODE if event.encoder else Phase.OTHER
        if event.override is not None:
            forced = event.override.phase
        past = 0 if event.encoder else event.past or 0
        batch = Batch(request_ids(prefix, event.rows), prompt=event.query)
        tokens = batch.divide(past=past, query=event.query, forced=forced)
        role = Role.ENCODER if event.encoder else Role.TARGET
        # What it found in a cache is no prompt that a request was spared.
        slices = tuple(one._replace(cached=0) for one in tokens.slices)
        tokens = replace(tokens, cached=0, slices=slices)
        self._rows.put(event, ids, tokens, Tag(TagSource.INFERRED, role=role), past=past)
