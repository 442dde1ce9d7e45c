"""What the loaders of small labelled images have in common: the set, its augmentation, the host and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._options import Options
from composer.datasets.image_transform import ImageTransform
from composer.datasets.synthetic import synthetic_images
from composer.datasets.utils import NormalizationFn, pil_image_collate

__all__ = ["ImageKind", "LabelledImages", "image_loader", "synthetic_set"]


@dataclass(frozen=True)
class ImageKind:
    """What is fixed of a data set.

    Attributes:
        name: What it is called.
        mean: Of the training images' channels, on the scale of bytes.
        std: Likewise.
        padding: Pixels by which training images are usually shifted.
        flip: Whether they are usually mirrored.
        size: Height and width.
        num_classes: Number of classes.
        num_train: Number of training images.
        num_test: Number of test images.
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int
    flip: bool
    size: int
    num_classes: int
    num_train: int
    num_test: int


class LabelledImages(Dataset[tuple[Any, Any]]):
    """Images in memory, yielded as Pillow images, so that the transforms of torchvision work on them.

    Args:
        images: Shape (N, C, H, W), uint8, of 1 or 3 channels.
        targets: Shape (N,), int64.
        transform: Takes a Pillow image. None: the image as it is.

    Attributes:
        images: As above.
        targets: As above.
        transform: As above; may be replaced, as `add_vision_dataset_transform` does.
    """

    def __init__(self, images: Tensor, targets: Tensor, transform: Callable[[Any], Any] | None = None) -> None:
        self.images, self.targets, self.transform = images, targets, transform
        self._pixels = images.permute(0, 2, 3, 1).contiguous().numpy()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        pixels = self._pixels[index]
        image: Any = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return image if self.transform is None else self.transform(image), int(self.targets[index])


def image_loader(kind: ImageKind, images: Tensor, targets: Tensor, transform: Any, options: Options) -> DataSpec:
    """A loader over images in memory.

    Args:
        kind: What they are.
        images: Shape (N, C, H, W), uint8.
        targets: Shape (N,), int64.
        transform: In place of the usual augmentation; None: that.
        options: How.
    """
    augmented = options.is_train
    if options.device is not None:
        if transform is None:
            usual: dict[str, Any] = {"flip": kind.flip, "padding": kind.padding} if augmented else {}
            transform = ImageTransform(**usual, mean=kind.mean, std=kind.std)
        return DataSpec(options.on_device(images, targets, transform), num_samples=len(images))
    if transform is None and augmented:
        transform = _host_transform(kind)
    loader = options.on_host(LabelledImages(images, targets, transform), pil_image_collate)
    return DataSpec(loader, batch_transforms=NormalizationFn(kind.mean, kind.std))


def synthetic_set(kind: ImageKind, num_samples: int | None, is_train: bool) -> tuple[Tensor, Tensor]:
    """Made-up images and labels in place of a data set's.

    Args:
        kind: The data set.
        num_samples: How many. None: as many as it has.
        is_train: Whether to take training images.
    """
    if num_samples is None:
        num_samples = kind.num_train if is_train else kind.num_test
    shape = (len(kind.mean), kind.size, kind.size)
    return synthetic_images(num_samples, shape, kind.num_classes, is_train=is_train)


def _host_transform(kind: ImageKind) -> Callable[[Any], Any]:
    from torchvision import transforms

    steps: list[Any] = []
    if kind.padding:
        steps.append(transforms.RandomCrop(kind.size, padding=kind.padding))
    if kind.flip:
        steps.append(transforms.RandomHorizontalFlip())
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed
