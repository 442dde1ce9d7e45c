"""C4, the cleaned Common Crawl, from shards on disk; or any other documents in lines of JSON."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from composer.core import DataSpec
from composer.datasets._device import AnyDevice
from composer.datasets._files import missing
from composer.datasets._optional import needed
from composer.datasets._options import Options
from composer.datasets._tokens import default_separator, tokens_of
from composer.datasets.lm import PackedTokens, build_synthetic_text_dataloader, token_loader
from composer.datasets.masking import TokenTransform

__all__ = ["build_c4_dataloader", "build_synthetic_c4_dataloader", "read_documents"]

_ENDINGS = ("json.gz", "jsonl.gz", "json.zst", "jsonl.zst", "jsonl", "json")


def build_c4_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    tokenizer: Any,
    max_seq_len: int,
    split: str = "train",
    masked: bool = False,
    mlm_probability: float = 0.15,
    max_shards: int | None = None,
    separator: int | Literal["auto"] | None = "auto",
    is_train: bool | None = None,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    device: AnyDevice | None = None,
    cache_dir: str | Path | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of C4, packed into sequences of one length.

    All documents are made tokens first, once if there is a `cache_dir`. So the whole text is shuffled, not a window of
    it, every rank gets its share exactly, and a run resumes at once wherever it was.

    Args:
        datadir: The folder of the shards, or one that has them in `en`: files like `c4-train.00000-of-01024.json.gz`,
            with a JSON object that has `text` in every line; `.json`, `.jsonl` and compression by zstd will do as well.
        global_batch_size: Sequences per batch, of all ranks together.
        tokenizer: As `build_text_dataloader` takes it.
        max_seq_len: Tokens per sequence.
        split: What the names of the shards contain: "train" or "validation".
        masked: Whether tokens are hidden for masked language modelling; otherwise the labels are the tokens.
        mlm_probability: Share of the tokens to predict, if `masked`.
        max_shards: Use only as many shards, the first ones. None: all.
        separator: The token after each document; None: none. "auto": the tokenizer's `eos_token_id` or `sep_token_id`,
            if it has one.
        is_train: What `drop_last` and `shuffle` are by default. None: whether `split` is "train".
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the hiding.
        device: Where to keep all tokens and make the batches; see `DeviceLoader`. None: a `ResumableDataLoader`.
        cache_dir: Where to keep the tokens between runs, as a file that is mapped into memory: 2 bytes per token, 4
            with more than 65536 different ones. None: in the memory of every process.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`; on the host only.

    Returns:
        As of `build_text_dataloader`.

    Raises:
        FileNotFoundError: There are no shards; the message has the command that gets them.
        TypeError: `tokenizer` is none, or an argument of `dataloader_kwargs` is unknown.
        ValueError: A number is out of range, a line is no document, or `masked` and the tokenizer has no mask.
    """
    shards = _shards(Path(datadir).expanduser(), split)
    if max_shards is not None and max_shards < 1:
        raise ValueError(f"`max_shards` must be positive or None, got {max_shards!r}.")
    shards = shards[:max_shards]
    end = default_separator(tokenizer) if separator == "auto" else separator
    transform = TokenTransform.of(tokenizer, masked, mlm_probability)
    tokens = tokens_of(lambda: read_documents(shards), shards, tokenizer, end, cache_dir)
    is_train = split == "train" if is_train is None else is_train
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, dataloader_kwargs)
    dataset = PackedTokens(tokens, max_seq_len)
    return token_loader(dataset, transform, options)


def build_synthetic_c4_dataloader(
    global_batch_size: int, *, max_seq_len: int = 1024, vocab_size: int = 50257, **options: Any
) -> DataSpec:
    """`build_c4_dataloader` without files: made-up tokens, by default of GPT-2's vocabulary.

    Args:
        global_batch_size: Sequences per batch, of all ranks together.
        max_seq_len: Tokens per sequence.
        vocab_size: Number of tokens.
        **options: As `build_synthetic_text_dataloader` takes them.
    """
    return build_synthetic_text_dataloader(global_batch_size, max_seq_len=max_seq_len, vocab_size=vocab_size, **options)


def read_documents(shards: Sequence[str | Path]) -> Iterator[str]:
    """The texts of shards, one after the other.

    Args:
        shards: Files with a JSON object in every line, compressed if their names end in `.gz` or `.zst`.

    Raises:
        ModuleNotFoundError: `.zst` needs a package that is not installed.
        ValueError: A line is not a JSON object with a string `text`, or a file is damaged.
    """
    for shard in map(Path, shards):
        for number, line in enumerate(_lines(shard), start=1):
            if line.strip():
                yield _text(line, f"{str(shard)!r}, line {number}")


def _text(line: str, place: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: must be a JSON object, got {line[:40]!r} ({error}).") from error
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: must be a JSON object with a string `text`, got {line[:40]!r}.")
    return text


def _lines(shard: Path) -> Iterator[str]:
    try:
        if shard.suffix == ".gz":
            with gzip.open(shard, "rt", encoding="utf-8") as file:
                yield from file
        elif shard.suffix == ".zst":
            with shard.open("rb") as compressed, _zstd(compressed) as file:
                yield from io.TextIOWrapper(file, encoding="utf-8")
        else:
            with shard.open(encoding="utf-8") as file:
                yield from file
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{str(shard)!r} is damaged ({error}). Get it again.") from error


def _zstd(file: Any) -> Any:
    return needed("zstandard", "A shard that ends in `.zst`", "zstd").ZstdDecompressor().stream_reader(file)


def _shards(datadir: Path, split: str) -> list[Path]:
    folders = (datadir, datadir / "en")
    for folder in folders:
        found: Iterable[Path] = {path for ending in _ENDINGS for path in folder.glob(f"*{split}*.{ending}")}
        if found:
            return sorted(found)
    raise missing(
        f"The split {split!r} of C4",
        [folder / f"*{split}*.{_ENDINGS[0]}" for folder in folders],
        f"hf download allenai/c4 --repo-type dataset --include 'en/c4-{split}.00000-*' --local-dir {str(datadir)!r}",
    )
