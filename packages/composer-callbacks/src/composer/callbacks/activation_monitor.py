"""Log statistics of the inputs and outputs of every module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from composer.callbacks._intervals import FirstOfInterval, in_batches_or_epochs
from composer.core import Callback, State, Time, TimeUnit
from composer.loggers import DeferredValue, Logger
from composer.utils import local_part, unwrapped_model

_FEWEST_BATCHES = 10


class ActivationMonitor(Callback):
    """Logs norm, mean, kurtosis and maximum of every module's inputs and outputs, at an interval.

    Names contain the index in a sequence or the key in a mapping: the first input of `layer1` is `layer1_input.0`, the
    entry "logits" of an output `_output.0.logits`. Only floating-point tensors are logged. With several microbatches,
    those of the first microbatch are logged.

    **Events** BEFORE_FORWARD (adds hooks to all modules), AFTER_FORWARD (removes them).
    **Cost** in the logged batches one pass over every activation; the values stay on the device until a logger writes
    them. A compiled model is recompiled for its hooks.

    Args:
        interval: Interval between logged batches, in batches or epochs, starting with the first batch of the run.
        ignore_module_types: Skip modules whose path or class name contains one of these strings.
        only_log_wandb: If there is a `WandBLogger`, log only to it: there are many values.

    Raises:
        ValueError: `interval` is in another unit, or not positive.

    Source: kurtosis is that of Pearson, 3 for a normal distribution.
    Differs: tensors in mappings are logged, and class names are compared too. Rows with constant values have no
        kurtosis and are left out of the mean.
    """

    def __init__(
        self,
        interval: SupportsIndex | str | Time[Any] = "25ba",
        ignore_module_types: Sequence[str] | None = None,
        only_log_wandb: bool = True,
    ) -> None:
        self.interval = in_batches_or_epochs(interval)
        if self.interval.unit is TimeUnit.BATCH and self.interval.value < _FEWEST_BATCHES:
            warnings.warn(
                f"An `interval` of '{self.interval}' is short: logging all activations is slow. Use '25ba' or more.",
                stacklevel=2,
            )
        self.ignore_module_types = [] if ignore_module_types is None else list(ignore_module_types)
        self.only_log_wandb = only_log_wandb
        self._due = FirstOfInterval(self.interval)
        self._hooks: list[Any] = []
        self._values: dict[str, torch.Tensor] = {}

    def init(self, state: State, logger: Logger) -> None:
        self._due.reset()

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._hooks:  # left by a forward pass that failed
            self._remove_hooks()
            self._values.clear()
        if not self._due.starts(state):
            return
        for name, module in unwrapped_model(state.model).named_modules():
            kind = type(module).__name__
            if not any(text in name or text in kind for text in self.ignore_module_types):
                self._hooks.append(module.register_forward_hook(self._hook(name)))

    def after_forward(self, state: State, logger: Logger) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        values, self._values = self._values, {}
        metrics = {key: DeferredValue.of_tensor(value) for key, value in values.items()}
        if self.only_log_wandb:
            wandb = [d for d in logger.destinations if any(c.__name__ == "WandBLogger" for c in type(d).__mro__)]
            logger = Logger(state, wandb) if wandb else logger
        logger.log_metrics(metrics)

    def close(self, state: State, logger: Logger) -> None:
        self._remove_hooks()
        self._values.clear()

    def _hook(self, name: str) -> Any:
        def compute(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            for kind, values in (("input", inputs), ("output", outputs)):
                for path, tensor in _tensors(values):
                    self._values.update(_statistics(tensor, f"{name}_{kind}{path}"))

        return compute

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors in nested sequences and mappings, with their paths."""
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
    """Return the mean kurtosis of the rows of a tensor, 3 for normally distributed values.

    With the second and fourth central moments m2 and m4 of a row, its kurtosis is `m4 / m2 ** 2`.

    Args:
        value: A floating-point tensor of rows: moments are computed over the last dimension.

    Returns:
        A scalar tensor. Rows with constant values do not count; NaN if there are no others.

    Example:
        >>> compute_kurtosis(torch.tensor([[-1.0, 1.0], [5.0, 5.0]])).item()
        1.0
    """
    rows = value.reshape(1, 1) if value.dim() == 0 else value
    centered = rows - rows.mean(dim=-1, keepdim=True)
    squares = centered.square()
    return (squares.square().mean(dim=-1) / squares.mean(dim=-1).square()).nanmean()
