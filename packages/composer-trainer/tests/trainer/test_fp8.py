"""The context of FP8, with a stand-in for TransformerEngine."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from composer.core import Precision, get_precision_context
from composer.trainer import fp8


class Recipe:
    """Stands in for TransformerEngine's `DelayedScaling`; the library needs a recent GPU even to be imported."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put a TransformerEngine in place that records how its autocast is entered."""
    calls: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def fp8_autocast(**arguments: Any) -> Any:
        calls.append(arguments)
        yield

    contents = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"fp8_autocast": fp8_autocast},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": Recipe, "Format": SimpleNamespace(HYBRID="hybrid")},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture
def capable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


class TestFP8:
    def test_a_missing_library_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
        monkeypatch.setitem(sys.modules, "transformer_engine", None)

        with pytest.raises(ImportError, match="AMP_FP8 precision is used but TransformerEngine is not installed"):
            get_precision_context(Precision.AMP_FP8)

    def test_a_broken_installation_is_not_called_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def import_module(name: str) -> ModuleType:
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

        monkeypatch.setattr(fp8.importlib, "import_module", import_module)

        with pytest.raises(ModuleNotFoundError, match="onnx"):
            get_precision_context(Precision.AMP_FP8)

    @pytest.mark.usefixtures("te")
    @pytest.mark.parametrize(("available", "found"), [(True, "compute capability 8.0"), (False, "no CUDA device")])
    def test_an_older_device_is_refused(self, monkeypatch: pytest.MonkeyPatch, available: bool, found: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))

        with pytest.raises(
            RuntimeError, match=f"AMP_FP8 precision is used but current device does not support it.*{found}"
        ):
            get_precision_context(Precision.AMP_FP8)

    @pytest.mark.usefixtures("capable_gpu")
    def test_the_default_recipe_is_hybrid_with_16_steps(self, te: list[dict[str, Any]]) -> None:
        with get_precision_context(Precision.AMP_FP8):
            pass

        assert te[0]["enabled"] is True
        expected = {"fp8_format": "hybrid", "amax_history_len": 16, "amax_compute_algo": "max"}
        assert expected == te[0]["fp8_recipe"].arguments

    @pytest.mark.usefixtures("capable_gpu")
    def test_the_recipe_and_the_switch_are_passed_on(self, te: list[dict[str, Any]]) -> None:
        with get_precision_context(Precision.AMP_FP8, {"margin": 2}, fp8_autocast_enabled=False):
            pass

        assert te[0]["enabled"] is False
        assert {"margin": 2} == te[0]["fp8_recipe"].arguments
