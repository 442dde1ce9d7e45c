"""Saving and loading a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from composer.core import _saved_optimizers, _state_dict
from composer.core.passes import PassInput
from composer.core.serializable import Serializable

if TYPE_CHECKING:
    from composer.core.logging import Logger
    from composer.core.state import State

__all__ = ["StateSaving"]


class StateSaving(Serializable):
    """The methods of a state that save and load it."""

    @property
    def _state(self) -> State:
        return cast("State", self)

    def get_model_state_dict(self) -> dict[str, Any]:
        """The model's parameters and buffers by name, without a `module.` prefix of DDP."""
        return _state_dict.model_state(self._state)

    def get_optim_state_dict(self) -> dict[str, Any]:
        """The states of the optimizers by class name, each keyed by parameter name."""
        return _saved_optimizers.optimizers_state(self._state)

    def _get_integrations_state_dict(self) -> dict[str, Any]:
        return _state_dict.integrations(self._state)

    def _get_state_metadata(self) -> dict[str, Any]:
        return _state_dict.metadata(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue the run; see `composer.core._state_dict` for the layout."""
        return _state_dict.save(self._state)

    def load_state_dict(
        self,
        state: dict[str, Any],
        logger: Logger | None = None,
        strict: bool = False,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: PassInput = None,
    ) -> None:
        """Restore what `state_dict` returned.

        Algorithms without which the model cannot be loaded (`required_on_load`) are added and applied first, unless
        `algorithms` holds them. They are rebuilt from their saved representation by parsing; nothing is evaluated.

        Args:
            state: A dictionary returned by `state_dict`, here or by the reference implementation.
            logger: What those algorithms log with. None: one over the loggers among `callbacks`.
            strict: Whether the model's keys must match exactly.
            exclude_algorithms: Class names of algorithms that are not to be added.
            algorithm_passes: The passes that order the run's algorithms, as `Engine` takes them.

        Raises:
            RuntimeError: `strict`, and keys are missing or unexpected.
            KeyError: A saved optimizer holds other parameters.
            ValueError: A saved optimizer has other parameter groups, or an algorithm cannot be added.
            ModuleNotFoundError: The package of such an algorithm is not installed.
        """
        _state_dict.load(self._state, state, logger, strict, exclude_algorithms, algorithm_passes)

    def load_model_state(
        self,
        state_dict: dict[str, Any],
        logger: Logger | None = None,
        strict: bool = True,
        exclude_algorithms: Sequence[str] | None = None,
        algorithm_passes: PassInput = None,
    ) -> None:
        """Restore the model only, with the algorithms it needs; see `load_state_dict` for the arguments."""
        saved = _state_dict.modern(state_dict)
        _state_dict.load_model(self._state, saved, logger, strict, exclude_algorithms, algorithm_passes)

    def load_optim_state(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore the optimizers only.

        Args:
            state_dict: A dictionary returned by `state_dict`.
            strict: Whether each saved optimizer must hold exactly the parameters of this one.

        Raises:
            KeyError: `strict`, and it holds others.
            ValueError: It has other parameter groups.
        """
        _saved_optimizers.load_optimizers(self._state, _state_dict.modern(state_dict)["optimizers"], strict)
