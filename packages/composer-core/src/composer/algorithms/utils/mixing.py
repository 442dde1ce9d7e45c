"""How algorithms that mix examples with partners mix targets and losses. Symbols: m is the weight of the partners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from composer.core.precision import get_precision_context
from composer.core.state import State
from composer.loss.utils import ensure_targets_one_hot
from composer.utils.misc import unwrapped_model

__all__ = ["mix_loss", "mix_targets"]


def mix_targets(state: State, target_key: Any, indices: torch.Tensor, weight: float, name: str) -> None:
    """Replace the targets t of the batch by `(1 - m) * t + m * t[indices]`, one value per class.

    They are taken as they are now: another method may have mixed them before, as it did with the inputs.

    Args:
        state: Its outputs tell the number of classes.
        target_key: Where the targets are in the batch.
        indices: The partners, shape (N,), int64.
        weight: m.
        name: The algorithm, for messages.

    Raises:
        NotImplementedError: The outputs are not one tensor.
    """
    if not isinstance(state.outputs, torch.Tensor):
        raise NotImplementedError(
            f"`{name}` needs the model's outputs to be one tensor, from which the number of classes is known, got "
            f"{type(state.outputs).__name__}. Let the model return its logits, or use `interpolate_loss=True` if the "
            f"model's `loss` looks at the targets of the batch."
        )
    target = ensure_targets_one_hot(state.outputs, state.batch_get_item(target_key))
    state.batch_set_item(target_key, torch.lerp(target, target.index_select(0, indices), weight))


def mix_loss(
    state: State,
    target_key: Any,
    indices: torch.Tensor,
    weight: float,
    name: str,
    *,
    target: torch.Tensor | None = None,
) -> None:
    """Replace the loss l by `(1 - m) * l + m * l'`, where l' is the loss against the targets of the partners.

    Args:
        state: Its model, or the one that a wrapper holds, has a method `loss(outputs, batch)`.
        target_key: Where the targets are in the batch, which keeps them.
        indices: The partners, shape (N,), int64.
        weight: m.
        name: The algorithm, for messages.
        target: The targets that the loss was computed against, such as smoothed ones. None: those of the batch.

    Raises:
        NotImplementedError: The loss is not one tensor, or was computed in the forward pass already.
        AttributeError: The model has no method `loss`.
    """
    if not isinstance(state.loss, torch.Tensor):
        raise NotImplementedError(
            f"`{name}` interpolates a loss that is one tensor, got {type(state.loss).__name__}. Use "
            f"`interpolate_loss=False`."
        )
    loss = _loss_of(state.model, name)
    kept = state.batch_get_item(target_key)
    target = kept if target is None else target
    state.batch_set_item(target_key, target.index_select(0, indices))
    # As the first loss was: after it autocast is over, and a loss would have the outputs' dtype.
    context = get_precision_context(state.precision, state.precision_config, device_type=state.loss.device.type)
    with context:
        other = loss(state.outputs, state.batch)
    state.batch_set_item(target_key, kept)
    if other is state.loss or _is_of_forward(other, state.outputs):
        raise NotImplementedError(
            f"`{name}` cannot interpolate the loss of `{type(unwrapped_model(state.model)).__name__}`, which is "
            f"computed in the forward pass, where it does not see the targets of the partners. Override `loss` to "
            f"compute it from outputs and batch."
        )
    state.loss = torch.lerp(state.loss, other.to(state.loss.dtype), weight)


def _loss_of(model: torch.nn.Module, name: str) -> Any:
    """The `loss` method of a model, or of the module inside a wrapper."""
    loss = getattr(model, "loss", None) or getattr(getattr(model, "module", None), "loss", None)
    if not callable(loss):
        raise AttributeError(
            f"`{name}(interpolate_loss=True)` calls `model.loss(outputs, batch)`, but the model has no such method. "
            f"Give it one, or use `interpolate_loss=False`."
        )
    return loss


def _is_of_forward(loss: torch.Tensor, outputs: Any) -> bool:
    """Return whether a loss depends on the model's outputs through scalars alone: losses that `forward` computed.

    Follows the graph from the loss back to the outputs. Terms of parameters alone, such as a penalty, do not matter.
    """
    found = [output for output in _tensors_in(outputs) if output.grad_fn is not None]
    # One node may put out the loss and the logits, as that of a compiled model does.
    scalars = {(output.grad_fn, output.output_nr) for output in found if not output.dim()}
    others = {(output.grad_fn, output.output_nr) for output in found if output.dim()}
    if not scalars:
        return False
    seen: set[Any] = set()
    queue: list[Any] = [(loss.grad_fn, loss.output_nr)]
    while queue:
        edge = queue.pop()
        if edge in others:
            return False
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        if edge not in scalars:
            queue.extend(edge[0].next_functions)
    return not seen.isdisjoint(scalars)


def _tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (Mapping, Sequence)) and not isinstance(outputs, str):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors_in(part)
    elif hasattr(outputs, "__dict__"):  # an object with the outputs as its fields
        yield from (part for part in vars(outputs).values() if isinstance(part, torch.Tensor))
