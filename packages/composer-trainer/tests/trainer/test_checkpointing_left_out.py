"""Parts that a checkpoint was saved without stay as they are in the run that loads it, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTrainer

from composer.optim import LinearScheduler
from composer.trainer import Trainer


def saved_without(make_trainer: MakeTrainer, folder: Path, keys: Any) -> Path:
    make_trainer(save_folder=folder, save_ignore_keys=keys, schedulers=LinearScheduler()).fit()
    return folder / "ep2-ba8-rank0.pt"


def loaded(make_trainer: MakeTrainer, path: Path, **arguments: Any) -> Trainer:
    model = MakeTrainer.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    trainer: Trainer = make_trainer(
        model=model, load_path=path, schedulers=LinearScheduler(), max_duration="4ep", **arguments
    )
    return trainer


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("state/model/*", ["holds no `state/model`. This run keeps its own"]),
        ("state/model", ["holds no `state/model`. This run keeps its own"]),
        ("state/optimizers/*", ["holds no `state/optimizers`. This run keeps its own"]),
        ("state/schedulers", ["of `schedulers` is not in the state_dict and keeps its current state"]),
        ("rng", []),
        ("resumption", []),
    ],
)
def test_a_part_that_was_left_out_stays_and_the_rest_is_loaded(
    make_trainer: MakeTrainer, tmp_path: Path, recwarn: pytest.WarningsRecorder, pattern: str, told: list[str]
) -> None:
    trainer = loaded(make_trainer, saved_without(make_trainer, tmp_path, [pattern]))

    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == len(told)
    assert all(text in message for text, message in zip(told, messages, strict=True))
    assert bool((next(trainer.state.model.parameters()) == 0.25).all()) == ("model" in pattern)
    assert trainer.state.timestamp.batch == 8
    trainer.fit()
    assert trainer.state.timestamp.batch == 16


def test_an_own_checkpoint_without_optimizers_is_gone_on_from(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"run_name": "run", "save_folder": tmp_path, "save_ignore_keys": ["state/optimizers/*"]}
    make_trainer(**arguments).fit()
    with pytest.warns(UserWarning, match="holds no `state/optimizers`"):
        again = make_trainer(**arguments, autoresume=True, max_duration="3ep")
    assert again.state.timestamp.batch == 8
    again.fit()


@pytest.mark.parametrize("pattern", ["state/timestamp", "state/timestamp/*", "state"])
def test_a_file_without_the_time_is_refused(make_trainer: MakeTrainer, tmp_path: Path, pattern: str) -> None:
    path = saved_without(make_trainer, tmp_path, [pattern])
    with pytest.raises(ValueError, match="holds no `state/timestamp`"):
        loaded(make_trainer, path)


@pytest.mark.parametrize("pattern", ["state/model", "state/model/*"])
def test_weights_alone_are_not_loaded_from_a_file_without_them(
    make_trainer: MakeTrainer, tmp_path: Path, pattern: str
) -> None:
    path = saved_without(make_trainer, tmp_path, [pattern])
    with pytest.raises(ValueError, match="must hold `state/model`"):
        loaded(make_trainer, path, load_weights_only=True)


def test_single_tensors_that_were_left_out_need_the_word_of_the_user(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = saved_without(make_trainer, tmp_path, ["state/model/*.bias"])
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*fc1\.bias"):
        loaded(make_trainer, path)
    with pytest.warns(UserWarning, match=r"Missing in the file: .*fc1\.bias"):
        trainer = loaded(make_trainer, path, load_strict_model_weights=False)
    for name, each in trainer.state.model.named_parameters():
        assert bool((each == 0.25).all()) == name.endswith(".bias")
