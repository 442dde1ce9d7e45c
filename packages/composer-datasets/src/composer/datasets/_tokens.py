"""Tokenization of documents into one long array, in memory or in a cache file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from composer.datasets._shards import durable
from composer.utils import dist

_DOCUMENTS_PER_CALL = 256


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return the tokens of texts, without special tokens.

    Args:
        tokenizer: A tokenizer of transformers or tokenizers, or an object with `encode(text) -> list[int]`.
        texts: The texts.

    Raises:
        TypeError: `tokenizer` is none of these.
    """
    if hasattr(tokenizer, "convert_tokens_to_ids"):  # transformers
        ids: list[Sequence[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    if hasattr(tokenizer, "encode_batch"):  # tokenizers
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    if hasattr(tokenizer, "encode"):
        return [tokenizer.encode(text) for text in texts]
    raise TypeError(
        f"`tokenizer` must be a tokenizer of transformers or tokenizers, or have `encode(text)`, got "
        f"{type(tokenizer).__name__}."
    )


def vocab_size_of(tokenizer: Any) -> int:
    """Return the vocabulary size, including added tokens.

    Raises:
        TypeError: The tokenizer has none.
    """
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    if hasattr(tokenizer, "vocab_size"):
        return int(tokenizer.vocab_size)
    raise TypeError(f"`tokenizer` must have `vocab_size`, got {type(tokenizer).__name__} without one.")


class TextTokenizer:
    """Tokenizer of whole documents into one array, in memory or in a cache file.

    Args:
        tokenizer: See `encode`.
        separator: The token after each document, or None. "auto": the tokenizer's `eos_token_id`, else its
            `sep_token_id`, else none.
    """

    def __init__(self, tokenizer: Any, separator: int | Literal["auto"] | None) -> None:
        if separator == "auto":
            candidates = (getattr(tokenizer, name, None) for name in ("eos_token_id", "sep_token_id"))
            separator = next((int(token) for token in candidates if token is not None), None)
        self._tokenizer, self._separator = tokenizer, separator

    def tokenize(
        self, documents: Callable[[], Iterable[str]], sources: Sequence[Path], cache_dir: str | Path | None
    ) -> np.ndarray:
        """Return all tokens of all documents, concatenated.

        Args:
            documents: Reads the documents.
            sources: Their files. A cache is valid for these files, unmodified, and this tokenizer.
            cache_dir: A folder visible to all processes of a node: the first one writes the tokens there, and all
                processes and later runs memory-map the file. None: every process holds its own copy.

        Returns:
            Shape (number of tokens,), uint16 or int32.
        """
        dtype = np.dtype(np.uint16 if vocab_size_of(self._tokenizer) <= 2**16 else np.int32)
        if cache_dir is None:
            parts = list(self._parts(documents(), dtype))
            return np.concatenate(parts) if parts else np.empty(0, dtype)
        folder = Path(cache_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"tokens-{self._fingerprint(sources)}.{dtype.name}"
        with dist.busy_wait_for_local_rank_zero(str(folder)):
            if dist.get_local_rank() == 0 and not path.exists():
                with durable(path) as file:
                    for part in self._parts(documents(), dtype):
                        file.write(part.tobytes())
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    def _parts(self, documents: Iterable[str], dtype: np.dtype) -> Iterator[np.ndarray]:
        end = np.array([] if self._separator is None else [self._separator], dtype)
        iterator = iter(documents)
        while texts := list(islice(iterator, _DOCUMENTS_PER_CALL)):
            for ids in encode(self._tokenizer, texts):
                yield np.concatenate([np.asarray(ids, dtype), end])

    def _fingerprint(self, sources: Sequence[Path]) -> str:
        tokenizer = self._tokenizer
        digest = hashlib.sha256(f"{type(tokenizer).__name__} {self._separator}".encode())
        for source in sources:
            status = source.stat()
            digest.update(f"{source.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        if hasattr(tokenizer, "get_vocab"):
            digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
        if hasattr(tokenizer, "encode_batch") or hasattr(tokenizer, "convert_tokens_to_ids"):
            # Tokenizers with the same vocabulary may still split text differently.
            digest.update(repr(encode(tokenizer, [f"It's {sources[0].name}: 3.14, Don't PANIC!\n"])).encode())
        return digest.hexdigest()[:20]
