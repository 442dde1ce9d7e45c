"""The function, the dataset transform, and the algorithm. Sizes are (height, width)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from composer.algorithms.utils import add_training_transform, check_targets_stay, check_training_transform
from composer.algorithms.utils.augmentation_common import image_size, moves_with_pixels
from composer.core import (
    AUGMENTS_IMAGES,
    DROPS_PIXELS,
    MIXES_AUGMENTATIONS,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_finite, check_flags, plain_number

if TYPE_CHECKING:
    from PIL.Image import Image

    from composer.core import State
    from composer.loggers import Logger

T = TypeVar("T")


def colout_batch(
    sample: Any,
    p_row: float = 0.15,
    p_col: float = 0.15,
    resize_target: bool | str = "auto",
    *,
    generator: torch.Generator | None = None,
) -> Any:
    """Drop random rows and columns of an image, or of all images of a batch alike.

    `int((1 - p_row) * H)` rows and `int((1 - p_col) * W)` columns remain, at least one of each, in their order. All
    subsets of rows and of columns are equally likely.

    Args:
        sample: A tensor of shape (..., H, W) and any dtype, a Pillow image, or a pair (input, target) with such an
            input; not modified.
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        resize_target: Drop the same rows and columns of the target. "auto": if the target is an image of the
            size of the input, that is a Pillow image, or a tensor with at most one dimension less than the input.
        generator: Draws the rows and columns; on the device of the input (Pillow images: "cpu"). None: the default
            generator of that device.

    Returns:
        The smaller input, of the same type; or the pair of smaller input and smaller target if the target is resized.

    Raises:
        ValueError: A fraction is outside [0, 1], `resize_target` is none of True, False and "auto", a sample does not
            have two parts, or a target that must be resized is missing or has another size.
        TypeError: The input is neither a tensor of at least two dimensions nor a Pillow image.

    Example:
        >>> colout_batch(torch.zeros(8, 3, 32, 32), p_row=0.25).shape
        torch.Size([8, 3, 24, 27])

    Source: Cory Stephenson, MosaicML, 2021; there is no paper.
    Differs: at least one row and one column stay.
    """
    _check(p_row, p_col, resize_target)
    input, *rest = _parts_of(sample)
    if resize_target is True and not rest:
        raise ValueError("`resize_target` must not be True for a sample without a target. Pass a pair (input, target).")
    size = image_size(input)
    if size is None:
        raise TypeError(
            f"`sample` must be an image or a batch of images, got {type(input).__name__}. Pass a tensor whose last "
            f"dimensions are height and width, or a Pillow image."
        )
    device = input.device if isinstance(input, torch.Tensor) else torch.device("cpu")
    kept = _draw_remaining(size[0], p_row, device, generator), _draw_remaining(size[1], p_col, device, generator)
    smaller = _select(input, *kept)
    if not rest or not _is_resized(rest[0], size, getattr(input, "ndim", 3), resize_target):
        return smaller
    return smaller, _select(rest[0], *kept)


def batch_colout(X: torch.Tensor, p_row: float = 0.15, p_col: float = 0.15) -> torch.Tensor:
    """Call `colout_batch` on a tensor, under its earlier name."""
    smaller: torch.Tensor = colout_batch(X, p_row, p_col)
    return smaller


def colout(img: T, p_row: float = 0.15, p_col: float = 0.15) -> T:
    """Call `colout_batch` on one image, under its earlier name."""
    smaller: T = colout_batch(img, p_row, p_col)
    return smaller


class ColOutTransform:
    """`colout_batch` as a transform of a dataset: other rows and columns are dropped of each image.

    Args:
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        resize_target: Drop the same ones of the target of a pair (image, target); see `colout_batch`.

    Raises:
        ValueError: A fraction is outside [0, 1], or `resize_target` is none of True, False and "auto".

    Example:
        >>> ColOutTransform(p_row=0.5)(torch.zeros(3, 8, 8)).shape
        torch.Size([3, 4, 6])
    """

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, resize_target: bool | str = "auto") -> None:
        _check(p_row, p_col, resize_target)
        self.p_row, self.p_col = plain_number(p_row), plain_number(p_col)
        self.resize_target = resize_target

    def __call__(self, sample: Any) -> Any:
        """Return the smaller image, or the pair of smaller image and smaller target."""
        return colout_batch(sample, self.p_row, self.p_col, self.resize_target)

    def __repr__(self) -> str:
        return f"ColOutTransform(p_row={self.p_row!r}, p_col={self.p_col!r}, resize_target={self.resize_target!r})"


_ADVICE = (
    "Use `ColOut(batch=True)`, which takes batches of any loader. Or apply `ColOutTransform` in the dataset yourself, "
    "without `ColOut`."
)


class ColOut(Algorithm):
    """Drops random rows and columns of the training images, which makes them smaller.

    With `batch=True` the same rows and columns are dropped of all images of a batch, at AFTER_DATALOADER, on the device
    of the batch. This is before the batch is split, so microbatches equal one batch. With `batch=False` a
    `ColOutTransform` is added to the transforms of the training dataset at FIT_START, before the one that converts
    images to tensors, and other rows and columns are dropped of each image. It stays there; further calls of `fit` with
    the same algorithm add no second one. If the loader is known at INIT or BEFORE_LOAD and its dataset takes no
    transform, an error is raised there.

    **Events** AFTER_DATALOADER; with `batch=False` INIT, BEFORE_LOAD and FIT_START too. **Reads** the batch, or
    `state.train_dataloader` and else `state.dataloader`. **Writes** inputs, and targets that are images; or the
    `transform` of the dataset; for a `Subset`, that of a copy of the dataset. **Cost** one copy of the remaining
    pixels; saves the work for the dropped ones. **Compilation** static: all batches have one size, smaller than that of
    the images.

    Args:
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        batch: Drop the same ones of all images of a batch.
        resize_target: Drop the same ones of the targets. "auto": if they have a value per pixel, as masks of shape
            (N, H, W) or (N, C, H, W).
        input_key: Where the inputs are in the batch; see `State.batch_get_item`. Used with `batch=True` only.
        target_key: Where the targets are. Not used with `resize_target=False`.

    Raises:
        ValueError: A fraction is outside [0, 1], or `resize_target` is none of True, False and "auto"; at the first
            batch, if it has no images, or with "auto", targets with positions in another form, such as boxes; with
            `batch=False`, if the first batch has a mask of its images.
        NotImplementedError: `resize_target=True` with `batch=False`.

    Example:
        >>> ColOut(p_row=0.1).p_col
        0.15

    Source: Cory Stephenson, MosaicML, 2021; there is no paper.
    Differs: at least one row and one column stay.
    """

    def __init__(
        self,
        p_row: float = 0.15,
        p_col: float = 0.15,
        batch: bool = True,
        resize_target: bool | str = "auto",
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        check_flags(batch=batch)
        if resize_target is True and not batch:
            raise NotImplementedError(
                "`resize_target` must not be True with `batch=False`, because a transform gets images without targets. "
                "Use `batch=True`, or `ColOutTransform` on pairs in your dataset."
            )
        self._transform = ColOutTransform(p_row, p_col, resize_target)
        self.p_row, self.p_col = self._transform.p_row, self._transform.p_col
        self.batch, self.resize_target = batch, resize_target
        self.input_key, self.target_key = input_key, target_key
        others = () if batch else (Event.INIT, Event.BEFORE_LOAD, Event.FIT_START)
        self.events = frozenset({Event.AFTER_DATALOADER, *others})
        self.placement = Placement(
            provides={TRANSFORMS_BATCH, DROPS_PIXELS} if batch else {DROPS_PIXELS},
            after={AUGMENTS_IMAGES, MIXES_AUGMENTATIONS},
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Drop rows and columns of the batch; or check the training loader, or add the transform to its dataset."""
        if event in (Event.INIT, Event.BEFORE_LOAD):
            check_training_transform(state, self._transform, _ADVICE)
            return
        if event is Event.FIT_START:
            add_training_transform(state, self._transform, _ADVICE)
            return
        if not self.batch:
            check_targets_stay(state, "ColOut(batch=False)")
            return
        sample = state.batch_get_item(self.input_key)
        if not isinstance(sample, torch.Tensor):
            raise TypeError(
                f"`ColOut` drops rows and columns of a tensor of images, got {type(sample).__name__}. Point "
                f"`input_key` at it, or use `batch=False`."
            )
        if sample.dim() < 3:  # (N, features), not (H, W)
            raise ValueError(
                f"`ColOut` drops rows and columns of a batch of images of shape (N, C, H, W) or (N, H, W), got "
                f"{tuple(sample.shape)}. Point `input_key` at the images."
            )
        target = None if self.resize_target is False else state.batch_get_item(self.target_key)
        is_resized = moves_with_pixels(target, sample, "ColOut") if self.resize_target == "auto" else self.resize_target
        if is_resized:
            sample, target = colout_batch((sample, target), self.p_row, self.p_col, resize_target=True)
            state.batch_set_item(self.target_key, target)
        else:
            sample = colout_batch(sample, self.p_row, self.p_col)
        state.batch_set_item(self.input_key, sample)


def _check(p_row: float, p_col: float, resize_target: bool | str) -> None:
    check_finite("It is the fraction to drop.", p_row=p_row, p_col=p_col, least=0, most=1)
    if not isinstance(resize_target, bool) and resize_target != "auto":
        raise ValueError(
            f"`resize_target` must be True, False or 'auto', got {resize_target!r}. 'auto' resizes images only."
        )


def _parts_of(sample: Any) -> tuple[Any, ...]:
    if not isinstance(sample, (tuple, list)):
        return (sample,)
    if len(sample) != 2:
        raise ValueError(
            f"`sample` must have two parts, an input and a target, got {len(sample)}. Pass a pair, or only the input."
        )
    return tuple(sample)


def _is_resized(target: Any, size: tuple[int, int], dims: int, resize_target: bool | str) -> bool:
    if resize_target == "auto":
        is_map = not isinstance(target, torch.Tensor) or target.dim() >= dims - 1
        return image_size(target) == size and is_map
    if resize_target and image_size(target) != size:
        actual = image_size(target) or type(target).__name__
        raise ValueError(
            f"`target` must have the size of the input, {size}, to be resized, got {actual}. Use `resize_target=False`."
        )
    return bool(resize_target)


def _draw_remaining(size: int, p: float, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Draw the rows or columns that remain, in ascending order."""
    count = max(int((1 - p) * size), 1)
    return torch.randperm(size, device=device, generator=generator)[:count].sort().values


def _select(image: Any, rows: torch.Tensor, columns: torch.Tensor) -> Any:
    """Return the given rows and columns of an image or of a batch of images."""
    if not isinstance(image, torch.Tensor):
        return _select_of_pillow(image, rows, columns)
    rows, columns = rows.to(image.device), columns.to(image.device)
    fewer = image.index_select(-2, rows)
    if fewer.requires_grad:  # the gradient of `gather` is not deterministic on CUDA
        return fewer.index_select(-1, columns)
    # Same as `index_select(-1, columns)`, which is several times as slow on a CPU.
    return fewer.gather(-1, columns.expand(*fewer.shape[:-1], -1))


def _select_of_pillow(image: Image, rows: torch.Tensor, columns: torch.Tensor) -> Image:
    from PIL import Image

    array = np.asarray(image)[rows.cpu().numpy()[:, None], columns.cpu().numpy()]
    if image.mode == "1":
        return Image.fromarray(array)
    smaller = Image.frombytes(image.mode, (len(columns), len(rows)), array.tobytes())
    palette = image.getpalette()
    if palette is not None:
        smaller.putpalette(palette)
    return smaller
