"""`LoggerDestination`, under the import path of MosaicML's Composer. `composer.core.logging` defines it."""

from composer.core.logging import LoggerDestination as LoggerDestination

__all__ = ["LoggerDestination"]
