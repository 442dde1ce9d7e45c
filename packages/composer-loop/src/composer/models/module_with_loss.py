"""Any module as a `ComposerModel`: with a function for its loss, and metrics."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from composer.core.types import Batch
from composer.loss.utils import check_for_index_targets, ignored_label, loss_for, loss_setting
from composer.models.base import ComposerModel
from composer.utils.batch_helpers import batch_get, fields_of, find_part, is_batch_dataclass
from composer.utils.import_helpers import load_registered

_PREFIX, _LOSS = "module.", "loss_fn."
_TORCH_LOSS = torch.nn.modules.loss._Loss  # losses of torch: their settings are not trained


class ModuleWithLoss(ComposerModel):
    """Any module, with a loss of its outputs and the targets, and metrics.

    Parameters and buffers have the same names as in the module: in `state_dict()`, so that saved weights load into the
    module, and in arguments of algorithms. Attributes of the module can also be read from this object.

    Args:
        module: The module.
        loss: `loss(outputs, targets) -> loss`, for example `torch.nn.functional.cross_entropy` or a module such as
            `torch.nn.CrossEntropyLoss()`. The result is as in `ComposerModel.loss`. Algorithms that need one loss per
            example pass `reduction="none"`, or set it in a module.
        metrics: A metric of torchmetrics, a `MetricCollection`, a sequence or a dict; for training and evaluation.
            None: "Loss" in evaluation, the mean of the loss over all examples or all labels that the loss does not
            ignore, if torchmetrics is installed.
        input_key: The inputs of the module in a batch: the index, key or attribute name of its only argument; a
            sequence of these, one per argument; or a function `batch -> inputs`. None: a tensor itself; the first of
            the two parts of a tuple or list; all of a mapping or dataclass except the targets, as keyword arguments or
            as the only argument of the module.
        target_key: The targets, likewise. None: the second part of a tuple or list; in a mapping or dataclass, the
            first of "labels", "label", "targets", "target" and "y" that exists.

    Attributes:
        module: The module.

    Raises:
        TypeError: `module` is not a module, `loss` not a function, or a metric not one of torchmetrics.
        ValueError: Two metrics have the same name.

    Warns:
        UserWarning: A metric has another `ignore_index` than the loss.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> model = ModuleWithLoss(net, torch.nn.functional.cross_entropy)
        >>> batch = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
        >>> model.loss(model(batch), batch, reduction="none").shape
        torch.Size([4])
        >>> list(model.state_dict())
        ['weight', 'bias']
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[..., Any],
        metrics: Any = None,
        *,
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` must be a `torch.nn.Module`, got {module!r}.")
        if isinstance(loss, type):
            raise TypeError(
                f"`loss` must be a function of outputs and targets, got the class `{loss.__name__}`. Pass "
                f"`{loss.__name__}()`."
            )
        if not callable(loss):
            raise TypeError(f"`loss` must be a function of outputs and targets, got {loss!r}.")
        _check_arguments(loss)
        self.module = module
        self.input_key, self.target_key = input_key, target_key
        self._metrics, self._measures_loss = _named_metrics(metrics), metrics is None
        ignored = ignored_label(loss)
        for name, metric in self._metrics.items():
            if ignored is not None and ignored >= 0 and getattr(metric, "ignore_index", ignored) != ignored:
                warnings.warn(
                    f"The loss ignores the label {ignored}, but the metric {name!r} has `ignore_index` "
                    f"{metric.ignore_index!r}, so it counts such targets. Pass `ignore_index={ignored}` to the metric.",
                    stacklevel=3,
                )
        # True for the names of inputs that are keyword arguments of the module.
        self._calls: dict[tuple[str, ...], bool] = {}
        if isinstance(loss, _TORCH_LOSS) or any(loss is part for part in module.modules()):
            # The loss has nothing to train or to save here, so state dicts are those of the module.
            self.__dict__["loss_fn"] = loss
        else:
            if isinstance(loss, torch.nn.Module) and hasattr(module, "loss_fn"):
                raise ValueError(
                    f"`loss` must not be a module with weights of its own if `module` has an attribute `loss_fn`, got "
                    f"{_name_of(loss)}: their names in checkpoints would be the same. Rename the attribute."
                )
            self.loss_fn = loss
        self.register_state_dict_post_hook(_remove_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_names)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        loss = self.__dict__.get("loss_fn")
        if isinstance(loss, _TORCH_LOSS):  # class weights move with the module
            loss._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return result

    def forward(self, batch: Batch) -> Any:
        """Call the module with the inputs of a batch, which may lack targets.

        Raises:
            ValueError: The inputs are unknown, because the keys do not fit the batch.
            TypeError: The module does not accept the inputs.
        """
        key = self.input_key
        if isinstance(batch, torch.Tensor) and not callable(key):
            return self.module(batch)  # to predict without targets
        if key is not None:
            inputs = batch_get(batch, key)
            return self.module(*inputs) if _is_many(key) else self.module(inputs)
        if isinstance(batch, Mapping):
            named = batch
        elif is_batch_dataclass(batch):
            named = fields_of(batch)
        else:
            return self.module(batch[_found(batch, "input")])
        target_key = find_part(batch, "target") if self.target_key is None else self.target_key
        inputs = {name: part for name, part in named.items() if name != target_key}
        names = tuple(inputs)
        if names not in self._calls:
            self._calls[names] = _takes_by_name(self.module, names)
        return self.module(**inputs) if self._calls[names] else self.module(*inputs.values())

    def loss(self, outputs: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the outputs and the targets of a batch.

        Args:
            outputs: The result of `forward`.
            batch: The batch.
            *args: Passed to the loss function.
            **kwargs: Passed to the loss function; `reduction` is set in a loss that is a module.

        Raises:
            TypeError: The loss function does not accept an argument.
        """
        targets = self._targets(batch)
        loss = loss_for(self.loss_fn, targets)
        if not kwargs:
            return loss(outputs, targets, *args)
        if isinstance(loss, torch.nn.Module) and "reduction" in kwargs and hasattr(loss, "reduction"):
            loss = copy.copy(loss)
            loss.reduction = kwargs.pop("reduction")
        elif "reduction" in kwargs and not _takes(loss, "reduction"):
            raise TypeError(
                f"`loss` must take `reduction={kwargs['reduction']!r}`, with which an algorithm asks for one loss per "
                f"example, got {_name_of(loss)}, which does not. Give it an argument `reduction`."
            )
        return loss(outputs, targets, *args, **kwargs)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics by name, the same for training and evaluation; without any, the loss for evaluation."""
        if self._measures_loss and not is_train and find_spec("torchmetrics") is not None:
            from composer.models.mean_loss import MeanLoss

            return {"Loss": MeanLoss()}
        return self._metrics

    def update_metric(self, batch: Batch, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric: `metric.update(outputs, targets)`.

        If an algorithm has turned the targets into class probabilities, metrics of class indices get the most probable
        class, and for a position without a target the `ignore_index` of the metric, or else that of the loss.
        """
        targets = self._targets(batch)
        if self._measures_loss:
            loss = self.loss(outputs, batch)
            parts = loss.values() if isinstance(loss, Mapping) else loss if isinstance(loss, (tuple, list)) else [loss]
            ignored, count = ignored_label(self.loss_fn), _num_examples(targets)
            are_indices = isinstance(targets, torch.Tensor) and check_for_index_targets(targets)
            total = torch.stack([part.mean() for part in parts]).sum()
            reduction = loss_setting(self.loss_fn, "reduction")
            if are_indices and ignored is not None and reduction in ("mean", "sum", None):
                count = (targets != ignored).sum()
            metric.update(total / count if reduction == "sum" else total, count)
            return
        tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        may_be_scores = tensors and outputs.dim() > 1 and outputs.shape == targets.shape
        if may_be_scores and targets.is_floating_point() and takes_indices(metric):
            targets = most_probable(targets, metric, self.loss_fn)
        metric.update(outputs, targets)

    def _targets(self, batch: Batch) -> Any:
        return batch_get(batch, _found(batch, "target") if self.target_key is None else self.target_key)

    # ---- the names of the module ----

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters by the names that they have in the module."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield _joined(prefix, name.removeprefix(_PREFIX)), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers by the names that they have in the module."""
        for name, buffer in super().named_buffers("", recurse, remove_duplicate):
            yield _joined(prefix, name.removeprefix(_PREFIX)), buffer

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a submodule by its name in the wrapped module, or in this one."""
        first = target.partition(".")[0]
        return super().get_submodule(target if first in ("", *self._modules) else f"{_PREFIX}{target}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", ()):
                raise
        return getattr(self.module, name)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _remove_prefix(model: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Rename the entries of a state dict to their names in the wrapped module."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}{_PREFIX}")]:
        state_dict[f"{prefix}{key[len(prefix) + len(_PREFIX) :]}"] = state_dict.pop(key)


def _add_prefix(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a state dict back, to load it."""
    own = isinstance(model._modules.get("loss_fn"), torch.nn.Module)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not (own and key.startswith(f"{prefix}{_LOSS}")):
            state_dict[f"{prefix}{_PREFIX}{key[len(prefix) :]}"] = state_dict.pop(key)


def _report_names(model: Any, incompatible: Any) -> None:
    """Give missing and unexpected entries their names in the wrapped module."""
    for names in incompatible:
        names[:] = [name.replace(_PREFIX, "", 1) for name in names]


def _named_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    from torchmetrics import Metric, MetricCollection

    if isinstance(metrics, (MetricCollection, Mapping)):
        named = dict(metrics.items())
    elif isinstance(metrics, str) or not isinstance(metrics, (Metric, Iterable)):
        raise TypeError(
            f"`metrics` must be metrics of torchmetrics, got {metrics!r}. Pass for example "
            f"`metrics=MulticlassAccuracy(num_classes=10)` of torchmetrics.classification, or a dict with names."
        )
    else:
        several = [metrics] if isinstance(metrics, Metric) else list(metrics)
        named = {type(metric).__name__: metric for metric in several}
        if len(named) < len(several):
            raise ValueError(
                f"`metrics` must not have two of one class, got {[type(metric).__name__ for metric in several]}. Give "
                f"them names: `metrics={{'a': ..., 'b': ...}}`."
            )
    for metric in named.values():
        if not isinstance(metric, Metric):
            raise TypeError(f"`metrics` must be metrics of torchmetrics, got {metric!r}.")
    return named


def _num_examples(targets: Any) -> Any:
    """Return the length of the first tensor in nested targets; 1 if there is none."""
    if isinstance(targets, torch.Tensor):
        return len(targets) if targets.dim() else 1
    inner = targets.values() if isinstance(targets, Mapping) else targets if isinstance(targets, (tuple, list)) else ()
    return next(map(_num_examples, inner), 1)


def _is_many(key: Any) -> bool:
    """Return True for a sequence of keys. A pair of functions gets and sets one part of a batch."""
    return isinstance(key, (tuple, list)) and not any(callable(part) for part in key)


def _takes_by_name(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Return True if inputs are keyword arguments of a module, False if a single input is its positional argument.

    Raises:
        TypeError: The module takes other arguments.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    unknown = [name for name in names if name not in parameters]
    if not unknown:
        return True
    if len(names) == 1:
        return False
    given, missing, taken = (", ".join(map(repr, some)) for some in (names, unknown, parameters))
    raise TypeError(
        f"`input_key` and `target_key` must be given for batches with the inputs {given}, because the module takes no "
        f"{missing} (it takes {taken or 'nothing'}). Pass for example `input_key={names[0]!r}`."
    )


def _found(batch: Any, part: Literal["input", "target"]) -> Any:
    """Return the key of the inputs or targets of a batch; raise ValueError if it is unknown."""
    key = find_part(batch, part)
    if key is not None:
        return key
    kind = type(batch).__name__
    if isinstance(batch, Mapping) or is_batch_dataclass(batch):
        names = list(batch if isinstance(batch, Mapping) else fields_of(batch)) or ["y"]
        raise ValueError(
            f"`{part}_key` must be given, because no part of the batch has the usual name of {part}s, got a {kind} of "
            f"{', '.join(map(repr, names))}. Pass for example `{part}_key={names[-1]!r}`."
        )
    hint = "`input_key=0, target_key=2`, or functions of the batch"
    if isinstance(batch, torch.Tensor):  # a number would choose one of its examples
        hint = "`target_key=lambda batch: batch`, if the targets are the inputs"
    got = f"{kind} of {len(batch)} parts" if isinstance(batch, (tuple, list)) else kind
    raise ValueError(
        f"`input_key` and `target_key` must be given for batches that are not pairs of inputs and targets, got a "
        f"{got}. Pass for example {hint}."
    )


def _takes(function: Any, argument: str) -> bool:
    """Return True if a function accepts an argument with a given name, or if that is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some C functions have no signature
        return True
    return any(parameter.name == argument or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _check_arguments(loss: Callable[..., Any]) -> None:
    """Raise TypeError unless the function can be called with outputs and targets."""
    try:
        signature = inspect.signature(loss)
    except ValueError:  # a C function without a signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"`loss` must be a function of outputs and targets, got one with the arguments {signature}. Pass for "
            f"example `loss=lambda outputs, targets: ...`, or define the loss in a `composer.ComposerModel`."
        ) from None


def _name_of(function: Any) -> str:
    return f"`{getattr(function, '__qualname__', type(function).__name__)}`"


@cache
def index_metrics() -> tuple[type, ...]:
    """Return torchmetrics' base classes of metrics that take one class index per example."""
    from torchmetrics import classification

    return (
        classification.MulticlassCalibrationError,
        classification.MulticlassConfusionMatrix,
        classification.MulticlassExactMatch,
        classification.MulticlassHingeLoss,
        classification.MulticlassPrecisionRecallCurve,
        classification.MulticlassStatScores,
    )


def takes_indices(metric: Any) -> bool:
    """Return True if a metric takes class indices, not probabilities: one of torchmetrics, or with `takes_indices`."""
    return getattr(metric, "takes_indices", False) or isinstance(metric, index_metrics())


def most_probable(targets: torch.Tensor, metric: Any, loss: Any) -> torch.Tensor:
    """Return the most probable classes, and for positions without any the index that the metric or the loss ignores.

    Args:
        targets: Probabilities, shape (N, C, ...).
        metric: The metric; its `ignore_index` is used unless it is None.
        loss: The loss; see `composer.loss.utils.ignored_label`.
    """
    ignored = getattr(metric, "ignore_index", None)
    ignored = ignored_label(loss) if ignored is None else ignored
    return torch.where(targets.any(dim=1), targets.argmax(dim=1), -100 if ignored is None else ignored)


# Entry points `wrapper(module, metrics=...)`, named after the package of the module's class.
_WRAPPERS = "composer.model_wrappers"


def user_model_name(model: torch.nn.Module) -> str:
    """Return the class of the module that the user has passed, for messages: without `ModuleWithLoss` around it.

    Example:
        >>> user_model_name(ModuleWithLoss(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy))
        'Linear'
    """
    return type(model.module if isinstance(model, ModuleWithLoss) else model).__name__


def as_composer_model(
    module: Any,
    loss: Callable[..., Any] | None = None,
    metrics: Any = None,
    *,
    input_key: Any = None,
    target_key: Any = None,
) -> ComposerModel:
    """Wrap a module as a `ComposerModel`; return a `ComposerModel` unchanged.

    Without `loss`, a model of a library that computes its own is wrapped by the package that registers that library as
    an entry point of the group "composer.model_wrappers", for example composer-huggingface for transformers and peft.

    Args:
        module: The module.
        loss: See `ModuleWithLoss`, as the other arguments.
        metrics: The metrics.
        input_key: The inputs in a batch; only with `loss`.
        target_key: The targets in a batch; only with `loss`.

    Raises:
        TypeError: `module` is not a module, or an argument has the wrong type.
        ValueError: `module` has its own loss and metrics, or no loss is known, or two metrics have the same name.
        ModuleNotFoundError: The package that wraps the module is not installed.
    """
    given = {"loss": loss, "metrics": metrics, "input_key": input_key, "target_key": target_key}
    names = ", ".join(f"`{name}`" for name, value in given.items() if value is not None)
    if isinstance(module, ComposerModel):
        if names:
            raise ValueError(
                f"{names} must not be given for a `ComposerModel`, which defines its own, got a "
                f"{type(module).__name__}. Give the module alone, or change the class."
            )
        return module
    if not isinstance(module, torch.nn.Module):
        got = f"the class `{module.__name__}`; pass an object" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"`model` must be a `torch.nn.Module`, got {got}.")
    if loss is not None:
        return ModuleWithLoss(module, loss, metrics, input_key=input_key, target_key=target_key)
    for package in dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(module).__mro__):
        try:
            wrapper = load_registered(_WRAPPERS, package)
        except AttributeError:
            continue
        if input_key is not None or target_key is not None:
            raise ValueError(f"{names} must be given together with `loss` for a model of `{package}`.")
        wrapped: ComposerModel = wrapper(module, metrics=metrics)
        return wrapped
    raise ValueError(
        f"`loss` must be given for a module that is not a `ComposerModel`, got a {type(module).__name__}. Pass a "
        f"function of outputs and targets, for example `loss=torch.nn.functional.cross_entropy`, or define the loss "
        f"in a subclass of `composer.ComposerModel`."
    )
