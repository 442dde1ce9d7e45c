"""Ranks, and collectives in one process and in several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from composer.devices import DeviceCPU
from composer.testing._processes import run_on_ranks
from composer.utils import dist

GETTERS: dict[str, Callable[[], int]] = {
    "WORLD_SIZE": dist.get_world_size,
    "RANK": dist.get_global_rank,
    "LOCAL_WORLD_SIZE": dist.get_local_world_size,
    "LOCAL_RANK": dist.get_local_rank,
    "NODE_RANK": dist.get_node_rank,
}
DEFAULTS = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "NODE_RANK": 0}
MEETINGS = 300  # on torch 2.6, `torch.distributed.destroy_process_group` hangs in one of some hundred
NOT_READY = "the distributed package is not available or has not been initialized"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*DEFAULTS, "GROUP_RANK"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.initialize_dist("cpu")


# ---- one process


def test_importing_initialises_nothing() -> None:
    assert dist.is_available()
    assert not dist.is_initialized()
    assert not DEFAULTS.keys() & os.environ.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_process_without_a_launcher_is_the_only_one(name: str) -> None:
    assert DEFAULTS[name] == GETTERS[name]()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_environment_tells_the_launch_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")

    assert 7 == GETTERS[name]()


def test_the_node_rank_may_have_the_name_that_torchrun_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    assert 3 == dist.get_node_rank()

    monkeypatch.setenv("NODE_RANK", "2")
    assert 2 == dist.get_node_rank()


def test_a_launch_variable_must_be_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")

    with pytest.raises(ValueError, match="`LOCAL_RANK` must be an integer, got 'first'"):
        dist.get_local_rank()


@pytest.mark.usefixtures("initialized")
def test_initialising_a_single_process_sets_its_launch_variables() -> None:
    assert dist.is_initialized()
    assert DEFAULTS == {name: int(os.environ[name]) for name in DEFAULTS}
    assert "gloo" == torch.distributed.get_backend()


def test_a_launched_single_process_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DEFAULTS.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    dist.initialize_dist(DeviceCPU(), timeout=30.0)

    assert 1 == torch.distributed.get_world_size()


@pytest.mark.usefixtures("initialized")
@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_an_environment_that_contradicts_the_process_group_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "5")

    with pytest.raises(
        RuntimeError, match=f"`{name}` is 5, but torch.distributed was initialized with {DEFAULTS[name]}"
    ):
        GETTERS[name]()


@pytest.mark.usefixtures("initialized")
def test_what_the_process_group_knows_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")

    assert (dist.get_world_size(), dist.get_global_rank()) == (1, 0)


@pytest.mark.usefixtures("initialized")
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"])
def test_what_only_the_environment_knows_must_be_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)

    with pytest.raises(dist.MissingEnvironmentError, match=f"`{name}` is not set"):
        GETTERS[name]()


@pytest.mark.usefixtures("initialized")
def test_initialising_twice_does_nothing() -> None:
    group = torch.distributed.group.WORLD

    dist.initialize_dist("cpu")

    assert group is torch.distributed.group.WORLD


class OtherDevice(DeviceCPU):
    dist_backend = "nccl"
    name = "other"


class DeviceWithoutBackend(DeviceCPU):
    dist_backend = ""
    name = "lonely"


@pytest.mark.usefixtures("initialized")
def test_initialising_again_with_another_backend_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'other' needs the backend 'nccl', but .* initialized with 'cpu:gloo"):
        dist.initialize_dist(OtherDevice())


@pytest.mark.usefixtures("initialized")
def test_a_device_without_a_backend_accepts_any_process_group() -> None:
    dist.initialize_dist(DeviceWithoutBackend())


def test_a_device_without_a_backend_works_in_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.initialize_dist(DeviceWithoutBackend())
    assert not dist.is_initialized()

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="'lonely' has no backend"):
        dist.initialize_dist(DeviceWithoutBackend())


@pytest.mark.parametrize("is_initialized", [False, True])
def test_collectives_do_nothing_in_a_single_process(is_initialized: bool) -> None:
    if is_initialized:
        dist.initialize_dist("cpu")
    tensor, objects = torch.tensor([1.0, 2.0]), ["a"]

    dist.barrier()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    dist.broadcast_object_list(objects)

    assert [1.0, 2.0] == tensor.tolist()
    assert ["a"] == objects
    assert [[1.0, 2.0]] == [t.tolist() for t in dist.all_gather(tensor)]
    assert [{"b": 1}] == dist.all_gather_object({"b": 1})


def _meet_and_leave() -> bool:
    for _ in range(MEETINGS):
        dist.initialize_dist("cpu")
        assert [1] == dist.all_gather_object(1)
        dist.destroy_process_group()
    return dist.is_initialized()


def test_leaving_does_not_wait_for_threads_that_wait_for_it() -> None:
    assert [False] == run_on_ranks(_meet_and_leave, 1, backend=None, timeout=120)


def test_destroying_one_group_leaves_the_default_group() -> None:
    dist.initialize_dist("cpu")
    other = torch.distributed.new_group([0])

    dist.destroy_process_group(other)
    assert dist.is_initialized()
    with pytest.raises((ValueError, TypeError)):  # the latter by torch 2.6
        dist.barrier(other)

    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "call",
    [
        dist.barrier,
        lambda: dist.all_reduce(torch.zeros(1)),
        lambda: dist.broadcast(torch.zeros(1), 0),
        lambda: dist.broadcast_object_list([1]),
        lambda: dist.all_gather(torch.zeros(1)),
        lambda: dist.all_gather_object(1),
    ],
    ids="barrier all_reduce broadcast broadcast_object_list all_gather all_gather_object".split(),
)
def test_collectives_of_several_processes_need_a_process_group(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError, match=NOT_READY):
        call()


def test_an_unknown_reduction_is_refused_even_in_a_single_process() -> None:
    with pytest.raises(ValueError, match=r"`reduce_operation` must be one of SUM, AVG, .*, got 'MEAN'"):
        dist.all_reduce(torch.zeros(1), "MEAN")


def test_the_sampler_of_a_single_process_covers_everything() -> None:
    sampler = dist.get_sampler(range(5))

    assert [0, 1, 2, 3, 4] == list(sampler)


def test_samplers_share_the_data_and_shuffle_by_seed() -> None:
    def shares(**options: Any) -> list[list[int]]:
        return [list(dist.get_sampler(range(7), num_replicas=2, rank=rank, **options)) for rank in range(2)]

    assert [[0, 2, 4, 6], [1, 3, 5, 0]] == shares()
    assert [[0, 2, 4], [1, 3, 5]] == shares(drop_last=True)
    assert shares(shuffle=True, seed=1) == shares(shuffle=True, seed=1)
    assert shares(shuffle=True, seed=1) != shares(shuffle=True, seed=2)


def test_the_sampler_takes_this_process_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    assert [1, 3] == list(dist.get_sampler(range(4)))


# ---- two processes


def collect_everything() -> dict[str, Any]:
    rank = dist.get_global_rank()
    found: dict[str, Any] = {name: getter() for name, getter in GETTERS.items()}
    for operation in ("SUM", "max", "PRODUCT", "MIN"):
        tensor = torch.tensor([2.0 + rank])
        dist.all_reduce(tensor, operation)
        found[operation] = tensor.item()
    sent, objects = torch.tensor([rank]), [f"rank {rank}", rank]
    dist.broadcast(sent, src=1)
    dist.broadcast_object_list(objects, src=1)
    found |= {"broadcast": sent.item(), "broadcast_object_list": objects}
    strided = torch.arange(4).reshape(2, 2).t() + rank
    found["all_gather"] = [t.tolist() for t in dist.all_gather(strided)]
    found["bool"] = [t.tolist() for t in dist.all_gather(torch.tensor([rank == 1]))]
    found["all_gather_object"] = dist.all_gather_object({"rank": rank})
    found["sampler"] = list(dist.get_sampler(range(4)))
    dist.barrier()
    return found


def test_collectives_of_two_processes() -> None:
    found = run_on_ranks(collect_everything)

    common = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "NODE_RANK": 0,
        "SUM": 5.0,
        "max": 3.0,
        "PRODUCT": 6.0,
        "MIN": 2.0,
        "broadcast": 1,
        "broadcast_object_list": ["rank 1", 1],
        "all_gather": [[[0, 2], [1, 3]], [[1, 3], [2, 4]]],
        "bool": [[False], [True]],
        "all_gather_object": [{"rank": 0}, {"rank": 1}],
    }
    for rank in range(2):
        assert {**common, "RANK": rank, "LOCAL_RANK": rank, "sampler": [rank, rank + 2]} == found[rank]


def work_in_a_group() -> tuple[int, list[int]] | None:
    group = torch.distributed.new_group([1, 2])
    if dist.get_global_rank() == 0:
        return None
    tensor = torch.tensor(dist.get_global_rank())
    dist.barrier(group)
    return dist.get_global_rank(group), [t.item() for t in dist.all_gather(tensor, group)]


def test_collectives_of_a_group_leave_the_others_out() -> None:
    assert [None, (0, [1, 2]), (1, [1, 2])] == run_on_ranks(work_in_a_group, 3)


def initialise_from_environment() -> tuple[bool, str, list[int]]:
    before = dist.is_initialized()
    dist.initialize_dist(DeviceCPU(), timeout=30.0)
    return before, torch.distributed.get_backend(), dist.all_gather_object(dist.get_global_rank())


def test_the_process_group_is_initialised_from_the_environment() -> None:
    assert [(False, "gloo", [0, 1])] * 2 == run_on_ranks(initialise_from_environment, 2, backend=None)
