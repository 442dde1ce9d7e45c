"""The sample that evaluation must not count twice: distributed samplers repeat some, to give all ranks equally many."""

from __future__ import annotations

from typing import Any

from torch.utils.data.distributed import DistributedSampler

__all__ = ["PaddedTail"]


class PaddedTail:
    """Tells when the last sample of this rank is a repeated one.

    `DistributedSampler` appends the first samples of its order until all ranks get equally many: less than one per
    rank, which comes last on the last ranks.

    Args:
        dataloader: The loader to evaluate, about to be iterated.

    Attributes:
        found: Whether the repeated sample was met.
    """

    def __init__(self, dataloader: Any) -> None:
        self.found = False
        self._seen: float = 0
        self._share = 0  # samples of this rank if the last one is a repeated one, else 0
        sampler = _plain_sampler(dataloader)
        if sampler is not None and not sampler.drop_last:
            padding = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
            if sampler.rank >= sampler.num_replicas - padding:
                self._share = sampler.num_samples

    def ends(self, samples: float) -> bool:
        """Whether a batch ends with the repeated sample.

        Args:
            samples: How many samples the batch has. Every batch must be asked about, in order.
        """
        self._seen += samples
        self.found = self._share > 0 and self._seen == self._share
        return self.found


def _plain_sampler(dataloader: Any) -> DistributedSampler[Any] | None:
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    for sampler in (getattr(dataloader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        # A subclass with an order of its own may fill up differently.
        if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
            return sampler
    return None
