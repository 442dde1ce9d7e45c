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

from composer.core import (
    AUGMENTS_IMAGES,
    AVERAGES_WEIGHTS,
    CLIPS_GRADIENTS,
    DROPS_PIXELS,
    FREEZES_WEIGHTS,
    MIXES_AUGMENTATIONS,
    REPLACES_OPTIMIZER,
    SCALES_SCHEDULE,
    SWAPS_WEIGHTS,
    WRAPS_OPTIMIZER,
    Algorithm,
    Callback,
    ConflictError,
    Event,
    Plan,
    Precision,
)
from composer.loggers import LoggerDestination
from composer.loop import HostedRun
from composer.loop.hosted_run import algorithms_in, forward_inputs
from composer.loop.skin import UNAVAILABLE, conflicts, hooks_by_event, raise_all, uncounted
from composer.models.base import total_loss

_KEY = "composer"  # the entry in Lightning's checkpoints
_PRECISIONS = {"bf16-mixed": Precision.AMP_BF16, "16-mixed": Precision.AMP_FP16}
_TRANSFORM = "Lightning loads a batch before training begins. Add the transform to the dataset yourself."
_FEATURES: dict[Event | str, str] = {
    **UNAVAILABLE,
    REPLACES_OPTIMIZER: "Create that optimizer in `configure_optimizers`.",
    SCALES_SCHEDULE: "Set `max_epochs` and the schedules of Lightning.",
    AUGMENTS_IMAGES: _TRANSFORM,
    MIXES_AUGMENTATIONS: _TRANSFORM,
    **dict.fromkeys(
        (Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD),
        "`validation_step` and `predict_step` run the model themselves. Leave the algorithm out.",
    ),
}
_WRAPPED = ("on_after_batch_transfer", "training_step", "optimizer_step", "log", "on_save_checkpoint")
_SPLIT = (
    "`training_step` computes outputs and loss in one. Pass `ComposeCallback(..., loss=lambda outputs, batch: ...)` "
    "and return `self.composer.loss(batch)` from `training_step`."
)
_WITHOUT_LOSS: dict[Event | str, str] = dict.fromkeys(
    (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD), _SPLIT
)
_HOOKS = hooks_by_event(
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
    PREDICT_START="",
)


class ComposeCallback(pl.Callback):
    """Runs algorithms inside the `Trainer` of Lightning: `Trainer(callbacks=[ComposeCallback([EMA()])])`.

    Algorithms that change the model, the batch, gradients, weights or the optimizer need nothing else. Those that act
    on outputs, targets or the loss need the forward pass and the loss as separate functions (`forward` has a default),
    and one line in the module::

        class Net(LightningModule):
            def training_step(self, batch, batch_idx):
                return self.composer.loss(batch)


        loss = lambda outputs, batch: cross_entropy(outputs, batch[1])
        Trainer(callbacks=[ComposeCallback([MixUp(), EMA()], loss=loss)])

    With the same seed and the same batches the weights equal those of composer's own `Trainer`, bit for bit.
    Checkpoints of Lightning contain the state of the algorithms, and the weights that algorithms want saved, such as
    averages; `trainer.fit(ckpt_path=...)` restores both, and is exact from the end of an epoch.

    Another `fit` of the module, even by another `Trainer` with other settings, continues the run: algorithms keep their
    states, and the run is longer by the epochs of that `fit`. After an interruption, the model has the training
    weights, not averages, and can be fitted again; an interrupted epoch counts as a full one.

    With gradient accumulation, events of the loader occur for each of its batches, and optimizers that need several
    gradients per step (`SAM`) get those of all batches of the step. Lightning divides the loss of each batch by
    `accumulate_grad_batches`, and DDP averages ranks, so that batches count the same in a step, however many samples or
    labels they have. `Trainer` and `HostedRun` weight them by these.

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
            `setup`, if an option or a callback of Lightning's `Trainer` conflicts with an algorithm.
        TypeError: `algorithms` contains other objects, or `forward` or `loss` is not callable.
        ValueError: `forward` is given without `loss`. In `setup`, if the optimization is manual, the strategy shards
            the model, the run has no length, there is another `ComposeCallback`, or `StochasticWeightAveraging` or a
            `Tuner` is used.

    Example:
        >>> callback = ComposeCallback([])
        >>> trainer = pl.Trainer(max_epochs=2, barebones=True, accelerator="cpu", callbacks=[callback])
        >>> callback.run is None  # before `trainer.fit`
        True
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
        self._algorithms, self._forward, self._loss = algorithms_in(algorithms), forward, loss
        problems: list[str | ConflictError] = []
        if forward is not None and loss is None:
            problems.append("`loss` must be given together with `forward`. Pass `loss=lambda outputs, batch: ...`.")
        for algorithm in self._algorithms:
            if DROPS_PIXELS in algorithm.placement.provides and Event.FIT_START in (algorithm.events or ()):
                kind = type(algorithm).__name__
                problems.append(ConflictError(f"`{kind}` changes the transforms of the dataset. {_TRANSFORM}"))
        unavailable = _FEATURES if loss is not None else _FEATURES | _WITHOUT_LOSS
        raise_all([*problems, *conflicts(self._algorithms, unavailable)])
        HostedRun(torch.nn.Identity(), max_duration="1ep", forward=forward, loss=loss)  # checks the functions
        self._settings: dict[str, Any] = {"seed": seed, "callbacks": callbacks, "loggers": loggers}
        self.run: HostedRun | None = None
        self._trainer: pl.Trainer | None = None
        self._steps: list[tuple[Any, ...]] = []  # the arguments of `training_step` after the batch, for a replay
        self._counted = 0  # steps of the optimizer at the last BATCH_END
        self._has_loss = False  # `loss` was called in this `training_step`
        self._before = (0, 0)  # epochs and batches of the run that this `Trainer` does not count
        self._is_resumed = False  # a checkpoint with the state of the run was loaded for this `fit`
        self._replaced: dict[str, Any] = {}  # attributes of the module, such as a compiled `training_step`

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
        """Announce INIT, before optimizers are created and weights are loaded."""
        self._trainer = trainer
        pl_module.composer = self  # type: ignore[assignment]
        if getattr(pl_module, "_compiler_ctx", None) is not None:  # Lightning compiles `training_step`, too
            # The events of a run are Python; `forward` of the module stays compiled.
            self.loss = torch.compiler.disable(self.loss)  # type: ignore[method-assign, no-untyped-call]
        if stage != "fit":
            return
        raise_all([*_problems(trainer, pl_module), *conflicts(self._algorithms, _unavailable(trainer))])
        self._is_resumed = False
        settings: dict[str, Any] = {
            "accumulate": trainer.accumulate_grad_batches,
            "precision": _PRECISIONS.get(str(trainer.precision), Precision.FP32),
        }
        if self.run is not None and self.run.model is pl_module:
            self.run.reconfigure(**settings)
        else:
            run = HostedRun(
                pl_module,
                self._algorithms,
                max_duration=_duration_of(trainer),
                forward=self._forward,
                loss=self._loss,
                hooks=_HOOKS,
                **self._settings,
                **settings,
            )
            run.init()
            self.run, self._before = run, (0, 0)
        self._replaced = {name: value for name, value in vars(pl_module).items() if name in _WRAPPED}
        for name in _WRAPPED:
            original, wrapper = getattr(pl_module, name), getattr(self, f"_{name}")
            # Lightning reads the signature of these methods.
            setattr(pl_module, name, functools.wraps(original)(functools.partial(wrapper, original)))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce BEFORE_LOAD and replace the optimizers by those that algorithms have wrapped."""
        trainer.strategy.optimizers = self._run().take_optimizers(trainer.strategy.optimizers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce AFTER_LOAD, FIT_START and, when resuming, missing ends of epochs."""
        run, length = self._run(), trainer.num_training_batches
        run.state.train_dataloader = trainer.train_dataloader
        run.state.set_dataloader(trainer.train_dataloader, "train")
        if math.isfinite(length):
            run.state.dataloader_len = -(-int(length) // trainer.accumulate_grad_batches)
        if not self._is_resumed:
            self._before = uncounted(run.state.timestamp, trainer.current_epoch, trainer.global_step)
        run.state.max_duration = _duration_of(trainer, *self._before)
        run.begin_fit()
        run.catch_up(self._before[0] + trainer.current_epoch)
        self._counted = trainer.global_step

    # ---- epochs and batches ----

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce EPOCH_START."""
        self._run().begin_epoch()

    def _on_after_batch_transfer(self, original: Callable[..., Any], batch: Any, dataloader_idx: int) -> Any:
        batch = original(batch, dataloader_idx)
        trainer = self._trainer
        if trainer is None or not trainer.training:
            return batch
        run = self._run()
        if not run.in_epoch:  # resumed: Lightning does not announce the start of the first epoch
            run.begin_epoch()
        return run.after_dataloader(batch)

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run()
        batch, *others = args or (kwargs.pop("batch"),)
        if run.replay_index is None:
            self._steps.append((*others, kwargs))
        self._has_loss = False
        result = original(batch if self._loss is not None else run.before_forward(batch), *others, **kwargs)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        kind = type(result).__name__
        if self._loss is None and not isinstance(loss, torch.Tensor):
            raise RuntimeError(f"`training_step` must return a loss, got {kind}. Do not skip steps.")
        if self._loss is not None and not (self._has_loss and isinstance(loss, torch.Tensor)):
            raise RuntimeError(
                f"`training_step` must return `self.composer.loss(batch)`, because `ComposeCallback` was given a "
                f"`loss`, but returned {kind} without it. Leave out `loss` and the algorithms that need it otherwise."
            )
        if self._loss is None:
            run.after_loss(loss)
        return result

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce AFTER_BACKWARD."""
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
        """Repeat a forward and backward pass of the step."""
        trainer = self._trainer
        assert trainer is not None
        index = self._run().replay_index
        assert index is not None, "it is called for a replay"
        *others, keywords = self._steps[index]
        result = trainer.strategy.training_step(batch, *others, **keywords)
        loss: Any = result["loss"] if isinstance(result, Mapping) else result
        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, getattr(optimizer, "optimizer", optimizer))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Announce AFTER_TRAIN_BATCH; Lightning clips gradients afterwards."""
        self._run().after_gradients()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Announce BATCH_END, if the optimizer has stepped."""
        run = self._run()
        if trainer.global_step != self._counted:
            self._counted = trainer.global_step
            self._steps.clear()
            run.end_batch()
        if trainer.enable_validation:  # Lightning iterates the loader, which draws a seed, before `on_validation_start`
            run.pause()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce EPOCH_END."""
        run = self._run()
        now, length = run.state.timestamp, run.state.dataloader_len
        if not run.in_epoch:  # resumed after the last step of an epoch
            if now.batch_in_epoch.value:
                run.catch_up(now.epoch.value + 1)
        elif length is None or now.batch_in_epoch >= length:  # `max_steps` may end the run within an epoch
            run.end_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce FIT_END."""
        self._run().end_fit()

    # ---- evaluation ----

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce EVAL_START."""
        if self._has_run_of(pl_module) and not trainer.sanity_checking:
            loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
            self._run().begin_evaluation([] if loaders is None else loaders, "test" if trainer.testing else "eval")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Announce EVAL_END."""
        if self._has_run_of(pl_module) and not trainer.sanity_checking:
            self._run().end_evaluation()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    # ---- checkpoints ----

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state of the run, and the weights that algorithms want saved."""
        if self._has_run_of(pl_module):
            run = self._run()
            self._save_weights(trainer, checkpoint)
            with run.saving():
                checkpoint[_KEY] = {**run.state_dict(), "before": self._before}

    def _on_save_checkpoint(self, original: Callable[..., Any], checkpoint: dict[str, Any]) -> None:
        if _KEY not in checkpoint and self._trainer is not None:  # weights only: Lightning does not call callbacks
            self._save_weights(self._trainer, checkpoint)
        original(checkpoint)

    def _save_weights(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Replace the weights in Lightning's checkpoint by the weights that algorithms want saved."""
        with self._run().saving():
            weights = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: value.detach().clone() for name, value in weights.items()}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the state of the run; a checkpoint of a run without this callback has none."""
        if _KEY in checkpoint and self.run is not None and trainer.state.fn == "fit":
            self.run.load_state_dict(checkpoint[_KEY])
            self._before, self._is_resumed = tuple(checkpoint[_KEY].get("before", (0, 0))), True

    # ---- the end ----

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave training or an evaluation with the training weights, so that the module can be fitted again."""
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it
        if self.run is not None:
            self.run.describe_failure(exception)
            self.run.abort()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove what `setup` has added to the module."""
        for name in (*_WRAPPED, "composer"):
            vars(pl_module).pop(name, None)
        vars(pl_module).update(self._replaced)
        self._replaced = {}
        vars(self).pop("loss", None)
        self._trainer = None
        self._steps.clear()

    def _run(self) -> HostedRun:
        if self.run is None:
            raise RuntimeError(
                "There is no run before `fit`. Put `ComposeCallback` among the `callbacks` of a `Trainer` and call its "
                "`fit` first."
            )
        return self.run

    def _has_run_of(self, pl_module: pl.LightningModule) -> bool:
        """Return True if the run trains this module, not another one that the same `Trainer` evaluates."""
        return self.run is not None and self.run.model is pl_module


def _problems(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    """Yield a message for each setting that hides steps or batches from the run, or gives it no length."""
    if not module.automatic_optimization:
        yield (
            "`automatic_optimization` must be True: with manual optimization the loop is your own. Use "
            "`composer.loop.HostedRun` in it."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield (
            "`training_step` must take a batch, got `dataloader_iter`, from which it draws batches itself, so that no "
            "algorithm sees them. Write `training_step(self, batch, batch_idx)`."
        )
    if type(trainer.strategy) is not SingleDeviceStrategy and not isinstance(trainer.strategy, DDPStrategy):
        yield (
            f"`strategy` must be a single device or DDP, got {type(trainer.strategy).__name__}, which changes "
            f"parameters itself. Use the `Trainer` of composer for sharded models."
        )
    if trainer.max_steps <= 0 and (trainer.max_epochs or 0) <= 0:
        yield (
            "`max_epochs` or `max_steps` must be set, since algorithms act at fractions of the run. Pass "
            "`Trainer(max_epochs=...)`."
        )
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    if sum(isinstance(callback, ComposeCallback) for callback in callbacks) > 1:
        yield (
            "`callbacks` must have one `ComposeCallback`, got several, whose algorithms would not know each other. "
            "Pass all algorithms to one: `ComposeCallback([EMA(), SAM()])`."
        )
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            yield (
                "`StochasticWeightAveraging` must not be used with `ComposeCallback`: it runs `training_step` without "
                "steps of the optimizer. Use `ComposeCallback([SWA()])` of composer-swa."
            )
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            yield (
                f"`{type(callback).__name__}`, which `Tuner` uses, must not run with `ComposeCallback`: it trains some "
                f"steps and takes them back, which algorithms cannot. Search with a trainer without `ComposeCallback`."
            )


def _unavailable(trainer: pl.Trainer) -> dict[Event | str, str]:
    """Return the effects of algorithms that conflict with options and callbacks of a `Trainer`."""
    features: dict[Event | str, str] = {}
    if trainer.gradient_clip_val is not None:
        features[CLIPS_GRADIENTS] = "`gradient_clip_val` clips as well, after the algorithm. Remove one of the two."
    if str(trainer.precision) == "16-mixed":
        features[WRAPS_OPTIMIZER] = "The scaler of '16-mixed' steps without a closure. Use 'bf16-mixed'."
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            features[FREEZES_WEIGHTS] = f"`{type(callback).__name__}` freezes and unfreezes, too. Remove one."
        if "WeightAveraging" in {kind.__name__ for kind in type(callback).__mro__}:  # Lightning 2.6
            swaps = f"`{type(callback).__name__}` puts averages into the model, too. Remove one."
            features |= dict.fromkeys((AVERAGES_WEIGHTS, SWAPS_WEIGHTS), swaps)
    return features


def _duration_of(trainer: pl.Trainer, epochs: int = 0, batches: int = 0) -> str:
    """Return the length of the run as a time string, with the epochs and batches that the trainer does not count."""
    return f"{batches + trainer.max_steps}ba" if trainer.max_steps > 0 else f"{epochs + (trainer.max_epochs or 0)}ep"
