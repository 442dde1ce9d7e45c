"""Checkpoints in shards: folders that all ranks write, whole or not there, for any number of ranks."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import needs_sharding
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from composer.callbacks import CheckpointSaver
from composer.checkpoint import CorruptCheckpointError, UnsafeCheckpointError, export_safetensors, load_safetensors
from composer.checkpoint.file import STATES, sha256_of, write_file
from composer.checkpoint.saver import BestCheckpoints
from composer.checkpoint.shards import (
    check_run,
    fill_shards,
    read_index,
    read_run,
    write_run,
)
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing import run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

pytestmark = needs_sharding

SAMPLES = 72
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(2, (SAMPLES,), generator=torch.Generator().manual_seed(1))
BATCH, BATCHES = 12, 12  # two epochs
SHARDED = {"fsdp": {"state_dict_type": "sharded"}}
FULL = {"fsdp": {"state_dict_type": "full"}}
LAYERS = {**SHARDED, "tp": {"tensor_parallel_degree": 2}}
LAYERS_FULL = {**FULL, "tp": {"tensor_parallel_degree": 2}}


class Net(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
        generator = torch.Generator().manual_seed(0)
        for weight in self.net.parameters():
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


class Averages(Algorithm):
    """Keeps a moving average of each parameter, as sharded as they are."""

    def __init__(self) -> None:
        self.averages: dict[str, torch.Tensor] = {}

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_END

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = getattr(state.model, "module", state.model)
        for name, parameter in model.named_parameters():
            old = self.averages.get(name, torch.zeros_like(parameter.detach()))
            self.averages[name] = old * 0.5 + parameter.detach() * 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = dict(state["averages"])

    def sums(self) -> dict[str, float]:
        whole = {name: a.full_tensor() if hasattr(a, "full_tensor") else a for name, a in self.averages.items()}
        return {name: value.sum().item() for name, value in whole.items()}


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.values.append(float(state.total_loss_dict["loss/train/total"]))


def train(folder: str, config: Any = None, batches: int = BATCHES, **arguments: Any) -> dict[str, Any]:
    """Train for some batches of the run, and tell what came out of it."""
    data, degree = TensorDataset(X, Y), 2 if config is not None and "tp" in config else 1
    if degree > 1:
        config = {
            **config,
            "tp": {**config["tp"], "layer_plan": {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}},
        }
    shares, share = dist.get_world_size() // degree, dist.get_global_rank() // degree
    sampler = dist.get_sampler(data, shuffle=True, num_replicas=shares, rank=share)
    loader = DataLoader(data, BATCH // shares, sampler=sampler)
    model, losses, averages = Net(), Losses(), Averages()
    with warnings.catch_warnings():
        # The generators of as many ranks as there were: these runs draw nothing.
        warnings.filterwarnings("ignore", message=".*(rank|generator).*", category=UserWarning)
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration=f"{batches}ba",
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            algorithms=averages,
            callbacks=losses,
            seed=3,
            device="cpu",
            progress_bar=False,
            parallelism_config=config,
            save_folder=folder,
            save_interval="1ba",
            **{"run_name": "run", "save_overwrite": True, **arguments},
        )
        trainer.fit()
        trainer.close()
    return {
        "losses": losses.values,
        "averages": averages.sums(),
        "saved": [os.path.basename(path) for path in trainer.saved_checkpoints],
        "params": sum(parameter.numel() for parameter in trainer.state.model.parameters()),
    }


def launch(world_size: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`train` on some ranks; what rank 0 tells."""
    if world_size == 1 and args[1] is None:
        return train(*args, **kwargs)
    return run_on_ranks(_train, world_size, args, kwargs)[0]


def _train(args: Any, kwargs: Any) -> dict[str, Any]:
    return train(*args, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on two ranks that saved in shards after every batch."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, launch(2, str(folder), SHARDED)


@pytest.fixture
def checkpoint(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of one of its checkpoints."""
    return Path(shutil.copytree(whole[0] / "ep0-ba4", tmp_path / "copies" / "ep0-ba4"))


def test_each_rank_writes_its_part(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, result = whole

    assert sorted(os.listdir(folder / "ep0-ba4")) == [".metadata", "__0_0.distcp", "__1_0.distcp", STATES]
    assert result["saved"] == [f"ep{(n - 1) // 6}-ba{n}" for n in range(1, BATCHES + 1)]
    assert os.readlink(folder / "latest-rank0.pt") == "ep1-ba12"
    assert not [name for name in os.listdir(folder) if name.endswith(".saving")]
    states = read_run(folder / "ep0-ba4")["state"]
    assert {type(value).__name__ for value in states["model"].values()} == {"Shard"}
    assert {type(value).__name__ for value in states["algorithms"][0][1]["averages"].values()} == {"Shard"}


# Two epochs of batches: from the fourth on, each of these goes on with the loss curve to the end, and the averages.
ROUTES = [
    pytest.param([(1, None), (2, FULL), (4, SHARDED)], id="2-1-2 full-4"),
    pytest.param([(4, LAYERS), (2, SHARDED), (4, LAYERS_FULL), (2, None)], id="2-2x2-2-2x2 full-2 whole"),
]


@pytest.mark.parametrize("route", ROUTES)
def test_another_number_of_ranks_goes_on(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, route: list[tuple[int, Any]]
) -> None:
    path, losses, result = whole[0] / "ep0-ba4", whole[1]["losses"][:4], {}
    for part, (world_size, config) in enumerate(route, start=1):
        folder = tmp_path / str(part)
        until = 4 + part * (BATCHES - 4) // len(route)
        result = launch(world_size, str(folder), config, until, load_path=str(path))
        losses += result["losses"]
        path = folder / result["saved"][-1]

    # Sums of the same numbers in another order: float64, twelve steps.
    assert losses == pytest.approx(whole[1]["losses"], abs=1e-12)
    assert result["averages"] == pytest.approx(whole[1]["averages"], abs=1e-12)


KEEP = {"save_num_checkpoints_to_keep": 2, "autoresume": True, "save_overwrite": False}


def test_a_relaunched_run_goes_on_by_itself(whole: tuple[Path, dict[str, Any]], ranks: tuple[Path, Any]) -> None:
    folder, begun = ranks[0] / "begun", ranks[1]["begun"]
    assert begun["saved"] == ["ep0-ba4", "ep0-ba5"]
    assert sorted(os.listdir(folder)) == ["ep0-ba4", "ep0-ba5", "latest-rank0.pt"]
    (folder / "ep0-ba5" / "__1_0.distcp").write_bytes(b"torn")
    (folder / ".ep0-ba6.0123abcd.saving").mkdir()  # of a process that was killed
    (folder / ".ep0-ba6.0123abcd.saving" / "__0_0.distcp").write_bytes(b"part")

    with pytest.warns(UserWarning, match="'.*ep0-ba5' is damaged .*__1_0.distcp.*; an older checkpoint is tried"):
        single = train(str(folder), None, 8, **KEEP)  # and one process takes over
    again = launch(2, str(folder), SHARDED, BATCHES, **KEEP)

    assert begun["losses"][:4] + single["losses"] + again["losses"] == pytest.approx(whole[1]["losses"], abs=1e-12)
    assert not [name for name in os.listdir(folder) if name.endswith(".saving")]


# ---- what two ranks do in one launch, for several tests: a process takes seconds to import everything


IGNORED = ["state/model/*", "state/optimizers", "state/algorithms", "state/callbacks"]
STEPS = {"fsdp": {"state_dict_type": "sharded", "sharded_ckpt_prefix_dir": "step-{batch}"}}


def on_two_ranks(whole: str, folder: str) -> dict[str, Any]:
    uri, goes_on = f"file://{folder}/remote/run", {"autoresume": True, "save_overwrite": False}
    return {
        "begun": train(f"{folder}/begun", SHARDED, 5, **KEEP),
        "weights": _load_weights(f"{whole}/ep0-ba4", None),
        "rest": _load_weights(f"{whole}/ep0-ba4", IGNORED),
        "no model": _go_on_without(f"{folder}/none", IGNORED),
        "steps": train(f"{folder}/steps", STEPS, 4),
        "store": train(uri, SHARDED, 5, **goes_on)["losses"] + train(uri, SHARDED, BATCHES, **goes_on)["losses"],
        "refused": _refused(f"{folder}/refused"),
        "damaged": _read(f"{folder}/damaged/ep0-ba4"),
        "full disk": _fill_the_disk(f"{folder}/full"),
    }


@pytest.fixture(scope="module")
def ranks(whole: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder and the results of rank 0, with those of both ranks as "damaged" and "full disk"."""
    folder = tmp_path_factory.mktemp("two")  # `train` ignores warnings that contain "rank"
    shutil.copytree(whole[0] / "ep0-ba4", folder / "damaged" / "ep0-ba4")
    (folder / "damaged" / "ep0-ba4" / "__1_0.distcp").write_bytes(b"")
    (folder / "full").mkdir()
    results = run_on_ranks(on_two_ranks, 2, str(whole[0]), str(folder), timeout=200)
    return folder, {**results[0], **{name: [each[name] for each in results] for name in ("damaged", "full disk")}}


def _load_weights(path: str, ignore: Any) -> Any:
    model = Net()
    trainer = Trainer(
        model=model,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        parallelism_config=SHARDED,
        load_path=path,
        load_weights_only=ignore is None,
        load_ignore_keys=ignore,
    )
    weight: Any = trainer.state.model.state_dict()["net.0.weight"]
    return weight.full_tensor().sum().item(), trainer.state.timestamp.batch.value


def test_a_part_can_be_loaded(checkpoint: Path, tmp_path: Path, ranks: tuple[Path, Any]) -> None:
    export_safetensors(checkpoint, tmp_path / "model.safetensors")
    exported = Net()
    load_safetensors(exported, tmp_path / "model.safetensors")
    fresh, saved = (net.net[0].weight.sum().item() for net in (Net(), exported))
    assert abs(fresh - saved) > 1e-3

    assert ranks[1]["weights"] == (pytest.approx(saved), 0)
    assert ranks[1]["rest"] == (pytest.approx(fresh), 4)


def _go_on_without(folder: str, ignored: list[str]) -> tuple[str, int, float]:
    train(folder, SHARDED, 1, save_ignore_keys=ignored)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight, batch = _load_weights(f"{folder}/ep0-ba1", [])
    told = [str(warning.message) for warning in caught if "holds no" in str(warning.message)]
    return "".join(told), batch, weight


def test_what_shards_were_saved_without_stays(ranks: tuple[Path, Any]) -> None:
    told, batch, weight = ranks[1]["no model"]
    assert (batch, weight) == (1, pytest.approx(Net().net[0].weight.sum().item()))
    assert "holds no `state/model` and `state/optimizers`" in told


def test_damage_is_found_before_anything_is_loaded(checkpoint: Path) -> None:
    chance = random.Random(0)
    for name in sorted(os.listdir(checkpoint)):
        path = checkpoint / name
        original = path.read_bytes()
        for damage in ("flipped", "cut", "gone"):
            data = bytearray(original)
            if damage == "flipped":
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            elif damage == "cut":
                del data[chance.randrange(len(data)) :]
            path.write_bytes(data)
            if damage == "gone":
                path.unlink()
            with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
                check_run(checkpoint)
            with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
                read_run(checkpoint)
        path.write_bytes(original)
    check_run(checkpoint)


def test_parts_of_another_checkpoint_are_found(whole: tuple[Path, dict[str, Any]], checkpoint: Path) -> None:
    shutil.copy(whole[0] / "ep0-ba5" / "__0_0.distcp", checkpoint)

    with pytest.raises(CorruptCheckpointError, match=r"checksum of its file '__0_0\.distcp'"):
        read_run(checkpoint)


def _read(path: str) -> str:
    try:
        read_run(Path(path))
    except CorruptCheckpointError as error:
        return error.reason
    return ""


def test_all_ranks_learn_of_damage_that_one_finds(ranks: tuple[Path, Any]) -> None:
    assert ["__1_0.distcp" in reason for reason in ranks[1]["damaged"]] == [True] * 2


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("true",))


def test_an_index_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    for evil in (pickle.dumps(Evil()), b"ctorch.distributed.checkpoint.metadata\nos\n."):
        path.write_bytes(evil)
        with pytest.raises(UnsafeCheckpointError, match="does not belong in an index"):
            read_index(path)
    path.write_bytes(b"\x80\x04")
    with pytest.raises(CorruptCheckpointError, match="its pickle cannot be read"):
        read_index(path)


def test_an_entry_that_is_no_tensor_runs_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "ep0-ba1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"state/model/weight": Touch(str(tmp_path / "ran"))}, checkpoint_id=folder)
    shard = {"__shard__": "state/model/weight", "shape": (2, 2), "dtype": torch.float32}
    digests = {name: sha256_of(folder / name) for name in os.listdir(folder)}
    content = {"state": {"model": {"weight": shard}}}
    write_file({"content": content, "folder": "ep0-ba1", "sha256": digests}, folder / STATES)

    with pytest.raises(UnsafeCheckpointError, match="the entry 'state/model/weight' of the shards\" holds"):
        fill_shards(read_run(folder), {})
    assert not (tmp_path / "ran").exists()


class Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def _fill_the_disk(folder: str) -> str:
    shards = {"weight": distribute_tensor(torch.zeros(4000), init_device_mesh("cpu", (2,)), [Shard(0)])}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        write_run({"state": shards}, Path(folder) / "ep0-ba2", overwrite=False)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ""


def test_a_full_disk_is_told_and_leaves_nothing(ranks: tuple[Path, Any]) -> None:
    for message in ranks[1]["full disk"]:
        assert "Could not save" in message
        assert "ep0-ba2" in message
    assert os.listdir(ranks[0] / "full") == []


def test_the_best_are_kept_when_a_run_goes_on(tmp_path: Path) -> None:
    best = BestCheckpoints(1, "eval/loss", "min")
    (tmp_path / "ep1-ba2").mkdir()

    values = {"/moved/from/ep1-ba2": 0.5, "/moved/from/ep0-ba1": 0.1}
    best.restore({"monitor": "eval/loss", "values": values}, {"ep1-ba2": str(tmp_path / "ep1-ba2")})

    assert best.paths == [str(tmp_path / "ep1-ba2")]


def test_folders_called_otherwise_are_found_by_the_link(
    whole: tuple[Path, dict[str, Any]], ranks: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(ranks[0] / "steps", tmp_path / "run", symlinks=True)
    shutil.copytree(ranks[0] / "steps", tmp_path / "shared", symlinks=True)
    single = train(str(tmp_path / "run"), None, 6, autoresume=True, save_overwrite=False)
    other = train(str(tmp_path / "shared"), None, 1, autoresume=True, run_name="other")

    assert ranks[1]["steps"]["losses"] + single["losses"] == pytest.approx(whole[1]["losses"][:6], abs=1e-12)
    assert len(other["losses"]) == 1  # it starts: the link names a checkpoint of another run


def test_a_checkpoint_without_shards(tmp_path: Path) -> None:
    write_run({"state": {"n": 1}, "resumption": {"complete": False}}, tmp_path / "a", overwrite=False)

    with pytest.raises(FileExistsError, match="already exists"):
        write_run({"state": {"n": 2}}, tmp_path / "a", overwrite=False)
    write_run({"state": {"n": 2}}, tmp_path / "a", overwrite=True)
    assert read_run(tmp_path / "a") == {"state": {"n": 2}}
    check_run(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def _refused(folder: str) -> str:
    model = Net()
    try:
        Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            device="cpu",
            progress_bar=False,
            parallelism_config=SHARDED,
            callbacks=CheckpointSaver(folder, asynchronous=True),
        )
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_is_refused_at_construction(ranks: tuple[Path, Any]) -> None:
    assert "not written in the background: all ranks write them together" in ranks[1]["refused"]


def test_a_run_goes_on_from_a_store(
    whole: tuple[Path, dict[str, Any]], ranks: tuple[Path, Any], tmp_path: Path
) -> None:
    remote = ranks[0] / "remote" / "run"
    linked = train(str(tmp_path / "local"), None, 6, load_path=f"file://{remote}/ep0-ba4")

    assert ranks[1]["store"] == pytest.approx(whole[1]["losses"], abs=1e-12)
    assert linked["losses"] == pytest.approx(whole[1]["losses"][4:6], abs=1e-12)
    assert (remote / "latest-rank0.pt.symlink").read_text().endswith("run/ep1-ba12")
