"""Small helpers of `composer.utils.misc`."""

from __future__ import annotations

import builtins
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer.utils import dist, misc

NAMES = ["a", "b", "run_name"]
values = st.one_of(st.integers(), st.text(max_size=5))
fields = st.sampled_from(["{}", "{0}", "{1}", "{a}", "{b}", "{run_name}", "{a!r}", "{b!s:>8}", "{run_name:}"])
# No literal braces here: `{{` has a test of its own.
templates = st.lists(st.one_of(fields, st.text(st.characters(exclude_characters="{}"), max_size=5)), max_size=8)


# ---- partial_format


@settings(deadline=None, max_examples=50)
@given(templates, st.tuples(values, values, *([values] * 8)), st.fixed_dictionaries(dict.fromkeys(NAMES, values)))
def test_with_all_arguments_it_is_str_format(parts: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    numbered = [part for part in parts if part != "{}"]  # str.format does not mix "{}" with "{0}"

    for template in ("".join(numbered), "".join(p for p in parts if p not in ("{0}", "{1}"))):
        assert template.format(*args, **kwargs) == misc.partial_format(template, *args, **kwargs)


@settings(deadline=None, max_examples=50)
@given(templates)
def test_without_arguments_nothing_changes(parts: list[str]) -> None:
    template = "".join(parts).replace("{run_name:}", "{run_name}")

    assert template == misc.partial_format(template)


@settings(deadline=None, max_examples=50)
@given(templates, st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers())), st.sets(st.sampled_from(NAMES)))
def test_filling_in_two_steps_equals_one_step(parts: list[str], kwargs: dict[str, Any], first: set[str]) -> None:
    template = "".join(part for part in parts if "0" not in part and "1" not in part and part != "{}")

    once = misc.partial_format(template, **{name: kwargs[name] for name in first})

    assert template.format(**kwargs) == misc.partial_format(once, **kwargs)


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "expected"),
    [
        ("{foo} {bar}", (), {"foo": 1}, "1 {bar}"),
        ("{} {}", ("x",), {}, "x {}"),
        ("{0} {1} {0}", ("x",), {}, "x {1} x"),
        ("{} {foo}", ("x",), {}, "x {foo}"),
        ("{epoch:03d}-{rank:02d}", (), {"rank": 3}, "{epoch:03d}-03"),
        ("{foo!r} {bar!r:>4}", (), {"foo": "x"}, "'x' {bar!r:>4}"),
        ("{foo.real} {bar.real} {bar[0]}", (), {"foo": 2}, "2 {bar.real} {bar[0]}"),
        ("{foo[0]}", (), {"foo": "xy"}, "x"),
        ("{foo:{width}}|", (), {"foo": 1, "width": 3}, "  1|"),
        ("{foo:{width}}|", (), {"foo": 1}, "{foo:{width}}|"),
        ("{{literal}} {foo}", (), {"foo": 1}, "{literal} 1"),
        ("", (), {}, ""),
    ],
)
def test_known_fields_are_filled_and_others_stay(
    template: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    assert expected == misc.partial_format(template, *args, **kwargs)


def test_a_wrong_attribute_of_a_given_argument_is_an_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        misc.partial_format("{foo.nothing}", foo=1)


# ---- wrapped models


def test_an_unwrapped_model_is_neither_ddp_nor_fsdp() -> None:
    model = nn.Sequential(nn.Linear(1, 1))

    assert not misc.is_model_ddp(model)
    assert not misc.is_model_fsdp(model)
    assert not misc.is_model_fsdp2(model)


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "")  # so that what the initialisation sets is undone
        monkeypatch.delenv(name)
    dist.initialize_dist("cpu")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")  # FSDP advises against a single process on a CPU
def test_wrapped_models_are_recognised() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def shard(module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        return module

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    models = [
        (DistributedDataParallel(nn.Linear(2, 2)), (True, False, False)),
        (wrap(nn.Linear(2, 2)), (False, True, False)),
        (nn.Sequential(wrap(nn.Linear(2, 2))), (False, True, False)),
        (shard(nn.Linear(2, 2)), (False, True, True)),
        (nn.Sequential(shard(nn.Linear(2, 2))), (False, True, True)),
        (nn.Sequential(nn.Linear(2, 2)), (False, False, False)),
    ]

    for model, expected in models:
        assert (misc.is_model_ddp(model), misc.is_model_fsdp(model), misc.is_model_fsdp2(model)) == expected


# ---- the rest


def test_only_a_notebook_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not misc.is_notebook()

    monkeypatch.setattr(builtins, "get_ipython", lambda: SimpleNamespace(config={}), raising=False)
    assert not misc.is_notebook()  # IPython in a terminal

    monkeypatch.setattr(builtins, "get_ipython", lambda: SimpleNamespace(config={"IPKernelApp": {}}), raising=False)
    assert misc.is_notebook()


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("", misc.get_free_tcp_port()))


def partly_frozen_model() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1).eval(), nn.Sequential(nn.Dropout()))


def test_eval_mode_ends_with_every_module_in_the_mode_it_had() -> None:
    model = partly_frozen_model()

    with misc.model_eval_mode(model):
        inside = [module.training for module in model.modules()]

    assert [False] * 5 == inside
    assert [True, True, False, True, True] == [module.training for module in model.modules()]


def test_eval_mode_ends_with_an_error_too() -> None:
    model = partly_frozen_model()

    with pytest.raises(KeyError, match="mine"), misc.model_eval_mode(model):
        raise KeyError("mine")

    assert [True, True, False, True, True] == [module.training for module in model.modules()]


def test_names_of_precisions() -> None:
    assert {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16} == misc.STR_TO_DTYPE


# ---- add_vision_dataset_transform


def flip(image: Any) -> Any:
    return image


def names_of_transforms(dataset: Any) -> list[str]:
    steps = getattr(dataset.transform, "transforms", [dataset.transform])
    return [getattr(step, "__name__", type(step).__name__) for step in steps]


@pytest.mark.parametrize(
    ("existing", "is_tensor_transform", "expected"),
    [
        ([], False, ["flip"]),
        (["ToTensor"], False, ["flip", "ToTensor"]),
        (["ToTensor"], True, ["ToTensor", "flip"]),
        (["Grayscale"], False, ["Grayscale", "flip"]),
        (["Grayscale"], True, ["Grayscale", "flip"]),
        (["Grayscale", "ToTensor", "RandomErasing"], False, ["Grayscale", "flip", "ToTensor", "RandomErasing"]),
        (["Grayscale", "ToTensor", "RandomErasing"], True, ["Grayscale", "ToTensor", "flip", "RandomErasing"]),
        (["Grayscale", "RandomInvert"], False, ["Grayscale", "RandomInvert", "flip"]),
        (["Grayscale", "RandomInvert"], True, ["Grayscale", "RandomInvert", "flip"]),
    ],
)
def test_a_transform_goes_where_its_input_type_fits(
    existing: list[str], is_tensor_transform: bool, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    torchvision = pytest.importorskip("torchvision")
    steps = [getattr(torchvision.transforms, name)() for name in existing]
    transform = torchvision.transforms.Compose(steps) if len(steps) > 1 else (steps or [None])[0]
    dataset = torchvision.datasets.VisionDataset(".", transform=transform)

    misc.add_vision_dataset_transform(dataset, flip, is_tensor_transform)

    assert expected == names_of_transforms(dataset)
    assert dataset.transforms.transform is dataset.transform
    assert [(logging.WARNING, "composer.utils.misc")] == [(r.levelno, r.name) for r in caplog.records]


def test_a_shared_compose_is_not_modified() -> None:
    torchvision = pytest.importorskip("torchvision")
    shared = torchvision.transforms.Compose([torchvision.transforms.ToTensor()])
    train, test = (torchvision.datasets.VisionDataset(".", transform=shared) for _ in range(2))

    misc.add_vision_dataset_transform(train, flip)

    assert ["flip", "ToTensor"] == names_of_transforms(train)
    assert ["ToTensor"] == names_of_transforms(test)


def test_transforms_of_version_2_stay_in_a_compose_of_version_2() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    dataset = SimpleNamespace(transform=v2.Compose([v2.Grayscale(), v2.ToImage()]))

    misc.add_vision_dataset_transform(dataset, flip)

    assert ["Grayscale", "flip", "ToImage"] == names_of_transforms(dataset)
    assert isinstance(dataset.transform, v2.Compose)


def test_the_target_transform_and_a_joint_transform_stay() -> None:
    torchvision = pytest.importorskip("torchvision")
    with_target = torchvision.datasets.VisionDataset(".", target_transform=str)
    joint = torchvision.datasets.VisionDataset(".", transforms=lambda x, y: (x, y))
    own = joint.transforms

    misc.add_vision_dataset_transform(with_target, flip)
    misc.add_vision_dataset_transform(joint, flip)

    assert (1, "2") == with_target.transforms(1, 2)
    assert joint.transforms is own


def test_a_model_is_taken_out_of_its_wrappers() -> None:
    layer = torch.nn.Linear(1, 1)

    assert layer is misc.unwrapped_model(layer)
    assert layer is misc.unwrapped_model(torch.compile(layer))  # type: ignore[arg-type]


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.zeros(2)

    assert tensor is misc.local_part(tensor)


@misc.renamed_arguments(colour="color")
def paint(color: str, *, size: int = 1) -> tuple[str, int]:
    return color, size


def test_an_argument_has_two_names() -> None:
    assert ("red", 1) == paint("red") == paint(color="red") == paint(colour="red")
    assert ("red", 2) == paint(size=2, colour="red")
    with pytest.raises(TypeError, match="`colour` and `color` are two names of the same argument, got both"):
        paint(color="red", colour="red")
    with pytest.raises(TypeError, match="unexpected keyword argument 'shade'"):
        paint(shade="red")  # type: ignore[call-arg]
