"""`compute_batch_size`, `WarmupBatchSampler` and `estimate_noise_scale`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from composer.algorithms.batch_size_warmup import WarmupBatchSampler, compute_batch_size, estimate_noise_scale

PLANS = st.fixed_dictionaries(
    {
        "duration": st.integers(0, 300),
        "initial": st.integers(1, 20),
        "final": st.integers(20, 60),
        "shape": st.sampled_from(["linear", "doubling"]),
        "multiple_of": st.integers(1, 8),
    }
)


@given(PLANS)
def test_sizes_grow_from_the_initial_one_to_the_final_one(plan: dict[str, int]) -> None:
    sizes = [compute_batch_size(samples, **plan) for samples in range(320)]

    assert sizes[0] == (plan["initial"] if plan["duration"] else plan["final"])
    assert sizes[plan["duration"] :] == [plan["final"]] * (320 - plan["duration"])
    assert sizes == sorted(sizes)
    assert all(size % plan["multiple_of"] == 0 for size in sizes if plan["initial"] < size < plan["final"])


def test_the_doublings_are_at_equal_distances() -> None:
    sizes = [compute_batch_size(samples, 300, 10, 80, "doubling") for samples in (0, 99, 100, 199, 200, 299, 300)]

    assert sizes == [10, 10, 20, 20, 40, 40, 80]


def test_the_last_doubling_ends_at_the_final_size() -> None:
    assert [compute_batch_size(samples, 30, 10, 50, "doubling") for samples in (0, 10, 20, 30)] == [10, 20, 40, 50]


@given(PLANS, st.booleans(), st.integers(0, 250))
def test_batches_are_the_plain_order_in_other_parts(plan: dict[str, int], drop_last: bool, before: int) -> None:
    sampler = WarmupBatchSampler(range(100), **plan, drop_last=drop_last)
    sampler.samples_before = before
    batches = list(sampler)

    joined = [index for batch in batches for index in batch]
    assert joined == list(range(len(joined)))
    assert len(batches) == len(sampler)
    drawn = before
    for batch in batches[:-1]:
        assert len(batch) == compute_batch_size(drawn, **plan)
        drawn += len(batch)
    if not drop_last:
        assert len(joined) == 100
    elif batches:
        assert len(batches[-1]) == compute_batch_size(drawn, **plan)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_loads_the_same_batches(workers: int) -> None:
    dataset = TensorDataset(torch.arange(40))
    order = list(RandomSampler(dataset, generator=torch.Generator().manual_seed(5)))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(dataset, batch_sampler=WarmupBatchSampler(sampler, 20, 2, 16), num_workers=workers)

    batches = [batch.tolist() for (batch,) in loader]

    assert [len(batch) for batch in batches] == [2, 3, 5, 9, 15, 6]
    assert [index for batch in batches for index in batch] == order


def test_the_noise_scale_is_that_of_gradients_with_known_moments() -> None:
    """Gradients of examples are drawn from a normal distribution: tr(S) = 100 * 4, |G|^2 = 100 * 0.25."""
    generator = torch.Generator().manual_seed(0)
    gradients = 0.5 + 2 * torch.randn(4000, 16, 100, generator=generator, dtype=torch.float64)
    large = gradients.mean(1).square().sum(-1)
    small = gradients.view(4000, 4, 4, 100).mean(2).square().sum(-1)

    assert estimate_noise_scale(small, large, 4, 16).item() == pytest.approx(16, rel=0.02)


def test_averages_are_taken_before_the_division() -> None:
    small, large = torch.tensor([6.0, 2.0]), torch.tensor([1.0, 2.0])
    trace = (4 - 1.5) / (1 / 2 - 1 / 8)
    squared_norm = (8 * 1.5 - 2 * 4) / (8 - 2)

    assert estimate_noise_scale(small, large, 2, 8).item() == pytest.approx(trace / squared_norm)


@pytest.mark.parametrize(("small", "large"), [(8, 8), (8, 4), (0, 4)])
def test_sizes_that_cannot_be_compared_are_refused(small: int, large: int) -> None:
    with pytest.raises(ValueError, match=r"batch_size` must be"):
        estimate_noise_scale(torch.ones(1), torch.ones(1), small, large)
