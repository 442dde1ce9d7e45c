"""Seeds and the state of the random number generators."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from composer.testing._processes import run_on_ranks
from composer.utils import dist, reproducibility


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    host = reproducibility._host_state()
    yield
    reproducibility._load_host_state(host)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 42, reproducibility.MAX_SEED])
def test_a_seed_fixes_all_generators(seed: int) -> None:
    reproducibility.seed_all(seed)
    first = draw()
    reproducibility.seed_all(seed)

    assert first == draw()


def test_different_seeds_draw_different_numbers_everywhere() -> None:
    reproducibility.seed_all(1)
    first = draw()
    reproducibility.seed_all(2)

    assert all(a != b for a, b in zip(first, draw(), strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"`seed` must be from 0 to .*, got {seed}"):
        reproducibility.seed_all(seed)


def test_random_seeds_are_valid_and_advance_no_generator() -> None:
    reproducibility.seed_all(0)
    expected = draw()
    reproducibility.seed_all(0)

    seeds = [reproducibility.get_random_seed() for _ in range(100)]

    assert expected == draw()
    assert all(0 <= seed <= reproducibility.MAX_SEED for seed in seeds)
    assert len(set(seeds)) > 90


def test_deterministic_mode_switches_torch_to_deterministic_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        reproducibility.configure_deterministic_mode()

        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)
        assert ":4096:8" == os.environ["CUBLAS_WORKSPACE_CONFIG"]
        assert "training is slower" in caplog.text
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def test_a_restored_state_continues_where_it_was_taken() -> None:
    reproducibility.seed_all(3)
    draw()
    states = reproducibility.get_rng_state()
    expected = draw()
    draw()

    reproducibility.load_rng_state(states)

    assert expected == draw()
    assert [{"python", "numpy", "torch"} | ({"cuda"} & states[0].keys())] == [set(state) for state in states]


def test_a_state_survives_saving(tmp_path: Any) -> None:
    states = reproducibility.get_rng_state()
    expected = draw()
    torch.save(states, tmp_path / "rng.pt")

    reproducibility.load_rng_state(torch.load(tmp_path / "rng.pt", weights_only=False))

    assert expected == draw()


def test_a_context_is_seeded_and_leaves_no_trace() -> None:
    reproducibility.seed_all(7)
    inside = draw()
    reproducibility.seed_all(5)
    before = draw()
    after = draw()
    reproducibility.seed_all(5)

    assert before == draw()
    with reproducibility.seed_context(7):
        assert inside == draw()
    assert after == draw()


def test_a_context_does_not_seed_a_cuda_that_is_used_later(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)  # what `torch.manual_seed` leaves for later
    with reproducibility.seed_context(7):
        draw()

    assert not seeds


def test_a_context_is_left_clean_after_an_error() -> None:
    reproducibility.seed_all(5)
    expected = draw()
    reproducibility.seed_all(5)

    with pytest.raises(KeyError), reproducibility.seed_context(7):
        raise KeyError
    assert expected == draw()


def test_more_states_than_processes_warn_and_the_own_one_is_used() -> None:
    states = reproducibility.get_rng_state()
    expected = draw()

    with pytest.warns(UserWarning, match="saved by 2 processes, but 1 are running"):
        reproducibility.load_rng_state([*states, {}])
    assert expected == draw()


def test_fewer_states_than_processes_warn_and_leave_other_ranks_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    states = reproducibility.get_rng_state()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    reproducibility.seed_all(0)
    expected = draw()
    reproducibility.seed_all(0)

    with pytest.warns(UserWarning, match="saved by 1 processes, but 2 are running"):
        reproducibility.load_rng_state(states)
    assert expected == draw()


class FakeCuda:
    """Stands for `torch.cuda` where there is no GPU."""

    def __init__(self, available: bool, initialised: bool = False, sizes: tuple[int, ...] = (16,)) -> None:
        self.available, self.initialised, self.sizes = available, initialised, sizes
        self.states: dict[int | None, Any] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.available)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_rng_state)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
        monkeypatch.setattr(
            torch.cuda, "get_rng_state_all", lambda: [torch.full((16,), i, dtype=torch.uint8) for i in range(2)]
        )
        return self

    def set_rng_state(self, state: torch.Tensor, device: int | None = None) -> None:
        if len(state) not in self.sizes:
            raise RuntimeError("RNG state is wrong size")
        self.states[device] = state.tolist()


def test_cuda_is_saved_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuda" in (FakeCuda(True, True).install(monkeypatch), reproducibility.get_rng_state()[0])[1]
    assert "cuda" not in (FakeCuda(True, False).install(monkeypatch), reproducibility.get_rng_state()[0])[1]


def test_a_cuda_state_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(True, True).install(monkeypatch)

    reproducibility.load_rng_state(reproducibility.get_rng_state())

    assert {None: [0] * 16} == cuda.states


def test_a_missing_cuda_state_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [reproducibility._host_state()]
    FakeCuda(True, True).install(monkeypatch)

    with pytest.warns(UserWarning, match="CUDA was not saved"):
        reproducibility.load_rng_state(states)


def test_a_cuda_state_of_another_size_is_skipped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(True, True).install(monkeypatch)
    states = [{**reproducibility._host_state(), "cuda": torch.zeros(816, dtype=torch.uint8)}]

    with pytest.warns(UserWarning, match="could not be restored: RNG state is wrong size"):
        reproducibility.load_rng_state(states)


def test_a_cuda_state_without_cuda_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(False).install(monkeypatch)
    states = [{**reproducibility._host_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}]

    with pytest.warns(UserWarning, match="there is no CUDA device"):
        reproducibility.load_rng_state(states)


def test_a_context_restores_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(True, True).install(monkeypatch)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)

    with reproducibility.seed_context(0):
        assert {} == cuda.states
    assert {0: [0] * 16, 1: [1] * 16} == cuda.states


def take_and_restore() -> tuple[int, bool]:
    warnings.simplefilter("error")
    reproducibility.seed_all(dist.get_global_rank())
    states = reproducibility.get_rng_state()
    expected = draw()
    draw()
    reproducibility.load_rng_state(states)
    return len(states), expected == draw()


def test_every_rank_restores_its_own_state() -> None:
    assert [(2, True), (2, True)] == run_on_ranks(take_and_restore)


@pytest.mark.parametrize("seed", [1.5, True, "1", float("nan")])
def test_a_seed_that_is_no_integer_is_refused(seed: Any) -> None:
    with pytest.raises(TypeError, match=r"`seed` must be an integer, got"):
        reproducibility.seed_all(seed)


def test_an_integer_of_numpy_is_a_seed() -> None:
    reproducibility.seed_all(np.int64(7))
    first = torch.rand(1)
    reproducibility.seed_all(7)

    assert torch.equal(first, torch.rand(1))
