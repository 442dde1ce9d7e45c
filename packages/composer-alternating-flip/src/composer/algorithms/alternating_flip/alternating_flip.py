"""The functions, the dataset, then the algorithm. Symbols: sample n of the dataset, its hash h."""

from __future__ import annotations

import copy
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from composer.algorithms.utils.augmentation_common import image_size, moves_with_pixels
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import AUGMENTS_IMAGES, Algorithm, Event, Placement
from composer.utils import check_integers, plain_number
from composer.utils.batch_helpers import batch_get, batch_set, find_part

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def compute_flip_parities(num_samples: int, seed: int = 42) -> torch.Tensor:
    """Return the parity of the hash h of each sample, which decides in which epochs its image is mirrored.

    h is the value of the last 8 hexadecimal digits of md5(str(n * seed)). So sample 0 has the same hash for
    every seed. One hash takes about a microsecond: compute them once per dataset.

    Args:
        num_samples: The number of samples, at least 0.
        seed: The seed.

    Returns:
        Shape (num_samples,), uint8, of 0 and 1.

    Raises:
        ValueError: `num_samples` is negative.
        TypeError: An argument is not an integer.

    Example:
        >>> compute_flip_parities(6)
        tensor([0, 0, 1, 0, 1, 1], dtype=torch.uint8)

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.6 and its listing.
    Differs: none.
    """
    check_integers(num_samples=num_samples, least=0)
    check_integers(seed=seed)
    step = int(seed)
    # The last digit has the parity of the number.
    digests = (hashlib.md5(b"%d" % (n * step), usedforsecurity=False).digest()[-1] & 1 for n in range(num_samples))
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8) if num_samples else torch.zeros(0, dtype=torch.uint8)


def flip_batch(images: torch.Tensor, parities: torch.Tensor, epoch: int | torch.Tensor) -> torch.Tensor:
    """Mirror the images of a batch that have an even h + epoch.

    Two consecutive epochs hold every image once as it is and once mirrored.

    Args:
        images: Shape (N, ..., H, W); not modified. Masks of these shapes are mirrored in the same way.
        parities: Those of the samples, shape (N,), on the device of the images: with `compute_flip_parities` of the
            dataset, `parities[indices]`.
        epoch: The number of the epoch, from 0; an integer or a tensor of one.

    Returns:
        The images, of which those with an even h + epoch are mirrored along W.

    Raises:
        ValueError: `images` has fewer than three dimensions, or `parities` does not have one value per image.
        TypeError: `epoch` is not an integer.

    Example:
        >>> images, parities = torch.tensor([[[1, 2]], [[3, 4]]]), torch.tensor([0, 1])
        >>> flip_batch(images, parities, epoch=0).tolist(), flip_batch(images, parities, epoch=1).tolist()
        ([[[2, 1]], [[3, 4]]], [[[1, 2]], [[4, 3]]])

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.6 and its listing.
    Differs: none.
    """
    if not isinstance(epoch, torch.Tensor):
        check_integers(epoch=epoch)
    if images.dim() < 3 or parities.shape != images.shape[:1]:
        raise ValueError(
            f"`images` must have shape (N, ..., H, W) and `parities` one value per image, got shapes "
            f"{tuple(images.shape)} and {tuple(parities.shape)}. Pass `parities[indices]` of the batch."
        )
    is_flipped = (parities + epoch) % 2 == 0
    return torch.where(is_flipped.view(-1, *(1 for _ in images.shape[1:])), images.flip(-1), images)


class FlippedDataset(Subset[Any]):
    """A view of a dataset in which each image is mirrored in every other epoch; see `flip_batch`.

    With the image, the other parts of a sample that have a value per pixel are mirrored, such as masks: tensors of
    shape (..., H, W) and Pillow images of its size. Class targets stay as they are; boxes and the like are refused.

    It is a `Subset` of all samples. The epoch is in shared memory, so the workers of a loader know it too, even
    persistent ones. `AlternatingFlip` makes one for the training loader.

    Args:
        dataset: A dataset with a length and an image in each sample: a tensor of shape (..., H, W) or a Pillow image.
        seed: The seed of `compute_flip_parities`.
        image_key: Position of the image in a sample, such as an index or a key; see `State.batch_get_item`. None: the
            sample is the image.

    Attributes:
        dataset: The dataset.
        seed: As given.
        image_key: As given.

    Raises:
        TypeError: The dataset has no length or no indices, or, when a sample is read, no image at `image_key`.
        ValueError: When a sample is read, if it has positions that cannot be mirrored, such as boxes.

    Example:
        >>> images = torch.utils.data.TensorDataset(torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]]))
        >>> flipped = FlippedDataset(images)
        >>> flipped.set_epoch(1)
        >>> [sample.tolist() for (sample,) in flipped]
        [[[1, 2]], [[3, 4]], [[6, 5]]]
    """

    def __init__(self, dataset: Dataset[Any], seed: int = 42, image_key: Any = 0) -> None:
        count = _length_of(dataset)
        super().__init__(dataset, range(count))
        self.seed, self.image_key = plain_number(seed), image_key
        self._parities = compute_flip_parities(count, seed)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0; before an iteration over the data begins."""
        self._epoch.fill_(epoch)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, or the batch of a dataset that takes a list of indices."""
        sample = self.dataset[index]
        if isinstance(index, (list, torch.Tensor)) and torch.as_tensor(index).dim():
            parities = self._parities[index]
            return self._replace(sample, lambda image: flip_batch(image, parities, self._epoch), is_batch=True)
        return self._flip(sample, index)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return several samples; a dataset may read them faster together."""
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        return [self._flip(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _flip(self, sample: Any, index: Any) -> Any:
        is_plain = (int(self._parities[index]) + int(self._epoch)) % 2
        return self._replace(sample, None if is_plain else _mirrored, is_batch=False)

    def _replace(self, sample: Any, mirror: Callable[[Any], Any] | None, is_batch: bool) -> Any:
        """Check a sample or a batch, and return it with mirrored images and masks; None: unchanged."""
        key = self.image_key
        if key == 0 and isinstance(sample, Mapping):
            key = find_part(sample, "input") or key
        image = _checked(sample if key is None else batch_get(sample, key))
        if key is None:
            return image if mirror is None else mirror(image)
        keys: Iterable[Any] = sample if isinstance(sample, Mapping) else ()
        keys = range(len(sample)) if isinstance(sample, (list, tuple)) else keys
        maps = [name for name in keys if sample[name] is not image]
        maps = [name for name in maps if moves_with_pixels(sample[name], image, "AlternatingFlip", is_batch=is_batch)]
        if mirror is None:
            return sample
        result = copy.copy(sample)  # the dataset may return the same object again
        for name in maps:
            result = batch_set(result, name, mirror(sample[name]))
        return batch_set(result, key, mirror(image))


def _length_of(dataset: Any) -> int:
    is_indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not (is_indexed and hasattr(dataset, "__len__")):
        raise TypeError(
            f"The dataset must have a length and indices, as flips depend on the index of an image, got "
            f"{type(dataset).__name__}. {_ADVICE}"
        )
    return len(dataset)


def _checked(image: Any) -> Any:
    """Return an image, or raise a TypeError if it has no height and width."""
    if image_size(image) is not None:
        return image
    got = f"shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else f"a {type(image).__name__}"
    raise TypeError(
        f"`image_key` must be the position of an image in a sample, a tensor of shape (..., H, W) or a Pillow image, "
        f"got {got} there. Pass for example `image_key='image'`, or convert arrays to tensors."
    )


def _mirrored(image: Any) -> Any:
    if isinstance(image, torch.Tensor):
        return image.flip(-1)
    return image.transpose(sys.modules["PIL.Image"].Transpose.FLIP_LEFT_RIGHT)


_ADVICE = (
    "Use a `torch.utils.data.DataLoader` with a dataset that has a length, or a `composer.datasets.DeviceLoader`, or "
    "call `flip_batch` where the batches are made."
)


class AlternatingFlip(Algorithm):
    """Mirrors each training image in every other epoch, half of the images in the even epochs.

    With random flips, two consecutive epochs show half of the images the same way twice. With alternating flips, they
    show each image once each way. A hash of its index in the dataset decides in which epochs an image is mirrored; see
    `flip_batch`. So nothing is random: a resumed run sees the same images, whatever the workers and the number of
    ranks.

    At FIT_START the dataset of the training loader is replaced by a `FlippedDataset` of it, and at the start of each
    epoch that gets the number of the epoch; at FIT_END the loader gets its dataset back. The original dataset does not
    change, and other loaders may use it, also for evaluation. A loader that stores all images in its `inputs`, as
    `composer.datasets.DeviceLoader` does, gets a mirrored copy of these at the start of each epoch instead. A loader
    without indices is refused, at BEFORE_LOAD if it is known then.

    **Events** INIT, BEFORE_LOAD, FIT_START, EPOCH_START, FIT_END. **Reads** `state.timestamp`, and
    `state.train_dataloader`, or else `state.dataloader`. **Writes** its `dataset`, or its `inputs` and masks in its
    `targets`. **Cost** mirroring half of the images, in the workers of the loader, or mirroring the stored images once
    an epoch; a hash per sample, once in a `fit`. **Compilation** static: the model and the shapes do not change.

    With the images, other parts of a sample that have a value per pixel are mirrored, such as masks; see
    `FlippedDataset`. Of a loader that stores images, the stored `targets` are.

    **When not to use it** left and right mean something, as in text or digits; targets are boxes or keypoints, which
    are refused; the transforms of the dataset already flip images at random; or the run has one epoch, where it is a
    random flip.

    Args:
        seed: The seed of the hash. Sample 0 is mirrored in even epochs for each seed.
        image_key: Position of the image in a sample of the dataset, before samples are collated to batches; see
            `FlippedDataset`. For stored images, leave the default.

    Raises:
        TypeError: `seed` is not an integer; or the training loader is not a `DataLoader` of a dataset with a length
            and does not store images.
        ValueError: An evaluator uses the training loader itself, whose images would be mirrored too; when the first
            sample is read, if it has no image of shape (..., H, W) or boxes.

    Warns:
        NotIntendedUseWarning: At FIT_START, if the transforms flip images at random: a `RandomHorizontalFlip`, or
            `flip` of an `ImageTransform`.

    Example:
        >>> AlternatingFlip()
        AlternatingFlip(seed=42,image_key=0)

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.6 and its listing.
    Differs: images are mirrored after the transforms of a dataset, not before; stored images as in the paper.
    """

    events = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.FIT_START, Event.EPOCH_START, Event.FIT_END})
    placement = Placement(provides={AUGMENTS_IMAGES})

    def __init__(self, seed: int = 42, image_key: Any = 0) -> None:
        check_integers(seed=seed)
        self.seed, self.image_key = plain_number(seed), image_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check the training loader, replace its dataset, set the epoch, or give the loader its dataset back."""
        loader = state.dataloader if state.train_dataloader is None else state.train_dataloader
        if loader is None and event in (Event.INIT, Event.BEFORE_LOAD):
            return
        self._check_loader(loader, state)
        epoch = int(state.timestamp.epoch)
        if _stores_images(loader):
            if event in (Event.FIT_START, Event.EPOCH_START, Event.FIT_END):
                self._mirror_stored(loader, None if event is Event.FIT_END else _Mirrored(self.seed, epoch % 2))
            return
        if event is Event.FIT_START:
            self._wrap(loader)
        if event is Event.FIT_END and isinstance(loader.dataset, FlippedDataset):
            _set_dataset(loader, loader.dataset.dataset)
        if event in (Event.FIT_START, Event.EPOCH_START) and isinstance(loader.dataset, FlippedDataset):
            loader.dataset.set_epoch(epoch)

    def _mirror_stored(self, loader: Any, now: _Mirrored | None) -> None:
        """Mirror the images of an epoch; None: give them back as they were."""
        before: _Mirrored | None = getattr(loader, _MARK, None)
        if before == now:
            return
        if before is None and getattr(loader.transform, "flip", False):
            _warn_of_random_flips("transform of the training loader has `flip=True`")
        targets = getattr(loader, "targets", None)
        names = ("inputs", "targets") if moves_with_pixels(targets, loader.inputs, "AlternatingFlip") else ("inputs",)
        for name in names:
            images = getattr(loader, name)
            if before is not None and now is not None and before.seed == now.seed:
                images = images.flip(-1)
            else:  # flipped twice, an image is as it was
                for each in (before, now):
                    images = images if each is None else self._with_parities(images, each)
            setattr(loader, name, images)
        setattr(loader, _MARK, now)

    def _with_parities(self, images: torch.Tensor, mirrored: _Mirrored) -> torch.Tensor:
        """Mirror the images of an epoch, or mirror them back. A new tensor: other loaders may share the old one."""
        parities = compute_flip_parities(len(images), mirrored.seed).to(images.device)
        return flip_batch(images, parities, mirrored.epoch)

    def _check_loader(self, loader: Any, state: State) -> None:
        if _stores_images(loader):
            if loader.inputs.dim() < 3 or self.image_key not in (0, None):
                raise ValueError(
                    f"A {type(loader).__name__} must store images, and `image_key` be 0, got inputs of shape "
                    f"{tuple(loader.inputs.shape)} and {self.image_key!r}."
                )
        elif isinstance(loader, DataLoader):
            _length_of(loader.dataset)
        else:
            raise TypeError(
                f"`train_dataloader` must be a `torch.utils.data.DataLoader`, got {type(loader).__name__}. {_ADVICE}"
            )
        for evaluator in state.evaluators:
            if evaluator.dataloader.dataloader is loader:
                raise ValueError(
                    f"The training loader must not be that of the evaluator {evaluator.label!r}, whose images "
                    f"`AlternatingFlip` would mirror too. Pass the evaluator a loader of its own, of the same dataset."
                )

    def _wrap(self, loader: Any) -> None:
        dataset = loader.dataset
        if isinstance(dataset, FlippedDataset):
            if (dataset.seed, dataset.image_key) == (self.seed, self.image_key):
                return
            dataset = dataset.dataset  # flipped twice, it would be as it was
        if _flips_at_random(dataset):
            _warn_of_random_flips("transforms of the training dataset have a `RandomHorizontalFlip`")
        _set_dataset(loader, FlippedDataset(dataset, self.seed, self.image_key))


def _set_dataset(loader: Any, dataset: Dataset[Any]) -> None:
    # A `DataLoader` refuses this, as its sampler is made for the dataset; this one has the same indices.
    object.__setattr__(loader, "dataset", dataset)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # persistent workers have a copy of the dataset


@dataclass(frozen=True)
class _Mirrored:
    """Mirroring of the images of a loader that stores them.

    Attributes:
        seed: The seed of the hash.
        epoch: The epoch, modulo 2.
    """

    seed: int
    epoch: int


_MARK = "alternating_flip"  # the attribute of such a loader, so that a second run knows


def _stores_images(loader: Any) -> bool:
    """Return True for a loader such as `composer.datasets.DeviceLoader`."""
    return isinstance(getattr(loader, "inputs", None), torch.Tensor) and hasattr(loader, "transform")


def _warn_of_random_flips(what: str) -> None:
    warnings.warn(
        f"The {what}, so two consecutive epochs do not hold each image once each way. Remove it, or `AlternatingFlip`.",
        NotIntendedUseWarning,
        stacklevel=3,
    )


def _flips_at_random(dataset: Any) -> bool:
    """Return True if a dataset, or one that it is a subset of, has a `RandomHorizontalFlip` of torchvision."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return _contains_flip(getattr(dataset, "transform", None))


def _contains_flip(transform: Any) -> bool:
    steps = getattr(transform, "transforms", None)
    is_composed = isinstance(steps, Sequence) and any(map(_contains_flip, steps))
    return is_composed or type(transform).__name__ == "RandomHorizontalFlip"
