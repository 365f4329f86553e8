"""What speculation yields: tokens of a step, and what drafting them takes.

With k drafted tokens, each accepted with the chance a where the one before it was, a step yields on average

    (1 - a^(k + 1)) / (1 - a)

tokens (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, arXiv
2211.17192, equation 1). A run that speculates already tells its own a: the one with which that many drafts would have
been accepted.
"""

from __future__ import annotations

from phaseprof.analyzers.what_if.changes import Setting
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.phases import Phase

#: Acceptance where nothing was measured or said: likely, at best, at worst. Leviathan et al. measured 0.5 to 0.9 with
#: draft models (table 3), 0.2 with bigrams.
_ACCEPTANCE = (0.7, 0.85, 0.5)
#: Time to draft a token over the time of a decode step: likely, at best, at worst. Drafts that are looked up in the
#: prompt cost next to nothing, a small draft model or head a twentieth to a tenth.
_DRAFT_COST = (0.05, 0.0, 0.1)
#: How far a measured acceptance may be off, at best and at worst: text and number of drafts change it.
_MEASURED_ERROR = 0.05
_MOST = 0.995


def tokens_of_step(acceptance: float, drafts: float) -> float:
    """Mean tokens that a step yields for a sequence: the closed form above.

    Args:
        acceptance: From 0 up to, and without, 1.
        drafts: Drafted tokens of a step.
    """
    if drafts <= 0:
        return 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def measured_acceptance(measured: Measured) -> float | None:
    """The acceptance that a run shows; None for one without drafts."""
    step = measured.step(Phase.DECODE)
    if step is None or not step.drafts:
        return None
    wanted = 1 + min(step.accepted, step.drafts * _MOST)
    low, high = 0.0, _MOST
    for _ in range(60):
        middle = (low + high) / 2
        if tokens_of_step(middle, step.drafts) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def acceptance(measured: Measured, setting: Setting, case: int) -> float:
    """The acceptance of a setting that speculates.

    Args:
        case: 0 likely, 1 at best, 2 at worst.
    """
    wanted = setting.speculation
    assert wanted is not None
    if wanted.acceptance is not None:
        return wanted.acceptance
    known = measured_acceptance(measured)
    if known is None:
        return _ACCEPTANCE[case]
    error = (0.0, _MEASURED_ERROR, -_MEASURED_ERROR)[case]
    return min(max(known + error, 0.0), _MOST)


def yielded(measured: Measured, setting: Setting, case: int) -> float:
    """Tokens that a decode step yields for a sequence.

    Args:
        case: As in `acceptance`.
    """
    step = measured.step(Phase.DECODE)
    before = 1.0 if step is None else 1 + step.accepted
    wanted = setting.speculation
    if wanted is None or step is None or wanted.drafts == step.drafts:
        return before
    return tokens_of_step(acceptance(measured, setting, case), wanted.drafts)


def draft_s(measured: Measured, setting: Setting, case: int) -> float:
    """Time that drafting adds to a decode step; negative where a run that speculates would draft less.

    Args:
        case: As in `acceptance`.
    """
    step = measured.step(Phase.DECODE)
    wanted = setting.speculation
    if wanted is None or step is None or wanted.drafts == step.drafts:
        return 0.0
    if wanted.draft_cost is not None:
        each = wanted.draft_cost * step.step_s
    elif step.drafts:
        each = measured.draft_s / step.drafts
    else:
        each = _DRAFT_COST[case] * step.step_s
    return each * (wanted.drafts - step.drafts)
