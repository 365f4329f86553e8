"""Models with PEFT adapters: each pass is one of the base model, whatever wraps it, and virtual tokens are a prompt."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flop_truth import CACHE
from transformers import LlamaForCausalLM

from phaseprof.phases import RequestTokens, check_invariants
from phaseprof.trace.reader import open_trace

peft = pytest.importorskip("peft")

Record = Callable[[Callable[[], Any]], Any]

IDS = torch.arange(3, 12).reshape(1, 9)
COLUMNS = (
    "model_id",
    "phase",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "padding_tokens",
    "logits_tokens",
)
DIRECT = ("LlamaForCausalLM-1", "prefill", 9, 0, 0, 0, 9)
STEP = ("LlamaForCausalLM-1", "decode", 0, 1, 0, 0, 1)
GENERATED = [("LlamaForCausalLM-1", "prefill", 9, 0, 0, 0, 1), STEP, STEP]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(
        **{
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
            **changes,
        }
    )


def adapted(llama: LlamaForCausalLM, config: Any) -> Any:
    torch.manual_seed(11)
    return peft.get_peft_model(copy.deepcopy(llama), config).eval()


def greedy(model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, **kwargs}
    result: torch.Tensor = model.generate(input_ids=ids, **kwargs)
    return result


def logits(call: Callable[..., Any], **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = call(input_ids=IDS, **kwargs).logits
    return result


def passes(recorded: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = recorded.passes(*COLUMNS)
    return rows


def checked(recorded: Any) -> list[tuple[Any, ...]]:
    """The passes, after the invariants were checked over the requests."""
    tokens: dict[tuple[str, str], int] = {}
    for (slices,) in recorded.passes("slices"):
        for part in slices:
            key = (part["request_id"], part["phase"])
            tokens[key] = tokens.get(key, 0) + part["query"]
    requests = [
        RequestTokens(
            request_id=row["request_id"],
            sequences=row["sequences"],
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            recomputed_tokens=0,
            prefill_tokens=tokens.get((row["request_id"], "prefill"), 0),
            decode_tokens=tokens.get((row["request_id"], "decode"), 0),
            rejected_tokens=0,
            output_tokens=row["output_tokens"],
        )
        for row in recorded.trace.requests.to_pylist()
    ]
    assert check_invariants(requests) == []
    return passes(recorded)


@pytest.fixture
def same(record: Record) -> Record:
    """Run a function alone and under a session: the same comes out."""

    def run(function: Callable[[], Any]) -> Any:
        alone = function()
        recorded = record(function)
        assert torch.equal(alone, recorded.output)
        return recorded

    return run


def test_lora(llama: LlamaForCausalLM, same: Record) -> None:
    """Called directly, in generate, through every layer that wraps the base model, and with the adapter off."""
    model = adapted(llama, lora())
    assert passes(same(lambda: logits(model))) == [DIRECT]
    assert passes(same(lambda: logits(model.forward))) == [DIRECT]
    assert passes(same(lambda: logits(model.base_model))) == [DIRECT]
    assert passes(same(lambda: logits(model.base_model.model.forward))) == [DIRECT]
    assert passes(same(lambda: greedy(model))) == GENERATED

    def without() -> torch.Tensor:
        with model.disable_adapter():
            return greedy(model)

    assert passes(same(without)) == GENERATED


def test_a_tuner_that_calls_forward(
    llama: LlamaForCausalLM, same: Record, monkeypatch: Any
) -> None:
    """Older versions of peft call the `forward` of the base model, whose own call then never runs."""
    from peft.tuners.tuners_utils import BaseTuner

    monkeypatch.setattr(BaseTuner, "forward", lambda self, *a, **k: self.model.forward(*a, **k))
    model = adapted(llama, lora())
    recorded = same(lambda: torch.cat([logits(model), logits(model)]))
    assert passes(recorded) == [DIRECT, DIRECT]
    assert [meta.class_name for meta in recorded.trace.metas[0].models] == ["LlamaForCausalLM"]
    assert passes(same(lambda: greedy(model))) == GENERATED


def test_several_adapters_and_merging(
    llama: LlamaForCausalLM, same: Record, record: Record
) -> None:
    """Another adapter is other work: a model of its own, and the first one again when it is set again. Merged, it costs
    what the bare model costs."""
    model = adapted(llama, lora())
    model.add_adapter("other", lora(r=8))

    def switch() -> torch.Tensor:
        results = []
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            results.append(logits(model))
        return torch.stack(results)

    other = ("LlamaForCausalLM-2", *DIRECT[1:])
    assert passes(same(switch)) == [DIRECT, other, DIRECT]
    merged = model.merge_and_unload()
    recorded = same(lambda: logits(merged))
    assert passes(recorded) == [DIRECT]
    bare = record(lambda: logits(llama))
    assert recorded.passes("flops", "weight_bytes") == bare.passes("flops", "weight_bytes")
    assert recorded.passes("flops")[0][0]


class Fed:
    """What the first layer of a model is really given: (slots before, slots) of each pass."""

    def __init__(self, model: Any) -> None:
        self.passes: list[tuple[int, int]] = []
        layer = model.get_base_model().model.layers[0]
        layer.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get(CACHE)
        past = 0 if cache is None else int(cache.get_seq_length())
        self.passes.append((past, args[0].shape[1]))

    def take(self) -> list[tuple[int, int]]:
        taken, self.passes = self.passes, []
        return taken


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_that_are_computed(
    kind: str, llama: LlamaForCausalLM, same: Record, record: Record
) -> None:
    """Prompt and p-tuning put 5 embeddings before the 9 of the prompt: 14 prompt tokens, all computed.

    Where transformers has renamed the cache, peft puts them before every step as well: those are computed at positions
    behind the prompt."""
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = adapted(llama, config)
    fed = Fed(model)
    first = ("LlamaForCausalLM-1", "prefill", 14, 0, 0, 0)
    assert passes(same(lambda: logits(model))) == [(*first, 14)]
    fed.take()
    recorded = record(lambda: greedy(model))
    step = 6 if CACHE == "cache" else 1
    assert fed.take() == [(0, 14), (14, step), (14 + step, step)]
    seen = passes(recorded) if CACHE == "cache" else checked(recorded)
    assert seen[0] == (*first, 1)
    assert [row[1:6] for row in seen[1:]] == [("decode", 0, step, 0, 0)] * 2


def test_virtual_tokens_that_are_cached(
    llama: LlamaForCausalLM, same: Record, record: Record
) -> None:
    """Prefix tuning gives the keys and values of 5 tokens: they are a part of the prompt that was in the cache. Where
    transformers has renamed the cache, generate leaves them out, and so do we."""
    model = adapted(llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    fed = Fed(model)
    assert passes(same(lambda: logits(model))) == [("LlamaForCausalLM-1", "prefill", 9, 0, 5, 0, 9)]
    assert set(fed.take()) == {(5, 9)}
    virtual = 0 if CACHE == "cache" else 5
    for prompt in (9, 1):
        recorded = record(partial(greedy, model, IDS[:, :prompt]))
        assert fed.take()[0] == (virtual, prompt)
        first = ("LlamaForCausalLM-1", "prefill", prompt, 0, virtual, 0, 1)
        assert checked(recorded) == [first, STEP, STEP]
        (request,) = recorded.trace.requests.to_pylist()
        assert request["prompt_tokens"] == prompt + virtual
        assert request["cached_tokens"] == virtual


def test_one_token_behind_a_prefix(llama: LlamaForCausalLM, same: Record) -> None:
    """A prompt of one token is a prompt, on a cache that an adapter has filled as well."""
    model = adapted(llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))

    def call() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(input_ids=IDS[:, :1]).logits
        return result

    assert passes(same(call)) == [("LlamaForCausalLM-1", "prefill", 1, 0, 5, 0, 1)]


def test_virtual_tokens_before_padding(llama: LlamaForCausalLM, record: Record) -> None:
    """The padding of a batch stands behind the virtual tokens: rows of 9 and 6 tokens, 5 virtual ones before each."""
    ids = torch.arange(3, 21).reshape(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = adapted(llama, config)
    recorded = record(lambda: greedy(model, ids, attention_mask=mask))
    assert passes(recorded)[0][1:] == ("prefill", 25, 0, 0, 3, 2)
    if CACHE == "past_key_values":
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        model = adapted(llama, config)
        recorded = record(lambda: greedy(model, ids, attention_mask=mask))
        assert checked(recorded)[0][1:] == ("prefill", 15, 0, 10, 3, 2)


IMPORTS = """
import sys
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
import phaseprof

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=64, eos_token_id=None, pad_token_id=0)).eval()
assert "peft" not in sys.modules
with phaseprof.profile(None, sys.argv[1]):
    import peft
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12).reshape(1, 9))
assert "__wrapped__" not in vars(peft.PeftModel.get_prompt)
"""


def test_peft_imported_in_the_session(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = open_trace(tmp_path / "t").passes.to_pylist()
    assert (row["phase"], row["prefill_tokens"], row["cached_tokens"]) == ("prefill", 9, 5)


def test_nothing_stays_on_peft(llama: LlamaForCausalLM, record: Record) -> None:
    before = dict(vars(peft.PeftModel))
    model = adapted(llama, lora())
    # What peft itself leaves on a model.
    greedy(model)
    own = [dict(vars(module)) for module in model.modules()]
    record(lambda: greedy(model))
    assert dict(vars(peft.PeftModel)) == before
    assert [vars(module).keys() for module in model.modules()] == [keys.keys() for keys in own]
    assert inspect.signature(peft.PeftModel.get_prompt) == inspect.signature(before["get_prompt"])
