from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets import DeviceLoader, ImageTransform, ResumableDataLoader


class Noisy(Dataset[Any]):
    """Samples with noise from all three global generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return index, torch.tensor(noise, dtype=torch.float64)


class Fetched(Noisy):
    """Takes several indices at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.zeros(1)) for index in indices]


def make(**arguments: Any) -> ResumableDataLoader:
    return ResumableDataLoader(Noisy(), **{"batch_size": 2, "seed": 4, **arguments})


def flat(batches: Any) -> list[Any]:
    return [(indices.tolist(), noise.tolist()) for indices, noise in batches]


def test_every_sample_comes_once_per_epoch_in_another_order() -> None:
    loader = make(drop_last=False)
    epochs = [[index for indices, _ in loader for index in indices.tolist()] for _ in range(2)]

    assert 6 == len(loader)
    assert list(range(11)) == sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_share_can_be_named() -> None:
    shares = [make(rank=rank, world_size=3, drop_last=False) for rank in range(3)]
    indices = [index for loader in shares for batch, _ in loader for index in batch.tolist()]

    assert list(range(11)) == sorted(indices)
    assert [2, 2, 2] == [len(loader) for loader in shares]


def test_no_two_batches_draw_the_same() -> None:
    loader = make()
    noise = torch.cat([noise for _ in range(2) for _, noise in loader])

    assert noise.numel() == len(noise.unique())


def test_an_incomplete_batch_is_dropped_only_when_shuffled() -> None:
    assert 5 == len(make()) == len(list(make()))
    assert 6 == len(make(shuffle=False)) == len(list(make(shuffle=False)))


@pytest.mark.parametrize("stopped_after", range(6))
def test_a_loader_resumes_exactly_after_any_batch(stopped_after: int) -> None:
    loader = make()
    expected = flat(loader) + flat(loader)
    loader = make()
    iterator = iter(loader)
    for _ in range(stopped_after):
        next(iterator)
    state = loader.state_dict()
    torch.rand(3)
    other = make(seed=0)
    other.load_state_dict(state)

    assert expected[stopped_after:] == flat(other) + flat(other)


def test_the_number_of_workers_does_not_change_batches() -> None:
    expected = flat(make())
    with_workers = make(num_workers=2, persistent_workers=True)

    assert expected == flat(with_workers)
    state = {"epoch": 0, "samples": 6, "seed": 4, "num_samples": 11}
    with_workers.load_state_dict(state)
    assert expected[3:] == flat(with_workers)


def test_the_global_generators_are_restored() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    expected = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    list(make())
    got = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002

    assert torch.equal(expected[0], got[0])
    assert expected[1:] == got[1:]


def test_persistent_workers_are_replaced_when_someone_asks_for_new_ones() -> None:
    """As `add_dataset_transform` does after it has changed the data set."""
    loader = make(num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    next(iter(loader))
    inner = loader._inner
    next(iter(loader))
    assert inner is loader._inner
    loader._iterator = None
    next(iter(loader))
    assert inner is not loader._inner


def test_a_data_set_that_takes_indices_together_is_given_them_together() -> None:
    batches = list(ResumableDataLoader(Fetched(), 2, shuffle=False))

    assert [0, 1] == batches[0][0].tolist()
    assert 1 == batches[0][1].shape[1]


def test_an_old_iterator_takes_the_place_back() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    next(iter(loader))  # somebody peeks
    next(iterator)

    assert {"epoch": 0, "samples": 4, "seed": 4, "num_samples": 11} == loader.state_dict()


def test_a_data_spec_counts_its_samples() -> None:
    assert 11 == DataSpec(make()).num_samples


def test_arguments_that_the_loader_decides_are_refused() -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'sampler'"):
        make(sampler=range(11))


@pytest.mark.parametrize("batch_size", [0, 12])
def test_a_batch_size_that_leaves_no_batch_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at"):
        make(batch_size=batch_size)


IMAGES = torch.randint(0, 256, (11, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
AUGMENT = ImageTransform(flip=True, padding=2, cutout=3, mean=[120.0] * 3, std=[60.0] * 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("with_labels", [True, False])
def test_a_device_transform_gives_the_batches_of_a_device_loader(rank: int, with_labels: bool) -> None:
    share: dict[str, Any] = {"seed": 4, "rank": rank, "world_size": 2, "drop_last": False}
    labels = torch.arange(11) if with_labels else None
    samples: Any = list(IMAGES) if labels is None else list(zip(IMAGES, labels, strict=True))
    host = ResumableDataLoader(samples, 2, device_transform=AUGMENT, device="cpu", **share)
    device = DeviceLoader(IMAGES, labels, 2, transform=AUGMENT, device="cpu", **share)
    for _ in range(2):
        expected, found = list(device), list(host)

        assert len(expected) == len(found)
        for first, second in zip(expected, found, strict=True):
            pairs = zip(first, second, strict=True) if with_labels else [(first, second)]
            assert all(torch.equal(*pair) for pair in pairs)


def test_a_device_transform_resumes() -> None:
    def loader() -> ResumableDataLoader:
        return ResumableDataLoader(list(IMAGES), 2, seed=4, device_transform=AUGMENT, device="cpu")

    whole, stopped, resumed = loader(), loader(), loader()
    batches = iter(stopped)
    for _ in range(2):
        next(batches)
    resumed.load_state_dict(stopped.state_dict())

    assert all(torch.equal(*pair) for pair in zip(list(whole)[2:], resumed, strict=True))


def test_a_device_transform_needs_its_device() -> None:
    with pytest.raises(ValueError, match="`device_transform` and `device` must be given together"):
        ResumableDataLoader(list(IMAGES), 2, device_transform=AUGMENT)
