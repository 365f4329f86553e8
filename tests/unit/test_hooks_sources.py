"""What a call of an encoder or of an encoder-decoder says of its tokens and of its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from phaseprof.hooks.inputs import encoded_tokens, source_is_new, source_of
from phaseprof.work.count import Source


@dataclass
class Shaped:
    """Stands for a tensor: nothing but its shape is read."""

    shape: tuple[int, ...]


@dataclass
class Cache:
    """Stands for an `EncoderDecoderCache`."""

    is_updated: Any = field(default_factory=dict)


STATES = Shaped((2, 7, 32))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"last_hidden_state": STATES, "pooler_output": Shaped((2, 32))}, (2, 7)),
        ((STATES, Shaped((2, 32))), (2, 7)),
        (STATES, (2, 7)),
        # Logits alone, features of a pixel shuffle in two axes, nothing at all.
        ({"logits": Shaped((2, 5))}, None),
        ((Shaped((14, 32)),), None),
        ((), None),
        (None, None),
    ],
)
def test_tokens_are_those_of_the_output(output: Any, expected: tuple[int, int] | None) -> None:
    assert encoded_tokens(output) == expected


def test_a_source_is_new_until_the_cache_holds_it() -> None:
    assert source_is_new(None)
    assert source_is_new(Cache())
    assert source_is_new(Cache({0: False, 1: False}))
    assert not source_is_new(Cache({0: True, 1: True}))
    # A cache that knows of no source.
    assert source_is_new(object())


@pytest.mark.parametrize("given", [{"last_hidden_state": STATES}, (STATES,), [STATES]])
@pytest.mark.parametrize("new", [False, True])
def test_a_source_that_is_handed_in_was_encoded_before(given: Any, new: bool) -> None:
    assert source_of({"encoder_outputs": given}, {}, new=new) == Source(7, new, encoded=False)


def test_a_source_that_is_given_out_was_encoded_inside() -> None:
    output = {"logits": Shaped((2, 3, 97)), "encoder_last_hidden_state": STATES}
    assert source_of({}, output, new=True) == Source(7, True, encoded=True)


@pytest.mark.parametrize(
    ("kwargs", "output"),
    [
        ({}, {}),
        ({}, (Shaped((2, 3, 97)),)),
        ({}, None),
        ({"encoder_outputs": {}}, {}),
        ({"encoder_outputs": (Shaped((14, 32)),)}, {}),
        ({"encoder_outputs": ()}, {}),
        ({"encoder_outputs": object()}, {"encoder_last_hidden_state": STATES}),
    ],
)
def test_a_source_that_cannot_be_read_is_none(kwargs: dict[str, Any], output: Any) -> None:
    assert source_of(kwargs, output, new=True) is None
