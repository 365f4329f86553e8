"""How the tables of kernel names are written down, and read.

A table is text. A line at the margin says class, tensor cores and where such names were seen, two spaces or more
between them; the indented lines below it are patterns of that kind, one a line, and a line that ends in ``|`` goes on
in the next. The first pattern that matches decides. A pattern is a regular expression that is searched in the kernel's
own name (its path, without return type, template arguments and parameters); with ``~`` before it, in the whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phaseprof.analyzers.kernels.kernel_results import KernelClass, TensorCores

_COLUMN = re.compile(r"\s{2,}")
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern of a table.

    Attributes:
        kernel_class: What the kernel does. tensor_cores: Whether it uses them.
        pattern: What is searched. whole: Searched in the whole name, not only in the kernel's own.
        seen: Where such a name was seen: a recorded trace, a library's source, torch's list of operators.
    """

    kernel_class: KernelClass
    tensor_cores: TensorCores
    pattern: re.Pattern[str]
    whole: bool
    seen: str


def table(text: str) -> tuple[Rule, ...]:
    """The rules of a table; empty lines and lines that begin with ``#`` are left out.

    Raises:
        ValueError: If a line is none.
    """
    return tuple(_rules(text.splitlines()))


def _rules(lines: Iterable[str]) -> Iterator[Rule]:
    head: tuple[KernelClass, TensorCores, str] | None = None
    begun = ""
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not line[0].isspace():
            head = _head(text)
            continue
        begun += text
        if begun.endswith("|"):
            continue
        if head is None:
            raise ValueError(f"a pattern before any class: {text}")
        kernel_class, cores, seen = head
        pattern, whole = begun.removeprefix("~"), begun.startswith("~")
        yield Rule(kernel_class, cores, re.compile(pattern), whole, seen)
        begun = ""
    if begun:
        raise ValueError(f"a pattern that does not end: {begun}")


def _head(text: str) -> tuple[KernelClass, TensorCores, str]:
    columns = _COLUMN.split(text)
    if len(columns) != _COLUMNS:
        raise ValueError(f"{len(columns)} columns in place of {_COLUMNS}: {text}")
    kernel_class, cores, seen = columns
    return KernelClass(kernel_class), TensorCores(cores), seen
