"""A page that shows the memory of a profile over time."""

from __future__ import annotations

import os
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.utils import check_finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 2**30
_PAGE = """<!DOCTYPE html>
<html>
<head><meta charset="utf-8"><title>Memory timeline</title></head>
<body><img alt="{alt}" style="max-width: 100%" src="data:image/png;base64,{image}"></body>
</html>
"""


def export_memory_timeline_html(
    prof: torch.profiler.profile,
    path: str | os.PathLike[str],
    device: str | None = None,
    figsize: tuple[float, float] = (20, 12),
    title: str | None = None,
    yxis_step_size: float = 1.0,
    return_fig: bool = False,
) -> Figure | None:
    """Draw the memory of a device over time, by category, into a self-contained HTML page.

    Args:
        prof: A profiler that has recorded with `record_shapes`, `profile_memory` and `with_stack`.
        path: The page to write.
        device: The device, such as "cuda:0" or "cpu"; None: the current GPU, or the CPU without one.
        figsize: Width and height in inches, at 80 dots per inch.
        title: A title for the figure.
        yxis_step_size: GiB between two ticks of the memory axis. If there are more than 50, fewer are drawn.
        return_fig: Return the figure.

    Returns:
        The figure, with `return_fig`.

    Raises:
        ValueError: `prof` has not recorded the memory of that device, or `yxis_step_size` is not positive.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_finite("Use 1.0 GiB.", yxis_step_size=yxis_step_size, above=0)
    try:
        from matplotlib.figure import Figure  # not from pyplot, which would hold a reference and may need a display
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The memory timeline is drawn with matplotlib, which is not installed. Run "
            "`pip install 'composer-profiler[memory]'`."
        ) from None
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    times, sizes = _timeline(prof, device)
    figure = Figure(figsize=figsize, dpi=80)
    _draw(figure, times, sizes, yxis_step_size)
    most = max(sum(row) for row in sizes) / _GIB
    lines = [*([title] if title else []), f"Most at a time: {most:.3g} GiB"]
    if torch.device(device).type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        lines.append(f"Of the run: {allocated / _GIB:.3g} GiB allocated, {reserved / _GIB:.3g} GiB reserved")
    figure.gca().set_title("\n\n".join(lines))
    image = BytesIO()
    figure.savefig(image, format="png")
    page = _PAGE.format(image=b64encode(image.getvalue()).decode("ascii"), alt=f"Memory of {device} over time")
    Path(path).write_text(page, encoding="utf-8")
    return figure if return_fig else None


def _timeline(prof: Any, device: str) -> tuple[list[int], list[list[int]]]:
    """Return times in microseconds, and for each of them the bytes by category, after a leading zero."""
    from torch.profiler._memory_profiler import MemoryProfileTimeline  # torch has no public one

    if prof.profiler is None or not (prof.record_shapes and prof.profile_memory and prof.with_stack):
        raise ValueError(
            "`prof` must have recorded with `record_shapes=True`, `profile_memory=True` and `with_stack=True`."
        )
    timeline: Any = MemoryProfileTimeline
    times, sizes = timeline(prof._memory_profile())._coalesce_timeline(device)
    if not times:
        raise ValueError(f"`prof` has recorded no memory of the device {device!r}. Pass the device that was used.")
    return times, sizes


def _draw(figure: Figure, times: list[int], sizes: list[list[int]], step: float) -> None:
    import numpy as np
    from torch.profiler import _memory_profiler as torch_names  # torch has no public names of the categories

    axes = figure.gca()
    milliseconds = (np.array(times) - min(times)) / 1e3
    stacked = np.cumsum(np.array(sizes), axis=1) / _GIB
    for category, color in torch_names._CATEGORY_TO_COLORS.items():
        column = torch_names._CATEGORY_TO_INDEX[category]
        name = "Unknown" if category is None else category.name.capitalize().replace("_", " ")
        axes.fill_between(
            milliseconds, stacked[:, column], stacked[:, column + 1], color=color, alpha=0.7, step="post", label=name
        )
    axes.legend(loc="upper left")
    axes.set_xlabel("Time (ms)")
    axes.set_ylabel("Memory (GiB)")
    top = float(stacked.max())
    if top >= step:  # otherwise matplotlib's default ticks are better
        count = int(top / step) + 1
        axes.set_yticks(np.arange(0, count + 1, max(1, count // 50)) * step)
