"""The state: few arguments, lists that step, time, loaders, batches, and saving."""

from __future__ import annotations

import io
from collections import UserDict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.core import Callback, State, Time, Timestamp
from composer.loggers import DeferredValue
from composer.models import ModuleWithLoss


def make_state(**kwargs: Any) -> State:
    torch.manual_seed(0)
    return State(model=torch.nn.Linear(2, 1), rank_zero_seed=3, **kwargs)


def test_few_arguments_are_enough() -> None:
    state = State(model=torch.nn.Linear(1, 1), max_duration="2ep", rank_zero_seed=0, dataloader=[1, 2, 3])

    assert (state.max_duration, state.dataloader_label, state.dataloader_len) == ("2ep", "train", "3ba")
    assert state.train_dataloader == [1, 2, 3]
    assert state.device.name == "cpu"
    assert state.run_name
    assert Timestamp() == state.timestamp
    assert state.previous_timestamp is None
    assert state.seed == 0


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"`model` must be a `torch.nn.Module`, got str"):
        State(model="resnet")  # type: ignore[arg-type]


def test_lists_take_single_objects_and_keep_their_identity() -> None:
    state = make_state()
    optimizers, first = state.optimizers, torch.optim.SGD(state.model.parameters(), lr=0.1)
    state.optimizers = first  # type: ignore[assignment]

    assert state.optimizers is optimizers
    assert [first] == optimizers
    state.optimizers = []  # type: ignore[assignment]
    assert optimizers == []
    callback = Callback()
    state.callbacks = callback  # type: ignore[assignment]
    assert [callback] == state.callbacks


def test_optimizers_and_schedulers_step_as_one() -> None:
    state = make_state()
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in state.model.parameters()]
    state.optimizers = optimizers  # type: ignore[assignment]
    state.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    before = [p.detach().clone() for p in state.model.parameters()]
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers.step()
    state.schedulers.step()

    for old, new in zip(before, state.model.parameters(), strict=True):
        torch.testing.assert_close(old - 1.0, new.detach())
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.5, 0.5]
    state.optimizers.zero_grad()
    assert [p.grad for p in state.model.parameters()] == [None, None]


# ---- time ----


@pytest.mark.parametrize(
    ("given", "expected"), [("10ep", "10ep"), (10, "10ep"), (Time(3, "ba"), "3ba"), (None, None), ("5sp", "5sp")]
)
def test_max_duration_parses(given: Any, expected: str | None) -> None:
    state = make_state(max_duration=given)

    assert (expected is None and state.max_duration is None) or state.max_duration == expected


def test_a_duration_of_durations_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be in 'dur', which is a fraction of it"):
        make_state(max_duration="0.5dur")
    with pytest.raises(ValueError, match="such as '10ep'"):
        make_state(max_duration="ten epochs")
    with pytest.raises(ValueError, match="`max_duration` must not be negative, got '-2ep'"):
        make_state(max_duration="-2ep")


def test_elapsed_duration() -> None:
    state = make_state()
    assert state.get_elapsed_duration() is None
    state.max_duration = "10ba"  # type: ignore[assignment]
    state.timestamp = Timestamp(batch=4)

    assert Time(0.4, "dur") == state.get_elapsed_duration()


@pytest.mark.parametrize(
    ("limit", "iteration", "timestamp", "expected"),
    [
        ("4ep", None, Timestamp(epoch=1, batch=8, batch_in_epoch=3), 8 / 20),
        ("4ep", None, Timestamp(epoch=3, batch=20, batch_in_epoch=5), 1.0),  # before the last epoch is closed
        ("4ep", None, Timestamp(epoch=4, batch=20), 1.0),
        ("4ep", None, Timestamp(epoch=1, batch=12, batch_in_epoch=7), 10 / 20),  # more batches than the loader said
        ("2iter", "2ep", Timestamp(iteration=1, epoch=3, epoch_in_iteration=1, batch=16, batch_in_epoch=1), 16 / 20),
        ("2iter", "50tok", Timestamp(iteration=1, token_in_iteration=10), 0.6),
        ("2iter", "50tok", Timestamp(iteration=0, token_in_iteration=70), 0.5),  # the iteration is about to be closed
        ("40sec", None, Timestamp(total_wct=timedelta(seconds=10.5)), 10.5 / 40),
        ("3iter", None, Timestamp(iteration=1), 1 / 3),
        ("40sp", None, Timestamp(sample=10), 0.25),
        ("40tok", None, Timestamp(token=10), 0.25),
    ],
)
def test_the_elapsed_fraction_advances_with_batches(
    limit: str, iteration: str | None, timestamp: Timestamp, expected: float
) -> None:
    state = make_state(max_duration=limit, dataloader=[0] * 5)
    state._iteration_length = iteration  # type: ignore[assignment]
    state.timestamp = timestamp

    assert expected == state.get_elapsed_duration()


def test_the_elapsed_fraction_does_not_depend_on_the_active_loader() -> None:
    state = make_state(max_duration="2ep")
    state.train_dataloader = training = [0] * 100
    state.set_dataloader(training, "train", 4)
    state.timestamp = Timestamp(batch=2, batch_in_epoch=2)
    before = state.get_elapsed_duration()
    state.set_dataloader([0] * 3, "eval")

    assert 0.25 == before == state.get_elapsed_duration()


def test_epochs_of_a_loader_without_a_length_are_taken_to_be_as_long_as_those_before() -> None:
    state = make_state(max_duration="4ep", dataloader=iter([0]))
    state.timestamp = Timestamp(batch=3, batch_in_epoch=3)
    first = state.get_elapsed_duration()
    state.timestamp = Timestamp(epoch=2, batch=11, batch_in_epoch=1)

    assert 0.0 == first
    assert 11 / 20 == state.get_elapsed_duration()


def test_a_run_stopped_before_its_first_batch_is_done() -> None:
    state = make_state(max_duration="10ba")
    state.stop_training()

    assert Time(1.0, "dur") == state.get_elapsed_duration()


@pytest.mark.parametrize(("limit", "expected"), [("10ep", "0ba"), ("10ba", "0ba"), ("10sp", "0sp"), (None, "0ba")])
def test_stop_training_ends_the_run_where_it_is(limit: str | None, expected: str) -> None:
    state = make_state(max_duration=limit)
    state.stop_training()

    assert state.max_duration == expected


def test_the_iteration_length_is_in_epochs_or_tokens() -> None:
    state = make_state()
    state._iteration_length = 2  # type: ignore[assignment]
    assert state._iteration_length == "2ep"
    state._iteration_length = "100tok"  # type: ignore[assignment]
    assert state._iteration_length == "100tok"
    with pytest.raises(NotImplementedError, match="must be in 'ep' or 'tok'"):
        state._iteration_length = "3ba"  # type: ignore[assignment]


# ---- loaders and batches ----


def test_loaders_have_labels_and_lengths() -> None:
    state = make_state()
    with pytest.raises(RuntimeError, match="Call `set_dataloader` first"):
        state.dataloader_len = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="`dataloader_label` must be given"):
        state.set_dataloader([1, 2])
    state.set_dataloader([1, 2, 3], "eval", 2)
    assert (state.dataloader_label, state.dataloader_len) == ("eval", "2ba")
    state.dataloader_len = -1  # type: ignore[assignment]
    assert state.dataloader_len == "3ba"
    with pytest.warns(UserWarning, match="DataloaderNumBatchesWarning: .* 3 are used"):
        state.dataloader_len = 9  # type: ignore[assignment]
    assert state.dataloader_len == "3ba"
    state.set_dataloader()
    assert (state.dataloader, state.dataloader_label, state.dataloader_len) == (None, None, None)


def test_a_loader_without_a_length_has_none_until_it_is_given() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    state = make_state(dataloader=torch.utils.data.DataLoader(Endless()))

    assert state.dataloader_len is None
    state.dataloader_len = 5  # type: ignore[assignment]
    assert state.dataloader_len == "5ba"


@pytest.mark.parametrize("batch", [(1, 2), [1, 2]])
def test_parts_of_a_pair_can_be_read_and_replaced(batch: Any) -> None:
    state = make_state()
    state.batch = batch
    state.inputs = 10

    assert (state.inputs, state.targets) == (10, 2)
    state.targets = 20
    assert state.batch == (10, 20)


def test_a_loop_may_assign_inputs_and_targets() -> None:
    state = make_state()
    seen = []
    for state.inputs, state.targets in [(1, 2), (3, 4)]:
        seen.append(state.batch)

    assert seen == [(1, 2), (3, 4)]


def test_batch_items_are_read_and_set_by_key() -> None:
    state = make_state()
    state.batch = (1, 2)
    state.batch_set_item(1, 5)
    assert state.batch == (1, 5)
    assert state.batch_get_item(1) == 5
    state.batch = {"x": 1}
    state.batch_set_item("x", 2)
    assert state.batch == {"x": 2}


@pytest.mark.parametrize(
    "batch",
    [{"pixel_values": 1, "labels": 2}, UserDict(x=1, y=2), SimpleNamespace(image=1, label=2), {0: 1, 1: 2}, (1, 2)],
    ids=lambda batch: type(batch).__name__,
)
def test_inputs_and_targets_are_found_by_their_usual_names(batch: Any) -> None:
    state = make_state()
    state.batch = batch

    assert (1, 2) == (state.batch_get_item(0), state.batch_get_item(1))
    state.batch_set_item(0, 10)
    state.batch_set_item(1, 20)
    assert (10, 20) == (state.batch_get_item(0), state.batch_get_item(1))


@pytest.mark.parametrize(
    "batch", [{"a": 1, "b": 2}, {"image": 1, "input_ids": 2, "labels": 3}], ids=["no candidate", "two candidates"]
)
def test_inputs_that_are_not_known_are_asked_for(batch: Any) -> None:
    state = make_state()
    state.batch = batch
    with pytest.raises(KeyError, match=r"has no 0\. Pass the keys to use, for example `input_key="):
        state.batch_get_item(0)


def test_the_names_of_the_model_come_before_the_usual_names() -> None:
    net = torch.nn.Linear(2, 2)
    state = State(ModuleWithLoss(net, torch.nn.functional.cross_entropy, input_key="b", target_key="c"))
    state.batch = {"image": 1, "b": 2, "labels": 3, "c": 4}

    assert (2, 4) == (state.batch_get_item(0), state.batch_get_item(1))
    assert 1 == state.batch_get_item("image")


def test_parts_of_what_is_no_pair_are_refused() -> None:
    state = make_state()
    state.batch = {"x": 1}
    with pytest.raises(TypeError, match=r"the batch is a dict. Use `state.batch_get_item"):
        state.inputs = 3


class Metric:
    """Has a computed value, as metrics of torchmetrics do until their next update."""

    def __init__(self, value: Any) -> None:
        self._computed = value


def test_metrics_are_printed_as_their_values() -> None:
    state = make_state()
    state.eval_metrics["eval"] = {"Accuracy": Metric(torch.tensor(0.75)), "Loss": Metric(None)}
    state.train_metrics = {"Loss": Metric(torch.tensor(1.23456))}

    assert "{'eval': {'Accuracy': 0.75, 'Loss': not computed}}" == repr(state.eval_metrics)
    assert "{'Loss': 1.235}" == str(state.train_metrics)
    assert "1.235" in state.train_metrics._repr_html_()  # type: ignore[attr-defined]


# ---- values read late ----


def test_losses_read_as_floats_and_metrics_as_tensors() -> None:
    state = make_state()
    state.total_loss_dict = {"loss/train/total": DeferredValue.of_tensor(torch.tensor(0.5))}
    state.train_metric_values = {"Accuracy": DeferredValue(lambda: torch.tensor(0.25))}

    assert state.total_loss_dict == {"loss/train/total": 0.5}
    assert isinstance(state.total_loss_dict["loss/train/total"], float)
    assert torch.equal(torch.tensor(0.25), state.train_metric_values["Accuracy"])


def test_reading_the_train_metrics_brings_them_up_to_date() -> None:
    state = make_state()
    calls = []

    def compute() -> None:
        state._pending_metrics = None
        calls.append(1)

    state._pending_metrics = compute
    assert {} == state.train_metrics == state.train_metrics
    assert calls == [1]


# ---- saving ----


class Counting(Callback):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def trained(seed: int, steps: int, **kwargs: Any) -> State:
    state = make_state(max_duration="4ba", run_name="run", **kwargs)
    state.optimizers = torch.optim.Adam(state.model.parameters(), lr=0.1)  # type: ignore[assignment]
    state.schedulers = torch.optim.lr_scheduler.StepLR(state.optimizers[0], 1, gamma=0.5)
    step(state, seed, steps)
    return state


def step(state: State, seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        state.optimizers.zero_grad()
        state.model(torch.randn(4, 2, generator=generator)).square().mean().backward()
        state.optimizers.step()
        state.schedulers.step()
        state.timestamp = state.timestamp.to_next_batch(4)


def test_a_saved_state_loads_into_a_new_one_and_continues_identically() -> None:
    saved = trained(1, 2, callbacks=[Counting(1), Counting(2)])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded = trained(9, 1, callbacks=[Counting(), Counting()])
    loaded.load_state_dict(torch.load(file, weights_only=False), strict=True)
    for state in (saved, loaded):
        step(state, 5, 2)

    assert saved.timestamp == loaded.timestamp
    # Both of two callbacks of one class keep their state.
    assert [callback.count for callback in loaded.callbacks] == [1, 2]  # type: ignore[attr-defined]
    assert saved.optimizers[0].param_groups[0]["lr"] == loaded.optimizers[0].param_groups[0]["lr"]
    for a, b in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_layout_of_a_saved_state() -> None:
    saved = trained(1, 1, callbacks=Counting(1)).state_dict()

    assert {
        "model",
        "optimizers",
        "schedulers",
        "algorithms",
        "callbacks",
        "timestamp",
        "rank_zero_seed",
        "run_name",
        "integrations",
        "metadata",
    } == set(saved)
    assert list(saved["model"]) == ["weight", "bias"]
    assert list(saved["optimizers"]["Adam"]["state"]) == ["weight", "bias"]
    assert saved["optimizers"]["Adam"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert list(saved["schedulers"]) == ["StepLR"]
    assert saved["callbacks"] == {"Counting": {"count": 1}}
    assert saved["timestamp"]["Timestamp"]["batch"] == 1
    assert (saved["rank_zero_seed"], saved["run_name"], saved["algorithms"]) == (3, "run", [])
    assert {
        "torch_version",
        "device",
        "precision",
        "world_size",
        "device_train_microbatch_size",
    } <= (set(saved["metadata"]))


def test_objects_that_the_saved_state_lacks_are_unchanged_with_a_warning() -> None:
    saved = trained(1, 1).state_dict()
    state = trained(2, 1, callbacks=Counting(7))
    with pytest.warns(UserWarning, match="Counting of `callbacks` is not in the state_dict"):
        state.load_state_dict(saved)

    assert state.callbacks[0].count == 7  # type: ignore[attr-defined]


def test_a_model_that_does_not_match_is_an_error_or_a_warning() -> None:
    saved = trained(1, 1).state_dict()
    saved["model"]["extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        make_state().load_model_state(saved, strict=True)
    with pytest.warns(UserWarning, match=r"Not in the model: \['extra'\]"):
        make_state().load_model_state(saved, strict=False)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    saved = trained(1, 1).state_dict()
    state = trained(2, 1)
    state.optimizers = torch.optim.Adam([state.model.weight], lr=0.1)  # type: ignore[assignment,list-item]
    with pytest.raises(KeyError, match="hold different parameters: bias"):
        state.load_optim_state(saved)


def test_an_optimizer_in_another_order_still_finds_its_parameters() -> None:
    saved = trained(1, 2)
    state = make_state()
    weight, bias = state.model.weight, state.model.bias
    state.optimizers = torch.optim.Adam([bias, weight], lr=0.1)  # type: ignore[assignment,list-item]
    state.load_optim_state(saved.state_dict())

    expected = saved.optimizers[0].state[saved.model.weight]["exp_avg"]  # type: ignore[index]
    assert torch.equal(expected, state.optimizers[0].state[weight]["exp_avg"])  # type: ignore[index]


@pytest.mark.parametrize("name", ["../other", "/other", "a/../../b", "a\\..\\b"])
def test_a_saved_name_of_a_run_that_leads_out_of_its_folders_is_refused(name: str) -> None:
    state = State(model=torch.nn.Linear(1, 1), run_name="own")

    with pytest.raises(
        ValueError, match="The saved `run_name` must not lead out of the folders that are named after it"
    ):
        state.load_state_dict({"run_name": name})

    assert "own" == state.run_name
