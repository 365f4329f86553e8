"""One way to use transformers, the passes that follow from its inputs, and what is held against them.

A case is data: its name, group and sentence make the table of the documentation, its function and its passes the test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from phaseprof.phases import RequestTokens, check_invariants
from phaseprof.trace.reader import Trace

#: Gives what a function returned and its trace.
Record = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Pass:
    """A pass, in tokens over all its rows. `tokens` are those of its slices, whatever they count as."""

    phase: str
    prefill: int = 0
    decode: int = 0
    cached: int = 0
    padding: int = 0
    role: str = "target"
    drafts: int = 0
    accepted: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Served:
    """A row of the requests table: sequences, and tokens of its prompt, its cached prefix and its output."""

    prompt: int
    output: int
    cached: int = 0
    sequences: int = 1
    finish: str = "length"


@dataclass(frozen=True)
class Case:
    """One way to use transformers.

    Attributes:
        name: Its name, also of the test.
        group: Which part of the table it stands in.
        says: What it shows, in one sentence.
        make: Makes the model, or whatever `run` takes.
        run: What a user does. Run twice: without the profiler, and with it.
        passes: What follows from the inputs.
        requests: The requests, in order; None where the passes say enough.
        complete: All of its requests are: the invariants of the contract can be checked.
        since: The first of the tested versions of transformers that can run it, and why the older one cannot.
    """

    name: str
    group: str
    says: str
    make: Callable[[], Any]
    run: Callable[[Any], Any]
    passes: Sequence[Pass]
    requests: Sequence[Served] | None = None
    complete: bool = True
    since: tuple[str, str] | None = None

    @property
    def not_here(self) -> str | None:
        """Why the transformers that is installed cannot run it; None if it can."""
        if self.since is None or _numbers(transformers.__version__) >= _numbers(self.since[0]):
            return None
        return f"needs transformers {self.since[0]}: {self.since[1]}"


def prefill(tokens: int, cached: int = 0, padding: int = 0, role: str = "target") -> Pass:
    return Pass("prefill", tokens, 0, cached, padding, role, tokens=tokens)


def decode(tokens: int, padding: int = 0, role: str = "target", cached: int = 0) -> Pass:
    return Pass("decode", 0, tokens, cached, padding, role, tokens=tokens)


def mixed(pre: int, dec: int, cached: int = 0, padding: int = 0) -> Pass:
    return Pass("mixed", pre, dec, cached, padding, tokens=pre + dec)


def verify(drafts: int, accepted: int, prompt: int = 0, cached: int = 0) -> Pass:
    """A verification: of the last token and the drafts, or of a prompt and the drafts."""
    phase, leading = ("mixed", 0) if prompt else ("decode", 1)
    tokens = prompt + leading + drafts
    return Pass(
        phase,
        prompt,
        leading + drafts,
        cached,
        drafts=drafts,
        accepted=accepted,
        tokens=tokens,
    )


def encode(tokens: int) -> Pass:
    return Pass("encode", role="encoder", tokens=tokens)


def other(tokens: int) -> Pass:
    return Pass("other", tokens=tokens)


def check(case: Case, record: Record) -> Trace:
    """Run a case without and with the profiler, and hold everything against it. Gives its trace."""
    with warnings.catch_warnings():
        # What these libraries warn of is not our subject.
        warnings.simplefilter("ignore")
        subject = case.make()
        alone = case.run(subject)
        recorded = record(lambda: case.run(subject))
    assert_same(alone, recorded.output)
    trace: Trace = recorded.trace
    assert seen(trace) == list(case.passes)
    assert trace.damage == ()
    notes = [note for meta in trace.metas for note in meta.not_measured]
    # What can be said of the work of a model is not the subject here.
    of_work = ("FLOPs and bytes of ", "the experts that each pass reads")
    assert [note for note in notes if not note.what.startswith(of_work)] == []
    if case.requests is not None:
        assert served(trace) == list(case.requests)
    check_trace(trace, complete=case.complete)
    return trace


def seen(trace: Trace) -> list[Pass]:
    """The passes of a trace in the order in which they ran."""
    return [
        Pass(
            phase=row["phase"],
            prefill=row["prefill_tokens"],
            decode=row["decode_tokens"],
            cached=row["cached_tokens"],
            padding=row["padding_tokens"],
            role=row["role"],
            drafts=row["draft_tokens"],
            accepted=row["accepted_tokens"],
            tokens=sum(part["query"] for part in row["slices"]),
        )
        for row in trace.passes.sort_by("pass_id").to_pylist()
    ]


def served(trace: Trace) -> list[Served]:
    """The requests of a trace in the order in which they came."""
    rows = trace.requests.to_pylist()
    rows.sort(key=lambda row: (row["arrival_ns"], row["request_id"]))
    return [
        Served(
            prompt=row["prompt_tokens"],
            output=row["output_tokens"],
            cached=row["cached_tokens"],
            sequences=row["sequences"],
            finish=row["finish"],
        )
        for row in rows
    ]


def check_trace(trace: Trace, *, complete: bool = True) -> None:
    """What holds in every trace: slices and columns agree, and the identities of the contract."""
    for row in trace.passes.to_pylist():
        assert len(row["slices"]) == row["sequences"]
        tokens = sum(part["query"] for part in row["slices"])
        if row["phase"] in ("prefill", "decode", "mixed"):
            assert tokens == row["prefill_tokens"] + row["decode_tokens"]
        assert row["recomputed_tokens"] <= row["prefill_tokens"]
        assert 0 <= row["accepted_tokens"] <= row["draft_tokens"] <= row["decode_tokens"]
    if complete:
        assert check_invariants(request_tokens(trace)) == []


def assert_same(alone: Any, recorded: Any) -> None:
    """Bit-identical tensors in the same structure."""
    if isinstance(alone, torch.Tensor):
        assert torch.equal(alone, recorded)
    elif isinstance(alone, list | tuple):
        assert len(alone) == len(recorded)
        for one, another in zip(alone, recorded, strict=True):
            assert_same(one, another)
    elif isinstance(alone, dict):
        assert list(alone) == list(recorded)
        assert_same(list(alone.values()), list(recorded.values()))
    else:
        assert alone == recorded


def request_tokens(trace: Trace) -> list[RequestTokens]:
    """Sum the slices of each request; the requests table gives the other side of the identities."""
    sums: dict[str, dict[str, int]] = {}
    for row in trace.passes.to_pylist():
        if row["role"] != "target":
            continue
        recomputed = 0
        for part in row["slices"]:
            share = _divided(part, row)
            recomputed += share["recomputed"]
            total = sums.setdefault(part["request_id"], dict.fromkeys(share, 0))
            for name, tokens in share.items():
                total[name] += tokens
        assert recomputed == row["recomputed_tokens"]
    return [
        RequestTokens(
            request_id=row["request_id"],
            sequences=row["sequences"],
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            recomputed_tokens=sums[row["request_id"]]["recomputed"],
            prefill_tokens=sums[row["request_id"]]["prefill"],
            decode_tokens=sums[row["request_id"]]["decode"],
            rejected_tokens=sums[row["request_id"]]["rejected"],
            output_tokens=row["output_tokens"],
        )
        for row in trace.requests.to_pylist()
    ]


def _divided(part: dict[str, Any], row: dict[str, Any]) -> dict[str, int]:
    """What a slice has of the columns of its pass. In a mixed pass of several rows each of them computes all its past
    again (there is no cache), and one token; a pass that verifies drafts has one row."""
    query = part["query"]
    if part["phase"] == "mixed":
        before = row["prefill_tokens"] if row["sequences"] == 1 else query - 1
    else:
        before = query if part["phase"] == "prefill" else 0
    return {
        "prefill": before,
        "decode": query - before if part["phase"] in ("mixed", "decode") else 0,
        "recomputed": before if row["recomputed_tokens"] else 0,
        "rejected": (row["draft_tokens"] - row["accepted_tokens"]) // row["sequences"],
    }


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
