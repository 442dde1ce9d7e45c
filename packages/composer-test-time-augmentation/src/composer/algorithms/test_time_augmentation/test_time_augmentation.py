"""`average_views`, then the algorithm. Symbols: N images of shape (C, H, W) in a batch, V views of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.logits import logits_of
from composer.core import REPLACES_MODEL, Algorithm, Event, Placement
from composer.utils import check_integers, plain_number
from composer.utils.batch_helpers import batch_set

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

# The weights of the views of each level, in the order of `_views`.
_WEIGHTS = ((1.0,), (1 / 2, 1 / 2), (1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8))
_BEFORE = frozenset({Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD})
_AFTER = frozenset({Event.EVAL_AFTER_FORWARD, Event.PREDICT_AFTER_FORWARD})


def average_views(
    model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, level: int = 2, shift: int = 1
) -> torch.Tensor:
    """Return the weighted mean of a model's logits over views of each image.

    | level | views | weight of each |
    |---|---|---|
    | 0 | the image | 1 |
    | 1 | the image and its mirror image | 1/2 |
    | 2 | those of level 1 | 1/4 |
    | | the image moved by `shift` pixels down and right, the same up and left, and the mirror images of both | 1/8 |

    A moved image is a crop of the image that is padded with its reflection. The model runs once per view, in its
    current mode, with gradients if they are enabled: use `model.eval()` and `torch.no_grad()`.

    Args:
        model: Computes logits of shape (N, classes) from images.
        images: Shape (N, C, H, W), of any dtype; not modified.
        level: 0, 1 or 2.
        shift: The distance in pixels, at least 1 and below H and W. Only used at level 2.

    Returns:
        The mean, computed in float32 (float64 for float64), in the dtype of the logits.

    Raises:
        ValueError: `level` or `shift` is out of range, or `images` or the logits have another shape.

    Example:
        >>> image = torch.tensor([[[[0.0, 4.0], [0.0, 0.0]]]])
        >>> average_views(lambda images: images[:, 0, 0], image, level=1)
        tensor([[2., 2.]])

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.5.
    Differs: none for a shift of 1.
    """
    _check(level, shift)
    _check_images(images, level, shift)
    total: torch.Tensor | None = None
    dtype = torch.float32
    for view, weight in zip(_views(images, level, shift), _WEIGHTS[level], strict=True):
        logits = model(view)
        _check_logits(logits, len(images), "average_views")
        dtype = logits.dtype
        part = weight * logits.to(torch.promote_types(dtype, torch.float32))
        total = part if total is None else total + part
    assert total is not None, "every level has a view"
    return total.to(dtype)


def _views(images: torch.Tensor, level: int, shift: int) -> list[torch.Tensor]:
    views = [images]
    if level == 2:
        views += [_move(images, shift), _move(images, -shift)]
    return [view for plain in views for view in ([plain, plain.flip(-1)] if level else [plain])]


def _move(images: torch.Tensor, by: int) -> torch.Tensor:
    """Move images down and right, or up and left for negative numbers; reflected rows and columns fill the gap."""
    for dim in (-2, -1):
        size, distance = images.shape[dim], abs(by)
        # Slices, as `torch.nn.functional.pad` does not reflect integers.
        if by > 0:
            gap = images.narrow(dim, 1, distance).flip(dim)
            images = torch.cat([gap, images.narrow(dim, 0, size - distance)], dim)
        else:
            gap = images.narrow(dim, size - 1 - distance, distance).flip(dim)
            images = torch.cat([images.narrow(dim, distance, size - distance), gap], dim)
    return images


class TestTimeAugmentation(Algorithm):
    """Evaluates and predicts with the mean of the logits of several views of each image.

    Before the forward pass of each batch or microbatch of an evaluation or prediction, the images are replaced by V
    views of each, and everything else in the batch that has one row per image is repeated V times. The model computes
    the logits of all views in its one forward pass, in the precision of the run. Afterwards the batch is restored, and
    the weighted mean of the logits takes the place of the outputs: metrics and `Trainer.predict` get one row per image.
    Training, and metrics of training, do not change. `average_views` has the views and weights; V is 1, 2 or 6.

    The outputs are the logits, of shape (N, classes); or a mapping or object with `logits`, or a tuple whose first
    tensor with at least two dimensions holds the logits. Other tensors in them with a row per view keep only the rows
    of the plain images. A scalar, such as a loss that the model computes in its forward pass, is that of all views.

    The views of an image do not depend on other images, so microbatches equal one batch.

    **Events** EVAL_BEFORE_FORWARD, PREDICT_BEFORE_FORWARD (views); EVAL_AFTER_FORWARD, PREDICT_AFTER_FORWARD (mean).
    **Reads** the images of the batch. **Writes** `state.batch`, until it is restored, and `state.outputs`. **Cost** V
    times the time and memory of the forward passes of evaluation and prediction; none in training. If memory is short,
    use `Evaluator(device_eval_microbatch_size="auto")`, and smaller batches to predict. **Compilation** static in
    training; in evaluation the model sees V times as many images, another shape.

    **When not to use it** left and right mean something, as in text; the outputs have a value per pixel, which would
    have to be moved back; or the evaluation is compared with one without it.

    Args:
        level: 0 for the image alone, which changes nothing; 1 for the image and its mirror image; 2 for moved ones too.
        shift: The distance in pixels by which images are moved at level 2, at least 1.
        input_key: Position of the images in the batch; see `State.batch_get_item`.

    Raises:
        ValueError: `level` is not 0, 1 or 2, or `shift` is below 1; in evaluation, if the images do not have shape (N,
            C, H, W), or the logits not shape (N, classes).
        TypeError: In evaluation, if there are no images or logits.

    Example:
        >>> TestTimeAugmentation(level=1)
        TestTimeAugmentation(level=1,shift=1,input_key=0)

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.5.
    Differs: none for a shift of 1.
    """

    __test__ = False  # pytest would collect it by its name

    events = _BEFORE | _AFTER
    placement = Placement(excludes={REPLACES_MODEL})

    def __init__(self, level: int = 2, shift: int = 1, input_key: Any = 0) -> None:
        _check(level, shift)
        self.level, self.shift = plain_number(level), plain_number(shift)
        self.input_key = input_key
        self._plain: tuple[Any, int] | None = None  # the batch to restore, and its number of images

    def match(self, event: Event, state: State) -> bool:
        """Return True at its events, unless the level is 0."""
        return self.level > 0 and event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the images by their views, or the outputs by their means."""
        if event in _BEFORE:
            self._expand(state)
        elif self._plain is not None:
            (state.batch, count), self._plain = self._plain, None
            state.outputs = _mean_outputs(state.outputs, count, self.level)

    def _expand(self, state: State) -> None:
        images = state.batch_get_item(self.input_key)
        _check_images(images, self.level, self.shift)
        views = _views(images, self.level, self.shift)
        self._plain = state.batch, len(images)
        repeated = _repeat(state.batch, len(images), len(views))
        if repeated is state.batch:
            repeated = copy.copy(state.batch)  # an object with the images as an attribute
        state.batch = batch_set(repeated, state.batch_key(self.input_key), torch.cat(views))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plain": None}  # a copy is not in a forward pass


def _repeat(batch: Any, rows: int, times: int) -> Any:
    """Return a copy of a batch in which tensors and lists with one row per image have each row for every view."""
    if isinstance(batch, torch.Tensor):
        is_per_image = batch.dim() > 0 and len(batch) == rows
        return batch.repeat(times, *(1 for _ in batch.shape[1:])) if is_per_image else batch
    if isinstance(batch, Mapping):
        result = copy.copy(batch)
        for key, value in batch.items():
            result[key] = _repeat(value, rows, times)  # type: ignore[index]
        return result
    if isinstance(batch, (list, tuple)):
        if len(batch) == rows and not any(isinstance(part, (torch.Tensor, Mapping, list, tuple)) for part in batch):
            return type(batch)(list(batch) * times)
        parts = [_repeat(part, rows, times) for part in batch]
        return getattr(type(batch), "_make", type(batch))(parts)  # a namedtuple takes its fields one by one
    return batch


def _mean_outputs(outputs: Any, rows: int, level: int) -> Any:
    """Return outputs with the mean of the logits of each image, and the plain views' rows of other tensors."""
    logits = logits_of(outputs, "TestTimeAugmentation")
    weights = _WEIGHTS[level]
    _check_logits(logits, rows * len(weights), "TestTimeAugmentation")
    total = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(len(weights), rows, -1)
    parts = [weight * part for weight, part in zip(weights, total, strict=True)]
    mean = sum(parts[1:], parts[0]).to(logits.dtype)

    def of_images(value: Any) -> Any:
        if value is logits:
            return mean
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows * len(weights):
            return value[:rows]
        if isinstance(value, (list, tuple)):
            return getattr(type(value), "_make", type(value))([of_images(part) for part in value])
        return value

    if isinstance(outputs, (torch.Tensor, list, tuple)):
        return of_images(outputs)
    result = copy.copy(outputs)
    if isinstance(outputs, Mapping):
        for key, value in outputs.items():
            result[key] = of_images(value)
    else:
        for name, value in vars(outputs).items():
            setattr(result, name, of_images(value))
    return result


def _check(level: int, shift: int) -> None:
    check_integers(level=level)
    if level not in (0, 1, 2):
        raise ValueError(f"`level` must be 0, 1 or 2, got {level!r}. Use 1 for the image and its mirror image.")
    check_integers("Use `level=1` for views that are not moved.", shift=shift, least=1)


def _check_images(images: Any, level: int, shift: int) -> None:
    if not isinstance(images, torch.Tensor):
        raise TypeError(
            f"`input_key` must be the position of the images, one tensor, got a {type(images).__name__} there. Pass "
            f"for example `input_key='image'`."
        )
    if images.dim() != 4:
        raise ValueError(
            f"The images must have shape (N, C, H, W) to be mirrored and moved, got {tuple(images.shape)}. Pass their "
            f"position in the batch as `input_key`."
        )
    if level == 2 and shift >= min(images.shape[-2:]):
        raise ValueError(
            f"`shift` must be below the height and width of the images, got {shift!r} for {tuple(images.shape)}. Pass "
            f"a smaller shift, or `level=1`."
        )


def _check_logits(logits: torch.Tensor, rows: int, name: str) -> None:
    if logits.dim() != 2 or len(logits) != rows:
        raise ValueError(
            f"`{name}` needs logits of shape (N, classes), here ({rows}, classes), got {tuple(logits.shape)}. Leave it "
            f"out for models with an output per pixel, or with one per batch."
        )
