"""Recordings of transformers that torch.profiler makes here: their passes are those that the hooks saw meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import DynamicCache

from phaseprof.cli.main import main
from phaseprof.trace.reader import Trace, open_trace

Record = Callable[[Callable[[], Any]], Any]

STACKS = {"with_stack": True}
SHAPES = {"record_shapes": True}
BOTH = {**STACKS, **SHAPES}

#: What a pass is, in the hooks' trace and in an imported one.
WHOLE = ("phase", "prefill_tokens", "decode_tokens", "sequences")


@pytest.fixture
def compare(record: Record, tmp_path: Path) -> Callable[..., tuple[list[Any], list[Any], Trace]]:
    """Run a function under the hooks and the profiler at once; the passes by the hooks, and by the recording."""

    def run(
        function: Callable[[], Any],
        options: dict[str, Any],
        *columns: str,
        names: tuple[str, ...] = (),
    ) -> tuple[list[Any], list[Any], Trace]:
        file, folder = tmp_path / "recorded.json.gz", tmp_path / "imported"

        def profiled() -> None:
            with profile(activities=[ProfilerActivity.CPU], **options) as recorded:
                function()
            recorded.export_chrome_trace(str(file))

        live = record(profiled)
        annotations = [part for name in names for part in ("--annotation", name)]
        assert main(["import", str(file), *annotations, "-o", str(folder)]) == 0
        trace = open_trace(folder)
        rows = trace.passes.sort_by("start_ns").select(list(columns)).to_pylist()
        return live.passes(*columns), [tuple(row.values()) for row in rows], trace

    return run


def ids(*shape: int) -> Any:
    return torch.arange(3, 3 + shape[0] * shape[1]).reshape(shape) % 200 + 3


def cache_name(model: Any) -> str:
    """What this version calls the argument of a model that holds its cache."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def generate(model: Any, prompt: Any, **changes: Any) -> Callable[[], Any]:
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        **changes,
    }
    if "prefill_chunk_size" in changes:
        # The first versions want a cache of the caller's for that; it is made before the recording.
        settings[cache_name(model)] = DynamicCache(config=model.config)
    return lambda: model.generate(prompt, **settings)


def cache_of(model: Any, out: Any) -> dict[str, Any]:
    """The cache of a pass as an argument of the next one."""
    name = cache_name(model)
    return {name: out[name if name in out else "past_key_values"]}


@pytest.mark.parametrize(
    ("prompt", "changes", "options"),
    [
        ((1, 9), {}, SHAPES),
        ((1, 9), {}, {**SHAPES, "with_modules": True}),
        ((1, 9), {"do_sample": True}, BOTH),
        ((1, 20), {"prefill_chunk_size": 8}, SHAPES),
        ((1, 20), {"prefill_chunk_size": 8}, BOTH),
        ((1, 9), {"cache_implementation": "static", "disable_compile": True}, BOTH),
    ],
)
def test_one_sequence_has_the_same_passes_and_tokens(
    llama: Any, compare: Any, prompt: Any, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    live, imported, _ = compare(generate(llama, ids(*prompt), **changes), options, *WHOLE)
    assert len(live) >= 4
    assert imported == live


@pytest.mark.parametrize(
    ("prompt", "changes", "options"),
    [
        ((1, 9), {}, STACKS),
        ((3, 9), {}, STACKS),
        ((3, 9), {}, SHAPES),
        ((3, 9), {}, BOTH),
        ((2, 9), {"num_beams": 2}, STACKS),
        ((2, 20), {"prefill_chunk_size": 8}, STACKS),
    ],
)
def test_generation_has_the_same_phases(
    llama: Any, compare: Any, prompt: Any, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    live, imported, trace = compare(generate(llama, ids(*prompt), **changes), options, "phase")
    assert {phase for (phase,) in live} == {"prefill", "decode"}
    assert imported == live
    assert set(trace.passes.column("tag_source").to_pylist()) == {"inferred"}


@pytest.mark.parametrize("prompt", [(1, 1), (2, 1)])
def test_a_prompt_of_one_token_is_prefill_where_calls_tell(
    llama: Any, compare: Any, prompt: Any
) -> None:
    live, imported, _ = compare(generate(llama, ids(*prompt)), BOTH, *WHOLE)
    assert [row[0] for row in live] == ["prefill", "decode", "decode", "decode"]
    assert imported == live


def test_rows_of_several_sequences_are_counted_and_padding_is_not(llama: Any, compare: Any) -> None:
    """How much of a prompt is padding is not recorded, so that its tokens are not counted."""
    prompt = ids(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    call = generate(llama, prompt, attention_mask=mask)
    live, imported, trace = compare(call, BOTH, "sequences", "decode_tokens", "prefill_tokens")
    assert [row[:2] for row in imported] == [row[:2] for row in live]
    assert [row[2] for row in live] == [14, 0, 0, 0]
    assert [row[2] for row in imported] == [0, 0, 0, 0]
    (meta,) = trace.metas
    said = {entry.what: entry.why for entry in meta.not_measured}
    assert "may be padding" in said["tokens of 1 pass"]


@pytest.mark.parametrize(("prompt", "counted"), [((1, 9), True), ((2, 9), False)])
def test_without_a_cache_passes_are_mixed_if_shapes_tell(
    llama: Any, compare: Any, prompt: Any, counted: bool
) -> None:
    call = generate(llama, ids(*prompt), use_cache=False)
    live, imported, _ = compare(call, BOTH, *WHOLE)
    assert [row[0] for row in live] == ["prefill", "mixed", "mixed", "mixed"]
    if counted:
        assert imported == live
    else:
        assert [(row[0], *row[2:]) for row in imported] == [(row[0], *row[2:]) for row in live]


def test_without_a_cache_and_shapes_it_is_said_that_phases_are_not_known(
    llama: Any, compare: Any
) -> None:
    _, imported, trace = compare(generate(llama, ids(1, 9), use_cache=False), STACKS, "phase")
    assert imported == [("prefill",), ("other",), ("other",), ("other",)]
    (meta,) = trace.metas
    said = {entry.what: entry.why for entry in meta.not_measured}
    assert "no call of a KV cache was recorded" in said["the phase of 3 passes"]


def test_a_loop_with_a_cache_after_one_without(llama: Any, compare: Any) -> None:
    def both() -> None:
        generate(llama, ids(1, 9), use_cache=False)()
        generate(llama, ids(1, 9))()
        generate(llama, ids(1, 9), use_cache=False)()

    _, imported, _ = compare(both, STACKS, "phase")
    without, cached = [("prefill",), *[("other",)] * 3], [("prefill",), *[("decode",)] * 3]
    assert imported == [*without, *cached, *without]


@pytest.mark.parametrize("options", [SHAPES, BOTH], ids=["shapes", "both"])
def test_a_loop_of_the_user_s_own(llama: Any, compare: Any, options: dict[str, Any]) -> None:
    def loop() -> None:
        with torch.no_grad():
            out = llama(ids(1, 9), use_cache=True)
            for _ in range(3):
                out = llama(ids(1, 1), use_cache=True, **cache_of(llama, out))

    live, imported, _ = compare(loop, options, *WHOLE)
    assert [row[0] for row in live] == ["prefill", "decode", "decode", "decode"]
    assert imported == live


@pytest.mark.parametrize("options", [{}, SHAPES], ids=["bare", "shapes"])
def test_ranges_that_a_user_names(llama: Any, compare: Any, options: dict[str, Any]) -> None:
    def loop() -> None:
        with torch.no_grad():
            with record_function("read the prompt"):
                out = llama(ids(1, 9), use_cache=True)
            for step in range(3):
                with record_function(f"token {step}"):
                    out = llama(ids(1, 1), use_cache=True, **cache_of(llama, out))

    names = ("read the prompt=prefill", "token *=decode")
    columns = WHOLE if options else ("phase",)
    live, imported, trace = compare(loop, options, *columns, names=names)
    assert [row[0] for row in live] == ["prefill", "decode", "decode", "decode"]
    assert imported == live
    assert set(trace.passes.column("tag_source").to_pylist()) == {"annotation"}


def test_a_range_around_several_passes_has_no_tokens_of_one(llama: Any, compare: Any) -> None:
    def run() -> None:
        with record_function("all of it"):
            generate(llama, ids(1, 9))()

    columns = ("phase", "decode_tokens")
    _, imported, _ = compare(run, BOTH, *columns, names=("all of it=decode",))
    assert imported == [("decode", 0)]


def test_positions_are_no_passes_of_their_own(compare: Any) -> None:
    """GPT-2 looks its positions up as well."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    call = generate(model, ids(1, 9), pad_token_id=0)
    live, imported, _ = compare(call, SHAPES, *WHOLE)
    assert imported == live


def test_a_pass_alone_is_no_generation(llama: Any, compare: Any) -> None:
    """Without calls and without a row of one token it may be training, or anything."""

    def forward() -> None:
        with torch.no_grad():
            llama(ids(2, 9))

    live, imported, _ = compare(forward, SHAPES, "phase")
    assert (live, imported) == ([("prefill",)], [])
