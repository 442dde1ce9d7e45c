from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from composer.core import State, Time, Timestamp, TimeUnit

BATCHES_PER_EPOCH = 1000
SAMPLES_PER_BATCH = 4
TOKENS_PER_BATCH = 100


def make_state(max_duration: str | None = "1000ep", batches_per_epoch: int | None = BATCHES_PER_EPOCH) -> State:
    loader = range(batches_per_epoch) if batches_per_epoch is not None else iter(())
    return State(model=torch.nn.Linear(1, 1), max_duration=max_duration, rank_zero_seed=0, dataloader=loader)


def move_to(state: State, time: str) -> None:
    """Pretend that the run has come to `time`, in batches or epochs."""
    now = Time.from_timestring(time)
    batch = now.value * (BATCHES_PER_EPOCH if now.unit is TimeUnit.EPOCH else 1)
    state.timestamp = Timestamp(
        epoch=batch // BATCHES_PER_EPOCH,
        batch=batch,
        sample=batch * SAMPLES_PER_BATCH,
        token=batch * TOKENS_PER_BATCH,
    )


@pytest.fixture(scope="session")
def state_of() -> Callable[..., State]:
    """A state with 1000 batches an epoch, in a run of 1000 epochs by default."""
    return make_state


@pytest.fixture(scope="session")
def move() -> Callable[[State, str], None]:
    return move_to
