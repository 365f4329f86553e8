"""Whether vLLM may load our plugin: it has to be installed, and `VLLM_PLUGINS` must not leave it out."""

from __future__ import annotations

import os
from importlib import metadata

from phaseprof.errors import NotMeasured

GROUP = "vllm.general_plugins"
NAME = "phaseprof"


def left_out() -> NotMeasured | None:
    """What `VLLM_PLUGINS` costs if it is set without our name; None if it is not."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or NAME in named.split(","):
        return None
    return NotMeasured(
        "processes of vLLM that only its plugins reach (Ray's workers; with `phaseprof.profile(llm)`, all)",
        f"VLLM_PLUGINS={named or '(empty)'} leaves phaseprof's plugin out",
        f"set VLLM_PLUGINS={named + ',' if named else ''}{NAME}, or unset it",
    )


def is_installed() -> bool:
    """Whether vLLM in this environment finds the plugin. An install that is older than the plugin lacks it."""
    return any(entry.name == NAME for entry in metadata.entry_points(group=GROUP))
