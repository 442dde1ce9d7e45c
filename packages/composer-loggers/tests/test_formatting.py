"""Logged values as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from composer.loggers import DeferredValue, format_log_data_value


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "None"),
        ("text", '"text"'),
        (3, "3"),
        (True, "True"),
        (0.12345, "0.1235"),
        (torch.tensor(0.5), "0.5000"),
        (torch.tensor([3]), "3"),
        (torch.zeros(2, 3), "Tensor of shape torch.Size([2, 3])"),
        (np.float32(0.5), "0.5000"),
        (np.array(0.5), "0.5000"),
        (np.array([1, 2]), "[1, 2]"),
        ({"a": 1, "b": "c"}, '{ "a": 1, "b": "c", }'),
        ({}, "{ }"),
        ([1, 0.5, [None]], "[1, 0.5000, [None]]"),
        (DeferredValue.of_tensor(torch.tensor(0.5)), "0.5000"),
        (torch.float32, "torch.float32"),
    ],
)
def test_data_as_text(data: Any, expected: str) -> None:
    assert expected == format_log_data_value(data)


def test_the_import_path_of_the_established_api_exists() -> None:
    from composer.loggers.logger import format_log_data_value as same_function

    assert format_log_data_value is same_function
