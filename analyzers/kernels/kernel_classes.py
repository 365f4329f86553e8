"""What a kernel is, told by its name: its class, and whether it uses tensor cores.

The tables (`names_*`) are data; this module reads a kernel's own name out of what a profiler gives and finds the first
rule that matches. Names are few where rows are many: classify the distinct ones (`classify_names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from phaseprof.analyzers.kernels import (
    names_cuda,
    names_engines,
    names_operators,
    names_rocm,
    names_torch,
    names_words,
)
from phaseprof.analyzers.kernels.kernel_results import KernelClass, TensorCores
from phaseprof.analyzers.kernels.kernel_table import Rule

#: In the order in which they are asked. Copies of the driver are no kernels; they come first.
KERNEL_TABLES: tuple[tuple[Rule, ...], ...] = (
    names_torch.DRIVER_COPIES,
    names_torch.INDUCTOR,
    names_cuda.COLLECTIVES,
    names_rocm.ROCM,
    names_engines.MOE,
    names_engines.ATTENTION,
    names_cuda.ATTENTION,
    names_cuda.GEMM,
    names_engines.ELEMENT,
    names_torch.EAGER,
)
# What torch's namespace says is torch's own, whatever words it holds.
_TORCH_TABLES = (names_torch.EAGER, *KERNEL_TABLES)
#: Only words, not names that were seen: asked last.
WORDS = names_words.WORDS
#: For rows of a CPU.
OPERATOR_TABLES: tuple[tuple[Rule, ...], ...] = (names_operators.OPERATORS,)

# Longer names are template arguments within template arguments.
_LONGEST = 4_000
_SHORT = 60
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous\)::")
_LENGTH = re.compile(r"\d+")
_CACHED = 65_536


@dataclass(frozen=True, slots=True)
class Kind:
    """What a name says.

    Attributes:
        kernel_class: `KernelClass.OTHER` where no rule matches.
        tensor_cores: Whether the kernel uses them; unknown for class `other`.
        driver_copy: Whether it is a copy or fill that the driver made, no kernel.
        by_word: Whether only a word of the name told, and no rule for such names.
    """

    kernel_class: KernelClass
    tensor_cores: TensorCores
    driver_copy: bool = False
    by_word: bool = False


_OTHER = Kind(KernelClass.OTHER, TensorCores.UNKNOWN)


@lru_cache(maxsize=_CACHED)
def classify(name: str, *, on_cpu: bool = False) -> Kind:
    """The kind of one kernel, or of one operator of a CPU."""
    if on_cpu:
        rule = _first(OPERATOR_TABLES, name, name)
        by_word = rule is None and not name.startswith("aten::")
        if by_word:
            rule = _first((WORDS,), name, name)
        return _OTHER if rule is None else Kind(rule.kernel_class, TensorCores.NO, by_word=by_word)
    whole = _ANONYMOUS.sub("", name[:_LONGEST])
    own = own_name(whole)
    rule = _first(_TORCH_TABLES if own.startswith("at::") else KERNEL_TABLES, own, whole)
    if rule is not None:
        copies = rule in names_torch.DRIVER_COPIES
        return Kind(rule.kernel_class, rule.tensor_cores, driver_copy=copies)
    rule = _first((WORDS,), own, whole)
    return _OTHER if rule is None else Kind(rule.kernel_class, rule.tensor_cores, by_word=True)


def classify_names(names: Iterable[str], *, on_cpu: bool = False) -> list[Kind]:
    """The kinds of distinct names, in their order."""
    return [classify(name, on_cpu=on_cpu) for name in names]


def own_name(name: str) -> str:
    """A kernel's path without return type, template arguments and parameters; mangled names are read.

    ``void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(…)`` is ``vllm::rms_norm_kernel``, and
    ``_ZN5aiter24add_rmsnorm_quant_kernelI…`` is ``aiter::add_rmsnorm_quant_kernel``.
    """
    name = _ANONYMOUS.sub("", name)
    if name.startswith("_Z"):
        return _unmangled(name)
    if name.startswith(("[", "Mem")):
        return name
    bare = _without_brackets(name)
    words = bare.split()
    return words[-1].removesuffix(".kd") if words else name


def short_name(name: str) -> str:
    """The own name as people would say it: its last parts, and for wrappers that run anything what they run."""
    own = own_name(name)
    if own.startswith("at::native::") and "elementwise" in own:
        for inside in re.findall(r"\b(\w+?)(?:_kernel_cuda|_kernel_impl|Functor\w*)\b", name):
            if inside not in {"Binary", "AUnary", "BUnary", "gpu"}:
                return f"{inside} ({own.rpartition('::')[2]})"[:_SHORT]
    if own in {"cutlass::Kernel", "cutlass::Kernel2", "cutlass::device_kernel"}:
        inside = re.match(r"[\w:]+", name.partition("<")[2])
        return inside[0][:_SHORT] if inside else own
    parts = own.split("::")
    text = "::".join(parts[-2:]) if own.startswith(("aten::", "vllm::", "aiter::")) else parts[-1]
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _first(tables: Iterable[tuple[Rule, ...]], own: str, whole: str) -> Rule | None:
    for rules in tables:
        for rule in rules:
            if rule.pattern.search(whole if rule.whole else own):
                return rule
    return None


def _without_brackets(name: str) -> str:
    """The name without what stands in angle brackets and parentheses.

    Inside parentheses angle brackets are comparisons (``(8)>(0)``) and count for nothing. Whatever follows the
    parameters (``const``, ``[clone …]``) is left out.
    """
    kept: list[str] = []
    angles = parens = 0
    after_parameters = False
    for place, char in enumerate(name):
        if char == "(":
            # Parentheses at the very front of a type are part of an expression, not parameters.
            if not angles and not parens and kept and name[place - 1] not in " <,":
                after_parameters = True
            parens += 1
        elif char == ")":
            parens = max(parens - 1, 0)
        elif parens:
            continue
        elif char == "<":
            angles += 1
        elif char == ">" and angles:
            angles -= 1
        elif not angles:
            if after_parameters:
                break
            kept.append(char)
    return "".join(kept)


def _unmangled(name: str) -> str:
    """The path in an Itanium-mangled name: its lengths and parts up to the template arguments."""
    place = 2
    if name.startswith("_ZN"):
        place = 3
        while name[place : place + 1] in {"K", "V", "r"}:
            place += 1
    parts = []
    while found := _LENGTH.match(name, place):
        length = int(found[0])
        part = name[found.end() : found.end() + length]
        if not part:
            break
        if not part.startswith("_GLOBAL__N"):
            parts.append(part)
        place = found.end() + length
    return "::".join(parts) or name
