"""`Logger` and `format_log_data_value` of `composer.core.logging`, under the import path of MosaicML's Composer."""

from composer.core.deferred_value import DeferredValue as DeferredValue
from composer.core.logging import Logger as Logger
from composer.core.logging import format_log_data_value as format_log_data_value
