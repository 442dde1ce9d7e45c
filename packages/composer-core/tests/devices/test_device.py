"""Devices: how modules, batches and optimizers move."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

from composer.devices import Device, DeviceCPU, DeviceGPU, DeviceMPS
from composer.devices.device import PlainDevice, _map_batch, _set_tf32
from composer.utils import get_device

Pair = namedtuple("Pair", ["x", "y"])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class DeviceMeta(PlainDevice):
    """Another device than the CPU that exists everywhere."""

    name = "meta"
    _device = torch.device("meta")


class FixedSequence(Sequence):  # type: ignore[type-arg]
    """A sequence whose constructor takes no iterator."""

    def __init__(self, first: Any, second: Any) -> None:
        self.items = [first, second]

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return 2


def negate(tensor: torch.Tensor) -> int:
    return -int(tensor)


one, two = torch.tensor(1), torch.tensor(2)


# ---- batches


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (one, -1),
        ([one, two], [-1, -2]),
        ((one, two), (-1, -2)),
        ({"a": one, "b": {"c": two}}, {"a": -1, "b": {"c": -2}}),
        ([one, ({"a": [two, "x"]}, None)], [-1, ({"a": [-2, "x"]}, None)]),
        (Pair(one, two), Pair(-1, -2)),
        (OrderedDict(a=one), OrderedDict(a=-1)),
        (UserDict(a=one), UserDict(a=-1)),
        (UserList([one, two]), UserList([-1, -2])),
        (defaultdict(list, a=one), {"a": -1}),
        (FixedSequence(one, two), [-1, -2]),
        (range(3), [0, 1, 2]),
        ("abc", "abc"),
        (b"abc", b"abc"),
        (["abc", 1.5, None], ["abc", 1.5, None]),
        (5, 5),
        (None, None),
        ((), ()),
    ],
)
def test_tensors_are_mapped_wherever_they_are(batch: Any, expected: Any) -> None:
    result = _map_batch(batch, negate)

    assert expected == result
    assert type(expected) is type(result)


def test_sets_and_queues_are_unchanged() -> None:
    for batch in ({1, 2}, deque([one]) if not isinstance(deque(), Sequence) else {3}):
        assert _map_batch(batch, negate) is batch


def test_a_tuple_that_is_there_already_comes_back_itself() -> None:
    batch = (torch.zeros(2), ("label", (torch.ones(2), 3)))
    pair = Pair(torch.zeros(2), None)

    assert DeviceCPU().batch_to_device(batch) is batch
    assert DeviceCPU().batch_to_device(pair) is pair


@pytest.mark.parametrize("batch", [[torch.zeros(2)], {"x": torch.zeros(2)}], ids=["list", "dict"])
def test_mutable_batches_are_new_so_that_changing_them_spares_the_data(batch: Any) -> None:
    key = 0 if isinstance(batch, list) else "x"

    moved = DeviceCPU().batch_to_device(batch)

    assert moved is not batch
    assert moved[key] is batch[key]


def test_a_tuple_is_new_if_anything_in_it_moves() -> None:
    batch = ("label", {"x": torch.zeros(2)}, (torch.zeros(3),))

    moved = DeviceMeta().batch_to_device(batch)

    assert [moved[1]["x"].device.type, moved[2][0].device.type] == ["meta", "meta"]
    assert [batch[1]["x"].device.type, batch[2][0].device.type] == ["cpu", "cpu"]


# ---- modules and optimizers


def test_modules_and_tensors_move() -> None:
    device, module = DeviceMeta(), torch.nn.Linear(1, 1)

    assert device.module_to_device(module) is module
    assert "meta" == module.weight.device.type
    assert "meta" == device.tensor_to_device(torch.zeros(1)).device.type


def make_optimizer(**options: Any) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}], **options)
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    return optimizer


def devices_of_state(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: value.device.type for state in optimizer.state.values() for key, value in state.items()}


def test_an_optimizer_moves_with_its_state_but_not_its_step_counter() -> None:
    optimizer = make_optimizer()

    assert DeviceMeta().optimizer_to_device(optimizer) is optimizer
    assert {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"} == devices_of_state(optimizer)


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_a_step_counter_that_the_kernel_reads_moves_as_well(option: str) -> None:
    optimizer = make_optimizer()
    for group in optimizer.param_groups:
        group[option] = True

    DeviceMeta().optimizer_to_device(optimizer)

    assert {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "meta"} == devices_of_state(optimizer)


def test_nested_optimizer_state_moves() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"history": [torch.zeros(2)], "count": 3}

    DeviceMeta().optimizer_to_device(optimizer)

    assert "meta" == optimizer.state[parameter]["history"][0].device.type
    assert 3 == optimizer.state[parameter]["count"]


# ---- finding a device


@pytest.mark.parametrize(
    ("kind", "backend", "name"),
    [
        (DeviceCPU, "gloo", "cpu"),
        (DeviceGPU, "nccl", "gpu"),
        (DeviceMPS, "", "mps"),
    ],
)
def test_names_and_backends(kind: type[Device], backend: str, name: str) -> None:
    assert (backend, name) == (kind.dist_backend, kind.name)
    assert issubclass(kind, Device)


def test_an_incomplete_device_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Device()  # type: ignore[abstract]


@pytest.mark.parametrize("name", ["cpu", "CPU", "Cpu"])
def test_devices_are_found_by_name_in_any_case(name: str) -> None:
    assert isinstance(get_device(name), DeviceCPU)


def test_a_device_is_passed_through() -> None:
    device = DeviceMeta()

    assert get_device(device) is device


def test_the_default_is_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert isinstance(get_device(), DeviceCPU)


@pytest.mark.parametrize("name", ["cuda", "CUDA"])
def test_cuda_is_another_name_of_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError, match=r"`DeviceGPU` needs a GPU, and CUDA is not available here"):
        get_device(name)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`device` must be one of 'cpu', 'gpu', .*, got 'magic'"):
        get_device("magic")


def test_mps_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs an Apple GPU"):
        get_device("mps")

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "mps" == get_device("mps")._device.type


# ---- GPUs


def test_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError, match="`DeviceGPU` needs a GPU, and CUDA is not available"):
        get_device("gpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: torch.cpu.Stream())
    return chosen


@pytest.fixture(autouse=True)
def keep_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_a_gpu_becomes_the_current_one(two_gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    devices = [DeviceGPU(0), DeviceGPU(), get_device()]

    assert [torch.device("cuda", index) for index in (0, 1, 1)] == [device._device for device in devices]
    assert two_gpus == [device._device for device in devices]


@pytest.mark.gpu
@needs_gpu
def test_a_batch_is_copied_while_the_gpu_computes() -> None:
    device = DeviceGPU()
    host = torch.arange(1 << 20).pin_memory()
    device.batch_to_device(host)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second

    inputs, other = device.batch_to_device((host, {"y": host}))
    device._copies.synchronize()

    assert not torch.cuda.current_stream().query(), "the copies are done, the computation is not"
    assert torch.equal(host, inputs.cpu())
    assert torch.equal(host, other["y"].cpu())
    assert device.batch_to_device([inputs])[0] is inputs


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("index", [2, -1])
def test_a_gpu_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"`device_id` must be below the number of visible GPUs, 2, got {index}"):
        DeviceGPU(index)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("allow", [True, False])
def test_a_gpu_sets_tf32(allow: bool) -> None:
    DeviceGPU(0, allow_tf32=allow)

    assert (allow, allow) == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize("allow", [True, False])
def test_tf32_leaves_torch_s_records_consistent_and_warns_of_nothing(allow: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _set_tf32(not allow)
        _set_tf32(allow)

    assert ("high" if allow else "highest") == torch.get_float32_matmul_precision()  # torch.compile asks this
    with torch.backends.cudnn.flags(enabled=False):
        pass


@pytest.mark.gpu
@needs_gpu
def test_a_batch_moves_to_a_real_gpu_without_waiting() -> None:
    device = DeviceGPU()
    pinned = torch.zeros(4).pin_memory()

    with torch.cuda.stream(torch.cuda.current_stream()):
        moved = device.batch_to_device((pinned, {"y": torch.ones(2)}))

    assert [moved[0].device.type, moved[1]["y"].device.type] == ["cuda", "cuda"]
    assert device.batch_to_device(moved[0]) is moved[0]


@pytest.mark.parametrize("cls", [DeviceCPU, DeviceGPU, DeviceMPS])
def test_each_device_has_its_module(cls: type[Device]) -> None:
    module = import_module(f"composer.devices.{cls.__name__.replace('Device', 'device_').lower()}")

    assert cls is getattr(module, cls.__name__)
    assert [cls.__name__] == module.__all__
