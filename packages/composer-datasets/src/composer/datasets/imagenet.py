"""ImageNet, or any other folder with a folder of photographs for each class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._files import missing
from composer.datasets._options import Options
from composer.datasets.synthetic import SyntheticImageDataset
from composer.datasets.utils import NormalizationFn, pil_image_collate

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "build_imagenet_dataloader", "build_synthetic_imagenet_dataloader"]

IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of the training pixels' channels, on the scale of bytes."""

IMAGENET_STD = (58.395, 57.12, 57.375)
"""Their standard deviation."""

_COMMAND = (
    "cd {datadir} && curl -LO https://image-net.org/data/ILSVRC/2012/ILSVRC2012_img_train.tar"
    " && curl -LO https://image-net.org/data/ILSVRC/2012/ILSVRC2012_img_val.tar    # after registering there; then"
    " unpack them into train/<class>/ and val/<class>/"
)


def build_imagenet_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    is_train: bool = True,
    resize_size: int = -1,
    crop_size: int = 224,
    transform: Callable[[Any], Any] | None = None,
    normalize_on_device: bool = False,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of ImageNet, or of any folder laid out like it.

    For training, a random part of each image (8% to 100% of its area) is resized to `crop_size` and mirrored at random;
    for evaluation, its centre is taken.

    Args:
        datadir: Holds `train` and `val`, each with a folder for each class.
        global_batch_size: Images per batch, of all ranks together.
        is_train: Whether to take `train`, augmented; otherwise `val`.
        resize_size: Pixels to which the shorter side is resized first. -1: not at all in training, and `crop_size` *
            256 / 224 in evaluation.
        crop_size: Height and width of the images in a batch.
        transform: A function of Pillow images, in place of all this; it must yield Pillow images of one size.
        normalize_on_device: Whether images move to the device as bytes, a quarter of what floats are, and are
            normalised there. Algorithms that act before that (ColOut, CutOut, ProgressiveResizing, SelectiveBackprop
            on whole batches) then see bytes.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the augmentation.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`.

    Returns:
        Batches are pairs of normalised images of shape (N, 3, crop_size, crop_size), float32, and labels of shape
        (N,), int64.

    Raises:
        FileNotFoundError: The folder is not there, or has no class; the message has the command that gets it.
        TypeError: An argument of `dataloader_kwargs` is unknown.
        ValueError: A size or `global_batch_size` is out of range.
    """
    from torchvision.datasets import ImageFolder

    folder = Path(datadir).expanduser() / ("train" if is_train else "val")
    if not folder.is_dir() or not any(path.is_dir() for path in folder.iterdir()):
        raise missing("ImageNet", [folder / "<class>" / "*.JPEG"], _COMMAND.format(datadir=datadir))
    steps = _transform(is_train, resize_size, crop_size) if transform is None else transform
    dataset: Any = ImageFolder(str(folder), transform=steps)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, dataloader_kwargs=dataloader_kwargs)
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
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """`build_imagenet_dataloader` without files: made-up images of the final size, not augmented.

    Args:
        global_batch_size: Images per batch, of all ranks together.
        num_samples: How many there are. None: as many as in ImageNet.
        num_unique: How many different ones are kept in memory; they repeat after that.
        crop_size: Height and width of the images.
        num_classes: Number of classes.
        is_train: What `drop_last` and `shuffle` are by default; the test images are others than the training images.
        normalize_on_device: As there.
        drop_last: As there.
        shuffle: As there.
        seed: As there; the images are the same with every seed.
        **dataloader_kwargs: As there.
    """
    if num_samples is None:
        num_samples = 1_281_167 if is_train else 50_000
    shape = (3, crop_size, crop_size)
    dataset = SyntheticImageDataset(
        num_samples, shape, num_classes, num_unique=num_unique, as_pil=True, is_train=is_train
    )
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, dataloader_kwargs=dataloader_kwargs)
    return _loader(dataset, normalize_on_device, options)


def _transform(is_train: bool, resize_size: int, crop_size: int) -> Callable[[Any], Any]:
    from torchvision import transforms

    if crop_size < 1 or (resize_size != -1 and resize_size < crop_size):
        raise ValueError(
            f"`crop_size` must be positive and `resize_size` not below it (or -1), got {crop_size!r} and "
            f"{resize_size!r}."
        )
    if resize_size == -1 and not is_train:
        resize_size = round(crop_size * 256 / 224)
    steps: list[Any] = [] if resize_size == -1 else [transforms.Resize(resize_size)]
    if is_train:
        steps += [transforms.RandomResizedCrop(crop_size), transforms.RandomHorizontalFlip()]
    else:
        steps += [transforms.CenterCrop(crop_size)]
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed


def _loader(dataset: Dataset[Any], normalize_on_device: bool, options: Options) -> DataSpec:
    loader, normalize = options.on_host(dataset, pil_image_collate), NormalizationFn(IMAGENET_MEAN, IMAGENET_STD)
    if normalize_on_device:
        return DataSpec(loader, microbatch_transforms=normalize)
    return DataSpec(loader, batch_transforms=normalize)
