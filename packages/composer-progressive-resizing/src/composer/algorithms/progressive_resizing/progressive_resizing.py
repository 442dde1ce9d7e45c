"""The function, then the algorithm. Images are (N, C, H, W)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

from composer.algorithms.utils.augmentation_common import has_pixel_maps
from composer.core import CHANGES_RESOLUTION, DROPS_PIXELS, TRANSFORMS_BATCH, Algorithm, Event, Placement
from composer.utils import check_finite, check_flags, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_MODES = ("crop", "resize")

T = TypeVar("T")
_Pair = tuple[int, int]


def resize_batch(
    input: torch.Tensor,
    target: T,
    scale_factor: float,
    mode: str = "resize",
    resize_targets: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, T]:
    """Shrink a batch of images to `int(scale_factor * H)` by `int(scale_factor * W)` pixels.

    "resize" selects the nearest pixels; "crop" selects one window, the same for all images, with a position drawn
    uniformly. Targets are resized in the same way, relative to their own size.

    Args:
        input: Shape (N, C, H, W), on any device; not modified.
        target: Returned unchanged, unless `resize_targets`: then shape (N, H', W') or (N, C', H', W'), any dtype.
        scale_factor: Positive; with 1 or more both arguments are returned unchanged.
        mode: "resize" or "crop".
        resize_targets: Resize the targets too: they are images, as in segmentation.
        generator: CPU generator for the position of the window. None: the default CPU generator.

    Returns:
        The smaller inputs and the targets, with unchanged dtypes and devices. A crop is a view of its argument.

    Raises:
        TypeError: `resize_targets` is set and `target` is not a tensor.
        ValueError: `mode` is unknown, `scale_factor` leaves no pixel, or the images do not have the shapes above.

    Example:
        >>> x, y = torch.zeros(2, 3, 8, 6), torch.tensor([0, 1])
        >>> resize_batch(x, y, scale_factor=0.5)[0].shape
        torch.Size([2, 3, 4, 3])

    Source: Howard and Gugger, "Deep Learning for Coders with fastai and PyTorch", chapter 7, "Progressive Resizing".
    Differs: nearest instead of averaged pixels; cropping as an alternative.
    """
    if scale_factor >= 1:
        return input, target
    _check_mode(mode)
    size = _smaller_size("input", input, scale_factor)
    images: Any = target  # with `resize_targets` these are images, which `_smaller_size` checks
    target_size = _smaller_size("target", images, scale_factor) if resize_targets else size
    if mode == "resize":
        smaller = F.interpolate(input, scale_factor=scale_factor, mode="nearest", recompute_scale_factor=False)
        if resize_targets:
            images = _pick_nearest(images, scale_factor, input.dtype)
    else:
        free = (input.shape[-2] - size[0], input.shape[-1] - size[1])
        corner = (_draw_offset(free[0], generator), _draw_offset(free[1], generator))
        smaller = _crop(input, size, corner, free)
        if resize_targets:
            images = _crop(images, target_size, corner, free)
    return smaller, images


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"`mode` must be 'crop' or 'resize', got {mode!r}. 'resize' shows the whole image.")


def _check_images(name: str, images: Any) -> None:
    advice = f"Pass a batch of images, or point `{name}_key` of the algorithm at one."
    if not isinstance(images, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor to be resized, got {type(images).__name__}. {advice}")
    if images.dim() != 4 and not (name == "target" and images.dim() == 3):
        shapes = "(N, C, H, W)" if name == "input" else "(N, H, W) or (N, C, H, W)"
        raise ValueError(f"`{name}` must have shape {shapes} to be resized, got {tuple(images.shape)}. {advice}")


def _smaller_size(name: str, images: Any, scale_factor: float) -> _Pair:
    _check_images(name, images)
    height, width = (int(scale_factor * n) for n in images.shape[-2:])
    if height < 1 or width < 1:
        raise ValueError(
            f"`scale_factor` must leave at least one pixel, got {scale_factor!r} for `{name}` of shape "
            f"{tuple(images.shape)}. Use a larger one."
        )
    return height, width


def _pick_nearest(target: torch.Tensor, scale_factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Select the pixels that `F.interpolate` selects from inputs of `dtype`, without arithmetic on the values."""
    for dim in (-2, -1):
        # The index of the nearest pixel depends on rounding in float32 or float64, so interpolate the indices.
        numbers = torch.arange(target.shape[dim], dtype=torch.promote_types(dtype, torch.float32), device=target.device)
        nearest = F.interpolate(
            numbers[None, None], scale_factor=scale_factor, mode="nearest", recompute_scale_factor=False
        )
        target = target.index_select(dim, nearest[0, 0].long())
    return target


def _draw_offset(highest: int, generator: torch.Generator | None) -> int:
    """Draw an offset in [0, highest] on the host; one drawn on a device would have to be read back to slice."""
    return int(torch.randint(highest + 1, (), device="cpu", generator=generator))


def _crop(image: torch.Tensor, size: _Pair, corner: _Pair, free: _Pair) -> torch.Tensor:
    """Crop a window whose relative position is the same for inputs and targets of different sizes."""
    (height, width), full = size, image.shape[-2:]
    top, left = (c * (w - s) // max(f, 1) for c, w, s, f in zip(corner, full, size, free, strict=True))
    return image[..., top : top + height, left : left + width]


def resize_inputs(
    X: torch.Tensor, y: T, scale_factor: float, mode: str = "resize", resize_targets: bool = False
) -> tuple[torch.Tensor, T]:
    """Call `resize_batch`; an earlier name of it."""
    return resize_batch(X, y, scale_factor, mode, resize_targets)


class ProgressiveResizing(Algorithm):
    """Trains on small images first, which grow to their full size.

    At AFTER_DATALOADER the batch is resized, on its current device. With the elapsed fraction e of the run:

        f = 0 if e < delay else min((e - delay) / (1 - finetune - delay), 1)
        scale = initial_scale + (1 - initial_scale) * f

    The width is then rounded to a multiple of `size_increment`, with the height in proportion. A batch is resized
    before it is split, and cropped at a single position, so microbatches equal one batch in both modes.

    **Events** AFTER_DATALOADER. **Reads** the batch, the elapsed duration. **Writes** inputs; targets with
    `resize_targets`. **Cost** one pass over the inputs with "resize", none with "crop"; saves computation in proportion
    to the dropped pixels. **Compilation** shapes change about `(1 - initial_scale) * width / size_increment` times in
    a run, always between batches. Each new shape may recompile a compiled model; larger increments mean fewer shapes.

    **Logs** `progressive_resizing/height` and `progressive_resizing/width` in pixels, and
    `progressive_resizing/scale_factor`, the scale before rounding.

    Args:
        mode: "resize" (nearest pixels) or "crop" (one random window per batch).
        initial_scale: The scale at the start, in [0, 1].
        finetune_fraction: Fraction of the run at the end with images of full size.
        delay_fraction: Fraction of the run at the start with images of the initial scale.
        size_increment: Widths below the full width are multiples of this number of pixels.
        resize_targets: Resize the targets too: they are images, as in segmentation.
        input_key: Position of the inputs in the batch; see `State.batch_get_item`.
        target_key: Position of the targets in the batch. Used only with `resize_targets`.

    Raises:
        ValueError: `mode` is unknown, a fraction is outside [0, 1], `delay_fraction + finetune_fraction` is larger than
            1, or `size_increment` is less than 1; at the first batch, if inputs are not images (N, C, H, W), or without
            `resize_targets`, if the batch has a mask of its images or boxes.

    Example:
        >>> ProgressiveResizing(initial_scale=0.25).size_increment
        4

    Source: Howard and Gugger, "Deep Learning for Coders with fastai and PyTorch", chapter 7, "Progressive Resizing".
    Differs: sizes grow linearly, rounded to increments, instead of in a few steps set by hand. The final size is the
        full size, even if the width is not a multiple of `size_increment`. With `delay_fraction + finetune_fraction =
        1` the size jumps from the initial scale to full size. Crops reach all edges.
    """

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={CHANGES_RESOLUTION, TRANSFORMS_BATCH}, after={DROPS_PIXELS})

    def __init__(
        self,
        mode: str = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        _check_mode(mode)
        fractions = {"finetune_fraction": finetune_fraction, "delay_fraction": delay_fraction}
        check_finite("It is a fraction.", initial_scale=initial_scale, **fractions, least=0, most=1)
        if delay_fraction + finetune_fraction > 1:
            raise ValueError(
                f"`delay_fraction` and `finetune_fraction` must not add up to more than 1, got {delay_fraction!r} and "
                f"{finetune_fraction!r}. Images grow in the time between them."
            )
        check_integers("Use 1 for every width.", size_increment=size_increment, least=1)
        check_flags(resize_targets=resize_targets)
        self.mode = mode
        self.initial_scale = plain_number(initial_scale)
        self.finetune_fraction, self.delay_fraction = plain_number(finetune_fraction), plain_number(delay_fraction)
        self.size_increment = plain_number(size_increment)
        self.resize_targets = resize_targets
        self.input_key, self.target_key = input_key, target_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Resize the batch to the size for the elapsed duration."""
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None, "the engine requires `max_duration` at this event"
        scale = self._scale_at(elapsed.value)
        input = state.batch_get_item(self.input_key)
        _check_images("input", input)
        if not self.resize_targets and has_pixel_maps(state.batch, input):
            raise ValueError(
                "`resize_targets` must be True for a batch with targets that have a value per pixel, such as masks, "
                "got False. Pass `ProgressiveResizing(resize_targets=True)`, which resizes images and targets alike. "
                "Boxes and keypoints cannot be resized."
            )
        target = state.batch_get_item(self.target_key) if self.resize_targets else None
        input, target = resize_batch(input, target, self._round_scale(scale, input), self.mode, self.resize_targets)
        state.batch_set_item(self.input_key, input)
        if self.resize_targets:
            state.batch_set_item(self.target_key, target)
        logger.log_metrics(
            {
                "progressive_resizing/height": input.shape[2],
                "progressive_resizing/width": input.shape[3],
                "progressive_resizing/scale_factor": scale,
            }
        )

    def _scale_at(self, elapsed: float) -> float:
        if elapsed < self.delay_fraction:
            return self.initial_scale
        if elapsed >= 1 - self.finetune_fraction:  # checked first: the growth period may have no length
            return 1.0
        growth = 1 - self.finetune_fraction - self.delay_fraction
        return self.initial_scale + (1 - self.initial_scale) * (elapsed - self.delay_fraction) / growth

    def _round_scale(self, scale: float, input: torch.Tensor) -> float:
        """Return the closest scale for which the width is a multiple of `size_increment`, or 1."""
        width = input.shape[3]
        rounded = max(round(width * scale / self.size_increment), 1) * self.size_increment
        if scale >= 1 or rounded >= width:
            return 1.0
        # The quotient may be rounded down, and `int(quotient * width)` would then be one pixel short.
        quotient = rounded / width
        return quotient if int(quotient * width) == rounded else math.nextafter(quotient, 1)
