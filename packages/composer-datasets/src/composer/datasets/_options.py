"""What all builders have in common: the batch size, the defaults of training and evaluation, host and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from composer.datasets._batching import per_rank
from composer.datasets._device import AnyDevice
from composer.datasets.device_loader import DeviceLoader, DeviceTransform
from composer.datasets.loader import ResumableDataLoader

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """How a loader is made.

    Attributes:
        global_batch_size: Samples per batch, of all ranks together.
        is_train: What `drop_last` and `shuffle` are by default.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one. None: only in training.
        seed: Of all that is random.
        device: Where to keep the set and make the batches. None: on the host.
        dataloader_kwargs: Of `ResumableDataLoader`; on the host only.
    """

    global_batch_size: int
    is_train: bool
    drop_last: bool | None = None
    shuffle: bool | None = None
    seed: int = 0
    device: AnyDevice | None = None
    dataloader_kwargs: dict[str, Any] = field(default_factory=dict)

    def on_host(
        self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> ResumableDataLoader:
        """A loader in this process and its workers.

        Args:
            dataset: The samples.
            collate_fn: Makes a batch of them. None: torch's.

        Raises:
            TypeError: An argument of `dataloader_kwargs` is unknown.
            ValueError: A number is out of range.
        """
        return ResumableDataLoader(
            dataset,
            per_rank(self.global_batch_size),
            shuffle=self._by_default(self.shuffle),
            drop_last=self._by_default(self.drop_last),
            seed=self.seed,
            collate_fn=collate_fn,
            **self.dataloader_kwargs,
        )

    def on_device(self, inputs: Tensor, targets: Tensor | None, transform: DeviceTransform) -> DeviceLoader:
        """A loader on `device`.

        Args:
            inputs: All samples.
            targets: Theirs.
            transform: Makes the batches.

        Raises:
            TypeError: There are `dataloader_kwargs`.
            ValueError: A number is out of range.
        """
        if self.dataloader_kwargs:
            raise TypeError(
                f"A loader on the device has no worker processes, so it takes no "
                f"{', '.join(sorted(self.dataloader_kwargs))}. Leave them out, or use `device=None`."
            )
        return DeviceLoader(
            inputs,
            targets,
            per_rank(self.global_batch_size),
            transform=transform,
            device=self.device,
            shuffle=self._by_default(self.shuffle),
            drop_last=self._by_default(self.drop_last),
            seed=self.seed,
        )

    def _by_default(self, value: bool | None) -> bool:
        return self.is_train if value is None else value
