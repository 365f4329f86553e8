"""What the roofs say of batching: where reading turns to computing, and what each further sequence adds. Pure.

A decode step of b sequences with c tokens in the cache of each reads the weights once, W bytes, and of each sequence
its keys, values and states, K(c) bytes, and computes F(c) FLOPs for each::

    t_memory(b) = (W + b K) / bandwidth        t_compute(b) = b F / peak

    ridge:  t_memory(B) = t_compute(B)    B = (W / bandwidth) / (F / peak - K / bandwidth)
    knee:   B = (W / bandwidth) / max(F / peak, K / bandwidth)

Where K / bandwidth >= F / peak there is no ridge: the reading of KV keeps the step at the memory roof at any batch. The
knee is where the two straight parts of ``max(t_memory, t_compute)`` would meet: there is always one. Without KV both
are the critical batch of W / F x peak / bandwidth tokens ("How To Scale Your Model", jax-ml.github.io/scaling-book).
Bytes and FLOPs are those of `phaseprof.work.count`; experts that more tokens reach make W grow, which is why the ridge
is searched for and not computed.
"""

from __future__ import annotations

from collections.abc import Callable

from phaseprof.analyzers.roofline import RoofTimes, roof_times
from phaseprof.analyzers.sweeping.sweep_results import DecodeRoofs
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count

#: No step is larger: what is not reached by then never is.
_MOST = 1 << 24
#: All experts are read, and what is left is straight.
_STRAIGHT = 1 << 20


def decode_roofs(cost: ModelCost, ceilings: Ceilings, context_tokens: int) -> DecodeRoofs | None:
    """The roofs of decode steps with so many tokens in the cache of each sequence; None if the work is not known."""
    if not cost.covered or ceilings.flops_per_s <= 0 or ceilings.bytes_per_s <= 0:
        return None

    def step(batch: int) -> RoofTimes | None:
        return _times(cost, ceilings, Rows(context_tokens, 1, batch), batch)

    far, farther = step(_STRAIGHT), step(2 * _STRAIGHT)
    if far is None or farther is None:
        return None
    # What each sequence adds where all experts are read, and what is left of the step without any.
    kv_s = (farther.memory_s - far.memory_s) / _STRAIGHT
    compute_s = (farther.compute_s - far.compute_s) / _STRAIGHT
    weights_s = far.memory_s - kv_s * _STRAIGHT
    return DecodeRoofs(
        context_tokens=context_tokens,
        weights_ms=weights_s * 1e3,
        kv_ms=kv_s * 1e3,
        compute_ms=compute_s * 1e3,
        ridge=_ridge(step),
        knee=weights_s / max(kv_s, compute_s),
    )


def prefill_ridge(cost: ModelCost, ceilings: Ceilings) -> float | None:
    """Tokens of one prompt from which its computing takes longer than its reading; None if that is not known."""
    if not cost.covered or ceilings.flops_per_s <= 0 or ceilings.bytes_per_s <= 0:
        return None
    return _ridge(lambda tokens: _times(cost, ceilings, Rows(0, tokens, 1), 1), most=1 << 20)


def _times(cost: ModelCost, ceilings: Ceilings, rows: Rows, logits: int) -> RoofTimes | None:
    work = count(cost, (rows,), logits_tokens=logits, layout=None)
    if work.kv_read_bytes is None or work.kv_write_bytes is None:
        return None
    moved = work.weight_bytes + work.kv_read_bytes + work.kv_write_bytes
    return roof_times(flops=work.flops, moved_bytes=moved, ceilings=ceilings)


def _ridge(times: Callable[[int], RoofTimes | None], most: int = _MOST) -> float | None:
    """The size from which computing takes longer than reading; None if it does not up to ``most``.

    FLOPs for each byte grow with the size, so that there is one such size at most.
    """

    def ahead(size: int) -> float:
        found = times(size)
        return -1.0 if found is None else found.compute_s - found.memory_s

    low, high = 0, 1
    while ahead(high) < 0:
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ahead(middle) >= 0 else (middle, high)
    if low == 0:
        return 1.0
    before, after = ahead(low), ahead(high)
    return low + before / (before - after)
