"""Traces built in memory, pass by pass, in which the right answer follows by construction.

The stand-in device does 1e12 FLOP/s and moves 100e9 bytes/s, so that work in round numbers takes round times: 1 GFLOP
is 1 ms at the compute roof, 0.1 GB is 1 ms at the memory roof.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from phaseprof.errors import NotMeasured
from phaseprof.schema import KERNELS, PASSES, REQUESTS, SAMPLES, STEPS, TableSpec
from phaseprof.trace.meta import Ceilings, Device, ModelMeta, ProcessMeta, SelfCost
from phaseprof.trace.reader import Trace
from phaseprof.work.cost import AttentionCost, ModelCost

MS = 1_000_000
GFLOP = 10**9
GB = 10**9
START_NS = 1_700_000_000 * 10**9

CPU = Device("Stand-in CPU", "cpu", 0, 2, 2, 8 * GB, "cpu-key")
GPU = Device("Stand-in GPU", "cuda", 0, 132, None, 80 * GB, "gpu-key")


def roofs(
    device: Device = CPU,
    *,
    dtype: str = "float32",
    flops_per_s: float = 1e12,
    bytes_per_s: float = 100e9,
    source: str = "measured",
    spread: float | None = 0.02,
) -> Ceilings:
    """Roofs of the stand-in device: 1 TFLOP/s and 100 GB/s, measured three minutes before the run."""
    return Ceilings(
        device_key=device.key,
        dtype=dtype,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        source=source,
        measured_ns=START_NS - 180 * 10**9 if source == "measured" else None,
        spread=spread if source == "measured" else None,
        reference="stand-in",
    )


#: 0.2 GB of weights in float32; a token costs 0.1 GFLOP.
COST = ModelCost(
    linear_flops_per_token=90_000_000,
    head_flops_per_token=10_000_000,
    attention=(AttentionCost(4, 8, 8, 64, 64, None, 4096),),
    body_weight_bytes=180_000_000,
    head_weight_bytes=20_000_000,
    lookup_bytes_per_token=0,
    parameter_bytes=200_000_000,
    parameters=50_000_000,
    dtype="float32",
)


def model(
    model_id: str = "m",
    *,
    name: str = "Stand-in-50M",
    device: Device = CPU,
    cost: ModelCost | None = COST,
) -> ModelMeta:
    """A model on a device."""
    return ModelMeta(
        model_id,
        name,
        "StandInForCausalLM",
        "transformers",
        device.key,
        cost,
        "sdpa",
        "DynamicCache",
    )


META = ProcessMeta(
    schema=1,
    phaseprof="0.1",
    rank=0,
    pid=1,
    command=("python", "serve.py"),
    versions={"transformers": "5.24.0"},
    started_ns=START_NS,
    ended_ns=START_NS + 10**10,
    complete=True,
    devices=(CPU, GPU),
    models=(model(),),
    ceilings=(roofs(),),
    hooks=("transformers 5.24.0 (generate)", "1 model class"),
    self_cost=SelfCost(passes=100, hook_ns=600_000, writer_cpu_ns=2 * MS),
)


@dataclass
class Timeline:
    """Rows of a trace as they are recorded, one thread's passes one after another.

    Attributes:
        gap_ns: Time between two passes.
        now_ns: Where the clock stands.
    """

    gap_ns: int = 0
    now_ns: int = START_NS
    passes: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        phase: str,
        ms: float,
        *,
        gflop: float | None = None,
        gb: float | None = None,
        weights: float = 1.0,
        tokens: int = 1,
        busy: float | None = None,
        request: str = "r0",
        past: int = 0,
        prompt: int | None = None,
        sequences: int = 1,
        **columns: Any,
    ) -> dict[str, Any]:
        """Add one pass of ``ms`` milliseconds.

        Args:
            phase: Its label.
            ms: Its time.
            gflop: Its work; None for unknown work.
            gb: The bytes it has to move, ``weights`` of which are weights and the rest KV that is read.
            weights: Share of the bytes.
            tokens: Tokens it computes, over all sequences.
            busy: Adds kernels that cover this share of it, half of them twice, and marks it as profiled.
            request: Request of its first sequence; others have the name with a number.
            past, prompt: Of each slice; a prompt of None is that of a whole prefill or of a decode step.
            sequences: Batch.
            **columns: Columns to set as they are.
        """
        span_ns = round(ms * MS)
        moved = None if gb is None else round(gb * GB)
        weight_bytes = None if moved is None else round(moved * weights)
        prefill = {"prefill": tokens, "encode": tokens}.get(phase, 0)
        decode = tokens if phase == "decode" else 0
        query = max(tokens // sequences, 1)
        if prompt is None:
            prompt = past + query if prefill else past
        row: dict[str, Any] = {
            "rank": 0,
            "pass_id": len(self.passes),
            "step": len(self.passes),
            "model_id": "m",
            "role": "target",
            "phase": phase,
            "tag_source": "generate",
            "start_ns": self.now_ns,
            "end_ns": self.now_ns + span_ns,
            "host_ns": span_ns,
            "device_ns": None,
            "sequences": sequences,
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "draft_tokens": 0,
            "accepted_tokens": None,
            "cached_tokens": 0,
            "recomputed_tokens": 0,
            "padding_tokens": 0,
            "context_tokens": past + query,
            "attention_pairs": None,
            "logits_tokens": sequences,
            "slices": [
                {
                    "request_id": request if i == 0 else f"{request}.{i}",
                    "phase": phase,
                    "query": query,
                    "past": past,
                    "prompt": prompt,
                }
                for i in range(sequences)
            ],
            "flops": None if gflop is None else round(gflop * GFLOP),
            "weight_bytes": weight_bytes,
            "kv_read_bytes": None
            if moved is None or weight_bytes is None
            else moved - weight_bytes,
            "kv_write_bytes": None if moved is None else 0,
            "dtype": "float32",
            "thread_id": 7,
            "warmup": None,
            "compiled": False,
            "graph": False,
            "profiled": busy is not None,
            "error": None,
        }
        row.update(columns)
        self.passes.append(row)
        if busy is not None:
            self._kernels(row, round(span_ns * busy))
        self.now_ns += span_ns + self.gap_ns
        return row

    def _kernels(self, row: dict[str, Any], busy_ns: int) -> None:
        """Two overlapping kernels whose union is ``busy_ns``."""
        for begin, end in ((0, busy_ns * 3 // 4), (busy_ns // 4, busy_ns)):
            self.kernels.append(
                {
                    "rank": row["rank"],
                    "pass_id": row["pass_id"],
                    "name": "op",
                    "device": "cpu",
                    "stream": 0,
                    "start_ns": row["start_ns"] + begin,
                    "end_ns": row["start_ns"] + end,
                    "source": "torch_profiler",
                }
            )

    def request(self, request_id: str, **columns: Any) -> None:
        """Add a request of 8 prompt and 3 output tokens: 20 ms to the first, 10 ms for each other."""
        row: dict[str, Any] = {
            "rank": 0,
            "request_id": request_id,
            "model_id": "m",
            "arrival_ns": START_NS,
            "queue_ns": 0,
            "first_token_ns": START_NS + 20 * MS,
            "finished_ns": START_NS + 40 * MS,
            "sequences": 1,
            "prompt_tokens": 8,
            "cached_tokens": 0,
            "output_tokens": 3,
            "ttft_ns": 20 * MS,
            "tpot_ns": 10 * MS,
            "itl_ns": [10 * MS, 10 * MS],
            "finish": "length",
            "warmup": None,
        }
        row.update(columns)
        self.requests.append(row)

    def step(self, at_ms: float, **columns: Any) -> None:
        """Add an engine's step: 1 ms to schedule, 8 ms to execute, 1 ms to update."""
        row: dict[str, Any] = {
            "rank": 0,
            "engine": 1,
            "step": len(self.steps),
            "model_id": "m",
            "start_ns": START_NS + round(at_ms * MS),
            "schedule_ns": 1 * MS,
            "execute_ns": 8 * MS,
            "update_ns": 1 * MS,
            "running": 1,
            "waiting": 0,
            "preempted": 0,
            "scheduled_tokens": 1,
            "kv_usage": 0.5,
        }
        row.update(columns)
        self.steps.append(row)

    def trace(self, *metas: ProcessMeta, damage: tuple[str, ...] = ()) -> Trace:
        """The trace as the reader gives it; one process on the stand-in CPU unless ``metas`` are given."""
        return Trace(
            path=Path("trace"),
            passes=_table(PASSES, self.passes),
            requests=_table(REQUESTS, self.requests),
            kernels=_table(KERNELS, self.kernels),
            samples=_table(SAMPLES, []),
            steps=_table(STEPS, self.steps),
            metas=metas or (META,),
            damage=damage,
            size_bytes=41_000,
        )


def _table(spec: TableSpec, rows: list[dict[str, Any]]) -> pa.Table:
    schema = spec.arrow.append(pa.field("rank", pa.int64()))
    return pa.Table.from_pylist(rows, schema=schema)


def meta(**changes: Any) -> ProcessMeta:
    """The usual process with other facts."""
    return replace(META, **changes)


def missing(what: str) -> NotMeasured:
    """Something that a process could not measure."""
    return NotMeasured(what, "no reason", "nothing")


def healthy(prefills: int = 8, decodes: int = 60) -> Timeline:
    """A compute-bound prefill (0.6 of its roof) and a bandwidth-bound decode (0.5 + of its roof).

    Prefill: 60 GFLOP and 0.2 GB in 100 ms: 60 ms at the compute roof, 2 ms at the memory roof.
    Decode: 0.1 GFLOP and 0.22 GB in 4 ms: 0.1 ms and 2.2 ms, 55 %.
    """
    timeline = Timeline(gap_ns=1 * MS)
    for i in range(prefills):
        timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, request=f"r{i}")
        for k in range(decodes // prefills):
            timeline.add(
                "decode",
                4,
                gflop=0.1,
                gb=0.22,
                weights=0.2 / 0.22,
                request=f"r{i}",
                past=512 + k,
                prompt=512,
            )
        timeline.request(f"r{i}")
    return timeline
