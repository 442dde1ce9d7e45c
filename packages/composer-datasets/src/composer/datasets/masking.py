"""Batches of tokens for causal and for masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer.datasets._tokens import vocab_size_of

__all__ = ["TokenTransform", "mask_tokens"]

_IGNORED = -100


def mask_tokens(
    input_ids: Tensor, chosen: Tensor, fate: Tensor, random_ids: Tensor, mask_token_id: int, probability: float
) -> tuple[Tensor, Tensor]:
    """Hide tokens that a model is to predict: 80% become the mask, 10% a random token, 10% stay.

    Args:
        input_ids: Shape (N, S), int64; not modified.
        chosen: Uniform in [0, 1), the same shape: a token is to be predicted where this is below `probability`.
        fate: Uniform in [0, 1), the same shape: what becomes of it.
        random_ids: Tokens that may come in, the same shape.
        mask_token_id: The mask.
        probability: Share of the tokens to predict.

    Returns:
        What the model is given, and the labels: the tokens to predict, and -100 elsewhere.

    Example:
        >>> ids, draws = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0.1, 0.1, 0.1, 0.9]])
        >>> mask_tokens(ids, draws, torch.tensor([[0.5, 0.85, 0.95, 0.0]]), torch.full((1, 4), 3), 0, 0.15)
        (tensor([[0, 3, 7, 8]]), tensor([[   5,    6,    7, -100]]))

    Source: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding", arXiv:1810.04805, section 3.1.
    Differs: each token is chosen on its own, so the share varies from sequence to sequence.
    """
    predicted = chosen < probability
    labels = input_ids.masked_fill(~predicted, _IGNORED)
    masked = input_ids.masked_fill(predicted & (fate < 0.8), mask_token_id)
    masked = torch.where(predicted & (fate >= 0.8) & (fate < 0.9), random_ids, masked)
    return masked, labels


class TokenTransform:
    """Makes batches of sequences of tokens: on the host as a `collate_fn`, on a device for a `DeviceLoader`.

    Args:
        mask_token_id: What hides tokens. None: nothing is hidden, and the labels are the tokens, for causal language
            modelling.
        vocab_size: Number of tokens; needed to draw random ones, if there is a mask.
        probability: Share of the tokens to predict, if there is a mask.
        special_token_ids: Tokens that are never to be predicted, such as what separates documents.

    Raises:
        ValueError: There is a mask and no `vocab_size`, or `probability` is not in (0, 1].

    Example:
        >>> batch = TokenTransform().collate([torch.tensor([4, 2, 7])])
        >>> batch["labels"], batch["attention_mask"]
        (tensor([[4, 2, 7]]), tensor([[1, 1, 1]]))
    """

    def __init__(
        self,
        mask_token_id: int | None = None,
        *,
        vocab_size: int | None = None,
        probability: float = 0.15,
        special_token_ids: Sequence[int] = (),
    ) -> None:
        if mask_token_id is not None and vocab_size is None:
            raise ValueError("`vocab_size` must be given together with `mask_token_id`, to draw random tokens from.")
        if not 0 < probability <= 1:
            raise ValueError(f"`probability` must be above 0 and at most 1, got {probability!r}.")
        self.mask_token_id, self.vocab_size, self.probability = mask_token_id, vocab_size or 0, probability
        self.special_token_ids = tuple(special_token_ids)

    @classmethod
    def of(cls, tokenizer: Any, masked: bool, probability: float) -> TokenTransform:
        """What suits a tokenizer.

        Args:
            tokenizer: Has `mask_token_id`, or a token "[MASK]" or "<mask>", if `masked`.
            masked: Whether to hide tokens.
            probability: Share of the tokens to predict.

        Raises:
            ValueError: The tokenizer has no mask, or `probability` is not in (0, 1].
        """
        if not masked:
            return cls()
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None and hasattr(tokenizer, "token_to_id"):
            found = [tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>")]
            mask = next((token for token in found if token is not None), None)
        if mask is None:
            raise ValueError(
                f"`tokenizer` must have a mask for masked language modelling, got {type(tokenizer).__name__} with "
                f"none. Add one (`CharTokenizer(..., mask_token='[MASK]')`), or use `masked=False`."
            )
        special = [token for token in getattr(tokenizer, "all_special_ids", ()) if token != mask]
        eos = getattr(tokenizer, "eos_token_id", None)
        special = special or ([] if eos is None else [eos])
        return cls(mask, vocab_size=vocab_size_of(tokenizer), probability=probability, special_token_ids=special)

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """For each token two uniform numbers and a random token; nothing without a mask.

        Args:
            shape: Of the tokens, (N, S).
            generator: To draw from; its device is that of the tokens.
        """
        if self.mask_token_id is None:
            return ()
        how: dict[str, Any] = {"generator": generator, "device": generator.device}
        return torch.rand(shape, **how), torch.rand(shape, **how), torch.randint(self.vocab_size, shape, **how)

    def __call__(self, inputs: Tensor, targets: Tensor | None, drawn: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The batch.

        Args:
            inputs: Tokens, shape (N, S), of any integer type.
            targets: Not used: the tokens are their own targets.
            drawn: What `draw` returned.

        Returns:
            `input_ids`, `attention_mask` (1 everywhere) and `labels`, each of shape (N, S), int64.
        """
        ids = inputs.long()
        everywhere = torch.ones_like(ids)
        if self.mask_token_id is None:
            return {"input_ids": ids, "attention_mask": everywhere, "labels": ids.clone()}
        chosen, fate, random_ids = drawn
        for token in self.special_token_ids:
            chosen = chosen.masked_fill(ids == token, 1.0)
        masked, labels = mask_tokens(ids, chosen, fate, random_ids, self.mask_token_id, self.probability)
        return {"input_ids": masked, "attention_mask": everywhere, "labels": labels}

    def collate(self, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        """The batch of a list of sequences, random choices drawn from torch's global generator.

        Args:
            samples: Each of shape (S,).
        """
        inputs = torch.stack(list(samples))
        return self(inputs, None, self.draw(inputs.shape, torch.default_generator))
