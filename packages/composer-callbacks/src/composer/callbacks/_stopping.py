"""What both stoppers share: comparing values of metrics, and finding them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from composer.core import State

__all__ = ["Comparison", "comparison", "metric_value", "warn_of_unknown_label"]

Comparison = Callable[[Any, Any], Any]

_BY_NAME: dict[str, Comparison] = {
    "gt": torch.greater,
    "greater": torch.greater,
    "lt": torch.less,
    "less": torch.less,
}
_LESS_IS_BETTER = ("loss", "error", "perplexity")


def comparison(comp: str | Comparison | None, monitor: str) -> Comparison:
    """The function that says whether its first argument is better than its second.

    Args:
        comp: The function, its name, or None to tell it from the name of the metric.
        monitor: The name of the metric.

    Raises:
        ValueError: `comp` is neither.
    """
    if comp is None:
        return torch.less if any(word in monitor.lower() for word in _LESS_IS_BETTER) else torch.greater
    if callable(comp):
        return comp
    if str(comp).lower() not in _BY_NAME:
        raise ValueError(
            f"`comp` must be 'gt', 'greater', 'lt', 'less' or a function of two tensors, got {comp!r}. Use 'greater' "
            f"where more is better."
        )
    return _BY_NAME[comp.lower()]


def metric_value(state: State, dataloader_label: str, monitor: str, argument: str = "monitor") -> torch.Tensor:
    """The value of a metric now, on the host.

    Args:
        state: The state of the run.
        dataloader_label: The evaluator's label, or that of the training loader.
        monitor: The name of the metric.
        argument: What the user calls that name.

    Raises:
        ValueError: There is no such metric, or its value is not a single number.
    """
    metrics = state.eval_metrics.get(dataloader_label)
    if metrics is None:
        metrics = state.train_metrics if dataloader_label in ("train", state.dataloader_label) else {}
    if monitor not in metrics:
        raise ValueError(
            f"`{argument}` must be a metric of {dataloader_label!r}, got {monitor!r}. "
            f"There are: {', '.join(map(repr, metrics)) or 'none'}."
        )
    value = torch.as_tensor(metrics[monitor].compute()).detach().cpu()
    if value.numel() != 1:
        raise ValueError(
            f"`{argument}` must be a metric whose value is one number, but {monitor!r} has shape {tuple(value.shape)}. "
            f"Average it, for example with `average='micro'`."
        )
    return value.reshape(())


def warn_of_unknown_label(state: State, dataloader_label: str, name: str) -> None:
    """Warn if nothing that runs in this `fit` has a label, because its metrics will never be looked at.

    Args:
        state: The state of the run, as training begins.
        dataloader_label: The label.
        name: Who looks.
    """
    labels = [state.dataloader_label, *(evaluator.label for evaluator in state.evaluators)]
    if dataloader_label not in labels:
        warnings.warn(
            f"`{name}` waits for metrics of {dataloader_label!r}, which nothing in this run has as its label, so it "
            f"will never stop it. Pass as `dataloader_label` one of {', '.join(map(repr, labels))}.",
            stacklevel=3,
        )
