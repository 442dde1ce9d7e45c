"""`assert_resumes_exactly` accepts jobs that resume exactly, and says how others differ."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import Engine, State
from composer.testing import ResumptionReport, assert_resumes_exactly
from composer.utils import reproducibility


class Job:
    """A loop of one's own of six batches, which saves every batch and goes on from there.

    Args:
        folder: Where it saves.
        fault: What it does wrong.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.fault = fault
        self.file = folder / "saved.pt"
        if fault != "draws before it seeds itself":
            torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.state = State(model=model, max_duration="6ba", rank_zero_seed=1, dataloader=[0] * 6, optimizers=optimizer)
        self.engine = Engine(self.state)
        self.saved: dict[str, Any] = {}
        if self.file.exists() and fault != "never loads":
            self.saved = torch.load(self.file, weights_only=False)

    def _load(self) -> None:
        if not self.saved:
            random.seed(3)
            reproducibility.seed_all(1)
            return
        if self.fault == "forgets momentum":
            self.saved["state"]["optimizers"]["SGD"]["state"] = {}
        self.state.load_state_dict(self.saved["state"])
        if self.fault != "forgets generators":
            reproducibility.load_rng_state(self.saved["rng"])

    def fit(self) -> None:
        self._load()
        state = self.state
        while state.timestamp.batch < 6:
            state.batch = torch.randn(3, 4)
            if self.fault == "drifts" and state.timestamp.batch == 3 and self.saved:
                state.batch[0, 0] += 0.5
            self.engine.run_event("batch_start")
            state.optimizers.zero_grad()
            loss = state.model(state.batch).square().mean()
            loss.backward()
            state.optimizers.step()
            state.total_loss_dict = {"loss": loss.detach()}
            state.timestamp = state.timestamp.to_next_batch(samples=3)
            if self.fault != "never saves":
                content = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
                torch.save(content, self.file.with_suffix(".part"))
                self.file.with_suffix(".part").replace(self.file)  # a kill leaves no torn file

    def close(self) -> None:
        self.engine.close()


@dataclass
class Faulty:
    fault: str

    def __call__(self, folder: Path) -> Job:
        return Job(folder, self.fault)


def test_a_job_that_resumes_exactly_is_accepted_and_the_generators_are_as_before(tmp_path: Path) -> None:
    before = reproducibility.get_rng_state()[0]["torch"]

    assert ResumptionReport(6, (2, 4), (2, 4)) == assert_resumes_exactly(Job)
    assert ResumptionReport(6, (1, 5), (1, 5)) == assert_resumes_exactly(Job, [1, 5], folder=tmp_path)
    assert {"uninterrupted", "killed"} <= {path.name for path in tmp_path.iterdir()}
    assert torch.equal(before, reproducibility.get_rng_state()[0]["torch"])


def test_a_killed_process_is_a_real_one() -> None:
    report = assert_resumes_exactly(Job, [2, 4.5], sigkill=True)

    assert 6 == report.batches
    assert 2 == report.resumed_from[0]
    assert report.resumed_from[1] in (4, 5, 6)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "forgets momentum",
            r"^At the start of batch 2, the run that was relaunched at batch 2 .*/optimizers/SGD",
        ),
        ("forgets generators", r"^At the start of batch 2, .*: /batch: Tensor-likes are not equal"),
        (
            "drifts",
            r"(?s)^At the start of batch 3, .*/batch: .*1 / 12.*Greatest absolute difference: 0\.[45]",
        ),
        ("never saves", r"killed at batches \[2, 4\] and started from scratch each time.*Pass `save_folder=folder"),
        ("never loads", r"killed at batches \[2, 4\] and started from scratch each time"),
    ],
)
def test_a_job_that_does_not_resume_exactly_raises_with_the_first_difference(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_resumes_exactly(Faulty(fault), [2, 4])


def test_a_process_that_differs_raises_the_same_error() -> None:
    with pytest.raises(AssertionError, match=r"^At the start of batch 2, .*/optimizers/SGD"):
        assert_resumes_exactly(Faulty("forgets momentum"), [2], sigkill=True)


def test_a_job_that_is_not_deterministic_raises_an_error() -> None:
    class Random(Job):
        def _load(self) -> None:
            random.seed()
            torch.manual_seed(random.randrange(2**31))

    with pytest.raises(AssertionError, match=r"a second run differs .* not killed yet.*`seed=`.*/batch"):
        assert_resumes_exactly(Random, [2])


def test_what_may_differ_is_named() -> None:
    assert_resumes_exactly(Faulty("drifts"), [4])  # the batch before is not trained again
    with pytest.raises(AssertionError, match="/optimizers"):
        assert_resumes_exactly(Faulty("forgets momentum"), [4])
    assert_resumes_exactly(Faulty("forgets momentum"), [5], ignore=["optimizers", "model", "losses"])


@pytest.mark.parametrize("kills", [[3, 2], [2, 2], [-1], [6]])
def test_kills_are_ascending_batches_of_the_run(kills: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`kills` must be ascending numbers of batches.*got \["):
        assert_resumes_exactly(Job, kills)
