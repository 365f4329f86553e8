"""What one phase is judged by, and the evidence as it gathers."""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseprof.analyzers.remedies import Circumstances
from phaseprof.analyzers.results import Confidence, Evidence, Provenance
from phaseprof.analyzers.witness import NOTHING_HEARD, Hearing, Witness
from phaseprof.analyzers.wording import pass_noun, sentence
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings

_ORDER = (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW)


@dataclass(slots=True)
class Case:
    """A phase before its class is known. The first fields are the arguments of `bound.classify`.

    Attributes:
        known: What else is known.
        evidence: The reasons for the class, strongest first. doubts: What speaks against it.
        excess: Why a share of a roof is above 100 %.
        confidence: As the doubts so far leave it. worst_doubt: The one that lowers it most.
        witness: What hardware counters say; None without any.
        hearing: What followed from that.
    """

    time_s: float
    flops: float | None
    moved_bytes: float | None
    ceilings: Ceilings | None
    busy_share: float | None
    comm_share: float | None
    phase: Phase
    known: Circumstances
    witness: Witness | None = None
    hearing: Hearing = NOTHING_HEARD
    evidence: list[Evidence] = field(default_factory=list)
    doubts: list[Evidence] = field(default_factory=list)
    excess: list[str] = field(default_factory=list)
    confidence: Confidence = Confidence.HIGH
    worst_doubt: str = ""

    @property
    def passes(self) -> int:
        return self.known.passes or 1

    @property
    def noun(self) -> str:
        return pass_noun(self.phase)

    @property
    def idle_share(self) -> float | None:
        return None if self.busy_share is None else 1 - self.busy_share

    def say(self, text: str, provenance: Provenance) -> None:
        self.evidence.append(Evidence(sentence(text), provenance))

    def doubt(self, level: Confidence, text: str, provenance: Provenance) -> None:
        """Lower the confidence to at most ``level``, with the reason."""
        if _ORDER.index(level) > _ORDER.index(self.confidence):
            self.confidence, self.worst_doubt = level, sentence(text)
        self.doubts.append(Evidence(sentence(text), provenance))
