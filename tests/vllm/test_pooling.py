"""Models that sample nothing: a decoder that embeds prefills, an encoder encodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Recorded, make_engine, prompts

Record = Callable[[Callable[[], Any]], Recorded]


def add_tokenizer(folder: Path) -> None:
    """Pooling wants a tokenizer, though it is given token ids: one word a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="w0", pad_token="w1"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny BERT."""
    from transformers import BertConfig

    folder = tmp_path_factory.mktemp("bert")
    BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        architectures=["BertModel"],
    ).save_pretrained(folder)
    return folder


def test_a_decoder_that_embeds_prefills(llama_folder: Path, record: Record) -> None:
    """32 tokens a step: the prompt of 40 takes two."""
    add_tokenizer(llama_folder)
    embedder = make_engine(
        llama_folder, runner="pooling", max_num_batched_tokens=32, skip_tokenizer_init=False
    )
    inputs = prompts(9, 40)
    recorded = record(lambda: embedder.embed(inputs, use_tqdm=False))
    assert recorded.short() == [
        "prefill | a: prefill 0+9, b: prefill 0+23",
        "prefill | b: prefill 23+17",
    ]
    assert recorded.passes("logits_tokens") == [(0,), (0,)]
    # They end with their embedding: no token came, first or later.
    told = [
        (row["prompt_tokens"], row["output_tokens"], row["finish"], row["ttft_ns"], row["tpot_ns"])
        for row in recorded.trace.requests.to_pylist()
    ]
    assert sorted(told) == [(9, 0, "stop", None, None), (40, 0, "stop", None, None)]
    assert all(row["queue_ns"] >= 0 for row in recorded.trace.requests.to_pylist())
    plain = embedder.embed(inputs, use_tqdm=False)
    assert [one.outputs.embedding for one in recorded.output] == [
        one.outputs.embedding for one in plain
    ]


def test_an_encoder_encodes(bert_folder: Path, record: Record) -> None:
    add_tokenizer(bert_folder)
    encoder = make_engine(
        bert_folder, runner="pooling", max_model_len=128, skip_tokenizer_init=False
    )
    recorded = record(lambda: encoder.embed(prompts(9, 12), use_tqdm=False))
    assert recorded.short() == ["encode | a: encode 0+9, b: encode 0+12"]
    assert recorded.passes("role", "prefill_tokens", "decode_tokens", "padding_tokens") == [
        ("encoder", 0, 0, 0)
    ]
    # Every token attends to every other of its prompt, by keys and values that are made for it and not kept.
    matrices = 2 * 2 * (64 * 3 * 64 + 64 * 64 + 2 * 64 * 128)
    attention = 2 * 4 * 64 * (9 * 9 + 12 * 12)
    figures = ("flops", "kv_read_bytes", "kv_write_bytes", "kv_held_bytes")
    assert recorded.passes(*figures) == [(21 * matrices + attention, 21 * 2 * 2 * 64 * 4, 0, 0)]
    models = {
        *recorded.trace.requests.column("model_id").to_pylist(),
        *recorded.trace.steps.column("model_id").to_pylist(),
        *recorded.trace.passes.column("model_id").to_pylist(),
    }
    assert models == {"vllm-BertModel-1"}
