"""What matrices are for, by where they stand, their names in transformers and in vLLM, and their shapes."""

from __future__ import annotations

import pytest

from phaseprof.work.cost import MatmulCost
from phaseprof.work.roles import Inside, inside_by_name, joined, role_of

ATTENTION, STATE, REST = Inside.ATTENTION, Inside.STATE, Inside.REST


@pytest.mark.parametrize(
    ("path", "inside", "inputs", "outputs", "role"),
    [
        # Llama, in transformers and merged in vLLM.
        ("model.layers.0.self_attn.q_proj", ATTENTION, 64, 64, "qkv"),
        ("model.layers.0.self_attn.qkv_proj", ATTENTION, 64, 96, "qkv"),
        ("model.layers.0.self_attn.o_proj", ATTENTION, 64, 64, "o"),
        ("model.layers.0.mlp.gate_proj", REST, 64, 160, "gate_up"),
        ("model.layers.0.mlp.gate_up_proj", REST, 64, 320, "gate_up"),
        ("model.layers.0.mlp.down_proj", REST, 160, 64, "down"),
        # One name, two meanings.
        ("transformer.h.0.attn.c_attn", ATTENTION, 64, 192, "qkv"),
        ("transformer.h.0.attn.c_proj", ATTENTION, 64, 64, "o"),
        ("transformer.h.0.mlp.c_fc", REST, 64, 256, "gate_up"),
        ("transformer.h.0.mlp.c_proj", REST, 256, 64, "down"),
        ("gpt_neox.layers.0.attention.dense", ATTENTION, 64, 64, "o"),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", REST, 64, 256, "gate_up"),
        ("gpt_neox.layers.0.mlp.dense_4h_to_h", REST, 256, 64, "down"),
        ("model.layers.0.self_attn.gate_proj", ATTENTION, 64, 64, "qkv"),
        # Ways to name an MLP.
        ("model.decoder.layers.0.fc1", REST, 64, 256, "gate_up"),
        ("model.decoder.layers.0.fc2", REST, 256, 64, "down"),
        ("model.layers.0.feed_forward.w3", REST, 64, 160, "gate_up"),
        ("model.layers.0.feed_forward.w2", REST, 160, 64, "down"),
        ("model.layers.0.mlp.expand", REST, 64, 160, "gate_up"),
        ("model.layers.0.mlp.shrink", REST, 160, 64, "down"),
        ("encoder.block.0.layer.1.DenseReluDense.wi_0", REST, 64, 160, "gate_up"),
        ("encoder.block.0.layer.1.DenseReluDense.wo", REST, 160, 64, "down"),
        ("bert.encoder.layer.0.intermediate.dense", REST, 64, 256, "gate_up"),
        ("bert.encoder.layer.0.output.dense", REST, 256, 64, "down"),
        # Experts: a shared one is an MLP like any other; a gate is a router, or half of an MLP.
        ("model.layers.0.mlp.shared_expert.up_proj", REST, 64, 160, "gate_up"),
        ("model.layers.0.mlp.shared_expert_gate", REST, 64, 1, "router"),
        ("model.layers.0.mlp.gate", REST, 64, 8, "router"),
        ("model.layers.0.mlp.gate", REST, 64, 160, "gate_up"),
        ("model.layers.0.mlp.router.layer", REST, 64, 8, "router"),
        # Latents.
        ("model.layers.0.self_attn.q_a_proj", ATTENTION, 64, 24, "latent"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", ATTENTION, 64, 40, "latent"),
        ("model.layers.0.self_attn.kv_b_proj", ATTENTION, 32, 256, "latent"),
        ("model.layers.0.self_attn.fused_qkv_a_proj", REST, 64, 64, "latent"),
        ("model.layers.0.self_attn.indexer.wq_b", ATTENTION, 24, 64, "other"),
        # States.
        ("backbone.layers.0.mixer.in_proj", STATE, 64, 256, "other"),
        ("model.layers.0.linear_attn.o_proj", STATE, 64, 64, "other"),
        # What nothing is known of.
        ("model.project_in", REST, 32, 64, "other"),
        ("model.layers.0.per_layer_input_gate", REST, 64, 16, "other"),
        ("model.layers.0.mlp.mix", REST, 64, 64, "other"),
    ],
)
def test_roles(path: str, inside: Inside, inputs: int, outputs: int, role: str) -> None:
    assert role_of(path, inside, inputs=inputs, outputs=outputs, hidden=64) == role


def test_an_attention_of_unknown_names_is_told_by_its_shapes() -> None:
    before, behind = "model.layers.0.attn.first", "model.layers.0.attn.second"
    assert role_of(before, ATTENTION, inputs=64, outputs=96, hidden=64) == "qkv"
    assert role_of(behind, ATTENTION, inputs=96, outputs=64, hidden=64) == "o"


def test_what_only_names_can_tell() -> None:
    assert inside_by_name("encoder.layer.0.attention.output.dense") is ATTENTION
    assert inside_by_name("decoder.layers.0.encoder_attn.q_proj") is ATTENTION
    assert inside_by_name("encoder.layer.0.output.dense") is REST


def test_identical_matrices_are_joined() -> None:
    one = MatmulCost("qkv", 1, 8, 8, 128)
    other = MatmulCost("qkv", 1, 8, 8, 130)
    assert joined([one, other, one, MatmulCost("qkv", 3, 8, 8, 130)]) == (
        MatmulCost("qkv", 2, 8, 8, 128),
        MatmulCost("qkv", 4, 8, 8, 130),
    )
