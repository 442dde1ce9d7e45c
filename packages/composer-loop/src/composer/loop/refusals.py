"""Refusals of arguments, and of what a host cannot do: all of them in one error, before anything is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from composer.core.algorithm import Algorithm, declared_events, declared_placement
from composer.core.callback import Callback, dispatches_by_name, overridden_hooks
from composer.core.effects import (
    CHANGES_BATCH_SIZE,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    WRAPS_OPTIMIZER,
    Placement,
)
from composer.core.event import Event
from composer.core.logging import Logger, LoggerDestination
from composer.core.ordering import ConflictError, Ordering
from composer.core.state import State
from composer.models.base import ComposerModel
from composer.utils.iter_helpers import check_distinct, ensure_tuple
from composer.utils.numbers import int_at_least

Problem: TypeAlias = str | Exception
"""What is wrong: a message about a value, or the error that a check has raised."""

UNAVAILABLE: dict[Event | str, str] = {  # in every host
    REPLACES_MODEL: "Pass the model that you want to train.",
    CHANGES_BATCH_SIZE: "The host loads and counts batches in advance. Use the `Trainer` of composer.",
}
_EVENTS = list(Event)
_MANUAL: dict[Event | str, str] = {  # where the loop computes gradients and steps by itself
    **dict.fromkeys(
        _EVENTS[_EVENTS.index(Event.BEFORE_TRAIN_BATCH) : _EVENTS.index(Event.AFTER_TRAIN_BATCH) + 1],
        "With manual optimization, losses and gradients are the loop's. Leave the algorithm out, or use the `Trainer` "
        "of composer with a model that has a method `begin_turn`.",
    ),
    WRAPS_OPTIMIZER: "With manual optimization, the loop steps without a closure. Leave the algorithm out.",
    REPLACES_OPTIMIZER: "With manual optimization, the loop holds the optimizers. Build this one by yourself.",
}


class HostFeatures(Algorithm):
    """Declare the effects of features of the host, so that algorithms may exclude them. It never acts.

    Args:
        effects: The effects.
    """

    events: frozenset[Event] | None = frozenset()

    def __init__(self, effects: Iterable[str]) -> None:
        self.placement = Placement(provides=effects)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Never called."""


def algorithms_in(algorithms: Algorithm | Sequence[Algorithm] | None) -> tuple[Algorithm, ...]:
    """Return one or several algorithms, or none, as a tuple.

    Args:
        algorithms: The argument of a user.

    Raises:
        TypeError: An object is not an algorithm.
        ValueError: An algorithm is given twice.
    """
    several: tuple[Any, ...] = ensure_tuple(algorithms)
    others = [each for each in several if not isinstance(each, Algorithm)]
    if others:
        words = [
            f"the class `{each.__name__}`; pass `{each.__name__}(...)`"
            if isinstance(each, type)
            else type(each).__name__
            for each in others
        ]
        raise TypeError(f"`algorithms` must be `Algorithm` objects, got {', and '.join(words)}.")
    check_distinct("algorithms", several)
    return several


def argument_problems(
    algorithms: Any,
    *,
    unavailable: Mapping[Event | str, str] | None = None,
    host_provides: Iterable[str] = (),
    manual: bool = False,
    accumulate: Any = 1,
    forward: Any = None,
    loss: Any = None,
    callbacks: Any = (),
    loggers: Any = (),
    schedulers: Any = (),
    seed: Any = 0,
    **settings: Any,
) -> Iterator[Problem]:
    """Yield everything that is wrong with arguments of `HostedRun`, apart from its optimizers and data.

    Args:
        algorithms: As in `HostedRun`, like the others.
        unavailable: What the host does not support.
        host_provides: Effects of features of the host.
        manual: The loop computes the gradients and steps the optimizers.
        accumulate: Batches per step.
        forward: Computes the outputs.
        loss: Computes the loss.
        callbacks: Callbacks.
        loggers: Loggers.
        schedulers: Learning-rate schedulers.
        seed: The seed.
        **settings: Arguments of `State`, which checks them: `model`, `max_duration` and `precision`.
    """
    yield from failures(
        lambda: algorithms_in(algorithms),
        lambda: int_at_least("accumulate", accumulate, 1),
        *(functools.partial(State, **{"model": torch.nn.Identity(), name: value}) for name, value in settings.items()),
    )
    if not hasattr(seed, "__index__"):
        yield TypeError(f"`seed` must be an integer, got {seed!r}.")
    for name, function in (("forward", forward), ("loss", loss)):
        if function is not None and not callable(function):
            yield TypeError(f"`{name}` must be a function, got {function!r}.")
    if loss is None and forward is not None:
        yield "`loss` must be given together with `forward`. Pass `loss=lambda outputs, batch: ...`."
    for name, objects, kind in (("callbacks", callbacks, Callback), ("loggers", loggers, LoggerDestination)):
        for each in ensure_tuple(objects):
            if not isinstance(each, kind):
                hint = " Pass it in `algorithms`." if isinstance(each, Algorithm) else ""
                yield TypeError(f"`{name}` must be {name} of composer, got {type(each).__name__}.{hint}")
    if "max_duration" in settings:  # `State` may have no length
        duration = settings["max_duration"]
        if duration is None:
            yield "`max_duration` must be given, got None. Pass the length of the run, such as '2ep'."
        elif duration in (0, "0ep", "0ba"):
            yield f"`max_duration` must be above 0, got {duration!r}: nothing would be trained."
    if getattr(loss, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss"):
        name = getattr(loss, "__name__", repr(loss))
        yield TypeError(
            f"`loss` must take the outputs and the batch, got {name} of torch, which takes targets. Write `loss=lambda "
            f"outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1])`, for example."
        )
    for each in ensure_tuple(schedulers):
        if isinstance(each, type):
            yield TypeError(
                f"`schedulers` must be objects, got the class {each.__name__}. Write `{each.__name__}(...)`."
            )
        elif not hasattr(each, "step"):
            yield TypeError(
                f"`schedulers` must have a method `step`, got {each!r}. For a schedule of `composer.optim` pass "
                f"none, call `run.init()`, which may replace or divide optimizers, and add `run.state.schedulers = "
                f"[compile_composer_scheduler(schedule, run.state, optimizer=each) for each in run.state.optimizers]`."
            )
    if manual and (accumulate != 1 or ensure_tuple(schedulers)):
        yield (
            "`accumulate` and `schedulers` must not be given with `manual=True`, where the loop steps by itself. Call "
            "`scheduler.step()` in the loop."
        )
    for each in ensure_tuple(callbacks) if manual else ():
        # A callback that gets all events by `run_event` can work with fewer.
        if isinstance(each, Callback) and dispatches_by_name(each):
            hooks = overridden_hooks(each)
            hidden = [event.name for event in _MANUAL if isinstance(event, Event) and event.value in hooks]
            if hidden:
                yield ConflictError(
                    f"`{type(each).__name__}` acts at {' and '.join(hidden)}, which this loop cannot announce. With "
                    f"manual optimization, losses and gradients are the loop's. Leave the callback out."
                )
    unavailable = {**(unavailable or {}), **(_MANUAL if manual else {})}
    if accumulate != 1:
        unavailable[CHANGES_BATCH_SIZE] = "Use `accumulate=1`, since the batches of the loader change."
    features = [HostFeatures(host_provides)] if host_provides else []
    known = {id(each): each for each in ensure_tuple(algorithms) if isinstance(each, Algorithm)}
    yield from conflicts([*known.values(), *features], unavailable)


def failures(*checks: Callable[[], object]) -> Iterator[Exception]:
    """Yield the errors that checks of values raise."""
    for check in checks:
        try:
            check()
        except (TypeError, ValueError, RuntimeError) as error:
            yield error


def conflicts(algorithms: Sequence[Algorithm], unavailable: Mapping[Event | str, str]) -> Iterator[Exception]:
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
                yield ConflictError(f"{name} {feature.replace('_', ' ')}, which this loop does not support. {advice}")
            else:
                continue
            reasons.add(advice)
    for problem in failures(lambda: Ordering(algorithms)):
        yield from map(type(problem), str(problem).splitlines())


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise one error with all problems, if there are any.

    Args:
        problems: The problems.

    Raises:
        ConflictError: A conflict is among the problems.
        TypeError: All of them are of this class.
        ValueError: There are other problems.
    """
    problems = list(problems)
    if not problems:
        return
    message = str(problems[0])
    if len(problems) > 1:
        message = "\n- ".join([f"{len(problems)} problems must be solved before training:", *map(str, problems)])
    kind: type[Exception] = ValueError
    if any(isinstance(each, ConflictError) for each in problems):
        kind = ConflictError
    elif all(isinstance(each, TypeError) for each in problems):
        kind = TypeError
    raise kind(message)


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
