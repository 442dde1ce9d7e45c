"""The functions, then the class. Images are (N, C, W, H), named as in the paper's code: x counts along W, y along H.

Symbols: l is the share of an image that the box leaves, p the permutation that picks partners.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from composer.algorithms.cutmix._box import Box, _adjust_lambda, _check_alpha, _choose_box, _gen_indices, _paste
from composer.algorithms.cutmix._box import _gen_cutmix_coef as _gen_cutmix_coef
from composer.algorithms.cutmix._box import _rand_bbox as _rand_bbox
from composer.algorithms.utils.mixing import mix_loss, mix_targets
from composer.core import (
    INTERPOLATES_LOSS,
    MIXES_INPUTS,
    MIXES_TARGETS,
    PASTES_REGIONS,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.utils import check_flags, plain_number

__all__ = ["CutMix", "cutmix", "cutmix_batch"]


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
    Without `length` or `bbox` the box has the sides `int(W * sqrt(1 - l))` and `int(H * sqrt(1 - l))` with a drawn l ~
    Beta(alpha, alpha), and what sticks out of the image is cut off.

    Args:
        input: Shape (N, C, W, H), any dtype; not modified.
        target: Shape (N,) or (N, ...); not modified.
        length: Sides of the box as a fraction of the image's, in [0, 1]. None: drawn. Not together with `bbox`.
        alpha: At least 0; 0 stands for l = 0, the largest box. Ignored if `length` or `bbox` is given.
        bbox: The box (x1, y1, x2, y2) in pixels, inside the image. None: drawn.
        indices: The permutation p, shape (N,), int64; drawn if None.
        uniform_sampling: Whether every pixel is equally likely to be in a box of a given size. Otherwise its centre is
            uniform over the pixels, so that the middle of the image is in the box more often than its edges.
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
    Differs: labels are weighed by the box as it is after rounding and cutting off. A box of an odd side has that side.
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
    """Older form of `cutmix_batch`: returns the mixed inputs and dense targets of shape (N, `num_classes`)."""
    if indices is None:
        indices = _gen_indices(x.shape[0], x.device)
    mixed, _, area, _ = cutmix_batch(x, y, None, alpha, bbox, indices, uniform_sampling)
    dense = y if y.is_floating_point() else F.one_hot(y.long(), num_classes).to(torch.get_default_dtype())
    return mixed, torch.lerp(dense, dense.index_select(0, indices), 1 - area)


class CutMix(Algorithm):
    """Trains on images with a box of another image pasted in.

    At BEFORE_FORWARD the box is pasted into the images of the microbatch. Then either the targets are combined by area
    at BEFORE_LOSS, or the loss becomes the combination of the losses against both targets at BEFORE_BACKWARD. Targets
    that are images of the inputs' size (segmentation) get the same box pasted at BEFORE_LOSS instead.

    Microbatches: each microbatch gets a box of its own, so several microbatches do not equal one batch.

    **Events** BEFORE_FORWARD, then BEFORE_LOSS (targets), or AFTER_LOSS and BEFORE_BACKWARD (loss). **Reads** the
    batch and `state.outputs`. **Writes** inputs and targets of the batch, or `state.loss`. **Cost** a copy of the
    inputs and a gather of the box; with `interpolate_loss` a second loss. **Compilation** static: shapes stay.

    Args:
        alpha: At least 0; the Beta distribution's parameter. 0 draws the largest box every time.
        interpolate_loss: Combine losses instead of targets.
        uniform_sampling: Whether every pixel is equally likely to be in a box of a given size.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.
        target_key: Where the targets are.

    Raises:
        ValueError: `alpha` is negative.

    Example:
        >>> CutMix(alpha=1.0, uniform_sampling=True)
        CutMix(alpha=1.0,interpolate_loss=False,uniform_sampling=True,input_key=0,target_key=1)

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
        arXiv:1905.04899, section 3.1.
    Differs: targets are permuted as they are when they are combined, so what another method has made of them counts.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        _check_alpha(alpha)
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
        """BEFORE_FORWARD, and where targets or losses are combined."""
        if self.interpolate_loss:
            return frozenset({Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
        return frozenset({Event.BEFORE_FORWARD, Event.BEFORE_LOSS})

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        """Pastes after what mixes whole inputs, and mixes targets or interpolates the loss."""
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
        assert self._indices is not None, "BEFORE_FORWARD comes before"
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
        self._is_segmentation = target.dim() > 2 and target.shape[-2:] == input.shape[-2:]
        if self._is_segmentation and self.interpolate_loss:
            raise ValueError("`interpolate_loss` must be False for targets that are images, got True. Leave it out.")
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
