"""Continuous batching of transformers on real models: passes written down by hand from prompts, limits and page sizes.

Every request is queued before the manager's thread starts, so that which request is in which step follows from the
inputs alone. Each case runs without and with the profiler: the tokens must be the same.

transformers 5.0 asks for the memory of an accelerator even on a CPU, and gets None; the fixture gives it a figure, and
the rest is its own code.
"""

from __future__ import annotations

import copy
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM

from phaseprof.phases import RequestTokens, check_invariants

API = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
#: It runs a request once more after its last token, and drops what comes.
RUNS_ON = VERSION < (5, 10)

# A pass: (phase, prefill, decode, cached, recomputed, padding, sequences).
Expected = tuple[str, int, int, int, int, int, int]
COLUMNS = (
    "phase",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "padding_tokens",
    "sequences",
)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers 5.0 plan its cache on a CPU."""
    if RUNS_ON:
        cache = importlib.import_module("transformers.generation.continuous_batching.cache")
        monkeypatch.setattr(
            cache,
            "get_device_and_memory_breakdown",
            lambda: (torch.device("cpu"), 2**30, 0, 0),
        )


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if "_run_generation_loop" in name] == []


@dataclass(frozen=True)
class Ask:
    """A request: its prompt and how many tokens it wants."""

    prompt: Sequence[int]
    new: int
    name: str = ""
    streaming: bool = False


@dataclass
class Served:
    """What came back: the tokens of each request, by its id, and how many outputs each got."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)


def words(length: int, start: int = 0) -> list[int]:
    """Token ids that are none of the special ones, different for each start."""
    return [3 + (start * 41 + index * 37) % 250 for index in range(length)]


def manager_of(
    model: Any,
    *,
    blocks: int = 64,
    page: int = 4,
    budget: int = 64,
    eos: int = -1,
    sequences: int = 1,
    **settings: Any,
) -> Any:
    """A manager of this version of transformers with a cache of ``blocks`` pages of ``page`` tokens."""
    # Several sequences have to be drawn.
    config = GenerationConfig(
        do_sample=sequences > 1, eos_token_id=eos, num_return_sequences=sequences
    )
    torch.manual_seed(3)
    if RUNS_ON:
        config.num_blocks, config.block_size, config.max_batch_tokens = blocks, page, budget
        return model.init_continuous_batching(config, **settings)
    made = importlib.import_module("transformers.generation.configuration_utils")
    settings.setdefault("use_cuda_graph", False)
    settings.setdefault("seed", 3)
    size = {"page_size" if VERSION >= (5, 22) else "block_size": page}
    chosen = made.ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=budget, **size, **settings
    )
    return model.init_continuous_batching(config, continuous_batching_config=chosen)


def serve(manager: Any, asks: Sequence[Ask], *, expected: int | None = None) -> Served:
    """Queue all requests, run the manager until they are done, and stop it."""
    for number, ask in enumerate(asks):
        manager.add_request(
            list(ask.prompt),
            request_id=ask.name or f"ask-{number}",
            max_new_tokens=ask.new,
            streaming=ask.streaming,
        )
    served = Served()
    manager.start()
    deadline = time.monotonic() + 60
    done: set[str] = set()
    while len(done) < (expected or len(asks)) and time.monotonic() < deadline:
        result = manager.get_result(timeout=0.5)
        if result is None:
            continue
        served.tokens[result.request_id] = list(result.generated_tokens)
        served.outputs[result.request_id] = served.outputs.get(result.request_id, 0) + 1
        if result.is_finished():
            done.add(result.request_id)
    manager.stop(block=True)
    assert len(done) == (expected or len(asks)), "the manager did not finish"
    return served


def both(record: Callable[[Callable[[], Any]], Any], run: Callable[[], Served]) -> Any:
    """Run without and with the profiler; the tokens must be the same."""
    alone = run()
    recorded = record(run)
    assert recorded.output.tokens == alone.tokens
    return recorded


def by_user_id(recorded: Any) -> dict[str, dict[str, Any]]:
    return {row["request_id"].partition(":")[2]: row for row in recorded.trace.requests.to_pylist()}


def assert_invariants(recorded: Any) -> None:
    """Of all requests of the trace, from the slices of its passes, each of which names its own phase."""
    counts: dict[str, dict[str, int]] = {}
    high: dict[str, int] = {}
    for row in recorded.trace.passes.sort_by("pass_id").to_pylist():
        assert row["tag_source"] == "scheduler"
        for part in row["slices"]:
            name, past, query, prompt = (
                part["request_id"],
                part["past"],
                part["query"],
                part["prompt"],
            )
            count = counts.setdefault(name, {"prefill": 0, "decode": 0, "recomputed": 0})
            # Position by position, as the contract says it.
            for position in range(past, past + query):
                again = position < high.get(name, 0)
                count["prefill" if position < prompt or again else "decode"] += 1
                count["recomputed"] += again
            high[name] = max(high.get(name, 0), past + query)
    passes = recorded.trace.passes
    for column in ("prefill", "decode", "recomputed"):
        total = sum(count[column] for count in counts.values())
        assert sum(passes[f"{column}_tokens"].to_pylist()) == total
    requests = recorded.trace.requests.to_pylist()
    assert set(counts) == {row["request_id"] for row in requests}
    assert sum(passes["cached_tokens"].to_pylist()) == sum(r["cached_tokens"] for r in requests)
    broken = check_invariants(
        RequestTokens(
            request_id=row["request_id"],
            sequences=row["sequences"],
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            recomputed_tokens=counts[row["request_id"]]["recomputed"],
            prefill_tokens=counts[row["request_id"]]["prefill"],
            decode_tokens=counts[row["request_id"]]["decode"],
            rejected_tokens=0,
            output_tokens=row["output_tokens"],
        )
        for row in requests
    )
    assert broken == []


def prefill(tokens: int, sequences: int, cached: int = 0) -> Expected:
    return ("prefill", tokens, 0, cached, 0, 0, sequences)


def decode(sequences: int, padding: int = 0) -> Expected:
    return ("decode", 0, sequences - padding, 0, 0, padding, sequences)


def mixed(pre: int, dec: int, sequences: int, cached: int = 0) -> Expected:
    return ("mixed", pre, dec, cached, 0, 0, sequences)


def ran_on(sequences: int) -> list[Expected]:
    """The last pass of transformers 5.0, for requests that have all their tokens."""
    return [("other", 0, 0, 0, 0, sequences, sequences)] if RUNS_ON else []


def test_two_prompts_of_different_length(llama: LlamaForCausalLM, record: Any) -> None:
    asks = [Ask(words(9), 3), Ask(words(5, 1), 3)]
    recorded = both(record, lambda: serve(manager_of(llama), asks))
    assert recorded.passes(*COLUMNS) == [prefill(14, 2), decode(2), decode(2), *ran_on(2)]
    first, second, *_ = recorded.trace.passes.sort_by("pass_id").to_pylist()
    assert [tuple(part.values())[1:5] for part in first["slices"]] == [
        ("prefill", 9, 0, 9),
        ("prefill", 5, 0, 5),
    ]
    assert [tuple(part.values())[1:5] for part in second["slices"]] == [
        ("decode", 1, 9, 9),
        ("decode", 1, 5, 5),
    ]
    # 9 and 5 tokens in the cache, then one more of each; 45 + 15 pairs, then 10 + 6.
    assert (first["context_tokens"], first["attention_pairs"]) == (14, 60)
    assert (second["context_tokens"], second["attention_pairs"]) == (16, 16)
    # Up to 5.10 the head is computed for every slot; since then once for each request.
    heads = [14, 2] if first["logits_tokens"] == 14 else [2, 2]
    assert [first["logits_tokens"], second["logits_tokens"]] == heads
    assert_invariants(recorded)
    requests = by_user_id(recorded)
    assert {name: row["prompt_tokens"] for name, row in requests.items()} == {
        "ask-0": 9,
        "ask-1": 5,
    }
    for row in requests.values():
        assert (row["output_tokens"], row["finish"], row["sequences"]) == (3, "length", 1)
        assert len(row["itl_ns"]) == 2
        assert row["tpot_ns"] == sum(row["itl_ns"]) // 2
        assert 0 <= row["queue_ns"] < row["ttft_ns"]
        assert row["arrival_ns"] + row["queue_ns"] == first["start_ns"]
        assert first["end_ns"] <= row["first_token_ns"] <= second["start_ns"]
        last_ns = row["first_token_ns"] + sum(row["itl_ns"])
        assert row["finished_ns"] > last_ns if RUNS_ON else row["finished_ns"] == last_ns


def test_the_work_of_a_packed_pass_is_that_of_its_requests(
    llama: LlamaForCausalLM, record: Any
) -> None:
    """Against generate, one prompt at a time: FLOPs and KV bytes add up, weights are read once."""
    asks = [Ask(words(9), 3), Ask(words(5, 1), 3)]

    def alone() -> None:
        for ask in asks:
            llama.generate(torch.tensor([ask.prompt]), max_new_tokens=3, min_new_tokens=3)

    single = record(alone).trace.passes.sort_by("pass_id").to_pylist()
    packed = record(lambda: serve(manager_of(llama), asks)).trace.passes
    prefilled, decoded, *_ = packed.sort_by("pass_id").to_pylist()
    head = 2 * 64 * 256
    for row, parts in ((prefilled, (single[0], single[3])), (decoded, (single[1], single[4]))):
        more = row["logits_tokens"] - sum(part["logits_tokens"] for part in parts)
        assert row["flops"] == sum(part["flops"] for part in parts) + more * head
        for column in ("kv_read_bytes", "kv_write_bytes", "kv_held_bytes", "attention_pairs"):
            assert row[column] == sum(part[column] for part in parts), column
        # Two layers of 2 heads of 16 in float32, keys and values: 512 bytes a token; 64 * 4 for a row of the table.
        assert row["kv_write_bytes"] == 512 * row["prefill_tokens"] + 512 * row["decode_tokens"]
        looked_up = 256 * (sum(p["prefill_tokens"] + p["decode_tokens"] for p in parts))
        body = parts[0]["weight_bytes"] - 256 * (
            parts[0]["prefill_tokens"] + parts[0]["decode_tokens"]
        )
        assert row["weight_bytes"] == body + looked_up
        assert row["cache_copy_bytes"] == 0
        # 64 pages of 4 tokens, and what each version keeps besides them for indices that point nowhere.
        assert 64 * 4 * 512 <= row["kv_allocated_bytes"] <= 70 * 4 * 512


def test_a_long_prompt_is_prefill_to_its_last_chunk_of_one_token(
    llama: LlamaForCausalLM, record: Any
) -> None:
    recorded = both(record, lambda: serve(manager_of(llama, budget=4), [Ask(words(9), 3)]))
    assert recorded.passes(*COLUMNS) == [
        prefill(4, 1),
        prefill(4, 1),
        prefill(1, 1),
        decode(1),
        decode(1),
        *ran_on(1),
    ]
    assert_invariants(recorded)


def test_a_chunk_rides_with_a_decode_step(llama: LlamaForCausalLM, record: Any) -> None:
    """The first prompt takes 3 of 8 slots and the second the other 5; then 1 + 7, and so on."""
    asks = [Ask(words(3), 4), Ask(words(14, 1), 2)]
    recorded = both(record, lambda: serve(manager_of(llama, budget=8), asks))
    assert recorded.passes(*COLUMNS)[:4] == [
        prefill(8, 2),
        mixed(7, 1, 2),
        mixed(2, 1, 2),
        decode(2),
    ]
    assert_invariants(recorded)


def test_a_shared_prefix_is_cached_and_not_work(llama: LlamaForCausalLM, record: Any) -> None:
    """The first prompt fills the step alone. The second shares its first 8 tokens: two whole pages of 4."""
    common = words(8)
    asks = [Ask(common + words(2, 1), 3), Ask(common + words(4, 2), 3)]
    recorded = both(record, lambda: serve(manager_of(llama, budget=10), asks))
    assert recorded.passes(*COLUMNS)[:4] == [
        prefill(10, 1),
        mixed(4, 1, 2, cached=8),
        decode(2),
        decode(2, padding=1) if RUNS_ON else decode(1),
    ]
    requests = by_user_id(recorded)
    assert [requests[f"ask-{n}"]["cached_tokens"] for n in range(2)] == [0, 8]
    assert_invariants(recorded)


def test_requests_join_and_leave(llama: LlamaForCausalLM, record: Any) -> None:
    asks = [Ask(words(3 + n, n), 1 + n % 5) for n in range(12)]
    recorded = both(record, lambda: serve(manager_of(llama, budget=12, blocks=200), asks))
    passes = recorded.trace.passes
    assert sum(passes["prefill_tokens"].to_pylist()) == sum(len(ask.prompt) for ask in asks)
    assert sum(passes["decode_tokens"].to_pylist()) == sum(ask.new - 1 for ask in asks)
    assert sum(passes["padding_tokens"].to_pylist()) == (len(asks) if RUNS_ON else 0)
    assert set(passes["phase"].to_pylist()) >= {"prefill", "mixed", "decode"}
    requests = by_user_id(recorded)
    for number, ask in enumerate(asks):
        row = requests[f"ask-{number}"]
        assert (row["prompt_tokens"], row["output_tokens"]) == (len(ask.prompt), ask.new)
        assert len(row["itl_ns"]) == ask.new - 1
        assert row["finish"] == "length"
    assert_invariants(recorded)


def test_one_token_has_no_time_per_output_token(llama: LlamaForCausalLM, record: Any) -> None:
    recorded = both(record, lambda: serve(manager_of(llama), [Ask(words(9), 1)]))
    assert recorded.passes(*COLUMNS) == [prefill(9, 1), *ran_on(1)]
    (row,) = recorded.trace.requests.to_pylist()
    assert (row["output_tokens"], row["tpot_ns"], row["itl_ns"]) == (1, None, [])
    assert row["finished_ns"] >= row["first_token_ns"]
    if not RUNS_ON:
        assert row["finished_ns"] == row["first_token_ns"]


def test_an_end_token_stops_a_request(llama: LlamaForCausalLM, record: Any) -> None:
    """What the model says third becomes the end token."""
    free = serve(manager_of(llama), [Ask(words(9), 8)]).tokens["ask-0"]
    third = free[2]
    assert third not in free[:2]
    recorded = both(record, lambda: serve(manager_of(llama, eos=third), [Ask(words(9), 8)]))
    assert recorded.output.tokens["ask-0"] == free[:3]
    assert recorded.passes(*COLUMNS) == [prefill(9, 1), decode(1), decode(1)]
    (row,) = recorded.trace.requests.to_pylist()
    assert (row["output_tokens"], row["finish"]) == (3, "stop")
    assert_invariants(recorded)


def test_a_preempted_request_computes_its_prompt_and_its_output_again(
    llama: LlamaForCausalLM, record: Any
) -> None:
    """Two requests of 6 tokens want 8 each, in a cache that does not hold both to their end."""
    asks = [Ask(words(6), 8), Ask(words(6, 1), 8)]
    settings: dict[str, Any] = {"allow_block_sharing": False}
    if VERSION >= (5, 17):
        settings["safety_margin"] = 0.0
    recorded = both(record, lambda: serve(manager_of(llama, blocks=6, **settings), asks))
    rows = recorded.trace.passes.sort_by("pass_id").to_pylist()
    (again,) = [row for row in rows if row["recomputed_tokens"]]
    (part,) = [part for part in again["slices"] if part["query"] > 1]
    # Its prompt and all of its output but the newest token had been computed.
    assert (part["phase"], part["past"], part["prompt"]) == ("mixed", 0, 6)
    assert again["recomputed_tokens"] == part["query"] - 1
    assert part["query"] > 6
    requests = by_user_id(recorded)
    for row in requests.values():
        assert (row["prompt_tokens"], row["output_tokens"]) == (6, 8)
        assert (row["cached_tokens"], len(row["itl_ns"])) == (0, 7)
    assert_invariants(recorded)


@pytest.mark.skipif(RUNS_ON, reason="5.0 moves no request to the host")
def test_a_request_that_was_moved_to_the_host_computes_nothing_twice(
    llama: LlamaForCausalLM, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's part of the cache is pinned memory, which needs an accelerator: here it is plain memory."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )
    asks = [Ask(words(6), 8), Ask(words(6, 1), 8)]
    settings: dict[str, Any] = {"allow_block_sharing": False, "cpu_offload_space": 0.01}
    if VERSION >= (5, 17):
        settings["safety_margin"] = 0.0
    recorded = both(record, lambda: serve(manager_of(llama, blocks=6, **settings), asks))
    passes = recorded.trace.passes
    assert sum(passes["recomputed_tokens"].to_pylist()) == 0
    assert sum(passes["prefill_tokens"].to_pylist()) == 12
    # One of the two waits for a while: then a step is for the other alone.
    assert set(passes["sequences"].to_pylist()) == {1, 2}
    assert_invariants(recorded)


def test_a_step_that_fails_is_recorded_and_its_requests_are_aborts(
    llama: LlamaForCausalLM, record: Any
) -> None:
    """The third step raises: the manager gives its requests up."""
    model = copy.deepcopy(llama)

    def fail(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if int(kwargs["position_ids"].max()) > 9:
            raise RuntimeError("the third step")

    model.model.register_forward_pre_hook(fail, with_kwargs=True)

    def run() -> Any:
        manager = manager_of(model)
        manager.add_request(words(9), request_id="x", max_new_tokens=5)
        manager.start()
        result = None
        while result is None and manager.is_running():
            result = manager.get_result(timeout=1)
        manager.stop(block=True)
        return result

    recorded = record(run)
    assert recorded.passes(*COLUMNS, "error") == [
        (*prefill(9, 1), None),
        (*decode(1), None),
        (*decode(1), "RuntimeError"),
    ]
    (row,) = recorded.trace.requests.to_pylist()
    assert (row["output_tokens"], row["finish"], len(row["itl_ns"])) == (2, "abort", 1)


def test_several_sequences_share_the_prompt_but_its_last_token(
    llama: LlamaForCausalLM, record: Any
) -> None:
    """8 of 9 tokens are computed once, and kept in two whole pages of 4; then each sequence computes the ninth."""
    run = lambda: serve(manager_of(llama, sequences=3), [Ask(words(9), 3)], expected=3)  # noqa: E731
    recorded = both(record, run)
    assert recorded.passes(*COLUMNS) == [
        prefill(8, 1),
        ("prefill", 3, 0, 16, 0, 0, 3),
        decode(3),
        decode(3),
        *ran_on(3),
    ]
    requests = by_user_id(recorded)
    assert sorted(requests) == ["ask-0", "ask-0__child#0", "ask-0__child#1"]
    assert {name: row["cached_tokens"] for name, row in requests.items()} == {
        "ask-0": 0,
        "ask-0__child#0": 8,
        "ask-0__child#1": 8,
    }
    # They were asked for together.
    assert len({row["arrival_ns"] for row in requests.values()}) == 1
    assert len({row["queue_ns"] for row in requests.values()}) == 1
    assert_invariants(recorded)


def test_a_stream_has_a_time_for_each_token(llama: LlamaForCausalLM, record: Any) -> None:
    ask = Ask(words(5), 4, streaming=True)
    recorded = both(record, lambda: serve(manager_of(llama), [ask]))
    assert recorded.output.outputs["ask-0"] == 4 + RUNS_ON
    (row,) = recorded.trace.requests.to_pylist()
    assert len(row["itl_ns"]) == 3
    assert_invariants(recorded)


def cancel_second(model: Any) -> list[str]:
    """The first request runs until it is cancelled, the second waits behind it and is cancelled first."""
    manager = manager_of(model, blocks=400, budget=2)
    manager.add_request(words(5), request_id="long", max_new_tokens=1000, streaming=True)
    # With two slots a step, the prompt of the first goes on for a while.
    manager.add_request(words(300, 1), request_id="waits", max_new_tokens=5)
    manager.start()
    seen = []
    try:
        while manager.get_result(timeout=5) is None:
            pass
        manager.cancel_request("waits")
        manager.cancel_request("long")
        # A third is served after both are gone.
        manager.add_request(words(4, 2), request_id="after", max_new_tokens=2)
        while "after" not in seen:
            result = manager.get_result(timeout=5)
            assert result is not None
            seen.append(result.request_id)
    finally:
        manager.stop(block=True)
    return seen


def test_a_cancelled_request_is_an_abort(llama: LlamaForCausalLM, record: Any) -> None:
    recorded = record(lambda: cancel_second(llama))
    requests = by_user_id(recorded)
    assert {name: row["finish"] for name, row in requests.items()} == {
        "long": "abort",
        "waits": "abort",
        "after": "length",
    }
    assert requests["long"]["output_tokens"] >= 1
    assert requests["after"]["output_tokens"] == 2
    waits = requests["waits"]
    assert (waits["output_tokens"], waits["ttft_ns"], waits["prompt_tokens"]) == (0, None, 300)
    assert waits["finished_ns"] >= waits["arrival_ns"]


def test_generate_batch_is_followed_and_leaves_nothing(
    llama: LlamaForCausalLM, record: Any
) -> None:
    """The library's own entry point, with its own ids and its own order."""
    prompts = [words(9), words(5, 1), words(7, 2)]
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=3)
    extra: dict[str, Any] = {}
    if RUNS_ON:
        config.num_blocks, config.block_size, config.max_batch_tokens = 64, 16, 64
    else:
        made = importlib.import_module("transformers.generation.configuration_utils")
        extra["continuous_batching_config"] = made.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, use_cuda_graph=False
        )

    def run() -> dict[str, list[int]]:
        found = llama.generate_batch(prompts, generation_config=config, **extra)
        return {name: list(output.generated_tokens) for name, output in found.items()}

    alone = run()
    recorded = record(run)
    assert recorded.output == alone
    assert recorded.passes(*COLUMNS) == [prefill(21, 3), decode(3), decode(3), *ran_on(3)]
    assert set(by_user_id(recorded)) == {"req_0", "req_1", "req_2"}
    assert recorded.trace.metas[0].not_measured == ()
    assert_invariants(recorded)
    for owner in (API.ContinuousBatchProcessor, API.Scheduler, getattr(API, "ModelRunner", API)):
        for name, value in vars(owner).items():
            code = getattr(value, "__code__", None)
            assert code is None or "hooks/continuous.py" not in code.co_filename, name


def windowed(kind: str) -> Any:
    """A tiny model all of whose layers slide (Mistral), or every second one (Gemma 2); the window is 4."""
    common = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "sliding_window": 4,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    torch.manual_seed(7)
    if kind == "mistral":
        config = transformers.MistralConfig(**common)
        return transformers.MistralForCausalLM(config).eval()
    config = transformers.Gemma2Config(**common, attn_implementation="eager")
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_sliding_layers_read_what_is_in_their_window(kind: str, record: Any) -> None:
    model = windowed(kind)
    recorded = both(record, lambda: serve(manager_of(model), [Ask(words(9), 3)]))
    assert recorded.passes(*COLUMNS) == [prefill(9, 1), decode(1), decode(1), *ran_on(1)]
    first, second, *_ = recorded.trace.passes.sort_by("pass_id").to_pylist()
    # 2 heads of 16 in float32, keys and values: 256 bytes a token and layer. The query reads 3 tokens before itself.
    sliding, full = (2, 0) if kind == "mistral" else (1, 1)
    assert first["kv_read_bytes"] == 256 * (sliding * 9 + full * 9)
    assert second["kv_read_bytes"] == 256 * (sliding * 4 + full * 10)
    assert second["kv_write_bytes"] == 256 * 2
    assert second["kv_held_bytes"] == 256 * (sliding * 4 + full * 10)
    assert_invariants(recorded)


@pytest.mark.skipif(
    RUNS_ON, reason="5.0 pads where it captures CUDA graphs, or compiles with fixed shapes"
)
def test_slots_beyond_the_tokens_are_padding(
    llama: LlamaForCausalLM, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a function around the model is compiled, 14 slots are padded to 16, and 2 to 8. It is left uncompiled here,
    which takes nothing from the padding."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    recorded = both(
        record, lambda: serve(compiling(llama), [Ask(words(9), 3), Ask(words(5, 1), 3)])
    )
    assert recorded.passes(*COLUMNS) == [
        ("prefill", 14, 0, 0, 0, 2, 2),
        ("decode", 0, 2, 0, 0, 6, 2),
        ("decode", 0, 2, 0, 0, 6, 2),
    ]
    second = recorded.trace.passes.sort_by("pass_id").to_pylist()[1]
    # Each of 8 slots writes 512 bytes; 2 of them are tokens, with 10 and 6 in the cache.
    assert second["kv_write_bytes"] == 8 * 512
    assert second["kv_held_bytes"] == 16 * 512
    assert_invariants(recorded)


def compiling(model: Any) -> Any:
    """A manager whose steps are one compiled function each, of a fixed length."""
    made = importlib.import_module("transformers.generation.configuration_utils")
    config = made.CompileConfig(backend="eager", fullgraph=False, mode=None)
    return manager_of(model, varlen_compile_config=config, q_padding_interval_size=8)


@pytest.mark.skipif(RUNS_ON, reason="5.0 compiles with CUDA graphs alone")
def test_a_compiled_step_has_one_row(llama: LlamaForCausalLM, record: Any) -> None:
    model = copy.deepcopy(llama)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    ask = Ask(words(5), 2)
    eager = serve(manager_of(model), [ask])
    torch._dynamo.reset()
    recorded = record(lambda: serve(compiling(model), [ask]))
    torch._dynamo.reset()
    assert recorded.output.tokens == eager.tokens
    assert recorded.passes(*COLUMNS, "compiled") == [
        ("prefill", 5, 0, 0, 0, 3, 1, True),
        ("decode", 0, 1, 0, 0, 7, 1, True),
    ]
    assert recorded.passes("warmup")[0] == ("compile",)


def test_a_scheduler_that_reads_differently_costs_the_labels_alone(
    llama: LlamaForCausalLM, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(processor: Any) -> Any:
        raise AttributeError("no attribute 'requests_in_batch'")

    monkeypatch.setattr("phaseprof.hooks.schedulers._batch", missing)
    asks = [Ask(words(9), 3), Ask(words(5, 1), 3)]
    recorded = both(record, lambda: serve(manager_of(llama), asks))
    assert [row[0] for row in recorded.passes("phase")] == ["other"] * (3 + RUNS_ON)
    notes = {note.what: note for note in recorded.trace.metas[0].not_measured}
    note = notes["prefill and decode under continuous batching"]
    assert transformers.__version__ in note.why and "5.24" in note.why
    assert "requests_in_batch" in note.why


def test_a_session_that_begins_and_ends_in_the_middle(
    llama: LlamaForCausalLM, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was before it is not made up: no time to a first token that nobody saw. Steps run as the test lets them."""
    prepare = API.ContinuousBatchProcessor.prepare_next_batch
    gate = threading.Semaphore(3)

    def gated(processor: Any) -> Any:
        gate.acquire()
        return prepare(processor)

    monkeypatch.setattr(API.ContinuousBatchProcessor, "prepare_next_batch", gated)
    manager = manager_of(llama)

    def outputs(count: int) -> None:
        for _ in range(count):
            assert manager.get_result(timeout=10) is not None

    def watch() -> None:
        for _ in range(4):
            gate.release()
        outputs(4)

    manager.add_request(words(5), request_id="long", max_new_tokens=12, streaming=True)
    manager.start()
    try:
        outputs(3)
        recorded = record(watch)
    finally:
        for _ in range(1000):
            gate.release()
        manager.stop(block=True)
    (row,) = recorded.trace.requests.to_pylist()
    assert (row["ttft_ns"], row["first_token_ns"], row["queue_ns"]) == (None, None, None)
    assert (row["finish"], row["prompt_tokens"], row["cached_tokens"]) == (None, 5, 5)
    # Three tokens had come; the fourth is computed from the third, at position 7.
    assert recorded.passes(*COLUMNS) == [("decode", 0, 1, 5 * (n == 0), 0, 0, 1) for n in range(4)]
    first = recorded.trace.passes.sort_by("pass_id").to_pylist()[0]
    assert [(part["past"], part["query"]) for part in first["slices"]] == [(7, 1)]
