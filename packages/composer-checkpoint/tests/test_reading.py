"""Checkpoints as plain data."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.checkpoint import (
    CorruptCheckpointError,
    UnsafeCheckpointError,
    glob_filter,
    load_checkpoint,
    read_checkpoint,
    safe_torch_load,
    save_checkpoint,
)
from composer.core import State
from composer.testing import SimpleModel


def saved(path: Path) -> tuple[Path, State]:
    model = SimpleModel()
    state = State(model=model, run_name="run", optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    save_checkpoint(state, str(path))
    return path, state


@pytest.mark.parametrize("name", ["a.pt", "a.tar.gz"])
def test_everything_is_read(name: str, tmp_path: Path) -> None:
    path, state = saved(tmp_path / name)
    content = read_checkpoint(path)

    assert content.keys() == {"state", "rng", "sealed"}
    assert content["state"].keys() == state.state_dict().keys()
    for key, value in state.model.state_dict().items():
        assert torch.equal(value, content["state"]["model"][key])


def test_of_the_state_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "a.pt")

    assert read_checkpoint(path, ["model", "run_name", "unknown"])["state"].keys() == {"model", "run_name"}


def test_a_remote_one_is_fetched(tmp_path: Path) -> None:
    path, state = saved(tmp_path / "a.pt")
    found = read_checkpoint(f"file://{path}", ["model"])["state"]["model"]

    assert all(torch.equal(value, found[key]) for key, value in state.model.state_dict().items())


def test_what_is_no_run_is_returned_as_it_is(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"state": 3}, tmp_path / "other.pt")

    assert read_checkpoint(tmp_path / "list.pt", ["model"]) == [1, 2]
    assert read_checkpoint(tmp_path / "other.pt", ["model"]) == {"state": 3}


class Evil:
    def __reduce__(self) -> Any:
        return (subprocess.run, (["true"],))


def test_damage_and_code_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "a.pt")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(path)
    torch.save({"state": {"model": Evil()}}, tmp_path / "evil.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"loading could run code"):
        read_checkpoint(tmp_path / "evil.pt", ["run_name"])
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "missing.pt")


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pt"
    state = State(model=torch.nn.Linear(1, 1))

    for call in (read_checkpoint, safe_torch_load, lambda path: load_checkpoint(path, state)):
        with pytest.raises(TypeError, match="`path` must be a path or a string, got 1"):
            call(1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`path` must not be empty"):
            call("")
        with pytest.raises(FileNotFoundError, match=rf"There is no .*{missing.name}"):
            call(missing)
    with pytest.raises(TypeError, match=r"`state` must be a `composer\.State`, got 2"):
        load_checkpoint(missing, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`state` must be a `composer\.State`, got 2"):
        save_checkpoint(2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`exclude_globs` must be a list of patterns, got 'state'"):
        glob_filter("state")
