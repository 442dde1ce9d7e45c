"""Averages next to the tensors they follow, and the fused operations between them."""

from __future__ import annotations

from itertools import chain
from operator import getitem, is_
from typing import Any

import torch

from composer.utils import local_part

__all__ = ["Links", "Pairs"]

_SLICE = 32  # tensors exchanged at once: fused, without a second copy of the whole model


class Pairs:
    """Averages and the values they follow, grouped so that an operation is one fused call per group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @classmethod
    def of(cls, model: torch.nn.Module, average: torch.nn.Module) -> Pairs:
        """The parameters and buffers of a model that another one has under the same name.

        Raises:
            ValueError: Their shapes differ.
        """
        pairs, averages = cls(), average.state_dict()
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if name not in averages:
                continue
            if averages[name].shape != tensor.shape:
                raise ValueError(
                    f"{name!r} must have one shape in `model` and `ema_model`, got {tuple(tensor.shape)} and "
                    f"{tuple(averages[name].shape)}. Average models of the same structure."
                )
            pairs.add(averages[name], tensor)
        return pairs

    def add(self, average: torch.Tensor, value: torch.Tensor) -> None:
        """Add a pair."""
        average, value = local_part(average), local_part(value)
        key = (average.device, average.dtype, value.device, value.dtype)
        averages, values = self._groups.setdefault(key, ([], []))
        averages.append(average)
        values.append(value)

    def update(self, smoothing: float) -> None:
        """`average <- smoothing * average + (1 - smoothing) * value`; what is not floating is copied."""
        for (device, dtype, *its), (averages, values) in self._groups.items():
            if its != [device, dtype]:
                values = [value.to(device, dtype) for value in values]
            if dtype.is_floating_point or dtype.is_complex:
                torch._foreach_lerp_(averages, values, 1 - smoothing)
            else:
                torch._foreach_copy_(averages, values)

    def exchange(self) -> None:
        """Exchange averages and values, which are of one dtype."""
        for averages, values in self._groups.values():
            for start in range(0, len(averages), _SLICE):
                ours, theirs = averages[start : start + _SLICE], values[start : start + _SLICE]
                kept = [value.clone() for value in theirs]
                torch._foreach_copy_(theirs, ours)
                torch._foreach_copy_(ours, kept)


class Links:
    """Which tensors of a model belong to which averages.

    Attributes:
        exact: Averages of the dtype of the model's tensors.
        rounded: Averages of more precision than that.
        rounded_at: Where those are stored, and for which tensor.
        frozen: Parameters without an average, by name: averaged from when they require gradients.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.exact, self.rounded = Pairs(), Pairs()
        self.rounded_at: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
        self.frozen: dict[str, torch.Tensor] = {}
        self._model = model
        # Everything the model holds, and where: to notice later, at little cost, that some of it was replaced.
        entries = [
            (held, key, value)
            for module in model.modules()
            for held in (module._modules, module._parameters, module._buffers)
            for key, value in held.items()
        ]
        self._holders: list[Any] = [holder for holder, _, _ in entries]
        self._keys, self._values = [key for _, key, _ in entries], [value for _, _, value in entries]

    def are_current(self, model: torch.nn.Module) -> bool:
        """Whether this is that model, and holds what it held."""
        try:
            return model is self._model and all(map(is_, map(getitem, self._holders, self._keys), self._values))
        except KeyError:
            return False
