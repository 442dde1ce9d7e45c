"""`ComposeCallback`: our algorithms inside the `Trainer` of Lightning."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from composer.core import Algorithm, Callback, ConflictError, Event, Plan, Precision, effects
from composer.loggers import LoggerDestination
from composer.loop import HostedRun, refusals, skin
from composer.loop.hosted_run import forward_inputs
from composer.models.base import total_loss
from composer.utils.iter_helpers import ensure_tuple

_KEY = "composer"  # the entry in Lightning's checkpoints
_PRECISIONS = {"bf16-mixed": Precision.AMP_BF16, "16-mixed": Precision.AMP_FP16}
_TRANSFORM = "Lightning loads a batch before training begins. Add the transform to the dataset yourself."
_UNAVAILABLE: dict[Event | str, str] = {
    **refusals.UNAVAILABLE,
    effects.REPLACES_OPTIMIZER: "Create that optimizer in `configure_optimizers`.",
    effects.SCALES_SCHEDULE: "Set `max_epochs` and the schedules of Lightning.",
    effects.AUGMENTS_IMAGES: _TRANSFORM,
    effects.MIXES_AUGMENTATIONS: _TRANSFORM,
    **dict.fromkeys(
        (Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD),
        "`validation_step` and `predict_step` run the model themselves. Leave the algorithm out.",
    ),
}
_WITHOUT_LOSS: dict[Event | str, str] = dict.fromkeys(
    (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    "`training_step` computes outputs and loss in one. Pass `ComposeCallback(..., loss=lambda outputs, batch: ...)` "
    "and return `self.composer.loss(batch)` from `training_step`.",
)
_HOOKS = skin.hooks_by_event(
    INIT="setup",
    BEFORE_LOAD="on_fit_start",
    AFTER_LOAD="on_train_start",
    ITERATION_START="on_train_epoch_start",
    BEFORE_DATALOADER="on_after_batch_transfer",
    BEFORE_TRAIN_BATCH="training_step",
    AFTER_BACKWARD="on_after_backward",
    AFTER_TRAIN_BATCH="on_before_optimizer_step",
    BATCH_END="on_train_batch_end",
    EPOCH_END="on_train_epoch_end",
    FIT_END="on_train_end",
    EVAL_BEFORE_ALL="on_validation_start",
    EVAL_BATCH_START="",
    EVAL_END="on_validation_end",
    EVAL_STANDALONE_START="on_validation_start",
    EVAL_STANDALONE_END="on_validation_end",
)


class ComposeCallback(pl.Callback):
    """Runs algorithms inside the `Trainer` of Lightning: `Trainer(callbacks=[ComposeCallback([EMA()])])`.

    Algorithms that act on outputs, targets or the loss need the forward pass and the loss as separate functions
    (`forward` has a default), and one line in the module, whose attribute `composer` is the callback::

        class Net(LightningModule):
            def training_step(self, batch, batch_idx):
                return self.composer.loss(batch)


        loss = lambda outputs, batch: cross_entropy(outputs, batch[1])
        Trainer(callbacks=[ComposeCallback([MixUp(), EMA()], loss=loss)])

    Checkpoints of Lightning contain the state of the run, and the weights that algorithms want saved, such as averages;
    `trainer.fit(ckpt_path=...)` restores both, and is exact from the end of an epoch. Another `fit` of the module, even
    by another `Trainer` with other settings or after an exception, continues the run. See `HostedRun` for what holds in
    all loops.

    With manual optimization, a batch counts once, however often the optimizers step in it. Algorithms that act on
    losses or gradients are refused in `setup`.

    Args:
        algorithms: The algorithms.
        forward: `forward(module, batch) -> outputs`. None: `module(inputs)`, the first part of the batch.
        loss: `loss(outputs, batch) -> loss`; with an argument `reduction` if an algorithm needs the loss per example.
            None: `training_step` computes the loss.
        callbacks: Callbacks of composer.
        loggers: Loggers of composer.
        seed: The seed of the random numbers of training.

    Attributes:
        run: The `HostedRun`; None before `setup`.

    Raises:
        ConflictError: Lightning does not support an algorithm, an algorithm needs `loss`, or two exclude each other. In
            `setup`, if the optimization is manual, or an option or a callback of Lightning's `Trainer` conflicts with
            an algorithm.
        TypeError: `algorithms` contains other objects, or `forward` or `loss` is not callable.
        ValueError: `forward` is given without `loss`. In `setup`, if the strategy shards the model, the run has no
            length, or another callback does not work with this one.
    """

    def __init__(
        self,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        seed: int = 0,
    ) -> None:
        self._algorithms, self._forward, self._loss = ensure_tuple(algorithms), forward, loss
        self._settings: dict[str, Any] = {"seed": seed, "callbacks": callbacks, "loggers": loggers}
        problems = [
            ConflictError(f"`{type(each).__name__}` changes the transforms of the dataset. {_TRANSFORM}")
            for each in self._algorithms
            if isinstance(each, Algorithm)
            and effects.DROPS_PIXELS in each.placement.provides
            and Event.FIT_START in (each.events or ())
        ]
        unavailable = _UNAVAILABLE if loss is not None else _UNAVAILABLE | _WITHOUT_LOSS
        given = {"unavailable": unavailable, "forward": forward, "loss": loss, **self._settings}
        refusals.raise_all([*problems, *refusals.argument_problems(self._algorithms, **given)])
        self.run: HostedRun | None = None
        self._trainer: pl.Trainer | None = None
        self._steps: list[tuple[Any, ...]] = []  # the arguments of `training_step` after the batch, for a replay
        self._counted = 0  # steps of the optimizer at the last BATCH_END
        self._has_loss = False  # `loss` was called in this `training_step`
        self._before = (0, 0)  # epochs and batches of the run that this `Trainer` does not count
        self._is_resumed = False  # a checkpoint with the state of the run was loaded for this `fit`
        self._undo: list[Callable[[], None]] = []  # put back the methods that `setup` has wrapped

    # ---- what the module calls ----

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch: in `training_step` with all algorithms, elsewhere without.

        Args:
            batch: The batch.

        Raises:
            RuntimeError: `ComposeCallback` did not get a `loss`.
        """
        if self._loss is None:
            raise RuntimeError("`loss` must be given to compute it. Pass `ComposeCallback(..., loss=...)`.")
        trainer = self._trainer
        if trainer is None or not trainer.training:
            module = self._run().model if trainer is None else trainer.lightning_module
            return total_loss(self._loss((self._forward or forward_inputs)(module, batch), batch))
        self._has_loss = True
        return total_loss(self._run().loss(batch))

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the hook of Lightning that announces it."""
        return self._run().explain()

    # ---- before training ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer
        pl_module.composer = self  # type: ignore[assignment]
        if getattr(pl_module, "_compiler_ctx", None) is not None:  # Lightning compiles `training_step`, too
            # The events of a run are Python; `forward` of the module stays compiled.
            self.loss = torch.compiler.disable(self.loss)  # type: ignore[method-assign, no-untyped-call]
        if stage != "fit":
            return
        self._is_resumed = False
        settings = _settings_of(trainer, pl_module)
        if self._has_run_of(pl_module):
            self._run().reconfigure(**settings)
        else:
            run = HostedRun(
                pl_module,
                self._algorithms,
                max_duration=skin.duration(trainer.max_steps, max(trainer.max_epochs or 0, 1)),  # less is a problem
                forward=self._forward,
                loss=self._loss,
                hooks=_HOOKS,
                **self._settings,
                **settings,
            )
            run.init()
            self.run, self._before = run, (0, 0)
        self._undo = [
            skin.wrap(pl_module, "on_after_batch_transfer", self._after_batch_transfer),
            skin.wrap(pl_module, "training_step", self._training_step),
            skin.wrap(pl_module, "optimizer_step", self._optimizer_step),
            skin.wrap(pl_module, "log", self._log),
            skin.wrap(trainer, "save_checkpoint", self._save_checkpoint),
        ]

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.optimizers = self._run().take_optimizers(trainer.strategy.optimizers)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        run, length = self._run(), trainer.num_training_batches
        run.state.train_dataloader = trainer.train_dataloader
        run.state.set_dataloader(trainer.train_dataloader, "train")
        if math.isfinite(length):
            run.state.dataloader_len = -(-int(length) // trainer.accumulate_grad_batches)
        if not self._is_resumed:
            self._before = skin.uncounted(run.state.timestamp, trainer.current_epoch, trainer.global_step)
        run.state.max_duration = skin.duration(trainer.max_steps, trainer.max_epochs or 0, self._before)
        run.begin_fit()
        run.catch_up(self._before[0] + trainer.current_epoch)
        self._counted = trainer.global_step

    # ---- epochs and batches ----

    def on_train_epoch_start(self, *_: Any) -> None:
        self._run().begin_epoch()

    def _after_batch_transfer(self, original: Callable[..., Any], batch: Any, dataloader_idx: int) -> Any:
        batch, run, trainer = original(batch, dataloader_idx), self._run(), self._trainer
        if trainer is None or not trainer.training:
            return batch
        if not run.in_epoch:  # resumed: Lightning does not announce the start of the first epoch
            run.begin_epoch()
        return run.after_dataloader(batch)

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run, is_split = self._run(), self._loss is not None
        if run.manual:
            return original(*args, **kwargs)
        batch, *others = args or (kwargs.pop("batch"),)
        if run.replay_index is None:
            self._steps.append((*others, kwargs))
        self._has_loss = False
        result = original(batch if is_split else run.before_forward(batch), *others, **kwargs)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor) or self._has_loss != is_split:
            expected = "`self.composer.loss(batch)` if `ComposeCallback` has a `loss`" if is_split else "a loss"
            raise RuntimeError(f"`training_step` must return {expected}, got {type(result).__name__}.")
        if not is_split:
            run.after_loss(loss)
        return result

    def on_after_backward(self, *_: Any) -> None:
        if not self._run().manual:
            self._run().after_backward()

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Log a value, except in repeated passes, whose weights are not the training weights."""
        if self._run().replay_index is None:
            original(*args, **kwargs)

    def _optimizer_step(
        self, original: Callable[..., Any], epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> Any:
        run = self._run()
        if run.replays:
            # Lightning itself calls `on_before_optimizer_step` after each call of the closure.
            closure = run.closure(functools.partial(self._repeat_pass, optimizer), first=closure, then=lambda: None)
        return original(epoch, batch_idx, optimizer, closure)

    def _repeat_pass(self, optimizer: Any, batch: Any) -> None:
        trainer, index = self._trainer, self._run().replay_index
        assert trainer is not None
        assert index is not None, "it is called for a replay"
        *others, keywords = self._steps[index]
        result: Any = trainer.strategy.training_step(batch, *others, **keywords)
        loss = result["loss"] if isinstance(result, Mapping) else result
        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, getattr(optimizer, "optimizer", optimizer))

    def on_before_optimizer_step(self, *_: Any) -> None:  # Lightning clips gradients afterwards
        if not self._run().manual:
            self._run().after_gradients()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        run = self._run()
        if run.manual or trainer.global_step != self._counted:
            self._counted = trainer.global_step
            self._steps.clear()
            run.end_batch()
        if trainer.enable_validation:  # Lightning iterates the loader, which draws a seed, before `on_validation_start`
            run.pause()

    def on_train_epoch_end(self, *_: Any) -> None:
        run, now = self._run(), self._run().state.timestamp
        if not run.in_epoch:  # resumed after the last step of an epoch
            if now.batch_in_epoch.value:
                run.catch_up(now.epoch.value + 1)
        elif skin.is_epoch_whole(run) is not False:  # `max_steps` may end the run within an epoch
            run.end_epoch()

    def on_train_end(self, *_: Any) -> None:
        self._run().end_fit()

    # ---- evaluation ----

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._has_run_of(pl_module) and not trainer.sanity_checking:
            loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
            self._run().begin_evaluation([] if loaders is None else loaders, "test" if trainer.testing else "eval")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._has_run_of(pl_module) and not trainer.sanity_checking:
            self._run().end_evaluation()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    # ---- checkpoints and the end ----

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with self._run().saving():
            original(*args, **kwargs)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self._has_run_of(pl_module):
            checkpoint[_KEY] = {**self._run().state_dict(), "before": self._before}

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the algorithms: Lightning warns of a checkpoint that is resumed without this callback."""
        return {"algorithms": [type(each).__name__ for each in self._algorithms]}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if _KEY in checkpoint and trainer.state.fn == "fit":
            self._run().load_state_dict(checkpoint[_KEY])
            self._before, self._is_resumed = tuple(checkpoint[_KEY]["before"]), True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it
        if self.run is not None:
            self.run.describe_failure(exception)
            self.run.abort()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        vars(pl_module).pop("composer", None)
        vars(self).pop("loss", None)
        self._trainer = None
        self._steps.clear()

    def _run(self) -> HostedRun:
        if self.run is None:
            raise RuntimeError(
                "There is no run before `fit`. Call it with a `Trainer(callbacks=[ComposeCallback(...)])`."
            )
        return self.run

    def _has_run_of(self, pl_module: pl.LightningModule) -> bool:
        """Return True if the run trains this module, not another one that the same `Trainer` evaluates."""
        return self.run is not None and self.run.model is pl_module


def _problems(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    """Yield what hides steps or batches from the run, or gives it no length."""
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    if not module.automatic_optimization and trainer.max_steps > 0:
        yield (
            "`max_steps` must not be set with manual optimization, where it counts the steps of all optimizers, and "
            "the run counts batches. Set `max_epochs`."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "`training_step` must take a batch, got `dataloader_iter`. Write `training_step(self, batch, batch_idx)`."
    if type(trainer.strategy) is not SingleDeviceStrategy and not isinstance(trainer.strategy, DDPStrategy):
        kind = type(trainer.strategy).__name__
        yield f"`strategy` must be a single device or DDP, got {kind}. Use the `Trainer` of composer."
    if trainer.max_steps <= 0 and (trainer.max_epochs or 0) <= 0:
        yield "`max_epochs` or `max_steps` must be set, since algorithms act at fractions of the run."
    for callback in callbacks:
        name = f"`{type(callback).__name__}`"
        if isinstance(callback, StochasticWeightAveraging):
            yield f"{name} must not be used with `ComposeCallback`. Use `ComposeCallback([SWA()])` of composer-swa."
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            yield f"{name}, which `Tuner` uses, must not run with `ComposeCallback`. Search with another `Trainer`."


def _settings_of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return arguments of `HostedRun` that follow from a trainer: its settings, and what it does not support."""
    unavailable: dict[Event | str, str] = {}
    for callback in getattr(trainer, "callbacks", []):
        name = f"`{type(callback).__name__}`"
        if isinstance(callback, BaseFinetuning):
            unavailable[effects.FREEZES_WEIGHTS] = f"{name} freezes and unfreezes, too. Remove one."
        if isinstance(callback, getattr(pl.callbacks, "WeightAveraging", ())):  # Lightning 2.6
            reason = f"{name} puts averages into the model, too. Remove one."
            unavailable |= dict.fromkeys((effects.AVERAGES_WEIGHTS, effects.SWAPS_WEIGHTS), reason)
    if trainer.gradient_clip_val is not None:
        unavailable[effects.CLIPS_GRADIENTS] = (
            "`gradient_clip_val` clips as well, after the algorithm. Remove one of the two."
        )
    if str(trainer.precision) == "16-mixed":
        unavailable[effects.WRAPS_OPTIMIZER] = "The scaler of '16-mixed' steps without a closure. Use 'bf16-mixed'."
    return {
        "manual": not module.automatic_optimization,
        "accumulate": trainer.accumulate_grad_batches,
        "precision": _PRECISIONS.get(str(trainer.precision), Precision.FP32),
        "unavailable": unavailable,
        "problems": _problems(trainer, module),
    }
