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
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LRScheduler

from composer.core import Algorithm, Callback, ConflictError, Plan, Precision, effects
from composer.core.time import TimeInput
from composer.loggers import LoggerDestination
from composer.loop import HostedRun, refusals, skin
from composer.loop.position import set_epoch

_PRECISIONS = {"no": Precision.FP32, "bf16": Precision.AMP_BF16, "fp16": Precision.AMP_FP16}
_HOOKS = skin.hooks_by_event(
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
)


class AcceleratedRun:
    """Runs algorithms in a training loop on Accelerate, of which only a few lines change, as in the example.

    The step of an optimizer announces the events after the backward pass. `accelerator.save_state` saves the state of
    the run on every rank, and the weights that algorithms want saved, such as averages; `accelerator.load_state`,
    before `epochs`, restores both, and training continues after the last batch that was trained on. See `HostedRun`
    for what holds in all loops.

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
        ValueError: There is no loss; or Accelerate uses FSDP1, DeepSpeed, Megatron-LM, XLA or fp8.

    Example:
        >>> accelerator, net = Accelerator(cpu=True), torch.nn.Linear(3, 2)
        >>> loss = lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1])
        >>> run = AcceleratedRun(accelerator, net, loss=loss, max_duration="2ep")
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> data = [(torch.zeros(3), 0), (torch.ones(3), 1)]
        >>> net, optimizer, loader = run.prepare(net, optimizer, torch.utils.data.DataLoader(data))
        >>> for batches in run.epochs():
        ...     for batch in batches:
        ...         with accelerator.accumulate(net):
        ...             accelerator.backward(run.loss(batch))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
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
        unavailable = dict(refusals.UNAVAILABLE)
        problems = [*refusals.distribution_problems(accelerator), *refusals.missing_loss(model, loss)]
        if accelerator.mixed_precision not in _PRECISIONS:
            names = ", ".join(_PRECISIONS)
            problems.append(f"`mixed_precision` must be one of {names}, got {accelerator.mixed_precision!r}.")
        if accelerator.scaler is not None:
            reason = "The scaler of 'fp16' cannot repeat a step. Use `Accelerator(mixed_precision='bf16')`."
            unavailable[effects.WRAPS_OPTIMIZER] = reason
        self._is_sharded = accelerator.distributed_type is DistributedType.FSDP
        if accelerator.device_placement and not self._is_sharded and isinstance(model, torch.nn.Module):
            model.to(accelerator.device)  # algorithms will create new layers on its device
        self.accelerator = accelerator
        self.run = HostedRun(
            model,
            algorithms,
            max_duration=max_duration,
            forward=forward,
            loss=loss,
            accumulate=accelerator.gradient_accumulation_steps,
            precision=_PRECISIONS.get(accelerator.mixed_precision, Precision.FP32),
            callbacks=callbacks,
            loggers=loggers,
            seed=seed,
            unavailable=unavailable,
            problems=problems,
            hooks=_HOOKS,
        )
        self._steps = skin.HookedSteps(self.run, self._repeat_backward)
        self._prepared: Any = None
        self._loader: Any = None
        self._optimizers: list[Any] = []  # Accelerate has prepared them
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            skin.wrap(accelerator, name, functools.partial(self._clip, name))
        skin.wrap(accelerator, "save_state", self._save_state)
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Let algorithms change the model and the optimizers, then prepare all objects with `Accelerator.prepare`.

        Args:
            *objects: The model of the constructor, optimizers, schedulers and data loaders. The first loader has the
                training data, unless `epochs` is given another.

        Returns:
            The prepared objects in the same order. Step these optimizers; the last one also steps those of algorithms.

        Raises:
            RuntimeError: `prepare` was called before.
            ValueError: The model or an optimizer is missing, an optimizer is prepared already, or an algorithm
                replaces an optimizer that a scheduler drives.
        """
        run, accelerator, state = self.run, self.accelerator, self.run.state
        if self._prepared is not None:
            raise RuntimeError("`prepare` must be called once for a run. Use `accelerator.prepare` for other loaders.")
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
        refusals.raise_all(problems)
        state.optimizers, state.schedulers = optimizers, [each for each in objects if isinstance(each, LRScheduler)]
        run.init()
        replaced = {id(each) for each in optimizers} - {id(each) for each in state.optimizers}
        refusals.raise_all(
            f"{type(each).__name__} drives {type(each.optimizer).__name__}, which an algorithm has replaced. Create "
            f"the scheduler with the optimizer that `prepare` returns."
            for each in state.schedulers
            if id(each.optimizer) in replaced
        )
        changed = run.take_optimizers()
        state.schedulers = []  # Accelerate steps and saves them
        if run.find_unused_parameters:
            accelerator.ddp_handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
            accelerator.ddp_handler.find_unused_parameters = True
        given, own = iter(changed), changed[len(optimizers) :]
        everything = accelerator.prepare(
            *(next(given) if isinstance(each, torch.optim.Optimizer) else each for each in objects), *own
        )
        prepared: tuple[Any, ...] = everything[: len(objects)]
        self._optimizers = [each for each in everything if isinstance(each, AcceleratedOptimizer)]
        self._prepared = next(new for each, new in zip(objects, prepared, strict=True) if each is run.model)
        self._loader = next((each for each in prepared if isinstance(each, torch.utils.data.DataLoader)), None)
        if self._is_sharded:
            skin.use_device(run, accelerator.device)
        run.use_model(self._prepared)
        self._steps.attach(changed[: len(optimizers)], everything[len(objects) :])
        return prepared

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
            raise ValueError("There is no training data. Give the loader to `prepare`, or write `run.epochs(loader)`.")
        if run.is_over():
            warnings.warn(
                f"The run has reached its `max_duration`, {str(run.state.max_duration)!r}: nothing is trained. To "
                f"train longer, set `run.run.state.max_duration`.",
                stacklevel=2,
            )
        # Algorithms may replace the dataset of the inner loader. That of a dispatcher has the batches of all ranks.
        is_shared = isinstance(loader, DataLoaderDispatcher)
        run.begin_fit(loader if is_shared else getattr(loader, "base_dataloader", loader))
        self._steps.clear()
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
        run, now = self.run, self.run.state.timestamp
        run.begin_epoch()
        set_epoch(loader, now.epoch.value)
        done = now.batch_in_epoch.value * run.accumulate
        for batch in self.accelerator.skip_first_batches(loader, done) if done else loader:
            yield run.after_dataloader(batch)
            self._finish()
            if run.is_over():
                break
        if not run.is_over() or skin.is_epoch_whole(run):
            run.end_epoch()

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch of `epochs`, with all algorithms: the scalar for `accelerator.backward`."""
        return self._steps.loss(batch)

    def abort(self) -> None:
        """Leave training after an exception, with the training weights in the model; `epochs` continues the run.

        A step whose optimizers have all stepped is counted, so that its batch is not trained on again.
        """
        if self._steps.is_complete:
            self._finish()
        self.run.abort()
        self._steps.clear()

    def _finish(self) -> None:
        """Announce what follows the last backward pass, and the end of the step if there was one."""
        self._steps.after_backward()
        accelerator = self.accelerator
        may_skip = accelerator.scaler is not None and accelerator.sync_gradients
        if self._steps.has_stepped or (may_skip and any(each.step_was_skipped for each in self._optimizers)):
            self._steps.clear()
            self.run.end_batch()

    def _repeat_backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Compute the gradients of a repeated pass; ranks exchange those of the last one."""
        with nullcontext() if is_last else self.accelerator.no_sync(self._prepared):
            self.accelerator.backward(loss)

    def _clip(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clips = [each for each in self.run.state.algorithms if effects.CLIPS_GRADIENTS in each.placement.provides]
        if clips or self.run.replays:
            reason = f"`{type(clips[0]).__name__}` clips as well" if clips else "an optimizer computes gradients again"
            raise ConflictError(
                f"`accelerator.{name}` must not be called, since {reason} after it. Use the algorithm "
                f"`GradientClipping` of composer-gradient-clipping instead, which clips the gradients of each pass."
            )
        return original(*args, **kwargs)

    # ---- evaluation and saving ----

    def evaluation(self, dataloader: Iterable[Any], label: str = "eval") -> AbstractContextManager[None]:
        """Evaluate in the body, after `prepare`; see `HostedRun.evaluation`."""
        self._check_prepared("evaluation")
        self._finish()
        return self.run.evaluation(dataloader, label)

    def eval_forward(self, batch: Any) -> Any:
        """Compute the outputs of an evaluation batch on the accelerator's device, with all algorithms."""
        return self.run.eval_forward(batch)

    def saving(self) -> AbstractContextManager[None]:
        """Save the model in the body, for example with `accelerator.save_model`: averages, if there are any."""
        self._check_prepared("saving")
        self._finish()
        return self.run.saving()

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the line of the loop that announces it."""
        return self.run.explain()

    def _check_prepared(self, method: str) -> None:
        if self._prepared is None:
            raise RuntimeError(
                f"`{method}` must be called after `prepare`. Write `net, optimizer = run.prepare(net, optimizer)`."
            )

    def _save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._prepared is None:
            return original(*args, **kwargs)
        self._finish()
        if self.run.in_step:
            raise RuntimeError(
                "`save_state` must be called between two steps: the gradients of a step that is not finished are not "
                "saved. Write `if accelerator.sync_gradients:` before it."
            )
        with self.run.saving():
            return original(*args, **kwargs)

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if self._prepared is not None:
            torch.save(self.run.state_dict(), self._file(models, folder, self.accelerator.process_index))

    def _load(self, models: list[torch.nn.Module], folder: str) -> None:
        """Restore the state of the run, which may change the optimizers, before Accelerate loads them."""
        # The saved run may have had fewer ranks, and a loop without algorithms leaves no file.
        files = [self._file(models, folder, rank) for rank in (self.accelerator.process_index, 0)]
        file = next((each for each in files if each.exists()), None)
        if file is not None:
            self.run.load_state_dict(torch.load(file, weights_only=True))

    def _file(self, models: Sequence[torch.nn.Module], folder: str, rank: int) -> Path:
        """Return the file of the state of the run on a rank, numbered like the model if there are several."""
        index = next((i for i, model in enumerate(models) if model is self._prepared), 0)
        return Path(folder) / (f"composer_{rank}.pt" if index == 0 else f"composer_{index}_{rank}.pt")
