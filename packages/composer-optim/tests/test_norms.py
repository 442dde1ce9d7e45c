from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.optim import DecoupledAdamW
from composer.testing import run_on_ranks

NAMES = ["l2_norm/grad", "l2_norm/moment", "l2_norm/param", "l2_norm/update"]


def trained(amsgrad: bool = False, **options: Any) -> tuple[DecoupledAdamW, list[torch.Tensor]]:
    """An optimizer of two groups after three steps, and what the last step added to its parameters."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.25, "betas": (0.5, 0.6)}]
    optimizer = DecoupledAdamW(groups, lr=0.5, weight_decay=1e-4, amsgrad=amsgrad, **options)
    before: list[torch.Tensor] = []
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, [p.detach() - b for p, b in zip(params, before, strict=True)]


def params_of(optimizer: DecoupledAdamW) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_there_is_a_function_for_every_metric() -> None:
    assert sorted(DecoupledAdamW.metric_functions) == NAMES


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_the_norms_are_those_of_the_last_step(amsgrad: bool, fused: bool | None) -> None:
    optimizer, updates = trained(amsgrad, fused=fused)
    for param, update in zip(params_of(optimizer), updates, strict=True):
        metrics = optimizer.report_per_parameter_metrics(param, "layer.weight", {})
        expected = {
            "l2_norm/moment/layer.weight": optimizer.state[param]["exp_avg"].norm(),
            "l2_norm/param/layer.weight": param.norm(),
            "l2_norm/update/layer.weight": update.norm(),
            "l2_norm/grad/layer.weight": param.grad.norm(),  # type: ignore[union-attr]
        }

        assert list(expected) == list(metrics)
        # The decay of the weights before the step is estimated by those after it.
        assert {n: v.item() for n, v in expected.items()} == pytest.approx(
            {n: v.item() for n, v in metrics.items()}, rel=1e-3
        )


def test_the_update_holds_step_and_decay() -> None:
    param = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    optimizer = DecoupledAdamW([param], lr=0.5, weight_decay=0.25, eps=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25

    # A step of 0.25 and a decay of 0.125 of what is left, for each of the four: 2 * 0.75 - 0.5 = 1.
    metrics = optimizer.report_per_parameter_metrics(param, "p", {})
    assert pytest.approx(metrics["l2_norm/update/p"].item()) == 2 * (0.25 + 0.125)


def test_metrics_are_added_to_those_already_there() -> None:
    optimizer, _ = trained()
    metrics = {"other": torch.ones(())}
    for index, param in enumerate(params_of(optimizer)):
        assert optimizer.report_per_parameter_metrics(param, f"p{index}", metrics) is metrics

    assert ["other", *sorted(f"{name}/p{index}" for name in NAMES for index in range(2))] == [
        "other",
        *sorted(set(metrics) - {"other"}),
    ]


def test_parameters_that_were_not_updated_report_nothing() -> None:
    fresh = torch.nn.Parameter(torch.ones(1))
    optimizer = DecoupledAdamW([fresh])
    fresh.grad = torch.ones(1)

    assert optimizer.report_per_parameter_metrics(fresh, "fresh", {}) == {}
    optimizer.step()
    fresh.grad = None
    assert optimizer.report_per_parameter_metrics(fresh, "fresh", {}) == {}
    assert optimizer.report_per_parameter_metrics(torch.ones(1), "stranger", {}) == {}


def test_on_one_rank_reducing_gives_the_norms_back_in_order() -> None:
    optimizer, _ = trained()
    metrics: dict[str, torch.Tensor] = {}
    for index, param in enumerate(params_of(optimizer)):
        optimizer.report_per_parameter_metrics(param, f"p{index}", metrics)
    reduced = optimizer.dist_reduce_metrics(optimizer.pre_reduce_metrics(metrics))

    assert sorted(metrics) == list(reduced)
    assert {n: v.item() for n, v in metrics.items()} == pytest.approx({n: v.item() for n, v in reduced.items()})
    assert optimizer.dist_reduce_metrics({}) == {}


def reduce_shards() -> dict[str, float]:
    rank = torch.distributed.get_rank()
    optimizer = DecoupledAdamW([torch.nn.Parameter(torch.ones(1))])
    norms = {"shared": torch.tensor(3.0 + rank), f"only{rank}": torch.tensor(2.0 + rank, dtype=torch.bfloat16)}
    return {n: v.item() for n, v in optimizer.dist_reduce_metrics(optimizer.pre_reduce_metrics(norms)).items()}


def test_norms_of_shards_become_the_norm_of_the_whole() -> None:
    expected = {"only0": 2.0, "only1": 3.0, "shared": 5.0}

    assert [pytest.approx(expected)] * 2 == run_on_ranks(reduce_shards)
