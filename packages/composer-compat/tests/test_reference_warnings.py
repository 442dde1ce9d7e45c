"""Warnings without their source line."""

from __future__ import annotations

import warnings

import pytest

from composer.utils import misc


def test_a_warning_fits_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", misc.warning_on_one_line)

    line = warnings.formatwarning(UserWarning("Slow."), UserWarning, "train.py", 3, line="slow()")

    assert "UserWarning: Slow. (source: train.py:3)\n" == line
