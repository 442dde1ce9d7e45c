"""`StochasticDepth` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from composer.algorithms.stochastic_depth import StochasticDepth, apply_stochastic_depth
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, Event, State, Time
from composer.loggers import LoggerDestination
from composer.testing import SimpleModel

TARGET = "ResNetBottleneck"


class Records(LoggerDestination):
    """Logger that stores all metrics."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(metrics)


def started(algorithm: StochasticDepth, model: Any) -> State:
    state = State(
        model=model, max_duration="4ba", dataloader=[0] * 4, algorithms=algorithm, callbacks=Records(), rank_zero_seed=0
    )
    Engine(state).run_event("init")
    return state


def rates(model: nn.Module) -> list[float]:
    return [float(module.drop_rate) for module in model.modules() if isinstance(module, Bottleneck)]


def rates_by_batch(state: State) -> list[list[float]]:
    engine, found = Engine(state), []
    while state.timestamp < "4ba":
        engine.run_event("batch_start")
        found.append(rates(state.model))
        state.timestamp = state.timestamp.to_next_batch()
    return found


@pytest.mark.parametrize("method", ["block", "sample"])
def test_blocks_are_stochastic_after_init(method: str, model: nn.Module) -> None:
    algorithm = StochasticDepth(TARGET, method, 0.3)
    state = started(algorithm, model)

    assert pytest.approx([0.1, 0.2, 0.3]) == rates(model)
    assert 3 == algorithm.num_stochastic_layers
    assert [{"stochastic_depth/num_stochastic_layers": 3}] == state.callbacks[0].calls  # type: ignore[attr-defined]
    assert not algorithm.match(Event.BATCH_START, state)


@pytest.mark.parametrize("warmup", ["2ba", 0.5, "0.5dur", Time.from_timestring("2ba")])
def test_rates_grow_and_reach_their_final_values_when_the_warmup_ends(warmup: Any, model: nn.Module) -> None:
    state = started(StochasticDepth(TARGET, drop_rate=0.4, drop_distribution="uniform", drop_warmup=warmup), model)
    found = [float(batch[0]) for batch in rates_by_batch(state)]
    logged = [call["stochastic_depth/drop_rate"] for call in state.callbacks[0].calls[1:]]  # type: ignore[attr-defined]

    assert pytest.approx([0, 0.2, 0.4, 0.4]) == found
    assert pytest.approx(found) == logged


def test_rates_of_a_warmup_are_distributed_like_the_final_ones(model: nn.Module) -> None:
    state = started(StochasticDepth(TARGET, drop_rate=0.6, drop_warmup="2ba"), model)

    assert pytest.approx([0.1, 0.2, 0.3]) == rates_by_batch(state)[1]
    assert pytest.approx([0.2, 0.4, 0.6]) == rates(model)


def test_a_checkpoint_holds_the_rate_that_was_reached(model: nn.Module) -> None:
    """A resumed run may evaluate, which scales by the rates, before it trains."""
    first = StochasticDepth(TARGET, drop_rate=0.4, drop_distribution="uniform", drop_warmup="4ba")
    state = started(first, model)
    state.timestamp = state.timestamp.to_next_batch()
    Engine(state).run_event("batch_start")
    saved = first.state_dict()

    second = StochasticDepth(TARGET, drop_rate=0.4, drop_distribution="uniform", drop_warmup="4ba")
    started(second, model)
    assert pytest.approx([0.4] * 3) == rates(model)
    second.load_state_dict(saved)
    assert pytest.approx([0.1] * 3) == rates(model)
    second.load_state_dict({"repr": repr(first)})  # by another version
    assert pytest.approx([0.1] * 3) == rates(model)


def test_only_whole_blocks_leave_parameters_unused() -> None:
    assert StochasticDepth(TARGET).find_unused_parameters
    assert not StochasticDepth(TARGET, "sample").find_unused_parameters
    assert StochasticDepth.required_on_load()


def test_a_model_without_blocks_raises_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match=r"`StochasticDepth` had no effect: the model has no ResNetBottleneck"):
        started(StochasticDepth(TARGET), SimpleModel())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"target_layer_name": "Linear"},
            r"`target_layer_name` must be 'ResNetBottleneck' or a class or .*'Linear'",
        ),
        ({"stochastic_method": "layer"}, r"`stochastic_method` must be 'block' or 'sample', got 'layer'"),
        ({"drop_distribution": "normal"}, r"`drop_distribution` must be 'linear' or 'uniform', got 'normal'"),
        ({"drop_rate": 1.1}, r"`drop_rate` must be in \[0, 1\], got 1.1"),
        ({"drop_rate": -0.1}, r"`drop_rate` must be in \[0, 1\], got -0.1"),
    ],
)
def test_unknown_names_are_refused_by_class_and_function(arguments: dict[str, Any], message: str) -> None:
    arguments = {"target_layer_name": TARGET, **arguments}
    with pytest.raises(ValueError, match=message):
        StochasticDepth(**arguments)
    with pytest.raises(ValueError, match=message):
        apply_stochastic_depth(nn.Sequential(), **arguments)


def test_a_warmup_must_be_possible() -> None:
    with pytest.raises(ValueError, match=r"`drop_warmup` must not be negative, got -0.1"):
        StochasticDepth(TARGET, drop_warmup=-0.1)
    with pytest.raises(ValueError, match=r"`drop_warmup` must be 0 with 'sample', got '10ba'"):
        StochasticDepth(TARGET, "sample", drop_warmup="10ba")


def test_training_steps_skip_blocks(model: Any) -> None:
    started(StochasticDepth(TARGET, drop_rate=1.0, drop_distribution="uniform"), model)
    model((torch.randn(2, 3, 16, 16), None)).sum().backward()

    assert all(parameter.grad is None for parameter in model.module[1][1].parameters())
    assert model.conv1.weight.grad is not None
