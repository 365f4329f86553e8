"""phaseprof: tag every forward pass of an LLM as prefill, decode or mixed, and say what bounds it."""

from __future__ import annotations

__version__ = "0.1.0"
