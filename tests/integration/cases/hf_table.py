"""All cases, as data: the table of the documentation and the parameters of the test."""

from __future__ import annotations

import cases_architectures
import cases_decoding
import cases_generate
import cases_loops
import cases_use
from hf_case import Case

#: Where each case is written down.
MODULES = (cases_generate, cases_decoding, cases_loops, cases_architectures, cases_use)
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
SOURCES = {case.name: f"{module.__name__}.py" for module in MODULES for case in module.CASES}
