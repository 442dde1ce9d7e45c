"""Parts of a batch, read and replaced."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from composer.utils import batch_get, batch_set, check_pair

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: int
    y: int


class Attributed(dict):  # type: ignore[type-arg]
    """A dict with an attribute, as some libraries' batches have."""

    extra = 7


def double_first(batch: Any) -> Any:
    return 2 * batch[0]


def put_first(batch: Any, value: Any) -> Any:
    return (value, *batch[1:])


@pytest.mark.parametrize(
    ("batch", "key", "expected"),
    [
        ((1, 2), 1, 2),
        ([1, 2], -1, 2),
        ({"a": 1}, "a", 1),
        ({3: 1}, 3, 1),
        ({("a", "b"): 1, "a": 2, "b": 3}, ("a", "b"), 1),
        (Pair(1, 2), "y", 2),
        (Pair(1, 2), 1, 2),
        (Record(1, 2), "x", 1),
        (SimpleNamespace(x=1), "x", 1),
        (Attributed(a=1), "extra", 7),
        (Attributed(a=1), "a", 1),
        ([1, 2, 3], slice(0, 2), [1, 2]),
        ([1, 2, 3], [0, 2], (1, 3)),
        ((1, 2, 3), (2, 0), (3, 1)),
        ({"a": 1, "b": 2, "c": 3}, ["c", "a"], (3, 1)),
        (Record(1, 2), ["y", "x"], (2, 1)),
        (Pair(1, 2), ("x", "y"), (1, 2)),
        ({"a": 1, "b": 2}, ("a",), (1,)),
        ((3, 4), double_first, 6),
        ((3, 4), (double_first, put_first), 6),
        ((3, 4), [double_first, put_first], 6),
    ],
)
def test_get_finds_items_then_attributes_then_asks_callables(batch: Any, key: Any, expected: Any) -> None:
    assert expected == batch_get(batch, key)


@pytest.mark.parametrize("batch", [torch.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4)])
@pytest.mark.parametrize("key", [0, [0, 2], (1, 2), slice(1, 3), ([0, 1], [1, 2])])
def test_get_indexes_tensors_and_arrays_as_they_are_indexed(batch: Any, key: Any) -> None:
    assert batch[key].tolist() == batch_get(batch, key).tolist()


@pytest.mark.parametrize(
    ("batch", "key", "error"),
    [
        ((1, 2), 2, IndexError),
        ((1, 2), (0, 5), IndexError),
        ({"a": 1}, "b", KeyError),
        ({"a": 1}, ("a", "b"), KeyError),
        ({"a": 1}, "items", KeyError),
        (Attributed(a=1), "b", KeyError),
        ([1, 2], "count", TypeError),
        (SimpleNamespace(x=1), "y", AttributeError),
        (SimpleNamespace(x=1), 0, TypeError),
        (Pair(1, 2), "z", AttributeError),
    ],
)
def test_get_of_a_missing_part_raises_and_never_returns_a_method(batch: Any, key: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        batch_get(batch, key)


@pytest.mark.parametrize("access", [batch_get, lambda batch, key: batch_set(batch, key, 0)])
@pytest.mark.parametrize("key", [[double_first], (double_first, put_first, put_first)])
def test_several_callables_that_are_no_pair_are_refused(access: Any, key: Any) -> None:
    with pytest.raises(ValueError, match="must contain two functions, a getter and a setter, got"):
        access((1, 2), key)


def test_a_setter_in_the_place_of_a_getter_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="value"):
        batch_get((1, 2), put_first)


@pytest.mark.parametrize(
    ("batch", "key", "value", "expected"),
    [
        ((1, 2), 1, 5, (1, 5)),
        ((1, 2), -2, 5, (5, 2)),
        ([1, 2], 1, 5, [1, 5]),
        ({"a": 1}, "a", 5, {"a": 5}),
        ({3: 1}, 3, 5, {3: 5}),
        ({("a", "b"): 1, "a": 2}, ("a", "b"), 5, {("a", "b"): 5, "a": 2}),
        (Pair(1, 2), "y", 5, Pair(1, 5)),
        (Pair(1, 2), 0, 5, Pair(5, 2)),
        (Record(1, 2), "x", 5, Record(5, 2)),
        (SimpleNamespace(x=1), "x", 5, SimpleNamespace(x=5)),
        ([1, 2, 3], slice(0, 2), [5, 6], [5, 6, 3]),
        ((1, 2, 3), slice(0, 2), [5, 6], (5, 6, 3)),
        ((1, 2, 3), (2, 0), (5, 6), (6, 2, 5)),
        ([1, 2, 3], [0, 2], [5, 6], [5, 2, 6]),
        ({"a": 1, "b": 2}, ["b", "a"], (5, 6), {"a": 6, "b": 5}),
        (Record(1, 2), ("y", "x"), [5, 6], Record(6, 5)),
        (Pair(1, 2), ("x", "y"), (5, 6), Pair(5, 6)),
        ((3, 4), put_first, 5, (5, 4)),
        ((3, 4), (double_first, put_first), 5, (5, 4)),
    ],
)
def test_set_replaces_items_and_attributes_and_asks_callables(batch: Any, key: Any, value: Any, expected: Any) -> None:
    result = batch_set(batch, key, value)

    assert expected == result
    assert type(expected) is type(result)


@pytest.mark.parametrize("batch", [[1, 2], {0: 1, 1: 2}, Attributed({0: 1, 1: 2})])
def test_set_changes_mutable_batches_in_place(batch: Any) -> None:
    result = batch_set(batch, 0, 5)

    assert result is batch
    assert 5 == batch[0]


def test_set_of_an_attribute_of_a_mapping_leaves_its_items() -> None:
    batch = Attributed(a=1)

    batch_set(batch, "extra", 9)

    assert (dict(batch), batch.extra) == ({"a": 1}, 9)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("key", [1, [0, 2], (1, 2), slice(1, 3)])
def test_set_assigns_to_tensors_and_arrays_in_one_step(make: Any, key: Any) -> None:
    batch, expected = make((3, 4)), make((3, 4))
    expected[key] = 1.0

    assert expected.tolist() == batch_set(batch, key, 1.0).tolist()


def test_set_of_several_elements_of_a_vector_takes_one_value_each() -> None:
    result = batch_set(torch.zeros(4), (0, 2), torch.tensor([1.0, 2.0]))

    assert [1.0, 0.0, 2.0, 0.0] == result.tolist()


@pytest.mark.parametrize(
    ("batch", "key", "error", "match"),
    [
        ((1, 2), 2, IndexError, "of 2 parts, and has no 2"),
        ([1, 2], 2, IndexError, "of 2 parts, and has no 2"),
        ({"a": 1}, "b", KeyError, "b"),
        (Attributed(a=1), "b", KeyError, "b"),
        ((1, 2), "count", RuntimeError, "must name an item or an attribute"),
        ([1, 2], "append", RuntimeError, "must name an item or an attribute"),
        (Pair(1, 2), "count", RuntimeError, "must name an item or an attribute"),
        (Pair(1, 2), "z", RuntimeError, "must name an item or an attribute"),
        (SimpleNamespace(x=1), "y", RuntimeError, "must name an item or an attribute"),
    ],
)
def test_set_of_a_missing_part_raises_and_adds_nothing(
    batch: Any, key: Any, error: type[Exception], match: str
) -> None:
    before = repr(batch)

    with pytest.raises(error, match=match):
        batch_set(batch, key, 5)
    assert before == repr(batch)


def test_set_of_several_parts_changes_none_if_one_is_missing() -> None:
    batch = {"a": 1, "b": 2}

    with pytest.raises(KeyError, match="c"):
        batch_set(batch, ("a", "c"), (5, 6))
    assert {"a": 1, "b": 2} == batch


@pytest.mark.parametrize("value", [5, "xy", b"xy"])
def test_set_of_several_parts_needs_a_collection(value: Any) -> None:
    with pytest.raises(ValueError, match="must contain one element for each of the 2 keys, got"):
        batch_set({"a": 1, "b": 2}, ("a", "b"), value)


@pytest.mark.parametrize("value", [[5], (5, 6, 7), torch.zeros(3)])
def test_set_of_several_parts_needs_as_many_values(value: Any) -> None:
    with pytest.raises(ValueError, match=f"for each of the 2 keys, got {len(value)}"):
        batch_set({"a": 1, "b": 2}, ("a", "b"), value)


@pytest.mark.parametrize("batch", [{"image": 1, "label": 2}, UserDict({"image": 1, "label": 2})])
def test_a_missing_key_is_answered_with_those_that_there_are(batch: Any) -> None:
    for use in (lambda: batch_get(batch, 0), lambda: batch_set(batch, 0, 3)):
        with pytest.raises(KeyError) as caught:
            use()

        assert str(caught.value) == (
            f"The batch is a {type(batch).__name__} with the keys 'image', 'label', and has no 0. Pass the keys "
            f"to use, for example `input_key='image'` and `target_key='label'`."
        )


def test_a_missing_field_is_answered_with_those_that_there_are() -> None:
    @dataclass
    class Pair:
        image: int
        label: int

    with pytest.raises(TypeError, match=r"the fields 'image', 'label', and has no 0\..* `input_key='image'`"):
        batch_get(Pair(1, 2), 0)


@pytest.mark.parametrize(("key", "error"), [(2, IndexError), ("image", TypeError)])
def test_a_missing_part_is_answered_with_how_many_there_are(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"The batch is a tuple of 2 parts, and has no {key!r}. .* `input_key=0` and"):
        batch_get((1, 2), key)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": 1, "y": 2}, r"got a dict with the keys 'x', 'y'\. Make pairs: `DataSpec\("),
        ((1, 2, 3), r"got a tuple of 3 parts\. Make pairs: `DataSpec\("),
    ],
)
def test_what_is_no_pair_is_not_unpacked(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"`batch` must be a pair of inputs and targets for `Model`, {message}"):
        check_pair(batch, "Model")

    check_pair((1, 2), "Model")


@dataclass(frozen=True)
class Frozen:
    x: int
    y: int


def test_a_field_of_a_frozen_dataclass_is_replaced_in_a_copy() -> None:
    batch = Frozen(1, 2)

    assert batch_set(batch, "x", 3) == Frozen(3, 2)
    assert batch_set(batch, ("x", "y"), (4, 5)) == Frozen(4, 5)
    assert batch == Frozen(1, 2)
