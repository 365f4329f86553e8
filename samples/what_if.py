"""What would help a recorded run: the ranking as objects, and a change of your own choice.

    python samples/what_if.py TRACE

TRACE is what `phaseprof profile`, `phaseprof run` or `phaseprof.profile` wrote.
"""

import argparse

from phaseprof.analyzers.what_if.changes import Batch, Speculate, Speculation
from phaseprof.analyzers.what_if.ranking import asked, ranked
from phaseprof.api import load_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    arguments = parser.parse_args()

    measured = load_report(arguments.trace).measured
    assert measured is not None

    found = ranked(measured)
    print(f"as measured: {found.measured.tokens_per_s.value:.3g} tokens/s")
    for outcome in found.outcomes:
        gain = outcome.gain
        print(f"{outcome.title}: {gain.value:.2f}x ({gain.low:.2f} to {gain.high:.2f})")
    for no in found.hopeless:
        print(f"{no.title}: no, {no.why}")

    # Several changes at once, with the arithmetic of decode.
    both = asked(measured, [Batch(32), Speculate(Speculation(drafts=3, acceptance=0.6))]).combined
    if both is not None:
        print(f"\n{both.title}: {both.gain.value:.2f}x, then {both.phase} is bound by {both.bound}")
        for term in both.terms:
            if term.phase == "decode":
                print(f"  {term.name}: {term.before:.4g} to {term.after:.4g} {term.unit}")


if __name__ == "__main__":
    main()
