"""What is known of the steps in a recording of another profiler, before they are rows of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.collectors.files.contents import LookedUp, Marker, Span
from phaseprof.phases import Phase, Role, TagSource

__all__ = ["LookedUp", "Marker", "Span", "Step", "StepWork"]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as a recording tells. None: it does not tell.

    Attributes:
        phase: The label of the step.
        prefill_sequences: Sequences of which prompt tokens are computed.
        prefill_tokens: Those tokens.
        decode_sequences: Sequences that go on with a generated token.
        decode_tokens: Tokens computed for them, drafts included.
        context_tokens: Sum over the sequences of the KV length after the step.
        attention_pairs: Exact causal query x key pairs, summed over the sequences.
        unknown: Why the phase could not be told, of a step that is `OTHER` for that alone; else empty.
    """

    phase: Phase
    prefill_sequences: int | None = None
    prefill_tokens: int | None = None
    decode_sequences: int | None = None
    decode_tokens: int | None = None
    context_tokens: int | None = None
    attention_pairs: int | None = None
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine, or one forward pass, on the host.

    Attributes:
        start_ns, end_ns: On the host, when it launched its work.
        thread_id: The thread that launched it; None if only the time is known.
        tag_source: `ANNOTATION` where something announced it, else `INFERRED`.
        name: What announced it: the annotation, the function, or how it was inferred.
        work: What it computes.
        role: Whose step it is: `DRAFT` where a recording says that a draft model ran.
    """

    start_ns: int
    end_ns: int
    thread_id: int | None
    tag_source: TagSource
    name: str
    work: StepWork
    role: Role = Role.TARGET
