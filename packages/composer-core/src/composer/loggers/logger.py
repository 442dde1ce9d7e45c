"""`Logger`, under the import path of MosaicML's Composer. `composer.core.logging` defines it."""

from composer.core._registry import registered_names
from composer.core.deferred_value import DeferredValue as DeferredValue
from composer.core.logging import Logger as Logger

__getattr__ = registered_names(__name__, "composer.loggers")
