"""`LoggerDestination`, under its established import path. `composer.core.logging` defines it."""

from composer.core.logging import LoggerDestination as LoggerDestination

__all__ = ["LoggerDestination"]
