"""Collectors by name, and what becomes of one that fails at any of its methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phaseprof.clock import Clock
from phaseprof.collectors import known as known_module
from phaseprof.collectors.base import Availability
from phaseprof.collectors.collection import Collection, collection
from phaseprof.collectors.known import (
    COLLECT_VARIABLE,
    KNOWN,
    Known,
    asked_for,
    choose,
    help_text,
    normalized,
)
from phaseprof.collectors.sampling import SampledCollector
from phaseprof.errors import NotMeasured, UsageError
from phaseprof.evidence import COLLECT_VARIABLE as OF_THE_GROUND
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import CollectorCost, Device

GPU = Device("NVIDIA Test", "cuda", 0, 132, None, 80 * 10**9, "cuda|test", "GPU-1")
MODULE = "phaseprof_test_collectors"

ALPHA = Known("alpha", MODULE, "alpha", True, "the first letter")
BETA = Known("beta", MODULE, "beta", True, "the second letter")
GAMMA = Known("gamma", MODULE, "gamma", False, "the third letter")
FILE = Known("file", MODULE, "file", False, "a file", takes="PATH")
ALL = (ALPHA, BETA, GAMMA, FILE)


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.clock = Clock.start()
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None: ...

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


class Window:
    """Counts what it is told, and may fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.told: list[str] = []

    def _tell(self, call: str) -> None:
        self.told.append(call)
        if call == self.fails:
            raise RuntimeError(f"in {call}")

    def begins(self, wide: bool, warmup: bool) -> bool:
        self._tell("begins")
        return True

    def ended(self) -> None:
        self._tell("ended")

    def hold(self, on: bool) -> None:
        self._tell("hold")


class Faulty:
    """A collector that fails at one of its methods."""

    def __init__(self, name: str, fails: str = "", window: PassWindow | None = None) -> None:
        self.name = name
        self.what = f"what {name} collects"
        self.fails = fails
        self.told: list[str] = []
        self._window = window

    def _tell(self, call: str) -> None:
        self.told.append(call)
        if call == self.fails:
            raise RuntimeError(f"in {call}")

    @property
    def window(self) -> PassWindow | None:
        self._tell("window")
        return self._window

    def probe(self) -> Availability:
        return Availability(True, "")

    def start(self, sink: EvidenceSink) -> None:
        self._tell("start")

    def device_seen(self, device: Device) -> None:
        self._tell("device_seen")

    def stop(self) -> None:
        self._tell("stop")


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """The known collectors are `ALL`; what their factories are is up to the test."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(known_module, "KNOWN", ALL)
    factories: dict[str, Callable[..., Any]] = vars(module)
    factories.update(
        alpha=lambda: Faulty("alpha"), beta=lambda: Faulty("beta"), gamma=lambda: Faulty("gamma")
    )
    yield factories


# Names


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, [("alpha", False), ("beta", False)]),
        ("", [("alpha", False), ("beta", False)]),
        ("default", [("alpha", False), ("beta", False)]),
        ("none", []),
        ("gamma", [("gamma", True)]),
        ("gamma, alpha", [("alpha", True), ("gamma", True)]),
        ("default,gamma", [("alpha", False), ("beta", False), ("gamma", True)]),
        ("beta,default", [("alpha", False), ("beta", True)]),
        ("alpha,alpha,", [("alpha", True)]),
    ],
)
def test_names_choose_collectors_in_the_order_in_which_they_start(
    wanted: str | None, chosen: list[tuple[str, bool]]
) -> None:
    assert [(each.known.name, each.asked) for each in choose(wanted, ALL)] == chosen


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("delta", "There is no collector 'delta'."),
        ("Alpha", "There is no collector 'Alpha'."),
        ("alpha,delta", "There is no collector 'delta'."),
        ("alpha=3", "The collector alpha takes nothing behind its name."),
        ("file", "The collector file needs a PATH."),
        ("none,alpha", "'none' stands alone: there is no collector then."),
        ("none=1", "There is no collector 'none'."),
    ],
)
def test_a_name_that_is_wrong_is_a_usage_error(wanted: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose(wanted, ALL)
    assert raised.value.message == message
    assert raised.value.exit_code == 2


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(UsageError) as raised:
        choose("delta", ALL)
    assert raised.value.remedy == (
        "Use alpha, beta, gamma, file=PATH, default or none, with commas between."
    )


def test_a_path_means_the_same_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collectors: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some=file").write_text("")
    assert normalized("default, gamma,file=some=file") == f"default,gamma,file={tmp_path}/some=file"
    assert normalized("none") == "none"
    assert normalized(None) is None and normalized("") is None
    with pytest.raises(UsageError, match="there is no"):
        normalized("file=other")


def test_the_environment_is_asked_where_no_option_is_given(
    monkeypatch: pytest.MonkeyPatch, collectors: object
) -> None:
    monkeypatch.setenv(COLLECT_VARIABLE, "gamma")
    assert asked_for(None) == "gamma"
    assert asked_for("beta") == "beta"
    monkeypatch.setenv(COLLECT_VARIABLE, "delta")
    with pytest.raises(UsageError):
        asked_for(None)
    monkeypatch.delenv(COLLECT_VARIABLE)
    assert asked_for(None) is None


def test_the_ground_reads_the_same_variable() -> None:
    assert COLLECT_VARIABLE == OF_THE_GROUND


def test_help_names_every_collector() -> None:
    assert [each.form for each in KNOWN if f"{each.form} (" not in help_text()] == []


def test_every_known_collector_can_be_made(tmp_path: Path) -> None:
    """And goes by the name by which it is asked for. Nothing is opened by that."""
    wanted = ",".join(f"{each.name}={tmp_path}" if each.takes else each.name for each in KNOWN)
    made = collection(wanted)
    assert made._missing == ()
    assert [each.name for each in made._collectors] == [each.name for each in KNOWN]
    for each in made._collectors:
        if isinstance(each, SampledCollector):
            assert each.asked and each.thread is made.thread


# What fails


def run(made: Collection, sink: Sink) -> None:
    """What a session does with its collectors."""
    made.start(sink)
    made.window  # noqa: B018
    made.device_seen(GPU)
    made.stop()


@pytest.mark.parametrize("fails", ["start", "window", "device_seen", "stop"])
def test_one_that_fails_is_put_aside_with_its_reason_and_the_other_goes_on(
    fails: str, collectors: dict[str, Callable[..., Any]], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Faulty("alpha", fails), Faulty("beta")
    collectors.update(alpha=lambda: bad, beta=lambda: good)
    sink = Sink()
    run(collection(None), sink)
    assert good.told == ["start", "window", "device_seen", "stop"]
    calls = ["start", "window", "device_seen", "stop"]
    # It is stopped after its failure, once, and told nothing in between.
    assert bad.told == [*calls[: calls.index(fails)], fails, *(["stop"] if fails != "stop" else [])]
    assert sink.notes == [
        NotMeasured(
            "what alpha collects",
            f"the collector alpha failed (RuntimeError: in {fails})",
            "please report it; PHASEPROF_DEBUG=1 shows where",
        )
    ]
    assert "the workload goes on" in caplog.text


def test_one_that_cannot_be_made_is_said_when_the_session_begins(
    collectors: dict[str, Callable[..., Any]],
) -> None:
    good = Faulty("beta")

    def broken() -> Faulty:
        raise ImportError("no module named cupti")

    collectors.update(alpha=broken, beta=lambda: good)
    sink = Sink()
    run(collection(None), sink)
    assert [(note.what, note.why) for note in sink.notes] == [
        (
            "what alpha collects",
            "the collector alpha failed (ImportError: no module named cupti)",
        )
    ]
    assert good.told == ["start", "window", "device_seen", "stop"]


@pytest.mark.parametrize("fails", ["begins", "ended", "hold"])
def test_a_window_that_fails_closes_for_good_and_raises_nothing(
    fails: str, collectors: dict[str, Callable[..., Any]]
) -> None:
    window = Window(fails)
    bad = Faulty("alpha", window=window)
    collectors.update(alpha=lambda: bad)
    sink = Sink()
    made = collection(None)
    made.start(sink)
    guarded = made.window
    assert guarded is not None
    answers = []
    for _ in range(2):
        answers.append(guarded.begins(False, False))
        guarded.ended()
        guarded.hold(False)
    assert answers == ([False, False] if fails == "begins" else [True, False])
    assert window.told.count(fails) == 1
    made.stop()
    assert bad.told == ["start", "window", "stop"]
    assert [note.why for note in sink.notes] == [
        f"the collector alpha failed (RuntimeError: in {fails})"
    ]
