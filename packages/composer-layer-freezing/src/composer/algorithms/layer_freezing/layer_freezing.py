"""The function, then the algorithm. Layers are modules with parameters and without children, in definition order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from composer.algorithms.warnings import warn_no_effect
from composer.core import FREEZES_WEIGHTS, Algorithm, Event, Placement
from composer.utils import check_finite, plain_number
from composer.utils.iter_helpers import ensure_tuple

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def freeze_layers(
    model: torch.nn.Module,
    optimizers: Optimizers,
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the first layers of a model, in place; their number grows with the elapsed time.

    With the elapsed fraction e: `fraction = freeze_level * (e - freeze_start) / (1 - freeze_start)`, or 0 before
    `freeze_start`, and the first `int(fraction * (n - 1))` of n layers are frozen, so never the last one. Their
    parameters no longer require gradients, lose their `grad`, and are removed from the optimizers with their state.

    Args:
        model: The model. A module that is used in several places counts as one layer, and so does a module with
            parametrizations. Parameters shared with a layer that still trains are not frozen, and neither are
            parameters of modules with children, such as position embeddings or the `in_proj_weight` of
            `torch.nn.MultiheadAttention`.
        optimizers: The optimizers of the model.
        current_duration: The elapsed fraction of the run.
        freeze_start: The fraction of the run after which layers are frozen, in [0, 1].
        freeze_level: The fraction of the layers that is frozen at the end, in [0, 1].

    Returns:
        The number of layers that should be frozen now, and the fraction. Layers frozen by an earlier call stay frozen.

    Raises:
        ValueError: `freeze_start` or `freeze_level` is outside [0, 1].

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> freeze_layers(model, optimizer, current_duration=1.0)
        (1, 1.0)
        >>> [parameter.requires_grad for parameter in model.parameters()]
        [False, False, True, True]

    Source: Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers", arXiv:1706.04983; Raghu et
        al., "SVCCA: Singular Vector Canonical Correlation Analysis for Deep Learning Dynamics and Interpretability",
        arXiv:1706.05806, on freeze training.
    Differs: layers are frozen in one step, without a learning rate per layer that decays to zero.
    """
    check_finite("It is a fraction.", freeze_start=freeze_start, freeze_level=freeze_level, least=0, most=1)
    layers = _layers(model)
    fraction = 0.0
    if current_duration > freeze_start:
        fraction = freeze_level * min((current_duration - freeze_start) / max(1 - freeze_start, 1e-9), 1.0)
    count = int(fraction * max(len(layers) - 1, 0))
    _freeze(layers, count, optimizers)
    return count, fraction


class LayerFreezing(Algorithm):
    """Stops training early layers before late ones.

    At EPOCH_END the first layers are frozen according to the elapsed fraction of the run; see `freeze_layers`. Nothing
    changes within an epoch, so microbatches equal one batch.

    **Events** INIT (freezes the layers of a loaded run), EPOCH_END. **Reads** the elapsed duration. **Writes**
    `requires_grad` and gradients of parameters, the groups and states of the optimizers. **Cost** none; saves the
    backward pass of the frozen layers. **Compilation** recompiles after an epoch in which layers were frozen.

    **Logs** `layer_freezing/layers_frozen` and `layer_freezing/percentage_frozen`, the fraction.

    Args:
        freeze_start: The fraction of the run after which layers are frozen, in [0, 1].
        freeze_level: The fraction of the layers that is frozen at the end, in [0, 1].

    Raises:
        ValueError: An argument is outside [0, 1].

    Warns:
        NoEffectWarning: At INIT, if the model has fewer than two layers.

    Example:
        >>> LayerFreezing(freeze_start=0.7)
        LayerFreezing(freeze_start=0.7,freeze_level=1.0)

    Source: Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers", arXiv:1706.04983; Raghu et
        al., "SVCCA: Singular Vector Canonical Correlation Analysis for Deep Learning Dynamics and Interpretability",
        arXiv:1706.05806, on freeze training.
    Differs: layers are frozen in one step, after an epoch. The number of frozen layers is saved, and loading it freezes
        them before the optimizer is loaded, so resuming is exact. A run can be extended: the last layer always trains.
    """

    events = frozenset({Event.INIT, Event.EPOCH_END})
    placement = Placement(provides={FREEZES_WEIGHTS})

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        check_finite("It is a fraction.", freeze_start=freeze_start, freeze_level=freeze_level, least=0, most=1)
        self.freeze_start, self.freeze_level = plain_number(freeze_start), plain_number(freeze_level)
        self.layers_frozen = 0
        self._run: weakref.ref[State] | None = None

    @property
    def find_unused_parameters(self) -> bool:
        """True, because frozen parameters get no gradient."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Freeze layers for the elapsed duration; at INIT, those that a loaded run had frozen."""
        if event is Event.INIT:
            if self._run is not None:  # of another run
                self.layers_frozen = 0
            self._run = weakref.ref(state)
            layers = _layers(state.model)
            if len(layers) < 2:
                warn_no_effect(
                    f"`LayerFreezing` will have no effect: the model has {len(layers)} layer with parameters, and the "
                    f"last one is never frozen."
                )
            _freeze(layers, self.layers_frozen, state.optimizers)
            return
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None, "the engine requires `max_duration` at this event"
        count, fraction = freeze_layers(
            state.model, state.optimizers, float(elapsed), self.freeze_start, self.freeze_level
        )
        self.layers_frozen = max(count, self.layers_frozen)  # extending the run reduces the elapsed fraction
        logger.log_metrics(
            {"layer_freezing/layers_frozen": self.layers_frozen, "layer_freezing/percentage_frozen": fraction}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers."""
        return {**super().state_dict(), "layers_frozen": self.layers_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Freeze the layers that were frozen: the optimizer, which is loaded next, must hold the other parameters."""
        self.layers_frozen = state.get("layers_frozen", 0)
        run = None if self._run is None else self._run()
        if run is not None:
            _freeze(_layers(run.model), self.layers_frozen, run.optimizers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}  # a copy belongs to no run


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model, each once. Parametrizations are part of the layer that has them."""
    layers: list[torch.nn.Module] = []
    seen: set[int] = set()
    for module in model.modules():  # parents come before their children
        has_children = len(module._modules) > is_parametrized(module)
        if id(module) not in seen and not has_children and next(module.parameters(), None) is not None:
            layers.append(module)
            seen.update(map(id, module.modules()))
    return layers


def _freeze(layers: Sequence[torch.nn.Module], count: int, optimizers: Optimizers) -> None:
    trained = {id(parameter) for layer in layers[count:] for parameter in layer.parameters()}
    frozen: set[int] = set()
    for layer in layers[:count]:
        for parameter in layer.parameters():
            if id(parameter) not in trained:
                frozen.add(id(parameter))
                parameter.requires_grad_(False)
                parameter.grad = None  # the optimizer will not clear it, but gradient clipping would read it
    for optimizer in ensure_tuple(optimizers):
        for group in optimizer.param_groups:
            remaining = [i for i, parameter in enumerate(group["params"]) if id(parameter) not in frozen]
            for parameter in group["params"]:
                if id(parameter) in frozen:
                    optimizer.state.pop(parameter, None)
            for name in ("params", "param_names"):  # torch stores the names, if there are any, in a second list
                if name in group:
                    group[name] = [group[name][i] for i in remaining]
