"""`CutMix` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from composer.algorithms.cutmix import CutMix
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import MIXES_INPUTS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.loss import soft_cross_entropy
from composer.testing import SimpleConvModel, SimpleSegmentationModel


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 12, 10, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def run(algorithms: Any, *events: str, batch: Any = None, outputs: Any = None, model: Any = None) -> State:
    torch.manual_seed(0)
    model = SimpleConvModel(num_classes=3) if model is None else model
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithms)
    engine = Engine(state)
    state.batch = make_batch() if batch is None else batch
    engine.run_event("before_forward")
    state.outputs = state.model(state.batch) if outputs is None else outputs
    for event in events:
        if event == "before_backward":
            state.loss = state.model.loss(state.outputs, state.batch)  # type: ignore[operator]
        engine.run_event(event)
    return state


@pytest.mark.parametrize("alpha", [0.2, 1.0])
@pytest.mark.parametrize("uniform_sampling", [False, True])
def test_targets_are_combined_by_the_area_of_the_box(alpha: float, uniform_sampling: bool) -> None:
    algorithm = CutMix(alpha=alpha, uniform_sampling=uniform_sampling)
    x, y = make_batch()
    state = run(algorithm, "before_loss")
    (x1, y1, x2, y2), p = algorithm._bbox, algorithm._indices
    assert p is not None
    expected = x.clone()
    expected[:, :, x1:x2, y1:y2] = x[p][:, :, x1:x2, y1:y2]
    area = 1 - (x2 - x1) * (y2 - y1) / 120

    assert torch.equal(expected, state.inputs)
    torch.testing.assert_close(area * one_hot(y, 3) + (1 - area) * one_hot(y[p], 3), state.targets)
    assert torch.equal(y[p], algorithm._permuted_target)  # type: ignore[arg-type]
    assert area == algorithm._adjusted_lambda


def test_both_modes_give_the_same_loss() -> None:
    """Cross-entropy is linear in the targets."""
    targets = run(CutMix(), "before_loss")
    losses = run(CutMix(interpolate_loss=True), "before_backward")

    torch.testing.assert_close(soft_cross_entropy(targets.outputs, targets.targets), losses.loss)
    assert torch.equal(make_batch()[1], losses.targets)


def test_the_interpolated_loss_equals_that_of_the_paper() -> None:
    algorithm = CutMix(interpolate_loss=True)
    state = run(algorithm, "before_backward")
    area, (_, y) = algorithm._adjusted_lambda, state.batch
    assert algorithm._permuted_target is not None

    expected = area * cross_entropy(state.outputs, y)
    expected += (1 - area) * cross_entropy(state.outputs, algorithm._permuted_target)
    torch.testing.assert_close(expected, state.loss)


@pytest.mark.parametrize("is_announced", [True, False])
def test_both_losses_have_the_precision_of_the_run(is_announced: bool) -> None:
    """Autocast computes a float32 loss of bfloat16 outputs; a loop may also enter it without `state.precision`."""
    algorithm = CutMix(interpolate_loss=True)
    precision = "amp_bf16" if is_announced else "fp32"
    model: Any = SimpleConvModel(num_classes=3)
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithm, precision=precision)
    engine = Engine(state)
    state.batch = make_batch()
    engine.run_event("before_forward")
    with torch.autocast("cpu", torch.bfloat16):
        state.outputs = model(state.batch)
        state.loss = model.loss(state.outputs, state.batch)
    engine.run_event("before_backward")
    m, p = 1 - algorithm._adjusted_lambda, algorithm._indices
    assert p is not None
    outputs, y = state.outputs.float(), state.targets  # type: ignore[union-attr]
    expected = (1 - m) * cross_entropy(outputs, y) + m * cross_entropy(outputs, y[p])

    assert state.outputs.dtype is torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(expected, state.loss, rtol=1e-6 if is_announced else 1e-2, atol=0)


class TestSegmentation:
    def make(self, dense: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(6, 3, 8, 10, generator=generator), torch.randint(0, 2, (6, 8, 10), generator=generator)
        return x, one_hot(y, 2).movedim(-1, 1).float() if dense else y

    @pytest.mark.parametrize("dense", [False, True])
    def test_the_box_is_pasted_into_the_targets_which_are_not_written(self, dense: bool) -> None:
        x, y = self.make(dense)
        before = y.clone()
        algorithm = CutMix()
        state = run(algorithm, "before_loss", batch=(x, y), model=SimpleSegmentationModel())
        (x1, y1, x2, y2), p = algorithm._bbox, algorithm._indices
        assert p is not None
        expected = y.clone()
        expected[..., x1:x2, y1:y2] = y[p][..., x1:x2, y1:y2]

        assert (x2 - x1) * (y2 - y1) > 0
        assert torch.equal(expected, state.targets)
        assert torch.equal(before, y)

    def test_losses_cannot_be_interpolated(self) -> None:
        with pytest.raises(ValueError, match=r"`interpolate_loss` must be False for targets that are images"):
            run(CutMix(interpolate_loss=True), batch=self.make(False), model=SimpleSegmentationModel())


class Halves(Algorithm):
    """A method that mixes each example with its mirror in the batch, half and half."""

    placement = Placement(provides={MIXES_INPUTS})
    events = frozenset({Event.BEFORE_FORWARD, Event.BEFORE_LOSS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        x, y = state.batch
        if event is Event.BEFORE_FORWARD:
            state.batch = (x + x.flip(0)) / 2, y
        else:
            dense = one_hot(y, 3).float()
            state.batch = x, (dense + dense.flip(0)) / 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_mixed_inputs_are_pasted_and_their_targets_are_permuted(reverse: bool, interpolate_loss: bool) -> None:
    """In any order of the list, for targets and for losses."""
    algorithm = CutMix(interpolate_loss=interpolate_loss)
    algorithms = [algorithm, Halves()]
    last = ["before_loss", "before_backward"] if interpolate_loss else ["before_loss"]
    state = run(algorithms[::-1] if reverse else algorithms, *last)
    x, y = make_batch()
    mixed, dense = (x + x.flip(0)) / 2, (one_hot(y, 3) + one_hot(y, 3).flip(0)) / 2
    p, area, (x1, y1, x2, y2) = algorithm._indices, algorithm._adjusted_lambda, algorithm._bbox
    assert p is not None
    expected = area * dense + (1 - area) * dense[p]
    mixed[:, :, x1:x2, y1:y2] = mixed[p][:, :, x1:x2, y1:y2]

    torch.testing.assert_close(mixed, state.inputs)
    if interpolate_loss:
        torch.testing.assert_close(soft_cross_entropy(state.outputs, expected), state.loss)
    else:
        torch.testing.assert_close(expected, state.targets)


def test_two_interpolated_losses_are_discouraged() -> None:
    with pytest.warns(NotIntendedUseWarning, match=r"`CutMix` should not be used together with `CutMix`"):
        Engine(State(model=torch.nn.Linear(1, 1), algorithms=[CutMix(interpolate_loss=True) for _ in range(2)]))


class ByKey(SimpleConvModel):
    """Takes batches that are dicts."""

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(outputs, batch["label"])


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_parts_of_other_batches_are_found_by_key(interpolate_loss: bool) -> None:
    algorithm = CutMix(interpolate_loss=interpolate_loss, input_key="image", target_key="label")
    x, y = make_batch()
    batch = {"image": x, "label": y, "id": torch.arange(8)}
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
    event = "before_backward" if interpolate_loss else "before_loss"
    state = run(algorithm, event, batch=batch, outputs=outputs, model=ByKey(num_classes=3))

    assert not torch.equal(x, state.batch["image"])
    assert torch.equal(torch.arange(8), state.batch["id"])
    if interpolate_loss:
        assert state.batch["label"] is y
        area, partner = algorithm._adjusted_lambda, algorithm._permuted_target
        assert partner is not None
        expected = area * cross_entropy(outputs, y) + (1 - area) * cross_entropy(outputs, partner)
        torch.testing.assert_close(expected, state.loss)
    else:
        assert (8, 3) == state.batch["label"].shape


def test_the_loss_of_a_wrapped_model_is_used() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = SimpleConvModel(num_classes=3)

    algorithm = CutMix(interpolate_loss=True)
    state = State(model=Wrapper(), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = make_batch()
    engine.run_event("before_forward")
    state.outputs, state.loss = torch.zeros(8, 3), torch.tensor(0.0)
    engine.run_event("before_backward")

    # With equal scores the second loss is log 3 for any targets.
    expected = (1 - algorithm._adjusted_lambda) * torch.tensor(3.0).log()
    torch.testing.assert_close(expected, state.loss)


def test_a_negative_alpha_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`alpha` must not be negative or infinite, got -0.5"):
        CutMix(alpha=-0.5)


def test_batches_that_cannot_be_mixed_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a tensor of images and a tensor of targets, got list and Tensor"):
        run(CutMix(), batch=([1, 2], torch.arange(2)))
    with pytest.raises(NotImplementedError, match=r"outputs to be one tensor.*got dict"):
        run(CutMix(), "before_loss", outputs={"logits": torch.zeros(8, 3)})


def test_only_a_loss_that_is_a_tensor_is_interpolated() -> None:
    state = run(CutMix(interpolate_loss=True))
    state.loss = {"total": torch.zeros(())}
    with pytest.raises(NotImplementedError, match=r"a loss that is one tensor, got dict"):
        Engine(state).run_event("before_backward")


def test_a_model_without_a_loss_is_refused() -> None:
    algorithm = CutMix(interpolate_loss=True)
    state = State(model=torch.nn.Linear(4, 3), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = make_batch()
    engine.run_event("before_forward")
    state.outputs, state.loss = torch.zeros(8, 3), torch.zeros(())
    with pytest.raises(AttributeError, match=r"the model has no such method"):
        engine.run_event("before_backward")


@pytest.mark.parametrize("dense", [False, True])
def test_masks_get_the_box_of_their_images(dense: bool) -> None:
    torch.manual_seed(0)
    mask = torch.randint(0, 3, (4, 6, 5))
    target = one_hot(mask, 3).movedim(-1, 1).float() if dense else mask
    state = run(CutMix(), "before_loss", batch=(mask[:, None].float(), target), outputs=torch.zeros(4, 3, 6, 5))
    moved = state.targets.argmax(dim=1) if dense else state.targets

    assert torch.equal(state.inputs[:, 0].long(), moved)


def test_targets_with_other_positions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Targets with positions .* by `CutMix`, got shape \(4, 3, 3\) .* 6 x 5 pixels"
    ):
        run(CutMix(), batch=(torch.zeros(4, 1, 6, 5), torch.zeros(4, 3, 3)))
