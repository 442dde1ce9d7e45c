"""The simplest tokenizer: every character is a token."""

from __future__ import annotations

from collections.abc import Iterable


class CharTokenizer:
    """Tokenizer in which every character is a token, in the order of Unicode.

    Args:
        characters: The vocabulary; repetitions do not matter.
        eos_token: Name of a token that separates documents, or None. Special tokens come after the characters.
        mask_token: Name of the mask token for masked language modeling, or None.
        unk_token: Name of the token for unknown characters. None: unknown characters raise an error.

    Attributes:
        vocab_size: Number of tokens.
        eos_token_id: The index of `eos_token`, or None; likewise `mask_token_id` and `unk_token_id`.

    Raises:
        ValueError: `characters` is empty, or has an element that is not a single character.

    Example:
        >>> tokenizer = CharTokenizer("hello", mask_token="[MASK]")
        >>> tokenizer.encode("hole"), tokenizer.vocab_size, tokenizer.mask_token_id
        ([1, 3, 2, 0], 5, 4)
        >>> tokenizer.decode([1, 0, 2, 4])
        'hel[MASK]'
    """

    def __init__(
        self,
        characters: Iterable[str],
        *,
        eos_token: str | None = None,
        mask_token: str | None = None,
        unk_token: str | None = None,
    ) -> None:
        self._tokens = sorted(set(characters))
        wrong = [token for token in self._tokens if len(token) != 1]
        if wrong or not self._tokens:
            raise ValueError(
                f"`characters` must be one or more single characters, got {repr(wrong[0]) if wrong else 'none'}."
            )
        self.eos_token_id = self._add(eos_token)
        self.mask_token_id = self._add(mask_token)
        self.unk_token_id = self._add(unk_token)
        self.vocab_size = len(self._tokens)
        self._index = {token: number for number, token in enumerate(self._tokens)}

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """Return a tokenizer of the characters of a text, without special tokens."""
        return cls(text)

    def _add(self, token: str | None) -> int | None:
        if token is None:
            return None
        self._tokens.append(token)
        return len(self._tokens) - 1

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return the index of each token."""
        return dict(self._index)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: It has an unknown character, and there is no `unk_token`.
        """
        unknown = sorted(set(text) - self._index.keys())
        if unknown and self.unk_token_id is None:
            raise ValueError(
                f"The text has the character {unknown[0]!a}, which is not in the vocabulary. Add it to `characters`, "
                f"or pass an `unk_token`."
            )
        return [self._index.get(character, self.unk_token_id or 0) for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, a list or tensor of integers."""
        return "".join(self._tokens[int(token)] for token in tokens)
