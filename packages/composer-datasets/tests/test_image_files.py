"""Image files: what is written is what is read, by any number of processes, after any interruption."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from composer import Trainer
from composer.core import DataSpec
from composer.datasets import (
    CenterCropDecoder,
    ImageFiles,
    RandomCropDecoder,
    ResumableDataLoader,
    image_collate,
)
from composer.datasets.image_files import Box, _decode_box, _open_shard
from composer.datasets.image_writer import ImageSource, WriteOptions, array_source, folder_source, write_image_files
from composer.models import ComposerModel
from composer.testing import deep_compare
from composer.utils import add_vision_dataset_transform


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth image with colours, so that JPEG keeps it, and some noise, so that all its blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, height // 16 + 2, width // 16 + 2, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    noisy = 255 * smooth + 3 * torch.randn(3, height, width, generator=generator)
    return Image.fromarray(noisy.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy())


def encoded(image: Image.Image, kind: str = "JPEG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of several sizes and colours, and a PNG, in two classes."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(10):
        path = root / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(photo(60 + 7 * number, 90 - 5 * number, number), quality=92))
    (root / "class0" / "gray.jpg").write_bytes(encoded(photo(40, 50).convert("L")))
    (root / "class0" / "ink.jpg").write_bytes(encoded(photo(40, 50).convert("CMYK")))
    (root / "class1" / "lossless.png").write_bytes(encoded(photo(33, 20), "PNG"))
    return root


def written(source: Path | ImageSource, folder: Path, **options: Any) -> ImageFiles:
    images = folder_source(source) if isinstance(source, Path) else source
    write_image_files(images, folder, WriteOptions(**options), shard_images=4)
    return ImageFiles(folder)


def test_large_rectangles_are_decoded_at_a_fraction_of_their_size() -> None:
    shape, box = (320, 400), Box(30, 52, 200, 220)
    data = encoded(photo(*shape), quality=95)
    small = _decode_box(data, shape, box, CenterCropDecoder(90))

    assert (100, 110) == small.shape[:2]
    exact = _decode_box(data, shape, box, None).reshape(100, 2, 110, 2, 3).mean((1, 3))

    assert abs(small - exact).mean() < 2  # a shift by one pixel gives 10
    assert (200, 220) == _decode_box(data, shape, box, CenterCropDecoder(101)).shape[:2]


# ---- written and read


def test_files_are_copied_byte_for_byte_and_decoded_like_an_image_folder(photos: Path, tmp_path: Path) -> None:
    dataset, folder = written(photos, tmp_path), ImageFolder(str(photos))
    stored = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("shard-*.bin")))

    assert folder.classes == dataset.classes
    assert folder.targets == [label for _, label in dataset]
    assert len(folder) == len(dataset) == 13
    for (path, _), (image, _) in zip(folder.samples, dataset, strict=True):
        assert Path(path).read_bytes() in stored
        expected = np.asarray(Image.open(path).convert("RGB"), np.int16)
        assert abs(image.permute(1, 2, 0).numpy() - expected).max() <= 4  # decoders round chroma differently
    with pytest.raises(IndexError, match="`index` must be from 0 to 12, got 13"):
        dataset[13]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_side": 50}, [(50, 47), (40, 50), (33, 20)]),
        ({"short_side": 30}, [(32, 30), (30, 38), (33, 20)]),
        ({"quality": 80}, [(95, 89), (40, 50), (33, 20)]),
    ],
    ids=str,
)
def test_images_are_shrunk_and_encoded(options: dict[str, int], expected: Any, tmp_path: Path) -> None:
    pictures = [photo(95, 89), photo(40, 50), photo(33, 20)]
    for number, picture in enumerate(pictures):
        (tmp_path / "a").mkdir(exist_ok=True)
        picture.save(tmp_path / "a" / f"{number}.png")
    dataset = written(tmp_path, tmp_path / "out", **options)

    assert expected == [tuple(image.shape[1:]) for image, _ in dataset]
    for (image, _), picture in zip(dataset, pictures, strict=True):
        resized = np.asarray(picture.resize(image.shape[:0:-1], Image.Resampling.LANCZOS), np.float32)
        assert abs(image.permute(1, 2, 0).numpy() - resized).mean() < 8


def test_jpegs_with_flaws_are_decoded_by_pillow(tmp_path: Path) -> None:
    flawed = encoded(photo(40, 50))
    flawed = flawed[:-2] + b"\x12\x34" + flawed[-2:]
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "b.jpg").write_bytes(flawed)
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(flawed)
    image, _ = written(tmp_path / "in", tmp_path / "out")[0]

    assert np.array_equal(np.asarray(Image.open(io.BytesIO(flawed))), image.permute(1, 2, 0).numpy())


def test_bad_options_and_sources_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`max_side` and `short_side` must not be given together"):
        WriteOptions(max_side=4, short_side=4)
    with pytest.raises(ValueError, match=r"`quality` must be in \[1, 100\], got 101"):
        WriteOptions(quality=101)
    with pytest.raises(ValueError, match="`images` must be at least 1, got 0"):
        write_image_files(ImageSource([], [], [], ""), tmp_path)
    (tmp_path / "in" / "a").mkdir(parents=True)
    for content in (b"", b"no image", encoded(photo(60, 60))[:1000]):
        (tmp_path / "in" / "a" / "b.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=r"b.jpg' cannot be read as an image: .*\. Remove or replace it"):
            write_image_files(folder_source(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="must be empty or hold files of the same images"):
        write_image_files(folder_source(photos), tmp_path / "in")
    written(photos, tmp_path / "photos")
    with pytest.raises(FileExistsError, match=r"written with other options. Use another folder"):
        written(photos, tmp_path / "photos", quality=90)
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    written(array_source(pixels, torch.tensor([0, 1]), ["x", "y"]), tmp_path / "pixels")
    with pytest.raises(FileExistsError, match=r"written with other labels. Use another folder"):
        written(array_source(pixels, torch.tensor([1, 0]), ["x", "y"]), tmp_path / "pixels")


# ---- interrupted, in parts, damaged


class _Killed(BaseException):
    pass


def test_a_killed_writer_leaves_nothing_that_is_read_and_continues(photos: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    written(photos, whole, quality=80)
    options = WriteOptions(quality=80)

    def kill(finished: int) -> None:
        raise _Killed

    with pytest.raises(_Killed):
        write_image_files(folder_source(photos), killed, options, shard_images=4, progress=kill)
    (killed / "shard-00001.bin.12.partial").touch()  # a process that is killed with SIGKILL leaves this
    with pytest.raises(FileNotFoundError, match="is not complete: its writer was interrupted, or is still running"):
        ImageFiles(killed)

    first = (killed / "shard-00000.bin").stat().st_mtime_ns
    finished: list[int] = []
    write_image_files(folder_source(photos), killed, options, shard_images=4, progress=finished.append)

    assert [4, 4, 4, 1] == finished
    assert first == (killed / "shard-00000.bin").stat().st_mtime_ns
    assert _contents(whole) == _contents(killed)


def test_several_processes_write_the_same_files(photos: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    written(photos, one, max_side=50)
    copy = shutil.copytree(photos, tmp_path / "photos")
    last = Path(folder_source(copy).images[-1])
    content = last.read_bytes()
    last.write_bytes(b"no image")
    options = WriteOptions(max_side=50)
    with pytest.raises(ValueError, match=r"cannot be read as an image"):
        write_image_files(folder_source(copy), two, options, shard_images=4, processes=2)
    assert (two / "shard-00001.bin").is_file()
    last.write_bytes(content)
    finished: list[int] = []
    write_image_files(folder_source(copy), two, options, shard_images=4, progress=finished.append)

    assert 13 == sum(finished)
    assert _contents(one) == _contents(two)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_damage_is_found(photos: Path, tmp_path: Path) -> None:
    dataset = written(photos, tmp_path, quality=90)
    path = tmp_path / "shard-00001.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 0xFF  # the first image
    path.write_bytes(content)
    _open_shard.cache_clear()
    with pytest.raises(ValueError, match=r"Image 4 of .* is damaged: .*Copy the folder again"):
        ImageFiles(tmp_path)[4]
    assert 3 == ImageFiles(tmp_path)[3][0].shape[0]

    for file in (path, path.with_suffix(".npy")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=r"must have [\d,]+ bytes, but has [\d,]+ bytes. The folder was changed"):
            ImageFiles(tmp_path)
        file.write_bytes(whole)
    path.unlink()
    with pytest.raises(ValueError, match="but does not exist"):
        ImageFiles(tmp_path)
    assert 13 == len(dataset)


def test_other_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked for '[^']*index.json'(?s:.*)composer-datasets write folder"):
        ImageFiles(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "composer-image-files", "version": 1}')
    with pytest.raises(ValueError, match=r"version 2, got 'composer-image-files', version 1. Upgrade"):
        ImageFiles(tmp_path)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install composer-datasets\[images\]"):
        ImageFiles(tmp_path)


# ---- crops


def test_random_crops_are_distributed_as_those_of_torchvision() -> None:
    torch.manual_seed(0)
    decoder, theirs = RandomCropDecoder(8, flip=0.25), v2.RandomResizedCrop(8)
    drawn = [decoder.draw(300, 400) for _ in range(4000)]
    boxes = np.array([box for box, _ in drawn])
    params = [theirs.make_params([torch.empty(3, 300, 400)]) for _ in range(4000)]
    expected = np.array([[each[key] for key in ("top", "left", "height", "width")] for each in params])

    assert boxes.min() >= 0
    assert (boxes[:, :2] + boxes[:, 2:] <= (300, 400)).all()
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        # The deviation of a quantile of 4,000 is at most 1.6% of the range.
        assert np.allclose(np.quantile(expected, quantile, 0), np.quantile(boxes, quantile, 0), atol=14)
    assert abs(np.mean([mirrored for _, mirrored in drawn]) - 0.25) < 0.03


def test_an_image_that_no_crop_fits_into_is_cropped_in_its_centre() -> None:
    assert (Box(0, 43, 10, 13), False) == RandomCropDecoder(4, scale=(1, 1), flip=0).draw(10, 100)
    assert (Box(43, 0, 13, 10), True) == RandomCropDecoder(4, scale=(1, 1), flip=1).draw(100, 10)


def test_bad_crops_are_refused() -> None:
    with pytest.raises(ValueError, match="`scale` must be two positive numbers in order, at most 1, got"):
        RandomCropDecoder(8, scale=(0.5, 1.5))
    with pytest.raises(ValueError, match="`ratio` must be two positive numbers in order, got"):
        RandomCropDecoder(8, ratio=(2, 1))
    with pytest.raises(ValueError, match="`resize_size` must be at least `size`, 8, got 7"):
        CenterCropDecoder(8, 7)


@pytest.mark.parametrize("options", [{}, {"quality": 95}], ids=["copied", "encoded"])
def test_crops_are_resized_and_mirrored(options: dict[str, int], photos: Path, tmp_path: Path) -> None:
    """The slow reference: decode everything, cut, resize as float, mirror."""
    whole = written(photos, tmp_path, **options)
    crop = RandomCropDecoder(40, fast=False)
    dataset = ImageFiles(tmp_path, crop)
    torch.manual_seed(3)
    samples = dataset.__getitems__(range(10))
    torch.manual_seed(3)
    for (image, _), (pixels, _) in zip(samples, whole, strict=False):
        box, mirrored = crop.draw(*pixels.shape[1:])
        part = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width].float()
        expected = torch.nn.functional.interpolate(part[None], (40, 40), mode="bilinear", antialias=True)[0]
        expected = expected.flip(2) if mirrored else expected

        assert (image - expected).abs().max() <= 1  # fixed-point arithmetic against float32
    torch.manual_seed(3)
    assert all(torch.equal(image, dataset[index][0]) for index, (image, _) in enumerate(samples))


def test_the_centre_is_that_of_torchvision(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        photo(120 + 30 * number, 170 - 10 * number, number).save(tmp_path / "in" / "a" / f"{number}.png")
    written(tmp_path / "in", tmp_path / "out")
    theirs = v2.Compose([v2.Resize(73), v2.CenterCrop(64)])
    for (image, _), (expected, _) in zip(
        ImageFiles(tmp_path / "out", CenterCropDecoder(64)), ImageFolder(str(tmp_path / "in"), theirs), strict=True
    ):
        reference = v2.functional.pil_to_tensor(expected).float()
        assert (image.float() - reference).abs().mean() < 9  # up to a pixel of the original apart
        assert (image[:, 3:].float() - reference[:, :-3]).abs().mean() > 20


# ---- in loaders and the Trainer


def test_transforms_get_pillow_images_and_can_be_added(photos: Path, tmp_path: Path) -> None:
    written(photos, tmp_path)
    crop = CenterCropDecoder(24)
    plain, pillow = ImageFiles(tmp_path, crop), ImageFiles(tmp_path, crop)
    add_vision_dataset_transform(pillow, v2.RandomHorizontalFlip(1.0))

    assert isinstance(pillow[0][0], Image.Image)
    images, labels = image_collate(plain.__getitems__(range(13)))
    mirrored, same_labels = image_collate(pillow.__getitems__(range(13)))
    assert torch.equal(images.flip(3), mirrored)
    assert torch.equal(labels, same_labels)
    assert ((13, 3, 24, 24), torch.uint8, torch.int64) == (images.shape, images.dtype, labels.dtype)
    for batch in (images, mirrored):
        assert batch.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"must have the same shape, got .* Pass `crop` to `ImageFiles`"):
        image_collate([ImageFiles(tmp_path)[index] for index in range(2)])


def test_workers_get_paths_and_draw_the_same(photos: Path, tmp_path: Path) -> None:
    written(photos, tmp_path, quality=90)
    dataset = ImageFiles(tmp_path, RandomCropDecoder(24))
    dataset[0]  # opens a file

    def batches(**how: Any) -> list[Any]:
        return list(ResumableDataLoader(dataset, 4, seed=2, collate_fn=image_collate, **how))

    assert len(pickle.dumps(dataset)) < 1000
    deep_compare(batches(), batches(num_workers=2))


def test_ranks_share_the_images_without_repetition(tmp_path: Path) -> None:
    images = 16 * torch.arange(13, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)  # JPEG is not exact
    dataset = written(array_source(images, torch.zeros(13, dtype=torch.int64), ["any"]), tmp_path)
    share: dict[str, Any] = {"world_size": 3, "drop_last": False, "collate_fn": image_collate}
    loaders = [ResumableDataLoader(dataset, 2, rank=rank, **share) for rank in range(3)]
    seen = [round(int(image[0, 0, 0]) / 16) for loader in loaders for batch, _ in loader for image in batch]

    assert list(range(13)) == sorted(seen)
    assert list(range(13)) != seen


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0].float().mean((2, 3)) / 255)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize("batch", [2, 5])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(batch: int, photos: Path, tmp_path: Path) -> None:
    written(photos, tmp_path / "files", quality=90)

    def train(**arguments: Any) -> Any:
        torch.manual_seed(0)
        dataset, model = ImageFiles(tmp_path / "files", RandomCropDecoder(16)), Model()
        trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(ResumableDataLoader(dataset, 4, seed=1, collate_fn=image_collate)),
            max_duration="3ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            device="cpu",
            progress_bar=False,
            **arguments,
        )
        trainer.fit()
        weights = trainer.state.state_dict()["model"]
        trainer.close()
        return weights

    whole = train(save_folder=str(tmp_path), save_interval="1ba", run_name="whole")
    checkpoint = str(next(tmp_path.glob(f"ep*-ba{batch}-rank0.pt")))

    deep_compare(whole, train(load_path=checkpoint))
