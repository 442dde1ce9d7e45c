"""The layer. Symbols: sigma subnetworks in all, of which tau train at a time."""

from __future__ import annotations

import torch
from torch import nn

from composer.utils import check_finite, check_integers

__all__ = ["GyroDropoutLayer", "mixed"]


class GyroDropoutLayer(nn.Module):
    """A `torch.nn.Dropout` that drops by a fixed set of masks, a few of them at a time.

    There are sigma masks of the shape of an example, each of which keeps an element with probability 1 - p. Every
    `iter_num` steps the next tau of them are selected, and each applies to an equal share of the batch, so that all
    have been used equally long at the end of training. Masks are not stored but drawn again from a seed, on the device
    of the input. In evaluation this is the identity.

    Args:
        iters_per_epoch: Training steps in an epoch.
        max_epoch: Epochs of the training.
        p: The probability to drop an element.
        sigma: The number of masks.
        tau: How many of them are in use at a time.
        seed: Determines the masks. None: drawn from torch's CPU generator.

    Attributes:
        training_step: The number of forward passes in training mode so far.
        iter_num: How many steps the same masks are in use.
        driven: Whether something else sets the step, by `set_step`; forward passes then do not count.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> layer = GyroDropoutLayer(iters_per_epoch=100, max_epoch=4, p=0.5, sigma=8, tau=2)
        >>> layer.iter_num
        100
        >>> y = layer(torch.ones(6, 5))
        >>> bool((y[0] == y[2]).all() and (y[3] == y[5]).all())
        True

    Source: Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    Differs: masks are selected in turn instead of drawn, which makes no difference to their distribution; inputs of any
        shape and any number of rows are taken.
    """

    def __init__(
        self,
        iters_per_epoch: int,
        max_epoch: float,
        p: float = 0.5,
        sigma: int = 256,
        tau: int = 16,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check(p, sigma, tau)
        self.p, self.sigma, self.tau = p, sigma, tau
        self.seed = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        self.training_step = 0
        self.driven = False
        self.shape: tuple[int, ...] | None = None  # the largest sizes of examples so far, by dimension
        self._group = 0
        self._masks: torch.Tensor | None = None  # (tau, *shape), bool
        self._scaled: torch.Tensor | None = None  # the same over 1 - p, in the dtype of the input
        self._seen: tuple[tuple[int, ...], torch.Tensor | None] = (
            (),
            None,
        )  # the last batch, and the masks of its rows
        self.plan(iters_per_epoch * max_epoch)

    def plan(self, steps: float) -> None:
        """Spread the masks over a number of steps.

        Raises:
            ValueError: It is not positive.
        """
        if steps <= 0:
            raise ValueError(f"`iters_per_epoch` and `max_epoch` must be positive, got {steps!r} steps in all.")
        self.iter_num = max(int(steps * self.tau / self.sigma), 1)

    def set_step(self, step: int) -> None:
        """Select the masks of a step."""
        self.training_step = step
        group = step // self.iter_num % -(-self.sigma // self.tau)
        if group != self._group:
            self._group = group
            if self._masks is not None:
                self._draw(self._masks.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of a tensor of shape (N, ...), or of shape (F,), which is one example."""
        if not self.training or self.p == 0 or x.is_meta:
            return x
        if x.dim() < 2:
            return self(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
        if not self.driven:
            self.set_step(self.training_step)
            self.training_step += 1
        masks = self._masks_for(x)
        rows, tau = x.shape[0], masks.shape[0]
        if rows % tau == 0:
            self._seen = (tuple(x.shape), None)
            return (x.reshape(tau, rows // tau, *x.shape[1:]) * masks.unsqueeze(1)).flatten(0, 1)
        index = torch.arange(rows, device=x.device)
        if rows > tau:
            index = index * tau // rows
        else:  # fewer rows than masks: a random run of them, so that none is left out
            index = (index + torch.randint(tau, (1,), device=x.device)) % tau
        self._seen = (tuple(x.shape), index)
        return x * masks.index_select(0, index)

    @property
    def selected_masks(self) -> torch.Tensor | None:
        """The masks in use, shape (tau, ...), bool; None before the first pass."""
        return self._masks

    @property
    def dropout_mask(self) -> torch.Tensor | None:
        """What the last batch was multiplied with, but for 1 / (1 - p): shape of the batch, bool. None before it."""
        shape, index = self._seen
        if self._masks is None or not shape:
            return None
        masks = self._masks[_box(shape)]
        if index is None:
            return masks.repeat_interleave(shape[0] // len(masks), 0)
        return masks.index_select(0, index)

    def _masks_for(self, x: torch.Tensor) -> torch.Tensor:
        """The masks in use over 1 - p, cut to the shape of an example."""
        shape = tuple(x.shape[1:])
        if self._masks is None or self._masks.device != x.device or not self._covers(shape):
            self._enlarge(shape)
            self._draw(x.device)
        assert self._masks is not None
        if self._scaled is None or self._scaled.dtype is not x.dtype:
            self._scaled = self._masks.to(x.dtype) / max(1 - self.p, torch.finfo(torch.float32).tiny)
        return self._scaled if shape == self.shape else self._scaled[_box(tuple(x.shape))]

    def _covers(self, shape: tuple[int, ...]) -> bool:
        mine = self.shape
        return mine is not None and len(mine) == len(shape) and all(a >= b for a, b in zip(mine, shape, strict=True))

    def _enlarge(self, shape: tuple[int, ...]) -> None:
        if self.shape is not None and len(self.shape) == len(shape):
            shape = tuple(map(max, self.shape, shape))
        self.shape = shape

    def _draw(self, device: torch.device) -> None:
        assert self.shape is not None
        generator = torch.Generator(device).manual_seed(mixed(self.seed, self._group))
        number = min(self.tau, self.sigma - self._group * self.tau)
        kept = torch.empty((number, *self.shape), device=device).bernoulli_(1 - self.p, generator=generator)
        self._masks, self._scaled = kept.bool(), None

    def extra_repr(self) -> str:
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"

    @staticmethod
    def from_Dropout(  # named after the class
        module: nn.Dropout,
        module_index: int = -1,
        iters_per_epoch: int = 1,
        max_epoch: float = 1,
        p: float | None = None,
        sigma: int = 256,
        tau: int = 16,
        seed: int | None = None,
    ) -> GyroDropoutLayer:
        """Make the replacement of a dropout layer.

        Args:
            module: The layer to replace.
            module_index: Its number among the layers replaced, which tells its masks from those of the others.
            iters_per_epoch: As all other arguments, one of `GyroDropoutLayer`.
            max_epoch: See `iters_per_epoch`.
            p: See `iters_per_epoch`. None: that of `module`.
            sigma: See `iters_per_epoch`.
            tau: See `iters_per_epoch`.
            seed: See `iters_per_epoch`; of all layers together.
        """
        own = None if seed is None else mixed(seed, module_index + 1)
        rate = module.p if p is None else p
        return GyroDropoutLayer(iters_per_epoch, max_epoch, rate, sigma, tau, seed=own)


def check(p: float, sigma: int, tau: int) -> None:
    """Raise ValueError unless `p` is a probability and 1 <= tau <= sigma."""
    check_finite(p=p)
    if not 0 <= p <= 1:
        raise ValueError(f"`p` must be in [0, 1], got {p!r}. It is the probability to drop an element.")
    check_integers(sigma=sigma, tau=tau)
    if not 1 <= tau <= sigma:
        raise ValueError(
            f"`tau` must be at least 1 and at most `sigma`, got {tau!r} and {sigma!r}. Use fewer at a time."
        )


def mixed(*numbers: int) -> int:
    """A seed made of numbers, of 32 bits, as that is what torch's CPU generator reads of it."""
    state = 0
    for number in numbers:
        state = (state ^ number) * 0x9E3779B97F4A7C15 % 2**64
        state ^= state >> 32
    return state % 2**32


def _box(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None), *(slice(size) for size in shape[1:]))
