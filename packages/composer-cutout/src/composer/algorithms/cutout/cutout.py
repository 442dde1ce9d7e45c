"""`cutout_batch` and the algorithm `CutOut`. Tensors are (..., H, W): x along W, y along H; s is the side of a hole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from composer.core import CHANGES_RESOLUTION, DROPS_PIXELS, ERASES_PIXELS, TRANSFORMS_BATCH, Algorithm, Event, Placement
from composer.utils import check_finite, check_flags, check_integers, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

ImageT = TypeVar("ImageT")


def cutout_batch(
    input: ImageT,
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> ImageT:
    """Set the pixels in square holes to 0, in a batch of images or in one image.

    A hole has sides of `s = int(length * min(H, W))` pixels and is clipped at the edges of the image. All images and
    channels get the same holes.

    Args:
        input: A tensor of shape (N, C, H, W), (C, H, W) or (H, W), any dtype and device, or a PIL image; not modified.
        num_holes: The number of holes, which may overlap.
        length: Sides of a hole as a fraction of the shorter side of the image, in [0, 1].
        uniform_sampling: True if every pixel is equally likely to be in a hole. Otherwise the center of the hole is
            uniform over the pixels, so the middle of the image is in it more often than the edges.
        generator: Draws the holes, on the host. None: torch's default CPU generator.

    Returns:
        A new tensor or image with the type, shape, dtype, memory format and mode of `input`.

    Raises:
        TypeError: `input` is neither a tensor nor a PIL image.
        ValueError: `input` has fewer than two dimensions, `num_holes` is negative, or `length` is outside [0, 1].

    Example:
        >>> cutout_batch(torch.ones(2, 3, 8, 8), length=0.5, uniform_sampling=True).shape
        torch.Size([2, 3, 8, 8])
        >>> cutout_batch(torch.ones(2, 2), length=1.0).sum() < 4
        tensor(True)

    Source: DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
        arXiv:1708.04552, section 3.
    Differs: one draw for the whole batch instead of one for each image. Odd sides of a hole are exact.
    """
    _check_arguments(num_holes, length)
    image: Any = input
    output: Any
    if isinstance(image, torch.Tensor):
        if image.dim() < 2:
            raise ValueError(f"`input` must have a height and a width, got shape {tuple(image.shape)}. Pass images.")
        height, width = image.shape[-2:]
        output = image.clone()
    elif _is_pil(image):
        width, height = image.size
        output = image.copy()
    else:
        raise TypeError(f"`input` must be a tensor or a PIL image, got {type(input).__name__}. Convert it first.")
    side = int(length * min(height, width))
    for _ in range(num_holes):
        x = _draw_center(width, side, uniform_sampling, generator)
        y = _draw_center(height, side, uniform_sampling, generator)
        if isinstance(output, torch.Tensor):
            _generate_mask(output, width, height, x, y, side)
        else:
            (x1, x2), (y1, y2) = _span(x, side, width), _span(y, side, height)
            output.paste(0, (x1, y1, x2, y2))
    return output  # type: ignore[no-any-return]


class CutOut(Algorithm):
    """Trains on images with square holes.

    At AFTER_DATALOADER the holes are cut into the inputs of the batch, on the device it is on. A batch is cut before it
    is split, so microbatches equal one batch.

    **Events** AFTER_DATALOADER. **Reads** the batch. **Writes** its inputs. **Cost** one copy of the inputs.
    **Compilation** static: no shape changes.

    Args:
        num_holes: The number of holes, which may overlap.
        length: Sides of a hole as a fraction of the shorter side of the image, in [0, 1].
        uniform_sampling: True if every pixel is equally likely to be in a hole.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.

    Raises:
        ValueError: `num_holes` is negative, or `length` is outside [0, 1]; at the first batch, if it has no images.

    Example:
        >>> CutOut(length=0.25)
        CutOut(num_holes=1,length=0.25,uniform_sampling=False,input_key=0)

    Source: DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
        arXiv:1708.04552, section 3.
    Differs: as `cutout_batch`.
    """

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={TRANSFORMS_BATCH, ERASES_PIXELS}, after={CHANGES_RESOLUTION, DROPS_PIXELS})

    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: Any = 0
    ) -> None:
        _check_arguments(num_holes, length)
        check_flags(uniform_sampling=uniform_sampling)
        self.num_holes = plain_number(num_holes)
        self.length = plain_number(length)
        self.uniform_sampling = uniform_sampling
        self.input_key = input_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Cut the holes into the inputs of the batch."""
        input = state.batch_get_item(self.input_key)
        if not isinstance(input, torch.Tensor):
            raise TypeError(
                f"`CutOut` cuts holes into a tensor of images, got {type(input).__name__}. Point `input_key` at a "
                f"tensor of the batch."
            )
        if input.dim() < 3:  # (N, features), not (H, W)
            raise ValueError(
                f"`CutOut` cuts holes into a batch of images of shape (N, C, H, W) or (N, H, W), got "
                f"{tuple(input.shape)}. Point `input_key` at the images."
            )
        state.batch_set_item(self.input_key, cutout_batch(input, self.num_holes, self.length, self.uniform_sampling))


def _check_arguments(num_holes: int, length: float) -> None:
    check_integers("Use 0 for no holes.", num_holes=num_holes, least=0)
    check_finite("It is a fraction of the image's shorter side.", length=length, least=0, most=1)


def _is_pil(image: Any) -> bool:
    """Return True for a PIL image. If one exists, PIL is imported already, so this function need not import it."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def _draw_center(size: int, side: int, uniform_sampling: bool, generator: torch.Generator | None) -> int:
    """Draw the center of a hole along one axis, on the host: slicing would have to read it back from a device."""
    if not uniform_sampling:
        return int(torch.randint(size, (), generator=generator))
    # All places that leave a pixel of the hole inside the image, so every pixel is covered equally often.
    return int(torch.randint(min(1 - side, 0), size, (), generator=generator)) + side // 2


def _span(center: int, side: int, size: int) -> tuple[int, int]:
    """Return the start and the end of a hole along one axis, clipped at the edges."""
    start = center - side // 2
    return min(max(start, 0), size), max(min(start + side, size), 0)


def _generate_mask(mask: torch.Tensor, width: int, height: int, x: int, y: int, cutout_length: int) -> torch.Tensor:
    """Set a hole with center (x, y) to 0 in a tensor of shape (..., height, width), in place; return the tensor."""
    (x1, x2), (y1, y2) = _span(x, cutout_length, width), _span(y, cutout_length, height)
    mask[..., y1:y2, x1:x2] = 0
    return mask
