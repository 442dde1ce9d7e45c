"""Augmented batches of 512 images of 3 x 32 x 32: the device loader against torchvision in a DataLoader."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from composer.datasets.device_loader import DeviceLoader
from composer.datasets.image_transform import ImageTransform
from composer.datasets.synthetic import synthetic_images
from tools.bench._measure import interleaved, machine, spread, timed

_BATCH = 512
_MEAN, _STD = (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)


class _Augmented(Dataset[Any]):
    """Image by image, by the transforms of torchvision that do the same."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        from torchvision.transforms import v2

        self._images, self._labels = images, labels
        self._transform = v2.Compose(
            [
                v2.RandomCrop(32, padding=4, padding_mode="reflect"),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([value / 255 for value in _MEAN], [value / 255 for value in _STD]),
            ]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._transform(self._images[index]), self._labels[index]


def _epoch(loader: Iterable[Any], device: torch.device) -> Callable[[], float]:
    """Microseconds per batch of an epoch, until its batches are on the device."""

    def run() -> float:
        count = 0

        def all_batches() -> None:
            nonlocal count
            for images, labels in loader:
                images.to(device, non_blocking=True)
                labels.to(device, non_blocking=True)
                count += 1
            if device.type == "cuda":
                torch.cuda.synchronize()

        return 1e6 * timed(all_batches) / count

    return run


def main(arguments: list[str]) -> None:
    """Print microseconds per batch."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- loaders", description=__doc__)
    parser.add_argument("--batches", type=int, default=20, help="batches per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--device", help="where batches go (default: the GPU, if there is one)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    images, labels = synthetic_images(options.batches * _BATCH, (3, 32, 32), 10)
    transform = ImageTransform(flip=True, padding=4, padding_mode="reflect", mean=_MEAN, std=_STD)
    how: dict[str, Any] = {"batch_size": _BATCH, "shuffle": True, "pin_memory": device.type == "cuda"}
    augmented = _Augmented(images, labels)
    contestants = {
        "DeviceLoader": _epoch(DeviceLoader(images, labels, _BATCH, transform=transform, device=device), device),
        "torchvision v2, 0 workers": _epoch(DataLoader(augmented, **how), device),
        "torchvision v2, 2 workers": _epoch(
            DataLoader(augmented, num_workers=2, persistent_workers=True, **how), device
        ),
    }
    results = interleaved(contestants, options.rounds)
    ours = statistics.median(results["DeviceLoader"])
    print(f"{machine()}, batches on {device}; {options.batches} batches, {options.rounds} interleaved rounds, medians")
    print(f"{'':30}{'us/batch':>10}{'min-max':>22}{'ratio':>8}")
    for name, values in results.items():
        median = statistics.median(values)
        print(f"{name:30}{median:10.0f}{spread(values):>22}{median / ours:8.1f}")
