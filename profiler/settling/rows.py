"""Make rows of passes: ids, work, warm-up flags, and device time that comes late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

from phaseprof.attribution import PassWindow
from phaseprof.events import ModelSeen, PassSeen
from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import EngineStep, ForwardPass, Request, Warmup
from phaseprof.routing import Routing
from phaseprof.sequences import PassTokens, with_drafts
from phaseprof.timers import Span
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Adapted, Rows, Work, can_count_experts, count, pairs
from phaseprof.work.kv import KvLayout
from phaseprof.work.merging import merged
from phaseprof.work.paged import PagedPool

#: Passes whose experts are remembered: a pass may be put again once the next one on its cache settles it.
_MAX_UNSETTLED = 1024


class Sink(Protocol):
    """Where rows go. A row with the id of an earlier one replaces it."""

    def put_pass(self, row: ForwardPass) -> None:
        """Take a pass."""
        ...

    def put_request(self, row: Request) -> None:
        """Take a request."""
        ...

    def put_step(self, row: EngineStep) -> None:
        """Take a step of an engine's scheduler."""
        ...


@dataclass(frozen=True, slots=True)
class PassIds:
    """The numbers of a pass: in the trace, and within its model."""

    pass_id: int
    step: int


@dataclass(frozen=True, slots=True)
class Tag:
    """What was derived of a pass besides its tokens.

    Attributes:
        source: Where the label comes from; a label that the user gave overrules it.
        role: Whose pass it is.
        drafts: Drafted tokens that it verifies.
        accepted: How many of them were accepted; None until the next pass tells.
        may_change: It is put again once it is settled.
    """

    source: TagSource
    role: Role = Role.TARGET
    drafts: int = 0
    accepted: int | None = 0
    may_change: bool = False


@dataclass(frozen=True, slots=True)
class PackedRow:
    """How a packed row holds the sequences of a pass: they are no rectangle of rows and slots.

    Attributes:
        rows: One a sequence.
        padding: Slots of the row beyond them. Each is computed like a token that attends to itself.
        pool: The cache; None if it is not known.
        graph: The pass was a CUDA graph.
        adapted: Tokens of those of them that have an adapter of their own; None without.
    """

    rows: tuple[Rows, ...]
    padding: int
    pool: PagedPool | None
    graph: bool = False
    adapted: Adapted | None = None


@dataclass(slots=True)
class _Model:
    cost: ModelCost | None = None
    dtype: str = ""
    masked: bool = False
    steps: int = 0
    seen: set[Phase] = field(default_factory=set)
    layout: KvLayout | None = None


class PassRows:
    """Makes the rows of passes and puts them into a sink.

    Args:
        sink: Takes them.
        offset_ns: From the monotonic clock to Unix ns.
        first_pass_id: Id of the first pass; later ones count up.
    """

    def __init__(self, sink: Sink, *, offset_ns: int, first_pass_id: int) -> None:
        self._sink = sink
        self._offset_ns = offset_ns
        self._next_pass_id = first_pass_id
        self._models: dict[str, _Model] = {}
        self._layouts: dict[int, KvLayout] = {}
        #: Passes whose device time is not known yet, in order, and the last version of each.
        self._waiting: deque[tuple[int, Span]] = deque()
        self._unresolved: dict[int, ForwardPass] = {}
        #: Device times of passes that are put again for another reason.
        self._resolved: dict[int, int | None] = {}
        self._profiled: list[PassWindow] = []
        self.routing = Routing()
        self._experts_read: dict[int, int] = {}

    def know(self, event: ModelSeen) -> None:
        """Take note of a model."""
        model = self._models.setdefault(event.model_id, _Model())
        model.cost = event.cost
        model.dtype = event.dtype
        model.masked = event.masked

    def begin(self, event: PassSeen) -> PassIds:
        """Number a pass."""
        model = self._models.setdefault(event.model_id, _Model())
        if event.layout is not None:
            self._layouts[event.cache] = model.layout = event.layout
        ids = PassIds(self._next_pass_id, model.steps)
        self._next_pass_id += 1
        model.steps += 1
        if model.cost is not None and model.cost.experts:
            layers = sum(experts.layers for experts in model.cost.experts)
            read = self.routing.take(event.thread_id, event.start_ns, layers)
            if read is not None and can_count_experts(model.cost):
                self._experts_read[ids.pass_id] = read
                if len(self._experts_read) > _MAX_UNSETTLED:
                    del self._experts_read[next(iter(self._experts_read))]
        return ids

    def forget_cache(self, cache: int) -> None:
        """A cache was freed."""
        self._layouts.pop(cache, None)

    def put(
        self,
        event: PassSeen,
        ids: PassIds,
        tokens: PassTokens,
        tag: Tag,
        *,
        past: int,
        packing: PackedRow | None = None,
    ) -> ForwardPass:
        """Make the row of a pass and put it.

        Args:
            event: The pass.
            ids: Its numbers.
            tokens: Its tokens.
            tag: What else is known of it.
            past: Slots in the cache before it, for each of its rows; not used where it is packed.
            packing: Its sequences, where it is one row that holds many.
        """
        model = self._models[event.model_id]
        experts_read = self._experts_read.get(ids.pass_id)
        masked = model.masked or tokens.padding > 0
        if packing is None:
            sequences = event.rows
            context = (past + event.query) * sequences
            attended = pairs(past, event.query) * sequences
            work = self._work(event, past, model, masked=masked, experts_read=experts_read)
        else:
            sequences = len(packing.rows)
            context = sum(row.past + row.query for row in packing.rows)
            attended = sum(pairs(row.past, row.query) for row in packing.rows)
            work = self._packed_work(event, packing, model, experts_read)
        unresolved = event.span is not None and _is_open(event.span)
        row = ForwardPass(
            pass_id=ids.pass_id,
            step=ids.step,
            model_id=event.model_id,
            role=tag.role,
            phase=tokens.phase,
            tag_source=TagSource.USER if event.override else tag.source,
            start_ns=event.start_ns + self._offset_ns,
            end_ns=event.end_ns + self._offset_ns,
            host_ns=event.end_ns - event.start_ns,
            device_ns=None if event.span is None else event.span.device_ns,
            sequences=sequences,
            prefill_tokens=tokens.prefill,
            decode_tokens=tokens.decode,
            draft_tokens=tag.drafts,
            accepted_tokens=tag.accepted,
            cached_tokens=tokens.cached,
            recomputed_tokens=tokens.recomputed,
            padding_tokens=None if event.mask_unread else tokens.padding,
            context_tokens=context,
            attention_pairs=attended,
            logits_tokens=event.logits,
            # A packed pass knows the drafts of each sequence.
            slices=tokens.slices
            if packing is not None
            else with_drafts(tokens.slices, tag.drafts, tag.accepted),
            flops=None if work is None else work.flops,
            weight_bytes=None if work is None else work.weight_bytes,
            kv_read_bytes=None if work is None else work.kv_read_bytes,
            kv_write_bytes=None if work is None else work.kv_write_bytes,
            kv_held_bytes=None if work is None else work.kv_held_bytes,
            kv_allocated_bytes=None if work is None else work.kv_allocated_bytes,
            cache_copy_bytes=None if work is None else work.cache_copy_bytes,
            experts_read=experts_read,
            dtype=model.dtype,
            thread_id=event.thread_id,
            warmup=_warmup(event, tokens.phase, model),
            compiled=event.compiled,
            graph=packing is not None and packing.graph,
            profiled=event.profiled,
            error=event.error,
            may_change=tag.may_change,
        )
        if event.span is not None and unresolved and ids.pass_id not in self._unresolved:
            self._waiting.append((ids.pass_id, event.span))
            self._unresolved[ids.pass_id] = row
        self.send(row)
        if row.profiled:
            self._profiled.append(PassWindow(row.pass_id, row.thread_id, row.start_ns, row.end_ns))
        return row

    def send(self, row: ForwardPass) -> None:
        """Put a row again; one whose device time is still to come stays open until it has."""
        if row.pass_id in self._unresolved:
            self._unresolved[row.pass_id] = row
            row = replace(row, may_change=True)
        elif row.pass_id in self._resolved:
            # Whoever puts it again may have seen it before its device time came.
            row = replace(row, device_ns=self._resolved[row.pass_id])
            if not row.may_change:
                del self._resolved[row.pass_id]
        self._sink.put_pass(row)

    def poll(self) -> None:
        """Put the passes again whose device time has become known, or never will be."""
        # Passes of other devices and threads may be done before the first in line.
        for _ in range(len(self._waiting)):
            pass_id, span = self._waiting.popleft()
            if _is_open(span):
                self._waiting.append((pass_id, span))
                continue
            row = replace(self._unresolved.pop(pass_id), device_ns=span.device_ns)
            if row.may_change:
                self._resolved[pass_id] = row.device_ns
            self._sink.put_pass(row)

    def take_profiled(self) -> list[PassWindow]:
        """When the passes ran that were flagged `profiled` since the last call."""
        taken, self._profiled = self._profiled, []
        return taken

    def _packed_work(
        self, event: PassSeen, packing: PackedRow, model: _Model, experts_read: int | None
    ) -> Work | None:
        if model.cost is None or not model.cost.covered or not packing.rows:
            return None
        pool = packing.pool
        # Encoders have none: their pass keeps nothing, and reads the keys and values that it makes.
        cached = pool is None or pool.holds
        padding = (Rows(0, 1, packing.padding),) if packing.padding else ()
        layout = None if pool is None or not cached else pool.layout
        rows = merged(packing.rows, model.cost, layout)
        work = count(
            model.cost,
            rows + padding,
            logits_tokens=event.logits,
            layout=layout,
            cached=cached,
            experts_read=experts_read,
            adapted=packing.adapted,
        )
        return work if pool is None else pool.refine(work, rows)

    def _work(
        self,
        event: PassSeen,
        past: int,
        model: _Model,
        *,
        masked: bool,
        experts_read: int | None,
    ) -> Work | None:
        if model.cost is None or not model.cost.covered or not event.query:
            return None
        if model.cost.cross and event.source is None:
            # What it attended to could not be read.
            return None
        return count(
            model.cost,
            (Rows(past=past, query=event.query, sequences=event.rows),),
            logits_tokens=event.logits,
            layout=self._layouts.get(event.cache, model.layout) if event.cache else None,
            cached=event.cache > 0,
            masked=masked,
            source=event.source,
            experts_read=experts_read,
        )


def _is_open(span: Span) -> bool:
    return span.device_ns is None and not span.lost


def _warmup(event: PassSeen, phase: Phase, model: _Model) -> Warmup | None:
    if event.warmup:
        model.seen.add(phase)
        return Warmup.REQUESTED
    if event.compiling or (event.span is not None and event.span.captured):
        return Warmup.COMPILE
    if phase not in model.seen and phase is not Phase.EXTEND:
        model.seen.add(phase)
        return Warmup.FIRST
    return None
