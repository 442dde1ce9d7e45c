"""Tables of a state and a plan for notebooks, and short names of models, optimizers and constructor calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from composer.core.time import Time
from composer.core.types import MetricDict, shown_value
from composer.core.types import number as number
from composer.utils.html import details, table

if TYPE_CHECKING:
    from composer.core.engine import Plan
    from composer.core.state import State

_MAX_METRICS = 20  # the largest number of rows
_PLAIN = (bool, int, float, str, Time)


def html_of_state(state: State, title: str = "State") -> str:
    """Return a table of a run as HTML: its progress, model, optimizers, algorithms and metrics.

    Args:
        state: The state.
        title: The first words of the heading.
    """
    return table(f"{title} of {state.run_name}", _rows_of_state(state))


def name_of_model(model: torch.nn.Module) -> str:
    """Return the class name of a model, without wrappers.

    Example:
        >>> from composer.models import ModuleWithLoss
        >>> name_of_model(ModuleWithLoss(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy))
        'Linear'
    """
    inner = getattr(model, "module", None)  # an attribute of DDP, `ModuleWithLoss` and classifiers
    return name_of_model(inner) if isinstance(inner, torch.nn.Module) else type(model).__name__


def name_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer, and those of its wrappers: "SGD in SAMOptimizer"."""
    inner = getattr(optimizer, "base_optimizer", None)
    own = type(optimizer).__name__
    return f"{name_of_optimizer(inner)} in {own}" if isinstance(inner, torch.optim.Optimizer) else own


def call_of(made: object) -> str:
    """Return the constructor call of an object, with the arguments that it stores and that differ from the defaults.

    Example:
        >>> call_of(torch.nn.Dropout(0.1))
        'Dropout(p=0.1)'
    """
    kept = vars(made)
    given = [
        f"{name}={kept[name] if isinstance(kept[name], Time) else repr(kept[name])}"
        for name, parameter in inspect.signature(type(made)).parameters.items()
        # As text, because times of different units cannot be compared.
        if name in kept and isinstance(kept[name], _PLAIN) and str(kept[name]) != str(parameter.default)
    ]
    return f"{type(made).__name__}({', '.join(given)})" if given else type(made).__name__


def html_of_metrics(metrics: MetricDict) -> str:
    """Return a table of metrics as HTML."""
    return table("Metrics", [(name, shown_value(metric)) for name, metric in metrics.items()])


def html_of_plan(plan: Plan) -> str:
    """Return a table of a plan as HTML: what acts at each event, in which order and why.

    Rows that have no other reason than their place in the user's list are folded.
    """
    if not plan:
        return table(str(plan), [])
    tables = []
    for folded in (False, True):
        rows, previous = [], None
        for row in plan:
            if folded == (row.reason == "as listed" or row.reason.startswith("as listed; from ")):
                rows.append(
                    ("" if row.event is previous else row.event.value, row.order, row.kind, row.name, row.reason)
                )
                previous = row.event
        tables.append(table("Plan", rows, header=("event", "order", "kind", "name", "why here")) if rows else "")
    notes = table("Decisions", list(plan.notes.items())) if plan.notes else ""
    shown, listed = tables
    return shown + (details("In the order of the lists", listed) if listed else "") + notes


def _rows_of_state(state: State) -> Iterator[tuple[str, Any]]:
    now = state.timestamp
    end = "" if state.max_duration is None else f" of {state.max_duration}"
    yield "progress", f"epoch {now.epoch.value}, batch {now.batch.value}, {now.sample.value:,} samples{end}"
    parameters = list(state.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in parameters)
    frozen = "" if trained == whole else f", {trained:,} of them trained"
    yield "model", f"{name_of_model(state.model)} with {whole:,} parameters{frozen}"
    for optimizer in state.optimizers:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        yield "optimizer", f"{name_of_optimizer(optimizer)}, learning rate {', '.join(f'{rate:.4g}' for rate in rates)}"
    for kind, objects in (("algorithms", state.algorithms), ("callbacks", state.callbacks)):
        if objects:
            yield kind, ", ".join(type(each).__name__ for each in objects)
    yield "device", f"{state.device.name}, {state.precision.value}"
    metrics = {f"train/{name}": value for name, value in state.train_metric_values.items()}
    metrics |= {f"eval/{name}": value for name, value in state.eval_metric_values.items()}
    for name, value in list(metrics.items())[:_MAX_METRICS]:
        yield name, number(value)
