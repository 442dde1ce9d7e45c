"""Optimizers of a model whose parameters are replaced by sharded ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from composer.checkpoint.sharded_tensors import shard_like
from composer.utils.module_surgery import has_own_state_dict

__all__ = ["OptimizerParameters"]


class OptimizerParameters:
    """Remembers which parameters optimizers hold, to give them those that are there later.

    Args:
        model: The model, before its parameters are replaced.
        optimizers: Its optimizers.

    Raises:
        ValueError: An optimizer holds a parameter that the model does not have, or keeps a state that only it knows.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._before = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in self._optimizers:
            foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in self._before]
            if has_own_state_dict(optimizer):
                raise ValueError(
                    f"`optimizers` must keep their state as torch's do to be sharded, got {type(optimizer).__name__}, "
                    f"whose `state_dict` has no `param_groups`. Use the optimizer inside it, or train without "
                    f"`parallelism_config`."
                )
            if foreign:
                raise ValueError(
                    f"`optimizers` must hold parameters of `model` to be sharded with it, but {len(foreign)} "
                    f"parameters of {type(optimizer).__name__} are not in it; the first has the shape "
                    f"{tuple(foreign[0].shape)}. Build the optimizer from `model.parameters()`."
                )

    def follow(self, model: torch.nn.Module) -> None:
        """Put the model's parameters of now in the places of those of before, with what is kept for each."""
        named = dict(model.named_parameters())
        now: dict[torch.Tensor, torch.nn.Parameter] = {old: named[name] for old, name in self._before.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now[parameter] for parameter in group["params"]]
            kept = list(optimizer.state.items())
            optimizer.state.clear()
            for parameter, values in kept:
                optimizer.state[now[parameter]] = _sharded(values, parameter, now[parameter])


def _sharded(values: Any, before: torch.Tensor, now: torch.Tensor) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: shard_like(value, now) if isinstance(value, torch.Tensor) and value.shape == before.shape else value
        for key, value in values.items()
    }
