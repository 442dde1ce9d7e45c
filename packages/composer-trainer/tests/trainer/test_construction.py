"""Tests of the constructor: refused arguments, defaults, names, loggers and seeds."""

from __future__ import annotations

import io
import itertools
import logging
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_runs import generated

from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec, Evaluator, Event, Placement, State
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.models import ComposerModel
from composer.testing import RandomClassificationDataset, SimpleModel, deep_compare
from composer.trainer.trainer import _generate_run_name
from composer.utils import collect_env, reproducibility

MakeTrainer = Any  # the fixture's class, in conftest.py


def test_hyperparameters_of_every_run_are_logged(make_trainer: MakeTrainer) -> None:
    class Nothing(Algorithm):
        events = frozenset({Event.BATCH_END})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    memory = InMemoryLogger()
    make_trainer(loggers=memory, algorithms=Nothing(), auto_log_hparams=True).fit()
    logged = memory.hyperparameters

    assert {
        "composer_version",
        "num_nodes",
        "num_cpus_per_node",
        "node_name",
        "rank_zero_seed",
        "enabled_algorithms/Nothing",
        "max_duration",
        "train_subset_num_batches",
    } <= set(logged)
    assert (1, 0, True, "2ep") == tuple(
        logged[k] for k in ("num_nodes", "rank_zero_seed", "enabled_algorithms/Nothing", "max_duration")
    )


@pytest.mark.parametrize("commit", ["0f1e2d", None])
def test_the_commit_of_composer_is_logged_if_there_is_one(
    commit: str | None, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPOSER_COMMIT_HASH", raising=False)
    monkeypatch.setattr(collect_env, "_commit_hash", lambda: commit)
    memory = InMemoryLogger()
    make_trainer(loggers=memory).close()

    assert memory.hyperparameters.get("composer_commit_hash", "absent") == (commit or "absent")

    monkeypatch.setenv("COMPOSER_COMMIT_HASH", "abc")
    make_trainer(loggers=memory)
    assert "abc" == memory.hyperparameters["composer_commit_hash"]


def test_the_seed_is_logged_once(make_trainer: MakeTrainer) -> None:
    memory = InMemoryLogger()
    make_trainer(loggers=memory, seed=7171).fit()

    assert ["rank_zero_seed"] == [name for name, value in memory.hyperparameters.items() if value == 7171]


@pytest.mark.parametrize(("variable", "name"), [("node7", "node7"), (None, platform.node())])
def test_the_node_is_named_by_the_variable_or_by_its_host(
    variable: str | None, name: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv("NODENAME", raising=False)
    else:
        monkeypatch.setenv("NODENAME", variable)
    memory = InMemoryLogger()
    make_trainer(loggers=memory)

    assert memory.hyperparameters["node_name"] == name


def never(**kwargs: Any) -> Trainer:
    """A trainer that must not come to be."""
    return Trainer(**{"model": SimpleModel(), "progress_bar": False, "device": "cpu", **kwargs})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, ValueError, r"`loss` must be given .* got a Linear"),
        ({"max_duration": "ten"}, ValueError, r"such as '10ep' or '0.5dur'"),
        ({"max_duration": "1dur"}, ValueError, r"`max_duration` must be in 'ep'.* got '1.0dur'"),
        ({"max_duration": 0}, ValueError, r"`max_duration` must be positive, got '0ep'"),
        ({"max_duration": 1.5}, TypeError, r"`max_duration` must be a number of epochs, a time string or a `Time`"),
        ({"device": "toaster"}, ValueError, r"toaster"),
        ({"precision": "fp12"}, ValueError, r"`precision` must be one of 'fp32', .*, got 'fp12'"),
        ({"seed": -1}, ValueError, r"seed"),
        ({"train_dataloader": 3}, TypeError, r"`train_dataloader` must be an iterable of batches, got int"),
        ({"train_dataloader": []}, ValueError, r"`train_dataloader` must not be empty"),
        ({"device_train_microbatch_size": 0}, ValueError, r"must be positive and finite, got 0"),
        ({"device_train_microbatch_size": "big"}, ValueError, r"must be a number, 'auto' or None, got 'big'"),
        ({"device_train_microbatch_size": "auto"}, ValueError, r"needs a GPU"),
        ({"device_train_microbatch_size": [1]}, TypeError, r"must be a number, 'auto' or None, got \[1\]"),
        ({"algorithms": "MixUp"}, TypeError, r"`algorithms` must be `Algorithm` objects, got str"),
        ({"callbacks": 3}, TypeError, r"`callbacks` must hold `Callback` objects, got int"),
        ({"loggers": Callback()}, TypeError, r"`loggers` must hold `LoggerDestination` objects, got Callback"),
        ({"schedulers": 3}, TypeError, r"`schedulers` must be torch schedulers or functions"),
        ({"algorithm_passes": 3}, ValueError, r"`algorithm_passes` must be a function"),
        ({"optimizers": "SGD"}, TypeError, r"`optimizers` must be a `torch.optim.Optimizer`, got str"),
        ({"algorithms": [Callback]}, TypeError, r"got the class `Callback`; pass `Callback\(...\)`"),
        ({"train_dataloader": [torch.zeros(1)], "train_subset_num_batches": 0}, ValueError, r"or -1 for all, got 0"),
        ({"python_log_level": "loud"}, ValueError, r"`python_log_level` must be 'debug'"),
    ],
)
@pytest.mark.filterwarnings("ignore:No optimizer was specified")
def test_bad_input_is_answered_at_construction(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        never(**arguments)


def test_a_batch_larger_than_the_data_is_explained(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"dataset has 3 samples: fewer than one batch, and `drop_last` is on"):
        make_trainer(train_dataloader=make_trainer.loader(3, batch_size=4, drop_last=True))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Yields samples without telling how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(RandomClassificationDataset(size=12)[i] for i in range(12))


def test_the_end_of_a_loader_without_a_length_is_the_end_of_the_epoch(make_trainer: MakeTrainer) -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    with pytest.warns(UserWarning, match="`train_dataloader` is a DataLoader without a length"):
        trainer = make_trainer(train_dataloader=loader, max_duration="2ep")
    trainer.fit()  # does not repeat it

    assert (2, 6, 24) == tuple(trainer.state.timestamp.get(unit).value for unit in ("ep", "ba", "sp"))


def test_an_endless_loader_trains_epochs_of_a_given_length(make_trainer: MakeTrainer) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return itertools.cycle(Stream())

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    trainer = make_trainer(train_dataloader=loader, train_subset_num_batches=2, max_duration="3ep")
    trainer.fit()

    assert (3, 6) == tuple(trainer.state.timestamp.get(unit).value for unit in ("ep", "ba"))
    trainer.eval(loader, subset_num_batches=3)

    assert trainer.state.eval_timestamp.batch == 3
    advice = r"`train_subset_num_batches=\.\.\.`, the number of batches per epoch, or a `max_duration` such as '1000ba'"
    with pytest.raises(ValueError, match=rf"must have an end, got a cycle .*'3ep', pass {advice}"):
        make_trainer(train_dataloader=itertools.cycle(make_trainer.loader()), max_duration="3ep")
    trainer = make_trainer(train_dataloader=itertools.cycle(make_trainer.loader()), max_duration=None)
    for _ in range(2):
        with pytest.raises(ValueError, match="must have an end"):
            trainer.fit(duration="3ep")


class Lazy(ComposerModel):
    """Learns the number of its inputs from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))

    def forward(self, batch: Any) -> Any:
        return self.module(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules_are_trained_saved_and_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def run(duration: str) -> Any:
        torch.manual_seed(0)
        model = Lazy()
        trainer = make_trainer(
            model=model,
            eval_dataloader=make_trainer.loader(),
            max_duration=duration,
            run_name="run",
            save_folder=tmp_path,
            autoresume=True,
        )
        trainer.fit()
        trainer.close()
        return model

    assert run("1ep").module[1].weight.shape == (2, 1)
    before = run("1ep").module[1].weight.detach().clone()

    assert not torch.equal(before, run("2ep").module[1].weight)


def test_a_generator_that_ends_before_the_run_is_told_from_an_empty_one(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(train_dataloader=generated(make_trainer.loader()), max_duration="9ba")
    with pytest.raises(RuntimeError, match=r"no batch in epoch 1, although it had yielded 4 before: it can"):
        trainer.fit()
    trainer = make_trainer(train_dataloader=generated([]), max_duration="9ba")
    with pytest.raises(RuntimeError, match=r"no batch in epoch 0\. No batches were trained"):
        trainer.fit()


def test_a_model_all_of_whose_parameters_are_frozen_can_only_be_evaluated(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"`model` must have parameters that require gradients, got SimpleModel, all"):
        make_trainer(model=model)
    trainer = make_trainer(model=model, train_dataloader=None, eval_dataloader=make_trainer.loader())
    trainer.eval()
    with pytest.raises(ValueError, match=r"`model` must have parameters that require gradients"):
        trainer.fit(train_dataloader=make_trainer.loader())


class HubDataset:
    """A data set of Hugging Face's library, which is none of torch's."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": "a"}

    def with_format(self, kind: str) -> Any:
        raise NotImplementedError


HubDataset.__module__ = "datasets.arrow_dataset"


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HubDataset(), r"got a `datasets.HubDataset`, whose items are samples. .*DataLoader\(dataset.with_format\("),
        (RandomClassificationDataset(size=4), r"got a RandomClassificationDataset, whose items are samples. Wrap"),
        (torch.zeros(4, 3), r"got a Tensor, whose items are samples.* `torch.utils.data.TensorDataset\("),
        ("data/train", r"got 'data/train'. Load the data it names"),
        ({"train": HubDataset()}, r"or a dict of its arguments with 'dataloader', got a dict with the keys 'train'"),
        (torch.utils.data.DataLoader, r"got the class `DataLoader`. Pass `DataLoader\(...\)`"),
    ],
)
def test_what_yields_no_batches_is_no_loader(
    make_trainer: MakeTrainer, argument: str, value: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=rf"`{argument}` must be an iterable of batches.* {message}"):
        make_trainer(**{argument: value})


def test_two_algorithms_that_exclude_each_other_are_refused_at_construction(make_trainer: MakeTrainer) -> None:
    class Alone(Algorithm):
        events = frozenset({Event.INIT})
        placement = Placement(provides={"test:alone"}, excludes={"test:alone"})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    with pytest.raises(ValueError, match=r"`Alone` is given twice"):
        make_trainer(algorithms=[Alone(), Alone()])


def test_fit_needs_data_and_a_duration(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"No `train_dataloader` was given"):
        make_trainer(train_dataloader=None).fit()
    with pytest.raises(ValueError, match=r"No `max_duration` was given"):
        make_trainer(max_duration=None).fit()


def test_progress_bar_and_console_are_added_unless_there(make_trainer: MakeTrainer) -> None:
    def kinds(**kwargs: Any) -> list[type]:
        return [type(c) for c in make_trainer(console_stream=io.StringIO(), **kwargs).state.callbacks]

    assert [] == make_trainer().state.callbacks
    assert [ProgressBarLogger] == kinds(progress_bar=True)
    assert [ConsoleLogger] == kinds(log_to_console=True)
    with pytest.warns(UserWarning, match=r"`progress_bar` and `log_to_console` are both on"):
        assert [ProgressBarLogger, ConsoleLogger] == kinds(progress_bar=True, log_to_console=True)
    with pytest.warns(UserWarning, match=r"`loggers` already contains a `ProgressBarLogger`"):
        assert [ProgressBarLogger] == kinds(progress_bar=True, loggers=ProgressBarLogger())


class Renames(LoggerDestination):
    """A logger that uploads files, with the attributes of `RemoteUploaderDownloader`."""

    file_path_format_string, num_concurrent_uploads = "{remote_file_name}", 1

    def can_upload_files(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (
            "file_path_format_string",
            "{rank}/{remote_file_name}",
            "Specifying a `file_path_format_string` to a `Renames`",
        ),
        ("num_concurrent_uploads", 2, "Multiple concurrent uploads is not currently supported when using autoresume"),
    ],
)
def test_an_uploader_that_could_lose_the_latest_checkpoint_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, value: Any, match: str
) -> None:
    uploader = Renames()
    setattr(uploader, name, value)
    with pytest.raises(ValueError, match=match):
        make_trainer(loggers=uploader, save_folder=str(tmp_path), autoresume=True, run_name="run")


def test_loggers_come_before_callbacks(make_trainer: MakeTrainer) -> None:
    logger, callback = InMemoryLogger(), Callback()
    trainer = make_trainer(callbacks=callback, loggers=logger)

    assert [logger, callback] == trainer.state.callbacks
    assert (logger,) == trainer.logger.destinations
    assert trainer.state.model.logger is trainer.logger


def test_the_console_prints_losses(make_trainer: MakeTrainer) -> None:
    stream = io.StringIO()
    make_trainer(log_to_console=True, console_stream=stream, console_log_interval="2ba").fit()

    assert "Train loss/train/total:" in stream.getvalue()


def test_run_names_come_from_the_environment_or_are_made_up(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPOSER_RUN_NAME", raising=False)
    monkeypatch.delenv("RUN_NAME", raising=False)
    seconds, first, second = _generate_run_name().split("-")
    assert seconds.isdigit()
    assert first.isalpha() and second.isalpha()  # noqa: PT018 - one fact
    monkeypatch.setenv("RUN_NAME", "second choice")
    assert "second choice" == make_trainer().state.run_name
    monkeypatch.setenv("COMPOSER_RUN_NAME", "first choice")
    assert "first choice" == make_trainer().state.run_name
    assert "given" == make_trainer(run_name="given").state.run_name


def test_the_same_seed_gives_the_same_run(make_trainer: MakeTrainer) -> None:
    def train(seed: int, run_name: str | None = None) -> dict[str, Any]:
        loader = make_trainer.loader(shuffle=True)
        model = make_trainer.model()
        make_trainer(model=model, train_dataloader=loader, seed=seed, run_name=run_name).fit()
        return model.state_dict()

    deep_compare(train(5), train(5, run_name="another"))
    with pytest.raises(AssertionError):
        deep_compare(train(5), train(6))


def test_without_a_seed_one_is_drawn_and_kept(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducibility, "get_random_seed", lambda: 77)

    assert 77 == make_trainer(seed=None).state.rank_zero_seed


def test_surgery_does_not_shift_the_randomness_of_training(make_trainer: MakeTrainer) -> None:
    class Drawing(Algorithm):
        events = frozenset({Event.INIT})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            torch.randn(100)

    draws = []

    class First(Callback):
        def fit_start(self, state: State, logger: Logger) -> None:
            draws.append(torch.rand(()))

    for algorithms in ([], [Drawing()]):
        make_trainer(algorithms=algorithms, callbacks=First()).fit()

    assert torch.equal(*draws)


def test_deterministic_mode_asks_torch_for_it(make_trainer: MakeTrainer) -> None:
    try:
        make_trainer(deterministic_mode=True).fit()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_the_log_level_is_that_of_the_library(make_trainer: MakeTrainer) -> None:
    logger = logging.getLogger("composer")
    before = logger.level
    try:
        make_trainer(python_log_level="debug")
        assert logging.DEBUG == logger.level
    finally:
        logger.setLevel(before)


def test_close_may_be_called_twice(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match=r"The engine is closed"):
        trainer.fit()


def test_several_processes_that_cannot_find_each_other_are_told_what_is_missing(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with pytest.raises(RuntimeError, match=r"`WORLD_SIZE` is 2, but RANK, MASTER_ADDR is not set.*`torchrun`"):
        make_trainer(train_dataloader=None)


@pytest.mark.parametrize("strategy", ["single", 3])
def test_an_unknown_sync_strategy_is_refused(make_trainer: MakeTrainer, strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"`ddp_sync_strategy` must be 'single_auto_sync', .* or None, got"):
        make_trainer(ddp_sync_strategy=strategy)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "300"])
def test_a_timeout_is_a_positive_number(make_trainer: MakeTrainer, seconds: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"`dist_timeout` must be (a positive number|positive and finite), got"
    ):
        make_trainer(dist_timeout=seconds)


def number_types(value: Any) -> set[type]:
    """The types of the numbers in a nesting."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if inner is None:
        return {type(value)} if isinstance(value, (int, float, np.generic)) else set()
    return {kind for item in inner for kind in number_types(item)}


@pytest.mark.filterwarnings("ignore:Arguments have no effect. `console_log_interval`:UserWarning")
def test_integers_of_numpy_are_arguments_and_are_kept_as_plain_ones(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def numbers(kind: Any) -> dict[str, Any]:
        train, evaluation = make_trainer.loader(), make_trainer.loader()
        return {
            "train_dataloader": DataSpec(
                train,
                get_num_samples_in_batch=lambda batch: kind(len(batch[0])),
                get_num_tokens_in_batch=lambda batch: kind(100),  # more than int8 holds in all
            ),
            "eval_dataloader": Evaluator(
                label="eval",
                dataloader=evaluation,
                subset_num_batches=kind(1),
                eval_interval=kind(1),
                device_eval_microbatch_size=kind(2),
            ),
            "max_duration": kind(2),
            "train_subset_num_batches": kind(2),
            "eval_interval": kind(1),
            "eval_subset_num_batches": kind(2),
            "device_train_microbatch_size": kind(2),
            "seed": kind(3),
            "save_interval": kind(1),
            "save_num_checkpoints_to_keep": kind(2),
            "console_log_interval": kind(1),
            "dist_timeout": kind(100),
            "auto_log_hparams": True,
        }

    def run(name: str, kind: Any) -> Trainer:
        trainer: Trainer = make_trainer(save_folder=tmp_path / name, run_name="run", **numbers(kind))
        trainer.fit()
        trainer.fit(duration=kind(1), device_train_microbatch_size=kind(4), train_subset_num_batches=kind(3))
        trainer.eval(subset_num_batches=kind(1))
        assert len(trainer.predict(make_trainer.loader(), subset_num_batches=kind(1))) == 1
        return trainer

    plain, made = run("plain", int), run("numpy", np.int8)

    assert (made.state.timestamp.batch, made.state.timestamp.token) == ("7ba", "700tok")
    deep_compare(plain.state.model.state_dict(), made.state.model.state_dict())
    assert number_types(made.local_hparams) <= {int, float, bool}
    assert len(made.saved_checkpoints) == 2
    for path in made.saved_checkpoints:
        assert number_types(torch.load(path, weights_only=True)) <= {int, float, bool}
