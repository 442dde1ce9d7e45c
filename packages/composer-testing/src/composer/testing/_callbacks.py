"""Callbacks for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer.core.callback import Callback
from composer.core.event import Event

if TYPE_CHECKING:
    from composer.core.state import State
    from composer.loggers import Logger


class EventCounterCallback(Callback):
    """Callback that counts the calls of each event.

    Attributes:
        event_to_num_calls: The number of calls by event.
    """

    def __init__(self) -> None:
        self.event_to_num_calls = dict.fromkeys(Event, 0)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.event_to_num_calls[event] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"events": dict(self.event_to_num_calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.event_to_num_calls.update(state["events"])
