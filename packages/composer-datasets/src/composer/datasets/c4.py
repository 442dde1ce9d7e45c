"""C4, the cleaned Common Crawl, or any other documents in JSON Lines files."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from composer.core import DataSpec
from composer.datasets._missing import missing_files, require
from composer.datasets._options import Options
from composer.datasets._tokens import TextTokenizer
from composer.datasets.lm import PackedTokens, token_loader
from composer.datasets.masking import TokenTransform

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
    cache_dir: str | Path | None = None,
    **options: Any,
) -> DataSpec:
    """Build a loader of C4, packed into sequences of one length.

    All documents are tokenized first; a `cache_dir` keeps the result for later runs. So the whole text is shuffled
    rather than a window of it, ranks get exact shares, and a run resumes immediately at any position.

    Args:
        datadir: The folder of the shards, or one that has them in `en`: files such as
            `c4-train.00000-of-01024.json.gz`, where every line is a JSON object with a `text`. `.json` and `.jsonl`,
            uncompressed or compressed with gzip or zstd, are supported.
        global_batch_size: Sequences per batch, summed over all ranks.
        tokenizer: A tokenizer as in `build_text_dataloader`.
        max_seq_len: Tokens per sequence.
        split: Part of the file names: "train" or "validation".
        masked: True: masked language modeling. False: causal language modeling, with the tokens as labels.
        mlm_probability: Fraction of the tokens to predict, if `masked`.
        max_shards: Use only this many shards, from the first. None: all.
        separator: The token after each document, or None. "auto": the tokenizer's `eos_token_id` or `sep_token_id`, if
            it has one.
        is_train: Default of `drop_last` and `shuffle`. None: True if `split` is "train".
        cache_dir: Folder that caches the tokens between runs, as a memory-mapped file of 2 bytes per token (4 for a
            vocabulary above 65536). None: every process holds them in memory.
        **options: Other arguments of `build_text_dataloader`: `drop_last`, `shuffle`, `seed`, `device`, and those of
            `ResumableDataLoader`.

    Returns:
        The batches of `build_text_dataloader`.

    Raises:
        FileNotFoundError: There are no shards; the message has the command that gets them.
        TypeError: `tokenizer` is not supported, or `options` has an unknown argument.
        ValueError: A number is out of range, a line is not a document, or `masked` and the tokenizer has no mask token.
    """
    shards = _shards(Path(datadir).expanduser(), split)
    if max_shards is not None and max_shards < 1:
        raise ValueError(f"`max_shards` must be positive or None, got {max_shards!r}.")
    shards = shards[:max_shards]
    is_train = split == "train" if is_train is None else is_train
    transform = TokenTransform.of(tokenizer, masked, mlm_probability)
    tokens = TextTokenizer(tokenizer, separator).tokenize(lambda: read_documents(shards), shards, cache_dir)
    return token_loader(PackedTokens(tokens, max_seq_len), transform, Options(global_batch_size, is_train, **options))


def read_documents(shards: Sequence[str | Path]) -> Iterator[str]:
    """Yield the texts of all shards.

    Args:
        shards: JSON Lines files, compressed if their names end in `.gz` or `.zst`.

    Raises:
        ModuleNotFoundError: There is a `.zst` file and zstandard is not installed.
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
            zstandard = require("zstandard", "A shard that ends in `.zst`", "zstd")
            with shard.open("rb") as compressed, zstandard.ZstdDecompressor().stream_reader(compressed) as file:
                yield from io.TextIOWrapper(file, encoding="utf-8")
        else:
            with shard.open(encoding="utf-8") as file:
                yield from file
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{str(shard)!r} is damaged ({error}). Download it again.") from error


def _shards(datadir: Path, split: str) -> list[Path]:
    folders = (datadir, datadir / "en")
    for folder in folders:
        matches = {path for ending in _ENDINGS for path in folder.glob(f"*{split}*.{ending}")}
        if matches:
            return sorted(matches)
    raise missing_files(
        f"The split {split!r} of C4",
        [folder / f"*{split}*.{_ENDINGS[0]}" for folder in folders],
        f"hf download allenai/c4 --repo-type dataset --include 'en/c4-{split}.00000-*' --local-dir {str(datadir)!r}",
    )
