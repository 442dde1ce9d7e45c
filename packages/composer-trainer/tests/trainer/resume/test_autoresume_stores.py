"""A relaunched run finds its checkpoints in a store under any name, and tells damage from stores that fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import MakeTrainer

from composer.checkpoint import read_checkpoint
from composer.checkpoint import storage as stores
from composer.checkpoint.storage import StorageError, storage_of
from composer.testing import deep_compare


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.Storage.__init__, "__defaults__", (3, 0.01))


@pytest.fixture
def store() -> str:
    return f"memory://{secrets.token_hex(4)}"


def launch(make_trainer: MakeTrainer, folder: str, filename: str, duration: str = "2ba", **kwargs: Any) -> Any:
    arguments = {"save_folder": folder, "run_name": "run", "autoresume": True, "save_interval": "1ba", **kwargs}
    return make_trainer(save_filename=filename, max_duration=duration, load_progress_bar=False, **arguments)


def run(*arguments: Any, **kwargs: Any) -> None:
    trainer = launch(*arguments, **kwargs)
    trainer.fit()
    trainer.close()


@pytest.mark.parametrize(
    ("before", "now"),
    [("x{batch}.pt", "ep{epoch}.pt"), ("ba{batch}.pt.gz", "ba{batch}.pt"), ("x{batch}.pt", "in/ba{batch}.pt")],
)
def test_checkpoints_with_another_name_are_found(make_trainer: MakeTrainer, store: str, before: str, now: str) -> None:
    run(make_trainer, f"{store}/{{run_name}}", before)
    storage_of(f"{store}/run").write_text("notes.txt", "no checkpoint")
    storage_of(f"{store}/run").write_text("empty.pt", "")
    second = launch(make_trainer, f"{store}/{{run_name}}", now, "4ba")
    assert 2 == second.state.timestamp.batch
    second.fit()
    second.close()

    assert 4 == launch(make_trainer, f"{store}/{{run_name}}", before, "4ba").state.timestamp.batch


def test_messages_do_not_show_a_password(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = f"memory://me:secret@{secrets.token_hex(4)}/run"
    run(make_trainer, folder, "ba{batch}.pt")
    store = storage_of(folder)
    store.write_text("ba3.pt", "damaged")
    caplog.set_level(0)
    with pytest.warns(UserWarning, match=r"me:\.\.\.@.*ba3.pt' is damaged") as caught:
        run(make_trainer, folder, "ba{batch}.pt", "4ba", progress_bar=True, console_stream="stderr")

    shown = capsys.readouterr().err
    assert "loaded from memory://me:...@" in shown
    texts = [str(warning.message) for warning in caught] + [each for each in caplog.messages if "memory://" in each]
    assert [text for text in [shown, *texts] if "secret" in text] == []


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # what `save` of older torch causes itself
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("remote", [False, True])
def test_shards_of_another_trainer_are_found(
    make_trainer: MakeTrainer, tmp_path: Path, store: str, remote: bool
) -> None:
    """MosaicML's Composer writes an index of all values, and no `composer_states.pt`."""
    run(make_trainer, str(tmp_path / "saved"), "x{batch}.pt")
    content = read_checkpoint(tmp_path / "saved" / "x2.pt")
    for name, batch in (("ep0-ba1", 1), ("ep1-ba2", 2)):
        content["state"]["timestamp"]["Timestamp"]["batch"] = batch
        dcp.save({key: content[key] for key in ("state", "rng")}, checkpoint_id=tmp_path / "run" / name)
    (tmp_path / "run" / "ep1-ba3").mkdir()
    dcp.save({"state/model/weight": torch.ones(2)}, checkpoint_id=tmp_path / "run" / "ep1-ba3")  # ours, incomplete
    folder = str(tmp_path / "run")
    if remote:
        folder = f"{store}/run"
        for file in (tmp_path / "run").rglob("*"):
            if file.is_file():
                storage_of(folder).upload(file, str(file.relative_to(tmp_path / "run")))

    resumed = launch(make_trainer, folder, "x{batch}.pt", "4ba")
    deep_compare(dict(resumed.state.model.state_dict()), content["state"]["model"])
    assert 2 == resumed.state.timestamp.batch
    resumed.fit()
    resumed.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_damaged_index_beside_the_checkpoints_is_told(make_trainer: MakeTrainer, store: str) -> None:
    run(make_trainer, f"{store}/run", "x{batch}.pt")
    storage_of(f"{store}/run").write_text("ep9-ba9/.metadata", "torn")
    with pytest.warns(UserWarning, match="ep9-ba9' is damaged"):
        assert 2 == launch(make_trainer, f"{store}/run", "x{batch}.pt", "4ba").state.timestamp.batch


def test_other_runs_files_are_left_alone(make_trainer: MakeTrainer, store: str) -> None:
    run(make_trainer, store, "x{batch}.pt", run_name="other")

    own = launch(make_trainer, store, "ep{epoch}.pt", save_latest_filename="own")
    assert 0 == own.state.timestamp.batch


def test_a_run_whose_renamed_checkpoints_are_all_damaged_does_not_begin_anew(
    make_trainer: MakeTrainer, store: str, tmp_path: Path
) -> None:
    run(make_trainer, store, "x{batch}.pt")
    for name in ("x1.pt", "x2.pt"):
        storage_of(store).download(name, tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2000])
        storage_of(store).upload(tmp_path / name, name)

    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RuntimeError) as caught:
        launch(make_trainer, store, "ep{epoch}.pt")
    assert all(text in str(caught.value) for text in ("x2.pt", "autoresume=False"))


@contextmanager
def failing(server: Any, status: int, fails: Callable[[dict[str, str]], bool]) -> Iterator[None]:
    """Have a server of S3 answer some requests with an error."""
    works = server._server.app

    def answer(environ: dict[str, str], start_response: Any) -> Any:
        if not fails(environ):
            return works(environ, start_response)
        start_response(f"{status} failing", [("Content-Length", "0")])
        return [b""]

    server._server.app = answer
    try:
        yield
    finally:
        server._server.app = works


@pytest.mark.parametrize(("what", "status"), [("list", 500), ("read", 503)])
def test_a_server_with_errors_of_its_own_is_an_error_rather_than_no_checkpoint_or_a_damaged_one(
    make_trainer: MakeTrainer, s3: str, s3_server: Any, status: int, what: str
) -> None:
    pytest.importorskip("s3fs")
    run(make_trainer, f"{s3}/run", "ba{batch}.pt")

    def fails(environ: dict[str, str]) -> bool:
        return "list-type" in environ["QUERY_STRING"]

    with failing(s3_server, 503, fails), pytest.raises(StorageError, match="Check the network and that the store"):
        launch(make_trainer, f"{s3}/run", "ba{batch}.pt")

    assert 2 == launch(make_trainer, f"{s3}/run", "ba{batch}.pt").state.timestamp.batch
