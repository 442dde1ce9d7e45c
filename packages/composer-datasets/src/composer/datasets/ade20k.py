"""ADE20k: scenes with one of 150 classes for each pixel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._missing import missing_files
from composer.datasets._options import Options
from composer.datasets.imagenet import IMAGENET_MEAN, IMAGENET_STD
from composer.datasets.synthetic import SyntheticSegmentationDataset
from composer.datasets.utils import NormalizationFn, pil_image_collate

_COMMAND = (
    "cd {parent} && curl -LO http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip"
    " && unzip ADEChallengeData2016.zip"
)
_SPLITS = {"train": "training", "val": "validation"}
NUM_CLASSES = 150


class ADE20k(Dataset[tuple[Any, Any]]):
    """Dataset of scenes and their annotations: 0 means no class, and 1 to 150 are the classes.

    Args:
        datadir: `ADEChallengeData2016`, or the folder that holds it.
        split: "train" or "val".
        transforms: `(image, annotation) -> (image, annotation)` on Pillow images. None: no transform.

    Attributes:
        transforms: As passed to the constructor.

    Raises:
        FileNotFoundError: There are no images, or an image has no annotation.
        ValueError: `split` is unknown.
    """

    def __init__(
        self,
        datadir: str | Path,
        split: str = "train",
        transforms: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> None:
        if split not in _SPLITS:
            raise ValueError(f"`split` must be one of {', '.join(_SPLITS)}, got {split!r}.")
        root = Path(datadir).expanduser()
        root = root / "ADEChallengeData2016" if (root / "ADEChallengeData2016").is_dir() else root
        images, annotations = root / "images" / _SPLITS[split], root / "annotations" / _SPLITS[split]
        self._images = sorted(images.glob("*.jpg"))
        self._annotations = [annotations / f"{path.stem}.png" for path in self._images]
        command = _COMMAND.format(parent=root.parent if root.name == "ADEChallengeData2016" else root)
        if not self._images:
            raise missing_files("ADE20k", [images / "*.jpg"], command)
        absent = [path for path in self._annotations if not path.is_file()]
        if absent:
            raise missing_files("A part of ADE20k", absent[:3], command)
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        with Image.open(self._images[index]) as opened:
            image = opened.convert("RGB")
        with Image.open(self._annotations[index]) as opened:
            annotation = opened.copy()
        return (image, annotation) if self.transforms is None else self.transforms(image, annotation)


class SegmentationTransform:
    """Transform of an image and its annotation: random resize, crop, mirror and colors, or only a resize.

    Args:
        size: Height and width of the results.
        is_train: Augment at random; otherwise only resize.
        base_size: The shorter side is first resized to this times a random factor.
        min_scale: The smallest factor.
        max_scale: The largest factor. Crops beyond the border are black, without a class.
    """

    def __init__(
        self, size: int, is_train: bool, *, base_size: int = 512, min_scale: float = 0.5, max_scale: float = 2.0
    ) -> None:
        from torchvision.transforms import v2

        if size < 1 or base_size < 1 or not 0 < min_scale <= max_scale:
            raise ValueError(
                f"`size` and `base_size` must be positive and `min_scale` at most `max_scale`, got {size!r}, "
                f"{base_size!r}, {min_scale!r} and {max_scale!r}."
            )
        steps: list[Any] = [v2.Resize((size, size))]
        if is_train:
            smallest, largest = max(round(base_size * min_scale), 1), round(base_size * max_scale)
            steps = [
                v2.RandomResize(smallest, largest + 1),
                v2.RandomCrop(size, pad_if_needed=True, fill=0),
                v2.RandomHorizontalFlip(),
                v2.RandomPhotometricDistort(),
            ]
        self._steps = v2.Compose(steps)

    def __call__(self, image: Any, annotation: Any) -> tuple[Any, Any]:
        """Return a Pillow image, and the annotation as a tensor of shape (size, size), uint8."""
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        mask = tv_tensors.Mask(functional.pil_to_tensor(annotation)[0])
        image, mask = self._steps(image, mask)
        return image, mask.as_subclass(torch.Tensor)


def build_ade20k_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    split: str = "train",
    base_size: int = 512,
    min_scale: float = 0.5,
    max_scale: float = 2.0,
    final_size: int = 512,
    ignore_background: bool = True,
    is_train: bool | None = None,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """Build a loader of ADE20k.

    Args:
        datadir: `ADEChallengeData2016`, or the folder that holds it.
        global_batch_size: Images per batch, summed over all ranks.
        split: "train" or "val".
        base_size: For training, the shorter side is resized to this times a random factor.
        min_scale: The smallest factor.
        max_scale: The largest factor.
        final_size: Height and width of the images in a batch: cropped in training, resized in evaluation.
        ignore_background: True: targets are -1 for no class and 0 to 149 for the classes. False: 0 and 1 to 150.
        is_train: Augment, and default of `drop_last` and `shuffle`. None: True if `split` is "train".
        drop_last: Drop samples that do not fill a batch on every rank. None: only in training.
        shuffle: Use a new random order in every epoch. None: only in training.
        seed: Seed of the order and the augmentation.
        **dataloader_kwargs: Arguments of `ResumableDataLoader` such as `num_workers`.

    Returns:
        Batches of normalized images, shape (N, 3, final_size, final_size), float32, and targets, shape (N, final_size,
        final_size), int64.

    Raises:
        FileNotFoundError: A file does not exist; the message has the command that gets it.
        TypeError: `dataloader_kwargs` has an unknown argument.
        ValueError: `split` is unknown, or a number is out of range.
    """
    is_train = split == "train" if is_train is None else is_train
    transforms = SegmentationTransform(
        final_size, is_train, base_size=base_size, min_scale=min_scale, max_scale=max_scale
    )
    dataset = ADE20k(datadir, split, transforms)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, **dataloader_kwargs)
    return _loader(dataset, ignore_background, options)


def build_synthetic_ade20k_dataloader(
    global_batch_size: int,
    *,
    num_samples: int | None = None,
    num_unique: int = 100,
    final_size: int = 512,
    ignore_background: bool = True,
    is_train: bool = True,
    **options: Any,
) -> DataSpec:
    """Build a loader of synthetic images in the format of ADE20k: rectangles in 150 colors, not augmented.

    Arguments that are not described here are those of `build_ade20k_dataloader`.

    Args:
        global_batch_size: Images per batch, summed over all ranks.
        num_samples: Number of images. None: as many as ADE20k has.
        num_unique: Number of different images in memory, which repeat.
        final_size: Height and width of the images.
        ignore_background: Use -1 for no class.
        is_train: Default of `drop_last` and `shuffle`; training and test images differ.
        **options: Other arguments of `build_ade20k_dataloader`. The images do not depend on `seed`.
    """
    if num_samples is None:
        num_samples = 20_210 if is_train else 2_000
    shape = (3, final_size, final_size)
    dataset = SyntheticSegmentationDataset(
        num_samples, shape, NUM_CLASSES + 1, num_unique=num_unique, as_pil=True, is_train=is_train
    )
    return _loader(dataset, ignore_background, Options(global_batch_size, is_train, **options))


def _loader(dataset: Dataset[Any], ignore_background: bool, options: Options) -> DataSpec:
    normalize = NormalizationFn(IMAGENET_MEAN, IMAGENET_STD, ignore_background)
    return DataSpec(options.on_host(dataset, pil_image_collate), batch_transforms=normalize)
