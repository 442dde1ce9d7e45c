"""Datasets in object storage, read with mosaicml-streaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from composer.core import DataSpec
from composer.datasets._missing import require
from composer.datasets._options import batch_size_per_rank
from composer.datasets.imagenet import IMAGENET_MEAN, IMAGENET_STD, image_transform
from composer.datasets.masking import TokenTransform
from composer.datasets.utils import NormalizationFn, pil_image_collate


def build_streaming_dataloader(
    remote: str | None,
    local: str,
    global_batch_size: int,
    *,
    split: str | None = None,
    sample_transform: Callable[[dict[str, Any]], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    is_train: bool = True,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    streaming_kwargs: Mapping[str, Any] | None = None,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """Build a loader of a dataset in the MDS format, downloaded shard by shard while it is read.

    mosaicml-streaming tracks the position; the Trainer saves it and resumes there immediately. Random transforms draw
    from the global generators of the worker that makes a batch.

    Args:
        remote: URL of the shards, such as `s3://bucket/folder`. None: all shards are in `local`.
        local: Folder that stores the shards on this node.
        global_batch_size: Samples per batch, summed over all ranks.
        split: A subfolder of both, such as "train", or None.
        sample_transform: Makes a sample of a stored dict.
        collate_fn: Makes a batch of a list of samples. None: torch's default.
        is_train: Default of `drop_last` and `shuffle`.
        drop_last: Drop the last, incomplete batch. None: only in training.
        shuffle: Use a new random order in every epoch. None: only in training.
        seed: Seed of the order.
        streaming_kwargs: More arguments of `streaming.StreamingDataset`, such as `cache_limit` or `predownload`.
        **dataloader_kwargs: Arguments of `torch.utils.data.DataLoader`, such as `num_workers`.

    Raises:
        ModuleNotFoundError: mosaicml-streaming is not installed.
        ValueError: `global_batch_size` is not a positive multiple of the number of ranks.
    """
    streaming = require("streaming", "A dataset in object storage", "streaming")
    batch_size = batch_size_per_rank(global_batch_size)
    dataset = streaming.StreamingDataset(
        remote=remote,
        local=local,
        split=split,
        batch_size=batch_size,
        shuffle=is_train if shuffle is None else shuffle,
        shuffle_seed=seed,
        **(streaming_kwargs or {}),
    )
    drop_last = is_train if drop_last is None else drop_last
    loader = streaming.StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=partial(_collate, sample_transform, default_collate if collate_fn is None else collate_fn),
        **dataloader_kwargs,
    )
    return DataSpec(loader, num_samples=dataset.size)


def build_streaming_imagenet_dataloader(
    remote: str | None,
    local: str,
    global_batch_size: int,
    *,
    is_train: bool = True,
    resize_size: int = -1,
    crop_size: int = 224,
    image_key: str = "x",
    target_key: str = "y",
    **options: Any,
) -> DataSpec:
    """Build a loader of ImageNet from object storage, with the batches of `build_imagenet_dataloader`.

    Args:
        remote: URL of the shards; see `build_streaming_dataloader`.
        local: Folder that stores the shards on this node.
        global_batch_size: Images per batch, summed over all ranks.
        is_train: Augment, shuffle and drop the last batch.
        resize_size: See `build_imagenet_dataloader`.
        crop_size: Height and width of the images in a batch.
        image_key: The column of the images, stored as "pil" or "jpeg".
        target_key: The column of the labels, stored as "int".
        **options: Other arguments of `build_streaming_dataloader`; `split` is "train" or "val" by default.
    """
    augment = image_transform(is_train, resize_size, crop_size)
    options.setdefault("split", "train" if is_train else "val")
    spec = build_streaming_dataloader(
        remote,
        local,
        global_batch_size,
        is_train=is_train,
        sample_transform=partial(_image_sample, augment, image_key, target_key),
        collate_fn=pil_image_collate,
        **options,
    )
    normalize = NormalizationFn(IMAGENET_MEAN, IMAGENET_STD)
    return DataSpec(spec.dataloader, num_samples=spec.num_samples, batch_transforms=normalize)


def build_streaming_text_dataloader(
    remote: str | None,
    local: str,
    global_batch_size: int,
    *,
    max_seq_len: int,
    tokenizer: Any = None,
    masked: bool = False,
    mlm_probability: float = 0.15,
    tokens_key: str = "tokens",
    is_train: bool = True,
    **options: Any,
) -> DataSpec:
    """Build a loader of packed tokens from object storage, with the batches of `build_text_dataloader`.

    Args:
        remote: URL of the shards; see `build_streaming_dataloader`.
        local: Folder that stores the shards on this node.
        global_batch_size: Sequences per batch, summed over all ranks.
        max_seq_len: Tokens per sequence; longer stored sequences are truncated.
        tokenizer: Provides the mask token; required if `masked`.
        masked: True: masked language modeling. False: causal language modeling, with the tokens as labels.
        mlm_probability: Fraction of the tokens to predict, if `masked`.
        tokens_key: The column of the tokens, stored as "ndarray" of integers, or as "bytes" of int64.
        is_train: Default of `drop_last` and `shuffle`.
        **options: Other arguments of `build_streaming_dataloader`.

    Raises:
        ValueError: A stored sequence is shorter than `max_seq_len`, or `masked` and the tokenizer has no mask token.
    """
    transform = TokenTransform.of(tokenizer, masked, mlm_probability)
    return build_streaming_dataloader(
        remote,
        local,
        global_batch_size,
        is_train=is_train,
        sample_transform=partial(_token_sample, tokens_key, max_seq_len),
        collate_fn=transform.collate,
        **options,
    )


def _collate(
    transform: Callable[[dict[str, Any]], Any] | None, collate: Callable[[list[Any]], Any], stored: list[dict[str, Any]]
) -> Any:
    return collate(stored if transform is None else [transform(sample) for sample in stored])


def _image_sample(
    augment: Callable[[Any], Any], image_key: str, target_key: str, stored: dict[str, Any]
) -> tuple[Any, int]:
    return augment(stored[image_key].convert("RGB")), int(stored[target_key])


def _token_sample(tokens_key: str, max_seq_len: int, stored: dict[str, Any]) -> Tensor:
    tokens: Any = stored[tokens_key]
    tokens = np.frombuffer(tokens, dtype=np.int64) if isinstance(tokens, bytes) else np.asarray(tokens)
    if len(tokens) < max_seq_len:
        raise ValueError(
            f"Stored sequences must have at least `max_seq_len` tokens, {max_seq_len}, got {len(tokens)}. Use a "
            f"smaller `max_seq_len`."
        )
    return torch.from_numpy(tokens[:max_seq_len].astype(np.int64))
