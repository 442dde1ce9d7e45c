"""Optimizers of other libraries: overflows in fp16, schedule-free weights, and wrappers with a state of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lion_pytorch
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import timm.optim
import torch

from composer import Trainer
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.sam import SAM
from composer.algorithms.squeeze_excite import SqueezeExcite
from composer.algorithms.swa import SWA
from composer.checkpoint import read_checkpoint
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel, deep_compare
from composer.utils.reproducibility import seed_context

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def schedule_free(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(parameters, lr=1e-2, foreach=False)


OPTIMIZERS: dict[str, Make] = {
    "timm-lamb": lambda parameters: timm.optim.Lamb(parameters, lr=1e-2),
    "timm-lookahead": lambda parameters: timm.optim.Lookahead(timm.optim.Adan(parameters, lr=1e-2)),
    "schedulefree": schedule_free,
    "pytorch_optimizer-adabelief": lambda parameters: pytorch_optimizer.AdaBelief(parameters, lr=1e-2),
    "lion-pytorch": lambda parameters: lion_pytorch.Lion(parameters, lr=1e-3),
    "prodigyopt": lambda parameters: prodigyopt.Prodigy(parameters, lr=1.0),
}

ALGORITHMS: dict[str, Callable[[], list[Algorithm]]] = {
    "alone": list,
    "clipped": lambda: [GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
    "sam": lambda: [SAM(rho=0.05)],
}


class OverflowsOnce(SimpleModel):
    """Has gradients beyond fp16's range in the passes of its second batch."""

    overflowing = False

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return super().loss(outputs, batch).float() * (1e30 if self.overflowing else 1.0)


class Watch(Algorithm):
    """Lets the second batch overflow; keeps the weights and the scale after each batch, and norms of the gradients."""

    events = frozenset({Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END})

    def __init__(self, model: OverflowsOnce) -> None:
        self.model = model
        self.weights: list[list[torch.Tensor]] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        assert state.scaler is not None
        if event is Event.BATCH_START:
            self.model.overflowing = state.timestamp.batch == 1
        elif event is Event.AFTER_TRAIN_BATCH:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        else:
            self.weights.append([p.detach().clone() for p in self.model.parameters()])
            self.scales.append(state.scaler.get_scale())


def watch(make: Make, algorithms: list[Algorithm], precision: str = "amp_fp16") -> Watch:
    with seed_context(0):
        model = OverflowsOnce()
    watcher = Watch(model)
    loader = torch.utils.data.DataLoader(RandomClassificationDataset(size=12), batch_size=4)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="3ba",
        optimizers=make(model.parameters()),
        algorithms=[*algorithms, watcher],
        precision=precision,
        device="cpu",
        seed=0,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return watcher


@pytest.mark.parametrize("algorithms", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_batch_that_overflows_is_skipped(make: Make, algorithms: Callable[[], list[Algorithm]]) -> None:
    seen = watch(make, algorithms())
    first, second, third = seen.weights

    assert all(bool(weight.isfinite().all()) for weights in seen.weights for weight in weights)
    deep_compare(first, second)
    assert any(not torch.equal(before, after) for before, after in zip(second, third, strict=True))
    assert [1.0, 0.5, 0.5] == [scale / seen.scales[0] for scale in seen.scales]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_are_unscaled_exactly_once(make: Make) -> None:
    norms = watch(make, []).norms
    expected = watch(lambda parameters: torch.optim.SGD(parameters, lr=0.1), []).norms

    torch.testing.assert_close(norms[0], expected[0], rtol=1e-3, atol=0.0)


# ---- schedule-free optimizers, and wrappers whose `state_dict` is of their own form ----


class Killed(Exception):
    """The process is lost."""


class Kill(Callback):
    """Ends the process at the start of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            raise Killed


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(RandomClassificationDataset(size=12), batch_size=4)


def start(make: Make, **options: Any) -> Trainer:
    """A run of two epochs of three batches, evaluated after each epoch."""
    with seed_context(0):
        model = options.pop("model", None) or SimpleModel()
    defaults = {
        "train_dataloader": loader(),
        "eval_dataloader": loader(),
        "max_duration": "2ep",
        "device": "cpu",
        "seed": 0,
        "progress_bar": False,
        "run_name": "run",
    }
    return Trainer(model=model, optimizers=make(model.parameters()), **{**defaults, **options})


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def by_hand(make: Make, *fits: int) -> dict[str, torch.Tensor]:
    """Train calls of `fit` of so many epochs without a Trainer, switching as the library of the optimizer says."""
    with seed_context(0):
        model = SimpleModel()
    optimizer: Any = make(model.parameters())
    for epochs in fits:
        optimizer.train()
        for _ in range(epochs):
            for batch in loader():
                optimizer.zero_grad()
                model.loss(model(batch), batch).backward()
                optimizer.step()
            optimizer.eval()  # an evaluation; the way there and back rounds
            optimizer.train()
        optimizer.eval()
    return {name: value.clone() for name, value in model.state_dict().items()}


SCHEDULE_FREE: dict[str, Make] = {
    "adamw": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=1e-2),
    "radam": lambda parameters: schedulefree.RAdamScheduleFree(parameters, lr=1e-1),
    "sgd": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=1e-1),
}


def mode(state: State) -> bool:
    (found,) = {group["train_mode"] for optimizer in state.optimizers for group in optimizer.param_groups}
    return bool(found)


class Modes(Callback):
    """Keeps the mode of the optimizer at each event, and calls something after the second batch."""

    def __init__(self, call: Callable[[], Any] = list) -> None:
        self.found: dict[Event, set[bool]] = {}
        self.call = call

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.found.setdefault(event, set()).add(mode(state))
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            self.call()


@pytest.mark.parametrize("make", SCHEDULE_FREE.values(), ids=SCHEDULE_FREE)
def test_schedule_free_weights_are_evaluated_and_end_in_the_model(make: Make) -> None:
    modes = Modes()
    trainer = start(make, callbacks=modes)
    trainer.fit()

    deep_compare(by_hand(make, 2), weights(trainer))
    for event in (Event.EVAL_START, Event.EVAL_BATCH_END, Event.FIT_END):
        assert modes.found[event] == {False}
    for event in (Event.BATCH_START, Event.BEFORE_FORWARD, Event.BATCH_END, Event.BATCH_CHECKPOINT):
        assert modes.found[event] == {True}

    trainer.fit(duration="1ep")

    deep_compare(by_hand(make, 2, 1), weights(trainer))
    trainer.close()


def test_schedule_free_weights_are_predicted_with_also_in_the_middle_of_training() -> None:
    trainer = start(SCHEDULE_FREE["sgd"], eval_dataloader=None)
    modes = Modes(lambda: (trainer.predict(loader()), trainer.eval(loader())))
    trainer.state.callbacks = [*trainer.state.callbacks, modes]
    trainer.fit()
    trainer.predict(loader())

    assert modes.found[Event.PREDICT_BATCH_START] == modes.found[Event.EVAL_BATCH_START] == {False}
    assert modes.found[Event.BATCH_CHECKPOINT] == {True}
    assert not mode(trainer.state)
    trainer.close()


class Interrupt(Callback):
    """Presses Ctrl-C at the end of the first epoch, once."""

    pressed = False

    def epoch_end(self, state: State, logger: Logger) -> None:
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("make", SCHEDULE_FREE.values(), ids=SCHEDULE_FREE)
def test_schedule_free_weights_are_in_the_model_after_an_interrupted_fit(make: Make) -> None:
    trainer = start(make, callbacks=Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()

    assert not mode(trainer.state)
    deep_compare(by_hand(make, 1), weights(trainer))
    trainer.fit()
    deep_compare(by_hand(make, 1, 1), weights(trainer))
    trainer.close()


RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "sam": {"algorithms": lambda: [SAM(rho=0.05)]},
    "microbatches": {"device_train_microbatch_size": 2},
    "bf16": {"precision": "amp_bf16"},
    "fp16": {"precision": "amp_fp16"},
}
WRAPPED: dict[str, Make] = {
    "lookahead": lambda parameters: pytorch_optimizer.Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), k=2),
}


def launch(make: Make, run: dict[str, Any], folder: Path, interval: str, **options: Any) -> dict[str, torch.Tensor]:
    run = {**run, "algorithms": run["algorithms"]()} if "algorithms" in run else run
    trainer = start(make, save_folder=folder, save_interval=interval, autoresume=True, **run, **options)
    trainer.fit()
    found = weights(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("interval", ["1ba", "4ba", "1ep"])
@pytest.mark.parametrize(
    ("make", "run"),
    [(SCHEDULE_FREE["adamw"], run) for run in RUNS.values()] + [(WRAPPED["lookahead"], RUNS["alone"])],
    ids=[*RUNS, "lookahead"],
)
@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NotIntendedUseWarning")
def test_memory_file_and_relaunch_agree(make: Make, run: dict[str, Any], interval: str, tmp_path: Path) -> None:
    whole = launch(make, run, tmp_path / "whole", interval)
    with pytest.raises(Killed):
        launch(make, run, tmp_path / "killed", interval, callbacks=Kill(4))
    resumed = launch(make, run, tmp_path / "killed", interval)

    deep_compare(whole, resumed)
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        deep_compare(whole, read_checkpoint(folder / "latest-rank0.pt")["state"]["model"])
        deep_compare(whole, launch(make, run, folder, interval))


def test_a_schedule_keeps_its_rate_through_a_wrapper_with_a_state_of_its_own(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)  # type: ignore[attr-defined]

    rates = []
    for kill in (2, 100):
        optimizers: list[Any] = []

        def make(parameters: Iterable[torch.nn.Parameter], made: list[Any] = optimizers) -> Any:
            made.append(WRAPPED["lookahead"](parameters))
            return made[0]

        trainer = start(make, save_folder=tmp_path, save_interval="1ba", autoresume=True, callbacks=Kill(kill))
        with suppress(Killed):
            trainer.fit(schedulers=schedule(optimizers[0]), step_schedulers_every_batch=True)
        rates.append(optimizers[0].param_groups[0]["lr"])
        trainer.close()

    assert [0.1 / 4, 0.1 / 64] == rates


@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NotIntendedUseWarning")
@pytest.mark.parametrize("algorithm", [SWA, EMA])
def test_schedule_free_averages_are_not_averaged_again(algorithm: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match=rf"`{algorithm.__name__}` together with the optimizer `SGDScheduleFree`"):
        start(SCHEDULE_FREE["sgd"], algorithms=[algorithm(), SAM()])


class Lookalike(torch.optim.SGD):
    """Has both names, but neither is a method that switches."""

    train = True

    def eval(self, metric: float) -> float:
        return metric


def test_an_attribute_called_train_is_no_mode() -> None:
    trainer = start(lambda parameters: Lookalike(parameters, lr=0.1))
    trainer.fit()
    trainer.close()


@pytest.mark.parametrize(
    ("algorithm", "error"),
    [
        (SAM(), r"Use SAM with the wrapped optimizer"),
        (SqueezeExcite(min_channels=1), r"before you make the optimizer"),
    ],
)
def test_algorithms_that_a_wrapper_cannot_take_are_refused_at_construction(algorithm: Algorithm, error: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=error):
        start(WRAPPED["lookahead"], model=Convolution(), algorithms=algorithm)


class Convolution(SimpleModel):
    """Has a convolution, which is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)


def test_a_state_of_another_form_is_refused(tmp_path: Path) -> None:
    start(WRAPPED["lookahead"]).save_checkpoint(f"{tmp_path}/x.pt")

    def other(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return timm.optim.Lookahead(torch.optim.SGD(parameters, lr=0.1))

    with pytest.raises(ValueError, match=r"saved Lookahead has the entries .* cannot load"):
        start(other, load_path=f"{tmp_path}/x.pt")
