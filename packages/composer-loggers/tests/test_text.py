from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.loggers._text import config_block, table_json, to_yaml


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"b": 1, "a": None}, "a: null\nb: 1\n"),
        (
            {"lr": 1e-05, "big": 1e20, "inf": math.inf, "low": -math.inf},
            "big: 1.0e+20\ninf: .inf\nlow: -.inf\nlr: 1.0e-05\n",
        ),
        ({"x": [1, [2, 3], {"k": 4, "z": []}]}, "x:\n- 1\n- - 2\n  - 3\n- k: 4\n  z: []\n"),
        ({"name": "a b", "no": "no", "version": "1.0"}, "name: a b\n'no': 'no'\nversion: '1.0'\n"),
        ({"dtype": torch.float32}, "dtype: torch.float32\n"),
        ({"pair": (1, 2)}, "pair:\n- 1\n- 2\n"),
        ({}, "{}\n"),
    ],
)
def test_yaml_reads_well(data: Any, expected: str) -> None:
    assert expected == to_yaml(data)


def test_the_config_is_printed_between_stars() -> None:
    stars = "*" * 30

    assert f"{stars}\nConfig:\nseed: 3\n\n{stars}\n" == config_block({"seed": 3})


def test_a_table_is_json_in_the_split_form() -> None:
    rows = [[torch.tensor(0.5), np.float32(0.25)], [float("nan"), ("a", torch.float32)], [None, {1: np.array([1, 2])}]]

    expected = '{"columns":["x","y"],"data":[[0.5,0.25],[null,["a","torch.float32"]],[null,{"1":[1,2]}]]}'
    assert expected == table_json(["x", "y"], rows)


@given(st.lists(st.tuples(st.text(), st.integers(), st.booleans())))
def test_a_table_keeps_its_values(rows: list[tuple[Any, ...]]) -> None:
    table = json.loads(table_json(["a", "b", "c"], [list(row) for row in rows]))

    assert {"columns": ["a", "b", "c"], "data": [list(row) for row in rows]} == table


def test_a_table_needs_rows_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"`rows` must each have 2 values, one per column, got \[1\]"):
        table_json(["a", "b"], [[1]])
