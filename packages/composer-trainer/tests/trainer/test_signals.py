"""SIGTERM and SIGINT during `fit`: the batch is finished and saved; a second signal ends at once."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel, deep_compare, run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

MakeTrainer = Any  # the fixture's class, in conftest.py


class Send(Callback):
    """Sends this process signals in the middle of a batch."""

    def __init__(self, batch: int, *numbers: int) -> None:
        self.batch, self.numbers = batch, numbers

    def after_loss(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(0)  # handlers run between two instructions


class SendAtEnd(Callback):
    """Sends this process a signal after the last batch, as in a long evaluation."""

    def fit_end(self, state: State, logger: Logger) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def saving(make_trainer: MakeTrainer, folder: Path, *callbacks: Callback, **kwargs: Any) -> Any:
    return make_trainer(
        callbacks=callbacks,
        train_dataloader=make_trainer.loader(shuffle=True),
        save_folder=folder,
        autoresume=True,
        run_name="run",
        **kwargs,
    )


def test_a_signal_after_the_last_batch_is_not_lost(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(callbacks=SendAtEnd())
    with pytest.raises(SystemExit) as caught:
        trainer.fit()
    assert caught.value.code == 143


@pytest.mark.parametrize(
    ("number", "error", "status"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)]
)
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: int,
    error: type[BaseException],
    status: int | None,
) -> None:
    before = signal.getsignal(number)
    trainer = saving(make_trainer, tmp_path / "run", Send(5, number), progress_bar=True)
    with pytest.raises(error) as caught:
        trainer.fit()
    assert getattr(caught.value, "code", None) == status
    assert signal.getsignal(number) is before
    assert trainer.state.timestamp.batch == 6
    assert os.path.basename(trainer.saved_checkpoints[-1]) == "ep1-ba6-rank0.pt"
    said = capsys.readouterr().err
    assert signal.Signals(number).name in said
    assert "ep1-ba6-rank0.pt" in said
    resumed = saving(make_trainer, tmp_path / "run")
    assert resumed.state.timestamp.batch == 6
    resumed.fit()
    whole = saving(make_trainer, tmp_path / "whole")
    whole.fit()

    deep_compare(resumed.state.model.state_dict(), whole.state.model.state_dict())


def test_what_is_written_in_the_background_is_waited_for(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = saving(make_trainer, tmp_path, Send(2, signal.SIGTERM), save_async=True)
    with pytest.raises(SystemExit):
        trainer.fit()

    assert "ep0-ba3-rank0.pt" in os.listdir(tmp_path)


def test_without_a_folder_the_user_is_told(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_trainer(callbacks=Send(1, signal.SIGTERM), progress_bar=True).fit()
    told = capsys.readouterr().err

    assert "SIGTERM: the batch is finished first; nothing is saved. Send it again to end immediately." in told
    assert "Nothing is saved, because the run has no `save_folder`." in told


def test_with_a_folder_the_user_is_told_of_the_save(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        saving(make_trainer, tmp_path, Send(1, signal.SIGTERM)).fit()

    assert "SIGTERM: the batch is finished and saved first. Send it again" in capsys.readouterr().err


def test_the_last_message_has_a_line_of_its_own_beside_a_bar(make_trainer: MakeTrainer) -> None:
    terminal = Terminal()
    with pytest.raises(SystemExit):
        make_trainer(callbacks=Send(3, signal.SIGTERM), progress_bar=True, console_stream=terminal).fit()
    before, after = terminal.getvalue().split("SIGTERM: the run ends after batch 4.")

    assert before.endswith("\r")  # the bar is wiped
    assert after.startswith(" Nothing is saved, because the run has no `save_folder`.\n")


def saved_in(folder: Path) -> list[str]:
    """List the checkpoints; a process that is ended at once leaves the files of its lease."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".composer"))


def test_a_second_interrupt_leaves_at_once(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = saving(make_trainer, tmp_path, Send(2, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()

    assert trainer.state.timestamp.batch == 2
    assert saved_in(tmp_path) == []


def leave_at_once(folder: Path) -> None:
    model = SimpleModel()
    loader = torch.utils.data.DataLoader(RandomClassificationDataset(size=16), batch_size=4)
    Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=Send(2, signal.SIGTERM, signal.SIGTERM),
        save_folder=folder,
        progress_bar=False,
        device="cpu",
    ).fit()


def test_a_second_termination_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code -15"):
        run_on_ranks(leave_at_once, 1, tmp_path, backend=None)
    assert saved_in(tmp_path) == []


def test_the_programs_own_handler_is_called_and_put_back(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    calls: list[int] = []

    def own(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit):
            saving(make_trainer, tmp_path, Send(2, signal.SIGTERM)).fit()
        assert calls == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = saving(make_trainer, tmp_path, Send(2, signal.SIGINT))
        trainer.fit()
        assert trainer.state.timestamp.batch == 8
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_installs_nothing(make_trainer: MakeTrainer) -> None:
    handlers: list[Any] = []

    class Look(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(callbacks=Look())
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join()

    assert handlers == [before] * 8


def test_importing_installs_nothing() -> None:
    # Only `fit` does: programs import this library in threads, too.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def leave_together(folder: Path) -> tuple[int, int, list[str]]:
    """Rank 1 is asked to end; rank 0 is not."""
    data = RandomClassificationDataset(size=32)
    model = SimpleModel()
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=4, sampler=dist.get_sampler(data)),
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=Send(2, *([signal.SIGTERM] if dist.get_global_rank() == 1 else [])),
        save_folder=folder,
        progress_bar=False,
        device="cpu",
    )
    try:
        trainer.fit()
    except SystemExit as left:
        return int(str(left.code)), trainer.state.timestamp.batch.value, trainer.saved_checkpoints
    return 0, trainer.state.timestamp.batch.value, trainer.saved_checkpoints


def test_all_ranks_leave_when_one_is_asked_to(tmp_path: Path) -> None:
    first, second = run_on_ranks(leave_together, 2, tmp_path)

    assert first[:2] == second[:2] == (143, 3)
    assert [os.path.basename(path) for path in first[2]] == ["ep0-ba3-rank0.pt"]
    assert saved_in(tmp_path) == ["ep0-ba3-rank0.pt", "latest-rank0.pt"]
