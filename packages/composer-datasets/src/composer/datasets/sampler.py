"""Each rank's share of a data set, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from composer.datasets._seeds import check_seed, epoch_order
from composer.utils import dist

__all__ = ["ShardSampler"]

_HOST = torch.device("cpu")


class ShardSampler(DistributedSampler[Any]):
    """The indices of this rank's share: every sample goes to exactly one rank, none is repeated.

    The epoch's order is cut like cards: rank r takes the samples r, r + world_size, ... of it. So the ranks' batches
    number k together are the k-th part of the order, whatever the number of ranks.

    Every iteration is an epoch of its own: the first is epoch 0, or the one that `set_epoch` names, and each further
    one is the next. `begin` and the position are for the loaders that iterate it in batches.

    Args:
        num_samples: Samples of the whole data set.
        shuffle: Whether the order is a random one; otherwise it is 0, 1, 2, ...
        drop_last: Whether all ranks get equally many, for which less than one sample per rank is left out. Otherwise
            the shares differ by at most one sample.
        seed: Of the order; the same on all ranks.
        rank: The share wanted. None: this process's rank.
        world_size: Number of shares. None: the number of processes.

    Raises:
        ValueError: There is no sample, `rank` is not below `world_size`, or `seed` is negative.

    Example:
        >>> [list(ShardSampler(5, shuffle=False, rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]

    Differs: torch's `DistributedSampler` repeats samples until all shares are equal, so that an evaluation counts them
    twice, and has the same order in every epoch unless `set_epoch` is called.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"A data set must have at least one sample, got {num_samples!r}.")
        super().__init__(
            range(num_samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=dist.get_world_size() if world_size is None else world_size,
            rank=dist.get_global_rank() if rank is None else rank,
            shuffle=shuffle,
            seed=check_seed(seed),
            drop_last=drop_last,
        )
        self.whole = num_samples
        kept = num_samples // self.num_replicas * self.num_replicas if drop_last else num_samples
        self.num_samples = len(range(self.rank, kept, self.num_replicas))
        self.total_size = kept
        self.position = (0, 0)
        self._named: int | None = 0  # the epoch to come, where it is known
        self._loaded: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next iteration is. A position in this very epoch that was loaded is kept.

        Args:
            epoch: From 0.
        """
        if self._loaded is not None and self._loaded[0] == epoch:
            return
        super().set_epoch(epoch)
        self._loaded, self._named = None, epoch

    def begin(self) -> tuple[int, int]:
        """Begin an iteration.

        Returns:
            Its epoch, and how many samples of this rank's share come before its first.
        """
        if self._loaded is not None:
            epoch, start = self._loaded
        else:
            epoch, start = self.epoch + 1 if self._named is None else self._named, 0
        self.epoch, self._loaded, self._named = epoch, None, None
        self.position = (epoch, start)
        return epoch, start

    def share(self, epoch: int, device: torch.device = _HOST) -> torch.Tensor:
        """The indices of this rank in an epoch, shape (num_samples,), int64.

        Args:
            epoch: The epoch.
            device: Where they are drawn; another kind of device draws another order.
        """
        if self.shuffle:
            order = epoch_order(self.whole, self.seed, epoch, device)
        else:
            order = torch.arange(self.whole, device=device)
        return order[self.rank : self.total_size : self.num_replicas].contiguous()

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.begin()
        return iter(self.share(epoch)[start:].tolist())

    def state_dict(self) -> dict[str, int]:
        """The place: the epoch, and the samples that this rank's share had until the last batch that was yielded."""
        epoch, samples = self.position
        return {"epoch": epoch, "samples": samples, "seed": self.seed, "num_samples": self.whole}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place with the next iteration. The seed of the place is taken over.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is of a data set with another number of samples.
        """
        if state["num_samples"] != self.whole:
            raise ValueError(
                f"The loader's state is of {state['num_samples']} samples, but this data set has {self.whole}, "
                f"so the place in its order means nothing. Load it into a loader over the same data."
            )
        self.seed = state["seed"]
        self.position = self._loaded = (state["epoch"], min(state["samples"], self.num_samples))
        self.epoch, self._named = state["epoch"], None
