"""Logs images of batches, and what a segmentation model makes of them."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from composer.callbacks._intervals import FirstOfInterval, in_batches_or_epochs
from composer.core import Callback, State, Time
from composer.loggers import Logger
from composer.utils import plain_int

__all__ = ["ImageVisualizer"]

_MODES = ("input", "segmentation")


class ImageVisualizer(Callback):
    """Logs the first images of a training batch at an interval, and of the first batch of every evaluation.

    They are logged as `Images/Train` and `Images/Eval`, as tables where a logger has them. In the mode "segmentation"
    they come with two masks of class indices, `prediction` (the largest output) and `ground_truth`; indices below 0,
    which mean "ignore", become 0.

    **Events** "input": BEFORE_FORWARD and EVAL_BEFORE_FORWARD; "segmentation": BEFORE_LOSS and EVAL_AFTER_FORWARD. And
    INIT, EVAL_START.
    **Cost** none but in the batches it logs; loggers are given tensors on the device, and copy them when it suits them.

    Args:
        interval: How far apart the training batches are, in batches or epochs. The first batch of the run is one.
        mode: "input" or "segmentation".
        num_images: Images to log of a batch, at least 1; fewer if the batch or microbatch has fewer.
        channels_last: Whether the channels of the images come last.
        input_key: Where the images are in the batch; see `State.batch_get_item`.
        target_key: Where the masks are in the batch.

    Raises:
        ValueError: An argument cannot work; when images are logged, if there are none under `input_key`.
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
        number = plain_int(num_images)
        if number is None or number < 1:
            raise ValueError(f"`num_images` must be at least 1, got {num_images!r}. Use 8.")
        self.interval = in_batches_or_epochs(interval)
        self.mode, self.num_images, self.channels_last = mode.lower(), number, channels_last
        self.input_key, self.target_key = input_key, target_key
        self._due = FirstOfInterval(self.interval)
        self._eval_is_new = True

    def init(self, state: State, logger: Logger) -> None:
        self._due.reset()

    def before_forward(self, state: State, logger: Logger) -> None:
        if self.mode == "input" and self._due.begins(state):
            self._log(state, logger, "Images/Train")

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.mode == "segmentation" and self._due.begins(state):
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
            raise ValueError(
                f"`input_key` must lead to images of shape (N, C, H, W), but {self.input_key!r} leads to {what}. "
                f"Choose another key, or leave `ImageVisualizer` out."
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
        few = slice(self.num_images)
        return {
            "prediction": outputs[few].detach().argmax(dim=1),
            "ground_truth": targets[few].detach().clamp(min=0),
        }
