"""ImageNet, or any other dataset with a folder of images for each class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._missing import missing_files
from composer.datasets._options import Options
from composer.datasets.device_loader import AnyDevice
from composer.datasets.image_files import (
    CenterCropDecoder,
    CropDecoder,
    ImageFiles,
    RandomCropDecoder,
    image_collate,
    is_image_files,
)
from composer.datasets.image_transform import ImageTransform
from composer.datasets.synthetic import SyntheticImageDataset
from composer.datasets.utils import NormalizationFn, pil_image_collate

IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of the training pixels per channel, in 0 to 255."""

IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of the training pixels per channel, in 0 to 255."""

COMMAND = (
    "cd {datadir} && curl -LO https://image-net.org/data/ILSVRC/2012/ILSVRC2012_img_train.tar"
    " && curl -LO https://image-net.org/data/ILSVRC/2012/ILSVRC2012_img_val.tar    # after registering there; then"
    " unpack them into train/<class>/ and val/<class>/"
)
"""Instructions to download ImageNet into the folder `{datadir}`, shown when its files are missing."""


def build_imagenet_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    is_train: bool = True,
    resize_size: int = -1,
    crop_size: int = 224,
    transform: Callable[[Any], Any] | None = None,
    normalize_on_device: bool = False,
    device: AnyDevice | None = None,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """Build a loader of ImageNet, or of any dataset with the same folders.

    Training images are random crops (8% to 100% of the area) resized to `crop_size` and mirrored at random; evaluation
    images are center crops.

    Folders that `composer-datasets write imagenet` wrote are read by `ImageFiles`, which is faster.

    Args:
        datadir: Holds `train` and `val`, each with a folder for each class, or as `composer-datasets write` wrote them.
        global_batch_size: Images per batch, summed over all ranks.
        is_train: True: the images of `train`, augmented. False: those of `val`.
        resize_size: Pixels to which the shorter side is resized first. -1: no resize in training, and `crop_size` *
            256 / 224 in evaluation. In training from image files it must be -1: resize when writing.
        crop_size: Height and width of the images in a batch.
        transform: Replaces the transform of Pillow images; must return Pillow images of one size. Image files are then
            decoded whole.
        normalize_on_device: Move images to the device as uint8, a quarter of the bytes of float32, and normalize them
            there. Algorithms that act before that (ColOut, CutOut, ProgressiveResizing, SelectiveBackprop on whole
            batches) then get uint8 images.
        device: Move batches to this device in the loader and normalize them there, before any algorithm acts. None: the
            Trainer moves them.
        drop_last: Drop samples that do not fill a batch on every rank. None: only in training.
        shuffle: Use a new random order in every epoch. None: only in training.
        seed: Seed of the order and the augmentation.
        **dataloader_kwargs: Arguments of `ResumableDataLoader` such as `num_workers`.

    Returns:
        Batches of normalized images, shape (N, 3, crop_size, crop_size), float32, and labels, shape (N,), int64.

    Raises:
        FileNotFoundError: The folder does not exist or has no class; the message has the command that gets it.
        ModuleNotFoundError: A package that reads the files is not installed.
        TypeError: `dataloader_kwargs` has an unknown argument.
        ValueError: A size or `global_batch_size` is out of range.
    """
    from torchvision.datasets import ImageFolder

    folder = Path(datadir).expanduser() / ("train" if is_train else "val")
    if device is not None and normalize_on_device:
        raise ValueError(f"`normalize_on_device` has no effect with `device`, which normalizes there; got {device!r}.")
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, **dataloader_kwargs)
    if is_image_files(folder):
        crop = None if transform is not None else _decoder(is_train, resize_size, crop_size)
        return _loader(ImageFiles(folder, crop, transform), normalize_on_device, options)
    if not folder.is_dir() or not any(path.is_dir() for path in folder.iterdir()):
        raise missing_files("ImageNet", [folder / "<class>" / "*.JPEG"], COMMAND.format(datadir=datadir))
    steps = image_transform(is_train, resize_size, crop_size) if transform is None else transform
    dataset: Any = ImageFolder(str(folder), transform=steps)
    return _loader(dataset, normalize_on_device, options)


def build_synthetic_imagenet_dataloader(
    global_batch_size: int,
    *,
    num_samples: int | None = None,
    num_unique: int = 100,
    crop_size: int = 224,
    num_classes: int = 1000,
    is_train: bool = True,
    normalize_on_device: bool = False,
    **options: Any,
) -> DataSpec:
    """Build a loader of synthetic images in the format of ImageNet, not augmented.

    Arguments that are not described here are those of `build_imagenet_dataloader`.

    Args:
        global_batch_size: Images per batch, summed over all ranks.
        num_samples: Number of images. None: as many as ImageNet has.
        num_unique: Number of different images in memory, which repeat.
        crop_size: Height and width of the images.
        num_classes: Number of classes.
        is_train: Default of `drop_last` and `shuffle`; training and test images differ.
        normalize_on_device: Move images to the device as uint8.
        **options: Other arguments of `build_imagenet_dataloader`. The images do not depend on `seed`.
    """
    if num_samples is None:
        num_samples = 1_281_167 if is_train else 50_000
    shape = (3, crop_size, crop_size)
    dataset = SyntheticImageDataset(
        num_samples, shape, num_classes, num_unique=num_unique, as_pil=True, is_train=is_train
    )
    return _loader(dataset, normalize_on_device, Options(global_batch_size, is_train, **options))


def image_transform(is_train: bool, resize_size: int, crop_size: int) -> Callable[[Any], Any]:
    """Return the default transform of `build_imagenet_dataloader`, for Pillow images; arguments as there."""
    from torchvision import transforms

    _check_sizes(resize_size, crop_size)
    if resize_size == -1 and not is_train:
        resize_size = round(crop_size * 256 / 224)
    steps: list[Any] = [] if resize_size == -1 else [transforms.Resize(resize_size)]
    if is_train:
        steps += [transforms.RandomResizedCrop(crop_size), transforms.RandomHorizontalFlip()]
    else:
        steps += [transforms.CenterCrop(crop_size)]
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed


def _check_sizes(resize_size: int, crop_size: int) -> None:
    if crop_size < 1 or (resize_size != -1 and resize_size < crop_size):
        raise ValueError(
            f"`crop_size` must be positive, and `resize_size` must be -1 or at least `crop_size`, got {crop_size!r} "
            f"and {resize_size!r}."
        )


def _decoder(is_train: bool, resize_size: int, crop_size: int) -> CropDecoder:
    """Return the decoder of image files that corresponds to `image_transform` for Pillow images."""
    _check_sizes(resize_size, crop_size)
    if not is_train:
        return CenterCropDecoder(crop_size, None if resize_size == -1 else resize_size)
    if resize_size != -1:
        raise ValueError(
            f"`resize_size` must be -1 for training on image files, got {resize_size}. Resize when writing them: "
            f"`composer-datasets write imagenet --short-side {resize_size} SRC DST`."
        )
    return RandomCropDecoder(crop_size)


def _loader(dataset: Dataset[Any], normalize_on_device: bool, options: Options) -> DataSpec:
    collate = image_collate if isinstance(dataset, ImageFiles) else pil_image_collate
    if options.device is not None:
        transform = ImageTransform(mean=IMAGENET_MEAN, std=IMAGENET_STD, memory_format=torch.channels_last)
        return DataSpec(options.on_host(dataset, collate, transform))
    loader, normalize = options.on_host(dataset, collate), NormalizationFn(IMAGENET_MEAN, IMAGENET_STD)
    if normalize_on_device:
        return DataSpec(loader, microbatch_transforms=normalize)
    return DataSpec(loader, batch_transforms=normalize)
