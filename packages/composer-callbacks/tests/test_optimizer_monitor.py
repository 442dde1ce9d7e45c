from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.sam import SAM
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.core import Callback, Engine, State
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW, DecoupledSGDW
from composer.testing import run_on_ranks

GRADIENTS = {f"l2_norm/grad/module.{i}.{kind}" for i in (2, 4) for kind in ("weight", "bias")}


def test_adamw_reports_moments_weights_and_updates(run: Any, make_model: Any) -> None:
    model = make_model()
    done = run(OptimizerMonitor(batch_log_interval=3), model=model, optimizers=DecoupledAdamW(model.parameters()))
    done.fit()
    expected = {key.replace("grad", kind) for key in GRADIENTS for kind in ("grad", "moment", "param", "update")}

    assert done.keys("l2_norm/") == expected | {"l2_norm/grad/global"}
    assert {len(done.values(key)) for key in done.keys("l2_norm/")} == {8 // 3}
    assert [time.batch.value for time, _ in done.memory.data["l2_norm/grad/global"]] == [3, 6]


class Keeps(Callback):
    """Callback that stores the norms of the last gradients."""

    def batch_end(self, state: Any, logger: Any) -> None:
        self.norms = {name: p.grad.norm().item() for name, p in state.model.named_parameters()}


def test_norms_are_those_of_the_gradients_that_the_step_used(run: Any, make_model: Any) -> None:
    model, keeps = make_model(), Keeps()
    optimizer = DecoupledSGDW(model.parameters(), lr=0.1)
    done = run([OptimizerMonitor(batch_log_interval=1), keeps], model=model, optimizers=optimizer)
    done.fit(duration="3ba")
    for name, norm in keeps.norms.items():
        assert float(done.values(f"l2_norm/grad/{name}")[-1]) == pytest.approx(norm)
    total = sum(norm**2 for norm in keeps.norms.values()) ** 0.5

    assert total > 0
    assert float(done.values("l2_norm/grad/global")[-1]) == pytest.approx(total)
    assert done.keys("l2_norm/") == GRADIENTS | {"l2_norm/grad/global"}


def test_the_optimizer_may_be_left_out(run: Any, make_model: Any) -> None:
    model = make_model()
    monitor = OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1)
    done = run(monitor, model=model, optimizers=DecoupledAdamW(model.parameters())).fit(duration="1ba")
    assert done.keys("l2_norm/") == GRADIENTS | {"l2_norm/grad/global"}


def test_an_optimizer_inside_sam_reports(run: Any, make_model: Any) -> None:
    model = make_model()
    monitor = OptimizerMonitor(batch_log_interval=1)
    done = run(monitor, model=model, optimizers=DecoupledAdamW(model.parameters()), algorithms=SAM())
    done.fit(duration="2ba")
    assert {"l2_norm/moment/module.2.weight", "l2_norm/update/module.4.bias"} <= done.keys("l2_norm/")


def test_prefixes_of_wrappers_are_no_part_of_the_name() -> None:
    model = torch.nn.Linear(2, 1)
    state = State(torch.compile(model), max_duration="1ba", dataloader=[0])
    model(torch.ones(1, 2)).sum().backward()
    assert set(OptimizerMonitor().norms(state)) == {f"l2_norm/grad/{name}" for name in ("weight", "bias", "global")}


def test_every_kind_of_gradient_is_measured_in_enough_bits() -> None:
    model = torch.nn.ModuleDict(
        {
            "narrow": torch.nn.Linear(100, 100, bias=False, dtype=torch.float16),
            "wide": torch.nn.Linear(1, 1, bias=False, dtype=torch.float64),
            "sparse": torch.nn.Embedding(4, 2, sparse=True),
            "unused": torch.nn.Linear(1, 1),
        }
    )
    model["narrow"].weight.grad = torch.full((100, 100), 10_000.0, dtype=torch.float16)  # the norm exceeds float16
    model["wide"].weight.grad = torch.full((1, 1), 3.0, dtype=torch.float64)
    model["sparse"](torch.tensor([1, 1])).sum().backward()
    norms = OptimizerMonitor().norms(State(model, max_duration="1ba", dataloader=[0]))

    assert norms["l2_norm/grad/narrow.weight"].item() == pytest.approx(1e6, rel=1e-5)
    assert norms["l2_norm/grad/wide.weight"].item() == 3.0
    assert norms["l2_norm/grad/sparse.weight"].item() == pytest.approx(8**0.5)
    assert "l2_norm/grad/unused.weight" not in norms
    assert norms["l2_norm/grad/global"].item() == pytest.approx(1e6, rel=1e-5)


def test_without_gradients_there_is_only_a_norm_of_zero() -> None:
    norms = OptimizerMonitor().norms(State(torch.nn.Linear(1, 1), max_duration="1ba", dataloader=[0]))
    assert {key: norm.item() for key, norm in norms.items()} == {"l2_norm/grad/global": 0.0}


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = DecoupledAdamW(model.parameters())
    memory = InMemoryLogger()
    state = State(
        model, max_duration="1ba", dataloader=[0], optimizers=optimizer, callbacks=[OptimizerMonitor(), memory]
    )
    engine = Engine(state)
    engine.run_event("init")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor was read"))
    state.callbacks[0].norms(state)
    monkeypatch.undo()
    engine.close()


@pytest.mark.parametrize("interval", [0, -1, 2.0, True])
def test_an_impossible_interval_is_refused(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"`batch_log_interval` must be .*at least 1 batch"):
        OptimizerMonitor(batch_log_interval=interval)


class Cosine(DecoupledAdamW):
    """Reports something that is no norm."""

    def report_per_parameter_metrics(self, param: Any, name: str, optimizer_metrics: Any) -> Any:
        metrics = super().report_per_parameter_metrics(param, name, optimizer_metrics)
        metrics[f"cosine/{name}"] = torch.tensor(2.0)
        return metrics

    def pre_reduce_metrics(self, optimizer_metrics: Any) -> Any:
        return {key: value + 1 for key, value in optimizer_metrics.items()}

    def dist_reduce_metrics(self, optimizer_metrics: Any) -> Any:
        for value in optimizer_metrics.values():
            torch.distributed.all_reduce(value)
        return optimizer_metrics


def norms_of(shape: tuple[int, ...] | None) -> dict[str, float]:
    """One step on the same batch on all ranks, whole or divided over a mesh of that shape."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    if shape is not None:
        from torch.distributed.fsdp import fully_shard

        names = ("replicate", "shard")[-len(shape) :]
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model, mesh=mesh)
    optimizer = Cosine(model.parameters(), lr=0.1, weight_decay=1e-4)
    model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()
    state = State(model, max_duration="1ba", dataloader=[0], optimizers=optimizer)
    return {key: value.item() for key, value in OptimizerMonitor().norms(state).items()}


def whole_and_sharded(shape: tuple[int, ...]) -> tuple[dict[str, float], dict[str, float]]:
    return norms_of(None), norms_of(shape)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
@pytest.mark.parametrize(("ranks", "shape"), [(2, (2,)), (4, (2, 2))])
def test_sharded_parameters_have_the_norms_of_the_whole(ranks: int, shape: tuple[int, ...]) -> None:
    for whole, sharded in run_on_ranks(whole_and_sharded, ranks, shape):
        cosines = {key for key in whole if key.startswith("cosine")}
        assert whole.keys() == sharded.keys()
        assert len(whole) == 4 * 5 + 1
        for key in whole.keys() - cosines:
            assert sharded[key] == pytest.approx(whole[key], rel=1e-4), key
        assert {sharded[key] for key in cosines} == {3.0 * ranks}
        assert {whole[key] for key in cosines} == {2.0}
