"""Every argument of the Trainer, given three values that cannot work: each is answered, by name, at construction."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer import Trainer
from composer.core import Algorithm, Callback, Evaluator, Precision, Time
from composer.devices import DeviceCPU
from composer.loggers import LoggerDestination
from composer.optim import ConstantScheduler
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.utils.parallelism import ParallelismConfig

NAN, INF = float("nan"), float("inf")
DATA = RandomClassificationDataset(size=8)


def batches() -> Any:
    yield from loader()


def loader(**arguments: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(DATA, batch_size=4, **arguments)


def sgd(model: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **arguments})


def sgd_of_rate(rate: float) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] = rate
        return optimizer

    return make


FLAGS = ["False", None, 2]
WRONG: dict[str, list[Any]] = {
    "model": [SimpleModel, torch.nn.Linear(1, 1), "resnet50", None],
    "train_dataloader": [DATA, "data/train", {"x": torch.zeros(4)}, torch.utils.data.DataLoader, torch.zeros(4, 3), 3],
    "train_dataloader_label": [3, None, ""],
    "train_subset_num_batches": [0, 1.5, "2", True, NAN],
    "max_duration": ["ten", 1.5, NAN, "-1ba", Time, True],
    "algorithms": ["MixUp", Algorithm, [Callback()]],
    "algorithm_passes": [3, "pass", [3]],
    "optimizers": [torch.optim.SGD, "SGD", sgd(SimpleModel()), sgd_of_rate(NAN), sgd_of_rate(INF), sgd_of_rate(-0.1)],
    "schedulers": [3, ConstantScheduler, "cosine", torch.optim.lr_scheduler.StepLR],
    "scale_schedule_ratio": [0, NAN, INF, "2", True],
    "step_schedulers_every_batch": ["yes", 2, 0.5],
    "eval_dataloader": [DATA, "data/test", {"x": torch.zeros(4)}, Evaluator, 3],
    "eval_interval": ["-1ba", "-0.5dur", NAN, "often", [1], True, Time],
    "eval_subset_num_batches": [0, -2, 1.5, "2"],
    "callbacks": [Callback, 3, [DeviceCPU()]],
    "loggers": [LoggerDestination, 3, [Callback()]],
    "run_name": [3, True, Path],
    "progress_bar": FLAGS,
    "log_to_console": FLAGS,
    "console_stream": ["stdin", 3, None],
    "console_log_interval": ["-1ba", "0ba", "1sp", "often", NAN, None],
    "log_traces": FLAGS,
    "auto_log_hparams": FLAGS,
    "device": ["toaster", 0, DeviceCPU],
    "precision": ["fp8", 16, Precision, torch.float16],
    "precision_config": ["hybrid", 3, dict],
    "device_train_microbatch_size": [0, NAN, INF, "big", True, -1],
    "accumulate_train_batch_on_tokens": FLAGS,
    "seed": [1.5, -1, True, "1", NAN, 2**32],
    "deterministic_mode": FLAGS,
    "dist_timeout": [0, NAN, "300", -1.0, None],
    "ddp_sync_strategy": ["always", 3, True],
    "parallelism_config": ["fsdp", {"dp": {}}, ParallelismConfig, 3],
    "profiler": [True, "profile", dict],
    "python_log_level": ["loud", 10, True],
    "compile_config": ["max", True, {"speed": 1}],
    "load_path": [3, True, Path],
    "load_object_store": ["s3", 3, dict],
    "load_weights_only": FLAGS,
    "load_strict_model_weights": FLAGS,
    "load_progress_bar": FLAGS,
    "load_ignore_keys": [3, "state/model", [3]],
    "load_exclude_algorithms": [3, "BlurPool", [Algorithm]],
    "save_folder": [3, True, Path],
    "save_filename": [3, None, True],
    "save_latest_filename": [3, True, Path],
    "save_overwrite": FLAGS,
    "save_interval": ["-1ba", "0ba", NAN, [1]],
    "save_weights_only": FLAGS,
    "save_ignore_keys": [3, "state/model", [3]],
    "save_num_checkpoints_to_keep": [-2, 1.5, "3", True],
    "save_metrics": FLAGS,
    "save_num_best_checkpoints_to_keep": [-1, 1.5, "3"],
    "save_monitor": [3, True, ""],
    "save_monitor_mode": ["up", 3, None],
    "save_async": FLAGS,
    "delivery_timeout": [0, NAN, "60", -1.0, None],
    "autoresume": FLAGS,
    "spin_dataloaders": FLAGS,
}
# Arguments that have an effect, and are checked, with these others only.
WITH: dict[str, Callable[[Path], dict[str, Any]]] = {
    "eval_interval": lambda folder: {"eval_dataloader": loader()},
    "eval_subset_num_batches": lambda folder: {"eval_dataloader": loader()},
    "scale_schedule_ratio": lambda folder: {"schedulers": ConstantScheduler()},
    "step_schedulers_every_batch": lambda folder: {"schedulers": ConstantScheduler()},
    "console_log_interval": lambda folder: {"log_to_console": True},
    "console_stream": lambda folder: {"log_to_console": True},
    "save_monitor": lambda folder: {"save_num_best_checkpoints_to_keep": 1},
    "save_monitor_mode": lambda folder: {"save_num_best_checkpoints_to_keep": 1, "save_monitor": "loss"},
}


CASES = [
    pytest.param(name, value, id=f"{name}-{i}") for name, values in WRONG.items() for i, value in enumerate(values)
]


def arguments_with(name: str, value: Any, folder: Path) -> dict[str, Any]:
    model = SimpleModel()
    defaults = {
        "model": model,
        "train_dataloader": loader(),
        "max_duration": "2ep",
        "progress_bar": False,
        "device": "cpu",
        "optimizers": sgd(model),
    }
    if name == "optimizers" and inspect.isfunction(value):
        value = value(model)
    if name.startswith("save_") or name == "autoresume":
        defaults |= {"save_folder": folder, "run_name": "run"}
    return {**defaults, **WITH.get(name, lambda folder: {})(folder), name: value}


def test_every_argument_is_tried() -> None:
    assert set(WRONG) == set(inspect.signature(Trainer).parameters)
    assert [name for name, values in WRONG.items() if len(values) < 3] == []


@pytest.mark.parametrize(("name", "value"), CASES)
def test_what_cannot_work_is_answered_by_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"`(save_)?{name.removeprefix('save_')}`"):
        Trainer(**arguments_with(name, value, tmp_path))
