from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.callbacks.activation_monitor import ActivationMonitor, compute_kurtosis
from composer.core import Engine, State
from composer.loggers import InMemoryLogger


def test_every_module_is_looked_at_at_the_interval(run: Any, make_model: Any) -> None:
    model = make_model()
    done = run(ActivationMonitor("10ba"), model=model, max_duration="21ba").fit()
    counts = {}
    for kind in ("l2_norm", "average", "kurtosis", "max"):
        keys = done.keys(f"activations/{kind}/")
        counts[kind] = {key.split("/", 2)[2]: len(done.values(key)) for key in keys}
    assert counts["max"] == counts["average"] == counts["kurtosis"] == counts["l2_norm"]
    assert set(counts["max"].values()) == {3}
    assert [time.batch.value for time, _ in done.memory.data["activations/max/module.0_input.0"]] == [0, 10, 20]
    assert {"_input.0.0", "_output.0", "module_input.0", "module.4_output.0"} <= counts["max"].keys()
    assert not any(module._forward_hooks for module in model.modules())


def drive(model: torch.nn.Module, batch: Any, monitor: ActivationMonitor, *others: Any) -> InMemoryLogger:
    memory = InMemoryLogger()
    state = State(model, max_duration="9ep", dataloader=[0], callbacks=[monitor, memory, *others])
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("before_forward")
    model(batch)
    engine.run_event("after_forward")
    engine.close()
    return memory


def test_the_numbers_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    model, batch = torch.nn.Sequential(torch.nn.Linear(4, 6)), torch.randn(3, 4)
    data = drive(model, batch, ActivationMonitor()).data
    for tensor, name in ((batch, "0_input.0"), (model(batch).detach(), "_output.0")):
        moments = [((row - row.mean()) ** 4).mean() / ((row - row.mean()) ** 2).mean() ** 2 for row in tensor]
        expected = {
            "l2_norm": tensor.norm(),
            "average": tensor.mean(),
            "kurtosis": torch.stack(moments).mean(),
            "max": tensor.max(),
        }
        for kind, value in expected.items():
            assert float(data[f"activations/{kind}/{name}"][0][1]) == pytest.approx(value.item(), rel=1e-5)


class Nested(torch.nn.Module):
    """Returns things within things."""

    def forward(self, batch: Any) -> Any:
        return batch["x"], {"logits": batch["x"] * 2, "name": "text", "ids": torch.ones(2, dtype=torch.long)}, [None]


def test_nested_values_are_found_and_those_that_are_not_floating_left_out() -> None:
    batch = {"x": torch.ones(2, 2, dtype=torch.bfloat16), "none": torch.ones(0), "scalar": torch.tensor(1.0)}
    data = drive(Nested(), batch, ActivationMonitor()).data
    names = {key.split("/", 2)[2] for key in data}
    assert names == {"_input.0.x", "_input.0.scalar", "_output.0", "_output.1.logits"}


@pytest.mark.parametrize("ignored", ["module.2", "Linear"])
def test_modules_can_be_left_out(run: Any, ignored: str) -> None:
    done = run(ActivationMonitor(ignore_module_types=[ignored]), max_duration="1ba").fit()
    assert done.keys("activations/max/module.3")
    assert not done.keys("activations/max/module.2")


class WandBLogger(InMemoryLogger):
    """A logger with the name of the real one."""


@pytest.mark.parametrize(("only", "elsewhere"), [(True, 0), (False, 1)])
def test_other_loggers_get_nothing_if_there_is_wandb(only: bool, elsewhere: int) -> None:
    wandb = WandBLogger()
    memory = drive(torch.nn.Linear(1, 1), torch.ones(1, 1), ActivationMonitor(only_log_wandb=only), wandb)
    assert len(wandb.data["activations/max/_output.0"]) == 1
    assert len(memory.data.get("activations/max/_output.0", [])) == elsewhere


def test_epochs_are_an_interval_too_and_microbatches_count_once(run: Any) -> None:
    done = run(ActivationMonitor("2ep"), max_duration="3ep", device_train_microbatch_size=1).fit()
    assert len(done.values("activations/max/_output.0")) == 2


def test_a_failed_forward_pass_leaves_no_hooks() -> None:
    model = torch.nn.Linear(1, 1)
    state = State(model, max_duration="9ep", dataloader=[0], callbacks=ActivationMonitor())
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("before_forward")
    assert model._forward_hooks
    engine.close()
    assert not model._forward_hooks


@pytest.mark.parametrize("interval", ["3sp", "0.1dur", 0, "0ba"])
def test_an_impossible_interval_is_refused(interval: Any) -> None:
    with pytest.raises(ValueError, match="`interval` must be a time in batches or epochs"):
        ActivationMonitor(interval)


def test_a_short_interval_warns() -> None:
    with pytest.warns(UserWarning, match="An `interval` of '9ba' is short"):
        ActivationMonitor("9ba")
    ActivationMonitor("1ep")


def test_kurtosis_of_known_distributions() -> None:
    torch.manual_seed(0)
    assert compute_kurtosis(torch.randn(2, 400_000)).item() == pytest.approx(3.0, abs=0.05)
    assert compute_kurtosis(torch.rand(2, 400_000)).item() == pytest.approx(1.8, abs=0.05)
    assert compute_kurtosis(torch.zeros(2, 3)).isnan()
    assert compute_kurtosis(torch.tensor(1.0)).isnan()


def test_what_a_failed_pass_has_left_is_not_logged_later() -> None:
    """As when the first microbatch does not fit the memory, and another part of the model runs afterwards."""
    monitor, memory = ActivationMonitor(), InMemoryLogger()
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    state = State(model, max_duration="99ba", dataloader=[0], callbacks=[monitor, memory])
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("before_forward")
    model["a"](torch.ones(1, 2))
    for _ in range(26):
        engine.run_event("before_forward")  # the pass before never came to its end
        if state.timestamp.batch.value == 25:
            model["b"](torch.ones(1, 2))
        engine.run_event("after_forward")
        state.timestamp = state.timestamp.to_next_batch()
    engine.close()

    assert {key.split("/")[-1] for key in memory.data} == {"b_input.0", "b_output.0"}
