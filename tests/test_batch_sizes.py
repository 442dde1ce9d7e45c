"""`BatchSizeWarmup` in runs: counts and schedules, parts of batches, ranks, and evaluations on the way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composer import Callback, DataSpec, State, Trainer
from composer.algorithms import BatchSizeWarmup
from composer.datasets import DeviceLoader, ResumableDataLoader
from composer.loggers import Logger
from composer.models import ComposerClassifier
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    MultiStepScheduler,
    WarmupStableDecayScheduler,
)
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist

SAMPLES, FINAL = 64, 16


class Steps(Callback):
    """Records the size and the counts of each step, and learning rates by the samples that they follow from."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: dict[int, float] = {}
        self.counts: list[tuple[int, int, int]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.sizes.append(len(state.batch[1]))
        now = state.timestamp
        self.counts.append((now.batch.value, now.sample.value, now.sample_in_epoch.value))
        before = state.previous_timestamp
        assert before is not None
        self.rates[before.sample.value] = state.optimizers[0].param_groups[0]["lr"]


def of_torch(dataset: TensorDataset, batch_size: int) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset, shuffle=False) if dist.get_world_size() > 1 else None
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def on_device(dataset: TensorDataset, batch_size: int, transform: Any = None) -> DeviceLoader:
    return DeviceLoader(*dataset.tensors, batch_size, shuffle=False, transform=transform)


def resumable(dataset: TensorDataset, batch_size: int) -> ResumableDataLoader:
    return ResumableDataLoader(dataset, batch_size, shuffle=False, num_workers=1)


def run(
    *algorithms: Any, microbatch_size: int | None = None, shards: int = 1, kind: Any = of_torch, **arguments: Any
) -> tuple[Any, Steps]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))
    torch.manual_seed(1)
    model = ComposerClassifier(torch.nn.Linear(6, 3).double(), num_classes=3)
    steps = Steps()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=list(algorithms),
        callbacks=[steps],
        device_train_microbatch_size=microbatch_size,
        progress_bar=False,
        device="cpu",
        **{
            "max_duration": "2ep",
            "schedulers": LinearScheduler(),
            "train_dataloader": kind(dataset, FINAL // shards),
            **arguments,
        },
    )
    trainer.fit()
    return trainer, steps


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in trainer.state.model.named_parameters()}


def test_batches_grow_and_every_sample_is_trained_once_per_epoch() -> None:
    trainer, steps = run(BatchSizeWarmup(2, duration="96sp"))

    assert steps.sizes == [2] * 16 + [4] * 8 + [8] * 4 + [16] * 2
    assert steps.counts[-1] == (30, 2 * SAMPLES, SAMPLES)
    assert trainer.state.timestamp.epoch == 2


@pytest.mark.parametrize("max_duration", ["128sp", "2ep"])
@pytest.mark.parametrize(
    "schedule",
    [
        LinearScheduler(t_max="128sp"),
        LinearScheduler(),
        LinearScheduler(t_max="2ep"),
        CosineAnnealingWithWarmupScheduler("0.25dur"),
        MultiStepScheduler(["1ep", "96sp"]),
        WarmupStableDecayScheduler("0.125dur", t_decay="0.5dur"),
    ],
)
def test_a_schedule_of_samples_or_epochs_is_the_same_function_of_the_samples(max_duration: str, schedule: Any) -> None:
    _, plain = run(max_duration=max_duration, schedulers=schedule)
    _, grown = run(BatchSizeWarmup(4, duration="64sp"), max_duration=max_duration, schedulers=schedule)

    common = plain.rates.keys() & grown.rates.keys()
    assert len(common) >= 6
    assert {key: plain.rates[key] for key in common} == {key: grown.rates[key] for key in common}


def test_a_schedule_in_a_run_of_tokens_is_the_same_function_of_the_tokens() -> None:
    def run_tokens(*algorithms: Any) -> Steps:
        dataset = TensorDataset(torch.ones(SAMPLES, 6, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.int64))
        loader = DataLoader(dataset, batch_size=FINAL)
        spec = DataSpec(loader, get_num_tokens_in_batch=lambda batch: 6 * len(batch[1]))
        return run(*algorithms, train_dataloader=spec, max_duration="768tok")[1]

    plain, grown = run_tokens(), run_tokens(BatchSizeWarmup(4, duration="64sp"))
    common = plain.rates.keys() & grown.rates.keys()
    assert len(common) >= 6
    assert {key: plain.rates[key] for key in common} == {key: grown.rates[key] for key in common}


def test_microbatches_equal_whole_batches() -> None:
    """One batch is accumulated from one to four microbatches."""
    warmup = {"initial_batch_size": 4, "duration": "96sp", "multiple_of": 4}
    whole, sizes = run(BatchSizeWarmup(**warmup))
    parts, sizes_of_parts = run(BatchSizeWarmup(**warmup), microbatch_size=4)

    assert sizes.sizes == sizes_of_parts.sizes
    torch.testing.assert_close(weights(whole), weights(parts), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [on_device, resumable])
def test_loaders_that_make_batches_of_any_size_give_the_batches_of_torch(kind: Any, tmp_path: Any) -> None:
    plain, steps = run(BatchSizeWarmup(2, duration="96sp"))
    other, other_steps = run(BatchSizeWarmup(2, duration="96sp"), kind=kind)
    assert (other_steps.sizes, other_steps.counts) == (steps.sizes, steps.counts)
    deep_compare(weights(other), weights(plain))

    saving = {"save_folder": str(tmp_path), "save_interval": "27ba", "kind": kind}  # in the second epoch
    run(BatchSizeWarmup(2, duration="96sp"), **saving, max_duration="2ep")
    resumed, rest = run(BatchSizeWarmup(2, duration="96sp"), kind=kind, load_path=str(tmp_path / "ep1-ba27-rank0.pt"))
    assert rest.sizes == steps.sizes[27:]
    deep_compare(weights(resumed), weights(plain))


class Noise:
    """Adds noise, and records how many samples of all ranks it was drawn for."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        self.counts.append(shape[0])
        return (torch.randn(shape, generator=generator, dtype=torch.float64),)

    def __call__(self, inputs: torch.Tensor, targets: Any, drawn: tuple[torch.Tensor, ...]) -> Any:
        return inputs + drawn[0], targets


def test_random_transforms_are_drawn_for_the_samples_of_the_batch() -> None:
    noise = Noise()
    _, steps = run(BatchSizeWarmup(2, duration="96sp"), kind=lambda *args: on_device(*args, transform=noise))

    assert noise.counts == steps.sizes


def on_a_rank(kind: Any) -> tuple[dict[str, torch.Tensor], list[int], list[tuple[int, int, int]]]:
    trainer, steps = run(BatchSizeWarmup(1, duration="96sp"), shards=dist.get_world_size(), kind=kind)
    return {name.removeprefix("module."): each for name, each in weights(trainer).items()}, steps.sizes, steps.counts


@pytest.mark.parametrize("kind", [of_torch, on_device])
def test_two_ranks_equal_one_process(kind: Any) -> None:
    """The duration is of all ranks together, the sizes of one. Rank r has the samples r, r + 2, ..."""
    one, steps = run(BatchSizeWarmup(2, duration="96sp"))

    for found, sizes, counts in run_on_ranks(on_a_rank, 2, kind):
        torch.testing.assert_close(weights(one), found, atol=1e-12, rtol=0)
        assert [2 * size for size in sizes] == steps.sizes
        assert counts == steps.counts


def test_evaluations_on_the_way_neither_warn_nor_change_the_batches() -> None:
    _, plain = run(BatchSizeWarmup(2, duration="96sp"))
    loader = DataLoader(TensorDataset(torch.randn(8, 6).double(), torch.zeros(8).long()), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, evaluated = run(BatchSizeWarmup(2, duration="96sp"), eval_dataloader=loader, eval_interval="5ba")
        _, at_ends = run(BatchSizeWarmup(2, duration="96sp"), eval_dataloader=loader, eval_interval="1ep")

    assert plain.sizes == evaluated.sizes == at_ends.sizes


def test_a_second_fit_goes_on_where_the_first_stopped() -> None:
    once, steps = run(BatchSizeWarmup(2, duration="96sp"), max_duration="2ep", schedulers=None)
    twice, more = run(BatchSizeWarmup(2, duration="96sp"), max_duration="5ba", schedulers=None)
    twice.fit(duration="25ba")

    assert steps.sizes == more.sizes
    deep_compare(weights(once), weights(twice))


@pytest.mark.parametrize("kind", [of_torch, on_device, resumable])
def test_an_object_makes_a_new_plan_for_another_run(kind: Any) -> None:
    used = BatchSizeWarmup(2, duration="0.5dur")
    run(used, kind=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, again = run(used, kind=kind, max_duration="4ep")

    assert again.sizes == run(BatchSizeWarmup(2, duration="0.5dur"), kind=kind, max_duration="4ep")[1].sizes


def test_a_loader_with_sizes_of_its_own_is_refused() -> None:
    def kind(*arguments: Any) -> DeviceLoader:
        loader = on_device(*arguments)
        loader.batch_sizes = lambda samples: 4
        return loader

    with pytest.raises(ValueError, match="must not have `batch_sizes` of its own"):
        run(BatchSizeWarmup(2, duration="96sp"), kind=kind)
