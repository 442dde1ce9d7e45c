"""Tests that need a CUDA device; skipped without one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core import Callback, State
from composer.distributed import prepare_ddp_module
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel, run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist
from composer.utils.reproducibility import seed_context

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


def _train_alone(config: dict[str, Any] | None, precision: str) -> dict[str, torch.Tensor]:
    """Train in a process group of one rank, under NCCL; its state."""
    with seed_context(0):
        model = SimpleModel()
        batches = list(torch.utils.data.DataLoader(RandomClassificationDataset(size=200), batch_size=4))
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        device="gpu",
        precision=precision,
        seed=0,
        progress_bar=False,
        parallelism_config=config,
    )
    trainer.fit()
    assert config is None or torch.distributed.get_backend() == "nccl"
    saved = trainer.state.model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().cpu() for name, value in saved.items()}


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16", "amp_bf16"])
def test_a_sharded_model_on_one_rank_trains_like_a_whole_one(precision: str) -> None:
    (sharded,) = run_on_ranks(_train_alone, 1, {"fsdp": {}}, precision, timeout=120.0, backend=None)
    (whole,) = run_on_ranks(_train_alone, 1, None, precision, timeout=120.0, backend=None)

    # Half precision rounds in other places: parameters and inputs are cast, not each operation's operands.
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=tolerance, atol=tolerance)


def _exchange_alone() -> bool:
    dist.initialize_dist("gpu")
    layer = torch.nn.Linear(4, 2).cuda()
    wrapped = prepare_ddp_module(layer, find_unused_parameters=False)
    wrapped(torch.ones(3, 4, device="cuda")).sum().backward()
    expected = torch.full((2, 4), 3.0)
    return isinstance(wrapped, DistributedDataParallel) and torch.equal(layer.weight.grad.cpu(), expected)


def test_data_parallel_training_on_one_rank_under_nccl() -> None:
    assert run_on_ranks(_exchange_alone, 1, timeout=120.0, backend=None) == [True]
