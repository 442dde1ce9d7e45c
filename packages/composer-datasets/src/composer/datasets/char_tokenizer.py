"""The plainest tokenizer: every character is a token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["CharTokenizer"]


class CharTokenizer:
    """Every character is a token; their numbers follow the order of the characters in Unicode.

    Args:
        characters: Those that there are; repetitions do not matter.
        eos_token: Name of a token that separates documents, or None. Tokens with names come after the characters.
        mask_token: Name of a token that hides others, for masked language modelling, or None.
        unk_token: Name of a token for characters that are not among `characters`. None: those are an error.

    Attributes:
        vocab_size: Number of tokens.
        eos_token_id: The number of `eos_token`, or None; likewise `mask_token_id` and `unk_token_id`.

    Raises:
        ValueError: There is no character, or an element of `characters` is not a single one.

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
        wrong = next((token for token in self._tokens if len(token) != 1), None)
        if not self._tokens or wrong is not None:
            raise ValueError(f"`characters` must be at least one single character, got {wrong!r} among them.")
        self._codes = np.array([ord(token) for token in self._tokens], dtype=np.uint32)
        self.eos_token_id = self._add(eos_token)
        self.mask_token_id = self._add(mask_token)
        self.unk_token_id = self._add(unk_token)
        self.vocab_size = len(self._tokens)

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """A tokenizer of the characters that occur in a text, without tokens that have names."""
        return cls(text)

    def _add(self, token: str | None) -> int | None:
        if token is None:
            return None
        self._tokens.append(token)
        return len(self._tokens) - 1

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """The number of each token."""
        return {token: number for number, token in enumerate(self._tokens)}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: It has a character that is not a token, and there is no `unk_token`.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        places = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
        unknown = self._codes[places] != codes
        if unknown.any():
            if self.unk_token_id is None:
                strange = chr(codes[unknown][0])
                raise ValueError(
                    f"The text has the character {strange!a}, which is no token. Make the tokenizer of all characters "
                    f"that occur, or give it an `unk_token`."
                )
            places = np.where(unknown, self.unk_token_id, places)
        encoded: list[int] = places.tolist()
        return encoded

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens.

        Args:
            tokens: A list or a tensor of numbers.
        """
        return "".join(self._tokens[int(token)] for token in tokens)
