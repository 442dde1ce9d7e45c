"""`apply_squeeze_excite` and `SqueezeExcite` on models, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.squeeze_excite import (
    SqueezeExcite,
    SqueezeExciteConv2d,
    apply_se,
    apply_squeeze_excite,
    squeeze_excite,
    squeeze_excite_layers,
)
from composer.algorithms.warnings import NoEffectWarning
from composer.core import REPLACES_BLOCKS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import ConvModel, SimpleConvModel
from composer.utils.module_surgery import count_module_instances


class Records(LoggerDestination):
    """Logger that stores the hyperparameters of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(hyperparameters)


def start(model: nn.Module, *algorithms: Algorithm) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithms, callbacks=Records())
    Engine(state).run_event("init")
    return state


def test_the_registered_functions_are_these() -> None:
    assert apply_squeeze_excite is cf.apply_squeeze_excite
    assert apply_se is cf.apply_se


def test_the_layers_are_next_to_the_function_too() -> None:
    assert squeeze_excite.SqueezeExcite2d is squeeze_excite_layers.SqueezeExcite2d
    assert squeeze_excite.SqueezeExciteConv2d is SqueezeExciteConv2d


def test_every_convolution_of_enough_channels_is_wrapped_at_init() -> None:
    """The second has few input channels, and the first few output channels."""
    model = ConvModel()
    conv3 = model.conv3
    state = start(model, SqueezeExcite(latent_channels=5, min_channels=16))

    assert [nn.Conv2d, nn.Conv2d] == [type(model.conv1), type(model.conv2)]
    assert isinstance(model.conv3, SqueezeExciteConv2d)
    assert model.conv3 is model.module[2]
    assert model.conv3.conv is conv3
    assert (5, 64) == model.conv3.se.pool_and_mlp[2].weight.shape  # type: ignore[union-attr]
    assert [{"squeeze_excite/num_squeeze_excite_layers": 1}] == state.callbacks[0].calls  # type: ignore[attr-defined]


def test_outputs_keep_their_shape_and_training_works() -> None:
    model, x = SimpleConvModel(), torch.randn(2, 3, 16, 16)
    expected = model((x, None)).shape
    state = start(model, SqueezeExcite(min_channels=3))
    outputs = model((x, None))
    outputs.sum().backward()

    assert 2 == count_module_instances(model, SqueezeExciteConv2d)
    assert expected == outputs.shape
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert {id(p) for p in model.parameters()} == {id(p) for p in state.optimizers[0].param_groups[0]["params"]}


def test_the_optimizer_keeps_the_state_of_the_convolution() -> None:
    model = ConvModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model((torch.randn(4, 32, 8, 8), None)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.conv3.weight]
    apply_squeeze_excite(model, min_channels=32, optimizers=optimizer)

    assert isinstance(model.conv3, SqueezeExciteConv2d)
    assert optimizer.state[model.conv3.conv.weight] is momentum


def test_the_earlier_name_does_the_same() -> None:
    models = ConvModel(), ConvModel()
    apply_squeeze_excite(models[0], 0.25, 8)
    apply_se(models[1], 0.25, 8)

    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in models]
    assert shapes[0] == shapes[1]


def test_applying_it_twice_is_the_same_as_once() -> None:
    model = ConvModel()
    apply_squeeze_excite(model, min_channels=8)
    once = [(name, type(module)) for name, module in model.named_modules()]
    apply_squeeze_excite(model, min_channels=8)

    assert once == [(name, type(module)) for name, module in model.named_modules()]


def test_a_convolution_that_another_method_put_inside_is_not_wrapped_again() -> None:
    """As when a method that replaces convolutions came next, and both are applied in a second run."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3))
    apply_squeeze_excite(model, min_channels=16)
    model[0].conv = nn.Sequential(nn.Conv2d(16, 16, 3))
    apply_squeeze_excite(model, min_channels=16)

    assert isinstance(model[0].conv[0], nn.Conv2d)
    assert 1 == count_module_instances(model, SqueezeExciteConv2d)


def test_training_and_evaluation_mode_are_kept() -> None:
    model = ConvModel().eval()
    apply_squeeze_excite(model, min_channels=8)

    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Conv2d(128, 128, 1), nn.Sequential(nn.Conv2d(128, 127, 1))])
def test_a_model_with_nothing_to_wrap_raises_a_warning(model: nn.Module) -> None:
    """A convolution that is the model itself has no place where its wrapper could go."""
    with pytest.warns(NoEffectWarning, match=r"`apply_squeeze_excite` had no effect.*at least 128 input and output"):
        apply_squeeze_excite(model)


def test_a_latent_width_that_is_not_positive_is_refused_before_anything_changes() -> None:
    with pytest.raises(ValueError, match=r"`latent_channels` must be positive, got 0"):
        SqueezeExcite(latent_channels=0)
    with pytest.raises(ValueError, match=r"`latent_channels` must be positive, got -1"):
        apply_squeeze_excite(nn.Linear(2, 2), latent_channels=-1)


def test_a_checkpoint_needs_it_before_loading() -> None:
    assert SqueezeExcite.required_on_load()


class BringsConvs(Algorithm):
    """A method that puts new blocks into the model."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_BLOCKS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.model.conv1 = nn.Conv2d(32, 8, 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_new_convolutions_are_wrapped_whatever_the_order_of_the_list(reverse: bool) -> None:
    model, algorithms = ConvModel(), [BringsConvs(), SqueezeExcite(min_channels=8)]
    start(model, *(reversed(algorithms) if reverse else algorithms))

    assert isinstance(model.conv1, SqueezeExciteConv2d)


def test_networks_that_read_the_weight_of_a_convolution_find_it() -> None:
    conv = nn.Conv2d(8, 8, 3)

    assert conv.weight is SqueezeExciteConv2d(conv=conv).weight


class PartialConv(nn.Conv2d):
    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input if mask is None else input * mask)


class PassingOn(nn.Conv2d):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


def test_a_convolution_that_takes_a_mask_stays() -> None:
    model = nn.ModuleList([PartialConv(16, 16, 3, 2), PassingOn(16, 16, 3, 2)])
    partial = model[0]
    with pytest.warns(UserWarning, match=r"`0` \(PartialConv\): its `forward` takes more than the input"):
        apply_squeeze_excite(model, latent_channels=4, min_channels=16)

    assert partial is model[0]
    assert not isinstance(model[1], PassingOn)
