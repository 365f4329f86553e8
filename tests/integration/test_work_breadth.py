"""Published models of more than sixty architectures, by their configs alone: parameters, and the FLOPs of a token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import MODELS, Model
from shape_truth import check_shapes

from phaseprof.work.cost import ModelCost
from phaseprof.work.from_config import load_given
from phaseprof.work.walk import model_cost
from phaseprof.workload.load import Placement, random_model

#: Parameters that multiply no token: lookup tables, decays of states, vectors.
_NO_MATRIX = re.compile(
    r"embed_tokens|embed_in|embed_positions|word_embeddings|wte|wpe|\.embeddings?\.|A_log|bias|sinks"
)
_ROUTED = re.compile(r"(?<!shared_)experts\.")
#: Gemma 3n runs the router of its four streams twice in each layer, and mixes them: FLOPs of a token beside those of
#: its parameters, in all, and those of products of two activations.
_MIXING = 35 * 2 * 4 * 4 * 2048
_AGAIN = {"gemma3n_text": _MIXING + 35 * 2 * 4 * 2048}
_WITHOUT_SHAPE = {"gemma3n_text": _MIXING}


#: The first release that is supported misses some models, and makes others in another way.
FIRST = transformers.__version__.startswith("5.0.")


def config_of(model: Model) -> dict[str, Any]:
    if model.new and FIRST:
        pytest.skip(f"transformers {transformers.__version__} makes no such model of {model.name}")
    # A field that published configs have and that the first release insists on.
    return {"pad_token_id": None} | model.config


def multiplied(model: Any, cost: ModelCost) -> int:
    """FLOPs of one token with the parameters of a model: with those of experts, for the share that is chosen."""
    head = model.get_output_embeddings().weight
    total = int(head.numel())
    for name, parameter in model.named_parameters():
        # Convolutions over time have three axes, and are part of a state.
        convolves = parameter.dim() == 3 and parameter.shape[1] == 1
        if parameter is head or parameter.dim() < 2 or convolves or _NO_MATRIX.search(name):
            continue
        number, chosen = 1, 1
        if _ROUTED.search(name):
            ((number, chosen),) = {(e.experts, e.top_k) for e in cost.experts}
        total += int(parameter.numel()) * chosen // number
    return 2 * total


def off_by(size: str) -> float:
    """Half a unit of the last digit."""
    return 0.5 * 10.0 ** -len(size.partition(".")[2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS, ids=[m.name for m in MODELS])
def test_a_config_is_enough(model: Model, tmp_path: Path) -> None:
    config = config_of(model)
    kind = config["model_type"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    cost = load_given(path).cost
    assert cost.not_covered == ()
    assert cost.encoder is None and not cost.counted
    if isinstance(model.size, int):
        assert cost.parameters == model.size
    else:
        assert cost.parameters / 1e9 == pytest.approx(float(model.size), abs=off_by(model.size))
    check_shapes(cost, without_shape=_WITHOUT_SHAPE.get(kind, 0))

    experts = sum(e.layers * e.top_k * e.expert_flops_per_token for e in cost.experts)
    of_a_token = cost.linear_flops_per_token + cost.head_flops_per_token + experts
    built = random_model(config, Placement("meta", "bfloat16"), name=model.name)
    assert of_a_token == multiplied(built, cost) + _AGAIN.get(kind, 0)
    if model.active is not None:
        idle = sum(
            e.layers * (e.experts - e.top_k) * e.expert_flops_per_token for e in cost.experts
        )
        with_table = cost.parameters - idle / 2
        assert of_a_token / 2e9 * 11 / 12 <= model.active <= with_table / 1e9 * 13 / 12


def test_there_are_more_than_sixty_architectures() -> None:
    assert len({model.config["model_type"] for model in MODELS}) > 60
    assert len({model.name for model in MODELS}) == len(MODELS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("longcat_flash", "attention in several places"),
        ("zaya", "not a plain linear layer"),
        ("moshi", "a sliding window in the config of a model that does not know of one"),
        ("rwkv", "no output projection that is known"),
        ("recurrent_gemma", "keeps its states in its own modules and in no cache"),
        ("zamba", "do not fit the recurrence of its kind"),
        ("zamba2", "several blocks in one layer"),
        ("deepseek_v4", "layers of type heavily_compressed_attention"),
    ],
)
def test_what_no_formula_covers_says_why(kind: str, why: str) -> None:
    if FIRST and kind in ("zaya", "zamba2", "deepseek_v4"):
        pytest.skip(f"transformers {transformers.__version__} makes no model of {kind}")
    cost = model_cost(random_model({"model_type": kind}, Placement("meta", "bfloat16"), name=kind))
    assert any(why in reason for reason in cost.not_covered)
    assert (cost.linear_flops_per_token, cost.matmuls) == (0, ())
    # Its size is known all the same.
    assert cost.parameters > 1e9


@pytest.mark.skipif(FIRST, reason="its code cannot be run without data there")
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_of_no_known_form_is_counted_by_its_code(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    described = {"model_type": "diffllama", "num_hidden_layers": 4}
    path.write_text(json.dumps(described))
    cost = load_given(path).cost
    assert cost.covered and cost.counted
    config = transformers.CONFIG_MAPPING["diffllama"].from_dict(described)
    kv = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    matrices = (
        config.num_hidden_layers
        * config.hidden_size
        * (2 * config.hidden_size + 2 * kv + 3 * config.intermediate_size)
    )
    # Its attention multiplies a little beside.
    assert cost.linear_flops_per_token == pytest.approx(2 * matrices, rel=0.001)
    (head,) = cost.matmuls
    assert (head.role, head.inputs, head.outputs) == (
        "lm_head",
        config.hidden_size,
        config.vocab_size,
    )
    assert cost.hidden_size == config.hidden_size
