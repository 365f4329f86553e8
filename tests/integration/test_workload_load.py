"""Loading and building models: real folders and configs, and a hub that refuses as the real one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from phaseprof.errors import MissingPackageError, ModelError
from phaseprof.workload.load import choose_placement, load_model, random_model

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = choose_placement("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model: Any = random_model(TINY, CPU, name="tiny", seed=3)
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    saved = weights(random_model(TINY, CPU, name="tiny", seed=3))
    loaded = load_model(str(folder), CPU)
    assert not loaded.training
    found = weights(loaded)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_dtype_and_attention_are_those_asked_for(folder: Path) -> None:
    model: Any = load_model(str(folder), choose_placement("cpu", "bf16", "eager"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_random_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = weights(random_model(TINY, CPU, name="tiny", seed=1))
    assert torch.equal(torch.rand(3), expected)
    again = weights(random_model(TINY, CPU, name="tiny", seed=1))
    other = weights(random_model(TINY, CPU, name="tiny", seed=2))
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[matrix], again[matrix])
    assert not torch.equal(first[matrix], other[matrix])


def test_a_random_model_is_called_one() -> None:
    model: Any = random_model(TINY, CPU, name="tiny")
    assert model.name_or_path == "tiny (random weights)"
    assert model.config.name_or_path == "tiny (random weights)"


def test_an_encoder_decoder_is_built_as_one() -> None:
    config = {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2}
    config |= {"num_layers": 1, "vocab_size": 50}
    model: Any = random_model(config, CPU, name="t5")
    assert type(model).__name__ == "T5ForConditionalGeneration"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "nosuch"}, "does not know the model type 'nosuch'"),
        ({"model_type": "vit"}, "is not a model that generates text"),
        ({"hidden_act": "nosuch"}, "cannot be loaded"),
        ({"hidden_size": "many"}, "cannot be loaded"),
    ],
)
def test_a_config_that_describes_nothing_we_can_run(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        random_model({**TINY, **change}, CPU, name="mine")
    assert "mine" in caught.value.message
    assert "\n" not in caught.value.message


def test_truncated_weights_are_said(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(folder), CPU)
    assert "\n" not in caught.value.message


def test_missing_weights_are_said(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(folder), CPU)


def test_a_folder_of_an_unknown_kind_is_said(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "nosuch"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="does not know the model type 'nosuch'"):
        load_model(str(folder), CPU)


def test_code_in_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "nosuch"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "own.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(ModelError, match="brings code of its own"):
        load_model(str(folder), CPU)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="There is no folder"):
        load_model(name, CPU)


def test_a_file_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file, not a model folder"):
        load_model(str(folder / "config.json"), CPU)


def test_attention_that_is_not_installed_is_said(folder: Path) -> None:
    with pytest.raises((MissingPackageError, ModelError), match="cannot be loaded") as caught:
        load_model(str(folder), choose_placement("cpu", None, "flash_attention_2"))
    assert "\n" not in caught.value.message


class _RefusingHub(BaseHTTPRequestHandler):
    """Answers as the hub does, by the model's name: the header is what its client goes by."""

    answers: ClassVar[dict[str, tuple[int, str]]] = {
        "owner/missing": (401, "RepoNotFound"),
        "owner/gated": (403, "GatedRepo"),
        "owner/no-config": (404, "EntryNotFound"),
    }

    def do_HEAD(self) -> None:
        for name, (status, code) in self.answers.items():
            if self.path.startswith(f"/{name}/"):
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_error(500)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _RefusingHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(names: list[str], endpoint: str, home: Path, offline: str = "0") -> list[str]:
    """What `load_model` says to each name, in a fresh process: the hub's client reads its settings when imported."""
    code = (
        "import sys\n"
        "from phaseprof.errors import PhaseprofError\n"
        "from phaseprof.workload.load import choose_placement, load_model\n"
        "for name in sys.argv[1:]:\n"
        "    try: load_model(name, choose_placement('cpu'))\n"
        "    except PhaseprofError as error: print(type(error).__name__, error.message)\n"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline}
    env.pop("HF_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_what_the_hub_refuses_is_said(hub: str, tmp_path: Path) -> None:
    names = ["owner/missing", "owner/gated", "owner/no-config", "not a name"]
    assert ask(names, hub, tmp_path) == [
        "ModelError There is no model owner/missing on the hub, or it is private.",
        "ModelError owner/gated is gated: its owner has to grant access.",
        "ModelError owner/no-config lacks a file that transformers needs (config.json or weights).",
        "ModelError 'not a name' is neither a folder nor a name of a model on the hub.",
    ]


def test_without_network_and_offline_the_cache_has_to_do(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    assert ask(["owner/model"], nobody, tmp_path) == [
        "ModelError owner/model is not in the local cache, and the hub cannot be reached."
    ]
    assert ask(["owner/model"], nobody, tmp_path, offline="1") == [
        "ModelError owner/model is not in the local cache, and HF_HUB_OFFLINE is set."
    ]
