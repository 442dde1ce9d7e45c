"""The function, then the class. Symbols: w is a weight, u the update of a step, eta the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from composer.algorithms.utils.hidden_matrices import check_patterns, match_names
from composer.algorithms.utils.optimizer_steps import (
    Rate,
    WeightsBeforeStep,
    check_schedulers,
    copy_before_step,
    take_over_decay,
)
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_LAYERS,
    DECAYS_WEIGHTS,
    DISPLACES_WEIGHTS,
    FREEZES_WEIGHTS,
    PINS_NORMS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    WRAPS_OPTIMIZER,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_finite, local_part, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


@torch.no_grad()
def apply_cautious_decay(
    weights: Sequence[Tensor], previous: Sequence[Tensor], lr: Rate | Sequence[Rate], weight_decay: float
) -> None:
    """Decay the elements of weights that a step has moved towards zero, in place.

    With u = (the weight before the step) - w: `w <- w * (1 - eta * weight_decay)` where `u * w > 0`. Elements that the
    step moved away from zero, across it, or not at all stay as they are.

    Args:
        weights: The weights after the step.
        previous: The weights before the step, in the same order. Of a `DTensor`, the local part is enough.
        lr: The learning rate eta, one or one for each weight.
        weight_decay: The decay; an element loses `lr * weight_decay` of its value.

    Raises:
        ValueError: `weight_decay` is negative, or the sequences have different lengths.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> before = torch.tensor([1.5, 1.5])  # the first moved towards zero
        >>> apply_cautious_decay([weight], [before], lr=1.0, weight_decay=0.5)
        >>> weight.detach()
        tensor([0.5000, 2.0000])

    Source: Chen et al., "Cautious Weight Decay", arXiv:2510.12402.
    Differs: see `CautiousDecay`.
    """
    check_finite(weight_decay=weight_decay, least=0)
    rates = [lr] * len(weights) if isinstance(lr, (int, float, Tensor)) else list(lr)
    if not len(weights) == len(previous) == len(rates):
        raise ValueError(
            f"`weights`, `previous` and `lr` must have the same lengths, got {len(weights)}, {len(previous)} and "
            f"{len(rates)}."
        )
    if not weights:  # operations on several tensors reject empty lists
        return
    after = [local_part(weight).detach() for weight in weights]
    signs = list(torch._foreach_sub([local_part(weight) for weight in previous], after))
    torch._foreach_sign_(signs)  # products of signs cannot underflow, as those of small updates and weights can
    decays = list(torch._foreach_mul(signs, after))
    torch._foreach_clamp_min_(decays, 0.0)
    torch._foreach_mul_(decays, signs)
    numbers = [rate * weight_decay for rate in rates if not isinstance(rate, Tensor)]
    if len(numbers) < len(rates):
        for decay, rate in zip(decays, rates, strict=True):
            decay.mul_(rate * weight_decay)
    else:
        torch._foreach_mul_(decays, numbers)
    torch._foreach_sub_(after, decays)


class CautiousDecay(Algorithm):
    """Weight decay of only those elements that the step moves towards zero.

    After each step, elements whose update has the sign of the weight are multiplied by `1 - lr * weight_decay`; see
    `apply_cautious_decay`. Elements that the loss moves away from zero are not pulled back, so decay does not oppose
    the loss. It replaces the weight decay of the optimizers for the same parameters, which is set to 0; other
    parameters keep theirs. `engine.explain()` prints which parameters it decays, and what it replaces.

    **Events** INIT, FIT_START, AFTER_TRAIN_BATCH (keeps the weights before the step), BATCH_END. **Reads**
    `state.model`, the learning rates. **Writes** the decayed parameters; the parameter groups of `state.optimizers`.
    **Cost** a copy of the decayed parameters during the step, and a few passes over them. **Compilation** static: the
    graphs of the model do not change. **When not to use it** with `Muon(cautious=True)`, which does the same for its
    matrices, and whose decay this one replaces.

    Args:
        weight_decay: The decay, at least 0; a step removes `lr * weight_decay` of an element, as in AdamW.
        include: Regular expressions; parameters with fewer than two dimensions whose name contains a match are decayed,
            too.
        exclude: Regular expressions; parameters whose name contains a match are left to the optimizer.

    Attributes:
        replaced: The replaced weight decay of each decayed parameter, by name; None before INIT.

    Raises:
        TypeError: An argument has another type.
        ValueError: `weight_decay` is negative; at INIT, if an expression is invalid or matches no trainable parameter,
            or an optimizer steps other weights than those of the model; at FIT_START, if a scheduler lacks the
            parameter groups that were divided.

    Warns:
        NoEffectWarning: The optimizers have no parameter to decay.

    Example:
        >>> CautiousDecay(0.05, exclude=["embedding"])
        CautiousDecay(weight_decay=0.05,include=(),exclude=('embedding',))

    Source: Chen et al., "Cautious Weight Decay", arXiv:2510.12402.
    Differs: the update is what the whole step changed, also by a method that pins norms, and the weights after the step
        are decayed, not those before it. So an element that the step moves across zero is not decayed.
    """

    events = frozenset({Event.INIT, Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
    placement = Placement(
        provides={DECAYS_WEIGHTS},
        after={CHANGES_LAYERS, REPLACES_MODEL, FREEZES_WEIGHTS, REPLACES_OPTIMIZER, PINS_NORMS},
        before={WRAPS_OPTIMIZER, DISPLACES_WEIGHTS, AVERAGES_WEIGHTS},
        excludes={DECAYS_WEIGHTS},
    )

    def __init__(self, weight_decay: float = 0.1, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        check_finite(weight_decay=weight_decay, least=0)
        check_patterns(include=include, exclude=exclude)
        self.weight_decay = plain_number(weight_decay)
        self.include, self.exclude = tuple(include), tuple(exclude)
        self.replaced: dict[str, float] | None = None
        self._others: dict[str, str] = {}  # why a parameter is not decayed
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._before: WeightsBeforeStep | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Take over the decay of the optimizers; keep the weights before a step, and decay them after it."""
        if event is Event.INIT:
            self.replaced = None
            if state.optimizers:
                self._take_over(state)
        elif event is Event.FIT_START:
            if self.replaced is None:  # a host may make its optimizers after INIT
                self._take_over(state)
            check_schedulers("CautiousDecay", state.schedulers)
            # Wrappers may have replaced parameters since INIT.
            present, replaced = dict(unwrapped_model(state.model).named_parameters()), self.replaced or {}
            self._weights, self._before = {name: present[name] for name in replaced if name in present}, None
        elif event is Event.AFTER_TRAIN_BATCH:
            # A closure may run several passes: the first are those at the weights from which the step begins.
            if self._before is None:
                self._before = copy_before_step(state.optimizers, self._weights)
        elif self._before is not None:
            before, self._before = self._before, None
            weights = [self._weights[name] for name in before.names]
            apply_cautious_decay(weights, before.previous, before.rates, self.weight_decay)

    def _take_over(self, state: State) -> None:
        trained = {name: p for name, p in unwrapped_model(state.model).named_parameters() if p.requires_grad}
        included = match_names(trained, self.include, "include")
        excluded = match_names(trained, self.exclude, "exclude")
        reasons = {name: "" if p.dim() > 1 or name in included else "not a matrix" for name, p in trained.items()}
        reasons |= dict.fromkeys(excluded, "excluded")
        chosen = {name: p for name, p in trained.items() if not reasons[name]}
        self.replaced = take_over_decay("CautiousDecay", state.optimizers, chosen)
        reasons |= dict.fromkeys(chosen.keys() - self.replaced.keys(), "in no optimizer")
        self._others = {name: reason for name, reason in reasons.items() if reason}
        if not self.replaced:
            warn_no_effect("`CautiousDecay` changes nothing: the optimizers have no parameter that it decays.")

    def explain(self) -> str:
        """Return which parameters are decayed, what that replaces, and why others are not; "" before INIT."""
        rows = [(name, "cautious", f"instead of {decay}") for name, decay in (self.replaced or {}).items()]
        rows += [(name, "optimizer", reason) for name, reason in self._others.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {owner:9}  {text}" for name, owner, text in rows)
