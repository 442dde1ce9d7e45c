"""`LabelSmoothing` at its events, with the engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer.algorithms import label_smoothing
from composer.algorithms.label_smoothing import LabelSmoothing, smooth_labels
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import (
    INTERPOLATES_LOSS,
    MIXES_TARGETS,
    TRANSFORMS_BATCH,
    Algorithm,
    Engine,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.loop import HostedRun
from composer.loss import binary_cross_entropy_with_logits, soft_cross_entropy
from composer.loss.utils import loss_setting
from composer.models.module_with_loss import ModuleWithLoss
from composer.testing import SimpleModel, train_by_hand


def prepare(*algorithms: Algorithm, batch: Any, outputs: Any) -> tuple[State, Engine]:
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[0], algorithms=algorithms)
    state.batch, state.outputs = batch, outputs
    return state, Engine(state)


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)


def test_the_function_is_reached_through_the_package() -> None:
    assert smooth_labels is label_smoothing.smooth_labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(8, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("dense", [False, True])
def test_targets_are_smoothed_before_the_loss_and_restored_after_it(
    smoothing: float, shape: tuple[int, ...], dense: bool
) -> None:
    labels = torch.randint(0, 3, shape[:1] + shape[2:])
    target = F.one_hot(labels, 3).movedim(-1, 1).float() if dense else labels
    algorithm = LabelSmoothing(smoothing)
    state, engine = prepare(algorithm, batch=(torch.zeros(1), target), outputs=torch.randn(shape))

    engine.run_event("before_loss")
    torch.testing.assert_close(
        (1 - smoothing) * F.one_hot(labels, 3).movedim(-1, 1) + smoothing / 3, state.batch_get_item(1)
    )
    assert target is algorithm.original_labels

    engine.run_event("after_loss")
    assert target is state.batch_get_item(1)
    assert algorithm.original_labels is None


def test_targets_of_other_batches_are_found_by_key() -> None:
    batch = {"image": torch.zeros(4, 2), "label": torch.arange(4)}
    state, engine = prepare(LabelSmoothing(0.2, target_key="label"), batch=batch, outputs=torch.zeros(4, 4))
    engine.run_event("before_loss")

    torch.testing.assert_close(0.8 * torch.eye(4) + 0.05, state.batch["label"])


def test_the_training_loss_is_torchs_smoothed_cross_entropy() -> None:
    x, y = draw_batch()
    state, engine = prepare(LabelSmoothing(0.3), batch=(x, y), outputs=None)
    state.outputs = state.model((x, y))
    engine.run_event("before_loss")
    loss = state.model.loss(state.outputs, state.batch)  # type: ignore[operator]

    torch.testing.assert_close(F.cross_entropy(state.outputs, y, label_smoothing=0.3), loss)


def test_it_trains_like_a_loop_with_torchs_smoothed_cross_entropy() -> None:
    """Even at `smoothing=1`, with uniform targets only."""
    batches = [draw_batch()] * 3
    expected, actual = SimpleModel(), SimpleModel()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(expected(batch), batch[1], label_smoothing=1.0).backward()
        optimizer.step()
    optimizer = torch.optim.SGD(actual.parameters(), lr=0.1)
    state = State(model=actual, max_duration="3ba", dataloader=batches, optimizers=optimizer)
    state.algorithms.append(LabelSmoothing(1.0))
    train_by_hand(state, batches)

    for parameter, reference in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(reference, parameter)


class Mixing(Algorithm):
    """A method that mixes targets: each example with its neighbour, half and half."""

    events = frozenset({Event.BEFORE_LOSS})
    placement = Placement(provides={TRANSFORMS_BATCH, MIXES_TARGETS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        labels = state.batch_get_item(1)
        dense = F.one_hot(labels, 4).float() if labels.ndim == 1 else labels
        state.batch_set_item(1, (dense + dense.roll(1, dims=0)) / 2)


@pytest.mark.parametrize("reverse", [False, True])
def test_mixed_targets_are_smoothed_in_any_order_of_the_list(reverse: bool) -> None:
    algorithms: list[Algorithm] = [Mixing(), LabelSmoothing(0.2)]
    labels = torch.tensor([3, 0, 1])
    mixed = (F.one_hot(labels, 4) + F.one_hot(labels.roll(1), 4)) / 2
    batch = (torch.zeros(3), labels)
    state, engine = prepare(*(reversed(algorithms) if reverse else algorithms), batch=batch, outputs=torch.zeros(3, 4))

    engine.run_event("before_loss")
    torch.testing.assert_close(0.8 * mixed + 0.05, state.batch_get_item(1))
    engine.run_event("after_loss")
    torch.testing.assert_close(mixed, state.batch_get_item(1))


class SecondLoss(Algorithm):
    """A method that adds a loss against the neighbours' targets, in the form the loss has just seen."""

    events = frozenset({Event.AFTER_LOSS})
    placement = Placement(provides={INTERPOLATES_LOSS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.target = state.batch_get_item(1).roll(1, dims=0)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_second_loss_can_be_taken_against_smoothed_targets(reverse: bool) -> None:
    second = SecondLoss()
    algorithms: list[Algorithm] = [second, LabelSmoothing(0.2)]
    labels = torch.tensor([3, 0, 1])
    batch = (torch.zeros(3), labels)
    state, engine = prepare(*(reversed(algorithms) if reverse else algorithms), batch=batch, outputs=torch.zeros(3, 4))
    engine.run_event("before_loss")
    engine.run_event("after_loss")

    torch.testing.assert_close(smooth_labels(state.outputs, labels.roll(1), 0.2), second.target)
    assert labels is state.batch_get_item(1)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_a_smoothing_outside_its_range_is_refused_at_construction(smoothing: float) -> None:
    with pytest.raises(ValueError, match=rf"`smoothing` must be in \[0, 1\], got {smoothing}"):
        LabelSmoothing(smoothing)


def test_outputs_and_targets_must_be_tensors() -> None:
    batch = (torch.zeros(2), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"the outputs, which must be one tensor.*got dict"):
        prepare(LabelSmoothing(), batch=batch, outputs={})[1].run_event("before_loss")
    with pytest.raises(
        TypeError, match=r"`target_key` must be the position of a tensor of the batch, got 1, which is a list"
    ):
        prepare(LabelSmoothing(), batch=(batch[0], [0, 1]), outputs=torch.zeros(2, 3))[1].run_event("before_loss")


def test_smoothing_twice_is_refused() -> None:
    state = State(model=SimpleModel(), rank_zero_seed=0, algorithms=[LabelSmoothing(), LabelSmoothing()])
    with pytest.raises(ValueError, match="`LabelSmoothing` is given twice"):
        Engine(state, Logger(state)).run_event(Event.INIT)


LOSSES = [
    (F.cross_entropy, -100),
    (torch.nn.CrossEntropyLoss(ignore_index=255), 255),
    (functools.partial(soft_cross_entropy, ignore_index=-1), -1),
    (functools.partial(F.cross_entropy, ignore_index=0, reduction="sum"), 0),
    (lambda outputs, targets: F.cross_entropy(outputs, targets.clone()), -100),  # hides what it calls
]


def smoothed_loss(loss: Any, outputs: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.3) -> torch.Tensor:
    """Return the loss that a model with a loss gets with `LabelSmoothing`."""
    network = torch.nn.Identity()
    network.weight = torch.nn.Parameter(torch.zeros(3, 4))  # it is not that of the loss
    model = ModuleWithLoss(network, loss)
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=LabelSmoothing(smoothing))
    engine = Engine(state)
    engine.run_event("init")
    state.batch, state.outputs = (torch.zeros(1), labels), outputs
    engine.run_event("before_forward")
    engine.run_event("before_loss")
    result: torch.Tensor = model.loss(outputs, state.batch)
    engine.run_event("after_loss")
    return result


@pytest.mark.parametrize(("loss", "ignored"), LOSSES)
@pytest.mark.parametrize("shape", [(8,), (2, 3, 4)])
def test_loss_and_gradient_are_those_of_torch_also_if_most_labels_are_ignored(
    loss: Any, ignored: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(shape[0], 3, *shape[1:], dtype=torch.float64, requires_grad=True)
    labels = torch.randint(1, 3, shape)
    labels.flatten()[2:] = ignored
    options = {"reduction": loss_setting(loss, "reduction") or "mean", "weight": loss_setting(loss, "weight")}
    expected = F.cross_entropy(outputs, labels, label_smoothing=0.3, ignore_index=ignored, **options)
    actual = smoothed_loss(loss, outputs, labels)

    torch.testing.assert_close(expected, actual)
    torch.testing.assert_close(torch.autograd.grad(expected, outputs), torch.autograd.grad(actual, outputs))


def test_a_loop_finds_the_ignored_label_of_its_loss() -> None:
    def loss(outputs: torch.Tensor, batch: Any, ignore_index: int = 2) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch[1], ignore_index=ignore_index)

    torch.manual_seed(0)
    model, inputs, labels = torch.nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 2, 2])
    expected = F.cross_entropy(model(inputs), labels, ignore_index=2, label_smoothing=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = HostedRun(
        model, [LabelSmoothing(0.3)], loss=loss, optimizers=optimizer, dataloader=[(inputs, labels)], max_duration="1ba"
    )
    run.begin_fit()
    batches = run.epoch()
    torch.testing.assert_close(expected, run.loss(next(batches)))


def test_a_batch_without_a_counted_label_has_no_gradient() -> None:
    outputs = torch.randn(4, 3, requires_grad=True)
    loss = smoothed_loss(F.cross_entropy, outputs, torch.full((4,), -100))

    assert (0, 0) == (loss, torch.autograd.grad(loss, outputs)[0].abs().sum())


@pytest.mark.parametrize("loss", [torch.nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("shape", [(4, 5), (4, 1), (4,)])
def test_with_a_binary_loss_each_label_is_smoothed_by_itself(loss: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(shape), torch.randint(2, shape).float()
    expected = F.binary_cross_entropy_with_logits(outputs, torch.where(labels == 1, 0.9, 0.1))

    torch.testing.assert_close(expected, smoothed_loss(loss, outputs, labels, smoothing=0.2))


@pytest.mark.parametrize("loss", [torch.nn.BCEWithLogitsLoss(), binary_cross_entropy_with_logits])
def test_indices_stand_for_exclusive_classes_also_with_a_binary_loss(loss: Any) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(3, 4), torch.tensor([3, 0, 1])
    expected = loss(outputs, 0.8 * torch.eye(4)[labels] + 0.05)

    torch.testing.assert_close(expected, smoothed_loss(loss, outputs, labels, smoothing=0.2))


def test_mixed_indices_stand_for_exclusive_classes_also_with_a_binary_loss() -> None:
    model = ModuleWithLoss(torch.nn.Identity(), torch.nn.BCEWithLogitsLoss())
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=[Mixing(), LabelSmoothing(0.2)])
    engine, labels = Engine(state), torch.tensor([3, 0, 1])
    state.batch, state.outputs = (torch.zeros(3), labels), torch.zeros(3, 4)
    engine.run_event("before_forward")
    engine.run_event("before_loss")
    mixed = (F.one_hot(labels, 4) + F.one_hot(labels.roll(1), 4)) / 2

    torch.testing.assert_close(0.8 * mixed + 0.05, state.batch[1])


def test_a_loss_that_smooths_too_is_reported_at_init() -> None:
    with pytest.warns(NotIntendedUseWarning, match=r"The loss has `label_smoothing=0.1` and smooths the targets"):
        smoothed_loss(torch.nn.CrossEntropyLoss(label_smoothing=0.1), torch.zeros(2, 3), torch.tensor([0, 1]))
