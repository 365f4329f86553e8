"""Where vLLM is wrapped: for each seam the class, the methods, the versions it was tried on, and a look at its form.

A version that is not in the list is wrapped if it has the form that is looked for. One that has not runs as if nothing
were there, and what is lost is said with the version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.hooks.patching import Patch

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

#: The versions of vLLM that all seams were tried on.
TRIED = ("0.32.0",)


@dataclass(frozen=True, slots=True)
class Seam:
    """A class of vLLM whose methods are wrapped, all or none.

    Attributes:
        module: Full name of the module that defines it.
        owner: Its name there; empty for functions of the module itself.
        methods: What makes the wrapper of each method.
        lost: What is not seen without it, for people.
        optional: Likewise, of methods that need not be there.
        look: Looks at the module for what else the wrappers rely on; gives what is missing, in words, or None.
        tried: Versions that it was seen to work on.
    """

    module: str
    owner: str
    methods: Mapping[str, Make]
    lost: str
    optional: Mapping[str, Make] = field(default_factory=dict)
    look: Callable[[Any], str | None] | None = None
    tried: tuple[str, ...] = TRIED

    def patch(self, module: Any) -> list[Patch]:
        """Wrap the methods.

        Raises:
            UnknownForm: If the class or a method is not there, or is not what is known; then nothing is wrapped.
        """
        owner = getattr(module, self.owner, None) if self.owner else module
        if self.owner and not isinstance(owner, type):
            raise UnknownForm(f"{self.module} has no class {self.owner}")
        for name in self.methods:
            if not callable(getattr(owner, name, None)):
                raise UnknownForm(f"{self.owner or self.module} has no {name}")
        problem = self.look(module) if self.look is not None else None
        if problem is not None:
            raise UnknownForm(problem)
        present = {
            name: make
            for name, make in self.optional.items()
            if callable(getattr(owner, name, None))
        }
        patches: list[Patch] = []
        try:
            for name, make in {**self.methods, **present}.items():
                patches.append(Patch(owner, name, make))
        except Exception:
            for patch in reversed(patches):
                patch.remove()
            raise
        return patches


class UnknownForm(Exception):
    """A part of vLLM is not of the form that is known."""


def unknown(lost: str, why: str) -> NotMeasured:
    """What a vLLM of another form costs, and what to do."""
    return NotMeasured(
        lost,
        f"vLLM {version()} is of a form that is not known ({why})",
        f"please report it with this line; it was tried with vLLM {', '.join(TRIED)}",
    )


def missing_fields(kind: Any, names: tuple[str, ...]) -> str | None:
    """Which of the fields a dataclass of vLLM lacks, in words; None if it has all."""
    known = getattr(kind, "__dataclass_fields__", {})
    lacking = [name for name in names if name not in known]
    if not lacking:
        return None
    return f"{getattr(kind, '__name__', kind)} has no {lacking[0]}"


def version() -> str:
    """The version of the vLLM that is loaded. Not asked of the installed packages: it may be installed under another
    name."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "of unknown version"))
