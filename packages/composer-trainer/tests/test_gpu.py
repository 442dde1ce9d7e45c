"""What only a CUDA device can show; skipped without one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from composer.core import Callback, State
from composer.loggers import Logger

MakeTrainer = Any  # the fixture's class, in conftest.py

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class NoSync(Callback):
    """From the third step on, waiting for the device is an error."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == "2ba":
            torch.cuda.set_sync_debug_mode("error")

    def epoch_end(self, state: State, logger: Logger) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _default_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_fifty_steps_with_the_default_loggers_never_wait_for_the_device(
    make_trainer: MakeTrainer, precision: str
) -> None:
    batches = [(x.cuda(), y.cuda()) for x, y in make_trainer.loader(208)]
    trainer = make_trainer(
        train_dataloader=batches,
        max_duration="1ep",
        device="gpu",
        precision=precision,
        progress_bar=True,
        console_stream=io.StringIO(),
        callbacks=NoSync(),
    )
    trainer.fit()

    assert trainer.state.timestamp.batch == "52ba"


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16"])
def test_training_on_the_gpu_follows_training_on_the_cpu(make_trainer: MakeTrainer, precision: str) -> None:
    cpu, gpu = make_trainer(), make_trainer(device="gpu", precision=precision)
    for trainer in (cpu, gpu):
        trainer.fit()

    # Eight steps in half precision: bf16 keeps 8 bits, so 2 ** -8 per operation, a few operations deep.
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    for a, b in zip(cpu.state.model.parameters(), gpu.state.model.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=tolerance, atol=tolerance)
    assert {"cpu"} == {output.device.type for output in gpu.predict(make_trainer.loader())}
