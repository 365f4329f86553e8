"""What the matrices of a model have to add up to, by the model itself."""

from __future__ import annotations

from phaseprof.work.cost import ModelCost


def check_shapes(cost: ModelCost, *, without_shape: int = 0) -> None:
    """Check that the shapes of a model say the same as its sums.

    Args:
        cost: Of the model.
        without_shape: FLOPs of a token that belong to no matrix.
    """
    head = [matrix for matrix in cost.matmuls if matrix.role == "lm_head"]
    body = [matrix for matrix in cost.matmuls if matrix.role != "lm_head"]
    assert body
    flops, head_flops = (
        sum(2 * matrix.inputs * matrix.outputs * matrix.count for matrix in matrices)
        for matrices in (body, head)
    )
    assert flops == cost.linear_flops_per_token - without_shape
    assert head_flops == cost.head_flops_per_token
    # Norms and vectors are all else that a pass reads whole.
    stored = sum(matrix.weight_bytes * matrix.count for matrix in body)
    assert 0.7 * cost.body_weight_bytes < stored <= cost.body_weight_bytes
    assert sum(matrix.weight_bytes * matrix.count for matrix in head) == cost.head_weight_bytes
    assert cost.hidden_size > 0
    assert len({matrix.outputs for matrix in body}) > 1
    assert ModelCost.from_json(cost.to_json()) == cost
