"""What a run needs besides its state to go on exactly, kept by whoever runs the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["Resumable", "attach", "attached"]


class Resumable(Protocol):
    """Keeps the position in the training data, and the like."""

    def state_dict(self) -> dict[str, Any]:
        """What to save under the key `resumption`; a collective operation, the same on every rank."""

    def before_load(self, content: dict[str, Any]) -> None:
        """See a checkpoint before the state takes it, and take out what the state is not to load."""

    def after_load(self, content: dict[str, Any]) -> None:
        """See a checkpoint after the state took it. Generators are restored when training goes on, not here."""


_ATTACHED: WeakKeyDictionary[State, Resumable] = WeakKeyDictionary()


def attach(state: State, part: Resumable) -> None:
    """Let every checkpoint of this state hold, and restore, what `part` keeps."""
    _ATTACHED[state] = part


def attached(state: State) -> Resumable | None:
    """What was attached to a state."""
    return _ATTACHED.get(state)
