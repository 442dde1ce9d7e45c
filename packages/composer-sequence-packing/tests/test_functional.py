"""`pack_sequences`, the masks, and `count_tokens`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader

from composer.algorithms.sequence_packing import count_tokens, make_block_mask, make_document_mask, pack_sequences

LENGTH = 12
LENGTHS = st.lists(st.integers(1, LENGTH), min_size=1, max_size=30)


def documents_of(lengths: list[int]) -> list[torch.Tensor]:
    """Documents of tokens that are all different, from 1 on."""
    return list(torch.arange(1, sum(lengths) + 1).split(lengths))


def padded(documents: list[torch.Tensor]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@given(LENGTHS)
def test_every_document_is_whole_and_in_one_row_once(lengths: list[int]) -> None:
    documents = documents_of(lengths)
    packed = pack_sequences(documents, LENGTH)

    assert packed["input_ids"].shape[1] == LENGTH
    for index, document in enumerate(documents):
        rows, places = torch.nonzero(packed["document_ids"] == index, as_tuple=True)
        assert len(set(rows.tolist())) == 1
        assert places.tolist() == list(range(int(places[0]), int(places[0]) + len(document)))
        assert torch.equal(packed["input_ids"][rows, places], document)
        assert packed["position_ids"][rows, places].tolist() == list(range(len(document)))
        assert packed["labels"][rows, places].tolist() == [-100, *document[1:].tolist()]
    is_padding = packed["document_ids"] == -1
    assert torch.equal(packed["attention_mask"], (~is_padding).long())
    assert int(packed["attention_mask"].sum()) == sum(lengths)
    assert packed["input_ids"][is_padding].eq(0).all()
    assert packed["labels"][is_padding].eq(-100).all()
    assert packed["position_ids"][is_padding].eq(0).all()


@given(LENGTHS)
def test_rows_are_full_and_in_the_order_of_their_documents(lengths: list[int]) -> None:
    ids = pack_sequences(documents_of(lengths), LENGTH)["document_ids"]
    members = [sorted(set(row.tolist()) - {-1}) for row in ids]
    sizes = (ids >= 0).sum(1).tolist()

    assert members == sorted(members)
    for row, documents in zip(ids, members, strict=True):
        assert row[row >= 0].tolist() == [each for each in documents for _ in range(lengths[each])]
        assert (row[int((row >= 0).sum()) :] == -1).all()
    assert all(one + other > LENGTH for i, one in enumerate(sizes) for other in sizes[:i])
    assert len(ids) <= max(1, 2 * sum(lengths) // LENGTH)


@given(LENGTHS, st.integers(2, LENGTH))
def test_long_documents_are_split_into_full_ones_and_a_rest(lengths: list[int], length: int) -> None:
    documents = documents_of(lengths)
    packed = pack_sequences(padded(documents), length, split_long=True)
    parts = [part for document in documents for part in document.split(length)]

    for key, value in pack_sequences(parts, length).items():
        assert torch.equal(value, packed[key]), key


@given(LENGTHS)
def test_a_padded_batch_is_packed_as_its_documents_are(lengths: list[int]) -> None:
    documents = documents_of(lengths)
    expected = pack_sequences(documents, LENGTH)
    mappings = [{"input_ids": document.tolist()} for document in documents]
    batch = padded(documents)
    left = {key: value.flip(1) for key, value in padded([document.flip(0) for document in documents]).items()}

    for other in (batch, mappings, left):
        packed = pack_sequences(other, LENGTH)
        assert packed.keys() == expected.keys()
        assert all(torch.equal(packed[key], expected[key]) for key in expected)
    assert torch.equal(batch["input_ids"], padded(documents)["input_ids"]), "the batch is not modified"


def test_documents_fill_the_fullest_row_that_has_room() -> None:
    packed = pack_sequences(documents_of([3, 6, 4, 2, 5]), 10)

    # 6, 5, then 4 with 6, 3 with 5, and 2 in what is left of the latter.
    assert [sorted(set(row.tolist()) - {-1}) for row in packed["document_ids"]] == [[0, 3, 4], [1, 2]]


def test_labels_of_encoders_and_values_of_tokens_stay_with_their_tokens() -> None:
    batch = padded(documents_of([2, 3]))
    batch |= {"labels": batch["input_ids"] * 2, "weights": batch["input_ids"][..., None].double(), "name": "text"}
    packed = pack_sequences(batch, 6, causal=False, first_position=2, pad_token_id=9)

    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9]]
    assert packed["labels"].tolist() == [[2, 4, 6, 8, 10, -100]]
    assert packed["weights"].tolist() == [[[1.0], [2.0], [3.0], [4.0], [5.0], [0.0]]]
    assert packed["position_ids"].tolist() == [[2, 3, 2, 3, 4, 2]]
    assert packed["name"] == "text"
    assert "labels" not in pack_sequences(documents_of([2]), 6, causal=False)


def test_values_of_documents_are_kept_if_no_row_is_shared() -> None:
    batch = {**padded(documents_of([4, 3, 4])), "classes": torch.tensor([7, 8, 9]), "texts": ["a", "b", "c"]}
    packed = pack_sequences(batch, 6)

    assert packed["classes"].tolist() == [7, 8, 9]
    assert packed["document_ids"][:, 0].tolist() == [0, 1, 2]
    for key in ("classes", "texts"):
        rest = {name: value for name, value in batch.items() if name in (key, "input_ids", "attention_mask")}
        with pytest.raises(ValueError, match=f"{key!r} has one for each document"):
            pack_sequences(rest, 8)


def test_documents_without_tokens_are_left_out() -> None:
    batch = padded(documents_of([2, 3]))
    batch["attention_mask"][0] = 0

    assert pack_sequences(batch, 4)["input_ids"].tolist() == [[3, 4, 5, 0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_packs_where_it_collates(workers: int) -> None:
    documents = documents_of([3, 5, 2, 4])
    collate = partial(pack_sequences, length=8)
    loader: Any = DataLoader(documents, batch_size=2, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    batches = list(loader)

    assert [batch["input_ids"].tolist() for batch in batches] == [
        [[1, 2, 3, 4, 5, 6, 7, 8]],
        [[9, 10, 11, 12, 13, 14, 0, 0]],
    ]


@pytest.mark.parametrize(
    ("documents", "arguments", "error", "message"),
    [
        ([[1]], {"length": 0}, ValueError, "`length` must be"),
        ([[1, 2]], {"length": 1, "split_long": True}, ValueError, "`length` must be at least 2.* no next token"),
        ([[1]], {"length": 2.0}, TypeError, "`length` must be"),
        ([[1]], {"pad_token_id": -1}, ValueError, "`pad_token_id` must not be negative"),
        ([[1]], {"first_position": -1}, ValueError, "`first_position` must not be negative"),
        ([[1]], {"causal": 2}, TypeError, "`causal` must be"),
        ([[1]], {"split_long": 2}, TypeError, "`split_long` must be"),
        ("text", {}, TypeError, "`documents` must be a mapping or a sequence of documents, got str"),
        ([], {}, ValueError, "`documents` must not be empty"),
        ([[1, 2, 3, 4, 5]], {}, ValueError, "`documents` must not have more than `length` tokens, 4, got one with 5"),
        ({"labels": torch.ones(2, 2)}, {}, ValueError, r"`input_ids` of shape \(N, S\), got NoneType"),
        ({"input_ids": torch.ones(2)}, {}, ValueError, r"`input_ids` of shape \(N, S\), got shape \(2,\)"),
        (
            {"input_ids": torch.ones(2, 2), "attention_mask": torch.ones(2, 1, 2, 2)},
            {},
            ValueError,
            r"`attention_mask` must have the shape of `input_ids`, \(2, 2\), got \(2, 1, 2, 2\)",
        ),
        ({"input_ids": torch.ones(1, 2), "attention_mask": torch.zeros(1, 2)}, {}, ValueError, "got only padding"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, ValueError, "a value for each token, which 'labels' has not"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    documents: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_sequences(documents, **{"length": 4, **arguments})


@pytest.mark.parametrize("causal", [True, False])
def test_tokens_see_their_own_document(causal: bool) -> None:
    ids = pack_sequences(documents_of([3, 5, 2, 4]), 9)["document_ids"]
    mask = make_document_mask(ids, causal=causal)

    assert mask.shape == (2, 1, 9, 9)
    for row, tokens in enumerate(ids.tolist()):
        expected = [[a == b and (i >= j or not causal) for j, b in enumerate(tokens)] for i, a in enumerate(tokens)]
        assert mask[row, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_additive_mask_has_the_scores_of_a_bool_one(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 0, 1, -1]])
    mask, additive = make_document_mask(ids), make_document_mask(ids, dtype=dtype)

    assert additive.dtype == dtype
    assert torch.equal(additive == 0, mask)
    assert torch.equal(
        additive.softmax(-1), torch.zeros(mask.shape).masked_fill(~mask, -math.inf).softmax(-1).to(dtype)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_a_block_mask_has_the_attention_of_a_dense_one(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (12,), generator=generator).tolist()
    ids = pack_sequences(documents_of(lengths), 256)["document_ids"]
    query, key, value = torch.randn(3, len(ids), 2, 256, 16, generator=generator)
    mask = make_document_mask(ids, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = flex_attention(query, key, value, block_mask=make_block_mask(ids, causal=causal))

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [make_document_mask, make_block_mask])
def test_masks_need_the_documents_of_rows(make: Any) -> None:
    with pytest.raises(ValueError, match=r"`document_ids` must have shape \(R, L\), got \(3,\)"):
        make(torch.zeros(3))


def test_masks_of_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`dtype` must be `torch.bool` or a floating dtype, got torch.int64"):
        make_document_mask(torch.zeros(1, 3), dtype=torch.int64)


@given(LENGTHS)
def test_tokens_are_counted_alike_packed_or_not(lengths: list[int]) -> None:
    batch = padded(documents_of(lengths))
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    expected = {"total": sum(lengths), "loss_generating": sum(lengths) - len(lengths)}

    assert count_tokens(batch) == expected
    assert count_tokens(pack_sequences(batch, LENGTH)) == expected
    unshifted = {"total": sum(lengths), "loss_generating": sum(lengths)}
    assert count_tokens(batch, causal=False) == unshifted
    assert count_tokens(pack_sequences(batch, LENGTH, causal=False), causal=False) == unshifted


def test_all_tokens_count_without_labels_and_mask() -> None:
    assert count_tokens({"input_ids": torch.ones(2, 5)}) == {"total": 10, "loss_generating": 8}
