"""Saving and loading through the Trainer."""

from __future__ import annotations

import datetime
import enum
import os
import re
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer.callbacks import CheckpointSaver
from composer.checkpoint import (
    CorruptCheckpointError,
    UnsafeCheckpointError,
    load_checkpoint,
    safe_torch_load,
    save_checkpoint,
)
from composer.checkpoint.safe_load import unloadable
from composer.core import Callback, Event, State
from composer.loggers import FileLogger, Logger
from composer.optim import ConstantScheduler, LinearScheduler
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


class StopAt(Callback):
    """Ends a run as a crash would, after a batch is saved."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError("crashed")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


# ---- saving ----


@pytest.mark.parametrize(
    ("interval", "duration", "saves"),
    [
        *[("1ep", "5ep", 5), ("2ep", "8ep", 4), ("10ba", "8ep", 4), ("0.25dur", "4ep", 4), ("5ba", "10ba", 2)],
        *[("0.35dur", "4ep", 3), ("0.10dur", "70sp", 10), ("0.05dur", "80sp", 20)],
    ],
)
def test_a_run_saves_as_often_as_asked(
    make_trainer: MakeTrainer, tmp_path: Path, interval: str, duration: str, saves: int
) -> None:
    trainer = make_trainer(
        train_dataloader=make_trainer.loader(10, 2), max_duration=duration, save_folder=tmp_path, save_interval=interval
    )
    trainer.fit()

    assert len(trainer.saved_checkpoints) == saves
    assert len(names(tmp_path)) == saves + 1  # the link
    assert os.path.realpath(tmp_path / "latest-rank0.pt") == os.path.realpath(trainer.saved_checkpoints[-1])


@pytest.mark.parametrize(("keep", "left"), [(-1, 4), (0, 0), (1, 1), (3, 3)])
def test_old_checkpoints_are_rotated_out(make_trainer: MakeTrainer, tmp_path: Path, keep: int, left: int) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_interval="2ba", save_num_checkpoints_to_keep=keep)
    trainer.fit()

    files = [name for name in names(tmp_path) if name.startswith("ep")]
    assert len(files) == left == len(trainer.saved_checkpoints)
    assert ("latest-rank0.pt" in names(tmp_path)) == (keep != 0)
    assert files == sorted(os.path.basename(path) for path in trainer.saved_checkpoints)


def test_the_best_by_a_metric_are_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    values = [0.2, 0.9, 0.5, 0.7, 0.1, 0.3]

    class Scripted(Callback):
        def eval_end(self, state: State, logger: Logger) -> None:
            metric = state.eval_metrics["eval"]["Accuracy"]
            metric.reset()
            value = values[state.timestamp.epoch.value - 1]
            targets = torch.arange(10) < 10 * value
            metric.update(torch.nn.functional.one_hot(torch.zeros(10).long(), 2).float(), (~targets).long())

    trainer = make_trainer(
        eval_dataloader=make_trainer.loader(),
        callbacks=Scripted(),
        max_duration="6ep",
        save_folder=tmp_path,
        save_num_checkpoints_to_keep=1,
        save_num_best_checkpoints_to_keep=2,
        save_monitor="eval/Accuracy",
    )
    trainer.fit()

    assert names(tmp_path) == [
        "best-rank0.pt",
        "ep2-ba8-rank0.pt",
        "ep4-ba16-rank0.pt",
        "ep6-ba24-rank0.pt",
        "latest-rank0.pt",
    ]
    assert os.readlink(tmp_path / "best-rank0.pt") == "ep2-ba8-rank0.pt"


def test_the_best_are_known_after_resuming(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(*callbacks: Callback) -> Any:
        return make_trainer(
            callbacks=callbacks,
            max_duration="4ep",
            save_folder=tmp_path,
            save_num_checkpoints_to_keep=1,
            save_num_best_checkpoints_to_keep=2,
            save_monitor="loss/train/total",
            save_monitor_mode="min",
            autoresume=True,
            run_name="best",
        )

    with pytest.raises(InterruptedError):
        trainer(StopAt(9)).fit()
    resumed = trainer()
    assert len(resumed._checkpoint_saver.best.values) == 2
    resumed.fit()

    best = resumed._checkpoint_saver.best
    assert len(best.values) == 2
    assert set(best.paths) <= set(resumed.saved_checkpoints)
    assert all(os.path.isfile(path) for path in best.paths)


def test_a_checkpoint_has_the_known_layout(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, schedulers=LinearScheduler(), save_metrics=True)
    trainer.fit()
    saved = torch.load(tmp_path / "latest-rank0.pt", weights_only=False)

    assert saved.keys() == {"state", "rng", "resumption"}
    state = saved["state"]
    assert state["timestamp"]["Timestamp"]["batch"] == 8
    assert set(state["optimizers"]["SGD"]["state"]) == {name for name, _ in trainer.state.model.named_parameters()}
    assert "LambdaLR" in state["schedulers"]
    assert state["callbacks"]["CheckpointSaver"]["all_saved_checkpoints_to_timestamp"][-1][1]["batch"] == 8
    assert "Accuracy" in state["train_metrics"]
    assert set(saved["rng"][0]) >= {"python", "numpy", "torch"}


def test_weights_alone_are_saved_and_loaded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_weights_only=True)
    trainer.fit()
    path = tmp_path / "latest-rank0.pt"
    assert torch.load(path, weights_only=False).keys() == {"state"}
    assert torch.load(path, weights_only=False)["state"].keys() == {"model", "integrations", "metadata"}

    other = make_trainer(load_path=path, load_weights_only=True)
    deep_compare(weights(other), weights(trainer))
    assert other.state.timestamp.batch == 0
    with pytest.raises(ValueError, match="holds the weights only"):
        make_trainer(load_path=path)


def test_what_is_to_be_ignored_is_not_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path, save_ignore_keys=["state/optimizers", "rng"]).fit()
    saved = torch.load(tmp_path / "latest-rank0.pt", weights_only=False)

    assert "rng" not in saved
    assert "optimizers" not in saved["state"]


def test_a_run_can_be_saved_at_any_time(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(duration="1ep")
    path = trainer.save_checkpoint(str(tmp_path / "{run_name}-ep{epoch}.pt"))
    assert path == str(tmp_path / f"{trainer.state.run_name}-ep1.pt")
    loaded = make_trainer(load_path=path)
    deep_compare(weights(loaded), weights(trainer))
    assert loaded.state.timestamp.batch == 4
    with pytest.raises(ValueError, match="you must pass a save_folder"):
        trainer.save_checkpoint_to_save_folder()
    saving = make_trainer(save_folder=tmp_path / "folder")
    saving.save_checkpoint_to_save_folder()
    assert names(tmp_path / "folder") == ["ep0-ba0-rank0.pt", "latest-rank0.pt"]
    assert saving.saved_checkpoints == [str(tmp_path / "folder" / "ep0-ba0-rank0.pt")]


def test_in_the_background_the_same_files_are_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for name, background in (("now", False), ("later", True)):
        trainer = make_trainer(save_folder=tmp_path / name, save_interval="1ba", save_async=background, run_name="run")
        trainer.fit()
        trainer.close()

    assert names(tmp_path / "now") == names(tmp_path / "later")
    for name in names(tmp_path / "now"):
        first, second = (torch.load(tmp_path / folder / name, weights_only=False) for folder in ("now", "later"))
        for saved in (first, second):
            saved["state"].pop("callbacks")
            saved["state"].pop("timestamp")
            saved.pop("resumption")
        deep_compare(first, second)


def test_files_of_another_run_stop_a_new_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path).fit()
    with pytest.raises(FileExistsError, match=r"save_overwrite=True") as caught:
        make_trainer(save_folder=tmp_path).fit()
    assert "autoresume=True" in str(caught.value)
    make_trainer(save_folder=tmp_path, save_overwrite=True).fit()


def test_a_state_that_will_not_load_is_told_when_it_is_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": [Path("x")]}

    with pytest.warns(UserWarning, match=r"At 'state/callbacks/.*Odd/path/0'.* a `pathlib.*Path`"):
        make_trainer(save_folder=tmp_path, callbacks=Odd()).fit()


class Color(enum.Enum):
    RED = 1


def holds_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


LOADABLE = {
    "empty array": lambda: np.zeros((0, 3)),
    "text": lambda: np.array(["ab"]),
    "dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "generator": lambda: np.random.RandomState(0).get_state(),
    "frozen set": lambda: frozenset({1}),
    "bytearray": lambda: bytearray(b"ab"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "view": lambda: torch.arange(12).view(3, 4).t(),
    "shared": lambda: [[1, 2]] * 50,
}
UNLOADABLE = {
    "fields": (lambda: np.zeros(2, dtype=[("a", "i4")]), "a NumPy type with parts", []),
    "objects": (lambda: np.array([1, "a"], dtype=object), "the NumPy type 'O8'", []),
    "deque": (lambda: deque([1]), "it holds `collections.deque`", [deque]),
    "strided nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor", []),
    "itself": (holds_itself, "one that holds itself", []),
    "large from one": (lambda: torch.ones(1).expand(10**9), r"shape \(1000000000,\) over 4 bytes", []),
    "repeated": (lambda: [list(range(1_000))] * 2_000, "references that repeat", []),
}
ALLOWED_ONLY = {
    "enum": (Color.RED, [Color]),
    "key": ({Color.RED: 1}, [Color]),
    "date": (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), [datetime.datetime, datetime.timezone]),
    "range": (range(3), [range]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Validating sparse tensor")
@pytest.mark.parametrize("name", LOADABLE)
def test_what_loads_is_saved_without_a_word(tmp_path: Path, name: str) -> None:
    value = LOADABLE[name]()
    content = {"callbacks": {"Mine": value}}

    assert list(unloadable(content)) == []
    torch.save(content, tmp_path / "a.pt")
    assert type(safe_torch_load(tmp_path / "a.pt")["callbacks"]["Mine"]) is type(value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_cannot_be_loaded_is_told_whatever_is_allowed(tmp_path: Path, name: str) -> None:
    make, reason, types = UNLOADABLE[name]
    content = {"callbacks": {"Other": [1], "Mine": make()}}
    torch.save(content, tmp_path / "a.pt")
    with torch.serialization.safe_globals(types):
        ((where, what),) = unloadable(content)
        with pytest.raises(UnsafeCheckpointError) as caught:
            safe_torch_load(tmp_path / "a.pt")

    assert where == "callbacks/Mine"
    assert re.search(f"cannot be loaded again: it holds .*{reason.removeprefix('it holds ')}", what)
    assert "allow these types" not in str(caught.value)


@pytest.mark.parametrize("name", ALLOWED_ONLY)
def test_what_loads_once_it_is_allowed_names_all_types(tmp_path: Path, name: str) -> None:
    value, types = ALLOWED_ONLY[name]
    content = {"callbacks": {"Mine": value}}
    ((where, what),) = unloadable(content)
    torch.save(content, tmp_path / "a.pt")

    assert where == "callbacks/Mine"
    assert all(f"`{kind.__module__}.{kind.__qualname__}`" in what.partition("with")[2] for kind in types)
    with torch.serialization.safe_globals(types):
        assert list(unloadable(content)) == []
        assert safe_torch_load(tmp_path / "a.pt") == content


def test_one_value_out_of_many_is_found_quickly() -> None:
    shared = list(range(1_000))
    content = {"many": {f"layer{i}": shared for i in range(1_000)}, "odd": [shared, Path("x")]}

    assert [where for where, _ in unloadable(content)] == ["odd/1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_num_checkpoints_to_keep": -2}, "save|num_checkpoints_to_keep"),
        ({"save_num_best_checkpoints_to_keep": 2}, "must be given together"),
        ({"save_monitor": "eval/Accuracy"}, "must be given together"),
        ({"save_num_best_checkpoints_to_keep": -1, "save_monitor": "a/b"}, "must be a number of checkpoints"),
        ({"save_num_best_checkpoints_to_keep": 1, "save_monitor": "Accuracy"}, "for example 'eval/Accuracy'"),
        (
            {"save_num_best_checkpoints_to_keep": 1, "save_monitor": "a/b", "save_monitor_mode": "best"},
            "'max' or 'min'",
        ),
        ({"save_filename": "a.tar.zip"}, "valid tarfile extension"),
    ],
)
def test_bad_arguments_of_saving_are_refused(
    make_trainer: MakeTrainer, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(save_folder=tmp_path, **arguments)


def test_an_unknown_metric_is_refused_before_training(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_num_best_checkpoints_to_keep=1, save_monitor="eval/Accuracy")
    with pytest.raises(ValueError, match="It has: train/Accuracy"):
        trainer.fit()


def test_the_savers_own_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="num_concurrent_uploads"):
        CheckpointSaver(num_concurrent_uploads=0)
    with pytest.raises(ValueError, match="upload_timeout_in_seconds"):
        CheckpointSaver(upload_timeout_in_seconds=0)


def test_arguments_without_effect_are_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no effect without `save_folder`"):
        make_trainer(save_interval="2ba")
    with pytest.warns(UserWarning, match="`CheckpointSaver`, whose arguments are used"):
        make_trainer(callbacks=CheckpointSaver(tmp_path), save_folder=tmp_path)
    with pytest.raises(ValueError, match="no effect without `load_path`"):
        make_trainer(load_weights_only=True)


def test_a_saver_of_ones_own_is_used(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path / "{run_name}", save_interval=lambda state, event: event is Event.EPOCH_CHECKPOINT)
    trainer = make_trainer(callbacks=[saver, Callback()], run_name="mine")
    trainer.fit()

    assert names(tmp_path / "mine") == ["ep1-ba4-rank0.pt", "ep2-ba8-rank0.pt", "latest-rank0.pt"]
    assert trainer.saved_checkpoints == saver.saved_checkpoints


# ---- loading ----


def test_a_loaded_run_goes_on_as_if_it_had_not_ended(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(**kwargs: Any) -> Any:
        loader = make_trainer.loader(shuffle=True)
        return make_trainer(train_dataloader=loader, schedulers=LinearScheduler(), **kwargs)

    whole = trainer(save_folder=tmp_path, save_interval="1ba")
    whole.fit()
    for name in [name for name in names(tmp_path) if name.startswith("ep")][:-1]:
        resumed = trainer(load_path=tmp_path / name)
        resumed.fit()
        deep_compare(weights(resumed), weights(whole))
        deep_compare(resumed.state.optimizers[0].state_dict(), whole.state.optimizers[0].state_dict())


def test_names_may_have_variables(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=f"{tmp_path}/{{run_name}}", run_name="a").fit()
    loaded = make_trainer(load_path=f"{tmp_path}/{{run_name}}/ep1-ba4-rank{{rank}}.pt", run_name="a")

    assert loaded.state.timestamp.epoch == 1


def test_a_loaded_run_keeps_its_own_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path, run_name="first").fit()
    assert make_trainer(load_path=tmp_path / "latest-rank0.pt", run_name="second").state.run_name == "second"


def test_a_model_of_other_shape_is_an_error(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path).fit()
    path = tmp_path / "latest-rank0.pt"

    class Grown(type(make_trainer.model())):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    for weights_only in (True, False):
        with pytest.raises(RuntimeError, match=r"Missing key.*extra|extra"):
            make_trainer(model=Grown(), load_path=path, load_weights_only=weights_only)
    with pytest.warns(UserWarning, match="does not match"):
        make_trainer(model=Grown(), load_path=path, load_weights_only=True, load_strict_model_weights=False)


def test_parts_can_be_left_out(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trained = make_trainer(save_folder=tmp_path)
    trained.fit()
    path = tmp_path / "latest-rank0.pt"
    fresh = weights(make_trainer())
    nothing = make_trainer(load_path=path, load_ignore_keys=["*"])
    assert nothing.state.timestamp.batch == 0
    deep_compare(weights(nothing), fresh)
    some = make_trainer(
        load_path=path, load_ignore_keys=["state/model/module.2*", "state/model/fc1*", "state/optimizers"]
    )
    deep_compare(weights(some)["module.2.weight"], fresh["module.2.weight"])
    deep_compare(weights(some)["module.4.weight"], weights(trained)["module.4.weight"])
    assert some.state.timestamp.batch == 8
    assert not some.state.optimizers[0].state

    def drop(content: dict[str, Any]) -> None:
        del content["state"]["timestamp"]

    assert make_trainer(load_path=path, load_ignore_keys=drop).state.timestamp.batch == 0


def test_a_damaged_checkpoint_is_not_loaded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path).fit()
    path = tmp_path / "ep2-ba8-rank0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match=r"ep2-ba8-rank0\.pt"):
        make_trainer(load_path=path)


def test_a_renamed_checkpoint_is_loaded_with_a_word(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path).fit()
    os.rename(tmp_path / "ep1-ba4-rank0.pt", tmp_path / "ep2-ba8-rank0.pt")

    with pytest.warns(UserWarning, match="was saved as 'ep1-ba4-rank0.pt'"):
        trainer = make_trainer(load_path=tmp_path / "ep2-ba8-rank0.pt")
    assert trainer.state.timestamp.batch == 4


def test_something_else_is_no_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of a run"):
        make_trainer(load_path=tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        make_trainer(load_path=tmp_path / "b.pt")


def refuse(path: str) -> bool:
    return False


def accept(path: str) -> bool:
    return Path(path).is_file()


def test_ones_own_function_can_refuse_a_file(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(save_folder=tmp_path).fit()
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "os.path.isdir")
    with pytest.raises(ValueError, match="refuses the checkpoint"):
        make_trainer(load_path=tmp_path / "latest-rank0.pt")
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "os.path.isfile")
    make_trainer(load_path=tmp_path / "latest-rank0.pt")


def test_states_are_saved_and_loaded_without_a_trainer(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trained, other = make_trainer(), make_trainer()
    trained.fit()
    path = save_checkpoint(trained.state, str(tmp_path / "ep{epoch}.pt"))
    assert path is not None
    rng = load_checkpoint(path, other.state)

    assert rng is not None
    assert len(rng) == 1
    deep_compare(other.state.model.state_dict(), trained.state.model.state_dict())


# ---- resuming by itself ----


def resuming(make_trainer: MakeTrainer, folder: Path, *callbacks: Callback, **kwargs: Any) -> Any:
    return make_trainer(
        **{
            "train_dataloader": make_trainer.loader(shuffle=True),
            "callbacks": callbacks,
            "save_folder": folder,
            "save_interval": "1ba",
            "autoresume": True,
            "run_name": "run",
            **kwargs,
        }
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_folder": None, "save_interval": "1ep"}, "needs `save_folder`"),
        ({"save_latest_filename": None}, "needs `save_latest_filename`"),
        ({"run_name": None}, "needs a `run_name`"),
        ({"save_weights_only": True}, "cannot continue from weights alone"),
    ],
)
def test_resuming_says_what_it_needs(
    make_trainer: MakeTrainer, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resuming(make_trainer, tmp_path, **arguments)


def test_the_newest_intact_checkpoint_is_taken(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = resuming(make_trainer, tmp_path / "whole")
    whole.fit()
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(6)).fit()
    newest, older = tmp_path / "run" / "ep1-ba6-rank0.pt", tmp_path / "run" / "ep1-ba5-rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    older.write_bytes((tmp_path / "run" / "ep0-ba3-rank0.pt").read_bytes())
    with pytest.warns(UserWarning, match="an older") as caught:
        resumed = resuming(make_trainer, tmp_path / "run", progress_bar=True)
    texts = [str(warning.message) for warning in caught]
    assert any("ep1-ba6-rank0.pt' is damaged" in text for text in texts)
    assert any("was saved as 'ep0-ba3-rank0.pt'" in text for text in texts)
    assert resumed.state.timestamp.batch == 4
    resumed.fit()

    assert "ep0-ba4-rank0.pt" in capsys.readouterr().err
    deep_compare(weights(resumed), weights(whole))


def test_a_run_without_checkpoint_starts(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_bytes(b"torn")  # no name of a checkpoint
    trainer = resuming(make_trainer, tmp_path)
    trainer.fit()

    assert trainer.state.timestamp.batch == 8


def test_time_is_not_reset_under_checkpoints_that_an_earlier_fit_saved(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(save_folder=tmp_path)
    trainer.fit()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ep*")}
    with pytest.raises(FileExistsError) as caught:
        trainer.fit(duration="1ep", reset_time=True)
    assert str(caught.value) == (
        f"`reset_time=True` would replace checkpoints that an earlier `fit` of this Trainer saved, such as "
        f"{str(tmp_path / 'ep1-ba4-rank0.pt')!r}. Leave it out, so that `duration` is counted from the present time; "
        f"save to another folder, or under another `save_filename`, with another Trainer; or pass "
        f"`save_overwrite=True` to the Trainer to replace those checkpoints."
    )
    trainer.fit(duration="1ep")  # it goes on where it was

    assert trainer.state.timestamp.batch == 12
    assert {"ep1-ba4-rank0.pt", "ep2-ba8-rank0.pt"} == before.keys()
    assert all(content == (tmp_path / name).read_bytes() for name, content in before.items())


@pytest.mark.parametrize("options", [{"save_overwrite": True}, {"save_filename": "last.pt"}])
def test_time_is_reset_where_checkpoints_may_be_replaced(
    make_trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = make_trainer(save_folder=tmp_path, **options)
    trainer.fit()
    trainer.fit(duration="1ep", reset_time=True)

    assert trainer.state.timestamp.batch == 4


def test_a_program_of_several_fits_is_relaunched(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def program(folder: str, *callbacks: Callback) -> Any:
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, max_duration=None)
        trainer.fit(duration="6ba")
        trainer.fit(duration="1ep", reset_time=True)
        trainer.fit(duration="3ba")
        return trainer

    whole = program("whole")
    for batch in (2, 5):
        with pytest.raises(InterruptedError):
            program(f"run{batch}", StopAt(batch))
        resumed = program(f"run{batch}")
        deep_compare(weights(resumed), weights(whole))
        assert resumed.state.timestamp.batch == whole.state.timestamp.batch == 7


def test_a_complete_run_says_so_and_can_be_made_longer(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resuming(make_trainer, tmp_path).fit()
    again = resuming(make_trainer, tmp_path, progress_bar=True)
    again.fit()
    assert "nothing is left to train" in capsys.readouterr().err
    assert again.state.timestamp.epoch == 2
    longer = resuming(make_trainer, tmp_path, max_duration="3ep")
    longer.fit()
    whole = resuming(make_trainer, tmp_path / "whole", max_duration="3ep")
    whole.fit()

    assert longer.state.timestamp.batch == 12
    deep_compare(weights(longer), weights(whole))


class CrashIn(Callback):
    """Ends a run as a crash would, at an event of its last batch."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and state.timestamp.batch.value == 8:
            raise InterruptedError("crashed")


@pytest.mark.parametrize(
    "event",
    [Event.BEFORE_DATALOADER, Event.EPOCH_END, Event.EVAL_END, Event.EPOCH_CHECKPOINT, Event.FIT_END],
)
def test_the_end_of_a_run_is_not_left_out(make_trainer: MakeTrainer, tmp_path: Path, event: Event) -> None:
    def program(folder: str, *callbacks: Callback) -> Any:
        loader = make_trainer.loader(shuffle=True)
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, eval_dataloader=loader, eval_interval="3ba")
        trainer.fit()
        return torch.rand(2), dict(trainer.state.eval_metric_values), dict(trainer.state.train_metric_values)

    whole = program("whole")
    with pytest.raises(InterruptedError):
        program("run", CrashIn(event))
    for _ in range(2):  # the first relaunch ends the run, the second finds it complete
        deep_compare(program("run"), whole)


def test_a_relaunched_run_goes_on_in_its_log_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(5), loggers=FileLogger(str(log), capture_stderr=False)).fit()
    make_trainer.made[-1].close()
    trainer = resuming(make_trainer, tmp_path / "run", loggers=FileLogger(str(log), capture_stderr=False))
    trainer.fit()
    trainer.close()

    text = log.read_text()
    assert [f"time/batch: {batch} " in text for batch in range(9)] == [True] * 9


# ---- changed arguments ----


def run_changed(make_trainer: MakeTrainer, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]) -> Any:
    def arguments(options: dict[str, Any]) -> dict[str, Any]:
        options = dict(options)
        model = make_trainer.model()
        lr, decay = options.pop("lr", 0.1), options.pop("weight_decay", 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
        return {"model": model, "optimizers": optimizer, **options}

    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path, StopAt(4), **arguments(first)).fit()
    return resuming(make_trainer, tmp_path, progress_bar=True, **arguments(then))


def test_a_changed_learning_rate_wins(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = {"schedulers": LinearScheduler()}
    resumed = run_changed(make_trainer, tmp_path, {"lr": 0.1, **linear}, {"lr": 0.2, "weight_decay": 0.5, **linear})
    group = resumed.state.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(0.2 * (1 - 3 / 8))  # the schedule of the fourth batch was asked after the third
    assert group["weight_decay"] == 0.5
    assert "lr: 0.1 -> 0.2" in (said := capsys.readouterr().err)
    assert "weight_decay: 0.0 -> 0.5" in said
    rates: list[float] = []

    class Rates(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    resumed.state.callbacks.append(Rates())
    resumed.fit()
    assert rates[1:] == pytest.approx([0.2 * (1 - batch / 8) for batch in range(4, 7)])


def test_without_a_schedule_the_new_rate_is_used(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed = run_changed(make_trainer, tmp_path, {"lr": 0.1}, {"lr": 0.01})
    assert resumed.state.optimizers[0].param_groups[0]["lr"] == 0.01


def test_a_changed_schedule_is_followed_from_where_the_run_is(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant, linear = {"schedulers": ConstantScheduler(0.5)}, {"schedulers": LinearScheduler()}
    resumed = run_changed(make_trainer, tmp_path, constant, linear)
    assert resumed.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 4 / 8))
    assert "schedulers:" in capsys.readouterr().err


def test_a_schedule_of_torch_is_brought_to_where_the_run_is(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def options(gamma: float) -> dict[str, Any]:
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=gamma)
        return {
            "model": model,
            "optimizers": optimizer,
            "schedulers": schedule,
            "step_schedulers_every_batch": True,
        }

    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path, StopAt(4), **options(0.1)).fit()
    same = resuming(make_trainer, tmp_path, **options(0.1))
    assert same.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    other = resuming(make_trainer, tmp_path, **options(0.5))
    assert other.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25)
    gone = resuming(make_trainer, tmp_path, **{**options(0.1), "schedulers": None, "step_schedulers_every_batch": None})
    gone.fit()  # which might have brought one
    assert gone.state.optimizers[0].param_groups[0]["lr"] == 1.0


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # which SequentialLR of torch 2.6 passes itself
def test_a_new_rate_reaches_schedules_made_of_others(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def options(lr: float) -> dict[str, Any]:
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
        halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, halving], milestones=[2])
        return {
            "model": model,
            "optimizers": optimizer,
            "schedulers": schedule,
            "step_schedulers_every_batch": True,
        }

    rates: dict[str, list[float]] = {}

    class Rates(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def batch_start(self, state: State, logger: Logger) -> None:
            rates.setdefault(self.name, []).append(state.optimizers[0].param_groups[0]["lr"])

    resuming(make_trainer, tmp_path / "whole", Rates("whole"), **options(2.0)).fit()
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(4), **options(1.0)).fit()
    resuming(make_trainer, tmp_path / "run", Rates("resumed"), **options(2.0)).fit()

    assert rates["resumed"] == pytest.approx(rates["whole"][4:])


def test_a_schedule_given_to_fit_is_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole = resuming(make_trainer, tmp_path / "whole")
    whole.fit(schedulers=LinearScheduler())
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(5)).fit(schedulers=LinearScheduler())
    resumed = resuming(make_trainer, tmp_path / "run")
    resumed.fit(schedulers=LinearScheduler())

    deep_compare(weights(resumed), weights(whole))
    deep_compare(resumed.state.optimizers[0].state_dict(), whole.state.optimizers[0].state_dict())


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("adam", [False, True])
def test_a_cycled_momentum_is_resumed_where_its_scheduler_is_given_to_fit(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, adam: bool
) -> None:
    def fit(folder: str, *callbacks: Callback) -> Any:
        model = make_trainer.model()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if adam:
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, model=model, optimizers=optimizer)
        if kind == "OneCycleLR":
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        else:
            schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4)
        trainer.fit(schedulers=schedule, step_schedulers_every_batch=True)
        return trainer

    whole = fit("whole")
    with pytest.raises(InterruptedError):
        fit("run", StopAt(5))
    resumed = fit("run")

    deep_compare(weights(resumed), weights(whole))
    deep_compare(resumed.state.optimizers[0].state_dict(), whole.state.optimizers[0].state_dict())


class Hyperparameters(Callback):
    """Notes what the optimizer trains each batch with."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}

    def batch_start(self, state: State, logger: Logger) -> None:
        group = state.optimizers[0].param_groups[0]
        self.seen[state.timestamp.batch.value] = (group["lr"], group["momentum"])


SCHEDULES: dict[str, Any] = {
    "own": lambda optimizer: LinearScheduler(t_max="16ba"),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=17),
}


@pytest.mark.parametrize("to_fit", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "without",
    [
        {"load_ignore_keys": ["state/optimizers/*"]},
        {"load_ignore_keys": ["state/timestamp"]},
        {"save_ignore_keys": ["state/optimizers"]},
        {"save_ignore_keys": ["state/optimizers/*/param_groups"]},
    ],
    ids=lambda without: str(*without.values()),
)
@pytest.mark.filterwarnings("ignore:.*keeps its current state:UserWarning", "ignore:.*was saved without:UserWarning")
def test_the_rate_is_the_schedule_s_where_the_optimizer_s_was_not_loaded(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, without: dict[str, Any], to_fit: bool
) -> None:
    def rates(max_duration: str, **options: Any) -> dict[int, tuple[float, float]]:
        model, noted = make_trainer.model(), Hyperparameters()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        given = {"step_schedulers_every_batch": True}
        if not to_fit:
            given["schedulers"] = SCHEDULES[name](optimizer)
        trainer = make_trainer(
            model=model, optimizers=optimizer, callbacks=noted, max_duration=max_duration,
            **{**options, **({} if to_fit else given)},
        )  # fmt: skip
        if to_fit:
            given["schedulers"] = SCHEDULES[name](optimizer)
        trainer.fit(**(given if to_fit else {}))
        return noted.seen

    loading = {key: value for key, value in without.items() if key.startswith("load")}
    saving = {key: value for key, value in without.items() if key.startswith("save")}
    whole = rates("16ba")
    rates("7ba", save_folder=tmp_path, **saving)
    resumed = rates(
        "16ba" if "timestamp" not in str(without) else "9ba", load_path=tmp_path / "latest-rank0.pt", **loading
    )

    shift = 7 if "timestamp" in str(without) and name != "own" else 0  # torch's count steps, ours ask for the time
    assert len(resumed) == 9
    for batch, seen in resumed.items():
        assert seen == pytest.approx(whole[batch + shift]), batch


def test_a_changed_batch_size_and_duration_are_told(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = run_changed(
        make_trainer,
        tmp_path,
        {},
        {"train_dataloader": make_trainer.loader(batch_size=8, shuffle=True), "max_duration": "3ep"},
    )
    said = capsys.readouterr().err
    assert "batch size: 4 -> 8" in said
    assert "max_duration: 2ep -> 3ep" in said
    resumed.fit()
    assert resumed.state.timestamp.epoch == 3
    assert resumed.state.timestamp.sample == 48


@pytest.mark.parametrize("filename", ["{run_name}-ep{epoch}-ba{batch}.pt", "{run_name}/ep{epoch}-ba{batch}.pt"])
def test_runs_that_share_a_folder_go_on_from_their_own(
    make_trainer: MakeTrainer, tmp_path: Path, filename: str
) -> None:
    def run(name: str, duration: str) -> int:
        trainer = make_trainer(
            run_name=name,
            max_duration=duration,
            save_folder=str(tmp_path),
            save_filename=filename,
            save_latest_filename="{run_name}-latest.pt",
            autoresume=True,
        )
        begun = trainer.state.timestamp.batch.value
        trainer.fit()
        trainer.close()
        return begun

    assert [run("mine", "1ep"), run("other", "2ep"), run("mine", "2ep"), run("new", "1ep")] == [0, 0, 4, 0]
