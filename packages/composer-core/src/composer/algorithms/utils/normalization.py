"""Replace the normalization layers of a model, for algorithms that change how they compute."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from composer.algorithms.warnings import warn_no_effect
from composer.core.event import Event
from composer.core.precision import Precision
from composer.utils import module_surgery

M = TypeVar("M", bound=nn.Module)

_APPLY_AT = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


def convert_norm(module: nn.Module, new_class: type[M]) -> M:
    """Return a layer of another class that shares the attributes, hooks and parameters of `module`.

    Args:
        module: The layer; not modified.
        new_class: A class that needs no other attributes. Its `__init__` is not called.
    """
    new = new_class.__new__(new_class)
    vars(new).update(vars(module))  # including hooks, the training flag and attributes of a subclass
    new._parameters = module._parameters.copy()
    new._compiled_call_impl = None
    return new


def replace_norms(
    name: str, model: nn.Module, old_class: type[M], new_class: type[M], optimizers: module_surgery.Optimizers | None
) -> None:
    """Replace each layer of a class, in place, except subclasses that override `forward` and parametrized layers.

    Args:
        name: The name of the calling function, for the warning.
        model: The model. A layer that is the model itself is not replaced.
        old_class: The class of torch to replace.
        new_class: The class of the replacements, which share the parameters.
        optimizers: The optimizer of the model.

    Warns:
        NoEffectWarning: The model has no `new_class` afterwards.
    """

    def convert(module: nn.Module, index: int) -> nn.Module | None:
        if module_surgery.overrides_forward(module, old_class) or is_parametrized(module):
            return None
        return convert_norm(module, new_class)

    module_surgery.replace_module_classes(model, {old_class: convert}, optimizers=optimizers)
    if not module_surgery.count_module_instances(model, new_class):
        warn_no_effect(
            f"`{name}` changed nothing: the model has no replaceable `torch.nn.{old_class.__name__}`.", stacklevel=3
        )


def is_low_precision(precision: Precision | str | None, name: str) -> bool:
    """Return True for AMP_FP16 and AMP_BF16; warn for any other precision.

    Args:
        precision: The precision of the run.
        name: The name of the calling function, for the warning.

    Raises:
        ValueError: `precision` is unknown.

    Warns:
        NoEffectWarning: `precision` is neither.
    """
    precision = None if precision is None else Precision(precision)
    if precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        return True
    warn_no_effect(
        f"`{name}` only applies to AMP_FP16 and AMP_BF16 precisions, "
        f"got {None if precision is None else precision.value!r}. Nothing was replaced.",
        stacklevel=3,
    )
    return False


def check_apply_at(apply_at: Event) -> None:
    """Check that an event comes before the model is wrapped or compiled.

    Raises:
        ValueError: The event is not INIT, BEFORE_LOAD or AFTER_LOAD.
    """
    if apply_at not in _APPLY_AT:
        raise ValueError(
            f"`apply_at` must be Event.INIT, Event.BEFORE_LOAD or Event.AFTER_LOAD, got {apply_at!r}. "
            f"At later events the model may be wrapped or compiled."
        )
