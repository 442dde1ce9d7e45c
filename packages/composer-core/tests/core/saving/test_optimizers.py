"""Optimizers find their saved state by class and parameter name, inside a wrapper and out of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.core import State
from composer.testing import deep_compare


class Around(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it shares, with gradients that are scaled."""

    def __init__(self, base_optimizer: torch.optim.Optimizer, scale: float = 1.0, setting: str = "scale") -> None:
        self.base_optimizer = base_optimizer
        self.setting = setting
        groups, state = base_optimizer.param_groups, base_optimizer.state
        super().__init__(groups, {setting: scale})
        base_optimizer.param_groups, base_optimizer.state = groups, state

    @property
    def param_groups(self) -> Any:
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.base_optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.base_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base_optimizer.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault(self.setting, self.defaults[self.setting])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault(self.setting, self.defaults[self.setting])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(group[self.setting])
        self.base_optimizer.step()


def make(scale: float | None = None, lr: float = 0.1, seed: int = 0) -> State:
    torch.manual_seed(seed)
    state = State(model=torch.nn.Linear(2, 1), run_name="run")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(state.model.parameters(), lr=lr, momentum=0.9)
    state.optimizers = optimizer if scale is None else Around(optimizer, scale)  # type: ignore[assignment]
    return state


def trained(state: State, steps: int = 2) -> State:
    for _ in range(steps):
        state.optimizers.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizers.step()
    return state


def momentum(state: State) -> list[torch.Tensor]:
    return [state.optimizers[0].state[p]["momentum_buffer"] for p in state.model.parameters()]


def test_a_wrapper_is_saved_under_the_class_of_what_it_wraps() -> None:
    saved = trained(make(0.5)).state_dict()["optimizers"]

    assert list(saved) == ["SGD"]
    assert saved["SGD"]["param_groups"][0]["scale"] == 0.5


def test_a_wrapper_continues_identically_with_its_own_settings() -> None:
    expected = trained(make(0.5))
    state = make(3.0, seed=1)
    state.load_state_dict(copy.deepcopy(expected.state_dict()))

    assert state.optimizers[0].param_groups[0]["scale"] == 0.5
    deep_compare(trained(expected).state_dict()["model"], trained(state).state_dict()["model"])


def test_a_run_without_the_wrapper_takes_the_state_and_keeps_settings_for_one_that_comes_later() -> None:
    expected = trained(make(0.5, lr=0.2))
    state = make(seed=1)
    state.load_state_dict(copy.deepcopy(expected.state_dict()))

    deep_compare(momentum(expected), momentum(state))
    assert state.optimizers[0].param_groups[0]["lr"] == 0.2
    state.optimizers = Around(state.optimizers[0], 3.0)  # type: ignore[assignment]
    deep_compare(trained(expected).state_dict()["model"], trained(state).state_dict()["model"])


def test_a_wrapper_takes_what_was_saved_without_it() -> None:
    expected = trained(make(lr=0.2))
    state = make(0.5, seed=1)
    state.load_state_dict(expected.state_dict())

    deep_compare(momentum(expected), momentum(state))
    group = state.optimizers[0].param_groups[0]
    assert (group["lr"], group["scale"]) == (0.2, 0.5)


def test_wrappers_in_wrappers_are_seen_through() -> None:
    state = make()
    state.optimizers = Around(Around(state.optimizers[0]), setting="outer")  # type: ignore[assignment]

    assert list(state.state_dict()["optimizers"]) == ["SGD"]


def test_an_entry_by_the_name_of_the_wrapper_is_found_with_a_warning() -> None:
    saved = trained(make(0.5, lr=0.2)).state_dict()
    saved["optimizers"] = {"Around": saved["optimizers"]["SGD"]}
    state = make(0.5, seed=1)
    with pytest.warns(UserWarning, match="was saved as `Around`, not as the `SGD` inside it"):
        state.load_state_dict(saved)

    assert state.optimizers[0].param_groups[0]["lr"] == 0.2


def test_an_absent_optimizer_is_named_with_what_is_there() -> None:
    saved = trained(make()).state_dict()
    saved["optimizers"] = {"Adam": saved["optimizers"]["SGD"]}
    with pytest.warns(UserWarning, match="SGD of `optimizers` is not in the state_dict, which has Adam"):
        make().load_state_dict(saved)


def test_an_optimizer_that_only_the_file_has_is_named() -> None:
    saved = trained(make(lr=0.2)).state_dict()
    saved["optimizers"]["SGD#2"] = saved["optimizers"]["SGD"]
    state = make()
    with pytest.warns(UserWarning, match="has SGD#2 beside the optimizers of this run, SGD. Its state is not used"):
        state.load_state_dict(saved)

    assert state.optimizers[0].param_groups[0]["lr"] == 0.2


def test_two_optimizers_of_one_class_keep_both_states() -> None:
    def two(lr: float) -> State:
        state = State(model=torch.nn.Linear(2, 1))
        own = [torch.optim.SGD([p], lr=lr * i) for i, p in enumerate(state.model.parameters(), 1)]
        state.optimizers = [own[0], Around(own[1])]  # type: ignore[assignment]
        return state

    saved, state = two(0.1).state_dict(), two(0.5)
    state.load_state_dict(saved)

    assert list(saved["optimizers"]) == ["SGD", "SGD#2"]
    assert [o.param_groups[0]["lr"] for o in state.optimizers] == [0.1, 0.2]


def test_states_keyed_by_number_are_read() -> None:
    expected = trained(make(lr=0.2))
    saved = expected.state_dict()
    saved["optimizers"] = {"SGD": expected.optimizers[0].state_dict()}
    state = make(seed=1)
    state.load_state_dict(saved)

    deep_compare(momentum(expected), momentum(state))


def test_names_that_torch_keeps_follow_the_order_of_this_optimizer() -> None:
    def ordered(step: int) -> State:
        state = make()
        parameters = list(state.model.named_parameters())[::step]
        state.optimizers = torch.optim.SGD(parameters, lr=0.1)  # type: ignore[assignment,arg-type]
        return state

    state = ordered(-1)
    state.load_state_dict(ordered(1).state_dict())

    assert state.optimizers[0].state_dict()["param_groups"][0]["param_names"] == ["bias", "weight"]


def with_groups(*groups: str) -> State:
    state = make()
    parameters = dict(state.model.named_parameters())
    held = [{"params": [parameters[name] for name in group.split()]} for group in groups]
    state.optimizers = torch.optim.SGD(held, lr=0.1)  # type: ignore[assignment]
    return state


def test_other_parameters_are_an_error() -> None:
    saved = trained(make()).state_dict()
    with pytest.raises(KeyError, match=r"different parameters: bias \(only in the file\). Apply the same algorithms"):
        with_groups("weight").load_state_dict(saved)
    with pytest.raises(KeyError, match=r"weight \(only in the file\); bias \(only in this one\)"):
        with_groups("bias").load_state_dict(with_groups("weight").state_dict())


def test_another_number_of_groups_is_an_error() -> None:
    saved = make().state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"1 parameter groups of \[2\] parameters, but this one has 2 of \[1, 1\]"):
            with_groups("weight", "bias").load_optim_state(saved, strict=strict)


def test_parameters_in_other_groups_are_an_error() -> None:
    saved = with_groups("weight", "bias").state_dict()
    with pytest.raises(ValueError, match=r"divide the parameters into groups differently: bias, weight \(group 0\)"):
        with_groups("bias", "weight").load_state_dict(saved)


def test_other_parameters_are_passed_over_if_not_strict() -> None:
    expected = trained(make())
    state = with_groups("weight")
    state.load_optim_state(expected.state_dict(), strict=False)

    assert torch.equal(momentum(expected)[0], state.optimizers[0].state[state.model.weight]["momentum_buffer"])  # type: ignore[index]
