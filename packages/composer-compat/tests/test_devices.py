"""Devices that need the package of a vendor."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any

import pytest
import torch

from composer.devices import Device, DeviceHPU, DeviceNeuron, DeviceTPU
from composer.utils import get_device, is_hpu_installed, is_xla_installed


@pytest.mark.parametrize("cls", [DeviceHPU, DeviceNeuron, DeviceTPU])
def test_each_device_has_its_module(cls: type[Device]) -> None:
    module = import_module(f"composer.devices.{cls.__name__.replace('Device', 'device_').lower()}")

    assert cls is getattr(module, cls.__name__)
    assert [cls.__name__] == module.__all__


@pytest.mark.parametrize(
    ("name", "kind", "package", "command"),
    [
        ("tpu", "DeviceTPU", "torch_xla", r"pip install torch_xla\[tpu\]"),
        ("neuron", "DeviceNeuron", "torch_xla", "pip install torch-neuronx"),
        ("hpu", "DeviceHPU", "habana_frameworks", "pip install habana-torch-plugin"),
    ],
)
def test_a_device_without_its_package_names_it(name: str, kind: str, package: str, command: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"`{kind}` needs the package `{package}`.*Run `{command}`") as caught:
        get_device(name)
    assert package == caught.value.name
    assert not is_xla_installed()
    assert not is_hpu_installed()


def pretend_installed(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    parts = name.split(".")
    for depth in range(len(parts)):
        module = types.ModuleType(".".join(parts[: depth + 1]))
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(attributes)


@pytest.mark.parametrize("name", ["tpu", "neuron"])
def test_an_xla_device_comes_from_torch_xla(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "torch_xla.core.xla_model", xla_device=lambda: torch.device("meta"))

    device = get_device(name)

    assert (name, "xla", torch.device("meta")) == (device.name, device.dist_backend, device._device)
    assert is_xla_installed()


def test_an_hpu_needs_habana_s_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "habana_frameworks.torch.core")

    assert "hpu" == get_device("hpu")._device.type
    assert is_hpu_installed()


def test_a_broken_installation_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "torch_xla.core")

    with pytest.raises(ModuleNotFoundError, match=r"No module named 'torch_xla.core.xla_model'"):
        get_device("tpu")
