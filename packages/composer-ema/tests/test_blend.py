"""The `blend` of `EMA`: a mixture of training weights and averages is evaluated and saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.algorithms.ema import EMA, EMAParameters
from composer.core import Callback, Engine, Event, State
from composer.testing import SimpleConvModel, deep_compare

STEPS = 5
Weights = dict[str, torch.Tensor]


class Saver(Callback):
    """Saves a copy of the state after each batch."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    def save_interval(self, state: State, event: Event) -> bool:
        return event is Event.BATCH_CHECKPOINT

    def batch_checkpoint(self, state: State, logger: Any) -> None:
        self.saved.append(copy.deepcopy(state.state_dict()))


class Run:
    """A loop with an evaluation and a checkpoint after each step."""

    def __init__(self, ema: EMA, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.ema, self.saver = SimpleConvModel(norm="batch").to(dtype), ema, Saver()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = State(
            model=self.model,
            max_duration=f"{STEPS}ba",
            dataloader=[0],
            optimizers=optimizer,
            algorithms=ema,
            callbacks=self.saver,
        )
        self.engine = Engine(self.state)
        self.trained: list[Weights] = []
        self.averages: list[Weights] = []
        self.evaluated: list[Weights] = []
        self.engine.run_event("init")

    def fit(self, end: int = STEPS) -> Run:
        run = self.engine.run_event
        run("fit_start")
        while self.state.timestamp.batches < end:
            step = self.state.timestamp.batches
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
            run("batch_start")
            self.state.optimizers.zero_grad()
            outputs = self.model((inputs.to(self.model.conv1.weight.dtype), None))
            outputs.float().square().mean().backward()
            self.state.optimizers.step()
            self.state.timestamp = self.state.timestamp.to_next_batch()
            run("batch_end")
            self.trained.append(self.weights())
            assert self.ema.ema_model is not None
            stored = {**dict(self.ema.ema_model.named_parameters()), **dict(self.ema.ema_model.named_buffers())}
            self.averages.append({name: average.clone() for name, average in stored.items()})
            run("eval_start")
            self.evaluated.append(self.weights())
            run("eval_end")
            run("batch_checkpoint")
        run("fit_end")
        return self

    def weights(self) -> Weights:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


def mixed(trained: Weights, averages: Weights, share: float) -> Weights:
    return {
        name: weight if weight.dtype is torch.int64 else (1 - share) * weight + share * averages[name]
        for name, weight in trained.items()
    }


@pytest.mark.parametrize("blend", [0.6, {"": 0.6}, {"weight": 0.6, "": 0.6, "bias": 1.0}])
def test_a_mixture_is_evaluated_and_training_does_not_change(blend: Any) -> None:
    plain, run = Run(EMA("2ba")).fit(), Run(EMA("2ba", blend=blend)).fit()

    deep_compare(plain.trained, run.trained)
    deep_compare(plain.averages, run.averages)
    for trained, averages, evaluated in zip(run.trained, run.averages, run.evaluated, strict=True):
        deep_compare(mixed(trained, averages, 0.6), evaluated, atol=1e-14)
    deep_compare(run.evaluated[-1], run.weights())
    assert not torch.equal(run.evaluated[-1]["module.0.weight"], run.averages[-1]["module.0.weight"])


def test_a_blend_of_1_is_the_average_bit_for_bit() -> None:
    plain = Run(EMA("2ba")).fit()
    for blend in (1.0, 1, {}, {"": 1.0}):
        run = Run(EMA("2ba", blend=blend)).fit()

        deep_compare(plain.evaluated, run.evaluated)
        deep_compare([each["model"] for each in plain.saver.saved], [each["model"] for each in run.saver.saved])
        deep_compare(plain.ema.state_dict(), run.ema.state_dict(), ignore_keys={"repr"})


def test_the_first_expression_found_in_a_name_counts() -> None:
    run = Run(EMA("2ba", blend={r"^module\.0\.": 0.0, "weight": 0.5, "^module": 0.25, "running_mean": 1.0})).fit()
    trained, averages, evaluated = run.trained[-1], run.averages[-1], run.evaluated[-1]
    plain = Run(EMA("2ba")).fit().averages[-1]

    assert "module.0.weight" not in averages  # costs no memory
    assert torch.equal(trained["module.0.weight"], evaluated["module.0.weight"])
    for name, share in {"module.2.weight": 0.5, "module.2.bias": 0.25, "module.2.running_mean": 0.25}.items():
        torch.testing.assert_close((1 - share) * trained[name] + share * plain[name], evaluated[name])


def test_the_rest_is_the_average() -> None:
    run = Run(EMA("2ba", blend={r"^module\.0\.": 0.5})).fit()

    for name, average in run.averages[-1].items():
        assert torch.equal(average, run.evaluated[-1][name]) == (not name.startswith("module.0."))


def test_weights_of_less_precision_are_mixed_in_float32() -> None:
    run = Run(EMA("2ba", blend=0.6), torch.bfloat16).fit()
    name = "module.0.weight"
    exact = 0.4 * run.trained[-1][name].float() + 0.6 * run.averages[-1][name]

    torch.testing.assert_close(exact.bfloat16(), run.evaluated[-1][name], atol=0, rtol=0.01)


@pytest.mark.parametrize(("before", "after"), [(0.6, 0.6), (0.6, 1.0), (1.0, 0.6), (0.6, 0.0), (0.0, 0.6)])
def test_a_run_resumed_from_any_checkpoint_continues_identically(before: float, after: float) -> None:
    """Checkpoints hold the mixture and, in the state of the algorithm, both sets of weights."""
    saved, expected = Run(EMA("2ba", blend=before)).fit().saver.saved, Run(EMA("2ba", blend=after)).fit()
    for number, state in enumerate(saved[:-1], start=1):
        resumed = Run(EMA("2ba", blend=after))
        resumed.state.load_state_dict(copy.deepcopy(state))
        resumed.fit()

        deep_compare(expected.trained[number:], resumed.trained)
        if before != 0 and after != 0:
            deep_compare(expected.evaluated[number:], resumed.evaluated)
            deep_compare(expected.ema.state_dict(), resumed.ema.state_dict())


def test_a_second_fit_continues_from_the_training_weights() -> None:
    expected, run = Run(EMA("2ba", blend=0.6)).fit(), Run(EMA("2ba", blend=0.6)).fit(end=2)
    deep_compare(run.evaluated[-1], run.weights())
    run.fit()

    deep_compare(expected.trained, run.trained)
    deep_compare(expected.evaluated, run.evaluated)


def test_weights_changed_between_two_fits_are_trained_on() -> None:
    run = Run(EMA("2ba", blend=0.6)).fit(end=2)
    with torch.no_grad():
        run.model.conv1.weight.fill_(0.5)
    run.engine.run_event("fit_start")
    run.engine.run_event("batch_start")

    assert torch.equal(torch.full_like(run.model.conv1.weight, 0.5), run.model.conv1.weight)
    assert run.ema.ema_model is not None
    average = run.ema.ema_model.named_parameters_dict["module.0.weight"]
    assert torch.equal(run.model.conv1.weight, average)


def test_the_mixture_can_be_written_into_a_copy() -> None:
    run = Run(EMA("2ba", blend=0.6)).fit()
    run.engine.run_event("fit_start")
    found = run.ema.get_ema_model(copy.deepcopy(run.model))

    for name, parameter in found.named_parameters():
        assert torch.equal(run.evaluated[-1][name], parameter)


def test_averages_of_a_loop_of_ones_own_can_be_mixed() -> None:
    model = torch.nn.Linear(2, 1)
    averages = EMAParameters(model, {"weight": 0.5})
    with torch.no_grad():
        model.weight += 2
    averages.swap_params(model)
    averages.swap_params(model)
    trained = model.weight.detach().clone()
    averages.swap_params(model)

    torch.testing.assert_close(trained - 1, model.weight.detach())


@pytest.mark.parametrize(
    ("blend", "error", "message"),
    [
        (1.5, ValueError, r"`blend` must be in \[0, 1\], got 1.5. It is the share of the average."),
        ({"weight": -1.0}, ValueError, r"`blend` must be in \[0, 1\], got -1.0"),
        ("0.6", TypeError, "`blend` must be a number, got '0.6'"),
        ({"(": 0.5}, ValueError, r"The keys of `blend` must be regular expressions, got '\('"),
        ({3: 0.5}, ValueError, "The keys of `blend` must be regular expressions, got 3"),
    ],
)
def test_wrong_shares_are_refused(blend: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EMA(blend=blend)


def test_an_expression_must_be_found() -> None:
    with pytest.raises(ValueError, match=r"must be found in names of parameters, but 'embedding' is in none of module"):
        Run(EMA(blend={"embedding": 0.0}))
