"""The functions, then the class. Symbols: N is the number of examples, u a position among them by loss, in (0, 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.algorithms.selective_backprop import _selection
from composer.core import (
    CHANGES_LENGTH,
    PRUNES_BATCH,
    REPLACES_MODEL,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
    State,
    get_precision_context,
)
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import check_finite, check_integers, plain_number
from composer.utils.batch_helpers import batch_get, batch_set

__all__ = [
    "SelectiveBackprop",
    "do_selective_backprop",
    "select_using_loss",
    "selective_backprop",
    "should_selective_backprop",
]


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Whether a batch is to be pruned.

    Args:
        current_duration: How far the run has come, in the unit of `start` and `end`; usually its elapsed fraction.
        batch_idx: The number of the batch in its epoch, from 0.
        start: When pruning begins.
        end: When it is over.
        interrupt: Every so many batches one is not pruned; 2 alternates, 0 prunes all.

    Example:
        >>> [should_selective_backprop(0.6, batch_idx) for batch_idx in range(4)]
        [True, False, True, False]
    """
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def do_selective_backprop(epoch: float, batch_idx: int, start: float, end: float, interrupt: int) -> bool:
    """`should_selective_backprop`, under its earlier name, with all times in epochs."""
    return should_selective_backprop(epoch, batch_idx, start, end, interrupt)


def select_using_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    model: Callable[[torch.Tensor], Any],
    loss_fun: Callable[..., torch.Tensor],
    keep: float = 0.5,
    scale_factor: float = 1,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the part of a batch that the model finds hard.

    Computes the losses of all examples without gradients, sorts them, and draws `max(int(keep * N), 1)` examples
    without replacement. The one at position i by loss, from the lowest, has the weight `u ** (1 / keep - 1)` with
    `u = (i + 0.5) / N`. The draw is on the device of the losses, which nothing waits for.

    Args:
        input: Shape (N, ...); not modified.
        target: Shape (N, ...); not modified.
        model: Gives the outputs for an input. It runs in the mode it is in; if it is a module, its buffers are kept.
        loss_fun: Gives the loss of outputs and targets and takes `reduction="none"`, with which it gives one loss, or
            one tensor of losses, for each example.
        keep: The fraction of the examples to keep, in (0, 1].
        scale_factor: Losses are measured on inputs made smaller by this, in (0, 1]; less than 1 needs inputs of shape
            (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        generator: Makes the draw; on the device of the losses. None: the device's default generator.

    Returns:
        The rows of `input` and `target` that were drawn, in the order drawn, full size.

    Raises:
        TypeError: `loss_fun` is no function or does not take `reduction`.
        ValueError: `keep` or `scale_factor` is out of range, inputs cannot be made smaller, or `loss_fun` does not give
            one loss per example.

    Example:
        >>> x, y = torch.zeros(8, 3), torch.zeros(8, 3)
        >>> kept, _ = select_using_loss(x, y, torch.nn.Linear(3, 3), torch.nn.functional.mse_loss, keep=0.25)
        >>> kept.shape
        torch.Size([2, 3])

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Differs: losses are ranked within the batch, not among recent ones, and the number of examples kept is fixed.
    """
    _selection.check(keep, scale_factor)
    _selection.check_loss(loss_fun)
    with torch.no_grad(), _selection.buffers_kept(model):
        losses = loss_fun(model(_selection.downsampled(input, scale_factor)), target, reduction="none")
        indices = _selection.choose(losses, input.shape[0], keep, generator)
    return input.index_select(0, indices), target.index_select(0, indices)


def selective_backprop(
    X: torch.Tensor,
    y: torch.Tensor,
    model: Callable[[torch.Tensor], Any],
    loss_fun: Callable[..., torch.Tensor],
    keep: float,
    scale_factor: float = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`select_using_loss`, under its earlier name."""
    return select_using_loss(X, y, model, loss_fun, keep, scale_factor)


class SelectiveBackprop(Algorithm):
    """Skips examples with a low loss: an extra forward pass finds them, and the batch goes on without them.

    At AFTER_DATALOADER the batch is moved to the device, the model computes the loss of each example without gradients,
    and the batch is pruned to what `select_using_loss` draws, before anything transforms it. It is pruned before it is
    split, so microbatches equal one batch. Time goes on counting the examples of the whole batch.

    The extra pass runs in training mode, since a model may return something else in evaluation, and leaves no trace in
    the buffers: batch norm statistics are those of the examples that are trained on.

    **Events** INIT (checks the model), AFTER_DATALOADER. **Reads** the model, the elapsed duration, the batch in the
    epoch. **Writes** the batch: every tensor in it with a row for each example, every list in it with
    an entry for each. **Cost** a forward pass over the batch,
    at `scale_factor`; saves `1 - keep` of the forward and backward pass. **Compilation** batches have two sizes, so a
    compiled model is compiled twice, and once more for the pass without gradients.

    Args:
        start: The fraction of the run after which batches are pruned, in [0, 1].
        end: The fraction of the run after which they no longer are; not before `start`.
        keep: The fraction of a batch to keep, in (0, 1]; with 1 nothing is done.
        scale_factor: Losses are measured on inputs made smaller by this, in (0, 1].
        interrupt: Every so many batches of an epoch one is not pruned; 2 alternates, 0 prunes all.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.
        target_key: Where the targets are.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> SelectiveBackprop(keep=0.25).interrupt
        2

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Differs: losses are ranked within the batch, not among recent ones, and the number of examples kept is fixed. Only a
        part of training is pruned. Selected examples go through the model again.
    """

    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    placement = Placement(provides={PRUNES_BATCH}, before={TRANSFORMS_BATCH, CHANGES_LENGTH}, excludes={REPLACES_MODEL})

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        check_finite(start=start, end=end)
        check_integers(interrupt=interrupt)
        if not 0 <= start <= 1:
            raise ValueError(f"`start` must be in [0, 1], got {start!r}. It is a fraction of the run.")
        if end < start:
            raise ValueError(f"`end` must not be less than `start`, got {end!r} and {start!r}. Use for example 0.9.")
        if interrupt < 0:
            raise ValueError(f"`interrupt` must not be negative, got {interrupt!r}. Use 0 to prune every batch.")
        _selection.check(keep, scale_factor)
        self.start, self.end = plain_number(start), plain_number(end)
        self.keep, self.scale_factor = plain_number(keep), plain_number(scale_factor)
        self.interrupt = plain_number(interrupt)
        self.input_key, self.target_key = input_key, target_key

    def match(self, event: Event, state: State) -> bool:
        """At INIT, and at AFTER_DATALOADER if the batch is to be pruned."""
        if event is not Event.AFTER_DATALOADER:
            return event is Event.INIT
        elapsed = state.get_elapsed_duration()
        if elapsed is None or self.keep == 1:
            return False
        batch_idx = int(state.timestamp.batch_in_epoch)
        return should_selective_backprop(float(elapsed), batch_idx, self.start, self.end, self.interrupt)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check the model, or prune the batch."""
        if event is Event.INIT:
            _check_model(state.model)
            return
        state.batch = batch = state.device.batch_to_device(state.batch)
        input, target = batch_get(batch, self.input_key), batch_get(batch, self.target_key)
        if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise NotImplementedError(
                f"`SelectiveBackprop` selects rows of a tensor of inputs and a tensor of targets, got "
                f"{type(input).__name__} and {type(target).__name__}. Point `input_key` and `target_key` at tensors."
            )
        indices = self._select(state, input)
        if isinstance(batch, (Mapping, list, tuple)):
            state.batch = _selection.rows_of(batch, indices, input.shape[0])
        else:
            state.batch_set_item(self.input_key, input.index_select(0, indices))
            state.batch_set_item(self.target_key, target.index_select(0, indices))

    def _select(self, state: State, input: torch.Tensor) -> torch.Tensor:
        model, batch = state.model, state.batch
        if isinstance(model, DistributedDataParallel):  # a pass without gradients concerns no other rank
            model = model.module
        if self.scale_factor != 1:
            batch = batch_set(copy.copy(batch), self.input_key, _selection.downsampled(input, self.scale_factor))
        context = get_precision_context(state.precision, state.precision_config, device_type=input.device.type)
        with torch.no_grad(), _selection.buffers_kept(model):
            with context:
                losses = model.loss(model(batch), batch, reduction="none")  # type: ignore[operator]
            return _selection.choose(losses, input.shape[0], self.keep, None)


def _check_model(model: Any) -> None:
    model = getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model
    if not isinstance(model, ComposerModel):
        raise RuntimeError(
            f"`SelectiveBackprop` must be used with a `ComposerModel`, whose `loss` it calls, got "
            f"{type(model).__name__}. In a loop of your own use `select_using_loss`."
        )
    if not _selection.takes_reduction(model.loss):
        raise TypeError(
            f"`{type(model).__name__}.loss` must take a keyword argument `reduction`. With 'none' it must give one "
            f"loss per example."
        )
