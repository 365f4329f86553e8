"""A model that is wrapped, copied or moved is seen once, as itself: the same passes as those of the bare model."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flop_truth import CACHE
from torch import nn
from transformers import LlamaForCausalLM

import phaseprof
from phaseprof.trace.reader import open_trace

Record = Callable[[Callable[[], Any]], Any]

IDS = torch.arange(3, 12).reshape(1, 9)
COLUMNS = (
    "model_id",
    "phase",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "logits_tokens",
    "compiled",
)
#: A prompt of nine tokens, called directly: the head is computed for all positions.
DIRECT = ("LlamaForCausalLM-1", "prefill", 9, 0, 0, 9, False)
#: The same in generate, which asks for one, and the two steps after it.
GENERATED = [
    ("LlamaForCausalLM-1", "prefill", 9, 0, 0, 1, False),
    ("LlamaForCausalLM-1", "decode", 0, 1, 0, 1, False),
    ("LlamaForCausalLM-1", "decode", 0, 1, 0, 1, False),
]


def greedy(model: Any, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, **kwargs}
    result: torch.Tensor = model.generate(input_ids=IDS, **kwargs)
    return result


def logits(call: Callable[..., Any], **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = call(input_ids=IDS, **kwargs).logits
    return result


def passes(recorded: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = recorded.passes(*COLUMNS)
    return found


def rows(trace: Path, *columns: str) -> list[tuple[Any, ...]]:
    table = open_trace(trace).passes.sort_by("pass_id").select(list(columns))
    return [tuple(row.values()) for row in table.to_pylist()]


def llama_of(llama: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A new model like another, with other weights and another depth."""
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers = layers
    config.layer_types = None
    return LlamaForCausalLM(config).eval()


def flops(recorded: Any) -> list[int | None]:
    return [row[0] for row in recorded.passes("flops")]


@pytest.fixture
def same(record: Record) -> Record:
    """Run a function alone and under a session: the same comes out."""

    def run(function: Callable[[], Any]) -> Any:
        alone = function()
        recorded = record(function)
        assert torch.equal(alone, recorded.output)
        return recorded

    return run


# The model's own call is gone around


def test_forward_called_directly(llama: LlamaForCausalLM, same: Any, record: Record) -> None:
    """`model.forward(...)` is a pass of the model with its head, from the first on; nothing stays on the class."""
    before = dict(vars(LlamaForCausalLM))
    bare = record(lambda: logits(llama))
    recorded = same(lambda: torch.stack([logits(llama.forward) for _ in range(3)]))
    assert passes(recorded) == [DIRECT] * 3
    assert flops(recorded) == flops(bare) * 3
    assert [model.class_name for model in recorded.trace.metas[0].models] == ["LlamaForCausalLM"]
    assert dict(vars(LlamaForCausalLM)) == before


def test_forward_called_directly_is_timed_whole(llama: LlamaForCausalLM, record: Record) -> None:
    """From the second time on the span holds the head: it begins before the inner model and ends after it."""
    spans: list[tuple[int, int]] = []
    own = copy.deepcopy(llama)
    import time

    def stamp(_: Any, *args: Any) -> None:
        spans.append((time.time_ns(), 0))
        time.sleep(0.02)

    own.lm_head.register_forward_hook(stamp)
    recorded = record(lambda: [logits(own.forward) for _ in range(2)])
    ends = [row[0] for row in recorded.passes("end_ns")]
    assert ends[1] - spans[1][0] > 15_000_000


def test_bare_model_keeps_its_own_passes(llama: LlamaForCausalLM, same: Any) -> None:
    """`LlamaModel` called by itself, before and after its outer model's forward, is a model without a head."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(
                [
                    llama.model(IDS).last_hidden_state.flatten(),
                    llama.forward(IDS).logits.flatten(),
                    llama.model(IDS).last_hidden_state.flatten(),
                    llama(IDS).logits.flatten(),
                ]
            )

    part = ("LlamaModel-1", "prefill", 9, 0, 0, 0, False)
    assert passes(same(run)) == [part, DIRECT, part, DIRECT]


class OwnForward(LlamaForCausalLM):  # type: ignore[misc]  # its types are not followed
    """Adds to its parent's forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


class OwnCall(LlamaForCausalLM):  # type: ignore[misc]
    """Has a call of its own that hands on to its parents'."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnCallAround(LlamaForCausalLM):  # type: ignore[misc]
    """Has a call of its own that goes around its parents'."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [OwnForward, OwnCall, OwnCallAround])
def test_a_subclass_of_the_users_own(kind: Any, llama: LlamaForCausalLM, same: Any) -> None:
    model = kind(llama.config).eval()
    name = f"{kind.__name__}-1"
    recorded = same(lambda: logits(model))
    assert passes(recorded) == [(name, *DIRECT[1:])]
    assert flops(recorded)[0]
    expected = [(name, *row[1:]) for row in GENERATED]
    if kind is OwnForward:
        # Its signature does not name `logits_to_keep`: generate cannot ask for the last position alone.
        expected[0] = (name, "prefill", 9, 0, 0, 9, False)
    assert passes(same(lambda: greedy(model))) == expected


class Around(nn.Module):
    """Somebody's module with a model in it, as a part or in a list that torch does not know of."""

    def __init__(self, model: LlamaForCausalLM, *, hidden: bool, parts: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.kept = [model] if hidden else nn.ModuleList([model])
        self.parts = parts

    def forward(self, input_ids: torch.Tensor) -> Any:
        model: Any = self.kept[0]
        if self.parts:
            return model.lm_head(model.model(input_ids).last_hidden_state) * self.scale
        return model(input_ids).logits * self.scale


@pytest.mark.parametrize("hidden", [False, True], ids=["a part", "in a list"])
@pytest.mark.parametrize("watched", [False, True], ids=["all models", "named"])
def test_a_model_in_a_users_module(
    hidden: bool, watched: bool, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The model inside is the model, even where the module around it is the one that was named."""
    module = Around(llama, hidden=hidden).eval()
    with torch.no_grad():
        alone = module(IDS)
        with phaseprof.profile(module if watched else None, tmp_path / "t"):
            assert torch.equal(module(IDS), alone)
    assert rows(tmp_path / "t", *COLUMNS) == [DIRECT]


def test_parts_of_a_model_in_a_users_module(llama: LlamaForCausalLM, same: Any) -> None:
    """Whoever calls the body and the head apart has a pass of the body: the head is not a model."""
    module = Around(llama, hidden=False, parts=True).eval()

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(module(IDS))

    assert passes(same(run)) == [("LlamaModel-1", "prefill", 9, 0, 0, 0, False)]


class Tiny(nn.Module):
    """A language model of the user's own, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.body(self.table(ids)))


def test_modules_without_transformers(tmp_path: Path) -> None:
    """Those that are named are watched, several in a list, and others of their class; parts of them are not."""
    torch.manual_seed(1)
    one, other = Tiny().eval(), Tiny().eval()
    stack = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    stranger = nn.Sequential(nn.Embedding(64, 8))
    before = [dict(vars(kind)) for kind in (Tiny, nn.Sequential)]
    with torch.no_grad(), phaseprof.profile([one, stack], tmp_path / "t"):
        for module in (one, other, stack, stranger):
            module(IDS)
    assert rows(tmp_path / "t", "model_id", "phase", "prefill_tokens") == [
        ("Tiny-1", "prefill", 9),
        ("Tiny-2", "prefill", 9),
        ("Sequential-1", "prefill", 9),
    ]
    assert [dict(vars(kind)) for kind in (Tiny, nn.Sequential)] == before


# DataParallel and accelerate


def replicate(model: Any) -> Any:
    """What `torch.nn.parallel.replicate` does for one device, with copies on the CPU."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, twin in copies.items():
        twin._former_parameters = {}
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            value = None if parameter is None else parameter.detach().clone()
            setattr(twin, name, value)
            twin._former_parameters[name] = value
    return copies[model]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def work(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("called_before", [False, True], ids=["first", "after the original"])
def test_replicas_are_their_original(
    called_before: bool, llama: LlamaForCausalLM, record: Record
) -> None:
    """Replicas of each pass are new objects; all are the one model, which is read once."""

    def run() -> torch.Tensor:
        results = [logits(llama)] if called_before else []
        for _ in range(2):
            twins = [replicate(llama) for _ in range(2)]
            results += in_threads([partial(logits, twin) for twin in twins])
        return torch.stack(results)

    alone = run()
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    assert passes(recorded) == [DIRECT] * (5 if called_before else 4)
    assert len(set(flops(recorded))) == 1 and flops(recorded)[0]
    (meta,) = recorded.trace.metas[0].models
    assert (meta.model_id, meta.device_key[:3]) == ("LlamaForCausalLM-1", "cpu")


def test_data_parallel_on_a_cpu(llama: LlamaForCausalLM, same: Any) -> None:
    wrapped = nn.DataParallel(llama)
    assert passes(same(lambda: logits(wrapped))) == [DIRECT]
    assert passes(same(lambda: greedy(wrapped.module))) == GENERATED


def offload_to_cpu(model: LlamaForCausalLM, folder: Path) -> Any:
    accelerate: Any = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def offload_to_disk(model: LlamaForCausalLM, folder: Path) -> Any:
    accelerate: Any = pytest.importorskip("accelerate")
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def dispatch(model: LlamaForCausalLM, folder: Path) -> Any:
    accelerate: Any = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


# transformers 5.0 takes the device of the first parameter for the model's.
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
@pytest.mark.parametrize("move", [offload_to_cpu, offload_to_disk, dispatch])
def test_offloaded_by_accelerate(
    move: Any, llama: LlamaForCausalLM, tmp_path: Path, same: Any, record: Record
) -> None:
    """Weights are on `meta` between the passes; the model runs where accelerate has it run, and is not compiled."""
    bare = record(lambda: logits(llama))
    model = move(copy.deepcopy(llama), tmp_path / "offloaded")
    recorded = same(lambda: logits(model))
    assert torch.equal(recorded.output, bare.output)
    assert passes(recorded) == [DIRECT]
    (meta,) = recorded.trace.metas[0].models
    assert meta.device_key == bare.trace.metas[0].models[0].device_key
    assert passes(same(lambda: greedy(model))) == GENERATED
    assert passes(same(lambda: logits(model.forward))) == [DIRECT]


def test_loaded_with_a_device_map(llama: LlamaForCausalLM, tmp_path: Path, same: Any) -> None:
    pytest.importorskip("accelerate")
    llama.save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map={"": "cpu"})
    recorded = same(lambda: greedy(model))
    assert passes(recorded) == GENERATED
    assert recorded.trace.metas[0].models[0].device_key.startswith("cpu")


# Copies, and lives


def test_copies_made_in_a_session(llama: LlamaForCausalLM, tmp_path: Path, record: Record) -> None:
    """A deep copy, a pickled one and a saved one, each made and used in the session, work on after it."""
    made: list[Any] = []

    def run() -> torch.Tensor:
        llama.save_pretrained(tmp_path / "model")
        made.clear()
        made.append(copy.deepcopy(llama))
        made.append(pickle.loads(pickle.dumps(llama)))
        made.append(LlamaForCausalLM.from_pretrained(tmp_path / "model"))
        return torch.stack([greedy(model) for model in made])

    alone = run()
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    expected = [
        (f"LlamaForCausalLM-{number}", *row[1:]) for number in (1, 2, 3) for row in GENERATED
    ]
    assert passes(recorded) == expected
    for model, before in zip(made, alone, strict=True):
        assert b"phaseprof" not in pickle.dumps(model)
        assert torch.equal(greedy(model), before)


def test_a_model_at_the_address_of_another(llama: LlamaForCausalLM, record: Record) -> None:
    """A model that was freed is another one's predecessor, not the same, wherever the new one lies."""

    def run() -> list[int]:
        addresses = []
        model = None
        for _ in range(20):
            del model
            model = LlamaForCausalLM.__new__(LlamaForCausalLM)
            model.__dict__ = dict(vars(llama))
            addresses.append(id(model))
            logits(model)
        return addresses

    recorded = record(run)
    assert len(set(recorded.output)) < 20, "no address was used again: the test shows nothing"
    assert [row[0] for row in passes(recorded)] == [f"LlamaForCausalLM-{n}" for n in range(1, 21)]


def test_two_models_interleaved(llama: LlamaForCausalLM, same: Any) -> None:
    """Each loop has its own model, cache and prompt."""
    small = llama_of(llama, 1)

    def run() -> torch.Tensor:
        kept: dict[int, Any] = {}
        results = []
        with torch.no_grad():
            for step in range(3):
                for number, (model, prompt) in enumerate(((llama, 9), (small, 5))):
                    given = IDS[:, :prompt] if step == 0 else IDS[:, step : step + 1]
                    output = model(given, **{CACHE: kept.get(number)})
                    kept[number] = output[CACHE]
                    results.append(output.logits[0, -1])
        return torch.stack(results)

    recorded = same(run)
    assert recorded.passes("model_id", "phase", "prefill_tokens", "decode_tokens") == [
        ("LlamaForCausalLM-1", "prefill", 9, 0),
        ("LlamaForCausalLM-2", "prefill", 5, 0),
        *[("LlamaForCausalLM-1", "decode", 0, 1), ("LlamaForCausalLM-2", "decode", 0, 1)] * 2,
    ]


def test_threads_on_several_new_models(llama: LlamaForCausalLM, record: Record) -> None:
    """Six threads, three models that were never called before, two threads on each: no model is taken for two, and no
    call gets the tokens of another."""
    models = [llama_of(llama, 1 + number) for number in range(3)]
    prompts = [4, 5, 6, 7, 8, 9]

    def generate(number: int) -> Any:
        model, prompt = models[number % 3], IDS[:, : prompts[number]]
        return model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    alone = [generate(number) for number in range(6)]
    recorded = record(lambda: in_threads([partial(generate, number) for number in range(6)]))
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded.output, strict=True))
    assert len(recorded.trace.metas[0].models) == 3
    by_thread: dict[int, list[tuple[Any, ...]]] = {}
    layers = {
        model.model_id: len(model.cost.attention) and model.cost.parameters
        for model in recorded.trace.metas[0].models
    }
    for thread, model_id, pre, dec in recorded.passes(
        "thread_id", "model_id", "prefill_tokens", "decode_tokens"
    ):
        by_thread.setdefault(thread, []).append((layers[model_id], pre, dec))
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sorted(by_thread.values()) == sorted(
        [(sizes[n % 3], prompts[n], 0)] + [(sizes[n % 3], 0, 1)] * 3 for n in range(6)
    )
