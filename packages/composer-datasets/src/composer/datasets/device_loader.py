"""A loader over a dataset that is stored on the training device, where its batches are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from composer.datasets.sampler import ShardLoader, ShardSampler, derived_seed
from composer.devices import Device
from composer.utils import dist

AnyDevice: TypeAlias = Device | torch.device | str
"""A device of composer or torch, or its name, such as "cpu" or "gpu"."""


def to_torch_device(device: AnyDevice) -> torch.device:
    """Return the torch device of a `Device`, a torch device or the name of one.

    "gpu" and "cuda" are the GPU with this process's local rank, as in the Trainer.

    Raises:
        ValueError: It is a GPU, and CUDA is not available.
    """
    if isinstance(device, Device):
        return device.tensor_to_device(torch.empty(0)).device
    result = torch.device("cuda" if isinstance(device, str) and device.lower() == "gpu" else device)
    if result.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"`device` must be available, got {device!r} without CUDA. Use `device='cpu'`.")
        if result == torch.device("cuda"):  # without an index
            return torch.device("cuda", dist.get_local_rank())
    return result


class DeviceTransform(Protocol):
    """Protocol of the transform of a `DeviceLoader`; it works on the device, on all samples of a batch together."""

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random numbers for a batch, or () if the transform is not random.

        Args:
            shape: Shape of the inputs of all ranks together, (N, ...): every rank draws the same numbers for all ranks
                and uses its own part.
            generator: Generator on the device.

        Returns:
            Tensors on the device whose first dimension is N.
        """
        ...

    def __call__(self, inputs: Tensor, targets: Tensor | None, drawn: tuple[Tensor, ...]) -> Any:
        """Return the batch.

        Args:
            inputs: A copy of the stored inputs, which may be modified.
            targets: The stored targets, or None.
            drawn: This rank's part of the result of `draw`.
        """
        ...


def draw_for_batch(
    transform: DeviceTransform,
    sampler: ShardSampler,
    batch_size: int,
    shape: torch.Size,
    generator: torch.Generator,
    epoch: int,
    begin: int,
) -> tuple[Tensor, ...]:
    """Return this rank's part of the random numbers of a batch, which depend on (seed, epoch, position) only.

    Args:
        transform: Draws them.
        sampler: The shares of all ranks.
        batch_size: Samples per batch of each rank.
        shape: Shape of this rank's inputs.
        generator: Generator on the device; it is seeded here.
        epoch: Zero-based index.
        begin: Samples of this rank's share before the batch.
    """
    ranks = sampler.num_replicas
    first = begin * ranks
    count = min(batch_size * ranks, sampler.total_size - first)  # samples of all ranks
    generator.manual_seed(derived_seed(sampler.seed, epoch, first))
    drawn = transform.draw(torch.Size((count, *shape[1:])), generator)
    return drawn if ranks == 1 else tuple(part[sampler.rank :: ranks] for part in drawn)


class DeviceLoader(ShardLoader):
    """A loader over a whole dataset in the memory of the training device.

    A batch is one `index_select` of the stored samples, transformed on the device: there are no worker processes, no
    copies from the host and no device-to-host reads. The Trainer uses such batches as they are.

    The order depends on (seed, epoch) and the random transforms of a batch on (seed, epoch, position), but not on other
    random draws. So a run that resumes at any batch equals an uninterrupted one, and several ranks together see the
    same transformed samples as a single rank.

    Every iteration is the next epoch, or the one set by `set_epoch`. The Trainer sets it, and saves the position in
    its checkpoints.

    Args:
        inputs: All samples, shape (N, ...), preferably in their stored dtype (images as uint8). Moved to `device`.
        targets: Shape (N,) or (N, ...). None: batches have inputs only.
        batch_size: Samples per batch of this rank.
        transform: Makes the batch; `ImageTransform` is for images. None: `(inputs, targets)` as stored.
        device: Device that stores the dataset: a `Device`, a torch device, "cpu", or "gpu" for the GPU with this
            process's local rank. None: the device of `inputs`.
        shuffle: Use a new random order in every epoch.
        drop_last: Drop samples that do not fill a batch on every rank. None: the value of `shuffle`.
        seed: Seed of the order and all random transforms; the same on all ranks.
        rank: Index of the share. None: this process's rank.
        world_size: Number of shares. None: the number of processes. Ranks of one tensor parallel group need the same
            share.

    Attributes:
        inputs: All samples, on the device.
        targets: All targets, on the device.
        batch_size: Samples per batch of this rank.
        batch_sizes: Returns the size of a batch by the samples of this rank's share before it in the epoch, for batches
            whose size is not `batch_size`, as with `BatchSizeWarmup`. None: all have `batch_size`.
        transform: Makes the batch.
        sampler: Assigns samples to ranks; `sampler.seed` is the seed.

    Raises:
        ValueError: `inputs` and `targets` differ in length, `batch_size` is below 1 or above this rank's share while
            `drop_last` is set, `seed` is negative, or the device is not available.

    Example:
        >>> images = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8)
        >>> loader = DeviceLoader(images, torch.arange(10), batch_size=4)
        >>> [(tuple(x.shape), x.dtype, len(y)) for x, y in loader]
        [((4, 3, 8, 8), torch.uint8, 4), ((4, 3, 8, 8), torch.uint8, 4)]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None,
        batch_size: int,
        *,
        transform: DeviceTransform | None = None,
        device: AnyDevice | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if targets is not None and len(targets) != len(inputs):
            raise ValueError(f"`targets` and `inputs` must have the same length, got {len(targets)} and {len(inputs)}.")
        self.drop_last = shuffle if drop_last is None else drop_last
        self.sampler = ShardSampler(
            len(inputs), shuffle=shuffle, drop_last=self.drop_last, seed=seed, rank=rank, world_size=world_size
        )
        self.sampler.check_batch_size(batch_size)
        storage = inputs.device if device is None else to_torch_device(device)
        self.inputs = inputs.to(storage).contiguous()
        self.targets = None if targets is None else targets.to(storage).contiguous()
        self.batch_size, self.transform = batch_size, transform

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        sampler, device = self.sampler, self.inputs.device
        share = sampler.share(epoch, device)
        all_targets = self.targets
        # Class indices are small: permute them once per epoch, so that a batch only needs a slice.
        ordered = all_targets.index_select(0, share) if all_targets is not None and all_targets.dim() == 1 else None
        generator = torch.Generator(device)
        for begin, end in self._bounds(start):
            indices = share[begin:end]
            targets: Tensor | None = None
            if ordered is not None:
                targets = ordered[begin:end]
            elif all_targets is not None:
                targets = all_targets.index_select(0, indices)
            inputs = self.inputs.index_select(0, indices)
            batch: Any = inputs if targets is None else (inputs, targets)
            if self.transform is not None:
                size = self.batch_size if self.batch_sizes is None else self.batch_sizes(begin)
                drawn = draw_for_batch(self.transform, sampler, size, inputs.shape, generator, epoch, begin)
                batch = self.transform(inputs, targets, drawn)
            sampler.position = (epoch, end)
            yield batch
