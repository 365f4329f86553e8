"""What-if and advice on a terminal, compared exactly, for runs that were put together by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from what_if_runs import H200, decode_step, gpu, mixed_step, on_cpu, prefill_step, run

from phaseprof.analyzers.advice import advise
from phaseprof.analyzers.results import Bound, Lever
from phaseprof.analyzers.what_if.changes import (
    Batch,
    Graphs,
    KvCache,
    KvFormat,
    OtherDevice,
    Speculate,
    Speculation,
    TensorParallel,
    WeightFormat,
    Weights,
)
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.analyzers.what_if.ranking import asked, ranked
from phaseprof.cli.render.advice import advice_section
from phaseprof.cli.render.layout import to_ascii
from phaseprof.cli.render.what_if import Head, render

Golden = Callable[[str, str], None]

HEAD = Head(("Stand-in-8B", "vllm 0.32.0", "NVIDIA H100 80GB HBM3, bfloat16"), "trace")
BANDWIDTH = run()
OVERHEAD = run(decode_step(16.0, idle=0.6, bound=Bound.OVERHEAD), prefill_step())
SERVED = run(
    decode_step(12.0, sequences=32, context=4000.0),
    mixed_step(30.0, chunk=512.0, decode=32.0),
    queue_ms=4.0,
)
CPU = on_cpu()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_all_sensible_changes(width: int, golden: Golden) -> None:
    golden(f"what-if-{width}.txt", render(ranked(BANDWIDTH), HEAD, width=width))


def test_an_overhead_bound_decode(golden: Golden) -> None:
    golden("what-if-overhead.txt", render(ranked(OVERHEAD), HEAD, width=120))


def test_a_server_with_mixed_steps(golden: Golden) -> None:
    golden("what-if-served.txt", render(ranked(SERVED), HEAD, width=140))


def test_on_a_cpu(golden: Golden) -> None:
    head = replace(HEAD, subject=("Stand-in-8B", "transformers 5.24.0", "CPU, bfloat16"))
    golden("what-if-cpu.txt", render(ranked(CPU), head, width=100))


def test_changes_that_were_asked_for_with_the_arithmetic(golden: Golden) -> None:
    found = asked(
        OVERHEAD,
        [
            Weights(WeightFormat.FP8),
            KvCache(KvFormat.FP8),
            Graphs(),
            Speculate(Speculation(4, 0.75)),
        ],
    )
    text = render(found, HEAD, width=110, explain=True)
    golden("what-if-explained.txt", text)
    golden(
        "what-if-explained-ascii.txt",
        render(found, HEAD, width=110, explain=True, unicode=False),
    )
    assert to_ascii(text).isascii()


def test_another_device_and_more_of_them(golden: Golden) -> None:
    h200 = OtherDevice(gpu("NVIDIA H200", H200, 141e9, "H200 SXM"))
    found = asked(BANDWIDTH, [h200, TensorParallel(2), Batch(512)])
    golden("what-if-devices.txt", render(found, HEAD, width=120, explain=True))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("name", "measured", "lever"),
    [
        ("bandwidth", BANDWIDTH, Lever("batch", "all sequences of a step read the same weights")),
        ("overhead", OVERHEAD, Lever("fewer launches", "CUDA graphs launch a step at once")),
        ("served", SERVED, None),
        ("cpu", CPU, Lever("batch", "all sequences of a step read the same weights")),
        ("unknown", run(missing="the roofs of this device are not known"), None),
    ],
)
def test_advice(
    name: str, measured: Measured, lever: Lever | None, width: int, golden: Golden
) -> None:
    lines = advice_section(advise(measured, lever), width, trace="trace")
    golden(f"advice-{name}-{width}.txt", "\n".join(line.plain for line in lines))
