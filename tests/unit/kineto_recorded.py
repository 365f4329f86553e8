"""Events with the methods of torch's `_KinetoEvent` that are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """An event with the methods of torch's `_KinetoEvent` that are read."""

    kind: str
    named: str
    at: tuple[int, int]
    device: int = 0
    resource: int = 0
    correlation: int = 0
    recorded_scope: int = 0
    asynchronous: bool = False

    def activity_type(self) -> str:
        return self.kind

    def name(self) -> str:
        return self.named

    def start_ns(self) -> int:
        return self.at[0]

    def end_ns(self) -> int:
        return self.at[1]

    def device_index(self) -> int:
        return self.device

    def device_resource_id(self) -> int:
        return self.resource

    def correlation_id(self) -> int:
        return self.correlation

    def scope(self) -> int:
        return self.recorded_scope

    def is_async(self) -> bool:
        return self.asynchronous
