"""State that a checkpoint lacks stays as it is in the run that loads it, with one message."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTrainer

from composer.checkpoint.file import read_file, write_file
from composer.core import Algorithm, Callback, Event
from composer.optim import LinearScheduler
from composer.trainer import Trainer


class Counts(Callback):
    """Counts batches."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def batch_end(self, state: Any, logger: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "more": {"twice": 2 * self.count}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Idle(Algorithm):
    """Has a state, and does nothing."""

    def match(self, event: Event, state: Any) -> bool:
        return False

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"idle": True}


def saved_without(make_trainer: MakeTrainer, folder: Path, keys: Any, **arguments: Any) -> Path:
    make_trainer(
        save_folder=folder, save_ignore_keys=keys, schedulers=LinearScheduler(), callbacks=Counts(), **arguments
    ).fit()
    return folder / "ep2-ba8-rank0.pt"


def loaded(make_trainer: MakeTrainer, path: Path, **arguments: Any) -> tuple[Trainer, list[str]]:
    model = MakeTrainer.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            model=model, load_path=path, schedulers=LinearScheduler(), callbacks=Counts(100), max_duration="4ep",
            **arguments,
        )  # fmt: skip
    return trainer, [str(warning.message) for warning in caught]


PATTERNS = [
    ("state/model/*", "state/model"),
    ("state/model", "state/model"),
    ("state/optimizers/*", "state/optimizers"),
    ("state/optimizers/SGD/param_groups", "state/optimizers/SGD/param_groups"),
    ("state/schedulers/*", "state/schedulers"),
    ("state/schedulers", "state/schedulers"),
    ("state/algorithms/*", "state/algorithms"),
    ("state/callbacks/*", "state/callbacks"),
    ("state/callbacks/Counts", "state/callbacks/Counts"),
    ("state/callbacks/Counts/count", "state/callbacks/Counts/count"),
    ("state/timestamp/*", "state/timestamp"),
    ("state/timestamp", "state/timestamp"),
    ("rng", "rng"),
    ("rng/*", "rng"),
    ("resumption", "resumption"),
    ("resumption/*", "resumption"),
    ("resumption/loader/0/position", "resumption/loader/0/position"),
    ("state/run_name", "state/run_name"),
]


@pytest.mark.parametrize(("pattern", "named"), PATTERNS, ids=[pattern for pattern, _ in PATTERNS])
def test_a_part_that_was_left_out_stays_and_the_rest_is_loaded(
    make_trainer: MakeTrainer, tmp_path: Path, pattern: str, named: str
) -> None:
    arguments: dict[str, Any] = {}
    if "algorithms" in pattern:
        arguments["algorithms"] = Idle()
    path = saved_without(make_trainer, tmp_path, [pattern], **arguments)
    assert read_file(path)["left_out"] == [named]
    trainer, messages = loaded(make_trainer, path, **arguments)

    told = [message for message in messages if "was saved without" in message]
    assert (messages, len(told)) == (told, 1)
    assert repr(named) in told[0]
    own_model, own_time = named == "state/model", named == "state/timestamp"
    own_count = named in ("state/callbacks", "state/callbacks/Counts", "state/callbacks/Counts/count")
    weight = next(trainer.state.model.parameters())
    assert bool((weight == 0.25).all()) == own_model
    assert trainer.state.timestamp.batch == (0 if own_time else 8)
    (counts,) = (callback for callback in trainer.state.callbacks if isinstance(callback, Counts))
    assert counts.count == (100 if own_count else 8)
    trainer.fit()
    assert trainer.state.timestamp.batch == 16


def test_one_tensor_that_was_left_out_stays(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = saved_without(make_trainer, tmp_path, ["state/model/*.weight"])
    names = read_file(path)["left_out"]
    trainer, messages = loaded(make_trainer, path)
    here = trainer.state.get_model_state_dict()
    assert len(messages) == 1
    assert {name for name, value in here.items() if value.is_floating_point() and bool((value == 0.25).all())} == {
        name.removeprefix("state/model/") for name in names
    }


def test_a_function_leaves_out_like_patterns(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def drop(content: dict[str, Any]) -> None:
        del content["rng"][0]
        content["state"].pop("optimizers")

    path = saved_without(make_trainer, tmp_path, drop)
    assert read_file(path)["left_out"] == ["state/optimizers", "rng"]
    assert len(loaded(make_trainer, path)[1]) == 1


@pytest.mark.parametrize("keys", [["state/model/*"], ["state/model/*.weight"], ["state/optimizers", "rng"]])
def test_weights_alone_are_loaded_as_far_as_they_are_there(
    make_trainer: MakeTrainer, tmp_path: Path, keys: list[str]
) -> None:
    path = saved_without(make_trainer, tmp_path, keys)
    trainer, messages = loaded(make_trainer, path, load_weights_only=True)
    assert (len(messages), trainer.state.timestamp.batch.value) == (1, 0)


def test_an_own_checkpoint_without_optimizers_is_gone_on_from(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"run_name": "run", "save_folder": tmp_path, "save_ignore_keys": ["state/optimizers/*"]}
    make_trainer(**arguments).fit()
    with pytest.warns(UserWarning, match="was saved without 'state/optimizers'"):
        again = make_trainer(**arguments, autoresume=True, max_duration="3ep")
    assert again.state.timestamp.batch == 8
    again.fit()


@pytest.mark.parametrize("part", ["model", "optimizers", "timestamp"])
def test_a_file_that_lacks_a_part_without_saying_so_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, part: str
) -> None:
    path = saved_without(make_trainer, tmp_path, None)
    content = read_file(path)
    assert "left_out" not in content
    del content["state"][part]
    write_file(content, path)
    with pytest.raises(ValueError, match=r"were not left out on purpose|holds the weights only"):
        loaded(make_trainer, path)
    if part == "model":
        with pytest.raises(ValueError, match="must hold `state/model`"):
            loaded(make_trainer, path, load_weights_only=True)


def test_what_is_left_out_when_loading_is_no_matter_of_the_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = saved_without(make_trainer, tmp_path, ["rng"])
    trainer, messages = loaded(make_trainer, path, load_ignore_keys=["state/model/*"])
    assert len(messages) == 1
    assert bool((next(trainer.state.model.parameters()) == 0.25).all())
