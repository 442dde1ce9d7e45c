"""`SelectiveBackprop` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.core import (
    CHANGES_LENGTH,
    REPLACES_MODEL,
    TRANSFORMS_BATCH,
    Algorithm,
    ConflictError,
    Engine,
    Event,
    Placement,
    State,
    Time,
)
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing import SimpleConvModel, SimpleModel, SimpleTransformerModel


class OutputsAreLosses(ComposerModel):
    """Its inputs are the losses; remembers the batches it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen.append(batch)
        outputs: torch.Tensor = self.weight * batch[0].flatten(1).mean(1)
        return outputs

    def loss(self, outputs: Any, batch: Any, reduction: str = "mean") -> torch.Tensor:
        losses: torch.Tensor = outputs
        return losses if reduction == "none" else losses.mean()


def make(algorithms: Any, model: torch.nn.Module | None = None) -> tuple[State, Engine]:
    torch.manual_seed(0)
    model = OutputsAreLosses() if model is None else model
    state = State(model=model, max_duration="10ep", dataloader=[0], algorithms=algorithms)
    engine = Engine(state)
    engine.run_event("init")
    state.timestamp = state.timestamp.copy(epoch=6)
    return state, engine


def pruned(algorithm: SelectiveBackprop, batch: Any, model: torch.nn.Module | None = None) -> State:
    state, engine = make(algorithm, model)
    state.batch = batch
    engine.run_event("after_dataloader")
    return state


def test_the_batch_is_pruned_to_high_losses() -> None:
    x, y = torch.arange(100.0).view(100, 1), torch.arange(100)
    state = pruned(SelectiveBackprop(keep=0.1), (x, y))

    assert (10, 1) == state.batch[0].shape
    assert torch.equal(x[state.batch[1]], state.batch[0])
    assert state.batch[1].min() > 40
    assert isinstance(state.batch, tuple)


@pytest.mark.parametrize("epoch", [4, 5, 8, 9])
@pytest.mark.parametrize("batch_in_epoch", [0, 1, 2, 3])
def test_it_acts_in_its_part_of_the_run_on_every_other_batch(epoch: int, batch_in_epoch: int) -> None:
    state, _ = make(SelectiveBackprop())
    state.train_dataloader = [0] * 4
    state.timestamp = state.timestamp.copy(epoch=epoch, batch_in_epoch=Time.from_batch(batch_in_epoch))
    expected = 5 <= epoch < 9 and batch_in_epoch % 2 == 0

    assert expected is state.algorithms[0].match(Event.AFTER_DATALOADER, state)
    assert state.algorithms[0].match(Event.INIT, state)
    assert not SelectiveBackprop(keep=1).match(Event.AFTER_DATALOADER, state)


def test_losses_are_measured_on_smaller_inputs_but_full_ones_are_kept() -> None:
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    state = pruned(SelectiveBackprop(scale_factor=0.5), [x, y])

    assert (4, 3, 4, 4) == state.model.seen[0][0].shape  # type: ignore[index,union-attr]
    assert (2, 3, 8, 8) == state.batch[0].shape
    assert torch.equal(x[state.batch[1]], state.batch[0])


def test_everything_with_a_row_per_example_loses_the_same_rows() -> None:
    x, y = torch.randint(0, 32, (6, 5)), torch.randint(0, 32, (6, 5))
    batch = {"input_ids": x, "labels": y, "attention_mask": torch.ones(6, 5), "id": torch.arange(6), "step": [3]}
    algorithm = SelectiveBackprop(input_key="input_ids", target_key="labels")
    kept = pruned(algorithm, batch, SimpleTransformerModel()).batch

    assert torch.equal(x[kept["id"]], kept["input_ids"])
    assert torch.equal(y[kept["id"]], kept["labels"])
    assert ((3, 5), (3,), [3]) == (kept["attention_mask"].shape, kept["id"].shape, kept["step"])
    assert 6 == len(batch["id"])


class Attributes:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.x, self.y)[index]


def test_keys_select_inputs_and_targets() -> None:
    class Moves(OutputsAreLosses):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward((batch.x, batch.y))

    state, engine = make(SelectiveBackprop(input_key="x", target_key="y"), Moves())
    state.device.batch_to_device = lambda batch: batch  # type: ignore[method-assign,assignment]
    state.batch = Attributes(torch.rand(4, 1), torch.arange(4))
    engine.run_event("after_dataloader")

    assert ((2, 1), (2,)) == (state.batch.x.shape, state.batch.y.shape)


class Transforms(Algorithm):
    """An augmentation."""

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={TRANSFORMS_BATCH})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        x, y = state.batch
        self.rows = len(x)
        state.batch = (x + 1000, y)


@pytest.mark.parametrize("effect", [TRANSFORMS_BATCH, CHANGES_LENGTH])
@pytest.mark.parametrize("reverse", [False, True])
def test_losses_are_measured_on_clean_inputs_whatever_the_order_of_the_list(reverse: bool, effect: str) -> None:
    transforms = Transforms()
    transforms.placement = Placement(provides={effect})
    algorithms: list[Algorithm] = [SelectiveBackprop(), transforms]
    state, engine = make(algorithms[::-1] if reverse else algorithms)
    state.batch = (torch.rand(4, 1), torch.arange(4))
    engine.run_event("after_dataloader")

    assert state.model.seen[0][0].max() <= 1  # type: ignore[index,union-attr]
    assert 2 == transforms.rows
    assert state.batch[0].min() >= 1000


def test_the_extra_pass_leaves_no_trace() -> None:
    model = SimpleConvModel(norm="batch")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruned(SelectiveBackprop(), (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])), model)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_losses_are_measured_in_the_precision_of_the_run() -> None:
    state, engine = make(SelectiveBackprop(), SimpleModel(num_features=3))
    state.precision = "amp_bf16"
    seen = []
    state.model.fc2.register_forward_hook(lambda *args: seen.append(args[-1].dtype))  # type: ignore[operator,union-attr]
    state.batch = (torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]))
    engine.run_event("after_dataloader")

    assert [torch.bfloat16] == seen


def test_models_without_a_loss_per_example_are_refused_at_init() -> None:
    class NoReduction(OutputsAreLosses):
        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(RuntimeError, match=r"must be used with a `ComposerModel`, .* got Linear"):
        make(SelectiveBackprop(), torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"`NoReduction.loss` must take a keyword argument `reduction`\."):
        make(SelectiveBackprop(), NoReduction())


def test_a_method_that_replaces_the_model_is_excluded() -> None:
    class Swaps(Transforms):
        placement = Placement(provides={REPLACES_MODEL})

    with pytest.raises(ConflictError, match="SelectiveBackprop"):
        make([SelectiveBackprop(), Swaps()])


def test_inputs_without_rows_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a tensor of inputs and a tensor of targets, got list and Tensor"):
        pruned(SelectiveBackprop(), ([1, 2], torch.arange(2)))


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`start` must be in \[0, 1\], got 5"):
        SelectiveBackprop(start=5)
    with pytest.raises(ValueError, match=r"`end` must not be less than `start`, got 0\.1 and 0\.5"):
        SelectiveBackprop(end=0.1)
    with pytest.raises(ValueError, match=r"`interrupt` must not be negative, got -1"):
        SelectiveBackprop(interrupt=-1)
    with pytest.raises(ValueError, match=r"`keep` must be in \(0, 1\], got 0"):
        SelectiveBackprop(keep=0)
    with pytest.raises(ValueError, match=r"`scale_factor` must be in \(0, 1\], got 2"):
        SelectiveBackprop(scale_factor=2)


def test_smaller_inputs_do_not_fit_masks() -> None:
    batch = [torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"`scale_factor` must be 1 for targets that have a value per pixel.* got 0.5"):
        pruned(SelectiveBackprop(scale_factor=0.5), batch)
