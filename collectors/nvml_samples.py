"""The collector `nvml`: what the NVIDIA driver shows of a GPU a few times a second.

Clocks, power and throttling are read every turn, the rest once a second. What a device does not have is asked once,
said once, and left out. `utilization.gpu` is kept because people look for it: it says that some kernel ran, not how
much of the GPU worked.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaseprof.collectors.base import Availability
from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState, ask_nvml
from phaseprof.collectors.nvml_devices import find
from phaseprof.collectors.nvml_questions import Question, Questions
from phaseprof.collectors.sampling import CannotSample, SampledCollector
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink
from phaseprof.records import Sample
from phaseprof.trace.meta import Device

WHAT = "clocks, power, temperature and throttling of the GPU"
#: A question that fails so often in a row, for reasons that may pass, is not asked in that way again.
FAILURES = 3


class NvmlSampler:
    """Samples one device: a `phaseprof.collectors.sampling.Sampler`.

    Args:
        device: A CUDA device.
        sink: Where it is said what is missing; its clock gives the times.

    Raises:
        CannotSample: If the driver does not answer, or does not know the device.
    """

    def __init__(self, device: Device, sink: EvidenceSink) -> None:
        self._sink = sink
        self._clock = sink.clock
        try:
            self._driver = Driver()
        except NvmlError as error:
            raise CannotSample(error.why, error.fix) from error
        try:
            self._gpu = find(self._driver, device)
            key = device.uuid or device.key
            self._questions = Questions(self._driver, self._gpu, key, self._clock).all()
        except NvmlError as error:
            self._driver.close()
            raise CannotSample(error.why, error.fix) from error
        self._name = self._gpu.name or device.name
        self._opened_ns = self._clock.now_unix_ns()
        if self._gpu.instance is not None:
            sink.note(
                NotMeasured(
                    f"power, energy and link traffic of {self._name}",
                    "the driver measures them for the whole GPU, of which a MIG instance is a part",
                )
            )

    def sample(self) -> Sequence[Sample]:
        """Read what is due.

        Raises:
            CannotSample: If the device does not answer any more, or shows nothing.
        """
        rows: list[Sample] = []
        missing: dict[NvmlState, list[str]] = {}
        for question in tuple(self._questions):
            rows += self._answer(question, missing)
        if not self._questions and len(missing) == 1:
            (state,) = missing
            raise CannotSample(state.value, state.remedy)
        for state, what in missing.items():
            named = f"{', '.join(what)} of {self._name}"
            self._sink.note(NotMeasured(named, state.value, state.remedy))
        if not self._questions:
            raise CannotSample(f"the NVIDIA driver shows nothing of {self._name}")
        return rows

    def close(self) -> None:
        """Close NVML."""
        self._driver.close()

    def _answer(self, question: Question, missing: dict[NvmlState, list[str]]) -> Sequence[Sample]:
        """Rows of a question that is due. A way that does not work is followed by the next one at once."""
        while question.ways and self._is_due(question):
            try:
                rows = question.ways[0].read(question.answered_ns or self._opened_ns)
            except NvmlError as error:
                if error.state.device_gone:
                    which = f"{self._name}, {self._gpu.uuid}"
                    raise CannotSample(f"{error.why}: {which}", error.fix) from error
                question.failures += 1
                if not error.state.lasting and question.failures < FAILURES:
                    return ()
                question.failures = 0
                del question.ways[0]
                if not question.ways:
                    self._questions.remove(question)
                    if not (question.optional and error.state is NvmlState.NOT_SUPPORTED):
                        missing.setdefault(error.state, []).append(question.what)
            else:
                question.answered_ns = self._clock.now_unix_ns()
                question.failures = 0
                return rows
        return ()

    def _is_due(self, question: Question) -> bool:
        if question.answered_ns is None:
            return True
        return self._clock.now_unix_ns() - question.answered_ns >= question.ways[0].every_ns


def probe() -> Availability:
    """Whether the driver answers and has a GPU."""
    answer = ask_nvml()
    if answer.state is not NvmlState.AVAILABLE:
        return Availability(False, answer.error or answer.state.value, answer.state.remedy)
    if not answer.gpus:
        return Availability(False, f"driver {answer.driver} has no GPU")
    plural = "s" if answer.gpus > 1 else ""
    return Availability(True, f"driver {answer.driver}, {answer.gpus} GPU{plural}")


def nvml_collector() -> SampledCollector:
    """The collector, for one session."""
    return SampledCollector("nvml", WHAT, NvmlSampler, probe)
