"""Two ranks in the loops of other libraries: the weights of our `Trainer` on two ranks."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from rank_runs import (
    BATCHES,
    EPOCHS,
    HALVES,
    LANGUAGE,
    SEED,
    SIZE,
    Case,
    algorithms_of,
    in_float64,
    loader_of,
    model_for,
    noise,
    optimizer_of,
    train,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from composer.hosts.accelerate import AcceleratedRun
from composer.hosts.ignite import IgniteRun
from composer.hosts.lightning import ComposeCallback
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist

# Hosts exchange the gradients of the first pass, too: SAM's default is not to.
CASES = {
    "nothing": Case("MixUp", is_plain=True),
    "EMA": Case("EMA", {"half_life": "2ba"}, is_batch_normalized=True),
    "GradientClipping": Case("GradientClipping", {"clipping_type": "norm", "clipping_threshold": 0.1}),
    "LabelSmoothing": Case("LabelSmoothing"),
    "LayerFreezing": Case("LayerFreezing", {"freeze_start": 0.0, "freeze_level": 1.0}),
    "MixUp": Case("MixUp"),
    "SAM": Case("SAM", {"rho": 0.5, "sync_ascent": True}, is_batch_normalized=True),
    "SelectiveBackprop": Case("SelectiveBackprop", {"start": 0.0, "end": 1.0}),
}
SHARDED = ("nothing", "EMA", "GradientClipping", "MixUp", "SAM")
Weights = dict[str, torch.Tensor]


def accelerated(case: Case, is_sharded: bool = False) -> tuple[Accelerator, AcceleratedRun, Any, Any]:
    """A run in Accelerate, which gives each rank its part of the batches: accelerator, run, model and optimizer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    if is_sharded:  # Accelerate shards on GPUs only; from here on it is told that it does
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=0, reshard_after_forward=True
        )
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
    model, collate = model_for(case), partial(in_float64, case.name in LANGUAGE)
    loader: Any = DataLoader(
        noise(BATCHES * SIZE), batch_size=SIZE // 2, collate_fn=collate, generator=torch.Generator()
    )
    run = AcceleratedRun(accelerator, model, algorithms_of(case), max_duration=f"{EPOCHS}ep", seed=SEED)
    net, optimizer, _ = run.prepare(model, optimizer_of(model), loader)
    return accelerator, run, net, optimizer


def train_accelerated(
    accelerator: Accelerator,
    run: AcceleratedRun,
    net: Any,
    optimizer: Any,
    save_at: int = 0,
    folder: Path | None = None,
) -> Weights:
    step = 0
    for batches in run.epochs():
        for batch in batches:
            accelerator.backward(run.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == save_at:
                accelerator.save_state(str(folder))
    return weights_of(net)


def with_accelerate(case: Case) -> Weights:
    accelerator, run, net, optimizer = accelerated(case)
    assert isinstance(net, DistributedDataParallel)
    return {
        name.removeprefix("module."): each for name, each in train_accelerated(accelerator, run, net, optimizer).items()
    }


def with_fsdp(case: Case) -> Weights:
    accelerator, run, net, optimizer = accelerated(case, is_sharded=True)
    assert all(isinstance(weight, DTensor) for weight in net.parameters())
    return train_accelerated(accelerator, run, net, optimizer)


def save_and_resume_with_fsdp(case: Case, folder: Path) -> tuple[Weights, Weights]:
    """Save in the middle of an epoch: the weights at the end, and those of a resumed run."""
    whole = train_accelerated(*accelerated(case, is_sharded=True), save_at=BATCHES + 1, folder=folder)
    accelerator, run, net, optimizer = accelerated(case, is_sharded=True)
    for weight in net.parameters():
        torch.nn.init.zeros_(weight)
    accelerator.load_state(str(folder))
    return whole, train_accelerated(accelerator, run, net, optimizer)


def with_ignite(case: Case) -> Weights:
    model = model_for(case)
    optimizer = optimizer_of(model)
    run = IgniteRun(model, algorithms_of(case), optimizer=optimizer, max_duration=f"{EPOCHS}ep", seed=SEED)
    wrapped = DistributedDataParallel(model, find_unused_parameters=run.find_unused_parameters)
    trainer = run.create_supervised_trainer(wrapped)
    trainer.run(own_loader_of(case, HALVES[dist.get_global_rank()]), max_epochs=EPOCHS)
    return weights_of(model)


class Hosted(pl.LightningModule):
    """A classifier as a module of Lightning."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, batch: Any) -> Any:
        return self.classifier(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.composer.loss(batch)  # type: ignore[operator, union-attr]

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def with_lightning(case: Case) -> Weights:
    model = model_for(case)
    algorithms = algorithms_of(case)
    callback = ComposeCallback(algorithms, forward=lambda module, batch: module(batch), loss=model.loss, seed=SEED)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[callback],
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=any(each.find_unused_parameters for each in algorithms)),
        plugins=[TorchElasticEnvironment()],
        precision="64-true",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Hosted(model), own_loader_of(case, HALVES[dist.get_global_rank()]))
    return weights_of(model)


def own_loader_of(case: Case, rows: tuple[int, int]) -> Any:
    """A loader that draws nothing from the global generator, which hosts iterate at different moments."""
    loader = loader_of(case, rows)
    loader.generator = torch.Generator()
    return loader


def weights_of(model: torch.nn.Module) -> Weights:
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for name, weight in model.named_parameters()
    }


def run_all() -> dict[str, dict[str, Any]]:
    """Of each algorithm, the weights of all hosts on this rank."""
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any]] = {}
    for label, case in CASES.items():
        with mock.patch("rank_runs.loader_of", own_loader_of):
            weights = train(case, HALVES[dist.get_global_rank()])["weights"]
        hosts = {"accelerate": with_accelerate, "ignite": with_ignite, "lightning": with_lightning}
        if label in SHARDED:
            hosts["accelerate, FSDP2"] = with_fsdp
        found[label] = {"trainer": weights, **{host: train_with(case) for host, train_with in hosts.items()}}
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, dict[str, Any]]]:
    """One pair of processes for all cases."""
    return run_on_ranks(run_all, timeout=300.0)


@pytest.mark.parametrize("host", ["accelerate", "ignite", "lightning"])
@pytest.mark.parametrize("label", CASES)
def test_two_ranks_give_the_weights_of_our_trainer(label: str, host: str, on_ranks: Any) -> None:
    for found in on_ranks:
        deep_compare(found[label]["trainer"], found[label][host])
    deep_compare(on_ranks[0][label][host], on_ranks[1][label][host])


@pytest.mark.parametrize("label", SHARDED)
def test_two_ranks_that_share_the_weights(label: str, on_ranks: Any) -> None:
    for found in on_ranks:
        for name, weight in found[label]["trainer"].items():
            # Norms of shards are summed in another order than those of whole tensors: a few roundings in float64.
            torch.testing.assert_close(found[label]["accelerate, FSDP2"][name], weight, rtol=0, atol=1e-14)


def save_and_resume(folder: Path) -> dict[str, tuple[Weights, Weights]]:
    warnings.simplefilter("ignore")
    return {label: save_and_resume_with_fsdp(CASES[label], folder / label) for label in ("EMA", "SAM")}


def test_resuming_with_shared_weights(tmp_path: Path) -> None:
    """The model's file has what algorithms want to have saved: averages of the weights, not those of training."""
    for found in run_on_ranks(save_and_resume, 2, tmp_path, timeout=300.0):
        for whole, resumed in found.values():
            deep_compare(whole, resumed)
