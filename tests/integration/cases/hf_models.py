"""Tiny models: random ones, and one whose every token follows from the last, so that the fate of a draft is known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

EOS, PAD, BOS = 2, 0, 1
#: Of every tiny language model here.
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": BOS,
}


def ids(rows: int, length: int) -> torch.Tensor:
    """Token ids that are none of the special ones, below 128."""
    return (torch.arange(rows * length).reshape(rows, length) * 37 + 11) % 100 + 3


def tiny(model: str, config: str, **changes: Any) -> Callable[[], Any]:
    """A maker of a random language model, which is made once."""

    @functools.cache
    def make() -> Any:
        torch.manual_seed(7)
        settings = getattr(transformers, config)(**{**TEXT, **changes})
        return getattr(transformers, model)(settings).eval()

    return make


#: Draws an end token (2) only if a case makes it.
llama = tiny("LlamaForCausalLM", "LlamaConfig", eos_token_id=EOS)
#: Has no end token at all.
endless = tiny("LlamaForCausalLM", "LlamaConfig")
#: Sees the last four tokens alone.
sliding = tiny("MistralForCausalLM", "MistralConfig", sliding_window=4)


def _follows(token: int) -> int:
    return token + 1 if token < 63 else 3


def _skips_after_fours(token: int) -> int:
    return min(token + 2, 63) if token % 4 == 0 else _follows(token)


def counting(follows: Callable[[int], int] = _follows, vocab: int = 64) -> LlamaForCausalLM:
    """A Llama that knows 64 tokens and says `follows(t)` after a token t, for its layers add nothing to it."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=vocab,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=BOS,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(vocab, 64))
        head = torch.zeros(vocab, 64)
        for token in range(64):
            head[follows(token), token] = 10.0
        model.get_output_embeddings().weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return drafting(model, 3)


def drafting(model: Any, tokens: int) -> Any:
    """Proposes that many tokens each round, whatever it thinks of them."""
    model.generation_config.num_assistant_tokens = tokens
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


#: 10 is followed by 11, 11 by 12, and so on.
counter = functools.cache(counting)


@functools.cache
def counter_and_skipper() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A counter, and a draft model that is wrong after each multiple of four."""
    return counting(), counting(_skips_after_fours)


def generate(model: Any, input_ids: torch.Tensor | None, **kwargs: Any) -> Any:
    """Generate a fixed number of tokens: an end token is not drawn unless the case asks for it."""
    kwargs.setdefault("do_sample", False)
    kwargs.setdefault("min_new_tokens", kwargs.get("max_new_tokens"))
    torch.manual_seed(3)
    return model.generate(input_ids, **kwargs)
