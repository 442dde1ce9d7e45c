"""Arguments shared by all builders, and the loaders they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from composer.datasets.device_loader import AnyDevice, DeviceLoader, DeviceTransform
from composer.datasets.loader import ResumableDataLoader
from composer.utils import dist


def batch_size_per_rank(global_batch_size: int) -> int:
    """Return the batch size of each rank.

    Args:
        global_batch_size: Samples per batch, summed over all ranks.

    Raises:
        ValueError: It is not a positive multiple of the number of ranks.
    """
    world_size = dist.get_world_size()
    if global_batch_size < 1 or global_batch_size % world_size:
        raise ValueError(
            f"`global_batch_size` must be a positive multiple of the number of ranks, {world_size}, got "
            f"{global_batch_size!r}."
        )
    return global_batch_size // world_size


class Options:
    """Arguments that every builder takes.

    Args:
        global_batch_size: Samples per batch, summed over all ranks.
        is_train: Default of `drop_last` and `shuffle`.
        drop_last: Drop samples that do not fill a batch on every rank. None: `is_train`.
        shuffle: Use a random order. None: `is_train`.
        seed: Seed of the order and all random transforms.
        device: Device that stores the dataset, or makes the batches of a loader on the host. None: the host.
        **dataloader_kwargs: Arguments of `ResumableDataLoader`; on the host only.
    """

    def __init__(
        self,
        global_batch_size: int,
        is_train: bool,
        drop_last: bool | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        device: AnyDevice | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        self.batch_size, self.device, self.dataloader_kwargs = global_batch_size, device, dataloader_kwargs
        self.is_train = is_train
        self._order: dict[str, Any] = {
            "shuffle": is_train if shuffle is None else shuffle,
            "drop_last": is_train if drop_last is None else drop_last,
            "seed": seed,
        }

    def on_host(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device_transform: DeviceTransform | None = None,
    ) -> ResumableDataLoader:
        """Return a loader that makes batches in this process or its workers.

        Args:
            dataset: The samples.
            collate_fn: Makes a batch of a list of samples. None: torch's default.
            device_transform: Transforms batches on `device`; None without one.
        """
        return ResumableDataLoader(
            dataset,
            batch_size_per_rank(self.batch_size),
            collate_fn=collate_fn,
            device_transform=device_transform,
            device=self.device,
            **self._order,
            **self.dataloader_kwargs,
        )

    def on_device(self, inputs: Tensor, targets: Tensor | None, transform: DeviceTransform) -> DeviceLoader:
        """Return a loader that makes batches on `device`.

        Args:
            inputs: All inputs.
            targets: All targets, or None.
            transform: Makes the batches.

        Raises:
            TypeError: There are `dataloader_kwargs`.
        """
        if self.dataloader_kwargs:
            raise TypeError(
                f"A loader on the device has no worker processes, so it takes no "
                f"{', '.join(sorted(self.dataloader_kwargs))}. Remove them, or use `device=None`."
            )
        return DeviceLoader(
            inputs,
            targets,
            batch_size_per_rank(self.batch_size),
            transform=transform,
            device=self.device,
            **self._order,
        )
