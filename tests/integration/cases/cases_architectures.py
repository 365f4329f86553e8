"""Cases: encoders, encoder-decoders, speech, images, states instead of a cache, experts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from flop_truth import CACHE
from hf_case import Case, Pass, Served, decode, encode, mixed, prefill, verify
from hf_models import TEXT, drafting, generate, ids, tiny
from transformers import GenerationMixin

#: An image token, and the tokens around images.
IMAGE, BEGIN, END = 120, 121, 122
SOURCE = ids(1, 9) % 60 + 3


def made(maker: Callable[[], Any]) -> Callable[[], Any]:
    """Made once, with random weights that are the same each time."""

    @functools.cache
    def make() -> Any:
        torch.manual_seed(7)
        return maker().eval()

    return make


@made
def t5() -> Any:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return drafting(transformers.T5ForConditionalGeneration(config), 2)


@made
def bart() -> Any:
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=64,
        max_position_embeddings=64,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


@made
def whisper() -> Any:
    """Hears 100 frames at a time; two of them make a position of the encoder."""
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=200,
        max_source_positions=50,
        max_target_positions=40,
        num_mel_bins=8,
        decoder_start_token_id=1,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.no_timestamps_token_id = 99
    return model


def audio(frames: int, rows: int = 1) -> torch.Tensor:
    return torch.sin(torch.arange(rows * 8 * frames) * 0.37).reshape(rows, 8, frames)


def transcribe(model: Any, frames: int, rows: int = 1, **kwargs: Any) -> Any:
    """Three tokens for each segment, with timestamps, which long audio needs."""
    torch.manual_seed(3)
    features = audio(frames, rows)
    return model.generate(
        features,
        attention_mask=torch.ones(rows, frames, dtype=torch.long),
        return_timestamps=True,
        max_new_tokens=3,
        min_new_tokens=3,
        **kwargs,
    )


def encoder_alone(model: Any, given: torch.Tensor = SOURCE) -> Any:
    with torch.no_grad():
        return model.get_encoder()(given).last_hidden_state


def encoded_before(model: Any) -> Any:
    """The encoder's output is computed once, and handed to generate."""
    with torch.no_grad():
        states = model.get_encoder()(SOURCE)
    return generate(model, None, encoder_outputs=states, max_new_tokens=2)


def decodes_by_hand(model: Any) -> Any:
    """A prompt of two decoder tokens, then one; the encoder runs within the first pass."""
    with torch.no_grad():
        first = model(SOURCE, decoder_input_ids=SOURCE[:, :2], use_cache=True)
        cache = dict.get(first, CACHE)
        states = (first.encoder_last_hidden_state,)
        second = model(encoder_outputs=states, decoder_input_ids=SOURCE[:, :1], **{CACHE: cache})
    return first.logits, second.logits


@functools.cache
def t5_twins() -> Any:
    torch.manual_seed(7)
    config = t5().config
    twin = transformers.T5ForConditionalGeneration(config).eval()
    twin.load_state_dict(t5().state_dict())
    return t5(), drafting(twin, 2)


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
}
VL_TEXT: dict[str, Any] = {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 128}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


@made
def llava() -> Any:
    """Four patches and a class token; the four are the image's tokens."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**VL_TEXT),
        vision_config=transformers.CLIPVisionConfig(patch_size=8, projection_dim=32, **VISION),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


@made
def qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**VL_TEXT, "rope_parameters": MROPE},
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=123,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


@made
def smol_vlm() -> Any:
    """Sixteen patches, shuffled to four tokens."""
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**VL_TEXT),
        vision_config={"patch_size": 4, **VISION},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


@made
def mllama() -> Any:
    """One layer attends to the image across; the image has one token in the prompt."""
    config = transformers.MllamaConfig(
        text_config={
            **TEXT,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "max_num_tiles": 1,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
        image_token_index=IMAGE,
    )
    return transformers.MllamaForConditionalGeneration(config)


@made
def pali_gemma() -> Any:
    """Attends to its prompt in both directions."""
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(head_dim=8, **VL_TEXT),
        vision_config=transformers.SiglipVisionConfig(patch_size=8, **VISION),
        image_token_index=IMAGE,
        projection_dim=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def image(rows: int = 1) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 3 * 256).reshape(rows, 3, 16, 16)


def with_image(rows: int = 1) -> dict[str, torch.Tensor]:
    """Eight tokens of which four are an image's."""
    tokens = torch.tensor([[1, 5, IMAGE, IMAGE, IMAGE, IMAGE, 6, 7]] * rows)
    return {
        "input_ids": tokens,
        "pixel_values": image(rows),
        "attention_mask": torch.ones_like(tokens),
    }


def qwen_image() -> dict[str, torch.Tensor]:
    """Sixteen patches of 8 x 8 pixels in two frames, merged to four tokens of eight."""
    tokens = torch.tensor([[1, BEGIN, IMAGE, IMAGE, IMAGE, IMAGE, END, 7]])
    given = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.linspace(-1, 1, 16 * 384).reshape(16, 384),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    takes = inspect.signature(transformers.Qwen2VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" in takes:  # not in transformers 5.0
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
    return given


def smol_image() -> dict[str, torch.Tensor]:
    return {**with_image(), "pixel_values": image()[None]}


def mllama_image() -> dict[str, torch.Tensor]:
    tokens = torch.tensor([[1, IMAGE, 5, 6, 7]])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": image()[None, None],
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 5, 1, 1, dtype=torch.long),
    }


def looks(model: Any, inputs: Callable[[], dict[str, torch.Tensor]]) -> Any:
    given = inputs()
    return generate(model, given.pop("input_ids"), max_new_tokens=3, **given)


def looks_by_hand(model: Any, inputs: Callable[[], dict[str, torch.Tensor]]) -> Any:
    with torch.no_grad():
        return model(**inputs()).logits


def image_features(model: Any) -> Any:
    with torch.no_grad():
        model.get_image_features(pixel_values=image())


def steps_by_hand(model: Any) -> Any:
    """A prompt of nine tokens, and two more on the state or cache that the model returns."""
    takes_positions = "cache_position" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        out = model(ids(1, 9), use_cache=True)
        logits = [out.logits]
        for position in (9, 10):
            names = (CACHE, "past_key_values", "cache_params")
            name = next(name for name in names if dict.get(out, name) is not None)
            kept = {name: dict.get(out, name)}
            if takes_positions:  # transformers 5.0
                kept["cache_position"] = torch.tensor([position])
            out = model(ids(1, 1), **kept, use_cache=True)
            logits.append(out.logits)
    return logits


def bert(model: str) -> Callable[[], Any]:
    @functools.cache
    def make() -> Any:
        torch.manual_seed(7)
        config = transformers.BertConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=128,
        )
        return getattr(transformers, model)(config).eval()

    return make


def call(model: Any, rows: int = 1) -> Any:
    with torch.no_grad():
        return model(ids(rows, 9))[0]


mamba = tiny("MambaForCausalLM", "MambaConfig", state_size=4)
mamba2 = tiny(
    "Mamba2ForCausalLM",
    "Mamba2Config",
    state_size=4,
    num_heads=8,
    head_dim=8,
    n_groups=1,
    chunk_size=4,
)
HYBRIDS: dict[str, Callable[[], Any]] = {
    "Jamba": tiny(
        "JambaForCausalLM",
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
    ),
    "Falcon-H1": tiny(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=4,
        head_dim=8,
    ),
    "Bamba": tiny(
        "BambaForCausalLM",
        "BambaConfig",
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "Qwen3-Next": tiny(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        head_dim=8,
    ),
    "LFM2": tiny(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        layer_types=["conv", "full_attention"],
        block_multiple_of=8,
    ),
}
#: Of these, transformers 5.0 makes a cache under generate alone.
NO_CACHE_IN_50 = ("Falcon-H1", "Bamba")
recurrent_gemma = tiny(
    "RecurrentGemmaForCausalLM",
    "RecurrentGemmaConfig",
    num_hidden_layers=3,
    lru_width=32,
    attention_window_size=8,
)
rwkv = tiny("RwkvForCausalLM", "RwkvConfig", attention_hidden_size=32)
mixtral = tiny("MixtralForCausalLM", "MixtralConfig", num_local_experts=4)
gemma2 = tiny("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=4)

STEPS = [prefill(9), decode(1), decode(1)]
DECODER = [prefill(1), decode(1), decode(1)]


def case(
    name: str,
    says: str,
    run: Callable[[Any], Any],
    passes: Sequence[Pass],
    *,
    group: str,
    make: Callable[[], Any],
    **more: Any,
) -> Case:
    return Case(name, group, says, make, run, passes, **more)


def translates(**kwargs: Any) -> Callable[[Any], Any]:
    return partial(generate, input_ids=SOURCE, max_new_tokens=3, **kwargs)


ENCODER_DECODERS = [
    case(
        "T5",
        "The encoder encodes; the decoder's prompt is its start token.",
        translates(),
        [encode(9), *DECODER],
        requests=[Served(1, 3)],
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "T5, beams over a batch",
        "The source is encoded once a row; the decoder runs once a beam.",
        partial(generate, input_ids=SOURCE.repeat(2, 1), max_new_tokens=2, num_beams=2),
        [encode(18), prefill(4), decode(4)],
        requests=[Served(1, 4, sequences=2)] * 2,
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "T5, a decoder prompt",
        "Decoder tokens that the caller passes are the prompt.",
        translates(decoder_input_ids=torch.tensor([[0, 5, 6]])),
        [encode(9), prefill(3), decode(1), decode(1)],
        requests=[Served(3, 3)],
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "T5, no cache",
        "The decoder's tokens are computed again, the encoder's are not.",
        translates(use_cache=False),
        [encode(9), prefill(1), mixed(1, 1), mixed(2, 1)],
        requests=[Served(1, 3)],
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "T5, static cache",
        "The decoder's part of a pair of caches tells how long it is.",
        translates(cache_implementation="static"),
        [encode(9), *DECODER],
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "T5, assisted by its twin",
        "The draft model has an encoder of its own.",
        lambda twins: generate(
            twins[0], SOURCE, max_new_tokens=3, min_new_tokens=None, assistant_model=twins[1]
        ),
        [
            encode(9),
            encode(9),
            prefill(1, role="draft"),
            decode(1, role="draft"),
            verify(2, 2, prompt=1),
        ],
        requests=[Served(1, 3)],
        group="encoder-decoders",
        make=t5_twins,
    ),
    case(
        "T5, encoded before",
        "An encoder that is called alone encodes; generate then begins with the decoder.",
        encoded_before,
        [encode(9), prefill(1), decode(1)],
        requests=[Served(1, 2)],
        group="encoder-decoders",
        make=t5,
    ),
    case(
        "BART",
        "The same for another encoder-decoder.",
        translates(),
        [encode(9), *DECODER],
        group="encoder-decoders",
        make=bart,
    ),
    case(
        "BART's encoder alone",
        "It encodes, although the configuration is that of the whole.",
        encoder_alone,
        [encode(9)],
        requests=[],
        group="encoder-decoders",
        make=bart,
    ),
    case(
        "BART by hand",
        "An encoder that runs within the decoder's pass is a part of it.",
        decodes_by_hand,
        [prefill(2), decode(1)],
        requests=[Served(2, 2, finish="unknown")],
        group="encoder-decoders",
        make=bart,
    ),
]

SPEECH = [
    case(
        "Whisper",
        "The tokens of the encoder are its positions, half of the frames; the decoder is told not to give timestamps.",
        lambda m: generate(m, audio(100), max_new_tokens=3),
        [encode(50), prefill(2), decode(1), decode(1)],
        requests=[Served(2, 3)],
        group="speech",
        make=whisper,
    ),
    case(
        "Whisper, long audio",
        "Each segment is a request with a decoder prompt of its own.",
        partial(transcribe, frames=250),
        [encode(50), *DECODER] * 3,
        requests=[Served(1, 3)] * 3,
        group="speech",
        make=whisper,
    ),
    case(
        "Whisper, long audio, a batch",
        "A segment of a batch is a request a row.",
        partial(transcribe, frames=150, rows=2),
        [encode(100), prefill(2), decode(2), decode(2)] * 2,
        requests=[Served(1, 3)] * 4,
        group="speech",
        make=whisper,
    ),
    case(
        "Whisper, a segment tried again",
        "Each try of a segment at another temperature is a request.",
        partial(
            transcribe,
            frames=150,
            temperature=(0.0, 0.4),
            logprob_threshold=100.0,
            compression_ratio_threshold=None,
        ),
        [encode(50), *DECODER] * 4,
        requests=[Served(1, 3)] * 4,
        group="speech",
        make=whisper,
    ),
    case(
        "Whisper, conditioned on what was said",
        "The text of the segment before is a part of the decoder's prompt.",
        partial(transcribe, frames=150, condition_on_prev_tokens=True),
        [encode(50), *DECODER, encode(50), prefill(3 + 1), decode(1), decode(1)],
        requests=[Served(1, 3), Served(4, 3)],
        group="speech",
        make=whisper,
    ),
    case(
        "Whisper's encoder alone",
        "It encodes.",
        partial(encoder_alone, given=audio(100)),
        [encode(50)],
        requests=[],
        group="speech",
        make=whisper,
    ),
]


def tower(tokens: int) -> list[Pass]:
    """generate runs a tower before its first pass; in transformers 5.0 it runs within that."""
    apart = hasattr(GenerationMixin, "_prepare_multimodal_encoder_kwargs_for_generation")
    return [encode(tokens)] if apart else []


IMAGES = [
    case(
        "Llava",
        "The tower encodes (with its class token); the image's tokens are prompt tokens.",
        partial(looks, inputs=with_image),
        [*tower(5), prefill(8), decode(1), decode(1)],
        requests=[Served(8, 3)],
        group="images",
        make=llava,
    ),
    case(
        "Llava, two rows",
        "An image a row.",
        partial(looks, inputs=partial(with_image, rows=2)),
        [*tower(10), prefill(16), decode(2), decode(2)],
        requests=[Served(8, 3)] * 2,
        group="images",
        make=llava,
    ),
    case(
        "Llava by hand",
        "A tower that runs within a pass is a part of it.",
        partial(looks_by_hand, inputs=with_image),
        [prefill(8)],
        group="images",
        make=llava,
    ),
    case(
        "Llava's tower alone",
        "It encodes.",
        image_features,
        [encode(5)],
        requests=[],
        group="images",
        make=llava,
    ),
    case(
        "Qwen2-VL",
        "The patches of all images are one row of its tower.",
        partial(looks, inputs=qwen_image),
        [*tower(16), prefill(8), decode(1), decode(1)],
        requests=[Served(8, 3)],
        group="images",
        make=qwen2_vl,
    ),
    case(
        "SmolVLM",
        "The tower encodes sixteen patches, of which four tokens are made.",
        partial(looks, inputs=smol_image),
        [*tower(16), prefill(8), decode(1), decode(1)],
        group="images",
        make=smol_vlm,
    ),
    case(
        "Mllama",
        "Its tower runs within the first pass, whose tokens are the text's.",
        partial(looks, inputs=mllama_image),
        [prefill(5), decode(1), decode(1)],
        requests=[Served(5, 3)],
        group="images",
        make=mllama,
    ),
    case(
        "PaliGemma",
        "A prompt that is attended to in both directions is prefill all the same.",
        partial(looks, inputs=with_image),
        [*tower(4), prefill(8), decode(1), decode(1)],
        requests=[Served(8, 3)],
        group="images",
        make=pali_gemma,
    ),
]


def generated(name: str, says: str, make: Callable[[], Any], **more: Any) -> Case:
    run = partial(generate, input_ids=ids(1, 9), max_new_tokens=3)
    requests = [Served(9, 3)]
    return case(name, says, run, STEPS, requests=requests, group="states", make=make, **more)


def stepped(name: str, says: str, make: Callable[[], Any], **more: Any) -> Case:
    requests = [Served(9, 3, finish="unknown")]
    name = f"{name} by hand"
    return case(
        name, says, steps_by_hand, STEPS, requests=requests, group="states", make=make, **more
    )


STATES = [
    generated("Mamba", "A state has no length: what went in is counted.", mamba),
    stepped("Mamba", "By hand, too.", mamba),
    generated("Mamba-2", "A state has no length: what went in is counted.", mamba2),
    stepped("Mamba-2", "By hand, too.", mamba2),
    *[
        generated(name, "Layers with a state beside layers with a cache.", make)
        for name, make in HYBRIDS.items()
    ],
    *[
        stepped(
            name,
            "Layers with a state beside layers with a cache.",
            make,
            since=("5.24", "it returns no cache") if name in NO_CACHE_IN_50 else None,
        )
        for name, make in HYBRIDS.items()
    ],
    generated("RecurrentGemma", "A state that the model itself keeps.", recurrent_gemma),
    generated("RWKV", "A state of plain tensors.", rwkv),
    generated("Gemma 2", "Windows in every other layer.", gemma2),
    generated("Mixtral", "Experts change no count of tokens.", mixtral),
]

ENCODERS = [
    case(
        "BERT",
        "An encoder encodes, and serves no request.",
        call,
        [encode(9)],
        requests=[],
        group="encoders",
        make=bert("BertModel"),
    ),
    case(
        "BERT, masked words",
        "So it does with a head for words.",
        partial(call, rows=2),
        [encode(18)],
        requests=[],
        group="encoders",
        make=bert("BertForMaskedLM"),
    ),
    case(
        "BERT, classes",
        "And with a head for classes.",
        call,
        [encode(9)],
        requests=[],
        group="encoders",
        make=bert("BertForSequenceClassification"),
    ),
]

CASES = ENCODER_DECODERS + SPEECH + IMAGES + STATES + ENCODERS
