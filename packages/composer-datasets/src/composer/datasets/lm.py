"""Text for language models: packed into sequences of one length, causal or masked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._device import AnyDevice
from composer.datasets._files import missing
from composer.datasets._options import Options
from composer.datasets._tokens import default_separator, tokens_of
from composer.datasets.masking import TokenTransform
from composer.datasets.synthetic import synthetic_text

__all__ = ["PackedTokens", "build_synthetic_text_dataloader", "build_text_dataloader"]

_EXAMPLE = "curl -LO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class PackedTokens(Dataset[Tensor]):
    """One long row of tokens, cut into sequences of one length: nothing is padded, and less than one is left out.

    Args:
        tokens: Shape (number of tokens,), integers; may be a file mapped into memory.
        max_seq_len: Tokens per sequence.
        part: Which part of the row to take, from 0.0 to 1.0: `(0.0, 0.9)` for training and `(0.9, 1.0)` for validation.

    Attributes:
        max_seq_len: As above.

    Raises:
        ValueError: `max_seq_len` is not positive, `part` is not a range within [0, 1], or there is not a single
            sequence.

    Example:
        >>> import numpy as np
        >>> dataset = PackedTokens(np.arange(11), max_seq_len=4)
        >>> len(dataset), dataset[1]
        (2, tensor([4, 5, 6, 7]))
    """

    def __init__(self, tokens: np.ndarray, max_seq_len: int, part: tuple[float, float] = (0.0, 1.0)) -> None:
        if max_seq_len < 1:
            raise ValueError(f"`max_seq_len` must be positive, got {max_seq_len!r}.")
        if not 0 <= part[0] < part[1] <= 1:
            raise ValueError(f"`part` must be a range within 0.0 and 1.0, got {part!r}.")
        first, last = (round(fraction * len(tokens)) for fraction in part)
        count = (last - first) // max_seq_len
        if count < 1:
            raise ValueError(
                f"There must be at least one sequence of {max_seq_len} tokens, got {last - first} tokens. Use more "
                f"text, a larger `part`, or a smaller `max_seq_len`."
            )
        self.max_seq_len = max_seq_len
        self._sequences = tokens[first : first + count * max_seq_len].reshape(count, max_seq_len)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._sequences[index].astype(np.int64))

    def as_tensor(self) -> Tensor:
        """All sequences, shape (len(self), max_seq_len), int32."""
        return torch.from_numpy(self._sequences.astype(np.int32))


def build_text_dataloader(
    paths: str | Path | Sequence[str | Path],
    global_batch_size: int,
    *,
    tokenizer: Any,
    max_seq_len: int,
    masked: bool = False,
    mlm_probability: float = 0.15,
    part: tuple[float, float] = (0.0, 1.0),
    is_train: bool = True,
    separator: int | Literal["auto"] | None = "auto",
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    cache_dir: str | Path | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of any text for language modelling, packed into sequences of one length.

    Args:
        paths: Text files, in UTF-8, each of which is a document; or folders, of which all `*.txt` are taken.
        global_batch_size: Sequences per batch, of all ranks together.
        tokenizer: Of transformers, of tokenizers, or anything else with `encode(text) -> list of int` and `vocab_size`,
            such as `CharTokenizer`.
        max_seq_len: Tokens per sequence.
        masked: Whether tokens are hidden for masked language modelling, anew in every epoch; otherwise the labels are
            the tokens themselves, for causal language modelling. See `TokenTransform`.
        mlm_probability: Share of the tokens to predict, if `masked`.
        part: Which part of the tokens to take: `(0.0, 0.9)` for training and `(0.9, 1.0)` for validation.
        is_train: What `drop_last` and `shuffle` are by default.
        separator: The token after each document; None: none. "auto": the tokenizer's `eos_token_id` or `sep_token_id`,
            if it has one.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the hiding.
        device: Where to keep all tokens and make the batches; see `DeviceLoader`. None: a `ResumableDataLoader`.
        cache_dir: Where to keep the tokens between runs, as a file that is mapped into memory. None: nowhere.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`; on the host only.

    Returns:
        Batches are dicts of `input_ids`, `attention_mask` and `labels`, each of shape (N, max_seq_len), int64. Labels
        of tokens that are not to be predicted are -100; models shift causal labels themselves, as those of
        transformers do.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: `tokenizer` is none, or an argument of `dataloader_kwargs` is unknown.
        ValueError: A number is out of range, there is too little text, or `masked` and the tokenizer has no mask.
    """
    files = _text_files([paths] if isinstance(paths, (str, Path)) else paths)
    end = default_separator(tokenizer) if separator == "auto" else separator
    transform = TokenTransform.of(tokenizer, masked, mlm_probability)

    def documents() -> Iterable[str]:
        return (file.read_text(encoding="utf-8") for file in files)

    tokens = tokens_of(documents, files, tokenizer, end, cache_dir)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    dataset = PackedTokens(tokens, max_seq_len, part)
    return token_loader(dataset, transform, options)


def build_synthetic_text_dataloader(
    global_batch_size: int,
    *,
    num_samples: int = 1024,
    max_seq_len: int = 128,
    vocab_size: int = 64,
    masked: bool = False,
    mlm_probability: float = 0.15,
    is_train: bool = True,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """`build_text_dataloader` without files and tokenizer: made-up tokens in which each follows from the one before.

    Args:
        global_batch_size: Sequences per batch, of all ranks together.
        num_samples: Number of sequences.
        max_seq_len: Tokens per sequence.
        vocab_size: Number of tokens; if `masked`, the last one is what hides others.
        masked: As there.
        mlm_probability: As there.
        is_train: What `drop_last` and `shuffle` are by default; the test text is another one than the training text.
        drop_last: As there.
        shuffle: As there.
        seed: As there; the text is the same with every seed.
        device: As there.
        **dataloader_kwargs: As there.
    """
    tokens = synthetic_text(num_samples * max_seq_len, vocab_size - masked, is_train=is_train).numpy()
    transform = TokenTransform()
    if masked:
        transform = TokenTransform(vocab_size - 1, vocab_size=vocab_size, probability=mlm_probability)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    dataset = PackedTokens(tokens, max_seq_len)
    return token_loader(dataset, transform, options)


def token_loader(dataset: PackedTokens, transform: TokenTransform, options: Options) -> DataSpec:
    """A loader over packed tokens.

    Args:
        dataset: The tokens.
        transform: Makes the batches.
        options: How.
    """
    num_tokens = len(dataset) * dataset.max_seq_len
    if options.device is None:
        return DataSpec(options.on_host(dataset, transform.collate), num_tokens=num_tokens)
    loader = options.on_device(dataset.as_tensor(), None, transform)
    return DataSpec(loader, num_samples=len(dataset), num_tokens=num_tokens)


def _text_files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            looked_for = path / "*.txt" if path.is_dir() else path
            raise missing("The text", [looked_for], f"{_EXAMPLE}    # for example")
        files += found
    return files
