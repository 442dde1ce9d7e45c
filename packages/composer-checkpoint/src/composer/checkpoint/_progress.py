"""How far a transfer is, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

__all__ = ["Progress", "showing_progress"]

Progress = bool | Callable[[int, int], None]


@contextmanager
def showing_progress(progress: Progress, name: str) -> Iterator[Any]:
    """A callback of fsspec that shows a bar (True), tells a function of each step, or does nothing (False).

    Args:
        progress: A function is called with the bytes done and the bytes in all.
        name: What is transferred.
    """
    from fsspec.callbacks import Callback, TqdmCallback

    from composer.loggers._bar import bar_file
    from composer.loggers._text import open_stream

    if progress is False:
        yield Callback()
    elif progress is True:
        file = bar_file(open_stream("stderr"))
        bar = TqdmCallback(
            tqdm_kwargs={"desc": PurePosixPath(name).name, "unit": "B", "unit_scale": True, "file": file}
        )
        try:
            yield bar
        finally:
            if bar.tqdm is not None:
                bar.tqdm.close()
    else:
        tell, told = progress, (-1, -1)

        def hook(size: int | None, value: int, **_: Any) -> None:
            nonlocal told
            if size is not None and told != (value, size):
                told = value, size
                tell(value, size)

        yield Callback(hooks={"bytes": hook})
