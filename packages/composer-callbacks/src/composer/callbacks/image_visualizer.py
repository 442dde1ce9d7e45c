"""Log images of batches, and the masks of a segmentation model."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from composer.callbacks._intervals import FirstOfInterval, in_batches_or_epochs
from composer.core import Callback, State, Time
from composer.loggers import Logger
from composer.utils import int_at_least

_MODES = ("input", "segmentation")


class ImageVisualizer(Callback):
    """Logs the first images of a training batch at an interval, and of the first batch of every evaluation.

    They are logged as `Images/Train` and `Images/Eval`, as tables if the logger supports them. In the mode
    "segmentation" they have two masks of class indices, `prediction` (argmax of the outputs) and `ground_truth`;
    negative indices, which mean "ignore", become 0.

    **Events** INIT, EVAL_START; "input": BEFORE_FORWARD and EVAL_BEFORE_FORWARD; "segmentation": BEFORE_LOSS and
    EVAL_AFTER_FORWARD.
    **Cost** only in the logged batches; loggers receive tensors on the device.

    Args:
        interval: Interval between logged training batches, in batches or epochs, starting with the first batch.
        mode: "input" or "segmentation".
        num_images: Maximum number of images of a batch or microbatch to log, at least 1.
        channels_last: True if the channels are the last dimension of the images.
        input_key: Key of the images in the batch, a tensor of shape (N, C, H, W), or (N, H, W, C) with `channels_last`;
            see `State.batch_get_item`.
        target_key: Key of the masks in the batch, integers of shape (N, H, W).

    Raises:
        ValueError: An argument is out of range; when images are logged, if `input_key` does not select images.
    """

    def __init__(
        self,
        interval: SupportsIndex | str | Time[Any] = "100ba",
        mode: str = "input",
        num_images: SupportsIndex = 8,
        channels_last: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        if str(mode).lower() not in _MODES:
            raise ValueError(f"`mode` must be 'input' or 'segmentation', got {mode!r}. Use 'input'.")
        number = int_at_least("num_images", num_images, 1, hint="Use 8.")
        self.interval = in_batches_or_epochs(interval)
        self.mode, self.num_images, self.channels_last = mode.lower(), number, channels_last
        self.input_key, self.target_key = input_key, target_key
        self._due = FirstOfInterval(self.interval)
        self._eval_is_new = True

    def init(self, state: State, logger: Logger) -> None:
        self._due.reset()

    def before_forward(self, state: State, logger: Logger) -> None:
        if self.mode == "input" and self._due.starts(state):
            self._log(state, logger, "Images/Train")

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.mode == "segmentation" and self._due.starts(state):
            self._log(state, logger, "Images/Train")

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_is_new = True

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        if self.mode == "input" and self._eval_is_new:
            self._eval_is_new = False
            self._log(state, logger, "Images/Eval")

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        if self.mode == "segmentation" and self._eval_is_new:
            self._eval_is_new = False
            self._log(state, logger, "Images/Eval")

    def _log(self, state: State, logger: Logger, name: str) -> None:
        if not logger.destinations:
            return
        images = state.batch_get_item(self.input_key)
        if not isinstance(images, torch.Tensor) or images.dim() != 4:
            what = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            shape = "(N, H, W, C)" if self.channels_last else "(N, C, H, W)"
            raise ValueError(
                f"`input_key` must select images of shape {shape}, but {self.input_key!r} selects {what}. "
                f"Use another key, or remove `ImageVisualizer`."
            )
        masks = self._masks(state) if self.mode == "segmentation" else None
        logger.log_images(
            images[: self.num_images].detach(),
            name=name,
            channels_last=self.channels_last,
            masks=masks,
            use_table=True,
        )

    def _masks(self, state: State) -> dict[str, torch.Tensor]:
        outputs, targets = state.outputs, state.batch_get_item(self.target_key)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 4:
            raise ValueError(
                f"`mode` must be 'input' for a model whose outputs are not scores of shape (N, classes, H, W), got "
                f"'segmentation' and {type(outputs).__name__}. Use 'input'."
            )
        return {
            "prediction": outputs[: self.num_images].detach().argmax(dim=1),
            "ground_truth": targets[: self.num_images].detach().clamp(min=0),
        }
