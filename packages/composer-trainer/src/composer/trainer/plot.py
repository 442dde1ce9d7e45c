"""Curves of a run's losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.loggers import InMemoryLogger, LoggerDestination
from composer.trainer.history import RunHistory
from composer.utils import MissingConditionalImportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _COLUMNS = 5.0, 3.0, 3  # inches of one plot, and plots in a row


def plot(destinations: Sequence[LoggerDestination], history: RunHistory, names: Sequence[Any]) -> Figure:
    """Draw the values of a run over batches, one plot for what training and evaluation share.

    Args:
        destinations: The loggers of the run; the first `InMemoryLogger` has the values.
        history: The values if there is none.
        names: What to draw, by the logged names or parts of them; empty: all losses and metrics.

    Raises:
        TypeError: One of `names` is not a string.
        ValueError: There are no values yet, or none has a name that contains one of `names`.
        MissingConditionalImportError: matplotlib is not installed.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"`names` must be strings, got {name!r}. Pass them one by one, such as `plot('loss', 'Accuracy')`, or "
                f"none to draw all losses and metrics."
            )
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingConditionalImportError("plot", "matplotlib", None) from error

    memory = next((each for each in destinations if isinstance(each, InMemoryLogger)), None)
    if memory is None:
        found = history.series()
    else:
        found = {name: [(time.batch.value, value) for time, value in values] for name, values in memory.data.items()}
    if not found:
        raise ValueError("There is nothing to draw yet. Call `fit` or `eval` first.")
    groups: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for name, series in found.items():
        is_wanted = any(part in name for part in names) if names else name.startswith(("loss/", "metrics/"))
        values = [(batch, _number(value)) for batch, value in series]
        # The value at the end of an epoch has the number of the next batch, whose value replaces it.
        points = {batch: value for batch, value in values if value is not None}
        if is_wanted and points:
            title = "loss" if name.startswith("loss/") else name.rpartition("/")[2]
            groups.setdefault(title, {})[name] = list(points), list(points.values())
    if not groups:
        known = ", ".join(sorted(found))
        hint = "" if memory else " For all that is logged, pass `loggers=InMemoryLogger()` to the `Trainer`."
        raise ValueError(
            f"`names` must be logged names or parts of them, got {list(names)!r}. There are: {known}.{hint}"
        )
    rows = -(-len(groups) // _COLUMNS)
    columns = min(len(groups), _COLUMNS)
    figure = pyplot.figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for index, (title, curves) in enumerate(groups.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        for name, (at, curve) in curves.items():
            axes.plot(at, curve, label=name, marker="." if len(at) < 2 * _COLUMNS else None)
        axes.set(title=title, xlabel="batch")
        axes.legend(fontsize="small")
    pyplot.close(figure)  # a notebook shows it once, as the result
    return figure


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # not a number, or several
        return None
