"""A step: build the model, run its cases under sessions, and write what they recorded."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_kit.plan import Run, Sizes, Step

#: Rows of a table that are kept for a case.
_LIMITS = {"passes": 20_000, "kernels": 60_000, "samples": 200_000}


class Deadline:
    """When the step has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self._end_s - time.monotonic()


def run_step(step: Step, sizes: Sizes, device: str, out: Path, deadline: Deadline) -> None:
    """Run the cases of a step; what fails is written down, and the rest goes on."""
    log: dict[str, Any] = {"step": step.name, "cases": {}}
    begun = time.monotonic()
    try:
        model = build(sizes, device)
        log["model_s"] = round(time.monotonic() - begun, 2)
        ceilings = guarded(log, "ceilings", lambda: measure_ceilings(device, sizes))
        for run in step.runs:
            for batch in sizes.batches[run.first : run.last]:
                name = f"{step.name}-{run.name}-b{batch}"
                if deadline.left_s < 10.0:
                    log["cases"][name] = {"skipped": "no time was left"}
                    continue
                case = Generation(model, sizes, batch, compiled=step.compiled)
                case_begun = time.monotonic()
                entry = guarded(
                    log,
                    name,
                    lambda case=case, name=name, run=run: run_case(  # type: ignore[misc]
                        case, run, out / name, ceilings
                    ),
                )
                _free(case)
                if entry is not None:
                    entry["seconds"] = round(time.monotonic() - case_begun, 2)
                    log["cases"][name] = entry
                save(out / f"{step.name}.json", log)
    except Exception:
        log["failed"] = traceback.format_exc(limit=8)
    log["seconds"] = round(time.monotonic() - begun, 2)
    save(out / f"{step.name}.json", log)


def guarded(log: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """Call; None if it failed, which the log then says."""
    try:
        return call()
    except Exception:
        log["cases"][name] = {"failed": traceback.format_exc(limit=8)}
        return None


def build(sizes: Sizes, device: str) -> Any:
    """The model with random weights, on the device."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **{k: v for k, v in sizes.config.items() if k not in ("model_type", "architectures")}
    )
    # Nothing ends a sequence before its last token.
    config.eos_token_id = None
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, sizes.dtype), attn_implementation="sdpa"
        )
    model.generation_config.eos_token_id = None
    return model.eval()


class Generation:
    """Calls of generate at one batch size; greedy, to the last token."""

    def __init__(self, model: Any, sizes: Sizes, batch: int, *, compiled: bool) -> None:
        import torch

        self.model = model
        self.sizes = sizes
        self.batch = batch
        self.compiled = compiled
        generator = torch.Generator(device="cpu").manual_seed(batch)
        vocabulary = int(sizes.config["vocab_size"])  # type: ignore[call-overload]
        ids = torch.randint(3, vocabulary, (batch, sizes.prompt), generator=generator)
        self.ids = ids.to(model.device)

    def __call__(self, tokens: int | None = None) -> Any:
        """Generate all new tokens, or stop after some: the length of the static cache is the same for both, so that
        nothing is compiled again."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        length = self.ids.shape[1] + (tokens or 0)

        class Enough(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                done = tokens is not None and input_ids.shape[1] >= length
                return torch.full((input_ids.shape[0],), done, device=input_ids.device)

        options: dict[str, Any] = {}
        if self.compiled:
            options["cache_implementation"] = "static"
            if self.model.device.type == "cpu":
                options["compile_config"] = _compile_on_cpu()
        return self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.sizes.new,
            pad_token_id=0,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Enough()]),
            **options,
        )


def _compile_on_cpu() -> Any:
    """generate compiles on a CPU only if it is told to; without code generation, as this is to try the script."""
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


def collectors(wanted: str) -> str:
    """Those of the wanted collectors that this phaseprof has."""
    from phaseprof.collectors.known import KNOWN

    have = {known.name for known in KNOWN}
    return ",".join(name for name in wanted.split(",") if name in have) or "none"


def measure_ceilings(device: str, sizes: Sizes) -> Any:
    """The roofs of the device, measured once for all steps (they are cached)."""
    from phaseprof.collectors import ceilings
    from phaseprof.devices import describe

    return ceilings.ensure(describe(device), sizes.dtype, seconds=sizes.calibrate_s)


def run_case(case: Generation, run: Run, folder: Path, ceilings: Any) -> dict[str, Any]:
    """Run one workload without and with a session; write the report and the tables."""
    from phaseprof.session import Session, warmup

    collect = collectors(run.collect)
    # What is compiled is compiled here, and its graphs are captured.
    case(8)
    alone_s, alone = _timed(case)
    trace = folder / "trace"
    session = Session(
        trace,
        collect=collect,
        workload={
            "prompt_tokens": case.sizes.prompt,
            "new_tokens": case.sizes.new,
            "batch": case.batch,
            "compiled": case.compiled,
        },
    )
    session.start()
    try:
        with warmup():
            case(4)
        times = []
        for _ in range(1 if run.brief else case.sizes.long):
            seconds, out = _timed(case)
            times.append(seconds)
        for _ in range(2 if run.brief else case.sizes.shorts(case.batch)):
            case(2)
    finally:
        session.stop()
    entry = write_results(trace, folder, ceilings)
    return {
        **entry,
        "collect": collect,
        "same_output": bool((alone == out).all()) if alone.shape == out.shape else False,
        "output": hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()[:16],
        "alone_s": round(alone_s, 4),
        "recorded_s": [round(seconds, 4) for seconds in times],
    }


def _timed(case: Generation) -> tuple[float, Any]:
    """A whole generation, and its time to the end of the device's work."""
    import torch

    _synchronize(torch, case)
    begin = time.perf_counter()
    out = case()
    _synchronize(torch, case)
    return time.perf_counter() - begin, out


def _free(case: Generation) -> None:
    """Give what the last case held back to the device."""
    import gc

    import torch

    gc.collect()
    if case.model.device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(torch: Any, case: Generation) -> None:
    if case.model.device.type == "cuda":
        torch.cuda.synchronize()


def write_results(trace_path: Path, folder: Path, ceilings: Any) -> dict[str, Any]:
    """The report as JSON, the tables bounded, the meta files; the trace itself is removed."""
    import pyarrow.parquet as pq

    from phaseprof.analyzers.as_json import to_json
    from phaseprof.analyzers.report import build_report
    from phaseprof.trace.reader import open_trace

    rows: dict[str, Any] = {}
    try:
        trace = open_trace(trace_path)
        for name, limit in _LIMITS.items():
            table = getattr(trace, name)
            rows[name] = table.num_rows
            if table.num_rows:
                kept = table.slice(0, limit)
                pq.write_table(kept, folder / f"{name}.parquet", compression="zstd")
        shutil.copytree(trace_path / "meta", folder / "meta", dirs_exist_ok=True)
        report = to_json(build_report(trace, ceilings=ceilings))
        save(folder / "report.json", report)
    finally:
        shutil.rmtree(trace_path, ignore_errors=True)
    return {"rows": rows, "answer": report["answer"]}


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1, default=str))
    part.replace(path)
