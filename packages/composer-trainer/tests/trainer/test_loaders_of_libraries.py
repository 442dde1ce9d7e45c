"""Data sets of WebDataset and Hugging Face, as people pass them to the Trainer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from composer import Trainer

ROWS = 20
NO_DATASETS = "needs datasets, of Hugging Face, whose pyarrow needs NumPy 2"
# WebDataset leaves its files open.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
    "ignore:.*without a length:UserWarning",
)


@pytest.fixture(scope="module", autouse=True)
def files_are_closed_here() -> Iterator[None]:
    """Files that are left open warn when they are collected, which must not be in the tests that come after."""
    yield
    gc.collect()


def fit(loader: Any, max_duration: str = "2ep", **arguments: Any) -> tuple[Trainer, list[torch.Tensor]]:
    """Train a linear module, and return the Trainer with the weights."""
    torch.manual_seed(0)
    network = arguments.pop("model", None) or torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    arguments |= {"optimizers": optimizer, "max_duration": max_duration, "device": "cpu", "progress_bar": False}
    trainer = Trainer(model=network, loss=F.cross_entropy, train_dataloader=loader, seed=1, **arguments)
    trainer.fit()
    trainer.close()
    return trainer, [parameter.detach().clone() for parameter in network.parameters()]


# ---- WebDataset


@pytest.fixture(name="make")
def shards(tmp_path: Path) -> Callable[..., Any]:
    """Two shards, and a function that reads them."""
    webdataset: Any = pytest.importorskip("webdataset", reason="needs webdataset")
    torch.manual_seed(0)
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as file:
            for i in range(ROWS // 2):
                file.write({"__key__": f"{shard}-{i}", "x.pth": torch.randn(4), "y.cls": i % 3})

    def read(**arguments: Any) -> Any:
        return webdataset.WebDataset(str(tmp_path / "{0..1}.tar"), **{"shardshuffle": False, **arguments})

    return read


def pairs(make: Callable[..., Any], **arguments: Any) -> Any:
    return make(**arguments).decode().to_tuple("x.pth", "y.cls")


def web_loader(*arguments: Any, **named: Any) -> Any:
    webdataset: Any = pytest.importorskip("webdataset", reason="needs webdataset")
    return webdataset.WebLoader(*arguments, **named)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda make: pairs(make).batched(8),
    "itself, of dictionaries": lambda make: make().decode().batched(8),
    "with_epoch": lambda make: pairs(make).batched(8).with_epoch(3),
    "DataLoader": lambda make: DataLoader(pairs(make).batched(8), batch_size=None),
    "DataLoader that makes the batches": lambda make: DataLoader(pairs(make), batch_size=8),
    "WebLoader": lambda make: web_loader(pairs(make).batched(8), batch_size=None),
    "WebLoader that makes the batches": lambda make: web_loader(pairs(make), batch_size=8),
    "WebLoader that makes other batches": lambda make: (
        web_loader(pairs(make).batched(4), batch_size=None).unbatched().batched(8).with_epoch(3)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_usual_pipelines_of_webdataset_train_alike(name: str, make: Callable[..., Any]) -> None:
    keys = {"input_key": "x.pth", "target_key": "y.cls"} if "dictionaries" in name else {}
    trainer, weights = fit(LOADERS[name](make), **keys)

    now = trainer.state.timestamp
    assert (2, 6, 2 * ROWS) == (now.epoch.value, now.batch.value, now.sample.value)
    _, expected = fit(DataLoader(pairs(make).batched(8), batch_size=None))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_items_that_are_samples_are_told(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"whose first item is a sample: inputs of shape \(4,\) and one target"):
        fit(DataLoader(pairs(make), batch_size=None), input_key=0, target_key=1)


def test_an_endless_pipeline_trains_for_a_number_of_batches(make: Callable[..., Any]) -> None:
    def endless() -> Any:
        return pairs(make, resampled=True).batched(8)

    assert 4 == fit(web_loader(endless(), batch_size=None).with_epoch(2))[0].state.timestamp.batch
    assert 4 == fit(endless(), train_subset_num_batches=2)[0].state.timestamp.batch
    assert 3 == fit(endless(), "3ba")[0].state.timestamp.batch


# ---- data sets of Hugging Face


def test_a_data_set_of_hugging_face_needs_a_loader() -> None:
    datasets: Any = pytest.importorskip("datasets", reason=NO_DATASETS, exc_type=ImportError)
    data = datasets.Dataset.from_dict({"x": [[1.0, 2.0, 3.0, 4.0]] * 8, "y": [0, 1] * 4})
    stream, splits = data.to_iterable_dataset(), datasets.DatasetDict({"train": data})
    advice = r"\.with_format\('torch'\), batch_size=\.\.\.\)"

    for given, message in (
        (data, rf"got a `datasets\.Dataset`, whose items are samples\. Pass .*DataLoader\(dataset{advice}"),
        (stream, rf"got a `datasets\.IterableDataset`, whose items are samples\. Pass .*\(dataset{advice}"),
        (splits, rf"got a `datasets\.DatasetDict`, whose values are datasets\. Pass .*\(dataset\['train'\]{advice}"),
    ):
        with pytest.raises(TypeError, match="`train_dataloader` must be an iterable of batches, " + message):
            fit(given)
        with pytest.raises(TypeError, match="`eval_dataloader` must be an iterable of batches, " + message):
            fit(None, eval_dataloader=given)

    keys = {"input_key": "x", "target_key": "y"}
    for wrapped in (
        DataLoader(data.with_format("torch"), batch_size=4),
        DataLoader(data.with_format("torch").batch(4), batch_size=None),
    ):
        assert 2 == fit(wrapped, "1ep", **keys)[0].state.timestamp.batch
    with pytest.warns(UserWarning, match="`train_dataloader` is a DataLoader without a length"):
        assert 2 == fit(DataLoader(stream.with_format("torch"), batch_size=4), "1ep", **keys)[0].state.timestamp.batch
