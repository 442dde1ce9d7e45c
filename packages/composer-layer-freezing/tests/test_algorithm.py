"""`LayerFreezing` in runs of several epochs, with the engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, State
from composer.loggers import LoggerDestination
from composer.testing import SimpleConvModel, deep_compare, run_on_ranks


class Records(LoggerDestination):
    """Logger that stores the metrics of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(metrics)


def start(algorithm: LayerFreezing, max_duration: str = "4ep") -> tuple[State, Engine]:
    torch.manual_seed(0)
    model = SimpleConvModel()
    state = State(
        model=model,
        max_duration=max_duration,
        dataloader=[0],
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        algorithms=algorithm,
        callbacks=Records(),
    )
    engine = Engine(state)
    engine.run_event("init")
    return state, engine


def train(state: State, engine: Engine, epochs: int) -> None:
    model = getattr(state.model, "module", state.model) if state.is_model_ddp else state.model
    for _ in range(epochs):
        generator = torch.Generator().manual_seed(int(state.timestamp.epoch))
        batch = torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 0, 1])
        state.optimizers.zero_grad()
        model.loss(state.model(batch), batch).backward()  # type: ignore[operator,union-attr]
        state.optimizers.step()
        state.timestamp = state.timestamp.to_next_batch().to_next_epoch()
        engine.run_event("epoch_end")


def trained(state: State) -> list[str]:
    return [name for name, parameter in state.model.named_parameters() if parameter.requires_grad]


def test_layers_are_frozen_at_the_ends_of_epochs() -> None:
    state, engine = start(LayerFreezing(freeze_start=0.25))
    counts = []
    for _ in range(4):
        train(state, engine, 1)
        counts.append(len(trained(state)))

    assert counts == [8, 6, 4, 2]
    assert [p.requires_grad for p in state.model.module[-1].parameters()] == [True, True]  # type: ignore[union-attr,index]
    assert [0, 1, 2, 3] == [c["layer_freezing/layers_frozen"] for c in state.callbacks[0].calls]  # type: ignore[attr-defined]
    fractions = [c["layer_freezing/percentage_frozen"] for c in state.callbacks[0].calls]  # type: ignore[attr-defined]
    assert fractions == [0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1]


def test_a_run_can_be_extended() -> None:
    state, engine = start(LayerFreezing(freeze_start=0.25))
    train(state, engine, 4)
    before = copy.deepcopy(state.model.state_dict())
    state.max_duration = "20ep"
    train(state, engine, 1)

    changed = [name for name, value in state.model.state_dict().items() if not torch.equal(before[name], value)]
    assert set(trained(state)) <= set(changed)
    assert 2 == len(trained(state))
    assert 3 == state.callbacks[0].calls[-1]["layer_freezing/layers_frozen"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_resuming_after_any_epoch_is_exact(at: int) -> None:
    expected, engine = start(LayerFreezing(freeze_start=0.25), "5ep")
    train(expected, engine, 5)

    begun, engine = start(LayerFreezing(freeze_start=0.25), "5ep")
    train(begun, engine, at)
    saved = copy.deepcopy(begun.state_dict())
    resumed, engine = start(LayerFreezing(freeze_start=0.25), "5ep")
    resumed.load_state_dict(saved)
    assert trained(begun) == trained(resumed)
    train(resumed, engine, 5 - at)

    deep_compare(expected.model.state_dict(), resumed.model.state_dict())
    deep_compare(expected.optimizers[0].state_dict(), resumed.optimizers[0].state_dict())
    deep_compare(expected.algorithms[0].state_dict(), resumed.algorithms[0].state_dict())


def test_layers_of_a_run_loaded_before_init_are_frozen_at_init() -> None:
    algorithm = LayerFreezing()
    algorithm.load_state_dict({"repr": "", "layers_frozen": 2})
    state, _ = start(algorithm)

    assert 4 == len(trained(state))


def test_an_object_of_a_run_that_ended_freezes_nothing_at_the_start_of_another() -> None:
    algorithm = LayerFreezing(freeze_start=0.0)
    train(*start(algorithm), epochs=4)
    first, _ = start(LayerFreezing(freeze_start=0.0))
    state, _ = start(algorithm)

    assert trained(state) == trained(first)


def test_a_state_without_the_number_of_layers_freezes_none() -> None:
    algorithm = LayerFreezing()
    algorithm.load_state_dict({})

    assert 0 == algorithm.layers_frozen


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_belongs_to_no_run(copied: Any) -> None:
    algorithm = LayerFreezing()
    state, _ = start(algorithm)
    copied(algorithm).load_state_dict({"layers_frozen": 3})

    assert 8 == len(trained(state))


def test_a_model_of_one_layer_raises_a_warning() -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", algorithms=LayerFreezing())
    with pytest.warns(NoEffectWarning, match=r"`LayerFreezing` will have no effect: the model has 1 layer"):
        Engine(state).run_event("init")


@pytest.mark.parametrize("name", ["freeze_start", "freeze_level"])
def test_a_fraction_outside_its_range_is_refused_at_construction(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must be in \[0, 1\], got 2"):
        LayerFreezing(**{name: 2})


def train_on_rank() -> dict[str, torch.Tensor]:
    state, engine = start(LayerFreezing(freeze_start=0.25))
    unused = state.algorithms[0].find_unused_parameters
    state.model = torch.nn.parallel.DistributedDataParallel(state.model, find_unused_parameters=unused)
    train(state, engine, 6)
    return {name: parameter.detach() for name, parameter in state.model.module.named_parameters()}


def test_wrapped_models_continue_training() -> None:
    """Ranks get the same batches, so they do what one process does."""
    state, engine = start(LayerFreezing(freeze_start=0.25))
    train(state, engine, 6)
    expected = {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    for weights in run_on_ranks(train_on_rank, 2):
        deep_compare(expected, weights, atol=1e-6, rtol=1e-6)
