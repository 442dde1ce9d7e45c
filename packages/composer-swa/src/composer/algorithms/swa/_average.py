"""The equal average of the weights that a model had at different times."""

from __future__ import annotations

from typing import Any

import torch

from composer.utils import local_part, unwrapped_model

__all__ = ["AveragedWeights"]

_PREFIX = "module."  # of the names in a saved `torch.optim.swa_utils.AveragedModel`, whose layout this one shares


class AveragedWeights:
    """The average of a model's parameters over the calls of `update`, each counting the same.

    Averages of weights narrower than float32 are float32: their steps would round to nothing.

    Attributes:
        averages: The average of each parameter, by name.
        n_averaged: How many sets of weights are averaged.
    """

    def __init__(self) -> None:
        self.averages: dict[str, torch.Tensor] = {}
        self.n_averaged = 0

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """Add a model's present weights: `average <- average + (weight - average) / (n + 1)`, fused.

        Args:
            model: The model; not modified.
        """
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, weight in unwrapped_model(model).named_parameters():
            average = self.averages.get(name)
            if average is None:
                average = torch.zeros_like(weight.detach(), dtype=_dtype(weight))
            # Sharded as the weight is, so that a checkpoint has all of it.
            average = self.averages[name] = average.to(weight.device)
            value = local_part(weight.detach())
            averages, values = groups.setdefault((value.device, value.dtype, average.dtype), ([], []))
            averages.append(local_part(average))
            values.append(value.to(average.dtype))
        for averages, values in groups.values():
            if self.n_averaged == 0:
                torch._foreach_copy_(averages, values)
            else:
                torch._foreach_lerp_(averages, values, 1 / (self.n_averaged + 1))
        self.n_averaged += 1

    @torch.no_grad()
    def transfer(self, model: torch.nn.Module) -> None:
        """Write the averages into a model, whose parameters stay the same objects.

        Args:
            model: The model.
        """
        for name, weight in unwrapped_model(model).named_parameters():
            local_part(weight.detach()).copy_(local_part(self.averages[name]))

    def state_dict(self) -> dict[str, Any]:
        """The averages and their number, in the layout of `torch.optim.swa_utils.AveragedModel`."""
        named = {f"{_PREFIX}{name}": average for name, average in self.averages.items()}
        return {"n_averaged": torch.tensor(self.n_averaged), **named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store copies of what `state_dict` returned.

        Args:
            state: A dictionary returned by `state_dict`.
        """
        self.n_averaged = int(state["n_averaged"])
        self.averages = {
            name.removeprefix(_PREFIX): value.detach().clone() for name, value in state.items() if name != "n_averaged"
        }


def _dtype(value: torch.Tensor) -> torch.dtype:
    narrow = value.dtype.is_floating_point and value.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else value.dtype
