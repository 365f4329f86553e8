"""Real engines of vLLM on the CPU, all in this process, and a way to record what they do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Recorded, make_engine

from phaseprof.session import Session
from phaseprof.trace.reader import open_trace

# Read by vLLM when it is imported, which no test does before this.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

_HERE = Path(__file__).parent
_MISSING = "" if importlib.util.find_spec("vllm") else "vLLM is not installed: make test-vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            # vLLM and what it imports warn as they like.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if _MISSING:
                item.add_marker(pytest.mark.skip(reason=_MISSING))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny Llama; vLLM makes its weights, the same each time."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(llama_folder: Path) -> Any:
    """An engine that computes at most 32 tokens a step, of at most 8 requests. Give each test prompts of its own: it
    keeps prefixes."""
    return make_engine(llama_folder, max_num_batched_tokens=32, max_num_seqs=8)


@pytest.fixture
def record(tmp_path: Path) -> Callable[[Callable[[], Any]], Recorded]:
    """Run a function under a session; give what it returned and its trace."""
    count = iter(range(1000))

    def run(function: Callable[[], Any]) -> Recorded:
        path = tmp_path / f"trace-{next(count)}"
        session = Session(path)
        session.start()
        try:
            output = function()
        finally:
            session.stop()
        return Recorded(output, open_trace(path))

    return run


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `tiny` that a server can serve: a config, and a tokenizer that has one token per letter."""
    import tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("served") / "tiny"
    LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=100,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
