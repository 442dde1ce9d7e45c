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
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.optim import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    LinearWithWarmupScheduler,
    MultiStepWithWarmupScheduler,
)
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.utils.parallelism import ParallelismConfig

MakeTrainer = Any  # the fixture's class, in conftest.py
NAN, INF = float("nan"), float("inf")
DATA = RandomClassificationDataset(size=8)


def batches() -> Any:
    yield from loader()


def loader(**arguments: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(DATA, batch_size=4, **arguments)


def sgd(model: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **arguments})


FLAGS = ["False", None, 2]
WRONG: dict[str, list[Any]] = {
    "model": [SimpleModel, "resnet50", None],
    "loss": [torch.nn.MSELoss, "mse", 3],
    "metrics": [3, "accuracy", [torch.nn.Linear(1, 1)]],
    "input_key": [0, "image", len],
    "target_key": [1, "label", len],
    "train_dataloader": [DATA, "data/train", {"x": torch.zeros(4)}, torch.utils.data.DataLoader, torch.zeros(4, 3), 3],
    "train_dataloader_label": [3, None, ""],
    "train_subset_num_batches": [0, 1.5, "2", True, NAN],
    "max_duration": ["ten", 1.5, NAN, "-1ba", Time, True],
    "branch_duration": ["ten", 1.5, NAN, "-1ba", Time, True],
    "algorithms": ["MixUp", Algorithm, [Callback()]],
    "algorithm_passes": [3, "pass", [3]],
    "optimizers": [torch.optim.SGD, "SGD", sgd(SimpleModel())],
    "schedulers": [3, ConstantScheduler, "cosine", torch.optim.lr_scheduler.StepLR],
    "scale_schedule_ratio": [0, NAN, INF, "2", True],
    "step_schedulers_every_batch": ["yes", 2, 0.5],
    "eval_dataloader": [DATA, "data/test", {"x": torch.zeros(4)}, Evaluator, 3],
    "eval_interval": ["-1ba", "-0.5dur", NAN, "often", [1], True, Time],
    "eval_subset_num_batches": [0, -2, 1.5, "2"],
    "callbacks": [Callback, 3, [DeviceCPU()]],
    "loggers": [LoggerDestination, 3, [Callback()]],
    "run_name": [3, True, Path, "../run", "/run"],
    "progress_bar": FLAGS,
    "log_to_console": FLAGS,
    "console_stream": ["stdin", 3, None],
    "console_log_interval": ["-1ba", "0ba", "1sp", "often", NAN, None],
    "log_traces": FLAGS,
    "auto_log_hparams": FLAGS,
    "device": ["toaster", 0, DeviceCPU],
    "precision": ["fp8", 64, Precision, torch.float64],
    "precision_config": ["hybrid", 3, dict],
    "device_train_microbatch_size": [0, NAN, INF, "big", True, -1],
    "accumulate_train_batch_on_tokens": FLAGS,
    "seed": [1.5, -1, True, "1", NAN, 2**32],
    "deterministic_mode": FLAGS,
    "dist_timeout": [0, NAN, "300", -1.0, None],
    "ddp_sync_strategy": ["always", 3, True],
    "deepspeed_config": [3, "nowhere.json", {}],
    "parallelism_config": ["fsdp", {"dp": {}}, ParallelismConfig, 3],
    "profiler": [True, "profile", dict],
    "python_log_level": ["loud", 10, True],
    "compile_config": ["max", True, {"speed": 1}],
    "compile_step": FLAGS,
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
    "branch_duration": lambda folder: {"max_duration": None, "load_path": folder / "run.pt"},
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


def test_a_run_that_would_never_end_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="`max_duration` must not be in iterations, got '2iter'"):
        make_trainer(max_duration="2iter")
    for arguments in (
        {"max_duration": "100tok"},
        {"eval_interval": "100tok", "eval_dataloader": make_trainer.loader()},
        {"schedulers": CosineAnnealingScheduler(t_max="100tok")},
    ):
        with pytest.raises(RuntimeError, match=r"must have tokens .* `DataSpec\(dataloader, get_num_tokens_in_batch"):
            make_trainer(**arguments).fit()
    with pytest.raises(ValueError, match="must not be in iterations, got '1iter'"):
        make_trainer(eval_interval="1iter", eval_dataloader=make_trainer.loader()).fit()
    with pytest.raises(ValueError, match="schedule must not be in iterations"):
        make_trainer(schedulers=CosineAnnealingScheduler(t_max="2iter"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, None])
def test_a_factor_that_ruins_the_weights_is_refused_when_it_is_computed(make_trainer: MakeTrainer, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"must return a factor .*, got {bad} at epoch 0 and batch 0"):
        make_trainer(schedulers=lambda state, ssr=1.0: bad)
    trainer = make_trainer(schedulers=lambda state, ssr=1.0: 0.1 if state.timestamp.batch < 3 else bad)
    with pytest.raises(ValueError, match=rf"got {bad} at epoch 0 and batch 3"):
        trainer.fit()
    assert all(parameter.isfinite().all() for parameter in trainer.state.model.parameters())


def test_a_torch_scheduler_that_gives_nan_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else float("nan"))
    with pytest.raises(ValueError, match="`LambdaLR` must return finite learning rates, got nan"):
        make_trainer(model=model, optimizers=optimizer, schedulers=scheduler).fit()


def test_a_trial_of_one_batch_is_warned_of_a_longer_warmup(make_trainer: MakeTrainer) -> None:
    for schedule in (LinearWithWarmupScheduler("50ep"), MultiStepWithWarmupScheduler("50ep", ["60ep"])):
        with pytest.warns(
            UserWarning, match="`t_warmup` should not be longer than the run, got '200ba' in a run of '1ba'"
        ):
            make_trainer(schedulers=schedule, max_duration="1ba").fit()


def test_several_loaders_are_not_a_loader(make_trainer: MakeTrainer) -> None:
    for several in (tuple, list):
        with pytest.raises(
            TypeError, match=rf"`train_dataloader` must be one loader, got a {several.__name__} of 2\. Join"
        ):
            make_trainer(train_dataloader=several([make_trainer.loader(), make_trainer.loader()]))


def test_a_logger_among_the_callbacks_logs(make_trainer: MakeTrainer) -> None:
    logger = InMemoryLogger()
    make_trainer(callbacks=logger).fit()

    assert 8 == len(logger.data["loss/train/total"])
    with pytest.raises(TypeError, match=r"`loggers` must hold `LoggerDestination` objects.* Pass it in `callbacks`\."):
        make_trainer(loggers=Callback())


def test_an_object_is_given_once(make_trainer: MakeTrainer) -> None:
    class Silent(Callback):
        pass

    callback, logger = Silent(), InMemoryLogger()
    for arguments in ({"callbacks": [callback, callback]}, {"loggers": [logger, logger]}):
        with pytest.raises(ValueError, match=rf"`{next(iter(arguments))}` must contain every object once"):
            make_trainer(**arguments)
    with pytest.raises(ValueError, match="`callbacks` and `loggers` must contain every object once"):
        make_trainer(callbacks=[logger], loggers=[logger])
    make_trainer(callbacks=[Silent(), Silent()])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"optimizers": []}, r"`optimizers` must be one .*, got \[\]"),
        ({"optimizers": {}}, r"`optimizers` must be one .*, got \{\}"),
        ({"schedulers": {}}, r"`schedulers` must be a scheduler"),
        ({"schedulers": print}, "must return a factor of the learning rate, .* got None"),
        ({"save_folder": ""}, "`save_folder` must not be empty"),
        ({"train_dataloader": (torch.zeros(4, 1), torch.zeros(4).long())}, "a tuple of 2 tensors of 4 samples"),
        ({"train_dataloader": [torch.zeros(4, 1), torch.zeros(4).long()]}, "a list of 2 tensors of 4 samples"),
        ({"train_dataloader": [5, 6]}, "got a list with 5"),
        ({"train_dataloader": [None]}, "got a list with None"),
        ({"train_dataloader": [()]}, r"got a list with \(\)"),
    ],
)
def test_what_cannot_be_meant_is_refused(make_trainer: MakeTrainer, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make_trainer(**arguments)


def test_a_pass_returns_algorithms(make_trainer: MakeTrainer) -> None:
    with pytest.raises(TypeError, match="must return a list of algorithms, got None"):
        make_trainer(algorithm_passes=print)


def test_an_evaluator_is_not_labelled_as_training(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="`label` must not be 'train'"):
        Evaluator(label="train", dataloader=make_trainer.loader())


def test_a_checkpoint_by_hand_has_a_name(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    for name, match in (
        (5, "must be a path"),
        (str(tmp_path), "must be the path of a file"),
        ("x{nope}", "{nope} is not known"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"`name` .*{match}"):
            trainer.save_checkpoint(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trainer.save_checkpoint("~/here.pt") == str(tmp_path / "here.pt")
    make_trainer(save_folder="~/runs", run_name="r").fit()
    assert (tmp_path / "runs").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"link': it, or a part of its path, is a file or a link to something"):
        make_trainer(save_folder=tmp_path / "link", run_name="r")
