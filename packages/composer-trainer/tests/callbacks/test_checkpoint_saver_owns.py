"""A run writes and removes only its own checkpoints, whatever the files it loads say."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import MakeTrainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_runs import StopAt, names

from composer.callbacks import CheckpointSaver
from composer.checkpoint import read_checkpoint
from composer.core import Callback, State, Timestamp
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, run_on_ranks
from composer.utils import dist

NAMES, FOLDERS = ["first", "second"], ["a", "b", "c"]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of all files, and the targets of all links, by their names."""
    entries = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    return {
        name: str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for name, path in entries.items()
    }


def checkpoints(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith("ep")]


@pytest.fixture
def pretrained(make_trainer: MakeTrainer, tmp_path: Path) -> Path:
    """The folder of a finished run with three checkpoints."""
    trainer = make_trainer(
        run_name="pretrain",
        save_folder=tmp_path / "a",
        max_duration="3ep",
        save_num_checkpoints_to_keep=2,
        save_num_best_checkpoints_to_keep=1,
        save_monitor="loss/train/total",
    )
    trainer.fit()
    return tmp_path / "a"


@pytest.mark.parametrize("keep", [1, 3])
def test_a_run_that_starts_from_a_checkpoint_of_another_leaves_it_alone(
    make_trainer: MakeTrainer, pretrained: Path, tmp_path: Path, keep: int
) -> None:
    before = snapshot(pretrained)
    for name in sorted(before):
        if name.startswith("ep"):
            finetune = make_trainer(
                run_name=f"finetune-{name}",
                save_folder=tmp_path / f"b-{name}",
                load_path=pretrained / name,
                max_duration="7ep",
                save_num_checkpoints_to_keep=keep,
                save_num_best_checkpoints_to_keep=1,
                save_monitor="loss/train/total",
            )
            finetune.fit()
            own = checkpoints(tmp_path / f"b-{name}")
            assert keep <= len(own) <= keep + 1
            assert (tmp_path / f"b-{name}" / "best-rank0.pt").resolve().name in own

    assert before == snapshot(pretrained)


def test_a_copied_folder_is_continued_without_the_original(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(folder: str, duration: str, *callbacks: Any) -> Any:
        options = {"save_num_checkpoints_to_keep": 2, "autoresume": True, "run_name": "run"}
        return make_trainer(
            save_folder=tmp_path / folder, max_duration=duration, callbacks=callbacks, save_interval="2ba", **options
        )

    trainer("original", "2ep").fit()
    shutil.copytree(tmp_path / "original", tmp_path / "fork", symlinks=True)
    shutil.copytree(tmp_path / "original", tmp_path / "moved", symlinks=True)
    before = snapshot(tmp_path / "original")
    trainer("fork", "4ep").fit()
    assert before == snapshot(tmp_path / "original")
    assert ["ep3-ba14-rank0.pt", "ep3-ba16-rank0.pt"] == checkpoints(tmp_path / "fork")

    shutil.rmtree(tmp_path / "original")
    resumed = trainer("moved", "3ep", StopAt(9))
    with pytest.raises(InterruptedError):
        resumed.fit()
    assert [str(tmp_path / "moved" / name) for name in checkpoints(tmp_path / "moved")] == resumed.saved_checkpoints
    trainer("moved", "4ep").fit()
    assert ["ep3-ba14-rank0.pt", "ep3-ba16-rank0.pt"] == checkpoints(tmp_path / "moved")


@pytest.mark.parametrize("autoresume", [False, True])
def test_no_path_in_a_checkpoint_is_removed_or_linked_to(
    make_trainer: MakeTrainer, tmp_path: Path, autoresume: bool
) -> None:
    victims = [tmp_path / "thesis.txt", tmp_path / "photos"]
    victims[0].write_text("years of work")
    victims[1].mkdir()
    (victims[1] / "a.png").write_text("a picture")

    class Forged(CheckpointSaver):
        def state_dict(self) -> dict[str, Any]:
            paths = [*map(str, victims), "../thesis.txt", f"{tmp_path}/run/../thesis.txt"]
            values = dict.fromkeys(paths, 1.0)
            return {
                "all_saved_checkpoints_to_timestamp": [(path, Timestamp().state_dict()) for path in paths],
                "best": {"monitor": "loss/train/total", "values": values},
            }

    Forged.__name__ = Forged.__qualname__ = "CheckpointSaver"
    folder = tmp_path / "run"
    make_trainer(run_name="run", callbacks=Forged(folder), max_duration="1ep").fit()
    loaded = {"autoresume": True} if autoresume else {"load_path": folder / "ep1-ba4-rank0.pt"}
    make_trainer(
        run_name="run",
        save_folder=folder,
        max_duration="3ep",
        save_num_checkpoints_to_keep=1,
        save_num_best_checkpoints_to_keep=1,
        save_monitor="loss/train/total",
        save_monitor_mode="max",
        **loaded,
    ).fit()

    assert ["years of work", "a picture"] == [victims[0].read_text(), (victims[1] / "a.png").read_text()]
    assert "ep1-ba4-rank0.pt" not in checkpoints(folder), "the run's own checkpoint is rotated out"
    assert (folder / "best-rank0.pt").resolve().parent == folder.resolve()


def test_a_link_under_the_name_of_a_checkpoint_is_not_followed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(folder: str, duration: str, **options: Any) -> Any:
        names = {"save_filename": "ep{epoch}/rank{rank}.pt", "run_name": "run"}
        return make_trainer(save_folder=tmp_path / folder, max_duration=duration, **names, **options)

    trainer("a", "1ep").fit()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ep1").symlink_to(tmp_path / "a" / "ep1")
    before = snapshot(tmp_path / "a")
    trainer("b", "3ep", load_path=tmp_path / "a" / "ep1" / "rank0.pt", save_num_checkpoints_to_keep=1).fit()

    assert before == snapshot(tmp_path / "a")
    assert ["ep1", "ep3"] == sorted(path.parent.name for path in (tmp_path / "b").glob("*/*.pt"))


steps = st.one_of(
    st.fixed_dictionaries(
        {
            "folder": st.sampled_from(FOLDERS),
            "run_name": st.sampled_from(NAMES),
            "load": st.one_of(st.none(), st.integers(0, 20)),
            "keep": st.sampled_from([0, 1, 2, -1]),
            "autoresume": st.booleans(),
            "overwrite": st.booleans(),
        }
    ),
    st.tuples(st.sampled_from(["copy", "move"]), st.sampled_from(FOLDERS), st.sampled_from(FOLDERS)),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=3, max_size=6))
def test_no_sequence_of_runs_copies_and_moves_changes_files_of_another_run(
    make_trainer: MakeTrainer, program: list[Any]
) -> None:
    """Files outside of the folder of a run stay, and so do those in it that another run has saved."""
    with TemporaryDirectory() as directory:
        top, epochs = Path(directory), 0
        for step in program:
            if isinstance(step, tuple):
                verb, source, target = step[0], top / step[1], top / step[2]
                if source.is_dir() and source != target:
                    shutil.rmtree(target, ignore_errors=True)
                    transfer: Callable[..., Any] = shutil.move if verb == "move" else shutil.copytree
                    transfer(source, target, **({} if verb == "move" else {"symlinks": True}))
                continue
            folder, epochs = top / step["folder"], epochs + 1
            files = sorted(path for path in top.glob("*/ep*.pt"))
            loaded = {} if step["load"] is None or not files else {"load_path": files[step["load"] % len(files)]}
            before, owners = snapshot(top), {str(path.relative_to(top)): run_of(path) for path in files}
            try:
                make_trainer(
                    train_dataloader=make_trainer.loader(2, 1),
                    run_name=step["run_name"],
                    save_folder=folder,
                    save_interval="1ba",
                    save_num_checkpoints_to_keep=step["keep"],
                    save_overwrite=step["overwrite"],
                    autoresume=step["autoresume"],
                    max_duration=f"{epochs}ep",
                    **loaded,
                ).fit()
            except (FileExistsError, ValueError):
                pass  # refused
            finally:
                for trainer in make_trainer.made:
                    trainer.close()
                make_trainer.made.clear()
            after = snapshot(top)
            for name, content in before.items():
                inside = name.startswith(f"{step['folder']}/")
                replaced = step["overwrite"] and inside
                if not inside or (owners.get(name, step["run_name"]) != step["run_name"] and not replaced):
                    assert content == after.get(name), name


def run_of(path: Path) -> str:
    return str(torch.load(path, weights_only=True)["state"]["run_name"])


def test_a_disk_without_links_gets_a_text_file_that_is_followed(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def trainer(duration: str, **options: Any) -> Any:
        return make_trainer(max_duration=duration, run_name="run", **options)

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    saving = {"save_folder": tmp_path, "save_num_checkpoints_to_keep": 1, "autoresume": True}
    told = r"without symbolic links.*'latest-rank0.pt.symlink' names"
    with pytest.warns(UserWarning, match=told):
        trainer("2ep", **saving).fit()
    resumed = trainer("3ep", **saving)
    assert 8 == resumed.state.timestamp.batch.value
    with pytest.warns(UserWarning, match=told):
        resumed.fit()

    assert ["ep3-ba12-rank0.pt", "latest-rank0.pt.symlink"] == names(tmp_path)
    started = trainer("4ep", load_path=tmp_path / "latest-rank{rank}.pt")
    assert 12 == started.state.timestamp.batch.value
    assert 12 == read_checkpoint(tmp_path / "latest-rank0.pt")["state"]["timestamp"]["Timestamp"]["batch"]


def _stop_alone(folder: str) -> list[list[str]]:
    class Stop(Callback):
        def __init__(self, batch: int) -> None:
            self.batch = batch

        def batch_end(self, state: State, logger: Logger) -> None:
            if dist.get_global_rank() == 1 and state.timestamp.batch == self.batch:
                state.stop_training()

    make, saved = MakeTrainer(), []
    for batch in (3, 4):
        loader = make.loader(64, sampler=dist.get_sampler(RandomClassificationDataset(size=64)))
        own = f"{folder}/{batch}"
        make(train_dataloader=loader, callbacks=Stop(batch), save_folder=own, save_interval="2ba").fit()
        saved.append(checkpoints(Path(own)))
    return saved


def test_ranks_save_the_end_together_if_one_of_them_stops(tmp_path: Path) -> None:
    (first, _) = run_on_ranks(_stop_alone, 2, str(tmp_path))

    assert [["ep0-ba2-rank0.pt", "ep0-ba3-rank0.pt"], ["ep0-ba2-rank0.pt", "ep0-ba4-rank0.pt"]] == first
