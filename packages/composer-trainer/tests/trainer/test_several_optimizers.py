"""Runs with several optimizers against runs with one optimizer of several groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import FSDP, Regression, filled, gap, needs_sharding, trained
from shared_runs import Overflowing
from torch.optim.lr_scheduler import LambdaLR

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.optim import LinearScheduler
from composer.testing import SimpleModel, deep_compare, run_on_ranks

MakeTrainer = Any  # the fixture's class, in conftest.py
SETTINGS: list[dict[str, Any]] = [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}]


def layers(model: Any) -> list[list[torch.nn.Parameter]]:
    return [list(model.fc1.parameters()), list(model.fc2.parameters())]


def several(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(part, **options) for part, options in zip(layers(model), SETTINGS, strict=True)]


def single(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": part, **options} for part, options in zip(layers(model), SETTINGS, strict=True)]
    return torch.optim.AdamW(groups)


class ClipsAll(Algorithm):
    """Clips the norm of all gradients together, and overflows in the second batch if asked to."""

    events = frozenset({Event.AFTER_TRAIN_BATCH, Event.AFTER_BACKWARD})

    def __init__(self, overflows: bool = False) -> None:
        self.overflows = overflows

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.05)
        elif self.overflows and state.timestamp.batch == "1ba":
            first = next(state.model.parameters())  # of the first optimizer alone
            assert first.grad is not None
            first.grad.fill_(float("inf"))


def run(make_trainer: MakeTrainer, make_optimizers: Any, **kwargs: Any) -> Any:
    model = make_trainer.model()
    kwargs = {"max_duration": "5ep", "schedulers": LinearScheduler(alpha_f=0.1), **kwargs}
    trainer = make_trainer(model=model, optimizers=make_optimizers(model), **kwargs)
    trainer.fit()
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_train_microbatch_size": 2},
        {"algorithms": ClipsAll},
        {"precision": "amp_bf16"},
        {"precision": "amp_fp16"},
        {"precision": "amp_fp16", "algorithms": lambda: ClipsAll(overflows=True)},
        {
            "precision": "amp_fp16",
            "algorithms": lambda: ClipsAll(overflows=True),
            "device_train_microbatch_size": 2,
        },
    ],
    ids=["plain", "microbatches", "clipped", "bf16", "fp16", "overflow", "all"],
)
def test_several_optimizers_equal_one_with_groups(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    def arguments() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in options.items()}

    one, two = (run(make_trainer, optimizers, **arguments()) for optimizers in (single, several))

    deep_compare(weights_of(one), weights_of(two))
    if options.get("precision") == "amp_fp16":
        assert one.state.scaler.get_scale() == two.state.scaler.get_scale()
    overflows = len(options) >= 2
    steps = {int(state["step"]) for optimizer in two.state.optimizers for state in optimizer.state.values()}
    assert steps == {19 if overflows else 20}, "an overflow in one skips the steps of all"


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
@pytest.mark.parametrize("interval", ["3ba", "1ep"])
def test_a_resumed_run_continues_identically(
    make_trainer: MakeTrainer, tmp_path: Path, interval: str, precision: str
) -> None:
    """After an overflow in fp16, whose scale is in the checkpoint."""
    save: dict[str, Any] = {"save_folder": str(tmp_path), "save_interval": interval, "save_filename": "ba{batch}.pt"}

    def options() -> dict[str, Any]:
        clips = ClipsAll(overflows=precision == "amp_fp16")
        return {"algorithms": clips, "precision": precision, "device_train_microbatch_size": 2}

    expected = run(make_trainer, several, **options(), **save)
    resumed = run(make_trainer, several, **options(), load_path=str(tmp_path / "ba12.pt"))

    deep_compare(weights_of(expected), weights_of(resumed))
    deep_compare(expected.state.get_optim_state_dict(), resumed.state.get_optim_state_dict())
    assert {"AdamW", "AdamW#2"} == expected.state.get_optim_state_dict().keys()


class Ordered(torch.optim.SGD):
    """Notes when it steps."""

    def __init__(self, notes: list[str], name: str, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.notes, self.name = notes, name

    def step(self, closure: Any = None) -> Any:
        self.notes.append(self.name)
        return super().step()


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_optimizers_step_in_the_order_of_the_list(make_trainer: MakeTrainer, precision: str) -> None:
    model, notes = make_trainer.model(), []  # type: ignore[var-annotated]
    last, first = layers(model)
    optimizers = [Ordered(notes, "first", first), Ordered(notes, "last", last)]
    trainer = make_trainer(model=model, optimizers=optimizers, precision=precision, max_duration="2ba")
    trainer.fit()

    assert optimizers == trainer.state.optimizers
    assert ["first", "last"] * 2 == notes


def test_a_closure_computes_the_gradients_of_all(make_trainer: MakeTrainer) -> None:
    def with_closure(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.fc1.parameters(), lr=0.1), torch.optim.LBFGS(model.fc2.parameters(), max_iter=2)]

    trainer = run(make_trainer, with_closure, max_duration="2ba", schedulers=None)

    before = dict(make_trainer.model().named_parameters())
    assert all(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_an_overflow_in_a_closure_skips_the_steps_of_all(make_trainer: MakeTrainer) -> None:
    class Explodes(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().loss(outputs, batch).float() * 1e30

    model = Explodes()
    optimizers = [Overflowing(model.fc1.parameters(), lr=0.1), torch.optim.SGD(model.fc2.parameters(), lr=0.1)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    make_trainer(model=model, optimizers=optimizers, precision="amp_fp16", max_duration="3ba").fit()

    deep_compare(before, {name: p.detach() for name, p in model.named_parameters()})


class Alternating(SimpleModel):
    """Trains one layer in each batch, as a GAN does."""

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return super().loss(outputs, batch) + 0 * sum(p.sum() for p in self.parameters() if p.requires_grad)


class Alternate(Callback):
    def batch_start(self, state: State, logger: Logger) -> None:
        model: Any = state.model
        turn = int(state.timestamp.batch) % 2
        model.fc1.requires_grad_(turn == 0)
        model.fc2.requires_grad_(turn == 1)


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_an_optimizer_without_gradients_waits(make_trainer: MakeTrainer, precision: str) -> None:
    model = Alternating()
    optimizers = several(model)
    make_trainer(
        model=model, optimizers=optimizers, callbacks=Alternate(), precision=precision, max_duration="5ba"
    ).fit()

    steps = [{int(state["step"]) for state in optimizer.state.values()} for optimizer in optimizers]
    assert steps == [{3}, {2}]


def by_layer(model: Any, rate: float = 0.1) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(model.fc1.parameters(), lr=0.01),
        torch.optim.SGD(model.fc2.parameters(), lr=rate, momentum=0.9),
    ]


def test_another_order_than_that_of_the_checkpoint_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Otherwise each would continue with the settings and the schedule of the other."""
    saving = run(make_trainer, by_layer, max_duration="2ba", save_folder=str(tmp_path), save_filename="ba{batch}.pt")
    model = make_trainer.model()

    with pytest.raises(ValueError, match=r"in another order than in the state_dict: SGD, AdamW instead of AdamW, SGD"):
        make_trainer(
            model=model,
            optimizers=by_layer(model)[::-1],
            schedulers=LinearScheduler(alpha_f=0.1),
            load_path=str(tmp_path / "ba2.pt"),
        )
    assert ["AdamW", "SGD"] == list(saving.state.get_optim_state_dict())


@pytest.mark.parametrize("own", [False, True], ids=["one schedule for all", "one for each"])
def test_a_new_learning_rate_of_one_wins_over_the_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path, own: bool
) -> None:
    def start(rate: float, **options: Any) -> Any:
        model = make_trainer.model()
        adam, sgd = by_layer(model, rate)
        schedulers = {adam: LinearScheduler(), sgd: LambdaLR(sgd, lambda step: 0.5**step)}
        return make_trainer(
            model=model,
            optimizers=[adam, sgd],
            schedulers=schedulers if own else LinearScheduler(),
            step_schedulers_every_batch=True,
            max_duration="8ba",
            **options,
        )

    save = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "save_interval": "4ba"}
    start(0.1, **save).fit()
    resumed = start(0.2, load_path=str(tmp_path / "ba4.pt"))
    resumed.fit()

    factor = 0.5**8 if own else 1 - 7 / 8  # a schedule of composer.optim is evaluated at the last batch
    assert [[pytest.approx(0.01 * (1 - 7 / 8))], [pytest.approx(0.2 * factor)]] == rates(resumed)


# ---- schedulers


def rates(trainer: Any) -> list[list[float]]:
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.state.optimizers]


def test_a_schedule_applies_to_all_or_to_one(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizers = several(model)
    both = run(make_trainer, several, schedulers=LinearScheduler(alpha_f=0.5), max_duration="1ep")
    each = make_trainer(
        model=model,
        optimizers=optimizers,
        schedulers={
            optimizers[0]: LinearScheduler(alpha_f=0.5),
            optimizers[1]: LambdaLR(optimizers[1], lambda step: 0.25),
        },
        step_schedulers_every_batch=True,
        max_duration="1ep",
    )
    each.fit()

    # A schedule is evaluated at the last batch, at 3/4 of the run.
    assert [[pytest.approx(0.00625)], [pytest.approx(0.0625)]] == rates(both)
    assert [[pytest.approx(0.00625)], [pytest.approx(0.025)]] == rates(each)


def test_a_schedule_of_a_foreign_optimizer_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    first, second = several(model)
    scheduler = LambdaLR(second, lambda step: 1.0)

    with pytest.raises(ValueError, match="must have the run's optimizers as keys, got AdamW"):
        make_trainer(model=model, schedulers={second: LinearScheduler()})
    with pytest.raises(ValueError, match="belongs to another AdamW; the run trains with AdamW, which"):
        make_trainer(model=model, optimizers=[first, second], schedulers={first: scheduler})


# ---- wrong optimizers


def test_a_parameter_of_two_optimizers_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.fc2.parameters())]

    with pytest.raises(
        ValueError, match=r"Adam shares 2 with an optimizer before it: 'module.4.weight', 'module.4.bias'"
    ):
        make_trainer(model=model, optimizers=optimizers)


def test_a_parameter_of_no_optimizer_is_named(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizers = [torch.optim.SGD([model.fc1.weight], lr=0.1), torch.optim.Adam(model.fc2.parameters())]

    with pytest.warns(
        UserWarning, match="so these are not trained: 'module.2.bias'. Add them to one of the `optimizers`"
    ):
        make_trainer(model=model, optimizers=optimizers)


def test_two_optimizers_that_run_the_passes_are_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizers = [torch.optim.LBFGS(part) for part in layers(model)]

    with pytest.raises(ValueError, match=r"may have one optimizer that runs the .* pass itself, got LBFGS, LBFGS"):
        make_trainer(model=model, optimizers=optimizers)


def test_one_optimizer_given_twice_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    optimizer = single(model)

    with pytest.raises(ValueError, match="`optimizers` must contain every object once"):
        make_trainer(model=model, optimizers=[optimizer, optimizer])


# ---- several ranks


def by_kind(model: torch.nn.Module, count: int) -> list[torch.optim.Optimizer]:
    """Adam for matrices and Adam for the rest, or one for both."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    if count == 1:
        return [torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 0.05}], lr=0.1)]
    return [torch.optim.AdamW(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.05)]


def run_of_ranks(config: Any, folder: str) -> dict[str, Any]:
    """Train with one optimizer, with two, and with two in two parts, of which each rank saves its shards."""
    results = {}
    for count in (1, 2):
        model = filled(Regression())
        results[str(count)] = trained(config, model=model, optimizers=by_kind(model, count))
    model = filled(Regression())
    optimizers = by_kind(model, 2)
    trained(
        config,
        model=model,
        optimizers=optimizers,
        save_folder=folder,
        save_interval="2ba",
        max_duration="4ba",
        save_filename="ba{batch}-rank{rank}.pt",
        schedulers=None,
    )
    shards = config is not None and "state_dict_type" in config["fsdp"]
    for start in (None, f"{folder}/ep0-ba2" if shards else f"{folder}/ba2-rank{{rank}}.pt"):
        model = filled(Regression(), seed=0 if start is None else 1)
        optimizers = by_kind(model, 2)
        results["resumed" if start else "whole"] = trained(
            config, model=model, optimizers=optimizers, max_duration="4ba", load_path=start, schedulers=None
        )
    return results


CONFIGS: dict[str, Any] = {"ddp": None, "fsdp": FSDP, "shards": {"fsdp": {"state_dict_type": "sharded"}}}


def runs_of_ranks(folder: str) -> dict[str, Any]:
    return {name: run_of_ranks(config, f"{folder}/{name}") for name, config in CONFIGS.items()}


@needs_sharding
def test_on_two_ranks_several_optimizers_equal_one(tmp_path: Path) -> None:
    for runs in run_on_ranks(runs_of_ranks, 2, str(tmp_path)):
        for results in runs.values():
            assert gap(results["1"], results["2"]) == 0.0
            deep_compare(results["whole"]["weights"], results["resumed"]["weights"])
