"""``python -m phaseprof``: the same as the console script."""

from __future__ import annotations

from phaseprof.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
