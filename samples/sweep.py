"""Where does batching stop paying? Read it from the trace of a sweep.

phaseprof profile --batch 1,2,4,8,16 --prompt-tokens 32 --new-tokens 16 -o sweep
python samples/sweep.py sweep
"""

from __future__ import annotations

import sys

from phaseprof.api import load_report


def main(trace: str) -> None:
    """Print what follows from a sweep, and tokens/s and TPOT of each cell as a line of CSV."""
    sweep = load_report(trace).sweep
    if sweep is None:
        sys.exit(f"{trace} has no sweep: give `phaseprof profile` several sizes.")
    for sentence in sweep.conclusion:
        print(f"# {sentence}")
    print("prompt,new,batch,tokens_per_s,tpot_ms,bound")
    for cell in sweep.cells:
        if cell.decode is not None and cell.tpot_ms is not None:
            sizes = f"{cell.prompt_tokens},{cell.new_tokens},{cell.batch}"
            figures = f"{cell.decode.tokens_per_s:.1f},{cell.tpot_ms.median:.2f}"
            print(f"{sizes},{figures},{cell.decode.bound}")


if __name__ == "__main__":
    main(*sys.argv[1:])
