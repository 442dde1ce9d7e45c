from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from composer.core import State, Time
from composer.optim import (
    ConstantScheduler,
    DecoupledAdamW,
    GroupScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    compile_composer_scheduler,
)

StateOf = Callable[..., State]
Move = Callable[[State, str], None]


@pytest.fixture
def state(state_of: StateOf) -> State:
    state = state_of("100ba")
    state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.5)
    return state


def test_the_learning_rate_follows_the_timestamp(state: State, move: Move) -> None:
    scheduler = compile_composer_scheduler(LinearScheduler(), state)
    rates = []
    for batch in (0, 30, 100):
        move(state, f"{batch}ba")
        state.optimizers[0].step()
        scheduler.step()
        rates.append(state.optimizers[0].param_groups[0]["lr"])

    assert isinstance(scheduler, LambdaLR)
    assert pytest.approx(rates) == [0.5, 0.35, 0.0]


def test_every_group_keeps_its_own_initial_rate(state: State, move: Move) -> None:
    groups = [{"params": [p], "lr": lr} for p, lr in zip(state.model.parameters(), (0.1, 0.01), strict=True)]
    state.optimizers = DecoupledAdamW(groups)
    move(state, "75ba")
    compile_composer_scheduler(LinearScheduler(), state)

    assert pytest.approx([group["lr"] for group in state.optimizers[0].param_groups]) == [0.025, 0.0025]
    assert [group["initial_lr"] for group in state.optimizers[0].param_groups] == [0.1, 0.01]


def test_named_groups_have_schedules_of_their_own(state: State, move: Move) -> None:
    weight, bias = state.model.parameters()
    first = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "name": "bias"}], lr=1.0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4.0)  # without a group of that name
    state.optimizers = [first, other]
    schedule = GroupScheduler(LinearScheduler(), bias=LinearScheduler(t_max="50ba"))
    schedulers = [compile_composer_scheduler(schedule, state, optimizer=each) for each in (first, other)]
    rates = []
    for batch in (10, 40, 60):
        move(state, f"{batch}ba")
        for scheduler in schedulers:
            scheduler.step()
        rates.append([group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups])
    schedulers[0].scale_schedule(0.5)

    assert [[0.9, 0.8, 3.6], [0.6, 0.2, 2.4], [0.4, 0.0, 1.6]] == [pytest.approx(row) for row in rates]
    assert [0.4, 0.0] == pytest.approx(schedulers[0].get_last_lr())
    assert "GroupScheduler(LinearScheduler(alpha_i=1.0" in repr(schedule)


def test_a_schedule_of_a_group_that_no_optimizer_has_is_refused(state: State) -> None:
    schedule = GroupScheduler(LinearScheduler(), baises=ConstantScheduler())
    state.optimizers[0].param_groups[0]["name"] = "weights"

    with pytest.raises(ValueError, match=r"which are \['weights'\], got \['baises'\]"):
        compile_composer_scheduler(schedule, state)
    with pytest.raises(TypeError, match=r"`bias` must be a schedule of one group, .* got GroupScheduler"):
        GroupScheduler(ConstantScheduler(), bias=schedule)


def test_compiling_again_starts_from_the_initial_rate(state: State, move: Move) -> None:
    compile_composer_scheduler(LinearScheduler(alpha_i=0.5), state)
    scheduler = compile_composer_scheduler(LinearScheduler(alpha_i=0.1), state)

    assert pytest.approx(scheduler.get_last_lr()) == [0.05]


def test_the_checkpoint_of_the_scheduler_holds_no_schedule(state: State) -> None:
    saved = compile_composer_scheduler(LinearScheduler(), state).state_dict()

    assert saved["lr_lambdas"] == [None]
    assert "_names" not in saved


def test_a_schedule_that_does_not_fit_the_run_fails_immediately(state: State) -> None:
    with pytest.raises(ValueError, match="must be greater than or equal to max_duration"):
        compile_composer_scheduler(LinearWithWarmupScheduler("1ba", t_max="99ba"), state)


@pytest.mark.parametrize("count", [0, 2])
def test_the_optimizer_is_named_unless_there_is_one(count: int, state: State) -> None:
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.5) for _ in range(count)]

    with pytest.raises(ValueError, match=f"for one optimizer, but the state has {count}. Pass one as `optimizer`"):
        compile_composer_scheduler(LinearScheduler(), state)
    for optimizer in state.optimizers:
        assert compile_composer_scheduler(LinearScheduler(), state, optimizer=optimizer).optimizer is optimizer


def only_state(state: State) -> float:
    return 0.5


def keyword_only(state: State, *, ssr: float) -> float:
    return ssr


def third(state: State, power: float = 2.0, ssr: float = 1.0) -> float:
    return ssr


def everything(*args: Any, **kwargs: Any) -> float:
    return float(kwargs["ssr"])


def another_default(state: State, power: float = 0.5) -> float:
    return power


class Object:
    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return ssr

    def method(self, state: State, ssr: float) -> float:
        return ssr


TAKING = [
    keyword_only,
    third,
    everything,
    Object(),
    Object().method,
    functools.partial(third, power=3.0),
    lambda state, ssr: ssr,
]


@pytest.mark.parametrize("schedule", TAKING)
@pytest.mark.parametrize("ssr", [1.0, 0.25])
def test_any_function_of_state_and_ratio_is_a_schedule(
    schedule: Callable[..., float], ssr: float, state: State
) -> None:
    assert [0.5 * ssr] == compile_composer_scheduler(schedule, state, ssr).get_last_lr()


@pytest.mark.parametrize("schedule", [only_state, another_default])
def test_a_function_of_the_state_is_a_schedule_if_there_is_no_ratio(
    schedule: Callable[..., float], state: State
) -> None:
    assert compile_composer_scheduler(schedule, state).get_last_lr() == [0.25]

    with pytest.raises(ValueError, match=r"`scheduler` must take `ssr` .* ratio of 0.5"):
        compile_composer_scheduler(schedule, state, 0.5)


def test_the_tail_that_the_error_suggests_is_flat(state: State, move: Move) -> None:
    schedule = lambda state, ssr=1.0: max(0.1, 1 - float(state.get_elapsed_duration()) / 0.8)  # noqa: E731
    scheduler = compile_composer_scheduler(schedule, state)
    rates = []
    for batch in (0, 40, 80, 100):
        move(state, f"{batch}ba")
        state.optimizers[0].step()
        scheduler.step()
        rates.extend(scheduler.get_last_lr())

    assert pytest.approx(rates) == [0.5, 0.25, 0.05, 0.05]


def test_a_compiled_schedule_can_be_scaled_once_more(state: State, move: Move) -> None:
    """The rate is set at once, to what the shorter schedule says of this time."""
    move(state, "20ba")
    scheduler = compile_composer_scheduler(LinearScheduler(t_max="100ba"), state)
    assert scheduler.get_last_lr() == pytest.approx([0.4])
    before = scheduler.state_dict()
    state.max_duration = "50ba"
    scheduler.scale_schedule(0.5)  # type: ignore[attr-defined]

    assert scheduler.get_last_lr() == pytest.approx([0.3])
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3)
    assert before.keys() == scheduler.state_dict().keys()


def test_ratios_multiply(state: State, move: Move) -> None:
    state.max_duration = "50ba"
    scheduler = compile_composer_scheduler(LinearScheduler(t_max="100ba"), state, ssr=0.5)
    state.max_duration = "25ba"
    scheduler.scale_schedule(0.5)  # type: ignore[attr-defined]
    move(state, "5ba")
    state.optimizers[0].step()
    scheduler.step()

    assert scheduler.get_last_lr() == pytest.approx([0.4])


def test_a_compiled_schedule_has_the_name_of_the_torch_class_in_checkpoints(state: State) -> None:
    scheduler = compile_composer_scheduler(LinearScheduler(), state)
    plain = LambdaLR(state.optimizers[0], lambda step: 1.0)

    assert set(plain.state_dict()) == set(scheduler.state_dict())
    assert type(scheduler).__qualname__ == "LambdaLR"


def test_a_rate_in_a_tensor_stays_that_tensor(state: State, move: Move) -> None:
    rate = torch.tensor(0.5)
    state.optimizers = torch.optim.Adam(state.model.parameters(), lr=rate, foreach=False)
    scheduler = compile_composer_scheduler(LinearScheduler(t_max="100ba"), state)
    move(state, "20ba")
    state.max_duration = "50ba"
    scheduler.scale_schedule(0.5)  # type: ignore[attr-defined]

    assert state.optimizers[0].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.3)


def test_a_ratio_that_cannot_be_used_is_refused_and_changes_nothing(state: State) -> None:
    scheduler = compile_composer_scheduler(lambda state: 0.5, state)
    with pytest.raises(ValueError, match="`scheduler` must take `ssr`"):
        scheduler.scale_schedule(0.5)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="`ssr` must be positive, got 0"):
        scheduler.scale_schedule(0)  # type: ignore[attr-defined]
    scheduler.scale_schedule(1.0)  # type: ignore[attr-defined]

    assert scheduler.get_last_lr() == [0.25]


def test_a_step_converts_no_time(state: State, move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = compile_composer_scheduler(LinearWithWarmupScheduler("10ba"), state)
    move(state, "55ba")
    state.optimizers[0].step()
    for name in ("from_input", "from_timestring", "__init__"):
        monkeypatch.setattr(Time, name, None)
    scheduler.step()

    assert scheduler.get_last_lr() == pytest.approx([0.25])


def test_the_times_are_converted_again_when_the_run_or_its_epochs_change(state_of: StateOf, move: Move) -> None:
    state = state_of("4ep")
    state.optimizers = torch.optim.SGD(state.model.parameters(), lr=1.0)
    state.set_dataloader([0] * 100, "train")
    move(state, "100ba")
    scheduler = compile_composer_scheduler(LinearScheduler(), state)
    rates = scheduler.get_last_lr()
    state.max_duration = "2ep"
    scheduler.step()
    rates += scheduler.get_last_lr()
    state.set_dataloader([0] * 1000, "train")
    scheduler.step()
    rates += scheduler.get_last_lr()

    assert pytest.approx(rates) == [0.75, 0.5, 0.95]


def test_a_schedule_that_extends_another_one_is_called(state: State, move: Move) -> None:
    class Halved(LinearScheduler):
        def __call__(self, state: State, ssr: float = 1.0) -> float:
            return 0.5 * super().__call__(state, ssr)

    move(state, "20ba")

    assert compile_composer_scheduler(Halved(), state).get_last_lr() == pytest.approx([0.2])


def test_the_step_of_the_optimizer_is_left_alone(state: State) -> None:
    """Torch counts the calls of `step` to warn of schedulers that step first; a schedule of time misses nothing."""
    optimizer = state.optimizers[0]
    scheduler = compile_composer_scheduler(LinearScheduler(), state)
    assert "step" not in vars(optimizer)
    scheduler.step()  # before the optimizer, without a warning
    plain = LambdaLR(optimizer, lambda step: 1.0)
    counting = vars(optimizer)["step"]
    compile_composer_scheduler(LinearScheduler(), state)
    optimizer.step()
    plain.step()

    assert vars(optimizer)["step"] is counting, "that of another scheduler stays"
