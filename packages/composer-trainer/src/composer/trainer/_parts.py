"""What a Trainer is made of, and how the parts are put together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TextIO

import torch
from tqdm import tqdm

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core import Algorithm, Callback, DataSpec, Engine, Event, Precision, State, Time, Timestamp
from composer.core.passes import PassInput
from composer.devices import Device
from composer.loggers import Logger, LoggerDestination
from composer.loggers._text import open_stream
from composer.models import ComposerModel
from composer.trainer import _construction as build
from composer.trainer._arguments import described
from composer.trainer._checkpointing import LoadOptions, load_run
from composer.trainer._evaluation import Evaluation
from composer.trainer._fit import FitLoop
from composer.trainer._hparams import log_standard_hparams
from composer.trainer._parallel import SingleProcess
from composer.trainer._profiling import remote_files
from composer.trainer._resumption import LoaderPosition
from composer.trainer._run_position import RunPosition
from composer.trainer._settings import RunSettings
from composer.trainer._signals import Interruption
from composer.trainer._train_batch import BatchTrainer
from composer.trainer._train_metrics import TrainMetrics
from composer.utils import dist, ensure_tuple, reproducibility

__all__ = ["TrainerParts"]

log = logging.getLogger(__name__)

_REMOVED = {
    "fsdp_config": "parallelism_config={'fsdp': {...}}",
    "fsdp_auto_wrap": "parallelism_config={'fsdp': {'auto_wrap': ...}}",
    "load_fsdp_monolith_rank0_only": "parallelism_config={'fsdp': {...}}`, whose ranks keep only what they need of a "
    "full checkpoint, and `load_path=...",
    "deepspeed_config": "parallelism_config={'fsdp': {}}`, which divides parameters, gradients and optimizer states as "
    "ZeRO stage 3 does, or as stage 2 with `{'fsdp': {'reshard_after_forward': False}}",
    "grad_accum": "device_train_microbatch_size=...`, the number of samples in each forward pass, not `grad_accum",
    "grad_clip_norm": "algorithms=[GradientClipping(clipping_type='norm', clipping_threshold=...)]",
    "validate_every_n_epochs": "eval_interval='...ep'`, or to evaluate never, as -1 did, `eval_interval=0",
    "validate_every_n_batches": "eval_interval='...ba'`, or to evaluate never, as -1 did, `eval_interval=0",
    "compute_training_metrics": "get_metrics(is_train=True)` in the model, which returns the metrics to compute, not "
    "`compute_training_metrics",
    "max_epochs": "max_duration='...ep'",
    "log_destinations": "loggers=[...]",
    "logger_destinations": "loggers=[...]",
    "load_logger_destination": "load_object_store=...",
}


class TrainerParts:
    """The parts of a Trainer; see there."""

    if not TYPE_CHECKING:  # it would hide the signature of `Trainer.__init__` from editors

        def __new__(cls, *args: Any, **arguments: Any) -> TrainerParts:
            """Answer arguments of earlier releases with what they are called now.

            Raises:
                TypeError: One of them is given.
            """
            for name in arguments.keys() & _REMOVED.keys():
                raise TypeError(f"`{name}` is not an argument of the `Trainer` any more. Write `{_REMOVED[name]}`.")
            return super().__new__(cls)

    state: State
    logger: Logger
    engine: Engine
    local_hparams: dict[str, Any]
    accumulate_train_batch_on_tokens: bool
    _model: ComposerModel
    _parallel: SingleProcess
    _settings: RunSettings
    _position: RunPosition
    _checkpoint_saver: CheckpointSaver | None
    _stream: TextIO | None  # where the user is told what happens; None: nowhere

    def _build_state(
        self,
        device: Device,
        precision: Precision,
        precision_config: dict[str, Any] | None,
        optimizer: torch.optim.Optimizer | None,
        algorithms: Any,
        run_name: str,
        seed: int,
        save_metrics: bool,
    ) -> None:
        model = self._parallel.to_device(self._model, device)
        self._parallel.equalize(model)
        if optimizer is not None:
            device.optimizer_to_device(optimizer)
        for algorithm in ensure_tuple(algorithms):
            if not isinstance(algorithm, Algorithm):
                raise TypeError(f"`algorithms` must hold `Algorithm` objects, got {described(algorithm)}.")
        build.check_distinct("algorithms", ensure_tuple(algorithms))
        self.state = State(
            model=model,
            rank_zero_seed=seed,
            run_name=run_name,
            device=device,
            precision=precision,
            precision_config=precision_config,
            optimizers=optimizer,
            algorithms=ensure_tuple(algorithms),
            save_metrics=save_metrics,
        )
        self._parallel.describe(self.state)

    def _start_engine(
        self,
        loggers: Sequence[LoggerDestination],
        callbacks: Sequence[Callback],
        passes: PassInput,
        delivery_timeout: float,
    ) -> None:
        state = self.state
        loggers = [*loggers, *remote_files(state.profiler, callbacks)]
        self.logger = Logger(state, loggers, delivery_timeout=delivery_timeout)
        state.callbacks = [*loggers, *callbacks, *state.callbacks]  # there are those of the profiler already
        self.engine = Engine(state, self.logger, passes)
        self._model.logger = self.logger
        self.engine.run_event(Event.INIT)
        # An algorithm may have replaced the model.
        self._model, _ = build.check_model(state.model)
        self._model.logger = self.logger
        build.check_optimizers(state.optimizers, self._model, changed_by="an algorithm")
        log_standard_hparams(state, self.logger, self.local_hparams)
        state.train_metrics = dict(copy.deepcopy(self._model.get_metrics(is_train=True)))
        self._parallel.adopt_metrics(state.train_metrics.values())
        parallel = self._parallel
        self._metrics = TrainMetrics(state, self._model, parallel.world_size == 1, parallel.free_gathered)
        self._evaluation = Evaluation(state, self.engine, self.logger, self._model, self._parallel)
        self._evaluation.modes.eval()  # the mode outside of `fit`, in whichever the user left them

    def _keep_position(self, spin_dataloaders: bool) -> None:
        """From here on, checkpoints hold and restore how far the run is."""
        loader = LoaderPosition(self.state, self._metrics, spin_dataloaders, self._evaluation.accesses)
        self._position = RunPosition(self.state, self._settings, loader, self._announce)
        self.state.resumption = self._position

    def _load(self, options: LoadOptions, passes: PassInput) -> bool:
        """Load what is asked for, and divide the model among ranks before; whether the run goes on from its own."""
        state = self.state
        with self._parallel.watched(), ExitStack() as downloads:
            return load_run(
                options,
                state,
                self.logger,
                self._checkpoint_saver,
                passes,
                self._announce,
                lambda: self._parallel.divide(state),
                downloads,
            )

    def _follow_model(self) -> None:
        """Use the loss and metrics of the model that an algorithm of the checkpoint put in place, if one did."""
        state = self.state
        model, _ = build.check_model(state.model)
        if model is self._model:
            return
        self._model = self._settings.model = self._evaluation.model = model
        model.logger = self.logger
        # The metrics are the model's already, and may be loaded.
        for metrics in (state.train_metrics, *state.eval_metrics.values()):
            self._parallel.adopt_metrics(metrics.values())
        self._metrics.set_model(model)

    def _settle_model(self, compile_config: dict[str, Any] | None) -> None:
        """Make the model what the loop calls, once all surgery is done and everything is loaded."""
        if not self.state.fsdp_enabled:  # the parts of a divided model are other tensors
            build.check_optimizers(self.state.optimizers, self.state.model, changed_by="an algorithm")
        self._evaluation.modes.check()
        # Surgery drew random numbers; training starts from the seed whatever algorithms did.
        reproducibility.seed_all(self.state.seed)
        self.state.model = self._parallel.wrap(self.state.model, self.state.algorithms)
        if compile_config is not None:
            self.state.model.compile(**compile_config)

    def _follow_loader(self, spec: DataSpec | None, length: Time[int] | None, start: Timestamp) -> None:
        """Begin the training data anew if this call of `fit` trains other data than the one before.

        Args:
            spec: The training data before.
            length: The batches of an epoch before.
            start: When this call began, in this process or in one that it continues.
        """
        now, shorter = self._settings.train_spec, self.state.dataloader_len
        if spec is None or now is None:
            return
        at_end = shorter is not None and shorter != length and start._batch_in_epoch >= shorter.value
        if now.dataloader is not spec.dataloader or at_end:
            self._position.loader.replace()

    def _loop(self) -> FitLoop:
        state, spec = self.state, self._settings.train_spec
        assert spec is not None, "`fit` checks that there is training data"
        batches = BatchTrainer(
            state, self.engine, self._model, self._parallel, self._metrics, self.accumulate_train_batch_on_tokens
        )
        return FitLoop(
            state,
            self.engine,
            self.logger,
            spec,
            batches,
            self._position.loader,
            self._evaluation,
            self._parallel,
            self._settings.step_every_batch,
            Interruption(self._checkpoint_saver, self._announce),
            self._position.over_at,
        )

    def _announce(self, text: str) -> None:
        """Tell the user something that is no warning: in the log and, with a progress bar or console, there."""
        log.info("%s", text)
        if self._stream is not None and dist.get_global_rank() == 0:
            tqdm.write(text, file=self._stream)  # above a progress bar, which would share its line
            self._stream.flush()


def stream_of(console_stream: str | TextIO, shown: bool) -> TextIO | None:
    """Where to tell the user what happens; None if nothing else is shown either."""
    return open_stream(console_stream) if shown else None
