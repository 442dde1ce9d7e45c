"""No algorithm, callback, logger or metric waits for the device in a training step.

The device is torch's `meta` device, whose tensors have no numbers: code that takes the way of an accelerator works,
and whatever needs a number, or a shape that depends on numbers, raises. What a logger shows is copied to the host in
the background; here the copies arrive as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_runs import (
    CLASSES,
    LOWER_PRECISION,
    WITHOUT_LOGITS,
    Unmasked,
    UnmaskedWithoutMetrics,
    arguments_of,
    captioned,
    make,
    noise,
    record_stack,
)
from observers import KEEPERS, WATCHERS
from torch.utils.data import DataLoader

from composer import Trainer
from composer.core import Callback, State, deferred_value
from composer.devices.device import PlainDevice
from composer.loggers import Logger
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW, DecoupledSGDW

STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated:DeprecationWarning")  # Neptune's


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
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Neptune's client writes into the current folder


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
    monkeypatch.setattr(deferred_value, "HostCopy", Arriving)


class Trained(Exception):
    """Ends a run before the end of its epoch, where numbers may be read."""


class End(Callback):
    """Ends a run after its last step."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == f"{STEPS}ba":
            raise Trained


def fit(
    callbacks: Sequence[Callback] = (),
    lower: bool = False,
    kind: type[Unmasked] = Unmasked,
    lr: float | torch.Tensor = 0.1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **arguments: Any,
) -> None:
    """Train for some steps."""
    with torch.device("meta"):
        model = kind(norm=partial(torch.nn.GroupNorm, 4) if lower else torch.nn.BatchNorm2d)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(noise(8 * STEPS + 8), batch_size=8, collate_fn=captioned),
        optimizers=optimizer(model.parameters(), lr=lr),
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


READING: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": torch.Tensor.item,
    "a truth value": lambda outputs: bool((outputs > 0).all()),
    "equality": lambda outputs: torch.equal(outputs, outputs + 1),
    "a list": torch.Tensor.tolist,
    "a copy": torch.Tensor.cpu,
    "a shape, of indices": torch.nonzero,
    "a shape, of selected values": lambda outputs: outputs[outputs > 0],
    "a shape, of repeated values": lambda outputs: torch.repeat_interleave(outputs, outputs.long().view(-1)),
    "a shape, of distinct values": torch.unique,
}


@pytest.mark.parametrize("what", READING)
def test_what_reads_is_caught(what: str) -> None:
    class Reading(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            READING[what](state.loss if what == "a number" else state.outputs)

    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        fit([Reading()])


@pytest.mark.parametrize("optimizer", [DecoupledSGDW, DecoupledAdamW])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_an_optimizer_and_its_schedule_wait_for_nothing(optimizer: Any, rate: Any) -> None:
    lr = rate if isinstance(rate, float) else rate.clone()
    fit(optimizer=partial(optimizer, weight_decay=1e-4), lr=lr, schedulers=CosineAnnealingWithWarmupScheduler("2ba"))


def test_microbatches_wait_for_nothing() -> None:
    fit(device_train_microbatch_size=4)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_algorithm_waits_for_nothing(name: str) -> None:
    keys = {"input_key": "image", "target_key": "label"}
    kind = UnmaskedWithoutMetrics if name in WITHOUT_LOGITS else Unmasked
    fit(algorithms=make(name, keys, arguments_of(name)), lower=name in LOWER_PRECISION, kind=kind)


def test_what_wins_records_together_waits_for_nothing() -> None:
    fit(algorithms=record_stack())


# They act at most at an interval of their own, which their cards say, and there they need numbers.
NOT_ON_META = {
    "ExportForInferenceCallback": "it exports a model with weights",
    "Generate": "it writes texts",
    "LoadCheckpoint": "it loads weights",
}


@pytest.mark.filterwarnings("ignore:.*only works on CUDA devices")
@pytest.mark.parametrize("name", sorted(WATCHERS.keys() - NOT_ON_META.keys()))
def test_a_callback_waits_for_nothing(name: str, tmp_path: Path) -> None:
    fit(
        [WATCHERS[name].make(tmp_path)],
        kind=Unmasked if WATCHERS[name].model.get("metrics", True) else UnmaskedWithoutMetrics,
    )


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")  # of MLflow
@pytest.mark.parametrize("name", sorted(KEEPERS))
def test_a_logger_waits_for_nothing(name: str, tmp_path: Path) -> None:
    fit(loggers=KEEPERS[name](tmp_path).logger)
