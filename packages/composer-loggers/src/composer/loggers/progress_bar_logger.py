"""A logger that shows progress bars."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from composer.core import TimeUnit
from composer.loggers import LoggerDestination, format_log_data_value
from composer.loggers._bar import Bar
from composer.loggers._text import config_block, open_stream
from composer.utils import dist

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["ProgressBarLogger"]

_TRAIN_KEYS = ("loss/train",)
_STATS = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_STATS_OF_SECONDS = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # of which there is one per second
_STATS_WITHOUT_END = "{n_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class ProgressBarLogger(LoggerDestination):
    """Shows a bar for the training and one for every evaluation, on the first rank of each node.

    The training has a bar for each epoch if `max_duration` is in epochs, else one for the whole run, in the unit of
    `max_duration`, such as seconds of training. It shows progress, time left, rate and the losses; an evaluation's bar
    shows its results. Time spent evaluating does not count into the rate of the training. The hyperparameters are
    printed once, before anything else.

    On a terminal or in a notebook a bar is redrawn ten times a second; in a file it is a plain line every 30 seconds. A
    training step never waits for the device: the losses shown are copied in the background.

    Args:
        stream: "stdout", "stderr" (looked up now; in a notebook, which shows that as an error, also stdout), or a text
            stream.
        log_traces: Whether to print which algorithms ran at which event.

    Attributes:
        hparams: The hyperparameters.

    Raises:
        ValueError: `stream` is an unknown name.
        TypeError: `stream` is neither a string nor a stream.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(self, stream: TextIO | Literal["stdout", "stderr"] = "stderr", log_traces: bool = False) -> None:
        self.stream = open_stream(stream)
        self.should_log_traces = log_traces
        self.train_pbar: Bar | None = None
        self.eval_pbar: Bar | None = None
        self.hparams: dict[str, Any] = {}
        self._config_printed = False
        self._eval_started = 0.0

    # ---- what is logged ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hparams.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        bar = self.eval_pbar or self.train_pbar
        if bar is not None:
            bar.log(metrics)

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self.should_log_traces:
            self._print("".join(f"[trace]: {key}:{format_log_data_value(run)}\n" for key, run in traces.items()))

    # ---- the bar of the training ----

    def init(self, state: State, logger: Logger) -> None:
        self.hparams = {}
        self._config_printed = False

    def fit_start(self, state: State, logger: Logger) -> None:
        self._print_config()
        self.eval_pbar = None
        # Resumed in the middle of an epoch, there is no EPOCH_START.
        if not _by_epochs(state) or state.timestamp.batch_in_epoch.value > 0:
            self._open_train(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        if _by_epochs(state):
            self._open_train(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        bar = self.train_pbar
        if bar is not None:
            bar.advance(state.timestamp)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if _by_epochs(state):
            self._close_train()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._close_train()

    def _open_train(self, state: State) -> None:
        assert state.max_duration is not None  # the engine has checked
        label = state.dataloader_label or "train"
        if _by_epochs(state):
            key, n, total = "batch_in_epoch", state.timestamp.batch_in_epoch, state.dataloader_len
            title = f"{label:<6}epoch {state.timestamp.epoch.value + 1}"
        else:
            total = state.max_duration
            key, n = total.unit.name.lower(), state.timestamp.get(total.unit)
            title = label
        metrics = None
        if self.train_pbar is not None:  # from a checkpoint, or left by a fit that failed
            self.train_pbar.close(read=False)
            metrics = self.train_pbar.state_dict()["metrics"]
        self.train_pbar = _bar(title, None if total is None else total.value, key, _TRAIN_KEYS, n.value, metrics)
        self._show(self.train_pbar)

    def _close_train(self) -> None:
        if self.train_pbar is not None:
            self.train_pbar.close()
            self.train_pbar = None

    # ---- the bar of an evaluation ----

    def predict_start(self, state: State, logger: Logger) -> None:
        self._print_config()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._print_config()
        self._eval_started = time.perf_counter()
        if self.train_pbar is not None:
            self.train_pbar.clear()  # the evaluation's bar takes its line
        label = state.dataloader_label or "eval"
        total = None if state.dataloader_len is None else state.dataloader_len.value
        keys = ("eval", f"metrics/{label}/")
        self.eval_pbar = _bar(f"{label:<6}{_when(state)}", total, "batch", keys, 0)
        self._show(self.eval_pbar)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self.eval_pbar is not None:
            self.eval_pbar.advance(state.eval_timestamp)

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.eval_pbar is not None:
            self.eval_pbar.close()
            self.eval_pbar = None
        if self.train_pbar is not None:
            self.train_pbar.resume(time.perf_counter() - self._eval_started)

    # ---- the end, and resumption ----

    def close(self, state: State, logger: Logger) -> None:
        for bar in (self.eval_pbar, self.train_pbar):
            if bar is not None:
                bar.close(read=False)
        self.eval_pbar = self.train_pbar = None

    def state_dict(self) -> dict[str, Any]:
        return {
            name: None if bar is None else bar.state_dict()
            for name, bar in (("train_pbar", self.train_pbar), ("eval_pbar", self.eval_pbar))
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the bars of a checkpoint. Nothing is drawn before the run goes on."""
        self.train_pbar, self.eval_pbar = (
            None if state.get(name) is None else Bar.restore(state[name]) for name in ("train_pbar", "eval_pbar")
        )

    # ---- printing ----

    def _show(self, bar: Bar) -> None:
        if dist.get_local_rank() == 0:
            bar.show(self.stream)

    def _print_config(self) -> None:
        if self.hparams and not self._config_printed:
            self._config_printed = True
            self._print(config_block(self.hparams))

    def _print(self, text: str) -> None:
        if dist.get_local_rank() == 0:
            for bar in (self.eval_pbar, self.train_pbar):
                if bar is not None:
                    bar.clear()
            self.stream.write(text)
            self.stream.flush()


def _by_epochs(state: State) -> bool:
    return state.max_duration is not None and state.max_duration.unit is TimeUnit.EPOCH


def _bar(
    title: str, total: int | None, key: str, keys_to_log: tuple[str, ...], n: int, metrics: dict[str, Any] | None = None
) -> Bar:
    title = f"{title:<16}".replace("{", "{{").replace("}", "}}")
    stats = _STATS_WITHOUT_END
    if total is not None:
        stats = f"{{percentage:3.0f}}%|{{bar}}| {_STATS_OF_SECONDS if key == 'second' else _STATS}"
    return Bar(total, f"{title} {stats}", key, keys_to_log, n=n, metrics=metrics)


def _when(state: State) -> str:
    """When an evaluation takes place, to tell its bar from others; empty outside of training."""
    now = state.timestamp
    if now.batch.value == 0:
        return ""
    if _by_epochs(state):
        return f"epoch {now.epoch.value + (now.batch_in_epoch.value > 0)}"
    return f"batch {now.batch.value}"
