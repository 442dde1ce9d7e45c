"""`DataSpec`, splitting and counting, against slow and obvious references."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from composer.core.data_spec import (
    DataSpec,
    _check_list_is_primitives,
    _default_split_batch,
    _split_list,
    _split_mapping,
    _split_tensor,
    default_split_batch,
    ensure_data_spec,
)

# A busy machine is no failure.
relaxed = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])

Pair = namedtuple("Pair", ["image", "label"])


def loader(samples: int = 8, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 2)), **{"batch_size": 4, **arguments})


def joined(parts: list[Any]) -> Any:
    """The batch that was split: the inverse of splitting, written without any of its code."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined([part[i] for part in parts]) for i in range(len(first)))
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    return first


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def fields(samples: int) -> st.SearchStrategy[Any]:
    """Anything with this number of samples: tensors, lists of strings, and nestings of them."""
    tensor = st.sampled_from([(), (2,), (2, 3)]).map(lambda shape: torch.rand(samples, *shape))
    strings = st.lists(st.text(max_size=2), min_size=samples, max_size=samples)
    leaf = tensor | strings
    shared = st.integers() | st.text(max_size=2) | st.booleans() | st.just(torch.tensor(0.5))

    def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        rest = st.dictionaries(st.sampled_from("cd"), children | shared)
        mapping = st.builds(lambda first, others: {"a": first, **others}, children, rest)
        return st.lists(children, min_size=1, max_size=3).map(tuple) | mapping

    return st.recursive(leaf, nested, max_leaves=6)


class TestSplitting:
    @relaxed
    @given(st.integers(2, 9), st.integers(1, 4), st.data())
    def test_the_parts_of_any_nesting_have_the_size_and_make_up_the_batch(
        self, samples: int, size: int, data: st.DataObject
    ) -> None:
        batch = data.draw(fields(samples))
        size = min(size, samples)

        parts = list(default_split_batch(batch, size))

        assert -(-samples // size) == len(parts)
        if isinstance(batch, list):  # a batch that is a list of strings; its parts have no shape
            sizes = [len(part) for part in parts]
        else:
            sizes = [DataSpec([]).get_num_samples_in_batch(part) for part in parts]
        assert sizes == [min(size, samples - start) for start in range(0, samples, size)]
        assert same(batch, joined(parts))

    @relaxed
    @given(st.integers(1, 9), st.data())
    def test_a_batch_that_fits_is_not_touched(self, samples: int, data: st.DataObject) -> None:
        batch = data.draw(fields(samples))

        parts = default_split_batch(batch, samples)

        assert len(parts) == 1
        assert parts[0] is batch

    @pytest.mark.parametrize(
        "batch",
        [torch.zeros(3, 2), (torch.zeros(3), torch.zeros(3)), {"a": torch.zeros(3), "b": ["x", "y", "z"]}, ["x"] * 3],
        ids=["tensor", "tuple", "mapping", "list"],
    )
    def test_a_batch_that_is_too_short_is_not_split_and_warns(self, batch: Any) -> None:
        with pytest.warns(UserWarning, match="Cannot split tensor of length 3 .* microbatches of size 4"):
            parts = default_split_batch(batch, 4)

        assert len(parts) == 1
        assert parts[0] is batch

    def test_tensors_share_memory_with_their_parts(self) -> None:
        batch = torch.arange(6)

        parts = default_split_batch(batch, 2)
        parts[1].zero_()

        assert [0, 1, 0, 0, 4, 5] == batch.tolist()

    def test_a_pair_becomes_tuples_and_a_mapping_becomes_dicts(self) -> None:
        pairs = default_split_batch([torch.arange(4), ["a", "b", "c", "d"]], 2)
        mappings = default_split_batch(UserDict(x=torch.arange(4)), 2)

        assert [(torch.Tensor, list)] * 2 == [tuple(type(field) for field in pair) for pair in pairs]
        assert [tuple] * 2 == [type(pair) for pair in pairs]
        assert [dict] * 2 == [type(mapping) for mapping in mappings]

    def test_a_named_tuple_keeps_its_names(self) -> None:
        parts = default_split_batch(Pair(torch.arange(4), torch.arange(4)), 2)

        assert [[0, 1], [2, 3]] == [part.label.tolist() for part in parts]

    def test_primitives_of_a_mapping_go_into_every_part(self) -> None:
        parts = default_split_batch({"x": torch.arange(4), "mode": "train", "extra": {"scale": 2.0}}, 2)

        assert [("train", {"scale": 2.0})] * 2 == [(part["mode"], part["extra"]) for part in parts]

    def test_a_mapping_without_samples_is_not_split(self) -> None:
        batch = {"mode": "train"}

        parts = default_split_batch(batch, 2)

        assert len(parts) == 1
        assert parts[0] is batch

    def test_entries_per_sample_are_distinguished_from_fields(self) -> None:
        """Boxes differ in number from image to image, so they are no field; a collated pair of features is."""
        boxes = [torch.zeros(count, 4) for count in (1, 2, 3, 4)]
        features = [torch.arange(4), torch.arange(4)]

        parts = default_split_batch({"image": torch.zeros(4, 3), "boxes": boxes, "features": features}, 2)

        assert [[1, 2], [3, 4]] == [[len(box) for box in part["boxes"]] for part in parts]
        assert [[0, 1], [0, 1]] == [feature.tolist() for feature in parts[0]["features"]]
        assert 4 == DataSpec([]).get_num_samples_in_batch({"image": torch.zeros(4, 3), "boxes": boxes})

    def test_nested_fields_without_samples_go_into_every_microbatch(self) -> None:
        scales = (torch.tensor(1.0), torch.tensor(2.0))

        parts = default_split_batch((torch.arange(4), scales), 2)

        assert [(part.tolist(), rest) for part, rest in parts] == [([0, 1], scales), ([2, 3], scales)]

    @pytest.mark.parametrize("entry", [torch.tensor, lambda i: {"id": i}, lambda i: {"id": torch.tensor(i)}])
    def test_a_list_with_an_entry_per_sample_is_split_by_entry(self, entry: Any) -> None:
        entries = [entry(i) for i in range(4)]
        parts = default_split_batch({"x": torch.zeros(4, 3), "meta": entries}, 2)

        assert [entries[:2], entries[2:]] == [list(part["meta"]) for part in parts]

    def test_a_list_of_objects_next_to_tensors_is_split_by_entry(self) -> None:
        batch = (torch.arange(4), [{"boxes": torch.zeros(count, 4), "id": count} for count in range(4)])

        parts = default_split_batch(batch, 2)

        assert [[0, 1], [2, 3]] == [[entry["id"] for entry in part[1]] for part in parts]

    @pytest.mark.parametrize("size", [2.0, 0.5])
    def test_a_float_size_is_refused(self, size: float) -> None:
        with pytest.raises(ValueError, match="`microbatch_size` must be an integer"):
            default_split_batch(torch.zeros(4), size)

    def test_a_size_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`microbatch_size` must be positive, got 0"):
            default_split_batch(torch.zeros(4), 0)

    @pytest.mark.parametrize("batch", [{1, 2}, "text", 5, None])
    def test_other_batches_are_not_implemented(self, batch: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"cannot be split by default. Pass `split_batch`"):
            default_split_batch(batch, 2)

    @pytest.mark.parametrize("batch", [(torch.zeros(4), 5), {"x": torch.zeros(4), "y": {1, 2}}, [1, "a"]])
    def test_other_elements_are_refused(self, batch: Any) -> None:
        with pytest.raises(ValueError, match="must consist of tensors, lists, tuples and mappings"):
            default_split_batch(batch, 2)

    @pytest.mark.parametrize(
        "batch",
        [(torch.zeros(4), torch.zeros(6)), {"x": torch.zeros(4), "y": torch.zeros(6)}],
        ids=["tuple", "mapping"],
    )
    def test_samples_are_not_dropped_to_make_elements_agree(self, batch: Any) -> None:
        with pytest.raises(ValueError, match=r"same number of microbatches, got \[2, 3\]"):
            default_split_batch(batch, 2)

    def test_the_private_helpers_of_the_reference_work(self) -> None:
        assert [[0, 1], [2]] == [part.tolist() for part in _split_tensor(torch.arange(3), 2)]
        assert [("a", "b"), ("c",)] == _split_list(("a", "b", "c"), 2)
        assert [{"x": [1, 2]}, {"x": [3]}] == _split_mapping({"x": [1, 2, 3]}, 2)
        assert _default_split_batch is default_split_batch

    @relaxed
    @example([1, True])
    @given(st.lists(st.integers() | st.booleans() | st.floats() | st.text() | st.none()))
    def test_primitives_are_lists_of_one_primitive_type(self, items: list[Any]) -> None:
        expected = any(all(type(item) is kind for item in items) for kind in (int, bool, float, str))

        assert expected == _check_list_is_primitives(items)


class TestCounting:
    @relaxed
    @given(st.integers(1, 9), st.data())
    def test_the_samples_of_any_nesting_are_counted(self, samples: int, data: st.DataObject) -> None:
        batch = (torch.zeros(samples), data.draw(fields(samples)))

        assert samples == DataSpec([])._default_get_num_samples_in_batch(batch)

    @pytest.mark.parametrize(
        "batch",
        [
            torch.zeros(4, 2),
            (torch.zeros(4), (torch.zeros(4), torch.zeros(4))),
            [torch.zeros(4), {"a": torch.zeros(4)}],
            {"x": torch.zeros(4), "names": list("abcd"), "mode": "train", "temperature": torch.tensor(1.0)},
            {"names": list("abcd")},
            (torch.zeros(4).numpy(), torch.zeros(4)),
        ],
        ids=["tensor", "nested tuple", "mapping in list", "mapping", "strings", "numpy"],
    )
    def test_the_usual_forms_are_counted(self, batch: Any) -> None:
        assert 4 == DataSpec([]).get_num_samples_in_batch(batch)

    @pytest.mark.parametrize("batch", [["a", "b"], (torch.zeros(2), 5), 5, {"mode": "train"}, torch.tensor(1.0)])
    def test_a_batch_without_shape_is_refused(self, batch: Any) -> None:
        with pytest.raises(ValueError, match="Unable to determine the number of samples"):
            DataSpec([]).get_num_samples_in_batch(batch)

    @pytest.mark.parametrize(
        "batch",
        [(torch.zeros(2), torch.zeros(3)), {"x": torch.zeros(2), "names": list("abc")}],
        ids=["tuple", "mapping"],
    )
    def test_different_sizes_are_not_implemented(self, batch: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"multiple Tensors .* \[2, 3\]"):
            DataSpec([]).get_num_samples_in_batch(batch)

    def test_tokens_are_the_elements_of_input_ids(self) -> None:
        spec = DataSpec([])

        assert 12 == spec.get_num_tokens_in_batch({"input_ids": torch.zeros(3, 4)})
        assert 12 == spec._default_get_num_tokens_in_batch({"input_ids": torch.zeros(3, 4, 2)})
        assert 5 == spec.get_num_tokens_in_batch({"input_ids": torch.zeros(5)})

    def test_tokens_come_from_the_dataset_otherwise(self) -> None:
        dataset = TensorDataset(torch.zeros(8, 2))
        dataset.max_seq_len = 10

        assert 40 == DataSpec(DataLoader(dataset, batch_size=4)).get_num_tokens_in_batch([torch.zeros(4, 2)])
        assert 0 == DataSpec(loader()).get_num_tokens_in_batch([torch.zeros(4, 2)])

    def test_token_types_are_counted_separately(self) -> None:
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": 8, "loss_generating": 6})

        assert 8 == spec.get_num_tokens_in_batch(None)
        assert 6 == spec.get_num_tokens_in_batch(None, token_type="loss_generating")

    def test_one_number_stands_for_every_type(self) -> None:
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: 8)

        assert 8 == spec.get_num_tokens_in_batch(None, token_type="loss_generating")

    def test_a_missing_token_type_is_refused(self) -> None:
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": 8})

        with pytest.raises(ValueError, match=r"must return 'loss_generating' among the token types, got \['total'\]"):
            spec.get_num_tokens_in_batch(None, token_type="loss_generating")

    @pytest.mark.parametrize("number", [np.int64(8), np.uint8(8), torch.tensor(8), torch.tensor([8])])
    def test_integers_of_any_library_become_plain_ones(self, number: Any) -> None:
        spec = DataSpec([], number, number, None, None, None, lambda batch: number, lambda batch: number)
        typed = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": number})

        counts = [spec.num_samples, spec.num_tokens, spec.get_num_samples_in_batch(None)]
        counts += [spec.get_num_tokens_in_batch(None), typed.get_num_tokens_in_batch(None)]
        assert [(type(count), count) for count in counts] == [(int, 8)] * 5

    @pytest.mark.parametrize("number", [torch.tensor(8, device="meta"), torch.tensor(8.0), 8.0, True, "8", None])
    def test_other_numbers_of_tokens_are_refused(self, number: Any) -> None:
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: number)

        with pytest.raises(ValueError, match=r"must return an int or a dict of ints, got .* Count on the host"):
            spec.get_num_tokens_in_batch(None)

    @pytest.mark.parametrize("number", [torch.tensor(8, device="meta"), torch.tensor(8.0), True, "8", None])
    def test_other_numbers_of_samples_are_refused(self, number: Any) -> None:
        spec = DataSpec([], get_num_samples_in_batch=lambda batch: number)

        with pytest.raises(ValueError, match="`get_num_samples_in_batch` must return a number"):
            spec.get_num_samples_in_batch(None)

    def test_fractions_of_a_sample_are_counted(self) -> None:
        assert 0.5 == DataSpec([], get_num_samples_in_batch=lambda batch: np.float32(0.5)).get_num_samples_in_batch(0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class TestDataSpec:
    def test_the_functions_given_are_the_functions_used(self) -> None:
        def function(batch: Any, *_: Any) -> Any:
            return batch

        spec = DataSpec([], 5, 50, function, function, function)

        assert (5, 50) == (spec.num_samples, spec.num_tokens)
        assert {function} == {
            spec.batch_transforms,
            spec.microbatch_transforms,
            spec.split_batch,
        }

    def test_the_default_transforms_change_nothing(self) -> None:
        spec, batch = DataSpec([]), object()

        assert spec.batch_transforms(batch) is batch
        assert spec.microbatch_transforms(batch) is batch
        assert spec.split_batch is default_split_batch

    def test_the_number_of_samples_comes_from_a_sized_dataset(self) -> None:
        assert 8 == DataSpec(loader(8)).num_samples
        assert 5 == DataSpec(loader(8), num_samples=5).num_samples
        assert DataSpec(DataLoader(Stream())).num_samples is None
        assert DataSpec([1, 2]).num_samples is None

    @pytest.mark.parametrize(
        "name",
        [
            "batch_transforms",
            "microbatch_transforms",
            "split_batch",
            "get_num_samples_in_batch",
            "get_num_tokens_in_batch",
        ],
    )
    def test_what_can_not_be_called_is_refused(self, name: str) -> None:
        with pytest.raises(TypeError, match=f"`{name}` must be a function, got 5"):
            DataSpec([], **{name: 5})  # type: ignore[arg-type]

    def test_a_dataloader_that_is_being_iterated_is_refused(self) -> None:
        active = loader(num_workers=1, persistent_workers=True)
        iterator = iter(active)

        with pytest.raises(ValueError, match="must not have an active iterator"):
            DataSpec(active)
        list(iterator)

    def test_ensure_makes_a_spec_of_everything_but_a_spec(self) -> None:
        spec = DataSpec([])

        assert ensure_data_spec(spec) is spec
        batches = [torch.zeros(1)]
        assert batches is ensure_data_spec(batches).dataloader
        assert 3 == ensure_data_spec({"dataloader": [1], "num_samples": 3}).num_samples


class TestRanks:
    @pytest.fixture(autouse=True)
    def two_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("composer.utils.dist.get_world_size", lambda: 2)

    def test_reading_the_same_samples_on_every_rank_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must use a `DistributedSampler` on 2 ranks, got SequentialSampler"):
            DataSpec(loader())

    @pytest.mark.parametrize("how", ["sampler", "batch_sampler", "sampler of batch_sampler", "stream", "list"])
    def test_everything_else_is_taken(self, how: str) -> None:
        dataset = TensorDataset(torch.zeros(8, 2))
        sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
        batches = BatchSampler(sampler, 4, drop_last=False)
        dataloader = {
            "sampler": lambda: DataLoader(dataset, sampler=sampler),
            "batch_sampler": lambda: DataLoader(dataset, batch_sampler=sampler),
            "sampler of batch_sampler": lambda: DataLoader(dataset, batch_sampler=batches),
            "stream": lambda: DataLoader(Stream()),
            "list": lambda: [torch.zeros(4)],
        }[how]()

        assert DataSpec(dataloader).dataloader is dataloader


def test_splitting_what_fits_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default_split_batch((torch.zeros(4), torch.zeros(4)), 4)


class OfHuggingFace(Dataset[Any]):
    """As a `datasets.Dataset`: columns with features, and a format."""

    def __init__(self, kind: str | None, **features: str) -> None:
        self.format = {"type": kind}
        self.features = {name: type(feature, (), {})() for name, feature in features.items()}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": [1.0, 2.0], "y": 0}

    def with_format(self, kind: str) -> Any:
        return OfHuggingFace(kind)


OfHuggingFace.__module__ = "datasets.arrow_dataset"


class OfAModuleCalledDatasets:
    """A loader of the user's."""

    def __iter__(self) -> Any:
        yield torch.zeros(2, 3)


OfAModuleCalledDatasets.__module__ = "datasets.loaders"


def test_a_module_of_the_user_may_be_called_datasets() -> None:
    assert DataSpec(OfAModuleCalledDatasets()).num_samples is None


def test_lists_of_hugging_face_data_sets_are_told() -> None:
    lists, numbers = OfHuggingFace(None, x="List", y="Value"), OfHuggingFace(None, y="ClassLabel")
    with pytest.warns(UserWarning, match=r"columns 'x' of the dataset.*with_format\('torch'\)"):
        DataSpec(DataLoader(lists))
    for loader in (
        DataLoader(lists, collate_fn=list),
        DataLoader(numbers),
        DataLoader(OfHuggingFace("torch", x="List")),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DataSpec(loader)


class Samples(IterableDataset[Any]):
    """Yields samples, or batches of two."""

    def __init__(self, batched: bool) -> None:
        self.batched = batched

    def __iter__(self) -> Any:
        for _ in range(3):
            shape = (2,) if self.batched else ()
            yield torch.zeros(*shape, 3, 8, 8), torch.zeros(shape, dtype=torch.int64)


def test_an_iterable_data_set_of_samples_is_told_at_its_first_item() -> None:
    spec = DataSpec(Samples(batched=False))
    with pytest.raises(TypeError, match=r"Samples whose first item is a sample: inputs of shape \(3, 8, 8\) and one"):
        spec.get_num_samples_in_batch(next(iter(spec.dataloader)))

    spec = DataSpec(Samples(batched=True))
    assert [spec.get_num_samples_in_batch(batch) for batch in spec.dataloader] == [2, 2, 2]
    spec = DataSpec(Samples(batched=False), get_num_samples_in_batch=lambda batch: 1)
    assert [spec.get_num_samples_in_batch(batch) for batch in spec.dataloader] == [1, 1, 1]


def test_a_loader_that_makes_no_batches_of_samples_is_told_at_its_first_item() -> None:
    spec = DataSpec(DataLoader(Samples(batched=False), batch_size=None))
    with pytest.raises(TypeError, match=r"a DataLoader whose first item is a sample.*Pass `batch_size=\.\.\.` to it"):
        spec.get_num_samples_in_batch(next(iter(spec.dataloader)))

    spec = DataSpec(DataLoader(Samples(batched=True), batch_size=None))
    assert [spec.get_num_samples_in_batch(batch) for batch in spec.dataloader] == [2, 2, 2]


class Items(IterableDataset[Any]):
    """Yields the given batches."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_arrays_of_an_iterable_data_set_become_tensors_as_in_a_loader() -> None:
    arrays = (np.zeros((2, 3)), {"y": np.arange(2), "names": ["a", "b"]})
    spec = DataSpec(Items(arrays, arrays))
    for batch in spec.dataloader:
        inputs, others = spec.batch_transforms(batch)
        assert isinstance(inputs, torch.Tensor)
        assert (torch.arange(2).tolist(), ["a", "b"]) == (others["y"].tolist(), others["names"])

    tensors = (torch.zeros(2, 3), torch.arange(2))
    spec = DataSpec(Items(tensors, tensors))
    assert all(spec.batch_transforms(batch) is tensors for batch in spec.dataloader)
    spec = DataSpec(Items(arrays), batch_transforms=lambda batch: batch)
    assert spec.batch_transforms(arrays) is arrays


class TestCountBatch:
    """`count_batch`, which a loop calls at every step, against the two methods."""

    @relaxed
    @given(st.integers(1, 5), st.data())
    def test_it_counts_what_the_methods_count(self, samples: int, data: st.DataObject) -> None:
        spec = DataSpec([])
        drawn = data.draw(fields(samples).filter(lambda batch: not isinstance(batch, list)))
        for batch in (drawn, (torch.zeros(samples, 2), torch.zeros(samples))):
            expected = (spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch))
            assert expected == spec.count_batch(batch)
            assert samples == expected[0]

    @pytest.mark.parametrize(
        "arguments",
        [{"get_num_samples_in_batch": lambda batch: 7}, {"get_num_tokens_in_batch": lambda batch: {"total": 9}}],
        ids=["samples", "tokens"],
    )
    def test_functions_of_the_user_count(self, arguments: dict[str, Any]) -> None:
        batch = (torch.zeros(3), torch.zeros(3))
        expected = (7, 0) if "get_num_samples_in_batch" in arguments else (3, 9)

        assert expected == DataSpec([], **arguments).count_batch(batch)

    def test_methods_that_were_replaced_count(self) -> None:
        class Doubled(DataSpec):
            def get_num_samples_in_batch(self, batch: Any) -> int | float:
                return 2 * super().get_num_samples_in_batch(batch)

        batch = (torch.zeros(3), torch.zeros(3))
        assert (6, 0) == Doubled([]).count_batch(batch)
        spec: Any = DataSpec([])
        spec.get_num_tokens_in_batch = lambda batch: 5
        assert (3, 5) == spec.count_batch(batch)

        class Tokens(DataSpec):
            def get_num_tokens_in_batch(self, batch: Any, token_type: str = "total") -> int:
                return 4

        assert (3, 4) == Tokens([]).count_batch(batch)

        class Default(DataSpec):
            def _default_get_num_tokens_in_batch(self, batch: Any) -> int:
                return 9

        assert (3, 9) == Default([]).count_batch(batch)

    def test_a_patched_class_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DataSpec, "get_num_samples_in_batch", lambda self, batch: 100)
        monkeypatch.setattr(DataSpec, "get_num_tokens_in_batch", lambda self, batch, token_type="total": 5)

        assert (100, 5) == DataSpec([]).count_batch((torch.zeros(3), torch.zeros(3)))

    def test_max_seq_len_counts_tokens(self) -> None:
        data: Any = loader()
        data.dataset.max_seq_len = 16

        assert (3, 48) == DataSpec(data).count_batch((torch.zeros(3), torch.zeros(3)))

    @pytest.mark.parametrize("batch", [(), (torch.zeros(()),), (torch.zeros(3), torch.zeros(2))], ids=str)
    def test_what_cannot_be_counted_is_told_as_by_the_method(self, batch: Any) -> None:
        spec = DataSpec([])
        with pytest.raises((ValueError, NotImplementedError)) as expected:
            spec.get_num_samples_in_batch(batch)
        with pytest.raises(expected.type) as error:
            spec.count_batch(batch)
        assert str(expected.value) == str(error.value)

    def test_a_loader_that_yields_samples_is_told(self) -> None:
        data = DataLoader(TensorDataset(torch.zeros(8, 3, 4), torch.zeros(8, 3)), batch_size=None)
        spec = DataSpec(data)
        message = None
        try:
            DataSpec(data).get_num_samples_in_batch(next(iter(data)))
        except TypeError as error:
            message = str(error)
        if message is None:
            assert 3 == spec.count_batch(next(iter(data)))[0]
        else:
            with pytest.raises(TypeError) as told:
                spec.count_batch(next(iter(data)))
            assert message == str(told.value)


def test_tokens_in_lists_are_told() -> None:
    with pytest.raises(ValueError, match=r"`batch\['input_ids'\]` must be a tensor, .* got list\. Make it one"):
        DataSpec([]).get_num_tokens_in_batch({"input_ids": [[1, 2], [3, 4]]})


@pytest.mark.parametrize("size", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", [tuple, list])
def test_sizes_are_integers_of_any_library(size: Any, kind: Any) -> None:
    assert [2, 1] == [len(part[0]) for part in default_split_batch(kind([torch.zeros(3), torch.zeros(3)]), size)]


@relaxed
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_a_tuple_of_tensors_is_split_as_a_list_of_them(samples: int, size: int, count: int) -> None:
    tensors = [torch.rand(samples, *[2] * i) for i in range(count)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a batch shorter than a microbatch
        parts = list(default_split_batch(tuple(tensors), size))
        expected = default_split_batch(tensors, size)
    assert same(tuple(tuple(part) for part in expected), tuple(parts))
    assert parts[0][0].data_ptr() == tensors[0].data_ptr()
