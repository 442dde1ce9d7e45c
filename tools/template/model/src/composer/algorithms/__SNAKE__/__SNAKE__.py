"""The function, then the class. Symbol: a is the slope below zero."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from composer.algorithms.warnings import NoEffectWarning
from composer.core import CHANGES_LAYERS, REPLACES_BLOCKS, REPLACES_FEEDFORWARD, Algorithm, Event, Placement, State
from composer.loggers import Logger
from composer.utils import module_surgery

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def __FUNCTION__(model: nn.Module, slope: float = 0.25, optimizers: Optimizers | None = None) -> None:
    """Replace the ReLUs of a model by PReLUs, whose slope below zero is trained, in place.

    `f(x) = x` for positive x, else `a * x`.

    Args:
        model: The model. A ReLU that is the model itself is not replaced.
        slope: The initial value of a, in [0, 1].
        optimizers: The optimizer of the model; the new parameters are added to it. Needed unless it is made afterwards.

    Raises:
        ValueError: `slope` is outside [0, 1].

    Warns:
        NoEffectWarning: The model has no ReLU to replace.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> __FUNCTION__(model)
        >>> model
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): PReLU(num_parameters=1)
        )

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """
    _check_slope(slope)
    like = next(model.parameters(), torch.empty(0))

    def prelu(module: nn.Module, index: int) -> nn.Module:
        return nn.PReLU(init=slope, device=like.device, dtype=like.dtype)

    if not module_surgery.replace_module_classes(model, {nn.ReLU: prelu}, optimizers=optimizers):
        warnings.warn(
            "`__FUNCTION__` changed nothing: the model has no `ReLU` module.", NoEffectWarning, stacklevel=2
        )


class __CLASS__(Algorithm):
    """Trains the slopes of the activations.

    At INIT the ReLUs of the model are replaced; see `__FUNCTION__`.
    The layers work on examples one by one, so microbatches equal one batch.

    **Compilation** static: no shape depends on time or data.

    Args:
        slope: The initial slope below zero, in [0, 1].

    Raises:
        ValueError: `slope` is outside [0, 1].

    Example:
        >>> __CLASS__(slope=0.1)
        __CLASS__(slope=0.1)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """

    events = frozenset({Event.INIT})
    # After the methods that bring layers with ReLUs of their own.
    placement = Placement(provides={CHANGES_LAYERS}, after={REPLACES_BLOCKS, REPLACES_FEEDFORWARD})

    def __init__(self, slope: float = 0.25) -> None:
        _check_slope(slope)
        self.slope = slope

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a saved model has parameters that the model does not have without this algorithm."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the ReLUs and log how many there were."""
        __FUNCTION__(state.model, self.slope, state.optimizers)
        count = module_surgery.count_module_instances(state.model, nn.PReLU)
        logger.log_hyperparameters({"__SNAKE__/num_layers": count})


def _check_slope(slope: float) -> None:
    if not 0 <= slope <= 1:
        raise ValueError(f"`slope` must be in [0, 1], got {slope!r}. 0 starts with a ReLU, 1 with the identity.")
