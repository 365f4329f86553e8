"""Device, dtype and attention names: what is filled in, what is refused; and names and configs on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from phaseprof.errors import MissingPackageError, ModelError, UsageError
from phaseprof.workload.load import choose_placement, config_name, one_line, read_config, require


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")],
)
def test_dtypes_have_short_names(spelling: str, dtype: str) -> None:
    assert choose_placement("cpu", spelling).dtype == dtype


def test_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    assert choose_placement("cpu").dtype == "float32"


@pytest.mark.parametrize("name", ["int8", "Float32", "", "float"])
def test_unknown_dtypes_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="Unknown dtype"):
        choose_placement("cpu", name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "", "CPU", "mps"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="Unknown device"):
        choose_placement(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_without_a_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="finds no CUDA device"):
        choose_placement(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_default_is_the_cpu() -> None:
    placement = choose_placement()
    assert (placement.device, placement.dtype) == ("cpu", "float32")


def test_unknown_attention_is_refused_and_hub_kernels_are_not() -> None:
    with pytest.raises(UsageError, match="Unknown attention implementation 'flash'"):
        choose_placement("cpu", attn_implementation="flash")
    kernel = choose_placement("cpu", attn_implementation="kernels-community/flash-attn")
    assert kernel.attn_implementation == "kernels-community/flash-attn"


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # to the import system: not installed
    with pytest.raises(MissingPackageError) as caught:
        require("gguf", extra="demo", purpose="The embedded model")
    assert caught.value.message == (
        "The embedded model needs the package gguf, which is not installed."
    )
    assert caught.value.remedy == 'pip install "phaseprof[demo]"'


def test_config_is_read_by_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert read_config(tmp_path) == {"model_type": "llama"}
    assert read_config(tmp_path / "config.json") == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"), ("[1]", "is not a JSON object"), ("\x00", "is not JSON")],
)
def test_a_config_that_is_no_config_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=said):
        read_config(file)


def test_a_missing_config_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="No file"):
        read_config(tmp_path / "other.json")


def test_random_models_are_called_after_their_config(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-9"
    folder.mkdir()
    assert config_name(folder) == "Llama-9"
    assert config_name(folder / "config.json") == "Llama-9"
    assert config_name(folder / "tiny.json") == "tiny"


def test_one_line_of_an_error() -> None:
    assert one_line(ValueError("\n  first.\nsecond")) == "first"
    assert one_line(ValueError("first:\n  second.\nthird")) == "first: second"
    assert one_line(ValueError("first:")) == "first"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 500))) == 200
