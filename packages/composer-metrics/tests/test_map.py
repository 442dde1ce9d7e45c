from __future__ import annotations

import pytest
import torch

from composer.metrics import MAP, map
from composer.utils import MissingConditionalImportError


def image(boxes, labels, scores=None):
    entry = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}
    return entry if scores is None else {**entry, "scores": torch.tensor(scores)}


@pytest.fixture
def needs_coco():
    pytest.importorskip("pycocotools")
    pytest.importorskip("torchvision")


@pytest.mark.usefixtures("needs_coco")
def test_perfect_detections_have_precision_one():
    metric = MAP()
    metric.update([image([[0, 0, 9, 9]], [0], [0.6])], [image([[0, 0, 9, 9]], [0])])

    assert 1.0 == metric.compute()["map"].item()


@pytest.mark.usefixtures("needs_coco")
def test_the_value_is_the_mean_over_ten_thresholds():
    """An IoU of 0.82 is a hit at 0.5, 0.55, ..., 0.8 and a miss at 0.85, 0.9, 0.95."""
    metric = MAP()
    metric.update([image([[0, 0, 100, 82]], [0], [0.6])], [image([[0, 0, 100, 100]], [0])])
    values = metric.compute()

    assert pytest.approx(0.7) == values["map"].item()
    assert (1.0, 1.0) == (values["map_50"].item(), values["map_75"].item())


@pytest.mark.usefixtures("needs_coco")
def test_images_accumulate_over_updates():
    metric = MAP()
    metric.update([image([[0, 0, 9, 9]], [0], [0.6])], [image([[0, 0, 9, 9]], [0])])
    metric.update([image([[50, 50, 59, 59]], [0], [0.9])], [image([[0, 0, 9, 9]], [0])])

    # Best score first: a false alarm, then a hit: precision 1/2 up to a recall of 1/2, that is at 51 of 101 recalls.
    assert pytest.approx(0.5 * 51 / 101) == metric.compute()["map"].item()


@pytest.mark.usefixtures("needs_coco")
def test_values_per_class_are_returned_on_request():
    predictions = [image([[0, 0, 9, 9], [0, 0, 5, 5]], [0, 1], [0.6, 0.6])]
    targets = [image([[0, 0, 9, 9], [50, 50, 59, 59]], [0, 1])]
    metric = MAP(class_metrics=True)
    metric.update(predictions, targets)

    assert [1.0, 0.0] == metric.compute()["map_per_class"].tolist()


@pytest.mark.usefixtures("needs_coco")
def test_arguments_reach_torchmetrics():
    def gather(state, group):
        return [state]

    metric = MAP(True, True, None, gather)

    assert (True, True, None, gather) == (
        metric.class_metrics,
        metric.dist_sync_on_step,
        metric.process_group,
        metric.dist_sync_fn,
    )
    assert metric.full_state_update is True


@pytest.mark.parametrize("missing", ["pycocotools", "torchvision"])
def test_a_missing_package_names_the_extra(monkeypatch, missing):
    monkeypatch.setattr(map, "find_spec", lambda name: None if name == missing else object())

    with pytest.raises(MissingConditionalImportError, match=r"Install the pip extra 'composer-metrics\[coco\]'"):
        MAP()
