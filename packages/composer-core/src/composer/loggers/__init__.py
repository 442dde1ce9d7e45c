"""Loggers: destinations of metrics, hyperparameters and files. `Logger` passes them to each `LoggerDestination`.

Other names are looked up in the installed packages; for a missing one the error names the package to install.
To write a logger for a remote service, see `composer.loggers.spi`.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

_OWN = {"logger": "DeferredValue Logger format_log_data_value", "logger_destination": "LoggerDestination"}
__getattr__, __dir__ = lazy_namespace("composer.loggers", globals(), _OWN, listed=True)
