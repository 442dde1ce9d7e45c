from __future__ import annotations

import copy
import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from composer.algorithms.utils.weight_swaps import is_saving
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_BATCH_SIZE,
    SWAPS_WEIGHTS,
    Algorithm,
    Callback,
    ConflictError,
    DataSpec,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger, LoggerDestination
from composer.loop import HostedRun
from composer.loop.loss_terms import LossTerms
from composer.loop.swapped_weights import swap_in
from composer.models.base import total_loss
from composer.testing import SimpleModel, deep_compare, run_on_ranks
from composer.utils import dist


def batches(sizes: tuple[int, ...] = (4, 4, 4, 2)) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 5, generator=generator), torch.randint(2, (n,), generator=generator)) for n in sizes]


def network(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Dropout(dropout), torch.nn.Linear(6, 2))


def criterion(outputs: Any, batch: Any, reduction: str = "mean", ignore_index: int = -100) -> torch.Tensor:
    return cross_entropy(outputs, batch[1], reduction=reduction, ignore_index=ignore_index)


def make(net: torch.nn.Module | None = None, algorithms: Any = (), **options: Any) -> HostedRun:
    net = network() if net is None else net
    defaults: dict[str, Any] = {"loss": criterion, "dataloader": batches(), "max_duration": "2ep"}
    if "optimizers" not in options:
        options["optimizers"] = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return HostedRun(net, algorithms, **{**defaults, **options})


def train(run: HostedRun, after_epoch: Callable[[], object] = lambda: None) -> dict[str, Any]:
    run.begin_fit()
    while not run.is_over():
        for batch in run.epoch():
            run.backward(run.loss(batch))
            run.step()
        after_epoch()
    run.end_fit()
    return copy.deepcopy(run.model.state_dict())


class Recorder(Callback):
    """Records the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


class At(Algorithm):
    """Does something at some events."""

    def __init__(self, events: set[Event] | None, action: Callable[[State], object] = lambda state: None) -> None:
        self.events = None if events is None else frozenset(events)
        self.action = action

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.action(state)


# ---- the loop ----


def test_the_events_of_a_run_come_in_their_order() -> None:
    recorder = Recorder()
    run = make(callbacks=recorder, dataloader=batches((4,)), max_duration="1ep")
    train(run, after_epoch=lambda: None)
    with run.evaluation(batches((3,))):
        run.eval_forward(batches((3,))[0])

    expected = """init before_load after_load fit_start iteration_start epoch_start before_dataloader after_dataloader
        batch_start before_train_batch before_forward after_forward before_loss after_loss before_backward
        after_backward after_train_batch batch_end batch_checkpoint epoch_end epoch_checkpoint fit_end
        eval_standalone_start eval_start eval_batch_start eval_before_forward eval_after_forward eval_batch_end
        eval_end eval_standalone_end"""
    assert expected.split() == recorder.events


def test_it_trains_as_a_plain_loop_does() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()

    run = make()
    deep_compare(net.state_dict(), train(run))
    assert (run.state.timestamp.epoch, run.state.timestamp.batch, run.state.timestamp.sample) == (2, 8, 28)


def test_a_model_with_a_loss_needs_no_functions() -> None:
    model = SimpleModel()
    run = make(model, loss=None, dataloader=[(torch.zeros(4, 1, 3, 3), torch.zeros(4, dtype=torch.long))])
    train(run)

    assert run.model is model


@pytest.mark.parametrize("accumulate", [2, 3])
def test_several_batches_make_one_step(accumulate: int) -> None:
    """Examples have equal weights, also in the last and smaller group."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = batches()
    for _ in range(2):
        for start in range(0, 4, accumulate):
            group = data[start : start + accumulate]
            optimizer.zero_grad()
            cross_entropy(net(torch.cat([x for x, _ in group])), torch.cat([y for _, y in group])).backward()
            optimizer.step()

    run = make(accumulate=accumulate)
    torch.testing.assert_close(dict(net.state_dict()), dict(train(run)), atol=1e-6, rtol=0)  # sums in another order
    assert (run.state.timestamp.batch, run.state.timestamp.sample) == (4, 28)
    assert run.state.dataloader_len == 2


def test_several_optimizers_and_schedulers_step() -> None:
    net: Any = network()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[2].parameters(), lr=0.01)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.5) for each in optimizers]
    before = copy.deepcopy(net.state_dict())
    after = train(make(net, optimizers=optimizers, schedulers=schedulers))

    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1 / 2**8, 0.01 / 2**8]


def test_an_optimizer_with_a_closure_gets_its_gradients_by_replay() -> None:
    net = network()
    reference = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for x, y in batches():

        def closure(x: Any = x, y: Any = y) -> torch.Tensor:
            reference.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            return loss

        reference.step(closure)

    other = network()
    run = make(other, optimizers=torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3), max_duration="1ep")
    deep_compare(net.state_dict(), train(run))


def test_a_replay_repeats_random_numbers_and_events() -> None:
    seen: list[torch.Tensor] = []

    def noise(state: State) -> None:
        seen.append(torch.rand(2))

    other = network(dropout=0.5)
    optimizer = torch.optim.LBFGS(other.parameters(), lr=1e-9, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0)
    recorder = Recorder()
    run = make(
        other,
        At({Event.BEFORE_FORWARD}, noise),
        optimizers=optimizer,
        callbacks=recorder,
        accumulate=2,
        max_duration="1ba",
    )
    train(run)

    first, second, *repeated = seen
    assert not torch.equal(first, second)
    assert len(repeated) >= 2
    deep_compare([first, second] * (len(repeated) // 2), repeated)
    passes = len(seen) // 2
    assert recorder.events.count("before_train_batch") == recorder.events.count("after_train_batch") == passes


# ---- random numbers ----


def test_neither_the_host_nor_an_evaluation_changes_the_random_numbers_of_training() -> None:
    expected = train(make(network(0.5)))
    run = make(network(0.5))

    def between() -> None:
        with run.evaluation(batches()):
            torch.rand(5)
        torch.manual_seed(77)

    deep_compare(expected, train(run, after_epoch=between))
    other = train(make(network(0.5), seed=1))
    assert not torch.equal(expected["0.weight"], other["0.weight"])


def test_the_global_generator_continues_with_its_own_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    net = network()
    run = make(net)
    torch.manual_seed(5)
    train(run)

    assert torch.equal(expected, torch.rand(3))


# ---- exceptions ----


class Swapping(Algorithm):
    """Has other weights in the model during evaluations, as averages do."""

    events = frozenset({Event.EVAL_START, Event.EVAL_END})
    placement = Placement(provides={SWAPS_WEIGHTS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        for parameter in state.model.parameters():
            parameter.data.neg_()


class Died(Exception):
    """Something fails."""


def die(state: State) -> None:
    raise Died


def test_an_evaluation_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("composer.loop.hosted_run.time.perf_counter", lambda: float(next(clock)))
    run = make(max_duration="2ba")
    run.begin_fit()
    for batch in run.epoch():
        run.backward(run.loss(batch))
        with run.evaluation(batches()):
            next(itertools.islice(clock, 1000, None))
        run.step()
        with run.evaluation(batches()):
            next(itertools.islice(clock, 1000, None))
    run.end_fit()

    assert run.state.timestamp.batches == 2
    assert run.state.timestamp.total_seconds < 100


def test_an_evaluation_that_fails_leaves_the_weights_of_training() -> None:
    expected = train(make(network(0.5)))
    recorder = Recorder()
    run = make(network(0.5), Swapping(), callbacks=recorder)

    def failing() -> None:
        with pytest.raises(Died), run.evaluation(batches()):
            raise Died

    deep_compare(expected, train(run, after_epoch=failing))
    assert recorder.events.count("eval_end") == recorder.events.count("eval_after_all") == 2


@pytest.mark.parametrize("event", [Event.EVAL_START, Event.EVAL_END])
def test_an_algorithm_that_fails_ends_the_evaluation(event: Event) -> None:
    net = network()
    run = make(net, [Swapping(), At({event}, die)] if event is Event.EVAL_START else [At({event}, die), Swapping()])
    before = copy.deepcopy(net.state_dict())
    run.begin_fit()
    with pytest.raises(Died), run.evaluation(batches()):
        pass

    deep_compare(before, copy.deepcopy(net.state_dict()))
    assert run.state.dataloader_label == "train"
    run.end_fit()


class SwappingToSave(Algorithm):
    """Has other weights in the model from a checkpoint until training goes on."""

    events = frozenset({Event.BATCH_CHECKPOINT, Event.ITERATION_START, Event.BATCH_START})
    placement = Placement(provides={SWAPS_WEIGHTS})
    swapped = False

    def match(self, event: Event, state: State) -> bool:
        return is_saving(event, state) if event is Event.BATCH_CHECKPOINT else self.swapped

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.swapped = not self.swapped
        for parameter in state.model.parameters():
            parameter.data.neg_()


@pytest.mark.parametrize("where", ["batch", "pass", "loss", "gradients", "step", "saving", "evaluation"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_aborted_run_continues_with_the_unfinished_step(where: str, accumulate: int) -> None:
    expected = train(make(accumulate=accumulate))
    net, recorder = network(), Recorder()
    run = make(net, [Swapping(), SwappingToSave()], accumulate=accumulate, callbacks=recorder)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run.begin_fit()
    batches_of_epoch = run.epoch()
    batch = next(batches_of_epoch)
    if where == "pass":
        run.before_forward(batch)
    elif where != "batch":
        loss = run.loss(batch)
        if where != "loss":
            run.backward(loss)
            if where != "gradients" and not run.step():
                run.backward(run.loss(next(batches_of_epoch)))
                run.step()
    if where == "saving":
        swap_in(run.engine)  # as a host whose files are written later
    elif where == "evaluation":
        run.begin_evaluation(batches())
    run.abort()
    run.abort()

    assert torch.equal(before, torch.get_rng_state())
    deep_compare(expected, train(run))
    assert (run.state.timestamp.epoch, recorder.events.count("epoch_end"), recorder.events.count("fit_end")) == (
        2,
        2,
        1,
    )


def test_abort_does_nothing_outside_of_training() -> None:
    run = make()
    run.abort()
    run.init()
    run.abort()
    train(run)
    run.abort()

    assert run.is_over()


def test_settings_of_the_host_change_between_two_fits() -> None:
    net = network()
    run = make(net, max_duration="1ep", accumulate=2)
    train(run)
    run.reconfigure(precision="amp_bf16")
    run.state.max_duration = "2ep"
    train(run)

    assert (run.state.timestamp.batch, run.state.dataloader_len) == (2 + 4, 4)
    assert run.state.outputs.dtype == torch.bfloat16


def test_settings_that_an_algorithm_excludes_are_refused() -> None:
    algorithm = At({Event.BATCH_END})
    algorithm.placement = Placement(provides={CHANGES_BATCH_SIZE}, excludes={AVERAGES_WEIGHTS})
    run = make(algorithms=algorithm, max_duration="1ep")
    with pytest.raises(ConflictError, match="`HostFeatures`"):
        run.reconfigure(host_provides={AVERAGES_WEIGHTS})
    with pytest.raises(ConflictError, match="Use `accumulate=1`"):
        run.reconfigure(accumulate=2)
    with pytest.raises(ConflictError, match="Leave it out"):
        run.reconfigure(unavailable={Event.BATCH_END: "Leave it out."})
    train(run)

    assert run.state.timestamp.batch == 4


# ---- saving ----


def stepped(run: HostedRun, steps: int) -> None:
    run.begin_fit()
    count = 0
    while count < steps:
        for batch in run.epoch():
            run.backward(run.loss(batch))
            count += run.step()
            if count == steps:
                return


def shuffled(seed: int | None) -> DataLoader[Any]:
    """Return a loader of four batches; without a seed, the global generator orders them."""
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    data = TensorDataset(*batches([16])[0])
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


class KeepsItsPlace:
    """A loader of four batches that saves its own position, like torchdata's, and never returns to its first batch."""

    def __init__(self) -> None:
        self.start = self.drawn = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        self.drawn, self.start = self.start, 0
        for batch in batches()[self.drawn :]:
            self.drawn += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.start = saved["drawn"]


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": batches,
    "with a state": KeepsItsPlace,
    "shuffled by its generator": lambda: shuffled(5),
    "shuffled": lambda: shuffled(None),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(("steps", "accumulate"), [(2, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_a_resumed_run_ends_as_an_uninterrupted_one(steps: int, accumulate: int, loader: Callable[[], Any]) -> None:
    expected = train(make(network(0.5), dataloader=loader(), accumulate=accumulate))
    killed = make(network(0.5), dataloader=loader(), accumulate=accumulate)
    stepped(killed, steps)
    file = io.BytesIO()
    optimizer = killed.state.optimizers[0].state_dict()
    torch.save({"net": killed.model.state_dict(), "run": killed.state_dict(), "optimizer": optimizer}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    torch.manual_seed(31)
    run = make(network(0.5), seed=9, dataloader=loader(), accumulate=accumulate)
    run.model.load_state_dict(saved["net"])
    run.load_state_dict(saved["run"])
    run.state.optimizers[0].load_state_dict(saved["optimizer"])
    deep_compare(expected, train(run))


def saved_after(run: HostedRun, steps: int) -> dict[str, Any]:
    """Train some steps; return what a program saves."""
    stepped(run, steps)
    return copy.deepcopy(
        {"net": run.model.state_dict(), "run": run.state_dict(), "optimizer": run.state.optimizers[0].state_dict()}
    )


def loaded(saved: dict[str, Any], **options: Any) -> HostedRun:
    """Return a new run in another process's place, with what was saved."""
    torch.manual_seed(31)
    run = make(network(0.5), seed=9, **options)
    run.model.load_state_dict(saved["net"])
    run.load_state_dict(copy.deepcopy(saved["run"]))
    run.state.optimizers[0].load_state_dict(copy.deepcopy(saved["optimizer"]))
    return run


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 4), (2, 1)])
def test_more_or_fewer_batches_may_make_a_step_after_a_resumption(before: int, after: int) -> None:
    loader = batches((2,) * 8)
    saved = saved_after(make(network(0.5), dataloader=loader, accumulate=before), 4 // before)

    run = loaded(saved, dataloader=loader, accumulate=after)
    run.begin_fit()
    trained = sum(len(batch[1]) for batch in trained_batches(run))

    assert trained == 8
    assert (run.state.timestamp.epochs, run.state.timestamp.samples) == (1, 16)


def trained_batches(run: HostedRun) -> Iterator[Any]:
    """Train the rest of an epoch."""
    for batch in run.epoch():
        run.backward(run.loss(batch))
        run.step()
        yield batch


@pytest.mark.parametrize("begun", [False, True], ids=["before begin_fit", "after begin_fit"])
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_a_run_that_is_saved_again_before_it_trains_resumes_alike(loader: Callable[[], Any], begun: bool) -> None:
    expected = train(make(network(0.5), dataloader=loader()))
    saved = saved_after(make(network(0.5), dataloader=loader()), 2)

    between = loaded(saved, dataloader=loader())
    if begun:
        between.begin_fit()
    again = {**saved, "run": between.state_dict()}
    between.abort()

    deep_compare(expected, train(loaded(again, dataloader=loader())))


class Drawing(Dataset[Any]):
    """Sixteen examples with noise of Python's and NumPy's generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return batches((16,))[0][0][index] + random.random() + np.random.rand(), torch.tensor(index % 2)  # noqa: NPY002


def test_generators_of_python_and_numpy_continue_too() -> None:
    def new() -> HostedRun:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        return make(network(0.5), dataloader=DataLoader(Drawing(), batch_size=4))

    expected = train(new())
    saved = saved_after(new(), 3)
    random.seed(2)

    deep_compare(expected, train(loaded(saved, dataloader=DataLoader(Drawing(), batch_size=4))))


def test_an_unfinished_step_is_not_saved() -> None:
    run = make(network(), accumulate=2)
    run.begin_fit()
    batch = next(run.epoch())
    run.backward(run.loss(batch))

    with pytest.raises(RuntimeError, match="must be called between two steps"), run.saving():
        run.state_dict()


def test_an_algorithm_is_given_once() -> None:
    algorithm = At({Event.BATCH_END})
    with pytest.raises(ValueError, match="the same `At` object twice"):
        make(algorithms=[algorithm, algorithm])


def test_callbacks_of_others_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be callbacks of composer, got At\. Pass it in `algorithms`"):
        make(callbacks=At(set()))
    with pytest.raises(TypeError, match=r"must be callbacks of composer, got object\.$"):
        make(callbacks=[object()])


def test_the_state_of_another_run_is_reported() -> None:
    saved = make().state_dict()
    with pytest.warns(UserWarning, match="different algorithms: At"):
        make(algorithms=At(set())).load_state_dict(saved)
    run, saved = make(), make(algorithms=At(set())).state_dict()
    with pytest.warns(UserWarning, match="averaged weights, this one starts from the averages"):
        run.load_state_dict(saved)
    run.take_optimizers(torch.optim.SGD(run.model.parameters(), lr=0.1))  # a second warning would fail the test
    with pytest.raises(ValueError, match=r"must be a result of `HostedRun\.state_dict`, but lacks algorithms"):
        make().load_state_dict({"timestamp": {}})


def test_missing_ends_of_epochs_are_announced() -> None:
    recorder = Recorder()
    run = make(callbacks=recorder)
    run.begin_fit()
    run.catch_up(2)
    run.catch_up(2)

    assert run.state.timestamp.epoch == 2
    assert recorder.events.count("epoch_end") == 2


def test_weights_to_save_are_in_the_model_only_while_it_is_saved() -> None:
    net, swapping = network(), SwappingToSave()
    run = make(net, swapping)
    stepped(run, 1)
    weight = net[0].weight.detach().clone()
    with run.saving():
        assert torch.equal(net[0].weight, -weight)
        with run.saving():
            pass
        assert torch.equal(net[0].weight, -weight)
    assert torch.equal(net[0].weight, weight)
    with pytest.raises(Died), run.saving():
        raise Died
    with run.evaluation(batches()), run.saving():
        assert torch.equal(net[0].weight, -weight)

    assert torch.equal(net[0].weight, weight)


# ---- what the host says ----


def test_what_the_host_lacks_is_refused_at_once() -> None:
    unavailable = {Event.BEFORE_LOSS: "Split the step.", AVERAGES_WEIGHTS: "Leave it out."}
    with pytest.raises(
        ConflictError, match=r"`At` acts at BEFORE_LOSS, which this loop cannot announce\. Split the step"
    ):
        make(algorithms=At({Event.BEFORE_LOSS}), unavailable=unavailable)
    with pytest.raises(ConflictError, match="`At` may act at BEFORE_LOSS, or any event"):
        make(algorithms=At(None), unavailable=unavailable)
    algorithm = At({Event.BATCH_END})
    algorithm.placement = Placement(provides={AVERAGES_WEIGHTS})
    with pytest.raises(ConflictError, match=r"`At` averages weights, which this loop does not support\. Leave it out"):
        make(algorithms=algorithm, unavailable=unavailable)


def test_the_first_labels_of_a_causal_model_of_transformers_do_not_count() -> None:
    settings = {"__module__": "transformers.models.tiny", "ignore_index": -100}
    model = type("TinyForCausalLM", (torch.nn.Module,), settings)()
    batch = {"input_ids": torch.zeros(2, 2), "labels": torch.tensor([[1, -100], [2, 3]])}

    assert LossTerms(model, DataSpec([])).count(batch) == 1


def test_features_of_the_host_may_exclude_an_algorithm() -> None:
    algorithm = At({Event.BATCH_END})
    algorithm.placement = Placement(excludes={AVERAGES_WEIGHTS})
    make(algorithms=algorithm)
    with pytest.raises(ConflictError, match="`HostFeatures`"):
        make(algorithms=algorithm, host_provides={AVERAGES_WEIGHTS})


def test_the_plan_names_the_hooks_of_the_host_and_the_parts_of_the_first_batch() -> None:
    loader = [{"pixel_values": torch.zeros(2, 5), "labels": torch.zeros(2)}]
    run = make(algorithms=At({Event.BATCH_END}), hooks={Event.BATCH_END: "on_train_batch_end"}, dataloader=loader)
    run.begin_fit()
    next(run.epoch())
    plan = run.explain()
    (row,) = plan

    assert (row.event, row.reason) == (Event.BATCH_END, "as listed; from on_train_batch_end")
    assert plan.notes == {"batch": "inputs: 'pixel_values', targets: 'labels'"}


def test_the_forward_pass_may_use_a_wrapped_model() -> None:
    calls: list[Any] = []
    net = network()

    class Wrapped(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            calls.append(x)
            return net(x)

    run = make(net)
    run.use_model(Wrapped())
    stepped(run, 2)
    assert len(calls) == 2


def test_a_data_spec_transforms_and_counts_batches() -> None:
    spec = DataSpec(
        batches(), batch_transforms=lambda batch: (batch[0] * 0, batch[1]), get_num_samples_in_batch=lambda b: 10
    )
    seen: list[float] = []
    run = make(
        algorithms=At({Event.AFTER_DATALOADER}, lambda state: seen.append(float(state.batch[0].sum()))),
        dataloader=spec,
        max_duration="1ep",
    )
    train(run)

    assert run.state.timestamp.sample == 40
    assert seen == [0.0] * 4


def test_losses_are_logged() -> None:
    class Journal(LoggerDestination):
        def __init__(self) -> None:
            self.names: list[str] = []

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            self.names += metrics

    journal = Journal()
    run = make(loggers=journal, max_duration="1ep")
    train(run)

    assert journal.names == ["loss/train/total"] * 4
    assert run.state.total_loss_dict["loss/train/total"] > 0


# ---- bad use ----


def fitted() -> HostedRun:
    run = make()
    run.begin_fit()
    return run


def in_an_epoch() -> HostedRun:
    run = fitted()
    run.begin_epoch()
    return run


def after_a_loss() -> HostedRun:
    run = in_an_epoch()
    run.loss(run.after_dataloader(batches()[0]))
    return run


BATCH = batches()[0]
WRONG: dict[str, tuple[Callable[[], HostedRun], Callable[[HostedRun], object], str]] = {
    "init twice": (fitted, lambda run: run.init(), "`init` must be called before `init`, but the run is between two"),
    "begin_fit twice": (fitted, lambda run: run.begin_fit(), r"`begin_fit` must be called .*Call `end_fit` first"),
    "epoch before begin_fit": (make, lambda run: run.begin_epoch(), "Call `begin_fit` before the first"),
    "epoch twice": (in_an_epoch, lambda run: run.begin_epoch(), "`end_epoch` after each epoch"),
    "loss before a batch": (in_an_epoch, lambda run: run.loss(BATCH), "Get the batch from `epoch`"),
    "loss before backward": (after_a_loss, lambda run: run.loss(BATCH), "Get the batch from `epoch`"),
    "backward before loss": (in_an_epoch, lambda run: run.backward(torch.ones(())), "Call `loss` first"),
    "step before backward": (after_a_loss, lambda run: run.step(), "Call `loss` and `backward` first"),
    "after_forward first": (in_an_epoch, lambda run: run.after_forward(BATCH), "Call `before_forward` first"),
    "before_loss first": (in_an_epoch, lambda run: run.before_loss(), "Call `before_forward` first"),
    "after_loss first": (in_an_epoch, lambda run: run.after_loss(torch.ones(())), "Call `before_forward` first"),
    "after_backward first": (in_an_epoch, lambda run: run.after_backward(), "Call it after `after_loss`"),
    "a batch outside an epoch": (fitted, lambda run: run.after_dataloader(BATCH), "Call `begin_epoch` first"),
    "end_batch first": (in_an_epoch, lambda run: run.end_batch(), "Call it after the step of the optimizers"),
    "end_batch before backward": (after_a_loss, lambda run: run.end_batch(), "Call it after the step of the optim"),
    "end_epoch first": (fitted, lambda run: run.end_epoch(), "Call `begin_epoch` first"),
    "end_fit first": (make, lambda run: run.end_fit(), "Call `begin_fit` first"),
    "end_fit in a step": (after_a_loss, lambda run: run.end_fit(), "finish each step"),
    "evaluation in a pass": (after_a_loss, lambda run: run.begin_evaluation([]), "Finish the pass"),
    "pause in a pass": (after_a_loss, lambda run: run.pause(), "Call `pause` after `backward`"),
    "eval_forward": (fitted, lambda run: run.eval_forward(BATCH), "Call it in `with run.evaluation"),
    "end_evaluation": (fitted, lambda run: run.end_evaluation(), "Call `begin_evaluation` first"),
    "reconfigure": (fitted, lambda run: run.reconfigure(), "or `abort` after an exception"),
    "optimizers in training": (fitted, lambda run: run.take_optimizers(), "Call it before `begin_fit`"),
    "loading in training": (fitted, lambda run: run.load_state_dict(run.state_dict()), "Call it before `begin_fit`"),
    "catching up": (make, lambda run: run.catch_up(1), "Call it after `begin_fit`"),
    "saving": (make, lambda run: run.saving().__enter__(), "or call `init` first"),
}


@pytest.mark.parametrize("label", WRONG)
def test_calls_out_of_order_are_answered(label: str) -> None:
    start, act, message = WRONG[label]
    run = start()
    with pytest.raises(RuntimeError, match=message):
        act(run)


def test_a_loop_that_does_not_train_its_batches_is_told() -> None:
    run = fitted()
    with pytest.raises(RuntimeError, match="Call `loss`, `backward` and `step` for each batch"):
        for _ in run.epoch():
            pass


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_samples_is_answered(accumulate: int) -> None:
    run = make(dataloader=batches((0, 0)), accumulate=accumulate)
    run.begin_fit()
    with pytest.raises(ValueError, match="The batches of a step must have samples, got 0"):
        next(run.epoch())


def test_batches_of_a_step_weigh_by_the_labels_that_their_loss_counts() -> None:
    inputs, labels = torch.randn(6, 5, generator=torch.Generator().manual_seed(3)), torch.tensor([9, 9, 1, 9, 0, 1])
    loss = functools.partial(criterion, ignore_index=9)
    whole = make(loss=loss, dataloader=[(inputs, labels)])
    parts = make(loss=loss, dataloader=list(zip(inputs.split(2), labels.split(2), strict=True)), accumulate=3)

    deep_compare(train(whole), train(parts), atol=1e-6, rtol=1e-6)


def train_in_ranks(rows: slice | None = None) -> dict[str, Any]:
    """Train on rows of batches whose labels are ignored in part; on several ranks, each on its own rows."""
    generator = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(2, 6, 5, generator=generator), torch.tensor([[9, 0, 1, 9, 0, 1], [1, 9, 9, 9, 0, 1]])
    if rows is None:
        rows = (slice(0, 2), slice(2, 6))[dist.get_global_rank()]
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [(x[rows], y[rows]) for x, y in zip(inputs, labels, strict=True)]
    loss = functools.partial(criterion, ignore_index=9)
    run = make(net, loss=loss, optimizers=optimizer, dataloader=data)
    if dist.get_world_size() > 1:
        run.use_model(torch.nn.parallel.DistributedDataParallel(net))
    return train(run)


def test_ranks_weigh_by_the_labels_that_their_loss_counts() -> None:
    expected = train_in_ranks(slice(0, 6))
    for result in run_on_ranks(train_in_ranks, 2):
        deep_compare(expected, result, atol=1e-6, rtol=1e-6)


def test_an_empty_batch_belongs_to_its_step() -> None:
    recorder = Recorder()
    run = make(callbacks=recorder, dataloader=batches((0, 4)), accumulate=2, max_duration="1ep")
    run.begin_fit()
    next(run.epoch())

    assert recorder.events.count("batch_start") == 1


def test_bad_arguments_are_named() -> None:
    net: Any = network()
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    twice = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net[0].parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="`accumulate` must be at least 1, got 0"):
        make(accumulate=0)
    with pytest.raises(ValueError, match="must hold parameters of `model`, got SGD, none of whose 4 parameters"):
        make(net, optimizers=other)
    with pytest.raises(ValueError, match="SGD shares 2 with one before it"):
        make(net, optimizers=twice)
    with pytest.raises(ValueError, match="`loss` must be given together with `forward`"):
        make(loss=None, forward=lambda module, batch: module(batch))
    with pytest.raises(TypeError, match="`loss` must be a function, got 3"):
        make(loss=3)
    with pytest.raises(TypeError, match=r"`model` must be a `torch\.nn\.Module`, got int"):
        HostedRun(3, loss=criterion, max_duration="1ep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`dataloader` must be given before training"):
        make(dataloader=None).begin_fit()


def test_what_is_missing_in_training_is_named() -> None:
    run = make(loss=None)
    run.begin_fit()
    run.begin_epoch()
    with pytest.raises(RuntimeError, match=r"Sequential is not a `ComposerModel`\. Pass `HostedRun\(\.\.\., loss="):
        run.loss(run.after_dataloader(BATCH))
    run = make(dataloader=[{"x": torch.zeros(2, 5)}])
    run.begin_fit()
    with pytest.raises(TypeError, match="must be given for batches that are neither tuples nor lists, got a dict"):
        run.loss(next(iter(run.epoch())))
    run = make(optimizers=None)
    run.begin_fit()
    run.backward(run.loss(next(iter(run.epoch()))))
    with pytest.raises(RuntimeError, match="`optimizers` must be given before `step`"):
        run.step()
    run = after_a_loss()
    run.state.precision = "amp_fp16"
    with pytest.raises(RuntimeError, match="`precision` must not be 'amp_fp16' without a `backward`"):
        run.backward(torch.ones(()))


def test_losses_may_be_collections() -> None:
    one, two = torch.ones(()), torch.full((2,), 2.0)

    assert [3.0, 3.0, 1.0, 2.0] == [
        float(total_loss(each)) for each in ((one, two), {"a": one, "b": two}, {"total": one, "b": two}, two)
    ]
    with pytest.raises(TypeError, match="`loss` must be a tensor, a sequence of tensors or a dict of tensors, got str"):
        total_loss("a")


def test_a_step_that_the_loop_makes_itself_is_told() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 3
    run = HostedRun(
        net,
        loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        optimizers=optimizer,
        dataloader=data,
        max_duration="1ep",
    )
    run.begin_fit()
    for number, batch in enumerate(run.epoch()):
        run.backward(run.loss(batch))
        if number == 1:
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"SGD has stepped since.*Remove `optimizer\.step\(\)`"):
                run.step()
            break
        run.step()


@pytest.mark.parametrize("duration", ["10ba", "2ep"])
@pytest.mark.parametrize("kind", ["exhausted", "empty"])
def test_an_epoch_without_batches_is_an_error(duration: str, kind: str) -> None:
    class Once:
        def __init__(self) -> None:
            self.iterator = iter(batches())

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return self.iterator

    run = make(dataloader=Once() if kind == "exhausted" else [], max_duration=duration)
    expected = "1, although it had yielded 4 before: it can be iterated" if kind == "exhausted" else "0. No batches"
    with pytest.raises(RuntimeError, match=f"yielded no batch in epoch {expected}"):
        train(run)


def test_a_loader_that_may_not_end_is_told_once_if_epochs_are_counted() -> None:
    with pytest.raises(ValueError, match="`dataloader` must have an end, got a cycle that yields batches forever"):
        train(make(dataloader=itertools.cycle(batches())))

    class Unsized:
        def __iter__(self) -> Any:
            return iter(batches())

    with pytest.warns(UserWarning, match="`dataloader` is a Unsized without a length.*Set `max_duration` in") as caught:
        train(make(dataloader=Unsized()))
    assert 1 == len(caught)
    train(make(dataloader=Unsized(), max_duration="8ba"))


def test_an_epoch_longer_than_its_loader_is_told_once() -> None:
    class Sized(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return (batch for batch in batches() for _ in range(2))

    run = make(dataloader=torch.utils.data.DataLoader(Sized(), batch_size=2, collate_fn=lambda pair: pair[0]))
    with pytest.warns(UserWarning, match="yields more batches than its length, 2.*Correct the `__len__`") as caught:
        train(run)
    assert 1 == len(caught)


def test_a_data_set_is_not_a_loader() -> None:
    with pytest.raises(TypeError, match="`dataloader` must be an iterable of batches, got a TensorDataset"):
        make(dataloader=TensorDataset(torch.zeros(4, 5), torch.zeros(4)))


def test_schedules_of_composer_must_be_compiled_first() -> None:
    with pytest.raises(TypeError, match=r"`schedulers` must have a method `step`.*`run.init\(\)`.*optimizer=each\)"):
        make(schedulers=lambda state, ssr=1.0: 1.0)


def test_two_runs_in_turns_equal_each_alone() -> None:
    def made(seed: int) -> HostedRun:
        return make(network(0.5), seed=seed, max_duration="1ep")

    alone = [train(made(seed)) for seed in (1, 2)]
    runs = [made(seed) for seed in (1, 2)]
    before = torch.get_rng_state()
    for run in runs:
        run.begin_fit()
    for pair in itertools.zip_longest(*(run.epoch() for run in runs)):
        losses = [run.loss(batch) for run, batch in zip(runs, pair, strict=True)]
        for run, loss in zip(runs, losses, strict=True):
            run.backward(loss)
            run.step()
    for run in runs:
        run.end_fit()

    deep_compare(alone, [run.model.state_dict() for run in runs])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": torch.nn.CrossEntropyLoss()},
            r"must take the outputs and the batch, got CrossEntropyLoss\(\) of torch",
        ),
        ({"loss": cross_entropy}, "must take the outputs and the batch, got cross_entropy of torch"),
        ({"optimizers": torch.optim.SGD}, r"must be optimizers, got SGD\. Make one of the model's parameters"),
        (
            {"schedulers": torch.optim.lr_scheduler.StepLR},
            r"must be objects, got the class StepLR\. Write `StepLR\(\.\.\.\)`",
        ),
        ({"max_duration": None}, "`max_duration` must be given, got None"),
        ({"max_duration": "0ep"}, "must be above 0, got '0ep': nothing would be trained"),
    ],
)
def test_what_people_try_first_is_answered(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)
