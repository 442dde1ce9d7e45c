"""The models, data sets and comparisons that other packages test with."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from composer import testing
from composer.core import Event, State
from composer.models import ComposerModel
from composer.testing import (
    ConvModel,
    EventCounterCallback,
    InfiniteClassificationDataset,
    RandomClassificationDataset,
    RandomImageDataset,
    RandomSegmentationDataset,
    RandomTextDataset,
    SimpleConvModel,
    SimpleModel,
    SimpleModelWithDropout,
    SimpleSegmentationModel,
    SimpleTransformerModel,
    deep_compare,
)

PAIRS: dict[str, tuple[Callable[..., ComposerModel], Callable[..., Dataset[Any]]]] = {
    "simple": (SimpleModel, RandomClassificationDataset),
    "dropout": (SimpleModelWithDropout, lambda **kw: RandomClassificationDataset((64,), num_classes=10, **kw)),
    "conv": (SimpleConvModel, RandomImageDataset),
    "conv with batch norm": (lambda **kw: SimpleConvModel(norm="batch", **kw), RandomImageDataset),
    "large conv": (ConvModel, lambda **kw: RandomImageDataset((32, 16, 16), num_classes=10, **kw)),
    "segmentation": (SimpleSegmentationModel, RandomSegmentationDataset),
    "transformer": (SimpleTransformerModel, RandomTextDataset),
}


class Mean:
    """The least that a metric can be."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Size, torch.Size]] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.calls.append((outputs.shape, targets.shape))


class TestModels:
    @pytest.mark.parametrize(("make", "data"), PAIRS.values(), ids=PAIRS)
    def test_a_model_learns_from_its_data(self, make: Any, data: Any) -> None:
        model = make()
        batch = next(iter(DataLoader(data(size=16), batch_size=16)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []

        for _ in range(20):
            optimizer.zero_grad()
            loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        assert sum(losses[-3:]) < sum(losses[:3])
        assert 16 == len(model.loss(model(batch), batch, reduction="none"))

    @pytest.mark.parametrize(("make", "data"), PAIRS.values(), ids=PAIRS)
    def test_weights_and_samples_depend_only_on_the_seed(self, make: Any, data: Any) -> None:
        torch.manual_seed(1)
        model, samples = make(seed=3), default_collate([data(size=4, seed=3)[i] for i in range(4)])
        torch.manual_seed(2)
        before = torch.get_rng_state()

        deep_compare(model.state_dict(), make(seed=3).state_dict())
        deep_compare(samples, default_collate([data(size=4, seed=3)[i] for i in range(4)]))

        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(AssertionError):
            deep_compare(model.state_dict(), make(seed=4).state_dict())
        with pytest.raises(AssertionError):
            deep_compare(samples, default_collate([data(size=4, seed=4)[i] for i in range(4)]))

    @pytest.mark.parametrize(("make", "data"), PAIRS.values(), ids=PAIRS)
    def test_metrics_are_those_given_and_get_outputs_and_targets(self, make: Any, data: Any) -> None:
        train, evaluation = Mean(), Mean()
        model = make(train_metrics={"train": train}, eval_metrics={"eval": evaluation})
        batch = next(iter(DataLoader(data(size=3), batch_size=3)))
        outputs = model.eval_forward(batch)

        model.update_metric(batch, outputs, evaluation)

        assert {"train": train} == model.get_metrics(is_train=True)
        assert {"eval": evaluation} == model.get_metrics(is_train=False)
        targets = batch["labels"] if isinstance(batch, dict) else batch[1]
        assert [(outputs.shape, targets.shape)] == evaluation.calls
        assert {} == make().get_metrics(is_train=True) == make().get_metrics(is_train=False)

    def test_the_layers_of_the_simple_model_are_attributes(self) -> None:
        model = SimpleModel(num_features=3, num_classes=4, bias=False)

        assert ["module.2.weight", "module.4.weight"] == [name for name, _ in model.named_parameters()]
        assert model.fc1 is model.module[2]
        assert model.fc2 is model.module[4]
        assert (3, 4) == (model.num_features, model.num_classes)

    @pytest.mark.parametrize(
        ("norm", "kind"),
        [
            (None, None),
            ("batch", torch.nn.BatchNorm2d),
            ("instance", torch.nn.InstanceNorm2d),
            ("group", torch.nn.GroupNorm),
        ],
    )
    @pytest.mark.parametrize("affine", [True, False])
    def test_the_layers_of_the_conv_model(self, norm: str | None, kind: type | None, affine: bool) -> None:
        model = SimpleConvModel(3, 2, norm, affine)
        convs = [layer for layer in model.module if isinstance(layer, torch.nn.Conv2d)]
        linears = [layer for layer in model.module if isinstance(layer, torch.nn.Linear)]
        norms = [layer for layer in model.module if kind is not None and isinstance(layer, kind)]

        assert [model.conv1, model.conv2] == convs
        assert [(3, 8), (8, 4)] == [(conv.in_channels, conv.out_channels) for conv in convs]
        assert [((3, 3), (1, 1), (2, 2))] * 2 == [(conv.kernel_size, conv.padding, conv.stride) for conv in convs]
        assert [(4, 16), (16, 2)] == [(linear.in_features, linear.out_features) for linear in linears]
        assert (0 if norm is None else 1) == len(norms)
        assert all((layer.weight is not None) == affine for layer in norms)

    def test_the_layers_of_the_large_conv_model_are_attributes(self) -> None:
        model = ConvModel()
        names = ["conv1", "conv2", "conv3", "bn", "pool1", "pool2", "flatten", "linear1", "linear2"]

        assert list(model.module) == [getattr(model, name) for name in names]
        assert [(32, 8, (2, 2)), (8, 32, (2, 2)), (32, 64, (1, 1))] == [
            (conv.in_channels, conv.out_channels, conv.stride) for conv in (model.conv1, model.conv2, model.conv3)
        ]
        assert all(conv.bias is None for conv in (model.conv1, model.conv2, model.conv3))
        assert (2, 2, 1) == (model.pool1.kernel_size, model.pool1.stride, model.pool1.padding)
        assert [(64, 48), (48, 10)] == [
            (layer.in_features, layer.out_features) for layer in (model.linear1, model.linear2)
        ]

    def test_attention_does_not_see_what_the_mask_hides(self) -> None:
        model, batch = SimpleTransformerModel(), default_collate([RandomTextDataset()[i] for i in range(2)])
        batch["attention_mask"][:, 10:] = 0
        changed = copy.deepcopy(batch)
        changed["input_ids"][:, 10:] = 0

        torch.testing.assert_close(model(batch)[:, :10], model(changed)[:, :10])
        assert not torch.equal(model(batch)[:, 10:], model(changed)[:, 10:])

    def test_the_transformer_works_without_a_mask(self) -> None:
        model, batch = SimpleTransformerModel(), default_collate([RandomTextDataset()[i] for i in range(2)])
        expected = model(batch)
        del batch["attention_mask"]

        torch.testing.assert_close(model(batch), expected)


class TestData:
    def test_lengths_and_shapes(self) -> None:
        x, y = RandomClassificationDataset()[0]

        assert ((1, 1, 1), ()) == (tuple(x.shape), tuple(y.shape))
        assert 100 == len(RandomClassificationDataset())
        assert {0, 1, 2} == set(RandomClassificationDataset(num_classes=3).y.tolist())

    def test_an_image_is_transformed_when_it_is_read(self) -> None:
        dataset = RandomImageDataset(size=3)
        plain = dataset[0][0]
        dataset.transform = torch.neg

        assert torch.equal(-plain, dataset[0][0])
        assert 0 <= plain.min() <= plain.max() < 1
        assert 3 == len(dataset)

    def test_a_segmentation_target_has_an_index_per_pixel(self) -> None:
        dataset = RandomSegmentationDataset((3, 4, 5), size=7, num_classes=3)

        assert ((3, 4, 5), (4, 5), 7) == (tuple(dataset[0][0].shape), tuple(dataset[0][1].shape), len(dataset))

    def test_text_hides_the_labels_of_some_tokens(self) -> None:
        dataset = RandomTextDataset(size=200, sequence_length=11, masked_fraction=0.5)
        batch = default_collate([dataset[i] for i in range(len(dataset))])
        predicted = batch["labels"] != -100

        assert torch.equal(batch["input_ids"][predicted], batch["labels"][predicted])
        assert 0.45 < predicted[:, 1:].float().mean() < 0.55
        assert predicted[:, 0].all()
        assert batch["attention_mask"].all()

    def test_an_infinite_stream_starts_again_from_its_seed(self) -> None:
        stream = InfiniteClassificationDataset(shape=(2,), num_classes=3)

        first, second = ([next(iterator) for _ in range(300)] for iterator in (iter(stream), iter(stream)))

        deep_compare(first, second)
        assert {0, 1, 2} == {int(y) for _, y in first}


class TestEventCounter:
    def test_it_counts_every_event_and_resumes(self) -> None:
        counter, state = EventCounterCallback(), State(model=SimpleModel())
        for event in (Event.INIT, Event.BATCH_END, Event.BATCH_END):
            counter.run_event(event, state, None)  # type: ignore[arg-type]
        saved = counter.state_dict()
        resumed = EventCounterCallback()
        resumed.load_state_dict(saved)
        resumed.run_event(Event.BATCH_END, state, None)  # type: ignore[arg-type]
        counter.run_event(Event.FIT_END, state, None)  # type: ignore[arg-type]

        assert set(Event) == set(counter.event_to_num_calls)
        assert (1, 2, 0) == tuple(saved["events"][e] for e in (Event.INIT, Event.BATCH_END, Event.FIT_END))
        assert 3 == resumed.event_to_num_calls[Event.BATCH_END]
        assert 2 == counter.event_to_num_calls[Event.BATCH_END]


class TestDeepCompare:
    @pytest.mark.parametrize(
        "value",
        [
            {"a": [1, 2.0, "x", None, True], "b": (torch.tensor([1.0, float("nan")]), {1, 2})},
            np.array([1.0, np.nan]),
            np.array(["a", "b"]),
            np.array([1, 2], dtype=np.uint32),
            float("nan"),
            torch.tensor([True]),
        ],
    )
    def test_copies_are_equal(self, value: Any) -> None:
        deep_compare(value, copy.deepcopy(value))

    def test_the_type_of_a_mapping_does_not_matter(self) -> None:
        deep_compare({"a": 1}, OrderedDict(a=1))

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            ({"a": {"b": 1}}, {"a": {"b": 2}}, "^/a/b: 1 is not 2"),
            ({"a": 1}, {"b": 1}, "^/: keys"),
            ([1, 2], [1], "^/: length: 2 is not 1"),
            ([1, [2]], [1, [3]], "^/1/0: 2 is not 3"),
            ([1], (1,), "^/: list is not tuple"),
            (1, 1.0, "^/: int is not float"),
            (True, 1, "^/: bool is not int"),
            (1.0, 1.1, "^/: Scalars are not equal"),
            (torch.zeros(2), torch.ones(2), "^/: Tensor-likes are not equal"),
            (torch.zeros(2), torch.zeros(3), "^/: The values for attribute 'shape'"),
            (torch.zeros(2), torch.zeros(2).double(), "^/: The values for attribute 'dtype'"),
            (np.zeros(2), np.ones(2), r"^/: array\(\[0"),
            (np.zeros(2), np.zeros(2, np.float32), "^/: .*dtype"),
            (np.array(["a"]), np.array(["b"]), r"^/: array\(\['a'"),
            ({1}, {2}, r"^/: \{1\} is not \{2\}"),
        ],
    )
    def test_a_difference_is_reported_with_its_path(self, a: Any, b: Any, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            deep_compare(a, b)

    def test_tolerances_apply_to_tensors_arrays_and_floats(self) -> None:
        a, b = [torch.ones(2), np.ones(2), 1.0], [torch.full((2,), 1.05), np.full(2, 1.05), 1.05]

        deep_compare(a, b, atol=0.1)
        deep_compare(a, b, rtol=0.1)
        for index in range(3):
            with pytest.raises(AssertionError):
                deep_compare(a[index], b[index], atol=0.01, rtol=0.01)

    def test_ignored_keys_are_ignored_at_any_depth(self) -> None:
        deep_compare({"a": {"time": 1, "x": 2}, "time": 3}, {"a": {"x": 2}, "time": 4}, ignore_keys=["time"])


def test_everything_exported_is_there() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)
