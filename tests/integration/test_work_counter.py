"""Decoders that no closed form covers: counted on tensors without data, held to torch's counter on real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.analyzers.report import build_report
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.counter import counted_cost
from phaseprof.work.kv import cache_bytes, read_layout
from phaseprof.work.layers import Layers
from phaseprof.work.walk import model_cost

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
#: Machines of tests are slow.
PATIENT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Pooling(nn.Module):
    """A mixer of a user's own: what attention gives, gated by a product of three matrices that nobody else has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mixing = nn.Parameter(torch.ones(3, 32, 32))

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        out, *rest = self.inner(hidden_states=hidden_states, **named)
        gate = hidden_states
        for matrix in self.mixing:
            gate = gate @ matrix
        return (out * gate.tanh(), *rest)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).eval()


def own(every: int = 1, **more: Any) -> Any:
    """A decoder with a mixer of its own in every so many layers."""
    model = llama(**more)
    for layer in list(model.model.layers)[::every]:
        layer.self_attn = Pooling(layer.self_attn)
    return model


def counted(model: Any) -> ModelCost:
    refused = model_cost(model)
    assert not refused.covered
    return counted_cost(model, refused, limit_s=PATIENT_S)


def products(model: Any, ids: torch.Tensor, cache: Any) -> tuple[int, Any]:
    """FLOPs of a real pass by torch's counter, with every rectangle of attention whole."""

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={kernel: attention})
    with torch.no_grad(), counter:
        out = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return int(counter.get_total_flops()), out.get(CACHE)


@pytest.mark.parametrize(
    "build",
    [
        own,
        lambda: own(every=2, num_hidden_layers=8),
        lambda: transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SIZES)).eval(),
    ],
    ids=["a mixer in every layer", "a mixer in every other layer", "DiffLlama"],
)
def test_passes_that_were_not_used_for_the_fit_agree(build: Any) -> None:
    model = build()
    cost = counted(model)
    assert cost.not_covered == () and cost.counted
    assert cost.parameter_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    cache, past = None, 0
    pair = sum(group.layers * group.flops_per_pair for group in cost.attention)
    for query in (40, 7, 1):
        flops, cache = products(model, torch.randint(3, 90, (2, query)), cache)
        layout = read_layout(cache)
        work = count(cost, [Rows(past, query, 2)], logits_tokens=2, layout=layout)
        masked = pair * 2 * (query * (query - 1) // 2)
        assert abs(work.flops + masked - flops) <= 0.005 * flops
        assert work.kv_held_bytes == cache_bytes(cache)
        # Before a cache was seen, the layers without data say the same.
        assert count(cost, [Rows(past, query, 2)], logits_tokens=2, layout=None) == work
        past += query


def test_where_a_closed_form_holds_it_is_the_same() -> None:
    model = llama(num_hidden_layers=6)
    cost = model_cost(model)
    by_counter = counted_cost(
        model, replace(cost, not_covered=("it is not asked",)), limit_s=PATIENT_S
    )
    assert by_counter.counted
    for past, query in ((0, 300), (300, 9), (309, 1)):
        rows = [Rows(past, query, 3)]
        theirs = count(by_counter, rows, logits_tokens=3, layout=None)
        ours = count(cost, rows, logits_tokens=3, layout=None)
        assert abs(theirs.flops - ours.flops) <= 0.005 * ours.flops
        assert (theirs.weight_bytes, theirs.kv_read_bytes, theirs.kv_held_bytes) == (
            ours.weight_bytes,
            ours.kv_read_bytes,
            ours.kv_held_bytes,
        )


def test_nothing_of_the_model_runs_or_changes() -> None:
    model = own()
    called: list[object] = []
    model.model.layers[1].register_forward_hook(lambda *_: called.append(1))
    model.train()
    model.model.layers[0].eval()
    model._cache = transformers.DynamicCache()
    before = {
        name: (id(p), p.data_ptr(), p._version)
        for name, p in model.state_dict(keep_vars=True).items()
    }
    modes = [module.training for module in model.modules()]
    config, noise = model.config.to_dict(), torch.get_rng_state()
    assert counted(model).counted
    assert called == []
    after = model.state_dict(keep_vars=True).items()
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in after} == before
    assert [module.training for module in model.modules()] == modes
    assert len(model.model.layers) == 2
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), noise)
    assert isinstance(torch.ones(1), torch.Tensor) and torch.ones(1).item() == 1.0


class Averaging(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """A decoder of a user's own, without a cache: each token takes the mean of those before it."""

    config_class = LlamaConfig
    base_model_prefix = ""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.ModuleList(
            nn.Bilinear(32, 32, 32, bias=False) for _ in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        states = self.table(input_ids)
        before = torch.ones(states.shape[1], states.shape[1], device=states.device).tril()
        for mix in self.mix:
            mean = (before / before.sum(-1, keepdim=True)) @ states
            states = states + torch.einsum("bti,oij,btj->bto", mean, mix.weight, states)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(states))


def test_a_decoder_of_a_users_own_without_a_cache() -> None:
    torch.manual_seed(0)
    model = Averaging(LlamaConfig(**{**SIZES, "num_hidden_layers": 6})).eval()
    cost = counted(model)
    assert cost.not_covered == ()
    pair = sum(group.layers * group.flops_per_pair for group in cost.attention)
    for query in (3, 61, 200):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.randint(3, 90, (2, query)))
        rows = [Rows(0, query, 2)]
        work = count(cost, rows, logits_tokens=2 * query, layout=None, cached=False)
        masked = pair * 2 * (query * (query - 1) // 2)
        flops = counter.get_total_flops()
        assert abs(work.flops + masked - flops) <= 0.005 * flops
        # What its mixers read of other tokens is not known.
        assert work.kv_read_bytes is None


class Scanning(Pooling):
    """Works on blocks of 16 tokens, padded: its FLOPs go up in steps."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        missing = -hidden_states.shape[1] % 16
        padded = nn.functional.pad(hidden_states, (0, 0, 0, missing))
        for matrix in self.mixing:
            padded = padded @ matrix
        return self.inner(hidden_states=hidden_states + padded.mean(), **named)


class Switching(Pooling):
    """Does more for a long prompt."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        for matrix in self.mixing[: 1 if hidden_states.shape[1] < 100 else 3]:
            hidden_states = hidden_states @ matrix
        return self.inner(hidden_states=hidden_states, **named)


class Looking(Pooling):
    """Decides by what it sees."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        if hidden_states.sum().item() > 0:
            hidden_states = hidden_states @ self.mixing[0]
        return self.inner(hidden_states=hidden_states, **named)


@torch.library.custom_op("phaseprof_tests::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    """A kernel of a user's own."""
    return x.clone()


@mixed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Fused(Pooling):
    """Runs a kernel whose FLOPs nobody knows."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        return self.inner(hidden_states=mixed(hidden_states), **named)


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (Scanning, "its FLOPs do not grow with its tokens and pairs"),
        (Switching, "130 tokens after 0 take"),
        (Looking, "does not run on tensors without data (DataDependentOutputException)"),
        (Fused, "it runs phaseprof_tests::mixed, whose FLOPs are not known"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_reasons(mixer: type[Pooling], why: str) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn = mixer(layer.self_attn)
    cost = counted(model)
    assert not cost.covered and not cost.counted
    first, *_, last = cost.not_covered
    assert "unknown use: mixing" in first
    assert last.startswith("torch's counter: ") and why in last


def test_a_window_is_not_seen_by_short_passes() -> None:
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=300)
    ).eval()
    model.model.layers[0].self_attn = Pooling(model.model.layers[0].self_attn)
    assert "a sliding_window in its config" in counted(model).not_covered[-1]


def test_a_replaced_forward_is_not_run() -> None:
    model = own()
    model.model.layers[0].forward = model.model.layers[0].forward
    assert "a forward that was put in its place" in counted(model).not_covered[-1]


def test_the_time_is_limited() -> None:
    model = own()
    refused = model_cost(model)
    assert counted_cost(model, refused, limit_s=0.0).not_covered[-1].endswith("takes too long")


def test_what_is_no_decoder_or_covered_is_left_as_it_is() -> None:
    model = llama()
    cost = model_cost(model)
    assert counted_cost(model, cost) is cost
    layer = nn.Linear(3, 3)
    refused = model_cost(layer)
    assert counted_cost(layer, refused) is refused


def test_layers_repeat_after_as_many_as_differ() -> None:
    layers = Layers.of(own(every=2, num_hidden_layers=8))
    assert (layers.period, layers.depths) == (2, (2, 4))
    # 10 in the first two, 7 more in each of the three pairs after them.
    assert layers.whole([10, 17]) == 10 + 3 * 7
    # The last one is like no other.
    model = llama(num_hidden_layers=8)
    model.model.layers[7].self_attn = Pooling(model.model.layers[7].self_attn)
    assert Layers.of(model).depths == (8,)
    assert Layers.of(llama(num_hidden_layers=2)).depths == (2,)


def test_a_recorded_run_says_that_torch_counted(record: Any) -> None:
    model = own()
    ids = torch.randint(3, 90, (1, 9))

    def run() -> torch.Tensor:
        return torch.as_tensor(
            model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        )

    alone = run()
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    (meta,) = recorded.trace.metas
    (seen,) = meta.models
    assert recorded.passes("phase", "prefill_tokens", "decode_tokens") == [
        ("prefill", 9, 0),
        ("decode", 0, 1),
        ("decode", 0, 1),
    ]
    if seen.cost.covered:
        assert seen.cost.counted
        assert all(flops for (flops,) in recorded.passes("flops"))
        notes = [note.what for note in build_report(recorded.trace).not_measured]
        assert f"a closed form of the FLOPs of {type(model).__name__}" in notes
    else:
        # A machine that is busy with other things: said, not guessed.
        assert "takes too long" in seen.cost.not_covered[-1]
