"""Loader of FFCV files (`.beton`), which needs the package `ffcv`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from composer.datasets._options import Options, batch_size_per_rank
from composer.utils import dist


def ffcv_loader(path: Path, crop_size: int, resize_size: int, options: Options) -> Any:
    """Return a loader of images of shape (N, 3, crop_size, crop_size), uint8, and labels of shape (N,), int64.

    FFCV determines order and random crops, so a run resumes by reading the earlier batches again, and evaluation on
    several ranks may count some samples twice.

    Args:
        path: A file with the fields `image` and `label`.
        crop_size: Height and width of the images.
        resize_size: In evaluation, the shorter side is resized to this before the crop; -1: `crop_size` * 256 / 224.
        options: Those of the builder; of `DataLoader`'s, FFCV supports only `num_workers`.

    Raises:
        ModuleNotFoundError: `ffcv` is not installed.
        TypeError: An argument is not supported.
    """
    unknown = sorted(options.dataloader_kwargs.keys() - {"num_workers"})
    if unknown:
        raise TypeError(f"FFCV, which reads {str(path)!r}, does not support {', '.join(unknown)}. Leave them out.")
    try:
        loading = import_module("ffcv.loader")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ffcv":
            raise
        raise ModuleNotFoundError(
            f"{str(path)!r} is a file of FFCV, and the package `ffcv` is not installed. Install it, or convert the "
            "images that the file was made of: `composer-datasets write imagenet SRC DST --max-side 400 --quality 90`.",
            name="ffcv",
        ) from None
    decoders, transforms = import_module("ffcv.fields.decoders"), import_module("ffcv.transforms")
    size = (crop_size, crop_size)
    if options.is_train:
        images = [decoders.RandomResizedCropRGBImageDecoder(size), transforms.RandomHorizontalFlip()]
    else:
        ratio = 224 / 256 if resize_size == -1 else crop_size / resize_size
        images = [decoders.CenterCropRGBImageDecoder(size, ratio=ratio)]
    shuffle = options.is_train if options.shuffle is None else options.shuffle
    return loading.Loader(
        str(path),
        batch_size=batch_size_per_rank(options.global_batch_size),
        num_workers=options.dataloader_kwargs.get("num_workers", -1),  # -1: all cores
        order=loading.OrderOption.RANDOM if shuffle else loading.OrderOption.SEQUENTIAL,
        drop_last=options.is_train if options.drop_last is None else options.drop_last,
        distributed=dist.get_world_size() > 1,
        seed=options.seed,
        pipelines={
            "image": [*images, transforms.ToTensor(), transforms.ToTorchImage()],
            "label": [decoders.IntDecoder(), transforms.ToTensor(), transforms.Squeeze()],
        },
    )
