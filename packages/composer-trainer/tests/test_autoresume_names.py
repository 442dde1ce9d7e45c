"""A relaunched run finds its checkpoints whatever they are called, and never begins anew without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTrainer


def launch(make_trainer: MakeTrainer, folder: Path, filename: str, duration: str = "2ba", **kwargs: Any) -> Any:
    arguments = {"save_folder": folder, "run_name": "run", "autoresume": True, "save_interval": "1ba", **kwargs}
    return make_trainer(save_filename=filename, max_duration=duration, **arguments)


@pytest.mark.parametrize(
    ("before", "now"),
    [("x{batch}.pt", "ep{epoch}.pt"), ("ep{epoch}-ba{batch}.tar.gz", "ep{epoch}-ba{batch}.pt"),
     ("ba{batch}.pt", "ba{batch}.pt.gz"), ("x{batch}.pt", "in/ba{batch}.pt")],
)  # fmt: skip
def test_checkpoints_with_another_name_are_found(
    make_trainer: MakeTrainer, tmp_path: Path, before: str, now: str
) -> None:
    first = launch(make_trainer, tmp_path, before)
    first.fit()
    first.close()
    (tmp_path / "notes.txt").write_text("no checkpoint")
    second = launch(make_trainer, tmp_path, now, "4ba")
    assert second.state.timestamp.batch == 2
    second.fit()
    second.close()

    assert launch(make_trainer, tmp_path, before, "4ba").state.timestamp.batch == 4  # the newest of both names


def test_other_runs_files_are_left_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    other = launch(make_trainer, tmp_path, "x{batch}.pt", run_name="other")
    other.fit()
    other.close()

    assert launch(make_trainer, tmp_path, "ep{epoch}.pt", save_latest_filename="own").state.timestamp.batch == 0


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    first = launch(make_trainer, tmp_path, "ba{batch}.pt")
    first.fit()
    first.close()
    (tmp_path / "ba1.pt").write_bytes(b"")
    (tmp_path / "ba2.pt").unlink()
    (tmp_path / "ba2.pt").symlink_to("ba2.pt")  # leads to itself

    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RuntimeError) as caught:
        launch(make_trainer, tmp_path, "ba{batch}.pt")
    assert all(text in str(caught.value) for text in ("ba1.pt", "it is empty", "ba2.pt", "autoresume=False"))
