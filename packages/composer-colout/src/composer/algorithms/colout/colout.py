"""The function, its transform, then the class."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from composer.algorithms.colout._pixels import draw, select, size_of
from composer.algorithms.utils import (
    add_training_transform,
    check_training_transform,
)
from composer.core import (
    AUGMENTS_IMAGES,
    DROPS_PIXELS,
    MIXES_AUGMENTATIONS,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.utils import check_finite, check_flags, plain_number

__all__ = ["ColOut", "ColOutTransform", "batch_colout", "colout", "colout_batch"]

T = TypeVar("T")


def colout_batch(
    sample: Any,
    p_row: float = 0.15,
    p_col: float = 0.15,
    resize_target: bool | str = "auto",
    *,
    generator: torch.Generator | None = None,
) -> Any:
    """Drop random rows and columns: of an image, or the same ones of all images of a batch.

    `int((1 - p_row) * H)` rows and `int((1 - p_col) * W)` columns are kept, at least one of each, in their order. Every
    choice is equally likely.

    Args:
        sample: A tensor of shape (..., H, W) and any dtype, a Pillow image, or a pair (input, target) whose input is
            one; not modified.
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        resize_target: Whether the target loses the same rows and columns. "auto": if it is an image of the size of the
            input, that is a Pillow image, or a tensor of more than two dimensions.
        generator: Draws the rows and columns; on the device of the input (Pillow images: "cpu"). None: the default
            generator of that device.

    Returns:
        The smaller input, of the same kind; or the pair of smaller input and smaller target if the target is resized.

    Raises:
        ValueError: A fraction is outside [0, 1], `resize_target` is something else, a sample has other than two parts,
            or a target that is to be resized is missing or has another size.
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
    size = size_of(input)
    if size is None:
        raise TypeError(
            f"`sample` must be an image or a batch of images, got {type(input).__name__}. Pass a tensor whose last "
            f"dimensions are height and width, or a Pillow image."
        )
    device = input.device if isinstance(input, torch.Tensor) else torch.device("cpu")
    kept = draw(size[0], p_row, device, generator), draw(size[1], p_col, device, generator)
    smaller = select(input, *kept)
    if not rest or not _is_resized(rest[0], size, resize_target):
        return smaller
    return smaller, select(rest[0], *kept)


def batch_colout(X: torch.Tensor, p_row: float = 0.15, p_col: float = 0.15) -> torch.Tensor:
    """`colout_batch` for a batch alone, under its earlier name."""
    smaller: torch.Tensor = colout_batch(X, p_row, p_col)
    return smaller


def colout(img: T, p_row: float = 0.15, p_col: float = 0.15) -> T:
    """`colout_batch` for one image, under its earlier name."""
    smaller: T = colout_batch(img, p_row, p_col)
    return smaller


class ColOutTransform:
    """`colout_batch` as a transform of a data set: each image loses rows and columns of its own.

    Args:
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        resize_target: Whether the target of a pair (image, target) loses the same ones; see `colout_batch`.

    Raises:
        ValueError: A fraction is outside [0, 1], or `resize_target` is something else.

    Example:
        >>> ColOutTransform(p_row=0.5)(torch.zeros(3, 8, 8)).shape
        torch.Size([3, 4, 6])
    """

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, resize_target: bool | str = "auto") -> None:
        _check(p_row, p_col, resize_target)
        self.p_row, self.p_col = plain_number(p_row), plain_number(p_col)
        self.resize_target = resize_target

    def __call__(self, sample: Any) -> Any:
        """The smaller image, or the pair of smaller image and smaller target."""
        return colout_batch(sample, self.p_row, self.p_col, self.resize_target)

    def __repr__(self) -> str:
        return f"ColOutTransform(p_row={self.p_row!r}, p_col={self.p_col!r}, resize_target={self.resize_target!r})"


_ADVICE = (
    "Use `ColOut(batch=True)`, which takes batches of any loader. Or apply `ColOutTransform` in the data set yourself, "
    "without `ColOut`."
)


class ColOut(Algorithm):
    """Drops random rows and columns of the training images, which makes them smaller.

    With `batch=True` all images of a batch lose the same ones at AFTER_DATALOADER, on the device the batch is on,
    before the batch is split: microbatches equal one batch. With `batch=False` a `ColOutTransform` joins the transforms
    of the training data set at FIT_START, before what makes tensors of images, and each image loses rows and columns of
    its own. It stays there; further fits with the same algorithm add nothing. A loader that cannot take it is refused
    at INIT or BEFORE_LOAD if it is known then.

    **Events** AFTER_DATALOADER, or INIT, BEFORE_LOAD and FIT_START. **Reads** the batch, or
    `state.train_dataloader` and else `state.dataloader`. **Writes** inputs, and targets that are images; or the
    `transform` of the data set, of a copy of it below a `Subset`. **Cost** a copy of the rows that are kept and of the
    columns of those; saves the share of the pixels that are not. **Compilation** static: all batches have one size,
    smaller than that of the images.

    Args:
        p_row: The fraction of the rows to drop, in [0, 1].
        p_col: The fraction of the columns to drop.
        batch: Whether all images of a batch lose the same ones.
        resize_target: Whether targets lose the same ones. "auto": if they are images of the size of the inputs.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`. Used with `batch=True` only.
        target_key: Where the targets are. Not used with `resize_target=False`.

    Raises:
        ValueError: A fraction is outside [0, 1], or `resize_target` is something else; at the first batch, if it has
            no images.
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
                "`resize_target` must not be True with `batch=False`, where a transform sees images without targets. "
                "Use `batch=True`, or `ColOutTransform` on pairs in your data set."
            )
        self._transform = ColOutTransform(p_row, p_col, resize_target)
        self.p_row, self.p_col = self._transform.p_row, self._transform.p_col
        self.batch, self.resize_target = batch, resize_target
        self.input_key, self.target_key = input_key, target_key
        self.events = frozenset({Event.AFTER_DATALOADER} if batch else {Event.INIT, Event.BEFORE_LOAD, Event.FIT_START})
        self.placement = Placement(
            provides={TRANSFORMS_BATCH, DROPS_PIXELS} if batch else {DROPS_PIXELS},
            after={AUGMENTS_IMAGES, MIXES_AUGMENTATIONS},
        )

    def match(self, event: Event, state: State) -> bool:
        """At AFTER_DATALOADER; or at INIT, BEFORE_LOAD and FIT_START."""
        return self.events is not None and event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Drop rows and columns of the batch; or check the training loader, or add the transform to its data set."""
        if event in (Event.INIT, Event.BEFORE_LOAD):
            check_training_transform(state, self._transform, _ADVICE)
            return
        if event is Event.FIT_START:
            add_training_transform(state, self._transform, _ADVICE)
            return
        sample = state.batch_get_item(self.input_key)
        if not isinstance(sample, torch.Tensor):
            raise TypeError(
                f"`ColOut` drops rows and columns of a tensor of images, got {type(sample).__name__}. Point "
                f"`input_key` at it, or use `batch=False`."
            )
        if sample.dim() < 3:  # of two dimensions, the first is that of the examples
            raise ValueError(
                f"`ColOut` drops rows and columns of a batch of images of shape (N, C, H, W) or (N, H, W), got "
                f"{tuple(sample.shape)}. Point `input_key` at the images."
            )
        if self.resize_target is not False:
            sample = sample, state.batch_get_item(self.target_key)
        smaller = self._transform(sample)
        if isinstance(smaller, tuple):
            smaller, target = smaller
            state.batch_set_item(self.target_key, target)
        state.batch_set_item(self.input_key, smaller)


def _check(p_row: float, p_col: float, resize_target: bool | str) -> None:
    for name, fraction in (("p_row", p_row), ("p_col", p_col)):
        check_finite(**{name: fraction})
        if not 0 <= fraction <= 1:
            raise ValueError(f"`{name}` must be in [0, 1], got {fraction!r}. It is the fraction that is dropped.")
    if not isinstance(resize_target, bool) and resize_target != "auto":
        raise ValueError(
            f"`resize_target` must be True, False or 'auto', got {resize_target!r}. 'auto' resizes images only."
        )


def _parts_of(sample: Any) -> tuple[Any, ...]:
    if not isinstance(sample, (tuple, list)):
        return (sample,)
    if len(sample) != 2:
        raise ValueError(
            f"`sample` must have two parts, an input and a target, got {len(sample)}. Pass them, or the input alone."
        )
    return tuple(sample)


def _is_resized(target: Any, size: tuple[int, int], resize_target: bool | str) -> bool:
    if resize_target == "auto":
        return size_of(target) == size and not (isinstance(target, torch.Tensor) and target.dim() == 2)
    if resize_target and size_of(target) != size:
        found = size_of(target) or type(target).__name__
        raise ValueError(
            f"`target` must be of the size of the input, {size}, to be resized, got {found}. Use `resize_target=False`."
        )
    return bool(resize_target)
