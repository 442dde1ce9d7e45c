from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from composer.metrics import MAP
from composer.testing import run_on_ranks


def values_on_this_rank(jobs):
    values = []
    for metric, shares in jobs:
        for batch in shares[torch.distributed.get_rank()]:
            metric.update(*batch)
        values.append(metric.compute())
    return values


def one_image(corner, score):
    box = {"boxes": torch.tensor([[corner, corner, corner + 9.0, corner + 9.0]]), "labels": torch.tensor([0])}
    truth = {"boxes": torch.tensor([[0.0, 0.0, 9.0, 9.0]]), "labels": torch.tensor([0])}
    return [{**box, "scores": torch.tensor([score])}], [truth]


def test_processes_with_unequal_shares_get_the_value_of_all_data(cases, draw):
    batches = [draw(case, 6, 9, 4) for case in cases]
    jobs = [(case.make(), [two, [one]]) for case, (*two, one) in zip(cases, batches, strict=True)]
    expected = [pytest.approx(case.reference(data), rel=1e-5) for case, data in zip(cases, batches, strict=True)]

    for values in run_on_ranks(values_on_this_rank, 2, jobs):
        assert expected == [value.item() for value in values]


@pytest.mark.skipif(find_spec("pycocotools") is None or find_spec("torchvision") is None, reason="needs the extra `coco`")
def test_average_precision_gathers_the_images_of_all_processes():
    hit, alarm = one_image(0.0, 0.6), one_image(50.0, 0.9)
    single = MAP()
    single.update(*hit)
    single.update(*alarm)
    expected = single.compute()["map"].item()

    assert 0 < expected < 1
    for (values,) in run_on_ranks(values_on_this_rank, 2, [(MAP(), [[hit], [alarm]])]):
        assert expected == values["map"].item()
