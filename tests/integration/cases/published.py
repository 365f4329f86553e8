"""Published models: their configs as far as the work depends on them, and what their authors say of their size.

Sizes are parameters in billions, to the digits given, or exact where the number is published; towers and layers for
multi-token prediction are left out. Where nothing but the type is given, the defaults of transformers are those of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        name: As published.
        config: Of its ``config.json``.
        size: Parameters: exact, or in billions, half a unit of the last digit off at most.
        active: Billions of parameters for one token, with or without the table of tokens, a twelfth off at most; None
            where nothing so exact is said.
        new: transformers 5.0 did not have it, or makes other modules or parameters of its config.
    """

    name: str
    config: dict[str, Any]
    size: int | str
    active: float | None = None
    new: bool = False


def _config(
    kind: str,
    vocab: int,
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    kv_heads: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
    } | more


_TIED = {"tie_word_embeddings": True}
_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}
_NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_BLOCKS = {"M": "mamba", "-": "mlp", "*": "attention"}

MODELS = [
    Model("Llama-3.1-8B", _config("llama", 128_256, 4096, 32, 14_336, 32, 8), 8_030_261_248),
    Model("Llama-3.3-70B", _config("llama", 128_256, 8192, 80, 28_672, 64, 8), 70_553_706_496),
    Model(
        "Llama-3.2-1B",
        _config("llama", 128_256, 2048, 16, 8192, 32, 8, head_dim=64, **_TIED),
        1_235_814_400,
    ),
    Model("Mistral-7B", _config("mistral", 32_000, 4096, 32, 14_336, 32, 8), 7_241_732_096),
    Model(
        "Mixtral-8x7B",
        _config(
            "mixtral", 32_000, 4096, 32, 14_336, 32, 8, num_local_experts=8, num_experts_per_tok=2
        ),
        46_702_792_704,
        12.9,
    ),
    Model("Qwen2.5-7B", _config("qwen2", 152_064, 3584, 28, 18_944, 28, 4), 7_615_616_512),
    Model("Qwen1.5-MoE-A2.7B", {"model_type": "qwen2_moe"}, "14.3", 2.7),
    Model("Qwen3-8B", _config("qwen3", 151_936, 4096, 36, 12_288, 32, 8), 8_190_735_360),
    Model(
        "Qwen3-30B-A3B",
        _config("qwen3_moe", 151_936, 2048, 48, 6144, 32, 4, moe_intermediate_size=768)
        | _QWEN3_MOE,
        30_532_122_624,
        3.3,
    ),
    Model("Qwen3-Next-80B-A3B", {"model_type": "qwen3_next"}, "80", 3.6),
    Model("Gemma-7B", {"model_type": "gemma"}, 8_537_680_896),
    Model("Gemma-2-2B", {"model_type": "gemma2"}, 2_614_341_888),
    Model(
        "Gemma-3-1B",
        _config("gemma3_text", 262_144, 1152, 26, 6912, 4, 1, head_dim=256, **_TIED),
        999_885_952,
    ),
    Model("Gemma-3n-E4B, text", {"model_type": "gemma3n_text"}, "6.8", new=True),
    Model("Phi-2", _config("phi", 51_200, 2560, 32, 10_240, 32, 32), 2_779_683_840),
    Model("Phi-3-mini", {"model_type": "phi3"}, 3_821_079_552),
    Model("Phi-3.5-MoE", {"model_type": "phimoe"}, "41.9", 6.6),
    Model("GPT-2", {"model_type": "gpt2"}, 124_439_808),
    Model("GPT-NeoX-20B", {"model_type": "gpt_neox"}, 20_554_567_680),
    Model("GPT-J-6B", {"model_type": "gptj"}, 6_050_882_784),
    Model("GPT-Neo-1.3B", {"model_type": "gpt_neo"}, 1_315_575_808),
    Model(
        "StarCoder",
        {
            "model_type": "gpt_bigcode",
            "vocab_size": 49_152,
            "n_embd": 6144,
            "n_layer": 40,
            "n_head": 48,
            "n_inner": 24_576,
            "n_positions": 8192,
        },
        15_517_456_384,
    ),
    Model("StarCoder2-3B", {"model_type": "starcoder2"}, 3_030_371_328),
    Model("OPT-125M", {"model_type": "opt"}, 125_239_296),
    Model(
        "BLOOM-7B1",
        {
            "model_type": "bloom",
            "vocab_size": 250_880,
            "hidden_size": 4096,
            "n_layer": 30,
            "n_head": 32,
        },
        7_069_016_064,
    ),
    Model("Falcon-7B", {"model_type": "falcon"}, 6_921_720_704),
    Model(
        "MPT-7B",
        {
            "model_type": "mpt",
            "vocab_size": 50_432,
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
        },
        6_649_286_656,
    ),
    Model("StableLM-3B-4E1T", {"model_type": "stablelm"}, 2_795_443_200),
    Model("Command-R", {"model_type": "cohere"}, 34_980_831_232),
    Model("Command-R7B", _config("cohere2", 256_000, 4096, 32, 14_336, 32, 8, **_TIED), "8.03"),
    Model("OLMo-7B", {"model_type": "olmo"}, 6_888_095_744),
    Model("OLMo-2-7B", _config("olmo2", 100_352, 4096, 32, 11_008, 32, 32), 7_298_617_344),
    Model("Olmo-3-7B", _config("olmo3", 100_278, 4096, 32, 11_008, 32, 32), "7.30"),
    Model(
        "OLMoE-1B-7B",
        _config("olmoe", 50_304, 2048, 16, 1024, 16, 16, num_experts=64, num_experts_per_tok=8),
        6_919_161_856,
        1.3,
    ),
    Model(
        "DeepSeek-V2-Lite",
        _config("deepseek_v2", 102_400, 2048, 27, 10_944, 16, 16)
        | _DEEPSEEK
        | {
            "moe_intermediate_size": 1408,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
        },
        15_706_484_224,
        2.4,
    ),
    Model("DeepSeek-V3", {"model_type": "deepseek_v3"}, "671", 37.0),
    Model("DeepSeek-V3.2", {"model_type": "deepseek_v32"}, "672", 37.0, new=True),
    Model("GLM-4-9B", {"model_type": "glm"}, 9_399_951_360),
    Model("GLM-4-9B-0414", {"model_type": "glm4"}, 9_400_279_040),
    Model("GLM-4.5-Air", {"model_type": "glm4_moe"}, "103"),
    Model(
        "Granite-3.1-8B",
        _config("granite", 49_155, 4096, 40, 12_800, 32, 8, **_TIED),
        "8.17",
    ),
    Model(
        "Granite-3.0-1B-A400M",
        _config(
            "granitemoe",
            49_155,
            1024,
            24,
            512,
            16,
            8,
            num_local_experts=32,
            num_experts_per_tok=8,
            **_TIED,
        ),
        "1.33",
        0.4,
        new=True,
    ),
    Model(
        "Nemotron-Mini-4B",
        _config("nemotron", 256_000, 3072, 32, 9216, 24, 8, head_dim=128),
        "4.19",
    ),
    Model(
        "Nemotron-H-8B",
        _config("nemotron_h", 131_072, 4096, 52, 21_504, 32, 8, head_dim=128)
        | {
            "layers_block_type": [_BLOCKS[kind] for kind in _NEMOTRON_H],
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
        "8.1",
        new=True,
    ),
    Model(
        "Mamba-2.8B",
        {
            "model_type": "mamba",
            "vocab_size": 50_280,
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "state_size": 16,
            "tie_word_embeddings": True,
        },
        2_768_345_600,
    ),
    Model(
        "Mamba-2-2.7B",
        {
            "model_type": "mamba2",
            "vocab_size": 50_288,
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "num_heads": 80,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
        "2.70",
    ),
    Model("Jamba-v0.1", {"model_type": "jamba"}, "51.6", 12.0),
    Model(
        "Bamba-9B",
        _config("bamba", 128_256, 4096, 32, 14_336, 32, 8, attn_layer_indices=[9, 18, 27])
        | {"mamba_d_state": 128},
        "9.78",
    ),
    Model(
        "LFM2-1.2B",
        _config("lfm2", 65_536, 2048, 16, 12_288, 32, 8, **_TIED)
        | {
            "block_ff_dim": 12_288,
            "layer_types": [
                "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
            ],
        },
        1_170_340_608,
    ),
    Model("SmolLM3-3B", {"model_type": "smollm3"}, 3_075_098_624),
    Model(
        "EXAONE-4.0-1.2B",
        _config("exaone4", 102_400, 2048, 30, 4096, 32, 8, head_dim=64, **_TIED),
        "1.28",
    ),
    Model("ERNIE-4.5-0.3B", {"model_type": "ernie4_5"}, "0.36"),
    Model("ERNIE-4.5-21B-A3B", {"model_type": "ernie4_5_moe"}, "21.8"),
    Model(
        "gpt-oss-20b",
        _config("gpt_oss", 201_088, 2880, 24, 2880, 64, 8, head_dim=64, num_local_experts=32),
        "20.9",
        3.6,
    ),
    Model("gpt-oss-120b", {"model_type": "gpt_oss"}, "116.8", 5.1),
    Model(
        "MiniMax-Text-01",
        _config(
            "minimax",
            200_064,
            6144,
            80,
            9216,
            64,
            8,
            head_dim=128,
            num_local_experts=32,
            num_experts_per_tok=2,
        )
        | {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10},
        "456",
        45.9,
    ),
    Model("MiniMax-M2", {"model_type": "minimax_m2"}, "229", 10.0, new=True),
    Model(
        "DBRX",
        {
            "model_type": "dbrx",
            "vocab_size": 100_352,
            "d_model": 6144,
            "n_layers": 40,
            "n_heads": 48,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500_000.0},
            "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131_596_523_520,
        36.0,
        new=True,
    ),
    Model(
        "Hunyuan-7B",
        _config("hunyuan_v1_dense", 128_167, 4096, 32, 14_336, 32, 8, head_dim=128, **_TIED),
        "7.50",
    ),
    Model(
        "Seed-OSS-36B",
        _config("seed_oss", 155_136, 5120, 64, 27_648, 80, 8, head_dim=128, attention_bias=True),
        "36.2",
    ),
    Model("Apertus-8B", _config("apertus", 131_072, 4096, 32, 21_504, 32, 8), "8.05", new=True),
    Model("Llama-4-Scout, text", {"model_type": "llama4_text"}, "107.8", 17.0),
    Model("AFM-4.5B", _config("arcee", 128_004, 2560, 36, 18_432, 20, 4, head_dim=128), "4.6"),
    Model("XGLM-564M", {"model_type": "xglm"}, 564_463_616),
    Model("BioGPT", {"model_type": "biogpt"}, 346_763_264),
    Model("GLM-5", {"model_type": "glm_moe_dsa"}, "744", 40.0, new=True),
    Model("MiMo-V2-Flash", {"model_type": "mimo_v2_flash"}, "309", 15.0, new=True),
]
