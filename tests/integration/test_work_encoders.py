"""Encoders and encoder-decoders: FLOPs against torch's counter, bytes against real weights and caches.

`FlopCounterMode` sees the matrix products and convolutions that really run; of attention what its mask lets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from flop_truth import CACHE
from shape_truth import check_shapes
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, EncoderDecoderCache

from phaseprof.hooks.inputs import encoded_tokens, source_is_new, source_of
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, Source, count
from phaseprof.work.kv import cache_bytes, read_layout, with_layout
from phaseprof.work.walk import model_cost

aten = torch.ops.aten
BATCH, LENGTH = 2, 23

_BERT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
_DISTIL: dict[str, Any] = {
    "vocab_size": 97,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
}
_MODERN: dict[str, Any] = _BERT | {
    "num_hidden_layers": 3,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_WHISPER: dict[str, Any] = _BART | {
    "max_source_positions": LENGTH,
    "max_target_positions": 40,
    "num_mel_bins": 8,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_MOONSHINE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
}
Shapes = dict[str, tuple[int, ...]]
_PIXELS: Shapes = {"pixel_values": (BATCH, 3, 24, 24)}
_IDS: Shapes = {"input_ids": (BATCH, LENGTH)}
_MEL: Shapes = {"input_features": (BATCH, 8, 2 * LENGTH)}
_SOUND: Shapes = {"input_values": (BATCH, 60_000)}

#: name -> (class, its config, the config's fields, shapes of its inputs)
ENCODERS: dict[str, tuple[str, str, dict[str, Any], Shapes]] = {
    "bert": ("BertModel", "BertConfig", _BERT, _IDS),
    "bert, no pooler": ("BertForTokenClassification", "BertConfig", _BERT, _IDS),
    "bert, logits": ("BertForMaskedLM", "BertConfig", _BERT, _IDS),
    "bert, classes": ("BertForSequenceClassification", "BertConfig", _BERT, _IDS),
    "roberta": ("RobertaModel", "RobertaConfig", _BERT, _IDS),
    "roberta, logits": ("RobertaForMaskedLM", "RobertaConfig", _BERT, _IDS),
    "roberta, classes": ("RobertaForSequenceClassification", "RobertaConfig", _BERT, _IDS),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", _BERT, _IDS),
    "camembert": ("CamembertModel", "CamembertConfig", _BERT, _IDS),
    "electra": ("ElectraModel", "ElectraConfig", _BERT | {"embedding_size": 16}, _IDS),
    "distilbert": ("DistilBertModel", "DistilBertConfig", _DISTIL, _IDS),
    "distilbert, logits": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL, _IDS),
    "distilbert, classes": ("DistilBertForSequenceClassification", "DistilBertConfig", _DISTIL, _IDS),
    "modernbert, windows": ("ModernBertModel", "ModernBertConfig", _MODERN, _IDS),
    "modernbert, logits": ("ModernBertForMaskedLM", "ModernBertConfig", _MODERN, _IDS),
    "modernbert, classes": ("ModernBertForSequenceClassification", "ModernBertConfig", _MODERN, _IDS),
    "t5": ("T5EncoderModel", "T5Config", _T5, _IDS),
    "umt5": ("UMT5EncoderModel", "UMT5Config", _T5, _IDS),
    "vit": ("ViTModel", "ViTConfig", _VISION, _PIXELS),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", _VISION, _PIXELS),
    "clip, projected": (
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", _VISION | {"projection_dim": 24}, _PIXELS,
    ),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", _VISION, _PIXELS),
}  # fmt: skip

#: name -> (class before the ending, config's fields, shapes of the encoder's inputs)
PAIRS: dict[str, tuple[str, dict[str, Any], Shapes]] = {
    "t5": ("T5", _T5, _IDS),
    "t5, gated, untied": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, _IDS),
    "mt5": ("MT5", _T5, _IDS),
    "umt5": ("UMT5", _T5, _IDS),
    "bart": ("Bart", _BART, _IDS),
    "mbart": ("MBart", _BART, _IDS),
    "m2m100 (NLLB)": ("M2M100", _BART, _IDS),
    "pegasus": ("Pegasus", _BART, _IDS),
    "marian": ("Marian", _BART, _IDS),
    "whisper": ("Whisper", _WHISPER, _MEL),
    "moonshine": ("Moonshine", _MOONSHINE, _SOUND),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Truth:
    """What torch saw: FLOPs by operation."""

    by_operation: dict[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        return sum(self.by_operation.values())


@contextmanager
def counted() -> Iterator[tuple[Truth, Callable[..., Any]]]:
    """Give a function that runs a model under the counter; afterwards the truth is filled in."""
    truth = Truth()

    def sdpa(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
    ) -> int:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        allowed = (allowed.tril() if is_causal else allowed).expand(*q.shape[:3], k.shape[2])
        mask = named.get("attn_mask")
        if mask is not None:
            allowed = allowed & (
                mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
            )
        return 2 * int(allowed.sum()) * int(q.shape[3] + v.shape[3])

    def bmm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        # The angles of rotary embeddings are an outer product, and not what is looked for.
        return 0 if a[2] == 1 else int(2 * a[0] * a[1] * a[2] * b[2])

    sdpa._get_raw = True  # type: ignore[attr-defined]
    mapping = {aten._scaled_dot_product_flash_attention_for_cpu: sdpa, aten.bmm: bmm}

    def run(model: Any, *args: Any, **named: Any) -> Any:
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        with torch.no_grad(), counter:
            out = model(*args, **named)
        for operation, flops in counter.flop_counts["Global"].items():
            truth.by_operation[str(operation)] = truth.by_operation.get(str(operation), 0) + flops
        return out

    yield truth, run


def inputs(shapes: Shapes) -> dict[str, Any]:
    return {
        name: torch.randint(3, 90, shape) if name == "input_ids" else torch.randn(shape)
        for name, shape in shapes.items()
    }


def configured(config_class: str, given: dict[str, Any]) -> Any:
    config = getattr(transformers, config_class)(**given)
    # T5 of transformers 5.0 knows nothing else.
    config._attn_implementation = "sdpa" if SDPA or "T5" not in config_class else "eager"
    return config


#: Whether the attention of T5 may run in sdpa.
SDPA = transformers.T5ForConditionalGeneration._supports_sdpa


def masked_flops(model: Any, query: int) -> int:
    """What eager attention multiplies although its mask lets nothing of it through: pairs of a query with later ones,
    in 3 layers of the decoder of 4 heads of 8."""
    if model.config._attn_implementation != "eager":
        return 0
    return 3 * (query * (query - 1) // 2) * BATCH * 4 * 4 * 8


def encoder(name: str) -> tuple[Any, dict[str, Any]]:
    model_class, config_class, given, shapes = ENCODERS[name]
    if not hasattr(transformers, model_class):
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(configured(config_class, given)).eval()
    return model, inputs(shapes)


def parameter_bytes(model: nn.Module, *, without: tuple[Any, ...] = ()) -> int:
    left_out = {id(p) for module in without for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in left_out)


def lookups(model: nn.Module, tokens: int, *, head: Any = None) -> int:
    """Rows that are looked up, less the tables that they are in; tables of biases are read whole."""
    total = 0
    seen = set() if head is None else {id(head.weight)}
    for path, table in model.named_modules():
        if (
            isinstance(table, nn.Embedding)
            and "relative" not in path
            and id(table.weight) not in seen
        ):
            seen.add(id(table.weight))
            row = table.weight.shape[1] * table.weight.element_size()
            # Sinusoids are no parameters in some models.
            if any(p is table.weight for p in model.parameters()):
                total += tokens * row - table.weight.numel() * table.weight.element_size()
    return total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder(name: str) -> None:
    model, given = encoder(name)
    cost = model_cost(model)
    assert cost.not_covered == ()
    with counted() as (truth, run):
        out = run(model, **given)
    shape = encoded_tokens(out)
    rows, tokens = (BATCH, LENGTH) if shape is None else shape
    assert rows == BATCH
    head = model.get_output_embeddings()
    logits = rows * tokens if cost.head_flops_per_token else 0
    work = count(cost, [Rows(0, tokens, rows)], logits_tokens=logits, layout=None, cached=False)
    assert work.flops == truth.flops
    assert work.weight_bytes == parameter_bytes(model) + lookups(model, rows * tokens, head=head)
    assert cost.parameter_bytes == parameter_bytes(model)
    assert (work.kv_write_bytes, work.kv_held_bytes) == (0, 0)
    # Every layer reads the keys and values of all tokens.
    wide = sum(g.layers * g.kv_heads * (g.qk_head_dim + g.v_head_dim) * 4 for g in cost.attention)
    assert work.kv_read_bytes == rows * tokens * wide


def pair(name: str) -> tuple[Any, dict[str, Any]]:
    family, given, shapes = PAIRS[name]
    torch.manual_seed(0)
    ending = "MTModel" if family == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, f"{family}{ending}")(configured(f"{family}Config", given)).eval()
    return model, inputs(shapes)


def close(ours: int, theirs: int) -> bool:
    """Equal, but where a convolution of a stem may leave its last input unused: then to half a percent."""
    return abs(ours - theirs) <= 0.005 * theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_alone_and_a_decoder_that_reads_it(name: str) -> None:
    model, given = pair(name)
    same: Callable[[int, int], bool] = close if name == "moonshine" else int.__eq__
    cost = model_cost(model)
    assert cost.not_covered == ()
    check_shapes(cost)
    assert cost.parameter_bytes == parameter_bytes(model)
    part = model.get_encoder()
    alone = model_cost(part)
    assert alone.not_covered == ()
    with counted() as (truth, run):
        states = run(part, **given)
    shape = encoded_tokens(states)
    assert shape is not None
    rows, source = shape
    encoded = count(alone, [Rows(0, source, rows)], logits_tokens=0, layout=None, cached=False)
    assert same(encoded.flops, truth.flops)
    assert encoded.weight_bytes == parameter_bytes(part) + lookups(part, rows * source)

    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    crossing = [
        projection
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in ("encoder_attn", "EncDecAttention")
        for projection_name, projection in module.named_children()
        if projection_name in ("k", "v", "k_proj", "v_proj")
    ]
    assert crossing
    past = 0
    for query in (3, 2, 1, 1):
        new = source_is_new(cache)
        call = {"encoder_outputs": states, "decoder_input_ids": torch.randint(3, 90, (rows, query))}
        with counted() as (truth, run):
            out = run(model, **call, **{CACHE: cache}, use_cache=True)
        seen = source_of(call, out, new=new)
        assert seen == Source(tokens=source, projected=past == 0, encoded=False)
        layout = read_layout(cache)
        assert layout is not None and layout.covered
        positions = out.logits.shape[0] * out.logits.shape[1]
        work = count(
            cost, [Rows(past, query, rows)], logits_tokens=positions, layout=layout, source=seen
        )
        assert work.flops == truth.flops - masked_flops(model, query)
        # The decoder and the head; what projects the source only in the first pass.
        skipped = () if past == 0 else tuple(crossing)
        reads = parameter_bytes(model.get_decoder(), without=skipped)
        head = model.get_output_embeddings()
        if all(p is not head.weight for p in model.get_decoder().parameters()):
            reads += head.weight.numel() * head.weight.element_size()
        assert work.weight_bytes == reads + lookups(model.get_decoder(), rows * query, head=head)
        own = cache_bytes(cache.self_attention_cache)
        crossed = cache_bytes(cache.cross_attention_cache)
        assert work.kv_held_bytes == work.kv_allocated_bytes == own + crossed
        assert work.kv_read_bytes == own + crossed
        assert work.kv_write_bytes == own * query // (past + query) + (crossed if past == 0 else 0)
        # Before a cache was seen, the same follows from the weights.
        guessed = count(
            cost, [Rows(past, query, rows)], logits_tokens=positions, layout=None, source=seen
        )
        assert guessed == work
        past += query
    assert layout is not None
    assert with_layout(cost, layout) == cost


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_pass_that_encodes_its_source_by_itself(name: str) -> None:
    model, given = pair(name)
    cost = model_cost(model)
    call = {**given, "decoder_input_ids": torch.randint(3, 90, (BATCH, 5))}
    with counted() as (truth, run):
        out = run(model, **call, use_cache=False)
    seen = source_of(call, out, new=source_is_new(None))
    assert seen == Source(tokens=LENGTH, projected=True, encoded=True)
    work = count(
        cost, [Rows(0, 5, BATCH)], logits_tokens=5 * BATCH, layout=None, cached=False, source=seen
    )
    assert work.flops == truth.flops - masked_flops(model, 5)
    # Two stacks that read each for itself; the decoder's tokens are looked up in the head, which is read whole.
    encoder_part, decoder_part = model.get_encoder(), model.get_decoder()
    reads = parameter_bytes(encoder_part) + lookups(encoder_part, BATCH * LENGTH)
    reads += parameter_bytes(decoder_part)
    reads += lookups(decoder_part, BATCH * 5, head=model.get_output_embeddings())
    assert model.get_output_embeddings().weight is decoder_part.get_input_embeddings().weight
    assert work.weight_bytes == reads
    assert (work.kv_write_bytes, work.kv_held_bytes) == (0, 0)


def test_a_bare_encoder_decoder_has_no_head() -> None:
    model = transformers.BartModel(configured("BartConfig", _BART)).eval()
    cost = model_cost(model)
    assert cost.not_covered == () and cost.head_flops_per_token == 0
    call = {**inputs(_IDS), "decoder_input_ids": torch.randint(3, 90, (BATCH, 4))}
    with counted() as (truth, run):
        out = run(model, **call, use_cache=False)
    seen = source_of(call, out, new=True)
    work = count(cost, [Rows(0, 4, BATCH)], logits_tokens=0, layout=None, cached=False, source=seen)
    assert work.flops == truth.flops


def test_windows_to_both_sides_by_hand() -> None:
    from phaseprof.work.cost import AttentionCost

    # 5 tokens, each with one to either side: 2 + 3 + 3 + 3 + 2 pairs of 2 x 1 x (1 + 1) FLOPs.
    group = AttentionCost(1, 1, 1, 1, 1, 2, 8, causal=False)
    cost = ModelCost(0, 0, (group,), 0, 0, 0, 0, 0, "float32", row_flops=7)
    work = count(cost, [Rows(0, 5, 3)], logits_tokens=0, layout=None, cached=False)
    assert work.flops == 3 * (13 * 4 + 7)


@pytest.mark.parametrize(
    ("model_class", "config_class", "given", "reason"),
    [
        ("BartForSequenceClassification", "BartConfig", _BART, "the head of BartForSequence"),
        ("ViTForImageClassification", "ViTConfig", _VISION, "its tokens are not known"),
        ("LongT5ForConditionalGeneration", "LongT5Config", _T5, "not known (longt5)"),
    ],
)
def test_what_is_not_known_is_refused(
    model_class: str, config_class: str, given: dict[str, Any], reason: str
) -> None:
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**given))
    cost = model_cost(model)
    assert not cost.covered
    assert any(reason in why for why in cost.not_covered)


def test_parameters_of_unknown_use_are_refused() -> None:
    model, _ = encoder("bert")
    model.encoder.layer[0].extra = nn.ParameterDict({"mixing": torch.ones(3)})
    assert any("unknown use: mixing" in why for why in model_cost(model).not_covered)
    model, _ = encoder("bert")
    model.extra = nn.Linear(3, 3)
    assert any("how often it is used" in why for why in model_cost(model).not_covered)
