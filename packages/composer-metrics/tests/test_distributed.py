from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from composer.metrics import MAP
from composer.testing import run_on_ranks

HAS_COCO = find_spec("pycocotools") is not None and find_spec("torchvision") is not None


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


HIT, ALARM = one_image(0.0, 0.6), one_image(50.0, 0.9)


@pytest.fixture(scope="module")
def batches(cases, draw):
    return [draw(case, 6, 9, 4) for case in cases]


@pytest.fixture(scope="module")
def values_by_rank(cases, batches):
    """Two batches on rank 0 and one on rank 1, for every metric; starting processes takes longer than all of them."""
    jobs = [(case.make(), [two, [one]]) for case, (*two, one) in zip(cases, batches, strict=True)]
    if HAS_COCO:
        jobs.append((MAP(), [[HIT], [ALARM]]))
    return run_on_ranks(values_on_this_rank, 2, jobs)


def test_every_process_gets_the_value_of_all_data(cases, batches, values_by_rank):
    expected = [pytest.approx(case.reference(data), rel=1e-5) for case, data in zip(cases, batches, strict=True)]

    for values in values_by_rank:
        assert expected == [value.item() for value in values[: len(cases)]]


@pytest.mark.skipif(not HAS_COCO, reason="needs the extra `coco`")
def test_average_precision_gathers_the_images_of_all_processes(values_by_rank):
    single = MAP()
    single.update(*HIT)
    single.update(*ALARM)
    expected = single.compute()["map"].item()

    assert 0 < expected < 1
    assert [expected, expected] == [values[-1]["map"].item() for values in values_by_rank]
