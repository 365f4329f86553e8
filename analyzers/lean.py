"""What a report has no use for, so that it is not read."""

from __future__ import annotations

from dataclasses import replace

from phaseprof.trace.forms import Lean

#: What of a trace no analysis reads: without it a report takes half the memory. What comes to be read is taken out.
LEAN = Lean(
    without=frozenset(
        [
            *("passes.context_tokens", "passes.attention_pairs", "passes.compiled", "passes.graph"),
            *("passes.slices.phase", "passes.experts_read", "passes.kv_held_bytes"),
            *("passes.slices.cached", "passes.slices.recomputed"),
            *("passes.slices.drafts", "passes.slices.accepted"),
            *("passes.kv_allocated_bytes", "passes.cache_copy_bytes"),
            *("requests.first_token_ns", "requests.cached_tokens", "requests.preemptions"),
            # Of an engine, these tell which step a slow token came from: see `ENGINE_LEAN`.
            *("requests.itl_steps", "requests.client_id"),
        ]
    ),
    # Of a whole trace every request has its row; of another it may have to be made from its slices.
    without_if_whole=frozenset(
        ["passes.slices.query", "passes.slices.past", "passes.slices.prompt"]
    ),
)

#: Likewise, of a trace with the steps of a serving engine.
ENGINE_LEAN = replace(LEAN, without=LEAN.without - {"requests.itl_steps", "requests.client_id"})
