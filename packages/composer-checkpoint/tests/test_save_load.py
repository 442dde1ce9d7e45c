"""The parts of checkpoints as functions, without a Trainer."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import composer.checkpoint
import composer.utils
from composer.callbacks import CheckpointSaver
from composer.checkpoint import (
    CorruptCheckpointError,
    UnsafeCheckpointError,
    download_monolithic_checkpoint,
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
    upload_file,
)
from composer.checkpoint.load import (
    CheckpointLoadOptions,
    load_checkpoint,
    load_model_checkpoint,
    load_optim_checkpoint,
    load_resumption_checkpoint,
)
from composer.checkpoint.save import (
    CheckpointSaveOptions,
    save_checkpoint_to_disk,
    save_composer_metadata_to_disk,
    save_model_to_disk,
    save_optim_to_disk,
    save_resumption_state_to_disk,
    save_state_dict_to_disk,
)
from composer.core import Callback, Event, State, Timestamp
from composer.testing import deep_compare, run_on_ranks


class Net(torch.nn.Module):
    """Two layers, a buffer of integers, and nothing that draws."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.register_buffer("count", torch.tensor(seed))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(batch))
        return result


class Counter(Callback):
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def adam(net: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=0.1)


def stepped(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def run(seed: int = 0, steps: int = 2) -> State:
    """A run after some steps."""
    net = Net(seed)
    optimizer = adam(net)
    for _ in range(steps):
        stepped(net, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = State(
        model=net, optimizers=optimizer, schedulers=schedule, callbacks=[Counter()], run_name="run", max_duration="2ep"
    )
    state.callbacks[0].count = seed
    for _ in range(steps):
        state.timestamp = state.timestamp.to_next_batch(samples=2)
    return state


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


# ---- the states ----


def test_state_of_a_model_is_its_own_tensors() -> None:
    net = Net()

    assert list(get_model_state_dict(net)) == list(net.state_dict())
    assert get_model_state_dict(net)["first.weight"].data_ptr() == net.first.weight.data_ptr()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (torch.double, torch.double)]
)
def test_precision_converts_floating_tensors_only(precision: Any, dtype: torch.dtype) -> None:
    found = get_model_state_dict(Net(3), precision=precision)

    assert found["first.weight"].dtype == dtype
    assert found["count"].dtype == torch.int64
    assert torch.equal(found["first.weight"], Net(3).first.weight.to(dtype))


def test_precision_of_none_keeps_each_tensor_as_it_is() -> None:
    found = get_model_state_dict(Net().double(), precision=None)

    assert found["first.weight"].dtype == torch.double


def test_precision_of_an_optimizer_leaves_its_counts_of_steps() -> None:
    net = Net()
    found = get_optim_state_dict(net, stepped(net, adam(net)), precision="bf16")["state"]["first.weight"]

    assert found["exp_avg"].dtype == torch.bfloat16
    assert found["step"].dtype == torch.float32


@pytest.mark.parametrize("precision", ["int8", torch.int32, 16])
def test_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match="`precision` must be one of 'fp32', 'fp16', 'bf16'"):
        get_model_state_dict(Net(), precision=precision)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"include_keys": "first.*"}, ["first.weight", "first.bias"]),
        ({"include_keys": ["*.bias", "count"]}, ["count", "first.bias", "second.bias"]),
        ({"ignore_keys": ["first.*", "count"]}, ["second.weight", "second.bias"]),
    ],
)
def test_keys_select_parts_of_a_model(keys: dict[str, Any], expected: list[str]) -> None:
    assert list(get_model_state_dict(Net(), **keys)) == expected


def test_keys_select_parameters_of_an_optimizer() -> None:
    net = Net()
    found = get_optim_state_dict(net, stepped(net, adam(net)), ignore_keys="first.*")

    assert list(found["state"]) == found["param_groups"][0]["params"] == ["second.weight", "second.bias"]


@pytest.mark.parametrize(
    "make", [CheckpointSaveOptions, CheckpointLoadOptions, lambda **keys: get_model_state_dict(Net(), **keys)]
)
def test_include_and_ignore_keys_together_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="`include_keys` and `ignore_keys` must not be given together"):
        make(include_keys=["a"], ignore_keys=["b"])


def test_pattern_that_matches_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match=r"The pattern 'third.\*' matches none"):
        get_model_state_dict(Net(), ignore_keys=["third.*"])


def test_shards_of_a_whole_model_are_refused(tmp_path: Path) -> None:
    net = Net()
    options = CheckpointSaveOptions(sharded_checkpoint=True)

    for call in (
        lambda: get_model_state_dict(net, sharded_state_dict=True),
        lambda: get_optim_state_dict(net, adam(net), sharded_state_dict=True),
        lambda: save_model_to_disk(net, tmp_path, sharded_checkpoint=True),
        lambda: save_checkpoint_to_disk(tmp_path, run(), options),
    ):
        with pytest.raises(ValueError, match="needs a model that is sharded by FSDP"):
            call()


def test_metadata_describe_the_checkpoint_and_are_json(tmp_path: Path) -> None:
    file = tmp_path / "description.json"
    found = json.loads(file.read_text()) if save_composer_metadata_to_disk(file, Net(), False, "bf16", None, 4) else {}

    assert found["composer_env_info"]["composer_version"]
    expected = {"model_name": "Net", "sharded_state_dict": False, "precision": "bfloat16", "device": "cpu"}
    assert expected.items() <= found.items()
    assert found["device_train_microbatch_size"] == 4
    assert "precision" not in get_metadata_state_dict()


def test_resumption_state_is_the_run_without_its_model_and_optimizers() -> None:
    found = get_resumption_state_dict(run(seed=7))

    assert {"timestamp", "schedulers", "callbacks", "rng", "rank_zero_seed", "run_name"} <= found.keys()
    assert not {"model", "optimizers"} & found.keys()
    assert found["callbacks"] == [("Counter", {"count": 7})]
    assert found["timestamp"]["batch"] == 2
    assert found["dataset_state"] is None


# ---- a whole checkpoint ----


@pytest.mark.parametrize("save_format", ["pt", "safetensors"])
def test_checkpoint_comes_back_as_it_was_saved(tmp_path: Path, save_format: str) -> None:
    state, other = run(seed=1), run(seed=2, steps=0)
    torch.manual_seed(5)
    folder = save_checkpoint_to_disk(tmp_path / "{run_name}", state, CheckpointSaveOptions(save_format=save_format))
    drawn = torch.rand(3)
    everything = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True)
    load_checkpoint(folder, everything, state=other)

    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    expected = ["composer_metadata.json", f"model/model.{save_format}", "optim/optim.pt", "resumption.pkl"]
    assert files == [f"run/ep0-ba2/{name}" for name in expected]
    deep_compare(state.state_dict(), other.state_dict())
    assert other.timestamp.batch == 2
    assert torch.equal(torch.rand(3), drawn)


def test_by_default_the_model_is_loaded_only(tmp_path: Path) -> None:
    state, other = run(seed=1), run(seed=2, steps=0)
    load_checkpoint(save_checkpoint_to_disk(tmp_path, state), model=other.model)

    assert same_weights(state.model, other.model)
    assert not other.optimizers[0].state
    assert other.timestamp.batch == 0


def test_parts_that_are_left_out_are_not_written(tmp_path: Path) -> None:
    options = CheckpointSaveOptions(save_model=False, save_optimizer=False, save_resumption_state=False)
    folder = Path(save_checkpoint_to_disk(tmp_path, run(), options))

    assert [path.name for path in folder.iterdir()] == ["composer_metadata.json"]
    with pytest.raises(FileNotFoundError, match="neither a file of the model nor shards of it"):
        load_checkpoint(folder, model=Net())


def test_existing_checkpoint_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    folder = save_checkpoint_to_disk(tmp_path, run(seed=1))
    with pytest.raises(FileExistsError, match=r"already exists. Pass `overwrite=True`"):
        save_checkpoint_to_disk(tmp_path, run(seed=2))
    net = Net()
    load_checkpoint(folder, model=net)
    assert same_weights(net, run(seed=1).model)

    save_checkpoint_to_disk(tmp_path, run(seed=2), CheckpointSaveOptions(overwrite=True, save_format="safetensors"))
    load_checkpoint(folder, model=net)

    assert same_weights(net, run(seed=2).model)
    assert not (Path(folder) / "model/model.pt").exists()


def test_what_a_killed_process_left_is_no_checkpoint_and_in_nobodys_way(tmp_path: Path) -> None:
    folder = Path(save_checkpoint_to_disk(tmp_path, run(seed=1)))
    (folder / "composer_metadata.json").unlink()  # written last
    with pytest.raises(CorruptCheckpointError, match=r"lacks 'composer_metadata.json', which is written last"):
        load_checkpoint(folder, model=Net())

    save_checkpoint_to_disk(tmp_path, run(seed=2))
    net = Net()
    load_checkpoint(folder, model=net)

    assert same_weights(net, run(seed=2).model)


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    state = run()
    (tmp_path / "ep0-ba1").mkdir()  # somebody else's
    options = CheckpointSaveOptions(num_checkpoints_to_keep=2, save_optimizer=False)
    other = run()
    other.run_name = "other"
    other_folder = save_checkpoint_to_disk(tmp_path, other, CheckpointSaveOptions(dir_prefix="ep7-ba7"))
    linked = save_checkpoint_to_disk(tmp_path / "elsewhere", state)
    (tmp_path / "ep0-ba0").symlink_to(linked)
    for _ in range(9):
        state.timestamp = state.timestamp.to_next_batch()
        save_checkpoint_to_disk(tmp_path, state, options)

    left = ["elsewhere", "ep0-ba0", "ep0-ba1", "ep0-ba10", "ep0-ba11", "ep7-ba7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    for folder in (linked, other_folder):
        load_checkpoint(folder, model=Net())


def test_save_frequency_says_when() -> None:
    state, options = run(steps=0), CheckpointSaveOptions(save_frequency="2ba")
    due = []
    for _ in range(4):
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch()
        due.append(options.is_due(state, Event.BATCH_CHECKPOINT))

    assert due == [False, True, False, True]
    assert CheckpointSaveOptions(save_frequency=lambda state, event: True).is_due(state, Event.EPOCH_CHECKPOINT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_format": "npz"}, "`save_format` must be one of 'pt', 'safetensors', got 'npz'"),
        ({"save_format": "safetensors", "sharded_checkpoint": True}, "must be 'pt' for a checkpoint in shards"),
        ({"num_checkpoints_to_keep": 0}, "`num_checkpoints_to_keep` must be at least 1, or -1"),
        ({"precision": "fp7"}, "`precision` must be"),
    ],
)
def test_bad_options_of_saving_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointSaveOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard_as_needed_during_load": True}, "`shard_as_needed_during_load` must be False"),
        ({"fsdp_config": {}}, "`fsdp_config` must be None"),
        ({"device_mesh": object()}, "`device_mesh` must be None"),
        ({"seed": 3}, "`seed` must be 42"),
        ({"load_planner": object()}, "`load_planner` has no effect without `sharded_checkpoint=True`"),
        ({"precision": "fp7"}, "`precision` must be"),
    ],
)
def test_bad_options_of_loading_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointLoadOptions(**arguments)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {}, "`load_model=True` needs `model` or `state`"),
        ({"load_model": False, "load_optimizer": True}, {}, "`load_optimizer=True` needs `model` or `state`"),
        ({"load_optimizer": True}, {"model": Net()}, "needs `optim`, or a `state` with an optimizer"),
        ({"load_resumption_state": True}, {"model": Net()}, "`load_resumption_state=True` needs `state`"),
    ],
)
def test_loading_needs_a_place_for_each_part(options: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint("nowhere", CheckpointLoadOptions(**options), **given)


def test_several_optimizers_are_saved_to_folders_of_their_own(tmp_path: Path) -> None:
    def state_of(seed: int) -> State:
        torch.manual_seed(seed)
        net = Net()
        optimizers = [adam(net.first), adam(net.second)]
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        return State(model=net, optimizers=optimizers, max_duration="1ep")

    state, other = state_of(1), state_of(2)
    folder = Path(save_checkpoint_to_disk(tmp_path, state))
    load_checkpoint(folder, CheckpointLoadOptions(load_optimizer=True), state=other)

    assert {"optim", "optim2"} <= {path.name for path in folder.iterdir()}
    deep_compare(state.get_optim_state_dict(), other.get_optim_state_dict())
    deep_compare(state.model.state_dict(), other.model.state_dict())


def test_replacing_a_checkpoint_removes_the_old_state_of_all_optimizers(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    def state_of(seed: int) -> State:
        net = Net(seed)
        optimizers = [adam(net.first), adam(net.second)]
        net(torch.ones(2, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return State(model=net, optimizers=optimizers, max_duration="1ep")

    folder = Path(save_checkpoint_to_disk(tmp_path, state_of(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("optim", "optim2", "optim3"):  # of an earlier run in shards, with three optimizers
            save(Net(1).state_dict(), checkpoint_id=folder / name)
    (folder / "optimum").mkdir()
    (folder / "optimum" / "optim.pt").write_text("somebody else's")
    state, other = state_of(2), state_of(3)
    save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(overwrite=True))
    load_checkpoint(folder, CheckpointLoadOptions(load_optimizer=True), state=other)

    deep_compare(state.get_optim_state_dict(), other.get_optim_state_dict())
    assert not (folder / "optim3").exists()
    assert (folder / "optimum" / "optim.pt").exists()

    save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(overwrite=True, save_optimizer=False))
    assert list(folder.glob("optim*/*")) == [folder / "optimum" / "optim.pt"]


def test_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        load_checkpoint(tmp_path / "none", model=Net())


def test_remote_checkpoint_is_fetched(tmp_path: Path) -> None:
    state, other = run(seed=1), run(seed=2, steps=0)
    folder = Path(save_checkpoint_to_disk(tmp_path, state))
    for part in ("model", "optim", ""):
        for file in filter(Path.is_file, (folder / part).iterdir()):
            upload_file(file, f"memory://functions/{part}".rstrip("/"))
    everything = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True)
    load_checkpoint("memory://functions", everything, state=other)

    deep_compare(state.state_dict(), other.state_dict())


# ---- single parts ----


def test_model_keeps_its_precision_when_another_is_loaded(tmp_path: Path) -> None:
    path = save_model_to_disk(Net(1), tmp_path, precision="bf16")
    net = Net(2)
    load_model_checkpoint(net, str(path))

    assert net.first.weight.dtype == torch.float32
    assert torch.equal(net.first.weight, Net(1).first.weight.bfloat16().float())


def test_precision_of_loading_rounds_what_is_loaded(tmp_path: Path) -> None:
    save_model_to_disk(Net(1), tmp_path)
    net = Net(2)
    load_model_checkpoint(net, tmp_path, CheckpointLoadOptions(precision="bf16"))

    assert torch.equal(net.first.weight, Net(1).first.weight.bfloat16().float())


@pytest.mark.parametrize("save_format", ["pt", "safetensors"])
def test_selected_names_are_loaded_and_others_stay(tmp_path: Path, save_format: str) -> None:
    save_model_to_disk(Net(1), tmp_path, save_format=save_format)
    net = Net(2)
    load_model_checkpoint(net, tmp_path, CheckpointLoadOptions(include_keys="first.*"))

    assert torch.equal(net.first.weight, Net(1).first.weight)
    assert torch.equal(net.second.weight, Net(2).second.weight)


def test_names_that_do_not_match_are_an_error_unless_it_is_not_strict(tmp_path: Path) -> None:
    save_model_to_disk(Net(1), tmp_path, ignore_keys="first.*")
    net = Net(2)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Net: missing .*first.bias"):
        load_model_checkpoint(net, tmp_path)
    assert same_weights(net, Net(2))
    with pytest.warns(UserWarning, match="does not match this one: missing in"):
        load_model_checkpoint(net, tmp_path, CheckpointLoadOptions(strict=False))
    assert torch.equal(net.second.weight, Net(1).second.weight)
    with pytest.raises(RuntimeError, match=r"unknown to the model: \['second.bias', 'second.weight'\]"):
        load_model_checkpoint(net.first, tmp_path, CheckpointLoadOptions(ignore_keys=["count", "weight", "bias"]))

    load_model_checkpoint(net, tmp_path, CheckpointLoadOptions(ignore_keys="first.*"))


def test_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, fresh = stepped(net, adam(net)), adam(other)
    save_optim_to_disk(net, optimizer, tmp_path)
    other.load_state_dict(net.state_dict())
    load_optim_checkpoint(other, fresh, tmp_path)
    stepped(net, optimizer)
    stepped(other, fresh)

    assert same_weights(net, other)


def test_selected_parameters_of_an_optimizer_are_loaded_and_others_stay(tmp_path: Path) -> None:
    net = Net()
    optimizer = stepped(net, adam(net))
    save_optim_to_disk(net, optimizer, tmp_path)
    later = get_optim_state_dict(net, stepped(net, optimizer))
    before = {name: {key: value.clone() for key, value in one.items()} for name, one in later["state"].items()}
    load_optim_checkpoint(net, optimizer, tmp_path, CheckpointLoadOptions(include_keys="first.*"))
    found = get_optim_state_dict(net, optimizer)["state"]

    assert found["first.weight"]["step"] == 1
    assert found["second.weight"]["step"] == 2
    deep_compare(found["second.weight"], before["second.weight"])


def test_optimizer_of_other_parameters_is_refused_unless_it_is_not_strict(tmp_path: Path) -> None:
    net = Net()
    optimizer = stepped(net, adam(net))
    save_optim_to_disk(net, optimizer, tmp_path, ignore_keys="second.*")
    stepped(net, optimizer)

    with pytest.raises(KeyError, match=r"hold different parameters: .*'second.bias', 'second.weight'"):
        load_optim_checkpoint(net, optimizer, tmp_path)
    load_optim_checkpoint(net, optimizer, tmp_path, CheckpointLoadOptions(strict=False))
    found = get_optim_state_dict(net, optimizer)["state"]

    assert [found[f"{layer}.weight"]["step"].item() for layer in ("first", "second")] == [1, 2]
    load_optim_checkpoint(net, optimizer, tmp_path, CheckpointLoadOptions(ignore_keys="second.*"))


def test_file_that_exists_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_state_dict_to_disk({"a": 1}, path)
    with pytest.raises(FileExistsError, match=r"already exists. Pass `overwrite=True`"):
        save_state_dict_to_disk({"a": 2}, path)
    save_state_dict_to_disk({"a": 2}, path, overwrite=True)

    assert composer.checkpoint.safe_torch_load(path) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_files_have_a_checksum(tmp_path: Path) -> None:
    folder = Path(save_checkpoint_to_disk(tmp_path, run()))
    for name in ("model/model.pt", "optim/optim.pt", "resumption.pkl"):
        file = folder / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    everything = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True)
    for options in (everything, CheckpointLoadOptions(False, True), CheckpointLoadOptions(False, False, True)):
        with pytest.raises(CorruptCheckpointError, match="its checksum does not match"):
            load_checkpoint(folder, options, state=run())


@pytest.mark.parametrize(
    "save",
    [
        lambda uri: save_checkpoint_to_disk(uri, run()),
        lambda uri: save_model_to_disk(Net(), uri),
        save_composer_metadata_to_disk,
        lambda uri: save_resumption_state_to_disk(run(), uri),
    ],
)
def test_remote_destinations_are_refused(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="The destination must be a local path, got 's3://bucket/run"):
        save("s3://bucket/run")

    assert not list(tmp_path.iterdir())


# ---- the rest of a run ----


class Malice:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_pickle_that_would_run_code_does_not(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open("resumption.pkl", "wb") as file:
        write({"callbacks": Malice()}, file)

    with pytest.raises(UnsafeCheckpointError, match=r"(?s)add_safe_globals.*global not in allowlist"):
        load_resumption_checkpoint(run(), tmp_path)
    assert not Path("harm").exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    state, other = run(seed=1), run(seed=2, steps=0)
    content = {**get_resumption_state_dict(state), "version": torch.__version__, "empty": {1, 2}}
    (tmp_path / "resumption.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
    load_resumption_checkpoint(other, tmp_path / "resumption.pkl")

    assert other.timestamp == state.timestamp
    assert other.callbacks[0].count == 1


def test_pickle_of_a_listed_type_is_read(tmp_path: Path) -> None:
    content = {"timestamp": {"Timestamp": Timestamp(batch=3).state_dict()}, "odd": Path}
    (tmp_path / "resumption.pkl").write_bytes(pickle.dumps(content))
    state = run()
    with torch.serialization.safe_globals([Path]):
        load_resumption_checkpoint(state, tmp_path)

    assert state.timestamp.batch == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\x80\x04nonsense", "its pickle cannot be read"), (pickle.dumps([1]), "must hold a dictionary, but holds list")],
)
def test_damaged_pickle_is_known(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "resumption.pkl").write_bytes(content)

    with pytest.raises(CorruptCheckpointError, match=reason):
        load_resumption_checkpoint(run(), tmp_path)


def test_missing_pickle_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load_resumption_checkpoint(run(), tmp_path)


# ---- transport ----


def test_upload_and_download(tmp_path: Path) -> None:
    path = str(save_model_to_disk(Net(1), tmp_path))
    uri = upload_file(path, "memory://transport/run", symlink_name="latest.pt.symlink")
    download_monolithic_checkpoint("memory://transport/run/latest.pt", tmp_path / "fetched.pt")
    net = Net(2)
    load_model_checkpoint(net, tmp_path / "fetched.pt")

    assert uri == "memory://transport/run/model.pt"
    assert same_weights(net, Net(1))
    with pytest.raises(FileExistsError, match=r"already exists. Pass `overwrite=True`"):
        upload_file(path, "memory://transport/run")
    upload_file(path, "memory://transport/run", overwrite=True)


def test_bad_uploads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file .* to upload"):
        upload_file(tmp_path / "none.pt", "memory://bad")
    with pytest.raises(ValueError, match=r"must end in '.symlink', got 'latest'"):
        upload_file(tmp_path / "none.pt", "memory://bad", symlink_name="latest")


# ---- several ranks ----


def _two_ranks(folder: str) -> dict[str, Any]:
    net = Net(1)
    optimizer = stepped(net, adam(net))
    model = DistributedDataParallel(net)
    state = State(model=model, optimizers=optimizer, run_name="run", max_duration="1ep")
    where = save_checkpoint_to_disk(folder, state)
    other = State(model=DistributedDataParallel(Net(1)), max_duration="1ep")
    other.optimizers = adam(other.model.module)
    load_checkpoint(where, CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True), state=other)
    try:
        save_checkpoint_to_disk(folder, state)
    except (FileExistsError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}"
    written = save_model_to_disk(model, f"{folder}/one")
    names = list(get_model_state_dict(model))
    return {"same": same_weights(net, other.model.module), "failure": failure, "written": written, "names": names}


def test_ranks_save_and_load_together_and_fail_together(tmp_path: Path) -> None:
    first, second = run_on_ranks(_two_ranks, 2, str(tmp_path))

    assert first["same"]
    assert second["same"]
    assert first["names"] == list(Net().state_dict())
    assert first["failure"].startswith("FileExistsError")
    assert second["failure"].startswith("RuntimeError: Stopped, because another rank failed: rank 0: FileExistsError")
    assert (first["written"], second["written"]) == (f"{tmp_path}/one/model.pt", None)


def _shards(folder: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int) -> tuple[Net, torch.optim.Optimizer]:
        net = Net(seed)
        fully_shard(net)
        optimizer = adam(net)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter) * (seed + 1)
        optimizer.step()
        optimizer.zero_grad()
        return net, optimizer

    net, optimizer = sharded(1)
    save_model_to_disk(net, f"{folder}/model", sharded_checkpoint=True)
    save_optim_to_disk(net, optimizer, f"{folder}/optim", sharded_checkpoint=True)
    save_model_to_disk(net, f"{folder}/whole")
    other, fresh = sharded(2)
    options = CheckpointLoadOptions(sharded_checkpoint=True)
    load_model_checkpoint(other, f"{folder}/model", options)
    load_optim_checkpoint(other, fresh, f"{folder}/optim", options)
    third, _ = sharded(3)
    load_model_checkpoint(third, f"{folder}/whole")
    found = []
    for one in (other, third):
        for mine, theirs in zip(net.parameters(), one.parameters(), strict=True):
            found.append(float((mine.to_local() - theirs.to_local()).abs().sum()))  # type: ignore[attr-defined]
    for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        found.append(float((mine["exp_avg"].to_local() - theirs["exp_avg"].to_local()).abs().sum()))
    return found


def test_sharded_models_are_saved_and_loaded_in_shards(tmp_path: Path) -> None:
    for differences in run_on_ranks(_shards, 2, str(tmp_path)):
        assert differences == [0.0] * 12

    # Shards fit into a whole model, too.
    net, options = Net(2), CheckpointLoadOptions(sharded_checkpoint=True)
    load_model_checkpoint(net, tmp_path / "model", options)
    whole = Net(3)
    load_model_checkpoint(whole, tmp_path / "whole")
    assert same_weights(net, whole)
    optimizer = adam(net)
    load_optim_checkpoint(net, optimizer, tmp_path / "optim", options)
    assert get_optim_state_dict(net, optimizer)["state"]["first.weight"]["step"] == 1


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Shards that one process wrote."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(Net(1).state_dict(), checkpoint_id=tmp_path / "model")
    return tmp_path / "model"


def test_names_of_shards_are_checked(shards: Path) -> None:
    options = CheckpointLoadOptions(sharded_checkpoint=True)
    net = Net(2)
    with pytest.raises(RuntimeError, match=r"missing .*\['bias', 'weight'\]; unknown .*'first.weight'"):
        load_model_checkpoint(net.first, shards, options)
    load_model_checkpoint(net, shards, CheckpointLoadOptions(sharded_checkpoint=True, include_keys="first.*"))

    assert torch.equal(net.first.weight, Net(1).first.weight)
    assert torch.equal(net.second.weight, Net(2).second.weight)
    with pytest.raises(ValueError, match="must be None for an optimizer in shards"):
        load_optim_checkpoint(
            net, adam(net), shards, CheckpointLoadOptions(sharded_checkpoint=True, ignore_keys="first.*")
        )


def test_shards_and_files_are_not_taken_for_one_another(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`sharded_checkpoint` must be True for .*, which is in shards"):
        load_model_checkpoint(Net(), shards)
    path = save_model_to_disk(Net(), tmp_path / "whole")
    with pytest.raises(ValueError, match=r"`sharded_checkpoint` must be False for .*, which is not in shards"):
        load_model_checkpoint(Net(), str(path), CheckpointLoadOptions(sharded_checkpoint=True))


def test_damaged_shards_are_told(shards: Path) -> None:
    for file in shards.glob("*.distcp"):
        file.unlink()

    with pytest.raises(RuntimeError, match=r"is damaged: the file .* which it names, is missing"):
        load_model_checkpoint(Net(), shards, CheckpointLoadOptions(sharded_checkpoint=True))


# ---- the callback, and the established names ----


def test_established_names_lead_here() -> None:
    for name in ("PartialFilePath", "get_save_filename", "load_checkpoint", "save_checkpoint", "safe_torch_load"):
        assert getattr(composer.utils, name) is getattr(composer.checkpoint, name)
    assert CheckpointSaver.__module__ == "composer.callbacks.checkpoint_saver"


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("save_format", ["pt", "safetensors"])
@pytest.mark.parametrize(("saved", "loaded"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_checkpoints_move_between_devices(tmp_path: Path, save_format: Any, saved: str, loaded: str) -> None:
    def on(device: str, seed: int) -> tuple[Net, torch.optim.Adam]:
        net = Net(seed).to(device)
        optimizer = adam(net)
        net(torch.ones(2, 3, device=device)).square().sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = on(saved, 1)
    state = State(model=net, optimizers=optimizer, run_name="run", max_duration="2ep")
    folder = save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(save_format=save_format))
    other, other_optimizer = on(loaded, 2)
    load_checkpoint(folder, model=other, optim=other_optimizer)

    found, expected = ((*one.state_dict().values(),) for one in (other, net))
    moments = [[one.state[p]["exp_avg"] for p in one.param_groups[0]["params"]] for one in (other_optimizer, optimizer)]
    assert {value.device.type for value in (*found, *moments[0])} == {loaded}
    deep_compare([value.cpu() for value in (*found, *moments[0])], [value.cpu() for value in (*expected, *moments[1])])
