"""`apply_blurpool` and `BlurPool` on models, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool, blur_2d
from composer.algorithms.warnings import NoEffectWarning
from composer.core import CHANGES_LAYERS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import ConvModel

FLAGS = [(True, True, True), (True, True, False), (True, False, True), (False, True, True), (True, False, False)]


class Records(LoggerDestination):
    """Records the logged hyperparameters, call by call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(hyperparameters)


def start(algorithm: Algorithm, model: nn.Module) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithm, callbacks=Records())
    Engine(state).run_event("init")
    return state


def test_the_function_is_registered() -> None:
    assert apply_blurpool is cf.apply_blurpool


@pytest.mark.parametrize(("replace_convs", "replace_maxpools", "blur_first"), FLAGS)
def test_layers_that_subsample_are_replaced_at_init(
    replace_convs: bool, replace_maxpools: bool, blur_first: bool
) -> None:
    """Only the first convolution is replaced: the second has few channels, the third does not subsample."""
    before, model = ConvModel(), ConvModel()
    state = start(BlurPool(replace_convs, replace_maxpools, blur_first), model)

    assert replace_convs == isinstance(model.conv1, BlurConv2d)
    assert replace_maxpools == isinstance(model.pool1, BlurMaxPool2d)
    assert [nn.Conv2d, nn.Conv2d] == [type(model.conv2), type(model.conv3)]
    assert model.conv1 is model.module[0]
    if isinstance(model.conv1, BlurConv2d):
        assert blur_first == model.conv1.blur_first
        assert torch.equal(before.conv1.weight, model.conv1.conv.weight)
    counts = {
        "blurpool/num_blurpool_layers": int(replace_maxpools),
        "blurpool/num_blurconv_layers": int(replace_convs),
    }
    assert [counts] == state.callbacks[0].calls  # type: ignore[attr-defined]


def test_parameters_stay_in_their_groups_with_their_state() -> None:
    model = ConvModel()
    params = list(model.parameters())
    weights, biases = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases}], weight_decay=0.0)
    model((torch.randn(2, 32, 16, 16), None)).sum().backward()
    optimizer.step()
    state = dict(optimizer.state)
    apply_blurpool(model, optimizers=optimizer)

    assert isinstance(model.conv1, BlurConv2d)
    assert {id(p) for p in params} == {id(p) for p in model.parameters()}
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert [[id(p) for p in weights], [id(p) for p in biases]] == groups
    assert all(optimizer.state[p] is state[p] for p in params)


class Standardized(nn.Conv2d):
    """Convolves with another weight than its parameter, as networks without normalization do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Same(nn.Conv2d):
    """Pads by itself, as much as the size of the image needs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(input, [1, 1, 1, 1]))


class PoolSame(nn.MaxPool2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(input, [0, 1, 0, 1]))


@pytest.mark.parametrize("kind", [Standardized, Same])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_of_a_subclass_computes_as_before_on_the_blurred_input(
    kind: type[nn.Conv2d], kernel: int
) -> None:
    conv, x = kind(16, 16, kernel, stride=2), torch.randn(2, 16, 9, 8)
    expected = conv(blur_2d(x))
    model = nn.Sequential(conv)
    apply_blurpool(model)

    assert isinstance(model[0], BlurConv2d)
    assert conv is model[0].conv
    torch.testing.assert_close(expected, model(x))


def test_layers_of_subclasses_that_cannot_be_blurred_stay_with_one_warning() -> None:
    model = nn.Sequential(Same(16, 16, 3, 2), PoolSame(2), Same(16, 16, 3, 2), nn.Conv2d(16, 16, 3, 2))
    before = list(model)
    with pytest.warns(UserWarning, match=r"(?s)left 3 modules.*`0` and 1 more \(Same\): .*`1` \(PoolSame\)") as caught:
        apply_blurpool(model, blur_first=False)

    assert 1 == len(caught)
    assert before[:3] == list(model)[:3]
    assert isinstance(model[3], BlurConv2d)


def test_hooks_and_norms_of_the_weight_survive() -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3, 2)), nn.MaxPool2d(2))
    model[0].register_forward_hook(lambda *_: calls.append("conv"))
    model[1].register_forward_hook(lambda *_: calls.append("pool"))
    expected = model[0](blur_2d(x := torch.randn(1, 16, 9, 9)))
    calls.clear()
    apply_blurpool(model)
    model(x)

    assert ["conv", "pool"] == calls
    torch.testing.assert_close(expected, model[0](x))


def test_convolutions_inside_adapters_stay_with_a_warning() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.lora_A = nn.Conv2d(16, 16, 3, 2), nn.Conv2d(16, 16, 3, 2)

    model = nn.Sequential(Adapter(), nn.Conv2d(16, 16, 3, 2))
    with pytest.warns(UserWarning, match=r"`0.base_layer` and 1 more \(Conv2d\): an adapter reads its weight"):
        apply_blurpool(model)

    assert [nn.Conv2d, nn.Conv2d, BlurConv2d] == [type(m) for m in (*model[0].children(), model[1])]


def test_a_shared_convolution_stays_shared() -> None:
    conv = nn.Conv2d(16, 16, 3, 2)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    apply_blurpool(model)

    assert model[0] is model[2]
    assert model[0].conv is conv


def test_outputs_keep_their_shape_and_training_works() -> None:
    model, x = ConvModel(), torch.randn(2, 32, 32, 32)
    expected = model((x, None)).shape
    start(BlurPool(min_channels=0), model)
    outputs = model((x, None))
    outputs.sum().backward()

    assert expected == outputs.shape
    assert isinstance(model.conv2, BlurConv2d)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_applying_it_twice_is_applying_it_once() -> None:
    model = ConvModel()
    apply_blurpool(model)
    once = [(name, type(module)) for name, module in model.named_modules()]
    apply_blurpool(model)

    assert once == [(name, type(module)) for name, module in model.named_modules()]


def test_training_and_evaluation_mode_are_kept() -> None:
    model = ConvModel().eval()
    apply_blurpool(model)

    assert not any(module.training for module in model.modules())


def test_only_convolutions_with_enough_channels_that_subsample_are_replaced() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 15, 3, 2), nn.Conv2d(15, 16, 3, 2), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 2, 3, (1, 2))
    )
    apply_blurpool(model)

    assert [BlurConv2d, nn.Conv2d, nn.Conv2d, BlurConv2d] == [type(layer) for layer in model]


def test_pooling_that_returns_indices_stays() -> None:
    pool = nn.MaxPool2d(2, return_indices=True)
    model = nn.Sequential(pool, nn.MaxPool2d(2))
    apply_blurpool(model)

    assert model[0] is pool
    assert isinstance(model[1], BlurMaxPool2d)


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Conv2d(32, 32, 3, stride=2), nn.Sequential(nn.Conv2d(8, 8, 3, 2))]
)
def test_a_model_with_nothing_to_replace_gets_a_warning(model: nn.Module) -> None:
    """A convolution that is the model itself has no place where its replacement could go."""
    with pytest.warns(NoEffectWarning, match=r"`apply_blurpool` changed nothing.*at least 16 input channels"):
        apply_blurpool(model)


def test_with_both_flags_off_the_function_warns_and_the_class_refuses() -> None:
    with pytest.warns(NoEffectWarning, match=r"`apply_blurpool` changed nothing"):
        apply_blurpool(ConvModel(), replace_convs=False, replace_maxpools=False)
    with pytest.raises(ValueError, match=r"`replace_convs` or `replace_maxpools` must be True, got False for both"):
        BlurPool(replace_convs=False, replace_maxpools=False)


def test_it_is_required_on_load() -> None:
    assert BlurPool.required_on_load()


class AfterConvs(Algorithm):
    """A method that must get the final layers of the model."""

    events = frozenset({Event.INIT})
    placement = Placement(after={CHANGES_LAYERS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = type(state.model.conv1)


@pytest.mark.parametrize("reverse", [False, True])
def test_methods_that_follow_replaced_convolutions_get_them_in_any_order_of_the_list(reverse: bool) -> None:
    after = AfterConvs()
    algorithms = [after, BlurPool()]
    state = State(model=ConvModel(), max_duration="1ep")
    Engine(state, algorithms=algorithms[::-1] if reverse else algorithms).run_event("init")

    assert BlurConv2d is after.seen


def test_replacing_draws_no_random_numbers() -> None:
    """Random numbers of other methods must not depend on their order relative to this one."""
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, stride=2), torch.nn.MaxPool2d(2))
    before = torch.get_rng_state()

    apply_blurpool(model)

    assert torch.equal(before, torch.get_rng_state())


class PartialConv(nn.Conv2d):
    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input if mask is None else input * mask)


class PassingOn(nn.Conv2d):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


def test_a_convolution_that_takes_a_mask_stays() -> None:
    model = nn.ModuleList([PartialConv(16, 16, 3, 2), PassingOn(16, 16, 3, 2)])
    partial = model[0]
    with pytest.warns(UserWarning, match=r"`0` \(PartialConv\): its `forward` takes more than the input"):
        apply_blurpool(model)

    assert partial is model[0]
    assert not isinstance(model[1], PassingOn)
