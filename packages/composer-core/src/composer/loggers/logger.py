"""`Logger` and `format_log_data_value`, under their established import path. `composer.core.logging` defines them."""

from composer.core.logging import Logger as Logger
from composer.core.logging import format_log_data_value as format_log_data_value

__all__ = ["Logger", "format_log_data_value"]
