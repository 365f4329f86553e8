"""Models by their config alone: weights that are quantized take what the tensors of their formats take."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phaseprof.errors import ModelError, UsageError
from phaseprof.work.formats import NAMED, rules_of
from phaseprof.work.from_config import GivenModel, load_given
from phaseprof.work.walk import model_cost

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
#: Inputs and outputs of the matrices of a layer.
SHAPES = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 640), (256, 640), (640, 256)]
ELEMENTS = sum(i * o for i, o in SHAPES)
NORMS, TABLE = 5 * 256 * 2, 1024 * 256 * 2
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
#: Both operands in FP8, as llm-compressor writes it.
FP8_ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
        }
    },
}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            },
            "input_activations": None,
        }
    },
}


def given(folder: Path, config: dict[str, Any], **how: Any) -> GivenModel:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return load_given(path, **how)


def body(folder: Path, quantization: dict[str, Any] | None, **changes: Any) -> int:
    """Bytes of the matrices in the layers of the tiny Llama."""
    config = LLAMA | changes
    if quantization is not None:
        config["quantization_config"] = quantization
    cost = given(folder, config).cost
    assert cost.not_covered == ()
    assert cost.parameters == 2 * ELEMENTS + NORMS // 2 + 2 * TABLE // 2
    assert cost.linear_flops_per_token == 2 * 2 * ELEMENTS
    assert cost.body_weight_bytes - NORMS == sum(
        m.count * m.weight_bytes for m in cost.matmuls if m.role != "lm_head"
    )
    return cost.body_weight_bytes - NORMS


@pytest.mark.parametrize(
    ("layers", "experts", "size"), [(24, 32, 13_761_264_768), (36, 128, 65_248_815_744)]
)
def test_gpt_oss_takes_what_its_published_files_take(
    tmp_path: Path, layers: int, experts: int, size: int
) -> None:
    """`total_size` of the index files of gpt-oss-20b and gpt-oss-120b."""
    cost = given(
        tmp_path, GPT_OSS | {"num_hidden_layers": layers, "num_local_experts": experts}
    ).cost
    assert cost.parameter_bytes == size
    assert cost.dtype == "bfloat16"
    # A byte for each 32 beside the 4 bits, and a bias of two for each output.
    matrices = 2880 * (3 * 2880)
    (one,) = cost.experts
    assert one.expert_bytes == matrices // 2 + matrices // 32 + 2 * 3 * 2880


def test_formats_of_eight_bits(tmp_path: Path) -> None:
    outputs = sum(o for _, o in SHAPES)
    assert body(tmp_path, FP8_ROWS) == 2 * (ELEMENTS + 2 * outputs)
    assert given(tmp_path, LLAMA | {"quantization_config": FP8_ROWS}).cost.dtype == "float8_e4m3fn"
    tensor = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    assert body(tmp_path, tensor) == 2 * (ELEMENTS + 8 * len(SHAPES))
    rows = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
    assert body(tmp_path, rows) == 2 * (ELEMENTS + 4 * outputs)


def test_formats_of_four_bits(tmp_path: Path) -> None:
    groups = sum(i // 128 * o for i, o in SHAPES)
    inputs = sum(i for i, _ in SHAPES)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    # Scales of 16 bits, zero points of 4.
    assert body(tmp_path, awq) == 2 * (ELEMENTS // 2 + 2 * groups + groups // 2)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
    assert body(tmp_path, gptq) == 2 * (ELEMENTS // 2 + 2 * groups + groups // 2 + 4 * inputs)
    # The shape of each matrix is stored with it.
    assert body(tmp_path, INT4) == 2 * (ELEMENTS // 2 + 2 * groups + 16 * len(SHAPES))
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    assert body(tmp_path, nvfp4) == 2 * (ELEMENTS // 2 + ELEMENTS // 16 + 8 * len(SHAPES))
    # Products are made of what is unpacked first, but for NVFP4.
    dtypes = [
        given(tmp_path, LLAMA | {"quantization_config": q}).cost.dtype
        for q in (awq, gptq, INT4, nvfp4)
    ]
    assert dtypes == ["bfloat16"] * 3 + ["float4_e2m1fn_x2"]


def _bitsandbytes(inputs: int, outputs: int, *, bits: int, nested: bool = True) -> int:
    """Bytes of the tensors of a real layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes.nn as bnb

        layer: Any = (
            bnb.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
            if bits == 8
            else bnb.Linear4bit(
                inputs, outputs, bias=False, quant_type="nf4", compress_statistics=nested
            )
        ).to("cpu")
    weight = layer.weight
    if bits == 8:
        return int(weight.data.nbytes + weight.SCB.nbytes)
    state = weight.quant_state
    parts = [weight.data, state.absmax, state.code]
    if nested:
        parts += [state.offset, state.state2.absmax, state.state2.code]
    return sum(int(part.nbytes) for part in parts)


@pytest.mark.parametrize(
    "config",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": False},
    ],
)
def test_bitsandbytes_takes_what_its_layers_hold(config: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    form = rules_of({"quant_method": "bitsandbytes", **config}, "it").format_of("layers.0.fc")
    assert form is not None
    for inputs, outputs in ((256, 640), (640, 256), (1024, 1024)):
        held = _bitsandbytes(
            inputs,
            outputs,
            bits=8 if "load_in_8bit" in config else 4,
            nested=bool(config.get("bnb_4bit_use_double_quant")),
        )
        assert form.data_bytes(inputs, outputs) + form.other_bytes(inputs, outputs) == held


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_fp8_in_blocks_is_what_transformers_makes_of_a_model(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Its own layers and experts, put into the same model: blocks of 128 x 128, some of them cut."""
    try:
        fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    except ImportError:
        pytest.skip("FP8 layers need triton here")
    config = config | {"intermediate_size": 600}
    told = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    ours = given(tmp_path, config | {"quantization_config": told}).cost
    described = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    fp8.replace_with_fp8_linear(
        model,
        modules_to_not_convert=["lm_head"],
        quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(128, 128)),
    )
    theirs = model_cost(model)
    assert theirs.dtype == "float8_e4m3fn"
    for name in ("matmuls", "experts", "attention", "parameters", "parameter_bytes", "dtype"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.body_weight_bytes == theirs.body_weight_bytes


def test_what_a_config_excludes_stays_as_it_is(tmp_path: Path) -> None:
    plain = body(tmp_path, None)
    assert plain == 2 * 2 * ELEMENTS
    whole = body(tmp_path, FP8_ROWS)
    attention = sum(i * o for i, o in SHAPES[:4])
    outputs = sum(o for _, o in SHAPES[:4])
    for left in (
        "re:.*self_attn.*",
        "self_attn",
        "model.layers.0.self_attn",
    ):
        layers = 1 if "0" in left else 2
        part = body(tmp_path, FP8_ROWS | {"ignore": ["lm_head", left]})
        assert part == whole + layers * (attention - 2 * outputs)
    # Without a word about the head it is packed like the rest; of a tied one that cannot be.
    everything = LLAMA | {"quantization_config": FP8_ROWS | {"ignore": []}}
    assert given(tmp_path, everything).cost.head_weight_bytes == 1024 * 256 + 2 * 1024
    tied = given(tmp_path, everything | {"tie_word_embeddings": True}).cost
    assert tied.head_weight_bytes == TABLE
    # Formats that do not speak of it leave it alone.
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert given(tmp_path, LLAMA | {"quantization_config": awq}).cost.head_weight_bytes == TABLE


def test_routers_are_never_packed(tmp_path: Path) -> None:
    config = QWEN3_MOE | {"quantization_config": FP8_ROWS | {"ignore": []}}
    cost = given(tmp_path, config).cost
    (router,) = [m for m in cost.matmuls if m.role == "router"]
    assert router.weight_bytes == 256 * 8 * 2
    (experts,) = cost.experts
    assert experts.expert_bytes == 3 * 256 * 128 + 2 * (2 * 128 + 256)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8),
        ("fp8-block", 8 + 32 / 128**2),
        ("int8", 8),
        ("int8-weight-only", 8),
        ("int4", 4 + 16 / 128),
        ("nf4", 4 + 32 / 64),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
    ],
)
def test_a_format_may_be_asked_for(tmp_path: Path, name: str, bits: float) -> None:
    assert name in NAMED
    cost = given(tmp_path, LLAMA, quantization=name).cost
    assert cost.not_covered == ()
    stored = 8 * (cost.body_weight_bytes - NORMS) / (2 * ELEMENTS)
    # Scales of whole rows are an eighth of a bit more in matrices so small.
    assert bits - 0.001 <= stored <= bits + 0.14
    # As it stands in the config, or not at all.
    quantized = LLAMA | {"quantization_config": INT4}
    assert given(tmp_path, quantized, quantization="none").cost.body_weight_bytes == (
        4 * ELEMENTS + NORMS
    )


def test_dtypes(tmp_path: Path) -> None:
    assert given(tmp_path, LLAMA).dtype == "bfloat16"
    assert given(tmp_path, LLAMA, dtype="fp32").cost.body_weight_bytes == 2 * (
        2 * 2 * ELEMENTS + NORMS
    )
    with pytest.raises(UsageError, match="Unknown dtype"):
        given(tmp_path, LLAMA, dtype="float12")


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"does not tell the bytes of its quantized weights .vptq."
    ):
        given(tmp_path, LLAMA | {"quantization_config": {"quant_method": "vptq"}})
    with pytest.raises(UsageError, match="Unknown quantization 'int3'"):
        given(tmp_path, LLAMA, quantization="int3")
    nothing = FP8_ROWS | {"ignore": ["re:.*"]}
    with pytest.raises(ModelError, match="names none of its matrices"):
        given(tmp_path, LLAMA | {"quantization_config": nothing})
