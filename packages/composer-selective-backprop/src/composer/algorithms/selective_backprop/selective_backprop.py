"""The functions, then the algorithm. Symbols: N is the number of examples, u in (0, 1) a position sorted by loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from composer.algorithms.utils.augmentation_common import has_pixel_maps
from composer.core import (
    CHANGES_LENGTH,
    PRUNES_BATCH,
    REPLACES_MODEL,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
    get_precision_context,
)
from composer.models import ComposerModel
from composer.utils import check_finite, check_integers, plain_number
from composer.utils.batch_helpers import batch_set

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Return True if a batch should be pruned.

    Args:
        current_duration: The elapsed time, in the unit of `start` and `end`; usually a fraction of the run.
        batch_idx: The index of the batch in its epoch, from 0.
        start: When pruning starts.
        end: When pruning ends.
        interrupt: Do not prune every `interrupt`-th batch; 2 alternates, 0 prunes all batches.

    Example:
        >>> [should_selective_backprop(0.6, batch_idx) for batch_idx in range(4)]
        [True, False, True, False]
    """
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def do_selective_backprop(epoch: float, batch_idx: int, start: float, end: float, interrupt: int) -> bool:
    """Alias of `should_selective_backprop` for times in epochs."""
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
    """Select the examples of a batch with high losses.

    Computes the losses of all examples without gradients, sorts them, and draws `max(int(keep * N), 1)` examples
    without replacement. The example with the i-th lowest loss, i from 0, has the weight `u ** (1 / keep - 1)` with
    `u = (i + 0.5) / N`. The draw is made on the device of the losses, without synchronizing with it.

    Args:
        input: Shape (N, ...); not modified.
        target: Shape (N, ...); not modified.
        model: Computes the outputs of an input. It runs in its current mode; the buffers of a module are restored.
        loss_fun: Gives the loss of outputs and targets and takes `reduction="none"`, with which it gives one loss, or
            one tensor of losses, for each example.
        keep: The fraction of the examples to keep, in (0, 1].
        scale_factor: Compute the losses on inputs downsampled by this factor, in (0, 1]; less than 1 requires inputs of
            shape (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        generator: Generator for the draw, on the device of the losses. None: the default generator of the device.

    Returns:
        The selected rows of `input` and `target`, in the order drawn, at full size.

    Raises:
        TypeError: `loss_fun` is not a function or does not accept `reduction`.
        ValueError: `keep` or `scale_factor` is out of range, the inputs cannot be downsampled, or `loss_fun` does not
            return one loss per example.

    Example:
        >>> x, y = torch.zeros(8, 3), torch.zeros(8, 3)
        >>> kept, _ = select_using_loss(x, y, torch.nn.Linear(3, 3), torch.nn.functional.mse_loss, keep=0.25)
        >>> kept.shape
        torch.Size([2, 3])

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Differs: losses are ranked within the batch, not among recent losses, and the number of examples kept is fixed.
    """
    _check_fractions(keep, scale_factor)
    _check_loss(loss_fun)
    with torch.no_grad(), _preserve_buffers(model):
        losses = loss_fun(model(_downsample(input, scale_factor)), target, reduction="none")
        indices = _choose(losses, input.shape[0], keep, generator)
    return input.index_select(0, indices), target.index_select(0, indices)


def selective_backprop(
    X: torch.Tensor,
    y: torch.Tensor,
    model: Callable[[torch.Tensor], Any],
    loss_fun: Callable[..., torch.Tensor],
    keep: float,
    scale_factor: float = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Alias of `select_using_loss`."""
    return select_using_loss(X, y, model, loss_fun, keep, scale_factor)


class SelectiveBackprop(Algorithm):
    """Skips examples with a low loss: an extra forward pass computes the losses, and the batch is pruned.

    At AFTER_DATALOADER the batch is moved to the device, the model computes the loss of each example without gradients,
    and the examples are selected as by `select_using_loss`, before other methods transform the batch. It is pruned
    before it is split, so microbatches equal one batch. The timestamp counts the examples of the unpruned batch.

    The extra pass runs in training mode, because a model may return something else in evaluation. Buffers are restored
    afterwards: batch norm statistics are those of the examples that are trained on.

    **Events** INIT (checks the model), AFTER_DATALOADER. **Reads** the model, the elapsed duration, the batch in the
    epoch. **Writes** the batch: every tensor with a row per example, every list with an entry per example. **Cost** a
    forward pass over the batch, at `scale_factor`; saves `1 - keep` of the forward and backward pass. **Compilation**
    batches have two sizes, so a compiled model is compiled twice, and once more for the pass without gradients.

    Args:
        start: The fraction of the run after which batches are pruned, in [0, 1].
        end: The fraction of the run after which batches are no longer pruned; not less than `start`.
        keep: The fraction of a batch to keep, in (0, 1]; 1 disables pruning.
        scale_factor: Compute the losses on inputs downsampled by this factor, in (0, 1].
        interrupt: Do not prune every `interrupt`-th batch of an epoch; 2 alternates, 0 prunes all batches.
        input_key: Position of the inputs in the batch; see `State.batch_get_item`.
        target_key: Position of the targets in the batch.

    Raises:
        ValueError: An argument is out of range; when a batch is pruned, if its inputs cannot be downsampled, or its
            targets have a value per pixel and `scale_factor` is not 1, or `loss` does not return one loss per example.
        TypeError: A number has the wrong type; at INIT, if the model's `loss` does not accept `reduction`.
        RuntimeError: At INIT, if the model is not a `ComposerModel`.
        NotImplementedError: When a batch is pruned, if inputs or targets are not a single tensor.

    Example:
        >>> SelectiveBackprop(keep=0.25).interrupt
        2

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
    Differs: losses are ranked within the batch, not among recent losses, and the number of examples kept is fixed. Only
        a part of training is pruned. Selected examples go through the model twice.
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
        check_finite("It is a fraction of the run.", start=start, least=0, most=1)
        check_finite(end=end)
        if end < start:
            raise ValueError(f"`end` must not be less than `start`, got {end!r} and {start!r}. Use for example 0.9.")
        check_integers("Use 0 to prune every batch.", interrupt=interrupt, least=0)
        _check_fractions(keep, scale_factor)
        self.start, self.end = plain_number(start), plain_number(end)
        self.keep, self.scale_factor = plain_number(keep), plain_number(scale_factor)
        self.interrupt = plain_number(interrupt)
        self.input_key, self.target_key = input_key, target_key

    def match(self, event: Event, state: State) -> bool:
        """Return True at INIT, and at AFTER_DATALOADER if the batch should be pruned."""
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
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise NotImplementedError(
                f"`SelectiveBackprop` selects rows of a tensor of inputs and a tensor of targets, got "
                f"{type(input).__name__} and {type(target).__name__}. Point `input_key` and `target_key` at tensors."
            )
        indices = self._select(state, input)
        if isinstance(batch, (Mapping, list, tuple)):
            state.batch = _select_rows(batch, indices, input.shape[0])
        else:
            state.batch_set_item(self.input_key, input.index_select(0, indices))
            state.batch_set_item(self.target_key, target.index_select(0, indices))

    def _select(self, state: State, input: torch.Tensor) -> torch.Tensor:
        model, batch = state.model, state.batch
        if isinstance(model, DistributedDataParallel):  # a pass without gradients needs no communication
            model = model.module
        if self.scale_factor != 1:
            if has_pixel_maps(batch, input):
                raise ValueError(
                    f"`scale_factor` must be 1 for targets that have a value per pixel, such as masks, which are not "
                    f"downsampled, got {self.scale_factor!r}. Use `SelectiveBackprop(scale_factor=1)`."
                )
            batch = batch_set(copy.copy(batch), state.batch_key(self.input_key), _downsample(input, self.scale_factor))
        context = get_precision_context(state.precision, state.precision_config, device_type=input.device.type)
        with torch.no_grad(), _preserve_buffers(model):
            with context:
                losses = model.loss(model(batch), batch, reduction="none")  # type: ignore[operator]
            return _choose(losses, input.shape[0], self.keep, None)


def _check_model(model: Any) -> None:
    model = getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model
    if not isinstance(model, ComposerModel):
        raise RuntimeError(
            f"`SelectiveBackprop` must be used with a `ComposerModel`, whose `loss` it calls, got "
            f"{type(model).__name__}. For other models call `select_using_loss` in a loop of your own."
        )
    if not _takes_reduction(model.loss):
        raise TypeError(
            f"`{type(model).__name__}.loss` must take a keyword argument `reduction`. With 'none' it must return one "
            f"loss per example."
        )


def _check_fractions(keep: float, scale_factor: float) -> None:
    check_finite("It is the fraction of a batch that is trained on, at least one example.", keep=keep, above=0, most=1)
    check_finite("With less than 1, losses are computed on smaller inputs.", scale_factor=scale_factor, above=0, most=1)


def _check_loss(loss_fun: Any) -> None:
    if not callable(loss_fun):
        raise TypeError(f"`loss_fun` must be a function, got {type(loss_fun).__name__}. Pass for example `F.mse_loss`.")
    if not _takes_reduction(loss_fun):
        raise TypeError(
            f"`loss_fun` must take a keyword argument `reduction`. {loss_fun!r} does not, so it cannot return one loss "
            f"per example."
        )


def _takes_reduction(function: Callable[..., Any]) -> bool:
    """Return True if a function accepts the keyword argument `reduction`."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature; the call will tell
        return True
    return "reduction" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _downsample(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    if scale_factor == 1:
        return input
    if input.dim() not in _INTERPOLATION:
        raise ValueError(
            f"`input` must have 3, 4 or 5 dimensions to be downsampled, got {input.dim()}. Use `scale_factor=1`."
        )
    mode = _INTERPOLATION[input.dim()]
    return F.interpolate(input, scale_factor=scale_factor, mode=mode, align_corners=False, recompute_scale_factor=False)


def _choose(losses: torch.Tensor, num_examples: int, keep: float, generator: torch.Generator | None) -> torch.Tensor:
    """Draw the fraction `keep` of the examples, at least one, preferring high losses; return their indices."""
    if losses.dim() == 0 or losses.shape[0] != num_examples:
        raise ValueError(
            f"`loss_fun` must return one loss per example with `reduction='none'`, got shape {tuple(losses.shape)} for "
            f"{num_examples} examples."
        )
    if losses.dim() > 1:
        losses = losses.flatten(1).mean(1)
    device = losses.device
    positions = (torch.arange(num_examples, device=device, dtype=torch.float64) + 0.5) / num_examples
    # Sequential draws in proportion to weights are equivalent to taking the largest log(weight) + Gumbel noise. In
    # logarithms, the weights for a tiny `keep` do not underflow.
    noise = torch.empty(num_examples, device=device, dtype=torch.float64).exponential_(generator=generator)
    scores = (1 / keep - 1) * positions.log() - noise.log()
    drawn = scores.topk(min(max(int(keep * num_examples), 1), num_examples)).indices
    return losses.argsort().index_select(0, drawn)


def _select_rows(batch: Any, indices: torch.Tensor, num_examples: int) -> Any:
    """Select examples in every tensor with a row per example and every list with an entry (a name) per example."""
    if isinstance(batch, (list, tuple)):
        return _rebuild(batch, [_select_rows_of_field(field, indices, num_examples) for field in batch])
    return _select_rows_of_field(batch, indices, num_examples)


def _select_rows_of_field(batch: Any, indices: torch.Tensor, num_examples: int) -> Any:
    if isinstance(batch, torch.Tensor):
        is_per_example = batch.dim() > 0 and batch.shape[0] == num_examples
        return batch.index_select(0, indices) if is_per_example else batch
    if isinstance(batch, Mapping):
        selected = {key: _select_rows_of_field(value, indices, num_examples) for key, value in batch.items()}
        return selected if type(batch) is dict else _update(batch, selected)
    if isinstance(batch, (list, tuple)):
        is_list = len(batch) == num_examples and not hasattr(batch, "_fields")
        if is_list and not all(_has_rows(part, num_examples) for part in batch):
            return _rebuild(batch, [batch[i] for i in indices.tolist()])  # a list can only be indexed on the host
        return _rebuild(batch, [_select_rows_of_field(part, indices, num_examples) for part in batch])
    return batch


def _has_rows(part: Any, num_examples: int) -> bool:
    if isinstance(part, Mapping):
        return all(_has_rows(value, num_examples) for value in part.values())
    if isinstance(part, torch.Tensor):
        return part.dim() > 0 and part.shape[0] == num_examples
    return isinstance(part, (list, tuple)) and len(part) == num_examples


def _rebuild(batch: Any, parts: list[Any]) -> Any:
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _update(batch: Any, values: dict[Any, Any]) -> Any:
    updated = batch.copy()
    for key, value in values.items():
        updated[key] = value
    return updated


@contextmanager
def _preserve_buffers(model: Any) -> Iterator[None]:
    """Restore the buffers of a model, such as batch norm statistics, after the body."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    saved = [
        (module._buffers, name, buffer, buffer.clone())
        for module in modules
        if module.training
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, value in saved:
            buffers[name] = buffer.copy_(value)
