"""`ModuleWithLoss`: any module, loss function and batch, under the names of the module."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from composer.core import DataSpec, Precision, State
from composer.devices import DeviceCPU
from composer.models import ModuleWithLoss
from composer.models.module_with_loss import as_composer_model
from composer.testing import SimpleModel
from composer.utils import get_device


class Net(torch.nn.Module):
    """Two inputs, a buffer and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(OrderedDict(module=torch.nn.Linear(3, 2)))  # a child with this name, too
        self.register_buffer("scale", torch.ones(2))
        self.width = 3

    def forward(self, image: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(image if mask is None else image * mask) * self.scale
        return outputs


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    target: torch.Tensor
    note: str = ""


Pair = namedtuple("Pair", ["image", "target"])

IMAGE, TARGET, MASK = torch.randn(4, 3), torch.tensor([0, 1, 1, 0]), torch.tensor([[1.0, 0.0, 1.0]]).expand(4, 3)


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        ((IMAGE, TARGET), {}),
        ([IMAGE, TARGET], {}),
        (Pair(IMAGE, TARGET), {}),
        ({"image": IMAGE, "labels": TARGET}, {}),
        ({"image": IMAGE, "label": TARGET}, {}),
        ({"x": IMAGE, "y": TARGET}, {"input_key": "x", "target_key": "y"}),
        ((MASK, IMAGE, TARGET), {"input_key": 1, "target_key": 2}),
        ({"image": IMAGE, "y": TARGET}, {"target_key": "y"}),
        (
            {"all": (IMAGE, TARGET)},
            {"input_key": lambda batch: batch["all"][0], "target_key": lambda batch: batch["all"][1]},
        ),
        (Pair(IMAGE, TARGET), {"input_key": "image", "target_key": "target"}),
    ],
)
def test_batches_of_every_form(batch: Any, keys: dict[str, Any]) -> None:
    net = Net()
    model = ModuleWithLoss(net, F.cross_entropy, **keys)

    outputs = model(batch)

    torch.testing.assert_close(outputs, net(IMAGE), rtol=0, atol=0)
    torch.testing.assert_close(model.loss(outputs, batch), F.cross_entropy(outputs, TARGET), rtol=0, atol=0)


def test_several_inputs_are_arguments() -> None:
    net = Net()
    expected = net(IMAGE, MASK)
    named = ModuleWithLoss(net, F.cross_entropy)({"image": IMAGE, "mask": MASK, "targets": TARGET})
    listed = ModuleWithLoss(net, F.cross_entropy, input_key=(0, 1), target_key=2)((IMAGE, MASK, TARGET))
    assert torch.equal(named, expected)
    assert torch.equal(listed, expected)


def test_a_dataclass_is_moved_counted_and_split() -> None:
    batch = Sample(IMAGE, TARGET, "clean")
    spec = DataSpec([batch])
    model = ModuleWithLoss(torch.nn.Linear(3, 2), F.cross_entropy, input_key="image")

    assert spec.get_num_samples_in_batch(batch) == 4
    parts = spec.split_batch(batch, 3)
    assert [len(part.image) for part in parts] == [3, 1]
    assert [part.note for part in parts] == ["clean", "clean"]
    moved = DeviceCPU().batch_to_device(batch)
    assert isinstance(moved, Sample)
    assert model.loss(model(parts[1]), parts[1]).ndim == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((IMAGE, MASK, TARGET), "`input_key` and `target_key` must be given .* got a tuple of 3 parts"),
        ({"image": IMAGE, "z": TARGET}, "`input_key` and `target_key` must be given .* takes no 'image', 'z'"),
    ],
)
def test_a_batch_that_needs_keys(batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ModuleWithLoss(torch.nn.Linear(3, 2), F.cross_entropy)(batch)


@pytest.mark.parametrize("batch", [IMAGE, {"image": IMAGE}])
def test_targets_that_are_not_there(batch: Any) -> None:
    model = ModuleWithLoss(torch.nn.Linear(3, 2), F.cross_entropy)
    with pytest.raises(ValueError, match="`target_key` must be given"):
        model.loss(model(batch), batch)


@pytest.mark.parametrize("batch", [IMAGE, (IMAGE,), [IMAGE], {"image": IMAGE}, {"x": IMAGE, "y": TARGET}])
@pytest.mark.parametrize("keys", [{}, {"input_key": 0}])
def test_inputs_without_targets_are_enough_to_predict(batch: Any, keys: dict[str, Any]) -> None:
    if keys and isinstance(batch, dict):
        keys = {"input_key": next(iter(batch))}
    net = torch.nn.Linear(3, 2)
    assert torch.equal(ModuleWithLoss(net, F.cross_entropy, **keys)(batch), net(IMAGE))


def test_names_of_weights_are_those_of_the_module_whatever_its_loss_has() -> None:
    weights = torch.rand(2)
    net = torch.nn.Linear(3, 2)
    model = ModuleWithLoss(net, torch.nn.CrossEntropyLoss(weight=weights)).double()
    net.load_state_dict(model.state_dict())
    assert model.loss_fn.weight.dtype is torch.float64  # it moves with the module

    net.loss_fn = torch.nn.CrossEntropyLoss(weight=weights)
    for loss in (net.loss_fn, F.cross_entropy, torch.nn.CrossEntropyLoss(weight=weights)):
        model = ModuleWithLoss(net, loss)
        assert set(model.state_dict()) == set(net.state_dict())
        model.load_state_dict(model.state_dict())


def test_a_loss_with_weights_is_saved() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, outputs: Any, targets: Any) -> Any:
            return F.cross_entropy(outputs * self.scale, targets)

    net = torch.nn.Linear(3, 2)
    model = ModuleWithLoss(net, Scaled())
    assert set(model.state_dict()) == {*net.state_dict(), "loss_fn.scale"}
    model.load_state_dict(model.state_dict())
    net.loss_fn = Scaled()
    with pytest.raises(ValueError, match="Rename the attribute"):
        ModuleWithLoss(net, Scaled())


def test_losses_per_example() -> None:
    batch = IMAGE, TARGET
    outputs = Net()(IMAGE)
    expected = F.cross_entropy(outputs, TARGET, reduction="none")

    module = torch.nn.CrossEntropyLoss()
    assert torch.equal(ModuleWithLoss(Net(), F.cross_entropy).loss(outputs, batch, reduction="none"), expected)
    assert torch.equal(ModuleWithLoss(Net(), module).loss(outputs, batch, reduction="none"), expected)
    assert module.reduction == "mean"
    with pytest.raises(TypeError, match=r"`loss` must take `reduction='none'`.* got `.*<lambda>`, which does not"):
        ModuleWithLoss(Net(), lambda outputs, targets: outputs.sum()).loss(outputs, batch, reduction="none")


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 0])),
        (torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])),  # indices, predicted as such
    ],
)
def test_a_metric_of_class_indices_gets_no_probabilities(targets: torch.Tensor, expected: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    metric = SimpleNamespace(takes_indices=True, update=lambda outputs, targets: seen.append(targets))
    model = ModuleWithLoss(Net(), F.cross_entropy, metrics={})
    model.update_metric((IMAGE[:2], targets), torch.zeros_like(targets), metric)
    assert torch.equal(seen[0], expected)


def test_names_are_those_of_the_module() -> None:
    net = Net()
    model = ModuleWithLoss(net, F.cross_entropy)

    assert list(model.state_dict()) == list(net.state_dict()) == ["scale", "inner.module.weight", "inner.module.bias"]
    assert dict(model.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert [name for name, _ in model.named_buffers("all")] == ["all.scale"]
    assert model.get_submodule("inner.module") is net.inner[0] is model.get_submodule("module.inner.module")
    assert model.get_submodule("") is model
    assert model.width == 3
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'height'"):
        _ = model.height

    other = ModuleWithLoss(Net(), F.cross_entropy)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert other.load_state_dict({"scale": torch.ones(2), "more": 1}, strict=False) == (
        ["inner.module.weight", "inner.module.bias"],
        ["more"],
    )

    outer = torch.nn.Sequential(OrderedDict(module=model))  # as in DDP
    assert list(outer.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    outer.load_state_dict({name: value + 1 for name, value in outer.state_dict().items()})
    assert torch.equal(net.scale, torch.full((2,), 2.0))


def test_a_loss_with_parameters_is_trained_and_saved() -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.weight * F.cross_entropy(outputs, targets)

    model = ModuleWithLoss(torch.nn.Linear(3, 2), Weighted())
    assert set(model.state_dict()) == {"weight", "bias", "loss_fn.weight"}
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert model.loss_fn.weight == 2
    assert {name for name, _ in model.named_parameters()} == {"weight", "bias", "loss_fn.weight"}


def test_copies_and_pickles() -> None:
    model = ModuleWithLoss(Net(), F.cross_entropy)
    for duplicate in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(duplicate((IMAGE, TARGET)), model((IMAGE, TARGET)))
        assert list(duplicate.state_dict()) == list(model.state_dict())
    assert copy.deepcopy(model).module is not model.module


def test_a_model_with_its_own_loss_is_left_alone() -> None:
    model = SimpleModel()
    assert as_composer_model(model) is model
    with pytest.raises(ValueError, match="`loss`, `input_key` must not be given for a `ComposerModel`"):
        as_composer_model(model, F.cross_entropy, input_key=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.nn.Linear,), TypeError, "got the class `Linear`; pass an object"),
        (("net",), TypeError, "`model` must be a `torch.nn.Module`, got str"),
        ((torch.nn.Linear(3, 2),), ValueError, "`loss` must be given for a module .* got a Linear"),
        ((torch.nn.Linear(3, 2), torch.nn.MSELoss), TypeError, r"got the class `MSELoss`. Pass `MSELoss\(\)`"),
        ((torch.nn.Linear(3, 2), "mse"), TypeError, "`loss` must be a function of outputs and targets, got 'mse'"),
        ((torch.nn.Linear(3, 2), lambda outputs: outputs), TypeError, r"got one with the arguments \(outputs\)\. Pass"),
        ((torch.nn.Linear(3, 2), lambda o, t, batch: o), TypeError, r"got one with the arguments \(o, t, batch\)\. "),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_composer_model(*arguments)


def test_a_model_of_a_library_is_wrapped_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer.core import _registry

    class Wrapped(SimpleModel):
        def __init__(self, module: Any, metrics: Any = None) -> None:
            super().__init__()
            self.inner, self.given = module, metrics

    kind = type("Model", (torch.nn.Linear,), {"__module__": "vendor.models"})
    point = type("Point", (), {"load": staticmethod(lambda: Wrapped)})
    monkeypatch.setattr(_registry, "points", lambda group: {"vendor": point} if "wrappers" in group else {})

    wrapped = as_composer_model(kind(3, 2), metrics=[])
    assert isinstance(wrapped, Wrapped)
    assert wrapped.given == []
    assert isinstance(as_composer_model(kind(3, 2), F.cross_entropy), ModuleWithLoss)
    with pytest.raises(ValueError, match="`input_key` must be given together with `loss` for a model of `vendor`"):
        as_composer_model(kind(3, 2), input_key=0)


def test_surgery_acts_on_the_module() -> None:
    from composer.utils import module_surgery

    net = Net()
    state = State(model=ModuleWithLoss(net, F.cross_entropy), rank_zero_seed=0)
    module_surgery.replace_module_classes(
        state.model, {torch.nn.Linear: lambda module, index: torch.nn.Identity()}, optimizers=None
    )
    assert isinstance(net.inner[0], torch.nn.Identity)


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        (32, "fp32"), ("32-true", "fp32"), ("no", "fp32"), (torch.float32, "fp32"),
        (16, "amp_fp16"), ("16-mixed", "amp_fp16"), ("FP16", "amp_fp16"), (torch.float16, "amp_fp16"),
        ("bf16", "amp_bf16"), ("bf16-mixed", "amp_bf16"), (torch.bfloat16, "amp_bf16"), ("fp8", "amp_fp8"),
    ],
)  # fmt: skip
def test_names_of_precisions_of_other_trainers(given: Any, precision: str) -> None:
    assert Precision(given).value == precision


@pytest.mark.parametrize("given", ["auto", None, torch.device("cpu"), "cpu:0", "CPU"])
def test_names_of_devices_of_other_trainers(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device(given).name == "cpu"


@pytest.mark.parametrize("given", ["cpu:1", "cuda:x", "tpu:3", "cuda:", "gpu0"])
def test_a_device_that_does_not_exist(given: str) -> None:
    with pytest.raises(ValueError, match=r"`device` must be one of .* or a GPU such as 'cuda:0', got"):
        get_device(given)


def test_one_of_several_gpus_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="`device` must be 'gpu' in a run of several processes"):
        get_device("cuda:1")


def test_a_tensor_alone_gets_a_hint_that_keeps_its_examples() -> None:
    model, batch = ModuleWithLoss(torch.nn.Linear(3, 3), F.mse_loss), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="`target_key=lambda batch: batch`, if the targets are the inputs"):
        model.loss(model(batch), batch)

    model = ModuleWithLoss(torch.nn.Linear(3, 3), F.mse_loss, target_key=lambda batch: batch)
    assert model.loss(model(batch), batch).dim() == 0
