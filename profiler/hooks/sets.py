"""What a session holds of each engine that it may meet: a set of hooks."""

from __future__ import annotations

from typing import Any, Protocol


class HookSet(Protocol):
    """The hooks on one engine."""

    @property
    def passes(self) -> int:
        """Passes seen."""
        ...

    @property
    def handed_over(self) -> int:
        """Passes that the recorder was given."""
        ...

    @property
    def own_ns(self) -> int:
        """Time in the hooks on the workload's threads, without `setup_ns`."""
        ...

    @property
    def setup_ns(self) -> int:
        """Time to read the structure of models at first sight."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """What is hooked, for people: one entry for the engine, or none."""
        ...

    def install(self, model: Any = None) -> None:
        """Set the hooks on what is imported, and on the rest as soon as it is.

        Args:
            model: What the user asks to watch besides; None for nothing.
        """
        ...

    def remove(self) -> None:
        """Take every hook off. One that somebody else has wrapped since passes calls through from now on."""
        ...
