"""Saved states of other versions, and what data sets, scalers and callbacks take from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist


class Counting(Callback):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Streaming(torch.utils.data.Dataset[int]):
    """Knows where it is, as data sets that are streamed do."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"num_samples": num_samples, "from_beginning": from_beginning}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self.loaded = obj


class Counter(torch.utils.data.IterableDataset[int]):
    """Its `state_dict` takes nothing: it cannot be asked for a position of the training."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}


class Freezing(Algorithm):
    """Takes a parameter out of the optimizer; when it is loaded, at once."""

    events = frozenset({Event.INIT})

    def __init__(self) -> None:
        self.group: dict[str, Any] = {}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.group["params"].pop()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.group["params"].pop()


class Loss(torch.nn.Module):
    """The part of a torchmetrics metric that saving needs."""

    def __init__(self, total: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor(total), persistent=False)
        self._computed: Any = None
        self._update_count = 0

    def persistent(self, mode: bool = False) -> None:
        self._non_persistent_buffers_set = set() if mode else {"total"}


def make(seed: int = 0, **kwargs: Any) -> State:
    torch.manual_seed(seed)
    return State(model=torch.nn.Linear(2, 1), run_name="run", **kwargs)


def loader(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset)


# ---- keys of old files ----


def test_keys_with_an_underscore_are_read() -> None:
    saved = make(rank_zero_seed=5).state_dict()
    weights = {f"module.{name}": value for name, value in saved.pop("model").items()}
    old = {f"_{name}": value for name, value in saved.items()} | {"_is_model_ddp_wrapped": True, "model": weights}
    state = make(seed=1)
    state.load_state_dict(old, strict=True)
    assert state.rank_zero_seed == 5
    assert torch.equal(weights["module.weight"], state.model.weight)  # type: ignore[arg-type]

    other = make(seed=1)
    other.load_model_state(old)
    assert torch.equal(weights["module.weight"], other.model.weight)  # type: ignore[arg-type]


def test_unknown_keys_are_ignored_and_a_missing_model_is_unchanged() -> None:
    saved = make().state_dict()
    state = make(seed=1)
    before = copy.deepcopy(state.model.state_dict())
    state.load_state_dict({**saved, "model": None, "something": 1, "metadata": None, "integrations": None})

    assert torch.equal(before["weight"], state.model.weight)  # type: ignore[arg-type]
    assert not hasattr(state, "something")


def test_a_scaler_is_found_under_any_name() -> None:
    saved = make(scaler=torch.amp.GradScaler("cpu", init_scale=4.0)).state_dict()
    saved["scaler"] = {"ClosureGradScaler": saved["scaler"]["GradScaler"]}
    state = make(scaler=torch.amp.GradScaler("cpu"))
    state.load_state_dict(saved)
    make().load_state_dict(saved)  # which has none

    assert state.scaler is not None
    assert state.scaler.get_scale() == 4.0


def test_one_saved_state_goes_to_the_first_of_two_callbacks() -> None:
    saved = make(callbacks=Counting(3)).state_dict()
    state = make(callbacks=[Counting(), Counting(7)])
    with pytest.warns(UserWarning, match="Counting#2 of `callbacks` is not in the state_dict"):
        state.load_state_dict(saved)

    assert [3, 7] == [callback.count for callback in state.callbacks]  # type: ignore[attr-defined]


def test_algorithms_are_loaded_before_the_optimizers_that_some_of_them_change() -> None:
    def freezing() -> tuple[State, Freezing]:
        algorithm = Freezing()
        state = make(algorithms=algorithm)
        state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1)  # type: ignore[assignment]
        algorithm.group = state.optimizers[0].param_groups[0]
        return state, algorithm

    frozen, algorithm = freezing()
    algorithm.apply(Event.INIT, frozen, Logger(frozen))
    state, _ = freezing()
    state.load_state_dict(frozen.state_dict())

    assert [state.model.weight] == state.optimizers[0].param_groups[0]["params"]


def test_helpers_return_parts_of_the_saved_state() -> None:
    state = make()
    state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1)  # type: ignore[assignment]
    saved = state.state_dict()

    assert saved["optimizers"] == state.get_optim_state_dict()
    assert saved["metadata"] == state._get_state_metadata()
    assert saved["integrations"] == state._get_integrations_state_dict() == {}


class Describing(torch.nn.Linear):
    """As a language model does."""

    def get_metadata(self) -> dict[str, Any]:
        return {"size": self.in_features}


def test_the_metadata_of_a_wrapped_model_is_saved() -> None:
    model = Describing(2, 1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = [model, torch.nn.parallel.DistributedDataParallel(model), torch.compile(model)]
        saved = [State(model=each, run_name="run").state_dict()["integrations"] for each in wrapped]
    finally:
        dist.destroy_process_group()

    assert [{"huggingface": {"size": 2}}] * 3 == saved


# ---- data sets ----


def test_a_streaming_data_set_is_given_its_position() -> None:
    state = make(train_dataloader=loader(Streaming()))
    state.timestamp = state.timestamp.to_next_batch(4)
    saved = state.state_dict()
    assert saved["dataset_state"] == {"train": {"num_samples": 4, "from_beginning": True}, "eval": {}}

    resumed = make(train_dataloader=loader(Streaming()))
    resumed.load_state_dict(saved)
    assert resumed.train_dataloader.dataset.loaded == saved["dataset_state"]["train"]
    assert resumed.dataset_resumption == {"train": True}
    assert saved["dataset_state"]["train"] is not None


def test_a_data_set_that_comes_later_is_given_its_position_then_and_only_once() -> None:
    saved = make(train_dataloader=loader(Streaming())).state_dict()
    resumed = make()
    resumed.load_state_dict(saved)
    assert resumed.dataset_resumption == {}
    first, second = Streaming(), Streaming()
    resumed.train_dataloader = loader(first)
    resumed.train_dataloader = loader(second)

    assert first.loaded == saved["dataset_state"]["train"]
    assert second.loaded is None
    assert resumed.dataset_resumption == {"train": True}


def test_a_position_may_be_given_at_construction() -> None:
    dataset = Streaming()
    state = make(dataloader=loader(dataset), dataset_state={"train": {"at": 2}, "eval": {}})

    assert dataset.loaded == {"at": 2}
    assert state.dataset_resumption == {"train": True}


@pytest.mark.parametrize("data", [None, [1, 2], loader(Counter())], ids=["none", "list", "other"])
def test_other_data_sets_save_no_position(data: Any) -> None:
    assert "dataset_state" not in make(train_dataloader=data).state_dict()
    resumed = make(train_dataloader=data)
    resumed.load_state_dict(make(train_dataloader=loader(Streaming())).state_dict())

    assert resumed.dataset_resumption == {}


# ---- metrics ----


def with_metrics(**kwargs: float) -> State:
    state = make(save_metrics=True)
    state.train_metrics = {name: Loss(total) for name, total in kwargs.items()}
    state.eval_metrics = {"eval": {name: Loss(total) for name, total in kwargs.items()}}
    return state


def test_metrics_are_saved_only_with_save_metrics() -> None:
    state = with_metrics(a=1.0)
    state.save_metrics = False

    assert not {"train_metrics", "eval_metrics"} & set(state.state_dict())


def test_metrics_continue_from_their_counts() -> None:
    saved = with_metrics(a=2.0)
    saved.train_metrics["a"]._update_count, saved.train_metrics["a"]._computed = 7, torch.tensor(0.5)
    state = with_metrics(a=0.0)
    state.load_state_dict(saved.state_dict())
    found = state.train_metrics["a"]

    assert (2.0, 0.5, 7) == (float(found.total), float(found._computed), found._update_count)
    assert float(state.eval_metrics["eval"]["a"].total) == 2.0


def test_metrics_of_old_files_are_read() -> None:
    """Whole metrics, computed values as numpy arrays, and no counts."""
    saved = with_metrics(a=1.0).state_dict()
    whole = Loss(3.0)
    whole._computed = np.float32(0.25)
    saved["train_metrics"] = {"a": whole}
    saved["eval_metrics"]["eval"]["a"] = {
        "state_dict": {"total": torch.tensor(4.0)},
        "_computed": {"x": np.array([0.5])},
    }
    state = with_metrics(a=0.0)
    state.load_state_dict(saved)
    train, evaluated = state.train_metrics["a"], state.eval_metrics["eval"]["a"]

    assert (3.0, 4.0) == (float(train.total), float(evaluated.total))
    assert torch.equal(torch.tensor(0.25), train._computed)
    assert torch.equal(torch.tensor([0.5], dtype=torch.float64), evaluated._computed["x"])
    assert evaluated._update_count == 1


def test_metrics_that_do_not_match_are_named() -> None:
    saved = with_metrics(a=1.0).state_dict()
    del saved["eval_metrics"]
    with pytest.warns(UserWarning, match="The metric b is not in the state_dict"):
        with_metrics(a=0.0, b=0.0).load_state_dict(saved)
    saved["train_metrics"]["a"]["state_dict"] = {"sum": torch.tensor(1.0)}
    with pytest.warns(UserWarning, match=r"metric a does not match.*: \['total'\].*: \['sum'\]"):
        with_metrics(a=0.0).load_state_dict(saved)
