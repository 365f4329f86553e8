"""State spaces, linear attention and short convolutions: FLOPs against torch's counter, states against real caches.

Torch runs a decode step in its recurrent form and a prompt in chunks. What the counter sees of a step is said for each
architecture beside what a step is: the recurrence is no matrix product where torch writes it element by element, and
the convolution of a step is run for one position more than is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from shape_truth import check_shapes
from torch.utils.flop_counter import FlopCounterMode

from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.kv import KvLayout, cache_bytes, read_layout, with_layout
from phaseprof.work.parts import NotCovered
from phaseprof.work.state import state_part
from phaseprof.work.walk import model_cost

BATCH = 2
_TWO = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
_GQA = _TWO | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_MAMBA = {"state_size": 8, "expand": 2, "conv_kernel": 4}
_SSD = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_EXPERTS = {"num_experts": 0, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}

# Per token of one step, all layers: FLOPs of recurrence and convolution by hand; what torch's counter
# sees of them (products, convolutions).
# Mamba has 64 channels with a state of 8: 4 x 64 x 8 = 2048 and a convolution of 2 x 64 x 4 = 512, twice. The counter
# sees the product with C (half of the recurrence), and the convolution for two positions.
ARCHITECTURES: dict[str, tuple[dict[str, Any], int, tuple[int, int] | None]] = {
    "Mamba": (_TWO | _MAMBA, 2 * (2048 + 512), (2 * 1024, 2 * 1024)),
    "FalconMamba": (_TWO | _MAMBA, 2 * (2048 + 512), (2 * 1024, 2 * 1024)),
    # 8 heads of 8 channels with a state of 8: the same recurrence; the convolution is 64 + 2 x 2 x 8 = 96 wide.
    "Mamba2": (
        _TWO | _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        2 * (2048 + 768),
        (2 * 1024, 2 * 1536),
    ),
    # One layer of the two; one group: 64 + 2 x 8 = 80 wide.
    "Bamba": (_GQA | _SSD | {"attn_layer_indices": [1], "mamba_expand": 2}, 2048 + 640, (1024, 1280)),
    "GraniteMoeHybrid": (
        _GQA
        | _SSD
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "mamba_expand": 2,
        },
        2048 + 640,
        (1024, 1280),
    ),
    "Jamba": (
        _GQA
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        2048 + 512,
        (1024, 1024),
    ),
    # 4 heads with a state of 8 x 8: 6 x 4 x 64 = 1536, all of it element by element; keys of 4 heads: 96 wide.
    "OlmoHybrid": (
        _GQA | _DELTA | _LINEAR_THEN_FULL | _IDS | {"linear_num_key_heads": 4},
        1536 + 768,
        (0, 1536),
    ),
    # Keys of 2 heads for 4 of the values: the convolution is 64 wide.
    "Qwen3Next": (
        _GQA | _DELTA | _LINEAR_THEN_FULL | _NO_EXPERTS | {"head_dim": 8},
        1536 + 512,
        (0, 1024),
    ),
    "Qwen3_5": (_GQA | _DELTA | _LINEAR_THEN_FULL | {"head_dim": 8}, 1536 + 512, (0, 1024)),
    # Both in each of the two layers.
    "FalconH1": (
        _GQA | _SSD | {"head_dim": 8, "mamba_d_ssm": 64},
        2 * (2048 + 640),
        (2 * 1024, 2 * 1280),
    ),
    "NemotronH": (
        _GQA
        | {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "head_dim": 8,
            "chunk_size": 8,
        },
        2048 + 640,
        (1024, 1280),
    ),
    # 4 heads of 8 x 8: 4 x 4 x 64, of which the product of a key and a value is an outer one.
    "MiniMax": (
        _GQA
        | _LINEAR_THEN_FULL
        | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "block_size": 8},
        1024,
        (512, 0),
    ),
    # The decay is each channel's own and comes from a gate; beside it latent attention, in products that are not told
    # apart from those of the recurrence.
    "KimiLinear": (
        _TWO
        | _LINEAR_THEN_FULL
        | _IDS
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "mlp_layer_types": ["dense", "dense"],
        },
        1536 + 768,
        None,
    ),
    # 3 taps over 32 channels.
    "Lfm2": (
        _GQA
        | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        192,
        (0, 384),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str) -> Any:
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    text = "Text" if name == "Qwen3_5" else ""
    config = getattr(transformers, f"{name}{text}Config")(**ARCHITECTURES[name][0])
    # One expert after the other, in products that the counter sees.
    config._experts_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _bmm(a: Any, b: Any, *_: Any, **__: Any) -> int:
    # The angles of rotary embeddings are an outer product, and not what is looked for.
    return 0 if a[2] == 1 else int(2 * a[0] * a[1] * a[2] * b[2])


class Loop:
    """A hand-written loop that keeps the cache of whatever version of transformers runs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        self.past = 0
        self.names = inspect.signature(model.forward).parameters
        self.flops: dict[str, int] = {}

    def step(self, query: int) -> Any:
        named: dict[str, Any] = {"use_cache": True}
        if self.cache is None and "cache" not in self.names:
            # A hybrid of transformers before 5.10 has a cache only if it is given one: as generate makes it.
            named |= self._first_cache()
        if self.cache is not None:
            argument = next(
                n for n in ("cache", "past_key_values", "cache_params") if n in self.names
            )
            named[argument] = self.cache
        if "cache_position" in self.names:
            named["cache_position"] = torch.arange(self.past, self.past + query)
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: _bmm})
        ids = torch.randint(3, 90, (BATCH, query))
        with torch.no_grad(), counter:
            out = self.model(ids, **named)
        self.flops = {str(op): flops for op, flops in counter.flop_counts["Global"].items()}
        given = (out.get(name) for name in ("cache", "past_key_values", "cache_params"))
        self.cache = next((cache for cache in given if cache is not None), self.cache)
        self.past += query
        return out

    def _first_cache(self) -> dict[str, Any]:
        module = inspect.getmodule(type(self.model))
        kinds = [
            kind
            for name, kind in vars(module).items()
            if name.endswith("Cache") and getattr(kind, "__module__", "") == module.__name__  # type: ignore[union-attr]
        ]
        if not kinds or "cache_params" in self.names:
            return {}
        cpu = torch.device("cpu")
        config = self.model.config
        named = {"config": config, "dtype": torch.float32, "device": cpu, "devices": [cpu] * 2}
        wanted = inspect.signature(kinds[0].__init__).parameters
        size = {n: BATCH for n in ("batch_size", "max_batch_size") if n in wanted}
        self.cache = kinds[0](**size, **{k: v for k, v in named.items() if k in wanted})
        return {}


def linear(flops: dict[str, int]) -> int:
    """FLOPs of products with weights."""
    return sum(flops.get(op, 0) for op in ("aten.mm", "aten.addmm"))


# What these libraries warn of (missing fast kernels, token ids) is not our subject.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_and_decode(name: str) -> None:
    model = build(name)
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    _, by_hand, seen = ARCHITECTURES[name]
    assert sum(s.layers * s.flops_per_token for s in cost.states) == by_hand
    loop = Loop(model)
    pairs_flops = sum(g.layers * g.flops_per_pair for g in cost.attention)
    for query in (11, 1, 1):
        past = loop.past
        out = loop.step(query)
        logits = out.logits.shape[0] * out.logits.shape[1]
        layout = read_layout(loop.cache)
        assert layout is not None and layout.covered
        work = count(cost, [Rows(past, query, BATCH)], logits_tokens=logits, layout=layout)
        # Products with weights are the same in every form; each token goes through the recurrence once.
        attention = BATCH * pairs_flops * (query * past + query * (query + 1) // 2)
        assert work.flops == linear(loop.flops) + attention + BATCH * query * by_hand
        if query == 1 and seen is not None:
            assert loop.flops.get("aten.bmm", 0) == BATCH * seen[0]
            # Before transformers 5.10 a step's convolution is no convolution, but a product and a sum.
            assert loop.flops.get("aten.convolution", 0) in (0, BATCH * seen[1])
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        table = model.get_input_embeddings().weight
        rows = BATCH * query * table.shape[1] * table.element_size()
        tied = model.get_output_embeddings().weight is table
        whole = 0 if tied else rows - table.numel() * table.element_size()
        assert work.weight_bytes == weights + whole
        assert work.kv_held_bytes == work.kv_allocated_bytes == cache_bytes(loop.cache)
        # A state is written whole by each pass, and read whole by each but the first.
        tokens = BATCH * layout.bytes_per_token
        state = BATCH * layout.state_bytes
        assert work.kv_write_bytes == state + query * tokens
        assert work.kv_read_bytes == (state if past else 0) + (past + query) * tokens
    assert layout is not None
    real = with_layout(cost, layout)
    assert sum(s.layers * s.state_bytes for s in real.states) == layout.state_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "OlmoHybrid", "Lfm2"])
def test_before_a_cache_was_seen_the_state_follows_from_the_weights(name: str) -> None:
    model = build(name)
    if not hasattr(transformers.cache_utils, "LinearAttentionLayer") and name == "Lfm2":
        pytest.skip("this transformers keeps one column more")
    loop = Loop(model)
    loop.step(5)
    layout = read_layout(loop.cache)
    assert layout is not None
    assert sum(s.layers * s.state_bytes for s in model_cost(model).states) == layout.state_bytes


# The recurrences as their papers write them, in matrix products, so that torch's counter counts them whole.


def delta_step(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """Gated delta rule: S = a S + k (beta (v - (a S)^T k))^T, o = S^T q. Heads in the first axis."""
    state = decay * state
    error = v[:, None] - torch.bmm(k[:, None], state)
    state = state + torch.bmm(k[:, :, None], beta * error)
    return torch.bmm(q[:, None], state)[:, 0], state


def ssd_step(x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any) -> tuple[Any, Any]:
    """Mamba-2: S = exp(dt A) S + (dt x) B^T, y = S C. Heads in the first axis."""
    state = torch.exp(dt * a)[:, None, None] * state + torch.bmm(
        (dt[:, None] * x)[..., None], b[:, None]
    )
    return torch.bmm(state, c[..., None])[..., 0], state


def test_a_step_of_the_delta_rule_is_what_transformers_runs() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    torch.manual_seed(0)
    heads, keys, values = 4, 8, 6
    q, k = torch.randn(heads, keys), torch.randn(heads, keys)
    v, state = torch.randn(heads, values), torch.randn(heads, keys, values)
    decay, beta = -torch.rand(heads), torch.rand(heads)
    with FlopCounterMode(display=False) as counter:
        out, after = delta_step(
            q / keys**0.5, k, v, decay.exp()[:, None, None], beta[:, None, None], state
        )
    assert counter.get_total_flops() == 6 * heads * keys * values
    theirs, their_state = torch_recurrent_gated_delta_rule(
        q[None, None], k[None, None], v[None, None], g=decay[None, None], beta=beta[None, None],
        initial_state=state[None], output_final_state=True,
    )  # fmt: skip
    torch.testing.assert_close(theirs[0, 0], out)
    torch.testing.assert_close(their_state[0], after)


def test_a_step_of_mamba_2_is_what_transformers_runs() -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(modeling, "mamba2_selective_state_update"):
        pytest.skip("inside the mixer in this transformers")
    torch.manual_seed(0)
    heads, channels, size = 4, 8, 6
    x, dt, a = torch.randn(heads, channels), torch.rand(heads), -torch.rand(heads)
    b, c = torch.randn(heads, size), torch.randn(heads, size)
    state = torch.randn(heads, channels, size)
    with FlopCounterMode(display=False) as counter:
        out, after = ssd_step(x, dt, a, b, c, state)
    assert counter.get_total_flops() == 4 * heads * channels * size
    kept = state[None].clone()
    theirs = modeling.mamba2_selective_state_update(
        kept, x[None], dt[None, :, None].expand(1, heads, channels),
        a[:, None, None].expand(heads, channels, size), b[None], c[None],
    )  # fmt: skip
    torch.testing.assert_close(theirs[0], out)
    torch.testing.assert_close(kept[0], after)


def test_weights_that_do_not_fit_are_refused() -> None:
    model = build("Mamba2")
    mixer = model.backbone.layers[0].mixer
    mixer.ssm_state_size = 7
    assert any("do not fit the recurrence" in reason for reason in model_cost(model).not_covered)
    mixer.ssm_state_size = 8
    mixer.conv1d = torch.nn.Conv1d(96, 96, 4)
    with pytest.raises(NotCovered, match="no convolution of single channels"):
        state_part(mixer, model.config, 0)


def test_states_outside_of_a_cache_are_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        **_TWO, num_attention_heads=4, intermediate_size=48, lru_width=32
    )
    cost = model_cost(transformers.RecurrentGemmaForCausalLM(config))
    assert any("in its own modules" in reason for reason in cost.not_covered)


def test_a_state_alone_makes_a_layout() -> None:
    """Of a pure state space nothing grows, and each pass moves the same."""
    cost = model_cost(build("Mamba"))
    layout = KvLayout((), state_bytes=6144)
    works = [count(cost, [Rows(p, 1, 3)], logits_tokens=3, layout=layout) for p in (1, 10_000)]
    assert {w.flops for w in works} == {works[0].flops}
    assert {w.kv_read_bytes for w in works} == {3 * 6144}
    assert isinstance(cost, ModelCost) and cost.attention == ()
