"""How long a pass takes: the sum over its operations, collectives between ranks, and the host that launches them.

    device = sum over operations + norms and elementwise kernels + collectives
    step   = max(device, host)           with kernels that the host launches one by one, ahead of the device
    step   = device + host               under CUDA graphs (one launch of all), and on a CPU

Products and attention take what the efficiency model of the device says for their shapes. What it does not model is
worked out from bytes and bandwidth: norms, rotary embeddings, activation functions and embeddings move their inputs
and outputs and cost a fixed time each; states and expansions of latents take their roof time over a part of the roof.

Each term has a 90 % interval. Errors of terms are not independent: they come from the same fit, the same clock and the
same assumptions. So intervals are added end to end, as if all errors had one sign, which is the cautious choice; the
interval of a sum is never narrower, relative to it, than those of its terms on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from phaseprof.analyzers.efficiency.estimate import Estimate, total
from phaseprof.analyzers.results import Roof
from phaseprof.analyzers.roofline import roof_times
from phaseprof.analyzers.steps.collectives import Link, all_gather, all_reduce
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Rows
from phaseprof.work.kv import KvLayout
from phaseprof.work.ops import AttentionShape, GemmShape, Op, OpKind, activation_bytes_of, ops_of

#: What kernels that only move data reach of the memory bandwidth: likely, at worst, at best.
_STREAMED = (0.80, 0.55, 0.95)
#: What operations without a fitted model reach of the nearer roof: likely, at worst, at best.
_UNFITTED = (0.60, 0.30, 0.90)
#: A fixed cost that is assumed, over the likely one: at best, at worst.
_FIXED_SPREAD = (0.6, 1.6)
#: Operations of a fixed cost only, if they move little.
_STREAMS = frozenset({OpKind.EMBEDDING, OpKind.NORM, OpKind.OTHER})


class OpTimes(Protocol):
    """What an efficiency model answers (`phaseprof.analyzers.efficiency`)."""

    def gemm(self, shape: GemmShape, dtype: str) -> Estimate:
        """One product."""
        ...

    def attention(self, shape: AttentionShape, dtype: str) -> Estimate:
        """Attention of one layer."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """How an engine runs a model on a device.

    Attributes:
        name: What to call it.
        norm_kernels, attention_kernels, mlp_kernels: Kernels of a norm with its residual, beside the products and the
            attention of a layer (rotary embedding, cache), and between its products (the activation function).
        pass_kernels: Kernels of a pass outside of its layers, the products not counted.
        streams: How often what lies between the products goes through memory, over once in and once out.
        kernel_s: Fixed cost of a small kernel on the device.
        launch_s: Host time to launch a kernel, with what the framework does for it.
        pass_s: Host time of a pass beside it.
        ahead: Whether the host runs ahead of the device, so that the slower one of both decides; else they take turns.
        overlaps: Whether the device computes while it reads; a CPU does so in part.
    """

    name: str
    norm_kernels: int
    attention_kernels: int
    mlp_kernels: int
    pass_kernels: int
    streams: float
    kernel_s: float
    launch_s: float
    pass_s: float
    ahead: bool
    overlaps: bool = True


#: A serving engine on a GPU: fused kernels, the whole step one CUDA graph. Its one launch is all that the host does.
GRAPHS = Runtime("CUDA graphs, fused kernels", 1, 1, 1, 6, 1.0, 2.2e-6, 0.0, 3.0e-5, False)
#: transformers, op by op, on a GPU. The counts are those of a Llama layer: 8 kernels of a norm and one of its residual,
#: 10 of the rotary embedding and 2 of the cache. A launch with torch and Python around it takes about 10 us; in a
#: recorded forward pass of transformers on an H100, stacks included, half of them took less than 19 us.
EAGER = Runtime("kernels launched one by one", 9, 12, 2, 20, 3.0, 2.2e-6, 1.0e-5, 1.0e-4, True)
#: transformers on a CPU: the same operators, called by the thread that computes.
CPU = Runtime("operators called one by one", 9, 12, 2, 20, 3.0, 0.0, 5.0e-6, 1.0e-4, False, False)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a pass runs on.

    Attributes:
        efficiency: How long its products and its attention take.
        ceilings: Roofs for the dtype that matrices are multiplied in.
        runtime: How they are launched.
        products: Dtype that the matrices of layers are multiplied in.
        activations: Dtype of everything else.
        other_ceilings: Roofs for `activations`; None: the same.
        ranks: Ranks that share each layer.
        link: What connects them; None for one rank.
    """

    efficiency: OpTimes
    ceilings: Ceilings
    runtime: Runtime
    products: str
    activations: str
    other_ceilings: Ceilings | None = None
    ranks: int = 1
    link: Link | None = None

    def roofs(self, kind: OpKind) -> Ceilings:
        """The roofs of an operation."""
        if kind in _WIDE_KINDS and self.other_ceilings is not None:
            return self.other_ceilings
        return self.ceilings

    def dtype(self, kind: OpKind) -> str:
        """What an operation multiplies in."""
        return self.activations if kind in _WIDE_KINDS else self.products


#: What quantized models compute in 16 bits all the same.
_WIDE_KINDS = frozenset(
    {
        OpKind.ATTENTION_PREFILL,
        OpKind.ATTENTION_DECODE,
        OpKind.LM_HEAD,
        OpKind.ROUTER,
        OpKind.STATE,
        OpKind.EMBEDDING,
        OpKind.NORM,
    }
)


@dataclass(frozen=True, slots=True)
class Term:
    """One kind and shape of operation in a pass; figures are sums over its calls.

    Attributes:
        kind: What for.
        calls: How often.
        flops: On one rank.
        moved_bytes: Weights, keys, values and states, on one rank.
        time: The modelled time.
        floor_s: FLOPs and moved bytes at the roofs, the longer one. 0 for what moves activations alone.
        roof: The one that takes longer; None without a floor.
        launches: Kernels.
        gemm: The shape of one call, where it is a product.
        attention: The shape of one call, where it is attention.
        what: What it is, where the kind does not say.
    """

    kind: OpKind
    calls: int
    flops: int
    moved_bytes: int
    time: Estimate
    floor_s: float
    roof: Roof | None
    launches: int = 0
    what: str = ""
    gemm: GemmShape | None = None
    attention: AttentionShape | None = None


@dataclass(frozen=True, slots=True)
class StepTime:
    """The modelled time of a pass.

    Attributes:
        terms: What the device does, in the order of a layer, collectives last.
        device: Their sum.
        host: What the host needs for the launches; zero under graphs but for the pass itself.
        step: The pass: see the module.
        launches: Kernels, as modelled.
        runtime: How they are launched.
    """

    terms: tuple[Term, ...]
    device: Estimate
    host: Estimate
    step: Estimate
    launches: int
    runtime: Runtime

    @property
    def floor_s(self) -> float:
        """The least time: each operation at its own roof, one after the other."""
        return sum(term.floor_s for term in self.terms)

    @property
    def flops(self) -> int:
        """FLOPs of one rank."""
        return sum(term.flops for term in self.terms)

    @property
    def moved_bytes(self) -> int:
        """Weights, keys, values and states that one rank moves."""
        return sum(term.moved_bytes for term in self.terms)

    @property
    def communication_s(self) -> float:
        """Time in collectives."""
        return sum(term.time.seconds for term in self.terms if term.kind is OpKind.COLLECTIVE)


def step_time(
    cost: ModelCost,
    prefill: Sequence[Rows],
    decode: Sequence[Rows] = (),
    *,
    machine: Machine,
    logits_tokens: int,
    layout: KvLayout | None = None,
) -> StepTime:
    """Model the time of a pass.

    Args:
        cost: What one rank holds (`restructured.tensor_parallel`), projections fused where the engine fuses them.
        prefill, decode: Rows of the pass; at least one.
        machine: What it runs on.
        logits_tokens: Positions for which the head is computed.
        layout: The cache as it is; None before one was seen.

    Raises:
        ValueError: If the model is not covered, or there are no rows.
    """
    ops = ops_of(cost, prefill, decode, logits_tokens=logits_tokens, layout=layout)
    tokens = sum(row.query * row.sequences for row in (*prefill, *decode))
    terms = [_term(op, machine) for op in _on_latents(ops, cost) if not _empty(op)]
    terms += _between(cost, tokens, machine)
    terms += _collectives(cost, tokens, logits_tokens, machine)
    runtime = machine.runtime
    terms.append(_fixed(runtime))
    launches = sum(term.launches for term in terms)
    device = total(term.time for term in terms)
    host = _spread(launches * runtime.launch_s + runtime.pass_s, "host time a launch, assumed")
    step = total([device, host])
    if runtime.ahead:
        step = Estimate(
            max(device.seconds, host.seconds),
            max(device.low, host.low),
            max(device.high, host.high),
            step.reference,
        )
    return StepTime(tuple(terms), device, host, step, launches, runtime)


def _on_latents(ops: Sequence[Op], cost: ModelCost) -> list[Op]:
    """Decode that attends to latents as they are has one key-value head of their width, which all query heads share."""
    groups = iter(cost.attention)
    found = []
    for op in ops:
        if op.kind is not OpKind.ATTENTION_DECODE or op.attention is None:
            found.append(op)
            continue
        group = next(groups)
        if all(row.query <= group.absorbed_query_tokens for row in op.attention.rows):
            latent = _latent_width(group)
            whole = group.absorbed_flops_per_pair // (2 * group.query_heads)
            # All that a token keeps is read for the scores, the latent alone for the values.
            shape = replace(op.attention, kv_heads=1, qk_head_dim=whole - latent, v_head_dim=latent)
            op = replace(op, attention=shape)
        found.append(op)
    return found


def _latent_width(group: AttentionCost) -> int:
    """The width r of a latent beside which d elements stand for positions, from the FLOPs of a pair, 2 Hq (2 r + d),
    and those of expanding a latent, 2 Hq r (d_qk - d + d_v)."""
    whole = group.absorbed_flops_per_pair / (2 * group.query_heads)
    quarter = (group.qk_head_dim + group.v_head_dim - whole) / 4
    expanded = group.expand_flops_per_token / (4 * group.query_heads)
    return round(math.sqrt(quarter * quarter + expanded) - quarter)


def _empty(op: Op) -> bool:
    return not (op.flops or op.weight_bytes or op.kv_bytes or op.activation_bytes)


def _term(op: Op, machine: Machine) -> Term:
    moved = op.weight_bytes + (op.kv_bytes or 0)
    roofs = machine.roofs(op.kind)
    times = roof_times(flops=op.flops, moved_bytes=moved, ceilings=roofs)
    if op.gemm is not None:
        time = machine.efficiency.gemm(op.gemm, machine.dtype(op.kind)).times(op.calls)
    elif op.attention is not None:
        time = machine.efficiency.attention(op.attention, machine.dtype(op.kind)).times(op.calls)
    elif op.kind in _STREAMS:
        time = _streamed(op, moved, machine)
    else:
        time = _unfitted(times.floor_s, op.calls, machine.runtime)
    return Term(
        kind=op.kind,
        calls=op.calls,
        flops=op.flops,
        moved_bytes=moved,
        time=time,
        floor_s=times.floor_s,
        roof=times.nearest if times.floor_s else None,
        launches=op.calls * (machine.runtime.norm_kernels if op.kind is OpKind.NORM else 1),
        gemm=op.gemm,
        attention=op.attention,
    )


def _streamed(op: Op, moved: int, machine: Machine) -> Estimate:
    """What only moves data. What `OTHER` computes is little beside the bytes that it moves."""
    runtime = machine.runtime
    kernels = op.calls * (runtime.norm_kernels if op.kind is OpKind.NORM else 1)
    streams = runtime.streams if op.kind is OpKind.NORM else 1.0
    size = moved + op.activation_bytes * streams
    return _moving(size, kernels, machine, op.flops / machine.ceilings.flops_per_s)


def _moving(size_bytes: float, kernels: int, machine: Machine, at_least_s: float = 0.0) -> Estimate:
    likely, worst, best = (size_bytes / (machine.ceilings.bytes_per_s * p) for p in _STREAMED)
    quick, slow = _FIXED_SPREAD
    fixed = kernels * machine.runtime.kernel_s
    return Estimate(
        max(fixed + likely, at_least_s),
        max(fixed * quick + best, at_least_s),
        max(fixed * slow + worst, at_least_s),
        "bytes over bandwidth, and a fixed cost each",
    )


def _unfitted(floor_s: float, calls: int, runtime: Runtime) -> Estimate:
    likely, worst, best = _UNFITTED
    quick, slow = _FIXED_SPREAD
    fixed = calls * runtime.kernel_s
    return Estimate(
        fixed + floor_s / likely,
        fixed * quick + floor_s / best,
        fixed * slow + floor_s / worst,
        "a part of the nearer roof, assumed",
    )


def _between(cost: ModelCost, tokens: int, machine: Machine) -> list[Term]:
    """Rotary embeddings, cache updates and activation functions: elementwise kernels beside those of `ops_of`."""
    width = activation_bytes_of(cost.dtype)
    runtime = machine.runtime
    found = []
    layers = sum(group.layers for group in cost.attention)
    turned = sum(
        group.layers * (group.query_heads + group.kv_heads) * group.qk_head_dim
        for group in cost.attention
    )
    if layers:
        size = 2 * tokens * turned * width * runtime.streams
        kernels = layers * runtime.attention_kernels
        found.append(_elementwise("rotary and cache", layers, size, kernels, machine))
    inner = [
        (matrix.count, matrix.inputs) for matrix in cost.matmuls if matrix.role == OpKind.DOWN.value
    ]
    if inner:
        # Gate and up go in, their product comes out.
        size = 3 * tokens * width * sum(count * columns for count, columns in inner)
        calls = sum(count for count, _ in inner)
        moved = size * (1 + runtime.streams) / 2
        kernels = calls * runtime.mlp_kernels
        found.append(_elementwise("activation function", calls, moved, kernels, machine))
    return found


def _elementwise(what: str, calls: int, size_bytes: float, kernels: int, machine: Machine) -> Term:
    time = _moving(size_bytes, kernels, machine)
    return Term(OpKind.OTHER, calls, 0, 0, time, 0.0, None, launches=kernels, what=what)


def _fixed(runtime: Runtime) -> Term:
    """Positions, masks, sampling."""
    kernels = runtime.pass_kernels
    time = _spread(kernels * runtime.kernel_s, "a fixed cost each")
    return Term(
        OpKind.OTHER, 1, 0, 0, time, 0.0, None, launches=kernels, what="positions, sampling"
    )


def _spread(seconds: float, reference: str) -> Estimate:
    quick, slow = _FIXED_SPREAD
    return Estimate(seconds, seconds * quick, seconds * slow, reference)


def _collectives(cost: ModelCost, tokens: int, logits_tokens: int, machine: Machine) -> list[Term]:
    """Two all-reduces of the hidden state a layer, one after the embedding, and the logits to one rank."""
    link, ranks = machine.link, machine.ranks
    if link is None or ranks < 2:
        return []
    width = activation_bytes_of(cost.dtype)
    layers = sum(group.layers for group in cost.attention)
    layers += sum(group.layers for group in cost.states)
    reduced = 2 * layers + 1
    hidden = all_reduce(tokens * cost.hidden_size * width, ranks, link).times(reduced)
    found = [_collective("all-reduce", reduced, hidden)]
    heads = [matrix for matrix in cost.matmuls if matrix.role == OpKind.LM_HEAD.value]
    if heads and logits_tokens:
        size = logits_tokens * ranks * sum(m.outputs * m.count for m in heads) * width
        found.append(_collective("gather of logits", 1, all_gather(size, ranks, link)))
    return found


def _collective(what: str, calls: int, time: Estimate) -> Term:
    return Term(OpKind.COLLECTIVE, calls, 0, 0, time, 0.0, None, launches=calls, what=what)
