"""Steps of vLLM's model runners that no CPU can run: real inputs and outputs, put together by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm_engines import sampling


def begins(name: str, prompt: int, *, past: int = 0, **changes: Any) -> Any:
    """A request that is sent to a worker for the first time, or by the V2 scheduler when it resumes."""
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData(
        req_id=name,
        prompt_token_ids=[7] * prompt,
        mm_features=[],
        sampling_params=sampling(changes.pop("limit", 100), **changes),
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=past,
        lora_request=None,
    )


def schedules(
    queries: Mapping[str, int],
    *,
    new: Sequence[Any] = (),
    past: Mapping[str, int] | None = None,
    got: Mapping[str, int] | None = None,
    drafts: Mapping[str, int] | None = None,
    resumed: Sequence[str] = (),
    finished: Sequence[str] = (),
) -> Any:
    """What a scheduler sends for a step.

    Args:
        queries: Tokens of each request.
        new: Of those, the ones that begin.
        past: Of the others, what is in the cache, as the scheduler believes.
        got: Tokens that they have got.
        drafts: Drafted tokens.
        resumed: Those that come back.
        finished: Requests that ended.
    """
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    past = past or {}
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(past),
            resumed_req_ids=set(resumed),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(past),
            num_computed_tokens=list(past.values()),
            num_output_tokens=[(got or {}).get(name, 1) for name in past],
        ),
        num_scheduled_tokens=dict(queries),
        total_num_scheduled_tokens=sum(queries.values()),
        scheduled_spec_decode_tokens={name: [-1] * n for name, n in (drafts or {}).items()},
        scheduled_encoder_inputs={},
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )


def model_output(tokens: Mapping[str, Sequence[int]] | None, requests: Sequence[str] = ()) -> Any:
    """What a runner gives: the tokens of each request, in an order of its own; None where they are still to come."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(requests or tokens or ())
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=[list(tokens[name]) for name in names] if tokens else [],
    )


class _Copied:
    """Stands for the event that tells that tokens are on the host."""

    def synchronize(self) -> None:
        pass


def v2_output(tokens: Mapping[str, Sequence[int]]) -> Any:
    """An `AsyncOutput` of the V2 runner whose copy is done."""
    import numpy as np
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    width = max(len(row) for row in tokens.values())
    output = AsyncOutput.__new__(AsyncOutput)
    output.model_runner_output = model_output(None, list(tokens))
    output.model_runner_output.sampled_token_ids = None
    output.copy_event = _Copied()
    output.sampled_token_ids = np.array(
        [[*row, *[0] * (width - len(row))] for row in tokens.values()], dtype=np.int64
    )
    output.num_sampled_tokens_np = np.array([len(row) for row in tokens.values()])
    output.sampling_mask_tensors = output.num_nans = output.logprobs_tensors = None
    output.prompt_logprobs_dict = {}
    output.prompt_token_id_logprobs_dict = {}
    output.pending_aux_output = output._has_fault = None
    return output


def v1_output(tokens: Mapping[str, Sequence[int]]) -> Any:
    """An `AsyncGPUModelRunnerOutput` of the V1 runner whose copy is done; rejected drafts are -1 in it."""
    import torch
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    width = max(len(row) for row in tokens.values())
    output = AsyncGPUModelRunnerOutput.__new__(AsyncGPUModelRunnerOutput)
    output._model_runner_output = model_output(None, list(tokens))
    output._invalid_req_indices = [n for n, row in enumerate(tokens.values()) if not row]
    output.async_copy_ready_event = _Copied()
    output.vocab_size = 256
    output._sampled_token_ids = None
    output.sampled_token_ids_cpu = torch.tensor(
        [[*row, *[-1] * (width - len(row))] for row in tokens.values()]
    )
    output._logprobs_tensors = output._logprobs_tensors_cpu = None
    output._num_nans = output._num_nans_cpu = output._has_fault = None
    return output


@dataclass
class Script:
    """What the methods of a runner do, one entry a call."""

    execute: list[Any] = field(default_factory=list)
    sample: list[Any] = field(default_factory=list)

    def execute_model(self, runner: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.execute.pop(0)
        return step(runner) if callable(step) else step

    def sample_tokens(self, runner: Any, *args: Any, **kwargs: Any) -> Any:
        return self.sample.pop(0)


@contextlib.contextmanager
def scripted(monkeypatch: Any, kind: type, script: Script) -> Iterator[Any]:
    """A runner of a class of vLLM that no device runs: its two methods do what is written down.

    What a session wraps are the attributes of the class, as ever; begin it inside.
    """
    with monkeypatch.context() as patch:
        patch.setattr(
            kind, "execute_model", lambda r, o, *a, **k: script.execute_model(r, o, *a, **k)
        )
        patch.setattr(kind, "sample_tokens", lambda r, *a, **k: script.sample_tokens(r, *a, **k))
        yield make_runner(kind)


def make_runner(kind: Any) -> Any:
    """An instance of a runner's class with nothing in it but what is read at its first step."""
    import torch

    class Model(torch.nn.Module):
        pass

    model = Model()
    runner = kind.__new__(kind)
    runner.model = model
    runner.device = torch.device("cpu")
    runner.model_config = SimpleNamespace(
        model="scripted", enforce_eager=True, attn_type="decoder", is_encoder_decoder=False
    )
    runner.compilation_config = SimpleNamespace(mode=None)
    runner.is_pooling_model = False
    runner.execute_model_state = None
    runner.get_model = lambda: model
    return runner
