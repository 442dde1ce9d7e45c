"""Runs of replica groups that die and return, on the CPU, beside runs of one process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replica_groups import Groups, lighthouse, wait_until
from replica_run import OPTIMIZERS, Numbered, loader_of, make_model, numbers_of, slowing

from composer.algorithms.batch_size_warmup import BatchSizeWarmup
from composer.torchft import TorchFT, make_strategy
from composer.trainer import Trainer

pytest.importorskip("torchft", reason="torchft has wheels for Linux only")
Weights = dict[str, torch.Tensor]


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


def train_alone(optimizer: str, loader: Any, duration: str) -> Weights:
    model = make_model()
    optimizers = OPTIMIZERS[optimizer](model.parameters())
    trainer = Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizers=optimizers,
        schedulers=slowing(optimizers),
        step_schedulers_every_batch=True,
        train_dataloader=loader,
        max_duration=duration,
        device="cpu",
        precision="fp32",
        progress_bar=False,
    )
    with closing(trainer):
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def replay(groups: Groups, per_group: int, survivor: int) -> Weights:
    """Train in one process on the samples that a survivor's clock has counted, batch by batch; group 2 was killed."""
    diary, loaders = groups.diary(survivor), [loader_of(3, each, per_group, shuffle=True) for each in range(3)]
    parts: list[list[Any]] = [[], [], []]  # the batches of each group, in all epochs
    for epoch in range(len(diary)):
        for part, loader in zip(parts, loaders, strict=True):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            part += loader
    batches, counted = [], 0
    for number, (_, batch, drawn, samples) in enumerate(diary):
        assert batch == number + 1  # every batch once
        everybody = samples - counted == 3 * len(drawn)
        counted = samples
        live = [part[number] for part in (parts if everybody else parts[:2])]
        assert drawn == numbers_of(live[survivor][0])
        batches.append(tuple(torch.cat(part) for part in zip(*live, strict=True)))
    return train_alone("AdamW", batches, "1ep")


def assert_close(actual: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_groups_train_as_one_process(address: str, tmp_path: Path, optimizer: str) -> None:
    groups = Groups(2, address, folder=str(tmp_path), optimizer=optimizer, duration="2ep")
    groups.wait()
    alone = train_alone(optimizer, torch.utils.data.DataLoader(Numbered(), batch_size=16), "2ep")
    for group in range(2):
        assert_close(groups.weights(group), alone)
    assert groups.diary(0)[-1][1::2] == [8, 128]  # batches and samples of both groups


def test_two_sharded_groups_train_as_one_process(address: str, tmp_path: Path) -> None:
    groups = Groups(2, address, 2, folder=str(tmp_path), duration="2ep")
    groups.wait()
    alone = train_alone("AdamW", torch.utils.data.DataLoader(Numbered(), batch_size=16), "2ep")
    for group in range(2):
        assert_close(groups.weights(group), alone)
    assert groups.diary(0)[-1][1::2] == [8, 128]


def test_a_sharded_group_loses_a_rank_and_returns(address: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 12, "duration": "80ba", "seconds": 0.03, "patience": 0.5, "shuffle": True}
    groups = Groups(3, address, 2, folder=str(tmp_path), **options, dies_at=6, averages=True)

    wait_until(lambda: groups.failed() == [2])  # in the middle of a step
    groups.kill(2)
    groups.options["dies_at"] = -1
    returns(groups)
    groups.kill(2, rank=random.randrange(2))
    returns(groups)
    groups.wait()

    assert [line[1] for line in groups.diary(0)] == [*range(1, 81)]
    assert len(groups.diary(2)) < 80
    for group in (1, 2):
        assert_close(groups.weights(group), groups.weights(0), 0.0)
    counts = {line[1]: line[3] for line in groups.diary(0)}
    for rank in range(2):
        part = loader_of(6, 4 + rank, 2, shuffle=True)
        for _, number, drawn, samples in groups.diary(2, rank):
            epoch, batch = divmod(number - 1, len(part))
            part.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            assert (drawn, samples) == (numbers_of([*part][batch][0]), counts[number])


def returns(groups: Groups) -> None:
    """Start the last group again once the others have gone on without it, and wait until it trains."""
    last, dead_at = groups.number - 1, groups.diary(0)[-1][1]
    wait_until(lambda: groups.diary(0)[-1][1] > dead_at + 3)
    groups.start(last)
    wait_until(lambda: groups.diary(last)[-1][1] > dead_at + 3)


def test_a_group_dies_and_returns_and_no_step_is_lost(address: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 12, "duration": "150ba", "seconds": 0.03, "patience": 0.5, "shuffle": True}
    groups = Groups(3, address, folder=str(tmp_path), **options, dies_at=6)

    wait_until(lambda: groups.failed() == [2])  # in the middle of a step
    groups.options["dies_at"] = -1
    returns(groups)
    time.sleep(random.uniform(0, 0.1))
    groups.kill(2)  # at any moment
    returns(groups)
    groups.wait()

    assert groups.diary(2)[-1][1] == 150
    assert len(groups.diary(2)) < 150
    expected = replay(groups, 4, survivor=0)
    for group in range(3):
        assert_close(groups.weights(group), expected)
    counts = {line[1]: line[3] for line in groups.diary(0)}
    assert all(counts[number] == samples for _, number, _, samples in groups.diary(2))  # its clock, too
    part = loader_of(3, 2, 4, shuffle=True)
    for _, number, drawn, _ in groups.diary(2):  # and its position in the data
        epoch, batch = divmod(number - 1, len(part))
        part.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        assert drawn == numbers_of([*part][batch][0])


def test_all_die_and_go_on_from_the_newest_checkpoint(address: str, tmp_path: Path) -> None:
    groups = Groups(2, address, folder=str(tmp_path), duration="20ba", seconds=0.05, saves=True)
    wait_until(lambda: len(groups.diary(0)) > 5)
    for group in range(2):
        groups.kill(group)
    before = len(groups.diary(0))
    for group in range(2):
        groups.start(group)
    groups.wait()

    assert min(line[1] for line in groups.diary(0)[before:]) in (before, before + 1)
    assert_close(groups.weights(0), groups.weights(1), 0.0)
    assert groups.weights(1)["batch"] == 20


def test_the_lighthouse_may_be_started_again(tmp_path: Path) -> None:
    with lighthouse() as address:
        groups = Groups(2, address, folder=str(tmp_path), duration="40ba", seconds=0.05, timeout=8.0)
        wait_until(lambda: len(groups.diary(0)) > 5)
    with lighthouse(int(address.rpartition(":")[2])):
        groups.wait(restarts=True)  # the group that finds it first may go on alone, and the other one must start again
    assert_close(groups.weights(0), groups.weights(1), 0.0)
    assert groups.weights(0)["batch"] == 40


def test_what_fails_again_and_again_ends_the_run(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(manager: Any, *_: Any, **__: Any) -> Any:
        manager.report_error(RuntimeError("no connection"))
        return SimpleNamespace(wait=lambda: None)

    model = make_model()
    trainer = Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=loader_of(1, 0, 8),
        max_duration="1ep",
        parallelism_config={"torchft": {"groups": 1, "group": 0, "lighthouse": address}},
        device="cpu",
        progress_bar=False,
    )
    with pytest.raises(ValueError, match="`max_duration` must be in epochs, batches or samples"):
        trainer.fit(duration="100tok")
    trainer.state.max_duration = "1ep"
    monkeypatch.setattr("torchft.Manager.allreduce", fail)
    with closing(trainer), pytest.raises(RuntimeError, match="failed 21 times consecutively"):
        trainer.fit()


def test_the_launcher_starts_groups_and_a_dead_one_again(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "batch": 4, "duration": "30ba", "seconds": 0.05, "patience": 5.0, "dies_at": 5}
    script = str(Path(__file__).with_name("replica_run.py"))
    command = [sys.executable, "-m", "composer", "--replicas", "2", "-n", "1", script, json.dumps(options)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)

    assert "composer: replica group 1 failed with exit status 137 and is started again, 1/10." in ended.stderr
    weights = [torch.load(tmp_path / f"group{group}.pt") for group in range(2)]
    assert_close(weights[1], weights[0], 0.0)
    assert weights[1]["batch"] == 30


def test_one_rank_may_end_the_run_of_its_group(address: str, tmp_path: Path) -> None:
    groups = Groups(1, address, 2, folder=str(tmp_path), stops_at=3, timeout=15.0)

    groups.wait()

    assert len(groups.diary(0, rank=1)) == 3


# ---- refusals, in one process ----

PLACE = {"groups": 2, "group": 0, "lighthouse": "http://localhost:1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "must be a dict, got 3"),
        ({"group": 0}, "'groups' must be the number .* got None and 0"),
        ({**PLACE, "group": 2}, "the index of this one, from 0, got 2 and 2"),
        ({**PLACE, "size": 2}, r"has the entries .*, got \['size'\]"),
        ({**PLACE, "fsdp": {"size": 2}}, "Unknown argument 'size' of 'fsdp'"),
        ({**PLACE, "lighthouse": "host:29510"}, "'lighthouse' must be the address .* got 'host:29510'"),
    ],
)
def test_a_wrong_configuration_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_strategy(given)


def test_without_a_configuration_of_fsdp_a_group_is_one_process() -> None:
    assert isinstance(make_strategy({**PLACE, "fsdp": None}), TorchFT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_duration": "100tok"}, "`max_duration` must be in epochs, batches or samples"),
        ({"train_dataloader": [torch.ones(1, 8)]}, "must have a sampler with `num_replicas=2` and `rank=0`, got None"),
        ({"dist_timeout": 1}, "failed to connect to http://localhost:1 within timeout"),
        ({"parallelism_config": {"torchft": PLACE, "fsdp": {}}}, "'torchft'"),
        ({"algorithms": BatchSizeWarmup(2)}, "`BatchSizeWarmup`: It divides"),
        ({"optimizers": torch.optim.LBFGS}, "`optimizers` must step together after one backward pass .*got LBFGS"),
    ],
)
def test_what_groups_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    model = make_model()
    arguments = {
        "optimizers": options.pop("optimizers", torch.optim.SGD)(model.parameters(), lr=0.1),
        "train_dataloader": loader_of(2, 0, 8),
        "max_duration": "1ep",
        "parallelism_config": {"torchft": PLACE},
        "device": "cpu",
    }
    with pytest.raises((RuntimeError, TimeoutError, ValueError), match=message):
        Trainer(model=model, loss=torch.nn.functional.cross_entropy, **{**arguments, **options})
