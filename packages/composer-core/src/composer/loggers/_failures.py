"""What happens when a logger fails: it is told once, and the training goes on."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer.loggers.logger_destination import LoggerDestination

__all__ = ["call_logger", "note_failure", "tell_failures"]

log = logging.getLogger(__name__)

_COUNT = "_composer_failures"  # an attribute of the destination


def call_logger(destination: LoggerDestination, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a destination; None if it raised, which `note_failure` handles."""
    try:
        return getattr(destination, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - told by `note_failure`
        note_failure(destination, method, error)
        return None


def note_failure(destination: LoggerDestination, method: str, error: Exception) -> None:
    """Warn of the first failure of a destination, and count the later ones. To be called where `error` is handled.

    Raises:
        Exception: `error`, if the destination's `on_error` is "raise".
    """
    if destination.on_error == "raise":
        raise error
    count = vars(destination).get(_COUNT, 0)
    vars(destination)[_COUNT] = count + 1
    name = type(destination).__name__
    if count:
        log.debug("`%s.%s` failed again.", name, method, exc_info=error)
        return
    log.warning("`%s.%s` failed:", name, method, exc_info=error)
    warnings.warn(
        f"`{name}.{method}` failed: {type(error).__name__}: {error}. The run goes on; later failures of this logger "
        f"are only counted. Set its `on_error` to 'raise' to stop the run instead.",
        UserWarning,
        stacklevel=4,
    )


def tell_failures(destination: LoggerDestination) -> None:
    """Log how often a destination failed, if that was more than the once that was warned of."""
    count = vars(destination).pop(_COUNT, 0)
    if count > 1:
        log.warning("`%s` failed %d times in this run; the first was reported.", type(destination).__name__, count)
