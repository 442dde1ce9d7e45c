"""`Distillation` at its events, with classifiers and language models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.distillation import Distillation, compute_distillation_loss
from composer.core import WEIGHS_LOSS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleConvModel, train_by_hand

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0])


class Metrics(LoggerDestination):
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.values |= metrics


def at_backward(algorithm: Distillation, outputs: Any, batch: Any, loss: Any, metrics: Metrics | None = None) -> State:
    state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    state.outputs, state.batch, state.loss = outputs, batch, loss
    engine = Engine(state, Logger(state, metrics))
    engine.run_event(Event.FIT_START)
    engine.run_event(Event.BEFORE_BACKWARD)
    return state


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_losses_are_combined(weight: float) -> None:
    teacher, outputs = SimpleConvModel(seed=5), torch.randn(4, 2)
    metrics = Metrics()
    state = at_backward(Distillation(teacher, weight, temperature=3.0), outputs, (X, Y), torch.tensor(2.0), metrics)

    term = compute_distillation_loss(outputs, teacher.eval()((X, Y)), 3.0)
    torch.testing.assert_close(state.loss, (1 - weight) * 2.0 + weight * term.detach())
    torch.testing.assert_close(metrics.values["distillation/loss"], term.detach())


def test_every_form_of_loss_keeps_its_form() -> None:
    algorithm, outputs, one = Distillation(SimpleConvModel(seed=5)), torch.randn(4, 2), torch.tensor(1.0)
    term = 0.5 * compute_distillation_loss(outputs, algorithm.teacher((X, Y))).detach()

    assert at_backward(algorithm, outputs, (X, Y), (one, one)).loss == (0.5, 0.5, term)
    assert at_backward(algorithm, outputs, (X, Y), {"a": one}).loss == {"a": 0.5, "distillation": term}
    assert at_backward(algorithm, outputs, (X, Y), {"total": one, "a": one}).loss == {"total": 0.5 + term, "a": 1.0}


def test_a_plain_module_is_called_with_the_inputs() -> None:
    teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))
    teacher(X)
    outputs = torch.randn(4, 2)
    batch = {"image": X, "labels": Y}
    state = at_backward(Distillation(teacher, 1.0, input_key="image"), outputs, batch, torch.tensor(2.0))

    torch.testing.assert_close(state.loss, compute_distillation_loss(outputs, teacher(X)).detach())


class Teacher(torch.nn.Module):
    """Logits of a language model."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.logits}


@pytest.mark.parametrize("shift", [False, True])
def test_tokens_without_a_label_do_not_count(shift: bool) -> None:
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    labels = torch.tensor([[3, 1, 2, -100, -100], [1, -100, 4, 5, -100]])
    algorithm = Distillation(Teacher(teacher), 1.0, input_key="input_ids", shift_labels=shift)
    state = at_backward(algorithm, {"logits": student}, {"input_ids": labels, "labels": labels}, torch.tensor(0.0))

    counts = labels != -100
    if shift:
        student, teacher, counts = student[:, :-1], teacher[:, :-1], counts[:, 1:]
    torch.testing.assert_close(state.loss, compute_distillation_loss(student[counts], teacher[counts]))


class Mixes(Algorithm):
    """Changes the inputs, as MixUp does."""

    events = frozenset({Event.BEFORE_FORWARD})
    placement = Placement(provides={"transforms_batch"})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch = (state.batch[0] + 1, state.batch[1])


def test_the_teacher_sees_the_transformed_batch_and_is_neither_trained_nor_saved() -> None:
    seen: list[torch.Tensor] = []
    teacher = SimpleConvModel(seed=5, norm="batch")
    teacher.train()
    algorithm = Distillation(teacher)
    teacher.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    model = SimpleConvModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(
        model=model, max_duration="1ep", dataloader=[0], optimizers=optimizer, algorithms=[algorithm, Mixes()]
    )
    train_by_hand(state, [(X, Y)] * 2)

    assert [True, True] == [torch.equal(X + 1, inputs) for inputs in seen]
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert {"repr"} == algorithm.state_dict().keys()
    assert {WEIGHS_LOSS} == algorithm.placement.provides


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"teacher": "resnet"}, TypeError, "`teacher` must be a `torch.nn.Module`, got 'resnet'"),
        ({"weight": 1.5}, ValueError, r"`weight` must be in \[0, 1\], got 1.5"),
        ({"temperature": 0}, ValueError, "`temperature` must be positive, got 0"),
        ({"shift_labels": "yes"}, TypeError, "`shift_labels`"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Distillation(**{"teacher": torch.nn.Linear(1, 1), **arguments})


def test_logits_without_tokens_cannot_be_shifted() -> None:
    algorithm = Distillation(SimpleConvModel(), shift_labels=True)
    message = r"`shift_labels` must be False for logits without a dimension of tokens, got True .* \(4, 2\)"
    with pytest.raises(ValueError, match=message):
        at_backward(algorithm, torch.randn(4, 2), (X, Y), torch.tensor(0.0))


def test_a_teacher_of_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="The teacher needs the same classes in the same order"):
        at_backward(Distillation(SimpleConvModel(num_classes=3)), torch.randn(4, 2), (X, Y), torch.tensor(0.0))


def test_a_teacher_in_training_mode_predicts_as_in_evaluation() -> None:
    teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(3 * 16 * 16), torch.nn.Linear(768, 2))
    algorithm = Distillation(teacher, weight=1.0)
    expected, mean = compute_distillation_loss(torch.ones(4, 2), teacher(X)), teacher[1].running_mean.clone()
    teacher.train()

    state = at_backward(algorithm, torch.ones(4, 2), (X, Y), torch.tensor(2.0))

    torch.testing.assert_close(state.loss, expected.detach())
    assert torch.equal(mean, teacher[1].running_mean)
    assert not any(module.training for module in teacher.modules())


def test_a_teacher_that_is_a_part_of_the_model_is_refused() -> None:
    model = SimpleConvModel()
    for teacher in (model, next(model.children())):
        state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=Distillation(teacher))
        with pytest.raises(ValueError, match=r"`teacher` must not share parameters with the model.*copy\.deepcopy"):
            Engine(state, Logger(state)).run_event(Event.FIT_START)
