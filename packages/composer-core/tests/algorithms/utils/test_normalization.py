"""Helpers of algorithms that replace normalization layers."""

from __future__ import annotations

import warnings

import pytest

from composer.algorithms.utils.normalization import check_apply_at, is_low_precision
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Event, Precision


@pytest.mark.parametrize("precision", [Precision.AMP_FP16, "amp_bf16"])
def test_low_precisions_are_recognized_without_a_warning(precision: Precision | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert is_low_precision(precision, "Norms")


@pytest.mark.parametrize(("precision", "name"), [(None, "None"), ("fp32", "'fp32'"), (Precision.AMP_FP8, "'amp_fp8'")])
def test_other_precisions_have_no_effect_and_warn(precision: Precision | str | None, name: str) -> None:
    with pytest.warns(NoEffectWarning, match=f"`Norms` only applies to AMP_FP16 and AMP_BF16 precisions, got {name}"):
        assert not is_low_precision(precision, "Norms")


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match="fp99"):
        is_low_precision("fp99", "Norms")


def test_norms_are_only_replaced_before_the_model_is_wrapped() -> None:
    for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD):
        check_apply_at(event)
    with pytest.raises(ValueError, match=r"`apply_at` must be Event\.INIT"):
        check_apply_at(Event.FIT_START)
