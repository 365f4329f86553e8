"""A draft model with a tokenizer of its own: what it drafts is text, and its counts are in its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from hf_case import check_trace, served
from hf_models import counting, generate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPT, NEW = 9, 8


def tokenizer(backwards: bool) -> Any:
    """Words w3 to w63; to the one tokenizer w5 is 5, to the other it is 61."""
    vocab = {f"w{n}": 66 - n if backwards else n for n in range(3, 64)}
    vocab |= {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def test_a_draft_model_with_another_tokenizer(record: Any) -> None:
    """Both count up the same words. What is drafted depends on how the text is cut, so only what must hold is said:
    the draft model reads the prompt once, later only drafts; all tokens but the first are decode, and none is lost."""
    target = counting()
    assistant = counting(lambda token: token - 1 if token > 3 else 63, vocab=70)

    def run() -> Any:
        return generate(
            target,
            torch.arange(10, 10 + PROMPT).reshape(1, PROMPT),
            assistant_model=assistant,
            tokenizer=tokenizer(backwards=False),
            assistant_tokenizer=tokenizer(backwards=True),
            max_new_tokens=NEW,
            min_new_tokens=None,
        )

    alone = run()
    recorded = record(run)
    assert alone.tolist() == [list(range(10, 10 + PROMPT + NEW))]
    assert torch.equal(alone, recorded.output)
    (request,) = served(recorded.trace)
    assert (request.prompt, request.output, request.finish) == (PROMPT, NEW, "length")
    check_trace(recorded.trace)
    rows = recorded.trace.passes.sort_by("pass_id").to_pylist()
    drafts = [row for row in rows if row["role"] == "draft"]
    assert (drafts[0]["phase"], drafts[0]["prefill_tokens"]) == ("prefill", PROMPT)
    assert all(row["decode_tokens"] > 0 for row in drafts[1:])
    assert all(row["cached_tokens"] == 0 for row in drafts)
    assert sum(row["accepted_tokens"] for row in rows) > 0
    for row in rows:
        (one,) = row["slices"]
        assert (one["drafts"], one["accepted"]) == (row["draft_tokens"], row["accepted_tokens"])
