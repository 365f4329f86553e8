"""Where the roofs cross for a batch, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import COST, roofs

from phaseprof.analyzers.sweeping.sweep_roofs import decode_roofs, prefill_ridge
from phaseprof.work.cost import ExpertsCost

# The stand-in reads its 0.2 GB of weights in 2 ms at 100 GB/s. A token is 0.1 GFLOP, and 2 x 8 x (64 + 64) x 4 layers =
# 8,192 FLOPs for each key that it attends to; a token in the cache is 4 x 4,096 = 16,384 bytes.


def test_the_ridge_and_the_knee_by_hand() -> None:
    found = decode_roofs(COST, roofs(), 98)
    assert found is not None
    # 99 keys: 100,811,008 FLOPs are 0.100811008 ms; 99 keys read and one written: 1,638,400 bytes are 0.016384 ms.
    assert found.weights_ms == pytest.approx(2.0)
    assert found.compute_ms == pytest.approx(0.100811008)
    assert found.kv_ms == pytest.approx(0.016384)
    assert found.ridge == pytest.approx(2.0 / (0.100811008 - 0.016384), rel=1e-6)
    assert found.knee == pytest.approx(2.0 / 0.100811008)


def test_long_contexts_never_reach_the_compute_roof() -> None:
    # 2,002 x 16,384 bytes are 0.32800768 ms a sequence, 0.1 GFLOP and 2,001 keys 0.116392192 ms.
    found = decode_roofs(COST, roofs(), 2_000)
    assert found is not None
    assert found.ridge is None
    assert found.kv_ms == pytest.approx(0.32800768)
    assert found.compute_ms == pytest.approx(0.116392192)
    assert found.knee == pytest.approx(2.0 / 0.32800768)


def test_a_device_that_computes_slower_than_it_reads_crosses_at_once() -> None:
    # 0.1 GFLOP at 10 GFLOP/s are 10 ms, the weights 2 ms.
    found = decode_roofs(COST, roofs(flops_per_s=10e9), 10)
    assert found is not None
    assert found.ridge == 1.0


def test_experts_that_more_tokens_reach_move_the_ridge() -> None:
    # 8 experts of 25 MB in the place of a part of the weights, of which a token takes one: 25 MFLOP.
    experts = ExpertsCost(1, 8, 1, 25_000_000, 25_000_000)
    cost = replace(
        COST,
        attention=(),
        experts=(experts,),
        linear_flops_per_token=65_000_000,
        body_weight_bytes=0,
    )
    found = decode_roofs(cost, roofs(), 10)
    assert found is not None
    # All are read: 200 MB and 20 MB of the head.
    assert found.weights_ms == pytest.approx(2.2)
    # 0.1 ms a token against E (1 - (7/8)^b) experts: at batch 21 they are 7.5 of 8, 2.08 ms, and 2.1 ms of computing;
    # at batch 20 7.45, 2.06 ms, and 2.0 ms.
    assert found.ridge is not None
    assert 20 < found.ridge < 21


def test_prefill_crosses_where_its_tokens_weigh_as_much_as_the_weights() -> None:
    ridge = prefill_ridge(replace(COST, attention=(), head_flops_per_token=0), roofs())
    # 0.09 GFLOP a token against 2 ms.
    assert ridge == pytest.approx(2.0 / 0.09, rel=1e-6)


def test_a_model_that_is_not_covered_has_no_roofs() -> None:
    cost = replace(COST, not_covered=("something",))
    assert decode_roofs(cost, roofs(), 10) is None
    assert prefill_ridge(cost, roofs()) is None
    assert decode_roofs(COST, replace(roofs(), flops_per_s=0.0), 10) is None
