from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb

import composer.loggers
from composer.core import Event
from composer.loggers import DeferredValue
from composer.loggers.wandb_logger import WandBLogger


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="WandBLogger")

    assert WandBLogger is point.load() is composer.loggers.WandBLogger


def test_a_run_is_read_back_as_logged(start: Any, stored: Any, offline: Any) -> None:
    logger = WandBLogger(**offline, group="g", tags=["a", "b"], entity="team")
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1, "sizes": [1, 2], "object": torch.nn.Identity(), "nothing": None})
    run.fit()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.curve("accuracy")
    assert [(n, n) for n in range(5)] == found.curve("time/batch")
    assert {"lr": 0.1, "sizes": [1, 2], "nothing": None}.items() <= found.config.items()
    assert ("my-run", "g", "tests", "team") == (
        found.run.display_name,
        found.run.run_group,
        found.run.project,
        found.run.entity,
    )
    assert ["a", "b"] == list(found.run.tags)
    assert [0] == found.exit_codes
    assert logger.run_dir is not None
    assert Path(logger.run_dir).is_dir()
    assert logger.run_url is None


def test_arguments_of_wandb_win(start: Any, stored: Any, offline: Any) -> None:
    offline["init_kwargs"] |= {"name": "mine", "group": "theirs"}
    start(WandBLogger(**offline, name="other", group="g")).close()

    [found] = stored()
    assert ("mine", "theirs") == (found.run.display_name, found.run.run_group)


def test_all_kinds_of_values(start: Any, stored: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    values = {
        "int": (3, 3),
        "bool": (True, True),
        "bf16": (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        "numpy": (np.float64(0.25), 0.25),
        "text": ("a", "a"),
        "strange: #?* {key}": (1.5, 1.5),
        "nan": (torch.tensor(float("nan")), "NaN"),
        "infinite": (float("inf"), "Infinity"),
    }
    run.logger.log_metrics({key: value for key, (value, _) in values.items()})
    run.logger.log_metrics({"confusion": torch.tensor([[3, 0], [1, 2]]), "nested": {"a": 1}})
    run.close()

    [row] = stored()[0].history
    for key, (_, expected) in values.items():
        assert expected == row[key] or str(expected).lower()[:3] == str(row[key]).lower()[:3], key
    assert ("table-file", 2, 2) == tuple(row["confusion"][key] for key in ("_type", "nrows", "ncols"))
    assert 1 == row["nested/a"]


def test_one_bad_value_costs_its_step_only(start: Any, stored: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    run.logger.log_metrics({"a": 1}, 0)
    run.logger.log_metrics({3: 1}, 1)  # names must be text
    run.logger.log_metrics({"a": 3}, 2)
    with pytest.warns(UserWarning, match="`WandBLogger` failed to log: .*The run continues"):
        run.engine.run_event("fit_end")
    run.close()

    assert [(0, 1), (2, 3)] == stored()[0].curve("a")


def test_a_failure_is_an_error_with_on_error_raise(start: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline, on_error="raise"))
    run.logger.log_metrics({3: 1}, 1)
    with pytest.raises(RuntimeError, match="`WandBLogger` failed to log"):
        run.engine.run_event("fit_end")


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_run_that_cannot_be_begun(start: Any, offline: Any, on_error: str) -> None:
    offline["init_kwargs"] |= {"mode": "nonsense"}
    logger = WandBLogger(**offline, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="`WandBLogger` failed to log"):
            start(logger)
        return
    with pytest.warns(UserWarning, match="`WandBLogger` failed to log"):
        run = start(logger)
    run.logger.log_hyperparameters({"a": 1})
    run.fit()
    run.close()


def test_a_table_is_read_back(start: Any, stored: Any, offline: Any) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    run.logger.log_table(["prompt", "score"], [["a", torch.tensor(0.5)], ["b", None]], "generations", step=3)
    run.close()

    [(step, shown)] = stored()[0].curve("generations")
    assert (3, "table-file") == (step, shown["_type"])
    table = json.loads((Path(str(logger.run_dir)) / shown["path"]).read_text())
    assert (["prompt", "score"], [["a", "0.5000"], ["b", None]]) == (table["columns"], table["data"])


@pytest.mark.parametrize(
    ("images", "channels_last", "count"),
    [
        (torch.rand(3, 4, 6), False, 1),
        (torch.rand(4, 6, 3).numpy(), True, 1),
        (torch.rand(2, 3, 4, 6, dtype=torch.bfloat16), False, 2),
        ([torch.rand(1, 4, 6), torch.rand(3, 4, 6, requires_grad=True)], False, 2),
    ],
)
def test_images_are_read_back(
    start: Any, stored: Any, offline: Any, images: Any, channels_last: bool, count: int
) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    run.logger.log_images(images, "pictures", channels_last, step=2, use_table=False)
    run.close()

    [(step, shown)] = stored()[0].curve("pictures")
    assert (2, count, 6, 4) == (step, shown["count"], shown["width"], shown["height"])
    assert all((Path(str(logger.run_dir)) / name).is_file() for name in shown["filenames"])


def test_masks_are_drawn_with_the_names_of_their_classes(start: Any, stored: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    masks = {"prediction": torch.ones(2, 4, 6, dtype=torch.int64), "ground_truth": np.zeros((2, 4, 6), np.int64)}
    labels = {0: "ground", 1: "cat"}
    run.logger.log_images(torch.rand(2, 3, 4, 6), "seen", masks=masks, mask_class_labels=labels, use_table=False)
    run.logger.log_images(torch.rand(2, 3, 4, 6), "table", masks=masks, mask_class_labels=labels)
    run.close()

    [found] = stored()
    [(_, shown)] = found.curve("seen")
    assert [{"prediction", "ground_truth"}] * 2 == [set(drawn) for drawn in shown["all_masks"]]
    assert {"0": "ground", "1": "cat"} == found_labels(found)
    [(_, table)] = found.curve("table")
    assert ("table-file", 2, 1) == (table["_type"], table["nrows"], table["ncols"])


def found_labels(found: Any) -> dict[str, str]:
    """The names of the classes, which W&B keeps in the config."""
    text = json.dumps(found.config.get("_wandb", {})) + "".join(
        item.value_json for record in found.records for item in record.config.update
    )
    start = text.index('{"0": "ground"') if '{"0": "ground"' in text else text.index('{"0":"ground"')
    labels: dict[str, str] = json.JSONDecoder().raw_decode(text[start:])[0]
    return {key: labels[key] for key in ("0", "1")}


def test_images_of_another_shape_are_refused(start: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    with pytest.raises(ValueError, match=r"`images` must be images of 3 dimensions, got shape \(4, 6\)"):
        run.logger.destinations[0].log_images(torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"`masks\['m'\]` must hold 2 masks, got 1"):
        run.logger.destinations[0].log_images(torch.zeros(2, 3, 4, 6), masks={"m": torch.zeros(4, 6)})


def test_files_become_artifacts(start: Any, stored: Any, offline: Any, tmp_path: Path) -> None:
    logger = WandBLogger(**offline, log_artifacts=True)
    assert logger.can_upload_files()
    run = start(logger)
    run.fit(2)
    source = tmp_path / "ep1.pt"
    source.write_text("weights")
    with pytest.warns(UserWarning, match=r"'my-run/ep1.pt' is stored as 'my-run.ep1.pt'"):
        run.logger.upload_file("{run_name}/ep1.pt", source)
    source.unlink()  # which the contract allows
    run.close()

    [artifact] = stored()[0].artifacts
    assert ("my-run.ep1.pt", "model") == (artifact.name, artifact.type)
    assert {"latest", "ep0-ba2"} == set(artifact.aliases)
    assert 2 == json.loads(artifact.metadata)["timestamp/batch"]
    [entry] = artifact.manifest.contents
    assert "ep1.pt" == entry.path
    assert "weights" == Path(entry.local_path).read_text()
    assert [] == list(tmp_path.glob(".held-*"))


def test_files_are_not_stored_by_default(start: Any, stored: Any, offline: Any, tmp_path: Path) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    (tmp_path / "a").write_text("a")
    run.logger.upload_file("a", tmp_path / "a")
    run.close()

    assert not logger.can_upload_files()
    assert [] == stored()[0].artifacts


def test_an_existing_file_is_not_replaced_by_a_download(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(FileExistsError, match="Pass `overwrite=True`"):
        WandBLogger().download_file("a", str(tmp_path / "a"))


def test_storing_the_files_of_rank_zero_only_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match="`rank_zero_only` should be set to False."):
        WandBLogger(log_artifacts=True)


@pytest.mark.parametrize("before_init", [True, False])
def test_a_resumed_run_continues_its_run(start: Any, stored: Any, offline: Any, before_init: bool) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1})
    run.fit(3)
    saved, time = pickle.loads(pickle.dumps(logger.state_dict())), run.state.timestamp
    run.close()

    logger = WandBLogger(**offline)
    if before_init:
        logger.load_state_dict(saved)
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.2})
    logger.load_state_dict(saved)
    run.state.timestamp = time
    run.engine.run_event("after_load")
    run.fit(2)
    run.close()

    runs = stored()
    assert (2 if before_init else 3) == len(runs)
    assert runs[0].run.run_id == runs[-1].run.run_id == saved["id"] == logger.state_dict()["id"]
    assert [(3, 4), (4, 5)] == runs[-1].curve("loss")
    assert 0.2 == runs[-1].config["lr"]


def test_another_run_begins_a_run_of_its_own(start: Any, stored: Any, offline: Any) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    saved = logger.state_dict()
    run.close()
    other = WandBLogger(**offline)
    run = start(other, name="finetuning")
    other.load_state_dict(saved)
    run.engine.run_event("after_load")
    run.close()

    assert saved["id"] != other.state_dict()["id"]


def test_a_run_whose_training_did_not_end_has_failed(start: Any, stored: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    run.fit(2, end=False)
    run.close()

    assert [1] == stored()[0].exit_codes


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("raise ValueError('a crash')", 1), ("engine.run_event('fit_end')", 0)],
)
def test_the_end_of_the_process_loses_nothing_and_importing_is_cheap(
    stored: Any, offline: Any, end: str, exit_code: int
) -> None:
    code = f"""
import sys, torch
from composer.core import Engine, State
from composer.loggers import Logger, WandBLogger
print("wandb" in sys.modules)
loggers = [WandBLogger(**{offline!r})]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
engine.run_event("fit_start")
for step in range(50):
    engine.logger.log_metrics({{"loss": torch.tensor(float(step))}}, step)
{end}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout == "False\n"
    assert "ValueError: a crash" in run.stderr or end != "raise ValueError('a crash')"
    assert "Error running" not in run.stderr
    [found] = stored()
    assert [(n, n) for n in range(50)] == found.curve("loss")
    assert [exit_code] == found.exit_codes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delivery_timeout": 0}, "`delivery_timeout` must be positive, got 0"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WandBLogger(**arguments)


def test_other_ranks_take_part_in_computing(start: Any, stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    monkeypatch.setattr("composer.utils.dist.broadcast_object_list", lambda ids: ids.__setitem__(slice(2), "ep"))
    logger = WandBLogger()
    run = start(logger)
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.logger.log_images(torch.zeros(3, 2, 2))
    run.logger.log_table(["a"], [[1]])
    run.fit()
    run.close()

    assert computed == [1]
    assert stored() == []
    assert ("e", "p") == (logger.entity, logger.project)


def test_every_rank_can_have_a_run(start: Any, stored: Any, offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    monkeypatch.setattr("composer.utils.dist.broadcast_object_list", lambda _: None)
    start(WandBLogger(**offline, rank_zero_only=False)).close()

    [found] = stored()
    assert ("my-run-rank1", "my-run") == (found.run.display_name, found.run.run_group)


def test_two_loggers_have_two_runs(start: Any, stored: Any, offline: Any) -> None:
    first, second = WandBLogger(**offline), WandBLogger(**(offline | {"project": "others"}))
    run = start(first, second)
    run.fit(2)
    first.log_metrics({"apart": 1}, 2)
    run.close()

    found = {one.run.project: one for one in stored()}
    assert {"tests", "others"} == set(found)
    assert [(0, 1), (1, 2)] == found["tests"].curve("loss") == found["others"].curve("loss")
    assert [(2, 1)] == found["tests"].curve("apart")
    assert [] == found["others"].curve("apart")


def test_the_run_of_the_script_is_taken(start: Any, stored: Any, offline: Any) -> None:
    own = wandb.init(project="sweep", **offline["init_kwargs"])
    logger = WandBLogger(**offline)
    run = start(logger)
    run.close()

    assert own.id == logger.state_dict()["id"]
    assert 1 == len(stored())


def test_hyperparameters_may_come_first_and_stay_with_their_run(start: Any, stored: Any, offline: Any) -> None:
    logger = WandBLogger(**offline)
    for name in ("first", "second"):
        logger.log_hyperparameters({name: 1})
        start(logger, name=name).close()

    assert [["first"], ["second"]] == [[key for key in one.config if key != "_wandb"] for one in stored()]


def test_it_survives_several_fits_and_a_new_run(start: Any, stored: Any, offline: Any) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    run.fit(2)
    run.fit(2)
    run.close()
    run.close()
    start(logger, name="second").fit(1)
    logger.post_close()

    first, second = stored()
    assert (4, 1) == (len(first.curve("loss")), len(second.curve("loss")))


def test_it_can_be_closed_without_a_fit_or_a_run(start: Any, offline: Any) -> None:
    start(WandBLogger(**offline)).close()
    WandBLogger().post_close()
    assert WandBLogger().state_dict() == {}


def test_it_accepts_every_event_in_any_order(start: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline))
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)


def test_it_can_be_copied_during_a_run(start: Any, offline: Any) -> None:
    logger = WandBLogger(**offline)
    start(logger).fit(1)

    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert copied.state_dict() == logger.state_dict()
        copied.close(None, None)
        copied.post_close()


def test_what_could_not_be_handed_over_names_where_the_rest_is(
    start: Any, offline: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logger = WandBLogger(**offline)
    run = start(logger)
    run.logger.log_metrics({3: 1}, 1)  # names must be text
    with pytest.warns(UserWarning, match="`WandBLogger` failed to log"):
        run.close()

    assert f"What W&B has taken is kept in {logger.run_dir} for `wandb sync`" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any, stored: Any, offline: Any) -> None:
    run = start(WandBLogger(**offline), device="cuda")
    run.fit()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.curve("accuracy")
