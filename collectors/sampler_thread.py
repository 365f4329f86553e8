"""The one thread on which a session reads its counters, and what happens when a reading never returns.

Each task says when its turn is; the thread sleeps until then. A call into a driver may hang, and nothing can interrupt
it: a second thread, which only looks once a second, then leaves the hanging one alone and has a new one go on with the
other tasks. Ending waits a bounded time, whatever hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

#: How often it is looked whether a call hangs.
WATCH_S = 1.0
#: How long the end of a session waits for readings that are under way.
END_S = 2.0


class Task(Protocol):
    """Something to be done again and again. None of its methods raises."""

    @property
    def owner(self) -> object:
        """Whose task it is: the tasks of one owner end together."""
        ...

    @property
    def due_ns(self) -> int:
        """When its next turn is, on the monotonic clock."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it needs no more turns."""
        ...

    @property
    def patience_s(self) -> float:
        """How long its next turn may take before it counts as hanging."""
        ...

    def step(self, now_ns: int) -> None:
        """Take a turn."""
        ...

    def end(self) -> None:
        """Take the last turn and let go of everything."""
        ...

    def hangs(self, seconds: float) -> None:
        """Told by another thread that its turn has not come back, and will have no effect if it still does."""
        ...


class SamplerThread:
    """Runs tasks on a thread that begins with the first one and ends with the last.

    Its methods may be called from any thread. In a forked child an instance of the parent is of no use; the child's
    session makes its own.

    Args:
        watch_s: How often it is looked whether a turn hangs.
        end_s: How long `end` waits for turns that are under way, before it gives them up.
    """

    def __init__(self, *, watch_s: float = WATCH_S, end_s: float = END_S) -> None:
        self._watch_s = watch_s
        self._end_s = end_s
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._tasks: list[Task] = []
        self._ending: list[Task] = []
        self._busy: _Turn | None = None
        self._worker: threading.Thread | None = None
        self._watch: tuple[threading.Thread, threading.Event] | None = None
        #: CPU time of its threads that have ended.
        self.cpu_ns = 0

    def add(self, task: Task) -> None:
        """Begin with a task."""
        with self._changed:
            self._tasks.append(task)
            if self._worker is None:
                self._worker = self._begin(self._run, "phaseprof-sampler")
            if self._watch is None:
                over = threading.Event()
                self._watch = (
                    self._begin(lambda: self._look(over), "phaseprof-sampler-watch"),
                    over,
                )
        self._wake.set()

    def end(self, owner: object) -> None:
        """End the tasks of an owner. Waits until they have ended, or hang."""
        with self._changed:
            mine = [task for task in self._tasks if task.owner is owner]
            self._ending += [task for task in mine if task not in self._ending]
            worker, watch = self._worker, self._watch
            self._wake.set()
            while not self._changed.wait_for(
                lambda: not any(task in self._tasks for task in mine), self._end_s
            ):
                if self._busy is None:
                    # It has got no time at all: the process is stopped, or about to end.
                    for task in mine:
                        self._give_up(task, self._end_s)
                    break
                self._leave_alone(self._busy, self._end_s)
                worker = self._worker
            if self._tasks:
                return
            self._worker = None
            self._watch = None
        if watch is not None:
            watch[1].set()
            self._wake.set()
            watch[0].join(self._end_s)
        if worker is not None:
            worker.join(self._end_s)

    # The thread that works

    def _begin(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        me = threading.current_thread()
        while (turn := self._next(me)) is not None:
            if turn.task is None:
                self._wake.wait(turn.wait_s)
                self._wake.clear()
            elif turn.last:
                turn.task.end()
            else:
                turn.task.step(time.perf_counter_ns())
        with self._changed:
            self.cpu_ns += time.thread_time_ns()

    def _next(self, me: threading.Thread) -> _Turn | None:
        """What the thread does next: a task's turn, or waiting; None if it is to end."""
        with self._changed:
            if self._worker is not me:
                return None
            self._busy = None
            for task in [task for task in self._tasks if task.ended]:
                self._remove(task)
            if self._ending:
                self._busy = _Turn(self._ending[0], last=True)
                return self._busy
            if not self._tasks:
                # It stays for a task that may come: an owner whose tasks fail has no reason to end the thread.
                return _Turn(None)
            task = min(self._tasks, key=lambda task: task.due_ns)
            wait_s = (task.due_ns - time.perf_counter_ns()) / 1e9
            if wait_s > 0:
                return _Turn(None, wait_s=wait_s)
            self._busy = _Turn(task)
            return self._busy

    def _remove(self, task: Task) -> None:
        self._tasks.remove(task)
        if task in self._ending:
            self._ending.remove(task)
        self._changed.notify_all()

    # The thread that watches

    def _look(self, over: threading.Event) -> None:
        """Count how often the same turn is met. Where the whole process stands still, so does the counting."""
        met: _Turn | None = None
        seconds = 0.0
        while not over.wait(self._watch_s):
            with self._changed:
                if self._busy is None or self._busy is not met:
                    met, seconds = self._busy, 0.0
                    continue
                seconds += self._watch_s
                if seconds >= met.patience_s:
                    self._leave_alone(met, seconds)
        with self._changed:
            self.cpu_ns += time.thread_time_ns()

    def _leave_alone(self, turn: _Turn, seconds: float) -> None:
        """Go on without a turn that hangs, on a new thread; the old one ends if it ever comes back."""
        if turn.task is not None:
            self._give_up(turn.task, seconds)
        self._busy = None
        try:
            self._worker = self._begin(self._run, "phaseprof-sampler")
        except RuntimeError:
            # The process is about to end, and may start no thread any more.
            self._worker = None

    def _give_up(self, task: Task, seconds: float) -> None:
        task.hangs(seconds)
        if task in self._tasks:
            self._remove(task)


class _Turn:
    """One turn of a task, or a wait. Compared by identity."""

    __slots__ = ("last", "patience_s", "task", "wait_s")

    def __init__(
        self, task: Task | None, *, wait_s: float | None = None, last: bool = False
    ) -> None:
        self.task = task
        self.wait_s = wait_s
        self.last = last
        self.patience_s = task.patience_s if task is not None else 0.0
