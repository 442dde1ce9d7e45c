"""Modules replaced inside a model, with the optimizer kept in step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from composer.utils.module_surgery import (
    count_module_instances,
    find_adapter_layers,
    overrides_forward,
    replace_module_classes,
    update_params_in_optimizer,
)


class Wrapped(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.none = None
        self.last = nn.Linear(3, 1)


def names_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, child in model.named_modules(remove_duplicate=False) if isinstance(child, kind)]


def same_tensors(expected: Any, actual: Any) -> bool:
    expected, actual = list(expected), list(actual)
    return len(expected) == len(actual) and all(a is b for a, b in zip(expected, actual, strict=True))


# ---- replace_module_classes


def test_modules_are_visited_depth_first_with_a_count() -> None:
    model = Model()
    seen: list[tuple[nn.Module, int]] = []

    replaced = replace_module_classes(model, {nn.Linear: lambda module, index: seen.append((module, index))})

    assert [(model.first, 0), (model.block[0], 1), (model.block[2], 2), (model.last, 3)] == seen
    assert {} == replaced


def test_only_modules_whose_policy_returns_one_are_replaced() -> None:
    model = Model()
    first, last = model.first, model.last

    replaced = replace_module_classes(model, {nn.Linear: lambda m, index: nn.Identity() if index == 0 else None})

    assert {first: model.first} == replaced
    assert ["first"] == names_of(model, nn.Identity)
    assert model.last is last


def test_subclasses_match_and_the_root_does_not() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(1, 1), nn.Sequential(nn.ReLU()))

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Identity(), nn.Sequential: lambda m, i: nn.Tanh()})

    assert [nn.Identity, nn.Tanh] == [type(child) for child in model]


def test_a_shared_module_is_visited_once_and_replaced_everywhere() -> None:
    shared = nn.ReLU()
    model = nn.Module()
    model.a, model.b, model.c = shared, nn.Sequential(shared, shared), shared
    calls: list[int] = []

    replaced = replace_module_classes(model, {nn.ReLU: lambda m, index: (calls.append(index), nn.GELU())[1]})

    assert [0] == calls
    assert [shared] == list(replaced)
    assert ["a", "b.0", "b.1", "c"] == names_of(model, nn.GELU)
    assert 1 == len({model.a, model.b[0], model.b[1], model.c})


def test_every_policy_counts_its_own_matches_even_without_a_replacement() -> None:
    model = Model()
    counts: dict[type[nn.Module], int] = {}

    replace_module_classes(model, {nn.Linear: lambda m, i: None, nn.Module: lambda m, i: None}, indices=counts)
    replace_module_classes(model, {nn.Linear: lambda m, i: None}, indices=counts)

    assert {nn.Linear: 8, nn.Module: 6} == counts


def test_two_replacements_of_one_module_trip_an_assertion() -> None:
    policies = {nn.ReLU: lambda m, i: nn.GELU(), nn.Module: lambda m, i: nn.Tanh()}

    with pytest.raises(AssertionError, match="must be replaced only once"):
        replace_module_classes(nn.Sequential(nn.ReLU()), policies)


def test_a_policy_may_change_the_module_and_return_it() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    dropout = model[0]

    def change(module: nn.Module, index: int) -> nn.Module:
        module.p = 0.5
        return module

    assert {dropout: dropout} == replace_module_classes(model, {nn.Dropout: change}, recurse_on_replacements=True)
    assert 0.5 == model[0].p


@pytest.mark.parametrize(("recurse", "expected"), [(False, 2), (True, 1)])
def test_replacements_are_visited_only_with_recurse_on_replacements(recurse: bool, expected: int) -> None:
    def shrink(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Linear)
        return None if module.in_features == 1 else nn.Sequential(nn.Linear(module.in_features - 1, 1))

    model = nn.Sequential(nn.Linear(3, 1))

    replace_module_classes(model, {nn.Linear: shrink}, recurse_on_replacements=recurse)

    (linear,) = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert expected == linear.in_features


def test_recursion_asks_again_about_a_replacement_itself() -> None:
    order: list[type[nn.Module]] = []

    def step(module: nn.Module, index: int) -> nn.Module | None:
        order.append(type(module))
        return {nn.ReLU: nn.GELU(), nn.GELU: nn.Tanh()}.get(type(module))

    model = nn.Sequential(nn.ReLU())

    replaced = replace_module_classes(model, {nn.Module: step}, recurse_on_replacements=True)

    assert [nn.ReLU, nn.GELU, nn.Tanh] == order
    assert 2 == len(replaced)
    assert isinstance(model[0], nn.Tanh)


@pytest.mark.parametrize("recurse", [False, True])
def test_a_module_that_its_replacement_wraps_is_not_visited_again(recurse: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    linear = model[0]

    replaced = replace_module_classes(model, {nn.Linear: lambda m, i: Wrapped(m)}, recurse_on_replacements=recurse)

    assert {linear: model[0]} == replaced
    assert model[0].inner is linear


def test_modules_inside_a_wrapped_one_are_replaced_inside_the_wrapper() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    policies = {nn.Sequential: lambda m, i: Wrapped(m), nn.ReLU: lambda m, i: nn.GELU()}

    replace_module_classes(model, policies)

    assert ["0.inner.0"] == names_of(model, nn.GELU)


def test_modules_that_left_the_model_with_their_parent_are_not_visited() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policies = {nn.Sequential: lambda m, i: nn.Identity(), nn.Linear: lambda m, i: nn.Linear(1, 1)}

    replaced = replace_module_classes(model, policies, optimizers=optimizer)

    assert 2 == len(replaced)
    assert same_tensors(model.parameters(), optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("training", [True, False])
def test_a_replacement_takes_over_the_training_flag(training: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1)).train(training)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Sequential(nn.Dropout())})

    assert [training] * 3 == [m.training for m in model.modules()]


def test_a_wrapped_module_keeps_its_own_training_flag() -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(1).eval()))

    replace_module_classes(model, {nn.Sequential: lambda m, i: Wrapped(m[0])})

    assert (model[0].training, model[0].inner.training) == (True, False)


@pytest.mark.parametrize(
    "old",
    [nn.Linear(1, 1, device="meta"), nn.BatchNorm1d(1, affine=False, device="meta"), nn.ReLU()],
    ids=["parameter", "buffer", "root"],
)
def test_a_replacement_moves_to_the_device_of_the_old_module_or_of_the_root(old: nn.Module) -> None:
    model = nn.Module()
    model.old, model.tail = old, nn.Conv1d(1, 1, 1, device="meta")

    replace_module_classes(model, {type(old): lambda m, i: nn.Linear(1, 1)})

    assert torch.device("meta") == model.old.weight.device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_new_parameters_are_on_the_gpu() -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(m.in_features, m.out_features)}, optimizer)

    assert {"cuda"} == {p.device.type for p in optimizer.param_groups[0]["params"]}


def test_a_model_without_tensors_can_be_changed() -> None:
    model = nn.Sequential(nn.ReLU())

    replace_module_classes(model, {nn.ReLU: lambda m, i: nn.Linear(1, 1)})

    assert torch.device("cpu") == model[0].weight.device


def test_a_ddp_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)

    with pytest.raises(TypeError, match="must not be wrapped in `DistributedDataParallel`"):
        replace_module_classes(ddp, {})


def test_a_replacement_without_an_optimizer_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        replace_module_classes(nn.Sequential(nn.ReLU()), {nn.ReLU: lambda m, i: nn.GELU()})

    assert ["1 modules were replaced without an optimizer. Create the optimizer afterwards."] == caplog.messages


def test_instances_are_counted_once_each_and_without_the_root() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(shared, nn.GELU()), nn.ReLU())

    assert 2 == count_module_instances(model, nn.ReLU)
    assert 3 == count_module_instances(model, (nn.ReLU, nn.GELU))
    assert 1 == count_module_instances(model, nn.Sequential)


# ---- optimizers


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(params=["bare", "list"])
def optimizers(request: pytest.FixtureRequest, model: Model) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer if request.param == "bare" else [optimizer]


def only(optimizers: Any) -> torch.optim.Optimizer:
    optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def test_the_optimizer_follows_the_model(model: Model, optimizers: Any) -> None:
    kept = [*model.block.parameters(), *model.last.parameters()]

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3) if i == 0 else None}, optimizers)

    expected = [*kept, *model.first.parameters()]
    assert same_tensors(expected, only(optimizers).param_groups[0]["params"])
    assert set(kept) == set(only(optimizers).state)


def test_a_parameter_that_the_replacement_reuses_stays_with_its_state(model: Model, optimizers: Any) -> None:
    bias = model.first.bias

    def reuse(module: nn.Module, index: int) -> nn.Module | None:
        if index > 0:
            return None
        new = nn.Linear(2, 3)
        new.bias = module.bias
        return new

    replace_module_classes(model, {nn.Linear: reuse}, optimizers)

    params = only(optimizers).param_groups[0]["params"]
    assert 1 == sum(p is bias for p in params)
    assert bias in only(optimizers).state
    assert set(model.parameters()) == set(params)
    assert len(set(params)) == len(params)


def test_wrapping_adds_only_what_is_new(model: Model, optimizers: Any) -> None:
    before = list(model.parameters())

    replace_module_classes(model, {nn.ReLU: lambda m, i: Wrapped(m), nn.Linear: lambda m, i: None}, optimizers)

    assert same_tensors([*before, model.block[1].gain], only(optimizers).param_groups[0]["params"])
    assert set(before) == set(only(optimizers).state)


def test_a_tied_parameter_that_the_model_still_uses_stays() -> None:
    model = Model()
    model.block[0].weight = model.block[2].weight
    tied = model.block[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(3, 3) if i == 1 else None}, optimizer)

    params = optimizer.param_groups[0]["params"]
    assert 1 == sum(p is tied for p in params)
    assert set(model.parameters()) == set(params)


def test_new_parameters_join_the_group_that_the_old_ones_were_in() -> None:
    model = Model()
    optimizer = torch.optim.SGD(
        [
            {"params": model.first.parameters()},
            {"params": model.block.parameters()},
            {"params": model.last.parameters()},
        ],
        lr=0.1,
    )

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(3, 3) if i in (1, 2) else None}, optimizer)

    assert [list(model.first.parameters()), list(model.block.parameters()), list(model.last.parameters())] == [
        group["params"] for group in optimizer.param_groups
    ]


def test_the_changed_optimizer_steps_and_its_state_can_be_saved_and_loaded(model: Model, optimizers: Any) -> None:
    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3) if i == 0 else None}, optimizers)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.first.weight.detach().clone()

    only(optimizers).step()
    only(optimizers).load_state_dict(only(optimizers).state_dict())

    assert not torch.equal(before, model.first.weight)


def test_an_optimizer_with_parameter_names_drops_them_in_all_groups() -> None:
    model = Model()
    optimizer = torch.optim.SGD(
        [{"params": list(model.first.named_parameters())}, {"params": list(model.last.named_parameters())}], lr=0.1
    )

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3) if i == 0 else None}, optimizer)

    assert [False, False] == ["param_names" in group for group in optimizer.param_groups]
    optimizer.load_state_dict(optimizer.state_dict())


def make_params(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def test_kept_parameters_stay_first_and_added_ones_keep_their_order() -> None:
    a, b, c, d, e = make_params(5)
    optimizer = torch.optim.SGD([a, b, c], lr=0.1)

    update_params_in_optimizer([a, b], [d, b, e], optimizer)

    assert same_tensors([b, c, d, e], optimizer.param_groups[0]["params"])


def test_parameters_that_the_optimizer_has_already_are_not_added_twice() -> None:
    a, b, c = make_params(3)
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    update_params_in_optimizer([a], [b, c], optimizer)

    assert same_tensors([b, c], optimizer.param_groups[0]["params"])


def test_nothing_changes_if_all_parameters_stay() -> None:
    a, b = make_params(2)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)

    update_params_in_optimizer(iter([a, b]), iter([b, a]), optimizer)

    assert [[a], [b]] == [group["params"] for group in optimizer.param_groups]


def test_parameters_may_leave_several_groups_if_none_is_added() -> None:
    a, b, c = make_params(3)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b, c]}], lr=0.1)

    update_params_in_optimizer([a, b, c], [c], optimizer)

    assert [[], [c]] == [group["params"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("old", "new"), [([], [3]), ([2], [3]), ([0, 1], [3])])
def test_an_ambiguous_group_is_an_error_and_changes_nothing(old: list[int], new: list[int]) -> None:
    params = make_params(4)
    optimizer = torch.optim.SGD([{"params": [params[0]]}, {"params": [params[1]]}], lr=0.1)

    with pytest.raises(RuntimeError, match=r"got \[0, 1\] of its 2 groups. Replace the modules before you make"):
        update_params_in_optimizer([params[i] for i in old], [params[i] for i in new], optimizer)
    assert [[params[0]], [params[1]]] == [group["params"] for group in optimizer.param_groups]


def by_kind(*models: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Two groups, as usual: weights are decayed, biases and norms are not."""
    params = [p for model in models for p in model.parameters()]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1, **options},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, **options},
    ]


def group_of(optimizer: torch.optim.Optimizer, *params: Any) -> list[int]:
    index_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [index_of.get(p, -1) for p in params]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_weights_and_biases_join_the_groups_of_the_weights_and_biases_they_replace(options: dict[str, Any]) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(by_kind(model), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    lists = [group["params"] for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = optimizer.state[model.last.weight]

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3) if i == 0 else None}, optimizer)

    assert [0, 1] == group_of(optimizer, model.first.weight, model.first.bias)
    assert all(a is b["params"] for a, b in zip(lists, optimizer.param_groups, strict=True))
    assert set(model.parameters()) == {p for group in optimizer.param_groups for p in group["params"]}
    assert set(optimizer.state) < set(model.parameters())
    assert kept is optimizer.state[model.last.weight]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    assert [0.05, 0.05] == [group["lr"] for group in optimizer.param_groups]


def test_parameters_of_a_wrapper_join_those_of_their_kind() -> None:
    """Nothing is removed; the bias of the new layer has no sibling in the one that is wrapped."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2))
    optimizer = torch.optim.AdamW(by_kind(model), lr=0.1)

    replace_module_classes(model, {nn.Conv2d: lambda m, i: nn.Sequential(m, nn.Conv2d(2, 2, 1))}, optimizer)

    assert [0, 0, 1] == group_of(optimizer, *model[0].parameters())


def test_a_new_bias_joins_the_only_group_of_biases_whatever_its_options() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
    weights, biases = by_kind(model)
    optimizer = torch.optim.SGD([weights, {**biases, "lr": 6.4}], lr=0.1)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 2)}, optimizer)

    assert [0, 1] == group_of(optimizer, *model[0].parameters())


def test_with_a_group_for_each_layer_new_parameters_join_that_of_their_layer() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    model = nn.Sequential(first, last)
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.1)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 2)}, optimizer)

    assert [0, 0, 1, 1] == group_of(optimizer, *model.parameters())


def test_with_a_learning_rate_for_each_layer_and_kind_a_new_bias_joins_the_biases_of_its_layer() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)) for _ in range(3)]
    groups = [group for i, block in enumerate(blocks) for group in by_kind(block, lr=0.1 * 0.5**i)]
    optimizer = torch.optim.AdamW(groups)

    replace_module_classes(nn.ModuleList(blocks), {nn.Linear: lambda m, i: nn.Linear(2, 2)}, optimizer)

    assert [0, 1, 1, 1] == group_of(optimizer, *blocks[0].parameters())
    assert [2, 3, 3, 3] == group_of(optimizer, *blocks[1].parameters())
    assert [4, 5, 5, 5] == group_of(optimizer, *blocks[2].parameters())


def test_new_parameters_in_place_of_untrained_ones_join_their_kind() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(by_kind(model.block, model.last), lr=0.1)

    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 3) if i == 0 else None}, optimizer)

    assert [0, 1] == group_of(optimizer, *model.first.parameters())


def test_hooks_move_to_the_replacement_and_can_still_be_removed() -> None:
    model, calls = nn.Sequential(nn.ReLU()), []
    handles = [
        model[0].register_forward_hook(lambda *_: calls.append("after")),
        model[0].register_forward_pre_hook(lambda *_: calls.append("before")),
    ]
    replace_module_classes(model, {nn.ReLU: lambda m, i: nn.GELU()})

    model(torch.zeros(1))
    assert ["before", "after"] == calls
    for handle in handles:
        handle.remove()
    model(torch.zeros(1))
    assert ["before", "after"] == calls


def test_hooks_of_a_wrapped_module_are_called_once() -> None:
    model, calls = nn.Sequential(nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: calls.append("after"))
    replace_module_classes(model, {nn.ReLU: lambda m, i: nn.Sequential(m)})

    model(torch.zeros(1))
    assert ["after"] == calls


def test_lazy_modules_stay_with_one_warning() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.ReLU(), nn.LazyLinear(3), nn.Linear(3, 3))
    with pytest.warns(UserWarning, match=r"`0` and 1 more \(LazyLinear\): its shape is not known yet. Run") as caught:
        replaced = replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(3, 4)})

    assert 1 == len(caught)
    assert [model[3]] == list(replaced.values())


def test_a_module_that_is_compiled_by_itself_stays_and_one_inside_a_compiled_model_does_not() -> None:
    model = nn.Sequential(torch.compile(nn.ReLU(), backend="eager"), nn.ReLU())
    with pytest.warns(UserWarning, match=r"`0._orig_mod` \(ReLU\): it was compiled on its own"):
        replaced = replace_module_classes(model, {nn.ReLU: lambda m, i: nn.Identity()})
    assert [model[1]] == list(replaced.values())

    compiled: Any = torch.compile(nn.Sequential(nn.ReLU()), backend="eager")
    x = -torch.ones(2)
    assert torch.equal(torch.zeros(2), compiled(x))
    replace_module_classes(compiled, {nn.ReLU: lambda m, i: nn.Identity()})
    assert torch.equal(x, compiled(x))


def test_a_ddp_model_inside_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.module_surgery.DistributedDataParallel", Wrapped)
    with pytest.raises(TypeError, match="must not be wrapped"):
        replace_module_classes(nn.Sequential(Wrapped(nn.ReLU())), {nn.ReLU: lambda m, i: nn.GELU()})


def test_layers_inside_adapters_are_found_and_other_base_layers_are_none() -> None:
    adapter = nn.ModuleDict({"base_layer": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1)})
    network = nn.ModuleDict({"base_layer": nn.Linear(2, 2), "level0": nn.Linear(2, 2)})

    assert set(adapter.values()) == find_adapter_layers(nn.Sequential(adapter, network))


def test_an_overridden_forward_is_detected() -> None:
    class Renamed(nn.Conv2d):
        pass

    class Padded(nn.Conv2d):
        def _conv_forward(self, *args: Any) -> torch.Tensor:
            return super()._conv_forward(*args)

    patched = nn.Conv2d(1, 1, 1)
    patched.forward = lambda input: input  # type: ignore[method-assign,assignment]
    layers = [nn.Conv2d(1, 1, 1), Renamed(1, 1, 1), nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 1, 1))]

    assert [False] * 3 == [overrides_forward(layer, nn.Conv2d) for layer in layers]
    assert [True] * 2 == [overrides_forward(layer, nn.Conv2d) for layer in (Padded(1, 1, 1), patched)]


def test_a_new_parameter_joins_the_optimizer_of_the_removed_one() -> None:
    a, b, new = make_params(3)
    first, second = torch.optim.SGD([a], lr=0.1, momentum=0.9), torch.optim.Adam([b])
    b.grad = torch.ones_like(b)
    second.step()

    update_params_in_optimizer([b], [new], [first, second])

    assert same_tensors([a], first.param_groups[0]["params"])
    assert same_tensors([new], second.param_groups[0]["params"])
    assert not second.state


def test_a_new_parameter_that_may_belong_to_several_optimizers_is_refused() -> None:
    a, b, new = make_params(3)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (a, b)]

    with pytest.raises(RuntimeError, match=r"got \[0, 1\] of its 2 groups. Replace the modules before you make"):
        update_params_in_optimizer([a, b], [new], optimizers)
    assert [[a], [b]] == [optimizer.param_groups[0]["params"] for optimizer in optimizers]


def test_parameters_are_found_by_identity() -> None:
    a, b, new = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)

    update_params_in_optimizer([b], [new], optimizer)

    assert [0, -1, 1] == group_of(optimizer, a, b, new)
