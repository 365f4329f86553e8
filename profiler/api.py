"""The Python interface: profile a block, look at its report.

This module stands above the analyzers and the collectors; `phaseprof` itself imports it when it is asked for.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from phaseprof.analyzers.lean import ENGINE_LEAN, LEAN
from phaseprof.analyzers.report import build_report, primary_device
from phaseprof.analyzers.results import Report
from phaseprof.analyzers.serving import Objective
from phaseprof.analyzers.what_if.changes import Hardware, hardware_of
from phaseprof.cli.render.terminal import render
from phaseprof.collectors import ceilings as ceilings_of
from phaseprof.collectors import datasheet
from phaseprof.collectors.ceilings import Progress
from phaseprof.collectors.known import asked_for
from phaseprof.errors import CalibrationError, UsageError
from phaseprof.schema import STEPS
from phaseprof.session import Session, current
from phaseprof.trace.meta import Ceilings
from phaseprof.trace.reader import Trace, open_trace
from phaseprof.trace.writer import meta_path, write_json
from phaseprof.vllm.engines import EngineSessions, is_engine


class PrintableReport(Report):
    """A report that prints as `phaseprof report` does."""

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        """What a notebook shows; `phaseprof report TRACE --html FILE` writes the whole page."""
        from phaseprof.cli.render.html.cell import report_cell

        return report_cell(self)


class Profile:
    """What `phaseprof.profile` yields: the trace of a block, and its report.

    Attributes:
        trace_path: The trace's folder.
    """

    def __init__(self, session: Session, others: EngineSessions | None = None) -> None:
        self._session = session
        self._others = others
        self.trace_path = session.trace

    @property
    def trace(self) -> Trace:
        """The trace so far: whole after the block.

        Raises:
            TraceError: If it cannot be read.
        """
        self._sync()
        return open_trace(self.trace_path)

    def report(self, *, calibrate: bool = True) -> PrintableReport:
        """The report. `print` shows it as `phaseprof report` does.

        Args:
            calibrate: Measure this device's ceilings if they are not known yet (a few seconds, once a device).

        Raises:
            TraceError: If the trace cannot be read.
            EmptyRunError: If no forward pass was seen.
        """
        self._sync()
        return load_report(self.trace_path, calibrate=calibrate)

    def _sync(self) -> None:
        self._session.recorder.sync()
        if self._others is not None:
            self._others.sync()

    @contextlib.contextmanager
    def follow(self, engine: Any) -> Iterator[None]:
        """Record the processes of a `vllm.LLM` that was made inside of the block, and ends there.

        Raises:
            UsageError: If it is none.
        """
        if not is_engine(engine):
            raise UsageError(f"{type(engine).__name__} is not an engine with other processes.")
        with _following(engine, self._session, owned=True) as self._others:
            yield
        self._others = None

    @contextlib.contextmanager
    def operator_window(self) -> Iterator[None]:
        """Look at what runs during the passes inside, with torch.profiler: kernels on a GPU, the outermost operators on
        a CPU. It costs time, so those passes are flagged and kept out of timing figures."""
        tell = self._session.elsewhere
        self._session.begin_look()
        try:
            if tell is not None:
                tell("look")
            try:
                yield
            finally:
                if tell is not None:
                    tell("unlook")
        finally:
            self._session.end_look()


@contextlib.contextmanager
def profile(
    model: Any = None,
    trace: str | Path | None = None,
    *,
    workload: Mapping[str, Any] | None = None,
    collect: str | None = None,
) -> Iterator[Profile]:
    """Record the forward passes of a block.

    Every transformers model of this process is seen, whether it exists already or not, and none is changed: the hooks
    sit on two classes of the library for the time of the block. An offline `vllm.LLM` is followed into the processes of
    its engine, which write into the same trace.

    Under `phaseprof run` the process is recorded already: the block joins that trace, and `trace`, `workload` and
    `collect` have no effect.

    Args:
        model: A module of your own that is not a transformers model, to be watched as well; or a `vllm.LLM`.
        trace: Where to write the trace; ``phaseprof-<local time>`` in the current folder by default.
        workload: Facts about the run that a reader should see.
        collect: Which collectors run beside the hooks, as `--collect` takes it: names with commas between, or ``none``.
            By default what `PHASEPROF_COLLECT` says, else those of docs/collect.md that run by default.

    Raises:
        UsageError: If a session runs in this process already, the engine is not an offline one, or there is no
            collector of such a name.
        TraceError: If the trace cannot be written.
    """
    engine = model if is_engine(model) else None
    running = current()
    if running is not None and running.whole_process:
        with _following(engine, running) as others:
            yield Profile(running, others)
        return
    session = Session(
        Path(trace) if trace is not None else default_trace_path(),
        model=None if engine is not None else model,
        workload=workload,
        collect=asked_for(collect),
    )
    session.start()
    try:
        with _following(engine, session) as others:
            yield Profile(session, others)
    finally:
        session.stop()


@contextlib.contextmanager
def _following(
    engine: Any, session: Session, *, owned: bool = False
) -> Iterator[EngineSessions | None]:
    """The processes of an engine, if there is one, record themselves as well."""
    if engine is None:
        yield None
        return
    others = EngineSessions(engine, session, owned=owned)
    try:
        others.begin()
        yield others
    finally:
        others.end()


def default_trace_path() -> Path:
    """``phaseprof-<local time>`` in the current folder, with a number behind it if it is taken."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    path = Path(f"phaseprof-{stamp}")
    number = 2
    while path.exists():
        path = Path(f"phaseprof-{stamp}-{number}")
        number += 1
    return path


def load_report(
    path: str | Path,
    *,
    calibrate: bool = False,
    progress: Progress | None = None,
    objectives: Sequence[Objective] = (),
) -> PrintableReport:
    """The report of a trace on disk.

    Args:
        path: The trace's folder.
        calibrate: Measure the ceilings if the trace is of this machine and they are not known yet.
        progress: Told of each step of a measurement: steps done, steps in all, what is measured.
        objectives: What a request should keep, for the goodput; see `phaseprof.analyzers.goodput`.

    Raises:
        TraceError: If the trace cannot be read.
        EmptyRunError: If no forward pass is in it.
    """
    has_steps = (Path(path) / STEPS.name).is_dir()
    trace = open_trace(path, lean=ENGINE_LEAN if has_steps else LEAN)
    ceilings = _ceilings(trace, calibrate, progress)
    report = build_report(
        trace, ceilings=ceilings, objectives=objectives, hardware=_hardware(trace, ceilings)
    )
    return PrintableReport(**{field.name: getattr(report, field.name) for field in fields(Report)})


def _ceilings(trace: Trace, calibrate: bool, progress: Progress | None) -> Ceilings | None:
    """The roofs of the trace's main device: those that the trace holds, else what is known of the device here.

    What is measured for a trace is kept in it: it is read the same on another machine and after the next calibration.
    """
    device, dtype = primary_device(trace)
    if device is None or not dtype:
        return None
    for meta in trace.metas:
        for ceilings in meta.ceilings:
            if ceilings.device_key == device.key and ceilings.dtype == dtype:
                return ceilings
    known = ceilings_of.resolve(device, dtype)
    if calibrate and (known is None or known.source != "measured"):
        # Refused for a device that is not here, or not set up as it was.
        with contextlib.suppress(CalibrationError):
            known = ceilings_of.ensure(device, dtype, progress=progress)
    if known is not None and known.source == "measured":
        _keep(trace, known)
    return known


def _hardware(trace: Trace, ceilings: Ceilings | None) -> Hardware:
    """What is known of the trace's main device: its roofs by dtype, and those of its datasheet."""
    device, _ = primary_device(trace)
    found = [roof for meta in trace.metas for roof in meta.ceilings]
    if device is None:
        return hardware_of(None, found)
    known = [roof for roof in found if roof.device_key == device.key]
    hardware = hardware_of(device, [*known, *([] if ceilings is None else [ceilings])])
    row = datasheet.find(device)
    if row is None:
        return hardware
    looked_up = {dtype: datasheet.lookup(device, dtype) for dtype in row.tflops}
    sheet = {dtype: roof for dtype, roof in looked_up.items() if roof is not None}
    return replace(hardware, sheet=sheet, board=row.board)


def _keep(trace: Trace, ceilings: Ceilings) -> None:
    """Write ceilings into the metas of the processes that ran on their device, once those have ended."""
    for meta in trace.metas:
        if meta.complete and any(device.key == ceilings.device_key for device in meta.devices):
            with contextlib.suppress(OSError):
                write_json(
                    meta_path(trace.path, meta.rank, meta.pid, meta.host_token),
                    replace(meta, ceilings=(*meta.ceilings, ceilings)).to_json(),
                )
