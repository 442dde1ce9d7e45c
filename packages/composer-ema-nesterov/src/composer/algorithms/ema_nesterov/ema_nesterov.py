"""`displace_weights` and the algorithm `EMANesterov`.

Symbols: w are the weights between two steps, m is the average of their changes, beta the lookahead, gamma the decay.
The average a of the weights is stored in place of m. It begins as the first weights and follows them with
`a <- gamma a + (1 - gamma) w`, so `m = (1 - gamma) / gamma * (w - a)`: one buffer, and no copy of the last weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.stored_weights import average_dtype, reshard
from composer.algorithms.utils.weight_swaps import has_passed, parse_time, warn_of_late_start
from composer.core import (
    AVERAGES_WEIGHTS,
    DECAYS_WEIGHTS,
    DISPLACES_WEIGHTS,
    PINS_NORMS,
    Algorithm,
    Event,
    Placement,
    Precision,
    Time,
)
from composer.utils import check_finite, local_part, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Tensors = Iterable[torch.Tensor]


@torch.no_grad()
def displace_weights(
    weights: Tensors, averages: Tensors, beta: float | torch.Tensor = 0.3, decay: float = 0.99
) -> None:
    """Move weights ahead in the average direction of their steps, in place, before the gradients are computed.

    With the weights w, their average a and the decay gamma: `w <- w + beta * (1 - gamma) / gamma * (w - a)`, which is
    `w + beta * m`. Move the averages after the optimizer has stepped: `a <- gamma * a + (1 - gamma) * w`.

    Args:
        weights: The weights, of any shapes.
        averages: Their averages, which begin as copies of the first weights. Not modified.
        beta: How far ahead, at least 0, in average steps. A tensor of one number stays on its device.
        decay: The decay gamma of the averages, in [0.5, 1).

    Raises:
        ValueError: `beta` is negative, or `decay` is out of range.

    Example:
        >>> weight, average = torch.tensor([1.0]), torch.tensor([0.0])
        >>> displace_weights([weight], [average], beta=0.5, decay=0.5)  # the step was 2 * (1 - 0) * 0.5 = 1
        >>> weight
        tensor([1.5000])

    Source: Yau et al., "EMA-Nesterov: Stabilizing Nesterov's Lookahead for Accelerated Deep Learning Optimization",
        arXiv:2605.25395.
    Differs: the average of the weights is stored instead of that of their changes; the results are the same.
    """
    _check_decay(decay)
    if not isinstance(beta, torch.Tensor):
        check_finite("Use 0.3 to 0.6.", beta=beta, least=0)
        if not beta:
            return
    _lerp(weights, averages, -beta * (1 - decay) / decay)


def _lerp(values: Tensors, ends: Tensors, weight: float | torch.Tensor) -> None:
    """Set `value <- value + weight * (end - value)`, in place, for tensors of any dtypes and devices."""
    values = list(values)
    ends = [end.to(value.device, value.dtype) for value, end in zip(values, ends, strict=True)]
    if not values:  # a group without trained weights, which torch refuses
        return
    if isinstance(weight, torch.Tensor):
        torch._foreach_lerp_(values, ends, [weight.to(value.device, value.dtype) for value in values])
    else:
        torch._foreach_lerp_(values, ends, weight)


def _check_decay(decay: float) -> None:
    check_finite("Use 0.99.", decay=decay, least=0.5)
    if decay >= 1:
        raise ValueError(f"`decay` must be below 1, got {decay!r}. Use 0.99.")


class EMANesterov(Algorithm):
    """Computes gradients at a point ahead of the weights, and steps from there: Nesterov's lookahead, averaged.

    When the first pass of a step begins, all trained weights move by `beta_t * m`, where m is an exponential moving
    average of the changes of the weights. The optimizer steps from there, so nothing is moved back. Between two steps
    the weights are those that the optimizer has made: evaluations, checkpoints and averages never see others. If a
    gradient scaler skips the step, the weights are restored exactly, and the average does not move.

    The lookahead beta_t is 0 before `begin` and from `end` on. Between them it is `beta` times the learning rate of the
    parameter group, divided by its largest: that of the schedule (`initial_lr`) or the largest one so far.

    **Events** INIT, FIT_START, BEFORE_TRAIN_BATCH (the first of a step), BATCH_END. **Reads** the learning rates.
    **Writes** the weights, before the passes of a step. **Cost** memory for another set of the trained weights, in
    float32 if they have less precision; two fused passes over them per step; no extra pass of the model. In fp16,
    another two sets during a step, to detect skipped ones. **Compilation** static. **When not to use it** with
    `ScheduleFree`, which computes its gradients at a point of its own; for weights in 16 bits, which cannot hold such
    small moves (weights in float32 under autocast can).

    Args:
        beta: The lookahead, at least 0, in average steps: 0.3 for strong optimizers, up to 0.6 for others.
        decay: The decay of the average of the changes, in [0.5, 1).
        begin: The time from which gradients are computed ahead, such as "0.1dur" or "300ba". Before, steps are noisy.
        end: The time from which they are not. The learning rate should decay from about there on.

    Raises:
        ValueError: `beta` or `decay` is out of range, a time is negative, or `end` is not after `begin`.
        TypeError: A time is neither a string nor a `Time`.

    Example:
        >>> EMANesterov(beta=0.6, end="0.75dur")
        EMANesterov(beta=0.6,decay=0.99,begin='0.1dur',end='0.75dur')

    Source: Yau et al., "EMA-Nesterov: Stabilizing Nesterov's Lookahead for Accelerated Deep Learning Optimization",
        arXiv:2605.25395.
    Differs: each parameter group has the ratio of its own learning rate. The average of the weights is stored instead
        of that of their changes, and is kept while `beta_t` is 0; the results are the same.
    """

    events = frozenset({Event.INIT, Event.FIT_START, Event.BEFORE_TRAIN_BATCH, Event.BATCH_END})
    placement = Placement(
        provides={DISPLACES_WEIGHTS},
        after={PINS_NORMS, DECAYS_WEIGHTS},
        before={AVERAGES_WEIGHTS},
        excludes={DISPLACES_WEIGHTS},
    )

    def __init__(
        self,
        beta: float = 0.3,
        decay: float = 0.99,
        begin: str | Time[Any] = "0.1dur",
        end: str | Time[Any] = "0.7dur",
    ) -> None:
        check_finite("Use 0.3 to 0.6.", beta=beta, least=0)
        _check_decay(decay)
        self.beta, self.decay = plain_number(beta), plain_number(decay)
        self._begin = parse_time("begin", begin, least=0, example="0.1dur")
        self._end = parse_time("end", end, least=0, example="0.7dur")
        if self._begin.unit is self._end.unit and self._end <= self._begin:
            raise ValueError(f"`end` must be after `begin`, got '{self._end}' and '{self._begin}'.")
        self.begin, self.end = str(self._begin), str(self._end)
        self._averages: dict[str, torch.Tensor] = {}  # a, by the name of the parameter
        self._largest: dict[str, Any] = {}  # the largest learning rate by the index of optimizer and group
        self._step: list[_Group] | None = None  # while a step is in progress

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Move the weights ahead when the passes of a step begin; move the averages after the step."""
        if event is Event.BEFORE_TRAIN_BATCH:
            if self._step is None:  # an optimizer may ask for the passes of one step several times
                self._step = self._begin_step(state)
        elif event is Event.BATCH_END:
            for group in self._step or ():
                group.finish(self.decay)
            self._step = None
        else:
            self._step = None
            if event is Event.INIT:
                self._averages, self._largest = {}, {}
            else:
                warn_of_late_start("EMANesterov", "begin", self._begin, state)

    @torch.no_grad()
    def _begin_step(self, state: State) -> list[_Group]:
        is_ahead = has_passed(self._begin, state) and not has_passed(self._end, state)
        averages = self._averages_of(unwrapped_model(state.model))
        groups = []
        for i, optimizer in enumerate(state.optimizers):
            for j, settings in enumerate(optimizer.param_groups):
                ratio = self._ratio(f"{i}.{j}", settings)
                trained = [p for p in settings["params"] if p.requires_grad and p in averages]
                weights = [local_part(parameter) for parameter in trained]
                group = _Group(weights, [local_part(averages[parameter]) for parameter in trained])
                group.beta = self.beta * ratio if is_ahead else 0.0
                if state.precision is Precision.AMP_FP16:
                    group.before = [weight.clone() for weight in weights]
                displace_weights(weights, group.averages, group.beta, self.decay)
                groups.append(group)
        return groups

    def _ratio(self, key: str, group: dict[str, Any]) -> Any:
        """Return the learning rate of a group divided by its largest, on the device if it is a tensor."""
        rate = group["lr"]
        others = (group.get("initial_lr", rate), self._largest.get(key, rate))
        if not isinstance(rate, torch.Tensor):
            self._largest[key] = max(rate, *others)
            return rate / self._largest[key] if rate else 0.0
        largest = rate.clone()
        for other in others:
            is_tensor = isinstance(other, torch.Tensor)
            largest = torch.maximum(largest, other.to(rate.device)) if is_tensor else largest.clamp(min=other)
        self._largest[key] = largest
        return rate / largest.clamp(min=torch.finfo(largest.dtype).tiny)

    def _averages_of(self, model: torch.nn.Module) -> dict[torch.Tensor, torch.Tensor]:
        """Return the averages by parameter; those of new parameters begin as their values."""
        reshard(model)
        found: dict[torch.Tensor, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            average = self._averages.get(name)
            if average is None and not parameter.requires_grad:
                continue
            if average is None or average.shape != parameter.shape:
                average = parameter
            dtype = average_dtype(parameter.dtype)
            if average is parameter or (average.device, average.dtype) != (parameter.device, dtype):
                average = torch.empty_like(parameter, dtype=dtype).copy_(average)
            found[parameter] = self._averages[name] = average
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of the weights by name, and the largest learning rates."""
        return {**super().state_dict(), "averages": dict(self._averages), "largest_lr": dict(self._largest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._averages = {name: average.detach().clone() for name, average in state["averages"].items()}
        self._largest, self._step = dict(state["largest_lr"]), None


@dataclass
class _Group:
    """The weights of a parameter group in a step.

    Attributes:
        weights: The weights, or this rank's shards of them.
        averages: Their averages.
        beta: The lookahead of the step.
        before: In fp16, the weights before they were moved.
    """

    weights: list[torch.Tensor]
    averages: list[torch.Tensor]
    beta: float | torch.Tensor = 0.0
    before: list[torch.Tensor] | None = None

    @torch.no_grad()
    def finish(self, decay: float) -> None:
        """Move the averages after a step. If it was skipped, put the weights back instead."""
        if not self.before:
            _lerp(self.averages, self.weights, 1 - decay)
            return
        # A scaler does not tell that it skips a step, and a fused optimizer skips it on the device. Either way the
        # weights are still where they were moved.
        moved = [weight.clone() for weight in self.before]
        displace_weights(moved, self.averages, self.beta, decay)
        device = moved[0].device
        same = [(now == then).all().to(device) for now, then in zip(self.weights, moved, strict=True)]
        skipped = torch.stack(same).all().float()
        _lerp(self.weights, self.before, skipped)
        _lerp(self.averages, self.weights, (1 - decay) * (1 - skipped))
