"""Rows as a run of a decoder records them, one field changed at a time."""

from __future__ import annotations

from typing import Any

from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import EngineStep, Finish, ForwardPass, Request, Slice

START_NS = 1_700_000_000 * 10**9


def forward_pass(pass_id: int = 0, **changes: Any) -> ForwardPass:
    """The decode step of one request of 9 prompt tokens that comes ``pass_id`` passes after its prompt."""
    start_ns = START_NS + pass_id * 1_000_000
    columns: dict[str, Any] = {
        "pass_id": pass_id,
        "step": pass_id,
        "model_id": "m0",
        "role": Role.TARGET,
        "phase": Phase.DECODE,
        "tag_source": TagSource.GENERATE,
        "start_ns": start_ns,
        "end_ns": start_ns + 900_000,
        "host_ns": 900_000,
        "device_ns": None,
        "sequences": 1,
        "prefill_tokens": 0,
        "decode_tokens": 1,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "cached_tokens": 0,
        "recomputed_tokens": 0,
        "padding_tokens": 0,
        "context_tokens": 10 + pass_id,
        "attention_pairs": 10 + pass_id,
        "logits_tokens": 1,
        "slices": (Slice("p1.g1.r0", Phase.DECODE, 1, 9 + pass_id, 9),),
        "flops": 269_000_000,
        "weight_bytes": 538_000_000,
        "kv_read_bytes": 46_080 * (10 + pass_id),
        "kv_write_bytes": 46_080,
        "dtype": "float32",
        "thread_id": 4242,
    }
    return ForwardPass(**{**columns, **changes})


def request(request_id: str = "p1.g1.r0", **changes: Any) -> Request:
    """A request of 9 prompt tokens that got 3 tokens: 20 ms to the first, 10 ms for each other."""
    columns: dict[str, Any] = {
        "request_id": request_id,
        "model_id": "m0",
        "arrival_ns": START_NS,
        "queue_ns": 1_000,
        "first_token_ns": START_NS + 20_000_000,
        "finished_ns": START_NS + 40_000_000,
        "sequences": 1,
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "output_tokens": 3,
        "ttft_ns": 20_000_000,
        "tpot_ns": 10_000_000,
        "itl_ns": (10_000_000, 10_000_000),
        "itl_steps": (1, 2),
        "finish": Finish.LENGTH,
    }
    return Request(**{**columns, **changes})


def engine_step(step: int = 0, **changes: Any) -> EngineStep:
    """A step of two requests, 10 ms after the one before: 1 ms to schedule, 8 to execute, 0.5 to update."""
    columns: dict[str, Any] = {
        "engine": 1,
        "step": step,
        "model_id": "m0",
        "start_ns": START_NS + step * 10_000_000,
        "schedule_ns": 1_000_000,
        "execute_ns": 8_000_000,
        "update_ns": 500_000,
        "running": 2,
        "waiting": 0,
        "preempted": 0,
        "scheduled_tokens": 2,
        "kv_usage": 0.25,
    }
    return EngineStep(**{**columns, **changes})
