"""`cutmix_batch` and the algorithm `CutMix`. Images are (N, C, W, H), as in the paper's code: x along W, y along H.

Symbols: l is the share of an image outside the box, p the permutation that selects the partners.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.augmentation_common import moves_with_pixels
from composer.algorithms.utils.mixing import check_alpha, draw_beta, mix_loss, mix_targets
from composer.core import (
    INTERPOLATES_LOSS,
    MIXES_INPUTS,
    MIXES_TARGETS,
    PASTES_REGIONS,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
)
from composer.loss.utils import dense_targets
from composer.utils import check_flags, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Box = tuple[int, int, int, int]
"""(x1, y1, x2, y2)."""


def cutmix_batch(
    input: torch.Tensor,
    target: torch.Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: torch.Tensor | None = None,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float, Box]:
    """Paste a box of another image of the same batch into every image.

    With the permutation p: `mixed[i, :, x1:x2, y1:y2] = input[p[i], :, x1:x2, y1:y2]`, one box for the whole batch.
    Without `length` and `bbox`, the box has the sides `int(W * sqrt(1 - l))` and `int(H * sqrt(1 - l))`, where
    l ~ Beta(alpha, alpha), and is clipped at the edges of the image.

    Args:
        input: Shape (N, C, W, H), any dtype; not modified.
        target: Shape (N,) or (N, ...); not modified.
        length: Sides of the box as a fraction of the sides of the image, in [0, 1]. None: drawn. Not with `bbox`.
        alpha: At least 0; 0 means l = 0, the largest box. Ignored if `length` or `bbox` is given.
        bbox: The box (x1, y1, x2, y2) in pixels, inside the image. None: drawn.
        indices: The permutation p, shape (N,), int64; drawn if None.
        uniform_sampling: True if every pixel is equally likely to be in a box of a given size. Otherwise the center of
            the box is uniform over the pixels, so the middle of the image is in the box more often than the edges.
        generator: Draws the permutation; on the device of `input`. None: the device's default generator. The box is
            always drawn on the host.

    Returns:
        The mixed input (shape, dtype and memory format of `input`), `target[p]`, the fraction of the image outside the
        box, which is the weight of `target`, and the box.

    Raises:
        ValueError: `length` and `bbox` are both given, `length` is outside [0, 1], `alpha` is negative, the box is not
            inside the image, `input` does not have four dimensions, or the sizes of `input` and `target` differ.

    Example:
        >>> x, y = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
        >>> mixed, partner, area, box = cutmix_batch(x, y, bbox=(0, 0, 2, 2))
        >>> area, box
        (0.75, (0, 0, 2, 2))

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
        arXiv:1905.04899, section 3.1.
    Differs: labels are weighted by the area of the box after rounding and clipping. Odd sides of a box are exact.
    """
    if input.dim() != 4 or input.shape[0] != target.shape[0]:
        raise ValueError(
            f"`input` must have shape (N, C, W, H) and `target` as many rows, got {tuple(input.shape)} and "
            f"{tuple(target.shape)}. Pass a batch of images and their targets."
        )
    box = _choose_box(input, length, alpha, bbox, uniform_sampling)
    if indices is None:
        indices = _gen_indices(input.shape[0], input.device, generator)
    return _paste(input, indices, box), target.index_select(0, indices), _adjust_lambda(input, box), box


def cutmix(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    num_classes: int,
    bbox: Box | None = None,
    indices: torch.Tensor | None = None,
    uniform_sampling: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixed inputs and dense targets of shape (N, `num_classes`): an older form of `cutmix_batch`."""
    if indices is None:
        indices = _gen_indices(x.shape[0], x.device)
    mixed, _, area, _ = cutmix_batch(x, y, None, alpha, bbox, indices, uniform_sampling)
    dense = y if y.is_floating_point() else dense_targets(y, num_classes, dtype=torch.get_default_dtype())
    return mixed, torch.lerp(dense, dense.index_select(0, indices), 1 - area)


class CutMix(Algorithm):
    """Trains on images with a box of another image pasted in.

    At BEFORE_FORWARD the box is pasted into the images of the microbatch. Then either the targets are combined by area
    at BEFORE_LOSS, or the loss becomes the combination of the losses against both targets at BEFORE_BACKWARD. Into
    targets with a value per pixel (masks of indices, or of one value per class), the same box is pasted at BEFORE_LOSS
    instead. A label that the loss ignores has no share in combined targets; the loss is the same in both modes.

    Microbatches: each microbatch draws its own box, so several microbatches do not equal one batch.

    **Events** BEFORE_FORWARD, then BEFORE_LOSS (targets), or AFTER_LOSS and BEFORE_BACKWARD (loss). **Reads** the
    batch and `state.outputs`. **Writes** inputs and targets of the batch, or `state.loss`. **Cost** a copy of the
    inputs and a gather of the box; with `interpolate_loss` a second loss. **Compilation** static: no shape changes.

    Args:
        alpha: At least 0; the parameter of the Beta distribution. 0 always draws the largest box.
        interpolate_loss: Combine losses instead of targets.
        uniform_sampling: True if every pixel is equally likely to be in a box of a given size.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.
        target_key: Where the targets are.

    Raises:
        ValueError: `alpha` is negative, infinite or NaN; at the first batch, if inputs are not images (N, C, H, W), or
            targets have positions in another form than a value per pixel, such as boxes.
        TypeError: `alpha` is not a number, or a flag not a bool.

    Example:
        >>> CutMix(alpha=1.0, uniform_sampling=True)
        CutMix(alpha=1.0,interpolate_loss=False,uniform_sampling=True,input_key=0,target_key=1)

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
        arXiv:1905.04899, section 3.1.
    Differs: targets are permuted when they are combined, so changes that other methods made to them are included.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        check_alpha(alpha)
        check_flags(interpolate_loss=interpolate_loss, uniform_sampling=uniform_sampling)
        self.alpha = plain_number(alpha)
        self.interpolate_loss = interpolate_loss
        self.uniform_sampling = uniform_sampling
        self.input_key, self.target_key = input_key, target_key
        self._indices: torch.Tensor | None = None
        self._bbox: Box = (0, 0, 0, 0)
        self._adjusted_lambda = 1.0
        self._permuted_target: torch.Tensor | None = None
        self._loss_target: torch.Tensor | None = None
        self._is_segmentation = False

    @property
    def events(self) -> frozenset[Event]:  # type: ignore[override]
        """BEFORE_FORWARD, and the events where targets or losses are combined."""
        if self.interpolate_loss:
            return frozenset({Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
        return frozenset({Event.BEFORE_FORWARD, Event.BEFORE_LOSS})

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        """After methods that mix whole inputs; mixes targets or interpolates the loss."""
        if self.interpolate_loss:
            return Placement(
                provides={TRANSFORMS_BATCH, PASTES_REGIONS, INTERPOLATES_LOSS},
                after={MIXES_INPUTS},
                discourages={INTERPOLATES_LOSS},
            )
        return Placement(provides={TRANSFORMS_BATCH, PASTES_REGIONS, MIXES_TARGETS}, after={MIXES_INPUTS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Paste the box, then combine the targets or the losses."""
        if event is Event.BEFORE_FORWARD:
            self._mix_inputs(state)
            return
        if event is Event.AFTER_LOSS:  # another method may have changed the targets for this loss only
            self._loss_target = state.batch_get_item(self.target_key)
            return
        assert self._indices is not None, "BEFORE_FORWARD comes first"
        if event is Event.BEFORE_LOSS:
            self._mix_targets(state, self._indices)
        else:
            target, self._loss_target = self._loss_target, None
            weight = 1 - self._adjusted_lambda
            mix_loss(state, self.target_key, self._indices, weight, "CutMix", target=target)

    def _mix_inputs(self, state: State) -> None:
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise NotImplementedError(
                f"`CutMix` mixes a tensor of images and a tensor of targets, got {type(input).__name__} and "
                f"{type(target).__name__}. Point `input_key` and `target_key` at tensors of the batch."
            )
        self._is_segmentation = moves_with_pixels(target, input, "CutMix")
        if self._is_segmentation and self.interpolate_loss:
            raise ValueError(
                "`interpolate_loss` must be False for targets that are images, got True. Remove the argument."
            )
        self._indices = _gen_indices(input.shape[0], input.device)
        mixed, self._permuted_target, self._adjusted_lambda, self._bbox = cutmix_batch(
            input,
            target,
            alpha=self.alpha,
            indices=self._indices,
            uniform_sampling=self.uniform_sampling,
        )
        state.batch_set_item(self.input_key, mixed)

    def _mix_targets(self, state: State, indices: torch.Tensor) -> None:
        if self._is_segmentation:
            target = state.batch_get_item(self.target_key)
            state.batch_set_item(self.target_key, _paste(target, indices, self._bbox))
            return
        mix_targets(state, self.target_key, indices, 1 - self._adjusted_lambda, "CutMix")


def _choose_box(
    input: torch.Tensor, length: float | None, alpha: float, bbox: Box | None, uniform_sampling: bool
) -> Box:
    """Return the given box, or draw one."""
    width, height = input.shape[-2:]
    if bbox is not None:
        if length is not None:
            raise ValueError(f"`length` must not be given together with `bbox`, got {length!r}. Pass one of them.")
        x1, y1, x2, y2 = bbox
        if not (0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height):
            raise ValueError(
                f"`bbox` must be (x1, y1, x2, y2) inside an image of {width} by {height} pixels, got {bbox!r}. "
                f"x counts along dimension 2, y along dimension 3."
            )
        return bbox
    if length is None:
        return _rand_bbox(width, height, draw_beta(alpha), uniform_sampling=uniform_sampling)
    if not 0 <= length <= 1:
        raise ValueError(f"`length` must be in [0, 1], got {length!r}. It is a fraction of the sides of the image.")
    return _place_box(width, height, length, None, None, uniform_sampling)


def _rand_bbox(
    W: int,
    H: int,
    cutmix_lambda: float,
    cx: int | None = None,
    cy: int | None = None,
    uniform_sampling: bool = False,
) -> Box:
    """Draw a box that, before clipping, leaves the share `cutmix_lambda` of the image; (cx, cy) is its center."""
    return _place_box(W, H, math.sqrt(1 - cutmix_lambda), cx, cy, uniform_sampling)


def _place_box(width: int, height: int, fraction: float, cx: int | None, cy: int | None, uniform_sampling: bool) -> Box:
    x1, x2 = _place_side(width, int(width * fraction), cx, uniform_sampling)
    y1, y2 = _place_side(height, int(height * fraction), cy, uniform_sampling)
    return x1, y1, x2, y2


def _place_side(size: int, side: int, center: int | None, uniform_sampling: bool) -> tuple[int, int]:
    """Draw the range of the box along one axis, on the host: slicing would have to read it back from a device."""
    if center is not None:
        start = center - side // 2
    elif uniform_sampling:  # all starts that leave a pixel inside, so every pixel is covered equally often
        start = int(torch.randint(min(1 - side, 0), size, ()))
    else:
        start = int(torch.randint(size, ())) - side // 2
    return min(max(start, 0), size), max(min(start + side, size), 0)


def _adjust_lambda(x: torch.Tensor, bbox: Box) -> float:
    """Return the fraction of the image outside the box."""
    x1, y1, x2, y2 = bbox
    return 1 - (x2 - x1) * (y2 - y1) / (x.shape[-2] * x.shape[-1])


def _paste(image: torch.Tensor, indices: torch.Tensor, bbox: Box) -> torch.Tensor:
    """Return a copy of the images, each with the box of its partner. Only the pixels of the box are gathered."""
    x1, y1, x2, y2 = bbox
    mixed = image.clone()
    mixed[..., x1:x2, y1:y2] = image[..., x1:x2, y1:y2].index_select(0, indices)
    return mixed


def _gen_indices(
    num_samples: int, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> torch.Tensor:
    return torch.randperm(num_samples, device=device, generator=generator)
