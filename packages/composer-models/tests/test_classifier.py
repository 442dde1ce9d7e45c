from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import composer.models
from composer.loss import soft_cross_entropy
from composer.metrics import CrossEntropy
from composer.models.base import ComposerModel
from composer.models.tasks import ComposerClassifier
from composer.models.tasks.classification import ComposerClassifier as DefinedClassifier


def one_hot(targets, num_classes=3):
    return nn.functional.one_hot(targets, num_classes).movedim(-1, 1).float()


def with_own_classes(num_classes):
    module = nn.Linear(4, 3)
    module.num_classes = num_classes
    return module


def test_it_is_one_class_under_all_its_paths():
    assert ComposerClassifier is DefinedClassifier is composer.models.ComposerClassifier


def test_it_is_a_composer_model(model):
    assert isinstance(model, ComposerModel)
    assert model.logger is None


# --- number of classes ------------------------------------------------------------------------------------------------


def test_the_number_of_classes_is_taken_as_given(module):
    assert 3 == ComposerClassifier(module, 3).num_classes


def test_the_number_of_classes_is_none_in_the_class():
    assert ComposerClassifier.num_classes is None


def test_the_number_of_classes_may_come_from_the_module():
    assert 3 == ComposerClassifier(with_own_classes(3)).num_classes


def test_the_same_number_of_classes_twice_is_no_contradiction():
    assert 3 == ComposerClassifier(with_own_classes(3), num_classes=3).num_classes


def test_the_module_knows_its_number_of_classes_better():
    with pytest.warns(
        UserWarning, match=r"`num_classes=5` was given, but `module\.num_classes` is 3\. Using 3\."
    ) as caught:
        model = ComposerClassifier(with_own_classes(3), num_classes=5)

    assert 3 == model.num_classes == model.train_metrics.num_classes
    assert __file__ == caught[0].filename


@pytest.mark.parametrize("given", [{}, {"train_metrics": CrossEntropy()}, {"val_metrics": CrossEntropy()}])
def test_default_metrics_need_the_number_of_classes(module, given):
    with pytest.raises(ValueError, match="`num_classes` must be given, because `module` has no `num_classes`"):
        ComposerClassifier(module, **given)


def test_custom_metrics_do_not_need_the_number_of_classes(module):
    model = ComposerClassifier(module, train_metrics=CrossEntropy(), val_metrics=CrossEntropy())

    assert model.num_classes is None


@pytest.mark.parametrize("num_classes", [0, -2])
def test_the_number_of_classes_must_be_positive(module, num_classes):
    with pytest.raises(ValueError, match=f"`num_classes` must be at least 1, got {num_classes}"):
        ComposerClassifier(module, num_classes)
    with pytest.raises(ValueError, match=rf"`module\.num_classes` must be at least 1, got {num_classes}"):
        ComposerClassifier(with_own_classes(num_classes))


def test_the_number_of_classes_must_be_an_integer(module):
    with pytest.raises(TypeError, match=r"`num_classes` must be an integer, got 3\.0"):
        ComposerClassifier(module, 3.0)


def test_the_module_must_be_a_module():
    with pytest.raises(TypeError, match=r"`module` must be a `torch\.nn\.Module`, got <function"):
        ComposerClassifier(lambda x: x, num_classes=2)


def test_the_loss_function_must_be_callable(module):
    with pytest.raises(TypeError, match="`loss_fn` must be callable, got 'mse'"):
        ComposerClassifier(module, 3, loss_fn="mse")


# --- forward and loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tuple, list])
def test_forward_calls_the_module_with_the_inputs(model, module, batch, form):
    torch.testing.assert_close(module(batch[0]), model(form(batch)))


def test_eval_forward_uses_the_outputs_it_is_given(model, batch):
    outputs = torch.zeros(6, 3)

    assert model.eval_forward(batch, outputs) is outputs
    torch.testing.assert_close(model(batch), model.eval_forward(batch))


def test_the_default_loss_is_the_soft_cross_entropy(model, batch):
    outputs = model(batch)

    assert model._loss_fn is soft_cross_entropy
    torch.testing.assert_close(nn.functional.cross_entropy(outputs, batch[1]), model.loss(outputs, batch))


def test_the_loss_takes_probabilities(model, batch):
    inputs, targets = batch
    outputs = model(batch)
    mixed = 0.3 * one_hot(targets) + 0.7 * one_hot(targets.flip(0))
    expected = 0.3 * model.loss(outputs, batch) + 0.7 * model.loss(outputs, (inputs, targets.flip(0)))

    torch.testing.assert_close(expected, model.loss(outputs, (inputs, mixed)))


def test_arguments_of_the_loss_are_passed_on(module, batch):
    calls = []

    def loss_fn(*args, **kwargs):
        calls.append((args, kwargs))
        return torch.zeros(())

    model = ComposerClassifier(module, 3, loss_fn=loss_fn)
    model.loss("outputs", (None, "targets"), 1, reduction="none")

    assert [(("outputs", "targets", 1), {"reduction": "none"})] == calls


def test_one_loss_per_example_on_request(model, batch):
    losses = model.loss(model(batch), batch, reduction="none")

    assert (6,) == losses.shape
    torch.testing.assert_close(model.loss(model(batch), batch), losses.mean())


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        ((4, 3), (5,), r"indices of shape \(4,\) or class probabilities of shape \(4, 3\) .*\(4, 3\), got \(5,\)"),
        ((4, 3), (1,), r"got \(1,\)"),
        ((4, 3), (4, 5), r"got \(4, 5\)"),
        ((4, 3), (4, 1), r"got \(4, 1\)"),
        ((4, 3), (), r"got \(\)"),
        ((4, 3, 2, 2), (4, 2), r"indices of shape \(4, 2, 2\) or .* got \(4, 2\)"),
        ((4,), (4,), r"The outputs must have shape \(N, C, \.\.\.\), got \(4,\)"),
    ],
)
def test_targets_that_do_not_fit_are_an_error(model, outputs, targets, message):
    with pytest.raises(ValueError, match=message):
        model.loss(torch.zeros(outputs), (None, torch.zeros(targets, dtype=torch.int64)))
    with pytest.raises(ValueError, match=message.replace("C, ", "3, ")):
        model.update_metric((None, torch.zeros(targets, dtype=torch.int64)), torch.zeros(outputs), model.train_metrics)


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (
            {"logits": torch.zeros(4, 3)},
            torch.zeros(4),
            "The outputs must be a tensor for the default loss .* got dict",
        ),
        (torch.zeros(4, 3), [0, 1, 2, 0], "The targets must be a tensor for the default loss .* got list"),
    ],
)
def test_the_default_loss_takes_tensors(model, outputs, targets, message):
    with pytest.raises(TypeError, match=message):
        model.loss(outputs, (None, targets))


def test_another_loss_function_takes_targets_of_any_shape(module, batch):
    model = ComposerClassifier(module, 3, loss_fn=nn.functional.mse_loss)

    torch.testing.assert_close(torch.tensor(1.0), model.loss(torch.zeros(5), (None, torch.ones(5))))


def test_the_loss_trains(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses == sorted(losses, reverse=True)


# --- copies and exports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_the_same(model, batch, clone):
    copied = clone(model)
    copied.update_metric(batch, copied(batch), copied.train_metrics)

    torch.testing.assert_close(model(batch), copied(batch))
    assert not model.train_metrics.update_called


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given", [{}, {"train_metrics": {}, "val_metrics": {"top": MulticlassAccuracy(3, top_k=2)}}])
def test_it_can_be_scripted(module, batch, training, given):
    model = ComposerClassifier(module, 3, **given).train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit and a property of torchmetrics are deprecated
        scripted = torch.jit.script(model)

    torch.testing.assert_close(model(batch), scripted(batch))


def test_it_can_be_traced(model, batch):
    torch.testing.assert_close(model(batch), torch.fx.symbolic_trace(model)(batch))


def test_it_can_be_exported(model, batch):
    torch.testing.assert_close(model(batch), torch.export.export(model, (batch,)).module()(batch))
