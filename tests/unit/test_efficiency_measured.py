"""The efficiency model against measured operations that the fit did not see, and the figures that are stated of it."""

from __future__ import annotations

import csv
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from efficiency_kit.search import minimum
from efficiency_kit.tables import Part, gemm_points, part_of

from phaseprof.analyzers.efficiency import fitted
from phaseprof.analyzers.efficiency.attention import attention_seconds
from phaseprof.analyzers.efficiency.gemm import gemm_seconds
from phaseprof.analyzers.efficiency.parameters import FittedGpu, Spread
from phaseprof.analyzers.efficiency.size_classes import attention_spread, gemm_spread
from phaseprof.work.count import Rows
from phaseprof.work.ops import AttentionShape, GemmShape

ROOT = Path(__file__).parents[2]
EXCERPT = ROOT / "tests" / "data" / "measured" / "excerpt.csv"
MEASURED = ROOT.parent / "shared" / "measured"
RESULTS = json.loads(
    (ROOT / "benchmarks" / "results" / "efficiency_fit.json").read_text(encoding="utf-8")
)
GPUS = {"h100": fitted.H100_SXM, "a100": fitted.A100_SXM}
KV = {"bfloat16": 2, "fp8": 1}


def gemm_modelled(gpu: FittedGpu, dtype: str, m: int, n: int, k: int) -> tuple[float, Spread]:
    model = gpu.gemm[dtype]
    hardware = replace(gpu.hardware, flops_per_s=model.flops_per_s)
    shape = GemmShape(m, n, k, round(n * k * model.fit.element_bytes))
    seconds = gemm_seconds(shape, model.fit, hardware)
    return seconds, gemm_spread(model.spreads, m, seconds)


def modelled(row: dict[str, str]) -> tuple[float, Spread]:
    gpu = GPUS[row["gpu"]]
    if row["operation"] == "gemm":
        return gemm_modelled(gpu, row["dtype"], int(row["m"]), int(row["n"]), int(row["k"]))
    models = {"prefill": gpu.prefill, "decode": gpu.decode}[row["operation"]]
    model = models[KV[row["dtype"]]]
    size, kv_heads = int(row["head_dim"]), int(row["kv_heads"])
    shape = AttentionShape(
        rows=(Rows(int(row["past"]), int(row["query"]), int(row["batch"])),),
        query_heads=int(row["heads"]),
        kv_heads=kv_heads,
        qk_head_dim=size,
        v_head_dim=size,
        window_tokens=int(row["window"]) or None,
        kv_bytes_per_token=kv_heads * 2 * size * KV[row["dtype"]],
    )
    # The measured calls are repeats of one and the same.
    seconds = attention_seconds(shape, model.fit, gpu.hardware, resident=True)
    return seconds, attention_spread(model.spreads, seconds)


@pytest.fixture(scope="module")
def excerpt() -> list[dict[str, str]]:
    with EXCERPT.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def errors(rows: list[dict[str, str]]) -> list[float]:
    return [abs(modelled(row)[0] / (float(row["latency_ms"]) * 1e-3) - 1) for row in rows]


def test_products_are_near_the_measured_ones(excerpt: list[dict[str, str]]) -> None:
    products = [row for row in excerpt if row["operation"] == "gemm"]
    large = [row for row in products if int(row["m"]) >= 16]
    small = [row for row in products if int(row["m"]) < 16]
    assert len(large) > 70
    assert len(small) > 20
    assert statistics.median(errors(large)) <= 0.12
    assert statistics.median(errors(small)) <= 0.20


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_attention_is_near_the_measured_one(excerpt: list[dict[str, str]], phase: str) -> None:
    rows = [row for row in excerpt if row["operation"] == phase]
    assert len(rows) == 80
    assert statistics.median(errors(rows)) <= 0.20


def test_intervals_hold_about_nine_of_ten(excerpt: list[dict[str, str]]) -> None:
    inside = []
    for row in excerpt:
        seconds, spread = modelled(row)
        measured = float(row["latency_ms"]) * 1e-3
        inside.append(spread.low * seconds <= measured <= spread.high * seconds)
    # 280 points: nine tenths, and three standard deviations of a sample of this size below.
    assert sum(inside) / len(inside) > 0.845


def test_the_excerpt_is_of_the_held_half(excerpt: list[dict[str, str]]) -> None:
    for row in excerpt:
        names = ("n", "k") if row["operation"] == "gemm" else ("heads", "kv_heads", "head_dim")
        assert part_of(*(int(row[name]) for name in names)) is not Part.FIT


def test_the_stated_errors_meet_the_targets() -> None:
    products = {name: each for name, each in RESULTS.items() if " gemm " in name}
    attentions = {name: each for name, each in RESULTS.items() if " attention" in name}
    assert len(products) == 4
    assert len(attentions) == 4
    for found in products.values():
        assert found["held"]["m >= 16"]["median"] <= 0.12
        assert found["held"]["m < 16"]["median"] <= 0.20
    for found in attentions.values():
        assert found["held"]["median"] <= 0.20


def stated(model: Any, name: str) -> None:
    found = RESULTS[name]
    assert {key: asdict(spread) for key, spread in model.spreads.items()} == found["by class"]
    for field, value in found["parameters"].items():
        if field == "compute_share" and isinstance(value, dict):
            assert {str(k): v for k, v in model.fit.compute_share.items()} == value
        elif field not in ("tiles", "splits"):
            assert getattr(model.fit, field) == value


def test_parameters_and_errors_are_those_of_the_results() -> None:
    for gpu, model in GPUS.items():
        for dtype, gemm in model.gemm.items():
            stated(gemm, f"{gpu} gemm {dtype}")
    for dtype, size in KV.items():
        stated(fitted.H100_SXM.prefill[size], f"h100 prefill attention, {dtype} KV")
        stated(fitted.H100_SXM.decode[size], f"h100 decode attention, {dtype} KV")
    scaled = {key: asdict(spread) for key, spread in fitted.SCALED.items()}
    assert scaled == RESULTS["scaled"]["by class"]


def test_the_page_states_the_errors_of_the_results() -> None:
    page = (ROOT / "docs" / "efficiency.md").read_text(encoding="utf-8")
    rows = [
        held
        for name, each in RESULTS.items()
        if " gemm " in name or " attention" in name
        for held in ([each["held"]] if "points" in each["held"] else each["held"].values())
    ]
    assert len(rows) == 12
    for row in rows:
        median, p90, bias = (100 * row[name] for name in ("median", "p90", "bias"))
        stated = f"| {row['points']:,} | {median:.1f} % | {p90:.1f} % | {bias:+.1f} % |"
        assert stated in page, stated


def test_the_halves_share_no_matrix_and_are_about_equal() -> None:
    parts = [part_of(n, k) for n in range(1024, 20_000, 512) for k in range(1024, 20_000, 512)]
    share = {part: parts.count(part) / len(parts) for part in Part}
    assert share[Part.FIT] == pytest.approx(0.5, abs=0.05)
    assert share[Part.CHECK] == pytest.approx(0.25, abs=0.05)


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables are not beside the checkout")
def test_the_whole_a100_table_gives_the_stated_errors() -> None:
    found: dict[bool, list[float]] = {True: [], False: []}
    for point in gemm_points(MEASURED / "a100-gemm.parquet", "bfloat16", 2):
        if point.part is not Part.FIT:
            shape = point.shape
            seconds, _ = gemm_modelled(fitted.A100_SXM, "bfloat16", shape.m, shape.n, shape.k)
            found[shape.m >= 16].append(abs(seconds / point.seconds - 1))
    held = RESULTS["a100 gemm bfloat16"]["held"]
    assert statistics.median(found[True]) == pytest.approx(held["m >= 16"]["median"], abs=1e-4)
    assert statistics.median(found[False]) == pytest.approx(held["m < 16"]["median"], abs=1e-4)


def test_the_search_finds_a_known_minimum() -> None:
    def banana(x: Any) -> float:
        return float(100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2)

    point, value = minimum(banana, [-1.2, 1.0], step=0.5, evaluations=600)
    assert value < 1e-6
    assert point == pytest.approx([1, 1], abs=1e-2)
