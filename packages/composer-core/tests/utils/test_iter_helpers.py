"""One value or many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.utils import ensure_tuple


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ("ab", ("ab",)),
        (b"ab", (b"ab",)),
        (bytearray(b"ab"), (bytearray(b"ab"),)),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        (range(2), (0, 1)),
        ({"a": 1, "b": 2}, (1, 2)),
        (5, (5,)),
        ({1}, ({1},)),
        ([], ()),
    ],
)
def test_ensure_tuple_takes_one_or_many(value: Any, expected: tuple[Any, ...]) -> None:
    assert expected == ensure_tuple(value)


def test_ensure_tuple_does_not_take_a_tensor_apart() -> None:
    tensor = torch.zeros(3)

    (element,) = ensure_tuple(tensor)

    assert element is tensor
