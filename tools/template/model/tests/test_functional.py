"""`__FUNCTION__` on models of all kinds."""

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.__SNAKE__ import __FUNCTION__
from composer.algorithms.warnings import NoEffectWarning


def test_the_lazy_name_is_the_function() -> None:
    assert cf.__FUNCTION__ is __FUNCTION__


def test_outputs_follow_the_formula() -> None:
    model = nn.Sequential(nn.ReLU())
    __FUNCTION__(model, slope=0.5)

    assert model(torch.tensor([-2.0, 0.0, 2.0])).tolist() == [-1.0, 0.0, 2.0]


def test_new_layers_have_the_dtype_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).double()
    __FUNCTION__(model)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_a_model_without_such_layers_gets_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match="changed nothing: the model has no `ReLU` module"):
        __FUNCTION__(nn.Sequential(nn.Linear(2, 2)))


def test_a_slope_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`slope` must be in \[0, 1\], got 1.5"):
        __FUNCTION__(nn.Sequential(nn.ReLU()), slope=1.5)
