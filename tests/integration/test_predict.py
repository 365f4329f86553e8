"""`phaseprof predict` as a user runs it, from configs alone; its launches of an eager pass against torch's calls."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from phaseprof.analyzers.efficiency import efficiency_for
from phaseprof.analyzers.steps.step_model import EAGER, Machine, step_time
from phaseprof.cli.boards import find_board
from phaseprof.cli.main import main
from phaseprof.work.count import Rows
from phaseprof.work.walk import model_cost

Captured = pytest.CaptureFixture[str]
#: What the forward pass calls its cache: that depends on the version.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
#: Fields of a public config; the values of Llama-3.1-8B.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
#: Operators that move nothing: another view of the same memory.
VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "transpose",
        "t",
        "expand",
        "unsqueeze",
        "slice",
        "select",
        "permute",
        "alias",
        "detach",
        "squeeze",
        "split",
    ]
)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config.json, of Llama-3.1-8B but for some fields."""

    def write(**fields: Any) -> Path:
        folder = tmp_path / "llama-8b"
        folder.mkdir(exist_ok=True)
        content = {k: v for k, v in {**LLAMA, **fields}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return write


def predicted(capsys: Captured, *arguments: str | Path) -> dict[str, Any]:
    code = main(["predict", *map(str, arguments), "--json"])
    assert code == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def complaint(capsys: Captured, *arguments: str | Path) -> str:
    code = main(["predict", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code in (1, 2)
    assert out == ""
    return err


def test_a_table_of_batches(config: Callable[..., Path], capsys: Captured) -> None:
    code = main(
        ["predict", str(config()), "--device", "h100-sxm", "--batch", "1,16", "--width", "80"]
    )
    out = capsys.readouterr().out
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("llama-8b · 8.03 G parameters · bfloat16 · H100 SXM")
    assert all(len(line) <= 80 for line in lines)
    assert "90 %" in out
    assert "scheduler" in out


def test_json_has_every_figure(config: Callable[..., Path], capsys: Captured) -> None:
    found = predicted(capsys, config(), "--device", "h200", "--batch", "1,64", "--new-tokens", "9")
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["device"]["name"] == "H200 SXM"
    assert [each["batch"] for each in found["predictions"]] == [1, 64]
    for each in found["predictions"]:
        for figure in ("ttft_ms", "tpot_ms", "output_tokens_per_s"):
            assert each[figure]["low"] < each[figure]["value"] < each[figure]["high"]
        decode = each["phases"]["decode"]
        assert decode["passes"] == 8
        ops = decode["step"]["ops"]
        assert sum(op["flops"] for op in ops) == pytest.approx(decode["flops"], rel=0.01)
        head = next(op for op in ops if op["kind"] == "lm_head")
        assert (head["m"], head["n"], head["k"]) == (each["batch"], 128256, 4096)


def test_the_arithmetic_of_each_operation(config: Callable[..., Path], capsys: Captured) -> None:
    code = main(["predict", str(config()), "--device", "h100-sxm", "--explain", "--width", "160"])
    out = capsys.readouterr().out
    assert code == 0
    assert "m 1 n 28,672 k 4,096" in out
    assert "lm head" in out
    assert "b 1 q 512 past 0" in out


def test_narrow_weights_and_keys(config: Callable[..., Path], capsys: Captured) -> None:
    folder = config()
    wide = predicted(capsys, folder, "--device", "h100-sxm")
    narrow = predicted(
        capsys, folder, "--device", "h100-sxm", "--dtype", "fp8", "--kv-dtype", "fp8"
    )
    before, after = (each["predictions"][0] for each in (wide, narrow))
    # All but head and embedding are halved; keys and values as well.
    tables = 2 * 2 * 4096 * 128256
    assert after["memory"]["weights_bytes"] - tables == pytest.approx(
        (before["memory"]["weights_bytes"] - tables) / 2, rel=1e-3
    )
    assert after["memory"]["kv_bytes"] * 2 == before["memory"]["kv_bytes"]
    assert after["tpot_ms"]["value"] < before["tpot_ms"]["value"]
    assert after["ttft_ms"]["value"] < before["ttft_ms"]["value"]


def test_a_quantized_checkpoint_has_its_format(
    config: Callable[..., Path], capsys: Captured
) -> None:
    folder = config(quantization_config={"quant_method": "gptq", "bits": 4})
    assert predicted(capsys, folder, "--device", "l40s")["model"]["weights"] == "int4"
    folder = config(quantization_config={"quant_method": "of its own"})
    assert "Name the nearest format with --dtype" in complaint(capsys, folder, "--device", "l40s")


def test_ranks_share_weights_and_talk(config: Callable[..., Path], capsys: Captured) -> None:
    found = predicted(capsys, config(), "--device", "h100-sxm", "--tp", "4")
    assert found["device"]["link"] == "NVLink 4"
    (each,) = found["predictions"]
    assert each["memory"]["weights_bytes"] == pytest.approx(16.06e9 / 4, rel=0.001)
    ops = each["phases"]["decode"]["step"]["ops"]
    reduced = next(op for op in ops if op["what"] == "all-reduce")
    assert reduced["calls"] == 65


def test_a_mixture_of_experts(config: Callable[..., Path], capsys: Captured) -> None:
    folder = config(
        model_type="qwen3_moe",
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        head_dim=32,
        vocab_size=1000,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        intermediate_size=512,
    )
    found = predicted(capsys, folder, "--device", "h100-sxm", "--batch", "4", "--tp", "2")
    ops = found["predictions"][0]["phases"]["decode"]["step"]["ops"]
    assert [op["kind"] for op in ops if op["groups"] and op["groups"] > 1] == ["experts"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "h100"), "h100-pcie or h100-sxm"),
        (("--device", "h300-sxm"), "Did you mean"),
        (("--device", "h100-sxm", "--batch", "0"), "--batch 0 is less than 1"),
        (("--device", "h100-sxm", "--dtype", "int3"), "unknown dtype 'int3'"),
        (("--device", "h100-sxm", "--kv-dtype", "int3"), "unknown dtype of the KV cache 'int3'"),
        (("--device", "h100-sxm", "--dtype", "float32"), "--dtype bfloat16 or float16"),
        (("--device", "h100-sxm", "--tp", "3"), "cannot be shared out evenly among 3 ranks"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    arguments: tuple[str, ...], said: str, config: Callable[..., Path], capsys: Captured
) -> None:
    assert said in complaint(capsys, config(), *arguments)


def test_models_that_are_not_there(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ("--device", "h100-sxm")
    assert "There is no file or folder" in complaint(capsys, tmp_path / "none", *device)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "hf download owner/none config.json" in complaint(capsys, "owner/none", *device)
    assert "no model is named" in complaint(capsys, *device)


def test_a_model_of_the_local_cache(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, config: Callable[..., Path]
) -> None:
    """As the hub's client lays it out."""
    root = tmp_path / "models--owner--small"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123")
    (config(num_hidden_layers=2) / "config.json").rename(snapshot / "config.json")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    found = predicted(capsys, "owner/small", "--device", "h100-sxm")
    assert found["model"]["name"] == "owner/small"


def test_models_that_are_not_covered(config: Callable[..., Path], capsys: Captured) -> None:
    folder = config(
        model_type="t5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, hidden_size=None
    )
    assert "encoder" in complaint(capsys, folder, "--device", "h100-sxm")


def test_all_devices_are_listed(capsys: Captured) -> None:
    assert main(["predict", "--device", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"h100-sxm", "h200-sxm", "a100-sxm-80gb", "mi300x", "this"} <= set(names)
    for name in names[:-1]:
        assert find_board(name).name == name


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def test_an_eager_layer_launches_what_torch_calls() -> None:
    """In bfloat16, where norms compute in float32."""

    def calls(layers: int) -> tuple[int, int]:
        shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
        model = LlamaForCausalLM(LlamaConfig(**shape, **sizes)).eval().to(torch.bfloat16)
        kept = {CACHE: DynamicCache(config=model.config)}
        with torch.no_grad():
            model(input_ids=torch.ones(2, 9, dtype=torch.long), **kept)
            with _Calls() as counted:
                model(input_ids=torch.ones(2, 1, dtype=torch.long), **kept)
        ran = sum(number for name, number in counted.count.items() if name not in VIEWS)
        board = find_board("h100-sxm")
        roofs = board.roofs["bfloat16"]
        efficiency = efficiency_for(roofs, board.device)
        machine = Machine(efficiency, roofs, EAGER, "bfloat16", "bfloat16")
        cost, rows = model_cost(model), (Rows(9, 1, 2),)
        step = step_time(cost, (), rows, machine=machine, logits_tokens=2)
        return ran, step.launches

    one, three = calls(1), calls(3)
    ran, modelled = ((after - before) / 2 for before, after in zip(one, three, strict=True))
    assert modelled == pytest.approx(ran, rel=0.1)
    assert three[1] == pytest.approx(three[0], rel=0.15)
