"""Count a decoder that no closed form covers: by running its code on tensors without data, and fitting what it counts.

The model is copied with a stand-in for each tensor (shape, dtype and device, no memory; `FakeTensorMode`), and the copy
runs six short passes under a counter of matrix products, with the formulas of `torch.utils.flop_counter`. Three of them
give the coefficients of ``flops = a q + b q (past + q) + e past``; the other three have to agree with them to half a
percent, or nothing is given. The counter sees rectangles of pairs; as in any other model, causal pairs are counted.

Such a pass takes half a second for 32 layers. Where all layers are alike, or repeat after a few, the copy therefore
runs with one such period and with two, and the rest is what the second one added; a third has to add the same.

Nothing of the model itself runs, moves or changes: hooks are left out of the copy, the modes that catch its operations
belong to this thread, and each operation looks at a deadline. Python code of the model does run; what it does to things
outside of its modules, it does.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from phaseprof.work.cache_layers import stored_tensors
from phaseprof.work.cost import AttentionCost, ModelCost, StateCost
from phaseprof.work.encoders import output_head
from phaseprof.work.kv import read_layout
from phaseprof.work.layers import Layers
from phaseprof.work.modules import class_name, matrix_of, own_parameters
from phaseprof.work.ops import OpKind
from phaseprof.work.roles import Found, hidden_size, matmuls_of
from phaseprof.work.weights import Weights

if TYPE_CHECKING:
    from torch import nn

#: Of this thread's time. A model that takes longer is not worth it: it is time of the workload.
LIMIT_S = 1.0
#: How far a pass that was not used for the fit may be off.
TOLERANCE = 0.005
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
#: Settings that limit what a query reaches: passes as short as these would not show it.
_REACHES = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
#: Kernels of scaled dot product attention.
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Uncountable(Exception):
    """The counter cannot tell either; the message says why, in one clause."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """FLOPs of a pass of one sequence: ``a q + b q (past + q) + e past``."""

    per_token: Fraction
    per_pair: Fraction
    per_past: Fraction

    def at(self, past: int, query: int) -> Fraction:
        return (
            self.per_token * query + self.per_pair * query * (past + query) + self.per_past * past
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """What a cache holds of one sequence."""

    bytes_per_token: int
    state_bytes: int


def counted_cost(model: nn.Module, refused: ModelCost, *, limit_s: float = LIMIT_S) -> ModelCost:
    """Count a decoder by torch's counter, where its structure could not be.

    Args:
        model: A model that generates, with a cache or without. It is only read.
        refused: What the walk over its modules gave: not covered, with its reasons.
        limit_s: When to give up.

    Returns:
        A cost with ``counted`` set; `refused`, with one more reason, if that does not work either, and as it is for a
        model that is no decoder.
    """
    if refused.covered or not _is_decoder(model):
        return refused
    try:
        return _counted(model, time.thread_time() + limit_s)
    except Uncountable as reason:
        why = str(reason)
    except Exception as error:
        # Whatever the model's code does on tensors without data is no failure of the workload.
        why = f"its code does not run on tensors without data ({type(error).__name__})"
    return replace(refused, not_covered=(*refused.not_covered, f"torch's counter: {why}"))


def _is_decoder(model: Any) -> bool:
    generates = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    return bool(
        callable(generates)
        and generates()
        and not getattr(config, "is_encoder_decoder", False)
        and "input_ids" in inspect.signature(model.forward).parameters
    )


def _counted(model: Any, deadline: float) -> ModelCost:
    weights = Weights.of(model)
    odd = next(weights.odd(), None)
    if odd is not None:
        raise Uncountable(odd)
    _check(model)
    runner = _Runner(model, deadline)
    head = output_head(model)
    matrix = None if head is None else matrix_of(head)
    if head is not None and matrix is None:
        raise Uncountable("its output head is no plain linear layer")
    head_flops = 0 if matrix is None else matrix.flops_per_token
    with _quiet(), runner.without_data():
        fit, held = _fit(runner, head_flops)
    return _as_cost(fit, held, weights, model, head, head_flops)


def _check(model: Any) -> None:
    import torch

    if any("forward" in vars(module) for module in model.modules()):
        raise Uncountable("a module with a forward that was put in its place")
    if any("expert" in class_name(module).lower() for module in model.modules()):
        raise Uncountable("experts, of which it cannot see whose weights are read")
    for name in _REACHES:
        value = getattr(model.config, name, None)
        if isinstance(value, int | tuple | list) and value:
            raise Uncountable(f"a {name} in its config, whose effect short passes do not show")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise Uncountable("it was first seen in a graph that is being captured")


def _fit(runner: _Runner, head_flops: int) -> tuple[_Fit, _Held | None]:
    """Fit three passes and check three others."""
    short, long = runner.pass_flops(0, 8, head_flops), runner.pass_flops(0, 24, head_flops)
    per_pair = Fraction(long - 3 * short, 384)
    per_token = Fraction(short, 8) - 8 * per_pair
    held = runner.held()
    if held is None:
        fit = _Fit(per_token, per_pair, Fraction(0))
        _agree(fit, 0, 130, runner.pass_flops(0, 130, head_flops))
        _agree(fit, 0, 1, runner.pass_flops(0, 1, head_flops))
        return fit, None
    step = runner.pass_flops(8, 1, head_flops)
    fit = _Fit(per_token, per_pair, (step - per_token - 9 * per_pair) / 8)
    _agree(fit, 24, 5, runner.pass_flops(24, 5, head_flops))
    _agree(fit, 0, 130, Fraction(runner.pass_flops(0, 130, head_flops, rows=2), 2))
    _agree(fit, 130, 1, Fraction(runner.pass_flops(130, 1, head_flops, rows=2), 2))
    return fit, held


def _agree(fit: _Fit, past: int, query: int, seen: Fraction | int) -> None:
    expected = fit.at(past, query)
    if min(fit.per_token, fit.per_pair) < 0 or not expected:
        raise Uncountable("its FLOPs do not grow with its tokens and pairs")
    off = abs(expected - seen) / expected
    if off > Fraction(TOLERANCE):
        raise Uncountable(
            f"{query} tokens after {past} take {float(off):.1%} less or more than its other passes say"
        )


def _as_cost(
    fit: _Fit,
    held: _Held | None,
    weights: Weights,
    model: Any,
    head: Any,
    head_flops: int,
) -> ModelCost:
    table = model.get_input_embeddings()
    tables = weights.of_modules([table])
    heads = weights.of_modules([head] if head is not None else [])
    row = weights.row_bytes(table)
    # All pairs in one layer: a multiply-add for the score and one for the value of each.
    heads_of_one = round(fit.per_pair / 4)
    attention = AttentionCost(
        layers=1,
        query_heads=heads_of_one,
        kv_heads=heads_of_one,
        qk_head_dim=1,
        v_head_dim=1,
        window_tokens=None,
        kv_bytes_per_token=0 if held is None else held.bytes_per_token,
        expand_flops_per_token=max(round(fit.per_past), 0),
    )
    state_bytes = 0 if held is None else held.state_bytes
    matrix = None if head is None else matrix_of(head)
    shapes = [] if matrix is None else [Found(OpKind.LM_HEAD.value, matrix, head)]
    text = getattr(model.config, "get_text_config", None)
    return ModelCost(
        linear_flops_per_token=round(fit.per_token),
        head_flops_per_token=head_flops,
        attention=(attention,) if heads_of_one or attention.kv_bytes_per_token else (),
        body_weight_bytes=weights.bytes() - weights.bytes(heads | tables),
        head_weight_bytes=weights.bytes(heads),
        lookup_bytes_per_token=row,
        parameter_bytes=weights.bytes(),
        parameters=weights.elements(),
        dtype=weights.dtype(),
        tied_lookup_bytes_per_token=row if tables <= heads else 0,
        states=(StateCost(1, 0, state_bytes),) if state_bytes else (),
        counted=True,
        matmuls=matmuls_of(shapes, weights, set()),
        hidden_size=hidden_size(text() if callable(text) else model.config, table),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Let torch not log what its stand-ins cannot do: it is told in our words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


class _Runner:
    """Runs a copy of a model without data, and counts.

    Args:
        model: To copy.
        deadline: Of `time.thread_time`.
    """

    def __init__(self, model: Any, deadline: float) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._deadline = deadline
        self._names = inspect.signature(model.forward).parameters
        self._keeps = "logits_to_keep" in self._names
        self._device = next(model.parameters()).device
        self._model = self._copy(model)
        self._layers = Layers.of(self._model)
        #: By depth, past and rows: what passes left for those after them.
        self._caches: dict[tuple[int, int, int], Any] = {}
        self._alike = False

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Every tensor that is made on this thread is a stand-in."""
        import torch

        with torch.no_grad(), self._fakes:
            yield

    def pass_flops(self, past: int, query: int, head_flops: int, *, rows: int = 1) -> int:
        """FLOPs of a pass of the whole model without its output head, on what an earlier one left."""
        depths = self._layers.depths
        seen = [self._run(depth, past, query, rows) for depth in depths]
        if len(depths) > 1 and not self._alike and past == 0:
            third = self._run(3 * depths[0], past, query, rows)
            if third != 2 * seen[1] - seen[0]:
                raise Uncountable("layers that look alike take different FLOPs")
            self._alike = True
        return self._layers.whole(seen) - rows * (1 if self._keeps else query) * head_flops

    def held(self) -> _Held | None:
        """What the caches of the first pass hold; None without a cache."""
        layouts = []
        for depth in self._layers.depths:
            cache = self._caches.get((depth, 8, 1))
            if cache is None:
                return None
            layout = read_layout(cache)
            if layout is None or not layout.covered:
                raise Uncountable("; ".join(layout.not_covered) if layout else "an empty cache")
            if any(group.window_tokens is not None for group in layout.groups):
                raise Uncountable("a cache with windows, whose effect short passes do not show")
            layouts.append(layout)
        return _Held(
            self._layers.whole([layout.bytes_per_token for layout in layouts]),
            self._layers.whole([layout.state_bytes for layout in layouts]),
        )

    def _run(self, depth: int, past: int, query: int, rows: int) -> int:
        import torch

        self._layers.keep(depth)
        named: dict[str, Any] = {}
        if "use_cache" in self._names:
            named["use_cache"] = True
        if self._keeps:
            named["logits_to_keep"] = 1
        if "cache_position" in self._names:
            named["cache_position"] = torch.arange(past, past + query, device=self._device)
        if past:
            name = next((name for name in _CACHE_NAMES if name in self._names), None)
            if name is None:
                raise Uncountable("it gives out a cache and takes none")
            named[name] = self._caches.pop((depth, past, rows))
        ids = torch.zeros(rows, query, dtype=torch.long, device=self._device)
        counting = _counting(self._deadline)
        with counting:
            out = self._model(input_ids=ids, **named)
        if counting.unknown:
            raise Uncountable(f"it runs {counting.unknown}, whose FLOPs are not known")
        self._caches[depth, past + query, rows] = _cache_in(out)
        return int(counting.flops)

    def _copy(self, model: Any) -> Any:
        """The model with stand-ins for its tensors; without hooks, and as it runs when it does not learn."""
        memo: dict[int, Any] = {}
        keep: list[Any] = []
        for module in model.modules():
            held = [own_parameters(module), module._buffers, *vars(module).values()]
            for tensor in stored_tensors(held):
                if id(tensor) not in memo:
                    memo[id(tensor)] = self._stand_in(tensor)
                    keep.append(tensor)
            # A cache that generate left on the model is none of its parts.
            memo |= {id(v): None for v in vars(module).values() if hasattr(v, "get_seq_length")}
        clone = copy.deepcopy(model, memo)
        for module in clone.modules():
            for name in _HOOKS:
                if name in vars(module):
                    vars(module)[name].clear()
            vars(module)["training"] = False
        return clone

    def _stand_in(self, tensor: Any) -> Any:
        import torch

        with self._fakes:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(fake, requires_grad=False)
        return fake


def _cache_in(output: Any) -> Any:
    """The cache in a model's output."""
    if isinstance(output, dict):
        given = (dict.get(output, name) for name in _CACHE_NAMES)
        return next((cache for cache in given if cache is not None), None)
    if isinstance(output, tuple):
        return next((item for item in output if hasattr(item, "get_seq_length")), None)
    return None


def _counting(deadline: float) -> Any:
    """A mode of this thread that sums FLOPs of matrix products, convolutions and attention in ``flops``, and names in
    ``unknown`` an operation that is not torch's own."""
    from torch.utils._python_dispatch import TorchDispatchMode

    formulas = _formulas()
    # Operations that do not fall into others.
    whole: set[Any] = set()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.flops = 0
            self.unknown = ""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if time.thread_time() > deadline:
                raise Uncountable("it takes too long")
            named = kwargs or {}
            formula = formulas.get(func._overloadpacket)
            if formula is None and func not in whole and func.namespace != "prim":
                with self:
                    parts = func.decompose(*args, **named)
                if parts is not NotImplemented:
                    return parts
                whole.add(func)
            out = func(*args, **named)
            if formula is not None:
                self.flops += int(formula(*args, **named, out_val=out))
            elif func.namespace not in ("aten", "prim", "prims"):
                self.unknown = self.unknown or f"{func.namespace}::{func._opname}"
            return out

    return Counting()


def _formulas() -> dict[Any, Callable[..., int]]:
    """By operation: those of torch, and those that it lacks."""
    import torch
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        rows, heads, queries, width = query.shape
        return int(2 * rows * heads * queries * key.shape[2] * (width + value.shape[3]))

    def grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
        return int(2 * a.numel() * b.shape[-1])

    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    # Torch has none for the CPU, and stumbles over queries of more heads than keys.
    for name in _ATTENTION:
        if hasattr(aten, name):
            formulas[getattr(aten, name)] = attention
    if hasattr(aten, "_grouped_mm"):
        formulas[aten._grouped_mm] = grouped
    return formulas
