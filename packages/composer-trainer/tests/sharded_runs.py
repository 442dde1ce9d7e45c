"""Runs on several ranks for the tests of sharding; each process of a launch calls many of them, one after the other."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanSquaredError, SumMetric

from composer.checkpoint.sharded_tensors import gather_tensors, is_sharded
from composer.core import Callback
from composer.models import ComposerModel
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from composer.testing import run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
CAN_SHARD_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_sharding = pytest.mark.skipif(not CAN_SHARD_ON_CPU, reason="`fully_shard` of this torch needs a GPU")

FSDP: dict[str, Any] = {"fsdp": {}}
BATCHES, ROWS = 10, 8
X = torch.randn(BATCHES, ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(BATCHES, ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "decoupled_sgdw": lambda p: DecoupledSGDW(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "decoupled_adamw": lambda p: DecoupledAdamW(p, lr=0.01, weight_decay=1e-4),
}


class Block(torch.nn.Module):
    """Two layers; with `tied`, they are one parameter."""

    def __init__(self, width: int, tied: bool = False) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        if tied:
            self.two.weight = self.one.weight
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x + self.two(torch.tanh(self.one(x)))


class Net(torch.nn.Module):
    """Statistics, tied and frozen weights, and a layer whose first dimension is smaller than the number of ranks."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
        self.blocks = torch.nn.ModuleList([Block(5, tied=True), Block(5)])
        self.narrow, self.last = torch.nn.Linear(5, 1), torch.nn.Linear(6, 2)
        self.last.bias.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(torch.cat([x, self.narrow(x)], dim=1))


class Narrow(torch.nn.Module):
    """Maps 3 numbers to 2, without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), Block(4), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Regression(ComposerModel):
    """A network, and a weight and a buffer of its own that `loss` and `eval_forward` use."""

    def __init__(self, net: Callable[[], torch.nn.Module] = Net, own: bool = True) -> None:
        super().__init__()
        self.net = net()
        self.scale = torch.nn.Parameter(torch.ones(2)) if own else 1.0
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return (outputs * self.scale + self.shift - batch[1]).square().mean()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) * self.scale

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        if is_train and hasattr(self.net, "norm"):
            return {}  # between evaluations, statistics are each rank's own
        return {"error": MeanSquaredError().set_dtype(torch.float64), "count": SumMetric().set_dtype(torch.float64)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        if isinstance(metric, SumMetric):
            metric.update(batch[1][:, 0])
        else:
            metric.update(outputs, batch[1])


def filled(model: ComposerModel, seed: int = 0) -> ComposerModel:
    """The model in float64, with weights that do not depend on how it was built."""
    model.double()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.5
    return model


class Losses(Callback):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.values.append(float(state.total_loss_dict["loss/train/total"]))


def part(data_ranks: int | None = None, data_rank: int | None = None) -> slice:
    """The rows of a batch that are this rank's."""
    size = ROWS // (dist.get_world_size() if data_ranks is None else data_ranks)
    start = (dist.get_global_rank() if data_rank is None else data_rank) * size
    return slice(start, start + size)


def batches(rows: slice, count: int = BATCHES) -> list[Any]:
    return [(X[i, rows], Y[i, rows]) for i in range(count)]


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return x, x[:, :2] * 2


def data(*lengths: int) -> list[Any]:
    """Batches to evaluate, as many as this rank's length says."""
    x, y = samples(lengths[dist.get_global_rank() % len(lengths)])
    return list(zip(x.split(2), y.split(2), strict=True))


def shared_data(size: int, ranks: int, rank: int) -> DataLoader[Any]:
    """Samples to evaluate, divided among ranks."""
    dataset = TensorDataset(*samples(size))
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Biases learn at a rate of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices}, {"params": others, "lr": 0.05}]


def make(config: Any = None, model: ComposerModel | None = None, optimizer: str = "sgd", **kwargs: Any) -> Trainer:
    model = filled(Regression()) if model is None else model
    defaults: dict[str, Any] = {
        "train_dataloader": batches(part()),
        "max_duration": f"{BATCHES}ba",
        "device": "cpu",
        "progress_bar": False,
        "seed": 3,
        "parallelism_config": config,
        "schedulers": LinearScheduler(alpha_f=0.5),
    }
    optimizers = kwargs.pop("optimizers", None) or OPTIMIZERS[optimizer](groups_of(model))
    return Trainer(model=model, optimizers=optimizers, **{**defaults, **kwargs})


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = gather_tensors(trainer.state.get_model_state_dict())
    return {name.removeprefix("module."): tensor.detach().clone() for name, tensor in state.items()}


def trained(config: Any = None, **kwargs: Any) -> dict[str, Any]:
    """The results of a run."""
    losses = Losses()
    trainer = make(config, callbacks=[losses, *kwargs.pop("callbacks", ())], **kwargs)
    trainer.fit()
    state = trainer.state
    trainer._strategy.broadcast_buffers(trainer._model)  # those of rank 0 are saved and evaluated
    metrics = {
        f"{label}/{name}": float(metric.compute())
        for label, metrics in {"train": state.train_metrics, **state.eval_metrics}.items()
        for name, metric in (metrics or {}).items()
    }
    result = {
        "weights": weights(trainer),
        "losses": losses.values,
        "metrics": metrics,
        "sample": state.timestamp.sample.value,
        "held": sum(_local(p).numel() for p in state.model.parameters()),
        "all": sum(p.numel() for p in state.model.parameters()),
        "sharded": [name for name, p in state.model.named_parameters() if is_sharded(p)],
    }
    trainer.close()
    return result


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if is_sharded(parameter) else parameter


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two runs' weights, losses and metrics."""
    assert one["weights"].keys() == other["weights"].keys()
    assert len(one["losses"]) == len(other["losses"])
    differences = [
        *((one["weights"][name] - other["weights"][name]).abs().max().item() for name in one["weights"]),
        *(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)),
        *(abs(one["metrics"][name] - other["metrics"][name]) for name in one["metrics"]),
    ]
    return max(differences) if all(d == d for d in differences) else float("nan")


def answer(function: Callable[[], Any]) -> str:
    """The message of the error that a call ends with."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  # it is what is asked for
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_all(scenarios: dict[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """Return the results of all scenarios on this rank; an error in one does not stop the others."""
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario(*args)
        except Exception:  # noqa: BLE001  # the test of this scenario raises it
            results[name] = AssertionError(traceback.format_exc())
    return results


def on_ranks(run: Callable[[], dict[str, Any]], ranks: int) -> Callable[[str], list[Any]]:
    """Return the results of a scenario on all ranks of a launch."""
    results = run_on_ranks(run, ranks, timeout=300)

    def of(name: str) -> list[Any]:
        values = [result[name] for result in results]
        for value in values:
            if isinstance(value, AssertionError):
                raise value
        return values

    return of
