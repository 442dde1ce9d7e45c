from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.datasets.sampler import ShardSampler


@given(count=st.integers(1, 50), world=st.integers(1, 7), shuffle=st.booleans(), seed=st.integers(0, 5))
def test_every_sample_goes_to_exactly_one_rank(count: int, world: int, shuffle: bool, seed: int) -> None:
    shares = [
        list(ShardSampler(count, shuffle=shuffle, seed=seed, rank=rank, world_size=world)) for rank in range(world)
    ]

    assert list(range(count)) == sorted(index for share in shares for index in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(count=st.integers(1, 50), world=st.integers(1, 7), seed=st.integers(0, 5))
def test_with_drop_last_shares_are_equal_and_less_than_one_per_rank_is_left_out(
    count: int, world: int, seed: int
) -> None:
    shares = [list(ShardSampler(count, drop_last=True, seed=seed, rank=r, world_size=world)) for r in range(world)]
    taken = [index for share in shares for index in share]

    assert {count // world} == {len(share) for share in shares}
    assert len(set(taken)) == len(taken) > count - world


def test_ranks_take_turns_in_the_order_of_one_rank() -> None:
    whole = list(ShardSampler(10, seed=3, rank=0, world_size=1))

    assert whole[1::3] == list(ShardSampler(10, seed=3, rank=1, world_size=3))


def test_each_iteration_is_the_next_epoch_and_the_order_is_from_seed_and_epoch() -> None:
    sampler = ShardSampler(20, seed=1)
    torch.manual_seed(5)
    first, second = list(sampler), list(sampler)
    again = ShardSampler(20, seed=1)
    again.set_epoch(1)

    assert first != second
    assert second == list(again)
    assert first != list(ShardSampler(20, seed=2))
    assert list(range(20)) == list(ShardSampler(20, shuffle=False))


def test_the_global_generator_is_not_used() -> None:
    before = torch.get_rng_state()
    list(ShardSampler(20))

    assert torch.equal(before, torch.get_rng_state())


def test_a_loaded_place_is_kept_by_its_epoch_and_given_up_for_another() -> None:
    state = {"epoch": 3, "samples": 4, "seed": 9, "num_samples": 10}
    kept, given_up = ShardSampler(10), ShardSampler(10)
    for sampler in (kept, given_up):
        sampler.load_state_dict(state)
    kept.set_epoch(3)
    given_up.set_epoch(4)

    assert (3, 4) == kept.begin()
    assert (4, 0) == kept.begin()
    assert (4, 0) == given_up.begin()
    assert 9 == kept.seed == given_up.seed


def test_the_place_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="was saved for 11 samples, but this dataset has 10"):
        ShardSampler(10).load_state_dict({"epoch": 0, "samples": 0, "seed": 0, "num_samples": 11})


def test_a_data_set_has_samples_and_a_seed_is_not_negative() -> None:
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        ShardSampler(0)
    with pytest.raises(ValueError, match="`seed` must not be negative, got -1"):
        ShardSampler(1, seed=-1)
    with pytest.raises(ValueError, match="rank"):
        ShardSampler(1, rank=1, world_size=1)
