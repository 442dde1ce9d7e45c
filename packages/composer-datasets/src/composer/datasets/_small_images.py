"""Datasets of small labeled images that fit in memory: their files, loaders and synthetic versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._missing import missing_files
from composer.datasets._options import Options
from composer.datasets.device_loader import AnyDevice
from composer.datasets.image_transform import ImageTransform
from composer.datasets.synthetic import synthetic_images
from composer.datasets.utils import NormalizationFn, pil_image, pil_image_collate
from composer.utils import dist


def not_found(name: str, datadir: Path | str, looked_for: Sequence[Path]) -> FileNotFoundError:
    """Return the error for missing files of a class in `torchvision.datasets`, with the command that gets them."""
    code = f"from torchvision.datasets import {name}; {name}({str(datadir)!r}, download=True)"
    return missing_files(name, looked_for, f'python -c "{code}"')


class LabeledImages(Dataset[tuple[Any, Any]]):
    """Images in memory, returned as Pillow images so that torchvision's transforms work on them.

    Args:
        images: Shape (N, C, H, W), uint8, with 1 or 3 channels.
        targets: Shape (N,), int64.
        transform: Applied to each Pillow image. None: no transform.

    Attributes:
        images: As passed to the constructor.
        targets: As passed to the constructor.
        transform: May be replaced, as `add_vision_dataset_transform` does.
    """

    def __init__(self, images: Tensor, targets: Tensor, transform: Callable[[Any], Any] | None = None) -> None:
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = pil_image(self.images[index])
        return image if self.transform is None else self.transform(image), int(self.targets[index])


@dataclass(frozen=True)
class SmallImageSet:
    """Description of a dataset; its `build` methods are the public builders.

    Attributes:
        load: `load(datadir, is_train)` returns the images and labels.
        name: The class in `torchvision.datasets` that downloads the files.
        mean: Mean of the training pixels per channel, in 0 to 255.
        std: Standard deviation of the training pixels per channel, in 0 to 255.
        padding: Default augmentation: shift by up to this many pixels.
        flip: Default augmentation: mirror left to right.
        size: Height and width.
        num_classes: Number of classes.
        num_train: Number of training images.
        num_test: Number of test images.
    """

    load: Callable[[Path | str, bool], tuple[Tensor, Tensor]]
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int
    flip: bool
    size: int
    num_classes: int = 10
    num_train: int = 50_000
    num_test: int = 10_000

    def build(
        self,
        datadir: str | Path,
        global_batch_size: int,
        *,
        is_train: bool = True,
        download: bool = False,
        drop_last: bool | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        device: AnyDevice | None = None,
        transform: Callable[..., Any] | None = None,
        **dataloader_kwargs: Any,
    ) -> DataSpec:
        """Build a loader of CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST.

        Training images are shifted by up to 4 pixels (MNIST and Fashion-MNIST: 2) with black borders, and mirrored at
        random (not MNIST).

        Args:
            datadir: The root folder passed to torchvision. It holds `cifar-10-batches-py`, `cifar-100-python`,
                `MNIST/raw` or `FashionMNIST/raw`.
            global_batch_size: Images per batch, summed over all ranks.
            is_train: True: the training images, augmented. False: the test images, unchanged.
            download: Download missing files with torchvision. Must be the same on all ranks; the first rank of each
                node downloads.
            drop_last: Drop samples that do not fill a batch on every rank. None: only in training.
            shuffle: Use a new random order in every epoch. None: only in training.
            seed: Seed of the order and the augmentation.
            device: Store the whole dataset on this device ("gpu", "cpu", a `Device` or a torch device) and make the
                batches there; see `DeviceLoader`. None: use a `ResumableDataLoader` on the host.
            transform: Replaces the default augmentation. With `device`: an `ImageTransform`, which also normalizes. On
                the host: a function of Pillow images.
            **dataloader_kwargs: Arguments of `ResumableDataLoader` such as `num_workers`; only without `device`.

        Returns:
            Batches of normalized images, shape (N, C, H, W), float32, and labels, shape (N,), int64.

        Raises:
            FileNotFoundError: A file does not exist; the message has the command that downloads it.
            TypeError: `dataloader_kwargs` has an unknown argument, or is combined with `device`.
            ValueError: `global_batch_size` is too large, or not a positive multiple of the number of ranks.
        """
        options = Options(global_batch_size, is_train, drop_last, shuffle, seed, device, **dataloader_kwargs)
        if download:
            with dist.run_local_rank_zero_first():
                getattr(import_module("torchvision.datasets"), self.name)(str(datadir), download=True)
        images, labels = self.load(datadir, is_train)
        return self._loader(images, labels, transform, options)

    def build_synthetic(
        self,
        global_batch_size: int,
        *,
        num_samples: int | None = None,
        is_train: bool = True,
        transform: Callable[..., Any] | None = None,
        **options: Any,
    ) -> DataSpec:
        """Build a loader of synthetic images with the shape and classes of the dataset. A model can learn them.

        Args:
            global_batch_size: Images per batch, summed over all ranks.
            num_samples: Number of images. None: as many as the dataset has.
            is_train: True: augment, shuffle and drop the last batch. The test images are different images of the same
                classes.
            transform: Replaces the default augmentation.
            **options: Other arguments of the builder without `synthetic` in its name. The images do not depend on
                `seed`.
        """
        if num_samples is None:
            num_samples = self.num_train if is_train else self.num_test
        shape = (len(self.mean), self.size, self.size)
        images, labels = synthetic_images(num_samples, shape, self.num_classes, is_train=is_train)
        return self._loader(images, labels, transform, Options(global_batch_size, is_train, **options))

    def _loader(self, images: Tensor, labels: Tensor, transform: Any, options: Options) -> DataSpec:
        augment = transform is None and options.is_train
        if options.device is not None:
            if transform is None:
                padding, flip = (self.padding, self.flip) if augment else (0, False)
                transform = ImageTransform(flip=flip, padding=padding, mean=self.mean, std=self.std)
            return DataSpec(options.on_device(images, labels, transform), num_samples=len(images))
        if augment:
            from torchvision import transforms

            steps: list[Any] = [transforms.RandomCrop(self.size, padding=self.padding)]
            transform = transforms.Compose(steps + [transforms.RandomHorizontalFlip()] * self.flip)
        loader = options.on_host(LabeledImages(images, labels, transform), pil_image_collate)
        return DataSpec(loader, batch_transforms=NormalizationFn(self.mean, self.std))
