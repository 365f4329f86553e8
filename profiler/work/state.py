"""Layers that keep a state of constant size: state spaces, linear attention with a decay, short convolutions.

Counted in their recurrent form, one token after the other, whatever a kernel does to run many at once. A state matrix
of P x N elements costs 2 FLOPs an element for each time that a token is multiplied into it or it is multiplied with one
(a decay scales it, element by element, and is not counted)::

    Mamba               4 I N           state x decay + (dt x) B^T, and its product with C
    Mamba-2 (SSD)       4 H P N         the same for H heads of P channels
    gated delta rule    6 H d_k d_v     what the state holds for k, the update by the error, and the product with q
    lightning attention 4 H d d         state x decay + k v^T, and its product with q
    convolution         2 C K           C channels, K taps, in front of most of them

docs/work-model.md says where the formulas come from, and what torch's chunked scans compute instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import StateCost
from phaseprof.work.modules import class_name, matrix_of, own_parameters
from phaseprof.work.parts import NotCovered, Part

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A causal convolution of each channel by itself."""

    module: Any
    channels: int
    taps: int

    @property
    def flops_per_token(self) -> int:
        return 2 * self.channels * self.taps

    @property
    def state_bytes(self) -> int:
        return self.channels * self.taps * int(self.module.weight.element_size())


def state_part(module: nn.Module, config: object, layer: int) -> Part | None:
    """Read a layer with a state, by the shapes of its weights. A `phaseprof.work.parts.Reader`.

    Raises:
        NotCovered: If it is one of these kinds, and its weights do not fit together as they should.
    """
    own, children = own_parameters(module), module._modules
    if "rg_lru" in children:
        # Griffin (RecurrentGemma): no cache is handed to a pass, so that nothing shows how much was kept.
        raise NotCovered(
            f"{class_name(module)} keeps its states in its own modules and in no cache"
        )
    if "A_log" in own and "conv1d" in children:
        if "x_proj" in children:
            return _mamba(module)
        return _mamba2(module) if "D" in own else _delta_net(module, own["A_log"].numel(), module)
    gate = children.get("forget_gate")
    if gate is not None and "conv1d" in children and "A_log" in own_parameters(gate):
        return _delta_net(module, own_parameters(gate)["A_log"].numel(), gate)
    if not own and {"conv", "in_proj", "out_proj"} <= children.keys():
        return _short_convolution(module)
    if hasattr(module, "slope_rate") and {"qkv_proj", "out_proj"} <= children.keys():
        return _lightning(module)
    return None


def _mamba(module: Any) -> Part:
    """Mamba (Gu and Dao, arXiv 2312.00752, algorithm 2): a state of I x N."""
    conv = _convolution(module, "conv1d")
    inner, size = (int(n) for n in module.A_log.shape)
    _check(module, conv.channels == inner and _inputs(module, "out_proj") == inner)
    return _part(
        conv, 4 * inner * size, inner * size * module.A_log.element_size(), (module, conv.module)
    )


def _mamba2(module: Any) -> Part:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060, section 3): H heads of P channels, each with a state of P x N."""
    conv = _convolution(module, "conv1d")
    heads, inner = int(module.A_log.numel()), _inputs(module, "out_proj")
    size = int(getattr(module, "ssm_state_size", 0))
    # The convolution runs over x, and over B and C of all groups.
    shared = conv.channels - inner
    _check(module, size > 0 and not inner % heads and shared > 0 and not shared % (2 * size))
    _check(module, _outputs(module, "in_proj") == inner + conv.channels + heads)
    return _part(
        conv, 4 * inner * size, inner * size * module.A_log.element_size(), (module, conv.module)
    )


def _delta_net(module: Any, heads: int, gate: Any) -> Part:
    """Gated delta rule (Yang et al., arXiv 2412.06464, equation 10): H heads, each with a state of d_k x d_v."""
    conv = _convolution(module, "conv1d")
    output = "out_proj" if "out_proj" in module._modules else "o_proj"
    values = _inputs(module, output)
    keys, odd = divmod(conv.channels - values, 2)
    key_dim = int(getattr(module, "head_k_dim", 0) or getattr(module, "head_dim", 0))
    # Keys of fewer heads are repeated for those of the values.
    _check(module, not odd and key_dim > 0 and keys > 0 and not keys % key_dim)
    _check(module, not values % heads and not heads % (keys // key_dim))
    state = key_dim * values
    # The state is kept in float32 whatever the weights are.
    return _part(conv, 6 * state, state * 4, (module, gate, conv.module))


def _short_convolution(module: Any) -> Part | None:
    """LFM2: a gated convolution alone."""
    try:
        conv = _convolution(module, "conv")
    except NotCovered:
        return None
    if _outputs(module, "in_proj") != 3 * conv.channels:
        return None
    return _part(conv, 0, 0, (conv.module,))


def _lightning(module: Any) -> Part:
    """Lightning attention (Qin et al., arXiv 2401.04658; MiniMax-01, arXiv 2501.08313): H heads of d x d."""
    heads, width = int(module.num_attention_heads), _inputs(module, "out_proj")
    _check(module, not width % heads and _outputs(module, "qkv_proj") == 3 * width)
    state = width * (width // heads)
    # Packed, it shows no matrix; what it gives is as wide as activations, mostly 16 bits.
    weight = getattr(module._modules["qkv_proj"], "weight", None)
    element = 2 if weight is None else int(weight.element_size())
    return Part(StateCost(1, 4 * state, state * element), ())


def _part(conv: _Convolution, flops: int, state_bytes: int, accounted: tuple[Any, ...]) -> Part:
    cost = StateCost(
        layers=1,
        flops_per_token=conv.flops_per_token + flops,
        state_bytes=conv.state_bytes + int(state_bytes),
    )
    return Part(cost, tuple(dict.fromkeys(accounted)))


def _convolution(module: Any, name: str) -> _Convolution:
    conv = module._modules[name]
    weight = own_parameters(conv).get("weight")
    shape = () if weight is None else tuple(weight.shape)
    if len(shape) != 3 or shape[1] != 1 or getattr(conv, "groups", None) != shape[0]:
        raise NotCovered(f"{name} of {class_name(module)} is no convolution of single channels")
    return _Convolution(conv, int(shape[0]), int(shape[2]))


def _inputs(module: Any, name: str) -> int:
    matrix = matrix_of(module._modules.get(name))
    if matrix is None:
        raise NotCovered(f"{name} of {class_name(module)} is no plain linear layer")
    return matrix.inputs


def _outputs(module: Any, name: str) -> int:
    matrix = matrix_of(module._modules.get(name))
    if matrix is None:
        raise NotCovered(f"{name} of {class_name(module)} is no plain linear layer")
    return matrix.outputs


def _check(module: object, fits: bool) -> None:
    if not fits:
        raise NotCovered(
            f"the weights of {class_name(module)} do not fit the recurrence of its kind"
        )
