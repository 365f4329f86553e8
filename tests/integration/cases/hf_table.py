"""All cases, as data: the table of the documentation and the parameters of the test."""

from __future__ import annotations

import cases_architectures
import cases_decoding
import cases_generate
import cases_loops
import cases_use
from hf_case import Case

CASES: list[Case] = [
    *cases_generate.CASES,
    *cases_decoding.CASES,
    *cases_loops.CASES,
    *cases_architectures.CASES,
    *cases_use.CASES,
]
