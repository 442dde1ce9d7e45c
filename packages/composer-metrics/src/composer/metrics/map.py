"""Mean average precision for object detection."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torchmetrics.detection.mean_ap import MeanAveragePrecision

from composer.utils import MissingConditionalImportError


class MAP(MeanAveragePrecision):
    """COCO mean average precision of bounding boxes: torchmetrics' `MeanAveragePrecision` with its defaults.

    `update` takes two lists with one dict per image: predictions with "boxes" (x1, y1, x2, y2), "scores" and "labels",
    targets with "boxes" and "labels". `compute` works on the host and returns a dict with "map" (the mean over IoU 0.5
    to 0.95), "map_50", "map_75", "mar_100" and so on, in [0, 1], or -1 if there are no matching boxes.

    Args:
        class_metrics: Also return the values per class.
        dist_sync_on_step: Also synchronize the value that `forward` returns.
        process_group: The processes to synchronize; all if None.
        dist_sync_fn: Function that gathers a tensor from all processes; the all-gather of torch if None.

    Raises:
        MissingConditionalImportError: pycocotools or torchvision is not installed; an `ImportError`.
    """

    full_state_update = True

    def __init__(
        self,
        class_metrics: bool = False,
        dist_sync_on_step: bool = False,
        process_group: Any = None,
        dist_sync_fn: Callable[..., Any] | None = None,
    ) -> None:
        if find_spec("pycocotools") is None or find_spec("torchvision") is None:
            raise MissingConditionalImportError("composer-metrics[coco]", conda_package=None)
        super().__init__(
            class_metrics=class_metrics,
            dist_sync_on_step=dist_sync_on_step,
            process_group=process_group,
            dist_sync_fn=dist_sync_fn,
        )
