"""Writes the page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from composer.report._find import find_runs
from composer.report._read import read_run

__all__ = ["write_report"]


def write_report(
    folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], output: str | os.PathLike[str] = "report.html"
) -> Path:
    """Write one page about a run, or one that compares several. It needs no network and loads nothing.

    Args:
        folders: A run's folder, or several; or a folder that holds folders of runs.
        output: The file to write; folders that do not exist are made.

    Returns:
        The file.

    Raises:
        RunNotFoundError: A folder holds no run.
        ValueError: `folders` is empty, or a run was recorded by a later release.

    Example:
        >>> import tempfile, torch
        >>> from composer.core import Engine, State
        >>> from composer.loggers import RunRecorder
        >>> recorder = RunRecorder(folder := tempfile.mkdtemp())
        >>> state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", callbacks=[recorder], run_name="a")
        >>> engine = Engine(state)
        >>> _ = engine.run_event("init")
        >>> engine.logger.log_metrics({"loss": 0.5})
        >>> engine.close()
        >>> write_report(folder, f"{folder}/report.html").name
        'report.html'
    """
    from composer.report._page import render

    given = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    if not given:
        raise ValueError("`folders` must name at least one folder of a run, got none.")
    page = render([read_run(folder) for folder in find_runs(given)])
    path = Path(output).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
