"""The state of a training run: everything that algorithms and callbacks may read or change."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.utils.data import IterableDataset

from composer.core._observed import ObservedList, SteppingList
from composer.core._registry import html_of, registered_names
from composer.core._registry import load as load_registered
from composer.core.deferred_value import DeferredValue
from composer.core.passes import PassInput
from composer.core.precision import Precision
from composer.core.saving import layout
from composer.core.saving.optimizers import load_optimizers, optimizers_state
from composer.core.serializable import Serializable
from composer.core.time import Time, TimeInput, Timestamp, TimeUnit, ensure_time
from composer.core.types import MetricDict
from composer.devices.device import Device
from composer.utils import dist
from composer.utils.batch_helpers import batch_get, batch_set, find_part
from composer.utils.device import get_device
from composer.utils.iter_helpers import ensure_tuple, length_of
from composer.utils.misc import is_model_ddp
from composer.utils.numbers import plain_number

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.callback import Callback
    from composer.core.logging import Logger
    from composer.core.serializable import Resumable

_SERIALIZED = (
    "model optimizers schedulers algorithms callbacks scaler timestamp "
    "rank_zero_seed train_metrics eval_metrics run_name dataset_state"
).split()


class State(Serializable):
    """Everything related to a training run that algorithms may read or change.

    The Trainer creates one. In a custom loop a few arguments are enough::

        state = State(model=model, max_duration="2ep", rank_zero_seed=0, dataloader=loader)

    Args:
        model: The module being trained.
        rank_zero_seed: The seed of rank 0; rank r uses `rank_zero_seed + r`.
        run_name: The name of the run; None makes one from the current time.
        device: The device to train on: a `Device` or its name; None: the device of the model.
        max_duration: The length of the run: a time string, a `Time` or a number of epochs.
        device_train_microbatch_size: Samples per forward pass; None: the whole batch.
        auto_microbatching: True if the Trainer searches for the largest size that fits into memory.
        train_dataloader: The loader of the training data.
        evaluators: The datasets to evaluate on.
        dataloader: The active loader. Without `train_dataloader` it is the training loader as well.
        dataloader_label: The label of the active loader; None: "train".
        dataloader_len: The number of batches to use per epoch; -1 uses all.
        precision: The numerical precision, a `Precision` or its name.
        precision_config: Arguments of the FP8 recipe.
        optimizers: One optimizer or several.
        scaler: The gradient scaler of fp16 training.
        save_metrics: True if `state_dict` includes metrics.
        algorithms: The algorithms, in the order in which they act unless their placements say otherwise.
        callbacks: The callbacks and loggers, in the order in which they are called.
        schedulers: One learning-rate scheduler or several.
        dataset_state: A saved position of the training dataset, passed to its `load_state_dict` when
            `train_dataloader` is set.
        dataset_resumption: True for each split, such as "train", whose dataset has restored its own position.
        parallelism_config: How the model is sharded, or will be: a `composer.utils.ParallelismConfig` or its dict,
            which needs `composer-trainer`. Sets `fsdp_config`, `fsdp_state_dict_type`, `tp_config` and `device_mesh`.

    Attributes:
        batch: The current batch: on the host from AFTER_DATALOADER on, the microbatch on the device during the forward
            and backward pass.
        inputs: The first part of a batch of two parts (TypeError for any other batch); setting it replaces that part.
        targets: The second part, likewise.
        outputs: The last outputs of the model.
        loss: The last loss: a tensor, a sequence of tensors, or a dict of tensors.
        timestamp: Training progress.
        previous_timestamp: Progress before the last step; None before the first.
        eval_timestamp: Progress of the current evaluation.
        predict_timestamp: Progress of the current prediction.
        metric_outputs: The values that `model.update_metric` returned last.
        eval_metrics: Evaluation metrics by evaluator label and name.
        load_path: The checkpoint that the Trainer loaded; None if it loaded none.
        train_data_spec: How the Trainer splits, counts and transforms the batches of `train_dataloader`; None in a
            custom loop, which uses them unchanged.
        samples_per_epoch: The samples in an epoch while the batch size changes: schedules then count epochs in samples.
            None: they count batches.
        profiler: Records when events, algorithms and callbacks start and end, such as a `composer.profiler.Profiler`;
            None records nothing, at no cost.
        fsdp_enabled: True if the model is sharded over ranks. `fsdp_config`, `tp_config` and `device_mesh` then hold
            the settings, and `fsdp_state_dict_type` says whether checkpoints are `"full"` or `"sharded"`.
        data_rank: The index of the data shard that this rank trains on; None: the global rank.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: `max_duration` cannot be parsed, is negative, or is in "dur", which is a fraction of `max_duration`.
    """

    batch: Any
    outputs: Any
    loss: Any

    load_path: str | None = None
    train_data_spec: Any = None
    samples_per_epoch: int | None = None
    # Set by the code that shards the model.
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
        evaluators: Any = None,
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
        parallelism_config: Any = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"`model` must be a `torch.nn.Module`, got {type(model).__name__}.")
        self._observers: list[Callable[[], None]] = []
        self.model = model
        self._keys = [getattr(model, name, None) for name in ("input_key", "target_key")]  # those of `ModuleWithLoss`
        self._found_keys: dict[int, Any] = {}  # the names that 0 and 1 stand for, once `batch_key` has found them
        self.rank_zero_seed = operator.index(rank_zero_seed)
        self.run_name = run_name if run_name is not None else f"run-{time.strftime('%Y%m%d-%H%M%S')}"
        if device is None:
            tensor = next(model.parameters(), next(model.buffers(), None))
            names = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}
            device = None if tensor is None else names.get(tensor.device.type)
        self.device = get_device(device)
        self.device_train_microbatch_size = plain_number(device_train_microbatch_size)
        self.auto_microbatching = auto_microbatching
        self.precision = precision  # the setter parses
        self.precision_config = precision_config
        self.scaler = scaler
        self.save_metrics = save_metrics
        self.serialized_attributes = list(_SERIALIZED)
        self.resumption: Resumable | None = None  # set by the training loop; every checkpoint holds its `state_dict`
        self.batch = self.outputs = self.loss = None
        self.timestamp = Timestamp()
        self.previous_timestamp: Timestamp | None = None
        self.eval_timestamp = Timestamp()
        self.predict_timestamp = Timestamp()
        self.__iteration_length: Time[Any] | None = None
        self._train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = MetricDict()
        # Set by the Trainer while the metrics of the last batch are not computed yet: call it to compute them.
        self._pending_metrics: Callable[[], None] | None = None
        self._train_metric_values: Mapping[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self._total_loss_dict: dict[str, Any] = {}
        self.metric_outputs: dict[str, Any] = {}
        self._profiler: Any = None
        self._evaluators: ObservedList[Any] = ObservedList(ensure_tuple(evaluators))
        self._optimizers: SteppingList[torch.optim.Optimizer] = SteppingList(ensure_tuple(optimizers))
        self._schedulers: SteppingList[Any] = SteppingList(ensure_tuple(schedulers))
        self._algorithms: ObservedList[Algorithm] = ObservedList(ensure_tuple(algorithms), self._notify)
        self._callbacks: ObservedList[Callback] = ObservedList(ensure_tuple(callbacks), self._notify)
        self._max_duration: Time[Any] | None = None
        self.max_duration = max_duration  # the setter parses
        self.dataset_state = dataset_state
        self.dataset_resumption = {} if dataset_resumption is None else dataset_resumption
        if parallelism_config is not None:
            load_registered("composer.utils", "ParallelismConfig").describe_in(self, parallelism_config)
        self.train_dataloader = train_dataloader  # the setter restores `dataset_state`
        self._dataloader: Iterable[Any] | None = None
        self._dataloader_label: str | None = None
        self._dataloader_len: int | None = None
        if dataloader is not None:
            if dataloader_label is None:
                dataloader_label = "train"
                self.train_dataloader = dataloader if train_dataloader is None else train_dataloader
            self.set_dataloader(dataloader, dataloader_label, dataloader_len)

    @property
    def load_monolith_rank0_only(self) -> bool:
        """True if only rank 0 reads a full checkpoint; see `composer.utils.FSDP2Config`."""
        return self.fsdp_config is not None and bool(self.fsdp_config.load_monolith_rank0_only)

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
        new = None if value is None else ensure_time(value, TimeUnit.EPOCH, argument="max_duration")
        if new is not None and new.unit is TimeUnit.DURATION:
            raise ValueError(
                f"`max_duration` must not be in 'dur', which is a fraction of it, got {new!r}. Use '10ep'."
            )
        if new is not None and new.value < 0:
            raise ValueError(f"`max_duration` must not be negative, got '{new}'. Use for example '10ep'.")
        changed, self._max_duration = (new is None) != (self._max_duration is None), new
        if changed:
            self._notify()

    def get_elapsed_duration(self) -> Time[float] | None:
        """Return the fraction of the run that is done, as a `Time` in 'dur'; None if the run has no length.

        The fraction advances with every batch, whatever the unit of `max_duration`, and is equal on all ranks; the last
        batch may take it beyond 1. Within an epoch it depends on the number of batches per epoch: the length of the
        training loader, or else the mean length of the epochs so far. In the first epoch of a loader without a length
        neither is known, and the fraction only advances at the end of the epoch.
        """
        limit = self._max_duration
        if limit is None:
            return None
        if not limit.value:  # training was stopped before its first batch
            return Time(1.0, TimeUnit.DURATION)
        now, length = self.timestamp, self.__iteration_length
        if limit.unit is TimeUnit.EPOCH:
            done, total = self._count_epochs(now.epochs)
        elif limit.unit is TimeUnit.ITERATION and length is not None and length.unit is TimeUnit.EPOCH:
            done, total = self._count_epochs(now.iterations * length.value + now.epochs_in_iteration)
            total *= length.value
        elif limit.unit is TimeUnit.ITERATION and length is not None:
            done, total = now.iterations * length.value + min(now.tokens_in_iteration, length.value), length.value
        elif limit.unit is TimeUnit.SECOND:
            return Time(now.total_seconds / limit.value, TimeUnit.DURATION)
        else:
            done, total = now.count(limit.unit), 1
        # A single division of integers, so that 3 of 10 batches are exactly the float 0.3.
        return Time(done / (limit.value * total), TimeUnit.DURATION)

    def _count_epochs(self, epochs: int) -> tuple[float, float]:
        """Return the number of batches in `epochs` epochs plus the current one, and the batches per epoch."""
        now = self.timestamp
        length: float | None = self._train_dataloader_len
        if length is None and now.epochs:
            length = (now.batches - now.batches_in_epoch) / now.epochs
        if not length:
            return epochs, 1
        return epochs * length + min(now.batches_in_epoch, length), length

    def is_over(self, limit: Time[Any] | None = None) -> bool:
        """Return True if the run has reached its end, whatever its unit.

        The fraction of `get_elapsed_duration` is already 1 after the last batch, before the last epoch has ended.

        Args:
            limit: Another end; None: `max_duration`.
        """
        if limit is None:
            limit = self._max_duration
            if limit is None:
                return False
        reached: bool = self.timestamp.count(limit._unit) >= limit._value
        return reached

    def stop_training(self) -> None:
        """End the run after the current batch, by shortening `max_duration`.

        A relaunch with `autoresume` then finds a finished run. `trainer.fit(duration=...)` continues it, and so does a
        relaunch with another `max_duration`.
        """
        unit = None if self._max_duration is None else self._max_duration.unit
        if unit is None or unit is TimeUnit.EPOCH:
            unit = TimeUnit.BATCH
        self.max_duration = self.timestamp.get(unit)

    @property
    def _iteration_length(self) -> Time[Any] | None:
        """The length of one iteration of an outer loop, in epochs or tokens; None if there is no outer loop."""
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
        """The loader of the training data. Setting it restores the saved position of a dataset that supports that."""
        return self._train_dataloader

    @train_dataloader.setter
    def train_dataloader(self, value: Iterable[Any] | None) -> None:
        self._train_dataloader = value
        # While an evaluation runs, another loader is the active one.
        self._train_dataloader_len = None if value is None else length_of(value)
        self._load_dataset_state()

    def _load_dataset_state(self) -> None:
        """Pass the loaded position to the training dataset once both are known."""
        position = (self.dataset_state or {}).get("train")
        load = getattr(getattr(self.train_dataloader, "dataset", None), "load_state_dict", None)
        if position is None or load is None:
            return
        load(position)
        self.dataset_state = {**(self.dataset_state or {}), "train": None}
        self.dataset_resumption["train"] = True

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
        """The number of batches to use per epoch; None if unknown. Set with an int or a `Time` in 'ba'."""
        return None if self._dataloader_len is None else Time(self._dataloader_len, TimeUnit.BATCH)

    @dataloader_len.setter
    def dataloader_len(self, value: SupportsIndex | Time[int]) -> None:
        if self._dataloader is None:
            raise RuntimeError("`dataloader_len` cannot be set without a loader. Call `set_dataloader` first.")
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

    @property
    def dataloader_limit(self) -> int | None:
        """The number of batches after which an epoch ends even if the loader has more; None: when the loader ends.

        The length of a `DataLoader` of an `IterableDataset` is an estimate, which several workers may exceed, so it
        is not a limit; `dataloader_len` has it.
        """
        number = self._dataloader_len
        estimated = isinstance(getattr(self._dataloader, "dataset", None), IterableDataset)
        return None if estimated and number == length_of(self._dataloader) else number

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
            dataloader: The loader; None deactivates the current one.
            dataloader_label: The label; required with a loader.
            dataloader_len: The number of batches to use per epoch; -1 uses all.

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

    def batch_key(self, key: Any, batch: Any = None) -> Any:
        """Return the name that 0 (the inputs) or 1 (the targets) stands for in a batch with named parts.

        It is the `input_key` or `target_key` of the model if that is a name, or else what
        `composer.utils.batch_helpers.find_part` finds. Any other key, an index that the batch has, and a key for which
        nothing is found are returned unchanged.

        Args:
            key: The `input_key` or `target_key` of an algorithm.
            batch: The batch; None: the current one.
        """
        batch = self.batch if batch is None else batch
        if type(batch) in (tuple, list) or type(key) is not int or key not in (0, 1):
            return key
        name = self._found_keys.get(key)
        if name is not None and isinstance(batch, dict) and name in batch:  # as in the batches before
            return name
        name = self._keys[key]
        if not isinstance(name, str):
            if key in batch if isinstance(batch, Mapping) else hasattr(type(batch), "__getitem__"):
                return key
            name = find_part(batch, "target" if key else "input")
        if name is None:
            return key
        self._found_keys[key] = name
        return name

    def batch_get_item(self, key: Any) -> Any:
        """Return an item of the batch.

        Args:
            key: An index, a mapping key, an attribute name, a function of the batch, or a `(getter, setter)` pair. In a
                batch with named parts, 0 and 1 are the inputs and the targets; see `batch_key`.
        """
        return batch_get(self.batch, self.batch_key(key))

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace an item of the batch. Tuples are rebuilt.

        Args:
            key: As for `batch_get_item`, but a function takes `(batch, value)` and returns the batch.
            value: The new item.
        """
        self.batch = batch_set(self.batch, self.batch_key(key), value)

    @property
    def inputs(self) -> Any:
        """The first part of a batch of two parts."""
        return _pair_of(self.batch)[0]

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self.batch = (value, _pair_of(self.batch)[1])

    @property
    def targets(self) -> Any:
        """The second part of a batch of two parts."""
        return _pair_of(self.batch)[1]

    @targets.setter
    def targets(self, value: Any) -> None:
        self.batch = (_pair_of(self.batch)[0], value)

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
        """True if the model is wrapped in `DistributedDataParallel`."""
        return is_model_ddp(self.model)

    @property
    def train_metrics(self) -> dict[str, Any]:
        """The training metrics by name, up to date with the last batch."""
        if self._pending_metrics is not None:
            self._pending_metrics()
        return self._train_metrics

    @train_metrics.setter
    def train_metrics(self, value: dict[str, Any]) -> None:
        self._train_metrics = MetricDict(value)

    @property
    def train_metric_values(self) -> dict[str, Any]:
        """The values of the training metrics when they were last computed."""
        values = self._train_metric_values
        if not isinstance(values, dict):
            self._train_metric_values = values = dict(values)
        return _resolved(values)

    @train_metric_values.setter
    def train_metric_values(self, value: Mapping[str, Any]) -> None:
        self._train_metric_values = value

    @property
    def total_loss_dict(self) -> dict[str, Any]:
        """The losses of the last batch as floats, by key (`loss/train/total`)."""
        return _resolved(self._total_loss_dict, tensors=True)

    @total_loss_dict.setter
    def total_loss_dict(self, value: dict[str, Any]) -> None:
        self._total_loss_dict = value

    # ---- lists; a change of algorithms, callbacks or profiler notifies the engines ----

    def _notify(self) -> None:
        """Notify the engines that their dispatch tables are out of date."""
        for observer in self._observers:
            observer()

    @property
    def evaluators(self) -> list[Any]:
        """The datasets to evaluate on."""
        return self._evaluators

    @evaluators.setter
    def evaluators(self, value: Any) -> None:
        self._evaluators[:] = ensure_tuple(value)

    @property
    def optimizers(self) -> SteppingList[torch.optim.Optimizer]:
        """The optimizers. `step` and `zero_grad` of the list call the methods of every optimizer."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, value: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers[:] = ensure_tuple(value)

    @property
    def schedulers(self) -> SteppingList[Any]:
        """The learning-rate schedulers. `step` of the list calls `step` of every scheduler."""
        return self._schedulers

    @schedulers.setter
    def schedulers(self, value: Any) -> None:
        self._schedulers[:] = ensure_tuple(value)

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms, in the order in which the user listed them."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, value: Algorithm | Sequence[Algorithm]) -> None:
        self._algorithms[:] = ensure_tuple(value)

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks and loggers, in the order in which the user listed them."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, value: Callback | Sequence[Callback]) -> None:
        self._callbacks[:] = ensure_tuple(value)

    @property
    def profiler(self) -> Any:
        """The profiler that records when events, algorithms and callbacks start and end; None if there is none."""
        return self._profiler

    @profiler.setter
    def profiler(self, value: Any) -> None:
        self._profiler = value
        self._notify()

    # ---- saving and loading; `composer.core.saving` has the layout ----

    def _repr_html_(self) -> str | None:
        return html_of("html_of_state", self)

    def get_model_state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers of the model by name, without the `module.` prefix of DDP."""
        return layout.model_state(self)

    def get_optim_state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizers by class name, each keyed by parameter name."""
        return optimizers_state(self)

    def _get_integrations_state_dict(self) -> dict[str, Any]:
        return layout.integrations(self)

    def _get_state_metadata(self) -> dict[str, Any]:
        return layout.metadata(self)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume the run; `composer.core.saving.layout` describes the keys."""
        return layout.state_dict_of(self)

    def load_state_dict(
        self,
        state: dict[str, Any],
        logger: Logger | None = None,
        strict: bool = False,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: PassInput = None,
    ) -> None:
        """Restore what `state_dict` returned.

        Algorithms that change the model so that it cannot be loaded without them (`required_on_load`) are added and
        applied first, unless `algorithms` has them already. They are rebuilt by parsing their saved `repr`, which is
        never evaluated.

        Args:
            state: A dictionary returned by `state_dict`, here or by MosaicML's Composer.
            logger: The logger for those algorithms; None: a logger with the destinations among `callbacks`.
            strict: True if the keys of the model must match exactly.
            exclude_algorithms: Class names of algorithms that must not be added.
            algorithm_passes: The passes that order the algorithms, as for `Engine`.

        Raises:
            RuntimeError: `strict`, and keys are missing or unexpected.
            KeyError: A saved optimizer has other parameters.
            ValueError: A saved optimizer has other parameter groups, or an algorithm cannot be added.
            ModuleNotFoundError: The package of such an algorithm is not installed.
        """
        layout.load(self, state, logger, strict, exclude_algorithms, algorithm_passes)

    def load_model_state(
        self,
        state_dict: dict[str, Any],
        logger: Logger | None = None,
        strict: bool = True,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: PassInput = None,
    ) -> None:
        """Restore only the model, with the algorithms that it requires. See `load_state_dict` for the arguments."""
        saved = layout.upgrade_state_dict(state_dict)
        layout.load_model(self, saved, logger, strict, exclude_algorithms, algorithm_passes)

    def load_optim_state(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore only the optimizers.

        Args:
            state_dict: A dictionary returned by `state_dict`.
            strict: True if each saved optimizer must have exactly the parameters of the current one.

        Raises:
            KeyError: `strict`, and a saved optimizer has other parameters.
            ValueError: A saved optimizer has other parameter groups.
        """
        load_optimizers(self, layout.upgrade_state_dict(state_dict)["optimizers"], strict)


def _resolved(values: dict[str, Any], tensors: bool = False) -> dict[str, Any]:
    """Read deferred values from the device, in place; with `tensors`, also replace tensors by their numbers."""
    for key, value in values.items():
        if isinstance(value, DeferredValue):
            values[key] = value.value
        elif tensors and isinstance(value, torch.Tensor):
            values[key] = value.item()
    return values


def _pair_of(batch: Any) -> Sequence[Any]:
    """Return the two parts of a batch."""
    if batch is None:  # in `for state.inputs, state.targets in loader` there is no batch at first
        return (None, None)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"`state.inputs` and `state.targets` need a batch of two parts, but the batch is a {type(batch).__name__}. "
            f"Use `state.batch_get_item(key)` and `state.batch_set_item(key, value)`."
        )
    return batch


__getattr__ = registered_names(__name__)
