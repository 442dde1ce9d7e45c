"""`ComposerMixin`: our algorithms inside the `Trainer` of transformers."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from composer.core import Algorithm, Callback, Event, Plan, Precision, effects
from composer.loggers import LoggerDestination
from composer.loop import HostedRun, refusals, skin
from composer.models.base import total_loss
from composer.models.huggingface._evaluation import resolve_shift_labels
from composer.utils.iter_helpers import ensure_tuple
from composer.utils.misc import needs_closure

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the user's class has one, which may be a subclass

_LABELS = "labels"  # the key under which transformers finds the targets of `compute_loss_func`
_FILE = "composer.pt"  # in a checkpoint, the file of rank 0; see `_name` for other ranks
_UNAVAILABLE: dict[Event | str, str] = {
    **refusals.UNAVAILABLE,
    effects.REPLACES_OPTIMIZER: "Create that optimizer yourself and pass it as `optimizers=(optimizer, None)`.",
    effects.SCALES_SCHEDULE: "Set `num_train_epochs` or `max_steps` in `TrainingArguments`.",
    **{
        event: "`prediction_step` runs the model itself. Leave the algorithm out."
        for event in Event
        if event.name.startswith(("EVAL_", "PREDICT_")) and event.name.endswith(("BATCH_START", "FORWARD", "BATCH_END"))
    },
}
_HOOKS = skin.hooks_by_event(
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
)


class ComposerMixin(_Trainer):  # type: ignore[misc]  # mypy skips transformers, see pyproject.toml
    """Run algorithms inside the `Trainer` of transformers, or one that is built on it.

    List it before the other class, whose arguments stay the same::

        class MyTrainer(ComposerMixin, Seq2SeqTrainer):
            pass


        MyTrainer(model, args, train_dataset=data, algorithms=[EMA()])

    Algorithms that act on outputs or targets need a loss that is separate from the forward pass: pass
    `compute_loss_func=` of the `Trainer` of transformers, with a further argument `reduction` for algorithms that need
    the loss of each example. They find the logits in `state.outputs`, and inputs and targets in the batch by their
    usual names, such as "pixel_values" and "labels"; for others, pass `input_key` and `target_key` to the algorithm.

    A checkpoint contains the state of the run, in `composer.pt`, and the weights that algorithms want to have saved,
    such as averages, as does `save_model`. `train(resume_from_checkpoint=...)` continues from any step. Another call of
    `train` continues the run, unless there is a `model_init`. See `HostedRun` for what holds in all loops.

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
        parts = {"algorithms": ensure_tuple(algorithms), "callbacks": composer_callbacks, "loggers": composer_loggers}
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

    # ---- methods of transformers: training ----

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        if self._composer is not None:  # otherwise, the constructor starts the run
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
        run, hooks = self.composer_run, self._composer
        if not run.in_epoch:
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)
        # transformers counts what it divides the loss by after algorithms have changed the batches.
        result = super().get_batch_samples(map(run.after_dataloader, epoch_iterator), *args, **kwargs)
        if hooks.gives_random_back and run.in_step:
            # After the first step of a resumed run has drawn, transformers restores its own generators.
            hooks.gives_random_back = False
            run.pause()
        return result

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        run, hooks = self.composer_run, self._composer
        if not run.in_step:  # called by the user
            return super().training_step(model, inputs, *args, **kwargs)
        if run.replays and run.replay_index is None:
            hooks.passes.append(lambda batch: ComposerMixin.training_step(self, model, batch, *args, **kwargs))
        hooks.has_computed = False
        loss = super().training_step(model, inputs, *args, **kwargs)
        if hooks.has_computed:
            run.after_backward()
        return loss

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        run, hooks = self.composer_run, self._composer
        if hooks.has_computed is None:  # called by an evaluation or the user
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        is_split = hooks.compute_loss is not None
        batch = copy.copy(run.before_forward(inputs))  # transformers takes the labels out
        needs_outputs = return_outputs or (hooks.needs_outputs and not is_split)
        result: Any = super().compute_loss(model, batch, needs_outputs, *args, **kwargs)
        loss, outputs = result if needs_outputs else (result, None)
        if not is_split:
            run.after_forward(_logits_of(outputs))
            loss, hooks.has_computed = run.after_loss(loss), True
        elif _is_mean(self) and not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
            loss = loss / self.current_gradient_accumulation_steps  # transformers 5.0 does not
        return (loss, outputs) if return_outputs else loss

    # ---- methods of transformers: evaluation and saving ----

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

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.composer_run.saving():  # with FSDP2, the weights are saved after `save_model`
            super()._save_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        self._composer.on_train_end()  # before, since FIT_END puts the last averages into the model
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
        self._split: dict[str, Any] = {}
        if self.compute_loss is not None:
            self._split = {"forward": self._forward, "loss": self._loss_with(self.compute_loss)}
            trainer.compute_loss_func = self._compute_split_loss
        self.start(trainer.model, trainer.optimizer)

    def start(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Begin a new run, which changes the model, and its optimizer if there is one already."""
        args, parts = self._trainer.args, dict(self._parts)
        if self._trainer.model_init is not None:  # each model needs algorithms without the state of the last run
            parts["algorithms"] = copy.deepcopy(parts["algorithms"])
        self.run = run = HostedRun(
            model,
            **parts,
            **self._split,
            max_duration=skin.duration(args.max_steps, args.num_train_epochs),
            optimizers=optimizer,
            seed=args.seed,
            hooks=_HOOKS,
            **_settings_of(self._trainer, parts["algorithms"]),
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
        self.passes: list[Callable[[Any], Any]] = []  # run `training_step` again
        self.has_computed: bool | None = None  # the loss of this `training_step`, with the algorithms; None: in none
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

    # ---- the loss, apart from the forward pass ----

    def _forward(self, module: Any, batch: Mapping[str, Any]) -> Any:
        """Compute the outputs without a loss, for algorithms that run the model."""
        self.outputs = module(**{name: value for name, value in batch.items() if name != _LABELS})
        return _logits_of(self.outputs)

    def _loss_with(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `loss(outputs, batch)` of a run, with an argument `reduction` if the user's function has one."""

        def loss(logits: Any, batch: Mapping[str, Any], reduction: str = "mean") -> Any:
            outputs = self.outputs
            if _logits_of(outputs) is not logits:  # an algorithm has changed them
                if outputs is not _logits_of(outputs) and isinstance(logits, torch.Tensor):
                    outputs = copy.copy(outputs)
                    outputs["logits"] = logits
                else:
                    outputs = logits
            options = {"num_items_in_batch": self.count} if reduction == "mean" else {"reduction": reduction}
            return function(outputs, batch.get(_LABELS), **options)

        def mean_loss(logits: Any, batch: Mapping[str, Any]) -> Any:
            return loss(logits, batch)

        return loss if "reduction" in inspect.signature(function).parameters else mean_loss

    def _compute_split_loss(self, outputs: Any, labels: Any, **kwargs: Any) -> Any:
        """Announce the events from AFTER_FORWARD to BEFORE_BACKWARD, around the user's loss function."""
        run, model = self.run, self.run.state.model
        if self.has_computed is None:
            assert self.compute_loss is not None, "it replaces that function"
            return self.compute_loss(outputs, labels, **kwargs)
        self.outputs, self.count = outputs, kwargs.get("num_items_in_batch")
        logits = run.after_forward(_logits_of(outputs))
        batch = run.before_loss()
        # Called through the model, since an algorithm may have replaced it there.
        loss = total_loss(run.after_loss(model.loss(logits, batch)))  # type: ignore[operator]
        self.outputs, self.count, self.has_computed = None, None, True
        return loss

    # ---- steps that compute gradients several times ----

    def with_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the step of an optimizer a closure, which repeats the passes of the step."""
        if not self.passes:
            return skin.without_gradients(optimizer)
        return (optimizer, self.run.closure(self._repeat_pass, then=self._after_repeat)), {}

    def _repeat_pass(self, batch: Any) -> None:
        index, trainer = self.run.replay_index, self._trainer
        assert index is not None, "it is called for a replay"
        is_last = index == len(self.passes) - 1
        with nullcontext() if is_last else trainer.accelerator.no_sync(trainer.model_wrapped):
            self.passes[index](batch)

    def _after_repeat(self) -> None:
        trainer = self._trainer
        if trainer.args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), trainer.args.max_grad_norm)
        self.run.after_gradients()

    # ---- what transformers calls ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.run
        if self._trainer.is_fsdp_enabled:  # the model was moved when it was sharded
            skin.use_device(run, args.device)
        # The user, or a search, may have changed the arguments.
        run.reconfigure(**_settings_of(self._trainer, self._parts["algorithms"]))
        if not self.is_resumed:
            self.before = skin.uncounted(run.state.timestamp, 0, state.global_step)
        has_whole_epochs = args.max_steps <= 0 and args.num_train_epochs == int(args.num_train_epochs)
        steps = 0 if has_whole_epochs else state.max_steps
        run.state.max_duration = skin.duration(steps, args.num_train_epochs, self.before)
        run.begin_fit(kwargs["train_dataloader"])
        self.is_fitting = True
        run.catch_up(self.before[0] + int(state.epoch or 0))
        self.gives_random_back = self.checkpoint is not None
        dispatch = run.engine.dispatch
        self.needs_outputs = bool(dispatch.after_forward or dispatch.after_loss or dispatch.before_backward)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.run.begin_epoch()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:  # transformers has clipped the gradients
        if not self.has_computed:
            kind = type(self._trainer).__name__
            raise RuntimeError(
                f"The loss of {kind} was computed without the algorithms: its `training_step` or `compute_loss` hides "
                f"that of `ComposerMixin`, or does not call `compute_loss_func`, which was given. Put the mixin first, "
                f"`class {kind}(ComposerMixin, MyTrainer)`, call the method of `super()`, or leave the function out."
            )
        self.run.after_gradients()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clear()
        self.run.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_whole = skin.is_epoch_whole(self.run)
        if is_whole is None:
            is_whole = not control.should_training_stop
        if is_whole and not self.run.in_step:  # `max_steps` may end the run within an epoch
            self.run.end_epoch()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.is_fitting:
            self.is_fitting = False
            (self.run.abort if self.run.in_step else self.run.end_fit)()  # a callback may stop within a step


def _is_mean(trainer: Any) -> bool:
    """Return True if the class says that its losses are means, which are divided by the batches per step."""
    return getattr(trainer, "loss_is_scaled_for_ga", None) is False


def _logits_of(outputs: Any) -> Any:
    """Return the logits of the outputs of a model of transformers; outputs of other models as they are."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def _name(rank: int) -> str:
    return _FILE if rank == 0 else f"composer-{rank}.pt"


def _problems(trainer: Any, algorithms: Sequence[Any]) -> Iterator[str]:
    """Yield a message for each setting that hides steps or parameters from the run."""
    args = trainer.args
    yield from refusals.distribution_problems(trainer.accelerator)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield (
            "The model must not be sharded when it is loaded, since algorithms that change layers come later. Use "
            "FSDP2: `TrainingArguments(fsdp=True, fsdp_config={'version': 2})`."
        )
    if args.n_gpu > 1 or trainer.is_model_parallel:
        yield "Each process must train on one device, got several. Start one process per device with `torchrun`."
    if args.auto_find_batch_size:
        yield "`auto_find_batch_size` must be False, got True. Set `per_device_train_batch_size`."
    if getattr(args, "enable_jit_checkpoint", False):
        yield "`enable_jit_checkpoint` must be False, got True: it saves within a step. Set `save_steps`."
    leaves_unused = any(getattr(each, "find_unused_parameters", False) for each in algorithms)
    if args.world_size > 1 and args.ddp_find_unused_parameters is False and leaves_unused:
        yield "`ddp_find_unused_parameters` must not be False, since an algorithm stops training some parameters."


def _settings_of(trainer: Any, algorithms: Sequence[Any]) -> dict[str, Any]:
    """Return arguments of `HostedRun` that follow from a trainer: its settings, and what it does not support.

    They may change between two calls of `train`.
    """
    args, unavailable = trainer.args, dict(_UNAVAILABLE)
    if trainer.compute_loss_func is None:
        unavailable |= dict.fromkeys(
            (Event.AFTER_FORWARD, Event.BEFORE_LOSS),
            "Without `compute_loss_func` the model computes outputs and loss in one. Pass "
            "`compute_loss_func=lambda outputs, labels, num_items_in_batch=None: ...`.",
        )
    if args.max_grad_norm:
        unavailable[effects.CLIPS_GRADIENTS] = (
            f"`max_grad_norm`, which is {args.max_grad_norm}, clips as well, before the algorithm. Pass "
            f"`TrainingArguments(max_grad_norm=0)`, or leave the algorithm out."
        )
    if args.label_smoothing_factor:
        unavailable[effects.SMOOTHS_TARGETS] = "`label_smoothing_factor` smooths as well. Remove one of the two."
    if args.fp16:
        bf16 = "Use `TrainingArguments(bf16=True)`."
        unavailable[effects.WRAPS_OPTIMIZER] = f"The scaler of fp16 steps without a closure. {bf16}"
        unavailable[effects.CLIPS_GRADIENTS] = f"Gradients of fp16 are scaled. {bf16}"
    if args.gradient_accumulation_steps > 1 and not _is_mean(trainer):
        unavailable |= dict.fromkeys(
            (effects.ADDS_LOSS, effects.WEIGHS_LOSS),
            "With `gradient_accumulation_steps` the losses of a step are added up, so that a term would be added once "
            "per batch. Let the loss be a mean, and set `loss_is_scaled_for_ga = False` in your class.",
        )
    return {
        "accumulate": args.gradient_accumulation_steps,
        "precision": Precision.AMP_BF16 if args.bf16 else Precision.AMP_FP16 if args.fp16 else Precision.FP32,
        "unavailable": unavailable,
        "problems": _problems(trainer, algorithms),
    }
