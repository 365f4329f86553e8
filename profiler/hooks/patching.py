"""Set an attribute of a class or a module for a while, and put back exactly what was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patch:
    """Replaces one attribute by a wrapper around what is found there.

    Args:
        owner: The class or module.
        name: The attribute.
        make: Makes the wrapper from what is found (by inheritance too).

    Attributes:
        label: ``owner.name``, for messages.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name, _MISSING)
        self._original = getattr(owner, name)
        self._wrapper = make(self._original)
        self.label = f"{owner.__name__}.{name}"
        for attribute in ("__doc__", "__module__", "__qualname__", "__signature__"):
            value = getattr(self._original, attribute, _MISSING)
            if value is not _MISSING:
                setattr(self._wrapper, attribute, value)
        # inspect.signature follows it: callers ask generate for its parameters.
        self._wrapper.__wrapped__ = self._original  # type: ignore[attr-defined]
        setattr(owner, name, self._wrapper)

    def remove(self) -> bool:
        """Put back what was there.

        Returns:
            False if somebody else has wrapped the attribute since: theirs stays, and ours inside it. The caller must
            then make the wrapper pass calls through.
        """
        if vars(self._owner).get(self._name) is not self._wrapper:
            return False
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
        return True
