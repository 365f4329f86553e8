"""Mixtures of experts, latent attention and borrowed keys of real models: FLOPs, weights and caches against the truth.

How many layers have experts, how many there are and how many a token is sent to is written by hand beside each
configuration. What a pass reads of them is taken from the indices that the routers really gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE, counted, has, held_per_token, one_thread, weights_read
from shape_truth import check_shapes
from torch import nn
from transformers import DynamicCache

from phaseprof.work.cost import ExpertsCost, ModelCost
from phaseprof.work.count import Rows, Work, count
from phaseprof.work.kv import cache_bytes, read_layout
from phaseprof.work.walk import model_cost

BATCH = 2
WINDOW = 8
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_PLAIN = {"num_experts": 6, "num_experts_per_tok": 2}
_SMALL = _PLAIN | {"moe_intermediate_size": 24}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
#: FLOPs of one pair in one head of eager attention.
_EQUAL, _MLA = 4 * 16, 2 * (16 + 8 + 12)

# Family; what its config is given; layers with experts, experts, experts a token; FLOPs of a pair in eager attention.
_Spec = tuple[str, dict[str, Any], tuple[int, int, int], int | None]
MIXTURES: dict[str, _Spec] = {
    "mixtral": ("Mixtral", _LOCAL, (4, 6, 2), None),
    "mixtral, one expert a token": ("Mixtral", _LOCAL | {"num_experts_per_tok": 1}, (4, 6, 1), None),
    "qwen2_moe, every other layer, shared": (
        "Qwen2Moe",
        _SMALL | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        (2, 6, 2),
        None,
    ),
    "qwen3_moe, a dense layer": ("Qwen3Moe", _SMALL | {"mlp_only_layers": [1]}, (3, 6, 2), None),
    "deepseek_v2": ("DeepseekV2", _LATENT | _GROUPED, (3, 8, 2), _MLA),
    "deepseek_v2, query not compressed": (
        "DeepseekV2",
        _LATENT | _GROUPED | {"q_lora_rank": None},
        (3, 8, 2),
        _MLA,
    ),
    "deepseek_v3, groups": ("DeepseekV3", _LATENT | _GROUPED | {"n_shared_experts": 2}, (3, 8, 2), _MLA),
    "glm4_moe": ("Glm4Moe", _GROUPED, (3, 8, 2), None),
    "glm4_moe_lite, latent": ("Glm4MoeLite", _LATENT | _GROUPED, (3, 8, 2), _MLA),
    "axk1, latent": ("AXK1", _LATENT | _GROUPED, (3, 8, 2), _MLA),
    "dots1": ("Dots1", _GROUPED, (3, 8, 2), None),
    "olmoe": ("Olmoe", _PLAIN, (4, 6, 2), None),
    "flex_olmo": ("FlexOlmo", _PLAIN, (4, 6, 2), None),
    "gpt_oss, biases and sinks": ("GptOss", _LOCAL | _ALTERNATING, (4, 6, 2), _EQUAL),
    "granitemoe": ("GraniteMoe", _LOCAL, (4, 6, 2), None),
    "granitemoe, shared": ("GraniteMoeShared", _LOCAL | {"shared_intermediate_size": 40}, (4, 6, 2), None),
    "granitemoe, sinks": (
        "GraniteMoeSWA",
        _LOCAL | _ALTERNATING | {"shared_intermediate_size": 40},
        (4, 6, 2),
        _EQUAL,
    ),
    "phimoe": ("Phimoe", _LOCAL, (4, 6, 2), None),
    "jetmoe, attention too": ("JetMoe", _LOCAL | {"kv_channels": 16}, (4, 6, 2), None),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "moe_layer_end_index": 3},
        (3, 6, 2),
        None,
    ),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 2}, (4, 6, 2), None),
    "minimax_m2": ("MiniMaxM2", _LOCAL, (4, 6, 2), None),
    "aria": ("AriaText", {"moe_num_experts": 6, "moe_topk": 2}, (4, 6, 2), None),
    "afmoe, gated": ("Afmoe", _SMALL | _ALTERNATING | {"num_dense_layers": 1}, (3, 6, 2), None),
    "exaone_moe": ("ExaoneMoe", _GROUPED | _SMALL | _ALTERNATING, (3, 6, 2), None),
    "cohere2_moe": ("Cohere2Moe", _PLAIN | _ALTERNATING, (4, 6, 2), None),
    "solar_open": ("SolarOpen", _GROUPED | {"first_k_dense_replace": 0}, (4, 8, 2), None),
    "laguna": ("Laguna", _SMALL | {"shared_expert_intermediate_size": 40}, (3, 6, 2), None),
    "mimo_v2_flash, sinks and heads by layer": (
        "MiMoV2Flash",
        _GROUPED | _ALTERNATING | {"v_head_dim": 12},
        (3, 8, 2),
        2 * (16 + 12),
    ),
}  # fmt: skip
#: Those that came after transformers 5.0.
NEW = {
    *("Glm4MoeLite", "AXK1", "GraniteMoeSWA", "ExaoneMoe", "Cohere2Moe"),
    *("Laguna", "MiMoV2Flash", "SolarOpen"),
}


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with one_thread():
        yield


def make(family: str, given: dict[str, Any], attention: str = "sdpa", *, new: bool = False) -> Any:
    """A random tiny model."""
    if not has(f"{family}ForCausalLM", new=new):
        pytest.skip(f"{family} came after transformers {transformers.__version__}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**given)
    config._attn_implementation = attention
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        # Some are only allocated; the choice among experts needs numbers.
        if not parameter.isfinite().all() or parameter.abs().max() > 1e3 or not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def build(name: str) -> Any:
    family, given, _, eager = MIXTURES[name]
    attention = "sdpa" if eager is None else "eager"
    return make(family, _SIZES | given, attention, new=family in NEW)


def experts_of(model: nn.Module) -> int:
    """Bytes of all routed experts: of what has three axes, and its biases."""
    size = 0
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if any(p.dim() == 3 for p in own.values()):
            size += sum(p.numel() * p.element_size() for p in own.values())
        elif isinstance(module, nn.ModuleList) and type(module).__name__.endswith("Experts"):
            size += sum(p.numel() * p.element_size() for p in module.parameters())
    return size


@contextmanager
def routed(model: nn.Module) -> Iterator[list[int]]:
    """How many experts each layer with experts was really asked for in a pass, in the order of the layers."""
    chosen: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = next(
            t
            for t in (*args, *kwargs.values())
            if isinstance(t, torch.Tensor) and not t.is_floating_point()
        )
        chosen.append(len(set(indices.flatten().tolist())))

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def weight_bytes(model: nn.Module, cost: ModelCost, work: Work, tokens: int) -> tuple[float, float]:
    """What is said to be read of the routed experts, and what is said of everything else."""
    said = sum(e.layers * round(e.expected_distinct(tokens) * e.expert_bytes) for e in cost.experts)
    return said, work.weight_bytes - said


@pytest.mark.parametrize("name", MIXTURES)
def test_every_figure_of_prefill_chunk_and_decode(name: str) -> None:
    model = build(name)
    layers, number, top_k = MIXTURES[name][2]
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    assert {(e.layers, e.experts, e.top_k) for e in cost.experts} == {(layers, number, top_k)}
    size = sum(e.layers * e.experts * e.expert_bytes for e in cost.experts)
    assert size == experts_of(model)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert cost.parameter_bytes == parameters

    cache = DynamicCache(config=model.config)
    head = model.get_output_embeddings()
    past = 0
    for query in (24, 5, 1):
        ids = torch.randint(3, 90, (BATCH, query))
        held = cache_bytes(cache)
        with counted(MIXTURES[name][3]) as (truth, run):
            out = run(model, ids, **{CACHE: cache}, use_cache=True)
        layout = read_layout(cache)
        logits = out.logits.shape[0] * out.logits.shape[1]
        rows = [Rows(past, query, BATCH)]
        work = count(cost, rows, logits_tokens=logits, layout=layout)

        assert work.flops == truth.flops
        _, rest = weight_bytes(model, cost, work, BATCH * query)
        assert rest == weights_read(model, BATCH * query, head=head) - size
        assert work.kv_write_bytes == BATCH * query * sum(held_per_token(cache))
        assert work.kv_read_bytes == held + work.kv_write_bytes
        # Before a cache was seen, the same follows from the weights alone.
        assert count(cost, rows, logits_tokens=logits, layout=None) == work
        past += query


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "mixtral, one expert a token",
        "qwen3_moe, a dense layer",
        "deepseek_v3, groups",
        "gpt_oss, biases and sinks",
    ],
)
def test_experts_are_read_as_the_router_chooses(name: str) -> None:
    """One token reads its k experts, no more; a prompt that is long enough reads them all."""
    model = build(name)
    layers, number, top_k = MIXTURES[name][2]
    cost = model_cost(model)
    (experts,) = cost.experts
    for tokens, distinct in ((1, top_k), (64 * number, number)):
        with routed(model) as chosen, torch.no_grad():
            model(torch.randint(3, 90, (1, 1)).repeat(1, 1) if tokens == 1 else _varied(tokens))
        if tokens == 1:
            assert chosen == [distinct] * layers
        work = count(cost, [Rows(0, tokens, 1)], logits_tokens=0, layout=None, cached=False)
        said, _ = weight_bytes(model, cost, work, tokens)
        assert said == layers * distinct * experts.expert_bytes


def _varied(tokens: int) -> torch.Tensor:
    return torch.randint(3, 90, (max(tokens // 64, 1), 64))


def test_a_long_prompt_reaches_every_expert() -> None:
    """Tokens of random embeddings, and a router of random rows: nothing that prefers an expert."""
    model = make("Mixtral", _SIZES | _LOCAL)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    with routed(model) as chosen, torch.no_grad():
        model(torch.randint(3, 90, (4, 64)))
    assert chosen == [6] * 4


@pytest.mark.parametrize(
    ("number", "top_k", "tokens"), [(4, 1, 3), (4, 2, 3), (5, 3, 2), (3, 3, 2)]
)
def test_expected_experts_are_the_mean_over_all_choices(
    number: int, top_k: int, tokens: int
) -> None:
    choices = list(combinations(range(number), top_k))
    draws = [len(set().union(*draw)) for draw in product(choices, repeat=tokens)]
    cost = ExpertsCost(1, number, top_k, expert_flops_per_token=1, expert_bytes=1)
    assert cost.expected_distinct(tokens) == pytest.approx(sum(draws) / len(draws), rel=1e-12)


def test_any_implementation_of_experts_needs_the_same() -> None:
    """One after the other, batched and grouped: the counter sees the same products, but for the rotary angles."""
    flops = set()
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = make("Qwen3Moe", _SIZES | _SMALL)
        model.set_experts_implementation(implementation)
        with counted() as (truth, run):
            run(model, torch.randint(3, 90, (BATCH, 24)), use_cache=False)
        flops.add(truth.flops)
    cost = model_cost(model)
    work = count(cost, [Rows(0, 24, BATCH)], logits_tokens=BATCH * 24, layout=None, cached=False)
    assert flops == {work.flops}


def test_llama4_runs_every_expert_and_needs_only_some() -> None:
    """Its experts in transformers multiply every token with all of them, most with zeros: that is the difference."""
    given = _SIZES | _LOCAL | {"intermediate_size_mlp": 72, "attention_chunk_size": 8}
    given |= {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "moe_layers": [1, 3]}
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**given)).eval()
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    (experts,) = cost.experts
    assert (experts.layers, experts.experts, experts.top_k) == (2, 6, 2)
    assert {(g.layers, g.chunk_tokens, g.window_tokens) for g in cost.attention} == {
        (3, 8, None),
        (1, None, None),
    }
    cache = DynamicCache(config=model.config)
    past = 0
    for query in (24, 5, 1):
        held = cache_bytes(cache)
        with counted() as (truth, run):
            run(model, torch.randint(3, 90, (BATCH, query)), **{CACHE: cache}, use_cache=True)
        layout = read_layout(cache)
        work = count(cost, [Rows(past, query, BATCH)], logits_tokens=BATCH * query, layout=layout)
        idle = experts.layers * (6 - 2) * experts.expert_flops_per_token * BATCH * query
        assert truth.flops == work.flops + idle
        assert work.kv_write_bytes == BATCH * query * sum(held_per_token(cache))
        assert work.kv_read_bytes == held + work.kv_write_bytes
        past += query


def test_latents_are_cached_where_attention_can_expand_them() -> None:
    """28 + 8 elements a token and layer for all heads, expanded again in each pass; before, 4 heads of 24 and 12."""
    model = build("deepseek_v3, groups")
    latent = hasattr(model.model.layers[0].self_attn, "expand_kv")
    (group,) = model_cost(model).attention
    assert group.kv_bytes_per_token == 4 * ((28 + 8) if latent else 4 * (24 + 12))
    assert group.expand_flops_per_token == (2 * 28 * 4 * (16 + 12) if latent else 0)
    assert (group.query_heads, group.qk_head_dim, group.v_head_dim) == (4, 24, 12)


@pytest.mark.parametrize(
    ("family", "own", "scorers"),
    [
        ("DeepseekV32", {}, 4),
        ("GlmMoeDsa", {"indexer_types": ["full", "shared", "full", "shared"]}, 2),
    ],
)
def test_attention_to_what_an_indexer_chooses(
    family: str, own: dict[str, Any], scorers: int
) -> None:
    """Each query attends to 8 keys at most; the scorers, two heads of 16, look at all of them, in float32 products."""
    indexed = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
    model = make(family, _SIZES | _LATENT | _GROUPED | indexed | own, "eager", new=True)
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    assert [(g.layers, g.window_tokens) for g in cost.attention] == [(4, 8), (scorers, None)]
    cache = DynamicCache(config=model.config)
    past = 0
    for query in (24, 5, 1, 1):
        held = cache_bytes(cache)
        with counted(_MLA) as (truth, run):
            run(model, torch.randint(3, 90, (BATCH, query)), **{CACHE: cache}, use_cache=True)
        layout = read_layout(cache)
        rows = [Rows(past, query, BATCH)]
        work = count(cost, rows, logits_tokens=BATCH * query, layout=layout)
        # The counter sees the rectangle of the scores: what is not causal is needed by nobody.
        idle = BATCH * scorers * (query * (query - 1) // 2) * 2 * 2 * (16 + 1)
        assert truth.flops == work.flops + idle
        assert work.kv_held_bytes == cache_bytes(cache)
        assert work.kv_read_bytes == cache_bytes(cache)
        assert work.kv_write_bytes == cache_bytes(cache) - held
        assert count(cost, rows, logits_tokens=BATCH * query, layout=None) == work
        past += query


_SHARING = {
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_layers_that_borrow_keys(family: str) -> None:
    """Two of four layers use what the two before them hold; both kinds of layers are read by attention."""
    if not has(f"{family}ForCausalLM", new=family == "Gemma4"):
        pytest.skip(f"{family} came after transformers {transformers.__version__}")
    torch.manual_seed(0)
    own: dict[str, Any] = {"laurel_rank": 4, "altup_num_inputs": 2}
    own |= {"activation_sparsity_pattern": [0.0] * 4}
    if family == "Gemma4":
        own = {"global_head_dim": 32, "enable_moe_block": True, "num_experts": 6}
        own |= {"top_k_experts": 2, "moe_intermediate_size": 24}
    config = getattr(transformers, f"{family}TextConfig")(**_SIZES | _SHARING | own)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    cost = model_cost(model)
    assert cost.not_covered == ()
    assert [(g.layers, g.borrows) for g in cost.attention] == [
        (1, False),
        (1, False),
        (1, True),
        (1, True),
    ]
    cache = DynamicCache(config=model.config)
    past = 0
    for query in (24, 5, 1):
        with counted() as (truth, run):
            run(model, torch.randint(3, 90, (BATCH, query)), **{CACHE: cache}, use_cache=True)
        layout = read_layout(cache)
        rows = [Rows(past, query, BATCH)]
        work = count(cost, rows, logits_tokens=BATCH * query, layout=layout)
        assert work.flops == truth.flops
        per_token = held_per_token(cache)
        assert len(per_token) == 2
        assert work.kv_write_bytes == BATCH * query * sum(per_token)
        assert work.kv_held_bytes == cache_bytes(cache)
        # The kernel of each layer is given as many keys as the layer that holds them has.
        lengths = zip(truth.key_lengths, (*per_token, *per_token), strict=True)
        assert work.kv_read_bytes == BATCH * sum(length * size for length, size in lengths)
        assert count(cost, rows, logits_tokens=BATCH * query, layout=None) == work
        past += query


def test_a_borrowing_layer_reads_no_projection_that_it_does_not_use() -> None:
    """Early releases build the projections to keys and values in every layer; a pass runs those of two."""
    torch.manual_seed(0)
    own = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.Gemma3nTextConfig(**_SIZES | _SHARING | own)
    model = transformers.Gemma3nForCausalLM(config).eval()
    cost = model_cost(model)
    ran: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda m, *_: ran.add(m)) for m in model.modules()]
    with torch.no_grad():
        model(torch.randint(3, 90, (1, 4)))
    for handle in handles:
        handle.remove()
    read = {
        id(p): p.numel() * 4
        for m in ran | {layer.altup for layer in model.model.layers}
        for p in m.parameters(recurse=False)
        if not isinstance(m, nn.Embedding)
    }
    tied = {id(model.lm_head.weight)}
    assert cost.body_weight_bytes == sum(size for key, size in read.items() if key not in tied)
