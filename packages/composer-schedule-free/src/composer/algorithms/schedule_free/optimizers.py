"""The optimizers of `schedulefree` with exact modes, how they replace AdamW and SGD, and a way around other optimizers.

Symbols: y are the weights at which gradients are computed, z those of the base optimizer, x the average of z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import schedulefree
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from composer.utils import check_finite, check_integers, local_part, needs_closure


class ExactModes(torch.optim.Optimizer):
    """Mixin, before an optimizer of `schedulefree`, with which `train` undoes `eval` bit for bit.

    In eval mode y is kept as "y" in the state of each parameter, so it is saved and loaded with the optimizer. The
    optimizers of the library compute y from x again, which rounds: evaluations then change training.
    """

    single_pass: ClassVar[bool] = True  # `step` needs no closure

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the parameters, if they hold y."""
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] else ():
                if "z" in self.state.get(parameter, {}):
                    self.state[parameter]["y"] = parameter.detach().clone(memory_format=torch.preserve_format)
        super().eval()  # type: ignore[misc]
        self._drop_empty_entries()

    @torch.no_grad()
    def train(self) -> None:
        """Put y back into the parameters, if they hold x."""
        super().train()  # type: ignore[misc]
        for parameter, state in self.state.items():
            if "y" in state:
                parameter.copy_(state.pop("y"))
        self._drop_empty_entries()

    def _drop_empty_entries(self) -> None:
        # The library looks up the state of each parameter, which makes one. A state means that steps were taken.
        for parameter in [parameter for parameter, state in self.state.items() if not state]:
            del self.state[parameter]


class ScheduleFreeAdamW(ExactModes, schedulefree.AdamWScheduleFree):  # type: ignore[misc]
    """Schedule-Free AdamW: no decay of the learning rate, because the average of all weights is used instead.

    With the gradient g at y, the second moment v as in AdamW, and the step number k from 1, a step is

        v = b2 * v + (1 - b2) * g**2
        z = z - lr_k * (g / (sqrt(v / (1 - b2**k)) + eps) + weight_decay * y)
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x

    with `lr_k = lr * min(1, k / warmup_steps)` and c the share of `k**r * max(lr_1, ..., lr_k)**weight_lr_power` in its
    sum over all steps. The parameters are y in train mode, the initial one, and x after `eval()`. `train()` puts y
    back, bit for bit. y and z have the dtype of the parameters, which should be float32 or float64.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate; 1 to 10 times that of AdamW with a schedule.
        betas: b1, the weight of x in y, and b2, both in [0, 1), b1 above 0.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay, multiplied by the learning rate.
        warmup_steps: The number of steps in which the learning rate rises from 0.
        r: How much more late steps count in the average: in proportion to k**r.
        weight_lr_power: How much more steps at a high learning rate count.
        foreach: Use the foreach implementation.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ScheduleFreeAdamW([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> round(weight.item(), 4)
        0.9

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1.
    Differs: none.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool = True,
    ) -> None:
        _check_settings(lr, weight_decay, betas[0], warmup_steps, r, weight_lr_power)
        check_finite("Use 0.999.", beta2=betas[1], least=0)
        check_finite(eps=eps, least=0)
        if betas[1] >= 1:
            raise ValueError(f"`betas[1]` must be below 1, got {betas[1]!r}. Use 0.999.")
        options: dict[str, Any] = {
            "warmup_steps": warmup_steps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "foreach": foreach,
        }
        options |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, **options)
        self.train()


class ScheduleFreeSGD(ExactModes, schedulefree.SGDScheduleFree):  # type: ignore[misc]
    """Schedule-Free SGD: no decay of the learning rate, because the average of all weights is used instead.

    With the gradient g at y a step is

        z = z - lr_k * (g + weight_decay * y)
        x = (1 - c) * x + c * z
        y = (1 - momentum) * z + momentum * x

    See `ScheduleFreeAdamW` for lr_k, c and the modes.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate; 10 to 50 times that of SGD with a schedule.
        momentum: The weight of x in y, in (0, 1).
        weight_decay: Weight decay, an L2 penalty at y.
        warmup_steps: The number of steps in which the learning rate rises from 0.
        r: How much more late steps count in the average: in proportion to k**r.
        weight_lr_power: How much more steps at a high learning rate count.
        foreach: Use the foreach implementation.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ScheduleFreeSGD([weight], lr=0.25)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> weight.item()
        0.5

    Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, equations 1 to 3.
    Differs: none.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool = True,
    ) -> None:
        _check_settings(lr, weight_decay, momentum, warmup_steps, r, weight_lr_power)
        options: dict[str, Any] = {
            "warmup_steps": warmup_steps,
            "r": r,
            "weight_lr_power": weight_lr_power,
            "foreach": foreach,
        }
        options |= {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, **options)
        self.train()


def _check_settings(
    lr: float | Tensor, weight_decay: float, momentum: float, warmup_steps: int, r: float, weight_lr_power: float
) -> None:
    check_finite(lr=lr, weight_decay=weight_decay, least=0)
    check_momentum(momentum)
    check_integers("0 means no warmup.", warmup_steps=warmup_steps, least=0)
    check_finite("Use 0 and 2.", r=r, weight_lr_power=weight_lr_power, least=0)


def check_momentum(momentum: float) -> None:
    """Raise ValueError unless the weight of x in y is between 0 and 1."""
    check_finite(momentum=momentum)
    if not 0 < momentum < 1:
        raise ValueError(
            f"`momentum` must be between 0 and 1, got {momentum!r}. It is the weight of the average in the weights at "
            f"which gradients are computed; use 0.9."
        )


class _AroundSteps(torch.optim.Optimizer):
    """Mixin, after `ExactModes` and before any other optimizer, whose steps then move z with the gradients at y.

    As in the wrapper of `schedulefree`, the optimizer keeps its own momentum, and its weight decay is that of z. Then
    follow x and y as in `ScheduleFreeAdamW`, where "x_weight" of the group takes the place of b1.
    """

    # It has no other methods, since they could replace some of the optimizer.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("`step` must be called in train mode. Call `train()` of the optimizer first.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            begun = [_put_z_in(self, group) for group in self.param_groups]
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                warmup = group["warmup_steps"]
                group["scheduled_lr"] = group["lr"] * (min(1.0, (group["k"] + 1) / warmup) if warmup else 1.0)
                group["lr"] = group["scheduled_lr"]
            super().step()
            for group, rate, (trained, zs, x) in zip(self.param_groups, rates, begun, strict=True):
                group["lr"] = rate
                share = _share_of_step(group)
                for parameter, z in zip(trained, zs, strict=True):
                    self.state[parameter]["z"] = z  # not before: some optimizers make their state where there is none
                if trained:
                    weights, z_parts = _local(trained), _local(zs)
                    torch._foreach_copy_(z_parts, weights)
                    torch._foreach_lerp_(x, z_parts, share)
                    torch._foreach_copy_(weights, torch._foreach_lerp(z_parts, x, group["x_weight"]))
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the parameters, if they hold y."""
        _switch(self, train=False)

    @torch.no_grad()
    def train(self) -> None:
        """Put y into the parameters, if they hold x."""
        _switch(self, train=True)


def _put_z_in(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Put z into the parameters of a group that have gradients; return these, z and the local parts of x."""
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not trained:
        return [], [], []
    known = [optimizer.state[p].get("z") if p in optimizer.state else None for p in trained]
    zs = [p.detach().clone() if z is None else z for p, z in zip(trained, known, strict=True)]
    weights, z_parts = _local(trained), _local(zs)
    x = torch._foreach_lerp(weights, z_parts, 1 - 1 / group["x_weight"])
    torch._foreach_copy_(weights, z_parts)
    return trained, zs, list(x)


def _switch(optimizer: torch.optim.Optimizer, *, train: bool) -> None:
    for group in optimizer.param_groups:
        moved = [parameter for parameter in group["params"] if "z" in optimizer.state.get(parameter, {})]
        if moved and group["train_mode"] is not train:
            share = 1 - group["x_weight"] if train else 1 - 1 / group["x_weight"]
            torch._foreach_lerp_(_local(moved), _local([optimizer.state[p]["z"] for p in moved]), share)
        group["train_mode"] = train


def _local(tensors: list[Tensor]) -> list[Tensor]:
    return [local_part(tensor.detach()) for tensor in tensors]


def _share_of_step(group: dict[str, Any]) -> float:
    """Return c, the share of the present step in the average, and count the step."""
    group["lr_max"] = max(group["scheduled_lr"], group["lr_max"])
    group["k"] += 1
    weight: float = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
    group["weight_sum"] += weight
    return weight / group["weight_sum"] if group["weight_sum"] else 0.0


_AROUND: dict[type, type] = {}


def _class_around(base: type) -> type:
    if base not in _AROUND:
        names = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
        _AROUND[base] = type(base.__name__, (ExactModes, _AroundSteps, base), names)  # checkpoints have that name
    return _AROUND[base]


def weight_of_x(group: dict[str, Any]) -> float:
    """Return b1, the weight of x in y, of a parameter group."""
    weight: float = group.get("x_weight") or (group["betas"][0] if "betas" in group else group["momentum"])
    return weight


# The library's optimizers, under their names: checkpoints of runs with and without exact modes are the same.
_EXACT: dict[type, type] = {
    base: type(base.__name__, (ExactModes, base), {"__doc__": base.__doc__, "__module__": __name__})
    for base in (schedulefree.AdamWScheduleFree, schedulefree.RAdamScheduleFree, schedulefree.SGDScheduleFree)
}


def restore_exactly(optimizer: torch.optim.Optimizer) -> bool:
    """Give an optimizer of `schedulefree` exact modes, in place, so that its schedulers and wrappers still fit.

    Args:
        optimizer: Any optimizer.

    Returns:
        False for optimizers that are not schedule-free.
    """
    if type(optimizer) in _EXACT:
        optimizer.__class__ = _EXACT[type(optimizer)]
    return isinstance(optimizer, ExactModes)


def build_schedule_free(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int = 0,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    momentum: float | None = None,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> ExactModes:
    """Make the schedule-free optimizer that replaces another one, with the same parameter groups.

    AdamW and SGD have counterparts in `schedulefree`. Any other optimizer, such as Muon, takes the same steps, which
    move z; its weight decay is that of z, and its momentum its own.

    Learning rates, weight decays, betas and eps of the groups are kept. The groups are the same objects, so
    that schedulers of the given optimizer change the learning rates of the new one. The given optimizer must not be
    used afterwards.

    Args:
        optimizer: An optimizer before its first step, whose `step` needs no closure.
        warmup_steps: The number of steps in which the learning rate rises from 0.
        lr: Learning rate of all groups. None: that of each.
        weight_decay: Weight decay of all groups, multiplied by the learning rate. None: that of each.
        momentum: The weight of x in y. None: the momentum, or first beta, of each group of AdamW or SGD; 0.9 if that is
            0, and for other optimizers.
        r: See `ScheduleFreeAdamW`.
        weight_lr_power: See `ScheduleFreeAdamW`.

    Raises:
        TypeError: The optimizer needs a closure, has no learning rate, or has modes.
        ValueError: A number is out of range; the optimizer uses `maximize`, `amsgrad`, `nesterov` or `dampening`, which
            have no counterpart; or its class may define weight decay differently and `weight_decay` is not given.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = build_schedule_free(
        ...     torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.95), warmup_steps=10
        ... )
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        (2.0, 0.95)
    """
    check_integers("0 means no warmup.", warmup_steps=warmup_steps, least=0)
    is_adam = isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam))
    changed = {"lr": lr, "weight_decay": weight_decay}
    options: dict[str, Any] = {"warmup_steps": int(warmup_steps), "r": r, "weight_lr_power": weight_lr_power}
    if not is_adam and not isinstance(optimizer, torch.optim.SGD):
        return _build_around(optimizer, changed, 0.9 if momentum is None else momentum, options)
    settings = [_settings_of(optimizer, group, is_adam, changed, momentum) for group in optimizer.param_groups]
    for kept in settings:
        first = kept["betas"][0] if is_adam else kept["momentum"]
        _check_settings(kept["lr"], kept["weight_decay"], first, warmup_steps, r, weight_lr_power)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.clear()
        group.update(kept)
    optimizer.state.clear()
    kind: Callable[..., Any] = ScheduleFreeAdamW if is_adam else ScheduleFreeSGD
    made: ExactModes = kind(optimizer.param_groups, **options)
    # Schedulers of the given optimizer would warn that it does not step.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made


def _build_around(
    optimizer: torch.optim.Optimizer, changed: dict[str, float | None], x_weight: float, options: dict[str, Any]
) -> ExactModes:
    has_rates = all(isinstance(group.get("lr"), (int, float, Tensor)) for group in optimizer.param_groups)
    if needs_closure(optimizer) or hasattr(optimizer, "eval") or not has_rates:
        raise TypeError(
            f"`optimizer` must have a learning rate, a `step` without a closure and no modes of its own, got "
            f"{type(optimizer).__name__}. Pass AdamW, SGD or Muon, or an optimizer of `schedulefree`."
        )
    _check_settings(changed["lr"] or 0.0, changed["weight_decay"] or 0.0, x_weight, **options)
    options = {**options, "x_weight": x_weight, "k": 0, "train_mode": True}
    options |= {"weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
    for group in optimizer.param_groups:
        group.update(options, lr=float(group["lr"]))
        group.update({key: value for key, value in changed.items() if value is not None})
        if changed["lr"] is not None:
            group.pop("initial_lr", None)
    made: ExactModes = object.__new__(_class_around(type(optimizer)))
    # A scheduler has put another `step` into the given optimizer, which calls that of its class.
    made.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    made.defaults = {**optimizer.defaults, **options}
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made


def _settings_of(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    is_adam: bool,
    changed: dict[str, float | None],
    momentum: float | None,
) -> dict[str, Any]:
    """Return the schedule-free parameter group for a group of AdamW or SGD; custom entries are kept."""
    name = type(optimizer).__name__
    for option in (
        "maximize",
        "amsgrad",
        "nesterov",
        "dampening",
    ):  # schedule-free optimizers lack them
        if group.get(option):
            raise ValueError(f"`optimizer` must not use `{option}`, got {name}({option}={group[option]!r}). Remove it.")
    if changed["weight_decay"] is None and group["weight_decay"] and type(optimizer) not in _WITH_KNOWN_DECAY:
        raise ValueError(
            f"`weight_decay` must be given to replace {name}, which may define weight decay in another way than "
            f"schedule-free optimizers, where a step removes `lr * weight_decay` of the weights; got a group with "
            f"{group['weight_decay']!r}. That of `DecoupledAdamW` and `DecoupledSGDW` is equivalent if divided by the "
            f"learning rate."
        )
    kept = {key: value for key, value in group.items() if key not in optimizer.defaults}
    kept["lr"] = float(group["lr"]) if changed["lr"] is None else changed["lr"]
    if changed["lr"] is not None:
        kept.pop("initial_lr", None)
    kept["weight_decay"] = group["weight_decay"] if changed["weight_decay"] is None else changed["weight_decay"]
    first = (group["betas"][0] if is_adam else group["momentum"]) or 0.9
    first = float(first if momentum is None else momentum)
    if is_adam:
        return {**kept, "betas": (first, float(group["betas"][1])), "eps": group["eps"]}
    return {**kept, "momentum": first}


_WITH_KNOWN_DECAY = (torch.optim.AdamW, torch.optim.SGD)
