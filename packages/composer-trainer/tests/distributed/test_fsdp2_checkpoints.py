"""Checkpoints of one file: saved by a model divided in one way, resumed by one that is divided in another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import BATCHES, FSDP, ROWS, Block, Losses, Regression, X, Y, filled, make, needs_sharding, weights
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from composer.checkpoint.sharded_tensors import is_sharded
from composer.testing import run_on_ranks
from composer.utils import dist

pytestmark = needs_sharding
EXACT = 1e-10
HALF = BATCHES // 2


class Plain(torch.nn.Module):
    """Without statistics, which differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), Block(4, tied=True), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loader() -> DataLoader[Any]:
    """The same samples in each step, on however many ranks."""
    dataset, ranks = TensorDataset(X.flatten(0, 1), Y.flatten(0, 1)), dist.get_world_size()
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=dist.get_global_rank(), shuffle=False)
    return DataLoader(dataset, batch_size=ROWS // ranks, sampler=sampler)


def run(config: Any, **kwargs: Any) -> Any:
    losses = Losses()
    trainer = make(
        config,
        model=filled(Regression(Plain), seed=kwargs.pop("weights_seed", 0)),
        optimizer="adamw",
        train_dataloader=loader(),
        callbacks=losses,
        **kwargs,
    )
    trainer.fit()
    result = losses.values, weights(trainer)
    trainer.close()
    return result


def saved(config: Any, folder: str, name: str) -> str:
    run(config, save_folder=folder, save_interval=f"{HALF}ba", save_filename=f"{name}-{{batch}}.pt")
    return os.path.join(folder, f"{name}-{HALF}.pt")


def resumed(config: Any, path: str, **kwargs: Any) -> Any:
    return run(config, load_path=path, weights_seed=7, **kwargs)


def on_two(folder: str) -> dict[str, Any]:
    sharded, whole = saved(FSDP, folder, "fsdp2"), saved(None, folder, "ddp2")
    return {
        "uninterrupted": run(FSDP),
        "fsdp2 -> fsdp2": resumed(FSDP, sharded),
        "fsdp2 -> ddp2": resumed(None, sharded),
        "ddp2 -> fsdp2": resumed(FSDP, whole),
    }


def partly(folder: str) -> dict[str, Any]:
    """Load parts of a checkpoint."""
    path = os.path.join(folder, "fsdp2.pt")
    trainer = make(FSDP, model=filled(Regression(Plain)), optimizer="adamw")
    trainer.fit(duration="2ba")
    trainer.save_checkpoint(path)
    before = weights(trainer)
    trainer.close()
    found: dict[str, Any] = {"saved": before}
    for name, options in {
        "weights": {"load_weights_only": True},
        "no optimizer": {"load_ignore_keys": ["state/optimizers"]},
        "not one": {"load_ignore_keys": ["state/model/net.layers.0.weight"], "load_strict_model_weights": False},
    }.items():
        trainer = make(FSDP, model=filled(Regression(Plain), seed=7), optimizer="adamw", load_path=path, **options)
        state = trainer.state
        steps = [float(values["step"]) for values in state.optimizers[0].state.values()]
        moments = [is_sharded(values["exp_avg"]) for values in state.optimizers[0].state.values()]
        found[name] = weights(trainer), state.timestamp.batch.value, steps, moments
        trainer.close()
    return found


def on_four(folder: str) -> dict[str, Any]:
    paths = {name: os.path.join(folder, f"{name}-{HALF}.pt") for name in ("fsdp2", "ddp2", "one")}
    found = {f"{name} -> fsdp4": resumed(FSDP, path) for name, path in paths.items()}
    hybrid = {"fsdp": {"data_parallel_replicate_degree": 2}}
    found["one -> hybrid4"] = resumed(hybrid, paths["one"])
    saved(FSDP, folder, "fsdp4")
    return found


def on_one(folder: str) -> dict[str, Any]:
    """A single process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert dist.get_world_size() == 1
    divided, whole = run(FSDP), run(None)
    return {
        "uninterrupted": whole,
        "divided": divided,
        "one -> fsdp1": resumed(FSDP, os.path.join(folder, f"one-{HALF}.pt")),
    }


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of all runs, of the first rank."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    found = dict(run_on_ranks(on_two, 2, folder, timeout=200)[0])
    saved(None, folder, "one")
    with pytest.warns(UserWarning, match="saved by 2 processes, but 1 are running"):
        found["fsdp2 -> one"] = resumed(None, os.path.join(folder, f"fsdp2-{HALF}.pt"))
    found |= run_on_ranks(on_four, 4, folder, timeout=200)[0]
    with pytest.warns(UserWarning, match="saved by 4 processes, but 1 are running"):
        found["fsdp4 -> one"] = resumed(None, os.path.join(folder, f"fsdp4-{HALF}.pt"))
    alone = run_on_ranks(on_one, 1, folder, timeout=100, backend=None)[0]
    return found | {f"alone {name}": values for name, values in alone.items()}


def test_a_run_goes_on_however_it_is_divided(curves: dict[str, Any]) -> None:
    losses, final = curves["uninterrupted"]
    assert len(losses) == BATCHES

    for name, (other_losses, other_final) in curves.items():
        assert other_losses == pytest.approx(losses[-len(other_losses) :], abs=EXACT), name
        assert len(other_losses) == (HALF if "->" in name else BATCHES), name
        for key in final:
            torch.testing.assert_close(other_final[key], final[key], rtol=0, atol=EXACT, msg=f"{name} {key}")


def test_parts_of_a_checkpoint_are_loaded_into_shards(tmp_path: Path) -> None:
    for found in run_on_ranks(partly, 2, str(tmp_path), timeout=100):
        saved_weights, own = found["saved"], weights_of_seed(7)
        for name in ("weights", "no optimizer"):
            assert all(torch.equal(saved_weights[key], found[name][0][key]) for key in saved_weights)
        assert (0, []) == found["weights"][1:3]
        assert (2, []) == found["no optimizer"][1:3]
        assert found["not one"][1:] == (2, [2.0] * 8, [True] * 8)
        for key, value in found["not one"][0].items():
            expected = own if key == "net.layers.0.weight" else saved_weights
            assert torch.equal(expected[key], value)


def weights_of_seed(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in filled(Regression(Plain), seed).state_dict().items()}
