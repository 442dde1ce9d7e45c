"""The model that does nothing, then the algorithm that replaces the model of a run with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from composer.core import CHANGES_LAYERS, REPLACES_MODEL, SMOOTHS_TARGETS, Algorithm, Event, Placement
from composer.models import ComposerModel
from composer.utils.batch_helpers import check_pair, find_part

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


class NoOpModelClass(ComposerModel):
    """A model that multiplies the targets by its only parameter, which is trained towards 1.

    A batch is `(anything, targets)`, or a mapping whose targets have the key `labels`, `label`, `targets`, `target` or
    `y`, or else are the last value. The inputs are not used. In evaluation the outputs are the targets, so the
    accuracy is 1.

    Args:
        original_model: The model that is replaced. Its device and, if there is one, its attribute `num_classes` are
            used.

    Raises:
        ValueError: `original_model` has no parameters, so its device is not known.
        TypeError: In a forward pass, if the batch has another type or the targets are not a single tensor.

    Example:
        >>> model = NoOpModelClass(torch.nn.Linear(1, 1))
        >>> model((None, torch.tensor([2.0, 4.0]))).tolist()
        [3.0, 6.0]
    """

    def __init__(self, original_model: torch.nn.Module) -> None:
        super().__init__()
        parameter = next(original_model.parameters(), None)
        if parameter is None:
            raise ValueError(
                f"`original_model` must have parameters, because their device is used, got "
                f"{type(original_model).__name__} without any."
            )
        self.weights = torch.nn.Parameter(torch.tensor([1.5], device=parameter.device))
        if hasattr(original_model, "num_classes"):
            self.num_classes = original_model.num_classes

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the targets times the parameter."""
        outputs: torch.Tensor = _targets(batch) * self.weights
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the squared error; further arguments are those of `torch.nn.functional.mse_loss`."""
        return F.mse_loss(outputs, _targets(batch).to(torch.float32), *args, **kwargs)

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> torch.Tensor:
        """Return the targets."""
        return _targets(batch)

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it stands in for a model, which was not trained")

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the fraction of outputs that equal the targets, which is 1."""
        from torchmetrics.classification import BinaryAccuracy  # slow to import, and not needed to look up the class

        return {"BinaryAccuracy": BinaryAccuracy(validate_args=False)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Count the elements of the outputs that equal the targets."""
        correct = (outputs == _targets(batch)).to(torch.int64)
        metric.update(correct, torch.ones_like(correct))


class NoOpModel(Algorithm):
    """Replaces the model of a run with one that does nothing, to measure everything else, above all the dataloader.

    At INIT, after other methods have changed the model, `state.model` becomes a `NoOpModelClass`, and the optimizers
    train only its parameter. The loss is a mean over examples, so microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** `state.model`, the parameters and states of `state.optimizers`.
    **Cost** none; a step is one multiplication. **Compilation** static.

    Example:
        >>> NoOpModel()
        NoOpModel()

    Source: none.
    Differs: none, one or several optimizers or parameter groups are supported: the first group gets the parameter.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_MODEL}, after={CHANGES_LAYERS}, excludes={SMOOTHS_TARGETS})

    def __init__(self) -> None:
        pass

    @staticmethod
    def required_on_load() -> bool:
        """Return True: checkpoints hold the parameter of the replacement."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the model."""
        if isinstance(state.model, NoOpModelClass):
            return
        model = NoOpModelClass(state.model)
        state.model = model
        new = [model.weights]
        for optimizer in state.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"], new = new, []
                group.pop("param_names", None)


def _targets(batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        targets = batch.get(find_part(batch, "target") or next(reversed([*batch]), None))
    elif isinstance(batch, (tuple, list)):
        check_pair(batch, "NoOpModel")
        targets = batch[1]
    else:
        raise TypeError(
            f"`batch` must be a mapping or a pair of inputs and targets for `NoOpModel`, got {type(batch).__name__}. "
            f"Convert the batches with `DataSpec(dataloader, batch_transforms=...)`."
        )
    if not isinstance(targets, torch.Tensor):
        raise TypeError(
            f"The targets of a batch must be one tensor for `NoOpModel`, which multiplies them, got "
            f"{type(targets).__name__}. Select one with `DataSpec(dataloader, batch_transforms=lambda batch: (x, y))`."
        )
    return targets
