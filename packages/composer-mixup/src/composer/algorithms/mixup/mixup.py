"""The function, then the class. Symbols: m is the weight of the partner, p the permutation that picks partners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.mixing import check_alpha, draw_beta, mix_loss, mix_targets
from composer.core import INTERPOLATES_LOSS, MIXES_INPUTS, MIXES_TARGETS, TRANSFORMS_BATCH, Algorithm, Event, Placement
from composer.utils import check_flags, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def mixup_batch(
    input: torch.Tensor,
    target: torch.Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: torch.Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mix every example of a batch with another example of the batch.

    With the permutation p and the weight m: `mixed[i] = (1 - m) * input[i] + m * input[p[i]]`.

    Args:
        input: Shape (N, ...); not modified. Integers are promoted to the default floating dtype.
        target: Shape (N,) or (N, ...).
        mixing: The weight m, in [0, 1]; drawn if None.
        alpha: Parameter of the Beta distribution, at least 0; small values leave most examples nearly unmixed. Ignored
            if `mixing` is given.
        indices: The permutation p, shape (N,), int64; drawn if None.
        generator: Generator for the permutation, on the device of `input`. None: the default generator of the device.

    Returns:
        The mixed input (shape and memory format of `input`), `target[p]`, and `mixing`.

    Raises:
        ValueError: `mixing` is outside [0, 1], `alpha` is negative, or the sizes of `input` and `target` differ.

    Example:
        >>> x, y = torch.zeros(4, 3), torch.arange(4)
        >>> mixed, partner, mixing = mixup_batch(x, y, mixing=0.3)
        >>> mixed.shape
        torch.Size([4, 3])

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412, section 2.
    Differs: a drawn `mixing` is at most 0.5, so that each example keeps the larger weight.
    """
    if mixing is None:
        mixing = _gen_mixing_coef(alpha)
    elif not 0 <= mixing <= 1:
        raise ValueError(f"`mixing` must be in [0, 1], got {mixing!r}. It is the weight of the partner.")
    if input.shape[0] != target.shape[0]:
        raise ValueError(
            f"`target` must have the same number of rows as `input`, {input.shape[0]}, got {target.shape[0]}."
        )
    if indices is None:
        indices = torch.randperm(input.shape[0], device=input.device, generator=generator)
    partner = _rows(input, indices)
    if not (input.is_floating_point() or input.is_complex()):
        input, partner = input.to(torch.get_default_dtype()), partner.to(torch.get_default_dtype())
    # `partner` is a copy, so the result is written into it: p - (1 - m) * (p - x) = x + m * (p - x).
    mixed = partner.lerp_(input, 1 - mixing) if not partner.requires_grad else partner.lerp(input, 1 - mixing)
    return mixed, target.index_select(0, indices), mixing


class MixUp(Algorithm):
    """Trains on convex combinations of pairs of examples.

    At BEFORE_FORWARD the inputs of the microbatch are mixed. Then either the targets are mixed in the same way at
    BEFORE_LOSS, or the loss becomes the weighted average of the losses against both targets at BEFORE_BACKWARD. A label
    that the loss ignores has no share in mixed targets; the loss is the same in both modes.

    Microbatches: each microbatch is mixed separately, so several microbatches do not equal one batch.

    **Events** BEFORE_FORWARD, then BEFORE_LOSS (targets), or AFTER_LOSS and BEFORE_BACKWARD (loss). **Reads** the
    batch and `state.outputs`. **Writes** inputs and targets of the batch, or `state.loss`. **Cost** a copy and a
    weighted sum of the inputs; with `interpolate_loss` a second loss. **Compilation** static: no shape changes.

    Args:
        alpha: Parameter of the Beta distribution, at least 0. 0 mixes nothing.
        interpolate_loss: Mix losses instead of targets.
        input_key: Position of the inputs in the batch; see `State.batch_get_item`.
        target_key: Position of the targets in the batch.

    Raises:
        ValueError: `alpha` is negative, infinite or NaN.
        TypeError: `alpha` is not a number, or `interpolate_loss` not a bool; at the first batch, if inputs are integers
            of fewer than three dimensions.
        NotImplementedError: At the first batch, if inputs, targets, outputs or loss are not a single tensor, or if
            `interpolate_loss` is set and the loss does not depend on the targets in the batch.

    Example:
        >>> MixUp(alpha=0.2)
        MixUp(alpha=0.2,interpolate_loss=False,input_key=0,target_key=1)

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412, section 2.
    Differs: one weight per microbatch, at most 0.5.
    """

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: Any = 0, target_key: Any = 1
    ) -> None:
        check_alpha(alpha)
        check_flags(interpolate_loss=interpolate_loss)
        self.alpha = plain_number(alpha)
        self.interpolate_loss = interpolate_loss
        self.input_key, self.target_key = input_key, target_key
        self.mixing = 0.0
        self.indices: torch.Tensor | None = None
        self.permuted_target: torch.Tensor | None = None
        self._loss_target: torch.Tensor | None = None

    @property
    def events(self) -> frozenset[Event]:  # type: ignore[override]
        """BEFORE_FORWARD, and the events at which targets or losses are mixed."""
        if self.interpolate_loss:
            return frozenset({Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
        return frozenset({Event.BEFORE_FORWARD, Event.BEFORE_LOSS})

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        """The effects: mixed inputs, and mixed targets or an interpolated loss."""
        if self.interpolate_loss:
            return Placement(
                provides={TRANSFORMS_BATCH, MIXES_INPUTS, INTERPOLATES_LOSS}, discourages={INTERPOLATES_LOSS}
            )
        return Placement(provides={TRANSFORMS_BATCH, MIXES_INPUTS, MIXES_TARGETS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Mix the inputs, then the targets or the loss."""
        if event is Event.BEFORE_FORWARD:
            self._mix_inputs(state)
            return
        if event is Event.AFTER_LOSS:  # another method may have changed the targets only for this loss
            self._loss_target = state.batch_get_item(self.target_key)
            return
        assert self.indices is not None, "set at BEFORE_FORWARD"
        if event is Event.BEFORE_LOSS:
            mix_targets(state, self.target_key, self.indices, self.mixing, "MixUp")
            return
        target, self._loss_target = self._loss_target, None
        mix_loss(state, self.target_key, self.indices, self.mixing, "MixUp", target=target)

    def _mix_inputs(self, state: State) -> None:
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise NotImplementedError(
                f"`MixUp` mixes a tensor of inputs and a tensor of targets, got {type(input).__name__} and "
                f"{type(target).__name__}. Point `input_key` and `target_key` at tensors of the batch."
            )
        if input.dim() < 3 and not (input.is_floating_point() or input.is_complex()):
            raise TypeError(
                f"`MixUp` mixes images or floating inputs, got {input.dtype} of shape {tuple(input.shape)}. Point "
                f"`input_key` at embeddings, as token ids cannot be averaged; convert features with `.float()`."
            )
        self.mixing = _gen_mixing_coef(self.alpha)
        self.indices = _gen_indices(input.shape[0], input.device)
        mixed, self.permuted_target, _ = mixup_batch(input, target, mixing=self.mixing, indices=self.indices)
        state.batch_set_item(self.input_key, mixed)


def _gen_mixing_coef(alpha: float) -> float:
    """Draw the weight of the partner, the smaller one of the two."""
    weight = draw_beta(alpha)
    return min(weight, 1 - weight)


def _gen_indices(num_samples: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randperm(num_samples, device=device)


def _rows(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select rows in the memory format of the input, which `index_select` alone does not preserve."""
    if input.requires_grad:  # autograd does not support `out`
        return input.index_select(0, indices)
    return torch.index_select(input, 0, indices, out=torch.empty_like(input))
