"""Cases: pipelines, chats, copies, threads: how models are used around generate."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flop_truth import CACHE
from hf_case import Case, Pass, Served, decode, encode, prefill
from hf_models import BOS, PAD, endless, generate, ids
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content }} ; {% endfor %}assistant :"


@functools.cache
def tokenizer() -> Any:
    """Each word is a token: w3 to w99, and what the chat template says. Batches are padded on the left."""
    vocab = {"[PAD]": PAD, "[BOS]": BOS, "[EOS]": 2}
    vocab |= {f"w{n}": n for n in range(3, 100)}
    # The last one is what transformers tries a tokenizer with before it looks for strings that stop.
    words = ("user", "assistant", ":", ";", "[MASK]", "abcdef")
    vocab |= {word: 100 + n for n, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        mask_token="[MASK]",
        padding_side="left",
    )
    fast.chat_template = CHAT
    return fast


def text_generation(model: Any, texts: Any, **kwargs: Any) -> Any:
    """What the pipeline says; two tokens each."""
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    return pipe(texts, max_new_tokens=2, min_new_tokens=2, do_sample=False, **kwargs)


def chats(model: Any) -> Any:
    """Two turns on one cache, the prompt of the second made by the template from both."""
    cache = DynamicCache(config=model.config)
    said: list[torch.Tensor] = []
    whole = torch.empty(1, 0, dtype=torch.long)
    for words in (4, 3):
        whole = torch.cat([whole, ids(1, words)], dim=1)
        whole = generate(model, whole, max_new_tokens=2, **{CACHE: cache})
        said.append(whole)
    return said


def stop_strings(model: Any) -> Any:
    """The model never stops by itself; the first word that it says is made the end."""
    text = tokenizer()
    first = generate(model, ids(1, 5), max_new_tokens=1)[0, -1]
    word = text.decode([first])
    return model.generate(
        ids(1, 5), max_new_tokens=6, do_sample=False, stop_strings=[word], tokenizer=text
    )


def streams_from_a_thread(model: Any) -> Any:
    """What servers do: generate runs on a thread, and its text is read here."""
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    settings = {"max_new_tokens": 3, "streamer": streamer}
    thread = threading.Thread(target=generate, args=(model, ids(1, 5)), kwargs=settings)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


@functools.cache
def saved() -> Any:
    """A model that was saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        endless().save_pretrained(folder)
        return type(endless()).from_pretrained(folder).eval()


@functools.cache
def masked() -> Any:
    torch.manual_seed(7)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=128,
    )
    return BertForMaskedLM(config).eval()


def fills(model: Any) -> Any:
    pipe = pipeline("fill-mask", model=model, tokenizer=tokenizer(), device="cpu")
    return pipe("w5 w6 [MASK] w7", top_k=2)


def features(model: Any) -> Any:
    pipe = pipeline("feature-extraction", model=model, tokenizer=tokenizer(), device="cpu")
    return pipe("w5 w6 w7")


def case(
    name: str,
    says: str,
    run: Callable[[Any], Any],
    passes: Sequence[Pass],
    *,
    make: Callable[[], Any] = endless,
    **more: Any,
) -> Case:
    return Case(name, "pipelines and chats", says, make, run, passes, **more)


CASES = [
    case(
        "pipeline",
        "A pipeline calls generate once a text.",
        lambda m: text_generation(m, ["w5 w6 w7", "w8 w9"]),
        [prefill(3), decode(1), prefill(2), decode(1)],
        requests=[Served(3, 2), Served(2, 2)],
    ),
    case(
        "pipeline with batches",
        "Texts of a batch are padded on the left.",
        lambda m: text_generation(m, ["w5 w6 w7 w8", "w8 w9"], batch_size=2),
        [prefill(6, padding=2), decode(2)],
        requests=[Served(4, 2), Served(2, 2)],
    ),
    case(
        "pipeline with chat messages",
        "The prompt is what the template makes of the messages: `user : w5 w6 ; assistant :`.",
        lambda m: text_generation(m, [{"role": "user", "content": "w5 w6"}]),
        [prefill(7), decode(1)],
        requests=[Served(7, 2)],
    ),
    case(
        "a chat on one cache",
        "Of the second turn, what was said before is cached, but for the last token.",
        chats,
        # 4 and one fed; then 4 + 2 + 3 with 5 of them cached.
        [prefill(4), decode(1), prefill(4, cached=5), decode(1)],
        requests=[Served(4, 2), Served(9, 2, cached=5)],
    ),
    case(
        "stop strings",
        "A string that ends the text stops the request.",
        stop_strings,
        [prefill(5), prefill(5)],
        requests=[Served(5, 1), Served(5, 1, finish="stop")],
    ),
    case(
        "streamed from a thread",
        "Threads are followed each for itself.",
        streams_from_a_thread,
        [prefill(5), decode(1), decode(1)],
        requests=[Served(5, 3)],
    ),
    case(
        "saved and loaded",
        "A model is followed wherever it comes from.",
        lambda m: generate(m, ids(1, 5), max_new_tokens=2),
        [prefill(5), decode(1)],
        make=saved,
    ),
    case(
        "fill-mask",
        "A pipeline around an encoder encodes.",
        fills,
        [encode(4)],
        requests=[],
        make=masked,
    ),
    case(
        "feature-extraction",
        "So does one for features.",
        features,
        [encode(3)],
        requests=[],
        make=masked,
    ),
]
