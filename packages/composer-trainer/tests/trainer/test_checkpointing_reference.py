"""Checkpoints in the established layout load: here they are put together by hand, key by key."""

from __future__ import annotations

import copy
import datetime
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from composer.checkpoint import UnsafeCheckpointError, load_checkpoint
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.optim import LinearScheduler
from composer.testing import SimpleModelWithDropout
from composer.trainer import Trainer

NEW_COUNTS = ("iteration", "epoch_in_iteration", "token_in_iteration", "iteration_wct")


class Counter(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def names_of(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def optimizer_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    saved, names = optimizer.state_dict(), names_of(model)
    return {
        "state": {names[number]: value for number, value in saved["state"].items()},
        "param_groups": [{**g, "params": [names[number] for number in g["params"]]} for g in saved["param_groups"]],
    }


def generators() -> dict[str, Any]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return {"python": random.getstate(), "numpy": legacy, "torch": torch.get_rng_state()}


def timestamp(**counts: Any) -> dict[str, Any]:
    """A timestamp of today's files; `counts` are not zero."""
    zero = datetime.timedelta()
    names = "iteration epoch batch sample token epoch_in_iteration token_in_iteration"
    names += " batch_in_epoch sample_in_epoch token_in_epoch"
    clocks = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
    return {**dict.fromkeys(names.split(), 0), **dict.fromkeys(clocks, zero), **counts}


def metadata() -> dict[str, Any]:
    environment = {"composer_version": "0.32.1", "composer_commit_hash": None, "num_nodes": 1, "num_gpus": 0}
    return {
        "composer_env_info": environment,
        "torch_version": torch.__version__,  # no plain string
        "device": "cpu",
        "precision": "fp32",
        "world_size": 1,
        "device_train_microbatch_size": None,
        "train_dataloader_batch_size": 4,
    }


def layout(state: State) -> dict[str, Any]:
    """A run in the established layout."""
    model, optimizer = state.model, state.optimizers[0]
    (schedule,) = state.schedulers
    return {
        "state": {
            "model": model.state_dict(),
            "optimizers": {type(optimizer).__qualname__: optimizer_by_name(model, optimizer)},
            "schedulers": {"LambdaLR": {**schedule.state_dict(), "verbose": False}},
            "algorithms": [("MixUp", {"repr": "MixUp(alpha=0.2,interpolate_loss=False,input_key=0,target_key=1)"})],
            "callbacks": {type(c).__qualname__: c.state_dict() for c in state.callbacks if isinstance(c, Counter)},
            "timestamp": {"Timestamp": state.timestamp.state_dict()},
            "rank_zero_seed": state.rank_zero_seed,
            "run_name": "1697-established-run",
            "dataset_state": {"train": None, "eval": {}},
            "integrations": {},
            "metadata": metadata(),
        },
        "rng": [generators()],
    }


class Writer(Callback):
    """Writes the established layout at an event of a batch."""

    def __init__(self, path: Path, batch: int, event: Event) -> None:
        self.path, self.batch, self.event = path, batch, event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and state.timestamp.batch == self.batch:
            torch.save(layout(state), self.path)


def trainer_of(make_trainer: Any, **kwargs: Any) -> Trainer:
    """A trainer whose model draws, with a schedule that changes the rate at every batch."""
    torch.manual_seed(kwargs.pop("weights", 1))
    model = SimpleModelWithDropout(num_features=1, num_classes=2)
    optimizer = kwargs.pop("optimizer", torch.optim.Adam)
    defaults = {
        "model": model,
        "optimizers": optimizer(model.parameters(), lr=0.05),
        "schedulers": LinearScheduler(),
        "step_schedulers_every_batch": True,
    }
    trainer: Trainer = make_trainer(**{**defaults, **kwargs})
    return trainer


def flat_loader(make_trainer: Any, **kwargs: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.rand(16, 1, generator=generator), torch.arange(16) % 2)
    return torch.utils.data.DataLoader(data, 4, **kwargs)


@pytest.mark.parametrize(
    ("batch", "event", "shuffle"), [(4, Event.EPOCH_CHECKPOINT, True), (6, Event.BATCH_CHECKPOINT, False)]
)
@pytest.mark.parametrize("old_counts", [False, True])
def test_run_goes_on_as_if_it_had_not_stopped(
    make_trainer: Any, tmp_path: Path, batch: int, event: Event, shuffle: bool, old_counts: bool
) -> None:
    path = tmp_path / "ep1.pt"
    whole = trainer_of(
        make_trainer,
        train_dataloader=flat_loader(make_trainer, shuffle=shuffle),
        callbacks=[Counter(), Writer(path, batch, event)],
    )
    whole.fit()
    if old_counts:  # files from before there were iterations
        content = torch.load(path, weights_only=False)
        for name in NEW_COUNTS:
            del content["state"]["timestamp"]["Timestamp"][name]
        torch.save(content, path)
    counter = Counter()
    resumed = trainer_of(
        make_trainer,
        weights=2,
        train_dataloader=flat_loader(make_trainer, shuffle=shuffle),
        callbacks=[counter],
        load_path=str(path),
        run_name="another",
        seed=17,
    )

    assert resumed.state.timestamp.batch == batch
    assert resumed.state.timestamp.epoch == 1
    assert resumed.state.run_name == "another"
    assert resumed.state.rank_zero_seed == 0
    assert counter.batches == batch
    resumed.fit()
    for name, value in whole.state.model.state_dict().items():
        assert torch.equal(value, resumed.state.model.state_dict()[name]), name
    assert resumed.state.schedulers[0].get_last_lr() == whole.state.schedulers[0].get_last_lr()
    assert resumed.state.timestamp.batch == 8
    assert counter.batches == 8
    own = {name: resumed.state.timestamp.state_dict()[name] for name in ("epoch", "sample", "iteration", "token")}
    assert own == {name: whole.state.timestamp.state_dict()[name] for name in own}


@pytest.fixture
def content(make_trainer: Any) -> dict[str, Any]:
    """A file's content, of a run after its first epoch."""
    trainer = trainer_of(make_trainer, train_dataloader=flat_loader(make_trainer), callbacks=[Counter()])
    trainer.fit(duration="1ep")
    return copy.deepcopy(layout(trainer.state))


def load(make_trainer: Any, content: dict[str, Any], folder: Path, **kwargs: Any) -> Trainer:
    torch.save(content, folder / "file.pt")
    kwargs = {"train_dataloader": flat_loader(make_trainer), "callbacks": [Counter()], **kwargs}
    return trainer_of(make_trainer, weights=2, load_path=str(folder / "file.pt"), **kwargs)


def assert_loaded(trainer: Trainer, weights: dict[str, torch.Tensor]) -> None:
    for name, value in trainer.state.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_prefixes_and_names_of_old_files(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    saved = content["state"]
    weights = saved["model"]
    saved["model"] = {f"module.{name}": value for name, value in saved["model"].items()}
    saved["_is_model_ddp_wrapped"] = True
    saved["_callbacks"] = saved.pop("callbacks")
    saved["algorithms"] = dict(saved["algorithms"])  # they had a dictionary
    saved["_a_key_nobody_knows"] = 1
    trainer = load(make_trainer, content, tmp_path)

    assert_loaded(trainer, weights)
    assert trainer.state.callbacks[0].batches == 4


def test_optimizers_keyed_by_numbers(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    saved = content["state"]["optimizers"]["Adam"]
    names = saved["param_groups"][0]["params"]
    first = names[0]
    expected = saved["state"][first]["exp_avg"].clone()
    saved["state"] = {names.index(name): value for name, value in saved["state"].items()}
    saved["param_groups"][0]["params"] = list(range(len(names)))
    trainer = load(make_trainer, content, tmp_path)

    parameter = dict(trainer.state.model.named_parameters())[first]
    assert torch.equal(trainer.state.optimizers[0].state[parameter]["exp_avg"], expected)


def test_weights_alone(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    saved = {"state": {name: content["state"][name] for name in ("model", "integrations", "metadata")}}
    trainer = load(make_trainer, saved, tmp_path, load_weights_only=True)

    assert_loaded(trainer, saved["state"]["model"])
    assert trainer.state.timestamp.batch == 0
    with pytest.raises(ValueError, match="like a file of weights"):
        load(make_trainer, saved, tmp_path)


def test_another_optimizer_is_left_alone_with_a_word(
    make_trainer: Any, content: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="SGD"):
        trainer = load(make_trainer, content, tmp_path, optimizer=torch.optim.SGD)

    assert_loaded(trainer, content["state"]["model"])
    assert not trainer.state.optimizers[0].state


def test_missing_callback_is_left_alone_with_a_word(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    del content["state"]["callbacks"]["Counter"]
    with pytest.warns(UserWarning, match="is not in the state_dict"):
        trainer = load(make_trainer, content, tmp_path)

    assert trainer.state.callbacks[0].batches == 0


def test_generators_of_all_ranks_are_listed(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    content["rng"].append(content["rng"][0])  # of two ranks, but there is one
    trainer = load(make_trainer, content, tmp_path)

    with pytest.warns(UserWarning, match="was saved by 2 processes, but 1 are running"):
        trainer.fit()


def test_metrics_with_numpy_values(make_trainer: Any, content: dict[str, Any], tmp_path: Path) -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", save_metrics=True)
    state.train_metrics = {"Accuracy": MulticlassAccuracy(2, average="micro")}
    saved = MulticlassAccuracy(2, average="micro")
    saved.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 1]))
    saved.persistent(mode=True)
    entry = {"state_dict": saved.state_dict(), "_computed": np.array(0.75, dtype=np.float32)}
    torch.save({"state": {"train_metrics": {"Accuracy": entry}, **stub()}}, tmp_path / "file.pt")
    load_checkpoint(tmp_path / "file.pt", state)

    assert state.train_metrics["Accuracy"].compute() == 0.75
    state.train_metrics["Accuracy"].update(torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 1]))
    assert state.train_metrics["Accuracy"].compute() == 3 / 8


def stub() -> dict[str, Any]:
    return {"model": torch.nn.Linear(1, 1).state_dict(), "timestamp": {"Timestamp": timestamp(batch=5)}}


def test_whole_metrics_of_old_files_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"state": {"train_metrics": {"Accuracy": MulticlassAccuracy(2)}, **stub()}}, tmp_path / "file.pt")

    with pytest.raises(UnsafeCheckpointError, match=re.escape("MulticlassAccuracy") + "(?s:.*)add_safe_globals"):
        load_checkpoint(tmp_path / "file.pt", State(model=torch.nn.Linear(1, 1), max_duration="1ep"))


def test_scaler(tmp_path: Path) -> None:
    scaler = {"scale": 2.0**11, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    content = {"state": {"scaler": {"GradScaler": {**scaler, "_growth_tracker": 7}}, **stub()}}
    torch.save(content, tmp_path / "file.pt")
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", scaler=torch.amp.GradScaler("cpu"))
    load_checkpoint(tmp_path / "file.pt", state)

    assert state.scaler is not None
    assert state.scaler.get_scale() == 2.0**11
    assert state.scaler.state_dict()["_growth_tracker"] == 7
    assert state.timestamp.batch == 5
