"""What a recording cannot say, and what of it could not be read: entries of `not_measured`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phaseprof.collectors.files.contents import Contents
from phaseprof.errors import NotMeasured
from phaseprof.importing.forms import Step
from phaseprof.importing.joining import Joined
from phaseprof.importing.model import work_of
from phaseprof.importing.step_names import announced
from phaseprof.importing.steps import Chosen
from phaseprof.phases import Phase, TagSource
from phaseprof.work.from_config import GivenModel


def lacking_of(
    file: str, contents: Contents, chosen: Chosen, joined: Joined, incomplete: int
) -> Iterator[NotMeasured]:
    """What one file lacks.

    Args:
        file: Its name.
        contents: What it held.
        chosen: The steps that were found, and by what.
        joined: What their kernels are.
        incomplete: Steps of which kernels are missing.
    """
    steps, record = chosen.steps, _RECORD.get(contents.source, "")
    for clause in contents.damage:
        yield damaged(file, clause)
    yield from _left_out(file, contents)
    yield from contents.lacking
    if not contents.epoch:
        yield NotMeasured(
            f"when {file} was recorded", "it does not say from which moment its times count"
        )
    if any(not device.name for device in contents.devices) and not joined.on_cpu:
        yield NotMeasured("the name of the device", f"{file} leaves it empty")
    if not joined.events:
        yield NotMeasured("kernels", f"{file} has none, and no operators", record)
    elif joined.on_cpu and contents.described:
        yield NotMeasured(
            "kernels",
            f"{file} was recorded beside {contents.described} GPUs and has nothing of what ran on "
            "them: the passes have the times of their calls",
            record,
        )
    if not steps:
        yield NotMeasured(
            "phases",
            f"nothing in {file} announces the steps of an engine that phaseprof knows, and {chosen.why}",
            f"put {range_of(contents.source)} around prefill and around decode, and import with "
            "--annotation NAME=prefill --annotation NAME=decode",
        )
        return
    yield from _of_steps(chosen)
    if chosen.drawn is not None:
        yield NotMeasured(
            "which step launched a kernel",
            "the host was not recorded: a kernel is of the step within whose range on its device it ran",
            record,
        )
    if joined.on_cpu:
        yield NotMeasured(
            "times without a profiler", "the recording was made under one, which slows operators"
        )
    elif chosen.drawn is None:
        yield NotMeasured(
            "times of the host without a profiler",
            "the recording was made under one, which slows launches: a pass has the time from its "
            "first to its last kernel, in which the device may have waited for the host",
        )
        without = len(steps) - sum(1 for own in joined.steps.values() if own.events)
        if without:
            yield NotMeasured(
                f"the time on the device of {_count(without, 'pass')}",
                "no kernel was launched by them in the recording: they have the time of their calls",
            )
    if incomplete:
        yield NotMeasured(
            f"idle time of {_count(incomplete, 'pass')}",
            "fewer kernels were recorded than they ran (launches without any, or replays of a graph "
            "with fewer than others had), so that a gap may have been filled",
            "record fewer steps at a time, or with a larger buffer",
        )
    yield NotMeasured("latencies of requests", "a recording of kernels knows no requests")


def range_of(source: str) -> str:
    """How a range is placed in the program, so that a recording of that source has it.

    Args:
        source: What records: ``kineto``, ``nsys``.
    """
    return "torch.cuda.nvtx.range(NAME)" if source == "nsys" else "record_function(NAME)"


def damaged(file: str, clause: str) -> NotMeasured:
    """What has to be said of a file that is damaged.

    Args:
        file: Its name.
        clause: What is wrong with it.
    """
    return NotMeasured(f"all of {file}: it is damaged", clause, "record it, or copy it, again")


def lacking_work(
    given: GivenModel | None, steps: Sequence[Step], *, split: bool
) -> Iterator[NotMeasured]:
    """What is missing for the work of the steps.

    Args:
        given: The model, where the user has named it.
        steps: The steps.
        split: The run had several ranks.
    """
    if not steps:
        return
    what = "FLOPs and bytes of the model"
    if given is None:
        yield NotMeasured(
            what,
            "a recording does not describe it",
            "phaseprof import … --model-config config.json",
        )
    elif split:
        yield NotMeasured(
            what, "the run had several ranks, and what each of them holds is not recorded"
        )
    elif not given.cost.covered:
        yield NotMeasured(
            what,
            f"the closed form does not cover {given.class_name} ({'; '.join(given.cost.not_covered)})",
        )
    else:
        unknown = sum(work_of(given, step.work) is None for step in steps)
        if unknown:
            yield NotMeasured(
                f"{what} in {_count(unknown, 'pass')}",
                "what announces them does not tell how long their sequences are",
            )


_RECORD = {
    "kineto": "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
    "nsys": "nsys profile --trace=cuda,nvtx",
}


def _of_steps(chosen: Chosen) -> Iterator[NotMeasured]:
    steps = chosen.steps
    inferred = sum(
        step.tag_source is TagSource.INFERRED and not step.work.unknown for step in steps
    )
    if inferred:
        yield NotMeasured(f"a certain label of {_count(inferred, 'pass')}", chosen.why)
    for reason, number in chosen.unknown.items():
        yield NotMeasured(f"the phase of {_count(number, 'pass')}", reason)
    for sentence in chosen.disagreements:
        yield NotMeasured("one account of the steps", sentence)
    without = [
        step
        for step in steps
        if step.work.phase in (Phase.PREFILL, Phase.DECODE, Phase.MIXED)
        and not (step.work.prefill_tokens or step.work.decode_tokens)
    ]
    # Sequences that nothing announced are rows of tokens that were looked up.
    padded = sum(bool(step.work.prefill_sequences) and not announced(step.name) for step in without)
    if padded:
        yield NotMeasured(
            f"tokens of {_count(padded, 'pass')}",
            "some of the tokens of their rows may be padding, which is not recorded",
        )
    if len(without) > padded:
        yield NotMeasured(
            f"tokens of {_count(len(without) - padded, 'pass')}", "what shows them does not tell"
        )


def _left_out(file: str, contents: Contents) -> Iterator[NotMeasured]:
    left = contents.left_out
    for number, why in (
        (left.no_time, "their begin or their length is no number, or impossible"),
        (left.bad_device, "their device is no number"),
        (left.unmatched, "they begin or end, and are not whole events"),
    ):
        if number:
            yield NotMeasured(f"{_count(number, 'event')} of {file}", why)


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
