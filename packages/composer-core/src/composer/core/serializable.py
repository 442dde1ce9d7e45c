"""The interface of objects whose state is saved in checkpoints."""

from __future__ import annotations

from typing import Any, Protocol


class Serializable:
    """An object with a state to save. By default the state is empty."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: tensors, numbers, strings and containers of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: A dictionary returned by `state_dict`.
        """


class Resumable(Protocol):
    """The progress of a training loop that is not in the `State`, such as the position in the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return what to save under the key `resumption`; a collective operation, the same on every rank."""

    def before_load(self, content: dict[str, Any]) -> None:
        """Read a checkpoint before the state loads it, and remove what the state must not load."""

    def after_load(self, content: dict[str, Any]) -> None:
        """Read a checkpoint after the state loaded it. Random generators are restored when training continues."""
