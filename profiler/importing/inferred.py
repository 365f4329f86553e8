"""Steps of a recording in which nothing tells of them but kernels.

Three kinds of kernels are looked at. Those that write keys and values run once a layer, with a block for each token
of the step in engines that pack their steps. A sampler ends a step. Some attention kernels serve prompts alone or
decoding alone. All that follows is marked inferred; where it does not tell prefill from decode, the step is ``other``.
"""

from __future__ import annotations

import bisect
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from itertools import pairwise

from phaseprof.importing.forms import Marker, Step, StepWork
from phaseprof.phases import Phase, TagSource

#: Gaps between steps are at least this many times the usual gap between layers. Launches of a step follow one
#: another within microseconds; between steps stand sampling and a scheduler.
_GAP = 4.0
#: With fewer writes a step, samplers lie between layers rather than between steps (routers look alike).
_LEAST_LAYERS = 2
#: vLLM's kernels have a block for each token in x.
_WRITE_A_BLOCK = re.compile(
    r"reshape_and_cache(?:_flash)?_kernel|reshape_and_cache_kernel_flash"
    r"|concat_and_cache_(?:ds_)?mla_kernel"
)
#: SGLang's has a warp for each token and part of a row, four warps a block: with four parts a block is a token.
_WRITE_BY_WARPS = re.compile(r"store_kv_?cache<\d+l?, (\d+)[,>]")
_WARPS = 4
#: Kernels that write keys and values with grids of other meanings.
_WRITE = re.compile(r"reshape_and_cache|concat_and_cache_mla|store_kv_?cache|set_kv_buffer_kernel")
_SAMPLER = re.compile(
    r"argmax|sampling_?from_?(?:probs?|logits)|top_?k_?top_?p|top_?p_?(?:sampling|renorm)"
    r"|min_?p_?sampling|_topk_topp_kernel|gumbel_sample|rejection_(?:greedy_|random_)?sample"
    r"|chain_?speculative_?sampling|distribution_(?:elementwise_grid_stride|nullary)_kernel.*exponential",
    re.IGNORECASE,
)
#: Attention that serves queries of one token. FlashInfer's prefill kernels and FlashAttention's split ones are left
#: out: either runs for decoding too.
_DECODE = re.compile(
    r"paged_attention_(?:v1|v2|ll4mi)|_fwd_(?:grouped_)?kernel_stage1|flash_fwd_splitkv_mla"
    r"|BatchDecodeWithPagedKVCache|masked_multihead_attention|fmhaSm\d+\w*ForGen|mla_decode",
)
#: Attention that serves prompts alone.
_PREFILL = re.compile(
    r"BatchPrefillWithRaggedKVCache|fmhaSm\d+\w*Context|_fwd_kernel_prefix_prefill|mla_prefill"
)


class _Kind(Enum):
    WRITE = auto()
    SAMPLER = auto()
    DECODE = auto()
    PREFILL = auto()


@lru_cache(maxsize=4096)
def _kind_of(name: str) -> _Kind | None:
    for kind, pattern in (
        (_Kind.WRITE, _WRITE),
        (_Kind.DECODE, _DECODE),
        (_Kind.PREFILL, _PREFILL),
        (_Kind.SAMPLER, _SAMPLER),
    ):
        if pattern.search(name):
            return kind
    return None


def wants_marker(name: str) -> bool:
    """Whether a kernel is one of those by which steps are known."""
    return _kind_of(name) is not None


@dataclass(frozen=True, slots=True)
class Inferred:
    """Steps by their kernels.

    Attributes:
        steps: By begin; empty if they cannot be told apart.
        why: What they rest on, or why there are none.
    """

    steps: tuple[Step, ...]
    why: str


@dataclass(slots=True)
class _Group:
    """Kernels that are taken to be one step's."""

    first_ns: int
    last_ns: int
    thread_id: int | None
    writes: int = 0
    tokens: Counter[int | None] = field(default_factory=Counter)
    attention: set[_Kind] = field(default_factory=set)
    sampled: bool = False
    launches: Counter[int] = field(default_factory=Counter)

    def add(self, kind: _Kind, marker: Marker) -> None:
        """One more of its kernels."""
        begin, end = _time(marker)
        self.first_ns, self.last_ns = min(self.first_ns, begin), max(self.last_ns, end)
        if kind is _Kind.WRITE:
            self.writes += 1
            self.tokens[_tokens(marker)] += 1
            if marker.launch:
                self.launches[marker.launch] += 1
        elif kind is _Kind.SAMPLER:
            self.sampled = True
        else:
            self.attention.add(kind)

    @property
    def replayed(self) -> bool:
        """Several writes have one launch: that of a graph, whose grids are those of its capture, padding included."""
        return max(self.launches.values(), default=0) > 1

    @property
    def step_tokens(self) -> int | None:
        """Tokens of the step, by most of its layers: those of a draft model are fewer."""
        if not self.tokens or self.replayed:
            return None
        return self.tokens.most_common(1)[0][0]


def steps_of_kernels(markers: Sequence[Marker]) -> Inferred:
    """The steps that kernels show.

    Args:
        markers: Kernels that `wants_marker` wants, of one rank, with their launches where those are known. With
            launches a step is a stretch of the launching thread, from the end of the one before to its own last
            kernel's launch; without any (no host in the recording), it is a stretch of its device.
    """
    launched = [marker for marker in markers if marker.launched_ns is not None]
    if not launched:
        found = _steps_of_one(_busiest_device(markers))
        return replace(found, why=f"{found.why}, on the device alone") if found.steps else found
    threads: dict[int | None, list[Marker]] = {}
    for marker in launched:
        threads.setdefault(marker.thread_id, []).append(marker)
    each = [_steps_of_one(own) for own in threads.values()]
    each.sort(key=lambda found: -len(found.steps))
    steps = [step for found in each for step in found.steps]
    return Inferred(tuple(sorted(steps, key=_start_of)), each[0].why)


def _steps_of_one(markers: Sequence[Marker]) -> Inferred:
    """The steps of one thread, or of one stream."""
    ordered = sorted(markers, key=_order)
    kinds = [(kind, marker) for marker in ordered if (kind := _kind_of(marker.name)) is not None]
    if all(kind is not _Kind.WRITE for kind, _ in kinds):
        return Inferred((), "no kernel that writes keys and values is known in it")
    groups: list[_Group] = []
    if any(kind is _Kind.SAMPLER for kind, _ in kinds):
        groups = _by_samplers(kinds)
    rests_on = "kernels that write keys and values, up to the sampler"
    if not groups or statistics.median([group.writes for group in groups]) < _LEAST_LAYERS:
        groups = _by_gaps(kinds)
        rests_on = "kernels that write keys and values, and the gaps between them"
        if not groups:
            return Inferred((), "where one step ends and the next one begins cannot be seen")
    return Inferred(_as_steps(groups, rests_on), rests_on)


def settle_by_kernels(steps: Sequence[Step], markers: Sequence[Marker]) -> tuple[Step, ...]:
    """The steps, with what kernels that they launched tell of those whose phase is unknown.

    Args:
        steps: By begin.
        markers: Kernels that `wants_marker` wants, with their launches.
    """
    groups: dict[int, _Group] = {}
    threads: dict[int | None, list[int]] = {}
    for place, step in enumerate(steps):
        threads.setdefault(step.thread_id, []).append(place)
    begins = {thread: [steps[place].start_ns for place in own] for thread, own in threads.items()}
    for marker in sorted(markers, key=_order):
        kind = _kind_of(marker.name)
        if marker.launched_ns is None or kind is None or marker.thread_id not in threads:
            continue
        before = bisect.bisect_right(begins[marker.thread_id], marker.launched_ns) - 1
        if before >= 0:
            place = threads[marker.thread_id][before]
            if marker.launched_ns < steps[place].end_ns:
                groups.setdefault(place, _new_group(marker)).add(kind, marker)
    found = list(steps)
    for place, group in groups.items():
        step = steps[place]
        work = _work(group) if step.work.unknown else step.work
        if work.phase is not Phase.OTHER and step.work.unknown:
            found[place] = replace(
                step,
                tag_source=TagSource.INFERRED,
                name=f"{step.name}, by its attention kernels",
                work=work,
            )
    return tuple(found)


def _by_samplers(kinds: Sequence[tuple[_Kind, Marker]]) -> list[_Group]:
    """Writes up to a sampler and the sampler are a step; the next write begins another one."""
    groups: list[_Group] = []
    for kind, marker in kinds:
        if not groups or (groups[-1].sampled and kind is not _Kind.SAMPLER):
            groups.append(_new_group(marker))
        groups[-1].add(kind, marker)
    # What was sampled for a step that began before the recording has no writes.
    return [group for group in groups if group.writes]


def _by_gaps(kinds: Sequence[tuple[_Kind, Marker]]) -> list[_Group]:
    """Writes with far larger gaps between them than usual are different steps, if all steps then have as many."""
    writes = [marker for kind, marker in kinds if kind is _Kind.WRITE]
    gaps = [_time(after)[0] - _time(before)[1] for before, after in pairwise(writes)]
    if not gaps:
        return []
    least = _GAP * max(statistics.median(gaps), 1)
    borders = {after.start_ns for after, gap in zip(writes[1:], gaps, strict=True) if gap > least}
    groups: list[_Group] = []
    for kind, marker in kinds:
        begins = kind is _Kind.WRITE and marker.start_ns in borders
        if not groups or begins:
            groups.append(_new_group(marker))
        groups[-1].add(kind, marker)
    # A recording may begin and end within a step.
    counts = [group.writes for group in groups]
    inner = counts[1:-1] or counts
    whole = len(groups) > 1 and len(set(inner)) == 1 and inner[0] >= _LEAST_LAYERS
    return groups if whole and max(counts[0], counts[-1]) <= inner[0] else []


def _as_steps(groups: Sequence[_Group], rests_on: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    before: dict[int | None, int] = {}
    for group in groups:
        # What is launched between two steps belongs to the later one: its kernels before the first write.
        start = before.get(group.thread_id, group.first_ns)
        if group.thread_id is None:
            start = group.first_ns
        end = max(group.last_ns, start + 1)
        before[group.thread_id] = end
        tokens = group.step_tokens
        name = f"inferred from {rests_on}"
        if tokens is not None:
            name += f": {tokens} {'token' if tokens == 1 else 'tokens'}"
        steps.append(Step(start, end, group.thread_id, TagSource.INFERRED, name, _work(group)))
    return tuple(sorted(steps, key=_start_of))


def _work(group: _Group) -> StepWork:
    """What the attention of a step tells; nothing where it serves either."""
    tokens = group.step_tokens
    if group.attention == {_Kind.DECODE}:
        return StepWork(Phase.DECODE, 0, 0, None, tokens)
    if group.attention == {_Kind.PREFILL}:
        return StepWork(Phase.PREFILL, None, tokens, 0, 0)
    if group.attention == {_Kind.DECODE, _Kind.PREFILL}:
        return StepWork(Phase.MIXED)
    return StepWork(
        Phase.OTHER,
        unknown="its attention kernels serve prefill and decode alike, or are not known",
    )


def _tokens(marker: Marker) -> int | None:
    """Tokens of the step that a write ran in; None where its grid does not tell."""
    if marker.grid is None:
        return None
    if _WRITE_A_BLOCK.search(marker.name):
        return marker.grid[0]
    parts = _WRITE_BY_WARPS.search(marker.name)
    return marker.grid[0] if parts is not None and int(parts.group(1)) == _WARPS else None


def _busiest_device(markers: Sequence[Marker]) -> list[Marker]:
    """The kernels of the device and stream with most of them: others run the same steps, or something else."""
    if not markers:
        return []
    streams = Counter((marker.device, marker.stream) for marker in markers)
    best = streams.most_common(1)[0][0]
    return [marker for marker in markers if (marker.device, marker.stream) == best]


def _new_group(marker: Marker) -> _Group:
    begin, end = _time(marker)
    return _Group(begin, end, marker.thread_id if marker.launched_ns is not None else None)


def _time(marker: Marker) -> tuple[int, int]:
    """On the host where the launch is known, else on the device."""
    if marker.launched_ns is not None:
        return marker.launched_ns, marker.launched_ns + 1
    return marker.start_ns, marker.end_ns


def _order(marker: Marker) -> tuple[int, int]:
    return marker.start_ns if marker.launched_ns is None else marker.launched_ns, marker.start_ns


def _start_of(step: Step) -> int:
    return step.start_ns
