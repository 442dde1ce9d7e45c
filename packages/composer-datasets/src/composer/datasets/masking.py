"""Token batches for causal and masked language modeling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer.datasets._tokens import vocab_size_of

_IGNORE_INDEX = -100


def mask_tokens(
    input_ids: Tensor, chosen: Tensor, fate: Tensor, random_ids: Tensor, mask_token_id: int, probability: float
) -> tuple[Tensor, Tensor]:
    """Mask the tokens that a model must predict: 80% become the mask token, 10% a random token, 10% are unchanged.

    Args:
        input_ids: Shape (N, S), int64; not modified.
        chosen: Uniform in [0, 1), the same shape: tokens are predicted where this is below `probability`.
        fate: Uniform in [0, 1), the same shape: selects mask, random or unchanged.
        random_ids: Random tokens, the same shape.
        mask_token_id: The mask token.
        probability: Fraction of the tokens to predict.

    Returns:
        The masked tokens, and the labels: the original tokens where they are predicted, -100 elsewhere.

    Example:
        >>> ids, draws = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0.1, 0.1, 0.1, 0.9]])
        >>> mask_tokens(ids, draws, torch.tensor([[0.5, 0.85, 0.95, 0.0]]), torch.full((1, 4), 3), 0, 0.15)
        (tensor([[0, 3, 7, 8]]), tensor([[   5,    6,    7, -100]]))

    Source: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
        Understanding", arXiv:1810.04805, section 3.1.
    Differs: each token is chosen independently, so the fraction varies between sequences.
    """
    predicted = chosen < probability
    labels = input_ids.masked_fill(~predicted, _IGNORE_INDEX)
    masked = input_ids.masked_fill(predicted & (fate < 0.8), mask_token_id)
    masked = torch.where(predicted & (fate >= 0.8) & (fate < 0.9), random_ids, masked)
    return masked, labels


class TokenTransform:
    """Transform of token sequences into batches: a `collate_fn` on the host, a `DeviceTransform` on a device.

    Args:
        mask_token_id: The mask token. None: causal language modeling, where the labels are the tokens.
        vocab_size: Number of tokens; required with `mask_token_id`, to draw random tokens.
        probability: Fraction of the tokens to predict, with `mask_token_id`.
        special_token_ids: Tokens that are never predicted, such as separators of documents.

    Raises:
        ValueError: `mask_token_id` is given without `vocab_size`, or `probability` is not in (0, 1].

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
            raise ValueError(
                "`vocab_size` must be given together with `mask_token_id`: it is the range of random tokens."
            )
        if not 0 < probability <= 1:
            raise ValueError(f"`probability` must be above 0 and at most 1, got {probability!r}.")
        self.mask_token_id, self.vocab_size, self.probability = mask_token_id, vocab_size or 0, probability
        self.special_token_ids = tuple(special_token_ids)

    @classmethod
    def of(cls, tokenizer: Any, masked: bool, probability: float) -> TokenTransform:
        """Return the transform for a tokenizer.

        Args:
            tokenizer: If `masked`, it must have `mask_token_id`, or a token "[MASK]" or "<mask>".
            masked: Mask tokens for masked language modeling.
            probability: Fraction of the tokens to predict.

        Raises:
            ValueError: The tokenizer has no mask token, or `probability` is not in (0, 1].
        """
        if not masked:
            return cls()
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None and hasattr(tokenizer, "token_to_id"):
            candidates = [tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>")]
            mask = next((token for token in candidates if token is not None), None)
        if mask is None:
            raise ValueError(
                f"`tokenizer` must have a mask token for masked language modeling, got {type(tokenizer).__name__} "
                f"without one. Add one (`CharTokenizer(..., mask_token='[MASK]')`), or use `masked=False`."
            )
        special = [token for token in getattr(tokenizer, "all_special_ids", ()) if token != mask]
        eos = getattr(tokenizer, "eos_token_id", None)
        special = special or ([] if eos is None else [eos])
        return cls(mask, vocab_size=vocab_size_of(tokenizer), probability=probability, special_token_ids=special)

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return two uniform numbers and a random token for each token, or () without a mask token.

        Args:
            shape: Shape of the tokens, (N, S).
            generator: Generator on the device of the tokens.
        """
        if self.mask_token_id is None:
            return ()
        kwargs: dict[str, Any] = {"generator": generator, "device": generator.device}
        return torch.rand(shape, **kwargs), torch.rand(shape, **kwargs), torch.randint(self.vocab_size, shape, **kwargs)

    def __call__(self, inputs: Tensor, targets: Tensor | None, drawn: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the batch.

        Args:
            inputs: Tokens, shape (N, S), of any integer type.
            targets: Unused: the tokens are their own targets.
            drawn: The result of `draw`.

        Returns:
            `input_ids`, `attention_mask` (all ones) and `labels`, each of shape (N, S), int64.
        """
        ids = inputs.long()
        attention_mask = torch.ones_like(ids)
        if self.mask_token_id is None:
            return {"input_ids": ids, "attention_mask": attention_mask, "labels": ids.clone()}
        chosen, fate, random_ids = drawn
        for token in self.special_token_ids:
            chosen = chosen.masked_fill(ids == token, 1.0)
        masked, labels = mask_tokens(ids, chosen, fate, random_ids, self.mask_token_id, self.probability)
        return {"input_ids": masked, "attention_mask": attention_mask, "labels": labels}

    def collate(self, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the batch of a list of sequences of shape (S,), with random draws from torch's global generator."""
        inputs = torch.stack(list(samples))
        return self(inputs, None, self.draw(inputs.shape, torch.default_generator))
