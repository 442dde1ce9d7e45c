"""What an algorithm did in a run, told from what was counted and logged."""

from __future__ import annotations

from composer.core import Algorithm, State
from composer.loggers import InMemoryLogger
from composer.recipes._watch import Watch

__all__ = ["describe_deeds"]


def describe_deeds(algorithm: Algorithm, state: State, memory: InMemoryLogger, watch: Watch) -> str:
    return ""
