"""SGD and AdamW whose weight decay follows the shape of the schedule, not the size of the learning rate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT, _default_to_fused_or_foreach
from torch.optim.sgd import sgd

from composer.utils import check_finite, dist, local_part

_log = logging.getLogger(__name__)

Metric = Callable[[Tensor, dict[str, Any], Tensor], Tensor]
"""A function of a parameter, its optimizer state and its last update."""


class _KeepsInitialLR(Optimizer):
    """An optimizer that stores the initial learning rate of each group in `group["initial_lr"]`, as a float.

    It is stored when a group is added, not at the first step: `torch.distributed.checkpoint` initializes the state of
    an optimizer with a step at learning rate 0. The learning rate schedulers of torch use the same entry.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; `initial_lr` is the `lr` of the group unless given."""
        super().add_param_group(param_group)
        _initial_lr_of(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading replaces the groups, and the optimizers of torch do not save `initial_lr`.
        previous = [group.get("initial_lr") for group in self.__dict__.get("param_groups", ())]
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            if index < len(previous) and previous[index] is not None:
                group.setdefault("initial_lr", previous[index])
            _initial_lr_of(group)


class DecoupledSGDW(_KeepsInitialLR, SGD):
    """SGD with momentum that decays weights by `lr / initial_lr * weight_decay`.

    With the gradient g and the momentum buffer b, which is initialized with the first gradient, a step is

        b = momentum * b + (1 - dampening) * g
        d = g + momentum * b if nesterov else b
        p = (1 - lr / initial_lr * weight_decay) * p - lr * d

    `initial_lr` is the initial learning rate of a parameter group, so the decay follows the shape of the schedule but
    not its peak: useful values are much smaller than with `torch.optim.SGD`. The ratio is 1 if `initial_lr` is 0.

    `group["initial_lr"]` is the entry that the schedulers of torch use. `state[p]["momentum_buffer"]` is b, or None if
    `momentum` is 0.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate: a float, or a tensor with one element.
        momentum: Momentum.
        dampening: Dampening of the momentum.
        weight_decay: Fraction of the weights that a step removes at the initial learning rate. Values from 1e-3 on log
            a warning.
        nesterov: Use Nesterov momentum, which requires momentum and no dampening.
        foreach: Update all parameters in a few kernels.
        fused: Update all parameters in one kernel, after another one for the decay. None for both: fused where torch
            supports it, else foreach where torch prefers it.

    Attributes:
        single_pass: True: `step` calls its closure at most once, before any update, so the Trainer may run the forward
            and backward pass itself.

    Raises:
        ValueError: A number is negative, or `nesterov` is used without momentum or with dampening.
        RuntimeError: `fused` and `foreach` are both set.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DecoupledSGDW([weight], lr=0.5, weight_decay=5e-4)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.9995

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 1, where
    `lr / initial_lr` is eta_t.
    Differs: the learning rate multiplies the momentum, not the gradients in it, as in torch. From MosaicML's Composer:
    `foreach` and `fused` are additions, sparse gradients are refused, and groups added later have their own
    `initial_lr`.
    """

    single_pass: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_finite(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        _log_if_large(weight_decay)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, foreach=foreach, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the gradients and returns the loss. It is called once, with gradients enabled.

        Returns:
            What `closure` returns; None without one.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = _call(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            buffers: list[Tensor | None] = [state.get("momentum_buffer") for state in states]
            self.sgdw(
                params,
                _dense_grads(params, self),
                buffers,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                initial_lr=_initial_lr_of(group),
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            for state, buffer in zip(states, buffers, strict=True):
                state["momentum_buffer"] = buffer
        return loss

    @staticmethod
    def sgdw(
        params: list[Tensor],
        d_p_list: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
        *,
        weight_decay: float,
        momentum: float,
        lr: float | Tensor,
        initial_lr: float,
        dampening: float,
        nesterov: bool,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step on lists, in place; see the class for the formula.

        Args:
            params: Parameters.
            d_p_list: Their gradients.
            momentum_buffer_list: Their momentum buffers. With momentum, None is replaced by a new buffer.
            weight_decay: Fraction of the weights that is removed at the initial learning rate.
            momentum: Momentum.
            lr: Learning rate.
            initial_lr: The initial learning rate.
            dampening: Dampening of the momentum.
            nesterov: Use Nesterov momentum.
            maximize: Maximize the objective instead of minimizing it.
            foreach: Use a few kernels for all parameters.
            fused: Use one kernel for all parameters, after another one for the decay. None for both: as in the class.
            grad_scale: Divisor of the gradients, a scalar tensor; requires `fused`.
            found_inf: Scalar tensor; the step is skipped unless it is 0. Requires `fused`.
        """
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        fused, foreach = _fastest(params, fused, foreach)
        if weight_decay != 0:
            factor = 1 - _decay_ratio(lr, initial_lr) * weight_decay
            _decay_(params, factor, grouped=bool(foreach or fused), found_inf=found_inf)
        if fused and momentum != 0:
            share = dampening / momentum * (-1 if maximize else 1)
            for index, buffer in enumerate(momentum_buffer_list):
                if buffer is None:
                    momentum_buffer_list[index] = _first_buffer(d_p_list[index], share, grad_scale, found_inf)
        sgd(
            params,
            d_p_list,
            momentum_buffer_list,
            foreach=foreach,
            fused=fused,
            grad_scale=grad_scale,
            found_inf=found_inf,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
        )


def _first_buffer(grad: Tensor, share: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Return a momentum buffer with which the update of the fused kernel results in the gradient.

    The kernel computes `momentum * buffer + (1 - dampening) * grad`. Its special first step cannot be used: it requires
    that all parameters are new, and leaves uninitialized memory if it is skipped because of `found_inf`.
    """
    if share == 0:
        return torch.zeros_like(grad)
    buffer = grad * share
    if grad_scale is not None:
        buffer = buffer / grad_scale.to(grad.device)
    if found_inf is not None:
        buffer = torch.where(found_inf.to(grad.device) == 0, buffer, 0.0)
    return buffer.to(grad.dtype)


def _norm(tensor: Tensor) -> Tensor:
    """Return the 2-norm of a tensor, or of its local shard."""
    norm: Tensor = torch.linalg.vector_norm(local_part(tensor))
    return norm


_METRIC_FUNCTIONS: dict[str, Metric] = {
    "l2_norm/moment": lambda param, state, update: _norm(state["exp_avg"]),
    "l2_norm/param": lambda param, state, update: _norm(param.detach()),
    "l2_norm/update": lambda param, state, update: _norm(update),
    "l2_norm/grad": lambda param, state, update: _norm(cast("Tensor", param.grad)),
}


class DecoupledAdamW(_KeepsInitialLR, AdamW):
    """Adam that decays weights by `lr / initial_lr * weight_decay`.

    With the gradient g, a step t is

        p = (1 - lr / initial_lr * weight_decay) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g ** 2
        p = p - lr / (1 - beta1 ** t) * m / (sqrt(v) / sqrt(1 - beta2 ** t) + eps)

    where AMSGrad uses the largest v so far in the last line. `initial_lr` is the initial learning rate of a parameter
    group, so the decay follows the shape of the schedule but not its peak: useful values are much smaller than with
    `torch.optim.AdamW`, whose decay is `lr * weight_decay`. The ratio is 1 if `initial_lr` is 0.

    `group["initial_lr"]` is the entry that the schedulers of torch use. `state[p]` holds t as "step" (a float32 scalar
    tensor; on the host unless the step is fused), m as "exp_avg", v as "exp_avg_sq" and its maximum as
    "max_exp_avg_sq". Parameters without a gradient or with `requires_grad=False` are skipped.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate: a float, or a tensor with one element.
        betas: beta1 and beta2, in [0, 1).
        eps: Added to the divisor.
        weight_decay: Fraction of the weights that a step removes at the initial learning rate. Values from 1e-3 on log
            a warning.
        amsgrad: Divide by the largest v so far.
        foreach: Update all parameters in a few kernels.
        fused: Update all parameters in one kernel, including the decay. None for both: fused where torch supports it,
            else foreach where torch prefers it.

    Attributes:
        single_pass: True: `step` calls its closure at most once, before any update, so the Trainer may run the forward
            and backward pass itself.
        metric_functions: The metrics of `report_per_parameter_metrics`, by name: functions of the parameter, its
            optimizer state and its last update.

    Raises:
        ValueError: A number is out of range.
        RuntimeError: `fused` and `foreach` are both set.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DecoupledAdamW([weight], lr=0.5, weight_decay=5e-4)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.9995

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2, where
    `lr / initial_lr` is eta_t; AMSGrad: Reddi, Kale, Kumar, "On the Convergence of Adam and Beyond", arXiv:1904.09237.
    Differs: none from the paper. From MosaicML's Composer: `foreach` and `fused` are additions, "step" is on the host,
    and groups added later get their `initial_lr` when they are added, not at their first step.
    """

    single_pass: ClassVar[bool] = True
    metric_functions: ClassVar[dict[str, Metric]] = _METRIC_FUNCTIONS

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_finite(lr=lr, eps=eps, weight_decay=weight_decay)
        for beta in betas:
            check_finite(betas=beta)
        _log_if_large(weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and requires one.

        Args:
            closure: Computes the gradients and returns the loss. It is called once, with gradients enabled.

        Returns:
            What `closure` returns; None without one.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = _call(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            grads = _dense_grads(params, self)
            fused, foreach = _fastest(params, group["fused"], group["foreach"])
            states = [self._state_of(p, group["amsgrad"], bool(fused or group["capturable"])) for p in params]
            self.adamw(
                params,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                [state["step"] for state in states],
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                initial_lr=_initial_lr_of(group),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=foreach,
                fused=fused,
                capturable=group["capturable"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
        return loss

    @staticmethod
    def adamw(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *,
        amsgrad: bool,
        beta1: float,
        beta2: float,
        lr: float | Tensor,
        initial_lr: float,
        weight_decay: float,
        eps: float,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step on lists, in place; see the class for the formula.

        Args:
            params: Parameters.
            grads: Their gradients.
            exp_avgs: Their m.
            exp_avg_sqs: Their v.
            max_exp_avg_sqs: Their largest v so far; empty without `amsgrad`.
            state_steps: The numbers of steps so far.
            amsgrad: Divide by the largest v so far.
            beta1: Decay of m.
            beta2: Decay of v.
            lr: Learning rate.
            initial_lr: The learning rate at which `weight_decay` holds as it is.
            weight_decay: Fraction of the weights that is removed at the initial learning rate.
            eps: Added to the divisor.
            maximize: Maximize the objective instead of minimizing it.
            foreach: Use a few kernels for all parameters.
            fused: Use one kernel for all parameters. None for both: as in the class.
            capturable: See `torch.optim.AdamW`.
            grad_scale: Divisor of the gradients, a scalar tensor; requires `fused`.
            found_inf: Scalar tensor; the step is skipped unless it is 0. Requires `fused`.
        """
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        fused, foreach = _fastest(params, fused, foreach)
        if initial_lr != 0:
            weight_decay /= initial_lr  # torch multiplies by 1 - lr * weight_decay
        elif weight_decay != 0:
            _decay_(params, 1 - weight_decay, grouped=bool(foreach or fused), found_inf=found_inf)
            weight_decay = 0.0
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            state_steps,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
            grad_scale=grad_scale,
            found_inf=found_inf,
            has_complex=any(map(torch.is_complex, params)),
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )

    def _state_of(self, param: Tensor, amsgrad: bool, step_on_device: bool) -> dict[str, Any]:
        """Return the state of a parameter, which is created at its first step."""
        state: dict[str, Any] = self.state[param]
        on_host = param.is_cpu or not step_on_device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu" if on_host else param.device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif state["step"].is_cpu is not on_host:
            # All state was moved to the device of the parameters; reading the step there would synchronize every step.
            state["step"] = state["step"].to("cpu" if on_host else param.device)
        return state

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the norms of a parameter, its gradient, its first moment and its last update.

        For a sharded parameter these are the norms of the local shard; see `pre_reduce_metrics`.

        Args:
            param: A parameter. Nothing is added before its first step, without a gradient, or if it is in no group.
            name: Its name in the metrics.
            optimizer_metrics: Updated with one entry f"{metric}/{name}" for each of `metric_functions`.

        Returns:
            `optimizer_metrics`.

        Differs: the update is computed with the settings of the group of the parameter, not of the first group, and is
        the sum of step and decay, both of which are subtracted from the parameter.
        """
        state = self.state.get(param)
        group = next((group for group in self.param_groups if any(param is p for p in group["params"])), None)
        if state and group is not None and param.grad is not None:
            update = _adamw_update(param, state, group, _initial_lr_of(group))
            for metric, function in self.metric_functions.items():
                optimizer_metrics[f"{metric}/{name}"] = function(param, state, update)
        return optimizer_metrics

    def pre_reduce_metrics(self, optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the squared norms, which `dist_reduce_metrics` sums over shards."""
        return {name: norm**2 for name, norm in optimizer_metrics.items()}

    def dist_reduce_metrics(self, optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the norms of whole parameters: the square root of the sum of squared norms over ranks.

        Args:
            optimizer_metrics: The result of `pre_reduce_metrics`; names may be missing on ranks without a shard.

        Returns:
            A norm for every name on any rank, sorted by name, the same on all ranks.
        """
        names = sorted(set().union(*dist.all_gather_object(list(optimizer_metrics))))
        if not names:
            return {}
        device = self.param_groups[0]["params"][0].device
        zero = torch.zeros((), device=device)
        sums = torch.stack([optimizer_metrics.get(name, zero).to(device, torch.float32) for name in names])
        dist.all_reduce(sums, reduce_operation="SUM")
        return dict(zip(names, sums.sqrt().unbind(), strict=True))


@torch.no_grad()
def _adamw_update(param: Tensor, state: dict[str, Any], group: dict[str, Any], initial_lr: float) -> Tensor:
    """Compute the last update of a parameter, including the decay, from the state after the step."""
    beta1, beta2 = group["betas"]
    step: Tensor = state["step"]
    mean: Tensor = state["exp_avg"]
    squares: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    step_size = -group["lr"] / (1 - beta1**step)
    divisor = squares.sqrt() / (1 - beta2**step).sqrt() + group["eps"]
    decay = group["weight_decay"] * _decay_ratio(group["lr"], initial_lr)
    update: Tensor = mean / divisor * step_size - param.detach() * decay
    return update


def _initial_lr_of(group: dict[str, Any]) -> float:
    """Return the initial learning rate of a group, and store the current learning rate if it has none."""
    initial_lr = group.setdefault("initial_lr", group["lr"])
    if isinstance(initial_lr, Tensor):  # once per group: a scheduler writes into the learning rate tensor itself
        group["initial_lr"] = initial_lr = float(initial_lr)
    return float(initial_lr)


def _decay_ratio(lr: float | Tensor, initial_lr: float) -> float | Tensor:
    """Return `lr / initial_lr`, or 1 if that is undefined."""
    return lr / initial_lr if initial_lr else 1.0


def _fastest(params: list[Tensor], fused: bool | None, foreach: bool | None) -> tuple[bool | None, bool | None]:
    """Return `fused` and `foreach`, chosen by what torch supports for these parameters if both are None."""
    if fused is None and foreach is None:
        # Sharded parameters cannot all be fused; in float64, the fused kernel of Adam is less exact than the others.
        # A fused kernel would break the graph of a compiled step, whose operations the compiler fuses itself.
        simple = all(type(p) in (Tensor, torch.nn.Parameter) and p.dtype is not torch.float64 for p in params)
        use_fused = simple and not torch.compiler.is_compiling()
        fused, foreach = _default_to_fused_or_foreach(params, differentiable=False, use_fused=use_fused)
    return fused, foreach


def _decay_(params: list[Tensor], factor: float | Tensor, *, grouped: bool, found_inf: Tensor | None = None) -> None:
    """Multiply the parameters by `factor`, in place.

    Args:
        params: The parameters.
        factor: A number or a scalar tensor.
        grouped: Multiply all parameters of a dtype in one kernel.
        found_inf: Scalar tensor; nothing changes unless it is 0.
    """
    if found_inf is not None:
        factor = torch.where(found_inf == 0, factor, 1.0)
    if not grouped or not params:
        for param in params:
            param.mul_(factor)
        return
    if not isinstance(factor, Tensor) and len({param.dtype for param in params}) == 1:
        torch._foreach_mul_(params, factor)  # the common case; grouping costs as much as the kernel
        return
    for (device, _), ((tensors,), _) in Optimizer._group_tensors_by_device_and_dtype([[*params]]).items():
        if isinstance(factor, Tensor):
            torch._foreach_mul_(cast("list[Tensor]", tensors), factor.to(device, non_blocking=True))
        else:
            torch._foreach_mul_(cast("list[Tensor]", tensors), factor)


def _log_if_large(weight_decay: float) -> None:
    if weight_decay >= 1e-3:
        _log.warning(
            "`weight_decay` of a decoupled optimizer is not multiplied by the learning rate, so %g is large: every "
            "step removes that fraction of the weights. To match a torch optimizer with the learning rate lr and the "
            "weight decay wd, use lr * wd.",
            weight_decay,
        )


def _call(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _dense_grads(params: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    grads = [cast("Tensor", param.grad) for param in params]
    if any(grad.layout is not torch.strided for grad in grads):
        raise RuntimeError(
            f"Gradients must be dense for {type(optimizer).__name__}, got a sparse one. "
            f"Create the layer with `sparse=False`, or optimize it with `torch.optim.SparseAdam`."
        )
    return grads
