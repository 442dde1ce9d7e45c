"""`compute_distillation_loss` and the algorithm `Distillation`. Symbols: logits s and t, temperature T, weight a."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from composer.algorithms.utils.logits import add_to_loss, labels_and_mask, logits_of, shifts_labels
from composer.core import (
    ADDS_LOSS,
    INTERPOLATES_LOSS,
    REPLACES_LOSS,
    REPLACES_MODEL,
    SMOOTHS_TARGETS,
    TRANSFORMS_BATCH,
    WEIGHS_LOSS,
    Algorithm,
    Event,
    Placement,
)
from composer.core.precision import precision_context_of
from composer.loss.utils import ignored_label
from composer.models import ComposerModel
from composer.utils import check_finite, check_flags, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def compute_distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float = 2.0,
    *,
    mask: torch.Tensor | None = None,
    dim: int = -1,
) -> torch.Tensor:
    """Return `T^2 * KL(softmax(t / T) || softmax(s / T))`, the mean over the positions that count.

    The factor T^2 keeps the size of the gradient independent of the temperature. Everything is computed in float32, or
    in float64 if the logits are.

    Args:
        logits: Logits s of the student; the classes are in dimension `dim`, the other dimensions are positions.
        teacher_logits: Logits t of the teacher, of the same shape. No gradient flows to them.
        temperature: T, above 0. Higher ones weigh the small probabilities of the teacher more.
        mask: One value per position; zeros (False) do not count. None: all positions count.
        dim: The dimension of the classes.

    Returns:
        A scalar; 0 if no position counts.

    Raises:
        ValueError: `temperature` is not positive, or the shapes differ.

    Example:
        >>> teacher = torch.tensor([[2.0, 0.0]])
        >>> compute_distillation_loss(torch.tensor([[2.0, 0.0]]), teacher)
        tensor(0.)
        >>> compute_distillation_loss(torch.zeros(1, 2), teacher).round(decimals=3)
        tensor(0.4440)

    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2.
    Differs: the divergence instead of the cross-entropy, which has the same gradient.
    """
    check_finite("Use 2.0.", temperature=temperature, above=0)
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"`logits` and `teacher_logits` must have the same shape, got {tuple(logits.shape)} and "
            f"{tuple(teacher_logits.shape)}. The teacher needs the same classes in the same order."
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    student = F.log_softmax(logits.to(dtype) / temperature, dim)
    teacher = F.log_softmax(teacher_logits.detach().to(dtype) / temperature, dim)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim)
    if mask is None:
        return temperature**2 * divergence.mean()
    counts = mask != 0
    if counts.shape != divergence.shape:
        raise ValueError(
            f"`mask` must have one value per position, shape {tuple(divergence.shape)}, got {tuple(mask.shape)}."
        )
    return temperature**2 * torch.where(counts, divergence, 0).sum() / counts.sum().clamp(min=1)


class Distillation(Algorithm):
    """Trains a model on the predictions of a teacher as well as on the labels.

    At BEFORE_BACKWARD the teacher sees the batch of the model, with all its transformations, and the loss becomes

        (1 - a) * loss + a * compute_distillation_loss(logits, logits of the teacher)

    The teacher runs in evaluation mode without gradients, once per microbatch, in the precision of the run. It is not
    part of `state.model`: it is neither trained nor saved.

    The term is a mean over the positions of the microbatch that have a label, like the loss itself. Several
    microbatches or ranks equal one batch if the loop weights them by these labels, as the Trainer and `HostedRun` do.

    **Events** FIT_START, BEFORE_BACKWARD. **Reads** `state.outputs`, `state.batch`. **Writes** `state.loss`. **Logs**
    the metric `distillation/loss`, of the last microbatch. **Cost** a forward pass of the teacher. **Compilation**
    static: it runs outside of the model.

    **When not to use it** the teacher has other classes or another tokenizer, or is no better than the model becomes
    without it.

    Args:
        teacher: A `ComposerModel`, which is called with the batch, or any other module, which is called with its
            inputs. It is moved to the device of the run.
        weight: The weight a of the teacher, in [0, 1]. 1 ignores the labels.
        temperature: T, above 0.
        input_key: Position of the inputs in the batch, for a teacher that is not a `ComposerModel`; see
            `State.batch_get_item`.
        target_key: Position of the labels; what the loss of the model ignores does not count, or -100 if it does not
            say. None: 1, the targets.
        shift_labels: Compare logits with the labels of the next tokens. None: as `shift_labels` of the model, which
            `HuggingFaceModel` has, and False for other models.

    Raises:
        ValueError: `weight` or `temperature` is out of range; in training, if the teacher is a part of the model, the
            logits have different shapes, or `shift_labels` is True but the logits have no dimension of tokens.
        TypeError: `teacher` is not a module; in training, if the outputs have no logits.

    Example:
        >>> Distillation(torch.nn.Linear(4, 2), temperature=4.0).temperature
        4.0

    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2.
    Differs: none.
    """

    events = frozenset({Event.FIT_START, Event.BEFORE_BACKWARD})
    # BEFORE_BACKWARD is where losses are interpolated: there, the term is not mixed with them.
    placement = Placement(
        provides={WEIGHS_LOSS},
        before={ADDS_LOSS},
        after={INTERPOLATES_LOSS, TRANSFORMS_BATCH},
        excludes={REPLACES_LOSS, REPLACES_MODEL},
        discourages={SMOOTHS_TARGETS},
    )

    def __init__(
        self,
        teacher: torch.nn.Module,
        weight: float = 0.5,
        temperature: float = 2.0,
        input_key: Any = 0,
        target_key: Any = None,
        shift_labels: bool | None = None,
    ) -> None:
        if not isinstance(teacher, torch.nn.Module):
            raise TypeError(f"`teacher` must be a `torch.nn.Module`, got {teacher!r:.100}.")
        check_finite("1 ignores the labels.", weight=weight, least=0, most=1)
        check_finite("Use 2.0.", temperature=temperature, above=0)
        if shift_labels is not None:
            check_flags(shift_labels=shift_labels)
        self.teacher = teacher.eval()
        self.weight, self.temperature = plain_number(weight), plain_number(temperature)
        self.input_key, self.target_key, self.shift_labels = input_key, target_key, shift_labels

    def __repr__(self) -> str:
        names = ("weight", "temperature", "input_key", "target_key", "shift_labels")
        text = ",".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}(teacher={type(self.teacher).__name__}(...),{text})"

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Move the teacher to the device, or combine the losses."""
        if event is Event.FIT_START:
            self._check_teacher(state.model)
            state.device.module_to_device(self.teacher)
            return
        logits = logits_of(state.outputs, "Distillation")
        if self.shift_labels and logits.dim() < 3:
            raise ValueError(
                f"`shift_labels` must be False for logits without a dimension of tokens, got True with logits of "
                f"shape {tuple(logits.shape)}. Pass `shift_labels=False`, or return logits of shape "
                f"(batch, tokens, classes) from `forward`."
            )
        teacher = logits_of(self._predict(state), "Distillation")
        dim, mask = (-1 if logits.dim() <= 3 else 1), None
        labels, _ = labels_and_mask(state, self.target_key)
        if logits.dim() > 2 and shifts_labels(state.model, self.shift_labels):
            logits, teacher, labels = logits[:, :-1], teacher[:, :-1], labels[:, 1:]
        if labels.shape == logits.movedim(dim, 0).shape[1:]:
            ignored = ignored_label(state.model)
            mask = labels != (-100 if ignored is None else ignored)
        term = compute_distillation_loss(logits, teacher, self.temperature, mask=mask, dim=dim)
        state.loss = add_to_loss(_scaled(state.loss, 1 - self.weight), self.weight * term, "distillation")
        logger.log_metrics({"distillation/loss": term.detach()})

    def _check_teacher(self, model: torch.nn.Module) -> None:
        """Raise ValueError if the teacher is a part of the model: it would be trained and saved."""
        own = {id(parameter) for parameter in self.teacher.parameters()}
        shared = [name for name, parameter in model.named_parameters() if id(parameter) in own]
        if shared:
            raise ValueError(
                f"`teacher` must not share parameters with the model, which trains and saves them, got {len(shared)} "
                f"of the model, such as {shared[0]!r}. Pass a copy, `copy.deepcopy(teacher)`, that the model does not "
                f"have as an attribute."
            )

    @torch.no_grad()
    def _predict(self, state: State) -> Any:
        batch = state.batch
        if self.teacher.training:  # the user called `train()`
            self.teacher.eval()
        inputs = batch if isinstance(self.teacher, ComposerModel) else state.batch_get_item(self.input_key)
        dtype = next((p.dtype for p in self.teacher.parameters() if p.is_floating_point()), None)
        with precision_context_of(state, fp8_autocast_enabled=False):
            return self.teacher(inputs if dtype is None else _with_dtype(inputs, dtype))


def _with_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floating tensors have the dtype of the teacher."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _with_dtype(value, dtype) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_with_dtype(value, dtype) for value in batch)
    return batch


def _scaled(loss: Any, factor: float) -> Any:
    """Return a loss times a factor, in the form that the model returns."""
    if isinstance(loss, Mapping):
        keys = ["total"] if "total" in loss else list(loss)
        return {**loss, **{key: _scaled(loss[key], factor) for key in keys}}
    return loss * factor if isinstance(loss, torch.Tensor) else tuple(_scaled(part, factor) for part in loss)
