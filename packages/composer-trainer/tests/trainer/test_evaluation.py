"""Evaluation at intervals and on its own, and prediction."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from composer.core import Callback, Evaluator, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.testing import EventCounterCallback, RandomClassificationDataset, deep_compare
from composer.trainer.evaluation import Results

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("interval", "duration", "expected"),
    [
        (1, "3ep", 3),
        ("1ep", "3ep", 3),
        ("2ep", "3ep", 2),  # after epoch 2, and at the end
        ("3ba", "2ep", 3),  # after batches 3 and 6, and at the end
        ("4sp", "1ep", 4),
        ("0.5dur", "2ep", 2),
        (0, "2ep", 0),
        ("0ba", "2ep", 0),
        (lambda state, event: event is Event.BATCH_END and state.timestamp.batch == "5ba", "2ep", 1),
    ],
)
def test_evaluation_runs_at_its_interval(
    make_trainer: MakeTrainer, interval: Any, duration: str, expected: int
) -> None:
    counter = EventCounterCallback()
    make_trainer(
        eval_dataloader=make_trainer.loader(8), eval_interval=interval, max_duration=duration, callbacks=counter
    ).fit()

    assert expected == counter.event_to_num_calls[Event.EVAL_START]
    assert expected == counter.event_to_num_calls[Event.EVAL_BEFORE_ALL]
    assert 2 * expected == counter.event_to_num_calls[Event.EVAL_BATCH_END]


def test_an_evaluators_own_interval_and_subset_win(make_trainer: MakeTrainer) -> None:
    counts: dict[str, int] = {}

    class Count(Callback):
        def eval_batch_end(self, state: State, logger: Logger) -> None:
            label = str(state.dataloader_label)
            counts[label] = counts.get(label, 0) + 1

    evaluators = [
        Evaluator(label="own", dataloader=make_trainer.loader(), eval_interval="2ba", subset_num_batches=1),
        Evaluator(label="default", dataloader=make_trainer.loader()),
    ]
    make_trainer(
        eval_dataloader=evaluators,
        eval_interval="1ep",
        eval_subset_num_batches=3,
        max_duration="1ep",
        callbacks=Count(),
    ).fit()

    assert {"own": 2, "default": 3} == counts


def test_metrics_cover_every_sample_once(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(eval_dataloader=make_trainer.loader(10, batch_size=4), eval_interval=0)
    trainer.eval()
    model = trainer.state.model
    with torch.no_grad():
        hits = [(model(batch).argmax(1) == batch[1]).float() for batch in make_trainer.loader(10, batch_size=4)]

    expected = torch.cat(hits).mean()
    assert torch.equal(expected, trainer.state.eval_metrics["eval"]["Accuracy"].compute())
    assert torch.equal(expected, trainer.state.eval_metric_values["Accuracy"])


def test_results_are_logged_under_the_label(make_trainer: MakeTrainer) -> None:
    memory = InMemoryLogger()
    evaluator = Evaluator(label="test", dataloader=make_trainer.loader(), metric_names=["accur.*"])
    trainer = make_trainer(eval_dataloader=evaluator, loggers=memory, max_duration="1ep")
    trainer.fit()

    assert 1 == len(memory.data["metrics/test/Accuracy"])
    assert "4ba" == str(memory.data["metrics/test/Accuracy"][0][0].batch)


def test_evaluation_leaves_training_as_it_was(make_trainer: MakeTrainer) -> None:
    modes: list[tuple[bool, bool]] = []

    class Watch(Callback):
        def eval_before_forward(self, state: State, logger: Logger) -> None:
            modes.append((state.model.training, torch.is_grad_enabled()))

        def batch_end(self, state: State, logger: Logger) -> None:
            self.batch = state.batch

        def batch_checkpoint(self, state: State, logger: Logger) -> None:
            assert state.batch is self.batch
            assert (state.model.training, state.dataloader_label) == (True, "train")

    trainer = make_trainer(
        eval_dataloader=make_trainer.loader(4), eval_interval="1ba", callbacks=Watch(), max_duration="1ep"
    )
    trainer.fit()
    plain = make_trainer(max_duration="1ep")
    plain.fit()

    assert {(False, False)} == set(modes)
    for a, b in zip(plain.state.model.parameters(), trainer.state.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_number_of_evaluations_does_not_change_the_weights(make_trainer: MakeTrainer) -> None:
    def weights(**kwargs: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(train_dataloader=make_trainer.loader(shuffle=True), **kwargs)
        trainer.fit(duration="1ep")
        if kwargs:
            trainer.eval()
            trainer.predict(make_trainer.loader())
        trainer.fit(duration="1ep")
        return trainer.state.model.state_dict()

    expected = weights()
    for interval in ("1ba", "1ep"):
        deep_compare(expected, weights(eval_dataloader=make_trainer.loader(), eval_interval=interval))


def test_a_batch_replaced_before_the_forward_pass_is_used(make_trainer: MakeTrainer) -> None:
    class Replace(Callback):
        def eval_before_forward(self, state: State, logger: Logger) -> None:
            state.batch = (torch.zeros_like(state.batch[0]), torch.zeros_like(state.batch[1]))

        def eval_after_forward(self, state: State, logger: Logger) -> None:
            assert torch.equal(state.outputs, state.model((torch.zeros(4, 1, 1, 1), None)))

    make_trainer(eval_dataloader=make_trainer.loader(4), callbacks=Replace()).eval()


def test_eval_on_its_own_announces_itself_and_forgets_what_it_was_given(make_trainer: MakeTrainer) -> None:
    counter = EventCounterCallback()
    trainer = make_trainer(eval_dataloader=make_trainer.loader(8), callbacks=counter)
    own = list(trainer.state.evaluators)
    trainer.eval(Evaluator(label="other", dataloader=make_trainer.loader(16)), subset_num_batches=3)

    assert own == trainer.state.evaluators
    assert {"eval", "other"} == set(trainer.state.eval_metrics)
    counts = counter.event_to_num_calls
    assert (1, 1, 1, 3, 0) == (
        counts[Event.EVAL_STANDALONE_START],
        counts[Event.EVAL_STANDALONE_END],
        counts[Event.EVAL_START],
        counts[Event.EVAL_BATCH_END],
        counts[Event.EVAL_BEFORE_ALL],
    )


def test_a_label_used_again_is_warned_of(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(eval_dataloader=make_trainer.loader(8))
    with pytest.warns(UserWarning, match=r"label 'eval' is already used"):
        trainer.eval(make_trainer.loader(4))


def test_evaluators_come_back_after_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(eval_dataloader=make_trainer.loader(8))
    own = list(trainer.state.evaluators)
    broken = Evaluator(label="broken", dataloader=[("not", "a batch")])
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the model says to such a batch
        trainer.eval(broken)

    assert own == trainer.state.evaluators
    assert "train" == trainer.state.dataloader_label


def test_there_must_be_something_to_evaluate(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"There is nothing to evaluate"):
        make_trainer().eval()


def test_a_loader_that_yields_nothing_is_warned_of(make_trainer: MakeTrainer) -> None:
    class Nothing:
        batch_size = 1

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter(())

    with pytest.warns(UserWarning, match=r"No batches were evaluated for global rank 0|was called before"):
        make_trainer().eval(Nothing())


def test_predictions_are_the_models_outputs_on_the_cpu(make_trainer: MakeTrainer) -> None:
    counter = EventCounterCallback()
    trainer = make_trainer(callbacks=counter)
    trainer.state.model.train()
    outputs = trainer.predict(make_trainer.loader(8))
    with torch.no_grad():
        expected = [trainer.state.model(batch) for batch in make_trainer.loader(8)]

    torch.testing.assert_close(expected, outputs)
    assert trainer.state.model.training
    assert "train" == trainer.state.dataloader_label
    assert "2ba" == str(trainer.state.predict_timestamp.batch)
    assert [1, 2, 2, 2, 2, 1] == [counter.event_to_num_calls[e] for e in Event if e.is_predict]


def test_predictions_may_be_limited_and_dropped(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()

    assert 1 == len(trainer.predict(make_trainer.loader(8), subset_num_batches=1))
    assert [] == trainer.predict(make_trainer.loader(8), return_outputs=False)
    assert 1 == len(trainer.predict((batch for batch in make_trainer.loader(8)), subset_num_batches=1))


@pytest.mark.parametrize("subset", [0, -2, "a", 1.5, True])
def test_a_subset_that_is_no_number_of_batches_is_refused(make_trainer: MakeTrainer, subset: Any) -> None:
    trainer = make_trainer()
    error = r"`subset_num_batches` must be a positive number of batches, or -1 for all, got"
    with pytest.raises(ValueError, match=error):
        trainer.eval(make_trainer.loader(), subset_num_batches=subset)
    with pytest.raises(ValueError, match=error):
        trainer.predict(make_trainer.loader(), subset_num_batches=subset)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Yields 12 samples without telling how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter([RandomClassificationDataset(size=12)[i] for i in range(12)])


class Batches:
    """Yields 3 batches without telling how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.utils.data.DataLoader(Stream(), batch_size=4))


@pytest.mark.parametrize("make_loader", [lambda: torch.utils.data.DataLoader(Stream(), batch_size=4), Batches])
def test_the_end_of_a_loader_without_a_length_ends_an_evaluation(make_trainer: MakeTrainer, make_loader: Any) -> None:
    stream = io.StringIO()
    loader = make_loader()
    with pytest.warns(UserWarning, match="`eval_dataloader` is a .* without a length.*`eval_subset_num_batches="):
        trainer = make_trainer(eval_dataloader=loader, progress_bar=True, console_stream=stream)
    trainer.fit()

    assert trainer.state.eval_timestamp.batch == 3
    assert trainer.state.eval_timestamp.sample == 12
    assert "eval" in stream.getvalue()

    trainer.eval(Evaluator(label="other", dataloader=loader), subset_num_batches=2)

    assert trainer.state.eval_timestamp.batch == 2
    with pytest.warns(UserWarning, match="`dataloader` is a .* without a length.*`subset_num_batches="):
        assert 3 == len(trainer.predict(loader))


def test_an_endless_loader_is_evaluated_for_a_number_of_batches(make_trainer: MakeTrainer) -> None:
    class Endless(itertools.cycle):  # type: ignore[type-arg]
        """Can be iterated repeatedly, unlike its base class."""

    trainer, endless = make_trainer(eval_subset_num_batches=2, eval_dataloader=Endless(Batches())), Endless(Batches())
    for use in (
        lambda: make_trainer(eval_dataloader=endless),
        lambda: trainer.eval(endless),
        lambda: trainer.predict(endless),
    ):
        with pytest.raises(
            ValueError, match=r"must have an end, got a Endless that yields batches forever\. Pass the num"
        ):
            use()
    assert 2 == len(trainer.predict(endless, subset_num_batches=2))


class Evaluated(Callback):
    """Notes at which batch, and over how many batches, each evaluator was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, int, int]] = []

    def eval_end(self, state: State, logger: Logger) -> None:
        self.seen.append((state.dataloader_label, state.timestamp.batch.value, state.eval_timestamp.batch.value))


def test_fit_replaces_interval_and_batches_of_the_evaluation(make_trainer: MakeTrainer) -> None:
    def seen(own: bool = False, **arguments: Any) -> list[Any]:
        loader, noted = make_trainer.loader(16, batch_size=4), Evaluated()
        evaluator = Evaluator(label="own", dataloader=loader, eval_interval="1ep", subset_num_batches=3)
        data = make_trainer.loader(16, batch_size=4)
        trainer = make_trainer(
            train_dataloader=data, eval_dataloader=evaluator if own else loader, max_duration="1ep", callbacks=noted
        )
        trainer.fit(**arguments)
        return noted.seen

    assert seen() == [("eval", 4, 4)]
    assert seen(eval_interval="2ba") == [("eval", 2, 4), ("eval", 4, 4)]
    assert seen(eval_interval=0) == []
    assert seen(eval_subset_num_batches=2) == [("eval", 4, 2)]
    assert seen(own=True, eval_interval="2ba", eval_subset_num_batches=2) == [("own", 4, 3)]  # its own win
    for arguments in ({"eval_interval": 0}, {"eval_subset_num_batches": 2}):
        with pytest.raises(ValueError, match="must not be given without evaluators"):
            make_trainer(max_duration="1ep").fit(**arguments)


def test_fit_replaces_the_label_of_the_training_data(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_duration="1ep", train_subset_num_batches=1)
    trainer.fit(train_dataloader_label="second")

    assert (trainer.state.dataloader_label, trainer.state.timestamp.batch) == ("second", 1)


def test_a_notebook_shows_a_confusion_matrix_as_a_heat_map_and_shortens_long_values() -> None:
    matrix, long = torch.tensor([[16.0, 1.0], [math.nan, 24.0]]), [torch.arange(100)]
    page = Results(eval={"Confusion": matrix, "Curves": long, "Large": torch.zeros(100, 100)})._repr_html_()

    assert ["0.70", "0.46", "0.00", "0.00"] == sorted(re.findall(r"196,(.+?)\)'", page), reverse=True)
    assert ["16", "1", "nan", "24"] == re.findall(r"\)'>(.+?)</td>", page)
    assert len(page) < 4000


def test_eval_returns_the_values_of_each_loader_and_a_notebook_shows_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(eval_dataloader=None)
    data = trainer.state.train_dataloader
    loaders = [Evaluator(label="first", dataloader=data), Evaluator(label="second", dataloader=data)]
    results = trainer.eval(loaders)

    assert list(results) == ["first", "second"]
    assert results["second"] == trainer.state.eval_metric_values
    page = results._repr_html_()
    assert results["first"]
    assert all(f"{float(value):.4g}" in page for value in results["first"].values())
    assert page.count("</tr>") == 1 + sum(map(len, results.values()))
