"""`ComposerMixin`: our algorithms inside the `Trainer` of transformers."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from composer.core import (
    ADDS_LOSS,
    CLIPS_GRADIENTS,
    REPLACES_OPTIMIZER,
    SCALES_SCHEDULE,
    SMOOTHS_TARGETS,
    WEIGHS_LOSS,
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
from composer.loop.hosted_run import algorithms_in
from composer.loop.skin import UNAVAILABLE, conflicts, distribution_problems, hooks_by_event, raise_all, uncounted
from composer.models.base import total_loss
from composer.models.huggingface._evaluation import resolve_shift_labels
from composer.utils import get_device
from composer.utils.misc import needs_closure

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the user's class has one, which may be a subclass

_LABELS = "labels"  # the key under which transformers finds the targets of `compute_loss_func`
_FILE = "composer.pt"  # in a checkpoint, the file of rank 0; see `_name` for other ranks
_OF_EVALUATION = (
    *(Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END),
    *(Event.PREDICT_BATCH_START, Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD, Event.PREDICT_BATCH_END),
)
_FEATURES: dict[Event | str, str] = {
    **UNAVAILABLE,
    REPLACES_OPTIMIZER: "Create that optimizer yourself and pass it as `optimizers=(optimizer, None)`.",
    SCALES_SCHEDULE: "Set `num_train_epochs` or `max_steps` in `TrainingArguments`.",
    **dict.fromkeys(_OF_EVALUATION, "`prediction_step` runs the model itself. Leave the algorithm out."),
}
_SPLIT = (
    "Without `compute_loss_func` the model computes outputs and loss in one. Pass "
    "`compute_loss_func=lambda outputs, labels, num_items_in_batch=None: ...`."
)
_HOOKS = hooks_by_event(
    INIT="__init__",
    BEFORE_LOAD="create_optimizer",
    AFTER_LOAD="on_train_begin",
    ITERATION_START="on_epoch_begin",
    BEFORE_DATALOADER="get_batch_samples",
    BEFORE_TRAIN_BATCH="compute_loss",
    AFTER_FORWARD="compute_loss_func",
    AFTER_LOSS="compute_loss",
    AFTER_BACKWARD="training_step",
    AFTER_TRAIN_BATCH="on_pre_optimizer_step",
    BATCH_END="on_step_end",
    EPOCH_END="on_epoch_end",
    FIT_END="on_train_end",
    EVAL_BEFORE_ALL="evaluation_loop",
    EVAL_BATCH_START="",
    EVAL_END="evaluation_loop",
    PREDICT_START="",
)


class ComposerMixin(_Trainer):  # type: ignore[misc]  # mypy skips transformers, see pyproject.toml
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

    optimizer: Any  # an attribute of transformers' Trainer

    def __init__(
        self,
        *args: Any,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        composer_callbacks: Callback | Sequence[Callback] = (),
        composer_loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        **kwargs: Any,
    ) -> None:
        self._composer: Any = None  # the constructor of the other class may create a model
        super().__init__(*args, **kwargs)
        parts = {"algorithms": algorithms_in(algorithms), "callbacks": composer_callbacks, "loggers": composer_loggers}
        self._composer = _Hooks(self, parts)
        # First, so that callbacks of the user find averages in the model when training ends.
        self.callback_handler.callbacks.insert(0, self._composer)

    @property
    def composer_run(self) -> HostedRun:
        """The run, with `state` and `engine`."""
        run: HostedRun = self._composer.run
        return run

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
        """Train with the algorithms; after an exception the model has the weights of training."""
        hooks, folder = self._composer, resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        hooks.checkpoint, hooks.is_resumed = Path(folder) if folder else None, False
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self.composer_run.describe_failure(error)
            self.composer_run.abort()
            raise
        finally:
            hooks.is_fitting, hooks.checkpoint = False, None
            hooks.clear()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, if there is none, and let algorithms wrap it."""
        super().create_optimizer(*args, **kwargs)
        hooks = self._composer
        if not self.is_fsdp_enabled:
            hooks.load()
        if not hooks.is_taken:
            (self.optimizer,), hooks.is_taken = self.composer_run.take_optimizers(self.optimizer), True
            if needs_closure(self.optimizer):  # transformers steps without
                self.optimizer.register_step_pre_hook(hooks.with_closure)
        return self.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self.is_fsdp_enabled:  # the weights are loaded by now: averages are sharded like them
            self._composer.load()
        super()._load_optimizer_and_scheduler(checkpoint)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect the batches of a step, as algorithms have changed them, and count what the loss is divided by."""
        run, hooks = self.composer_run, self._composer
        if not run.in_epoch:
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)

        def draw(batch: Any) -> Any:
            hooks.is_in_step = True
            return run.after_dataloader(batch)

        result = super().get_batch_samples(map(draw, epoch_iterator), *args, **kwargs)
        if hooks.gives_random_back and hooks.is_in_step:
            # After the first step of a resumed run has drawn, transformers restores its own generators.
            hooks.gives_random_back = False
            run.pause()
        return result

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of a batch."""
        run, hooks = self.composer_run, self._composer
        if not run.in_epoch:  # called by the user
            return super().training_step(model, inputs, *args, **kwargs)
        if run.replays and run.replay_index is None:
            hooks.steps.append(lambda batch: ComposerMixin.training_step(self, model, batch, *args, **kwargs))
        hooks.is_in_pass, hooks.has_computed = True, False
        try:
            loss = super().training_step(model, inputs, *args, **kwargs)
        finally:
            hooks.is_in_pass = False
        if not hooks.has_computed:
            raise hooks.overridden("compute_loss")
        run.after_backward()
        return loss

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss: in training with all algorithms, elsewhere without."""
        run, hooks = self.composer_run, self._composer
        if not hooks.is_in_pass:
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        is_split = hooks.compute_loss is not None
        batch = copy.copy(run.before_forward(inputs))  # transformers takes the labels out
        hooks.has_split, hooks.has_computed = False, True
        needs_outputs = return_outputs or (hooks.needs_outputs and not is_split)
        result: Any = super().compute_loss(model, batch, needs_outputs, *args, **kwargs)
        loss, outputs = result if needs_outputs else (result, None)
        if not is_split:
            run.after_forward(_logits_of(outputs))
            loss = run.after_loss(loss)
        elif not hooks.has_split:
            raise RuntimeError(
                f"`compute_loss` of {type(self).__name__} must call `compute_loss_func`, which was given. Leave out "
                f"`compute_loss_func` and the algorithms that need it."
            )
        elif _is_mean(self) and not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
            loss = loss / self.current_gradient_accumulation_steps  # transformers 5.0 does not
        return (loss, outputs) if return_outputs else loss

    # ---- evaluation and saving ----

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the weights that algorithms want to have evaluated, such as averages."""
        self.composer_run.begin_evaluation(dataloader, kwargs.get("metric_key_prefix", "eval"))
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.composer_run.end_evaluation()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights that algorithms want to have saved, such as averages; in a checkpoint, also the run."""
        run = self.composer_run
        with run.saving():
            super().save_model(output_dir, _internal_call)
            if _internal_call and output_dir is not None and not self.args.save_only_model:
                Path(output_dir).mkdir(parents=True, exist_ok=True)  # transformers creates it on one rank only
                saved = {**run.state_dict(), "before": self._composer.before}
                torch.save(saved, Path(output_dir) / _name(self.args.process_index))

    def _load_best_model(self) -> None:
        self._composer.finish()  # before, since FIT_END puts the last averages into the model
        super()._load_best_model()


class ComposerTrainer(ComposerMixin, transformers.Trainer):  # type: ignore[misc]
    """The `Trainer` of transformers with algorithms; see `ComposerMixin`."""


class _Hooks(TrainerCallback):  # type: ignore[misc]
    """Holds the run of a `Trainer`, and announces as a callback the events that the mixin does not.

    Args:
        trainer: The trainer.
        parts: Arguments of `HostedRun`: algorithms, callbacks and loggers.
    """

    def __init__(self, trainer: Any, parts: dict[str, Any]) -> None:
        self._trainer, self._parts = trainer, parts
        self.checkpoint: Path | None = None  # the checkpoint that `train` resumes from
        self.is_resumed = False  # a state of the run was loaded for this `train`
        self.compute_loss: Callable[..., Any] | None = trainer.compute_loss_func
        raise_all(_problems(trainer, parts["algorithms"]))
        if self.compute_loss is not None:
            trainer.compute_loss_func = self._compute_split_loss
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
        if self.compute_loss is not None:
            split = {"forward": self._forward, "loss": _loss_of(self.compute_loss, self)}
        self.run = run = HostedRun(
            model,
            **parts,
            **split,
            max_duration=f"{args.max_steps}ba" if args.max_steps > 0 else f"{math.ceil(args.num_train_epochs)}ep",
            optimizers=optimizer,
            seed=args.seed,
            hooks=_HOOKS,
            **_settings_of(args),
        )
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # that of an adapter
        if resolve_shift_labels(base, None) and not hasattr(run.state.model, "shift_labels"):
            run.state.model.shift_labels = True  # type: ignore[assignment]  # what algorithms read
        run.init()
        self.is_taken = False  # algorithms have wrapped the optimizer
        self.is_fitting = self.gives_random_back = False
        self.before = (0, 0)  # epochs and batches of the run that transformers does not count in this `train`
        self.clear()

    def clear(self) -> None:
        """Forget the batches of the last step."""
        self.steps: list[Callable[[Any], Any]] = []  # run `training_step` again
        self.is_in_step = False  # batches were drawn, and the optimizer has not stepped
        self.is_in_pass = False
        self.has_split = False  # `compute_loss_func` was called in this `compute_loss`
        self.has_computed = False  # `compute_loss` of the mixin was called in this `training_step`
        self.count: Any = None  # what transformers divides the loss of this pass by
        self.outputs: Any = None  # the outputs of the last forward pass

    def load(self) -> None:
        """Load the state of the run, if `train` resumes."""
        if self.checkpoint is None:
            return
        files = [self.checkpoint / _name(self._trainer.args.process_index), self.checkpoint / _FILE]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            warnings.warn(
                f"{self.checkpoint} has no {_FILE}, so the algorithms start without their saved state. Save "
                f"checkpoints with the same class, without `save_only_model`.",
                stacklevel=2,
            )
            return
        saved = torch.load(file, map_location="cpu", weights_only=True)
        self.before, self.is_resumed = saved.pop("before"), True
        self.run.load_state_dict(saved)

    def _compute_split_loss(self, outputs: Any, labels: Any, **kwargs: Any) -> Any:
        """Announce the events from AFTER_FORWARD to BEFORE_BACKWARD, around the user's loss function."""
        function, run = self.compute_loss, self.run
        assert function is not None, "it replaces that function"
        if not self.is_in_pass:
            return function(outputs, labels, **kwargs)
        self.has_split = True
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

    def with_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the step of an optimizer a closure, which repeats the passes of the step."""
        if not self.steps:
            # torch.distributed.checkpoint creates the states of optimizers by a step without gradients, at a rate of 0.
            return (optimizer, lambda *args, **kwargs: torch.zeros(())), {}
        return (optimizer, self.run.closure(self._repeat_pass, then=self._after_repeat)), {}

    def _repeat_pass(self, batch: Any) -> None:
        index, trainer = self.run.replay_index, self._trainer
        assert index is not None, "it is called for a replay"
        is_last = index == len(self.steps) - 1
        with nullcontext() if is_last else trainer.accelerator.no_sync(trainer.model_wrapped):
            self.steps[index](batch)

    def _after_repeat(self) -> None:
        trainer = self._trainer
        if trainer.args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), trainer.args.max_grad_norm)
        self.run.after_gradients()

    def overridden(self, method: str) -> RuntimeError:
        kind = type(self._trainer).__name__
        return RuntimeError(
            f"`{method}` of {kind} hides that of `ComposerMixin`, which runs the algorithms. Put the mixin before the "
            f"class that has it: `class {kind}(ComposerMixin, MyTrainer)`. Or call `super().{method}`."
        )

    # ---- what transformers calls ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce AFTER_LOAD, FIT_START and, when resuming, the ends of epochs that are missing."""
        run = self.run
        if self._trainer.is_fsdp_enabled:  # the model was moved when it was sharded
            run.state.device = get_device("gpu" if args.device.type == "cuda" else args.device.type)
        # The user, or a search, may have changed the arguments.
        raise_all(_problems(self._trainer, self._parts["algorithms"]))
        run.reconfigure(**_settings_of(args))
        if not self.is_resumed:
            self.before = uncounted(run.state.timestamp, 0, state.global_step)
        epochs, batches = self.before
        if args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs):
            run.state.max_duration = f"{batches + state.max_steps}ba"
        else:
            run.state.max_duration = f"{epochs + int(args.num_train_epochs)}ep"
        run.begin_fit(kwargs["train_dataloader"])
        self.is_fitting = True
        run.catch_up(epochs + int(state.epoch or 0))
        self.gives_random_back = self.checkpoint is not None
        dispatch = run.engine.dispatch
        self.needs_outputs = bool(dispatch.after_forward or dispatch.after_loss or dispatch.before_backward)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce EPOCH_START."""
        self.run.begin_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce AFTER_TRAIN_BATCH; transformers has clipped the gradients."""
        if not self.has_computed:
            raise self.overridden("training_step")
        self.run.after_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce BATCH_END."""
        self.is_in_step = False
        self.steps.clear()
        self.run.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce EPOCH_END."""
        run = self.run
        now, length = run.state.timestamp.batch_in_epoch, run.state.dataloader_len
        is_whole = not control.should_training_stop if length is None else now >= length
        if is_whole and not self.is_in_step:  # `max_steps` may end the run within an epoch
            run.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Announce FIT_END."""
        self.finish()

    def finish(self) -> None:
        """Announce FIT_END, unless it is done; a callback may have stopped training within a step."""
        if self.is_fitting:
            self.is_fitting = False
            (self.run.abort if self.is_in_step else self.run.end_fit)()


# ---- settings, and what is refused ----


def _settings_of(args: Any) -> dict[str, Any]:
    """Return arguments of `HostedRun` that may change between two calls of `train`."""
    precision = Precision.AMP_BF16 if args.bf16 else Precision.AMP_FP16 if args.fp16 else Precision.FP32
    return {"accumulate": args.gradient_accumulation_steps, "precision": precision}


def _is_mean(trainer: Any) -> bool:
    """Return True if the class says that its losses are means, which are divided by the batches per step."""
    return getattr(trainer, "loss_is_scaled_for_ga", None) is False


def _problems(trainer: Any, algorithms: Sequence[Algorithm]) -> Iterator[str | ConflictError]:
    """Yield a message for each setting that hides steps or parameters from the run, or conflicts with algorithms."""
    args, features = trainer.args, dict(_FEATURES)
    yield from distribution_problems(trainer.accelerator)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield (
            "The model must not be sharded when it is loaded, since algorithms that change layers come later. Leave "
            "`distributed_config` or `tp_plan` out of `from_pretrained`, and use FSDP2: `TrainingArguments(fsdp=True, "
            "fsdp_config={'version': 2})`."
        )
    if args.n_gpu > 1 or trainer.is_model_parallel:
        yield (
            "Each process must train on one device, got several. Start one process per device with `torchrun`, or set "
            "`CUDA_VISIBLE_DEVICES`."
        )
    for name, advice in (
        ("auto_find_batch_size", "It begins training again in the middle. Set `per_device_train_batch_size`."),
        ("enable_jit_checkpoint", "It saves within a step. Set `save_strategy` and `save_steps`."),
    ):
        if getattr(args, name, False):
            yield f"`{name}` must be False, got True. {advice}"
    leaves_unused = any(each.find_unused_parameters for each in algorithms)
    if args.world_size > 1 and args.ddp_find_unused_parameters is False and leaves_unused:
        yield (
            "`ddp_find_unused_parameters` must not be False, since an algorithm stops training some parameters. Leave "
            "it out, or pass `TrainingArguments(ddp_find_unused_parameters=True)`."
        )

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
    yield from conflicts(algorithms, features)


# ---- losses ----


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
