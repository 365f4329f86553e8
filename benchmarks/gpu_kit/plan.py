"""What is run: the sizes of the model and the workload, the cases, and how long each step may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Llama-3.1-8B, with random weights.
LLAMA_8B: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: The same shape in small: for trying the script itself on any machine.
LLAMA_SMALL: Mapping[str, object] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is computed.

    Attributes:
        config: Of the model.
        dtype: Of its weights.
        prompt, new: Tokens of a request.
        batches: Requests at once, one case each.
        long: Generate calls of `new` tokens in a case.
        short: Generate calls that end after two tokens: they give the slow counters windows full of prefill. For the
            batch of one; a larger batch needs fewer.
        calibrate_s: How long the roofs are measured.
    """

    config: Mapping[str, object]
    dtype: str
    prompt: int
    new: int
    batches: tuple[int, ...]
    long: int
    short: int
    calibrate_s: float

    def shorts(self, batch: int) -> int:
        """Short calls at a batch."""
        return max(self.short // batch, 1)


FULL = Sizes(LLAMA_8B, "bfloat16", 2048, 256, (1, 8, 64), long=2, short=24, calibrate_s=5.0)
SMALL = Sizes(LLAMA_SMALL, "float32", 24, 6, (1, 2), long=1, short=2, calibrate_s=0.2)


@dataclass(frozen=True, slots=True)
class Run:
    """Cases with the same collectors.

    Attributes:
        name: Of the run; a case is called ``STEP-RUN-bBATCH``.
        collect: The collectors, as `--collect` takes them.
        first, last: Which of the batches: from this one, up to before that one.
        brief: Whether a single generation is enough: what is recorded comes from a few passes.
    """

    name: str
    collect: str
    first: int
    last: int
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A process of its own.

    Attributes:
        name: Of the step.
        seconds: How long it may take before it is ended.
        compiled: Whether decode is compiled, over a static cache.
        runs: In the order of their worth.
    """

    name: str
    seconds: float
    compiled: bool
    runs: tuple[Run, ...]


_SAMPLERS = "host,nvml,gpm"

#: In the order of their worth: what comes last is cut short when time runs out.
STEPS: tuple[Step, ...] = (
    Step(
        "eager",
        170.0,
        False,
        (Run("counters", _SAMPLERS, 0, 3), Run("kernels", "kernels", 0, 2, brief=True)),
    ),
    Step("pm", 75.0, False, (Run("pm", "pm,nvml,gpm", 0, 2),)),
    Step(
        "compiled",
        200.0,
        True,
        (
            Run("counters", _SAMPLERS, 0, 1),
            Run("kernels", "kernels", 0, 1, brief=True),
            Run("counters", _SAMPLERS, 1, 3),
        ),
    ),
)
