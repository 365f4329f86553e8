"""Answer a few questions with a Hugging Face model, one after the other: a script that knows nothing of phaseprof.

    phaseprof run -- python samples/generate_greedy.py
    phaseprof run -o trace -- python samples/generate_greedy.py MODEL --new-tokens 32

MODEL is a folder or a name on the hub. Without it, the embedded model of `phaseprof profile` is taken from its cache.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Name the first three prime numbers.",
)


def cached_model() -> Path:
    own = os.environ.get("PHASEPROF_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else base / "phaseprof") / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(cached_model()))
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    if arguments.model == str(cached_model()) and not cached_model().is_dir():
        parser.error("name a MODEL, or run `make demo` once: it gets the embedded model")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    ).to(device)

    for question in QUESTIONS:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            text = question
        inputs = tokenizer(text, return_tensors="pt").to(device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=arguments.new_tokens)
        answer = output[0, inputs["input_ids"].shape[1] :]
        print(f"> {question}\n{tokenizer.decode(answer, skip_special_tokens=True).strip()}\n")


if __name__ == "__main__":
    main()
