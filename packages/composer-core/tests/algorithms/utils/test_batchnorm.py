"""Batch norm statistics of weights that were not trained with."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from composer import functional as cf
from composer.algorithms.utils.batchnorm import BatchNormRecalibration, recalibrate_batchnorm
from composer.algorithms.warnings import NoEffectWarning
from composer.core import DataSpec, State
from composer.testing import SimpleConvModel, deep_compare, run_on_ranks


class Net(nn.Sequential):
    """Two batch norms, and a dropout before the second."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))


def batches_of(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(5, 3, generator=generator) + 1 for _ in range(count)]


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if "running" in name}


@settings(deadline=None, max_examples=20)
@given(count=st.integers(1, 6))
def test_statistics_are_the_mean_over_the_batches(count: int) -> None:
    model = Net().double()
    batches = [batch.double() for batch in batches_of(count)]
    recalibrate_batchnorm(model, iter(batches))

    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    torch.testing.assert_close(torch.stack([b.mean(0) for b in batches]).mean(0), norm.running_mean)
    torch.testing.assert_close(torch.stack([b.var(0) for b in batches]).mean(0), norm.running_var)


def test_later_layers_are_those_of_torch_without_dropout() -> None:
    model = Net().double()
    expected = copy.deepcopy(model)
    expected[2] = nn.Identity()
    batches = [batch.double() for batch in batches_of(4)]
    recalibrate_batchnorm(model, batches)
    torch.optim.swa_utils.update_bn(batches, expected)

    deep_compare(statistics(expected), statistics(model), atol=1e-12)


def test_only_the_first_batches_are_used() -> None:
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    recalibrate_batchnorm(models[0], batches_of(2))
    recalibrate_batchnorm(models[1], batches_of(5), num_batches=2)

    deep_compare(statistics(models[0]), statistics(models[1]))


@pytest.mark.parametrize("training", [True, False])
def test_modes_momenta_counters_and_gradients_stay(training: bool) -> None:
    model = Net().train(training)
    model[0].eval()
    model[3].momentum = None  # type: ignore[assignment]
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" not in name}
    recalibrate_batchnorm(model, batches_of(3))

    assert [training, False, training] == [model.training, model[0].training, model[3].training]
    assert [0.1, None] == [model[0].momentum, model[3].momentum]
    deep_compare(before, {name: value for name, value in model.state_dict().items() if "running" not in name})
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model[0]._forward_pre_hooks


def test_a_layer_that_is_called_twice_counts_every_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + self.norm(2 * x)  # type: ignore[no-any-return]

    model, (batch,) = Shared(), batches_of(1)
    recalibrate_batchnorm(model, [batch])

    torch.testing.assert_close(1.5 * batch.mean(0), model.norm.running_mean)


def test_a_compiled_model_is_measured_uncompiled() -> None:
    model, expected = Net(), Net()
    expected.load_state_dict(model.state_dict())
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    recalibrate_batchnorm(torch.compile(model, backend=count), batches_of(5))  # type: ignore[arg-type]
    recalibrate_batchnorm(expected, batches_of(5))

    deep_compare(statistics(expected), statistics(model))
    assert not graphs


def test_without_batch_norm_there_is_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match="`recalibrate_batchnorm` changed nothing: the model has no batch norm"):
        cf.recalibrate_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), [])


def test_without_batches_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="`batches` must have at least one batch on every rank, got none"):
        recalibrate_batchnorm(Net(), [])


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_batches_must_be_positive(number: int) -> None:
    with pytest.raises(ValueError, match="`num_batches` must be at least 1"):
        recalibrate_batchnorm(Net(), batches_of(1), num_batches=number)


# ---- in a run ----


def state_of(loader: Iterable[Any], model: nn.Module | None = None, **options: Any) -> State:
    torch.manual_seed(3)
    model = SimpleConvModel(norm="batch") if model is None else model
    return State(model=model, max_duration="1ep", dataloader=loader, rank_zero_seed=5, **options)


def images(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 2)


def entered(state: State, **options: Any) -> dict[str, torch.Tensor]:
    recalibration = BatchNormRecalibration("Method", options.pop("num_batches", 2), **options)
    recalibration.check(state)
    recalibration.enter(state, version=0)
    return statistics(state.model)


def test_a_list_of_batches_is_used_as_it_is() -> None:
    batches = [tuple(images()[i : i + 8]) for i in (0, 8, 16)]
    state = state_of(batches)
    expected = copy.deepcopy(state.model)
    recalibrate_batchnorm(expected, batches, num_batches=2)

    deep_compare(statistics(expected), entered(state))


def test_a_model_that_is_not_of_the_library_gets_the_inputs_of_a_pair() -> None:
    batches = [(x, torch.zeros(5)) for x in batches_of(2)]
    state = state_of(batches, Net())
    expected = copy.deepcopy(state.model)
    recalibrate_batchnorm(expected, [x for x, _ in batches])

    deep_compare(statistics(expected), entered(state))


def test_the_transforms_of_the_data_apply() -> None:
    loader = DataLoader(images(), batch_size=8)
    state = state_of(loader)
    state.train_data_spec = DataSpec(
        loader,
        batch_transforms=lambda batch: (batch[0] + 1, batch[1]),
        microbatch_transforms=lambda batch: (2 * batch[0], batch[1]),
    )
    expected = copy.deepcopy(state.model)
    recalibrate_batchnorm(expected, [(2 * (x + 1), y) for x, y in loader], num_batches=2)

    deep_compare(statistics(expected), entered(state))


def test_microbatches_are_those_of_training() -> None:
    loader = DataLoader(images(), batch_size=8)
    expected = state_of(DataLoader(images(), batch_size=4))
    state = state_of(loader, device_train_microbatch_size=4)

    deep_compare(entered(expected, num_batches=4), entered(state, num_batches=2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(4)], ids=["global", "own"])
def test_training_does_not_notice(workers: int, generator: torch.Generator | None) -> None:
    """Neither the order of the data, nor an iteration in progress, nor any random number changes."""
    found = []
    for recalibrates in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        own = None if generator is None else torch.Generator().manual_seed(4)
        data = TensorDataset(torch.arange(24.0), torch.arange(24))
        loader = DataLoader(
            data,
            batch_size=4,
            sampler=RandomSampler(data, generator=own),
            generator=own,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        state = state_of(loader, nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.BatchNorm1d(1)))
        seen: list[Any] = []
        for _ in range(2):
            for batch in loader:
                seen += [batch[1].tolist(), torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
                if recalibrates:
                    entered(state)
        found.append(seen)
        loader._iterator = None  # ends its workers: each takes five seconds if garbage collection ends them

    assert found[0] == found[1]


def test_the_batches_are_the_same_each_time() -> None:
    loader = DataLoader(images(), batch_size=8, shuffle=True)
    first, second = state_of(loader), state_of(loader)
    found = entered(first)
    torch.rand(3)

    deep_compare(found, entered(second))


def test_the_same_weights_are_measured_once() -> None:
    calls = 0

    def counted(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return batch

    batches = [tuple(images()[:8])]
    state = state_of(batches)
    state.train_data_spec = DataSpec(batches, batch_transforms=counted)
    recalibration = BatchNormRecalibration("Method", 50)
    training = recalibration.training_statistics(state.model)
    recalibration.enter(state, version=3)
    measured = statistics(state.model)
    recalibration.restore(state.model, training)
    deep_compare(training, statistics(state.model))
    recalibration.enter(state, version=3)
    deep_compare(measured, statistics(state.model))
    assert calls == 1

    other = BatchNormRecalibration("Method", 50)
    other.load_state_dict(copy.deepcopy(recalibration.state_dict()))
    other.restore(state.model, training)
    other.enter(state, version=3)
    deep_compare(measured, statistics(state.model))
    assert calls == 1
    other.enter(state, version=4)
    assert calls == 2


def test_layers_that_trained_in_evaluation_mode_keep_their_statistics() -> None:
    state = state_of([(x, 0) for x in batches_of(2)], Net())
    state.model[0].eval()  # type: ignore[operator,union-attr,index]
    recalibration = BatchNormRecalibration("Method", 2)
    recalibration.check(state)
    recalibration.observe(state)
    state.model.eval()
    before = statistics(state.model)
    recalibration.enter(state, version=1)
    after = statistics(state.model)

    assert torch.equal(before["0.running_mean"], after["0.running_mean"])
    assert not torch.equal(before["3.running_mean"], after["3.running_mean"])


class Stream(IterableDataset[Any]):
    """Data of one pass."""

    def __iter__(self) -> Iterator[Any]:
        yield from images()


@pytest.mark.parametrize("data", [DataLoader(Stream(), batch_size=4), iter([1])], ids=["stream", "iterator"])
def test_data_that_cannot_be_iterated_beside_training_are_refused(data: Any) -> None:
    recalibration = BatchNormRecalibration("Method", 2)
    with pytest.raises(
        ValueError, match=r"`Method` must recalibrate .* `recalibration_data`, or `recalibration_batches=0`"
    ):
        recalibration.check(state_of(data))
    recalibration.check(state_of(data, nn.Linear(2, 2)))  # nothing to recalibrate
    BatchNormRecalibration("Method", 0).check(state_of(data))


def test_other_data_may_be_given() -> None:
    batches = [tuple(images()[:8])]
    expected = entered(state_of(batches))

    deep_compare(expected, entered(state_of(iter([1])), data=batches))
    deep_compare(expected, entered(state_of(iter([1])), data=DataSpec(batches)))


def test_switched_off_nothing_changes() -> None:
    state = state_of([tuple(images()[:8])])
    before = statistics(state.model)

    deep_compare(before, entered(state, num_batches=0))


def test_empty_data_are_an_error() -> None:
    with pytest.raises(ValueError, match="`Method` must have batches to recalibrate"):
        entered(state_of([1]), data=DataLoader(images(3), batch_size=4, drop_last=True))


def test_without_training_data_the_statistics_stay_with_a_warning() -> None:
    state = State(model=SimpleConvModel(norm="batch"))
    before = statistics(state.model)
    recalibration = BatchNormRecalibration("Method", 2)
    with pytest.warns(NoEffectWarning, match="`Method` cannot recalibrate batch norm layers without training data"):
        recalibration.enter(state, 0)

    deep_compare(before, statistics(state.model))


def measure_on_rank() -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Net().double()
    # The second rank has one batch more.
    recalibrate_batchnorm(
        model, [batch.double() for batch in batches_of(4)[2 * rank : 2 + 2 * rank + rank]][: 2 + rank]
    )
    return statistics(model)


def test_ranks_have_the_mean_over_all_their_batches() -> None:
    torch.manual_seed(0)
    model = Net().double()
    recalibrate_batchnorm(model, [batch.double() for batch in batches_of(4)])

    for found in run_on_ranks(measure_on_rank, 2):
        deep_compare(statistics(model), found, atol=1e-12)
