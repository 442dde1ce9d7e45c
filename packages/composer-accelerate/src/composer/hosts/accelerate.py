"""`AcceleratedRun`: our algorithms in a training loop on Accelerate."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, save_fsdp_model

from composer.core import (
    CLIPS_GRADIENTS,
    SWAPS_WEIGHTS,
    WRAPS_OPTIMIZER,
    Algorithm,
    Callback,
    ConflictError,
    Plan,
    Precision,
)
from composer.core.time import TimeInput
from composer.loggers import LoggerDestination
from composer.loop import HostedRun
from composer.loop.hosted_run import algorithms_in
from composer.loop.position import set_epoch
from composer.loop.skin import (
    UNAVAILABLE,
    conflicts,
    distribution_problems,
    hooks_by_event,
    missing_loss,
    raise_all,
)
from composer.models.base import total_loss
from composer.utils import get_device
from composer.utils.misc import needs_closure

_PRECISIONS = {"no": Precision.FP32, "bf16": Precision.AMP_BF16, "fp16": Precision.AMP_FP16}
_HOOKS = hooks_by_event(
    INIT="run.prepare",
    AFTER_LOAD="run.epochs",
    ITERATION_START="the iteration over batches",
    BEFORE_TRAIN_BATCH="run.loss",
    AFTER_BACKWARD="optimizer.step",
    BATCH_END="the iteration over batches",
    FIT_END="run.epochs",
    EVAL_BEFORE_ALL="run.evaluation",
    EVAL_BATCH_START="run.eval_forward",
    EVAL_END="run.evaluation",
    PREDICT_START="",
)


class AcceleratedRun:
    """Runs algorithms in a training loop on Accelerate, of which only a few lines change.

    Such a loop is::

        run = AcceleratedRun(accelerator, net, [MixUp(), EMA()], loss=loss, max_duration="2ep")
        net, optimizer, loader, scheduler = run.prepare(net, optimizer, loader, scheduler)
        for batches in run.epochs():
            for batch in batches:
                with accelerator.accumulate(net):
                    accelerator.backward(run.loss(batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    With the same seed and the same batches the weights equal those of composer's own `Trainer`, bit for bit. The step
    of an optimizer announces the events after the backward pass. Optimizers that need several gradients per step
    (`SAM`) get them by repeating the step's passes on the prepared model, with gradients synchronized between ranks.

    Accelerate divides the loss of each batch by `gradient_accumulation_steps`, and DDP averages ranks, so that batches
    count the same in a step, however many samples or labels they have. `Trainer` and `HostedRun` weight them by these.

    `accelerator.save_state` saves the state of the run on every rank, and the weights that algorithms want saved, such
    as averages; `accelerator.load_state`, before `epochs`, restores both. Training then continues after the last batch
    that was trained on, without reading the earlier ones. Save between two steps.

    Args:
        accelerator: The accelerator: on one device, or with DDP or FSDP2.
        model: A `ComposerModel`, which has a loss; or any module, with `loss`.
        algorithms: The algorithms.
        max_duration: The length of the run: a time string, a `Time` or a number of epochs.
        forward: `forward(module, batch) -> outputs`. None: `module(inputs)`, the first part of the batch.
        loss: `loss(outputs, batch) -> loss`; with an argument `reduction` if an algorithm needs the loss per example.
        callbacks: Callbacks of composer.
        loggers: Loggers of composer.
        seed: The seed of the random numbers of training, which are kept apart from the global ones.

    Attributes:
        run: The `HostedRun`.
        accelerator: The accelerator.

    Raises:
        ConflictError: Accelerate or one of its features does not support an algorithm.
        TypeError: `accelerator` is not an `Accelerator`, or `model` is not a module.
        ValueError: There is no loss; or Accelerate shards the model with FSDP1, or uses DeepSpeed, Megatron-LM, XLA or
            fp8.

    Example:
        >>> accelerator, net = Accelerator(cpu=True), torch.nn.Linear(3, 2)
        >>> run = AcceleratedRun(
        ...     accelerator,
        ...     net,
        ...     loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        ...     max_duration="2ep",
        ... )
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> data = [(torch.zeros(3), 0), (torch.ones(3), 1)]
        >>> net, optimizer, loader = run.prepare(net, optimizer, torch.utils.data.DataLoader(data))
        >>> for batches in run.epochs():
        ...     for batch in batches:
        ...         accelerator.backward(run.loss(batch))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> run.run.state.timestamp.batch
        Time(4, TimeUnit.BATCH)
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        *,
        max_duration: TimeInput,
        forward: Callable[[Any, Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        seed: int = 0,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"`accelerator` must be an `accelerate.Accelerator`, got {type(accelerator).__name__}.")
        algorithms, features = algorithms_in(algorithms), dict(UNAVAILABLE)
        if accelerator.scaler is not None:
            features[WRAPS_OPTIMIZER] = (
                "The scaler of 'fp16' cannot repeat a step. Use `Accelerator(mixed_precision='bf16')`."
            )
        raise_all([*_problems(accelerator), *missing_loss(model, loss), *conflicts(algorithms, features)])
        self._is_sharded = accelerator.distributed_type is DistributedType.FSDP
        if accelerator.device_placement and not self._is_sharded and hasattr(model, "to"):
            model.to(accelerator.device)  # algorithms will create new layers on its device
        self._settings: dict[str, Any] = {
            "accumulate": accelerator.gradient_accumulation_steps,
            "precision": _PRECISIONS[accelerator.mixed_precision],
        }
        self.accelerator = accelerator
        self.run = HostedRun(
            model,
            algorithms,
            max_duration=max_duration,
            forward=forward,
            loss=loss,
            callbacks=callbacks,
            loggers=loggers,
            seed=seed,
            hooks=_HOOKS,
            **self._settings,
        )
        kinds = [type(each) for each in algorithms if CLIPS_GRADIENTS in each.placement.provides]
        self._clips = [kind.__name__ for kind in kinds]
        self._prepared: Any = None
        self._loader: Any = None
        self._optimizers: list[Any] = []  # Accelerate has prepared them
        self._own: Sequence[Any] = ()  # algorithms have added them
        self._passes = 0  # backward passes of the current step
        self._has_loss = False  # the backward pass is not announced yet
        self._has_stepped = False  # the step is not counted yet
        self._is_trained = False  # the last optimizer has stepped, too
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(accelerator, name)
            setattr(accelerator, name, functools.wraps(original)(functools.partial(self._clip, original, name)))
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    # ---- before training ----

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Let algorithms change the model and the optimizers, then prepare all objects with `Accelerator.prepare`.

        Args:
            *objects: The model of the constructor, optimizers, schedulers and data loaders. The first loader has the
                training data, unless `epochs` is given another. With FSDP2, pass the model with its optimizers.

        Returns:
            The prepared objects in the same order. Step these optimizers; the last one also steps those of algorithms.

        Raises:
            RuntimeError: `prepare` was called before.
            ValueError: The model or an optimizer is missing, an optimizer is prepared already, or an algorithm
                replaces an optimizer that a scheduler drives.
        """
        run, accelerator = self.run, self.accelerator
        if self._prepared is not None:
            raise RuntimeError(
                "`prepare` must be called once for a run. Use `accelerator.prepare` for other loaders, such as those "
                "of an evaluation."
            )
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        problems: list[str | ConflictError] = []
        if not optimizers or all(each is not run.model for each in objects):
            problems.append(
                "`prepare` must be given the model of the run and its optimizers. Write `net, optimizer, loader = "
                "run.prepare(net, optimizer, loader)`."
            )
        if any(isinstance(each, AcceleratedOptimizer) for each in optimizers):
            problems.append(
                "`prepare` must be given plain optimizers, got one that Accelerate has prepared already. Call "
                "`run.prepare` instead of `accelerator.prepare`, and once for each model."
            )
        raise_all(problems)
        schedulers = [each for each in objects if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]
        run.state.optimizers, run.state.schedulers = optimizers, schedulers
        run.init()
        replaced = {id(each) for each in optimizers} - {id(each) for each in run.state.optimizers}
        raise_all(
            f"{type(each).__name__} drives {type(each.optimizer).__name__}, which an algorithm has replaced. Create "
            f"the scheduler with the optimizer that `prepare` returns."
            for each in schedulers
            if id(each.optimizer) in replaced
        )
        changed = run.take_optimizers()
        if run.find_unused_parameters:
            handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
            handler.find_unused_parameters = True
            accelerator.ddp_handler = handler
        # Accelerate saves the schedulers itself.
        run.state.schedulers = []
        given, own = iter(changed), changed[len(optimizers) :]
        everything = accelerator.prepare(
            *(next(given) if isinstance(each, torch.optim.Optimizer) else each for each in objects), *own
        )
        prepared: tuple[Any, ...] = everything[: len(objects)]
        self._own = everything[len(objects) :]
        self._optimizers = [each for each in everything if isinstance(each, AcceleratedOptimizer)]
        pairs = list(zip(objects, prepared, strict=True))
        self._prepared = next(result for each, result in pairs if each is run.model)
        self._loader = next((result for each, result in pairs if isinstance(each, torch.utils.data.DataLoader)), None)
        if self._is_sharded:
            kind = accelerator.device.type
            run.state.device = get_device("gpu" if kind == "cuda" else kind)
            run.reconfigure(**self._settings)
        run.use_model(self._prepared)
        for optimizer in changed:
            optimizer.register_step_pre_hook(self._before_step)
        changed[len(optimizers) - 1].register_step_post_hook(self._after_last_step)
        return prepared

    # ---- training ----

    def epochs(self, dataloader: Iterable[Any] | None = None) -> Iterator[Iterator[Any]]:
        """Train: iterate over the remaining epochs, each an iterator over its batches.

        The run ends with the iteration; afterwards the model has the averaged weights, if there are any. Leaving the
        loop early, for example with an exception, calls `abort`.

        Args:
            dataloader: The training data: batches on the accelerator's device. None: the loader of `prepare`.

        Raises:
            RuntimeError: `prepare` was not called.
            ValueError: There is no training data.

        Warns:
            UserWarning: The run is over, so nothing is trained.
        """
        self._check_prepared("epochs")
        run, loader = self.run, self._loader if dataloader is None else dataloader
        if loader is None:
            raise ValueError(
                "`dataloader` must be given before training. Give the loader to `prepare`, or write "
                "`run.epochs(loader)`."
            )
        if run.is_over():
            warnings.warn(
                f"The run has reached its `max_duration`, {str(run.state.max_duration)!r}: nothing is trained. To "
                f"train longer, set `run.run.state.max_duration`. For another run, create another `AcceleratedRun`.",
                stacklevel=2,
            )
        is_shared = isinstance(loader, DataLoaderDispatcher)  # the inner loader then has the batches of all ranks
        # Algorithms may replace the dataset of the inner loader.
        run.begin_fit(loader if is_shared else getattr(loader, "base_dataloader", loader))
        self._start_step()
        try:
            while not run.is_over():
                yield self._batches(loader)
                if run.in_epoch:  # the loop left the epoch early
                    self._finish()
                    if not run.is_over():
                        run.end_epoch()
            run.end_fit()
        finally:
            self.abort()

    def _batches(self, loader: Any) -> Iterator[Any]:
        run = self.run
        now = run.state.timestamp
        run.begin_epoch()
        set_epoch(loader, now.epoch.value)
        done = now.batch_in_epoch.value * run.accumulate
        for batch in self.accelerator.skip_first_batches(loader, done) if done else loader:
            yield run.after_dataloader(batch)
            self._finish()
            if run.is_over():
                break
        length = run.state.dataloader_len
        if not run.is_over() or (length is not None and run.state.timestamp.batch_in_epoch >= length):
            run.end_epoch()

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch, with all algorithms.

        Args:
            batch: A batch of `epochs`; not modified.

        Returns:
            The scalar for `accelerator.backward`.
        """
        loss = total_loss(self.run.loss(batch))
        self._has_loss, self._passes = True, self._passes + 1
        return loss

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Announce the events after the backward pass, and give the optimizer a closure if it needs one."""
        run = self.run
        if not self._passes:
            if any(group["lr"] != 0 for group in optimizer.param_groups):
                raise RuntimeError(
                    "`optimizer.step` must follow a backward pass of `run.loss`, whose events algorithms need. Write "
                    "`accelerator.backward(run.loss(batch))`."
                )
            # torch.distributed.checkpoint initializes the states of optimizers with a step at a learning rate of 0.
            return ((optimizer, lambda *args, **kwargs: torch.zeros(())), {}) if needs_closure(optimizer) else None
        self._after_backward()
        if kwargs.get("closure") is not None or any(each is not None for each in args[1:]):
            raise ValueError(
                "`closure` must not be given to the step: the run repeats passes itself. Write `optimizer.step()`."
            )
        wants = run.replays and needs_closure(optimizer)
        if wants and self._has_stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__} must be the first optimizer that steps, since it repeats the passes of "
                f"the step. Call its `step` before those of the others."
            )
        if not self._has_stepped:
            run.after_gradients()
        self._has_stepped = True
        return ((optimizer, run.closure(self._repeat_pass)), {}) if wants else None

    def _after_last_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step the optimizers that algorithms have added, which the loop does not step."""
        if self._has_stepped:
            for each in self._own:
                each.step()
                each.zero_grad()
            self._is_trained = True

    def _repeat_pass(self, batch: Any) -> None:
        """Repeat a forward and backward pass of the step; only the last one exchanges gradients."""
        run, accelerator = self.run, self.accelerator
        is_last = run.replay_index == self._passes - 1
        with nullcontext() if is_last else accelerator.no_sync(self._prepared):
            accelerator.backward(total_loss(run.loss(batch)))
        run.after_backward()

    def _after_backward(self) -> None:
        if self._has_loss:
            self._has_loss = False
            self.run.after_backward()

    def _finish(self) -> None:
        """Announce what follows the last backward pass, and the end of the step if there was one."""
        self._after_backward()
        accelerator = self.accelerator
        skipped = accelerator.scaler is not None and accelerator.sync_gradients
        if self._has_stepped or (skipped and any(each.step_was_skipped for each in self._optimizers)):
            self._start_step()
            self.run.end_batch()

    def _start_step(self) -> None:
        self._has_loss = self._has_stepped = self._is_trained = False
        self._passes = 0

    def _clip(self, original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if self._clips or self.run.replays:
            reason = f"`{self._clips[0]}` clips as well" if self._clips else "an optimizer computes gradients again"
            raise ConflictError(
                f"`accelerator.{name}` must not be called, since {reason} after it. Remove it, and clip with the "
                f"algorithm `GradientClipping` of composer-gradient-clipping, which clips the gradients of each pass."
            )
        return original(*args, **kwargs)

    def abort(self) -> None:
        """Leave training after an exception, with the training weights in the model; `epochs` continues the run.

        A step whose optimizers have all stepped is counted, so that its batch is not trained on again.
        """
        if self._is_trained:
            self._finish()
        self.run.abort()
        self._start_step()

    # ---- evaluation and saving ----

    def evaluation(self, dataloader: Iterable[Any], label: str = "eval") -> AbstractContextManager[None]:
        """Evaluate in the body: in eval mode, without gradients, with averaged weights if an algorithm keeps them.

        Args:
            dataloader: The data to evaluate on.
            label: The name of the data.

        Raises:
            RuntimeError: `prepare` was not called.
        """
        self._check_prepared("evaluation")
        self._finish()
        return self.run.evaluation(dataloader, label)

    def eval_forward(self, batch: Any) -> Any:
        """Compute the outputs of an evaluation batch, with all algorithms.

        Args:
            batch: A batch on the accelerator's device.
        """
        return self.run.eval_forward(batch)

    def saving(self) -> AbstractContextManager[None]:
        """Save the model in the body, for example with `accelerator.save_model`: averages, if there are any.

        `accelerator.save_state` does this itself.

        Raises:
            RuntimeError: `prepare` was not called.
        """
        self._check_prepared("saving")
        self._finish()
        return self.run.saving()

    def _check_prepared(self, method: str) -> None:
        if self._prepared is None:
            raise RuntimeError(
                f"`{method}` must be called after `prepare`. Write `net, optimizer = run.prepare(net, optimizer)`."
            )

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if self._prepared is None:
            return
        self._finish()
        if self._passes:
            raise RuntimeError(
                "`save_state` must be called between two steps: the gradients of a step that is not finished are not "
                "saved. Write `if accelerator.sync_gradients:` before it."
            )
        with self.run.saving():
            for i in range(len(weights)):  # Accelerate took the training weights
                weights[i] = self.accelerator.get_state_dict(models[i], unwrap=False)
            if self._is_sharded and any(SWAPS_WEIGHTS in each.placement.provides for each in self.run.state.algorithms):
                for i, model in enumerate(models):
                    save_fsdp_model(self.accelerator.state.fsdp_plugin, self.accelerator, model, folder, i)
            torch.save(self.run.state_dict(), self._file(models, folder, self.accelerator.process_index))

    def _load(self, models: list[torch.nn.Module], folder: str) -> None:
        """Restore the state of the run, which may change the optimizers, before Accelerate loads them."""
        file = self._file(models, folder, self.accelerator.process_index)
        if not file.exists():  # the saved run had fewer processes, or the loop had no algorithms
            file = self._file(models, folder, 0)
        if file.exists():
            self.run.load_state_dict(torch.load(file, weights_only=True))

    def _file(self, models: Sequence[torch.nn.Module], folder: str, rank: int) -> Path:
        """Return the file of the state of the run on a rank, numbered like the model if there are several."""
        index = next((i for i, model in enumerate(models) if model is self._prepared), 0)
        return Path(folder) / (f"composer_{rank}.pt" if index == 0 else f"composer_{index}_{rank}.pt")

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the line of the loop that announces it."""
        return self.run.explain()


def _problems(accelerator: Accelerator) -> Iterator[str]:
    """Yield a message for each setting of Accelerate that changes parameters, layers or the loop."""
    yield from distribution_problems(accelerator)
    if accelerator.mixed_precision not in _PRECISIONS:
        yield (
            f"`mixed_precision` must be one of {', '.join(_PRECISIONS)}, got {accelerator.mixed_precision!r}, which "
            f"replaces layers itself. Use 'bf16'."
        )
