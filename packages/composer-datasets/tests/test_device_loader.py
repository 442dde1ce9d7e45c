from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from composer.datasets import DeviceLoader, ImageTransform, TokenTransform

IMAGES = torch.randint(0, 256, (11, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(11)
AUGMENT = ImageTransform(flip=True, padding=2, cutout=3, mean=[120.0] * 3, std=[60.0] * 3)


def make(**arguments: Any) -> DeviceLoader:
    return DeviceLoader(IMAGES, LABELS, **{"batch_size": 2, "transform": AUGMENT, "seed": 4, **arguments})


def equal(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True)
    )


def test_without_a_transform_samples_come_as_they_are_stored() -> None:
    for images, labels in make(transform=None, drop_last=False):
        assert torch.equal(IMAGES[labels], images)


def test_every_sample_comes_once_per_epoch_in_another_order() -> None:
    loader = make(drop_last=False)
    epochs = [torch.cat([labels for _, labels in loader]) for _ in range(2)]

    assert 6 == len(loader)
    assert torch.equal(LABELS, epochs[0].sort().values)
    assert torch.equal(LABELS, epochs[1].sort().values)
    assert not torch.equal(*epochs)


def test_for_evaluation_the_order_is_that_of_the_set_and_nothing_is_dropped() -> None:
    loader = make(shuffle=False, transform=None)

    assert torch.equal(LABELS, torch.cat([labels for _, labels in loader]))
    assert 6 == len(loader)


def test_the_set_is_never_written_to() -> None:
    before = IMAGES.clone()
    for shuffle in (True, False):
        for images, labels in make(transform=None, shuffle=shuffle):
            images.zero_()
            labels.zero_()

    assert torch.equal(before, IMAGES)
    assert torch.equal(torch.arange(11), LABELS)


def test_a_step_takes_one_index_select_and_does_not_read_back() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    real, calls = Tensor.index_select, []

    def counting(self: Tensor, *arguments: Any) -> Tensor:
        calls.append(self.shape)
        return real(self, *arguments)

    forbidden = mock.Mock(side_effect=AssertionError("read from the device"))
    with (
        mock.patch.object(Tensor, "index_select", counting),
        mock.patch.object(Tensor, "item", forbidden),
        mock.patch.object(Tensor, "tolist", forbidden),
        mock.patch.object(Tensor, "cpu", forbidden),
        mock.patch.object(Tensor, "__bool__", forbidden),
        mock.patch.object(Tensor, "nonzero", forbidden),
    ):
        next(iterator)

    assert [IMAGES.shape] == calls


@pytest.mark.parametrize("stopped_after", range(6))
def test_a_loader_resumes_exactly_after_any_batch(stopped_after: int) -> None:
    loader = make()
    expected = [*loader, *loader]
    loader = make()
    iterator = iter(loader)
    for _ in range(stopped_after):
        next(iterator)
    other = make(seed=0)
    other.load_state_dict(loader.state_dict())
    torch.rand(1)

    assert equal(expected[stopped_after:], [*other, *other])


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    torch.manual_seed(1)
    first = [*make(), *make()]
    torch.manual_seed(2)
    loader = make()
    before = torch.get_rng_state()
    later = list(loader)
    loader.set_epoch(0)

    assert equal(first, [*later, *loader])
    assert torch.equal(before, torch.get_rng_state())
    assert not equal(list(make(seed=5)), list(make()))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_of_one_process(world_size: int, drop_last: bool) -> None:
    """Augmented alike: the global batch does not depend on the number of ranks."""
    arguments: dict[str, Any] = {"drop_last": drop_last}
    whole = list(make(batch_size=2 * world_size, **arguments))
    for rank in range(world_size):
        share = list(make(rank=rank, world_size=world_size, **arguments))
        expected = [(images[rank::world_size], labels[rank::world_size]) for images, labels in whole]

        assert equal([pair for pair in expected if len(pair[1])], share)


def test_targets_with_several_dimensions_are_taken_with_their_inputs() -> None:
    masks = IMAGES[:, 0]
    loader = DeviceLoader(IMAGES, masks, 4, transform=ImageTransform(flip=True, padding=1, ignore_index=0))

    for images, targets in loader:
        assert torch.equal(images[:, 0].long(), targets)


def test_tokens_are_their_own_targets() -> None:
    tokens = torch.arange(12, dtype=torch.int32).view(4, 3)
    batch = next(iter(DeviceLoader(tokens, None, 2, transform=TokenTransform(), shuffle=False)))

    assert torch.equal(tokens[:2].long(), batch["input_ids"])
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(tokens[:2], next(iter(DeviceLoader(tokens, None, 2, shuffle=False))))


def test_there_are_as_many_targets_as_inputs() -> None:
    with pytest.raises(ValueError, match="`targets` and `inputs` must have the same length, got 3 and 11"):
        DeviceLoader(IMAGES, LABELS[:3], 2)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 12}, {"batch_size": 6, "world_size": 2}])
def test_a_batch_size_that_leaves_no_batch_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at"):
        make(**{"rank": 0, "world_size": 1, **arguments})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    from composer.devices import DeviceGPU

    device = DeviceGPU()
    loader = make(device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in loader:
            assert device.batch_to_device(batch) is batch
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_sizes_that_are_none_are_refused(size: float) -> None:
    loader = DeviceLoader(torch.arange(6), None, 2)
    loader.batch_sizes = lambda samples: size  # type: ignore[assignment, return-value]

    with pytest.raises(ValueError, match="`batch_sizes` must return integers of at least 1"):
        len(loader)
    with pytest.raises(ValueError, match="`batch_sizes` must return integers of at least 1"):
        next(iter(loader))
