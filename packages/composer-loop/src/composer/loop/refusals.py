"""Refusals of what a loop of another library cannot do: all of them in one error, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer.core.algorithm import Algorithm, declared_events, declared_placement
from composer.core.effects import CHANGES_BATCH_SIZE, PHRASES, REPLACES_MODEL
from composer.core.event import Event
from composer.core.ordering import ConflictError, Ordering
from composer.models.base import ComposerModel

UNAVAILABLE: dict[Event | str, str] = {  # in every host
    REPLACES_MODEL: "Pass the model that you want to train.",
    CHANGES_BATCH_SIZE: "The host loads and counts batches in advance. Use the `Trainer` of composer.",
}


def conflicts(algorithms: Sequence[Algorithm], unavailable: Mapping[Event | str, str]) -> Iterator[ConflictError]:
    """Yield an error for each event or effect of an algorithm that a host does not support, and for excluded pairs.

    Args:
        algorithms: The algorithms.
        unavailable: The events and effects, each with the reason or the way out, as a sentence.
    """
    for algorithm in algorithms:
        name, events = f"`{type(algorithm).__name__}`", declared_events(algorithm)
        effects, reasons = declared_placement(algorithm).provides, set[str]()
        for feature, advice in unavailable.items():
            if advice in reasons:  # several events are often missing for the same reason
                continue
            if isinstance(feature, Event) and (events is None or feature in events):
                what = f"acts at {feature.name}" if events is not None else f"may act at {feature.name}, or any event"
                yield ConflictError(f"{name} {what}, which this loop cannot announce. {advice}")
            elif not isinstance(feature, Event) and feature in effects:
                what = PHRASES.get(feature, feature)
                yield ConflictError(f"{name} {what}, which this loop does not support. {advice}")
            else:
                continue
            reasons.add(advice)
    try:
        Ordering(algorithms)
    except ConflictError as error:
        yield error


def raise_all(problems: Iterable[str | ConflictError]) -> None:
    """Raise one error with all problems, if there are any.

    Args:
        problems: Messages about settings, and conflicts of algorithms.

    Raises:
        ConflictError: A conflict is among the problems.
        ValueError: There are messages only.
    """
    problems = list(problems)
    if not problems:
        return
    message = str(problems[0])
    if len(problems) > 1:
        message = "\n- ".join([f"{len(problems)} problems must be solved before training:", *map(str, problems)])
    raise (ConflictError if any(isinstance(each, ConflictError) for each in problems) else ValueError)(message)


def distribution_problems(accelerator: Any) -> Iterator[str]:
    """Yield a message if an `Accelerator` distributes the model in a way that hides parameters or steps.

    Args:
        accelerator: The object of Accelerate, which transformers has, too.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        yield (
            f"The model must be on one device, in DDP or sharded by FSDP2, got {kind}, which steps or changes "
            f"parameters itself. Use FSDP2 or the `Trainer` of composer."
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        yield (
            "The model must not be sharded by FSDP1, which flattens parameters. Use "
            "`FullyShardedDataParallelPlugin(fsdp_version=2)`, or `TrainingArguments(fsdp_config={'version': 2})`."
        )


def missing_loss(model: Any, loss: Callable[..., Any] | None) -> Iterator[str]:
    """Yield a message if neither the model nor the user computes a loss."""
    if loss is None and isinstance(model, torch.nn.Module) and not isinstance(model, ComposerModel):
        yield (
            f"`loss` must be given for a model that is not a `ComposerModel`, got {type(model).__name__}. Pass "
            f"`loss=lambda outputs, batch: ...`."
        )
