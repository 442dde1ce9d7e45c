"""Exporting the model of a run: by the Trainer, and by a callback at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exporting import assert_same, expected, loaded

import composer.callbacks
from composer.callbacks.export_for_inference import ExportForInferenceCallback
from composer.loggers import LoggerDestination
from composer.testing import run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
CAN_SHARD_ON_CPU = hasattr(torch.cpu.Stream, "record_event")

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*torch.jit.*is deprecated")  # reading TorchScript

IMAGES = torch.randn(7, 1, 1, 1)


class Kept(LoggerDestination):
    """Stores files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files[remote_file_name] = file_path.read_bytes()


def test_the_trainer_exports_with_the_last_batch(make_trainer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    kept = Kept()
    trainer = make_trainer(loggers=kept, run_name="run")
    with pytest.raises(ValueError, match="`sample_input` must be given"):
        trainer.export_for_inference("torch_export", "model.pt2")
    trainer.fit()
    trainer.export_for_inference("torch_export", "{run_name}/model.pt2", output_names=["scores"])

    found = loaded(Path("run/model.pt2"))(IMAGES)
    assert_same(found["scores"], expected(trainer.state.model, (IMAGES, None)), depth=5)
    assert list(kept.files) == ["run/model.pt2"]
    assert trainer.state.model.training
    assert trainer.state.model.logger is trainer.logger


@pytest.mark.parametrize("save_format", ["torch_export", "torchscript"])
def test_the_callback_exports_at_the_end_of_each_fit(make_trainer: Any, tmp_path: Path, save_format: str) -> None:
    path = tmp_path / "model.pt2"
    callback = composer.callbacks.ExportForInferenceCallback(save_format, path)
    trainer = make_trainer(callbacks=callback)
    seen = []
    for _ in range(2):
        trainer.fit(duration="1ep")
        wanted = expected(trainer.state.model, (IMAGES, torch.zeros(7)))
        if save_format == "torchscript":
            found = torch.jit.load(path)((IMAGES, torch.zeros(7)))
        else:
            found = loaded(path)(IMAGES)
        assert_same(found, wanted, depth=5)
        seen.append(wanted)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("given", [None, "a batch"])
def test_arguments_of_the_callback_reach_the_export(make_trainer: Any, given: Any) -> None:
    callback = ExportForInferenceCallback("torch_export", "m.pt2", None, given, None, ["x"], ["y"])
    trainer = make_trainer(callbacks=callback)
    with patch("composer.callbacks.export_for_inference.export_with_logger") as export:
        trainer.fit()
    images, targets = next(iter(trainer.state.train_dataloader))
    if given is None:  # the first batch
        sample = export.call_args.kwargs["sample_input"]
        assert torch.equal(sample[0][0], images)
        assert torch.equal(sample[0][1], targets)
        given = sample[0]

    export.assert_called_once_with(
        model=trainer.state.model,
        save_format="torch_export",
        save_path="m.pt2",
        logger=trainer.logger,
        save_object_store=None,
        sample_input=(given, {}),
        transforms=None,
        input_names=["x"],
        output_names=["y"],
    )


def test_a_callback_that_could_not_export_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"`save_path` must end in '\.pt2'"):
        ExportForInferenceCallback("torch_export", "model.pth")
    with pytest.raises(ValueError, match="must be one of"):
        ExportForInferenceCallback("pickle", "model.pkl")


def fit_on_ranks(folder: str) -> list[str]:
    from composer.testing import RandomClassificationDataset, SimpleModel

    data = RandomClassificationDataset(size=16)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.get_sampler(data))
    for sharding in (None, {"fsdp": {}}) if CAN_SHARD_ON_CPU else (None,):
        model = SimpleModel()
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration="1ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=ExportForInferenceCallback("torch_export", f"{folder}/model.pt2"),
            parallelism_config=sharding,
            progress_bar=False,
            device="cpu",
        )
        if sharding is None:
            trainer.fit()
            continue
        with pytest.raises(ValueError, match=r"parameters are sharded across ranks"):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0  # nothing was trained in vain
    return [file.name for file in Path(folder).iterdir()]


def test_several_ranks_export_one_file_and_sharded_models_are_refused_at_the_start(tmp_path: Path) -> None:
    run_on_ranks(fit_on_ranks, 2, str(tmp_path))

    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    assert loaded(tmp_path / "model.pt2")(IMAGES).shape == (7, 2)
