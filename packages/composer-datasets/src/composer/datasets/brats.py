"""BraTS: brain tumours in magnetic resonance volumes, for three-dimensional segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from composer.core import DataSpec
from composer.datasets._files import missing
from composer.datasets._optional import needed
from composer.datasets._options import Options
from composer.datasets.synthetic import SyntheticVolumeDataset

__all__ = ["BraTS", "build_brats_dataloader", "build_synthetic_brats_dataloader"]

# How the years name the same four sequences: until 2021, and since 2023.
_MODALITIES = (("flair", "t1", "t1ce", "t2"), ("t2f", "t1n", "t1c", "t2w"))
_COMMAND = (
    "synapse get -r syn51156910 --downloadLocation {datadir}    # after registering at https://www.synapse.org/brats"
)


class BraTS(Dataset[tuple[Tensor, Tensor]]):
    """Volumes of the four magnetic resonance sequences, and the kind of tissue of each voxel.

    Each sequence is normalised over the voxels of the brain (those that are not 0), which outside stay 0. Classes are
    0 (healthy), 1 (necrosis), 2 (oedema) and 3 (enhancing tumour, which the files until 2021 call 4).

    Args:
        datadir: Has a folder for each case, with files like `<case>_flair.nii.gz` and `<case>_seg.nii.gz`, or as since
            2023 `<case>-t2f.nii.gz` and `<case>-seg.nii.gz`.
        crop_size: Depth, height and width of the samples; what a volume lacks is 0.
        is_train: Whether to crop at random and mirror each dimension at random; otherwise the centre is taken.
        cases: Names of the folders to use. None: all.

    Attributes:
        cases: Names of the folders in use.

    Raises:
        FileNotFoundError: There is no case, or one lacks a file; the message has the command that gets them.
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
    ) -> None:
        if min(crop_size) < 1:
            raise ValueError(f"`crop_size` must be three positive numbers, got {crop_size!r}.")
        _nibabel()  # now, not at the first sample
        self._crop_size, self._is_train = tuple(crop_size), is_train
        self._command = _COMMAND.format(datadir=datadir)
        root = Path(datadir).expanduser()
        if cases is None:
            cases = sorted(path.parent.name for path in root.glob("*/*seg.nii*"))
        if not cases:
            raise missing("BraTS", [root / "<case>" / "<case>_seg.nii.gz"], self._command)
        self.cases = list(cases)
        self._files = [self._files_of(root / case) for case in self.cases]

    def _files_of(self, folder: Path) -> list[Path]:
        """The four sequences, then the segmentation."""
        by_name = {
            path.name.partition(".")[0].replace("-", "_").rpartition("_")[2]: path for path in folder.glob("*.nii*")
        }
        names = next((names for names in _MODALITIES if names[0] in by_name), _MODALITIES[0])
        absent = [folder / f"*{name}.nii.gz" for name in (*names, "seg") if name not in by_name]
        if absent:
            raise missing("A part of BraTS", absent, self._command)
        return [by_name[name] for name in (*names, "seg")]

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        *sequences, segmentation = (_read(path) for path in self._files[index])
        volume = torch.stack([_normalized(sequence) for sequence in sequences])
        mask = segmentation.round().long()
        mask[mask == 4] = 3
        both = self._cropped(torch.cat([volume, mask[None].float()]))  # small integers are exact
        if self._is_train:
            mirrored = [dim + 1 for dim, draw in enumerate(torch.rand(3).tolist()) if draw < 0.5]
            both = both.flip(mirrored)
        return both[:-1].contiguous(), both[-1].long()

    def _cropped(self, both: Tensor) -> Tensor:
        lacks = [max(size - have, 0) for size, have in zip(self._crop_size, both.shape[1:], strict=True)]
        both = pad(both, [part for lack in reversed(lacks) for part in (lack // 2, lack - lack // 2)])
        for dim, size in enumerate(self._crop_size, start=1):
            room = both.shape[dim] - size
            start = int(torch.randint(room + 1, ())) if self._is_train else room // 2
            both = both.narrow(dim, start, size)
        return both


def build_brats_dataloader(
    datadir: str | Path,
    global_batch_size: int,
    *,
    crop_size: tuple[int, int, int] = (128, 128, 128),
    is_train: bool = True,
    cases: Sequence[str] | None = None,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """A loader of BraTS; see `BraTS` for the samples.

    Args:
        datadir: Has a folder for each case.
        global_batch_size: Volumes per batch, of all ranks together.
        crop_size: Depth, height and width of the volumes in a batch.
        is_train: Whether to crop and mirror at random.
        cases: Names of the folders to use, such as those of a fold. None: all.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only in training.
        shuffle: Whether the order is a random one, another in every epoch. None: only in training.
        seed: Of the order and the augmentation.
        **dataloader_kwargs: `num_workers` and others of `ResumableDataLoader`.

    Returns:
        Batches are pairs of volumes of shape (N, 4, *crop_size), float32, and targets of shape (N, *crop_size), int64.

    Raises:
        FileNotFoundError: The files are not there; the message has the command that gets them.
        ModuleNotFoundError: nibabel is not installed.
        TypeError: An argument of `dataloader_kwargs` is unknown.
        ValueError: A number is out of range.
    """
    dataset = BraTS(datadir, crop_size, is_train=is_train, cases=cases)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, dataloader_kwargs=dataloader_kwargs)
    return DataSpec(options.on_host(dataset))


def build_synthetic_brats_dataloader(
    global_batch_size: int,
    *,
    num_samples: int = 64,
    crop_size: tuple[int, int, int] = (128, 128, 128),
    is_train: bool = True,
    drop_last: bool | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **dataloader_kwargs: Any,
) -> DataSpec:
    """`build_brats_dataloader` without files: balls in noise, not augmented.

    Args:
        global_batch_size: Volumes per batch, of all ranks together.
        num_samples: How many there are; 8 different ones are kept in memory.
        crop_size: As there.
        is_train: What `drop_last` and `shuffle` are by default; the test volumes are others than the training volumes.
        drop_last: As there.
        shuffle: As there.
        seed: As there; the volumes are the same with every seed.
        **dataloader_kwargs: As there.
    """
    dataset = SyntheticVolumeDataset(num_samples, (4, *crop_size), is_train=is_train)
    options = Options(global_batch_size, is_train, drop_last, shuffle, seed, dataloader_kwargs=dataloader_kwargs)
    return DataSpec(options.on_host(dataset))


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
    return needed("nibabel", "BraTS, which is stored as NIfTI,", "brats")
