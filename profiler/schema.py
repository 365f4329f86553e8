"""The tables of a trace, column by column: the one place that says what is stored and in which unit.

`docs/trace-schema.md` is generated from this module (``python -m phaseprof.schema`` prints it), and a test compares
the two. A null means "not known", and the reason stands under ``not_measured`` in the process's meta file; a figure is
never made up. No prompt text and no token ids are stored anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import CallKind, Finish, Warmup

#: Raised when a column changes its meaning or goes away. New columns do not raise it.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, whether it may be null, and its meaning (with unit, where the name has none)."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of the trace.

    Attributes:
        name: The folder of the table inside the trace.
        row: What one row is.
        key: The column that identifies a row. A row that is written again with the same key replaces the earlier one
            (a pass that was settled later, a request that ended); empty where rows have no identity.
    """

    name: str
    row: str
    key: str
    columns: tuple[Column, ...]

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema, with the schema version in its metadata."""
        fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns]
        return pa.schema(fields, metadata={"phaseprof.schema": str(SCHEMA_VERSION)})


_TEXT = pa.string()
_I64 = pa.int64()
_I32 = pa.int32()
_BOOL = pa.bool_()


def _values(
    kind: type[Phase] | type[Role] | type[TagSource] | type[Warmup] | type[Finish] | type[CallKind],
) -> str:
    return ", ".join(f"`{member.value}`" for member in kind)


SLICE_TYPE = pa.struct(
    [
        pa.field("request_id", _TEXT, nullable=False),
        pa.field("phase", _TEXT, nullable=False),
        pa.field("query", _I64, nullable=False),
        pa.field("past", _I64, nullable=False),
        pa.field("prompt", _I64, nullable=False),
        # Added to a table that exists: null in older traces.
        pa.field("cached", _I64),
        pa.field("recomputed", _I64),
        pa.field("drafts", _I64),
        pa.field("accepted", _I64),
    ]
)

PASSES = TableSpec(
    name="passes",
    row="one forward pass of a model",
    key="pass_id",
    columns=(
        Column(
            "pass_id",
            _I64,
            "Unique in the trace; the ids of a process ascend in the order of its passes.",
        ),
        Column("step", _I64, "Number of the pass within its model and process, from 0."),
        Column("model_id", _TEXT, "Which model; `models` in the meta file describes it."),
        Column("role", _TEXT, f"Whose pass it is: {_values(Role)}."),
        Column("phase", _TEXT, f"The label: {_values(Phase)}."),
        Column("tag_source", _TEXT, f"Where the label comes from: {_values(TagSource)}."),
        Column("start_ns", _I64, "Begin of the call on the host clock, Unix ns."),
        Column("end_ns", _I64, "End of the call on the host clock, Unix ns."),
        Column(
            "host_ns", _I64, "Host time of the call: `end_ns - start_ns` on the monotonic clock."
        ),
        Column(
            "device_ns",
            _I64,
            "Time between the pass's first and last device event; null without device events.",
            nullable=True,
        ),
        Column("sequences", _I64, "Sequences (rows) in the batch, beams included."),
        Column("prefill_tokens", _I64, "Prompt tokens and recomputed tokens computed by the pass."),
        Column("decode_tokens", _I64, "Generated tokens computed by the pass, drafts included."),
        Column(
            "draft_tokens", _I64, "Drafted tokens that the pass verified (part of `decode_tokens`)."
        ),
        Column(
            "accepted_tokens",
            _I64,
            "Drafted tokens that were accepted; null until it is known.",
            nullable=True,
        ),
        Column(
            "cached_tokens",
            _I64,
            "Prompt tokens that the requests beginning with this pass found in the cache: not computed.",
        ),
        Column(
            "recomputed_tokens",
            _I64,
            "Tokens computed at positions computed before (part of `prefill_tokens`).",
        ),
        Column(
            "padding_tokens",
            _I64,
            "Slots computed for padding or for rows that had already finished; null if not known.",
            nullable=True,
        ),
        Column(
            "context_tokens",
            _I64,
            "Sum over the rows of the KV length after the pass (slots in use, padding included).",
            nullable=True,
        ),
        Column(
            "attention_pairs",
            _I64,
            "Exact causal query x key pairs summed over the rows, for a layer without a window.",
            nullable=True,
        ),
        Column(
            "logits_tokens",
            _I64,
            "Positions for which the output head was computed.",
            nullable=True,
        ),
        Column(
            "slices",
            pa.list_(pa.field("item", SLICE_TYPE, nullable=False)),
            "One entry a sequence, in tokens: `request_id`, `phase` of its part, `query` (computed), `past` (in the "
            "cache before), `prompt`, `cached` (of the prompt, found in the cache at this pass), `recomputed` and "
            "`drafts` (of `query`), `accepted` (of the drafts; null if not known). The last four are null in older "
            "traces.",
        ),
        Column(
            "flops",
            _I64,
            "Floating-point operations of the pass in closed form (2 per multiply-add), padding included.",
            nullable=True,
        ),
        Column(
            "weight_bytes",
            _I64,
            "Bytes of weights that the pass has to read; of routed experts `experts_read`, or, where that is null, as "
            "many as an even spread of the tokens is expected to reach.",
            nullable=True,
        ),
        Column(
            "experts_read",
            _I64,
            "Distinct routed experts that the pass reads, summed over its layers, counted from what the routers chose; "
            "null without routed experts, and where the choice could not be read.",
            nullable=True,
        ),
        Column(
            "kv_read_bytes",
            _I64,
            "Bytes of keys, values and states that the pass reads.",
            nullable=True,
        ),
        Column(
            "kv_write_bytes",
            _I64,
            "Bytes of keys, values and states that the pass adds or renews.",
            nullable=True,
        ),
        Column(
            "kv_held_bytes",
            _I64,
            "Bytes of keys, values and states in the cache after the pass.",
            nullable=True,
        ),
        Column(
            "kv_allocated_bytes",
            _I64,
            "Bytes that the cache takes for them, empty slots included.",
            nullable=True,
        ),
        Column(
            "cache_copy_bytes",
            _I64,
            "Bytes that the cache reads and writes beyond that, copying itself as it grows or slides.",
            nullable=True,
        ),
        Column("dtype", _TEXT, "The dtype that the model computes in."),
        Column("thread_id", _I64, "Native id of the host thread that made the call."),
        Column(
            "warmup",
            _TEXT,
            f"Why the pass is kept out of steady-state figures: {_values(Warmup)}; null if it is not.",
            nullable=True,
        ),
        Column("compiled", _BOOL, "The pass ran compiled code (torch.compile)."),
        Column("graph", _BOOL, "The pass was a replay of a CUDA graph."),
        Column(
            "profiled",
            _BOOL,
            "A costly collector ran during the pass: its time is kept out of timing figures.",
        ),
        Column(
            "error",
            _TEXT,
            "Class of the exception that ended the pass; null if none.",
            nullable=True,
        ),
    ),
)

REQUESTS = TableSpec(
    name="requests",
    row="one request: a row of the batch that a caller passed, or an answer asked of a serving engine",
    key="request_id",
    columns=(
        Column("request_id", _TEXT, "Unique in the trace."),
        Column("model_id", _TEXT, "Which model served it."),
        Column("arrival_ns", _I64, "When the caller asked, Unix ns."),
        Column(
            "queue_ns",
            _I64,
            "Time from arrival to the begin of its first pass; of a serving engine, until it has decided to run it.",
            nullable=True,
        ),
        Column(
            "first_token_ns",
            _I64,
            "End of the pass that yields its first token, Unix ns; of a serving engine, when it hands the token over.",
            nullable=True,
        ),
        Column("finished_ns", _I64, "When it ended, Unix ns; null while it runs.", nullable=True),
        Column("sequences", _I64, "Sequences computed for it: beams or returned sequences."),
        Column("prompt_tokens", _I64, "Prompt of one sequence, padding not counted."),
        Column(
            "cached_tokens", _I64, "Tokens of the prompt found in the cache, not computed for it."
        ),
        Column("output_tokens", _I64, "Generated tokens, summed over its sequences."),
        Column("ttft_ns", _I64, "Time to first token: first_token_ns - arrival_ns.", nullable=True),
        Column(
            "tpot_ns",
            _I64,
            "Time per output token after the first; null with fewer than two tokens.",
            nullable=True,
        ),
        Column(
            "itl_ns",
            pa.list_(pa.field("item", _I64, nullable=False)),
            "Inter-token latencies, one for each token after the first. Of several tokens that one step yields, the "
            "first has the time since the step before that yielded one, the others 0.",
        ),
        Column(
            "finish", _TEXT, f"How it ended: {_values(Finish)}; null while it runs.", nullable=True
        ),
        Column(
            "warmup",
            _TEXT,
            "As in `passes`: the request is kept out of latency figures; null if it is not.",
            nullable=True,
        ),
        Column(
            "profiled",
            _BOOL,
            "A costly collector ran during one of its passes: kept out of latency figures.",
        ),
        Column(
            "itl_steps",
            pa.list_(pa.field("item", _I64, nullable=False)),
            "The `step` (in `passes`, and in `steps`) that yielded each of those tokens, in the order of `itl_ns`; "
            "null in a trace that was written without it.",
            nullable=True,
        ),
        Column(
            "client_id",
            _TEXT,
            "The id under which the client sent it to a serving engine; several rows share it where it asked for "
            "several answers. Null without such an engine.",
            nullable=True,
        ),
        Column(
            "preemptions",
            _I64,
            "How often the scheduler took its cache away and put it back into the queue; null without a scheduler that "
            "does.",
            nullable=True,
        ),
    ),
)

STEPS = TableSpec(
    name="steps",
    row="one step of a serving engine's scheduler that scheduled a token",
    key="",
    columns=(
        Column("engine", _I64, "Number of the engine in its process, from 1."),
        Column(
            "step",
            _I64,
            "Number of the step in its engine, from 0: with `rank` and `model_id` it joins `passes.step`.",
        ),
        Column("model_id", _TEXT, "Which model; as in `passes`."),
        Column("start_ns", _I64, "The scheduler was asked what to run, Unix ns."),
        Column("schedule_ns", _I64, "Time that it took to decide."),
        Column(
            "execute_ns",
            _I64,
            "From then until the step's output was there: dispatch, waiting for earlier steps, and the pass itself; "
            "null if it never came.",
            nullable=True,
        ),
        Column(
            "update_ns",
            _I64,
            "Time that the scheduler took to hand the tokens over and to see who ended; null likewise.",
            nullable=True,
        ),
        Column("running", _I64, "Requests that were being served after the decision."),
        Column("waiting", _I64, "Requests that were waiting after it."),
        Column("preempted", _I64, "Requests that were preempted since the step before."),
        Column("scheduled_tokens", _I64, "Tokens that the step computes."),
        Column(
            "kv_usage",
            pa.float64(),
            "Share of the KV cache's blocks in use after the decision, 0 to 1; null if not known.",
            nullable=True,
        ),
    ),
)

KERNELS = TableSpec(
    name="kernels",
    row="one kernel or copy on a device; on a CPU, one outermost operator",
    key="",
    columns=(
        Column(
            "pass_id",
            _I64,
            "The pass that launched it; null if it cannot be joined.",
            nullable=True,
        ),
        Column("name", _TEXT, "Name as the collector gives it."),
        Column("device", _TEXT, "Device, as torch names it."),
        Column("stream", _I32, "Stream, or host thread index on a CPU.", nullable=True),
        Column("start_ns", _I64, "Begin, Unix ns."),
        Column("end_ns", _I64, "End, Unix ns."),
        Column("source", _TEXT, "The collector."),
        Column(
            "launched_ns",
            _I64,
            "When the host launched it, or the graph that holds it, Unix ns; null if no launch was seen, and for an "
            "operator of a CPU.",
            nullable=True,
        ),
    ),
)

SAMPLES = TableSpec(
    name="samples",
    row="one sample window of a counter",
    key="",
    columns=(
        Column("start_ns", _I64, "Begin of the window, Unix ns."),
        Column("end_ns", _I64, "End of the window, Unix ns."),
        Column(
            "device",
            _TEXT,
            "The device: `uuid` of its entry in the meta files (`GPU-…`, `MIG-…`), or `cpu`.",
        ),
        Column("source", _TEXT, "The collector."),
        Column("metric", _TEXT, "What was sampled, with its unit in the name."),
        Column("value", pa.float64(), "The value."),
    ),
)

CALLS = TableSpec(
    name="calls",
    row="one call that `phaseprof profile` made, and that ended: the passes that lie within it are its own",
    key="",
    columns=(
        Column("kind", _TEXT, f"Why: {_values(CallKind)}."),
        Column("prompt_tokens", _I64, "Prompt tokens of each of its sequences."),
        Column("new_tokens", _I64, "Tokens that each of them generates."),
        Column("sequences", _I64, "Sequences, or requests, at once."),
        Column(
            "repeat",
            _I64,
            "Number of the call among those of its kind and size, from 0; a run that goes on goes on counting.",
        ),
        Column("start_ns", _I64, "When it was made, Unix ns."),
        Column("end_ns", _I64, "When it returned, Unix ns."),
    ),
)

TABLES: tuple[TableSpec, ...] = (PASSES, REQUESTS, STEPS, KERNELS, SAMPLES, CALLS)


def markdown() -> str:
    """The tables as the docs page `docs/trace-schema.md` shows them."""
    lines = [
        "# The trace, column by column",
        "",
        "<!-- Generated by `python -m phaseprof.schema`; edit profiler/schema.py. -->",
        "",
        f"Schema version {SCHEMA_VERSION}. A trace is a folder; each table is a Parquet dataset under",
        "`TRACE/<table>/rank=R/part-*.parquet` that DuckDB, pandas and polars read as it is. Times are int64",
        "nanoseconds since the Unix epoch. A null means that the value is not known; the reason stands under",
        "`not_measured` in `TRACE/meta/*.json`. No prompt text and no token ids are stored.",
        "",
        "While a run lasts, a row may be written again with the same key (a pass that was settled by a later one,",
        "a request that ended): the row in the later part counts. A process names its parts",
        "`part-<host>-<pid>-<first>-<last>.parquet`, by its host and the numbers of the flushes inside; a kill at the",
        "wrong moment can leave a part beside the wider one that it was merged into. `phaseprof.open_trace` takes",
        "care of both, adds the column `rank` from the folder's name, and names the parts that cannot be read. A run",
        "that ends cleanly leaves one part a process and table (a very long one a few), and one row a key:",
        "`SELECT ... FROM 'TRACE/passes/**/*.parquet'` is exact there. Ranks over which a model is split",
        "(`tensor_ranks` in the meta files) each write the passes that they make together.",
    ]
    for table in TABLES:
        lines += ["", f"## {table.name}", "", f"One row is {table.row}."]
        if table.key:
            lines += [f"Key: `{table.key}`."]
        lines += ["", "| column | type | null | meaning |", "|---|---|---|---|"]
        for column in table.columns:
            kind = str(column.type).replace("item: ", "").replace(" not null", "")
            null = "yes" if column.nullable else ""
            lines.append(f"| `{column.name}` | {kind} | {null} | {column.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
