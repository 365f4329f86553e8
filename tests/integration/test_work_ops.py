"""The operations of a pass against torch's counter, module by module: each has the FLOPs of the modules that it stands
for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from flop_truth import has, one_thread
from torch.utils.flop_counter import FlopCounterMode

from phaseprof.work.count import Rows, count
from phaseprof.work.ops import OpKind, activation_bytes_of, ops_of
from phaseprof.work.walk import model_cost

ROWS, LENGTH = 2, 7
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
#: Family; what its config is given; which module of a layer is what, by the end of its path.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": (
        "LlamaForCausalLM",
        _SIZES,
        {r"[qkv]_proj": "qkv", "o_proj": "o", r"gate_proj|up_proj": "gate_up", "down_proj": "down"},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        _GPT2,
        {"c_attn": "qkv", r"attn\.c_proj": "o", "c_fc": "gate_up", r"mlp\.c_proj": "down"},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        _SIZES,
        {
            "query_key_value": "qkv",
            r"attention\.dense": "o",
            "dense_h_to_4h": "gate_up",
            "dense_4h_to_h": "down",
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        _SIZES,
        {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"},
    ),
    "opt": (
        "OPTForCausalLM",
        {k: v for k, v in _SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
        | {"ffn_dim": 112, "word_embed_proj_dim": 32},
        {
            r"[qkv]_proj": "qkv",
            "out_proj": "o",
            "fc1": "gate_up",
            "fc2": "down",
            r"project_in|project_out": "other",
        },
    ),
    "deepseek_v2, all experts chosen": (
        "DeepseekV2ForCausalLM",
        _SIZES | _LATENT,
        {
            r"q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj": "latent",
            "o_proj": "o",
            r"gate_proj|up_proj": "gate_up",
            "down_proj": "down",
            "gate": "router",
            "experts": "experts",
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        _SIZES
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        {
            r"[qkv]_proj": "qkv",
            "o_proj": "o",
            r"gate_proj|up_proj": "gate_up",
            "down_proj": "down",
            r"gate|shared_expert_gate": "router",
            "experts": "experts",
        },
    ),
}


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with one_thread():
        yield


def build(name: str) -> Any:
    family, given, _ = MODELS[name]
    assert has(family, new=False)
    torch.manual_seed(0)
    model_class = getattr(transformers, family)
    config = model_class.config_class(**given)
    config._attn_implementation = "sdpa"
    return model_class(config).eval()


def by_module(model: Any, roles: dict[str, str]) -> Counter[str]:
    """FLOPs of a pass by what a module is for, as torch's counter sees each module; attention kernels are not in it."""

    def grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
        return int(2 * a[0] * a[1] * b[-1])

    aten = torch.ops.aten
    mapping = {
        aten._grouped_mm: grouped,
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: 0,
    }
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(torch.randint(3, 90, (ROWS, LENGTH)), use_cache=False)
    found: Counter[str] = Counter()
    for path, flops in counter.get_flop_counts().items():
        role = next((r for end, r in roles.items() if re.search(rf"\.(?:{end})$", path)), None)
        if path.endswith((".lm_head", ".embed_out")):
            role = "lm_head"
        if role is not None:
            found[role] += sum(flops.values())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_operations_have_the_flops_of_their_modules(name: str) -> None:
    if name.startswith("deepseek") and transformers.__version__.startswith("5.0."):
        pytest.skip("its router is multiplied with in the block around it there")
    model = build(name)
    cost = model_cost(model)
    rows = (Rows(0, LENGTH, ROWS),)
    ops = ops_of(cost, rows, logits_tokens=ROWS * LENGTH)
    ours: Counter[str] = Counter()
    for op in ops:
        if op.kind not in (OpKind.ATTENTION_PREFILL, OpKind.STATE):
            ours[op.kind.value] += op.flops
    assert +ours == by_module(model, MODELS[name][2])
    whole = count(cost, rows, logits_tokens=ROWS * LENGTH, layout=None)
    assert sum(op.flops for op in ops) == whole.flops
    assert sum(op.weight_bytes for op in ops) == whole.weight_bytes
    # Shapes say the same as the sums.
    for op in ops:
        if op.gemm is not None:
            assert op.calls * op.gemm.flops == op.flops
    # What is left without a shape are norms and vectors: weights without products.
    (rest,) = [op for op in ops if op.kind is OpKind.OTHER and op.gemm is None]
    assert (rest.flops, rest.kv_bytes) == (0, 0)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert 0 < rest.weight_bytes <= vectors * activation_bytes_of(cost.dtype)


@pytest.mark.filterwarnings("ignore")
def test_what_adapters_add_has_no_shape_of_its_own() -> None:
    """LoRA of rank 3 on two projections of each layer: 3 (inputs + outputs) elements each."""
    peft = pytest.importorskip("peft")
    plain = model_cost(build("llama"))
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    cost = model_cost(peft.get_peft_model(build("llama"), config).eval())
    assert cost.matmuls == plain.matmuls
    ops = ops_of(cost, (Rows(0, LENGTH, ROWS),), logits_tokens=ROWS)
    (rest,) = [op for op in ops if op.kind is OpKind.OTHER and op.gemm is None]
    elements = 2 * (3 * (64 + 64) + 3 * (64 + 32))
    assert rest.flops == 2 * elements * ROWS * LENGTH
    norms = 5 * 64
    assert rest.weight_bytes == 4 * (elements + norms)


def test_a_tied_head_has_the_bytes_of_the_table() -> None:
    model = build("gpt2")
    (head,) = [m for m in model_cost(model).matmuls if m.role == "lm_head"]
    assert (head.inputs, head.outputs, head.weight_bytes) == (64, 97, 4 * 64 * 97)
    ops = ops_of(model_cost(model), (Rows(0, LENGTH, ROWS),), logits_tokens=0)
    assert all(op.kind is not OpKind.LM_HEAD for op in ops)
