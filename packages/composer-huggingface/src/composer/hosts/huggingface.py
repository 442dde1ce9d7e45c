"""`ComposerMixin`: our algorithms inside the `Trainer` of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint

from composer.core import (
    ADDS_LOSS,
    CHANGES_BATCH_SIZE,
    CLIPS_GRADIENTS,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    SCALES_SCHEDULE,
    SMOOTHS_TARGETS,
    WEIGHS_LOSS,
    WRAPS_OPTIMIZER,
    Algorithm,
    Callback,
    Event,
    Plan,
    Precision,
)
from composer.loggers import LoggerDestination
from composer.loop import HostedRun
from composer.models.base import total_loss
from composer.utils import get_device
from composer.utils.misc import needs_closure

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object  # the user's class has one, which may be a subclass

_LABELS = "labels"  # the key under which transformers finds the targets of `compute_loss_func`
_FILE = "composer.pt"  # in a checkpoint; of several ranks, each has one of its own
_OF_EVALUATION = (
    *(Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END),
    *(Event.PREDICT_BATCH_START, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END),
)
_FEATURES: dict[Event | str, str] = {
    REPLACES_MODEL: "Pass the model that you want to train to the `Trainer`.",
    REPLACES_OPTIMIZER: "Create that optimizer yourself and pass it as `optimizers=(optimizer, None)`.",
    SCALES_SCHEDULE: "Set `num_train_epochs` or `max_steps` in `TrainingArguments`.",
    CHANGES_BATCH_SIZE: "transformers counts the steps of an epoch before training. Use the `Trainer` of composer.",
    **dict.fromkeys(_OF_EVALUATION, "`prediction_step` runs the model itself. Leave the algorithm out."),
}
_SPLIT = (
    "Without `compute_loss_func` the model computes outputs and loss in one. Pass "
    "`compute_loss_func=lambda outputs, labels, num_items_in_batch=None: ...`."
)
_HOOKS = {
    Event.INIT: "__init__",
    Event.BEFORE_LOAD: "create_optimizer",
    **dict.fromkeys((Event.AFTER_LOAD, Event.FIT_START), "on_train_begin"),
    **dict.fromkeys((Event.ITERATION_START, Event.EPOCH_START), "on_epoch_begin"),
    **dict.fromkeys((Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START), "get_batch_samples"),
    **dict.fromkeys((Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD), "compute_loss"),
    **dict.fromkeys((Event.AFTER_FORWARD, Event.BEFORE_LOSS), "compute_loss_func"),
    **dict.fromkeys((Event.AFTER_LOSS, Event.BEFORE_BACKWARD), "compute_loss"),
    Event.AFTER_BACKWARD: "training_step",
    Event.AFTER_TRAIN_BATCH: "on_pre_optimizer_step",
    **dict.fromkeys((Event.BATCH_END, Event.BATCH_CHECKPOINT), "on_step_end"),
    **dict.fromkeys((Event.EPOCH_END, Event.EPOCH_CHECKPOINT), "on_epoch_end"),
    Event.FIT_END: "on_train_end",
    **dict.fromkeys((Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, Event.EVAL_START), "evaluation_loop"),
    **dict.fromkeys((Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END, Event.EVAL_END), "evaluation_loop"),
}
_SHARDED = {"DEEPSPEED", "MEGATRON_LM", "XLA"}


class ComposerMixin(_Trainer):
    """Run algorithms inside the `Trainer` of transformers, or one that is built on it.

    List it before the other class, whose arguments stay the same::

        class MyTrainer(ComposerMixin, Seq2SeqTrainer):
            pass


        MyTrainer(model, args, train_dataset=data, algorithms=[EMA()])

    Algorithms that change the model, inputs, gradients, weights or the optimizer need nothing else, nor do those that
    add to the loss. Those that act on outputs or targets need a loss that is separate from the forward pass: pass
    `compute_loss_func=` of the `Trainer` of transformers. They find the logits of the model in `state.outputs`, and
    inputs and targets in the batch by their usual names, such as "pixel_values" and "labels"; for others, pass
    `input_key` and `target_key` to the algorithm. `compute_loss_func` gets the targets of the key "labels"; with a
    further argument `reduction` it serves algorithms that need the loss of each example.

    With the same seed and the same batches the weights equal those of composer's own `Trainer`, bit for bit, unless
    transformers itself acts as well: by default, it clips gradients and lowers the learning rate.

    Batches of a step and ranks are weighted by the rule of transformers: a model or a `compute_loss_func` that takes
    `num_items_in_batch` divides the sum of its loss by the number of labels of the step that are not -100; other losses
    are divided by `gradient_accumulation_steps`, so that batches count the same.

    Models may be sharded by FSDP2: `TrainingArguments(fsdp=True, fsdp_config={"version": 2})`.

    A checkpoint contains the state of the algorithms, in `composer.pt`, and the weights that algorithms want to have
    saved, such as averages; `save_model` saves the same weights. `train(resume_from_checkpoint=...)` continues from the
    weights of training, from any step.

    Another call of `train` continues the run, unless there is a `model_init`: algorithms keep their states, and the run
    is extended. After an interruption the model has the weights of training, not averages.

    Args:
        *args: Arguments of the other class.
        algorithms: The algorithms.
        composer_callbacks: Callbacks of composer; `callbacks` are those of transformers.
        composer_loggers: Loggers of composer.
        **kwargs: Arguments of the other class.

    Attributes:
        composer_run: The `HostedRun`. Its seed is that of `TrainingArguments`.

    Raises:
        ConflictError: The host or one of its settings does not support an algorithm.
        ValueError: The model is sharded by anything but FSDP2 or trained by several devices in one process, or a
            setting repeats or interrupts steps.

    Example:
        >>> args = transformers.TrainingArguments("out", report_to="none", disable_tqdm=True, use_cpu=True)
        >>> config = transformers.BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
        ... )
        >>> trainer = ComposerTrainer(transformers.BertForMaskedLM(config), args, algorithms=[])
        >>> trainer.composer_run.state.max_duration
        Time(3, TimeUnit.EPOCH)
    """

    def __init__(
        self,
        *args: Any,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        composer_callbacks: Callback | Sequence[Callback] = (),
        composer_loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        **kwargs: Any,
    ) -> None:
        self._composer: _Hooks | None = None
        super().__init__(*args, **kwargs)
        parts = {"algorithms": algorithms, "callbacks": composer_callbacks, "loggers": composer_loggers}
        self._composer = _Hooks(self, parts)
        # First, so that callbacks of the user find averages in the model when training ends.
        self.callback_handler.callbacks.insert(0, self._composer)

    @property
    def composer_run(self) -> HostedRun:
        """The run, with `state` and `engine`."""
        return self._hooks.run

    @property
    def _hooks(self) -> _Hooks:
        assert self._composer is not None, "the constructor has returned"
        return self._composer

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the hook that announces it."""
        return self.composer_run.explain()

    # ---- training ----

    def call_model_init(self, trial: Any = None) -> Any:
        """Create a model and start a run with it."""
        model = super().call_model_init(trial)
        if self._composer is not None:  # else, the constructor starts the run
            self._composer.start(model.to(self.args.device))
        return model

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train with the algorithms."""
        with self._hooks.training(resume_from_checkpoint):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, if there is none, and let algorithms wrap it."""
        super().create_optimizer(*args, **kwargs)
        self._hooks.take_optimizer()
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect the batches of a step, as algorithms have changed them, and count what the loss is divided by."""
        hooks = self._hooks
        result = super().get_batch_samples(hooks.batches(epoch_iterator), *args, **kwargs)
        hooks.give_random_back()
        return result

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of a batch."""
        step = functools.partial(super().training_step, model)
        return self._hooks.training_step(step, inputs, *args, **kwargs)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss: in training with all algorithms, elsewhere without."""
        compute = functools.partial(super().compute_loss, model)
        return self._hooks.compute_loss(compute, inputs, return_outputs, *args, **kwargs)

    # ---- evaluation and saving ----

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the weights that algorithms want to have evaluated, such as averages."""
        with self._hooks.evaluation(dataloader, kwargs.get("metric_key_prefix", "eval")):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights that algorithms want to have saved, such as averages."""
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        with self._hooks.saving(output_dir if is_checkpoint else None):
            super().save_model(output_dir, _internal_call)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self._hooks.load_sharded()
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        self._hooks.finish()  # before, since FIT_END puts the last averages into the model
        super()._load_best_model()


class ComposerTrainer(ComposerMixin, transformers.Trainer):
    """The `Trainer` of transformers with algorithms; see `ComposerMixin`."""


class _Hooks(TrainerCallback):
    """Announces the events of a run from the methods and callbacks of a `Trainer`.

    Args:
        trainer: The trainer.
        parts: Arguments of `HostedRun`: algorithms, callbacks and loggers.
    """

    def __init__(self, trainer: Any, parts: dict[str, Any]) -> None:
        self._trainer, self._parts = trainer, parts
        self._checkpoint: Path | None = None
        self._is_resumed = False  # a state of the run was loaded for this `train`
        self._compute_loss: Callable[..., Any] | None = trainer.compute_loss_func
        if self._compute_loss is not None:
            trainer.compute_loss_func = self._compute_split_loss
        _check(trainer.args, trainer)
        self.start(trainer.model, trainer.optimizer)

    def start(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Begin a new run, which changes the model.

        Args:
            model: The model.
            optimizer: Its optimizer, if there is one already.
        """
        trainer, args = self._trainer, self._trainer.args
        # Each model of a `model_init` needs algorithms without the state of the last run.
        parts, split = dict(self._parts), dict[str, Any]()
        if trainer.model_init is not None:
            parts["algorithms"] = copy.deepcopy(parts["algorithms"])
        if self._compute_loss is not None:
            split = {"forward": self._forward, "loss": _loss_of(self._compute_loss, self)}
        self.run = run = HostedRun(
            model,
            **parts,
            **split,
            max_duration=f"{args.max_steps}ba" if args.max_steps > 0 else f"{math.ceil(args.num_train_epochs)}ep",
            optimizers=optimizer,
            seed=args.seed,
            hooks=_HOOKS,
            **_settings_of(trainer),
        )
        if _is_causal(model) and not hasattr(run.state.model, "shift_labels"):
            run.state.model.shift_labels = True  # type: ignore[assignment]  # what algorithms read
        _check_unused_parameters(args, run)
        run.init()
        self._is_taken = self._is_fitting = self._is_evaluating = False
        self._before = (0, 0)  # epochs and batches of the run that transformers does not count in this `train`
        self._gives_random_back = False
        self._clear()

    def _clear(self) -> None:
        """Forget the batches of the last step."""
        self._steps: list[Callable[[Any], Any]] = []  # run `training_step` again
        self._is_in_step = False  # batches were drawn, and the optimizer has not stepped
        self._is_in_pass = False
        self._has_split = True  # `compute_loss_func` was called in this `compute_loss`
        self._has_computed = False  # `compute_loss` of the mixin was called in this `training_step`
        self.count: Any = None  # what transformers divides the loss of this pass by
        self.outputs: Any = None  # the outputs of the last forward pass

    # ---- what the methods of the trainer call ----

    @contextmanager
    def training(self, checkpoint: Any) -> Iterator[None]:
        """Train in the body; after an exception the model has the weights of training."""
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self._trainer.args.output_dir)  # type: ignore[no-untyped-call]
        self._checkpoint, self._is_resumed = Path(checkpoint) if checkpoint else None, False
        try:
            yield
        except BaseException as error:
            self.run.describe_failure(error)
            self.run.abort()
            raise
        finally:
            self._is_fitting, self._is_evaluating, self._checkpoint = False, False, None
            self._clear()

    def take_optimizer(self) -> None:
        """Announce BEFORE_LOAD; when resuming, first load the state of the run, unless the model will be sharded."""
        trainer, run = self._trainer, self.run
        if self._checkpoint is not None and not trainer.is_fsdp_enabled:
            self._load(self._checkpoint)
        if self._is_taken:
            return
        (optimizer,) = run.take_optimizers(trainer.optimizer)
        self._is_taken, trainer.optimizer = True, optimizer
        if needs_closure(optimizer):  # transformers steps without
            optimizer.register_step_pre_hook(self._with_closure)

    def load_sharded(self) -> None:
        """Load the state of the run after the weights of a sharded model: its averages are sharded alike."""
        if self._checkpoint is not None and self._trainer.is_fsdp_enabled:
            self._load(self._checkpoint)

    def _load(self, checkpoint: Path) -> None:
        files = [checkpoint / _name(self._trainer.args.process_index), checkpoint / _FILE]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            warnings.warn(
                f"{checkpoint} has no {_FILE}, so the algorithms start without their saved state. Save checkpoints "
                f"with the same class, without `save_only_model`.",
                stacklevel=2,
            )
            return
        saved = torch.load(file, map_location="cpu", weights_only=True)
        self._before = saved.pop("before")
        self.run.load_state_dict(saved)
        self._is_resumed = True

    def batches(self, iterator: Iterable[Any]) -> Any:
        """Announce AFTER_DATALOADER for each batch that is drawn."""
        return map(self._draw, iterator) if self.run.in_epoch else iterator

    def _draw(self, batch: Any) -> Any:
        self._is_in_step = True
        return self.run.after_dataloader(batch)

    def give_random_back(self) -> None:
        """In the first step, give the generators to transformers, which restores its own after it has drawn."""
        if self._gives_random_back and self._is_in_step:
            self._gives_random_back = False
            self.run.pause()

    def training_step(self, step: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce AFTER_BACKWARD."""
        run = self.run
        if not run.in_epoch:  # called by the user
            return step(inputs, *args, **kwargs)
        if run.replays and run.replay_index is None:
            self._steps.append(lambda batch: self.training_step(step, batch, *args, **kwargs))
        self._is_in_pass = True
        self._has_computed = False
        try:
            loss = step(inputs, *args, **kwargs)
        finally:
            self._is_in_pass = False
        if not self._has_computed:
            raise self._overridden("compute_loss")
        run.after_backward()
        return loss

    def compute_loss(
        self, compute: Callable[..., Any], inputs: Any, return_outputs: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Announce the events from BEFORE_FORWARD to BEFORE_BACKWARD."""
        if not self._is_in_pass:
            return compute(inputs, return_outputs, *args, **kwargs)
        run, is_split = self.run, self._compute_loss is not None
        batch = run.before_forward(inputs)
        self._has_split, self._has_computed = False, True
        needs_outputs = return_outputs or (self._needs_outputs and not is_split)
        result = compute(copy.copy(batch), needs_outputs, *args, **kwargs)  # transformers takes the labels out
        loss, outputs = result if needs_outputs else (result, None)
        if is_split and not self._has_split:
            raise RuntimeError(
                f"`compute_loss` of {type(self._trainer).__name__} must call `compute_loss_func`, which was given. "
                f"Leave out `compute_loss_func` and the algorithms that need it."
            )
        if not is_split:
            run.after_forward(_logits_of(outputs))
            loss = run.after_loss(loss)
        elif _is_mean(self._trainer) and not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
            loss = loss / self._trainer.current_gradient_accumulation_steps  # transformers 5.0 does not
        return (loss, outputs) if return_outputs else loss

    def _compute_split_loss(self, outputs: Any, labels: Any, **kwargs: Any) -> Any:
        """Announce the events from AFTER_FORWARD to BEFORE_BACKWARD, around the user's loss function."""
        function, run = self._compute_loss, self.run
        assert function is not None, "it replaces that function"
        if not self._is_in_pass:
            return function(outputs, labels, **kwargs)
        self._has_split = True
        self.outputs, self.count = outputs, kwargs.get("num_items_in_batch")
        try:
            outputs = run.after_forward(_logits_of(outputs))
            batch, model = run.before_loss(), run.state.model
            # Called through the model, since an algorithm may have replaced it there.
            return total_loss(run.after_loss(model.loss(outputs, batch)))  # type: ignore[operator]
        finally:
            self.outputs = self.count = None

    def _forward(self, module: Any, batch: Mapping[str, Any]) -> Any:
        """Compute the outputs without a loss, for algorithms that run the model."""
        self.outputs = module(**{name: value for name, value in batch.items() if name != _LABELS})
        return _logits_of(self.outputs)

    def _with_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the step of an optimizer a closure, which repeats the passes of the step."""
        if not self._steps:
            # torch.distributed.checkpoint creates the states of optimizers by a step without gradients, at a rate of 0.
            return (optimizer, lambda *args, **kwargs: torch.zeros(())), {}
        return (optimizer, self.run.closure(self._repeat_pass, then=self._after_repeat)), {}

    def _repeat_pass(self, batch: Any) -> None:
        index, trainer = self.run.replay_index, self._trainer
        assert index is not None, "it is called for a replay"
        is_last = index == len(self._steps) - 1
        with nullcontext() if is_last else trainer.accelerator.no_sync(trainer.model_wrapped):
            self._steps[index](batch)

    def _after_repeat(self) -> None:
        trainer = self._trainer
        if trainer.args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), trainer.args.max_grad_norm)
        self.run.after_gradients()

    @contextmanager
    def evaluation(self, dataloader: Any, label: str) -> Iterator[None]:
        """Evaluate in the body."""
        if self._is_evaluating:
            yield
            return
        self.run.begin_evaluation(dataloader, label)
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False
            self.run.end_evaluation()

    @contextmanager
    def saving(self, folder: str | None) -> Iterator[None]:
        """Save the model in the body, and the state of the run if there is a folder for it."""
        with self.run.saving():
            yield
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)  # not by each rank
                saved = {**self.run.state_dict(), "before": self._before}
                torch.save(saved, Path(folder) / _name(self._trainer.args.process_index))

    def _overridden(self, method: str) -> RuntimeError:
        kind = type(self._trainer).__name__
        return RuntimeError(
            f"`{method}` of {kind} hides that of `ComposerMixin`, which runs the algorithms. Put the mixin before the "
            f"class that has it: `class {kind}(ComposerMixin, MyTrainer)`. Or call `super().{method}`."
        )

    # ---- what transformers calls ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce AFTER_LOAD, FIT_START and, when resuming, the ends of epochs that are missing."""
        run = self.run
        now = run.state.timestamp
        if self._trainer.is_fsdp_enabled:  # the model was moved when it was sharded
            run.state.device = get_device("gpu" if args.device.type == "cuda" else args.device.type)
        run.reconfigure(**_settings_of(self._trainer))  # the user, or a search, may have changed the arguments
        if not self._is_resumed:  # transformers starts an epoch, so one that was interrupted is over
            self._before = now.epoch.value + (now.batch_in_epoch.value > 0), now.batch.value - state.global_step
        epochs, batches = self._before
        if args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs):
            run.state.max_duration = f"{batches + state.max_steps}ba"
        else:
            run.state.max_duration = f"{epochs + int(args.num_train_epochs)}ep"
        run.begin_fit(kwargs["train_dataloader"])
        self._is_fitting = True
        run.catch_up(epochs + int(state.epoch or 0))
        self._gives_random_back = self._checkpoint is not None
        dispatch = run.engine.dispatch
        self._needs_outputs = bool(dispatch.after_forward or dispatch.after_loss or dispatch.before_backward)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce EPOCH_START."""
        self.run.begin_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce AFTER_TRAIN_BATCH; transformers has clipped the gradients."""
        if not self._has_computed:
            raise self._overridden("training_step")
        self.run.after_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce BATCH_END."""
        self._is_in_step = False
        self._steps.clear()
        self.run.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce EPOCH_END."""
        run = self.run
        now, length = run.state.timestamp.batch_in_epoch, run.state.dataloader_len
        is_whole = not control.should_training_stop if length is None else now >= length
        if is_whole and not self._is_in_step:  # not where `max_steps` ends the run
            run.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce FIT_END."""
        self.finish()

    def finish(self) -> None:
        """Announce FIT_END, unless it is done; a callback may have stopped training within a step."""
        if self._is_fitting:
            self._is_fitting = False
            (self.run.abort if self._is_in_step else self.run.end_fit)()


# ---- settings, and what is refused ----


def _settings_of(trainer: Any) -> dict[str, Any]:
    """Return arguments of `HostedRun` that may change between two calls of `train`."""
    args = trainer.args
    return {
        "accumulate": args.gradient_accumulation_steps,
        "precision": Precision.AMP_BF16 if args.bf16 else Precision.AMP_FP16 if args.fp16 else Precision.FP32,
        "unavailable": _unavailable(trainer),
    }


def _unavailable(trainer: Any) -> dict[Event | str, str]:
    args, features = trainer.args, dict(_FEATURES)
    if trainer.compute_loss_func is None:
        features |= dict.fromkeys((Event.AFTER_FORWARD, Event.BEFORE_LOSS), _SPLIT)
    if args.max_grad_norm:
        features[CLIPS_GRADIENTS] = (
            f"`max_grad_norm`, which is {args.max_grad_norm}, clips as well, before the algorithm. Pass "
            f"`TrainingArguments(max_grad_norm=0)`, or leave the algorithm out."
        )
    if args.label_smoothing_factor:
        features[SMOOTHS_TARGETS] = "`label_smoothing_factor` smooths as well. Remove one of the two."
    if args.fp16:
        features[WRAPS_OPTIMIZER] = "The scaler of fp16 steps without a closure. Use `TrainingArguments(bf16=True)`."
        features[CLIPS_GRADIENTS] = "Gradients of fp16 are scaled. Use `TrainingArguments(bf16=True)`."
    if args.gradient_accumulation_steps > 1 and not _is_mean(trainer):
        sums = (
            "With `gradient_accumulation_steps` the losses of a step are added up, so that a term would be added once "
            "per batch. Let the loss be a mean, and set `loss_is_scaled_for_ga = False` in your class."
        )
        features |= dict.fromkeys((ADDS_LOSS, WEIGHS_LOSS), sums)
    return features


def _is_mean(trainer: Any) -> bool:
    """Return True if the class says that its losses are means, which are divided by the batches per step."""
    return getattr(trainer, "loss_is_scaled_for_ga", None) is False


def _check(args: Any, trainer: Any) -> None:
    """Raise ValueError if transformers would change parameters itself, or repeat or interrupt steps."""
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        raise ValueError(
            "The model must not be sharded by FSDP1, which flattens parameters, so that algorithms do not find them. "
            "Pass `TrainingArguments(fsdp_config={'version': 2})`."
        )
    if kind in _SHARDED:
        raise ValueError(
            f"The model must be on a single device, in `DistributedDataParallel` or sharded by FSDP2, but {kind} "
            f"changes parameters itself. Use FSDP2 or the `Trainer` of composer."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "The model must not be sharded when it is loaded, since algorithms that change layers come later. Leave "
            "`distributed_config` or `tp_plan` out of `from_pretrained`, and use FSDP2: `TrainingArguments(fsdp=True, "
            "fsdp_config={'version': 2})`."
        )
    if args.n_gpu > 1 or trainer.is_model_parallel:
        raise ValueError(
            "Each process must train on one device, got several. Start one process per device with `torchrun`, or "
            "set `CUDA_VISIBLE_DEVICES`."
        )
    for name, advice in (
        ("auto_find_batch_size", "It begins training again in the middle. Set `per_device_train_batch_size`."),
        ("enable_jit_checkpoint", "It saves within a step. Set `save_strategy` and `save_steps`."),
    ):
        if getattr(args, name, False):
            raise ValueError(f"`{name}` must be False, got True. {advice}")


def _check_unused_parameters(args: Any, run: HostedRun) -> None:
    if args.world_size > 1 and args.ddp_find_unused_parameters is False and run.find_unused_parameters:
        raise ValueError(
            "`ddp_find_unused_parameters` must not be False, since an algorithm stops training some parameters. Leave "
            "it out, or pass `TrainingArguments(ddp_find_unused_parameters=True)`."
        )


# ---- losses ----


def _is_causal(model: Any) -> bool:
    """Return True if the labels of each token are those of the next."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
    return any(kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for kind in type(base).__mro__)


def _logits_of(outputs: Any) -> Any:
    """Return the logits of the outputs of a model of transformers; outputs of other models as they are."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def _with_logits(outputs: Any, logits: Any) -> Any:
    """Return outputs with other logits."""
    if _logits_of(outputs) is logits:
        return outputs
    if not isinstance(outputs, Mapping) or "logits" not in outputs or not isinstance(logits, torch.Tensor):
        return logits
    outputs = copy.copy(outputs)
    outputs["logits"] = logits
    return outputs


def _loss_of(function: Callable[..., Any], hooks: _Hooks) -> Callable[..., Any]:
    """Return the `loss(outputs, batch)` of a run, with an argument `reduction` if the function of the user has one."""

    def loss(outputs: Any, batch: Mapping[str, Any]) -> Any:
        outputs = _with_logits(hooks.outputs, outputs)
        return function(outputs, batch.get(_LABELS), num_items_in_batch=hooks.count)

    def loss_with_reduction(outputs: Any, batch: Mapping[str, Any], reduction: str = "mean") -> Any:
        if reduction == "mean":
            return loss(outputs, batch)
        return function(_with_logits(hooks.outputs, outputs), batch.get(_LABELS), reduction=reduction)

    return loss_with_reduction if "reduction" in inspect.signature(function).parameters else loss


def _name(rank: int) -> str:
    return _FILE if rank == 0 else f"composer-{rank}.pt"
