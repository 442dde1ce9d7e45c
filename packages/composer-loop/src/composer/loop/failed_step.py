"""Notes that a failing first step adds to its error: batch, outputs, model and optimizers, and likely causes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from composer.core.display import name_of_model, name_of_optimizer
from composer.core.precision import Precision
from composer.loss.utils import ignored_label
from composer.utils.batch_helpers import batch_get, fields_of, is_batch_dataclass

if TYPE_CHECKING:
    from composer.core.state import State

_log = logging.getLogger(__name__)
_MAX_TENSORS = 12  # lines about the batch, and about the outputs


def describe_failed_step(error: Exception, state: State, batch: Any) -> None:
    """Add to an error what the first step saw: batch, outputs, loss, model and optimizers, and what may be wrong.

    The error gets a note, which its traceback shows.

    Args:
        error: The error that the step raised.
        state: The state of the run.
        batch: The batch that the step began with, if possible on the host: after an error of a CUDA kernel the values
            on the device cannot be read.
    """
    try:
        text = "\n".join(["The first step saw:", *(f"  {line}" for line in _seen(state, batch))])
        causes = [f"  {line}" for line in _causes(state, batch)]
    except Exception:  # noqa: BLE001 - the error of the step must get through
        _log.debug("The failed step could not be described.", exc_info=True)
        return
    text = "\n".join([text, "Possible causes:", *causes]) if causes else text
    error.add_note(text)


def _seen(state: State, batch: Any) -> Iterator[str]:
    for name, value in (("batch", batch), ("outputs", state.outputs), ("loss", state.loss)):
        for path, tensor in islice(_tensors(value, name), _MAX_TENSORS):
            ends = _range(tensor) if name == "batch" else None
            values = "" if ends is None else f", values {ends[0]} to {ends[1]}"
            grad = f", requires_grad={tensor.requires_grad}" if name == "loss" else ""
            yield f"{path}: {_short(tensor.dtype)}, shape {tuple(tensor.shape)}, {tensor.device}{values}{grad}"
    kinds = Counter(f"{_short(each.dtype)} on {each.device}" for each in state.model.parameters())
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"
    yield f"parameters of {name_of_model(state.model)}: {counted}; precision {state.precision.value}"
    for optimizer in state.optimizers:
        rates = dict.fromkeys(repr(group.get("lr")) for group in optimizer.param_groups)
        yield f"optimizer: {name_of_optimizer(optimizer)}, lr {', '.join(rates)}"


def _causes(state: State, batch: Any) -> Iterator[str]:
    inputs, targets = (_part(state, batch, index) for index in (0, 1))
    parameters = dict(state.model.named_parameters())
    meta = next((name for name, each in parameters.items() if each.is_meta), None)
    if meta is not None:
        yield f"The parameter {meta!r} is on the meta device and has no values. Load weights before training."
    dtypes = {each.dtype for each in parameters.values() if each.is_floating_point()}
    if inputs is not None and dtypes and inputs.dtype not in dtypes and not inputs.is_complex():
        names = f"The inputs are {_short(inputs.dtype)}, the parameters {', '.join(sorted(map(_short, dtypes)))}."
        if not inputs.is_floating_point():
            if not any(isinstance(each, torch.nn.Embedding) for each in state.model.modules()):
                yield f"{names} Convert the inputs with `.float()`."
        elif not dtypes & {torch.float32, torch.float64}:
            yield f"{names} Keep the parameters in float32 and pass `precision='amp_bf16'`, or convert the inputs."
        elif state.precision is Precision.FP32 or inputs.dtype is torch.float64:
            yield f"{names} Convert the inputs with `.float()`."
    if targets is not None and not (targets.is_floating_point() or targets.is_complex()):
        if targets.dtype not in (torch.int64, torch.uint8, torch.bool):
            yield f"The targets are {_short(targets.dtype)}, but losses of class indices need int64. Use `.long()`."
        ignored = ignored_label(state.model)
        ignored = -100 if ignored is None else ignored
        classes, ends = _num_classes(state.outputs, targets), _range(targets, ignored)
        if classes is not None and ends is not None and not 0 <= ends[0] <= ends[1] < classes:
            yield (
                f"The targets are {ends[0]} to {ends[1]}, but the outputs have {classes} classes, which are 0 to "
                f"{classes - 1}; {ignored} is ignored."
            )
    losses = [tensor for _, tensor in _tensors(state.loss, "loss")]
    if losses and not any(loss.requires_grad for loss in losses):
        trained = sum(each.requires_grad for each in parameters.values())
        yield (
            f"The loss has no gradient: it or the outputs were detached, replaced by a number or computed under "
            f"`torch.no_grad()`, or nothing in it is trained ({trained} of {len(parameters)} parameters require one)."
        )
    for optimizer in state.optimizers:
        rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), str)]
        if rates:
            yield f"`lr` of {name_of_optimizer(optimizer)} is the text {rates[0]!r}. Pass a number."


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested batches, outputs or losses, with the expressions that select them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{path}[{index}]")
    elif is_batch_dataclass(value):
        for name, part in fields_of(value).items():
            yield from _tensors(part, f"{path}.{name}")


def _part(state: State, batch: Any, index: int) -> torch.Tensor | None:
    """Return the inputs (0) or targets (1) of a batch if they are known and a single tensor."""
    try:
        value = batch_get(batch, state.batch_key(index, batch))
    except (LookupError, TypeError, AttributeError):
        return None
    return value if isinstance(value, torch.Tensor) else None


def _range(tensor: torch.Tensor, ignored: int | None = None) -> tuple[int, int] | None:
    """Return the smallest and the largest of integers; None for other tensors, and if they cannot be read."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return None
    try:
        counted = tensor if ignored is None else tensor[tensor != ignored]
        return (int(counted.min()), int(counted.max())) if counted.numel() else None
    except (RuntimeError, NotImplementedError):  # after an error of a CUDA kernel, or on the meta device
        return None


def _num_classes(outputs: Any, targets: torch.Tensor) -> int | None:
    """Return the number of classes of outputs of shape (N, C, ...) or (N, ..., C) for targets of shape (N, ...).

    N may differ: the outputs may be those of a microbatch.
    """
    for _, tensor in _tensors(outputs, "outputs"):
        shape, rest = tensor.shape, targets.shape[1:]
        if tensor.dim() == targets.dim() + 1 > 1 and rest in (shape[2:], shape[1:-1]):
            return shape[1] if shape[2:] == rest else shape[-1]
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
