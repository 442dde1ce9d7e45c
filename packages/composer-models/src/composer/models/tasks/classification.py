"""Classification with any module that returns class scores."""

# No `from __future__ import annotations`: TorchScript does not support string annotations of attributes.

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.loss import soft_cross_entropy
from composer.loss.utils import ignored_label, loss_for
from composer.models.base import ComposerModel
from composer.models.module_with_loss import takes_indices
from composer.models.tasks._targets import check_shapes, check_tensors, index_targets
from composer.utils import check_pair

if TYPE_CHECKING:
    # Slow to import, so at run time only when there are metrics.
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy


class ComposerClassifier(ComposerModel):
    """A classifier from any module that returns class scores, with loss and metrics, for batches (inputs, targets).

    Targets are class indices, shape (N, ...), or class probabilities, shape (N, C, ...), for outputs of shape
    (N, C, ...). torchmetrics' multiclass metrics support only indices: probabilities are converted to the most probable
    class, and rows of zeros (ignored examples) to the `ignore_index` of the metric, or else that of the loss. Other
    metrics get the targets unchanged.

    Args:
        module: Called with the inputs of the batch.
        num_classes: Number of classes; only required for default metrics. `module.num_classes` takes precedence.
        train_metrics: A metric, a `MetricCollection` or a dict of training metrics; {} for none. None: the accuracy.
        val_metrics: The same for evaluation. None: the cross entropy and the accuracy.
        loss_fn: Called with the outputs, the targets, and further arguments of `loss`.

    Attributes:
        train_metrics: The metrics of `get_metrics(True)`; assign a metric, a collection, a dict or None to change them.
        val_metrics: The metrics of `get_metrics(False)`, likewise.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `num_classes` is below 1, or unknown while a default metric needs it.

    Example:
        >>> model = ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2)
        >>> batch = torch.randn(8, 3), torch.randint(2, (8,))
        >>> model.loss(model(batch), batch).shape
        torch.Size([])
        >>> sorted(model.get_metrics(is_train=False))
        ['CrossEntropy', 'MulticlassAccuracy']

    Differs: the default accuracy does not check values of the targets, so that a step does not read from the device.
    Wrong shapes are an error; a wrong index is counted as a wrong prediction.
    """

    num_classes: int | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        num_classes: int | None = None,
        train_metrics: "Metric | MetricCollection | Mapping[str, Metric] | None" = None,
        val_metrics: "Metric | MetricCollection | Mapping[str, Metric] | None" = None,
        loss_fn: Callable[..., Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` must be a `torch.nn.Module`, got {module!r}.")
        if not callable(loss_fn):
            raise TypeError(f"`loss_fn` must be callable, got {loss_fn!r}.")
        self.module = module
        self._loss_fn = loss_fn
        given = _as_count("num_classes", num_classes)
        own = _as_count("module.num_classes", getattr(module, "num_classes", None))
        if given is not None and own is not None and given != own:
            warnings.warn(
                f"`num_classes={given}` was given, but `module.num_classes` is {own}. Using {own}.",
                stacklevel=2,
            )
        self.num_classes = given if own is None else own
        if self.num_classes is None and (train_metrics is None or val_metrics is None):
            raise ValueError(
                "`num_classes` must be given, because `module` has no `num_classes` and the default metrics need it. "
                "Pass `num_classes`, or both `train_metrics` and `val_metrics`."
            )
        if train_metrics is None:
            train_metrics = _accuracy(self.num_classes)
        if val_metrics is None:
            from torchmetrics import MetricCollection

            from composer.metrics import CrossEntropy

            ignored = ignored_label(loss_fn)
            cross_entropy = CrossEntropy(-100 if ignored is None else ignored)
            val_metrics = MetricCollection([cross_entropy, _accuracy(self.num_classes)])
        # Annotated here: TorchScript would try to compile types in annotations of the class body.
        self.train_metrics: Metric | MetricCollection | Mapping[str, Metric] | None = train_metrics
        self.val_metrics: Metric | MetricCollection | Mapping[str, Metric] | None = val_metrics

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("train_metrics", "val_metrics"):
            value = _as_metrics(name, value)
        super().__setattr__(name, value)

    def forward(self, batch: tuple[Tensor, Any]) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_pair(batch, "ComposerClassifier")
        inputs, _ = batch
        outputs: Tensor = self.module(inputs)
        return outputs

    def loss(self, outputs: Any, batch: tuple[Any, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the outputs and the targets.

        Args:
            outputs: The result of `forward`.
            batch: Inputs and targets.
            *args: Passed to the loss function.
            **kwargs: Passed to the loss function, for example `reduction="none"`.

        Raises:
            TypeError: The outputs or the targets are not a tensor; only checked for the default loss function.
            ValueError: The shapes of targets and outputs do not fit; only checked for the default loss function.
        """
        _, targets = batch
        if self._loss_fn is soft_cross_entropy:
            check_tensors(outputs, targets)
            check_shapes(outputs, targets)
        loss: Tensor = loss_for(self._loss_fn, targets)(outputs, targets, *args, **kwargs)
        return loss

    def get_metrics(self, is_train: bool) -> "dict[str, Metric]":
        """Return the metrics by name: the class name of a single metric, otherwise the keys of the collection.

        Args:
            is_train: True: training metrics. False: evaluation metrics.
        """
        metrics = self.train_metrics if is_train else self.val_metrics
        if metrics is None:
            return {}
        from torchmetrics import Metric

        if isinstance(metrics, Metric):
            return {type(metrics).__name__: metrics}
        return dict(metrics.items())

    def update_metric(self, batch: tuple[Any, Any], outputs: Any, metric: "Metric") -> None:
        """Add a batch to a metric.

        Args:
            batch: Inputs and targets.
            outputs: The result of `eval_forward`.
            metric: A metric of `get_metrics`, or a copy.

        Raises:
            ValueError: The shapes of targets and outputs do not fit; only checked for multiclass metrics.
        """
        _, targets = batch
        if takes_indices(metric):
            targets = index_targets(outputs, targets, metric, self._loss_fn)
        metric.update(outputs, targets)


def _as_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}.") from None
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, got {count!r}.")
    return count


def _accuracy(num_classes: int | None) -> "MulticlassAccuracy":
    from torchmetrics.classification import MulticlassAccuracy

    # Validation would read targets from the device in every step; the classifier checks shapes.
    return MulticlassAccuracy(num_classes=num_classes, average="micro", validate_args=False)


def _as_metrics(name: str, value: Any) -> "Metric | MetricCollection | None":
    if value is None or (isinstance(value, Mapping) and not value):
        return None  # an empty collection is not scriptable
    from torchmetrics import Metric, MetricCollection

    if isinstance(value, Mapping):
        return MetricCollection(dict(value))  # a dict would not move between devices with the model
    if isinstance(value, Metric | MetricCollection):
        return value
    raise TypeError(f"`{name}` must be a `Metric`, a `MetricCollection` or a dict of metrics, got {value!r}.")
