"""The optimizer that looks for flat minima, and the algorithm that wraps it around the optimizers of a run.

Symbols: w are the weights, g the gradient, e the step to the worst point of the neighborhood.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.core import WRAPS_OPTIMIZER, Algorithm, Event, Placement
from composer.utils import check_finite, check_flags, check_integers, local_part, plain_number
from composer.utils.module_surgery import has_own_state_dict

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Tensors = list[torch.Tensor]


class SAMOptimizer(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer.

    One step computes the gradient g at the weights w, moves to w + e, computes the gradient there, moves back to w and
    runs the step of the base optimizer with that second gradient:

        e = rho * g / (||g|| + epsilon), with the L2 norm over all gradients

    The norm stays on the device. The weights are restored bit for bit, even if the second pass fails.

    This optimizer and the base optimizer share `param_groups`, whose groups gain `rho`, `epsilon` and `global_step`,
    and `state`. Schedulers, module surgery and checkpoints therefore work with either, before and after wrapping.

    Args:
        base_optimizer: The optimizer that updates the weights; its `step` must not require a closure.
        rho: Radius of the neighborhood, at least 0. A parameter group may override it.
        epsilon: Positive constant that prevents a division by zero if all gradients are zero.
        interval: Use two passes in every `interval`-th step; the other steps use one.
        sync_ascent: Synchronize the gradient of the first pass across ranks, so that all ranks move to the same point.
        others: Optimizers of other weights that take part: the norm is that over all gradients, and all weights move to
            w + e and back. They are stepped by the caller, afterwards, with the gradients of the second pass.
        **kwargs: Defaults of further entries of the parameter groups.

    Attributes:
        base_optimizer: The optimizer that updates the weights.
        interval: The argument.
        sync_ascent: The argument.
        others: The argument, as a tuple.
        global_step: The number of steps taken.

    Raises:
        TypeError: `base_optimizer` is not an optimizer.
        ValueError: `base_optimizer` requires a closure or is a wrapper with its own groups or state, `rho` is negative,
            `epsilon` is not positive or `interval` is below 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = weight.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)  # the gradient at 1 + 0.5 is 3
        >>> round(weight.item(), 3)
        0.7

    Source: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
        algorithm 1 with p = 2.
    Differs: `interval`. See `SAM` for the rest.
    """

    needs_closure = True
    _step_supports_amp_closure = True
    _moved: tuple[Tensors, Tensors] | None = None  # between `first_step` and `second_step`

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        rho: float = 0.05,
        epsilon: float = 1e-12,
        interval: int = 1,
        sync_ascent: bool = False,
        others: Sequence[torch.optim.Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        _check_arguments(rho, epsilon, interval)
        for optimizer in (base_optimizer, *others):
            _check_base(optimizer)
        self.base_optimizer, self.interval, self._is_built = base_optimizer, interval, False
        self.others = tuple(others)
        self.sync_ascent = sync_ascent
        groups, state = base_optimizer.param_groups, base_optimizer.state
        try:
            super().__init__(groups, {"rho": rho, "epsilon": epsilon, "global_step": 0, **kwargs})
        finally:
            # The constructor of torch assigned new ones through the properties below.
            base_optimizer.param_groups, base_optimizer.state = groups, state
        self._is_built = True

    # Properties, so that both optimizers still share these after the base optimizer has loaded or replaced them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the base optimizer."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of the base optimizer; SAM itself needs none between steps."""
        return self.base_optimizer.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.base_optimizer.state = value

    @property
    def global_step(self) -> int:
        """The number of steps taken. Stored in the parameter groups, so it is saved and loaded with them."""
        step: int = self._setting(self.param_groups[0], "global_step")
        return step

    @global_step.setter
    def global_step(self, value: int) -> None:
        for group in self.param_groups:
            group["global_step"] = value

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Run the closure, twice in every `interval`-th step, and step the base optimizer.

        Both passes of a step draw the same random numbers, for example for dropout masks and mixed pairs.

        Args:
            closure: Clears the gradients, computes new ones and returns the loss, or None if the gradients overflowed;
                the weights then stay as they are. If its signature has them, it is called with two keywords:
                `ddp_sync` in the first of two passes, True if the gradients must be synchronized across ranks, and
                `loss_dict={}` in the second pass, whose loss should not be logged.

        Returns:
            The result of the first call of the closure.

        Raises:
            TypeError: `closure` is None.
        """
        if closure is None:
            raise TypeError(
                "`closure` must be given: `SAMOptimizer` computes two gradients in one step. Pass a function that "
                "clears the gradients, runs the forward and backward pass and returns the loss."
            )
        with torch.enable_grad():
            if (self.global_step + 1) % self.interval == 0:
                loss, usable = self._two_passes(closure)
            else:
                loss = closure()
                usable = loss is not None
        if usable:
            self.base_optimizer.step()
        self.global_step += 1
        return loss

    def first_step(self) -> None:
        """Move the weights from w to w + e, with the gradients at w.

        For loops without a closure: afterwards clear the gradients, compute those at w + e, and call `second_step`. The
        gradients are overwritten.

        Raises:
            RuntimeError: The weights have been moved already.
        """
        if self._moved is not None:
            raise RuntimeError("`first_step` has moved the weights already. Call `second_step` before another one.")
        self._moved = self._ascend()

    def second_step(self) -> None:
        """Move the weights back to w and step the base optimizer, with the gradients at w + e.

        Raises:
            RuntimeError: `first_step` has not been called.
        """
        if self._moved is None:
            raise RuntimeError("`second_step` needs the weights where `first_step` moves them. Call that one first.")
        moved, self._moved = self._moved, None
        _copy(*moved)
        torch.clear_autocast_cache()
        self.base_optimizer.step()
        self.global_step += 1

    def _two_passes(self, closure: Callable[..., Any]) -> tuple[Any, bool]:
        """Compute the second gradient; return the first loss and whether the second gradient is usable."""
        random = _RandomState(p.device for group in self._all_groups() for p in group["params"])
        loss = _call(closure, ddp_sync=self.sync_ascent)
        if loss is None:
            return loss, False
        weights, originals = self._ascend()
        random.restore()
        try:
            second = _call(closure, loss_dict={})
        finally:
            _copy(weights, originals)
            torch.clear_autocast_cache()
        return loss, second is not None

    @torch.no_grad()
    def _ascend(self) -> tuple[Tensors, Tensors]:
        """Move from w to w + e; return the weights and copies of their original values."""
        buckets: dict[tuple[Any, ...], tuple[Tensors, Tensors]] = {}
        for group in self._all_groups():
            rho, epsilon = self._setting(group, "rho"), self._setting(group, "epsilon")
            for weight in group["params"]:
                if weight.grad is not None:
                    params, grads = buckets.setdefault((rho, epsilon, weight.device, weight.dtype), ([], []))
                    params.append(weight)
                    grads.append(weight.grad)
        weights = [weight for params, _ in buckets.values() for weight in params]
        originals = [torch.empty_like(weight) for weight in weights]
        _copy(originals, weights)
        norm = torch.nn.utils.get_total_norm([grad for _, grads in buckets.values() for grad in grads])
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # in float16 epsilon would be zero
        for (rho, epsilon, device, _), (params, grads) in buckets.items():
            # The closure clears the gradients next, so they can be overwritten with e.
            torch._foreach_mul_(grads, (rho / (norm + epsilon)).to(device, non_blocking=True))
            torch._foreach_add_(params, grads)
        torch.clear_autocast_cache()  # it holds casts of the weights before the change
        return weights, originals

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in (self.base_optimizer, *self.others) for group in optimizer.param_groups]

    def _setting(self, group: dict[str, Any], name: str) -> Any:
        # A group that was added or loaded through the base optimizer may lack the entry.
        return group.get(name, self.defaults[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Set the gradients to None instead of zero.
        """
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to both optimizers.

        Args:
            param_group: `{"params": ...}` and the settings that differ from the defaults of either optimizer.
        """
        if not self._is_built:  # the constructor adds the groups of the base optimizer
            super().add_param_group(param_group)
            return
        self.base_optimizer.add_param_group(param_group)
        for name, value in {**self.defaults, "global_step": self.global_step}.items():
            self.param_groups[-1].setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both optimizers. A `state_dict` of the base optimizer alone is accepted too.

        Args:
            state_dict: A dictionary returned by `state_dict`.
        """
        # Other implementations store e in the state, where the base optimizer would mistake it for its own.
        state = {
            key: {name: value for name, value in entries.items() if name != "e_w"}
            for key, entries in state_dict["state"].items()
            if entries.keys() != {"e_w"}
        }
        self.base_optimizer.load_state_dict({**state_dict, "state": state})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "base_optimizer": self.base_optimizer,
            "others": self.others,
            "interval": self.interval,
            "sync_ascent": self.sync_ascent,
            "defaults": self.defaults,
            "_is_built": True,
        }


class SAM(Algorithm):
    """Sharpness-aware minimization: find weights whose entire neighborhood has a low loss.

    Wraps the optimizer of the run in a `SAMOptimizer`: at BEFORE_LOAD, so that a checkpoint is loaded into the
    optimizer it was saved from, and at AFTER_LOAD if it is not wrapped yet, for loops that only run that event. If the
    run has several optimizers, the first is wrapped and moves the weights of all.

    **Events** BEFORE_LOAD, AFTER_LOAD. In a step with two passes the events from BEFORE_TRAIN_BATCH to
    AFTER_TRAIN_BATCH occur twice. **Writes** `state.optimizers`. **Cost** a second forward and backward pass, and
    memory for a copy of the weights, in every `interval`-th step. **Compilation** static: both passes run one graph.
    **When not to use it** if the model sees each example once, as large language models do, or with another algorithm
    that wraps the optimizer.

    Args:
        rho: Radius of the neighborhood, at least 0. A larger `interval` needs a larger radius, such as 0.5 with 10.
        epsilon: Positive constant that prevents a division by zero if all gradients are zero.
        interval: Use two passes in every `interval`-th step; the other steps use one.
        sync_ascent: Synchronize the gradient of the first pass across ranks, which costs another all-reduce. Several
            ranks then train as one process does; otherwise each rank uses its own gradient. A sharded model always
            synchronizes.

    Raises:
        ValueError: `rho` is negative, `epsilon` is not positive or `interval` is below 1.

    Example:
        >>> SAM(rho=0.5, interval=10)
        SAM(rho=0.5,epsilon=1e-12,interval=10,sync_ascent=False)

    Source: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
        section 2, algorithm 1 with p = 2.
    Differs: `interval` and `sync_ascent` are additions. Without `sync_ascent` each rank uses its own gradient in the
        first pass (the paper's m-sharpness, section 4.1, with m the batch size of a rank). Both passes draw the same
        random numbers. A loss of exactly zero does not skip the step. The state of the base optimizer is saved and
        loaded, so resuming is exact.
    """

    events = frozenset({Event.BEFORE_LOAD, Event.AFTER_LOAD})
    placement = Placement(provides={WRAPS_OPTIMIZER}, excludes={WRAPS_OPTIMIZER})

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1, sync_ascent: bool = False) -> None:
        _check_arguments(rho, epsilon, interval)
        check_flags(sync_ascent=sync_ascent)
        self.rho, self.epsilon = plain_number(rho), plain_number(epsilon)
        self.interval, self.sync_ascent = plain_number(interval), sync_ascent

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Wrap the first optimizer, unless one is wrapped already."""
        if state.optimizers and not any(isinstance(optimizer, SAMOptimizer) for optimizer in state.optimizers):
            first, *others = state.optimizers
            wrapped = SAMOptimizer(first, self.rho, self.epsilon, self.interval, self.sync_ascent, others)
            state.optimizers = [wrapped, *others]

    def explain(self) -> str:
        """Return what happens in a step, which the order at each event does not show."""
        return (
            f"two passes in every `interval`-th step, which is {self.interval}, each with all events from "
            f"BEFORE_TRAIN_BATCH to AFTER_TRAIN_BATCH; then the weights move back, and the optimizers step"
        )


def _check_arguments(rho: float, epsilon: float, interval: int) -> None:
    check_finite("Use 0.05, or more with a larger `interval`.", rho=rho, least=0)
    check_finite("It prevents a division by zero if all gradients are zero.", epsilon=epsilon, above=0)
    check_integers("Use 1 for two passes in every step.", interval=interval, least=1)


def _check_base(base_optimizer: Any) -> None:
    """Raise an error unless `base_optimizer` is an optimizer that steps without a closure."""
    if not isinstance(base_optimizer, torch.optim.Optimizer):
        raise TypeError(f"`base_optimizer` must be a `torch.optim.Optimizer`, got {type(base_optimizer).__name__}.")
    groups = inspect.getattr_static(base_optimizer, "param_groups", None)
    if has_own_state_dict(base_optimizer) or (isinstance(groups, property) and groups.fset is None):
        raise ValueError(
            f"`base_optimizer` must store its parameter groups and state as the optimizers of torch do, got "
            f"{type(base_optimizer).__name__}, a wrapper that does not. Use SAM with the wrapped optimizer, or remove "
            f"SAM."
        )
    closure = inspect.signature(inspect.unwrap(type(base_optimizer).step)).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    declared = any(getattr(base_optimizer, name, False) for name in ("_step_supports_amp_closure", "needs_closure"))
    if required or declared:
        raise ValueError(
            f"`base_optimizer` must step without a closure, got {type(base_optimizer).__name__}, which runs the "
            f"forward and backward pass itself. Use another optimizer, such as `torch.optim.SGD`."
        )


class _RandomState:
    """Snapshot of the default random generators of the CPU and of some devices.

    The states are on the host, so taking and restoring them does not synchronize with a device.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._modules = {device: torch.get_device_module(device) for device in set(devices) if device.type != "cpu"}
        self._cpu = torch.get_rng_state()
        self._states = {device: module.get_rng_state(*_index(device)) for device, module in self._modules.items()}

    def restore(self) -> None:
        """Reset the generators to the snapshot."""
        torch.set_rng_state(self._cpu)
        for device, module in self._modules.items():
            module.set_rng_state(self._states[device], *_index(device))


def _index(device: torch.device) -> tuple[Any, ...]:
    return () if device.type == "mps" else (device,)  # the functions of `torch.mps` take no device


def _call(closure: Callable[..., Any], **keywords: Any) -> Any:
    """Call a closure with those of the keywords that its signature has."""
    parameters = inspect.signature(closure).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        keywords = {name: value for name, value in keywords.items() if name in parameters}
    return closure(**keywords)


@torch.no_grad()
def _copy(targets: Tensors, values: Tensors) -> None:
    if not targets:  # `_foreach_copy_` rejects empty lists
        return
    # `_foreach_copy_` does not support sharded tensors; their local parts are plain tensors.
    torch._foreach_copy_([local_part(target) for target in targets], [local_part(value) for value in values])
