"""Optimizers of a model whose parameters are replaced by sharded ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composer.checkpoint.sharded_tensors import shard_like
from composer.utils.module_surgery import has_own_state_dict


class OptimizerParameters:
    """Stores the names of the parameters in optimizers, to replace them after the model is sharded.

    Args:
        model: The model, before its parameters are replaced.
        optimizers: Its optimizers.

    Raises:
        ValueError: An optimizer has a parameter that is not in the model, or its `state_dict` has another layout.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in self._optimizers:
            foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in self._names]
            if has_own_state_dict(optimizer):
                raise ValueError(
                    f"`optimizers` must have the state layout of torch's optimizers to be sharded, got "
                    f"{type(optimizer).__name__}, whose `state_dict` has no `param_groups`. Use the "
                    f"optimizer inside it, or train without `parallelism_config`."
                )
            if foreign:
                raise ValueError(
                    f"`optimizers` must have parameters of `model` to be sharded with it, but {len(foreign)} "
                    f"parameters of {type(optimizer).__name__} are not in it; the first has the shape "
                    f"{tuple(foreign[0].shape)}. Build the optimizer from `model.parameters()`."
                )

    def replace(self, model: torch.nn.Module) -> None:
        """Replace the old parameters with the model's current ones, and keep their optimizer states."""
        named = dict(model.named_parameters())
        current: dict[torch.Tensor, torch.nn.Parameter] = {old: named[name] for old, name in self._names.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [current[parameter] for parameter in group["params"]]
            states = list(optimizer.state.items())
            optimizer.state.clear()
            for old, values in states:
                new = current[old]
                if isinstance(values, dict):  # momenta and the like have the shape of the parameter
                    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
                    like_parameter = {key: value for key, value in tensors.items() if value.shape == old.shape}
                    values = {**values, **{key: shard_like(value, new) for key, value in like_parameter.items()}}
                optimizer.state[new] = values
