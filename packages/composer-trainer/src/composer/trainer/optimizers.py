"""The optimizers and schedulers of a run: their checks, train and eval modes, and optimizers inside others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    CLIPS_GRADIENTS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    SWAPS_WEIGHTS,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.models.module_with_loss import ModuleWithLoss, user_model_name
from composer.optim import DecoupledSGDW
from composer.trainer.options import described
from composer.utils import ensure_tuple
from composer.utils import needs_closure as needs_closure  # the step takes it from here
from composer.utils.iter_helpers import check_distinct


class OptimizerFactory(Algorithm):
    """Makes the optimizers with the function `optimizers`, after algorithms have changed the layers.

    Args:
        function: `function(parameters)` returns one optimizer or several, and schedulers of torch for them.

    Attributes:
        made: The optimizers.
        schedulers: The schedulers.
    """

    events: frozenset[Event] | None = frozenset({Event.INIT})
    placement = Placement(
        after={CHANGES_LAYERS, REPLACES_MODEL},
        before={AVERAGES_WEIGHTS, CLIPS_GRADIENTS, REPLACES_OPTIMIZER, SWAPS_WEIGHTS, WRAPS_OPTIMIZER},
    )

    def __init__(self, function: Callable[[list[torch.nn.Parameter]], Any]) -> None:
        self.function = function
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Make them.

        Raises:
            TypeError: The function returned something else.
        """
        result = self.function([*state.model.parameters()])
        returned = ensure_tuple(result)
        self.schedulers = [each for each in returned if isinstance(each, LRScheduler)]
        self.optimizers = [each for each in returned if not isinstance(each, LRScheduler)]
        if not self.optimizers or not all(
            isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers
        ):
            raise TypeError(
                f"`optimizers` must be a function that returns one or several `torch.optim.Optimizer`, got one that "
                f"returns {result!r}. Return for example `torch.optim.AdamW(parameters)`."
            )
        state.optimizers = build_optimizers(state.model, self.optimizers)


def build_optimizers(model: torch.nn.Module, optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the run's optimizers; if none is given, a default with a warning.

    The default is `AdamW(lr=0.001)` for any module with a loss, and `DecoupledSGDW(lr=0.1)` for a `ComposerModel`.

    Args:
        model: The model.
        optimizers: One or several, or None.

    Raises:
        ValueError: An optimizer has no parameter of the model, or one of another optimizer, or several optimizers run
            the passes themselves.
    """
    given = list(ensure_tuple(optimizers))
    if given:
        if len(given) > 1:
            check_distinct("optimizers", given)
            kinds = [type(optimizer).__name__ for optimizer in given if needs_closure(optimizer)]
            if len(kinds) > 1:
                raise ValueError(
                    f"`optimizers` may have one optimizer that runs the forward and backward pass itself, got "
                    f"{', '.join(kinds)}. The others step with the gradients of its last pass, so they cannot have "
                    f"their own."
                )
        check_optimizers(given, model)
        return given
    parameters = list(model.parameters())
    if not parameters:
        warnings.warn(
            "No optimizer was specified, and the model does not have parameters. None is made; `fit` will need one.",
            stacklevel=5,
        )
        return []
    if isinstance(model, ModuleWithLoss):
        warnings.warn("No optimizer was specified. `torch.optim.AdamW(lr=0.001)` is used.", stacklevel=5)
        return [torch.optim.AdamW(parameters, lr=1e-3)]
    warnings.warn("No optimizer was specified. `DecoupledSGDW(lr=0.1)` is used.", stacklevel=5)
    return [DecoupledSGDW(parameters, lr=0.1)]  # MosaicML's Composer uses it, too


def check_alternating_optimizers(
    model: torch.nn.Module, given: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Check that the optimizers of a model that trains in turns are those that it expects.

    Args:
        model: The model, with a method `begin_turn`: its optimizers take turns.
        given: The argument `optimizers`.
        optimizers: The run's optimizers, after algorithms may have changed them.

    Raises:
        ValueError: There are fewer than two, an algorithm has changed their number, or one runs the forward and
            backward pass itself.
    """
    expected = max(len(ensure_tuple(given)), 1)
    what = f"{user_model_name(model)}, which defines `begin_turn`"
    if given is not None and expected < 2:
        raise ValueError(
            f"`optimizers` must be a list of at least two for {what}, got one. Pass one for each network, in the order "
            f"of the turns."
        )
    if len(optimizers) != expected:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"`algorithms` must not change the number of optimizers of {what}: {expected} were given, and there are "
            f"{len(optimizers)} now: {names}. Leave that algorithm out, or make its optimizers yourself and pass them "
            f"as `optimizers`: `begin_turn` then gets the index of each of them."
        )
    kinds = [type(optimizer).__name__ for optimizer in optimizers if needs_closure(optimizer)]
    if kinds:
        raise ValueError(
            f"`optimizers` must step without a closure for {what}, got {', '.join(kinds)}, which runs the forward and "
            f"backward pass itself. Use other optimizers, and no `SAM`."
        )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module, changed_by: str = "") -> None:
    """Check that each optimizer trains parameters of the model that no other has; warn of untrained parameters.

    Args:
        optimizers: The run's optimizers.
        model: The model that is trained.
        changed_by: What may have changed the model since it was given, for the message; "": nothing.

    Raises:
        ValueError: An optimizer has no parameter of the model, or one of another optimizer.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimized: set[torch.nn.Parameter] = set()
    for optimizer in optimizers:
        own: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            own += group["params"]
        kind = type(optimizer).__name__
        if own and names.keys().isdisjoint(own):
            by = f"{changed_by} replaced them all" if changed_by else "it was created for another model, or for a copy"
            raise ValueError(
                f"`optimizers` must hold parameters of `model`, got {kind} with {len(own)} parameters, none of which "
                f"belongs to {user_model_name(model)}: {by}. Nothing would be trained. Create it last: "
                f"`{kind}(model.parameters(), ...)`, with the model that is passed to the `Trainer`."
            )
        if not optimized.isdisjoint(own):
            shared = [names.get(parameter, "?") for parameter in own if parameter in optimized]
            raise ValueError(
                f"`optimizers` must hold different parameters, but {kind} shares {len(shared)} with an optimizer "
                f"before it: {_some(shared)}. Each parameter is trained by one optimizer."
            )
        optimized.update(own)
    if changed_by:
        return
    foreign = len(optimized - names.keys())
    missing = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in optimized]
    untrained = ""
    if missing:
        untrained = (
            f"No optimizer has {len(missing)} parameters of the model, so these are not trained: {_some(missing)}."
        )
    if foreign:
        warnings.warn(
            f"`optimizers` hold {foreign} parameters that do not belong to `model`: they are neither moved to the "
            f"device nor saved. {untrained} Create the optimizer after the model is complete, and make a loss with "
            f"parameters an attribute of the model.".replace("  ", " "),
            stacklevel=6,
        )
    elif missing:
        warnings.warn(
            f"{untrained} Add them to one of the `optimizers`, or freeze them with `requires_grad_(False)`.",
            stacklevel=6,
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


class OptimizerModes:
    """Switches the train and eval modes of schedule-free optimizers.

    Such an optimizer has methods `train()` and `eval()`, which switch the weights in place between those that gradients
    are computed at and their averages, which are used for inference. Other optimizers are left alone. Outside `fit`,
    however it ended, the optimizers are in eval mode.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state, self._training = state, False

    def train(self) -> None:
        """Switch to train mode: training starts or continues."""
        self._training = True
        for optimizer in self._with_modes():
            optimizer.train()

    def eval(self) -> None:
        """Switch to eval mode: training has ended or was interrupted."""
        self._training = False
        for optimizer in self._with_modes():
            optimizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to eval mode temporarily."""
        before = self._training
        self.eval()
        yield
        # Not after an error: an algorithm may have left other weights in the model, which the next `fit` removes.
        if before:
            self.train()

    def check(self) -> None:
        """Check that no algorithm loads averages into the model that the optimizer would treat as its own.

        An algorithm that replaces the optimizer may average through it: these averages are the optimizer's own.

        Raises:
            ValueError: The run has such an algorithm and an optimizer with modes.
        """
        placements = [(each, each.placement.provides) for each in self._state.algorithms]
        averaging = [each for each, p in placements if AVERAGES_WEIGHTS in p and REPLACES_OPTIMIZER not in p]
        for optimizer in self._with_modes():
            for algorithm in averaging:
                optimizer_name, name = type(optimizer).__name__, type(algorithm).__name__
                raise ValueError(
                    f"`algorithms` must not hold `{name}` together with the optimizer `{optimizer_name}`: both average "
                    f"the weights, and `{optimizer_name}` would treat the average of `{name}` as its own. Remove "
                    f"`{name}`, or train with another optimizer."
                )

    def _with_modes(self) -> Iterator[Any]:
        # A wrapper with modes switches the optimizers inside it.
        queue = list(self._state.optimizers)
        while queue:
            optimizer = queue.pop(0)
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                yield optimizer
            else:
                queue += _inner_optimizers(optimizer)


def prepare_fused_sgd(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give `torch.optim.SGD(fused=True)` momenta of zero, with which its first step is the same.

    Without them its kernel keeps uninitialized memory as momentum if that step is skipped because gradients overflowed
    in float16, and it fails where a parameter gets its first gradient in a later step (torch 2.6 to 2.14).
    """
    for optimizer in wrapped_optimizers(optimizers):
        if not isinstance(optimizer, torch.optim.SGD) or isinstance(optimizer, DecoupledSGDW):
            continue
        for group in optimizer.param_groups:
            if not (group.get("fused") and group["momentum"]) or group["dampening"]:  # the first momentum is not damped
                continue
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def wrapped_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers and the optimizers inside them, as attributes or in collections, at any depth."""
    found = list(optimizers)
    for optimizer in found:
        found += [inner for inner in _inner_optimizers(optimizer) if not any(inner is other for other in found)]
    return found


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    inner: list[torch.optim.Optimizer] = []
    for value in vars(optimizer).values():
        if isinstance(value, Mapping):
            value = list(value.values())
        items = value if isinstance(value, (list, tuple)) else (value,)
        inner += [item for item in items if isinstance(item, torch.optim.Optimizer)]
    return inner


def check_schedulers(
    schedulers: Sequence[tuple[Any, torch.optim.Optimizer | None]], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Check that objects are schedulers that this run can step.

    Args:
        schedulers: The user's schedulers, each with the optimizer that it is given to; None: it may belong to any.
        optimizers: The run's optimizers.

    Raises:
        TypeError: An object is neither a torch scheduler nor a function, or its `step` needs a metric.
        ValueError: A scheduler belongs to another optimizer.
    """
    known = wrapped_optimizers(optimizers)
    names = ", ".join(type(optimizer).__name__ for optimizer in known) or "no optimizer"
    for scheduler, owner in schedulers:
        if isinstance(scheduler, type) or not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
            raise TypeError(
                f"`schedulers` must be torch schedulers or functions `f(state, ssr)`, got {described(scheduler)}."
            )
        if owner is not None and not any(owner is optimizer for optimizer in known):
            raise ValueError(
                f"`schedulers` must have the run's optimizers as keys, got {described(owner)}. The run trains with "
                f"{names}."
            )
        allowed = known if owner is None else [owner]
        for part in with_members([scheduler]):
            if not isinstance(part, LRScheduler):
                continue
            kind, target = type(part).__name__, getattr(part, "optimizer", None)
            required = [p for p in inspect.signature(part.step).parameters.values() if p.default is p.empty]
            if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required):
                raise TypeError(
                    f"`schedulers` must be schedulers whose `step` needs no argument, got {kind}, whose "
                    f"`step({required[0].name})` needs one. Use a schedule of `composer.optim`, or step it yourself in "
                    f"`eval_end` of a `Callback`, where `state.eval_metrics` has the metrics."
                )
            if target is None or any(target is optimizer for optimizer in allowed):
                continue
            # A scheduler of an optimizer with the same groups, such as one that wraps it, changes the same rates.
            groups = {id(group) for optimizer in allowed for group in optimizer.param_groups}
            if groups.isdisjoint(map(id, target.param_groups)):
                other = names if owner is None else f"{type(owner).__name__}, which the scheduler is given to"
                raise ValueError(
                    f"`schedulers` must change the learning rate of the run's optimizer, but {kind} belongs to another "
                    f"{type(target).__name__}; the run trains with {other}. Create the scheduler for the optimizer "
                    f"that is passed as `optimizers`."
                )


def with_members(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Iterate over schedulers and the schedulers that they consist of, as in `SequentialLR`."""
    for scheduler in schedulers:
        yield scheduler
        yield from with_members(getattr(scheduler, "_schedulers", ()))
