"""Models with packed weights: their bytes against the storages that the layers hold, their FLOPs against the same model
unpacked, and real generate calls of them under a session.

Layers of quanto, torchao, bitsandbytes, torch's dynamic quantization and transformers (GGUF, FP8, MXFP4) are the real
ones. GPTQ, AWQ, HQQ and compressed-tensors are not installed: their layers are stood in for by modules with the same
class name, the same tensors under the same names, and a forward that unpacks them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.analyzers.report import build_report
from phaseprof.cli.render.stream import render_for
from phaseprof.work.modules import Kind, kind_of
from phaseprof.work.packed import packed_experts, packed_matrix, packed_table
from phaseprof.work.walk import model_cost

#: The fixture that runs a function under a session.
Record = Callable[[Callable[[], Any]], Any]


def has(module: str) -> bool:
    """Whether this transformers has a module, and what that needs to be imported."""
    try:
        importlib.import_module(f"transformers.integrations.{module}")
    except ImportError:
        return False
    return True


needs_gguf = pytest.mark.skipif(not has("gguf.utils"), reason="transformers keeps no GGUF blocks")
needs_fp8 = pytest.mark.skipif(not has("finegrained_fp8"), reason="FP8Linear needs triton here")
Tensors = list[torch.Tensor]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The packages warn about each other as they are imported and as they quantize."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put another layer in the place of every linear layer but the head."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            model.set_submodule(path, make(module))


# How each format is made, and the tensors that one layer of it holds.


def quanto(qtype: str) -> LlamaForCausalLM:
    with quiet():
        from optimum.quanto import freeze, qtypes, quantize

        model = llama(torch.bfloat16)
        quantize(model, weights=qtypes[qtype], exclude="lm_head")
        freeze(model)
    return model


#: Not in the environment itself: there it would speak up in every test.
TORCHAO = Path(sys.prefix) / "torchao"


def of_quanto(layer: Any) -> Tensors:
    weight = layer.weight
    data = weight._data if type(weight._data) is torch.Tensor else weight._data._data
    shift = [weight._shift] if hasattr(weight, "_shift") else []
    return [data, weight._scale, *shift]


def torchao(config: str) -> LlamaForCausalLM:
    if not TORCHAO.is_dir():
        pytest.skip("`make test` installs torchao beside the environment")
    if str(TORCHAO) not in sys.path:
        sys.path.append(str(TORCHAO))
    with quiet():
        import torchao.quantization

        model = llama(torch.bfloat16)
        torchao.quantization.quantize_(
            model,
            getattr(torchao.quantization, config)(),
            lambda m, p: type(m) is nn.Linear and p != "lm_head",
        )
    return model


def of_torchao(layer: Any) -> Tensors:
    return [layer.weight.qdata, layer.weight.scale, layer.weight.zero_point]


def bitsandbytes(bits: int) -> LlamaForCausalLM:
    with quiet():
        import bitsandbytes.nn as bnb

    def make(linear: nn.Linear) -> nn.Module:
        sizes = (linear.in_features, linear.out_features)
        layer: nn.Module
        if bits == 8:
            layer = bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        else:
            layer = bnb.Linear4bit(
                *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    model = llama(torch.bfloat16)
    with quiet():
        replace_linears(model, make)
    return model


def of_8bit(layer: Any) -> Tensors:
    return [
        layer.weight.data,
        layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB,
    ]


def of_4bit(layer: Any) -> Tensors:
    state = layer.weight.quant_state
    return [
        layer.weight.data,
        state.absmax,
        state.code,
        state.offset,
        state.state2.absmax,
        state.state2.code,
    ]


def with_gguf() -> LlamaForCausalLM:
    from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

    def blocks(weight: torch.Tensor) -> torch.Tensor:
        packed = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_1)
        return torch.from_numpy(np.array(packed))

    class UnpackingLinear(GgufLinear):  # type: ignore[misc]
        """Its way for many rows, for few as well: the kernel for these is a package of its own."""

        def forward(self, x: torch.Tensor) -> Any:
            rows = self._unpack_matmul(x.reshape(-1, self.in_features))
            return rows.reshape(*x.shape[:-1], self.out_features)

    def make(linear: nn.Linear) -> nn.Module:
        layer = UnpackingLinear(
            linear.in_features, linear.out_features, gguf.GGMLQuantizationType.Q4_1.value
        )
        layer.weight.data = blocks(linear.weight.data)
        return layer

    model = llama(torch.float32)
    replace_linears(model, make)
    table = model.model.embed_tokens
    packed = GgufEmbedding(*table.weight.shape, gguf.GGMLQuantizationType.Q4_1.value)
    packed.weight.data = blocks(table.weight.data)
    model.model.embed_tokens = packed
    return model


def of_weight(layer: Any) -> Tensors:
    return [layer.weight.data]


class WQLinear_GEMM(nn.Module):
    """AWQ's layer: eight 4-bit weights in each int32, with zeros and scales for each group of 64 inputs."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    GROUP = 64

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.w_bit = linear.in_features, linear.out_features, 4
        groups = linear.weight.float().reshape(linear.out_features, -1, self.GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        zero = torch.round(-low / scale)
        codes = torch.clamp(torch.round(groups / scale) + zero, 0, 15).to(torch.int32)
        self.register_buffer("qweight", self.pack(codes.reshape(linear.out_features, -1).T))
        self.register_buffer("qzeros", self.pack(zero.squeeze(-1).T.to(torch.int32)))
        self.register_buffer("scales", scale.squeeze(-1).T.to(linear.weight.dtype))
        self.bias = None

    @staticmethod
    def pack(codes: torch.Tensor) -> torch.Tensor:
        eights = codes.reshape(codes.shape[0], -1, 8)
        return (eights << (4 * torch.arange(8, dtype=torch.int32))).sum(-1).to(torch.int32)

    @staticmethod
    def unpack(packed: torch.Tensor) -> torch.Tensor:
        codes = (packed.unsqueeze(-1) >> (4 * torch.arange(8, dtype=torch.int32))) & 15
        return codes.reshape(packed.shape[0], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = self.unpack(self.qzeros).repeat_interleave(self.GROUP, 0)
        scales = self.scales.repeat_interleave(self.GROUP, 0)
        return x @ ((self.unpack(self.qweight) - zeros).to(x.dtype) * scales)


class TorchQuantLinear(WQLinear_GEMM):
    """GPTQ's layer, which knows the group of each input besides, and older names of its widths."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.infeatures, self.outfeatures = self.in_features, self.out_features
        del self.in_features, self.out_features
        self.register_buffer(
            "g_idx", torch.arange(self.infeatures, dtype=torch.int32) // self.GROUP
        )


class HQQLinear(nn.Module):
    """HQQ's layer: the packed data are a parameter, scales and zeros lie in a plain dict."""

    W_q: nn.Parameter
    meta: dict[str, Any]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            None,
        )
        inner = WQLinear_GEMM(linear)
        self.W_q = nn.Parameter(inner.qweight, requires_grad=False)
        self.meta = {
            "nbits": 4,
            "scale": inner.scales,
            "zero": inner.qzeros,
            "shape": linear.weight.shape,
        }

    def forward(self, x: torch.Tensor) -> Any:
        zeros = WQLinear_GEMM.unpack(self.meta["zero"]).repeat_interleave(64, 0)
        weight = (WQLinear_GEMM.unpack(self.W_q) - zeros).to(x.dtype) * self.meta[
            "scale"
        ].repeat_interleave(64, 0)
        return x @ weight


class CompressedLinear(nn.Linear):
    """compressed-tensors' layer: an int8 weight with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        codes = torch.round(linear.weight / scale).to(torch.int8)
        del self.weight
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.weight_scale).T


def stand_in(kind: type[nn.Module]) -> LlamaForCausalLM:
    model = llama(torch.bfloat16)
    replace_linears(model, kind)
    return model


def of_awq(layer: Any) -> Tensors:
    return [layer.qweight, layer.qzeros, layer.scales]


def of_gptq(layer: Any) -> Tensors:
    return [layer.qweight, layer.qzeros, layer.scales, layer.g_idx]


def of_hqq(layer: Any) -> Tensors:
    return [layer.W_q.data, layer.meta["scale"], layer.meta["zero"]]


def of_compressed(layer: Any) -> Tensors:
    return [layer.weight.data, layer.weight_scale.data]


#: Name: the model, the tensors of a packed layer, the dtype that it computes in, bits that a weight takes at most.
FORMATS: dict[str, tuple[Callable[[], LlamaForCausalLM], Callable[[Any], Tensors], str, float]] = {
    "quanto int8": (lambda: quanto("qint8"), of_quanto, "bfloat16", 8.5),
    "quanto int4": (lambda: quanto("qint4"), of_quanto, "bfloat16", 5),
    "torchao int8": (lambda: torchao("Int8WeightOnlyConfig"), of_torchao, "bfloat16", 9),
    "torchao int8 x int8": (
        lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
        of_torchao,
        "int8",
        9,
    ),
    "bitsandbytes 8 bit": (lambda: bitsandbytes(8), of_8bit, "int8", 9),
    "bitsandbytes 4 bit": (lambda: bitsandbytes(4), of_4bit, "bfloat16", 8),
    "GGUF Q4_1": (with_gguf, of_weight, "float32", 5),
    "AWQ": (lambda: stand_in(WQLinear_GEMM), of_awq, "bfloat16", 5),
    "GPTQ": (lambda: stand_in(TorchQuantLinear), of_gptq, "bfloat16", 5.5),
    "HQQ": (lambda: stand_in(HQQLinear), of_hqq, "bfloat16", 5),
    "compressed-tensors": (lambda: stand_in(CompressedLinear), of_compressed, "bfloat16", 8.5),
}


def storages(tensors: Tensors) -> dict[int, int]:
    """Bytes of the storages behind tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def packed_layers(model: nn.Module) -> list[nn.Module]:
    return [m for p, m in model.named_modules() if p.rpartition(".")[2].endswith("_proj")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_gguf) if "GGUF" in n else n for n in FORMATS]
)
def test_a_packed_model_counts_what_it_holds_and_computes_what_it_did(
    name: str, record: Record
) -> None:
    make, tensors_of, dtype, most_bits = FORMATS[name]
    model = make()
    plain = model_cost(llama(torch.bfloat16))
    layers = packed_layers(model)
    assert len(layers) == 14
    packed = storages([t for layer in layers for t in tensors_of(layer)])
    norms = storages([m.weight.data for m in model.modules() if "RMSNorm" in type(m).__name__])
    table = storages([model.model.embed_tokens.weight.data])
    head = storages([model.lm_head.weight.data])

    cost = model_cost(model)
    assert cost.not_covered == ()
    assert cost.body_weight_bytes == sum(packed.values()) + sum(norms.values())
    assert cost.head_weight_bytes == sum(head.values())
    assert cost.lookup_bytes_per_token == sum(table.values()) // 256
    assert cost.parameter_bytes == sum((packed | norms | table | head).values())
    assert sum(size for _, size in cost.stored) == cost.parameter_bytes
    # The matrices are as large as they were, whatever they are packed into.
    assert cost.linear_flops_per_token == plain.linear_flops_per_token
    assert cost.head_flops_per_token == plain.head_flops_per_token
    assert cost.parameters == plain.parameters
    assert cost.dtype == dtype
    assert 8 * sum(packed.values()) / (plain.linear_flops_per_token / 2) <= most_bits

    prompt = torch.arange(3, 12).unsqueeze(0)

    def generate() -> Any:
        with quiet():
            return model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)

    expected = generate()
    recorded = record(generate)
    assert torch.equal(recorded.output, expected)
    rows = recorded.passes("phase", "weight_bytes", "flops", "dtype", "kv_write_bytes")
    assert [row[0] for row in rows] == ["prefill", "decode", "decode", "decode"]
    # After its first pass LLM.int8 holds the same scales elsewhere.
    assert model_cost(model) == cost
    step = cost.body_weight_bytes + cost.head_weight_bytes
    assert [row[1] for row in rows] == [
        step + n * cost.lookup_bytes_per_token for n in (9, 1, 1, 1)
    ]
    assert {row[3] for row in rows} == {dtype}
    # 2 layers, keys and values of 2 heads of 16: as wide as the activations.
    width = model.model.norm.weight.element_size()
    assert rows[1][4] == 2 * 2 * 2 * 16 * width
    unpacked = record(
        lambda: llama(torch.bfloat16).generate(prompt, max_new_tokens=4, eos_token_id=None)
    )
    assert [row[0] for row in unpacked.passes("flops")] == [row[2] for row in rows]


@needs_gguf
def test_the_bytes_of_keys_and_values_follow_the_activations_before_a_cache_was_seen() -> None:
    """2 heads of 16, keys and values, in one layer."""
    assert model_cost(quanto("qint4")).attention[0].kv_bytes_per_token == 64 * 2
    assert model_cost(with_gguf()).attention[0].kv_bytes_per_token == 64 * 4


def test_dynamic_quantization_counts_a_byte_for_each_weight() -> None:
    plain = llama(torch.float32)
    with quiet():
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    cost, expected = model_cost(model), model_cost(llama(torch.float32))
    assert (cost.not_covered, cost.dtype) == ((), "int8")
    assert cost.linear_flops_per_token == expected.linear_flops_per_token
    norms = sum(m.weight.nbytes for m in model.modules() if "RMSNorm" in type(m).__name__)
    assert cost.body_weight_bytes == expected.linear_flops_per_token // 2 + norms
    assert cost.head_weight_bytes == expected.head_flops_per_token // 2
    assert cost.parameters == expected.parameters


@needs_fp8
def test_fp8_layers_count_their_scales_and_compute_in_fp8() -> None:
    """The layer of transformers for fine-grained FP8; its kernels need a GPU, so that it is not run here."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    model = llama(torch.bfloat16)
    replace_linears(
        model,
        lambda linear: FP8Linear(linear.in_features, linear.out_features, block_size=(32, 32)),
    )
    cost, plain = model_cost(model), model_cost(llama(torch.bfloat16))
    layers = [m for m in model.modules() if isinstance(m, FP8Linear)]
    held = storages([t for m in layers for t in (m.weight.data, m.weight_scale_inv.data)])
    norms = sum(m.weight.nbytes for m in model.modules() if "RMSNorm" in type(m).__name__)
    assert cost.not_covered == ()
    assert cost.body_weight_bytes == sum(held.values()) + norms
    assert cost.dtype == "float8_e4m3fn"
    assert (cost.linear_flops_per_token, cost.parameters) == (
        plain.linear_flops_per_token,
        plain.parameters,
    )
    assert cost.stored[0][0] == "float8_e4m3fn"


@needs_gguf
def test_experts_in_blocks_count_by_what_is_stored() -> None:
    from transformers import GptOssConfig
    from transformers.integrations.gguf.utils import GgufExperts
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    q4 = gguf.GGMLQuantizationType.Q4_1.value
    blocks = packed_experts(GgufExperts(4, 64, 32, q4, q4, nn.SiLU()))
    assert blocks is not None
    # 32 weights of Q4_1 take 20 bytes.
    assert (blocks.rows, blocks.columns) == (4, 3 * 64 * 32)
    assert sum(part.bytes for part in blocks.stored) == 4 * 3 * 64 * 32 * 20 // 32

    config = GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=32)
    experts = Mxfp4GptOssExperts(config)
    packed = packed_experts(experts)
    assert packed is not None
    assert (packed.rows, packed.columns) == (4, 3 * 64 * 32)
    assert sum(part.bytes for part in packed.stored) == sum(
        storages(list(experts.parameters())).values()
    )
    assert packed.bias_elements == 4 * (2 * 32 + 64)


def test_a_layer_of_unknown_packing_is_not_taken_for_one() -> None:
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2048, 1, dtype=torch.uint8), requires_grad=False)
    assert packed_matrix(layer) is None

    class ElsewhereLinear(nn.Module):
        """Its data lie where nobody sees them: 8 bytes cannot hold 4096 weights."""

        def __init__(self) -> None:
            super().__init__()
            self.in_features = self.out_features = 64
            self.register_buffer("handle", torch.zeros(8, dtype=torch.uint8))

    assert packed_matrix(ElsewhereLinear()) is None

    class ScratchLinear(ElsewhereLinear):
        """A kernel's workspace is no weight."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(64 * 32, dtype=torch.uint8))
            self.register_buffer("workspace", torch.zeros(4096, dtype=torch.uint8))

    packed = packed_matrix(ScratchLinear())
    assert packed is not None
    assert sum(part.bytes for part in packed.stored) == 64 * 32 + 8


def test_buffers_of_other_modules_are_no_weights() -> None:
    model = llama(torch.float32)
    before = model_cost(model)
    model.model.norm.register_buffer("running", torch.zeros(1000))
    assert model_cost(model) == before
    assert kind_of(model.model.rotary_emb) is Kind.EMPTY
    assert packed_table(model.model.embed_tokens) is None


@needs_gguf
def test_the_report_says_how_many_bits_a_weight_takes(record: Record) -> None:
    model = with_gguf()
    prompt = torch.arange(3, 12).unsqueeze(0)

    def bits(model: LlamaForCausalLM) -> tuple[float | None, str]:
        trace = record(
            lambda: model.generate(prompt, max_new_tokens=4, eos_token_id=None, do_sample=False)
        ).trace
        report = build_report(trace)
        return report.facts.weight_bits, render_for(report, io.StringIO(), width=100)

    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    plain = llama(torch.float32)
    weights = sum(p.numel() for p in plain.parameters())
    found, text = bits(model)
    assert found == pytest.approx(8 * held / weights)
    assert f"float32, weights of {8 * held / weights:.1f} bits" in text
    assert bits(plain)[0] is None
