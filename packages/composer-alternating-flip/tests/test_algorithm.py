"""`AlternatingFlip` with loaders, the engine and the Trainer."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from composer import Trainer
from composer.algorithms.alternating_flip import AlternatingFlip, FlippedDataset, compute_flip_parities, flip_batch
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import Algorithm, Callback, Engine, Evaluator, State
from composer.datasets import DeviceLoader, ImageTransform
from composer.loggers import Logger
from composer.testing import SimpleConvModel, SimpleModel, deep_compare, run_on_ranks
from composer.utils import dist

SIZE = 12
IMAGES = torch.randn(SIZE, 3, 4, 4, generator=torch.Generator().manual_seed(0))
PARITIES = compute_flip_parities(SIZE)


class Pictures(Dataset[Any]):
    """Samples of an image, its index, and whatever `make` makes of both."""

    def __init__(self, make: Any = lambda image, index: (image, index)) -> None:
        self.make, self.transform = make, None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.make(IMAGES[index], index)


def start(loader: Any, *algorithms: Algorithm) -> tuple[State, Engine]:
    state = State(
        model=SimpleConvModel(), max_duration="9ep", dataloader=loader, algorithms=[*algorithms] or AlternatingFlip()
    )
    engine = Engine(state)
    for event in ("init", "before_load", "fit_start"):
        engine.run_event(event)
    return state, engine


def epoch_of(loader: Any) -> torch.Tensor:
    """The images of an epoch, in the order of their indices."""
    batches = [*loader]
    images, indices = (torch.cat(column) for column in zip(*batches, strict=True))
    return images[indices.argsort()]  # type: ignore[no-any-return]


def next_epoch(state: State, engine: Engine) -> None:
    state.timestamp = state.timestamp.to_next_batch(SIZE).to_next_epoch()
    engine.run_event("epoch_start")


# ---- data sets and loaders ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
    ],
)
def test_each_epoch_has_the_flips_of_the_function(options: dict[str, Any]) -> None:
    loader = DataLoader(TensorDataset(IMAGES, torch.arange(SIZE)), batch_size=5, **options)
    if "spawn" not in options.values():
        assert torch.equal(IMAGES, epoch_of(loader))  # persistent workers begin before the flips are there
    state, engine = start(loader)
    engine.run_event("epoch_start")
    for epoch in range(3):
        assert torch.equal(flip_batch(IMAGES, PARITIES, epoch), epoch_of(loader))
        next_epoch(state, engine)


def test_a_run_that_begins_in_an_epoch_has_its_flips() -> None:
    loader = DataLoader(Pictures(), batch_size=5)
    state = State(model=SimpleModel(), max_duration="9ep", dataloader=loader, algorithms=AlternatingFlip(seed=3))
    state.timestamp = state.timestamp.to_next_batch(SIZE).to_next_epoch().to_next_batch(5)
    Engine(state).run_event("fit_start")

    assert torch.equal(flip_batch(IMAGES, compute_flip_parities(SIZE, 3), 1), epoch_of(loader))


def test_samples_of_every_form_are_flipped() -> None:
    flipped = IMAGES[0].flip(2)
    dictionary = {"x": IMAGES[0], "y": 1}
    for sample, key in (
        ((IMAGES[0], 1), 0),
        ([IMAGES[0], 1], 0),
        (dictionary, "x"),
        (SimpleNamespace(x=IMAGES[0]), "x"),
        (IMAGES[0], None),
    ):
        before = copy.deepcopy(sample)
        found = FlippedDataset(Pictures(lambda image, index, sample=sample: sample), image_key=key)[0]
        image = found if key is None else found.x if isinstance(found, SimpleNamespace) else found[key]

        assert type(sample) is type(found)
        assert torch.equal(flipped, image)
        if not isinstance(sample, SimpleNamespace):
            deep_compare(before, sample)
    assert torch.equal(IMAGES[0], dictionary["x"])  # type: ignore[arg-type]


def test_pillow_images_are_flipped() -> None:
    pixels = IMAGES.mul(50).to(torch.uint8)
    dataset = Pictures(lambda image, index: (Image.fromarray(pixels[index].permute(1, 2, 0).numpy()), index))

    for index in range(3):
        expected = pixels[index] if PARITIES[index] else pixels[index].flip(2)
        actual = torch.frombuffer(bytearray(FlippedDataset(dataset)[index][0].tobytes()), dtype=torch.uint8)
        assert torch.equal(expected.permute(1, 2, 0).flatten(), actual)


class Together(TensorDataset):
    """A data set that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(image, index) for image, index in zip(IMAGES[indices], indices, strict=True)]


def test_data_sets_that_read_several_samples_together_are_flipped() -> None:
    expected = flip_batch(IMAGES, PARITIES, 0)
    many = FlippedDataset(Together(IMAGES))
    whole = DataLoader(
        FlippedDataset(TensorDataset(IMAGES, torch.arange(SIZE))), sampler=[[3, 1], [2, 5]], batch_size=None
    )

    assert torch.equal(expected[[4, 2]], torch.stack([image for image, _ in many.__getitems__([4, 2])]))
    assert torch.equal(expected, epoch_of(DataLoader(many, batch_size=5)))
    assert torch.equal(expected[[3, 1, 2, 5]], torch.cat([images for images, _ in whole]))


def test_other_loaders_of_the_data_set_are_not_changed() -> None:
    dataset = Pictures()
    loader, other = DataLoader(dataset), DataLoader(dataset)
    start(loader)

    assert torch.equal(IMAGES, epoch_of(other))
    assert dataset is loader.dataset.dataset  # type: ignore[attr-defined]


def test_a_second_run_flips_once() -> None:
    """With the same algorithm, an equal one, or one with another seed."""
    loader = DataLoader(Pictures(), batch_size=5)
    algorithm = AlternatingFlip()
    for again in (algorithm, algorithm, AlternatingFlip()):
        start(loader, again)
        assert torch.equal(flip_batch(IMAGES, PARITIES, 0), epoch_of(loader))
    start(loader, AlternatingFlip(seed=5))

    assert torch.equal(flip_batch(IMAGES, compute_flip_parities(SIZE, 5), 0), epoch_of(loader))


def test_a_transform_that_is_added_later_is_applied() -> None:
    """Other algorithms find the data set as they find that of a subset."""
    from composer.algorithms.utils import add_dataset_transform

    dataset = Pictures()
    dataset.make = lambda image, index: (image, index)
    loader = DataLoader(dataset)
    start(loader)
    add_dataset_transform(loader, double := lambda image: 2 * image)

    assert double is loader.dataset.dataset.transform  # type: ignore[attr-defined]


# ---- with the Trainer ----


class Seen(Callback):
    """The images of each batch."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.batches.append(state.batch[0])


def fit(duration: str, **arguments: Any) -> tuple[list[torch.Tensor], Any]:
    model, seen = SimpleConvModel(), Seen()
    data = TensorDataset(IMAGES, torch.arange(SIZE) % 2)
    loader = arguments.pop("loader", None) or DataLoader(data, batch_size=4, shuffle=True)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=AlternatingFlip(),
        callbacks=seen,
        max_duration=duration,
        progress_bar=False,
        device="cpu",
        seed=5,
        **arguments,
    )
    trainer.fit()
    return seen.batches, model.state_dict()


def test_a_resumed_run_sees_the_images_of_an_uninterrupted_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected, weights = fit("4ep")
    first, _ = fit("4ba", save_folder=folder, save_interval="1ba", run_name="run")
    second, resumed = fit("4ep", load_path=f"{folder}/latest-rank0.pt")

    assert len(expected) == len(first) + len(second)
    deep_compare(expected, [*first, *second])
    deep_compare(weights, resumed)


@pytest.mark.parametrize("kind", ["dataset", "stored"])
def test_the_loader_is_as_before_after_the_run(kind: str) -> None:
    data = TensorDataset(IMAGES, torch.arange(SIZE) % 2)
    loader: Any = DeviceLoader(*data.tensors, 4, seed=5) if kind == "stored" else DataLoader(data)
    fit("2ep", loader=loader)

    assert torch.equal(IMAGES, loader.inputs) if kind == "stored" else loader.dataset is data


def test_two_epochs_of_a_fit_hold_every_image_once_each_way() -> None:
    batches, _ = fit("2ep")
    seen = sorted(image.numpy().tobytes() for image in torch.cat(batches))

    assert sorted(image.contiguous().numpy().tobytes() for image in (*IMAGES, *IMAGES.flip(3))) == seen


def _fit_part() -> list[torch.Tensor]:
    data = TensorDataset(IMAGES, torch.arange(SIZE) % 2)
    return fit("2ep", loader=DataLoader(data, batch_size=3, sampler=dist.get_sampler(data)))[0]


def test_the_parts_of_ranks_are_flipped_as_the_whole() -> None:
    ranks = [torch.cat(batches) for batches in run_on_ranks(_fit_part, 2)]
    whole = torch.cat([flip_batch(IMAGES, PARITIES, epoch) for epoch in (0, 1)])

    for rank, images in enumerate(ranks):
        assert torch.equal(whole[rank::2], images)


# ---- images that a loader stores ----


def stored(**options: Any) -> DeviceLoader:
    return DeviceLoader(IMAGES, torch.arange(SIZE), 4, seed=5, **options)


def test_stored_images_have_the_flips_of_the_function_in_each_epoch() -> None:
    loader, before = stored(), IMAGES.clone()
    state, engine = start(loader)
    for epoch in range(4):
        assert torch.equal(flip_batch(IMAGES, PARITIES, epoch), epoch_of(loader))
        next_epoch(state, engine)

    assert torch.equal(before, IMAGES)  # which other loaders may share


def test_a_second_run_flips_stored_images_once() -> None:
    loader = stored()
    for algorithm in (AlternatingFlip(), AlternatingFlip(), AlternatingFlip(seed=3), AlternatingFlip()):
        start(loader, algorithm)
        parities = compute_flip_parities(SIZE, algorithm.seed)
        assert torch.equal(flip_batch(IMAGES, parities, 0), epoch_of(loader))


def test_a_resumed_run_sees_the_stored_images_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def targets() -> DeviceLoader:
        return DeviceLoader(IMAGES, torch.arange(SIZE) % 2, 4, seed=5)

    folder = str(tmp_path)
    expected, weights = fit("4ep", loader=targets())
    first, _ = fit("5ba", loader=targets(), save_folder=folder, save_interval="1ba", run_name="run")
    second, resumed = fit("4ep", loader=targets(), load_path=f"{folder}/latest-rank0.pt")

    deep_compare(expected, [*first, *second])
    deep_compare(weights, resumed)


def test_what_is_no_image_is_refused_and_random_flips_are_pointed_out() -> None:
    with pytest.raises(ValueError, match=r"must store images, and `image_key` be 0, got inputs of shape \(12, 4\)"):
        start(DeviceLoader(torch.zeros(SIZE, 4), None, 4))
    with pytest.raises(ValueError, match=r"`image_key` be 0, .* and 'image'"):
        start(stored(), AlternatingFlip(image_key="image"))
    with pytest.warns(NotIntendedUseWarning, match="has `flip=True`"):
        start(stored(transform=ImageTransform(flip=True, mean=[0.0] * 3, std=[1.0] * 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(stored(transform=ImageTransform(mean=[0.0] * 3, std=[1.0] * 3)))


# ---- what is refused ----


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(IMAGES)


def test_loaders_without_indices_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"`train_dataloader` must be a `torch.utils.data.DataLoader`, got list"):
        start([IMAGES])
    with pytest.raises(TypeError, match=r"must have a length and indices.*got Stream.*call `flip_batch`"):
        start(DataLoader(Stream()))
    with pytest.raises(TypeError, match=r"must have a length and indices.*got Stream"):
        FlippedDataset(Stream())


def test_an_evaluation_of_the_training_loader_is_refused() -> None:
    loader = DataLoader(Pictures())
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=loader, algorithms=AlternatingFlip())
    state.evaluators = [Evaluator(label="test", dataloader=DataLoader(loader.dataset))]
    Engine(state).run_event("init")
    state.evaluators = [Evaluator(label="test", dataloader=loader)]

    with pytest.raises(ValueError, match=r"must not be that of the evaluator 'test'.*a loader of its own"):
        Engine(state).run_event("init")


def test_samples_without_an_image_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`image_key` must be the position of an image.*got a int there"):
        FlippedDataset(Pictures(), image_key=1)[0]


class RandomHorizontalFlip:
    """As that of torchvision."""


def test_random_flips_in_the_data_set_are_pointed_out() -> None:
    dataset = Pictures()
    dataset.transform = SimpleNamespace(transforms=[SimpleNamespace(transforms=[RandomHorizontalFlip()])])  # type: ignore[assignment]
    with pytest.warns(NotIntendedUseWarning, match="have a `RandomHorizontalFlip`"):
        start(DataLoader(Subset(dataset, [0, 1])))
    dataset.transform = SimpleNamespace(transforms=[torch.nn.Identity()])  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(DataLoader(dataset))


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(TypeError, match=r"`seed` must be an integer, got 0.5"):
        AlternatingFlip(seed=0.5)  # type: ignore[arg-type]


MASKS = [
    lambda image, index: (image, image[0].long()),
    lambda image, index: (image, index, image.clone()),
    lambda image, index: {0: image, "mask": image[:1]},
    lambda image, index: (Image.fromarray(image[0].numpy()), Image.fromarray(image[1].numpy())),
]


def as_tensor(image: Any) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else torch.from_numpy(np.array(image))


@pytest.mark.parametrize("make", MASKS)
def test_masks_are_mirrored_with_their_images(make: Any) -> None:
    plain, flipped = Pictures(make), FlippedDataset(Pictures(make))
    mirrored = 0
    for before, after in zip((plain[n] for n in range(SIZE)), (flipped[n] for n in range(SIZE)), strict=True):
        parts = [(before[key], after[key]) for key in (before if isinstance(before, dict) else range(len(before)))]
        pixels = [tuple(map(as_tensor, pair)) for pair in parts if not isinstance(pair[0], int)]
        moved = [torch.equal(old.flip(-1), new) for old, new in pixels]
        stayed = [torch.equal(old, new) for old, new in pixels]
        mirrored += all(moved)

        assert len(pixels) == 2
        assert all(moved) or all(stayed)
    assert 0 < mirrored < SIZE


def test_stored_masks_and_masks_of_whole_batches_are_mirrored_too() -> None:
    loader = DeviceLoader(IMAGES, IMAGES[:, 0].long(), SIZE, shuffle=False, transform=ImageTransform())
    start(loader)
    images, masks = next(iter(loader))

    assert torch.equal(images[:, 0].long(), masks)
    assert not torch.equal(IMAGES, images)
    batch = FlippedDataset(TensorDataset(IMAGES, IMAGES[:, 0]))[[*range(SIZE)]]
    assert torch.equal(batch[0], images)
    assert torch.equal(batch[0][:, 0], batch[1])


@pytest.mark.parametrize(
    "target",
    [{"boxes": torch.zeros(2, 4)}, torch.zeros(2, 4), [{"bbox": [0, 1, 2, 3]}], torch.zeros(3, 2, 2), np.zeros((4, 4))],
)
def test_targets_with_other_positions_are_refused_at_the_first_sample(target: Any) -> None:
    for index in range(2):
        with pytest.raises(ValueError, match=r"Targets with positions must have .* with them by `AlternatingFlip`"):
            FlippedDataset(Pictures(lambda image, index: (image, target)))[index]


@pytest.mark.parametrize("target", [3, (1, 2), {"label": 1}, "a cat", torch.zeros(10), ["a", "b"]])
def test_other_targets_stay(target: Any) -> None:
    dataset = FlippedDataset(Pictures(lambda image, index: (image, target)))

    assert all(dataset[index][1] is target for index in range(SIZE))


def test_features_are_refused_at_the_first_sample() -> None:
    for index in range(2):
        with pytest.raises(TypeError, match=r"a tensor of shape \(\.\.\., H, W\) or a Pillow image, got shape \(4,\)"):
            FlippedDataset(TensorDataset(torch.zeros(2, 4)))[index]
