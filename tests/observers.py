"""Every callback and every logger, ready for a small run, and what a logger has kept of it."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback
from composer.loggers import LoggerDestination
from composer.models import ComposerClassifier

LABEL = "MulticlassAccuracy"


@dataclass(frozen=True)
class Watcher:
    """The arguments of a callback, and its log of two batches of this run on a CPU.

    Attributes:
        make: Makes it, to work in a folder.
        metric: A metric it logs.
        image: Images it logs.
        table: A table it logs.
        model: Arguments of `make_model`.
    """

    make: Callable[[Path], Callback]
    metric: str | None = None
    image: str | None = None
    table: str | None = None
    model: dict[str, Any] = field(default_factory=dict)


class Keeper:
    """A logger that is about to be used, and what it has kept afterwards.

    Args:
        logger: The logger.
        has: Whether it has kept metrics, images or a table of that name; None: there is no way to tell.
        images: Whether it keeps images.
        tables: Whether it keeps tables.
    """

    def __init__(
        self,
        logger: LoggerDestination,
        has: Callable[[str], bool] | None,
        *,
        images: bool = False,
        tables: bool = True,
    ) -> None:
        self.logger, self.has, self.images, self.tables = logger, has, images, tables


def names(group: str) -> list[str]:
    """The classes that the packages register in a group."""
    return sorted({point.name for point in entry_points(group=group)})


class Tokenizer:
    """Stands for one: every text is one token."""

    padding_side, pad_token = "right", "_"

    def __call__(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("input_ids", "attention_mask"), torch.ones(len(texts), 1))

    def batch_decode(self, tokens: torch.Tensor, **kwargs: Any) -> list[str]:
        return ["x"] * len(tokens)


def make_model(*, metrics: bool = True, generates: bool = False) -> ComposerClassifier:
    """A network for the images of `make_loader`."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    accuracy = MulticlassAccuracy(num_classes=2, average="micro")
    model = ComposerClassifier(network, num_classes=2, train_metrics=accuracy, val_metrics=accuracy)
    if not metrics:
        model.get_metrics = lambda is_train: {}  # type: ignore[method-assign]
    if generates:
        model.tokenizer, model.generate = Tokenizer(), lambda tokens, **_: tokens  # type: ignore[assignment]
    return model


def make_loader() -> DataLoader[Any]:
    """Two batches of two images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 4, 4, generator=generator)
    return DataLoader(TensorDataset(images, torch.tensor([0, 1, 1, 0])), batch_size=2)


def make_trainer(callbacks: Any, loggers: Any, *, model: dict[str, Any] | None = None, **kwargs: Any) -> Trainer:
    """A trainer for two epochs."""
    network = make_model(**(model or {}))
    arguments = {"max_duration": "2ep", "run_name": "watched", "progress_bar": False, "device": "cpu"} | kwargs
    return Trainer(
        model=network,
        optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
        train_dataloader=make_loader(),
        eval_dataloader=make_loader(),
        device_train_microbatch_size=1,
        callbacks=callbacks,
        loggers=loggers,
        **arguments,
    )


def _watchers() -> dict[str, Watcher]:
    from composer import callbacks as c

    def saved(folder: Path) -> str:
        """A checkpoint of a model as `make_model` makes it."""
        path = folder / "before.pt"
        trainer = make_trainer([], [], max_duration="1ba")
        trainer.save_checkpoint(str(path))
        trainer.close()
        return str(path)

    return {
        "ActivationMonitor": Watcher(
            lambda _: c.ActivationMonitor("1ep", only_log_wandb=False), "activations/l2_norm/module.0_input.0"
        ),
        "CheckpointSaver": Watcher(lambda folder: c.CheckpointSaver(str(folder / "saved"))),
        "EarlyStopper": Watcher(lambda _: c.EarlyStopper(LABEL, "train", patience=99)),
        "ExportForInferenceCallback": Watcher(
            lambda folder: c.ExportForInferenceCallback("torch_export", str(folder / "model.pt2"))
        ),
        "FreeOutputs": Watcher(lambda _: c.FreeOutputs(), model={"metrics": False}),
        "Generate": Watcher(
            lambda _: c.Generate(["a", "b"], "1ba", max_new_tokens=2), table="generations", model={"generates": True}
        ),
        "ImageVisualizer": Watcher(lambda _: c.ImageVisualizer("1ba"), image="Images/Train"),
        "LRMonitor": Watcher(lambda _: c.LRMonitor(), "lr-SGD/group0"),
        "LoadCheckpoint": Watcher(lambda folder: c.LoadCheckpoint(saved(folder), load_weights_only=True)),
        "MLPerfCallback": Watcher(lambda folder: c.MLPerfCallback(folder / "mlperf", 0, metric_name=LABEL)),
        "MemoryMonitor": Watcher(lambda _: c.MemoryMonitor()),
        "MemorySnapshot": Watcher(lambda _: c.MemorySnapshot()),
        "NaNMonitor": Watcher(lambda _: c.NaNMonitor()),
        "OOMObserver": Watcher(lambda _: c.OOMObserver()),
        "OptimizerMonitor": Watcher(lambda _: c.OptimizerMonitor(batch_log_interval=1), "l2_norm/grad/global"),
        "RuntimeEstimator": Watcher(lambda _: c.RuntimeEstimator(), "time/remaining_estimate"),
        "SpeedMonitor": Watcher(lambda _: c.SpeedMonitor(window_size=1), "throughput/samples_per_sec"),
        "SystemMetricsMonitor": Watcher(lambda _: c.SystemMetricsMonitor(), "cpu_percentage"),
        "ThresholdStopper": Watcher(lambda _: c.ThresholdStopper(LABEL, "train", 1.5)),
    }


def _file(folder: Path) -> Keeper:
    from composer.loggers import FileLogger

    path = folder / "log.txt"
    logger = FileLogger(str(path), capture_stdout=False, capture_stderr=False, append=True)
    return Keeper(logger, lambda name: f": {name}: " in path.read_text())


def _console(folder: Path) -> Keeper:
    from composer.loggers import ConsoleLogger

    stream = io.StringIO()
    return Keeper(ConsoleLogger(stream=stream), lambda name: f" {name}: " in stream.getvalue())


def _progress_bar(folder: Path) -> Keeper:
    from composer.loggers import ProgressBarLogger

    return Keeper(ProgressBarLogger(stream=io.StringIO()), None)


def _in_memory(folder: Path) -> Keeper:
    from composer.loggers import InMemoryLogger

    logger = InMemoryLogger()
    return Keeper(logger, lambda name: name in logger.data or name in logger.tables)


def _run_recorder(folder: Path) -> Keeper:
    from composer.loggers import RunRecorder

    def has(name: str) -> bool:
        return f'"{name}"' in (folder / "run-rank0.jsonl").read_text()

    return Keeper(RunRecorder(folder, on_error="raise"), has)


def _tensorboard(folder: Path) -> Keeper:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from composer.loggers import TensorboardLogger

    def has(name: str) -> bool:
        found = EventAccumulator(str(folder / "tb" / "watched"), size_guidance={"scalars": 0})
        found.Reload()
        tags = found.Tags()
        return any(tag.startswith(name) for kind in ("scalars", "images", "tensors") for tag in tags[kind])

    return Keeper(TensorboardLogger(str(folder / "tb")), has, images=True)


@cache
def _store(folder: Path) -> str:
    """The address of an MLflow store; to make one takes seconds."""
    return f"sqlite:///{folder}/mlflow.db"


def _mlflow(folder: Path) -> Keeper:
    from mlflow import MlflowClient

    from composer.loggers import MLFlowLogger

    experiment = folder.name
    store = _store(folder.parent)
    logger = MLFlowLogger(experiment, tracking_uri=store, log_system_metrics=False, on_error="raise")

    def has(name: str) -> bool:
        client = MlflowClient(store)
        found = client.get_experiment_by_name(experiment)
        assert found is not None
        [run] = client.search_runs([found.experiment_id])
        parent = name.rpartition("/")[0]
        artifacts = [entry.path for entry in client.list_artifacts(run.info.run_id, parent or None)]
        return name in run.data.metrics or any(path.startswith(name) for path in artifacts)

    return Keeper(logger, has, images=True)


def _wandb(folder: Path) -> Keeper:
    from composer.loggers import WandBLogger

    logger = WandBLogger("tests", init_kwargs={"mode": "offline", "dir": str(folder)}, on_error="raise")

    def has(name: str) -> bool:
        deadline = time.monotonic() + 30  # the process of W&B may still be writing
        while time.monotonic() < deadline:
            # Keys are plain text in these files, and a short run stays in the first block of 32 KiB.
            if any(name.encode() in file.read_bytes() for file in folder.glob("wandb/offline-run-*/*.wandb")):
                return True
            time.sleep(0.02)
        return False

    return Keeper(logger, has, images=True)


def _comet(folder: Path) -> Keeper:
    from composer.loggers import CometMLLogger

    os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # else the client patches torch when it is imported
    quiet = {"log_env_details": False, "auto_output_logging": False, "parse_args": False, "display_summary_level": 0}
    arguments = quiet | {"offline_directory": str(folder / "comet")}
    logger = CometMLLogger(offline=True, exp_kwargs=arguments, on_error="raise")

    def has(name: str) -> bool:
        archives = map(zipfile.ZipFile, folder.glob("comet/*.zip"))
        return any(f'"{name}'.encode() in archive.read("messages.json") for archive in archives)

    return Keeper(logger, has, images=True)


def _neptune(folder: Path) -> Keeper:
    from composer.loggers import NeptuneLogger

    quiet: dict[str, Any] = {"capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False}
    logger = NeptuneLogger(mode="offline", on_error="raise", source_files=[], **quiet)

    def has(name: str) -> bool:  # the client writes into the current folder
        path = json.dumps(name.split("/"))[1:-1]
        return any(path in file.read_text() for file in folder.glob(".neptune/offline/*/data-*.log"))

    return Keeper(logger, has, images=True, tables=False)


def _slack(folder: Path) -> Keeper:
    from composer.loggers import SlackLogger

    posted: list[str] = []
    logger = SlackLogger(slack_logging_api_key="token", channel_id="channel")
    logger.client.chat_postMessage = lambda text, **_: posted.append(text)
    return Keeper(logger, lambda name: any(f"{name}: " in text for text in posted), tables=False)


def _mosaicml(folder: Path) -> Keeper:
    from composer.loggers import MosaicMLLogger

    return Keeper(MosaicMLLogger(), None)  # does nothing outside of the platform


def _remote(folder: Path) -> Keeper:
    from composer.loggers import RemoteUploaderDownloader

    (folder / "stores" / "bucket").mkdir(parents=True, exist_ok=True)
    local = {"provider": "local", "provider_kwargs": {"key": str(folder / "stores")}}
    return Keeper(RemoteUploaderDownloader("libcloud://bucket", local, use_procs=False), None)  # it keeps files only


WATCHERS = _watchers()
KEEPERS: dict[str, Callable[[Path], Keeper]] = {
    "CometMLLogger": _comet,
    "ConsoleLogger": _console,
    "FileLogger": _file,
    "InMemoryLogger": _in_memory,
    "MLFlowLogger": _mlflow,
    "MosaicMLLogger": _mosaicml,
    "NeptuneLogger": _neptune,
    "ProgressBarLogger": _progress_bar,
    "RemoteUploaderDownloader": _remote,
    "RunRecorder": _run_recorder,
    "SlackLogger": _slack,
    "TensorboardLogger": _tensorboard,
    "WandBLogger": _wandb,
}
