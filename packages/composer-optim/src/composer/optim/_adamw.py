"""AdamW with decoupled weight decay that is independent of the size of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from composer.optim._decoupled import KeepsInitialLR, call, decay_, dense_grads, initial_lr_of, log_if_large
from composer.optim._norms import METRIC_FUNCTIONS, Metric, adamw_update, root_of_sum_over_ranks
from composer.utils import check_finite

__all__ = ["DecoupledAdamW"]


class DecoupledAdamW(KeepsInitialLR, AdamW):
    """Adam that decays weights by `lr / initial_lr * weight_decay`.

    With the gradient g, a step t is

        p = (1 - lr / initial_lr * weight_decay) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g ** 2
        p = p - lr / (1 - beta1 ** t) * m / (sqrt(v) / sqrt(1 - beta2 ** t) + eps)

    where AMSGrad puts the largest v so far in the last line. `initial_lr` is the learning rate that a parameter group
    begins with, so the decay follows the shape of the schedule but not its peak: useful values are much smaller than
    with `torch.optim.AdamW`, whose decay is `lr * weight_decay`. The ratio is 1 where `initial_lr` is 0.

    `group["initial_lr"]` is the entry that torch's schedulers use. `state[p]` holds t as "step" (a float32 tensor
    without dimensions; on the host unless `fused`), m as "exp_avg", v as "exp_avg_sq" and its maximum as
    "max_exp_avg_sq". Parameters without a gradient or with `requires_grad=False` are skipped.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate: a float, or a tensor with one element.
        betas: beta1 and beta2, in [0, 1).
        eps: Added to the divisor.
        weight_decay: Part of the weights that a step removes at the initial learning rate. From 1e-3 on a warning is
            logged.
        amsgrad: Divide by the largest v so far.
        foreach: Update all parameters in a few kernels. None lets torch decide: so on accelerators, not on the CPU.
        fused: Update all parameters in one kernel, decay included.

    Attributes:
        single_pass: True: `step` calls its closure at most once, before any update; the Trainer may run forward and
            backward itself.
        metric_functions: What `report_per_parameter_metrics` reports: functions of the parameter, its optimizer state
            and its last update, by metric name.

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
    Differs: none from the paper. From the established API: `foreach` and `fused`, "step" is on the host, and groups
    added later get their `initial_lr` when they are added, not at their first step.
    """

    single_pass: ClassVar[bool] = True
    metric_functions: ClassVar[dict[str, Metric]] = METRIC_FUNCTIONS

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
        log_if_large(weight_decay)
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
        loss = call(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            grads = dense_grads(params, self)
            states = [self._state_of(p, group) for p in params]
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
                initial_lr=initial_lr_of(group),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                fused=group["fused"],
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
            state_steps: The numbers of their steps so far.
            amsgrad: Divide by the largest v so far.
            beta1: Decay of m.
            beta2: Decay of v.
            lr: Learning rate.
            initial_lr: The learning rate at which `weight_decay` holds as it is.
            weight_decay: Part of the weights that is removed at the initial learning rate.
            eps: Added to the divisor.
            maximize: Go up instead of down.
            foreach: A few kernels for all parameters; None lets torch decide.
            fused: One kernel for all parameters.
            capturable: As for `torch.optim.AdamW`.
            grad_scale: Divisor of the gradients, a tensor without dimensions; needs `fused`.
            found_inf: Skip the step unless this tensor without dimensions is 0; needs `fused`.
        """
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        if initial_lr != 0:
            weight_decay /= initial_lr  # torch multiplies by 1 - lr * weight_decay, within its kernel if there is one
        elif weight_decay != 0:
            decay_(params, 1 - weight_decay, grouped=bool(foreach or fused), found_inf=found_inf)
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

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made at its first step."""
        state: dict[str, Any] = self.state[param]
        on_host = param.is_cpu or not (group["fused"] or group["capturable"])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu" if on_host else param.device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif state["step"].is_cpu is not on_host:
            # Whoever moved all state to the parameters' device moved this too; reading it there would stall every step.
            state["step"] = state["step"].to("cpu" if on_host else param.device)
        return state

    def report_per_parameter_metrics(
        self, param: Tensor, name: str, optimizer_metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the norms of a parameter, its gradient, its first moment and its last update.

        For a sharded parameter these are the norms of the local shard; see `pre_reduce_metrics`.

        Args:
            param: A parameter. Nothing is added before its first step, without a gradient, or if it is in no group.
            name: What to call it.
            optimizer_metrics: Gets one entry f"{metric}/{name}" for each of `metric_functions`.

        Returns:
            `optimizer_metrics`.

        Differs: the update is computed with the settings of the parameter's own group, not of the first one, and is the
        sum of step and decay, both of which are subtracted from the parameter.
        """
        state = self.state.get(param)
        group = next((group for group in self.param_groups if any(param is p for p in group["params"])), None)
        if state and group is not None and param.grad is not None:
            update = adamw_update(param, state, group, initial_lr_of(group))
            for metric, function in self.metric_functions.items():
                optimizer_metrics[f"{metric}/{name}"] = function(param, state, update)
        return optimizer_metrics

    def pre_reduce_metrics(self, optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Square the norms, so that those of shards can be added up by `dist_reduce_metrics`."""
        return {name: norm**2 for name, norm in optimizer_metrics.items()}

    def dist_reduce_metrics(self, optimizer_metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Norms of whole parameters from the squared norms of shards: the root of the sum over ranks.

        Args:
            optimizer_metrics: What `pre_reduce_metrics` returned; names may be missing on ranks without a shard.

        Returns:
            A norm for every name that any rank has, sorted by name, the same on all ranks.
        """
        return root_of_sum_over_ranks(optimizer_metrics, device=self.param_groups[0]["params"][0].device)
