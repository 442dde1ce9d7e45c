"""SIGTERM and SIGINT: finish the batch, save, and leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core import State
from composer.utils.terminal import open_stream

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Records a signal to end the process while a fit runs; a second signal ends it immediately.

    Handlers are installed in the main thread only, as Python requires, and restored afterwards. A signal that the
    program ignores stays ignored.

    Args:
        saver: Saves the run before it ends; None: nothing is saved.
        announce: Shows a message to the user.

    Attributes:
        signal: The signal that was received; None: none.
    """

    def __init__(self, saver: CheckpointSaver | None, announce: Callable[[str], None]) -> None:
        self._saver, self._announce = saver, announce
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def prepare(self) -> None:
        """Save the run at the next BATCH_CHECKPOINT. Called on every rank if any of them received a signal."""
        if self._saver is not None:
            self._saver.save_soon()

    def __enter__(self) -> Interruption:
        self.signal = None
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def leave(self, state: State) -> NoReturn:
        """End the process as the signal requests, after pending uploads.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM or a signal to another rank, with exit status 143.
        """
        number = signal.SIGTERM if self.signal is None else signal.Signals(self.signal)
        saved = "Nothing is saved, because the run has no `save_folder`."
        if self._saver is not None:
            self._saver.flush()
            saved = f"Saved to {self._saver.saved_to}; `autoresume=True` continues from there."
        self._announce(f"{number.name}: the run ends after batch {state.timestamp.batches}. {saved}")
        before = self._before.get(number)
        self._restore()
        if callable(before) and before is not signal.default_int_handler:
            before(number, None)  # the program's own handler
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            name = signal.Signals(number).name
            first = "finished first; nothing is saved" if self._saver is None else "finished and saved first"
            # The line break ends the line of a progress bar.
            text = f"\n{name}: the batch is {first}. Send it again to end immediately."
            print(text, file=open_stream("stderr"), flush=True)
            return
        self._restore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
