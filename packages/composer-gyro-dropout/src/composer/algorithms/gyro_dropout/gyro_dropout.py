"""The layer, `apply_gyro_dropout` and the algorithm. Symbols: sigma masks in total, tau of them in use at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from composer.algorithms.warnings import warn_no_effect
from composer.core import REPLACES_DROPOUT, Algorithm, Event, Placement, TimeUnit
from composer.utils import check_finite, check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


# An operator of its own, because a graph cannot contain a generator.
@torch.library.custom_op(
    "composer_gyro_dropout::draw_masks",
    mutates_args=(),
    schema="(Tensor like, SymInt[] shape, float keep, int seed) -> Tensor",
)
def _draw_masks(like: torch.Tensor, shape: Sequence[int], keep: float, seed: int) -> torch.Tensor:
    """Return masks on the device of a tensor, bool, whose elements are True with probability `keep`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(shape, device=like.device).bernoulli_(keep, generator=generator).bool()


@_draw_masks.register_fake
def _(like: torch.Tensor, shape: Sequence[int], keep: float, seed: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.bool)


class GyroDropoutLayer(nn.Module):
    """A `torch.nn.Dropout` with a fixed set of masks, of which a few are in use at a time.

    There are sigma masks with the shape of an example, each of which keeps an element with probability 1 - p. Every
    `iter_num` steps the next tau masks are selected, and each applies to an equal share of the batch, so that at the
    end of training all masks have been in use equally long. Masks are not stored: they are drawn from a seed, on the
    device of the input. In evaluation the layer is the identity.

    Args:
        iters_per_epoch: Training steps in an epoch.
        max_epoch: Epochs of the training.
        p: The probability to drop an element.
        sigma: The number of masks.
        tau: The number of masks in use at a time.
        seed: Determines the masks. None: drawn from torch's CPU generator.

    Attributes:
        training_step: The number of forward passes in training mode so far.
        iter_num: The number of steps for which the same masks are in use.
        driven: True if the step is set with `set_step`; forward passes are then not counted.

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
        _check(p, sigma, tau)
        self.p, self.sigma, self.tau = p, sigma, tau
        self.seed = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        self.training_step = 0
        self.driven = False
        self.shape: tuple[int, ...] | None = None  # the largest size of examples so far, per dimension
        self._group = 0
        self._masks: torch.Tensor | None = None  # (tau, *shape), bool
        self._scaled: torch.Tensor | None = None  # masks / (1 - p), in the dtype of the input
        # Shape of the last batch, and the index of the mask of each row (None: equal blocks of rows).
        self._last_batch: tuple[tuple[int, ...], torch.Tensor | None] = ((), None)
        self.plan(iters_per_epoch * max_epoch)

    def plan(self, steps: float) -> None:
        """Distribute the masks over a number of steps.

        Raises:
            ValueError: The number is not positive.
        """
        if steps <= 0:
            raise ValueError(f"`iters_per_epoch` and `max_epoch` must be positive, got {steps!r} steps in total.")
        self.iter_num = max(int(steps * self.tau / self.sigma), 1)

    def set_step(self, step: int) -> None:
        """Select the masks for a step."""
        self.training_step = step
        group = step // self.iter_num % -(-self.sigma // self.tau)
        if group != self._group:
            self._group = group
            if self._masks is not None:
                dtype = None if self._scaled is None else self._scaled.dtype
                self._draw(self._masks)
                if dtype is not None:
                    self._scale(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of a tensor of shape (N, ...), or of shape (F,), which is one example."""
        if not self.training or self.p == 0 or x.is_meta:
            return x
        if x.dim() < 2:
            return self(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
        if not self.driven:
            _advance_outside_graphs(self)
        if not self._has_masks_for(x):
            self._prepare(x)
        masks = self._scaled
        assert masks is not None
        if tuple(x.shape[1:]) != self.shape:
            masks = masks[_slices_of(tuple(x.shape))]
        rows, tau = x.shape[0], masks.shape[0]
        if rows % tau == 0:
            self._last_batch = (tuple(x.shape), None)
            return (x.reshape(tau, rows // tau, *x.shape[1:]) * masks.unsqueeze(1)).flatten(0, 1)
        index = torch.arange(rows, device=x.device)
        if rows > tau:
            index = index * tau // rows
        else:  # fewer rows than masks: consecutive masks from a random start, so that all are used
            index = (index + torch.randint(tau, (1,), device=x.device)) % tau
        self._last_batch = (tuple(x.shape), index)
        return x * masks.index_select(0, index)

    @property
    def selected_masks(self) -> torch.Tensor | None:
        """The masks in use, shape (tau, ...), bool; None before the first pass."""
        return self._masks

    @property
    def dropout_mask(self) -> torch.Tensor | None:
        """The mask of the last batch, shape of the batch, bool; None before the first batch."""
        shape, index = self._last_batch
        if self._masks is None or not shape:
            return None
        masks = self._masks[_slices_of(shape)]
        if index is None:
            return masks.repeat_interleave(shape[0] // len(masks), 0)
        return masks.index_select(0, index)

    def _has_masks_for(self, x: torch.Tensor) -> bool:
        scaled = self._scaled
        return (
            scaled is not None
            and scaled.device == x.device
            and scaled.dtype is x.dtype
            and self._covers(tuple(x.shape[1:]))
        )

    def _prepare(self, x: torch.Tensor) -> None:
        """Make the masks in use / (1 - p) for inputs like these."""
        shape = tuple(x.shape[1:])
        if self._masks is None or self._masks.device != x.device or not self._covers(shape):
            if self.shape is not None and len(self.shape) == len(shape):
                shape = tuple(map(max, self.shape, shape))
            self.shape = shape
            self._draw(x)
        self._scale(x.dtype)

    def _scale(self, dtype: torch.dtype) -> None:
        assert self._masks is not None
        self._scaled = self._masks.to(dtype) / max(1 - self.p, torch.finfo(torch.float32).tiny)

    def _covers(self, shape: tuple[int, ...]) -> bool:
        largest = self.shape
        return largest is not None and len(largest) == len(shape) and all(map(ge, largest, shape))

    def _draw(self, like: torch.Tensor) -> None:
        assert self.shape is not None
        number = min(self.tau, self.sigma - self._group * self.tau)
        seed = _mix_seed(self.seed, self._group)
        self._masks, self._scaled = _draw_masks(like, [number, *self.shape], 1 - self.p, seed), None

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
        """Return the replacement of a dropout layer.

        Args:
            module: The layer to replace.
            module_index: Its index among the replaced layers, so that layers have different masks.
            iters_per_epoch: See `GyroDropoutLayer`.
            max_epoch: See `GyroDropoutLayer`.
            p: See `GyroDropoutLayer`. None: the value of `module`.
            sigma: See `GyroDropoutLayer`.
            tau: See `GyroDropoutLayer`.
            seed: Seed of all layers; combined with `module_index`.
        """
        layer_seed = None if seed is None else _mix_seed(seed, module_index + 1)
        rate = module.p if p is None else p
        return GyroDropoutLayer(iters_per_epoch, max_epoch, rate, sigma, tau, seed=layer_seed)


def _advance(layer: GyroDropoutLayer) -> None:
    layer.set_step(layer.training_step)
    layer.training_step += 1


# A graph with the count would be compiled again for each count.
_advance_outside_graphs: Any = cast(Any, torch.compiler).disable(_advance)


def apply_gyro_dropout(
    model: nn.Module,
    iters_per_epoch: int,
    max_epoch: float,
    p: float | None = None,
    sigma: int = 256,
    tau: int = 16,
    *,
    seed: int | None = None,
) -> None:
    """Replace each `torch.nn.Dropout` in a model, in place, by a `GyroDropoutLayer`.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        iters_per_epoch: Training steps in an epoch.
        max_epoch: Epochs of the training. Both determine how long each mask is in use.
        p: The probability to drop an element. None: the value of each layer; layers with 0 are then not replaced.
        sigma: The number of masks.
        tau: The number of masks in use at a time.
        seed: Determines all masks. None: drawn from torch's CPU generator.

    Raises:
        ValueError: An argument is out of range.

    Warns:
        NoEffectWarning: The model has no `GyroDropoutLayer` afterwards.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
        >>> apply_gyro_dropout(model, iters_per_epoch=196, max_epoch=100)
        >>> model[1]
        GyroDropoutLayer(p=0.3, sigma=256, tau=16)

    Source: Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    Differs: as `GyroDropoutLayer`.
    """
    _check(0.5 if p is None else p, sigma, tau)
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    if not _replace(model, (iters_per_epoch, max_epoch, p, sigma, tau, seed)):
        warn_no_effect("`apply_gyro_dropout` changed nothing: the model has no `torch.nn.Dropout` with `p > 0`.")


def _replace(model: nn.Module, options: tuple[Any, ...]) -> list[GyroDropoutLayer]:
    """Replace the dropout of a model; return all gyro dropout layers, including those of earlier calls."""

    def gyro(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Dropout)
        overrides_forward = type(module).forward is not nn.Dropout.forward
        if overrides_forward or (options[2] is None and module.p == 0):
            return None
        return GyroDropoutLayer.from_Dropout(module, index, *options)

    module_surgery.replace_module_classes(model, {nn.Dropout: gyro})
    return [module for module in model.modules() if isinstance(module, GyroDropoutLayer)]


class GyroDropout(Algorithm):
    """Trains a fixed set of subnetworks, a few at a time, instead of new ones at every step.

    At FIT_START each dropout layer of the model is replaced; see `apply_gyro_dropout`. Before each batch is loaded, and
    at BATCH_START, the masks for the elapsed part of the run are selected; its duration may have any unit. Each
    microbatch is divided among all selected masks, so microbatches do not equal one batch.

    **Events** FIT_START, BEFORE_DATALOADER, BATCH_START. **Reads** `state.max_duration`, `state.timestamp`,
    `state.dataloader_len`. **Writes** modules of `state.model`. **Cost** that of dropout, without the draw and
    the mask stored for the backward pass. `tau` masks of the size of an example are in memory. **Compilation**
    a second graph after the first batch, when the masks are there; then static, as new ones are drawn between batches.

    Args:
        p: The probability to drop an element. None: the value of each layer.
        sigma: The number of masks and so of subnetworks.
        tau: The number of masks in use at a time.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> GyroDropout(sigma=1024, tau=8)
        GyroDropout(p=None,sigma=1024,tau=8)

    Source: Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    Differs: masks are selected in turn instead of drawn; layers keep their own `p`; inputs may have any shape, batches
        any size and runs any length.
    """

    # Others may run the model between BEFORE_DATALOADER and BATCH_START; some loops only announce the latter.
    events = frozenset({Event.FIT_START, Event.BEFORE_DATALOADER, Event.BATCH_START})
    placement = Placement(provides={REPLACES_DROPOUT})

    def __init__(self, p: float | None = None, sigma: int = 256, tau: int = 16) -> None:
        _check(0.5 if p is None else p, sigma, tau)
        self.p, self.sigma, self.tau = plain_number(p), plain_number(sigma), plain_number(tau)
        self._layers: list[GyroDropoutLayer] = []
        self._seed: int | None = None
        self._shapes: list[Any] = []  # from a checkpoint

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a run that used it must continue with it."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, or select their masks."""
        if event is Event.FIT_START:
            self._start(state)
        steps = _steps(state)
        for layer in self._layers:
            if steps is None:  # not counted in steps: count selections of masks instead
                elapsed = state.get_elapsed_duration()
                assert elapsed is not None, "the engine asks for `max_duration` at these events"
                layer.iter_num = 1
                layer.set_step(int(elapsed.value * self.sigma / self.tau))
            else:
                layer.plan(steps)
                layer.set_step(state.timestamp.batch.value)

    def _start(self, state: State) -> None:
        if self._seed is None:
            self._seed = state.rank_zero_seed  # equal on all ranks, and draws no random number
        model: Any = state.model.module if state.is_model_ddp else state.model
        self._layers = _replace(model, (1, 1, self.p, self.sigma, self.tau, self._seed))
        if not self._layers:
            warn_no_effect("`GyroDropout` changed nothing: the model has no `torch.nn.Dropout` with `p > 0`.")
        for layer in self._layers:
            layer.driven = True
        for layer, shape in zip(self._layers, self._shapes, strict=False):
            layer.shape = None if shape is None else tuple(shape)
        self._shapes = []

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the sizes of the masks."""
        shapes = [None if layer.shape is None else list(layer.shape) for layer in self._layers]
        return {**super().state_dict(), "seed": self._seed, "shapes": shapes or self._shapes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before FIT_START."""
        self._seed, self._shapes = state.get("seed"), list(state.get("shapes", []))


def _steps(state: State) -> float | None:
    """Return the length of the run in training steps, or None if it is unknown."""
    duration, length = state.max_duration, state.dataloader_len
    assert duration is not None, "the engine asks for `max_duration` at these events"
    if duration.unit is TimeUnit.BATCH:
        return float(duration.value)
    if duration.unit is TimeUnit.EPOCH and length is not None:
        return float(duration.value * length.value)
    return None


def _check(p: float, sigma: int, tau: int) -> None:
    """Raise ValueError unless `p` is a probability and 1 <= tau <= sigma."""
    check_finite("It is the probability to drop an element.", p=p, least=0, most=1)
    check_integers(sigma=sigma, tau=tau)
    if not 1 <= tau <= sigma:
        raise ValueError(
            f"`tau` must be at least 1 and at most `sigma`, got {tau!r} and {sigma!r}. Use fewer at a time."
        )


def _mix_seed(*numbers: int) -> int:
    """Combine numbers to a seed of 32 bits: the CPU generator of torch ignores the other bits."""
    state = 0
    for number in numbers:
        state = (state ^ number) * 0x9E3779B97F4A7C15 % 2**64
        state ^= state >> 32
    return state % 2**32


def _slices_of(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None), *(slice(size) for size in shape[1:]))
