"""Tests of the interface of strategies; those of what they compute are beside DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed

from composer.core import Algorithm
from composer.trainer import DataParallel, RankStrategy, Strategy, Trainer
from composer.trainer.sharded import ShardedParallel


def test_strategies_only_override() -> None:
    """A renamed method that one strategy still defines under its old name would silently do nothing there."""
    interface = {name for name in dir(Strategy) if not name.startswith("_")}

    for variant in (DataParallel, ShardedParallel):
        assert {name for name in vars(variant) if not name.startswith("_")} <= interface


class Planned(Algorithm):
    def match(self, event: Any, state: Any) -> bool:
        return False

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        raise AssertionError("it never matches")


class Other(Planned):
    pass


class Refusing(Strategy):
    """Refuses every algorithm but `Planned`."""

    def refusal(self, algorithm: Algorithm) -> str | None:
        return None if type(algorithm) is Planned else f"{type(algorithm).__name__} steps alone. Leave it out."


def make(strategy: Any, *algorithms: Algorithm, **kwargs: Any) -> Trainer:
    model = torch.nn.Linear(3, 1)
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters()),
        loss=torch.nn.functional.mse_loss,
        train_dataloader=[(torch.ones(4, 3), torch.ones(4, 1))],
        max_duration="1ep",
        parallelism_config=strategy,
        algorithms=algorithms,
        progress_bar=False,
        device="cpu",
        **kwargs,
    )


class Third(Other):
    pass


def test_a_strategy_refuses_algorithms_at_construction_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"Refusing. `Other`: Other steps alone. .* `Third`: Third steps alone."):
        make(Refusing(), Planned(), Other(), Third())


def test_a_strategy_decides_itself_when_it_averages() -> None:
    with pytest.raises(ValueError, match=r"`ddp_sync_strategy` must not be given with .*Refusing\(\.\.\.\)"):
        make(Refusing(), ddp_sync_strategy="forced_sync")


def test_a_class_is_no_strategy() -> None:
    with pytest.raises(TypeError, match=r"must be an object, got the class RankStrategy. Write `RankStrategy\(\)`"):
        make(RankStrategy)


class Separate(Strategy):
    """Exchanges values with processes that were launched separately."""

    is_distributed = property(lambda self: True)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_batch(self) -> None:
        self.calls.append("begin_batch")

    def average_gradients(self) -> None:
        self.calls.append("average_gradients")


def test_a_strategy_may_exchange_values_with_one_rank() -> None:
    strategy = Separate()
    loader = [(torch.ones(4, 3), torch.ones(4, 1))] * 2
    trainer = make(strategy)

    trainer.fit(train_dataloader=loader)

    assert strategy.calls == ["begin_batch", "average_gradients"] * 2 + ["begin_batch"]  # the end of the epoch
    trainer.close()


class Remembering(Strategy):
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_strategy_that_would_not_be_saved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must not have a `state_dict`, as Remembering has: a strategy is not saved"):
        make(Remembering())


class Wrapping(Strategy):
    def wrap(self, model: torch.nn.Module, algorithms: Any) -> torch.nn.Module:
        return torch.nn.Sequential(model)


def test_wrappers_that_would_rename_the_weights_are_refused(group_of_one: None) -> None:
    with pytest.raises(ValueError, match=r"`Wrapping.wrap` must return the model that it gets, .* got Sequential"):
        make(Wrapping())


def test_a_strategy_belongs_to_one_trainer(group_of_one: None) -> None:
    strategy = RankStrategy()
    trainer = make(strategy)
    with pytest.raises(ValueError, match=r"a strategy of its own .* this RankStrategy belongs to another one"):
        make(strategy)
    trainer.close()
    make(strategy).close()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    yield
    torch.distributed.destroy_process_group()


def test_a_strategy_must_be_one_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("composer.utils.dist.initialize_dist", lambda *args: None)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match=r"for all 2 ranks, but Refusing has `world_size=1`. Derive it from"):
        make(Refusing())


class Engine(Strategy):
    """Runs the passes itself, as an engine of another library does."""

    scales_losses = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        self.calls.append(f"forward {len(batch[0])}")
        return model(batch)

    def backward(self, loss: torch.Tensor, create_graph: bool) -> None:
        self.calls.append("backward")
        loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("group_of_one")
def test_a_strategy_may_run_the_passes() -> None:
    strategy = Engine()
    trainer, plain = make(strategy, device_train_microbatch_size=2), make(None, device_train_microbatch_size=2)
    plain.state.model.load_state_dict(trainer.state.model.state_dict())
    for each in (trainer, plain):
        each.fit()
        each.close()

    assert ["forward 2", "backward", "forward 2", "backward"] == strategy.calls
    for one, other in zip(trainer.state.model.parameters(), plain.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("group_of_one")
def test_no_scaler_is_made_if_the_strategy_scales() -> None:
    assert make(Strategy(), precision="amp_fp16").state.scaler is not None
    assert make(Engine(), precision="amp_fp16").state.scaler is None


def test_a_strategy_that_is_not_installed_names_its_package() -> None:
    with pytest.raises(ValueError, match=r"got 'pipeline'\..* `pip install composer-pipeline`"):
        make({"pipeline": {}})
