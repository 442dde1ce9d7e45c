"""Weights alone, in the format of safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from composer.checkpoint import (
    CorruptCheckpointError,
    export_safetensors,
    load_safetensors,
    save_checkpoint,
    upload_file,
)
from composer.checkpoint.save import save_model_to_disk
from composer.core import State, Timestamp


class Tied(torch.nn.Module):
    """Two layers that share a weight, a transposed view of another one, a scalar, and a part of a larger block."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder, self.decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.turned = torch.nn.Parameter(torch.rand(3, 2, generator=generator).T)
        block = torch.rand(2, 5, generator=generator)
        self.register_buffer("row", block[0])
        self.register_buffer("rest", block[1, 1:])
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0, 3))
        with torch.no_grad():
            for layer in (self.encoder, self.decoder):
                layer.weight.copy_(torch.rand(4, 4, generator=generator))
                layer.bias.copy_(torch.rand(4, generator=generator))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def run(seed: int = 0) -> State:
    state = State(model=Tied(seed), max_duration="1ep", run_name="run")
    state.timestamp = Timestamp(epoch=1, batch=7)
    return state


def source(kind: str, folder: Path) -> Any:
    """The same weights, wherever they are."""
    state = run(seed=1)
    if kind == "run":
        return state
    if kind == "model":
        return state.model
    if kind == "weights":
        return save_model_to_disk(state.model, folder)
    path = str(save_checkpoint(state, str(folder / ("run.pt.gz" if kind == "compressed" else "run.pt"))))
    if kind == "remote":
        return upload_file(path, "memory://export", overwrite=True)
    return path


@pytest.mark.parametrize("kind", ["run", "model", "weights", "checkpoint", "compressed", "remote"])
def test_weights_come_back_from_every_source(kind: str, tmp_path: Path) -> None:
    path = export_safetensors(source(kind, tmp_path), tmp_path / "out/model.safetensors")
    model = Tied(2)

    assert load_safetensors(model, path) == ([], [])
    assert same(model, Tied(1))
    assert model.encoder.weight is model.decoder.weight
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["composer_version"]
    if kind in ("model", "weights"):
        assert "timestamp" not in metadata
    else:
        assert json.loads(metadata["timestamp"])["batch"] == 7


def test_other_programs_read_the_file_in_which_tied_weights_are_once(tmp_path: Path) -> None:
    found = load_file(export_safetensors(Tied(1), tmp_path / "model.safetensors"))

    assert found.keys() == Tied(1).state_dict().keys() - {"decoder.weight"}
    assert torch.equal(found["turned"], Tied(1).turned)
    assert os.path.getsize(tmp_path / "model.safetensors") < 1500


def test_the_file_has_the_permissions_that_the_user_chose(tmp_path: Path) -> None:
    usual = os.umask(0o027)
    try:
        path = export_safetensors(Tied(1), tmp_path / "model.safetensors")
    finally:
        os.umask(usual)

    assert 0o640 == os.stat(path).st_mode & 0o777


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    saved = {name: value.contiguous().clone() for name, value in Tied(1).state_dict().items()}
    del saved["decoder.weight"]  # as they leave tied weights out
    save_file(saved, tmp_path / "model.safetensors")
    model = Tied(2)

    assert load_safetensors(model, tmp_path / "model.safetensors") == ([], [])
    assert same(model, Tied(1))


def test_precision_is_converted_and_weights_stay_tied(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors", precision="bf16")
    found = load_file(path)

    assert found["encoder.weight"].dtype == torch.bfloat16
    assert found["count"].dtype == torch.int64
    assert "decoder.weight" not in found
    model = Tied(2)
    load_safetensors(model, path)
    assert torch.equal(model.encoder.weight, Tied(1).encoder.weight.bfloat16().float())


def test_names_are_selected(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors", include_keys="encoder.*")

    assert sorted(load_file(path)) == ["encoder.bias", "encoder.weight"]


def test_names_that_do_not_match_are_an_error_unless_it_is_not_strict(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors", ignore_keys=["row", "count"])
    model = Tied(2)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Tied: missing .*\['row', 'count'\]"):
        load_safetensors(model, path)

    assert load_safetensors(model, path, strict=False) == (["row", "count"], [])
    assert torch.equal(model.encoder.weight, Tied(1).encoder.weight)
    with pytest.raises(RuntimeError, match=r"unknown to the module: .*'encoder.bias'"):
        load_safetensors(torch.nn.Identity(), path)


def test_remote_file_is_fetched(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors")
    model = Tied(2)
    load_safetensors(model, upload_file(path, "memory://weights", overwrite=True))

    assert same(model, Tied(1))


def test_existing_file_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError, match=r"already exists. Pass `overwrite=True`"):
        export_safetensors(Tied(2), path)
    model = Tied(3)
    load_safetensors(model, path)
    assert same(model, Tied(1))

    export_safetensors(Tied(2), path, overwrite=True)
    load_safetensors(model, path)

    assert same(model, Tied(2))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_any_altered_byte_is_known(tmp_path: Path) -> None:
    path = export_safetensors(Tied(1), tmp_path / "model.safetensors")
    whole = path.read_bytes()
    model = Tied(2)
    survivors = []
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            load_safetensors(model, path)
        except (CorruptCheckpointError, RuntimeError):
            continue
        survivors.append(place)
        assert same(model, Tied(1)), place  # a version number, for example

    header = int.from_bytes(whole[:8], "little") + 8
    assert all(place < header for place in survivors)
    for length in (0, 5, header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match="cannot be read as safetensors"):
            load_safetensors(model, path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="its checksum does not match"):
        load_safetensors(model, path)


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load_safetensors(Tied(), tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        export_safetensors(tmp_path / "none.pt", tmp_path / "out.safetensors")


class WithExtras(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("model", [WithExtras(1, 1), torch.nn.Linear(1, 1, device="meta")])
def test_what_is_no_dense_tensor_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a dense tensor with values, whole on this rank, got"):
        export_safetensors(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_other_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`source` must be a `State`, a module, or the path or URI"):
        export_safetensors({"a": 1}, tmp_path / "model.safetensors")  # type: ignore[arg-type]
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of a run or of a model"):
        export_safetensors(tmp_path / "list.pt", tmp_path / "model.safetensors")
    path = save_checkpoint(run(), str(tmp_path / "run.pt"), ignore_keys=["state/model"])
    with pytest.raises(ValueError, match=r"holds no model. Was it left out"):
        export_safetensors(str(path), tmp_path / "model.safetensors")


def test_prefixes_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    weights = {f"module.{name}": value for name, value in torch.nn.Linear(2, 1).state_dict().items()}
    torch.save({"state": {"model": weights, "_is_model_ddp_wrapped": True}}, tmp_path / "old.pt")

    assert sorted(load_file(export_safetensors(tmp_path / "old.pt", tmp_path / "new.safetensors"))) == [
        "bias",
        "weight",
    ]
