"""Objects whose state goes into a checkpoint."""

from __future__ import annotations

from typing import Any

__all__ = ["Serializable"]


class Serializable:
    """Something with a state to save; the default has none."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save: tensors, numbers, strings and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: A dictionary returned by `state_dict`.
        """
