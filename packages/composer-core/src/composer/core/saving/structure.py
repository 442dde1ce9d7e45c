"""A snapshot of the model structure before algorithms change it, so that they can be applied in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer.core.state import State


class ModelSnapshot:
    """A snapshot of the modules, parameters and hooks of a model, and of the parameters in its optimizers.

    Tensors are held by reference: an in-place change is not undone. Replaced parameters stay in memory as long as the
    snapshot exists.

    Args:
        state: The state of the run, before INIT.
    """

    def __init__(self, state: State) -> None:
        self._model = state.model
        self._modules = [
            (module, type(module), {name: _copied(value) for name, value in vars(module).items()})
            for module in state.model.modules()
        ]
        members = ("params", "param_names")
        self._groups = [
            (groups, [{name: list(group[name]) for name in members if name in group} for group in groups])
            for groups in (optimizer.param_groups for optimizer in state.optimizers)
        ]

    def restore(self, state: State) -> None:
        """Undo all changes to the structure of the model, and move it to the device of the changed model."""
        devices = {parameter.device for parameter in state.model.parameters()}
        state.model = self._model
        for module, cls, attributes in self._modules:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update({name: _copied(value) for name, value in attributes.items()})
        for groups, members in self._groups:
            del groups[len(members) :]
            for group, saved in zip(groups, members, strict=True):
                group.pop("param_names", None)
                group.update({name: list(value) for name, value in saved.items()})
        if len(devices) == 1:
            state.model.to(devices.pop())


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value  # the dicts of children, parameters and hooks
