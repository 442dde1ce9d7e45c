from __future__ import annotations

import pytest
import torch

from composer.models.tasks import ComposerClassifier


@pytest.fixture
def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))


@pytest.fixture
def model(module):
    return ComposerClassifier(module, num_classes=3)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
