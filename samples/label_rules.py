"""How would a simpler rule label the same passes? Two rules that are in use, beside the labels of a trace.

    python samples/label_rules.py TRACE [--passes]      any trace of phaseprof
    python samples/label_rules.py --demo [--passes]     eight ways to generate, on a tiny model with random weights

"query > 1": a sequence that computes several tokens is in prefill, one that computes a single token is in decode.
"output count": a sequence that has got no output token yet is in prefill, any other is in decode.

Both see each sequence of a pass alone, as an engine's step does. What they call prefill is compared, pass by pass, with
the prefill tokens that were counted by position (docs/labelling.md).
"""

import argparse
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import phaseprof

RULES = ("query > 1", "output count")


@dataclass
class Judged:
    """One pass: prefill and decode tokens as counted, and the prefill tokens of each rule."""

    pass_id: int
    phase: str
    prefill: int
    decode: int
    by_rule: dict[str, int]

    def label(self, prefill: int) -> str:
        """What the pass is, if so many of its tokens are prefill tokens."""
        if not prefill:
            return "decode"
        return "prefill" if prefill == self.prefill + self.decode else "mixed"


@dataclass
class Tally:
    """What a rule got wrong."""

    passes: int = 0
    tokens: int = 0
    wrong_passes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    wrong_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))

    def add(self, judged: Judged) -> None:
        self.passes += 1
        self.tokens += judged.prefill + judged.decode
        for rule, prefill in judged.by_rule.items():
            self.wrong_passes[rule] += judged.label(prefill) != judged.phase
            self.wrong_tokens[rule] += abs(prefill - judged.prefill)


def judge(trace: phaseprof.Trace) -> Iterator[Judged]:
    """Every prefill, decode and mixed pass of a trace, in order, as the rules would have it."""
    # A draft model's passes serve the same requests, and are a sequence of their own.
    answered: set[tuple[str, str]] = set()
    columns = ("pass_id", "role", "phase", "prefill_tokens", "decode_tokens", "slices")
    for row in trace.passes.sort_by("pass_id").select(list(columns)).to_pylist():
        slices = row["slices"]
        if row["phase"] in ("prefill", "decode", "mixed"):
            yield Judged(
                row["pass_id"],
                row["phase"],
                row["prefill_tokens"],
                row["decode_tokens"],
                {
                    "query > 1": sum(s["query"] for s in slices if s["query"] > 1),
                    "output count": sum(
                        s["query"] for s in slices if (row["role"], s["request_id"]) not in answered
                    ),
                },
            )
            # A pass that reaches the end of the prompt yields a token.
            answered |= {
                (row["role"], s["request_id"])
                for s in slices
                if s["query"] and s["past"] + s["query"] >= s["prompt"]
            }


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """One line a tally: wrong labels and misplaced tokens of each rule."""
    width = max(len(name) for name in tallies)
    yield f"{'':{width}}  {'passes':>6}  {'tokens':>6}" + "".join(f"  {rule:>22}" for rule in RULES)
    for name, tally in tallies.items():
        cells = ""
        for rule in RULES:
            passes, tokens = tally.wrong_passes[rule], tally.wrong_tokens[rule]
            wrong = f"{passes} passes, {tokens} tokens" if passes or tokens else "right"
            cells += f"  {wrong:>22}"
        yield f"{name:{width}}  {tally.passes:>6}  {tally.tokens:>6}{cells}"


def details(judged: Judged) -> str:
    """One pass in a line."""
    said = ", ".join(f"{rule}: {judged.label(n)}" for rule, n in judged.by_rule.items())
    counted = f"{judged.prefill} prefill + {judged.decode} decode tokens"
    return f"  {judged.phase:<7}  {counted:<34}  {said}"


def demo_modes() -> dict[str, Callable[[], Any]]:
    """Ways to generate, on a Llama of two layers that knows nothing."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    draft = LlamaForCausalLM(config).eval()

    def ids(length: int, rows: int = 1) -> torch.Tensor:
        return torch.arange(3, 3 + rows * length).reshape(rows, length) % 250 + 3

    def generate(prompt: torch.Tensor, **options: Any) -> Any:
        options = {"max_new_tokens": 5, "do_sample": False} | options
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, **options)

    def two_turns() -> None:
        cache = DynamicCache(config=config)
        parameters = inspect.signature(LlamaForCausalLM.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        first = generate(ids(12), **{name: cache})
        generate(torch.cat([first, ids(6)], dim=1), **{name: cache})

    return {
        "prompt of 12, 5 new tokens": lambda: generate(ids(12)),
        "prompt of one token": lambda: generate(ids(1)),
        "prefill in chunks of 4, the last of 1": lambda: generate(ids(9), prefill_chunk_size=4),
        "a second turn on a kept cache": two_turns,
        "a draft model, drafts of 3": lambda: generate(
            ids(12), assistant_model=draft, num_assistant_tokens=3, max_new_tokens=12
        ),
        "prompt lookup": lambda: generate(
            ids(4).repeat(1, 4), prompt_lookup_num_tokens=3, max_new_tokens=12
        ),
        "no cache": lambda: generate(ids(12), use_cache=False),
        "batch of 3, 2 beams": lambda: generate(ids(8, rows=3), num_beams=2),
    }


def demo(folder: Path) -> dict[str, list[Judged]]:
    """Record each mode into a trace of its own."""
    judged = {}
    for number, (name, run) in enumerate(demo_modes().items()):
        with phaseprof.profile(trace=folder / f"{number}") as prof:
            run()
        judged[name] = list(judge(prof.trace))
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", help="the folder of a trace")
    parser.add_argument("--demo", action="store_true", help="record eight modes and compare them")
    parser.add_argument("--passes", action="store_true", help="one line for each pass as well")
    arguments = parser.parse_args()
    if arguments.demo == (arguments.trace is not None):
        parser.error("name a TRACE, or ask for --demo")

    if arguments.demo:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with tempfile.TemporaryDirectory() as folder:
            judged = demo(Path(folder))
    else:
        judged = {str(arguments.trace): list(judge(phaseprof.open_trace(arguments.trace)))}

    tallies: dict[str, Tally] = {}
    for name, passes in judged.items():
        tallies[name] = Tally()
        for one in passes:
            tallies[name].add(one)
        if arguments.passes:
            print(name)
            print("\n".join(map(details, passes)))
    print("\n".join(table(tallies)))


if __name__ == "__main__":
    main()
