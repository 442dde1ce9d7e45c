"""Loaders inside the real Trainer: resumption, untouched batches, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer import Callback, Trainer
from composer.core import DataSpec, Evaluator
from composer.datasets import DeviceLoader, ImageTransform, ResumableDataLoader
from composer.datasets import build_synthetic_cifar10_dataloader as build
from composer.models import ComposerModel
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist

NUM_SAMPLES, BATCH = 22, 4


class Model(ComposerModel):
    """Remembers which images it has seen, by a hash of their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen: list[list[float]] = []
        self.evaluated: list[int] = []

    def forward(self, batch: Any) -> Any:
        self.seen.append([round(float(value), 4) for value in batch[0].double().mean((1, 2, 3))])
        return self.scale * batch[0].mean()

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return outputs.square()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        self.evaluated += batch[1].tolist()
        return outputs


def data(kind: str) -> DataSpec:
    device = "cpu" if kind == "device" else None
    return build(BATCH, num_samples=NUM_SAMPLES, device=device, seed=3)


def train(kind: str, *, max_duration: str = "3ep", folder: Path | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    saving = {} if folder is None else {"save_folder": str(folder), "save_interval": "1ba", "run_name": "whole"}
    trainer = Trainer(
        model=model,
        train_dataloader=data(kind),
        max_duration=max_duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        device="cpu",
        progress_bar=False,
        seed=1,
        **saving,
        **arguments,
    )
    trainer.fit()
    weights = trainer.state.state_dict()["model"]
    trainer.close()
    return model.seen, weights


@pytest.fixture(scope="module", params=["host", "device"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    seen, weights = train(request.param, folder=folder)
    return request.param, folder, seen, weights


def checkpoint(folder: Path, batch: int) -> str:
    return str(next(folder.glob(f"ep*-ba{batch}-rank0.pt")))


@pytest.mark.parametrize("batch", [2, 5, 7, 10])
def test_a_resumed_run_gets_the_batches_of_an_uninterrupted_one(whole: Any, batch: int) -> None:
    kind, folder, seen, weights = whole
    rest, resumed = train(kind, load_path=checkpoint(folder, batch))

    assert 15 == len(seen)
    assert seen[batch:] == rest
    deep_compare(weights, resumed)


def test_a_run_can_be_resumed_twice(whole: Any, tmp_path: Path) -> None:
    kind, folder, seen, weights = whole
    train(kind, max_duration="8ba", load_path=checkpoint(folder, 3), folder=tmp_path)
    rest, resumed = train(kind, load_path=checkpoint(tmp_path, 8))

    assert seen[8:] == rest
    deep_compare(weights, resumed)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_fits_in_pieces_equal_one_fit(kind: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(
        model=model, train_dataloader=data(kind), optimizers=optimizer, device="cpu", progress_bar=False, seed=1
    )
    for duration in ("2ba", "3ba", "2ep"):
        trainer.fit(duration=duration)
    trainer.close()

    assert train(kind)[0] == model.seen


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_subset_of_an_epoch_is_followed_by_the_next_epoch(kind: str, tmp_path: Path) -> None:
    seen, _ = train(kind, train_subset_num_batches=2, folder=tmp_path)
    all_seen, _ = train(kind)
    rest, _ = train(kind, train_subset_num_batches=2, load_path=checkpoint(tmp_path, 4))

    assert [*all_seen[:2], *all_seen[5:7], *all_seen[10:12]] == seen
    assert seen[4:] == rest


def test_the_order_does_not_depend_on_peeking_algorithms() -> None:
    class Peek(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            next(iter(state.train_dataloader))

        def batch_end(self, state: Any, logger: Any) -> None:
            next(iter(state.train_dataloader))

    for kind in ("host", "device"):
        assert train(kind)[0] == train(kind, callbacks=Peek())[0]


class Addresses(Callback):
    """Records the addresses of a batch's tensors, from the loader and in the model."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []
        self.given: list[Any] = []

    def after_dataloader(self, state: Any, logger: Any) -> None:
        self.drawn.append(state.batch)

    def before_forward(self, state: Any, logger: Any) -> None:
        self.given.append(state.batch)


def test_the_trainer_passes_batches_of_a_device_loader_on_as_they_are() -> None:
    addresses = Addresses()
    train("device", max_duration="1ep", callbacks=addresses)

    assert 5 == len(addresses.given)
    assert all(drawn is given for drawn, given in zip(addresses.drawn, addresses.given, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_trainer_passes_batches_on_as_they_are() -> None:
    addresses, model = Addresses(), Model()
    trainer = Trainer(
        model=model,
        train_dataloader=build(BATCH, num_samples=NUM_SAMPLES, device="gpu"),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        device="gpu",
        progress_bar=False,
        callbacks=addresses,
    )
    trainer.fit()
    trainer.close()

    assert all(images.is_cuda for images, _ in addresses.given)
    assert all(drawn is given for drawn, given in zip(addresses.drawn, addresses.given, strict=True))


def numbered(kind: str, count: int) -> Any:
    images, labels = torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(count)
    if kind == "device":
        return DeviceLoader(images, labels, 2, transform=ImageTransform(dtype=torch.float32), shuffle=False)
    pairs = [(image.float(), label) for image, label in zip(images, labels, strict=True)]
    return ResumableDataLoader(pairs, 2, shuffle=False)


def on_rank(folder: str) -> Any:
    """Return the samples that this rank evaluates and trains, uninterrupted and resumed."""
    evaluated = {}
    for kind in ("host", "device"):
        for count in (5, 8):
            model = Model()
            evaluator = Evaluator(label="eval", dataloader=numbered(kind, count))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            trainer = Trainer(
                model=model, eval_dataloader=evaluator, optimizers=optimizer, device="cpu", progress_bar=False
            )
            trainer.eval()
            trainer.close()
            evaluated[kind, count] = model.evaluated
    trained = {}
    for kind in ("host", "device"):
        place = Path(folder) / kind
        seen, _ = train(kind, folder=place, max_duration="2ep")
        dist.barrier()
        rest, _ = train(kind, load_path=str(next(place.glob("ep*-ba7-rank0.pt"))), max_duration="2ep")
        trained[kind] = (seen, rest)
    return evaluated, trained


def test_two_ranks_take_every_sample_once_and_resume(tmp_path: Path) -> None:
    results = run_on_ranks(on_rank, 2, str(tmp_path))

    for key in results[0][0]:
        assert list(range(key[1])) == sorted(results[0][0][key] + results[1][0][key])
    alone = {kind: train(kind, max_duration="2ep")[0] for kind in ("host", "device")}
    for kind in ("host", "device"):
        shares = [trained[kind] for _, trained in results]
        for seen, rest in shares:
            assert 10 == len(seen)
            assert seen[7:] == rest
    # A checkpoint of two ranks, gone on from by one.
    place = next((tmp_path / "device").glob("ep*-ba7-rank0.pt"))
    with pytest.warns(UserWarning, match="saved by 2 processes, but 1 are running"):
        rest, _ = train("device", load_path=str(place), max_duration="2ep")
    assert alone["device"][7:] == rest
    together = [[*a, *b] for a, b in zip(results[0][1]["device"][0], results[1][1]["device"][0], strict=True)]

    assert [sorted(batch) for batch in alone["device"]] == [sorted(batch) for batch in together]
