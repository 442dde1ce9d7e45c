"""The function that replaces dropout in a model, then the class. The layer is in `_layer`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from composer.algorithms.gyro_dropout._layer import GyroDropoutLayer as GyroDropoutLayer
from composer.algorithms.gyro_dropout._layer import check
from composer.algorithms.warnings import NoEffectWarning
from composer.core import REPLACES_DROPOUT, Algorithm, Event, Placement, State, TimeUnit
from composer.loggers import Logger
from composer.utils import module_surgery, plain_number

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout"]


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
        max_epoch: Epochs of the training. Together they tell how long each mask is in use.
        p: The probability to drop an element. None: that of each layer; layers with 0 then stay.
        sigma: The number of masks.
        tau: How many of them are in use at a time.
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
    check(0.5 if p is None else p, sigma, tau)
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    if not _replace(model, (iters_per_epoch, max_epoch, p, sigma, tau, seed)):
        warnings.warn(
            "`apply_gyro_dropout` changed nothing: the model has no torch.nn.Dropout that drops anything.",
            NoEffectWarning,
            stacklevel=2,
        )


def _replace(model: nn.Module, options: tuple[Any, ...]) -> list[GyroDropoutLayer]:
    """Replace the dropout of a model; return all layers, those of earlier calls too."""

    def gyro(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Dropout)
        own = type(module).forward is not nn.Dropout.forward
        if own or (options[2] is None and module.p == 0):
            return None
        return GyroDropoutLayer.from_Dropout(module, index, *options)

    module_surgery.replace_module_classes(model, {nn.Dropout: gyro})
    return [module for module in model.modules() if isinstance(module, GyroDropoutLayer)]


class GyroDropout(Algorithm):
    """Trains a fixed set of subnetworks, a few at a time, instead of ever new ones.

    At FIT_START each dropout layer of the model is replaced; see `apply_gyro_dropout`. Before each batch is loaded, and
    at BATCH_START, the masks are selected that the progress of the run asks for, whatever the unit of its duration.
    Each microbatch is shared out among all selected masks, so microbatches do not equal one batch.

    **Events** FIT_START, BEFORE_DATALOADER, BATCH_START. **Reads** `state.max_duration`, `state.timestamp`,
    `state.dataloader_len`. **Writes** modules of `state.model`. **Cost** that of dropout, less the draw and the mask
    kept for the backward pass. `tau` masks of the size of an example are in memory. **Compilation** static: new masks
    are drawn between batches.

    Args:
        p: The probability to drop an element. None: that of each layer.
        sigma: The number of masks, that is, of subnetworks.
        tau: How many of them are in use at a time.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> GyroDropout(sigma=1024, tau=8)
        GyroDropout(p=None,sigma=1024,tau=8)

    Source: Lee et al., "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    Differs: masks are selected in turn instead of drawn; layers keep their own `p`; inputs may have any shape, batches
        any size and runs any length.
    """

    # Others may run the model between BEFORE_DATALOADER and BATCH_START; some loops announce only the latter.
    events = frozenset({Event.FIT_START, Event.BEFORE_DATALOADER, Event.BATCH_START})
    placement = Placement(provides={REPLACES_DROPOUT})

    def __init__(self, p: float | None = None, sigma: int = 256, tau: int = 16) -> None:
        check(0.5 if p is None else p, sigma, tau)
        self.p, self.sigma, self.tau = plain_number(p), plain_number(sigma), plain_number(tau)
        self._layers: list[GyroDropoutLayer] = []
        self._seed: int | None = None
        self._shapes: list[Any] = []  # from a checkpoint

    @staticmethod
    def required_on_load() -> bool:
        """A run that was trained with it is continued with it."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers, or select their masks."""
        if event is Event.FIT_START:
            self._start(state)
        steps = _steps(state)
        for layer in self._layers:
            if steps is None:  # the run is not counted in steps: then one "step" is as long as masks are in use
                elapsed = state.get_elapsed_duration()
                assert elapsed is not None, "the engine asks for `max_duration` at these events"
                layer.iter_num = 1
                layer.set_step(int(elapsed.value * self.sigma / self.tau))
            else:
                layer.plan(steps)
                layer.set_step(state.timestamp.batch.value)

    def _start(self, state: State) -> None:
        if self._seed is None:
            self._seed = (
                state.rank_zero_seed
            )  # equal on all ranks, and nothing is drawn that a resumed run would not draw
        model: Any = state.model.module if state.is_model_ddp else state.model
        self._layers = _replace(model, (1, 1, self.p, self.sigma, self.tau, self._seed))
        if not self._layers:
            warnings.warn(
                "`GyroDropout` changed nothing: the model has no torch.nn.Dropout that drops anything.",
                NoEffectWarning,
                stacklevel=2,
            )
        for layer in self._layers:
            layer.driven = True
        for layer, shape in zip(self._layers, self._shapes, strict=False):
            layer.shape = None if shape is None else tuple(shape)
        self._shapes = []

    def state_dict(self) -> dict[str, Any]:
        """Return what the masks are drawn from: a seed and their sizes."""
        started = [None if layer.shape is None else list(layer.shape) for layer in self._layers]
        return {**super().state_dict(), "seed": self._seed, "shapes": started or self._shapes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before FIT_START."""
        self._seed, self._shapes = state.get("seed"), list(state.get("shapes", []))


def _steps(state: State) -> float | None:
    """The length of the run in training steps, or None if that is not known."""
    duration, length = state.max_duration, state.dataloader_len
    assert duration is not None, "the engine asks for `max_duration` at these events"
    if duration.unit is TimeUnit.BATCH:
        return float(duration.value)
    if duration.unit is TimeUnit.EPOCH and length is not None:
        return float(duration.value * length.value)
    return None
