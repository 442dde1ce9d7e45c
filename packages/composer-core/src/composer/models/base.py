"""The base class of models: a module with a loss and metrics."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from composer.core.types import Batch

if TYPE_CHECKING:
    from composer.loggers.logger import Logger

Model = TypeVar("Model", bound="ComposerModel")


Function = TypeVar("Function", bound=Callable[..., Any])

_ALONE = "_composer_of_outputs_alone"


def of_outputs_alone(eval_forward: Function) -> Function:
    """Mark an `eval_forward` that depends only on its arguments when it is given outputs.

    It may then be called later, or never if the training metrics are not read. Overriding the method removes the mark.

    Args:
        eval_forward: The method.

    Returns:
        The method.
    """
    setattr(eval_forward, _ALONE, True)
    return eval_forward


def is_of_outputs_alone(eval_forward: Callable[..., Any]) -> bool:
    """Return True if a method is marked by `of_outputs_alone`."""
    return getattr(eval_forward, _ALONE, False) is True


class ComposerModel(torch.nn.Module, abc.ABC):
    """A module with a loss and metrics.

    A subclass defines `forward` and `loss`; for metrics also `get_metrics` and `update_metric`. With an optional method
    `flops_per_batch(batch)`, throughput is also reported in FLOPs. With an optional method `begin_turn(turn)`, the
    optimizers of the Trainer take turns in every batch: optimizer i steps after its own forward and backward pass,
    before which `begin_turn(i)` is called, so that `forward` and `loss` can compute the loss of one network.

    Microbatches and ranks are weighted by the number of labels that the loss averages over: the labels that differ from
    the attribute `ignore_index` of the model or of its `loss_fn`, without the first label of each row if the model has
    `shift_labels = True`. If neither has the attribute `ignore_index`, they are weighted by their samples.

    Attributes:
        logger: The logger of the Trainer that trains this model, or None. It is copied, but not pickled.

    Example:
        >>> class Regression(ComposerModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(3, 1)
        ...
        ...     def forward(self, batch):
        ...         inputs, _ = batch
        ...         return self.linear(inputs).squeeze(1)
        ...
        ...     def loss(self, outputs, batch, *args, **kwargs):
        ...         _, targets = batch
        ...         return torch.nn.functional.mse_loss(outputs, targets)
        >>> model, batch = Regression(), (torch.zeros(4, 3), torch.zeros(4))
        >>> model.loss(model(batch), batch).shape
        torch.Size([])
    """

    def __init__(self) -> None:
        super().__init__()
        # Annotated here: TorchScript would try to compile a type annotated in the class body.
        self.logger: Logger | None = None

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Any:
        """Compute the outputs for a batch.

        Args:
            batch: A batch as the dataloader yields it, on the device.

        Returns:
            Outputs of any type, for `loss` and `update_metric`.
        """

    @abc.abstractmethod
    def loss(
        self, outputs: Any, batch: Batch, *args: Any, **kwargs: Any
    ) -> torch.Tensor | Sequence[torch.Tensor] | dict[str, torch.Tensor]:
        """Compute the loss of a batch.

        Args:
            outputs: The result of `forward`.
            batch: The batch.
            *args: Arguments of the loss function.
            **kwargs: Arguments of the loss function; algorithms pass `reduction="none"` for one loss per example.

        Returns:
            A tensor; or a sequence, whose sum is trained on; or a dict, whose entry "total" is trained on if it exists,
            otherwise the sum.
        """

    def eval_forward(self, batch: Batch, outputs: Any | None = None) -> Any:
        """Compute the outputs for metrics; override this if they differ from those of `forward`.

        Args:
            batch: The batch.
            outputs: The result of `forward`, if it was called already (for training metrics).

        Returns:
            `outputs`, or the result of the forward pass if that is None.
        """
        return self(batch) if outputs is None else outputs

    def update_metric(self, batch: Batch, outputs: Any, metric: Any) -> dict[str, Any] | None:
        """Update a metric with a batch.

        Args:
            batch: The batch.
            outputs: The result of `eval_forward`.
            metric: One of the metrics of `get_metrics`.

        Returns:
            None, or values for `state.metric_outputs`, where callbacks can read them.

        Raises:
            NotImplementedError: The subclass has metrics but does not override this method.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `update_metric` to measure {type(metric).__name__}. "
            f"Define it, or return no metrics from `get_metrics`."
        )

    def get_metrics(self, is_train: bool) -> Mapping[str, Any]:
        """Return the metrics of the model.

        Args:
            is_train: True for training metrics, False for evaluation metrics.

        Returns:
            `torchmetrics.Metric` objects by name; the Trainer works on copies of them.
        """
        return {}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["logger"] = None  # it holds open files and connections
        return state

    def __copy__(self: Model) -> Model:
        duplicate = type(self).__new__(type(self))
        duplicate.__setstate__(self.__getstate__())  # type: ignore[no-untyped-call]
        duplicate.logger = self.logger
        return duplicate

    def __deepcopy__(self: Model, memo: dict[int, Any]) -> Model:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate  # first, because a child may refer to its parent
        duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        duplicate.logger = self.logger
        return duplicate


def total_loss(loss: Any) -> torch.Tensor:
    """Return the scalar to differentiate.

    Args:
        loss: A tensor, which is averaged; a dict, whose entry "total", or else the sum of all, is used; or a sequence,
            which is summed.

    Raises:
        TypeError: `loss` is something else.
    """
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    if isinstance(loss, Mapping):
        if "total" in loss:
            return total_loss(loss["total"])
        loss = tuple(loss.values())
    if not isinstance(loss, Sequence) or isinstance(loss, str) or not loss:
        raise TypeError(
            f"`loss` must be a tensor, a sequence of tensors or a dict of tensors, got {type(loss).__name__}. "
            f"Check what the model's `loss` method returns."
        )
    return sum((total_loss(part) for part in loss[1:]), start=total_loss(loss[0]))
