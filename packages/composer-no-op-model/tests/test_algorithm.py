"""The model that does nothing, and `NoOpModel` with the engine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from composer.algorithms.no_op_model import NoOpModel, NoOpModelClass
from composer.core import (
    CHANGES_LAYERS,
    PRUNES_BATCH,
    REPLACES_MODEL,
    Algorithm,
    ConflictError,
    Engine,
    Evaluator,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.testing import SimpleConvModel, SimpleModel


def start(algorithms: Any, optimizers: Any = (), model: torch.nn.Module | None = None) -> State:
    model = SimpleModel() if model is None else model
    state = State(model=model, max_duration="1ep", optimizers=optimizers, algorithms=algorithms)
    Engine(state).run_event("init")
    return state


@pytest.mark.parametrize("targets", [torch.tensor([0, 3, 2]), torch.rand(2, 3), torch.rand(2, 3, 4).bfloat16()])
def test_it_computes_the_formula(targets: torch.Tensor) -> None:
    model = NoOpModelClass(SimpleModel())
    outputs = model((None, targets))
    loss = model.loss(outputs, (None, targets))
    loss.backward()

    torch.testing.assert_close(1.5 * targets.float(), outputs)
    torch.testing.assert_close((0.5 * targets.float()).square().mean(), loss)
    torch.testing.assert_close(targets.float().square().mean().view(1), model.weights.grad)
    assert targets.shape == model.loss(outputs, (None, targets), reduction="none").shape


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "anything"])
def test_a_batch_may_be_a_mapping(name: str) -> None:
    model, targets = NoOpModelClass(SimpleModel()), torch.tensor([0, 3, 2])
    batch = {name: targets, "input_ids": torch.zeros(3, 5)}
    if name == "anything":  # then the last one is taken
        batch["anything"] = batch.pop("anything")

    assert torch.equal(1.5 * targets, model(batch))
    assert torch.equal(targets, model.eval_forward(batch))


def test_it_learns_that_the_parameter_is_1() -> None:
    model = NoOpModelClass(SimpleModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = None, torch.ones(4)
    for _ in range(50):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()

    torch.testing.assert_close(torch.ones(1), model.weights.detach())


def test_evaluation_returns_the_targets_with_an_accuracy_of_1() -> None:
    model, batch = NoOpModelClass(SimpleModel()), (None, torch.tensor([0, 1, 2, 9]))
    metrics = model.get_metrics(is_train=False)
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metrics["BinaryAccuracy"])

    assert ["BinaryAccuracy"] == list(metrics)
    assert torch.equal(batch[1], outputs)
    assert 1 == metrics["BinaryAccuracy"].compute()
    model.update_metric(batch, torch.zeros(4), metrics["BinaryAccuracy"])
    assert 5 / 8 == metrics["BinaryAccuracy"].compute()


def test_the_device_and_the_number_of_classes_come_from_the_original() -> None:
    with torch.device("meta"):
        original = torch.nn.Linear(2, 2)
    assert "meta" == NoOpModelClass(original).weights.device.type
    assert not hasattr(NoOpModelClass(original), "num_classes")
    assert 7 == NoOpModelClass(SimpleModel(num_classes=7)).num_classes


def test_a_model_without_parameters_has_no_device() -> None:
    with pytest.raises(ValueError, match=r"`original_model` must have parameters, .* got ReLU without any"):
        NoOpModelClass(torch.nn.ReLU())


def test_the_optimizer_trains_the_new_parameter_only() -> None:
    model = SimpleModel()
    groups = [{"params": model.fc1.parameters(), "lr": 0.5}, {"params": model.fc2.parameters()}]
    first, second = torch.optim.SGD(groups, momentum=0.9), torch.optim.SGD(model.parameters(), lr=0.1)
    model((torch.ones(1, 1, 1, 1), None)).sum().backward()
    first.step()
    state = start(NoOpModel(), [first, second], model)

    assert isinstance(state.model, NoOpModelClass)
    assert [id(state.model.weights)] == [id(p) for p in first.param_groups[0]["params"]]
    assert [[], []] == [first.param_groups[1]["params"], second.param_groups[0]["params"]]
    assert not first.state
    assert 0.5 == first.param_groups[0]["lr"]
    batch = None, torch.ones(3)
    state.model.loss(state.model(batch), batch).backward()
    state.optimizers.step()
    assert state.model.weights.item() < 1.5


def test_no_optimizer_is_needed() -> None:
    assert isinstance(start(NoOpModel()).model, NoOpModelClass)


def test_applying_it_twice_is_applying_it_once() -> None:
    state = start(NoOpModel())
    model = state.model
    Engine(state).run_event("init")

    assert model is state.model


class Surgery(Algorithm):
    """A method that changes layers."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={CHANGES_LAYERS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = type(state.model)


@pytest.mark.parametrize("reverse", [False, True])
def test_other_methods_change_the_original_whatever_the_order_of_the_list(reverse: bool) -> None:
    surgery = Surgery()
    algorithms: list[Algorithm] = [NoOpModel(), surgery]
    state = start(algorithms[::-1] if reverse else algorithms, model=SimpleConvModel())

    assert SimpleConvModel is surgery.seen
    assert isinstance(state.model, NoOpModelClass)


def test_methods_that_need_the_model_are_refused() -> None:
    class Prunes(Surgery):
        placement = Placement(provides={PRUNES_BATCH}, excludes={REPLACES_MODEL})

    with pytest.raises(ConflictError, match="NoOpModel"):
        start([NoOpModel(), Prunes()])


def test_a_checkpoint_needs_it_before_loading() -> None:
    assert NoOpModel.required_on_load()
    expected = start(NoOpModel())
    expected.model.weights.data.fill_(3)  # type: ignore[operator,union-attr]
    resumed = start(NoOpModel())
    resumed.load_state_dict(expected.state_dict(), strict=True)

    assert 3 == resumed.model.weights
    assert "NoOpModel()" == expected.algorithms[0].state_dict()["repr"]


@pytest.mark.parametrize("listed", [True, False])
def test_a_checkpoint_in_a_custom_loop_restores_the_metrics_of_the_replacement(
    listed: bool,
) -> None:
    def measured(algorithms: Any, num_batches: int) -> State:
        state = start(algorithms)
        state.save_metrics = True
        state.evaluators = Evaluator(label="test", dataloader=[torch.zeros(1)])
        state.train_metrics = state.model.get_metrics(is_train=True)  # type: ignore[operator,union-attr]
        state.eval_metrics = {"test": state.model.get_metrics(is_train=False)}  # type: ignore[operator,union-attr]
        for _ in range(num_batches):
            for metrics in (state.train_metrics, state.eval_metrics["test"]):
                for metric in metrics.values():
                    metric.update(torch.tensor([1, 0, 1]), torch.ones(3, dtype=torch.int64))
        return state

    expected = measured(NoOpModel(), 2)
    resumed = measured(NoOpModel() if listed else None, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(expected.state_dict())

    assert [] == [str(warning.message) for warning in caught if "metric" in str(warning.message)]
    for metrics in (resumed.train_metrics, resumed.eval_metrics["test"]):
        assert 2 / 3 == pytest.approx(float(metrics["BinaryAccuracy"].compute()))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((1, 2, 3), "`batch` must be a pair of inputs and targets for `NoOpModel`, got a tuple of 3 parts"),
        ((torch.zeros(2, 3), [1, 2]), "one tensor .* got list"),
        ({"image": torch.zeros(2, 3), "labels": ["a", "b"]}, "one tensor .* got list"),
        (torch.zeros(2, 3), "a pair of inputs and targets for `NoOpModel`, got Tensor"),
        ({}, "one tensor .* got NoneType"),
    ],
)
def test_batches_without_a_tensor_of_targets_are_refused(batch: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        NoOpModelClass(SimpleModel())(batch)
