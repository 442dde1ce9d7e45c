"""Training inside Lightning gives the weights of composer's own `Trainer`, bit for bit."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM
from composer.core import (
    DROPS_PIXELS,
    REPLACES_OPTIMIZER,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Placement,
    Precision,
    State,
)
from composer.hosts.lightning import ComposeCallback
from composer.loggers import Logger
from composer.testing import HostProblem, deep_compare, run_on_ranks

LENGTH, BATCH, EPOCHS, SEED = HostProblem.length, HostProblem.batch_size, HostProblem.epochs, HostProblem.seed
layers, criterion, data, sgd = HostProblem.network, HostProblem.loss, HostProblem.loader, HostProblem.optimizer
ALGORITHMS: dict[str, Any] = {
    "nothing": list,
    "SAM": lambda: [SAM(rho=0.05, interval=2)],
    "EMA and GradientClipping": lambda: [EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
    "LayerFreezing": lambda: [LayerFreezing(freeze_start=0.0)],
    "all": lambda: [MixUp(), LabelSmoothing(), SAM(), EMA(half_life="2ba"), GradientClipping("norm", 0.1)],
}
OF_THE_LOSS = {"all"}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: Any) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.layers[0].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SplitNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.composer.loss(batch)  # type: ignore[operator, union-attr]


def callback_of(label: str, split: bool = True) -> ComposeCallback:
    return ComposeCallback(ALGORITHMS[label](), loss=criterion if split else None, seed=SEED)


def trainer_of(callback: Any, *others: Any, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in others),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return pl.Trainer(callbacks=[callback, *others], **{**defaults, **options})


def with_our_trainer(label: str, **options: Any) -> dict[str, Any]:
    return HostProblem.train(ALGORITHMS[label](), **options)


def fit(label: str, split: bool = True, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    net = SplitNet() if split else Net()
    trainer = trainer_of(callback_of(label, split), accumulate_grad_batches=accumulate, **options)
    trainer.fit(net, data(BATCH // accumulate))
    return copy.deepcopy(net.layers.state_dict())


# ---- the weights ----


@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_equal_those_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label))


@pytest.mark.parametrize("label", ALGORITHMS.keys() - OF_THE_LOSS)
def test_the_weights_are_equal_in_an_untouched_module(label: str) -> None:
    deep_compare(with_our_trainer(label), fit(label, split=False))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping"])
def test_two_batches_per_step_equal_microbatches(label: str, split: bool) -> None:
    deep_compare(with_our_trainer(label, device_train_microbatch_size=BATCH // 2), fit(label, split, accumulate=2))


@pytest.mark.parametrize("label", ["SAM", "all"])
def test_bfloat16_equals_that_of_our_trainer(label: str) -> None:
    deep_compare(with_our_trainer(label, precision="amp_bf16"), fit(label, precision="bf16-mixed"))


def test_a_compiled_module_has_the_same_weights() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compiler.reset()
    net = SplitNet()
    trainer_of(callback_of("all")).fit(torch.compile(net, backend=backend), data())  # type: ignore[arg-type]

    assert any("batch_norm" in graph for graph in graphs)
    assert {"forward", "training_step"} < vars(net).keys()  # still compiled
    deep_compare(with_our_trainer("all"), copy.deepcopy(net.layers.state_dict()))


def test_evaluations_and_checks_on_the_way_change_nothing() -> None:
    net = SplitNet()
    trainer = trainer_of(callback_of("all"), num_sanity_val_steps=2, val_check_interval=2)
    trainer.fit(net, data(), DataLoader(data().dataset, batch_size=4, shuffle=True))

    deep_compare(with_our_trainer("all"), copy.deepcopy(net.layers.state_dict()))


@pytest.mark.parametrize("label", ["SAM", "EMA and GradientClipping", "all"])
def test_evaluations_between_the_batches_of_a_step_change_nothing(label: str) -> None:
    net, batches = SplitNet(), data(BATCH // 2)
    trainer = trainer_of(callback_of(label), accumulate_grad_batches=2, val_check_interval=1)
    trainer.fit(net, batches, DataLoader(batches.dataset, batch_size=4, shuffle=True))

    assert len(net.seen) > 2 * EPOCHS * LENGTH
    deep_compare(fit(label, accumulate=2), copy.deepcopy(net.layers.state_dict()))


def test_a_run_may_end_in_mid_epoch() -> None:
    callback = callback_of("EMA and GradientClipping")
    trainer_of(callback, max_steps=7).fit(SplitNet(), data())
    run = callback.run

    assert run is not None
    assert (run.state.timestamp.batch, run.state.timestamp.epoch, run.is_over()) == (7, 1, True)


# ---- events ----


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


def test_the_events_come_in_the_order_of_our_trainer() -> None:
    recorder, ours = Recorder(), Recorder()
    with_our_trainer("nothing", callbacks=ours)
    callback = ComposeCallback([], loss=criterion, callbacks=recorder, seed=SEED)
    trainer_of(callback).fit(SplitNet(), data())

    # Our own loop announces the end of the loader as well.
    expected = [
        a
        for a, b in zip(ours.events, [*ours.events[1:], ""], strict=True)
        if (a, b) != ("before_dataloader", "epoch_end")
    ]
    assert expected == recorder.events


def test_averages_are_evaluated() -> None:
    net, callback = SplitNet(), callback_of("EMA and GradientClipping")
    weights: list[torch.Tensor] = []

    class Training(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            weights.append(net.layers[0].weight.detach().clone())

    trainer_of(callback, Training(), num_sanity_val_steps=0).fit(net, data(), data())
    ema: Any = callback.run.state.algorithms[0]  # type: ignore[union-attr]

    assert len(net.seen) == EPOCHS * LENGTH
    assert not torch.equal(net.seen[0], weights[0])
    assert ema.ema_weights_active
    assert torch.equal(net.seen[-1], net.layers[0].weight)


def test_an_error_of_the_first_step_says_what_the_step_saw(caplog: pytest.LogCaptureFixture) -> None:
    class Beyond(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return cross_entropy(self(batch[0]), batch[1] + 99)

    with pytest.raises(IndexError) as caught:
        trainer_of(ComposeCallback([])).fit(Beyond(), data())
    text = "\n".join(getattr(caught.value, "__notes__", [])) or caplog.text
    assert 1 == text.count("The first step saw:\n  batch[0]: float32")


class LossNet(SplitNet):
    """Computes its loss with `self.composer.loss` everywhere, and logs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.composer.loss(batch))  # type: ignore[operator, union-attr]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.composer.loss(batch))  # type: ignore[operator, union-attr]


def test_the_loss_is_that_of_the_module_that_is_evaluated() -> None:
    net, other = LossNet(), LossNet()
    torch.nn.init.zeros_(other.layers[-1].weight)
    trainer = trainer_of(callback_of("all"))
    before = trainer.validate(other, data(), verbose=False)
    trainer.fit(net, data())
    after = trainer.test(net, data(), verbose=False)

    assert trainer.validate(other, data(), verbose=False) == before
    with torch.no_grad():
        losses = [float(criterion(net.eval()(batch[0]), batch)) for batch in data()]  # of one size
    assert after[0]["test"] == pytest.approx(sum(losses) / len(losses))


def test_repeated_passes_are_not_logged() -> None:
    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    losses: list[float] = []
    trainer = trainer_of(ComposeCallback(SAM(rho=1.0), loss=criterion), Losses(), max_epochs=1)
    trainer.fit(LossNet(), data())

    assert float(trainer.callback_metrics["train"]) == pytest.approx(sum(losses) / len(losses))


def test_the_plan_names_hooks() -> None:
    callback = callback_of("all")
    trainer_of(callback).fit(SplitNet(), data())

    assert "training_step" in str(callback.explain())


# ---- checkpoints ----


class Died(Exception):
    """The process is lost."""


class Death(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise Died


# After the last step of an epoch, before its end is announced, and after that.
SAVES: dict[str, dict[str, Any]] = {
    "step": {"every_n_train_steps": LENGTH},
    "epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


class Kill(Death):
    """Kills the process."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(label: str, when: str, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)  # sums round by it
    os.chdir(folder)
    saver: Any = ModelCheckpoint(folder, save_last=True, **SAVES[when])
    trainer_of(callback_of(label), saver, Kill(LENGTH + 2)).fit(SplitNet(), data())


def resumed(label: str, loader: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Return the weights at the end of a run that continues from the last checkpoint."""
    net = SplitNet()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    torch.manual_seed(55)
    trainer_of(callback_of(label), **options).fit(net, loader, ckpt_path=folder / "last.ckpt", weights_only=True)
    return copy.deepcopy(net.layers.state_dict())


@pytest.mark.parametrize("when", SAVES)
@pytest.mark.parametrize("label", ["all", "LayerFreezing"])
def test_a_run_whose_process_is_killed_resumes_exactly(label: str, when: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"SIGKILL|-9|died"):
        run_on_ranks(train_until_killed, 1, label, when, str(tmp_path), torch.get_num_threads(), backend=None)

    deep_compare(with_our_trainer(label), resumed(label, data(), tmp_path))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("label", ["all", "LayerFreezing"])
def test_a_run_resumes_in_mid_epoch_with_a_loader_that_has_a_state(label: str, tmp_path: Path) -> None:
    """Lightning saves the state of the loader: the order of the shuffled examples, and the position."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def shuffled(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torchdata.StatefulDataLoader(data().dataset, BATCH, shuffle=True, generator=generator)

    net, saver = SplitNet(), ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=LENGTH + 2)
    longer = {"max_epochs": EPOCHS + 2}  # two epochs begin after the resumption
    trainer_of(callback_of(label), **longer).fit(net, shuffled(1))
    with pytest.raises(Died):
        trainer_of(callback_of(label), saver, Death(LENGTH + 3), **longer).fit(SplitNet(), shuffled(1))

    deep_compare(copy.deepcopy(net.layers.state_dict()), resumed(label, shuffled(2), tmp_path, **longer))


def test_checkpoints_hold_the_averages_and_tell_of_the_callback(tmp_path: Path) -> None:
    net, callback = SplitNet(), callback_of("EMA and GradientClipping")
    saver: Any = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=3)
    trainer_of(callback, saver, max_steps=4).fit(net, data())
    with pytest.warns(UserWarning, match=r"add the following callbacks: .*ComposeCallback"):
        trainer_of(pl.Callback(), max_steps=4).fit(Net(), data(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)

    assert dict(saved["composer"]["algorithms"])["EMA"]["ema_weights_active"]
    training = dict(saved["composer"]["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
    assert not torch.equal(training["network.layers.0.weight"], saved["state_dict"]["layers.0.weight"])


def test_files_of_weights_only_hold_the_averages(tmp_path: Path) -> None:
    def saved(weights_only: bool) -> dict[str, Any]:
        folder = tmp_path / str(weights_only)
        saver: Any = ModelCheckpoint(folder, save_last=True, every_n_train_steps=3, save_weights_only=weights_only)
        trainer_of(callback_of("EMA and GradientClipping"), saver, max_steps=4).fit(SplitNet(), data())
        return dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])

    deep_compare(saved(weights_only=False), saved(weights_only=True))


def test_averages_are_in_the_model_only_while_it_is_saved(tmp_path: Path) -> None:
    found: list[tuple[bool, bool]] = []

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            weight = pl_module.layers[0].weight
            before = weight.detach().clone()
            trainer.save_checkpoint(tmp_path / "now.ckpt", weights_only=False)
            saved = torch.load(tmp_path / "now.ckpt", weights_only=True)["state_dict"]["layers.0.weight"]
            found.append((torch.equal(before, weight), torch.equal(before, saved)))

    trainer_of(callback_of("EMA and GradientClipping"), Saving(), max_steps=3).fit(SplitNet(), data())

    assert found[-1] == (True, False)


def test_a_trainer_that_has_not_fitted_may_save(tmp_path: Path) -> None:
    net = Net()
    trainer = trainer_of(callback_of("EMA and GradientClipping", split=False))
    trainer.validate(net, data(), verbose=False)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=False)

    deep_compare(net.state_dict(), torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"])


# ---- several fits ----


class Failure(pl.Callback):
    """Raises at a hook of the second epoch, and records the last weights of training."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        self.weights: dict[str, Any] = {}
        setattr(self, hook, self._fail)
        self._error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights = copy.deepcopy(dict(pl_module.layers.named_parameters()))

    def _fail(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > LENGTH:
            raise self._error


@pytest.mark.parametrize("error", [Died, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_before_backward", "on_train_batch_start", "on_validation_batch_end"])
def test_an_interrupted_fit_can_be_continued(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    net, callback, failure = SplitNet(), callback_of("all"), Failure(hook, error)
    saver: Any = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = trainer_of(callback, failure, saver, num_sanity_val_steps=0, val_check_interval=2)
    torch.manual_seed(5)
    random, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            trainer.fit(net, data(), data())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    run: Any = callback.run

    assert torch.equal(random, torch.get_rng_state())
    deep_compare(failure.weights, copy.deepcopy(dict(net.layers.named_parameters())))
    assert not {"training_step", "optimizer_step", "log", "composer"} & vars(net).keys()
    assert (run.state.timestamp.epoch, run.state.timestamp.batch_in_epoch > 0) == (1, True)

    net.train()
    trainer_of(callback).fit(net, data())
    assert (run.state.timestamp.epoch, run.is_over()) == (2 + EPOCHS, True)
    assert run.state.algorithms[3].ema_weights_active


def test_the_same_trainer_continues_after_an_interruption() -> None:
    net, callback, death = SplitNet(), callback_of("all"), Death(LENGTH + 2)
    trainer = trainer_of(callback, death)
    with pytest.raises(Died):
        trainer.fit(net, data())
    death.step = -1
    trainer.fit(net, data())
    run: Any = callback.run

    assert trainer.current_epoch == EPOCHS
    assert (run.state.timestamp.batch, run.is_over()) == (trainer.global_step, True)


def test_another_fit_continues_the_run() -> None:
    """Of one run of twice the length, and of two fits: the same steps."""
    net, callback = SplitNet(), ComposeCallback([LabelSmoothing()], loss=criterion, seed=SEED)
    trainer_of(callback).fit(net, data())
    trainer_of(callback).fit(net, data())
    run: Any = callback.run
    whole = ComposeCallback([LabelSmoothing()], loss=criterion, seed=SEED)
    other = SplitNet()
    # Both trainers start with new momentum.
    trainer_of(whole).fit(other, data())
    own = trainer_of(whole, max_steps=EPOCHS * LENGTH, max_epochs=-1)
    own.fit(other, data())

    deep_compare(copy.deepcopy(net.state_dict()), copy.deepcopy(other.state_dict()))
    assert (run.state.timestamp.epoch, run.state.max_duration, run.is_over()) == (2 * EPOCHS, f"{2 * EPOCHS}ep", True)
    assert whole.run.state.max_duration == f"{2 * EPOCHS * LENGTH}ba"  # type: ignore[union-attr]


def test_the_settings_of_another_trainer_are_applied() -> None:
    net, callback = SplitNet(), callback_of("all")
    trainer_of(callback).fit(net, data())
    run: Any = callback.run
    trainer_of(callback, accumulate_grad_batches=2, precision="bf16-mixed").fit(net, data(BATCH // 2))

    assert callback.run is run
    assert (run.accumulate, run.state.precision, run.state.timestamp.batch) == (
        2,
        Precision.AMP_BF16,
        2 * EPOCHS * LENGTH,
    )
    assert run.state.outputs.dtype == torch.bfloat16


def test_the_settings_of_another_trainer_are_checked() -> None:
    net, callback = SplitNet(), callback_of("all")
    trainer_of(callback).fit(net, data())
    with pytest.raises(ConflictError, match="`gradient_clip_val` clips as well"):
        trainer_of(callback, gradient_clip_val=1.0).fit(net, data())
    with pytest.raises(ValueError, match="`StochasticWeightAveraging` must not be used"):
        trainer_of(callback, StochasticWeightAveraging(swa_lrs=0.1)).fit(net, data())
    trainer_of(callback).fit(net, data())

    assert callback.run is not None
    assert callback.run.state.timestamp.epoch == 2 * EPOCHS


def test_a_later_fit_resumes_exactly(tmp_path: Path) -> None:
    def fitted_once() -> tuple[SplitNet, ComposeCallback]:
        net, callback = SplitNet(), callback_of("all")
        trainer_of(callback).fit(net, data())
        return net, callback

    net, callback = fitted_once()
    trainer_of(callback).fit(net, data())
    other, killed = fitted_once()
    saver: Any = ModelCheckpoint(tmp_path, save_last=True, **SAVES["epoch"])
    with pytest.raises(Died):
        trainer_of(killed, saver, Death(LENGTH + 2)).fit(other, data())
    other, resumed = SplitNet(), callback_of("all")
    trainer_of(resumed).fit(other, data(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)

    deep_compare(copy.deepcopy(net.state_dict()), copy.deepcopy(other.state_dict()))
    assert resumed.run is not None
    assert resumed.run.state.max_duration == f"{2 * EPOCHS}ep"


# ---- what is refused ----


def test_a_checkpoint_of_lightning_alone_is_continued(tmp_path: Path) -> None:
    net, callback = Net(), callback_of("EMA and GradientClipping", split=False)
    alone = trainer_of(pl.Callback(), max_steps=4)
    alone.fit(net, data())
    alone.save_checkpoint(tmp_path / "alone.ckpt", weights_only=False)
    trainer_of(callback, max_steps=6, max_epochs=3).fit(net, data(), ckpt_path=tmp_path / "alone.ckpt")

    assert callback.run is not None
    assert callback.run.state.timestamp.batch == callback.run.state.max_duration == "2ba"


class Replacing(Algorithm):
    """Replaces the optimizer."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_OPTIMIZER})

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...


class Freezing(BackboneFinetuning):
    """Freezes nothing."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...


def refused(callback: ComposeCallback, *others: Any, module: Any = None, **options: Any) -> Any:
    trainer = trainer_of(callback, *others, **options)
    trainer.fit(SplitNet() if module is None else module, data())


class OfTheData(Algorithm):
    """Adds a transform to the data set."""

    events = frozenset({Event.FIT_START})
    placement = Placement(provides={DROPS_PIXELS})

    def apply(self, event: Event, state: State, logger: Logger) -> None: ...


def test_what_lightning_cannot_do_is_refused_when_constructed() -> None:
    with pytest.raises(ConflictError, match=r"`MixUp` acts at BEFORE_LOSS.*return `self\.composer\.loss\(batch\)`"):
        ComposeCallback(MixUp())
    with pytest.raises(ConflictError, match=r"`Replacing` replaces optimizer.*Create that optimizer in `configure_opt"):
        ComposeCallback(Replacing())
    with pytest.raises(ConflictError, match=r"`OfTheData` changes the transforms.*Add the transform to the dataset"):
        ComposeCallback(OfTheData())
    with pytest.raises(ConflictError, match="`EMA` is given twice"):
        ComposeCallback([EMA(), EMA()])


def test_what_conflicts_with_the_trainer_is_refused_before_training() -> None:
    with pytest.raises(ConflictError, match=r"`GradientClipping` clips gradients.*`gradient_clip_val` clips as well"):
        refused(ComposeCallback(GradientClipping("norm", 1.0)), gradient_clip_val=1.0)
    with pytest.raises(ConflictError, match=r"`LayerFreezing` freezes weights.*`Freezing` freezes and unfreezes"):
        refused(ComposeCallback(LayerFreezing()), Freezing())


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong: Any = 3
    with pytest.raises(ConflictError, match=r"(?s)4 problems.*`forward` must be a.*`loss` must.*MixUp.*Replacing"):
        ComposeCallback([MixUp(), Replacing()], forward=wrong)
    callback, other = ComposeCallback([GradientClipping("norm", 1.0)]), StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(ConflictError, match=r"(?s)3 problems.*`max_epochs`.*`StochasticWeight.*clips as well"):
        refused(callback, other, max_epochs=-1, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="2 problems") as caught:
        refused(ComposeCallback([]), StochasticWeightAveraging(swa_lrs=0.1), module=Net(), max_epochs=-1)
    assert not isinstance(caught.value, ConflictError)


def test_averages_of_lightning_are_refused() -> None:
    with pytest.raises(ValueError, match="`StochasticWeightAveraging` must not be used with `ComposeCallback`"):
        refused(ComposeCallback([]), StochasticWeightAveraging(swa_lrs=0.1), module=Net())
    if hasattr(pl.callbacks, "EMAWeightAveraging"):  # Lightning 2.6
        with pytest.raises(ConflictError, match=r"`EMA` averages weights.*`EMAWeightAveraging` puts averages into the"):
            refused(ComposeCallback(EMA()), pl.callbacks.EMAWeightAveraging())


def test_a_training_step_that_draws_its_batches_is_refused() -> None:
    class Drawing(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(ValueError, match=r"`training_step` must take a batch, got `dataloader_iter`"):
        refused(ComposeCallback([]), module=Drawing())


def test_endless_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="`max_epochs` or `max_steps` must be set"):
        refused(ComposeCallback([]), module=Net(), max_epochs=-1)
    with pytest.raises(ValueError, match="`loss` must be given together with `forward`"):
        ComposeCallback([], forward=lambda module, batch: module(batch))


def test_a_training_step_that_computes_the_loss_itself_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"must return `self\.composer\.loss\(batch\)`"):
        refused(ComposeCallback(MixUp(), loss=criterion), module=Net())
    with pytest.raises(
        RuntimeError, match=r"`loss` must be given to compute it\. Pass `ComposeCallback\(\.\.\., loss="
    ):
        refused(ComposeCallback([]))
    with pytest.raises(RuntimeError, match="There is no run before `fit`"):
        ComposeCallback([]).explain()


def test_steps_are_not_skipped() -> None:
    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(RuntimeError, match="`training_step` must return a loss, got NoneType"):
        refused(ComposeCallback([]), module=Skipping())


@pytest.mark.parametrize("result", [None, {"logs": 1}])
def test_a_training_step_that_forgets_to_return_its_loss_is_told(result: Any) -> None:
    class Forgetful(SplitNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return result

    with pytest.raises(RuntimeError, match=r"must return `self\.composer\.loss\(batch\)`.*, got (NoneType|dict)"):
        refused(ComposeCallback([], loss=criterion), module=Forgetful())


def test_the_module_is_as_before_afterwards() -> None:
    net = SplitNet()
    trainer_of(callback_of("nothing")).fit(net, data())

    assert not {"training_step", "optimizer_step", "log", "composer"} & vars(net).keys()


def test_one_callback_has_all_algorithms() -> None:
    callbacks = [ComposeCallback([EMA()]), ComposeCallback([GradientClipping("norm", 1.0)])]
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ComposeCallback`"):  # Lightning's
        trainer_of(*callbacks)
    algorithms: Any = EMA
    with pytest.raises(TypeError, match=r"got the class `EMA`; pass `EMA\(\.\.\.\)`"):
        ComposeCallback(algorithms)


def test_a_search_for_the_learning_rate_is_refused() -> None:
    callback, net = ComposeCallback([EMA(half_life="2ba")]), Net()
    net.lr = 0.1
    with pytest.raises(ValueError, match="`LearningRateFinder`, which `Tuner` uses, must not run"):
        Tuner(trainer_of(callback)).lr_find(net, data())
    trainer_of(callback).fit(net, data())


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", ALGORITHMS)
def test_the_weights_on_a_gpu_equal_those_of_our_trainer(label: str) -> None:
    expected = with_our_trainer(label, device="gpu", precision="fp32")
    found = fit(label, accelerator="gpu", devices=1)

    deep_compare(*({name: value.cpu() for name, value in one.items()} for one in (expected, found)))
