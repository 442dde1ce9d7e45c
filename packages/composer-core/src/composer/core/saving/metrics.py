"""Save and load metrics: `{name: {"state_dict": ..., "_computed": ..., "_update_count": ...}}`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def metrics_state(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the states of metrics by name."""
    saved = {}
    for name, metric in metrics.items():
        metric.persistent(mode=True)
        saved[name] = {
            "state_dict": metric.state_dict(),
            "_computed": metric._computed,
            "_update_count": metric._update_count,
        }
    return saved


def load_metrics(
    metrics: dict[str, Any], saved: dict[str, Any], to_device: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    """Restore the states of metrics. A metric that the saved state lacks is unchanged, with a warning.

    Args:
        metrics: The metrics by name.
        saved: The result of `metrics_state`; or metric objects by name, as early releases of MosaicML's Composer wrote.
        to_device: Moves a metric to the device of the run.
    """
    for name, metric in metrics.items():
        if name not in saved:
            warnings.warn(f"The metric {name} is not in the state_dict and keeps its current state.", stacklevel=4)
            continue
        entry = saved[name]
        if isinstance(entry, torch.nn.Module):
            entry = metrics_state({"": entry})[""]
        metric.persistent(mode=True)
        # A copy, because torchmetrics removes the entries.
        missing, unexpected = metric.load_state_dict(dict(entry["state_dict"]), strict=False)
        if missing or unexpected:
            warnings.warn(
                f"The saved metric {name} does not match this one. Missing in the file: {missing}. Not in the metric: "
                f"{unexpected}.",
                stacklevel=4,
            )
        metric._computed = _as_tensors(entry.get("_computed"))
        # Files of other libraries have no count; with count 0 torchmetrics warns that nothing was updated.
        metric._update_count = entry.get("_update_count", metric._update_count + 1)
        to_device(metric)


def _as_tensors(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.as_tensor(value)
    return {key: _as_tensors(item) for key, item in value.items()} if isinstance(value, dict) else value
