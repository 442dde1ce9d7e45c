"""The algorithm `ChunkedCrossEntropy`, which lets the head of a model compute the loss instead of logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.chunked_cross_entropy.loss import check_arguments, compute_chunked_cross_entropy
from composer.algorithms.utils.logits import labels_and_mask, shifts_labels
from composer.core import (
    CHANGES_LAYERS,
    CHANGES_LENGTH,
    INTERPOLATES_LOSS,
    MIXES_TARGETS,
    PRUNES_BATCH,
    REPLACES_LOSS,
    REPLACES_MODEL,
    RESHAPES_SEQUENCES,
    SMOOTHS_TARGETS,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
)
from composer.loss.utils import ignored_label
from composer.utils import check_flags, plain_number, unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["ChunkedCrossEntropy", "compute_chunked_cross_entropy"]

_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss")  # of transformers: the mean cross-entropy over labels


class ChunkedHead(nn.Linear):
    """A linear layer that returns the loss of its inputs, shape (), while it has targets.

    The loss is computed in `forward`, where `fully_shard` has gathered the weight.

    Attributes:
        targets: Shape (...) for inputs (..., H). None: the layer returns logits.
        options: Arguments of `compute_chunked_cross_entropy`.
        loss: The last loss that was returned.
    """

    targets: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    options: dict[str, Any]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss, or logits without gradients or targets."""
        if self.targets is None or not torch.is_grad_enabled():
            return super().forward(hidden)
        loss = compute_chunked_cross_entropy(hidden, self.weight, self.targets, bias=self.bias, **self.options)
        self.loss = loss
        return loss


def _find_head(model: nn.Module, head_name: str | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the head, and the model of transformers that has it."""
    named = None if head_name is None else _submodule(model, head_name)
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module) and (named is None or head is named):
            return head, module
    return named, None


def _submodule(model: nn.Module, head_name: str) -> nn.Module:
    try:
        return model.get_submodule(head_name)
    except AttributeError as error:
        similar = [repr(name) for name, _ in model.named_modules() if name.endswith(f".{head_name}")]
        raise AttributeError(
            f"`head_name` must be a name in `model.named_modules()`, got {head_name!r}: {error}."
            + (f" Use {' or '.join(similar)}." if similar else "")
        ) from None


def _check_model(model: Any) -> None:
    """Check that a model of transformers has the loss that is replaced.

    Raises:
        ValueError: It has another one.
    """
    config: Any = model.config
    loss = getattr(model, "loss_function", None)
    name = getattr(loss, "__name__", type(loss).__name__)
    if name not in _LOSSES:
        raise ValueError(
            f"`ChunkedCrossEntropy` replaces the cross-entropy of language models, but the loss of "
            f"`{type(model).__name__}` is `{name}`. Leave one of them out."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"`ChunkedCrossEntropy` does not support encoder-decoders such as `{type(model).__name__}`, which make "
            f"inputs from labels. Call `compute_chunked_cross_entropy` in a `ComposerModel` of your own."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for option in ("final_logit_softcapping", "output_router_logits"):
        if getattr(text, option, None):
            raise ValueError(
                f"`ChunkedCrossEntropy` needs a model whose loss is the cross-entropy of the output of its head, but "
                f"`{type(model).__name__}` has `{option}={getattr(text, option)!r}` in its configuration. Call "
                f"`compute_chunked_cross_entropy` in a `ComposerModel` of your own."
            )


def _check_loss(loss: Any, settings: Mapping[str, Any]) -> None:
    """Check that the loss of a `ModuleWithLoss` is the one that replaces it, unless it is a custom function.

    Raises:
        ValueError: It is another loss of torch, or a cross-entropy with other settings.
    """
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if not getattr(kind, "__module__", "").startswith("torch.nn") or loss is nn.functional.cross_entropy:
        return
    if not isinstance(loss, nn.CrossEntropyLoss):
        raise ValueError(
            f"`ChunkedCrossEntropy` replaces the loss by the cross-entropy, but `loss` is `{kind.__name__}`. Leave one "
            f"of them out."
        )
    for name, value in {"weight": None, "reduction": "mean", **settings}.items():
        own = getattr(loss, name)
        if isinstance(own, torch.Tensor) or own != value:
            raise ValueError(
                f"`loss` must have the settings of `ChunkedCrossEntropy`, which replaces it: {name}={value!r}, got "
                f"{own!r}. Use the same for both, or leave one of them out."
            )


def _output_of(outputs: Any) -> Any:
    """Return what the head returned: the outputs, their `logits`, or the first of them."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    if isinstance(outputs, (list, tuple)):
        return outputs[0] if outputs else None
    return getattr(outputs, "logits", outputs)


def _check_outputs(head: ChunkedHead, model: nn.Module, args: Any, outputs: Any) -> None:
    """Check that a model returns the output of its head unchanged, as a forward hook of the model.

    Raises:
        RuntimeError: It does not.
    """
    if head.targets is None or not torch.is_grad_enabled():
        return
    loss, head.loss = head.loss, None
    if loss is None or _output_of(outputs) is not loss:
        reason = "does not call it" if loss is None else "does not return its output unchanged as its logits"
        raise RuntimeError(
            f"`ChunkedCrossEntropy` lets the head of the model compute the loss, but `{type(model).__name__}` "
            f"{reason}. Pass the name of the last layer as `head_name`, or call `compute_chunked_cross_entropy` in "
            f"the model."
        )


class ChunkedCrossEntropy(Algorithm):
    """Computes head and cross-entropy in chunks of tokens, so that training never holds the logits of a whole batch.

    At INIT the head, a `torch.nn.Linear`, gets another `forward`. In each training pass it has the targets, and returns
    the loss instead of logits; see `compute_chunked_cross_entropy`. It replaces the result of `model.loss`, which must
    be the mean cross-entropy over the labels that are not `ignore_index`, as in models of `transformers`. In
    evaluation, prediction and generation the model is unchanged.

    In training, `state.outputs` is `{"loss": ...}`: there are no logits for training metrics, which are refused, and
    for algorithms that need them. Metrics of evaluation have logits.

    The loss is a mean over the labels of the microbatch, as it is without this algorithm. Several microbatches or ranks
    equal one batch if the loop weights them by these labels, as the Trainer and `HostedRun` do. A microbatch without
    labels has the loss 0.

    **Events** INIT; BEFORE_TRAIN_BATCH, BEFORE_FORWARD, AFTER_FORWARD, BEFORE_LOSS, AFTER_LOSS. **Reads** the labels of
    the batch. **Writes** the class of the head, `state.outputs`, `state.loss`; in the forward pass, the batch of a
    model of `transformers` has no labels. **Cost** the same matrix products, in smaller parts; the gradient of the
    weight is held in float32 between the passes. Nothing is read from the device, except by the kernel of liger.
    **Compilation** static: the loop over chunks is a part of the graph.

    **When not to use it** the vocabulary is small compared with the width of the model; the loss is another one.

    Args:
        head_name: The name of the head, the last layer of the model; may contain dots. None: the output embeddings of a
            model of `transformers`.
        target_key: Position of the labels in the batch; see `State.batch_get_item`. None: 1, the targets.
        ignore_index: The label of tokens that do not count. None: the one that the loss of the model ignores, or -100
            if it does not say.
        shift_labels: Predict the labels of the next tokens. None: as `shift_labels` of the model, which
            `HuggingFaceModel` has, and False for other models.
        label_smoothing: See `compute_chunked_cross_entropy`. Only in training, like `z_loss`.
        z_loss: See `compute_chunked_cross_entropy`. Included in the loss.
        chunk_size: Tokens per chunk. None: see `compute_chunked_cross_entropy`.
        kernel: "torch", "liger" or None; see `compute_chunked_cross_entropy`.

    Raises:
        ValueError: An argument is out of range; at INIT, if the model has no head, training metrics, or another loss.
        TypeError: At INIT, if the head is not a `torch.nn.Linear`, such as one with LoRA; in training, if the labels
            are not int64.
        AttributeError: At INIT, if the model has no module `head_name`.
        RuntimeError: In the first batch, if the model does not return the output of its head unchanged.

    Example:
        >>> ChunkedCrossEntropy(head_name="head").head_name
        'head'

    Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989, section 3.2.
    Differs: gradients of the weight are summed over chunks in float32.
    """

    events = frozenset(
        {
            Event.INIT,
            Event.BEFORE_TRAIN_BATCH,
            Event.BEFORE_FORWARD,
            Event.AFTER_FORWARD,
            Event.BEFORE_LOSS,
            Event.AFTER_LOSS,
        }
    )
    placement = Placement(
        provides={REPLACES_LOSS},
        after={CHANGES_LAYERS, CHANGES_LENGTH, PRUNES_BATCH, RESHAPES_SEQUENCES, TRANSFORMS_BATCH},
        excludes={INTERPOLATES_LOSS, MIXES_TARGETS, REPLACES_LOSS, REPLACES_MODEL, SMOOTHS_TARGETS},
    )

    def __init__(
        self,
        head_name: str | None = None,
        target_key: Any = None,
        ignore_index: int | None = None,
        shift_labels: bool | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
        kernel: str | None = None,
    ) -> None:
        check_arguments(
            -100 if ignore_index is None else ignore_index, label_smoothing, z_loss, None, chunk_size, kernel
        )
        if shift_labels is not None:
            check_flags(shift_labels=shift_labels)
        self.head_name, self.target_key = head_name, target_key
        self.ignore_index = None if ignore_index is None else plain_number(ignore_index)
        self.shift_labels = shift_labels
        self.label_smoothing, self.z_loss = plain_number(label_smoothing), plain_number(z_loss)
        self.chunk_size = None if chunk_size is None else plain_number(chunk_size)
        self.kernel = kernel
        self._ignored = -100 if ignore_index is None else ignore_index
        self._head: ChunkedHead | None = None
        self._hides_labels = False
        self._batch: Any = None  # the batch with labels, during the forward pass
        self._replaced = False  # `loss` of the model is replaced, while it is called

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the head, or compute the loss in it."""
        if event is Event.INIT:
            self._prepare(state.model)
        elif event is Event.BEFORE_TRAIN_BATCH:
            self._reset(state)  # a pass that ran out of memory is repeated
        elif event is Event.BEFORE_FORWARD:
            self._give_targets(state)
        elif event is Event.AFTER_FORWARD:
            state.outputs = {"loss": _output_of(state.outputs)}
            state.batch = self._batch
            self._reset(state)
        elif event is Event.BEFORE_LOSS:
            # The loop calls `loss` with these outputs, from which the model could not compute it.
            unwrapped_model(state.model).loss = partial(_given, state.outputs["loss"])  # type: ignore[assignment]
            self._replaced = True
        else:
            self._reset(state)

    def _prepare(self, model: Any) -> None:
        metrics = model.get_metrics(is_train=True) if hasattr(model, "get_metrics") else {}
        if metrics:
            raise ValueError(
                f"`ChunkedCrossEntropy` must not be used with training metrics, which need logits, but the model has "
                f"{', '.join(metrics)}. Use them in evaluation only: let `get_metrics(is_train=True)` return {{}}, "
                f"for example with `model.train_metrics = {{}}`."
            )
        head, owner = _find_head(model, self.head_name)
        if head is None:
            raise ValueError(
                "`head_name` must be the name of the last layer of the model, got None, and the model has no output "
                "embeddings as models of `transformers` have. Pass for example `head_name='head'`."
            )
        if type(head) not in (nn.Linear, ChunkedHead):
            raise TypeError(
                f"`ChunkedCrossEntropy` needs a head that is a `torch.nn.Linear`, got `{type(head).__name__}`. Adapt "
                f"other layers than the head (LoRA), and shard the model after INIT."
            )
        if owner is not None:
            _check_model(owner)
        of_loss = ignored_label(model)
        if self.ignore_index is None and of_loss is not None:
            self._ignored = of_loss
        if callable(getattr(model, "loss_fn", None)):  # of a `ModuleWithLoss`
            _check_loss(model.loss_fn, {"label_smoothing": self.label_smoothing, "ignore_index": self._ignored})
        head.__class__ = ChunkedHead
        assert isinstance(head, ChunkedHead)
        head.options = {
            "ignore_index": self._ignored,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "chunk_size": self.chunk_size,
            "kernel": self.kernel,
        }
        model.register_forward_hook(partial(_check_outputs, head))
        self._head, self._hides_labels = head, owner is not None

    def _give_targets(self, state: State) -> None:
        """Give the head its targets, and hide labels from a model that would compute a loss from them."""
        assert self._head is not None, "INIT was announced"
        batch = self._batch = state.batch
        targets, _ = labels_and_mask(state, self.target_key)
        if shifts_labels(state.model, self.shift_labels):
            targets = F.pad(targets[:, 1:], (0, 1), value=self._ignored)
        self._head.targets = targets
        if self._hides_labels and isinstance(batch, Mapping):
            state.batch = {key: value for key, value in batch.items() if key != "labels"}

    def _reset(self, state: State) -> None:
        """Remove the targets and the batch of a pass, and restore `model.loss`."""
        self._batch = None
        if self._head is not None:
            self._head.targets = self._head.loss = None
        if self._replaced:
            del unwrapped_model(state.model).loss
            self._replaced = False


def _given(loss: torch.Tensor, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the loss that the head has computed, as the `loss` of the model."""
    return loss
