"""On a CUDA device: no algorithm, callback or logger waits for it in a step, and training follows that on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import (
    CLASSES,
    LOWER_PRECISION,
    WITHOUT_LOGITS,
    Captioned,
    Unmasked,
    UnmaskedWithoutMetrics,
    arguments_of,
    captioned,
    make,
    noise,
)
from observers import KEEPERS, WATCHERS
from torch.utils.data import DataLoader

from composer import Trainer
from composer.core import Callback, State
from composer.devices import DeviceGPU
from composer.loggers import Logger

KEYS = {"input_key": "image", "target_key": "label"}
STEPS = 20
UNWATCHED = 2  # steps in which libraries load kernels and allocate what they keep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated:DeprecationWarning"),  # Neptune's
    pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated"),  # MLflow's
]


@pytest.fixture(autouse=True)
def _default_sync_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    torch.cuda.set_sync_debug_mode("default")


class NoWaiting(Callback):
    """From the start of a step to its end, whatever waits for the device raises."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch >= UNWATCHED:
            torch.cuda.set_sync_debug_mode("error")

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        torch.cuda.set_sync_debug_mode("default")


def fit(
    *,
    callbacks: Any = (),
    lower: bool = False,
    kind: type[Unmasked] = Unmasked,
    precision: str = "",
    saves: bool = False,
    **arguments: Any,
) -> Trainer:
    """Train for some steps that must not wait, except for what is saved after them."""
    model = kind(norm=partial(torch.nn.GroupNorm, 4) if lower else torch.nn.BatchNorm2d)
    batches = DataLoader(noise(8 * STEPS + 8), batch_size=8, collate_fn=captioned, pin_memory=True)
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration=f"{STEPS}ba",
        device="gpu",
        precision=precision or ("amp_bf16" if lower else "fp32"),
        progress_bar=False,
        seed=0,
        callbacks=[NoWaiting(), *callbacks] if saves else [*callbacks, NoWaiting()],
        **arguments,
    )
    trainer.fit()
    trainer.close()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_the_trainer_waits_for_nothing(precision: str) -> None:
    fit(precision=precision)


def test_what_waits_is_caught() -> None:
    class Reading(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            state.loss.item()

    with pytest.raises(RuntimeError, match="synchronizing"):
        fit(callbacks=[Reading()])


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_algorithm_waits_for_nothing(name: str) -> None:
    kind = UnmaskedWithoutMetrics if name in WITHOUT_LOGITS else Unmasked
    fit(algorithms=make(name, KEYS, arguments_of(name)), lower=name in LOWER_PRECISION, kind=kind)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_algorithm_trains_in_float16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoWaiting, "after_dataloader", lambda *_: None)  # the scaler of gradients must read
    kind = UnmaskedWithoutMetrics if name in WITHOUT_LOGITS else Unmasked
    fit(
        algorithms=make(name, KEYS, arguments_of(name)),
        lower=name in LOWER_PRECISION,
        kind=kind,
        precision="amp_fp16",
        device_train_microbatch_size=4,
    )


NOT_IN_STEPS = {"ExportForInferenceCallback", "Generate", "LoadCheckpoint"}  # they work before, after or at intervals


@pytest.mark.parametrize("name", sorted(WATCHERS.keys() - NOT_IN_STEPS))
def test_a_callback_waits_for_nothing(name: str, tmp_path: Path) -> None:
    kind = Unmasked if WATCHERS[name].model.get("metrics", True) else UnmaskedWithoutMetrics
    fit(callbacks=[WATCHERS[name].make(tmp_path)], kind=kind, saves=name == "CheckpointSaver")


@pytest.mark.parametrize("name", sorted(KEEPERS))
def test_a_logger_waits_for_nothing(name: str, tmp_path: Path) -> None:
    try:
        logger = KEEPERS[name](tmp_path).logger
    except ImportError as error:
        pytest.skip(str(error))
    fit(loggers=logger)


def _trained(name: str, device: str | DeviceGPU, seed: int = 0) -> dict[str, torch.Tensor]:
    """The weights after six steps without dropout."""
    lower = name in LOWER_PRECISION
    model = Captioned(norm=partial(torch.nn.GroupNorm, 4) if lower else torch.nn.BatchNorm2d, dropout=0.0)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(noise(48), batch_size=8, collate_fn=captioned),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        algorithms=make(name, KEYS, arguments_of(name)),
        max_duration="6ba",
        device=device,
        precision="amp_bf16" if lower else "fp32",
        progress_bar=False,
        seed=seed,
    )
    trainer.fit()
    trainer.close()
    return {key: value.detach().cpu().float() for key, value in copy.deepcopy(trainer.state.model.state_dict()).items()}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_training_on_a_gpu_follows_training_on_the_cpu(name: str) -> None:
    expected = _trained(name, "cpu")
    if any(not torch.equal(value, expected[key]) for key, value in _trained(name, "cpu", seed=1).items()):
        pytest.skip("it draws random numbers, which differ between devices")
    found = _trained(name, DeviceGPU(allow_tf32=False))

    # Six steps with rates up to 0.5 amplify the rounding of one, 1e-7 (bfloat16: 2 ** -8), about a thousandfold.
    # Muon makes its updates orthogonal in bfloat16.
    tolerance = 0.1 if name in {*LOWER_PRECISION, "Muon"} else 1e-3
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: key + text
        )
