"""`set_batch_sequence_length` against loops over rows."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.seq_length_warmup import (
    apply_curriculum,
    apply_seq_length_warmup,
    set_batch_sequence_length,
)


def make(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * length).view(rows, length)
    return {"input_ids": tokens, "labels": tokens + 1000, "attention_mask": torch.ones_like(tokens)}


def test_the_registered_functions_are_these() -> None:
    assert cf.set_batch_sequence_length is set_batch_sequence_length
    assert cf.apply_seq_length_warmup is apply_seq_length_warmup
    assert cf.apply_curriculum is apply_curriculum


@pytest.mark.parametrize("length", [1, 3, 7])
def test_sequences_are_truncated(length: int) -> None:
    before, batch = make(), make()
    result = set_batch_sequence_length(batch, length)

    assert batch is result
    assert before.keys() == batch.keys()
    for key, value in batch.items():
        assert [row[:length] for row in before[key].tolist()] == value.tolist()
        assert value.is_contiguous()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("length", [8, 9])
def test_sequences_that_are_short_enough_stay(length: int, truncate: bool) -> None:
    before = make()
    batch = set_batch_sequence_length(dict(before), length, truncate)

    assert all(before[key] is batch[key] for key in before)


def test_features_of_tokens_are_truncated_with_them() -> None:
    batch = set_batch_sequence_length({"x": torch.zeros(2, 8, 3), "ids": ["a", "b"]}, 5)

    assert (2, 5, 3) == batch["x"].shape
    assert ["a", "b"] == batch["ids"]


@given(data=st.data(), rows=st.integers(1, 5), length=st.integers(2, 9), extra=st.booleans())
def test_the_last_attended_token_is_kept(data: Any, rows: int, length: int, extra: bool) -> None:
    short = data.draw(st.integers(1, length - 1))
    attended = data.draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    before = make(rows, length)
    before["attention_mask"] = torch.tensor([[int(j < n) for j in range(length)] for n in attended])
    if extra:
        before["features"] = torch.randn(rows, length, 2)
    batch = set_batch_sequence_length(dict(before), short, preserve_end_of_sequence=True)

    for key, value in batch.items():
        for i, n in enumerate(attended):
            row = before[key][i, :short].clone()
            row[min(n, short) - 1] = before[key][i, n - 1]
            assert torch.equal(row, value[i])


def test_a_row_that_attends_to_nothing_does_not_matter() -> None:
    before = {**make(2, 4), "attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])}
    batch = set_batch_sequence_length(dict(before), 2, preserve_end_of_sequence=True)

    assert [[0, 1], [4, 7]] == batch["input_ids"].tolist()


@given(rows=st.integers(1, 6), length=st.integers(2, 12), data=st.data())
def test_reshaping_keeps_the_order_of_all_tokens_but_the_last_few(rows: int, length: int, data: Any) -> None:
    short = data.draw(st.integers(1, length - 1))
    before = make(rows, length)
    batch = set_batch_sequence_length(dict(before), short, truncate=False)

    assert before.keys() == batch.keys()
    for key, value in batch.items():
        kept = value.numel()
        assert short == value.shape[1]
        assert before[key].flatten()[:kept].tolist() == value.flatten().tolist()
        assert rows * length - kept < short


def test_sequences_that_are_not_contiguous_can_be_reshaped() -> None:
    tokens = torch.arange(12).view(4, 3).t()
    batch = set_batch_sequence_length({"input_ids": tokens}, 2, truncate=False)

    assert tokens.flatten().tolist() == batch["input_ids"].flatten().tolist()


@pytest.mark.parametrize("options", [{}, {"truncate": False}, {"preserve_end_of_sequence": True}])
def test_the_tensors_given_are_not_modified(options: dict[str, bool]) -> None:
    before, given_batch = make(), make()
    batch = set_batch_sequence_length(dict(given_batch), 3, **options)

    assert all(torch.equal(before[key], given_batch[key]) for key in before)
    assert all(batch[key] is not given_batch[key] for key in before)


def test_other_mappings_work() -> None:
    batch = set_batch_sequence_length(UserDict(make()), 3)

    assert isinstance(batch, UserDict)
    assert (4, 3) == batch["labels"].shape


def test_earlier_names_call_the_same_function() -> None:
    expected = set_batch_sequence_length(make(), 3, False)

    for other in (apply_seq_length_warmup(make(), 3, False), apply_curriculum(make(), 3, False)):
        assert all(torch.equal(expected[key], other[key]) for key in expected)


def test_batches_that_cannot_be_shortened_are_refused() -> None:
    no_mapping: Any = (torch.zeros(2, 8), torch.zeros(2))
    with pytest.raises(TypeError, match=r"`batch` must be a mapping of names to tensors, got tuple"):
        set_batch_sequence_length(no_mapping, 3)
    with pytest.raises(ValueError, match=r"at least two dimensions to truncate, got 'labels' of shape \(4,\)"):
        set_batch_sequence_length({**make(), "labels": torch.zeros(4)}, 3)
    with pytest.raises(ValueError, match=r"must hold 'attention_mask' for `preserve_end_of_sequence`"):
        set_batch_sequence_length({"input_ids": torch.zeros(2, 8)}, 3, preserve_end_of_sequence=True)
    with pytest.raises(ValueError, match=r"must hold 'input_ids' for `truncate=False`"):
        set_batch_sequence_length({"tokens": torch.zeros(2, 8)}, 3, truncate=False)
    with pytest.raises(ValueError, match=r"one shape for `truncate=False`, got 'labels' of shape \(4,\)"):
        set_batch_sequence_length({**make(), "labels": torch.zeros(4)}, 3, truncate=False)
    with pytest.raises(ValueError, match=r"`curr_seq_len` must be at least 1, got 0"):
        set_batch_sequence_length(make(), 0)


@pytest.mark.parametrize("first", ["labels", "input_ids"])
def test_the_length_is_that_of_the_tokens_whatever_comes_first(first: str) -> None:
    batch = {"labels": torch.arange(6).view(2, 3), "input_ids": torch.arange(32).view(2, 16)}
    batch = {first: batch[first], **batch}
    cut = set_batch_sequence_length(dict(batch), 8)

    assert torch.equal(batch["input_ids"][:, :8], cut["input_ids"])
    assert torch.equal(batch["labels"], cut["labels"])


def test_labels_of_another_length_are_truncated_to_the_same_one() -> None:
    """Those of an encoder-decoder."""
    batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(20).view(2, 10)}

    assert torch.equal(batch["labels"][:, :8], set_batch_sequence_length(dict(batch), 8)["labels"])


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("labels", torch.zeros(2), r"add a second dimension: `labels\[:, None\]`"),
        ("labels", torch.zeros(2, 12), r"sequences of the same length, 16, .* one value per class"),
        ("attention_mask", torch.ones(2, 16, 16), r"`attention_mask` must have shape \(N, S\) to truncate"),
        ("attention_mask", torch.ones(2, 1, 16, 16), r"`attention_mask` must have shape \(N, S\) to truncate"),
    ],
)
def test_tensors_that_are_not_sequences_are_refused(name: str, value: torch.Tensor, match: str) -> None:
    batch = {"input_ids": torch.arange(32).view(2, 16), name: value}
    with pytest.raises(ValueError, match=match):
        set_batch_sequence_length(dict(batch), 8)

    assert value is set_batch_sequence_length(dict(batch), 16)[name]


def test_one_value_per_example_may_have_a_second_dimension() -> None:
    for labels in (torch.tensor([[1], [2]]), torch.tensor([[0.5], [1.5]])):
        batch = {"input_ids": torch.arange(32).view(2, 16), "labels": labels}

        assert torch.equal(labels, set_batch_sequence_length(batch, 8)["labels"])


def test_ends_are_kept_only_by_a_mask_of_the_same_length() -> None:
    batch = {"input_ids": torch.arange(32).view(2, 16), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    with pytest.raises(ValueError, match="`attention_mask` must be as long as the sequences, 16"):
        set_batch_sequence_length(batch, 8, preserve_end_of_sequence=True)
