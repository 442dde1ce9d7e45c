"""`EMANesterov` in loops, against a slow reference with the average of changes, as the paper writes it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from composer.algorithms.ema_nesterov import EMANesterov
from composer.core import (
    AVERAGES_WEIGHTS,
    PINS_NORMS,
    SWAPS_WEIGHTS,
    Algorithm,
    Callback,
    ConflictError,
    Engine,
    Event,
    Placement,
    State,
    Time,
)
from composer.core.logging import Logger
from composer.testing import SimpleModel, deep_compare

STEPS = 12
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class SignDescent(torch.optim.Optimizer):
    """Steps along the signs of gradients, which it computes twice with a closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        closure()
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad.sign())
        return loss


OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "sign": lambda p: SignDescent(p, lr=0.01),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02, dtype=torch.float64), capturable=False),
}


def lr_factor(step: int) -> float:
    """Warm up for three steps, then decay."""
    return (step + 1) / 4 if step < 3 else 1 - (step - 3) / STEPS


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 1, 1, 1, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 2, (8,), generator=generator)


def make_model() -> SimpleModel:
    torch.manual_seed(1)
    return SimpleModel().double()


def set_rates(optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["initial_lr"] * lr_factor(step)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"] = rate.clone()
            else:
                group["lr"] = rate


def halves(model: SimpleModel) -> list[list[torch.nn.Parameter]]:
    parameters = list(model.parameters())
    return [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]


class Run:
    """A loop of `STEPS` steps that announces the events of a step.

    Args:
        algorithms: The algorithms.
        names: Keys of `OPTIMIZERS`, one for each half of the parameters.
        scheduled: Change the learning rates.
        callbacks: Callbacks.
    """

    def __init__(
        self, *algorithms: Algorithm, names: Sequence[str] = ("sgd", "sgd"), scheduled: bool = True, callbacks: Any = ()
    ) -> None:
        self.model, self.scheduled = make_model(), scheduled
        self.optimizers = [OPTIMIZERS[name](half) for name, half in zip(names, halves(self.model), strict=True)]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = copy.deepcopy(group["lr"])
        self.state = State(
            model=self.model,
            max_duration=f"{STEPS}ba",
            dataloader=[0],
            optimizers=self.optimizers,
            algorithms=algorithms,
            callbacks=callbacks,
        )
        self.engine = Engine(self.state)
        self.made: dict[str, torch.Tensor] = {}  # the weights that the optimizers have made last
        self.passed: list[torch.Tensor] = []  # the first weight in every pass
        for event in ("init", "before_load", "after_load", "fit_start"):
            self.engine.run_event(event)

    def steps(self, end: int = STEPS) -> Run:
        run = self.engine.run_event
        while self.state.timestamp.batches < end:
            self.step()
        run("fit_end")
        return self

    def step(self) -> None:
        run, step = self.engine.run_event, self.state.timestamp.batches
        if self.scheduled:
            set_rates(self.optimizers, step)
        run("before_dataloader")
        self.state.batch = batch_of(step)
        run("after_dataloader")
        run("batch_start")
        first, *others = self.optimizers
        first.step(self.closure)  # type: ignore[arg-type]
        for optimizer in others:
            optimizer.step() if not isinstance(optimizer, SignDescent) else optimizer.step(lambda: None)
        self.made = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.state.timestamp = self.state.timestamp.to_next_batch()
        run("batch_end")
        run("eval_start")
        run("eval_end")
        run("batch_checkpoint")

    def closure(self) -> torch.Tensor:
        run = self.engine.run_event
        run("before_train_batch")
        self.state.optimizers.zero_grad()
        run("before_forward")
        self.passed.append(next(self.model.parameters()).detach().clone())
        loss: torch.Tensor = self.model.loss(self.model(self.state.batch), self.state.batch)
        loss.backward()
        run("after_train_batch")
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def reference(names: Sequence[str], beta: float, decay: float, begin: int, end: int, scheduled: bool) -> Any:
    """Train with the formulas of the paper, one parameter after the other."""
    model = make_model()
    parts = halves(model)
    optimizers = [OPTIMIZERS[name](half) for name, half in zip(names, parts, strict=True)]
    peaks = [float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.param_groups[0]["initial_lr"] = copy.deepcopy(optimizer.param_groups[0]["lr"])
    change = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(STEPS):
        if scheduled:
            set_rates(optimizers, step)
        old = {p: p.detach().clone() for p in model.parameters()}
        for half, optimizer, peak in zip(parts, optimizers, peaks, strict=True):
            ahead = beta * float(optimizer.param_groups[0]["lr"]) / peak if begin <= step < end else 0.0
            for p in half:
                p.data += ahead * change[p]

        def closure(optimizers: Any = optimizers, step: int = step) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss: torch.Tensor = model.loss(model(batch_of(step)), batch_of(step))
            loss.backward()
            return loss

        optimizers[0].step(closure)  # type: ignore[arg-type]
        for optimizer in optimizers[1:]:
            optimizer.step() if not isinstance(optimizer, SignDescent) else optimizer.step(lambda: None)
        for p in model.parameters():
            change[p] = decay * change[p] + (1 - decay) * (p.detach() - old[p])
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("names", [("sgd", "sgd"), ("adamw", "sgd"), ("sign", "adamw"), ("tensor_lr", "sign")])
def test_the_weights_are_those_of_the_paper(names: Sequence[str], scheduled: bool) -> None:
    expected = reference(names, beta=0.6, decay=0.9, begin=2, end=9, scheduled=scheduled)
    plain = reference(names, beta=0.0, decay=0.9, begin=2, end=9, scheduled=scheduled)

    run = Run(EMANesterov(0.6, 0.9, begin="2ba", end="0.75dur"), names=names, scheduled=scheduled).steps()

    deep_compare(expected, run.weights(), atol=1e-12, rtol=1e-12)
    assert max((expected[name] - plain[name]).abs().max() for name in plain) > 1e-4


def test_without_a_schedule_that_says_its_largest_rate_the_largest_one_so_far_counts() -> None:
    algorithm = EMANesterov(begin="0ba", end="1dur")
    group: dict[str, Any] = {"lr": 0.1}

    ratios = [algorithm._ratio("0.0", group | {"lr": lr}) for lr in (0.0, 0.1, 0.4, 0.2, 0.0)]

    assert ratios == [0.0, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("names", [("sgd", "adamw"), ("tensor_lr", "sgd")])
def test_a_run_resumed_at_any_batch_continues_bit_for_bit(names: Sequence[str]) -> None:
    def make() -> Run:
        run = Run(EMANesterov(0.6, 0.9, begin="0.25dur", end="0.75dur"), names=names)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                del group["initial_lr"]
        return run

    def train(run: Run, end: int) -> Run:
        run.scheduled = False
        while run.state.timestamp.batches < end:
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    rate = 0.05 * lr_factor(run.state.timestamp.batches)
                    group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
            run.step()
        return run

    expected = train(make(), STEPS)
    for batches in (1, 3, 4, 8, 9, 11):  # before, inside and after the window, which begins at 3 and ends at 9
        file, begun = io.BytesIO(), train(make(), batches)
        torch.save(begun.state.state_dict(), file)
        file.seek(0)
        resumed = make()
        resumed.state.load_state_dict(torch.load(file, weights_only=False))
        train(resumed, STEPS)

        deep_compare(expected.weights(), resumed.weights())
        deep_compare(expected.state.algorithms[0].state_dict(), resumed.state.algorithms[0].state_dict())


class Observer(Callback):
    """Compares the weights with those that the optimizers have made, at every event between two steps."""

    def __init__(self) -> None:
        self.run: Run
        self.seen: set[Event] = set()

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        in_step = {Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH}
        if event not in in_step and getattr(self, "run", None) is not None and self.run.made:
            self.seen.add(event)
            deep_compare(self.run.made, self.run.weights())


def test_between_two_steps_the_weights_are_those_of_the_optimizer() -> None:
    observer = Observer()
    run = Run(EMANesterov(0.6, 0.9, begin="1ba", end="1dur"), callbacks=observer)
    observer.run = run
    run.steps()

    assert {Event.BATCH_START, Event.BATCH_END, Event.EVAL_START, Event.BATCH_CHECKPOINT} <= observer.seen
    assert not torch.equal(run.passed[-1], run.made[next(iter(run.made))])


@pytest.mark.parametrize("begin", ["0ba", "3ba"])
def test_gradients_are_computed_ahead_only_in_the_window(begin: str) -> None:
    run = Run(EMANesterov(0.6, 0.9, begin=begin, end="6ba"))
    ahead = []
    for _ in range(STEPS):
        before = next(run.model.parameters()).detach().clone()
        run.step()
        ahead.append(not torch.equal(before, run.passed[-1]))

    first = max(int(begin[0]), 1)  # nothing has changed before the first step
    assert [first <= step < 6 for step in range(STEPS)] == ahead


def test_an_optimizer_with_two_passes_moves_once() -> None:
    run = Run(EMANesterov(0.6, 0.9, begin="0ba", end="1dur"), names=("sign", "sgd")).steps()

    assert 2 * STEPS == len(run.passed)
    assert all(torch.equal(a, b) for a, b in zip(run.passed[::2], run.passed[1::2], strict=True))


class Pinning(Algorithm):
    """Gives every matrix the norm 1 after a step."""

    events = frozenset({Event.BATCH_END})
    placement = Placement(provides={PINS_NORMS})

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.log.append("pin")
        with torch.no_grad():
            for parameter in state.model.parameters():
                if parameter.dim() == 2:
                    parameter.div_(parameter.norm())


class Averaging(Algorithm):
    """Notes when it averages, and swaps weights in for the time between two steps, like EMA."""

    events = frozenset({Event.BATCH_END, Event.BATCH_START, Event.BATCH_CHECKPOINT})
    placement = Placement(provides={AVERAGES_WEIGHTS, SWAPS_WEIGHTS})

    def __init__(self, log: list[str]) -> None:
        self.log, self.stored = log, 0.0

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.log.append(event.value)
        with torch.no_grad():
            first = next(state.model.parameters())
            if event is Event.BATCH_CHECKPOINT:
                self.stored = first.clone()  # type: ignore[assignment]
                first.fill_(float("nan"))
            elif event is Event.BATCH_START and isinstance(self.stored, torch.Tensor):
                first.copy_(self.stored)


class Logged(EMANesterov):
    """Notes when it acts."""

    events = EMANesterov.events

    def __init__(self, log: list[str]) -> None:
        super().__init__(0.6, 0.9, begin="0ba", end="1dur")
        self.log = log

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.log.append("ahead" if event is Event.BEFORE_TRAIN_BATCH else "follow")
        super().apply(event, state, logger)


@pytest.mark.parametrize("reverse", [False, True])
def test_norms_are_pinned_before_and_weights_averaged_after(reverse: bool) -> None:
    log: list[str] = []
    algorithms = [Averaging(log), Logged(log), Pinning(log)]
    run = Run(*(algorithms[::-1] if reverse else algorithms))
    log.clear()
    run.step()
    run.step()

    assert ["batch_start", "ahead", "pin", "follow", "batch_end", "batch_checkpoint"] * 2 == log
    rows = [row.name for row in run.engine.explain().at("batch_end")]
    assert ["Pinning", "Logged", "Averaging"] == rows
    assert all(torch.isfinite(weight).all() for weight in run.passed)


def test_the_average_follows_pinned_norms() -> None:
    algorithm = EMANesterov(0.0, 0.9, begin="0ba", end="1dur")
    run = Run(Pinning([]), algorithm)
    first = dict(run.weights())
    run.step()

    expected = {name: 0.9 * weight + 0.1 * run.weights()[name] for name, weight in first.items()}
    deep_compare(expected, algorithm.state_dict()["averages"], atol=1e-14)


def test_frozen_weights_are_not_moved() -> None:
    run = Run(EMANesterov(0.6, 0.9, begin="0ba", end="1dur"))
    for _ in range(3):
        run.step()
    frozen, other = halves(run.model)[0][0], halves(run.model)[1][0]
    frozen.requires_grad_(False)
    frozen.grad = None
    before = frozen.detach().clone(), other.detach().clone()
    run.step()

    assert torch.equal(before[0], frozen)
    assert not torch.equal(before[1], other)


def test_a_weight_that_thaws_moves_from_its_second_step_on() -> None:
    run = Run(EMANesterov(0.6, 0.9, begin="0ba", end="1dur"))
    run.model.requires_grad_(False)
    late = halves(run.model)[1][0]
    next(run.model.parameters()).requires_grad_(True)
    run.step()
    late.requires_grad_(True)
    run.step()
    averages = run.state.algorithms[0].state_dict()["averages"]

    assert 2 == len(averages)


def test_a_replaced_layer_begins_its_own_average() -> None:
    run = Run(EMANesterov(0.6, 0.9, begin="0ba", end="1dur"))
    run.step()
    replaced = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
    run.model.fc2.weight = replaced
    run.engine.run_event("before_train_batch")

    assert torch.equal(torch.ones(3, 5), run.state.algorithms[0].state_dict()["averages"]["module.4.weight"].float())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_moves_nothing_and_counts_nowhere(fused: bool) -> None:
    """A fused optimizer skips the step on the device."""

    def trained(overflowing: Sequence[int]) -> tuple[list[Any], Any]:
        model = make_model().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
        algorithm = EMANesterov(0.6, 0.9, begin="1ba", end="1dur")
        state = State(
            model=model, max_duration="9ba", dataloader=[0], optimizers=optimizer, algorithms=algorithm, device="cpu"
        )
        state.precision = "amp_fp16"  # type: ignore[assignment]
        engine, scaler, seen = Engine(state), torch.amp.GradScaler("cpu", init_scale=2.0), []
        engine.run_event("init")
        for step, is_bad in enumerate(overflowing):
            before = [p.detach().clone() for p in model.parameters()]
            engine.run_event("batch_start")
            engine.run_event("before_train_batch")
            inputs, targets = batch_of(step if not is_bad else 99)
            loss = model.loss(model((inputs.float(), targets)), (inputs, targets))
            scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
            engine.run_event("after_train_batch")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            engine.run_event("batch_end")
            state.timestamp = state.timestamp.to_next_batch()
            if is_bad:
                deep_compare(before, [p.detach() for p in model.parameters()])
            else:
                seen.append([p.detach().clone() for p in model.parameters()])
        return seen, algorithm.state_dict()["averages"]

    good, averages = trained([0, 0, 0, 1, 0, 1])

    assert all(torch.isfinite(p).all() for weights in good for p in weights)
    expected, expected_averages = trained([0, 0, 0])
    deep_compare(expected, good[:3])
    third, other = trained([0, 0, 0, 1])
    deep_compare(expected_averages, other)
    assert len(third) == 3
    assert any(not torch.equal(averages[name], other[name]) for name in averages)


def test_a_first_step_of_zero_moves_nothing() -> None:
    run = Run(EMANesterov(0.6, 0.5, begin="0ba", end="1dur"))
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 0.0
    before = run.weights()
    run.steps(2)

    deep_compare(before, run.weights())


def test_a_second_run_starts_again() -> None:
    algorithm = EMANesterov(0.6, 0.9, begin="0ba", end="1dur")
    first = Run(algorithm).steps().weights()
    second = Run(algorithm).steps().weights()

    deep_compare(first, second)


def test_a_step_that_failed_does_not_keep_the_next_fit_from_moving() -> None:
    run = Run(EMANesterov(0.6, 0.9, begin="0ba", end="1dur"))
    run.step()
    run.engine.run_event("before_train_batch")
    run.engine.run_event("fit_start")
    before = next(run.model.parameters()).detach().clone()
    run.step()

    assert not torch.equal(before, run.passed[-1])


def test_weights_of_less_precision_have_averages_of_float32() -> None:
    algorithm = EMANesterov()
    model = make_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, max_duration="2ba", dataloader=[0], optimizers=optimizer, algorithms=algorithm)
    engine = Engine(state)
    for event in ("init", "before_train_batch", "batch_end"):
        engine.run_event(event)

    assert {torch.float32} == {average.dtype for average in algorithm.state_dict()["averages"].values()}


def test_two_lookaheads_cannot_share_a_model() -> None:
    with pytest.raises(ConflictError, match="`EMANesterov` is given twice"):
        Run(EMANesterov(), EMANesterov())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -1.0}, "`beta` must not be negative"),
        ({"decay": 1.0}, "`decay` must be below 1"),
        ({"decay": 0.1}, "`decay` must be at least 0.5"),
        ({"begin": "-1ba"}, "`begin` must be at least 0"),
        ({"begin": "0.7dur"}, "`end` must be after `begin`, got '0.7dur' and '0.7dur'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMANesterov(**arguments)


def test_a_begin_after_the_end_of_the_run_raises_a_warning() -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="16ba")
    with pytest.warns(UserWarning, match="does nothing in this `fit`: `begin` is '100ba', and the run ends at '16ba'"):
        EMANesterov(begin="100ba", end="1dur").apply(Event.FIT_START, state, Logger(state))


def test_a_time_is_a_string_or_an_object() -> None:
    with pytest.raises(TypeError, match=r"`end` must be a time string .* Write for example '0.7dur'"):
        EMANesterov(end=0.7)  # type: ignore[arg-type]

    assert "300ba" == EMANesterov(begin=Time.from_batch(300)).begin
