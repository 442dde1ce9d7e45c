"""Logs statistics of what goes into and out of every module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

import torch

from composer.callbacks._intervals import FirstOfInterval, in_batches_or_epochs
from composer.callbacks._units import Declared
from composer.core import Callback, State, Time, TimeUnit
from composer.loggers import DeferredValue, Logger
from composer.utils import local_part, unwrapped_model

__all__ = ["ActivationMonitor", "compute_kurtosis"]

_FEWEST_BATCHES = 10


class ActivationMonitor(Callback):
    """Logs norm, mean, kurtosis and maximum of every module's inputs and outputs, at an interval.

    Inputs and outputs are numbered within their sequence, and named within a mapping: the first input of `layer1` is
    `layer1_input.0`, the entry "logits" of an output `_output.0.logits`. Only floating tensors count. With several
    microbatches the first of the batch is looked at.

    **Events** BEFORE_FORWARD (hooks on all modules), AFTER_FORWARD (they are removed).
    **Cost** in the batches it looks at a pass over every activation; the numbers stay on the device until they are
    written down. A compiled model is compiled once more for its hooks.

    Args:
        interval: How far apart the batches are, in batches or epochs. The first batch of the run is one of them.
        ignore_module_types: Modules are left out if the path to them or the name of their class contains one of these.
        only_log_wandb: Whether, if there is a `WandBLogger`, other loggers get nothing: these are many values.

    Raises:
        ValueError: `interval` is in another unit, or not positive.

    Source: none of its own; kurtosis is Pearson's, 3 for a normal distribution.
    Differs: mappings are looked into as well, and names of classes are compared, too. Rows whose values are all the
        same have no kurtosis; they are left out of the mean.
    """

    metrics: ClassVar[Declared] = {
        "activations/l2_norm/<module>_input.<i>": (
            "unit of the activation",
            "L2 norm of it; also `_output.<i>`",
        ),
        "activations/average/<module>_input.<i>": (
            "unit of the activation",
            "mean of its values; also `_output.<i>`",
        ),
        "activations/kurtosis/<module>_input.<i>": ("1", "mean kurtosis of its rows (last dim); also `_output.<i>`"),
        "activations/max/<module>_input.<i>": ("unit of the activation", "its largest element; also `_output.<i>`"),
    }

    def __init__(
        self,
        interval: SupportsIndex | str | Time[Any] = "25ba",
        ignore_module_types: Sequence[str] | None = None,
        only_log_wandb: bool = True,
    ) -> None:
        self.interval = in_batches_or_epochs(interval)
        if self.interval.unit is TimeUnit.BATCH and self.interval.value < _FEWEST_BATCHES:
            warnings.warn(
                f"An `interval` of '{self.interval}' is short: looking at all activations is slow. Use '25ba' or more.",
                stacklevel=2,
            )
        self.ignore_module_types = [] if ignore_module_types is None else list(ignore_module_types)
        self.only_log_wandb = only_log_wandb
        self._due = FirstOfInterval(self.interval)
        self._hooks: list[Any] = []
        self._found: dict[str, torch.Tensor] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._due.reset()

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._hooks:  # left by a forward pass that failed, with what it had found
            self._remove_hooks()
            self._found.clear()
        if not self._due.begins(state):
            return
        for name, module in unwrapped_model(state.model).named_modules():
            kind = type(module).__name__
            if not any(text in name or text in kind for text in self.ignore_module_types):
                self._hooks.append(module.register_forward_hook(self._hook(name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        found, self._found = self._found, {}
        values = {key: DeferredValue.of_tensor(value) for key, value in found.items()}
        _logger_for(state, logger, self.only_log_wandb).log_metrics(values)

    def close(self, state: State, logger: Logger) -> None:
        self._remove_hooks()
        self._found.clear()

    def _hook(self, name: str) -> Any:
        def look(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            for where, values in (("input", inputs), ("output", outputs)):
                for path, tensor in _tensors(values):
                    self._found.update(_statistics(tensor, f"{name}_{where}{path}"))

        return look

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _logger_for(state: State, logger: Logger, only_wandb: bool) -> Logger:
    if only_wandb:
        chosen = [d for d in logger.destinations if any(c.__name__ == "WandBLogger" for c in type(d).__mro__)]
        if chosen:
            return Logger(state, chosen)
    return logger


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors in nested sequences and mappings, with the way to them."""
    if isinstance(value, torch.Tensor):
        part = local_part(value.detach())
        if part.is_floating_point() and part.numel():
            yield path, part
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}.{i}")


@torch.no_grad()
def _statistics(value: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    value = value.double() if value.dtype is torch.float64 else value.float()
    return {
        f"activations/l2_norm/{name}": torch.linalg.vector_norm(value),
        f"activations/average/{name}": value.mean(),
        f"activations/kurtosis/{name}": compute_kurtosis(value),
        f"activations/max/{name}": value.max(),
    }


def compute_kurtosis(value: torch.Tensor) -> torch.Tensor:
    """The mean kurtosis of the rows of a tensor, 3 for normal values.

    With m2 and m4 the second and fourth central moment of a row, its kurtosis is `m4 / m2 ** 2`.

    Args:
        value: Floating; its last dimension is that of the rows.

    Returns:
        A tensor without dimensions. Rows whose values are all the same do not count; NaN if there are no others.

    Example:
        >>> compute_kurtosis(torch.tensor([[-1.0, 1.0], [5.0, 5.0]])).item()
        1.0
    """
    rows = value.reshape(1, 1) if value.dim() == 0 else value
    centred = rows - rows.mean(dim=-1, keepdim=True)
    squares = centred.square()
    return (squares.square().mean(dim=-1) / squares.mean(dim=-1).square()).nanmean()
