"""ImageNet, ADE20k and BraTS, from small files of the same layout; and synthetic samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from composer import datasets
from composer.datasets.ade20k import SegmentationTransform
from composer.datasets.cli import main
from composer.datasets.imagenet import IMAGENET_MEAN, IMAGENET_STD
from composer.datasets.synthetic import synthetic_images, synthetic_text

RNG = np.random.default_rng(0)


def picture(path: Path, height: int, width: int, channels: int = 3) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (height, width, channels), dtype=np.uint8)
    Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).save(path)
    return pixels


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for label in ("n01", "n02"):
            for number in range(2):
                picture(tmp_path / part / label / f"{number}.png", 20 + number, 24)
    return tmp_path


def test_imagenet_is_cropped_and_normalised(imagenet: Path) -> None:
    spec = datasets.build_imagenet_dataloader(imagenet, 2, crop_size=8)
    images, labels = spec.batch_transforms(next(iter(spec.dataloader)))

    assert ((2, 3, 8, 8), torch.float32, 2) == (images.shape, images.dtype, len(labels))
    assert 4 == spec.num_samples


def test_the_centre_of_an_image_is_evaluated(imagenet: Path) -> None:
    spec = datasets.build_imagenet_dataloader(imagenet, 4, is_train=False, crop_size=14, resize_size=20)
    images, labels = spec.batch_transforms(next(iter(spec.dataloader)))
    pixels = np.asarray(Image.open(imagenet / "val" / "n01" / "0.png"), dtype=np.float32)[3:17, 5:19]
    expected = (pixels - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)

    assert [0, 0, 1, 1] == labels.tolist()
    assert np.allclose(expected.transpose(2, 0, 1), images[0].numpy(), atol=1e-5)


def test_images_can_be_normalised_on_the_device(imagenet: Path) -> None:
    options: dict[str, Any] = {"is_train": False, "crop_size": 8}
    host = datasets.build_imagenet_dataloader(imagenet, 4, **options)
    device = datasets.build_imagenet_dataloader(imagenet, 4, normalize_on_device=True, **options)
    moved = device.batch_transforms(next(iter(device.dataloader)))

    assert torch.uint8 == moved[0].dtype
    assert torch.equal(host.batch_transforms(next(iter(host.dataloader)))[0], device.microbatch_transforms(moved)[0])


def test_batches_can_be_normalised_by_the_loader(imagenet: Path) -> None:
    options: dict[str, Any] = {"is_train": False, "crop_size": 8}
    host = datasets.build_imagenet_dataloader(imagenet, 4, **options)
    images, labels = next(iter(datasets.build_imagenet_dataloader(imagenet, 4, device="cpu", **options).dataloader))

    assert torch.equal(host.batch_transforms(next(iter(host.dataloader)))[0], images)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert [0, 0, 1, 1] == labels.tolist()
    with pytest.raises(ValueError, match="`normalize_on_device` has no effect with `device`"):
        datasets.build_imagenet_dataloader(imagenet, 4, device="cpu", normalize_on_device=True)


def test_a_transform_replaces_the_usual_one(imagenet: Path) -> None:
    spec = datasets.build_imagenet_dataloader(imagenet, 4, transform=lambda image: image.resize((5, 4)))

    assert (4, 3, 4, 5) == next(iter(spec.dataloader))[0].shape


def test_the_error_for_missing_imagenet_has_its_path(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    for is_train, part in ((True, "train"), (False, "val")):
        with pytest.raises(FileNotFoundError, match=rf"ImageNet was not found: looked for .*{part}(?s:.*)curl -LO"):
            datasets.build_imagenet_dataloader(tmp_path, 2, is_train=is_train)


@pytest.mark.parametrize("sizes", [{"crop_size": 0}, {"crop_size": 9, "resize_size": 8}])
def test_sizes_fit_each_other(imagenet: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="`crop_size` must be positive, and `resize_size` must be -1 or at least"):
        datasets.build_imagenet_dataloader(imagenet, 2, **sizes)


def write(source: Path, destination: Path, *options: str) -> int:
    return main(["write", "imagenet", str(source), str(destination), *options, "--processes", "1"])


def test_imagenet_is_read_from_image_files(imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == write(imagenet, tmp_path / "files")
    assert "val: 4 images, 2 classes" in capsys.readouterr().out
    options: dict[str, Any] = {"crop_size": 14, "resize_size": 20, "is_train": False}
    folder = datasets.build_imagenet_dataloader(imagenet, 4, **options)
    files = datasets.build_imagenet_dataloader(tmp_path / "files", 4, **options)
    (expected, labels), (images, same) = (next(iter(spec.dataloader)) for spec in (folder, files))

    assert labels.tolist() == same.tolist()
    assert torch.equal(expected[::2], images[::2])  # of 20 x 24 pixels; the others are resized
    assert torch.float32 == files.batch_transforms((images, same))[0].dtype
    train = datasets.build_imagenet_dataloader(tmp_path / "files", 2, crop_size=8, normalize_on_device=True)
    images, labels = train.microbatch_transforms(next(iter(train.dataloader)))
    assert ((2, 3, 8, 8), torch.float32, 4) == (images.shape, images.dtype, train.num_samples)
    pillow = datasets.build_imagenet_dataloader(tmp_path / "files", 4, transform=lambda image: image.resize((5, 4)))
    assert (4, 3, 4, 5) == next(iter(pillow.dataloader))[0].shape
    with pytest.raises(ValueError, match=r"`resize_size` must be -1 .*composer-datasets write imagenet --short-side 9"):
        datasets.build_imagenet_dataloader(tmp_path / "files", 2, crop_size=8, resize_size=9)


def scenes(root: Path) -> None:
    for part in ("training", "validation"):
        for number in range(3):
            pixels = picture(root / "images" / part / f"scene_{number}.jpg", 20, 30)
            annotation = (pixels[:, :, 0] % 151).astype(np.uint8)
            path = root / "annotations" / part / f"scene_{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(annotation).save(path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_ade20k_is_resized_with_its_annotations(tmp_path: Path, split: str) -> None:
    scenes(tmp_path / "ADEChallengeData2016")
    spec = datasets.build_ade20k_dataloader(tmp_path, 3, split=split, final_size=16, base_size=16)
    images, targets = spec.batch_transforms(next(iter(spec.dataloader)))

    assert (3, 3, 16, 16) == images.shape
    assert (3, 16, 16) == targets.shape
    assert torch.int64 == targets.dtype
    assert -1 <= targets.min()
    assert targets.max() <= 149


def test_images_and_annotations_are_transformed_identically() -> None:
    """Without the change of colours, an image that equals its annotation goes on doing so."""
    pixels = np.kron(RNG.integers(1, 100, (6, 6)), np.ones((8, 8))).astype(np.uint8)
    transform = SegmentationTransform(24, True, base_size=48, min_scale=1.0, max_scale=1.0)
    transform._steps.transforms.pop()
    torch.manual_seed(0)
    crops = set()
    for _ in range(10):
        image, annotation = transform(Image.fromarray(pixels), Image.fromarray(pixels))

        assert np.array_equal(np.asarray(image), annotation.numpy())
        crops.add(annotation.numpy().tobytes())
    assert len(crops) > 5


def test_missing_files_of_ade20k_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ADE20k was not found: looked for (?s:.*)ADEChallengeData2016.zip"):
        datasets.ADE20k(tmp_path)
    scenes(tmp_path)
    (tmp_path / "annotations" / "training" / "scene_1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"A part of ADE20k was not found: looked for '[^']*scene_1.png'\."):
        datasets.ADE20k(tmp_path)
    assert 3 == len(datasets.ADE20k(tmp_path, "val"))
    assert (30, 20) == datasets.ADE20k(tmp_path, "val")[0][0].size


def test_bad_arguments_of_ade20k_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`split` must be one of train, val, got 'test'"):
        datasets.ADE20k(tmp_path, "test")
    with pytest.raises(ValueError, match="`min_scale` at most `max_scale`"):
        SegmentationTransform(8, True, min_scale=2.0, max_scale=1.0)


def cases(root: Path, names: tuple[str, ...], mark: str, shape: tuple[int, ...] = (6, 7, 8)) -> None:
    nibabel = pytest.importorskip("nibabel")
    for number in range(2):
        case = root / f"case{number}"
        case.mkdir(parents=True)
        for offset, name in enumerate((*names, "seg")):
            volume = RNG.integers(0, 5 if name == "seg" else 900, shape).astype(np.int16) + (
                offset if offset < 4 else 0
            )
            volume[0] = 0
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), case / f"case{number}{mark}{name}.nii.gz")


@pytest.mark.parametrize(("names", "mark"), [(("flair", "t1", "t1ce", "t2"), "_"), (("t2f", "t1n", "t1c", "t2w"), "-")])
def test_brats_of_any_year_is_read(tmp_path: Path, names: tuple[str, ...], mark: str) -> None:
    cases(tmp_path, names, mark)
    dataset = datasets.BraTS(tmp_path, (6, 7, 8), is_train=False)
    volume, mask = dataset[0]

    assert ["case0", "case1"] == dataset.cases
    assert (4, 6, 7, 8) == volume.shape
    assert torch.float32 == volume.dtype
    assert {0, 1, 2, 3} == set(mask.unique().tolist())
    for sequence in volume:
        brain = sequence[sequence != 0]
        assert abs(float(brain.mean())) < 1e-5
        assert abs(float(brain.std()) - 1) < 1e-5
        assert 0 == sequence[0].abs().max()


def test_volumes_are_cropped_padded_and_mirrored_with_their_masks(tmp_path: Path) -> None:
    cases(tmp_path, ("flair", "t1", "t1ce", "t2"), "_")
    spec = datasets.build_brats_dataloader(tmp_path, 2, crop_size=(4, 10, 8))
    volumes, masks = next(iter(spec.dataloader))
    dataset = datasets.BraTS(tmp_path, (4, 10, 8))
    torch.manual_seed(0)
    samples = [dataset[0] for _ in range(4)]

    assert (2, 4, 4, 10, 8) == volumes.shape
    assert (2, 4, 10, 8) == masks.shape
    assert len({mask.numpy().tobytes() for _, mask in samples}) > 1
    whole, whole_mask = datasets.BraTS(tmp_path, (6, 7, 8), is_train=False)[0]
    expected = dict(zip(_voxels(whole), whole_mask.flatten().tolist(), strict=True))
    for volume, mask in samples:
        found = list(zip(_voxels(volume), mask.flatten().tolist(), strict=True))

        assert all(label == expected.get(voxel, 0) for voxel, label in found if any(voxel))
        assert 60 < sum(any(voxel) for voxel, _ in found)  # the rest is padding, or outside of the brain


def test_volumes_are_transformed_after_the_crop(tmp_path: Path) -> None:
    cases(tmp_path, ("flair", "t1", "t1ce", "t2"), "_")
    plain = datasets.build_brats_dataloader(tmp_path, 2, crop_size=(4, 10, 8), is_train=False)
    brighter = datasets.RandomBrightness3d(1.0, (2, 2))
    doubled = datasets.build_brats_dataloader(tmp_path, 2, crop_size=(4, 10, 8), is_train=False, transform=brighter)
    (volumes, masks), (changed, same) = (next(iter(spec.dataloader)) for spec in (plain, doubled))

    assert torch.equal(2 * volumes, changed)
    assert torch.equal(masks, same)


def _voxels(volume: torch.Tensor) -> list[tuple[float, ...]]:
    """Return the values that identify each voxel: its four sequences."""
    return [tuple(voxel) for voxel in volume.flatten(1).T.tolist()]


def test_missing_files_of_brats_are_named(tmp_path: Path) -> None:
    pytest.importorskip("nibabel")
    with pytest.raises(FileNotFoundError, match=r"BraTS was not found: looked for (?s:.*)synapse get"):
        datasets.BraTS(tmp_path)
    cases(tmp_path, ("flair", "t1", "t1ce", "t2"), "_")
    (tmp_path / "case1" / "case1_t1ce.nii.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"A part of BraTS was not found: looked for '[^']*case1/\*t1ce.nii.gz'\."
    ):
        datasets.BraTS(tmp_path)
    assert 1 == len(datasets.BraTS(tmp_path, cases=["case0"]))
    with pytest.raises(ValueError, match="`crop_size` must be three positive numbers"):
        datasets.BraTS(tmp_path, (0, 1, 1))


def test_brats_without_nibabel_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install composer-datasets\[brats\]"):
        datasets.BraTS(tmp_path)


def test_synthetic_versions_need_no_files() -> None:
    small: dict[str, Any] = {"num_samples": 4, "is_train": False}
    imagenet = datasets.build_synthetic_imagenet_dataloader(2, crop_size=16, **small)
    ade20k = datasets.build_synthetic_ade20k_dataloader(2, final_size=16, **small)
    brats = datasets.build_synthetic_brats_dataloader(2, crop_size=(8, 8, 8), **small)
    batches = [spec.batch_transforms(next(iter(spec.dataloader))) for spec in (imagenet, ade20k, brats)]

    assert [(2, 3, 16, 16), (2, 3, 16, 16), (2, 4, 8, 8, 8)] == [images.shape for images, _ in batches]
    assert [(2,), (2, 16, 16), (2, 8, 8, 8)] == [targets.shape for _, targets in batches]
    assert all(targets.dtype == torch.int64 for _, targets in batches)
    assert 1_281_167 == datasets.build_synthetic_imagenet_dataloader(2, num_unique=2, crop_size=8).num_samples
    assert 20_210 == datasets.build_synthetic_ade20k_dataloader(2, num_unique=2, final_size=8).num_samples


@pytest.mark.parametrize("name", ["Image", "Segmentation", "Volume"])
def test_synthetic_samples_are_the_same_every_time(name: str) -> None:
    cls = getattr(datasets, f"Synthetic{name}Dataset")
    one, other, test, another = cls(5), cls(5), cls(5, is_train=False), cls(5, seed=1)
    first = _numbers(one[3])

    assert 5 == len(one) == len(list(one))
    assert torch.equal(first, _numbers(other[3]))
    for different in (test, another):
        assert not torch.equal(first, _numbers(different[3]))


def _numbers(sample: Any) -> torch.Tensor:
    return torch.cat([torch.as_tensor(part).float().flatten() for part in sample])


def test_synthetic_samples_repeat_after_the_different_ones() -> None:
    dataset = datasets.SyntheticImageDataset(7, (1, 4, 4), 2, num_unique=4, as_pil=True, transform=np.asarray)
    pairs = datasets.SyntheticSegmentationDataset(7, num_unique=4, transforms=lambda image, mask: (mask, image))

    assert np.array_equal(dataset[0][0], dataset[4][0])
    assert (4, 4) == dataset[0][0].shape
    assert torch.equal(pairs[1][1], pairs[5][1])
    assert torch.uint8 == pairs[1][0].dtype


def test_synthetic_images_can_be_learned() -> None:
    images, labels = synthetic_images(200, (1, 8, 8), 5)
    test_images, test_labels = synthetic_images(100, (1, 8, 8), 5, is_train=False)
    means = torch.stack([images[labels == label].float().mean(0) for label in range(5)])
    nearest = torch.cdist(test_images.float().flatten(1), means.flatten(1)).argmin(1)

    assert torch.equal(test_labels, nearest)
    assert not torch.equal(images[:100], test_images)


def test_synthetic_text_can_be_learned() -> None:
    tokens = synthetic_text(10_000, 20)
    followed = ((tokens[1:] - tokens[:-1]) % 20 == 1).float().mean()

    assert 0.88 < followed < 0.93
    assert (0, 19) == (tokens.min(), tokens.max())
    assert torch.equal(tokens, synthetic_text(10_000, 20))
    for different in (synthetic_text(10_000, 20, is_train=False), synthetic_text(10_000, 20, seed=1)):
        assert not torch.equal(tokens, different)


@pytest.mark.parametrize("number", ["size", "num_classes", "num_unique"])
def test_numbers_are_positive(number: str) -> None:
    for name in ("Image", "Segmentation", "Volume"):
        with pytest.raises(ValueError, match=f"`{number}` must be positive, got 0"):
            getattr(datasets, f"Synthetic{name}Dataset")(**{"size": 4, number: 0})
    with pytest.raises(ValueError, match="`vocab_size` must be positive"):
        synthetic_text(4, vocab_size=0)
    with pytest.raises(IndexError, match="`index` must be from 0 to 3, got 4"):
        datasets.SyntheticImageDataset(4)[4]
