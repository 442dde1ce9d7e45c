"""Which examples of a batch are kept, judged by their losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from composer.utils import check_finite

__all__ = ["buffers_kept", "check", "check_loss", "choose", "downsampled", "rows_of", "takes_reduction"]

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def check(keep: float, scale_factor: float) -> None:
    """Raise ValueError unless both are in (0, 1]."""
    check_finite(keep=keep, scale_factor=scale_factor)
    if not 0 < keep <= 1:
        raise ValueError(
            f"`keep` must be in (0, 1], got {keep!r}. It is the fraction of a batch that is trained on; at least one "
            f"example is."
        )
    if not 0 < scale_factor <= 1:
        raise ValueError(
            f"`scale_factor` must be in (0, 1], got {scale_factor!r}. With less than 1 losses are measured on smaller "
            f"inputs."
        )


def check_loss(loss_fun: Any) -> None:
    """Raise TypeError unless it is a function that can give one loss per example."""
    if not callable(loss_fun):
        raise TypeError(f"`loss_fun` must be a function, got {type(loss_fun).__name__}. Pass for example `F.mse_loss`.")
    if not takes_reduction(loss_fun):
        raise TypeError(
            f"`loss_fun` must take a keyword argument `reduction`. {loss_fun!r} does not, so it cannot give one loss "
            f"per example."
        )


def takes_reduction(function: Callable[..., Any]) -> bool:
    """Whether a function has the keyword argument `reduction`, or takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature; they say it themselves
        return True
    return "reduction" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def downsampled(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """The input at a smaller size, or itself.

    Raises:
        ValueError: It has no size that could be smaller.
    """
    if scale_factor == 1:
        return input
    if input.dim() not in _INTERPOLATION:
        raise ValueError(
            f"`input` must have 3, 4 or 5 dimensions to be made smaller, got {input.dim()}. Use `scale_factor=1`."
        )
    mode = _INTERPOLATION[input.dim()]
    return F.interpolate(input, scale_factor=scale_factor, mode=mode, align_corners=False, recompute_scale_factor=False)


def choose(losses: torch.Tensor, num_examples: int, keep: float, generator: torch.Generator | None) -> torch.Tensor:
    """Draw `keep` of the examples, at least one, preferring high losses; return their indices in the order drawn.

    Raises:
        ValueError: There is not one loss, or tensor of losses, for each example.
    """
    if losses.dim() == 0 or losses.shape[0] != num_examples:
        raise ValueError(
            f"`loss_fun` must give one loss per example with `reduction='none'`, got shape {tuple(losses.shape)} for "
            f"{num_examples} examples."
        )
    if losses.dim() > 1:
        losses = losses.flatten(1).mean(1)
    device = losses.device
    positions = (torch.arange(num_examples, device=device, dtype=torch.float64) + 0.5) / num_examples
    # Drawing one after the other in proportion to weights is taking the largest of log(weight) + Gumbel noise. As
    # logarithms, the weights of a tiny `keep` do not vanish.
    noise = torch.empty(num_examples, device=device, dtype=torch.float64).exponential_(generator=generator)
    scores = (1 / keep - 1) * positions.log() - noise.log()
    drawn = scores.topk(min(max(int(keep * num_examples), 1), num_examples)).indices
    return losses.argsort().index_select(0, drawn)


def rows_of(batch: Any, indices: torch.Tensor, num_examples: int) -> Any:
    """A batch of some of its examples.

    Every tensor with a row for each example loses the others, and so does every list inside the batch with an entry,
    such as a name, for each example.
    """
    if isinstance(batch, (list, tuple)):
        return _rebuilt(batch, [_rows_of_field(field, indices, num_examples) for field in batch])
    return _rows_of_field(batch, indices, num_examples)


def _rows_of_field(batch: Any, indices: torch.Tensor, num_examples: int) -> Any:
    if isinstance(batch, torch.Tensor):
        is_per_example = batch.dim() > 0 and batch.shape[0] == num_examples
        return batch.index_select(0, indices) if is_per_example else batch
    if isinstance(batch, Mapping):
        kept = {key: _rows_of_field(value, indices, num_examples) for key, value in batch.items()}
        return kept if type(batch) is dict else _updated(batch, kept)
    if isinstance(batch, (list, tuple)):
        is_list = len(batch) == num_examples and not hasattr(batch, "_fields")
        if is_list and not all(_has_rows(part, num_examples) for part in batch):
            return _rebuilt(batch, [batch[i] for i in indices.tolist()])  # what is on the host is chosen there
        return _rebuilt(batch, [_rows_of_field(part, indices, num_examples) for part in batch])
    return batch


def _has_rows(part: Any, num_examples: int) -> bool:
    """Whether something has a row for each example."""
    if isinstance(part, Mapping):
        return all(_has_rows(value, num_examples) for value in part.values())
    if isinstance(part, torch.Tensor):
        return part.dim() > 0 and part.shape[0] == num_examples
    return isinstance(part, (list, tuple)) and len(part) == num_examples


def _rebuilt(batch: Any, parts: list[Any]) -> Any:
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _updated(batch: Any, kept: dict[Any, Any]) -> Any:
    copied = batch.copy()
    for key, value in kept.items():
        copied[key] = value
    return copied


@contextmanager
def buffers_kept(model: Any) -> Iterator[None]:
    """Undo what the body does to the buffers of a model, such as batch norm statistics."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    kept = [
        (module._buffers, name, buffer, buffer.clone())
        for module in modules
        if module.training
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, value in kept:
            buffers[name] = buffer.copy_(value)
