"""The table of cases as a page of the documentation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hf_case import Case, Pass
from hf_table import CASES, SOURCES

RULES = ("query > 1", "output count")
#: Passes that each rule names otherwise, by the rule.
Wrong = Mapping[str, int]

_INTRODUCTION = """\
# Every case, and the test that holds it

The [labelling contract](labelling.md), applied to the ways in which transformers is used. Each row is a test with that
name, and links to where it is written down: the case is run on a real model with random weights, with and without the
profiler, and the output, the passes and the requests are compared with figures that were worked out by hand from the
inputs.

    python -m pytest "tests/integration/test_hf_cases.py::test_case[greedy]"

**passes** lists them in order, with the tokens over all rows: `prefill 9` computes nine prompt tokens, `mixed 9+4`
nine prefill and four decode tokens, `encode 50` fifty positions of an encoder; `3 x decode 1` is three passes alike. A
pass of a draft model has `draft:` before it.

The last two columns say how many of these passes two simpler rules would name otherwise. Both see one sequence of a
pass at a time, as an engine does: **query > 1** calls a sequence that computes several tokens prefill, **output count**
one that has got no output token yet. An empty cell: none of them. `encode` and `other` passes are not judged.
`samples/label_rules.py` does the same for any trace.

`python -m pytest tests/integration/test_hf_cases.py --update-golden` writes this page.
"""


def page(wrong: Mapping[str, Wrong]) -> str:
    """The page.

    Args:
        wrong: What the rules get wrong, by the name of each case.
    """
    return "\n".join(_lines(wrong))


def _lines(wrong: Mapping[str, Wrong]) -> Iterator[str]:
    yield _INTRODUCTION
    for group in dict.fromkeys(case.group for case in CASES):
        yield f"## {group[0].upper()}{group[1:]}\n"
        yield "| case | what it shows | passes | query > 1 | output count |"
        yield "|---|---|---|---|---|"
        for case in CASES:
            if case.group == group:
                yield _row(case, wrong[case.name])
        yield ""
    total = {rule: sum(counts[rule] > 0 for counts in wrong.values()) for rule in RULES}
    sums = ", ".join(f"`{rule}` in {total[rule]}" for rule in RULES)
    yield f"{len(CASES)} cases. Cases in which a rule is wrong about a pass: {sums}.\n"


def _row(case: Case, wrong: Wrong) -> str:
    name = f"[{case.name}](../tests/integration/cases/{SOURCES[case.name]})"
    cells = [name, case.says, _passes(case.passes)]
    cells += [f"{wrong[rule]} wrong" if wrong[rule] else "" for rule in RULES]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _passes(passes: Sequence[Pass]) -> str:
    groups = ((text, len(list(alike))) for text, alike in itertools.groupby(map(_pass, passes)))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in groups)


def _pass(one: Pass) -> str:
    tokens = {
        "prefill": f"{one.prefill}",
        "decode": f"{one.decode}",
        "mixed": f"{one.prefill}+{one.decode}",
    }.get(one.phase, f"{one.tokens}")
    text = f"{one.phase} {tokens}"
    return f"draft: {text}" if one.role == "draft" else text
