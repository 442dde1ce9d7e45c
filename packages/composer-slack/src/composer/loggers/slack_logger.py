"""A logger for Slack."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from composer.core import Time, TimeUnit
from composer.loggers import LoggerDestination
from composer.loggers.spi import Logged, Sender, check_delivery_options, hold_metrics, import_client
from composer.utils import dist, ensure_tuple, plain_int

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

log = logging.getLogger(__name__)

_MAX_BLOCKS = 50  # of one message, which is Slack's limit
_MAX_BEHIND = 32  # messages; beyond them Slack, which takes about one per second, could not catch up


class SlackLogger(LoggerDestination):
    """Posts chosen metrics and hyperparameters to a Slack channel, from rank 0.

    A message has the latest value of each key that was logged since the last message. It is posted at every
    `log_interval` and after the first batch or epoch, when `max_logs_per_message` keys are waiting, and when the run
    is closed. A thread posts: no step waits for Slack. If Slack is more than 32 messages behind, messages are merged. A
    message that cannot be posted is logged as an error; `on_error` says what follows from the first one.

    Args:
        include_keys: Regular expressions; a key that one of them matches at its start is posted. Without any, all are.
        formatter_func: Called as `formatter_func(data, step=step)` with the values by key and the number of trained
            batches; returns the blocks of the message. None is one section `*key:* value` for each key.
        log_interval: How often to post, in batches or epochs.
        max_logs_per_message: The number of keys in one message, at most 50.
        slack_logging_api_key: The token of a Slack app; None is the environment variable SLACK_LOGGING_API_KEY.
        channel_id: The channel; None is the environment variable SLACK_LOGGING_CHANNEL_ID.
        client_kwargs: Arguments of `slack_sdk.WebClient`, such as `proxy` or `timeout`.
        delivery_timeout: How many seconds in total the end of the run waits for queued messages once Slack fails or
            hangs. None: the Trainer's timeout, which its services share (60 by default).
        on_error: What to do if a message cannot be posted: "warn" (once; the run continues) or "raise".

    Attributes:
        client: The `slack_sdk.WebClient`; None if the token or the channel is missing.

    Raises:
        ImportError: `slack_sdk` is not installed.
        ValueError: `log_interval` is not in batches or epochs, `max_logs_per_message` is not from 1 to 50, a regular
            expression is invalid, `delivery_timeout` is not positive, or `on_error` is unknown.

    Warns:
        UserWarning: The token or the channel is missing, so nothing is posted.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        include_keys: Sequence[str] = (),
        formatter_func: Callable[..., list[dict[str, Any]]] | None = None,
        log_interval: int | str | Time[Any] = "1ba",
        max_logs_per_message: int = _MAX_BLOCKS,
        slack_logging_api_key: str | None = None,
        channel_id: str | None = None,
        *,
        client_kwargs: dict[str, Any] | None = None,
        delivery_timeout: float | None = None,
        on_error: str = "warn",
    ) -> None:
        check_delivery_options(on_error, delivery_timeout)
        self.on_error = on_error
        self.log_interval = Time.from_input(log_interval, TimeUnit.EPOCH)
        if self.log_interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.log_interval.value < 1:
            raise ValueError(
                f"`log_interval` must be a positive number of batches or epochs, such as '10ba', got {log_interval!r}."
            )
        keys = plain_int(max_logs_per_message)
        if keys is None or not 1 <= keys <= _MAX_BLOCKS:
            raise ValueError(
                f"`max_logs_per_message` must be from 1 to {_MAX_BLOCKS}, the most that Slack accepts, got "
                f"{max_logs_per_message!r}."
            )
        self.include_keys = ensure_tuple(include_keys)
        self._patterns = [_compiled(pattern) for pattern in self.include_keys]
        self.formatter_func = formatter_func or _format
        self.max_logs_per_message, self.delivery_timeout = keys, delivery_timeout
        self.slack_logging_api_key = slack_logging_api_key or os.environ.get("SLACK_LOGGING_API_KEY")
        self.channel_id = channel_id or os.environ.get("SLACK_LOGGING_CHANNEL_ID")
        self.client: Any = self._create(client_kwargs or {})
        self._included: dict[str, bool] = {}  # by key
        self._hyperparameters: dict[str, Any] = {}
        self._sender: Sender | None = None
        self._requested = 0  # messages
        self._waiting: dict[str, Any] = {}  # the latest values; used by the thread only
        self._step = 0  # of these values

    def _create(self, arguments: dict[str, Any]) -> Any:
        """Return the client, or None if nothing can be posted."""
        sdk = import_client("slack_sdk", "SlackLogger")
        settings = {
            "slack_logging_api_key": (self.slack_logging_api_key, "SLACK_LOGGING_API_KEY"),
            "channel_id": (self.channel_id, "SLACK_LOGGING_CHANNEL_ID"),
        }
        missing = [f"`{name}` or {variable}" for name, (value, variable) in settings.items() if not value]
        if missing:
            warnings.warn(
                f"`SlackLogger` posts nothing: {' and '.join(missing)} is not set. Pass the argument, or set the "
                f"environment variable.",
                stacklevel=3,
            )
            return None
        from slack_sdk.http_retry import all_builtin_retry_handlers

        return sdk.WebClient(**{"retry_handlers": all_builtin_retry_handlers(), **arguments})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread, which cannot be copied."""
        return {**vars(self), "_sender": None}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        kept = {key: value for key, value in hyperparameters.items() if self._is_included(key)}
        if self._sender is None:
            self._hyperparameters |= kept
        elif kept:
            self._sender.put_metrics(kept, self._step)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        hold_metrics(metrics)  # on every rank, whether they are posted or not
        kept = {key: value for key, value in metrics.items() if self._is_included(key)}
        if kept and self._sender is not None:
            self._sender.put_metrics(kept, 0 if step is None else step)

    def _is_included(self, key: str) -> bool:
        if key not in self._included:
            matched = any(pattern.match(key) for pattern in self._patterns)
            self._included[key] = matched or not self._patterns
        return self._included[key]

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        if self.client is None or dist.get_global_rank() != 0:
            return
        self._waiting, self._requested, self._step = {}, 0, state.timestamp.batch.value
        self._sender = Sender(
            "SlackLogger",
            self._collect,
            on_error=self.on_error,
            timeout=logger.delivery_deadline.for_service(self.delivery_timeout),
        )
        hyperparameters, self._hyperparameters = self._hyperparameters, {}
        self.log_hyperparameters(hyperparameters)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.log_interval.unit is TimeUnit.BATCH:
            self._post_at(state.timestamp.batch.value)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self.log_interval.unit is TimeUnit.EPOCH:
            self._post_at(state.timestamp.epoch.value)
        elif self._sender is not None:
            self._sender.fetch()  # it may be a while until something is logged again

    def _post_at(self, count: int) -> None:
        if self._sender is not None and (count == 1 or count % self.log_interval.value == 0):
            self._requested += 1
            self._sender.put(partial(self._post_unless_behind, self._requested))

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._sender is not None and self.on_error == "raise":  # an error in `close` does not end the run
            self._sender.flush()

    def close(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self._sender.put(self._post, check=False)
            self._sender.flush(check=False)

    def post_close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    # ---- in the thread of the sender ----

    def _collect(self, records: Sequence[Logged]) -> bool:
        """Take values, and return True if that posted some."""
        posted = False
        for metrics, step, _ in records:
            for key, value in metrics.items():
                self._waiting[key] = value
                self._step = step
                if len(self._waiting) >= self.max_logs_per_message:
                    posted |= self._post()
        return posted

    def _post_unless_behind(self, number: int) -> bool:
        return self._requested - number < _MAX_BEHIND and self._post()

    def _post(self) -> bool:
        """Post what is waiting.

        Returns:
            True if something was waiting.

        Raises:
            Exception: Slack did not accept it; the sender then reports the first error and knows that Slack fails.
        """
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return False
        try:
            self.client.chat_postMessage(
                token=self.slack_logging_api_key,
                channel=self.channel_id,
                blocks=self.formatter_func(waiting, step=self._step),
                text=", ".join(f"{key}: {_text(value)}" for key, value in waiting.items()),  # of the notification
            )
        except Exception as error:
            log.error("`SlackLogger` could not post %s: %s", ", ".join(waiting), error)
            raise
        return True


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        ValueError: It is invalid.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`include_keys` must be regular expressions, got {pattern!r}: {error}.") from error


def _format(data: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
    """Return a section for each value."""
    texts = [f"*{key}:* {_text(value)}" for key, value in data.items()]
    return [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
