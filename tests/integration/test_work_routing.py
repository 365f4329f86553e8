"""The experts that passes really read: what the routers of tiny real mixtures chose, under a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from phaseprof.hooks.routing import RoutingHook
from phaseprof.hooks.state import ThreadState
from phaseprof.work.walk import model_cost

#: The fixture that runs a function under a session.
Record = Callable[[Callable[[], Any]], Any]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing was compiled: another test may have."""
    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())


LAYERS, EXPERTS, TOP_K = 2, 8, 2
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


def mixtral(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **_SIZES, intermediate_size=48, num_local_experts=EXPERTS, **changes
    )
    return transformers.MixtralForCausalLM(config).eval()


def qwen3_moe(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **_SIZES,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        head_dim=8,
        **changes,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


class Choosing(nn.Module):
    """A router that sends every token to the same experts, or token t to the experts t and t + 1."""

    top_k: int

    def __init__(self, chosen: list[int] | None) -> None:
        super().__init__()
        self.chosen = chosen
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 32))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
        if self.chosen is None:
            first = torch.arange(tokens) % EXPERTS
            index = torch.stack([first, (first + 1) % EXPERTS], 1)
        else:
            index = torch.tensor([self.chosen]).repeat(tokens, 1)
        return torch.zeros(tokens, EXPERTS), torch.full((tokens, TOP_K), 0.5), index


def force(model: Any, *chosen: list[int] | None) -> Any:
    for layer, experts in zip(model.model.layers, chosen, strict=True):
        gate = Choosing(experts)
        gate.top_k = TOP_K
        layer.mlp.gate = gate
    return model


def generate(model: Any, length: int = 5, rows: int = 1, new: int = 3) -> torch.Tensor:
    prompt = (torch.arange(length * rows) % 96 + 1).reshape(rows, length)
    output: torch.Tensor = model.generate(prompt, max_new_tokens=new, do_sample=False)
    return output


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_the_experts_of_a_forced_routing_are_counted(
    make: Callable[[], Any], record: Record
) -> None:
    """Layer 0 sends every token to two experts; layer 1 spreads a prompt of 5 over the experts 0 to 5."""
    model = force(make(), [3, 6], None)
    cost = model_cost(model)
    assert cost.not_covered == ()
    expected = generate(model)
    recorded = record(lambda: generate(model))
    assert torch.equal(recorded.output, expected)
    rows = recorded.passes("phase", "experts_read", "weight_bytes")
    assert [row[:2] for row in rows] == [("prefill", 2 + 6), ("decode", 2 + 2), ("decode", 2 + 2)]
    expert = model.model.layers[0].mlp.experts
    size = (expert.gate_up_proj[0].numel() + expert.down_proj[0].numel()) * 4
    assert cost.experts[0].expert_bytes == size
    fixed = cost.body_weight_bytes + cost.head_weight_bytes
    assert [row[2] for row in rows] == [
        fixed + tokens * cost.lookup_bytes_per_token + read * size
        for tokens, read in ((5, 8), (1, 4), (1, 4))
    ]
    # An even spread would reach 8 (1 - (3/4)^5) = 6.1 experts of each layer in the prompt.
    assert cost.experts[0].expected_distinct(5) == pytest.approx(6.102, abs=1e-3)


def test_rows_of_a_batch_share_experts(record: Record) -> None:
    model = force(mixtral(), [0, 1], [0, 7])
    rows = record(lambda: generate(model, rows=4)).passes("experts_read")
    assert rows == [(4,), (4,), (4,)]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_the_router_s_own_choice_is_counted_by_every_implementation(
    implementation: str, record: Record
) -> None:
    model = mixtral()
    model.set_experts_implementation(implementation)
    seen: list[int] = []

    def look(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(len(set(args[1].flatten().tolist())))

    hooks = [layer.mlp.experts.register_forward_pre_hook(look) for layer in model.model.layers]
    recorded = record(lambda: generate(model, length=40))
    for hook in hooks:
        hook.remove()
    by_pass = [seen[i] + seen[i + 1] for i in range(0, len(seen), LAYERS)]
    assert [row[0] for row in recorded.passes("experts_read")] == by_pass
    assert by_pass[0] > LAYERS * TOP_K


def test_a_long_prompt_is_counted_as_well(record: Record) -> None:
    model = force(mixtral(), None, [1, 2])
    assert record(lambda: generate(model, length=300, new=1)).passes("experts_read") == [
        (EXPERTS + 2,)
    ]


def test_in_inference_mode_the_choice_is_read_too(record: Record) -> None:
    model = force(mixtral(), [0, 1], [2, 3])

    def run() -> None:
        with torch.inference_mode():
            generate(model)

    assert record(run).passes("experts_read") == [(4,)] * 3


def test_a_choice_that_is_written_over_is_not_counted(record: Record) -> None:
    """What the recorder would find later is not what the router chose."""
    model = force(mixtral(), [0, 1], [2, 3])
    experts = model.model.layers[0].mlp.experts
    inner = experts.act_fn

    class Overwriting(nn.Module):
        index: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.index is not None:
                self.index.fill_(0)
            result: torch.Tensor = inner(x)
            return result

    experts.act_fn = Overwriting()
    hook = experts.register_forward_pre_hook(lambda m, args: setattr(m.act_fn, "index", args[1]))
    rows = record(lambda: generate(model)).passes("experts_read", "weight_bytes")
    hook.remove()
    cost = model_cost(model)
    assert [row[0] for row in rows] == [None] * 3
    expected = sum(round(e.layers * e.expected_distinct(1) * e.expert_bytes) for e in cost.experts)
    assert (
        rows[1][1]
        == cost.body_weight_bytes + cost.head_weight_bytes + cost.lookup_bytes_per_token + expected
    )


def test_a_dense_model_has_no_figure_and_no_wrapper(llama: Any, record: Record) -> None:
    rows = record(lambda: generate(llama))
    assert rows.passes("experts_read") == [(None,)] * 3
    (meta,) = rows.trace.metas
    assert not any("Experts" in hook for hook in meta.hooks)


def test_nothing_is_left_on_the_classes_of_the_experts(record: Record) -> None:
    model = mixtral()
    kind = type(model.model.layers[0].mlp.experts)
    before = dict(vars(kind))
    state = {name: id(value) for name, value in vars(model.model.layers[0].mlp.experts).items()}
    inside: list[bool] = []

    def run() -> None:
        generate(model)
        inside.append(vars(kind)["forward"] is not before["forward"])

    record(run)
    assert inside == [True]
    assert dict(vars(kind)) == before
    assert {n: id(v) for n, v in vars(model.model.layers[0].mlp.experts).items()} == state


def test_a_layer_that_is_not_seen_leaves_the_expected_number(record: Record) -> None:
    """One layer's experts are run by a function of the user's own, around the class."""
    model = force(mixtral(), [0, 1], [2, 3])
    experts = model.model.layers[1].mlp.experts
    bare = type(experts).forward
    experts.forward = lambda *args: bare.__wrapped__(experts, *args)
    assert record(lambda: generate(model)).passes("experts_read") == [(None,)] * 3


def test_a_compiled_model_is_left_alone(record: Record) -> None:
    model = mixtral()
    # The products of the default implementation cannot be compiled in every dtype.
    model.set_experts_implementation("batched_mm")
    model.model.layers[0].compile(backend="eager")
    recorded = record(lambda: generate(model))
    assert recorded.passes("experts_read") == [(None,)] * 3
    (meta,) = recorded.trace.metas
    assert any(note.what == "the experts that each pass reads" for note in meta.not_measured)


def test_a_model_compiled_under_the_session_keeps_its_graph_whole(record: Record) -> None:
    """Traced, the wrapper is the class's own forward: fullgraph holds, before, in and after the session."""
    model = force(mixtral(experts_implementation="batched_mm"), [0, 1], [2, 3])
    prompt = torch.arange(1, 6).unsqueeze(0)

    def run() -> Any:
        generate(model)
        layer: Any = torch.compile(model.model.layers[0].mlp, backend="eager", fullgraph=True)
        hidden = torch.ones(1, 4, 32)
        with torch.no_grad():
            return layer(hidden), model(prompt).logits

    compiled, _ = record(run).output
    with torch.no_grad():
        assert torch.allclose(compiled, model.model.layers[0].mlp(torch.ones(1, 4, 32)))
    torch._dynamo.reset()


def test_on_another_device_it_is_said_and_left_alone() -> None:
    """Experts on the meta device stand for a device that cannot be read: a hook sees the device alone."""
    notes: list[Any] = []
    model = mixtral()

    class PlacedExperts(type(model.model.layers[0].mlp.experts)):  # type: ignore[misc]
        def parameters(self, recurse: bool = True) -> Any:
            return iter([_Placed()])

    class _Placed:
        device = torch.device("cuda", 0)

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = PlacedExperts
    hook = RoutingHook(
        emit=lambda event: None,
        state=ThreadState(),
        failed=lambda what, error: None,
        note=notes.append,
    )
    assert hook.patches(model) == []
    assert [note.what for note in notes] == ["the experts that each pass reads"]
    assert "cuda" in notes[0].why
