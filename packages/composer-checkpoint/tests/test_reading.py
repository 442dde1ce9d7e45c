"""Checkpoints as plain data."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer.checkpoint import (
    CorruptCheckpointError,
    UnsafeCheckpointError,
    glob_filter,
    load_checkpoint,
    read_checkpoint,
    safe_torch_load,
    save_checkpoint,
)
from composer.checkpoint.shards import fetch_run, identify_run
from composer.core import State, Timestamp
from composer.testing import SimpleModel, deep_compare
from composer.utils.reproducibility import get_rng_state


def saved(path: Path) -> tuple[Path, State]:
    model = SimpleModel()
    state = State(model=model, run_name="run", optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    save_checkpoint(state, str(path))
    return path, state


@pytest.mark.parametrize("name", ["a.pt", "a.tar.gz"])
def test_everything_is_read(name: str, tmp_path: Path) -> None:
    path, state = saved(tmp_path / name)
    content = read_checkpoint(path)

    assert content.keys() == {"state", "rng", "has_checksum"}
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


# ---- shards of MosaicML's Composer: an index of all values, without `composer_states.pt` ----

# The second is what `save` of older torch causes itself.
one_process = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:TypedStorage is deprecated"
)


def saved_as_index(folder: Path) -> State:
    """Write a run as MosaicML's Composer does under FSDP, by torch alone."""
    state = saved(folder.parent / "a.pt")[1]
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()
    state.timestamp = state.timestamp.to_next_batch(2)
    content = {"state": state.state_dict(), "rng": get_rng_state()}
    dcp.save(content, checkpoint_id=folder)
    return state


def fresh_state() -> State:
    model = SimpleModel()
    return State(model=model, run_name="new", optimizers=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


@one_process
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_that_is_only_an_index_is_loaded(scheme: str, tmp_path: Path) -> None:
    state, resumed = saved_as_index(tmp_path / "ep0-ba1"), fresh_state()
    rng = load_checkpoint(f"{scheme}{tmp_path / 'ep0-ba1'}", resumed)

    assert rng is not None
    deep_compare(rng, get_rng_state())
    deep_compare(resumed.state_dict(), state.state_dict())
    assert read_checkpoint(tmp_path / "ep0-ba1", ["run_name"])["state"] == {"run_name": "run"}
    name, timestamp = identify_run(tmp_path / "ep0-ba1") or ("", Timestamp())
    assert (name, timestamp.state_dict()) == ("run", state.timestamp.state_dict())


@one_process
def test_an_index_whose_shards_are_missing_or_short_is_refused(tmp_path: Path) -> None:
    saved_as_index(tmp_path / "ep0-ba1")
    shard = next((tmp_path / "ep0-ba1").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError, match="is not within"):
        load_checkpoint(tmp_path / "ep0-ba1", fresh_state())
    shard.unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        load_checkpoint(tmp_path / "ep0-ba1", fresh_state())


@one_process
def test_code_in_an_entry_of_an_index_is_refused(tmp_path: Path) -> None:
    dcp.save({"state": {"model": {"weight": torch.ones(2)}, "run_name": Evil()}}, checkpoint_id=tmp_path)
    with pytest.raises(UnsafeCheckpointError, match=r"the entry 'state.run_name' .* could run code"):
        load_checkpoint(tmp_path, fresh_state())


@one_process
def test_files_elsewhere_are_not_fetched(tmp_path: Path) -> None:
    saved_as_index(tmp_path / "store")
    index = tmp_path / "store" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    index.write_bytes(pickle.dumps(metadata))

    with pytest.raises(CorruptCheckpointError, match=r"outside of its folder, '\.\./elsewhere'"):
        fetch_run(lambda name, path: shutil.copy(tmp_path / "store" / name, path), "", tmp_path / "target")


@one_process
def test_shards_of_another_kind_are_not_fetched_and_nothing_else_is_removed(tmp_path: Path) -> None:
    dcp.save({"state/model/weight": torch.ones(2)}, checkpoint_id=tmp_path / "store")
    (tmp_path / "target").mkdir()
    fetched: list[str] = []

    def get(name: str, path: Path) -> None:
        path.write_bytes((tmp_path / "store" / name).read_bytes())
        fetched.append(name)

    assert not fetch_run(get, "", tmp_path / "target")
    assert fetched == [".metadata"]
    assert not (tmp_path / "target").exists()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        fetch_run(get, "", tmp_path / "target")
    assert (tmp_path / "target" / "notes.txt").read_text() == "mine"
