"""Properties of every callback."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch

import composer.callbacks
from composer.callbacks.activation_monitor import ActivationMonitor
from composer.callbacks.early_stopper import EarlyStopper
from composer.callbacks.free_outputs import FreeOutputs
from composer.callbacks.generate import Generate
from composer.callbacks.image_visualizer import ImageVisualizer
from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.memory_monitor import MemoryMonitor
from composer.callbacks.memory_snapshot import MemorySnapshot
from composer.callbacks.nan_monitor import NaNMonitor
from composer.callbacks.oom_observer import OOMObserver
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.callbacks.threshold_stopper import ThresholdStopper
from composer.core import Callback
from composer.testing import SimpleModel

MAKERS: dict[str, Callable[[], Callback]] = {
    "ActivationMonitor": ActivationMonitor,
    "EarlyStopper": lambda: EarlyStopper("MulticlassAccuracy", "train", patience=99),
    "FreeOutputs": FreeOutputs,
    "Generate": lambda: Generate(["a", "b", "c"], "1ba", batch_size=2, max_new_tokens=20),
    "ImageVisualizer": ImageVisualizer,
    "LRMonitor": LRMonitor,
    "MemoryMonitor": MemoryMonitor,
    "MemorySnapshot": MemorySnapshot,
    "NaNMonitor": NaNMonitor,
    "OOMObserver": OOMObserver,
    "OptimizerMonitor": OptimizerMonitor,
    "RuntimeEstimator": RuntimeEstimator,
    "SpeedMonitor": lambda: SpeedMonitor(window_size=1),
    "SystemMetricsMonitor": SystemMetricsMonitor,
    "ThresholdStopper": lambda: ThresholdStopper("MulticlassAccuracy", "train", 1.5),
}
each = pytest.mark.parametrize("name", list(MAKERS))


@pytest.fixture(autouse=True)
def quietly_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*only works on CUDA devices")
        yield


@pytest.fixture
def begin(run: Any, make_model: Any, make_loader: Any) -> Callable[..., Any]:
    """Begins a run with evaluation that suits a callback."""

    def begin(name: str, callback: Callback, **kwargs: Any) -> Any:
        model = SimpleModel() if name == "FreeOutputs" else make_model()
        model.tokenizer = Tokenizer()
        model.generate = lambda tokens, **_: tokens
        return run(callback, model=model, eval_dataloader=make_loader(2), device_train_microbatch_size=1, **kwargs)

    return begin


class Tokenizer:
    """A tokenizer for which every text is one token."""

    padding_side, pad_token = "right", "_"

    def __call__(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("input_ids", "attention_mask"), torch.ones(len(texts), 1))

    def batch_decode(self, tokens: torch.Tensor, **kwargs: Any) -> list[str]:
        return ["x"] * len(tokens)


def test_all_are_here() -> None:
    points = {p.name: p for p in distribution("composer-callbacks").entry_points if p.group == "composer.callbacks"}
    assert points.keys() == MAKERS.keys()
    for name, point in points.items():
        assert point.load() is getattr(composer.callbacks, name)
        assert name in dir(composer.callbacks)


@each
def test_it_survives_several_fits_evaluation_and_a_new_run(begin: Any, name: str) -> None:
    callback = MAKERS[name]()
    for _ in range(2):
        done = begin(name, callback, max_duration="2ep").fit()
        assert done.state.timestamp.epoch == "2ep"
        done.trainer.eval()
        done.state.max_duration = "4ep"
        done.fit()
        assert done.state.timestamp.epoch == "4ep"
        for _ in range(2):
            done.trainer.close()
        callback.close(done.state, done.trainer.logger)


@each
def test_it_can_be_closed_without_a_fit(begin: Any, name: str) -> None:
    begin(name, MAKERS[name]()).trainer.close()


@each
def test_a_resumed_run_trains_on(begin: Any, name: str, tmp_path: Path) -> None:
    saving = {"save_folder": str(tmp_path / "saved"), "save_interval": "3ba"}
    begin(name, MAKERS[name](), max_duration="3ba", **saving).fit()
    callback = MAKERS[name]()
    resumed = begin(name, callback, max_duration="2ep", load_path=str(tmp_path / "saved" / "latest-rank0.pt")).fit()
    assert resumed.state.timestamp.batch == "8ba"


@each
def test_its_state_survives_a_round_trip(begin: Any, name: str) -> None:
    callback = MAKERS[name]()
    begin(name, callback).fit()
    saved = copy.deepcopy(callback.state_dict())
    other = MAKERS[name]()
    other.load_state_dict(saved)
    assert other.state_dict() == saved


def test_all_of_them_together(run: Any, make_loader: Any) -> None:
    others = [make() for name, make in MAKERS.items() if name not in ("FreeOutputs", "Generate")]
    done = run(others, eval_dataloader=make_loader()).fit()
    assert done.state.timestamp.batch == "8ba"
