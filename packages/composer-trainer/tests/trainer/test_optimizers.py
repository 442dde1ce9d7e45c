"""Tests of the optimizers of a run: checks, defaults and closures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shared_runs import Overflowing, TwoPass

from composer import Trainer
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.optim import DecoupledAdamW, DecoupledSGDW
from composer.testing import SimpleModel
from composer.trainer.step import needs_closure
from composer.utils.reproducibility import seed_context

MakeTrainer = Any  # the fixture's class, in conftest.py


def test_an_optimizer_of_another_model_is_refused(make_trainer: MakeTrainer) -> None:
    other = torch.optim.SGD(make_trainer.model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`optimizers` must hold parameters of `model`, got SGD with 4 parameters"):
        make_trainer(optimizers=other)
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"none of which belongs to SimpleModel: it was created for another model"):
        make_trainer(model=copy.deepcopy(model), optimizers=optimizer)


def test_a_layer_that_was_replaced_after_the_optimizer_was_built_is_named(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module[4] = model.fc2 = torch.nn.Linear(5, 2)
    with pytest.warns(UserWarning, match=r"2 parameters that do not .* so these are not trained: 'module.4.weight'"):
        make_trainer(model=model, optimizers=optimizer)


def test_a_loss_with_parameters_outside_the_model_trains_with_a_warning(make_trainer: MakeTrainer) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    model = make_trainer.model()
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    with pytest.warns(UserWarning, match=r"hold 1 parameters that do not belong to `model`: .* nor saved. Create"):
        make_trainer(model=model, optimizers=optimizer)


def test_a_part_of_the_model_that_no_optimizer_has_is_named_unless_it_is_frozen(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.fc2.parameters(), lr=0.1)
    named = (
        r"No optimizer has 2 parameters of the model, .*: 'module.2.weight', 'module.2.bias'.*`requires_grad_\(False\)`"
    )
    with pytest.warns(UserWarning, match=named) as caught:
        make_trainer(model=model, optimizers=optimizer)
    assert 1 == len(caught)
    model.fc1.requires_grad_(False)
    make_trainer(model=model, optimizers=optimizer).fit()


def test_surgery_that_leaves_the_optimizer_behind_is_refused(make_trainer: MakeTrainer) -> None:
    class Rebuilds(Algorithm):
        events = frozenset({Event.INIT})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            state.model = make_trainer.model()

    with pytest.raises(ValueError, match=r"`optimizers` must hold parameters of `model`.* an algorithm replaced them"):
        make_trainer(algorithms=Rebuilds())


def test_without_an_optimizer_there_is_a_default_with_a_warning(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match=r"No optimizer was specified. `DecoupledSGDW\(lr=0.1\)` is used"):
        trainer = make_trainer(optimizers=None)

    assert type(trainer.state.optimizers[0]) is DecoupledSGDW
    trainer.fit()


def test_any_module_with_a_loss_has_another_default(make_trainer: MakeTrainer) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))
    net(torch.zeros(1, 1, 10, 10))
    with pytest.warns(UserWarning, match=r"No optimizer was specified. `torch.optim.AdamW\(lr=0.001\)` is used"):
        trainer = Trainer(model=net, loss=torch.nn.functional.cross_entropy)

    (optimizer,) = trainer.state.optimizers
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.AdamW, 1e-3)


def test_a_model_without_parameters_has_no_optimizer(make_trainer: MakeTrainer) -> None:
    class Empty(SimpleModel):
        def __init__(self) -> None:
            super().__init__()
            for name in list(self._modules):
                del self._modules[name]

    with pytest.warns(UserWarning, match=r"No optimizer was specified, and the model does not have parameters"):
        trainer = make_trainer(model=Empty(), optimizers=None)
    with pytest.raises(ValueError, match=r"No optimizer was specified when constructing the Trainer"):
        trainer.fit()


def test_which_optimizers_need_closures() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    single = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, DecoupledSGDW, DecoupledAdamW]
    several = [torch.optim.LBFGS, TwoPass, Overflowing]

    assert [False] * 5 == [needs_closure(cls(parameters, lr=0.1)) for cls in single]
    assert [True] * 3 == [needs_closure(cls(parameters, lr=0.1)) for cls in several]

    class OptionalClosure(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return closure()

    class NoClosure(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            pass

    assert not needs_closure(OptionalClosure(parameters, {}))
    assert not needs_closure(NoClosure(parameters, {}))


def test_an_optimizer_may_ask_for_a_closure_by_declaration() -> None:
    class Declares(torch.optim.SGD):
        needs_closure = True

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    asked = torch.optim.SGD(parameters, lr=0.1)
    asked.needs_closure = True  # type: ignore[attr-defined]

    assert [True, True] == [needs_closure(Declares(parameters, lr=0.1)), needs_closure(asked)]


def test_a_scheduler_around_the_step_does_not_hide_what_it_needs() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    assert not needs_closure(optimizer)


@pytest.mark.parametrize("size", [None, 2])
def test_an_optimizer_gets_as_many_passes_as_it_wants(make_trainer: MakeTrainer, size: int | None) -> None:
    passes: list[Event] = []

    class Count(Algorithm):
        events = frozenset({Event.BEFORE_TRAIN_BATCH})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            passes.append(event)

    model = make_trainer.model()
    trainer = make_trainer(
        model=model,
        optimizers=TwoPass(model.parameters(), lr=0.1),
        algorithms=Count(),
        max_duration="2ba",
        device_train_microbatch_size=size,
    )
    trainer.fit()

    assert 4 == len(passes)
    assert {"loss/train/total"} == set(trainer.state.total_loss_dict)


def test_lbfgs_trains(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    batches = list(make_trainer.loader())[:1]
    trainer = make_trainer(
        model=model, optimizers=torch.optim.LBFGS(model.parameters(), lr=0.1), train_dataloader=batches
    )
    before = float(model.loss(model(batches[0]), batches[0]).detach())
    trainer.fit()

    assert float(model.loss(model(batches[0]), batches[0]).detach()) < before


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_fused_sgd_of_torch_survives_overflows_and_late_gradients(
    make_trainer: MakeTrainer, precision: str, nesterov: bool
) -> None:
    class Late(SimpleModel):
        """A parameter gets its first gradient in the third step; gradients of the first overflow in float16."""

        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.Parameter(torch.ones(2))
            self.steps = 0

        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            loss = super().loss(outputs, batch, *args, **kwargs)
            if self.steps > 2:
                loss = loss + self.late.square().sum()
            return loss * torch.inf if self.steps == 1 and precision == "amp_fp16" else loss

    weights = []
    for fused in (True, False):
        with seed_context(3):
            model = Late()
        options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
        optimizer = torch.optim.SGD(model.parameters(), **options, fused=fused)
        make_trainer(model=model, optimizers=optimizer, precision=precision, max_duration="5ba").fit()
        weights.append(model.state_dict())

    assert not torch.equal(weights[0]["late"], torch.ones(2))
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-5, atol=1e-6)  # fused operations round once
