"""Models with real adapters of PEFT: FLOPs against torch's counter, bytes against the tensors that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.hooks.variants import AdapterState
from phaseprof.work.adapters import base_of, has_adapters, read_adapters
from phaseprof.work.cost import ModelCost
from phaseprof.work.walk import model_cost

#: The fixture that runs a function under a session.
Record = Callable[[Callable[[], Any]], Any]

# PEFT asks transformers by an older name whether it trains.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = 7
PROMPT = torch.arange(3, 3 + TOKENS).unsqueeze(0)


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        pad_token_id=0,
        attn_implementation="eager",
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def lora(rank: int = 4, **changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": rank, "target_modules": ["q_proj", "down_proj"], **changes})


def adapted(config: Any, **changes: Any) -> PeftModel:
    return get_peft_model(llama(**changes), config).eval()


def tensors_of(model: nn.Module, *words: str) -> list[torch.Tensor]:
    """Parameters whose path has all the words in it."""
    return [p for name, p in model.named_parameters() if all(word in name for word in words)]


def size(tensors: list[torch.Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def counted_flops(model: nn.Module) -> int:
    """Products that a pass runs on its linear layers, head included, by torch's counter; attention taken away."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(PROMPT, use_cache=False)
    by_operator = counter.get_flop_counts()["Global"]
    return sum(flops for operator, flops in by_operator.items() if "bmm" not in str(operator))


def flops(cost: ModelCost) -> int:
    return TOKENS * (cost.linear_flops_per_token + cost.head_flops_per_token)


PLAIN = model_cost(llama())


def test_active_adapters_count_and_others_do_not() -> None:
    model = adapted(lora(4))
    model.add_adapter("wide", lora(16, target_modules=["v_proj"]))
    base = model.get_base_model()
    for active, rank, words in (("default", 4, "default"), ("wide", 16, "wide")):
        model.set_adapter(active)
        cost = model_cost(base)
        assert cost.not_covered == ()
        assert flops(cost) == counted_flops(model), (active, rank)
        assert cost.body_weight_bytes == PLAIN.body_weight_bytes + size(
            tensors_of(base, "lora_", words)
        )
        assert cost.attention == PLAIN.attention
        assert cost.parameter_bytes == size(list(base.parameters()))


def test_several_active_adapters_add_up() -> None:
    model = adapted(lora(4))
    model.add_adapter("wide", lora(16, target_modules=["q_proj", "v_proj"]))
    model.base_model.set_adapter(["default", "wide"])
    cost = model_cost(model.get_base_model())
    assert flops(cost) == counted_flops(model)
    assert cost.body_weight_bytes == PLAIN.body_weight_bytes + size(tensors_of(model, "lora_"))


def test_merged_and_disabled_adapters_are_not_read() -> None:
    model = adapted(lora(4))
    base = model.get_base_model()
    with model.disable_adapter():
        assert flops(model_cost(base)) == flops(PLAIN) == counted_flops(model)
        assert model_cost(base).body_weight_bytes == PLAIN.body_weight_bytes
    model.merge_adapter()
    assert flops(model_cost(base)) == flops(PLAIN) == counted_flops(model)
    assert model_cost(base).body_weight_bytes == PLAIN.body_weight_bytes
    model.unmerge_adapter()
    assert flops(model_cost(base)) == counted_flops(model)
    assert model_cost(model.merge_and_unload()) == PLAIN


def test_every_change_of_what_runs_is_noticed() -> None:
    model = adapted(lora(4))
    model.add_adapter("wide", lora(16))
    base = model.get_base_model()
    at_first = AdapterState.of(base)
    assert at_first is not None
    assert (at_first.active, at_first.holds()) == (("default",), True)
    with model.disable_adapter():
        assert not at_first.holds()
    assert at_first.holds()
    model.set_adapter("wide")
    assert not at_first.holds()
    model.set_adapter("default")
    assert at_first.holds()
    model.merge_adapter()
    assert not at_first.holds()
    model.unmerge_adapter()
    assert at_first.holds()
    model.merge_and_unload()
    assert not at_first.holds()
    assert AdapterState.of(base) is None


def test_an_adapter_on_some_layers_on_the_head_and_a_copy_of_the_table() -> None:
    model = adapted(lora(4, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"]))
    base = model.get_base_model()
    cost = model_cost(base)
    assert cost.not_covered == ()
    assert flops(cost) == counted_flops(model)
    head = tensors_of(base, "lm_head.lora_")
    assert cost.head_flops_per_token - PLAIN.head_flops_per_token == 2 * 4 * (64 + 256)
    assert cost.head_weight_bytes == PLAIN.head_weight_bytes + size(head)
    assert cost.body_weight_bytes == PLAIN.body_weight_bytes + size(
        tensors_of(base, "q_proj.lora_")
    )
    # The copy of the table is what is looked up, a row of it for each token.
    assert cost.lookup_bytes_per_token == 64 * 4
    one_layer = adapted(
        lora(4, target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers")
    )
    assert model_cost(one_layer.get_base_model()).linear_flops_per_token == (
        PLAIN.linear_flops_per_token + 2 * 4 * (64 + 64)
    )


def test_dora_reads_its_magnitudes_and_the_norm_is_a_constant() -> None:
    """PEFT computes the norms of the columns in every pass: 2 r in (in + out) FLOPs that the mathematics does not
    need."""
    model = adapted(lora(4, target_modules=["q_proj"], use_dora=True))
    base = model.get_base_model()
    cost = model_cost(base)
    assert cost.not_covered == ()
    again = 2 * 2 * 4 * 64 * (64 + 64)
    assert flops(cost) + again == counted_flops(model)
    assert cost.body_weight_bytes == PLAIN.body_weight_bytes + size(tensors_of(base, "lora_"))
    assert len(tensors_of(base, "magnitude")) == 2


def test_ia3_scales_and_multiplies_nothing() -> None:
    model = adapted(
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    )
    base = model.get_base_model()
    cost = model_cost(base)
    assert cost.not_covered == ()
    assert flops(cost) == flops(PLAIN) == counted_flops(model)
    assert cost.body_weight_bytes == PLAIN.body_weight_bytes + size(tensors_of(base, "ia3_l"))


def test_adapters_that_are_not_known_are_said_unless_they_do_nothing() -> None:
    model = adapted(LoHaConfig(r=4, target_modules=["q_proj"]))
    base = model.get_base_model()
    (reason,) = model_cost(base).not_covered
    assert reason.startswith("adapters of class loha.")
    with model.disable_adapter():
        assert model_cost(base).not_covered == ()
        assert flops(model_cost(base)) == flops(PLAIN)
    table = adapted(lora(4, target_modules=["embed_tokens"]))
    assert model_cost(table.get_base_model()).not_covered == ("adapters on a lookup table",)


def test_a_model_without_adapters_is_seen_as_it_is() -> None:
    model = llama()
    assert not has_adapters(model)
    assert AdapterState.of(model) is None
    assert read_adapters(model).modules == dict(model.named_modules())
    assert base_of(model) is model


def test_passes_with_other_adapters_count_as_those_of_another_model(record: Record) -> None:
    """What runs may change between two passes of one model: each pass has the work of what is active then."""
    model = adapted(lora(4))
    model.add_adapter("wide", lora(16))

    def run() -> list[torch.Tensor]:
        outputs = []
        for active in ("default", "wide", "default"):
            model.set_adapter(active)
            outputs.append(model.generate(input_ids=PROMPT, max_new_tokens=3, do_sample=False))
        with model.disable_adapter():
            outputs.append(model.generate(input_ids=PROMPT, max_new_tokens=3, do_sample=False))
            with torch.no_grad():
                model(PROMPT)
        with torch.no_grad():
            model(PROMPT)
        return outputs

    expected = run()
    recorded = record(run)
    assert all(torch.equal(a, b) for a, b in zip(recorded.output, expected, strict=True))
    rows = recorded.passes("phase", "flops", "weight_bytes")
    assert [row[0] for row in rows] == ["prefill", "decode", "decode"] * 4 + ["prefill"] * 2

    def weight_bytes(rank: int) -> int:
        extra = 2 * rank * (64 + 64 + 128 + 64) * 4
        return PLAIN.body_weight_bytes + PLAIN.head_weight_bytes + extra

    lookups = PLAIN.lookup_bytes_per_token
    read = [row[2] - lookups * (TOKENS if row[0] == "prefill" else 1) for row in rows]
    ranks = [4] * 3 + [16] * 3 + [4] * 3 + [0] * 4 + [4]
    assert read == [weight_bytes(rank) for rank in ranks]


def test_an_adapter_that_is_added_between_two_calls_is_noticed(record: Record) -> None:
    model = llama()

    def run() -> None:
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
        with_adapter = get_peft_model(model, lora(4)).eval()
        with_adapter.generate(input_ids=PROMPT, max_new_tokens=2, do_sample=False)

    rows = record(run).passes("phase", "weight_bytes")
    assert [row[0] for row in rows] == ["prefill", "decode"] * 2
    assert rows[3][1] - rows[1][1] == 2 * 4 * (64 + 64 + 128 + 64) * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_on_packed_layers(bits: int) -> None:
    import bitsandbytes.nn as bnb

    model = llama()
    plain = llama()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            kind = bnb.Linear8bitLt if bits == 8 else bnb.Linear4bit
            extra: dict[str, Any] = (
                {"has_fp16_weights": False} if bits == 8 else {"compute_dtype": torch.float32}
            )
            layer = kind(module.in_features, module.out_features, bias=False, **extra)
            layer.load_state_dict(module.state_dict())
            model.set_submodule(path, layer.to("cpu"))
    before = model_cost(model)
    assert before.linear_flops_per_token == model_cost(plain).linear_flops_per_token
    base = get_peft_model(model, lora(4)).eval().get_base_model()
    cost = model_cost(base)
    assert cost.not_covered == ()
    assert cost.linear_flops_per_token == before.linear_flops_per_token + 2 * 2 * 4 * (
        64 + 64 + 128 + 64
    )
    assert cost.body_weight_bytes == before.body_weight_bytes + size(tensors_of(base, "lora_"))
