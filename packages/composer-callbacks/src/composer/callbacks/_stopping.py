"""Finding and comparing values of metrics, for callbacks that stop training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from composer.core import State

Comparison = Callable[[Any, Any], Any]

_BY_NAME: dict[str, Comparison] = {
    "gt": torch.greater,
    "greater": torch.greater,
    "lt": torch.less,
    "less": torch.less,
}
_LESS_IS_BETTER = ("loss", "error", "perplexity")


def comparison(comp: str | Comparison | None, monitor: str) -> Comparison:
    """Return a function that is True if its first argument is better than its second.

    Args:
        comp: The function, its name, or None to derive it from the name of the metric.
        monitor: The name of the metric.

    Raises:
        ValueError: `comp` is an unknown name.
    """
    if comp is None:
        return torch.less if any(word in monitor.lower() for word in _LESS_IS_BETTER) else torch.greater
    if callable(comp):
        return comp
    if str(comp).lower() not in _BY_NAME:
        raise ValueError(
            f"`comp` must be 'gt', 'greater', 'lt', 'less' or a function of two tensors, got {comp!r}. Use 'greater' "
            f"if larger values are better."
        )
    return _BY_NAME[comp.lower()]


def metric_value(state: State, dataloader_label: str, monitor: str, argument: str = "monitor") -> torch.Tensor:
    """Return the current value of a metric, on the host.

    Args:
        state: The state of the run.
        dataloader_label: The label of the evaluator or of the training dataloader.
        monitor: The name of the metric.
        argument: The name of the argument of the callback, for error messages.

    Raises:
        ValueError: There is no such metric, or its value is not a single number.
    """
    metrics = state.eval_metrics.get(dataloader_label)
    if metrics is None:
        metrics = state.train_metrics if dataloader_label in ("train", state.dataloader_label) else {}
    if monitor not in metrics:
        raise ValueError(
            f"`{argument}` must be a metric of {dataloader_label!r}, got {monitor!r}. "
            f"Known metrics: {', '.join(map(repr, metrics)) or 'none'}."
        )
    value = torch.as_tensor(metrics[monitor].compute()).detach().cpu()
    if value.numel() != 1:
        raise ValueError(
            f"`{argument}` must be a metric whose value is one number, but {monitor!r} has shape {tuple(value.shape)}. "
            f"Average it, for example with `average='micro'`."
        )
    return value.reshape(())


def warn_of_unknown_label(state: State, dataloader_label: str, name: str) -> None:
    """Warn if no dataloader of this `fit` has a label.

    Args:
        state: The state of the run, at the start of training.
        dataloader_label: The label.
        name: The name of the callback.
    """
    labels = [state.dataloader_label, *(evaluator.label for evaluator in state.evaluators)]
    if dataloader_label not in labels:
        warnings.warn(
            f"`{name}` reads metrics of {dataloader_label!r}, but no dataloader of this run has that label, so it will "
            f"never stop the run. Use as `dataloader_label` one of {', '.join(map(repr, labels))}.",
            stacklevel=3,
        )
