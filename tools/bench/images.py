"""Random 224-pixel crops of 400-pixel JPEGs: image files against torchvision in a DataLoader, and against decoding."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from composer.datasets.image_files import ImageFiles, RandomCropDecoder, image_collate
from composer.datasets.image_writer import WriteOptions, folder_source, write_image_files
from composer.datasets.loader import ResumableDataLoader
from tools.bench._measure import interleaved, keep_memory, machine, spread, timed

_BATCH, _SIZE, _QUALITY = 128, 224, 90


def _write_photos(folder: Path, count: int, width: int, height: int) -> None:
    """Write random parts of the two photographs of scikit-learn as JPEGs of one size."""
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        photo = photos[number % len(photos)]
        room = min(photo.width / width, photo.height / height)
        scale, across, down = torch.rand(3, generator=generator).tolist()
        scale = 1 + (room - 1) * scale
        left, top = across * (photo.width - width * scale), down * (photo.height - height * scale)
        box = (left, top, left + width * scale, top + height * scale)
        path = folder / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.resize((width, height), Image.Resampling.LANCZOS, box).save(path, quality=_QUALITY)


def _epoch(batches: Iterable[Any], count: int) -> Callable[[], float]:
    """Microseconds of the processor per image."""

    def all_batches() -> None:
        for _ in batches:
            pass

    return lambda: 1e6 * timed(all_batches, time.process_time) / count


def _each(decode: Callable[[Any], object], files: Sequence[Any]) -> Callable[[], float]:
    """Microseconds of the processor per file."""

    def all_files() -> None:
        for file in files:
            decode(file)

    return lambda: 1e6 * timed(all_files, time.process_time) / len(files)


def main(arguments: list[str]) -> None:
    """Print microseconds of the processor per image."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- images", description=__doc__)
    parser.add_argument("--images", type=int, default=256, help="images per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--width", type=int, default=400, help="of the JPEGs (default: %(default)s)")
    parser.add_argument("--height", type=int, default=400, help="of the JPEGs (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_memory()
    count = options.images
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _write_photos(root / "photos", count, options.width, options.height)
        source = folder_source(root / "photos")
        write_image_files(source, root / "copied")
        write_image_files(source, root / "encoded", WriteOptions(quality=_QUALITY))
        transform = v2.Compose([v2.RandomResizedCrop(_SIZE, antialias=True), v2.ToImage()])
        files = [Path(path).read_bytes() for path in source.images]
        tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]

        def loader(part: str, size: int = _SIZE) -> Any:
            dataset = ImageFiles(root / part, RandomCropDecoder(size, flip=0))
            return ResumableDataLoader(dataset, _BATCH, collate_fn=image_collate)

        contestants = {
            "decoding alone (simplejpeg)": _each(simplejpeg.decode_jpeg, files),
            "decoding alone (torchvision.io)": _each(lambda data: decode_jpeg(data, ImageReadMode.RGB), tensors),
            "torchvision": _epoch(
                DataLoader(ImageFolder(str(root / "photos"), transform), _BATCH, shuffle=True), count
            ),
            "ImageFiles, encoded": _epoch(loader("encoded"), count),
            "ImageFiles, copied": _epoch(loader("copied"), count),
            "ImageFiles, encoded, 112 pixels": _epoch(loader("encoded", 112), count),
        }
        results = interleaved(contestants, options.rounds)
    medians = {name: statistics.median(values) for name, values in results.items()}
    decoding, torchvision = medians["decoding alone (simplejpeg)"], medians["torchvision"]
    print(f"{machine()}; {count} JPEGs of {options.width} x {options.height}")
    print(f"{options.rounds} interleaved rounds, medians")
    print(f"{'':34}{'us/image':>10}{'min-max':>18}{'/ decoding':>12}{'torchvision /':>15}")
    for name, values in results.items():
        each = medians[name]
        print(f"{name:34}{each:10.0f}{spread(values, 0):>18}{each / decoding:12.2f}{torchvision / each:15.2f}")
