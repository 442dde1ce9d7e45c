"""Tests of loading a checkpoint through the Trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shared_runs import names, weights

from composer.callbacks import LoadCheckpoint
from composer.checkpoint import (
    CorruptCheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from composer.optim import LinearScheduler
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


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


def test_a_run_that_is_saved_again_before_fit_goes_on_alike(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole = make_trainer(save_folder=tmp_path, save_interval="1ba")
    whole.fit()
    between = make_trainer(load_path=tmp_path / "ep0-ba2-rank0.pt")
    torch.rand(3)  # the program may draw, too
    between.save_checkpoint(str(tmp_path / "again.pt"))

    resumed = make_trainer(load_path=tmp_path / "again.pt")
    resumed.fit()

    deep_compare(weights(resumed), weights(whole))


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


def test_a_safetensors_file_is_loaded_as_weights(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trained = make_trainer()
    trained.fit()
    path = tmp_path / "model.safetensors"
    save_file({key: value.clone() for key, value in trained.state.model.state_dict().items()}, path)

    loaded = make_trainer(load_path=path, model=make_trainer.model())
    deep_compare(weights(loaded), weights(trained))
    assert 0 == loaded.state.timestamp.batch
    called = make_trainer(callbacks=LoadCheckpoint(path))
    deep_compare(weights(called), weights(trained))
    with pytest.raises(ValueError, match="like a file of weights"):
        load_checkpoint(path, loaded.state)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpointError, match="is damaged: it cannot be read as safetensors"):
        make_trainer(load_path=path)


@pytest.mark.parametrize("strict", [False, True])
def test_the_error_for_a_head_of_another_size_says_how_to_leave_it_out(
    make_trainer: MakeTrainer, tmp_path: Path, strict: bool
) -> None:
    make_trainer(save_folder=tmp_path).fit()
    options: dict[str, Any] = {"load_path": tmp_path / "latest-rank0.pt", "load_weights_only": True}
    options["load_strict_model_weights"] = strict

    def other() -> Any:
        model = make_trainer.model()
        model.fc2 = torch.nn.Linear(model.fc2.in_features, 7)
        return model

    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        make_trainer(model=other(), **options)
    (advice,) = re.findall(r"`load_ignore_keys=(\[.*\])`", str(caught.value))
    assert "['state/model/fc2.*']" == advice
    loaded = make_trainer(model=other(), load_ignore_keys=["state/model/fc2.*"], **options)
    assert 7 == loaded.state.model.fc2.out_features


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


def test_something_else_is_no_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of a run"):
        make_trainer(load_path=tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        make_trainer(load_path=tmp_path / "b.pt")


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
