"""Interference: decode time that requests lose to the prefills of others, token by token. No loop over rows.

A token's inter-token latency is the time since the token before it. If the step that yields it also computes the prompt
of another request, what it takes beyond the usual is lost to that prompt. The usual is the median of the tokens that
come from steps of decode alone with about as many sequences (within a factor of two); where there are too few of those,
of all such tokens. That is an estimate: nobody knows what the same step had taken without the prompt.

A token before which more steps than usual passed without its request (it was preempted, or left out) is held back, and
counted apart. Tokens that come together with the one before (accepted drafts) wait for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    groups,
    int_column,
    named,
    names,
    nearest_ranks,
    percentiles_ms,
    plain,
    scalar,
    total,
    unsteady,
)
from phaseprof.analyzers.engine import step_keys
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.serving import Cause, Interference, RequestLoss, SlowToken
from phaseprof.trace.columns import to_column

#: Tokens that a median of steps of about the same size has to rest on.
_ENOUGH = 5
#: Requests and tokens that are named.
_NAMED = 5

_I64 = pa.int64()
_ZERO = scalar(0, _I64)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens after the first of each request, in the order of the requests. All but `lengths` are of one length.

    Attributes:
        lengths: How many there are of each request.
        request: Row of their request.
        itl_ns: Time since the token before.
        step: The step that yielded them.
        pass_row: The row of its pass in the table; null if it is not known.
        prefill: Prompt tokens that the step computed.
        decoding: Sequences that it decoded.
        counts: They did not come together with the token before.
        held: More steps than usual lie before them.
        slowed: Their step also computed the prompt of another request.
    """

    lengths: pa.Array
    request: pa.Array
    itl_ns: pa.Array
    step: pa.Array
    pass_row: pa.Array
    prefill: pa.Array
    decoding: pa.Array
    counts: pa.Array
    held: pa.Array
    slowed: pa.Array


def interference(requests: pa.Table, passes: pa.Table, primary: Primary) -> Interference | None:
    """What the steps that mix prefill with decode cost; None if no token came from a step of decode alone.

    Args:
        requests: The `requests` table, with its `itl_steps`.
        passes: The `passes` table.
        primary: Which model.
    """
    everyone = requests.filter(named(names(requests, "model_id"), primary.model_id))
    rows = _steady(everyone)
    mine = pc.and_(
        named(names(passes, "model_id"), primary.model_id),
        named(names(passes, "role"), *primary.roles),
    )
    own = passes.select(["rank", "step", *_READ]).filter(mine)
    own = own.append_column("row", pc.cast(pc.indices_nonzero(mine), _I64))
    if rows.num_rows == 0 or own.num_rows == 0:
        return None
    tokens = _tokens(rows, own)
    plainly = _all(tokens.counts, pc.invert(tokens.held), pc.invert(tokens.slowed))
    base_ns = tokens.itl_ns.filter(plainly)
    if len(base_ns) == 0:
        return None
    (typical_ns,) = nearest_ranks(base_ns, 0.5)
    usual = _usual(tokens, plainly, round(typical_ns))
    over = pc.max_element_wise(pc.subtract(tokens.itl_ns, usual), _ZERO)
    lost = pc.if_else(tokens.slowed, over, _ZERO)
    held = pc.if_else(tokens.held, over, _ZERO)
    whole = total(tokens.itl_ns)
    losses = _per_request(lost, tokens.lengths)
    return Interference(
        tokens=total(pc.cast(tokens.counts, _I64)),
        slowed=total(pc.cast(tokens.slowed, _I64)),
        typical_ms=typical_ns / 1e6,
        slowed_ms=percentiles_ms(tokens.itl_ns.filter(tokens.slowed)),
        lost_ms=total(lost) / 1e6,
        lost_share=total(lost) / whole if whole else 0.0,
        requests=total(pc.cast(pc.greater(losses, _ZERO), _I64)),
        held=total(pc.cast(tokens.held, _I64)),
        held_ms=total(held) / 1e6,
        worst=tuple(_worst(rows, tokens, losses)),
        slowest=(
            *_slowest(rows, everyone, passes, tokens, usual, lost, Cause.PREFILL),
            *_slowest(rows, everyone, passes, tokens, usual, held, Cause.HELD),
        ),
    )


_READ = ("prefill_tokens", "decode_tokens", "draft_tokens")


def _steady(requests: pa.Table) -> pa.Table:
    """Those that say which steps yielded their tokens, without warm-up, or with it for want of others."""
    told = requests.filter(pc.is_valid(plain(requests.column("itl_steps"))))
    quiet = told.filter(pc.invert(unsteady(told)))
    return quiet if quiet.num_rows else told


def _tokens(requests: pa.Table, passes: pa.Table) -> _Tokens:
    gaps, yields = plain(requests.column("itl_ns")), plain(requests.column("itl_steps"))
    request = pc.cast(pc.list_parent_indices(yields), _I64)
    itl_ns, step = pc.list_flatten(gaps), pc.list_flatten(yields)
    rank = int_column(requests, "rank").take(request)
    known = step_keys(int_column(passes, "rank"), int_column(passes, "step"))
    pass_row = pc.index_in(step_keys(rank, step), value_set=known)
    prefill = pc.fill_null(int_column(passes, "prefill_tokens").take(pass_row), _ZERO)
    decoding = pc.subtract(int_column(passes, "decode_tokens"), int_column(passes, "draft_tokens"))
    counts = pc.greater(itl_ns, _ZERO)
    apart = _steps_before(request, step)
    usual = nearest_ranks(apart.filter(counts), 0.5)
    held = pc.and_(counts, pc.greater(apart, scalar(round(usual[0]) if usual else 1, _I64)))
    # What a request computes again after it was held back is a prompt of its own.
    slowed = _all(counts, pc.invert(held), pc.greater(prefill, _ZERO))
    return _Tokens(
        lengths=pc.cast(pc.list_value_length(yields), _I64),
        request=request,
        itl_ns=itl_ns,
        step=step,
        pass_row=column(passes, "row").take(pass_row),
        prefill=prefill,
        decoding=pc.fill_null(decoding.take(pass_row), _ZERO),
        counts=counts,
        held=held,
        slowed=slowed,
    )


def _steps_before(request: pa.Array, step: pa.Array) -> pa.Array:
    """How many steps later than the token before each came. Of the second token of a request that is not known: 1."""
    if len(step) == 0:
        return step
    one = scalar(1, _I64)
    head = to_column([1], _I64)
    same = pc.equal(request.slice(1), request.slice(0, len(request) - 1))
    apart = pc.if_else(same, pc.subtract(step.slice(1), step.slice(0, len(step) - 1)), one)
    return pa.concat_arrays([head, apart])


def _usual(tokens: _Tokens, plainly: pa.Array, typical_ns: int) -> pa.Array:
    """The usual latency of each token: of those from steps of decode alone that had about as many sequences."""
    most = scalar(1, _I64)
    size = pc.cast(
        pc.floor(pc.log2(pc.cast(pc.max_element_wise(tokens.decoding, most), pa.float64()))), _I64
    )
    found = {}
    base_ns = tokens.itl_ns.filter(plainly)
    order, runs = groups(size.filter(plainly))
    ordered = base_ns.take(order)
    for value, begin, length in runs:
        if length >= _ENOUGH:
            (median,) = nearest_ranks(ordered.slice(begin, length), 0.5)
            found[value] = round(median)
    largest = pc.max(size).as_py()
    by_size = to_column([found.get(value, typical_ns) for value in range(largest + 1)], _I64)
    return by_size.take(size)


def _per_request(values: pa.Array, lengths: pa.Array) -> pa.Array:
    """Sums by request: differences of running sums, for the values lie in the order of the requests."""
    head = to_column([0], _I64)
    sums = pa.concat_arrays([head, pc.cumulative_sum(values)]).take(pc.cumulative_sum(lengths))
    return pc.subtract(sums, pa.concat_arrays([head, sums.slice(0, max(len(sums) - 1, 0))]))


def _worst(requests: pa.Table, tokens: _Tokens, losses: pa.Array) -> Iterator[RequestLoss]:
    whole = _per_request(tokens.itl_ns, tokens.lengths)
    slowed = _per_request(pc.cast(tokens.slowed, _I64), tokens.lengths)
    for row in _largest(losses):
        lost_ns = losses[row].as_py()
        yield RequestLoss(
            request_id=str(column(requests, "request_id")[row].as_py()),
            client_id=column(requests, "client_id")[row].as_py(),
            tokens=slowed[row].as_py(),
            lost_ms=lost_ns / 1e6,
            share=lost_ns / whole[row].as_py(),
        )


def _slowest(
    requests: pa.Table,
    everyone: pa.Table,
    passes: pa.Table,
    tokens: _Tokens,
    usual: pa.Array,
    over: pa.Array,
    cause: Cause,
) -> Iterator[SlowToken]:
    ids, clients = column(requests, "request_id"), column(requests, "client_id")
    for place in _largest(over):
        row, step = tokens.request[place].as_py(), tokens.step[place].as_py()
        own = str(ids[row].as_py())
        by: tuple[str, ...] = ()
        if cause is Cause.PREFILL:
            by = tuple(_prefilling(everyone, passes, tokens.pass_row[place].as_py(), step))
        yield SlowToken(
            request_id=own,
            client_id=clients[row].as_py(),
            # The list begins with the second token.
            token=place - pc.index(tokens.request, scalar(row, _I64)).as_py() + 1,
            itl_ms=tokens.itl_ns[place].as_py() / 1e6,
            typical_ms=usual[place].as_py() / 1e6,
            rank=int_column(requests, "rank")[row].as_py(),
            step=step,
            cause=cause,
            prefill_tokens=tokens.prefill[place].as_py() if cause is Cause.PREFILL else 0,
            by=by,
        )


def _prefilling(requests: pa.Table, passes: pa.Table, pass_row: int, step: int) -> Iterator[str]:
    """The requests of a pass that got none of their later tokens from it: those whose prompt it computed."""
    served = [part["request_id"] for part in passes.column("slices")[pass_row].as_py()]
    rows = pc.index_in(to_column(served, pa.string()), value_set=column(requests, "request_id"))
    for name, row in zip(served, rows.to_pylist(), strict=True):
        if row is None:
            continue
        steps = requests.column("itl_steps")[row].as_py()
        if steps is not None and step not in steps:
            yield str(requests.column("client_id")[row].as_py() or name)


def _largest(values: pa.Array) -> list[int]:
    """Where the largest positive values are, the largest first."""
    order = pc.array_sort_indices(values, order="descending").slice(0, _NAMED).to_pylist()
    return [place for place in order if values[place].as_py() > 0]


def _all(first: pa.Array, *others: pa.Array) -> pa.Array:
    for flags in others:
        first = pc.and_(first, flags)
    return first
