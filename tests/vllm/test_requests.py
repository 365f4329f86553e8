"""Requests and scheduler steps of real engines, held against what vLLM itself returns, counts and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import Recorded, counter, generate, make_engine, prompts, sampling, tokens_of

from phaseprof.analyzers.goodput import parse_objectives
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.serving import Cause
from phaseprof.session import Session
from phaseprof.trace.reader import open_trace

Record = Callable[[Callable[[], Any]], Recorded]
Rows = dict[str, dict[str, Any]]

#: Between two clocks that are both read as Unix time: the one is slewed, the other is not.
CLOCKS_NS = 1_000_000


@pytest.fixture(scope="module")
def small_engine(llama_folder: Any) -> Any:
    """An engine with room for 7 blocks of 32 tokens, that drafts three tokens by looking them up in what it has."""
    return make_engine(
        llama_folder,
        kv_cache_memory_bytes=8 * 32 * 1024,
        max_model_len=128,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )


def requests_of(recorded: Recorded) -> Rows:
    """The rows of the requests by their ids."""
    return {row["request_id"]: row for row in recorded.trace.requests.to_pylist()}


def by_client(recorded: Recorded) -> Rows:
    """By the id that the client knows; each asked for one answer."""
    rows = list(requests_of(recorded).values())
    assert len({row["client_id"] for row in rows}) == len(rows)
    return {row["client_id"]: row for row in rows}


def unix_ns(recorded: Recorded, seconds: float) -> int:
    """A time of vLLM's metrics, which are on the monotonic clock."""
    (meta,) = recorded.trace.metas
    pair = meta.clock[0]
    return round(seconds * 1e9) - pair.monotonic_ns + pair.unix_ns


def agree(recorded: Recorded, outputs: Iterable[Any]) -> None:
    """Each row tells what vLLM returned to the client, and lies between the times that vLLM took before and after."""
    rows = by_client(recorded)
    for output in outputs:
        row, metrics = rows[output.request_id], output.metrics
        (answer,) = output.outputs
        assert row["output_tokens"] == len(answer.token_ids) == metrics.num_generation_tokens
        assert row["prompt_tokens"] == len(output.prompt_token_ids)
        assert row["cached_tokens"] == output.num_cached_tokens
        assert row["preemptions"] == metrics.num_preemptions
        assert row["finish"] == answer.finish_reason
        assert abs(row["arrival_ns"] - round(metrics.arrival_time * 1e9)) < 1000
        # The scheduler notes when it begins to decide and makes its outputs before it returns.
        decided = row["arrival_ns"] + row["queue_ns"]
        assert unix_ns(recorded, metrics.scheduled_ts) <= decided <= row["first_token_ns"]
        assert unix_ns(recorded, metrics.first_token_ts) <= row["first_token_ns"]
        seen = row["arrival_ns"] + round(metrics.first_token_latency * 1e9)
        assert row["first_token_ns"] <= seen + CLOCKS_NS
        assert row["ttft_ns"] == row["first_token_ns"] - row["arrival_ns"]
        last = row["first_token_ns"] + sum(row["itl_ns"])
        assert unix_ns(recorded, metrics.last_token_ts) <= last == row["finished_ns"]
        assert len(row["itl_ns"]) == len(row["itl_steps"]) == row["output_tokens"] - 1
        if row["itl_ns"]:
            assert row["tpot_ns"] == sum(row["itl_ns"]) // len(row["itl_ns"])


def joined(recorded: Recorded) -> None:
    """Steps and passes are the same steps, inside each other, and serve the same requests."""
    steps = recorded.trace.steps.to_pylist()
    passes = recorded.trace.passes.sort_by("pass_id").to_pylist()
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert [row["step"] for row in passes] == [row["step"] for row in steps]
    for step, row in zip(steps, passes, strict=True):
        assert (step["model_id"], step["rank"]) == (row["model_id"], row["rank"])
        assert step["scheduled_tokens"] == sum(one["query"] for one in row["slices"])
        begun = step["start_ns"] + step["schedule_ns"]
        assert begun <= row["start_ns"] <= row["end_ns"] <= begun + step["execute_ns"]
        assert 0 < step["kv_usage"] <= 1
        assert step["running"] >= len(row["slices"])
    served = {one["request_id"] for row in passes for one in row["slices"]}
    rows = requests_of(recorded)
    assert served == set(rows)
    in_step = [{one["request_id"] for one in row["slices"]} for row in passes]
    for name, request in rows.items():
        assert all(name in in_step[step] for step in request["itl_steps"])
    # What the passes count and what the requests count is the same.
    assert recorded.sum("cached_tokens") == sum(row["cached_tokens"] for row in rows.values())


def test_the_rows_agree_with_what_vllm_returns(engine: Any, record: Record) -> None:
    engine.reset_prefix_cache()
    recorded = record(lambda: generate(engine, prompts(9, 40, 70, 1, first=7), sampling(6)))
    agree(recorded, recorded.output)
    joined(recorded)
    steps = recorded.trace.steps.to_pylist()
    # 32 tokens a step: the fourth waits while the long prompts take them all.
    assert (steps[0]["running"], steps[0]["waiting"], steps[0]["scheduled_tokens"]) == (2, 2, 32)
    assert [row["preempted"] for row in steps] == [0] * len(steps)
    # What the first step of each phase serves is cold.
    assert by_client(recorded)[recorded.output[0].request_id]["warmup"] == "first"


def test_a_found_prefix_is_cached(engine: Any, record: Record) -> None:
    engine.reset_prefix_cache()
    inputs = prompts(70, first=17)
    recorded = record(
        lambda: [
            *generate(engine, inputs, sampling(2)),
            *generate(engine, inputs, sampling(2)),
        ]
    )
    agree(recorded, recorded.output)
    joined(recorded)
    assert sorted(row["cached_tokens"] for row in requests_of(recorded).values()) == [0, 64]


def test_answers_to_one_question_share_the_clients_id(engine: Any, record: Record) -> None:
    recorded = record(
        lambda: generate(engine, prompts(10, first=27), sampling(4, n=3, temperature=1.0, seed=2))
    )
    (output,) = recorded.output
    rows = requests_of(recorded)
    assert [row["client_id"] for row in rows.values()] == [output.request_id] * 3
    assert {row["output_tokens"] for row in rows.values()} == {4}
    joined(recorded)


def test_a_stop_token_ends_a_request(engine: Any, record: Record) -> None:
    inputs = prompts(12, first=37)
    (answer,) = tokens_of(generate(engine, inputs, sampling(10)))
    recorded = record(lambda: generate(engine, inputs, sampling(10, stop_token_ids=[answer[3]])))
    agree(recorded, recorded.output)
    (row,) = requests_of(recorded).values()
    assert (row["finish"], row["output_tokens"]) == ("stop", answer.index(answer[3]) + 1)


def test_one_token_has_no_tpot(engine: Any, record: Record) -> None:
    recorded = record(lambda: generate(engine, prompts(12, first=47), sampling(1)))
    agree(recorded, recorded.output)
    (row,) = requests_of(recorded).values()
    assert (row["output_tokens"], row["tpot_ns"], row["itl_ns"]) == (1, None, [])


def test_an_abort_keeps_what_was_got(engine: Any, record: Record) -> None:
    core = engine.llm_engine

    def run() -> None:
        for name, prompt in zip(("x", "y", "z"), prompts(6, 8, 60, first=57), strict=True):
            core.add_request(name, prompt, sampling(8))
        core.step()
        core.step()
        core.abort_request(["x"])
        # It was never scheduled.
        core.add_request("w", prompts(9, first=67)[0], sampling(8))
        core.abort_request(["w"])
        while core.has_unfinished_requests():
            core.step()

    recorded = record(run)
    rows = by_client(recorded)
    assert {name: (row["finish"], row["output_tokens"]) for name, row in rows.items()} == {
        "x": ("abort", 2),
        "y": ("length", 8),
        "z": ("length", 8),
        "w": ("abort", 0),
    }
    never = rows["w"]
    assert (never["queue_ns"], never["ttft_ns"], never["tpot_ns"]) == (None, None, None)
    assert never["finished_ns"] >= never["arrival_ns"]


def test_a_session_that_begins_midway_knows_what_it_can(engine: Any, record: Record) -> None:
    core = engine.llm_engine
    core.add_request("early", prompts(6, first=77)[0], sampling(5))
    core.step()
    core.step()

    def run() -> None:
        while core.has_unfinished_requests():
            core.step()

    (row,) = requests_of(record(run)).values()
    assert (row["prompt_tokens"], row["output_tokens"], row["finish"]) == (6, 5, "length")
    assert (row["client_id"], row["queue_ns"], row["ttft_ns"]) == (None, None, None)
    # The gap to the first token that was seen is not known.
    assert (len(row["itl_ns"]), row["cached_tokens"]) == (2, 0)


def test_requests_that_still_run_have_no_end(engine: Any, record: Record) -> None:
    core = engine.llm_engine

    def run() -> None:
        core.add_request("open", prompts(6, first=87)[0], sampling(9))
        for _ in range(3):
            core.step()

    (row,) = requests_of(record(run)).values()
    while core.has_unfinished_requests():
        core.step()
    assert (row["finish"], row["finished_ns"], row["output_tokens"]) == (None, None, 3)
    assert len(row["itl_ns"]) == 2


def test_warmup_and_profiled_are_taken_over(engine: Any, record: Record) -> None:
    import phaseprof
    from phaseprof.session import profiled_passes

    def run() -> list[Any]:
        with phaseprof.warmup():
            first = generate(engine, prompts(4, first=131), sampling(1))
        with profiled_passes():
            return [*first, *generate(engine, prompts(4, first=141), sampling(1))]

    recorded = record(run)
    rows = by_client(recorded)
    flags = [
        (rows[output.request_id]["warmup"], rows[output.request_id]["profiled"])
        for output in recorded.output
    ]
    assert flags == [("requested", False), (None, True)]


def test_a_session_whose_input_streams_in(engine: Any, record: Record) -> None:
    """Two turns, of 8 and of 5 tokens: the last token of the first turn is not computed, so that the second begins
    behind its other two."""
    from vllm.v1.engine import EngineCoreRequest

    core = engine.llm_engine.engine_core.engine_core

    def send(tokens: list[int], *, resumable: bool = True) -> None:
        request = EngineCoreRequest(
            request_id="stream-0",
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=_processed(sampling(3)),
            pooling_params=None,
            arrival_time=__import__("time").time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
            external_req_id="stream",
        )
        core.add_request(*core.preprocess_add_request(request))

    def run() -> None:
        send([9] * 8)
        for _ in range(3):
            core.step()
        send([11] * 5)
        for _ in range(3):
            core.step()
        send([0], resumable=False)

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+8",
        "decode | a: decode 8+1",
        "decode | a: decode 9+1",
        "prefill | a: prefill 10+5",
        "decode | a: decode 15+1",
        "decode | a: decode 16+1",
    ]
    joined(recorded)
    (row,) = requests_of(recorded).values()
    assert (row["client_id"], row["prompt_tokens"], row["cached_tokens"]) == ("stream", 13, 0)
    # Two gaps in each turn, none between them.
    assert (row["output_tokens"], row["itl_steps"], row["finish"]) == (6, [1, 2, 4, 5], "length")
    core.step()


def _processed(parameters: Any) -> Any:
    parameters.eos_token_id  # noqa: B018  # what the frontend sets has a default
    return parameters


def test_a_preempted_request_waits_and_goes_on(small_engine: Any, record: Record) -> None:
    """Two requests of 4 blocks each in 7 blocks: one has to give way."""
    before = counter(small_engine, "vllm:num_preemptions")
    recorded = record(lambda: generate(small_engine, _apart(60, 60), sampling(60)))
    happened = counter(small_engine, "vllm:num_preemptions") - before
    assert happened > 0
    agree(recorded, recorded.output)
    rows = requests_of(recorded)
    assert sum(row["preemptions"] for row in rows.values()) == happened
    assert sum(row["preempted"] for row in recorded.trace.steps.to_pylist()) == happened
    joined(recorded)


def test_accepted_drafts_come_at_once(small_engine: Any, record: Record) -> None:
    """Each token but the first of a step has waited for nothing: as many as there are accepted drafts."""
    accepted = "vllm:spec_decode_num_accepted_tokens"
    before = counter(small_engine, accepted)
    inputs = [{"prompt_token_ids": [5, 6, 7, 8] * 6}]
    recorded = record(lambda: generate(small_engine, inputs, sampling(40)))
    happened = counter(small_engine, accepted) - before
    assert happened > 0
    agree(recorded, recorded.output)
    joined(recorded)
    (row,) = requests_of(recorded).values()
    steps = row["itl_steps"]
    again = [
        gap
        for gap, step, last in zip(row["itl_ns"], steps, [0, *steps], strict=False)
        if step == last
    ]
    assert again and set(again) == {0}
    # Of the last step the tokens beyond the limit are cut, and vLLM counts them as accepted.
    assert happened - 3 <= len(again) <= happened


def _apart(*lengths: int) -> list[Any]:
    """Prompts in which nothing comes twice, so that nothing is drafted from them."""
    return [
        {"prompt_token_ids": [3 + n * 100 + place for place in range(length)]}
        for n, length in enumerate(lengths)
    ]


def test_steps_that_overlap(engine: Any, record: Record) -> None:
    """Asynchronous scheduling cannot run on a CPU: its scheduler can. The second step is decided before the output of
    the first is there, and a third that computes a token too many once its request has ended."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    real = engine.llm_engine.engine_core.engine_core.scheduler
    scheduler = AsyncScheduler(
        vllm_config=real.vllm_config,
        kv_cache_config=real.kv_cache_config,
        structured_output_manager=real.structured_output_manager,
        block_size=real.block_size,
        hash_block_size=real.hash_block_size,
        log_stats=True,
    )

    def output(scheduled: Any, tokens: list[list[int]]) -> Any:
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
        )

    def run() -> Any:
        scheduler.add_request(Request("over", [4] * 9, _processed(sampling(2)), None))
        first = scheduler.schedule()
        second = scheduler.schedule()
        scheduler.update_from_output(first, output(first, [[7]]))
        scheduler.update_from_output(second, output(second, [[8]]))
        return first, second

    recorded = record(run)
    first, second = recorded.trace.steps.to_pylist()
    assert (first["step"], first["scheduled_tokens"]) == (0, 9)
    assert (second["step"], second["scheduled_tokens"]) == (1, 1)
    decided = second["start_ns"] + second["schedule_ns"]
    assert decided <= first["start_ns"] + first["schedule_ns"] + first["execute_ns"]
    (row,) = requests_of(recorded).values()
    assert (row["output_tokens"], row["itl_steps"], row["finish"]) == (2, [1], "length")
    assert row["first_token_ns"] + row["itl_ns"][0] == row["finished_ns"]


def test_an_output_that_never_comes(engine: Any, record: Record) -> None:
    """The scheduler is freed with a step under way: it has no time to execute, and its request was given up."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    real = engine.llm_engine.engine_core.engine_core.scheduler

    def run() -> None:
        scheduler = Scheduler(
            vllm_config=real.vllm_config,
            kv_cache_config=real.kv_cache_config,
            structured_output_manager=real.structured_output_manager,
            block_size=real.block_size,
            hash_block_size=real.hash_block_size,
        )
        scheduler.add_request(Request("lost", [4] * 9, _processed(sampling(2)), None))
        scheduler.schedule()
        del scheduler
        __import__("gc").collect()

    recorded = record(run)
    (step,) = recorded.trace.steps.to_pylist()
    assert (step["execute_ns"], step["update_ns"]) == (None, None)
    (row,) = requests_of(recorded).values()
    assert (row["request_id"], row["finish"], row["output_tokens"]) == ("lost", "abort", 0)


def test_a_stop_string_is_the_frontends(engine: Any, record: Record) -> None:
    """The frontend finds it and ends the request from outside; in one process that is seen."""
    core = engine.llm_engine
    processor = core.output_processor

    def run() -> None:
        core.add_request("text", prompts(6, first=97)[0], sampling(8))
        core.step()
        state = next(iter(processor.request_states.values()))
        # Without a tokenizer nothing finds a text: what stands for one finds it at once.
        state.detokenizer = SimpleNamespace(
            update=lambda *args: "found",
            get_next_output_text=lambda *args: "",
            output_token_ids=[1, 2],
            num_output_tokens=lambda: 2,
        )
        while core.has_unfinished_requests():
            core.step()

    (row,) = requests_of(record(run)).values()
    assert (row["finish"], row["output_tokens"]) == ("stop", 2)


def test_a_scheduler_of_another_form_runs_unseen(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are still seen, and the trace says what is missing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    session = Session(tmp_path / "trace")
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "finish_requests", None)
        session.start()
    answers = generate(engine, prompts(5, first=201), sampling(2))
    session.stop()
    assert len(tokens_of(answers)[0]) == 2
    trace = open_trace(tmp_path / "trace")
    assert (trace.passes.num_rows, trace.requests.num_rows, trace.steps.num_rows) == (2, 0, 0)
    (meta,) = trace.metas
    (note,) = [note for note in meta.not_measured if "requests of vLLM" in note.what]
    assert "Scheduler has no finish_requests" in note.why


def test_what_we_fail_at_is_said_and_nothing_else(
    engine: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phaseprof.vllm import core
    from phaseprof.vllm.core_events import StepScheduled

    failures = iter([True])

    def fails(*args: Any) -> Any:
        if next(failures, False):
            raise ZeroDivisionError("ours")
        return StepScheduled(*args)

    monkeypatch.setattr(core, "StepScheduled", fails)
    recorded = record(lambda: generate(engine, prompts(5, first=211), sampling(3)))
    assert len(tokens_of(recorded.output)[0]) == 3
    # The step that was not seen has its number, so that the others still join.
    assert [row["step"] for row in recorded.trace.steps.to_pylist()] == [1, 2]
    (row,) = requests_of(recorded).values()
    assert (row["output_tokens"], row["itl_steps"], row["finish"]) == (3, [1, 2], "length")
    (meta,) = recorded.trace.metas
    assert any("ZeroDivisionError: ours" in note.why for note in meta.not_measured)


def test_the_report_tells_whose_prompt_slowed_whom(engine: Any, record: Record) -> None:
    """32 tokens a step: the prompt of 90 takes 26, 31, 31 and 2 of them, the last three beside one that decodes."""
    engine.reset_prefix_cache()

    def run() -> Any:
        # What comes first is cold.
        generate(engine, prompts(5, 60, first=107), sampling(4))
        return generate(engine, prompts(6, 90, first=117), sampling(12))

    recorded = record(run)
    joined(recorded)
    decodes, prefills = (output.request_id for output in recorded.output)
    report = build_report(recorded.trace, objectives=parse_objectives("ttft=3600s"))
    assert report.facts.engine.startswith("vllm 0.")
    assert (report.requests.count, report.requests.output_tokens) == (2, 24)
    found = report.interference
    assert found is not None
    assert (found.tokens, found.slowed, found.held) == (22, 3, 0)
    slow = [each for each in found.slowest if each.cause is Cause.PREFILL]
    assert {each.client_id for each in slow} <= {decodes}
    assert {each.by for each in slow} <= {(prefills,)}
    assert {(each.token, each.prefill_tokens) for each in slow} <= {(1, 31), (2, 31), (3, 2)}
    load = report.engine
    assert load is not None
    assert (load.engines, load.running_max, load.preemptions) == (1, 2, 0)
    assert 0 < load.overhead_share < 1
    assert report.goodput is not None
    assert (report.goodput.requests, report.goodput.share) == (2, 1.0)
