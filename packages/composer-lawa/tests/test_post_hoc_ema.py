"""`PostHocEMA`, and averages of other widths from its snapshots."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.lawa import PostHocEMA, reconstruct_ema, solve_ema_weights
from composer.algorithms.lawa.post_hoc_ema import _exponent, _inner_products
from composer.core import Event
from composer.testing import deep_compare

# The exponents of the paper's two widths.
EXPONENTS = {0.05: 16.97, 0.10: 6.94}


def profile(steps: int, gamma: float) -> torch.Tensor:
    """The weight of each step in the average after `steps` of them."""
    edges = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** (gamma + 1)
    return edges[1:] - edges[:-1]


# ---- the profiles ----


@pytest.mark.parametrize("sigma_rel", EXPONENTS)
def test_exponents_are_those_of_the_paper(sigma_rel: float) -> None:
    assert _exponent(sigma_rel) == pytest.approx(EXPONENTS[sigma_rel], abs=0.005)


@settings(deadline=None)
@given(st.floats(1e-3, 0.28))
def test_the_width_is_the_standard_deviation_of_the_profile(sigma_rel: float) -> None:
    gamma = _exponent(sigma_rel)
    mean, square = (gamma + 1) / (gamma + 2), (gamma + 1) / (gamma + 3)

    assert (square - mean**2) ** 0.5 == pytest.approx(sigma_rel, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(*[st.floats(0.05, 0.25), st.floats(0.05, 0.25), st.integers(1, 20), st.integers(1, 20)])
def test_inner_products_are_the_integrals(one: float, other: float, t_one: int, t_other: int) -> None:
    times, steps = (t_one, t_other), 20_000
    gammas = [_exponent(one), _exponent(other)]
    until = min(times)
    tau = (torch.arange(steps, dtype=torch.float64) + 0.5) * until / steps
    densities = [(g + 1) * tau**g / t ** (g + 1) for g, t in zip(gammas, times, strict=True)]
    expected = (densities[0] * densities[1]).sum() * until / steps
    arguments = [torch.tensor(float(x), dtype=torch.float64) for pair in zip(times, gammas, strict=True) for x in pair]

    torch.testing.assert_close(expected, _inner_products(*arguments), rtol=1e-4, atol=1e-12)


def pairs(count: int, every: int) -> tuple[list[float], list[float]]:
    times = [float(every * (i + 1)) for i in range(count) for _ in EXPONENTS]
    return times, list(EXPONENTS) * count


def error_of(sigma_rel: float) -> float:
    """The share of weight that 32 pairs of snapshots misplace, and the sum of their factors."""
    steps = 2048
    times, widths = pairs(32, steps // 32)
    factors = solve_ema_weights(times, widths, sigma_rel)
    found = torch.zeros(steps, dtype=torch.float64)
    for factor, t, width in zip(factors, times, widths, strict=True):
        found[: int(t)] += factor * profile(int(t), _exponent(width))
    return float((found - profile(steps, _exponent(sigma_rel))).abs().sum())


@pytest.mark.parametrize("sigma_rel", EXPONENTS)
def test_a_width_that_was_kept_comes_back(sigma_rel: float) -> None:
    assert error_of(sigma_rel) < 1e-14


def test_a_width_between_those_that_were_kept_is_met_closely() -> None:
    gamma = 10.0
    sigma_rel = ((gamma + 1) / (gamma + 3) - ((gamma + 1) / (gamma + 2)) ** 2) ** 0.5

    assert 1e-4 < error_of(sigma_rel) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 0.1), "must have one value for each snapshot, got 0 and 0"),
        (([1], [0.1, 0.2], 0.1), "must have one value for each snapshot, got 1 and 2"),
        (([1, 1], [0.1, 0.1], 0.1), "must not have the same snapshot twice"),
        (([0], [0.1], 0.1), "`updates` must be positive, got 0"),
        (([1], [0.3], 0.1), "`sigma_rels` must be in"),
        (([1], [0.1], 0.0), "`sigma_rel` must be in"),
        (([1], [0.1], 0.1, -1), "`at` must be positive"),
    ],
)
def test_what_cannot_be_solved_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cf.solve_ema_weights(*arguments)


# ---- the algorithm ----

NAME = "module.0.weight"


def test_averages_have_the_weights_of_the_profile(make_run: Any) -> None:
    run = make_run(ema := PostHocEMA()).fit("4ep")
    for sigma_rel, average in zip(EXPONENTS, ema.averages, strict=True):
        factors = profile(len(run.weights), _exponent(sigma_rel))
        expected = sum(factor * weight for factor, weight in zip(factors, run.weights, strict=True))

        torch.testing.assert_close(expected, average.named_parameters_dict[NAME], atol=1e-15, rtol=1e-14)


def test_training_and_evaluation_do_not_change(make_run: Any) -> None:
    plain, run = make_run(norm="batch").fit(), make_run(PostHocEMA(), norm="batch").fit()

    deep_compare([plain.weights, plain.evaluated], [run.weights, run.evaluated])
    deep_compare(plain.model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("2ba", [2, 4, 6]), ("4ba", [4, 6]), ("1ep", [3, 6]), ("0.5dur", [3, 6]), ("12sp", [3, 6]), ("9ba", [6])],
)
def test_snapshots_are_taken_after_each_interval_and_at_the_end(
    interval: str, expected: list[int], make_run: Any
) -> None:
    run = make_run(ema := PostHocEMA(snapshot_interval=interval)).fit()

    assert expected == [snapshot.updates for snapshot in ema.snapshots]
    run.engine.run_event("fit_end")
    assert expected == [snapshot.updates for snapshot in ema.snapshots]


def test_updates_may_be_rarer_than_batches(make_run: Any) -> None:
    run = make_run(ema := PostHocEMA(update_interval="2ba")).fit()
    factors = profile(3, _exponent(0.1))
    expected = sum(factor * weight for factor, weight in zip(factors, run.weights[1::2], strict=True))

    torch.testing.assert_close(expected, ema.averages[1].named_parameters_dict[NAME], atol=1e-15, rtol=1e-14)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_width_that_was_kept_is_reconstructed(in_files: bool, make_run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder" if in_files else None
    run = make_run(ema := PostHocEMA(snapshot_interval="2ba", folder=folder), norm="batch").fit("4ep")
    for sigma_rel, average in zip(EXPONENTS, ema.averages, strict=True):
        found = ema.reconstruct(sigma_rel)

        deep_compare({**dict(average.named_parameters()), **dict(average.named_buffers())}, found, atol=1e-9)
        if folder is not None:
            deep_compare(found, reconstruct_ema(folder, sigma_rel))
        assert found["module.2.num_batches_tracked"].item() == len(run.weights)


@pytest.mark.parametrize("sigma_rel", [0.07, 0.12])
def test_any_other_width_is_reconstructed(sigma_rel: float, make_run: Any) -> None:
    run = make_run(ema := PostHocEMA(snapshot_interval="1ba"))
    run.model.register_buffer("mask", torch.tensor([0, -torch.inf]))
    run.fit("14ep")
    factors = profile(len(run.weights), _exponent(sigma_rel))
    exact = sum(factor * weight for factor, weight in zip(factors, run.weights, strict=True))
    found = ema.reconstruct(sigma_rel)[NAME]
    spread = (run.weights[-1] - exact).norm()

    assert (found - exact).norm() < 0.02 * spread
    assert all((found - average.named_parameters_dict[NAME]).norm() > 0.05 * spread for average in ema.averages)
    assert ema.reconstruct(sigma_rel)["mask"].tolist() == [0, -torch.inf]


def test_an_earlier_time_is_reconstructed_from_what_was_known_then(make_run: Any) -> None:
    run = make_run(ema := PostHocEMA(snapshot_interval="1ep")).fit("4ep")
    earlier = make_run(then := PostHocEMA(snapshot_interval="1ep")).fit("2ep")
    run.engine.run_event("fit_end")

    assert len(earlier.weights) == 6
    deep_compare(then.reconstruct(0.1), ema.reconstruct(0.1, updates=6), atol=1e-9)
    with pytest.raises(ValueError, match="`updates` must be at least 3, the time of the first snapshot, got 2"):
        ema.reconstruct(0.1, updates=2)
    with pytest.raises(ValueError, match="`updates` must be in"):
        ema.reconstruct(0.1, updates=13)


def test_a_reconstruction_is_written_into_a_model(make_run: Any) -> None:
    run = make_run(ema := PostHocEMA(), norm="batch").fit()
    other = make_run(norm="batch").model

    assert ema.load(other, 0.1) is other
    expected = ema.reconstruct(0.1)
    deep_compare(
        expected, {name: other.state_dict().get(name, dict(other.named_parameters()).get(name)) for name in expected}
    )
    with pytest.raises(ValueError, match="`model` must have the structure of the run, but lacks"):
        ema.load(torch.nn.Linear(1, 1), 0.1)
    assert torch.equal(run.weights[-1], run.first_layer())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_snapshots_of_less_precision_take_less_memory(precision: str, make_run: Any, tmp_path: Path) -> None:
    sizes = []
    for each in ("fp32", precision):
        make_run(ema := PostHocEMA(folder=tmp_path / each, snapshot_precision=each), dtype=torch.float32).fit()
        sizes.append(sum(file.stat().st_size for file in (tmp_path / each).iterdir()))
        assert ema.reconstruct(0.1)[NAME].dtype is torch.float32

    assert sizes[1] < 0.8 * sizes[0]
    torch.testing.assert_close(
        reconstruct_ema(tmp_path / "fp32", 0.1)[NAME], ema.reconstruct(0.1)[NAME], atol=0.05, rtol=0.05
    )


def test_averages_of_narrow_weights_are_float32(make_run: Any) -> None:
    make_run(ema := PostHocEMA(), dtype=torch.bfloat16).fit()

    assert ema.averages[0].named_parameters_dict[NAME].dtype is ema.reconstruct(0.1)[NAME].dtype is torch.float32


@pytest.mark.parametrize("in_files", [False, True])
def test_a_resumed_run_continues_identically(in_files: bool, make_run: Any, make_saver: Any, tmp_path: Path) -> None:
    def make() -> PostHocEMA:
        return PostHocEMA(snapshot_interval="2ba", folder=tmp_path if in_files else None)

    saver = make_saver(Event.BATCH_CHECKPOINT)
    make_run(whole := make(), callbacks=saver).fit()
    expected = whole.reconstruct(0.12)
    for saved in saver.saved[:-1]:
        resumed = make_run(ema := make())
        resumed.state.load_state_dict(copy.deepcopy(saved))
        resumed.fit()

        deep_compare(whole.state_dict(), ema.state_dict())
        deep_compare(expected, ema.reconstruct(0.12))


def test_files_that_a_run_was_killed_in_writing_are_not_read(make_run: Any, tmp_path: Path) -> None:
    make_run(PostHocEMA(folder=tmp_path)).fit()
    expected = reconstruct_ema(tmp_path, 0.1)
    (tmp_path / ".snapshot-0000000009.pt.77").write_bytes(b"torn")

    deep_compare(expected, reconstruct_ema(tmp_path, 0.1))


def test_folders_of_other_runs_are_refused(make_run: Any, tmp_path: Path) -> None:
    make_run(PostHocEMA(folder=tmp_path)).fit()
    make_run(PostHocEMA(folder=tmp_path)).fit()  # the same run, launched again
    other = make_run(PostHocEMA(folder=tmp_path))
    other.state.run_name = "other"
    with pytest.raises(ValueError, match=r"must not have snapshots of another run, got '.*' with those of run"):
        other.engine.run_event("fit_start")

    content = torch.load(tmp_path / "snapshot-0000000006.pt", weights_only=True)
    torch.save({**content, "run_name": "other"}, tmp_path / "snapshot-0000000009.pt")
    with pytest.raises(ValueError, match="`folder` must have the snapshots of one run, got those of other, run"):
        reconstruct_ema(tmp_path, 0.1)


def test_folders_without_snapshots_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`folder` must have snapshots of `PostHocEMA`"):
        cf.reconstruct_ema(tmp_path, 0.1)
    with pytest.raises(RuntimeError, match="There are no snapshots yet"):
        PostHocEMA().reconstruct(0.1)


def test_snapshots_of_other_widths_are_not_loaded(make_run: Any) -> None:
    make_run(ema := PostHocEMA()).fit()
    for widths in ((0.05, 0.2), (0.05, 0.1, 0.2)):
        with pytest.raises(ValueError, match="`sigma_rels` must be those of the saved run"):
            PostHocEMA(widths).load_state_dict(ema.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sigma_rels": (0.1,)}, ValueError, "`sigma_rels` must be at least two increasing widths"),
        ({"sigma_rels": (0.1, 0.05)}, ValueError, "`sigma_rels` must be at least two increasing widths"),
        ({"sigma_rels": (0.1, 0.3)}, ValueError, "`sigma_rels` must be in"),
        ({"sigma_rels": 0.1}, TypeError, "`sigma_rels` must be a sequence of numbers"),
        ({"sigma_rels": "0.1"}, TypeError, "`sigma_rels` must be a sequence of numbers"),
        ({"update_interval": "1ep"}, ValueError, "`update_interval` must be in 'ba'"),
        ({"update_interval": "0ba"}, ValueError, "`update_interval` must be at least 1"),
        ({"snapshot_interval": "0dur"}, ValueError, "`snapshot_interval` must be positive"),
        ({"folder": "s3://bucket/folder"}, ValueError, "`folder` must be a local path"),
        ({"snapshot_precision": "fp8"}, ValueError, "`snapshot_precision` must be one of 'fp32', 'fp16', 'bf16'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        PostHocEMA(**arguments)


def test_a_sharded_model_needs_a_folder(make_run: Any, tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        run = make_run(PostHocEMA(folder=folder))
        run.state.fsdp_enabled = True
        if folder is None:
            with pytest.raises(ValueError, match="`folder` must be given for a model that is sharded"):
                run.engine.run_event("fit_start")
        else:
            run.engine.run_event("fit_start")


def test_it_can_be_pickled() -> None:
    copied = pickle.loads(pickle.dumps(PostHocEMA(snapshot_interval="3ba")))
    assert repr(PostHocEMA(snapshot_interval="3ba")) == repr(copied)
