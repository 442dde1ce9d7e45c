"""From documents to one long array of tokens, in memory or in a file that is made once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from composer.utils import dist

__all__ = ["default_separator", "encode", "tokens_of", "vocab_size_of"]

_AT_ONCE = 256  # documents that are given to a tokenizer together


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Sequence[int]]:
    """The tokens of texts, without special ones.

    Args:
        tokenizer: Of transformers, of tokenizers, or anything else with `encode(text) -> list of int`.
        texts: The texts.

    Raises:
        TypeError: It is none of them.
    """
    if hasattr(tokenizer, "convert_tokens_to_ids"):  # transformers
        ids: list[Sequence[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    if hasattr(tokenizer, "encode_batch"):  # tokenizers
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    if hasattr(tokenizer, "encode"):
        return [tokenizer.encode(text) for text in texts]
    raise TypeError(
        f"`tokenizer` must be of transformers or tokenizers, or have `encode(text)`, got {type(tokenizer).__name__}."
    )


def vocab_size_of(tokenizer: Any) -> int:
    """The number of tokens, added ones included.

    Raises:
        TypeError: The tokenizer does not tell.
    """
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    if hasattr(tokenizer, "vocab_size"):
        return int(tokenizer.vocab_size)
    raise TypeError(f"`tokenizer` must have `vocab_size`, got {type(tokenizer).__name__}, which does not.")


def default_separator(tokenizer: Any) -> int | None:
    """The token that stands between documents: the tokenizer's end of a sequence, else its separator, else none."""
    for name in ("eos_token_id", "sep_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return None


def tokens_of(
    documents: Callable[[], Iterable[str]],
    sources: Sequence[Path],
    tokenizer: Any,
    separator: int | None,
    cache_dir: str | Path | None,
) -> np.ndarray:
    """All tokens of all documents, one after the other.

    Args:
        documents: Reads them.
        sources: The files they are from: a cache is of these files as they are now, and of this tokenizer.
        tokenizer: Makes the tokens.
        separator: A token after each document, or None.
        cache_dir: A folder that all processes of a node see: the first one writes the tokens there, all of them map
            the file into memory, and so do later runs. None: every process keeps its own.

    Returns:
        Shape (number of tokens,), uint16 or int32.
    """
    dtype = np.dtype(np.uint16 if vocab_size_of(tokenizer) <= 2**16 else np.int32)
    if cache_dir is None:
        parts = list(_parts(documents(), tokenizer, separator, dtype))
        return np.concatenate(parts) if parts else np.empty(0, dtype)
    folder = Path(cache_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tokens-{_fingerprint(sources, tokenizer, separator)}.{dtype.name}"
    with dist.busy_wait_for_local_rank_zero(str(folder)):
        if dist.get_local_rank() == 0 and not path.exists():
            _write(path, _parts(documents(), tokenizer, separator, dtype))
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _parts(documents: Iterable[str], tokenizer: Any, separator: int | None, dtype: np.dtype) -> Iterator[np.ndarray]:
    end = np.array([] if separator is None else [separator], dtype)
    iterator = iter(documents)
    while texts := list(islice(iterator, _AT_ONCE)):
        for ids in encode(tokenizer, texts):
            yield np.concatenate([np.asarray(ids, dtype), end])


def _write(path: Path, parts: Iterable[np.ndarray]) -> None:
    """Under another name first: a file that is there is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part.tobytes())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _fingerprint(sources: Sequence[Path], tokenizer: Any, separator: int | None) -> str:
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {separator}".encode())
    for source in sources:
        status = source.stat()
        digest.update(f"{source.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    if hasattr(tokenizer, "get_vocab"):
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    probe = next(iter(sources)).name
    if hasattr(tokenizer, "encode_batch") or hasattr(tokenizer, "convert_tokens_to_ids"):
        digest.update(repr(encode(tokenizer, [f"It's {probe}: 3.14, Don't PANIC!\n"])).encode())
    return digest.hexdigest()[:20]
