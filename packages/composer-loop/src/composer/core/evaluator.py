"""A dataset to evaluate on, with its metrics and evaluation interval."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from composer.core.data_spec import DataSpec, check_microbatch_size, ensure_data_spec
from composer.core.event import Event
from composer.core.time import Time, TimeUnit, ensure_time
from composer.core.types import MetricDict
from composer.utils.interval_scheduler import create_interval_scheduler
from composer.utils.numbers import plain_int, plain_number

if TYPE_CHECKING:
    from composer.core.state import State

log = logging.getLogger(__name__)

T = TypeVar("T")


class Evaluator:
    """A dataset to evaluate on.

    Args:
        label: The name of the dataset; metrics are logged as `metrics/<label>/<name>`.
        dataloader: An iterable of batches, a `DataSpec`, or a dict of `DataSpec` arguments.
        metric_names: Case-insensitive regular expressions that select the evaluation metrics of the model by name;
            None selects all metrics, [] none.
        subset_num_batches: The number of batches to evaluate; None: that of the Trainer; -1: all.
        eval_interval: The interval between evaluations during training: a number of epochs, a time string, a `Time`, or
            a function `(state, event) -> bool`. 0: never; None: that of the Trainer.
        device_eval_microbatch_size: Samples per forward pass; None: the `batch_size` of the dataloader, or the whole
            batch if it has none. "auto" starts with that size; the Trainer halves it when the GPU runs out of memory.

    Raises:
        TypeError: `label` is not a name, `dataloader` does not yield batches, or `eval_interval` is not a time.
        ValueError: `eval_interval` is negative, `subset_num_batches` is not a number of batches, `metric_names` is not
            a collection of regular expressions, `device_eval_microbatch_size` is neither "auto" nor a positive number,
            or "auto" is used with a sequence-parallel dataloader.
        AttributeError: `device_eval_microbatch_size` is "auto", and the dataloader has no `batch_size`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> evaluator = Evaluator(label="test", dataloader=loader, metric_names=["accuracy"])
        >>> evaluator.select_metrics({"MulticlassAccuracy": 1, "CrossEntropy": 2})
        {'MulticlassAccuracy': 1}
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: DataSpec | Iterable[Any] | dict[str, Any],
        metric_names: Collection[str] | None = None,
        subset_num_batches: SupportsIndex | None = None,
        eval_interval: SupportsIndex | str | Time[int] | Time[float] | Callable[[State, Event], bool] | None = None,
        device_eval_microbatch_size: SupportsIndex | float | str | None = None,
    ) -> None:
        name: Any = label
        if not isinstance(name, str) or not name:
            raise TypeError(f"`label` must be a name such as 'eval', got {label!r}.")
        if label == "train":
            raise ValueError(
                "`label` must not be 'train', the label of the training metrics. Use for example 'train_eval'."
            )
        self.label = label
        self._inherited: dict[str, Any] = {}  # the values from a Trainer
        self.dataloader = ensure_data_spec(dataloader)
        self.metric_names = _metric_names(metric_names)
        number = plain_int(subset_num_batches)
        if subset_num_batches is not None and (number is None or number < -1 or number == 0):
            raise ValueError(
                f"`subset_num_batches` must be a positive number of batches, -1 for all, or None for that of the "
                f"Trainer, got {subset_num_batches!r}."
            )
        self.subset_num_batches = number
        self.eval_interval = eval_interval
        self.auto_microbatching = device_eval_microbatch_size == "auto"
        if self.auto_microbatching:
            if getattr(self.dataloader, "seq_parallel_world_size", 1) != 1:
                raise ValueError(
                    "`device_eval_microbatch_size` must be a number for a dataloader with `seq_parallel_world_size`, "
                    "got 'auto'. Set the number of samples per forward pass."
                )
            warnings.warn(
                "`device_eval_microbatch_size='auto'` may potentially fail with unexpected CUDA errors, because it "
                "continues after an out-of-memory error. If it fails, set a number.",
                stacklevel=2,
            )
        self.device_eval_microbatch_size = _microbatch_size(device_eval_microbatch_size, self.dataloader.dataloader)
        check_microbatch_size("device_eval_microbatch_size", self.device_eval_microbatch_size, self.dataloader)

    @property
    def eval_interval(self) -> Callable[[State, Event], bool] | None:
        """The function of state and event that returns True when it is time to evaluate; None uses that of the Trainer.

        Set with any form that the constructor accepts.
        """
        return self._eval_interval

    @eval_interval.setter
    def eval_interval(
        self, eval_interval: SupportsIndex | str | Time[int] | Time[float] | Callable[[State, Event], bool] | None
    ) -> None:
        interval: Any = plain_number(eval_interval)
        if isinstance(interval, (int, str, Time)) and not isinstance(interval, bool):
            if ensure_time(interval, TimeUnit.EPOCH, argument="eval_interval").value < 0:
                raise ValueError(
                    f"`eval_interval` must be positive, or 0 to never evaluate during training, got "
                    f"{str(interval)!r}. Use for example '1ep'."
                )
            self._eval_interval: Callable[[State, Event], bool] | None = create_interval_scheduler(
                interval, checkpoint_events=False, final_events={Event.FIT_END}
            )
        elif isinstance(interval, (bool, type)) or not (interval is None or callable(interval)):
            raise TypeError(
                f"`eval_interval` must be a time such as '1ep' or '100ba', a number of epochs or a function, got "
                f"{interval!r}."
            )
        else:
            self._eval_interval = interval

    def _inherit(self, **values: Any) -> None:
        """Use the values of a Trainer for arguments that are not set; those of a later Trainer replace them."""
        for name, value in values.items():
            own = getattr(self, name)
            if own is None or self._inherited.get(name) is own:
                setattr(self, name, value)
                self._inherited[name] = getattr(self, name)

    def select_metrics(self, metrics: Mapping[str, T]) -> dict[str, T]:
        """Return the metrics that match `metric_names`.

        Args:
            metrics: All metrics of the model by name.
        """
        if self.metric_names is None:
            return MetricDict(metrics)
        selected = set()
        for pattern in self.metric_names:
            matches = {name for name in metrics if re.search(pattern, name, re.IGNORECASE)}
            if not matches:
                log.warning(
                    "No metric of the model matches %r in `metric_names` of evaluator %r. The metrics are: %s.",
                    pattern,
                    self.label,
                    ", ".join(metrics) or "none",
                )
            selected |= matches
        return MetricDict({name: metric for name, metric in metrics.items() if name in selected})


def ensure_evaluator(
    evaluator: Evaluator | DataSpec | Iterable[Any] | dict[str, Any], default_metric_names: Collection[str] | None
) -> Evaluator:
    """Make an `Evaluator` with the label "eval" from a dataloader; return an `Evaluator` unchanged.

    Args:
        evaluator: An `Evaluator`, or a value for its argument `dataloader`.
        default_metric_names: The `metric_names` of a new `Evaluator`.
    """
    if isinstance(evaluator, Evaluator):
        return evaluator
    return Evaluator(label="eval", dataloader=evaluator, metric_names=default_metric_names)


def _metric_names(names: Any) -> list[str] | None:
    if names is None:
        return None
    is_collection = isinstance(names, Collection) and not isinstance(names, (str, bytes, Mapping))
    if not is_collection or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`metric_names` should be a list of strings, got {names!r}. Use None for all metrics.")
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"`metric_names` must contain regular expressions, got {name!r}: {error}. '.*' matches everything."
            ) from error
    return sorted(names) if isinstance(names, Set) else list(names)


def _microbatch_size(size: Any, dataloader: Iterable[Any]) -> int | float | None:
    if size is None or size == "auto":
        batch_size = getattr(dataloader, "batch_size", None)
        if batch_size is None:  # a torch dataloader with a batch sampler
            batch_size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        if batch_size is None and size is None:
            return None  # e.g. a list of batches: one forward pass for each
        if batch_size is None:
            raise AttributeError(
                f"`dataloader` must have a `batch_size` if `device_eval_microbatch_size` is {size!r}, got "
                f"{type(dataloader).__name__} without one. Set `device_eval_microbatch_size` to a number."
            )
        default_size: int | float = plain_number(batch_size)
        return default_size
    number = plain_number(size)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
        raise ValueError(
            f"`device_eval_microbatch_size` must be 'auto' or a positive number, got {size!r}. "
            f"Leave it out to use the batch size of the dataloader."
        )
    return number
