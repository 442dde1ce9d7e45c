"""No algorithm, callback, logger or metric waits for the device in a training step.

The device is torch's `meta` device, whose tensors have no numbers: code that takes the way of an accelerator works,
and whatever needs a number, or a shape that depends on numbers, raises. What a logger shows is copied to the host in
the background; here the copies arrive as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_runs import CLASSES, LOWER_PRECISION, MeasuredCaptioned, arguments_of, captioned, make, noise
from observers import KEEPERS, WATCHERS
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback, State, deferred_value
from composer.devices.device import PlainDevice
from composer.loggers import Logger

STEPS = 20


class MetaDevice(PlainDevice):
    """A device whose tensors have shapes, but no numbers."""

    name = "cpu"  # of the kind of autocast
    _device = torch.device("meta")


class Arriving:
    """Copies of numbers to the host, which are there with the next step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.numbers, self._asked = [0.0] * len(tensor), False

    @property
    def ready(self) -> bool:
        asked, self._asked = self._asked, True
        return asked


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add to torch what it has for accelerators, but not for the meta device."""
    plain = torch.is_autocast_enabled
    generator = SimpleNamespace(
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: torch.set_rng_state(state),
    )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": device != "meta" and plain(device))
    monkeypatch.setattr(torch, "get_device_module", lambda device: generator)
    monkeypatch.setattr(deferred_value, "_Copy", Arriving)


class Unmasked(MeasuredCaptioned):
    """Without what makes other libraries read: attention masks (`transformers`) and `MeanMetric` (`torchmetrics`)."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Accuracy": MulticlassAccuracy(num_classes=4, average="micro", validate_args=False).to("meta")}

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.text(input_ids=batch["input_ids"]).last_hidden_state
        outputs: torch.Tensor = self.vision(batch["image"]) + self.head(hidden.mean(1))
        return outputs


class Trained(Exception):
    """Ends a run before the end of its epoch, where numbers may be read."""


class End(Callback):
    """Ends a run after its last step."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == f"{STEPS}ba":
            raise Trained


def fit(callbacks: Sequence[Callback] = (), **arguments: Any) -> None:
    """Train for some steps."""
    lower = arguments.pop("lower", False)
    with torch.device("meta"):
        model = Unmasked(norm=partial(torch.nn.GroupNorm, 4) if lower else torch.nn.BatchNorm2d)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(noise(8 * STEPS + 8), batch_size=8, collate_fn=captioned),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=f"{STEPS + 1}ba",
        device=MetaDevice(),
        precision="amp_bf16" if lower else "fp32",
        progress_bar=False,
        seed=0,
        callbacks=[*callbacks, End()],
        **arguments,
    )
    with pytest.raises(Trained):
        trainer.fit()
    trainer.close()


def test_the_trainer_waits_for_nothing() -> None:
    fit()


def test_what_reads_is_caught() -> None:
    class Reading(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            float(state.loss)

    with pytest.raises(RuntimeError, match="meta"):
        fit([Reading()])


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_algorithm_waits_for_nothing(name: str) -> None:
    keys = {"input_key": "image", "target_key": "label"}
    fit(algorithms=make(name, keys, arguments_of(name)), lower=name in LOWER_PRECISION)


NOT_ON_META = {
    "ExportForInferenceCallback": "it exports a model with weights",
    "FreeOutputs": "it refuses models with training metrics",
    "Generate": "it needs a model that generates",
    "LoadCheckpoint": "it loads weights",
}


@pytest.mark.filterwarnings("ignore:.*only works on CUDA devices")
@pytest.mark.parametrize("name", sorted(WATCHERS.keys() - NOT_ON_META.keys()))
def test_a_callback_waits_for_nothing(name: str, tmp_path: Path) -> None:
    fit([WATCHERS[name].make(tmp_path)])


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")  # of MLflow
@pytest.mark.parametrize("name", sorted(KEEPERS))
def test_a_logger_waits_for_nothing(name: str, tmp_path: Path) -> None:
    fit(loggers=KEEPERS[name](tmp_path).logger)
