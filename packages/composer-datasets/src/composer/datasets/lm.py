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
from composer.datasets._missing import missing_files
from composer.datasets._options import Options
from composer.datasets._tokens import TextTokenizer
from composer.datasets.device_loader import AnyDevice
from composer.datasets.masking import TokenTransform
from composer.datasets.synthetic import synthetic_text
from composer.utils import check_finite

_EXAMPLE = "curl -LO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class PackedTokens(Dataset[Tensor]):
    """Dataset that cuts one long array of tokens into sequences, without padding; an incomplete last one is dropped.

    Args:
        tokens: Shape (number of tokens,), integers; may be a memory-mapped file.
        max_seq_len: Tokens per sequence.
        part: The part of the array to use, such as `(0.0, 0.9)` for training and `(0.9, 1.0)` for validation.

    Attributes:
        max_seq_len: Tokens per sequence.

    Raises:
        ValueError: `max_seq_len` is not positive, `part` is not a range within [0, 1], or there are too few tokens for
            one sequence.

    Example:
        >>> import numpy as np
        >>> dataset = PackedTokens(np.arange(11), max_seq_len=4)
        >>> len(dataset), dataset[1]
        (2, tensor([4, 5, 6, 7]))
    """

    def __init__(self, tokens: np.ndarray, max_seq_len: int, part: tuple[float, float] = (0.0, 1.0)) -> None:
        check_finite(max_seq_len=max_seq_len, above=0)
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
        """Return all sequences, shape (len(self), max_seq_len), int32."""
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
    """Build a loader of text files for language modeling, packed into sequences of one length.

    Args:
        paths: Text files in UTF-8, one document each, or folders of `*.txt` files.
        global_batch_size: Sequences per batch, summed over all ranks.
        tokenizer: A tokenizer of transformers or tokenizers, or an object with `encode(text) -> list[int]` and
            `vocab_size`, such as `CharTokenizer`.
        max_seq_len: Tokens per sequence.
        masked: True: masked language modeling, with new random masks in every epoch. False: causal language
            modeling, with the tokens as labels. See `TokenTransform`.
        mlm_probability: Fraction of the tokens to predict, if `masked`.
        part: The part of the tokens to use, such as `(0.0, 0.9)` for training and `(0.9, 1.0)` for validation.
        is_train: Default of `drop_last` and `shuffle`.
        separator: The token after each document, or None. "auto": the tokenizer's `eos_token_id` or `sep_token_id`, if
            it has one.
        drop_last: Drop samples that do not fill a batch on every rank. None: only in training.
        shuffle: Use a new random order in every epoch. None: only in training.
        seed: Seed of the order and the masks.
        device: Store all tokens on this device and make the batches there; see `DeviceLoader`. None: use a
            `ResumableDataLoader`.
        cache_dir: Folder that caches the tokens between runs, as a memory-mapped file. None: no cache.
        **dataloader_kwargs: Arguments of `ResumableDataLoader` such as `num_workers`; only without `device`.

    Returns:
        Batches are dicts of `input_ids`, `attention_mask` and `labels`, each of shape (N, max_seq_len), int64. Tokens
        that are not to be predicted have the label -100. Causal labels are not shifted: models do that, as in
        transformers.

    Raises:
        FileNotFoundError: A file does not exist.
        TypeError: `tokenizer` is not supported, or `dataloader_kwargs` has an unknown argument.
        ValueError: A number is out of range, there is too little text, or `masked` and the tokenizer has no mask token.
    """
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        matches = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not matches or not matches[0].is_file():
            looked_for = path / "*.txt" if path.is_dir() else path
            raise missing_files("The text", [looked_for], f"{_EXAMPLE}    # for example")
        files += matches

    def documents() -> Iterable[str]:
        return (file.read_text(encoding="utf-8") for file in files)

    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, **dataloader_kwargs)
    transform = TokenTransform.of(tokenizer, masked, mlm_probability)
    tokens = TextTokenizer(tokenizer, separator).tokenize(documents, files, cache_dir)
    return token_loader(PackedTokens(tokens, max_seq_len, part), transform, options)


def read_tokens(path: str | Path) -> np.ndarray:
    """Return the tokens of a NumPy file, as a memory-mapped array.

    Args:
        path: A file of `numpy.save`, shape (number of tokens,), integers of any size, such as uint16.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: It holds anything else.
    """
    if not Path(path).is_file():
        raise missing_files("The tokens", [Path(path)], "numpy.save(path, numpy.array(ids, numpy.uint16))")
    tokens: np.ndarray = np.load(path, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"`path` must hold integers of shape (number of tokens,), got {tokens.dtype} of shape {tokens.shape} in "
            f"{str(path)!r}."
        )
    return tokens


def build_token_dataloader(
    path: str | Path,
    global_batch_size: int,
    *,
    max_seq_len: int,
    part: tuple[float, float] = (0.0, 1.0),
    is_train: bool = True,
    **options: Any,
) -> DataSpec:
    """Build a loader of tokens that another program has written, for causal language modeling.

    Arguments that are not described here, and the batches, are those of `build_text_dataloader`.

    Args:
        path: A file for `read_tokens`.
        global_batch_size: Sequences per batch, summed over all ranks.
        max_seq_len: Tokens per sequence.
        part: The part of the tokens to use.
        is_train: Default of `drop_last` and `shuffle`.
        **options: Other arguments of `build_text_dataloader`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It does not hold tokens, there are too few, or a number is out of range.
    """
    dataset = PackedTokens(read_tokens(path), max_seq_len, part)
    return token_loader(dataset, TokenTransform(), Options(global_batch_size, is_train, **options))


def build_synthetic_text_dataloader(
    global_batch_size: int,
    *,
    num_samples: int = 1024,
    max_seq_len: int = 128,
    vocab_size: int = 64,
    masked: bool = False,
    mlm_probability: float = 0.15,
    is_train: bool = True,
    **options: Any,
) -> DataSpec:
    """Build a loader of synthetic tokens, each of which mostly follows from the one before.

    Arguments that are not described here are those of `build_text_dataloader`.

    Args:
        global_batch_size: Sequences per batch, summed over all ranks.
        num_samples: Number of sequences.
        max_seq_len: Tokens per sequence.
        vocab_size: Number of tokens; if `masked`, the last one is the mask token.
        masked: Mask tokens for masked language modeling.
        mlm_probability: Fraction of the tokens to predict, if `masked`.
        is_train: Default of `drop_last` and `shuffle`; training and test text differ.
        **options: Other arguments of `build_text_dataloader`. The tokens do not depend on `seed`.
    """
    tokens = synthetic_text(num_samples * max_seq_len, vocab_size - masked, is_train=is_train).numpy()
    transform = TokenTransform()
    if masked:
        transform = TokenTransform(vocab_size - 1, vocab_size=vocab_size, probability=mlm_probability)
    dataset = PackedTokens(tokens, max_seq_len)
    return token_loader(dataset, transform, Options(global_batch_size, is_train, **options))


def token_loader(dataset: PackedTokens, transform: TokenTransform, options: Options) -> DataSpec:
    """Return a loader of packed tokens on the host or a device.

    Args:
        dataset: The tokens.
        transform: Makes the batches.
        options: The arguments of the builder.
    """
    num_tokens = len(dataset) * dataset.max_seq_len
    if options.device is None:
        return DataSpec(options.on_host(dataset, transform.collate), num_tokens=num_tokens)
    loader = options.on_device(dataset.as_tensor(), None, transform)
    return DataSpec(loader, num_samples=len(dataset), num_tokens=num_tokens)
