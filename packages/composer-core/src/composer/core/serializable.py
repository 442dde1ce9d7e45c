"""The interface of objects whose state is saved in checkpoints."""

from __future__ import annotations

from typing import Any

__all__ = ["Serializable"]


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
