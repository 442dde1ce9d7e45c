"""Types used in public signatures."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.utils.data

from composer.core._registry import html_of, registered_names

Batch: TypeAlias = Any
"""A batch from a dataloader: a tensor, or any nesting of tuples, lists and mappings."""

Dataset: TypeAlias = torch.utils.data.Dataset[Batch]
"""A torch dataset of batches or samples."""

JSON: TypeAlias = str | float | int | list["JSON"] | dict[str, "JSON"] | None
"""A value that `json.loads` returns."""


class MetricDict(dict[str, Any]):
    """Metrics by name, or by label and name. Printed, it shows the values that the metrics computed last.

    Printing computes nothing: with several ranks that would wait for the others.

    Example:
        >>> MetricDict(eval={"Loss": torch.tensor(0.25)})
        {'eval': {'Loss': 0.25}}
    """

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {shown_value(metric)}' for name, metric in self.items())}}}"

    def _repr_html_(self) -> str | None:
        return html_of("html_of_metrics", self)


def shown_value(metric: Any) -> str:
    """Return the value that a metric computed last as text, without computing it."""
    if isinstance(metric, dict):
        return repr(MetricDict(metric))
    computed = getattr(metric, "_computed", metric)  # torchmetrics keeps the value until the next update
    return "not computed" if computed is None else number(computed)


def number(value: Any) -> str:
    """Format a number, or a tensor of one number, with four significant digits; anything else with `str`, shortened.

    Example:
        >>> number(0.123456)
        '0.1235'
    """
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):  # not a number, or several
        text = str(value)
        return text if len(text) <= 200 else f"{text[:200]} ..."


__getattr__ = registered_names(__name__)
