"""`apply_alibi` and the algorithm `Alibi`. Policies are in `attention_surgery_functions`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.algorithms.warnings import warn_no_effect
from composer.core import REPLACES_ATTENTION, RESHAPES_SEQUENCES, TRANSFORMS_BATCH, Algorithm, Event, Placement
from composer.utils import MissingConditionalImportError, check_finite, check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_log = logging.getLogger(__name__)


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Replace the position embeddings of a language model, in place, by a linear bias of its attention.

    Each head of self-attention adds `-m * |i - j|` to the score of query i and key j; the slope m differs between
    heads. Position embeddings become zeros that are not trained. BERT, RoBERTa and GPT-2 of `transformers`, and models
    built from their layers, are supported; others can be registered in `attention_surgery_functions.policy_registry`.
    A second call changes `max_sequence_length`.

    Args:
        model: The model.
        max_sequence_length: The longest sequence that the model will see, in training or later, in tokens.
        optimizers: The optimizer of the model, for policies that create parameters. The built-in ones do not.

    Warns:
        NoEffectWarning: The model has no module of a registered class; it is not changed.

    Raises:
        ValueError: `max_sequence_length` is less than 1, or a policy replaces the model itself.
        NotImplementedError: The attention of the model takes no bias, such as flash attention, or the model has
            relative position embeddings.
        MissingConditionalImportError: `transformers` is not installed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=8, n_layer=1, n_head=2))
        >>> apply_alibi(model, max_sequence_length=64)
        >>> model(torch.zeros(1, 64, dtype=torch.int64)).logits.shape
        torch.Size([1, 64, 100])

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        arXiv:2108.12409, section 3.
    Differs: bidirectional models, such as BERT, are biased by the distance in both directions.
    """
    check_integers("It is a number of tokens.", max_sequence_length=max_sequence_length, least=1)
    try:
        surgery: Any = import_module("composer.algorithms.alibi.attention_surgery_functions")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise MissingConditionalImportError(extra_deps_group="nlp", conda_package="transformers") from error
    surgery.check_attention(model, surgery.policy_registry)
    policies = {
        kind: _replacement_function(policy, max_sequence_length) for kind, policy in surgery.policy_registry.items()
    }
    changed = len(module_surgery.replace_module_classes(model, policies, optimizers=optimizers))
    for kind, policy in policies.items():  # module surgery skips the model itself
        replacement = policy(model, 0) if isinstance(model, kind) else None
        if replacement not in (None, model):
            raise ValueError(
                f"The policy for `{kind.__name__}` replaces `model` itself, which is not possible in place. Pass a "
                f"module that contains it, or let the policy change it in place."
            )
        changed += replacement is model
    surgery.share_biases(model)
    _log.log(logging.INFO if changed else logging.WARNING, "ALiBi changed %d modules.", changed)
    if not changed:
        warn_no_effect(
            f"`apply_alibi` changed nothing: the model has no module of a registered class, which are "
            f"{', '.join(f'`{kind.__name__}`' for kind in policies)}. Register others in "
            f"`attention_surgery_functions.policy_registry`."
        )


def _replacement_function(policy: Any, max_sequence_length: int) -> module_surgery.ReplacementFunction:
    def replace(module: nn.Module, index: int) -> nn.Module | None:
        replacement: nn.Module | None = policy(module, index, max_sequence_length)
        return replacement

    return replace


class Alibi(Algorithm):
    """Trains language models on short sequences, for use on longer ones.

    At INIT position embeddings are replaced by biases of the attention; see `apply_alibi`. Train on short sequences
    from the loader, or let the algorithm cut long ones: at AFTER_DATALOADER, if the batch is a mapping, each sequence
    is cut into pieces of `train_sequence_length_scaling` times its length, which become separate rows, in order.
    Values with one entry per example but no sequence dimension, such as labels of shape (N,), are repeated for each
    piece. A batch is cut before it is split, so microbatches equal one batch.

    **Events** INIT, AFTER_DATALOADER. **Reads** the batch. **Writes** modules of `state.model`; the batch.
    **Cost** one addition to the mask in each forward pass, of shape (N, heads, length, length); none with sdpa and no
    padding. Attention cannot use flash kernels. Shorter rows save most of its time and memory. **Compilation**
    static: batches have one shape if those of the loader do.

    Args:
        max_sequence_length: The longest sequence that the model will see, in training or later, in tokens.
        train_sequence_length_scaling: Length of the pieces relative to the sequences, above 0 and at most 1. The
            sequences must be divisible into whole pieces. 1 does not change batches.

    Raises:
        ValueError: `max_sequence_length` is less than 1, or `train_sequence_length_scaling` is not in (0, 1].

    Example:
        >>> Alibi(max_sequence_length=1024)
        Alibi(max_sequence_length=1024,train_sequence_length_scaling=1.0)

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        arXiv:2108.12409, section 3.
    Differs: by default, sequences are not cut. MosaicML's class cuts them to a quarter, which fails for lengths that
        are not divisible by 4; pass `train_sequence_length_scaling=0.25` for that. See also `apply_alibi`.
    """

    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    placement = Placement(provides={REPLACES_ATTENTION, RESHAPES_SEQUENCES, TRANSFORMS_BATCH})

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 1.0) -> None:
        check_integers("It is a number of tokens.", max_sequence_length=max_sequence_length, least=1)
        check_finite(train_sequence_length_scaling=train_sequence_length_scaling)
        if not 0 < train_sequence_length_scaling <= 1:
            raise ValueError(
                f"`train_sequence_length_scaling` must be above 0 and at most 1, got "
                f"{train_sequence_length_scaling!r}. 1 does not cut sequences."
            )
        self.max_sequence_length = plain_number(max_sequence_length)
        self.train_sequence_length_scaling = plain_number(train_sequence_length_scaling)
        self._applied = False

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the position embeddings have another shape in a checkpoint."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return True at INIT, once, and at AFTER_DATALOADER."""
        return event in self.events and not (event is Event.INIT and self._applied)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the model, or cut the sequences of the batch."""
        if event is Event.INIT:
            apply_alibi(state.model, self.max_sequence_length, optimizers=state.optimizers)
            self._applied = True
        elif self.train_sequence_length_scaling != 1 and isinstance(state.batch, Mapping):
            state.batch = _cut(state.batch, self.train_sequence_length_scaling)


def _cut(batch: Mapping[Any, Any], scaling: float) -> Mapping[Any, Any]:
    """Return a batch with the sequences cut into pieces; the batch is not modified.

    A value of shape (N, S, ...) becomes (N * S / s, s, ...), with the length S of the sequences and s = scaling * S.
    """
    values = [batch.get("input_ids"), *batch.values()]
    sequences = next((value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1), None)
    if sequences is None:
        return batch
    count, length = sequences.shape[:2]
    short = round(scaling * length)
    if short < 1 or abs(short - scaling * length) > 1e-6 * length or count * length % short:
        raise ValueError(
            f"`train_sequence_length_scaling` must cut sequences into whole pieces, got {scaling!r} for {count} of "
            f"{length} tokens. Pad sequences to a multiple of the number of pieces."
        )
    result = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)  # preserves a `BatchEncoding`
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != count:
            result[key] = value
        elif value.dim() > 1 and value.shape[1] == length:
            result[key] = value.reshape(-1, short, *value.shape[2:])
        elif length % short == 0:
            result[key] = value.repeat_interleave(length // short, dim=0)
        else:
            raise ValueError(
                f"`train_sequence_length_scaling` must be one over a whole number if a value without a sequence "
                f"dimension, here {key!r}, is repeated for each piece, got pieces of {short} out of {length} tokens."
            )
    return result
