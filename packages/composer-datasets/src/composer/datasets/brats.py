"""BraTS: brain tumours in magnetic resonance volumes, for 3D segmentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._missing import missing_files, require
from composer.datasets._options import Options
from composer.datasets.synthetic import SyntheticVolumeDataset
from composer.datasets.volume_transforms import CenterCrop3d, RandomCrop3d, RandomFlip3d

VolumeTransform: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# File names of the same four sequences until 2021, and since 2023.
_MODALITIES = (("flair", "t1", "t1ce", "t2"), ("t2f", "t1n", "t1c", "t2w"))
_COMMAND = (
    "synapse get -r syn51156910 --downloadLocation {datadir}    # after registering at https://www.synapse.org/brats"
)


class BraTS(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of volumes of the four magnetic resonance sequences, and the tissue class of each voxel.

    Each sequence is normalized over the voxels of the brain (those that are not 0); the others stay 0. Classes are
    0 (healthy), 1 (necrosis), 2 (oedema) and 3 (enhancing tumour; 4 in files until 2021).

    Args:
        datadir: Holds a folder for each case, with files such as `<case>_flair.nii.gz` and `<case>_seg.nii.gz`, or,
            since 2023, `<case>-t2f.nii.gz` and `<case>-seg.nii.gz`.
        crop_size: Depth, height and width of the samples; smaller volumes are padded with 0.
        is_train: Crop at random and mirror each dimension at random; otherwise crop the center.
        cases: Names of the folders to use. None: all.
        transform: `(volume, mask) -> (volume, mask)` after that, such as `RandomNoise3d()`, or several of them in
            `torchvision.transforms.v2.Compose`. None: no more transforms.

    Attributes:
        transform: As passed to the constructor.
        cases: Names of the folders in use.

    Raises:
        FileNotFoundError: There is no case, or a case has a missing file; the message has the command that gets them.
        ModuleNotFoundError: nibabel is not installed.
        ValueError: A size is not positive.
    """

    def __init__(
        self,
        datadir: str | Path,
        crop_size: tuple[int, int, int] = (128, 128, 128),
        *,
        is_train: bool = True,
        cases: Sequence[str] | None = None,
        transform: VolumeTransform | None = None,
    ) -> None:
        if min(crop_size) < 1:
            raise ValueError(f"`crop_size` must be three positive numbers, got {crop_size!r}.")
        _nibabel()  # raises now if it is missing, not at the first sample
        steps: list[VolumeTransform] = [RandomCrop3d(crop_size), RandomFlip3d()]
        self._steps = steps if is_train else [CenterCrop3d(crop_size)]
        self.transform = transform
        self._command = _COMMAND.format(datadir=datadir)
        root = Path(datadir).expanduser()
        if cases is None:
            cases = sorted(path.parent.name for path in root.glob("*/*seg.nii*"))
        if not cases:
            raise missing_files("BraTS", [root / "<case>" / "<case>_seg.nii.gz"], self._command)
        self.cases = list(cases)
        self._files = [self._files_of(root / case) for case in self.cases]

    def _files_of(self, folder: Path) -> list[Path]:
        """Return the paths of the four sequences and of the segmentation."""
        by_name = {
            path.name.partition(".")[0].replace("-", "_").rpartition("_")[2]: path for path in folder.glob("*.nii*")
        }
        names = next((names for names in _MODALITIES if names[0] in by_name), _MODALITIES[0])
        absent = [folder / f"*{name}.nii.gz" for name in (*names, "seg") if name not in by_name]
        if absent:
            raise missing_files("A part of BraTS", absent, self._command)
        return [by_name[name] for name in (*names, "seg")]

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        *sequences, segmentation = (_read(path) for path in self._files[index])
        volume = torch.stack([_normalized(sequence) for sequence in sequences])
        mask = segmentation.round().long()
        mask[mask == 4] = 3
        for step in (*self._steps, *([] if self.transform is None else [self.transform])):
            volume, mask = step(volume, mask)
        return volume, mask


def build_brats_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    crop_size: tuple[int, int, int] = (128, 128, 128),
    is_train: bool = True,
    cases: Sequence[str] | None = None,
    transform: VolumeTransform | None = None,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """Build a loader of BraTS; see `BraTS` for the samples.

    Args:
        datadir: Holds a folder for each case.
        global_batch_size: Volumes per batch, summed over all ranks.
        crop_size: Depth, height and width of the volumes in a batch.
        is_train: Crop and mirror at random.
        cases: Names of the folders to use, such as those of a fold. None: all.
        transform: `(volume, mask) -> (volume, mask)` after the crop; see `BraTS`.
        drop_last: Drop samples that do not fill a batch on every rank. None: only in training.
        shuffle: Use a new random order in every epoch. None: only in training.
        seed: Seed of the order and the augmentation.
        **dataloader_kwargs: Arguments of `ResumableDataLoader` such as `num_workers`.

    Returns:
        Batches of volumes, shape (N, 4, *crop_size), float32, and targets, shape (N, *crop_size), int64.

    Raises:
        FileNotFoundError: A file does not exist; the message has the command that gets it.
        ModuleNotFoundError: nibabel is not installed.
        TypeError: `dataloader_kwargs` has an unknown argument.
        ValueError: A number is out of range.
    """
    dataset = BraTS(datadir, crop_size, is_train=is_train, cases=cases, transform=transform)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, **dataloader_kwargs)
    return DataSpec(options.on_host(dataset))


def build_synthetic_brats_dataloader(
    global_batch_size: int,
    *,
    num_samples: int = 64,
    crop_size: tuple[int, int, int] = (128, 128, 128),
    is_train: bool = True,
    **options: Any,
) -> DataSpec:
    """Build a loader of synthetic volumes in the format of BraTS: balls in noise, not augmented.

    Arguments that are not described here are those of `build_brats_dataloader`.

    Args:
        global_batch_size: Volumes per batch, summed over all ranks.
        num_samples: Number of volumes; 8 different ones are stored in memory.
        crop_size: Depth, height and width of the volumes.
        is_train: Default of `drop_last` and `shuffle`; training and test volumes differ.
        **options: Other arguments of `build_brats_dataloader`. The volumes do not depend on `seed`.
    """
    dataset = SyntheticVolumeDataset(num_samples, (4, *crop_size), is_train=is_train)
    return DataSpec(Options(global_batch_size, is_train, **options).on_host(dataset))


def _normalized(sequence: Tensor) -> Tensor:
    brain = sequence != 0
    inside = sequence[brain]
    if inside.numel() < 2:
        return sequence
    return torch.where(brain, (sequence - inside.mean()) / inside.std().clamp(min=1e-8), 0)


def _read(path: Path) -> Tensor:
    volume = np.asarray(_nibabel().load(path).dataobj, dtype=np.float32)
    return torch.from_numpy(np.ascontiguousarray(volume))


def _nibabel() -> Any:
    return require("nibabel", "BraTS, which is stored as NIfTI,", "brats")
