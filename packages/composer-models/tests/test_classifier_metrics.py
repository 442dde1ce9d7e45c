from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchmetrics import Accuracy, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassHingeLoss,
    MulticlassJaccardIndex,
    MulticlassRecall,
    MultilabelAccuracy,
)

from composer.metrics import CrossEntropy, Dice, LossMetric, MIoU
from composer.models.module_with_loss import ModuleWithLoss
from composer.models.tasks import ComposerClassifier


def one_hot(targets, num_classes=3):
    return nn.functional.one_hot(targets, num_classes).movedim(-1, 1).float()


# --- which metrics ----------------------------------------------------------------------------------------------------


def test_default_metrics(model):
    train, val = model.get_metrics(is_train=True), model.get_metrics(is_train=False)

    assert ["MulticlassAccuracy"] == list(train)
    assert ["CrossEntropy", "MulticlassAccuracy"] == list(val)
    assert ("micro", 3) == (train["MulticlassAccuracy"].average, train["MulticlassAccuracy"].num_classes)
    assert isinstance(model.train_metrics, MulticlassAccuracy)
    assert isinstance(model.val_metrics, MetricCollection)


def test_default_metrics_do_not_look_at_values(model):
    """Some releases of torchmetrics skip the look anyway, so the test on the meta device does not notice."""
    validated = [
        metric.validate_args
        for is_train in (True, False)
        for metric in model.get_metrics(is_train).values()
        if isinstance(metric, MulticlassAccuracy)
    ]

    assert [False, False] == validated


def test_a_single_metric_is_named_after_its_class(module):
    metric = MulticlassRecall(num_classes=3)
    model = ComposerClassifier(module, 3, train_metrics=metric)

    assert {"MulticlassRecall": metric} == model.get_metrics(True)


@pytest.mark.parametrize("form", [dict, MetricCollection])
def test_several_metrics_keep_their_names(module, form):
    metrics = {"coarse": MulticlassAccuracy(3), "fine": MulticlassRecall(3)}
    model = ComposerClassifier(module, 3, val_metrics=form(metrics))

    assert metrics == model.get_metrics(False)


def test_a_prefix_is_part_of_the_name(module):
    model = ComposerClassifier(module, 3, val_metrics=MetricCollection([CrossEntropy()], prefix="slow_"))

    assert ["slow_CrossEntropy"] == list(model.get_metrics(False))


def test_an_empty_dict_means_no_metrics(module):
    model = ComposerClassifier(module, train_metrics={}, val_metrics={})

    assert ({}, {}) == (model.get_metrics(True), model.get_metrics(False))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        ({}, []),
        (CrossEntropy(), ["CrossEntropy"]),
        ({"entropy": CrossEntropy()}, ["entropy"]),
        (MetricCollection([CrossEntropy()]), ["CrossEntropy"]),
    ],
)
def test_metrics_can_be_assigned(model, value, names):
    model.train_metrics = value

    assert names == list(model.get_metrics(True))


def test_metrics_can_be_assigned_again(model):
    model.train_metrics = None
    model.train_metrics = {"entropy": CrossEntropy()}

    assert ["entropy"] == list(model.get_metrics(True))


def test_metrics_must_be_metrics(module):
    with pytest.raises(
        TypeError, match=r"`val_metrics` must be a `Metric`, a `MetricCollection` or a dict .* got \[\]"
    ):
        ComposerClassifier(module, 3, val_metrics=[])


@pytest.mark.parametrize("form", [lambda metric: metric, lambda metric: {"metric": metric}])
def test_metrics_move_with_the_model(module, form):
    model = ComposerClassifier(module, 3, train_metrics=form(CrossEntropy())).to("meta")
    (metric,) = model.get_metrics(True).values()

    assert "meta" == metric.sum_loss.device.type


def test_metrics_are_not_part_of_the_checkpoint(model):
    assert {"module.1.weight", "module.1.bias"} == set(model.state_dict())


# --- measuring --------------------------------------------------------------------------------------------------------


def test_update_metric_measures_the_outputs(model, batch):
    outputs = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2])]
    targets = torch.tensor([0, 1, 2, 1, 1, 1])
    metrics = model.get_metrics(is_train=False)
    for metric in metrics.values():
        assert model.update_metric((None, targets), outputs, metric) is None

    assert pytest.approx(4 / 6) == metrics["MulticlassAccuracy"].compute().item()
    torch.testing.assert_close(nn.functional.cross_entropy(outputs, targets), metrics["CrossEntropy"].compute())


def test_a_copy_of_a_metric_can_be_measured(model, batch):
    metric = copy.deepcopy(model.get_metrics(True)["MulticlassAccuracy"])
    model.update_metric(batch, model(batch), metric)

    assert metric.update_called
    assert not model.train_metrics.update_called


METRICS = {
    "accuracy": lambda: MulticlassAccuracy(3),
    "accuracy by task": lambda: Accuracy(task="multiclass", num_classes=3),
    "top 2": lambda: MulticlassAccuracy(3, top_k=2),
    "unvalidated": lambda: MulticlassAccuracy(3, validate_args=False),
    "recall": lambda: MulticlassRecall(3),
    "confusion matrix": lambda: MulticlassConfusionMatrix(3),
    "jaccard": lambda: MulticlassJaccardIndex(3),
    "auroc": lambda: MulticlassAUROC(3, thresholds=5),
    "calibration": lambda: MulticlassCalibrationError(3),
    "hinge": lambda: MulticlassHingeLoss(3),
}


@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_multiclass_metrics_get_the_most_probable_class(model, batch, make):
    inputs, targets = batch
    outputs = model(batch).softmax(dim=1)
    soft = 0.9 * one_hot(targets) + 0.1 / 3
    of_indices, of_probabilities = make(), make()
    model.update_metric(batch, outputs, of_indices)
    model.update_metric((inputs, soft), outputs, of_probabilities)

    torch.testing.assert_close(of_indices.compute(), of_probabilities.compute())


@pytest.mark.parametrize("make", [lambda: MulticlassAccuracy(3), lambda: MulticlassExactMatch(3)])
def test_multiclass_metrics_get_the_most_probable_class_of_every_pixel(model, make):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 3, 2, 2, generator=generator)
    targets = torch.randint(3, (4, 2, 2), generator=generator)
    outputs[:2] = 5 * one_hot(targets[:2])  # two images without an error
    of_indices, of_probabilities = make(), make()
    model.update_metric((None, targets), outputs, of_indices)
    model.update_metric((None, one_hot(targets)), outputs, of_probabilities)

    assert 0 < of_indices.compute() < 1
    torch.testing.assert_close(of_indices.compute(), of_probabilities.compute())


def test_integer_one_hot_targets_are_probabilities_too(model):
    metric = model.train_metrics
    model.update_metric((None, one_hot(torch.tensor([0, 1])).long()), torch.eye(3)[:2], metric)

    assert 1.0 == metric.compute().item()


def test_a_row_without_any_mass_is_ignored_by_a_metric_that_can(model):
    metric = MulticlassAccuracy(3, ignore_index=-100, average="micro", validate_args=False)
    targets = one_hot(torch.tensor([0, 0, 2]))
    targets[1] = 0
    model.update_metric((None, targets), torch.eye(3), metric)

    assert (2, 0) == (metric.tp.item(), metric.fp.item())


def test_predictions_of_a_subclass_are_not_taken_for_scores(module):
    class Predictor(ComposerClassifier):
        def eval_forward(self, batch, outputs=None):
            return super().eval_forward(batch, outputs).argmax(dim=1)

    model = Predictor(module, 3)
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    outputs = model.eval_forward(batch)
    model.update_metric((batch[0], outputs.clone()), outputs, model.train_metrics)

    assert 1.0 == model.train_metrics.compute().item()


def test_the_outputs_must_have_the_number_of_classes_of_the_metric(model):
    with pytest.raises(ValueError, match=r"The outputs must have shape \(N, 3, \.\.\.\), got \(4, 5\)"):
        model.update_metric((None, torch.zeros(4, dtype=torch.int64)), torch.zeros(4, 5), model.train_metrics)


def test_other_metrics_get_probabilities_as_they_are(model):
    outputs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    for metric in (MeanSquaredError(), LossMetric(nn.functional.mse_loss)):
        model.update_metric((None, targets), outputs, metric)
        torch.testing.assert_close(nn.functional.mse_loss(outputs, targets), metric.compute())

    multilabel = MultilabelAccuracy(3)
    model.update_metric((None, torch.ones(2, 3, dtype=torch.int64)), torch.ones(2, 3), multilabel)

    assert 1.0 == multilabel.compute().item()


def test_outputs_that_are_no_tensor_are_up_to_the_metric(module):
    class Keeper(Metric):
        def __init__(self):
            super().__init__()
            self.add_state("seen", default=[])

        def update(self, outputs, targets):
            self.seen = [outputs, targets]

        def compute(self):
            return self.seen

    model = ComposerClassifier(module, 3, train_metrics=Keeper())
    model.update_metric((None, "targets"), {"logits": 1}, model.train_metrics)

    assert [{"logits": 1}, "targets"] == model.train_metrics.compute()


@pytest.mark.parametrize("dense", [False, True], ids=["indices", "probabilities"])
def test_a_step_with_default_metrics_reads_nothing_from_the_device(module, dense):
    """The meta device has no values, so reading one is an error."""
    model = ComposerClassifier(module, 3).to("meta")
    targets = torch.zeros(6, dtype=torch.int64, device="meta")
    batch = torch.zeros(6, 4, device="meta"), torch.zeros(6, 3, device="meta") if dense else targets
    outputs = model(batch)
    model.loss(outputs, batch).backward()
    for metric in (*model.get_metrics(True).values(), *model.get_metrics(False).values()):
        model.update_metric(batch, model.eval_forward(batch, outputs), metric)
        assert metric.update_called


@pytest.mark.parametrize("wrap", [ComposerClassifier, None])
@pytest.mark.parametrize("make", [lambda: MIoU(3, ignore_index=255), lambda: Dice(3), lambda: MulticlassAccuracy(3)])
def test_positions_without_a_target_have_the_ignored_index_of_the_metric_or_the_loss(module, wrap, make):
    """With probabilities, the most probable class of such a position would be class 0."""
    loss = nn.CrossEntropyLoss(ignore_index=1)
    model = ModuleWithLoss(module, loss, metrics={}) if wrap is None else wrap(module, 3, loss_fn=loss)
    outputs, labels = torch.randn(2, 3, 8), torch.randint(3, (2, 8))
    dense = one_hot(labels)
    dense[:, :, 4:] = 0
    metric, expected = make(), make()
    model.update_metric((None, dense), outputs, metric)
    labels[:, 4:] = 1 if getattr(metric, "ignore_index", None) is None else metric.ignore_index
    expected.update(outputs, labels)

    assert expected.compute() == metric.compute()


def test_the_default_cross_entropy_ignores_what_the_loss_ignores(module):
    model = ComposerClassifier(module, 3, loss_fn=nn.CrossEntropyLoss(ignore_index=255))

    assert 255 == model.val_metrics["CrossEntropy"].ignore_index
