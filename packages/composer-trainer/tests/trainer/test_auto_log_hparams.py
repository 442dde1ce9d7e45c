"""Hyperparameters of constructors as loggable values."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.utils import convert_flat_dict_to_nested_dict, convert_nested_dict_to_flat_dict, extract_hparams


class Precision(Enum):
    BF16 = "bf16"


class Trainer:
    """Its constructor collects what it was given."""

    def __init__(self, lr: float, _hidden: int = 0) -> None:
        self.local_hparams = extract_hparams(locals())


class Model:
    pass


def test_hyperparameters_become_loggable_values() -> None:
    values = {
        "int": 1,
        "float": 0.5,
        "bool": True,
        "str": "x",
        "none": None,
        "enum": Precision.BF16,
        "object": Model(),
        "nested": Trainer(0.1),
        "list": [1, Precision.BF16, Model(), Trainer(0.2)],
        "tuple": (0.9, 0.95),
        "dict": {"a": Model(), "b": 2, "c": [1]},
        "self": Model(),
        "_private": 1,
        "__class__": Model,
        "kind": Model,
    }

    assert {
        "int": 1,
        "float": 0.5,
        "bool": True,
        "str": "x",
        "none": None,
        "enum": "bf16",
        "object": "Model",
        "nested": {"Trainer": {"lr": 0.1}},
        "list": [1, "bf16", "Model", {"Trainer": {"lr": 0.2}}],
        "tuple": (0.9, 0.95),
        "dict": {"a": "Model", "b": 2, "c": "list"},
    } == extract_hparams(values)


def test_hyperparameters_hold_no_password() -> None:
    values = {"save_folder": "sftp://me:secret@host/run", "loaded": ["s3://bucket/run?token=secret"]}

    expected = {"save_folder": "sftp://me:...@host/run", "loaded": ["s3://bucket/run?token=..."]}

    assert expected == extract_hparams(values)


keys = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=3)
nested_dicts = st.recursive(
    st.integers(), lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(nested_dicts)
def test_flattening_can_be_undone(nested: dict[str, Any]) -> None:
    flat = convert_nested_dict_to_flat_dict(nested)

    assert not any(isinstance(value, dict) for value in flat.values())
    assert nested == convert_flat_dict_to_nested_dict(flat)


def test_keys_are_joined_by_slashes_below_a_prefix() -> None:
    assert {"p/a/b": 1, "p/c": {}} == convert_nested_dict_to_flat_dict({"a": {"b": 1}, "c": {}}, prefix="p")


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_cannot_be_a_value_and_a_folder(order: int) -> None:
    flat = dict([("a", {}), ("a/b/c", 2)][::order])

    with pytest.raises(ValueError, match="must not contain both a value for 'a' and one for 'a/b/c'"):
        convert_flat_dict_to_nested_dict(flat)
    assert {} == flat["a"]
