"""Stretch or shrink torch's own schedulers."""

from __future__ import annotations

from collections import Counter

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)

__all__ = ["scale_pytorch_scheduler"]


def scale_pytorch_scheduler(scheduler: LRScheduler, ssr: float) -> None:
    """Multiply the lengths of a torch scheduler by a scale schedule ratio, in place.

    Lengths are rounded down. The gamma of an `ExponentialLR` becomes `gamma ** (1 / ssr)`.

    Args:
        scheduler: A `StepLR`, `MultiStepLR`, `CosineAnnealingLR`, `CosineAnnealingWarmRestarts` or `ExponentialLR`.
        ssr: The ratio, more than 0; 1 changes nothing, whatever the scheduler.

    Raises:
        ValueError: `ssr` is not positive, leaves nothing of a length, or `scheduler` is of another type.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = StepLR(optimizer, step_size=30)
        >>> scale_pytorch_scheduler(scheduler, ssr=0.5)
        >>> scheduler.step_size
        15

    Differs: the running cycle of `CosineAnnealingWarmRestarts` (`T_i`) is scaled too: torch steps by it, not by `T_0`.
    """
    if ssr <= 0:
        raise ValueError(f"`ssr` must be positive, got {ssr!r}.")
    if ssr == 1.0:
        return
    if isinstance(scheduler, StepLR):
        scheduler.step_size = _scaled("step_size", scheduler.step_size, ssr)
    elif isinstance(scheduler, MultiStepLR):
        milestones: Counter[int] = Counter()
        for milestone, count in scheduler.milestones.items():
            milestones[int(milestone * ssr)] += count
        scheduler.milestones = milestones
    elif isinstance(scheduler, CosineAnnealingWarmRestarts):
        scheduler.T_i = _scaled("T_i", scheduler.T_i, ssr)
        scheduler.T_0 = _scaled("T_0", scheduler.T_0, ssr)
    elif isinstance(scheduler, CosineAnnealingLR):
        scheduler.T_max = _scaled("T_max", scheduler.T_max, ssr)
    elif isinstance(scheduler, ExponentialLR):
        scheduler.gamma = scheduler.gamma ** (1 / ssr)
    else:
        raise ValueError(
            f"`scheduler` must be a StepLR, MultiStepLR, CosineAnnealingLR, CosineAnnealingWarmRestarts or "
            f"ExponentialLR, got {type(scheduler).__name__}. Scale it yourself, or use a schedule of `composer.optim`."
        )


def _scaled(name: str, length: int, ssr: float) -> int:
    scaled = int(length * ssr)
    if scaled == 0:
        raise ValueError(
            f"`ssr` must leave something of `{name}`, got {ssr!r} for {name}={length!r}. Use a larger ratio."
        )
    return scaled
