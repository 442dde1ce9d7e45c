"""Programs written for MosaicML's Composer rely on more than names and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import composer.trainer.trainer as trainer_module
from composer.core import Event
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.trainer import Trainer


def test_a_mock_of_a_logger_is_used(make_trainer: Any, tmp_path: Path) -> None:
    logger = MagicMock(spec=LoggerDestination)
    logger.can_upload_files.return_value = False
    logger.state_dict.return_value = {}
    trainer = make_trainer(loggers=[logger], save_folder=tmp_path)
    trainer.fit()

    assert any("loss/train/total" in call.args[0] for call in logger.log_metrics.call_args_list)
    events = [call.args[0] for call in logger.run_event.call_args_list]
    assert events[0] is Event.INIT
    assert Event.FIT_END in events
    assert trainer.saved_checkpoints


def test_hyperparameters_are_those_of_the_reference(make_trainer: Any) -> None:
    made = make_trainer(auto_log_hparams=True, seed=3, device="cpu").local_hparams
    added = {"is_model_compiled": False, "auto_microbatching": False, "num_optimizers": 1, "rank_zero_seed": 3}

    assert added.items() <= made.items()
    assert not {"loss", "save_async", "delivery_timeout", "compile_step"} & made.keys()
    assert {"save_num_checkpoints_to_keep", "load_path", "algorithm_passes"} <= made.keys()
    assert make_trainer(auto_log_hparams=True, delivery_timeout=5.0).local_hparams["delivery_timeout"] == 5.0


def test_fit_compiles_when_told(make_trainer: Any) -> None:
    log = InMemoryLogger()
    trainer = make_trainer(auto_log_hparams=True, loggers=[log], seed=3)
    plain = make_trainer(seed=3)
    trainer.fit(compile_config={"backend": "eager"})
    plain.fit()

    assert trainer.state.model._compiled_call_impl is not None
    assert trainer.local_hparams["is_model_compiled"] is True
    assert log.hyperparameters["is_model_compiled"] is True
    for own, other in zip(trainer.state.model.parameters(), plain.state.model.parameters(), strict=True):
        assert torch.equal(own, other)
    with pytest.raises(ValueError, match=r"must hold arguments of `torch\.compile`"):
        trainer.fit(duration="1ep", compile_config={"back_end": "eager"})


def test_loaded_generators_wait_until_fit(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path, run_name="run").fit()
    trainer = make_trainer(load_path=tmp_path / "latest-rank0.pt", max_duration="3ep")
    waiting = trainer._rng_state

    assert waiting is not None
    assert {"python", "numpy", "torch"} <= waiting[0].keys()
    assert trainer._train_data_spec.dataloader is trainer.state.train_dataloader
    trainer.fit()
    assert trainer._rng_state is None


def test_the_module_of_checkpoints_may_be_patched(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(save_folder=tmp_path, run_name="run").fit()
    loaded: list[Any] = []

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(path)
        return original(path, *args, **kwargs)

    original = trainer_module.checkpoint.load_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setattr(trainer_module.checkpoint, "load_checkpoint", load)  # type: ignore[attr-defined]
    make_trainer(load_path=tmp_path / "latest-rank0.pt")

    assert loaded == [str(tmp_path / "latest-rank0.pt")]


def test_saved_metadata_are_those_of_the_state(make_trainer: Any, tmp_path: Path) -> None:
    trainer: Trainer = make_trainer(save_folder=tmp_path)
    trainer.fit()
    saved = torch.load(tmp_path / "latest-rank0.pt", weights_only=False)

    assert saved["state"]["metadata"] == trainer.state._get_state_metadata()
    assert saved["has_checksum"] is True


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")  # torchmetrics warns, too
def test_an_evaluation_without_batches_warns_and_goes_on(make_trainer: Any) -> None:
    trainer = make_trainer(eval_dataloader=[])
    with pytest.warns(UserWarning, match="No batches were evaluated for global rank 0"):
        trainer.fit()

    assert trainer.state.timestamp.epoch == trainer.state.max_duration
