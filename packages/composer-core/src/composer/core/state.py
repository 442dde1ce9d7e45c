"""The state of a run: everything that algorithms and callbacks may read or change."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from composer.core._saved_data import hand_over_dataset_state
from composer.core._state_lists import StateLists
from composer.core._state_parts import device_of, length_of, pair_of, resolved
from composer.core._state_saving import StateSaving
from composer.core._time import Time, TimeInput, TimeUnit, ensure_time
from composer.core._timestamp import Timestamp
from composer.core.precision import Precision
from composer.devices import Device
from composer.utils import dist
from composer.utils.batch_helpers import batch_get, batch_set
from composer.utils.device import get_device
from composer.utils.misc import is_model_ddp, plain_number

if TYPE_CHECKING:
    from composer.core._model_snapshot import ModelSnapshot
    from composer.core.algorithm import Algorithm
    from composer.core.callback import Callback
    from composer.core.evaluator import Evaluator
    from composer.core.serializable import Resumable

__all__ = ["State"]

_SERIALIZED = (
    "model optimizers schedulers algorithms callbacks scaler timestamp "
    "rank_zero_seed train_metrics eval_metrics run_name dataset_state"
).split()


class State(StateLists, StateSaving):
    """Everything related to a training run that algorithms may read or change.

    The Trainer makes one. A loop of your own needs only a few arguments::

        state = State(model=model, max_duration="2ep", rank_zero_seed=0, dataloader=loader)

    Args:
        model: The module being trained.
        rank_zero_seed: The seed of rank 0; rank r uses `rank_zero_seed + r`.
        run_name: The run's name; None makes one from the current time.
        device: The device the run trains on: a `Device` or its name; None takes the one the model is on.
        max_duration: The length of the run: a time string, a `Time` or a number of epochs.
        device_train_microbatch_size: Samples per forward pass; None is the whole batch.
        auto_microbatching: Whether the Trainer searches that size.
        train_dataloader: The loader of the training data.
        evaluators: What is evaluated.
        dataloader: The active loader. Alone it is taken to be the training loader.
        dataloader_label: Its label; "train" if a loader is given without one.
        dataloader_len: Batches of it to use; -1 is its own length.
        precision: The numerical precision, a `Precision` or its name.
        precision_config: Arguments of the FP8 recipe.
        optimizers: One optimizer or several.
        scaler: The gradient scaler of fp16 training.
        save_metrics: Whether `state_dict` includes metrics.
        algorithms: The algorithms that run, in your order.
        callbacks: The callbacks and loggers that run, in your order.
        schedulers: One learning-rate scheduler or several.
        dataset_state: A saved position of the training data set; it gets it when `train_dataloader` is set.
        dataset_resumption: Which splits, such as "train", have taken up their position themselves.

    Attributes:
        batch: The current batch: on the host from AFTER_DATALOADER on, the microbatch on the device during the forward
            and backward pass.
        inputs: First part of a pair batch; setting it replaces that part.
        targets: Second part of a pair batch.
        outputs: What the model returned last.
        loss: The last loss: a tensor, a sequence of tensors, or a dict of them.
        timestamp: Training progress.
        previous_timestamp: Progress before the last step; None before the first.
        eval_timestamp: Progress of the current evaluation.
        predict_timestamp: Progress of the current prediction.
        metric_outputs: What `model.update_metric` returned last.
        eval_metrics: Evaluation metrics by evaluator label and name.
        load_path: What the Trainer loaded the run from; None: nothing.
        profiler: Records when events, algorithms and callbacks begin and end, such as a `composer.profiler.Profiler`;
            None: nothing is recorded, at no cost.
        fsdp_enabled: Whether the model is divided among ranks; then `fsdp_config`, `tp_config` and `device_mesh` tell
            how, and `fsdp_state_dict_type` whether checkpoints are `"full"` or `"sharded"`.
        data_rank: Which part of each batch this rank trains on; None: the one of its number.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: `max_duration` does not parse, or is a duration ("dur"), which is a fraction of itself.
    """

    batch: Any
    outputs: Any
    loss: Any

    load_path: str | None = None
    # Set by who divides the model.
    data_rank: int | None = None
    fsdp_enabled: bool = False
    fsdp_config: Any = None
    fsdp_config_version: int = 0
    fsdp_state_dict_type: str | None = None
    fsdp_sharded_state_dict_enabled: bool = False
    tp_config: Any = None
    device_mesh: Any = None

    def __init__(
        self,
        model: torch.nn.Module,
        rank_zero_seed: SupportsIndex = 0,
        run_name: str | None = None,
        device: Device | str | None = None,
        max_duration: TimeInput | None = None,
        device_train_microbatch_size: float | None = None,
        auto_microbatching: bool = False,
        train_dataloader: Iterable[Any] | None = None,
        evaluators: Evaluator | Sequence[Evaluator] | None = None,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: SupportsIndex | Time[int] = -1,
        precision: str | Precision = Precision.FP32,
        precision_config: dict[str, Any] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        save_metrics: bool = False,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        schedulers: Any = None,
        dataset_state: dict[str, Any] | None = None,
        dataset_resumption: dict[str, bool] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"`model` must be a `torch.nn.Module`, got {type(model).__name__}.")
        self._observers: list[Callable[[], None]] = []
        self._before_init: ModelSnapshot | None = None  # until training starts
        self.model = model
        self.rank_zero_seed = operator.index(rank_zero_seed)
        self.run_name = run_name if run_name is not None else f"run-{time.strftime('%Y%m%d-%H%M%S')}"
        self.device = device_of(model) if device is None else get_device(device)
        self.device_train_microbatch_size = plain_number(device_train_microbatch_size)
        self.auto_microbatching = auto_microbatching
        self.precision = precision  # the setter parses
        self.precision_config = precision_config
        self.scaler = scaler
        self.save_metrics = save_metrics
        self.serialized_attributes = list(_SERIALIZED)
        self.resumption: Resumable | None = None  # of the loop that runs; every checkpoint holds its `state_dict`
        self._set_progress()
        self._set_lists(evaluators, optimizers, schedulers, algorithms, callbacks)
        self._max_duration: Time[Any] | None = None
        self.max_duration = max_duration  # the setter parses
        self.dataset_state = dataset_state
        self.dataset_resumption = {} if dataset_resumption is None else dataset_resumption
        self.train_dataloader = train_dataloader  # the setter hands `dataset_state` over
        self._dataloader: Iterable[Any] | None = None
        self._dataloader_label: str | None = None
        self._dataloader_len: int | None = None
        if dataloader is not None:
            if dataloader_label is None:
                dataloader_label = "train"
                self.train_dataloader = dataloader if train_dataloader is None else train_dataloader
            self.set_dataloader(dataloader, dataloader_label, dataloader_len)

    def _set_progress(self) -> None:
        self.batch = self.outputs = None
        self.loss = None
        self.timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.eval_timestamp = Timestamp()
        self.predict_timestamp = Timestamp()
        self.__iteration_length: Time[Any] | None = None
        self._train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        # Set by the Trainer while the metrics of the last batch have not been computed; computes them.
        self._pending_metrics: Callable[[], None] | None = None
        self._train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self._total_loss_dict: dict[str, Any] = {}
        self.metric_outputs: dict[str, Any] = {}

    # ---- time ----

    @property
    def seed(self) -> int:
        """This rank's seed."""
        return self.rank_zero_seed + (dist.get_global_rank() if self.data_rank is None else self.data_rank)

    @property
    def max_duration(self) -> Time[Any] | None:
        """The length of the run. Set with a `Time`, a time string or a number of epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: TimeInput | None) -> None:
        new = None if value is None else ensure_time(value, TimeUnit.EPOCH)
        if new is not None and new.unit is TimeUnit.DURATION:
            raise ValueError(
                f"`max_duration` must not be in 'dur', which is a fraction of it, got {new!r}. Use '10ep'."
            )
        changed, self._max_duration = (new is None) != (self._max_duration is None), new
        if changed:
            self._notify()

    def get_elapsed_duration(self) -> Time[float] | None:
        """Return the fraction of the run that is done, as a `Time` in 'dur'; None if the run has no length.

        It advances with every batch, whatever the unit of `max_duration`, and is equal on all ranks; the last batch may
        take it beyond 1. Within an epoch it needs the number of batches per epoch: the length of the training loader,
        else the mean length of the epochs so far. While neither is known, in the first epoch of a loader without a
        length, the fraction advances at the end of the epoch.
        """
        limit = self._max_duration
        if limit is None:
            return None
        if not limit.value:  # training was stopped before its first batch
            return Time(1.0, TimeUnit.DURATION)
        now, length = self.timestamp, self.__iteration_length
        if limit.unit is TimeUnit.EPOCH:
            done, whole = self._count_epochs(now._epoch)
        elif limit.unit is TimeUnit.ITERATION and length is not None and length.unit is TimeUnit.EPOCH:
            done, whole = self._count_epochs(now._iteration * length.value + now._epoch_in_iteration)
            whole *= length.value
        elif limit.unit is TimeUnit.ITERATION and length is not None:
            done, whole = now._iteration * length.value + min(now._token_in_iteration, length.value), length.value
        elif limit.unit is TimeUnit.SECOND:
            return Time(now._total_wct.total_seconds() / limit.value, TimeUnit.DURATION)
        else:
            done, whole = now._count(limit.unit), 1
        # One division of whole numbers, so that 3 of 10 batches are exactly the float 0.3.
        return Time(done / (limit.value * whole), TimeUnit.DURATION)

    def _count_epochs(self, epochs: int) -> tuple[float, float]:
        """Return the batches in a number of epochs and the current one, and the batches per epoch."""
        now = self.timestamp
        length: float | None = self._train_dataloader_len
        if length is None and now._epoch:
            length = (now._batch - now._batch_in_epoch) / now._epoch
        if not length:
            return epochs, 1
        return epochs * length + min(now._batch_in_epoch, length), length

    def stop_training(self) -> None:
        """End the run after the current batch, by shortening `max_duration`.

        For a relaunch with `autoresume` the run is then complete. `trainer.fit(duration=...)` goes on, and so does a
        relaunch with another `max_duration`.
        """
        unit = None if self._max_duration is None else self._max_duration.unit
        if unit is None or unit is TimeUnit.EPOCH:
            unit = TimeUnit.BATCH
        self.max_duration = self.timestamp.get(unit)

    @property
    def _iteration_length(self) -> Time[Any] | None:
        """The length of one iteration of an outer loop, in epochs or tokens; None: there is no outer loop."""
        return self.__iteration_length

    @_iteration_length.setter
    def _iteration_length(self, value: TimeInput | None) -> None:
        length = None if value is None else ensure_time(value, TimeUnit.EPOCH)
        if length is not None and length.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN):
            raise NotImplementedError(f"The iteration length must be in 'ep' or 'tok', got {length!r}.")
        self.__iteration_length = length

    # ---- data ----

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data. Setting it hands a saved position to a data set that takes one."""
        return self._train_dataloader

    @train_dataloader.setter
    def train_dataloader(self, value: Iterable[Any] | None) -> None:
        self._train_dataloader = value
        # While an evaluation runs, another loader is the active one.
        self._train_dataloader_len = None if value is None else length_of(value)
        hand_over_dataset_state(self)

    @property
    def dataloader(self) -> Any:
        """The active loader. Set with `set_dataloader`."""
        return self._dataloader

    @property
    def dataloader_label(self) -> str | None:
        """The label of the active loader."""
        return self._dataloader_label

    @property
    def dataloader_len(self) -> Time[int] | None:
        """Batches to use of the active loader; None if it has no length. Set with an int or a `Time` in 'ba'."""
        return None if self._dataloader_len is None else Time(self._dataloader_len, TimeUnit.BATCH)

    @dataloader_len.setter
    def dataloader_len(self, value: SupportsIndex | Time[int]) -> None:
        if self._dataloader is None:
            raise RuntimeError("`dataloader_len` must be set together with a loader. Call `set_dataloader` first.")
        number, own = int(ensure_time(value, TimeUnit.BATCH)), length_of(self._dataloader)
        if number == -1:
            self._set_dataloader_len(own)
            return
        if own is not None and number > own:
            warnings.warn(
                f"DataloaderNumBatchesWarning: `dataloader_len` is {number}, but the loader has only {own} batches; "
                f"{own} are used.",
                stacklevel=2,
            )
            number = own
        self._set_dataloader_len(number)

    def _set_dataloader_len(self, number: int | None) -> None:
        self._dataloader_len = number
        if self._dataloader is self._train_dataloader:
            self._train_dataloader_len = number

    def set_dataloader(
        self,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: SupportsIndex | Time[int] = -1,
    ) -> None:
        """Make a loader the active one.

        Args:
            dataloader: The loader; None: no loader is active.
            dataloader_label: Its label, needed with a loader.
            dataloader_len: Batches to use; -1 is all.

        Raises:
            ValueError: A loader is given without a label.
        """
        if dataloader is not None and dataloader_label is None:
            raise ValueError("`dataloader_label` must be given with a loader, for example 'train' or 'eval'.")
        changed = (dataloader is None) != (self._dataloader is None)
        self._dataloader = dataloader
        self._dataloader_label = dataloader_label if dataloader is not None else None
        self._dataloader_len = None
        if dataloader is not None:
            self.dataloader_len = dataloader_len
        if changed:
            self._notify()

    def batch_get_item(self, key: Any) -> Any:
        """An item of the batch.

        Args:
            key: An index, a mapping key, an attribute name, a function of the batch, or a `(getter, setter)` pair.
        """
        return batch_get(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace an item of the batch; tuples are rebuilt.

        Args:
            key: As in `batch_get_item`; a function takes `(batch, value)` and returns the batch.
            value: The new item.
        """
        self.batch = batch_set(self.batch, key, value)

    @property
    def inputs(self) -> Any:
        """The first part of a pair batch."""
        return pair_of(self.batch)[0]

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self.batch = (value, pair_of(self.batch)[1])

    @property
    def targets(self) -> Any:
        """The second part of a pair batch."""
        return pair_of(self.batch)[1]

    @targets.setter
    def targets(self, value: Any) -> None:
        self.batch = (pair_of(self.batch)[0], value)

    # ---- numbers ----

    @property
    def precision(self) -> Precision:
        """The numerical precision. Set with a `Precision` or its name."""
        return self._precision

    @precision.setter
    def precision(self, value: str | Precision) -> None:
        self._precision = Precision(value)

    @property
    def is_model_ddp(self) -> bool:
        """Whether the model is wrapped in `DistributedDataParallel`."""
        return is_model_ddp(self.model)

    @property
    def train_metrics(self) -> dict[str, Any]:
        """The training metrics by name, up to date with the last batch."""
        if self._pending_metrics is not None:
            self._pending_metrics()
        return self._train_metrics

    @train_metrics.setter
    def train_metrics(self, value: dict[str, Any]) -> None:
        self._train_metrics = value

    @property
    def train_metric_values(self) -> dict[str, Any]:
        """The last computed training metrics."""
        return resolved(self._train_metric_values)

    @train_metric_values.setter
    def train_metric_values(self, value: dict[str, Any]) -> None:
        self._train_metric_values = value

    @property
    def total_loss_dict(self) -> dict[str, Any]:
        """The losses of the last batch as floats, by key (`loss/train/total`)."""
        return resolved(self._total_loss_dict, tensors=True)

    @total_loss_dict.setter
    def total_loss_dict(self, value: dict[str, Any]) -> None:
        self._total_loss_dict = value
