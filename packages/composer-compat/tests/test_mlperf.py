"""Results of MLPerf, checked by MLCommons' own checkers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.callbacks.mlperf import MLPerfCallback, get_system_description
from composer.core import Callback
from composer.testing import RandomClassificationDataset, SimpleModel, run_on_ranks
from composer.utils import dist

pytest.importorskip("mlperf_logging")

START, POINT, END = "INTERVAL_START", "POINT_IN_TIME", "INTERVAL_END"


def lines(path: Path) -> list[dict[str, Any]]:
    texts = path.read_text(encoding="utf-8").splitlines()
    assert all(text.startswith(":::MLLOG {") for text in texts)
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in texts]


def values(path: Path, key: str) -> list[Any]:
    return [line["value"] for line in lines(path) if line["key"] == key]


def events(path: Path) -> list[tuple[str, str]]:
    return [(line["key"], line["event_type"]) for line in lines(path)]


def is_compliant(path: Path, tmp_path: Path) -> bool:
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "4.0.0", quiet=True, werror=False)
    valid = mlp_compliance.main(str(path), "training_4.0.0/common.yaml", checker)[0]
    return bool(valid)


class SetAccuracy(Callback):
    """Callback that sets the accuracies of evaluations."""

    def __init__(self, *accuracies: float) -> None:
        self.accuracies = list(accuracies)

    def eval_end(self, state: Any, logger: Any) -> None:
        value = torch.tensor(self.accuracies.pop(0))
        state.eval_metrics["eval"]["MulticlassAccuracy"].compute = lambda: value


def record(run: Any, make_loader: Any, tmp_path: Path, *accuracies: float, **kwargs: Any) -> tuple[Any, MLPerfCallback]:
    callback = MLPerfCallback(tmp_path, 0, target=0.5, cache_clear_cmd="true", **kwargs)
    done = run([SetAccuracy(*accuracies), callback], eval_dataloader=make_loader(6), max_duration="3ep")
    return done, callback


def test_a_result_is_compliant(run: Any, make_loader: Any, tmp_path: Path) -> None:
    done, callback = record(run, make_loader, tmp_path, 0.25, 0.5, 0.75)
    done.fit()
    path = tmp_path / "results" / "1xcpu_composer" / "resnet" / "result_0.txt"

    assert callback.filename == path
    assert callback.success
    assert done.state.timestamp.epoch == "3ep"  # training continues, but is not recorded
    assert events(path) == [
        ("cache_clear", POINT),
        ("init_start", START),
        ("submission_benchmark", POINT),
        ("submission_division", POINT),
        ("submission_org", POINT),
        ("submission_platform", POINT),
        ("submission_status", POINT),
        ("seed", POINT),
        ("train_samples", POINT),
        ("eval_samples", POINT),
        ("global_batch_size", POINT),
        ("init_stop", END),
        ("run_start", START),
        *2
        * [
            ("epoch_start", START),
            ("epoch_stop", END),
            ("eval_start", START),
            ("eval_accuracy", POINT),
            ("eval_stop", END),
        ],
        ("run_stop", END),
    ]
    recorded = {line["key"]: line["value"] for line in lines(path)}
    assert recorded["submission_org"] == "MosaicML"
    assert recorded["submission_platform"] == "1xcpu_composer"
    assert (recorded["train_samples"], recorded["eval_samples"], recorded["global_batch_size"]) == (8, 6, 2)
    assert recorded["seed"] == done.state.rank_zero_seed
    inside = [
        line["metadata"] for line in lines(path) if line["key"].startswith(("epoch", "eval_a", "eval_st", "run_stop"))
    ]
    assert [data["epoch_num"] for data in inside] == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert [data["samples_count"] for data in inside] == [0, 8, 8, 8, 8, 8, 16, 16, 16, 16, 16]
    assert lines(path)[-1]["metadata"]["status"] == "success"
    assert values(path, "eval_accuracy") == [0.25, 0.5]
    assert is_compliant(path, tmp_path)


def test_a_result_without_a_cleared_cache_is_not(run: Any, make_loader: Any, tmp_path: Path) -> None:
    callback = MLPerfCallback(tmp_path, 0, target=0.0)
    run(callback, eval_dataloader=make_loader(6)).fit()

    assert callback.success
    assert "cache_clear" not in dict(events(callback.filename))
    assert not is_compliant(callback.filename, tmp_path)


def test_training_can_end_at_the_target(run: Any, make_loader: Any, tmp_path: Path) -> None:
    done, callback = record(run, make_loader, tmp_path, 0.25, 0.75, exit_at_target=True)
    done.fit()

    assert done.state.timestamp.epoch == "2ep"
    assert lines(callback.filename)[-1]["metadata"]["status"] == "success"


def test_a_run_that_misses_the_target_is_aborted(run: Any, make_loader: Any, tmp_path: Path) -> None:
    done, callback = record(run, make_loader, tmp_path, *[0.25] * 5)
    done.fit()
    before = lines(callback.filename)
    done.fit(duration="1ep")

    assert not callback.success
    assert before[-1]["metadata"]["status"] == "aborted"
    assert lines(callback.filename) == before
    assert is_compliant(callback.filename, tmp_path)


class Fails(Callback):
    def batch_end(self, state: Any, logger: Any) -> None:
        raise ArithmeticError


def test_a_run_that_fails_is_aborted(run: Any, make_loader: Any, tmp_path: Path) -> None:
    callback = MLPerfCallback(tmp_path, 0)
    done = run([callback, Fails()], eval_dataloader=make_loader(6))
    with pytest.raises(ArithmeticError):
        done.fit()
    done.trainer.close()

    assert events(callback.filename)[-2:] == [("epoch_start", START), ("run_stop", END)]
    assert lines(callback.filename)[-1]["metadata"]["status"] == "aborted"


def test_evaluations_in_mid_epoch_and_of_others(run: Any, make_loader: Any, tmp_path: Path) -> None:
    from composer.core import Evaluator

    callback = MLPerfCallback(tmp_path, 3, benchmark="bert", target=2.0, metric_label="b", system_name="my-system")
    evaluators = [
        Evaluator(label=name, dataloader=make_loader(6), metric_names=["MulticlassAccuracy"]) for name in "ab"
    ]
    done = run(callback, eval_dataloader=evaluators, eval_interval="2ba", max_duration="1ep")
    done.trainer.eval()  # before the run
    done.fit()
    path = tmp_path / "results" / "my-system" / "bert" / "result_3.txt"
    evaluations = [line["metadata"] for line in lines(path) if line["key"] == "eval_accuracy"]

    assert [(data["epoch_num"], data["samples_count"]) for data in evaluations] == [(1, 4), (1, 8)]


def test_the_system_is_described(run: Any, make_loader: Any, tmp_path: Path) -> None:
    from mlperf_logging.system_desc_checker.system_desc_checker import check_system_desc

    callback = MLPerfCallback(tmp_path, 0, submitter="us", status="research", host_processors_per_node=2)
    run(callback).trainer.close()
    path = tmp_path / "systems" / "1xcpu_composer.json"
    found = json.loads(path.read_text())

    assert check_system_desc(str(path), "training", "4.1.0")[:2] == (True, "1xcpu_composer")
    assert all(isinstance(value, str) for value in found.values())
    assert (found["submitter"], found["division"], found["host_processors_per_node"]) == ("us", "open", "2")
    assert (found["number_of_nodes"], found["accelerators_per_node"]) == ("1", "0")
    assert int(found["host_processor_vcpu_count"]) > 0
    assert found["framework"] == f"PyTorch {torch.__version__}"

    if not torch.cuda.is_available():
        assert found == get_system_description("us", "open", "research", host_processors_per_node=2)
    assert "mine" == get_system_description("us", "open", "cloud", "mine")["system_name"]
    with pytest.raises(ValueError, match="`status` must be one of 'onprem'"):
        get_system_description("us", "open", "bought")

    path.write_text('{"cooling": "air"}')
    run(callback).trainer.close()
    assert json.loads(path.read_text()) == {"cooling": "air"}


def test_an_earlier_result_is_kept(run: Any, tmp_path: Path, caplog: Any) -> None:
    callback = MLPerfCallback(tmp_path, 0)
    run(callback).fit()
    assert callback.filename is not None
    first = callback.filename.read_text()
    run(MLPerfCallback(tmp_path, 0)).fit()

    assert callback.filename.with_name("result_0.txt.old").read_text() == first != callback.filename.read_text()
    assert "was renamed to result_0.txt.old" in caplog.text


def test_what_the_loader_cannot_tell_is_left_out(run: Any, tmp_path: Path, caplog: Any) -> None:
    batches = [(torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.int64))] * 3
    callback = MLPerfCallback(tmp_path, 0)
    run(callback, train_dataloader=batches, max_duration="1ep").fit()

    assert not {"train_samples", "global_batch_size"} & dict(events(callback.filename)).keys()  # type: ignore[arg-type]
    assert "is unknown, so it is not recorded" in caplog.text


def test_commands(run: Any, tmp_path: Path) -> None:
    run(MLPerfCallback(tmp_path, 0, cache_clear_cmd=["touch", str(tmp_path / "cleared")])).trainer.close()
    assert (tmp_path / "cleared").exists()
    with pytest.raises(RuntimeError, match=r"`cache_clear_cmd` 'echo no >&2; exit 3' failed with status 3: no\."):
        run(MLPerfCallback(tmp_path, 0, cache_clear_cmd="echo no >&2; exit 3"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"index": -1}, "`index` must be at least 0, got -1"),
        ({"division": "closed"}, "`division` must be 'open', got 'closed'. The closed division requires"),
        ({"status": "soon"}, "`status` must be one of 'onprem', 'cloud', 'preview', 'research', got 'soon'"),
        ({"benchmark": "../x"}, "`benchmark` must be a folder name"),
        ({"system_name": "a b"}, "`system_name` must be a folder name"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MLPerfCallback(**{"root_folder": tmp_path, "index": 0, **arguments})


def test_a_metric_that_is_not_there(run: Any, make_loader: Any, tmp_path: Path) -> None:
    callback = MLPerfCallback(tmp_path, 0, metric_name="Other")
    with pytest.raises(ValueError, match=r"`metric_name` must be a metric of 'eval', got 'Other'"):
        run(callback, eval_dataloader=make_loader(6)).fit()


def test_a_missing_package_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'composer-compat\[mlperf\]'"):
        MLPerfCallback(tmp_path, 0)


def record_on_ranks(folder: str) -> bool:
    data = RandomClassificationDataset(size=8)
    loader = DataLoader(data, batch_size=2, sampler=dist.get_sampler(data))
    metric = MulticlassAccuracy(num_classes=2, average="micro")
    model = SimpleModel(eval_metrics={"MulticlassAccuracy": metric})
    callback = MLPerfCallback(
        folder, 0, target=0.0, cache_clear_cmd=f"echo $$ >> {folder}/cleared", exit_at_target=True
    )
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=loader,
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callback,
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.epoch == "1ep"
    return callback.success


def test_several_ranks_write_one_result(tmp_path: Path) -> None:
    assert run_on_ranks(record_on_ranks, 2, str(tmp_path)) == [True, True]
    (path,) = tmp_path.rglob("result_*.txt")

    assert path.parent.parent.name == "2xcpu_composer"
    assert values(path, "global_batch_size") == [4]
    assert len((tmp_path / "cleared").read_text().splitlines()) == 1  # once per node
    assert is_compliant(path, tmp_path)
