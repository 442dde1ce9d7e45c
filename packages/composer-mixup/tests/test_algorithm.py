"""`MixUp` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from composer.algorithms.mixup import MixUp
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import Engine, State
from composer.loss import soft_cross_entropy
from composer.models.module_with_loss import ModuleWithLoss
from composer.testing import SimpleModel


def run(algorithm: MixUp, *events: str, batch: Any = None, outputs: Any = None) -> State:
    torch.manual_seed(0)
    state = State(
        model=SimpleModel(num_features=4, num_classes=3), max_duration="1ep", dataloader=[0], algorithms=algorithm
    )
    engine = Engine(state)
    state.batch = (torch.randn(8, 4, 1, 1), torch.randint(0, 3, (8,))) if batch is None else batch
    engine.run_event("before_forward")
    state.outputs = state.model(state.batch) if outputs is None else outputs
    for event in events:
        if event == "before_backward":
            state.loss = state.model.loss(state.outputs, state.batch)  # type: ignore[operator]
        engine.run_event(event)
    return state


def test_targets_are_mixed_like_the_inputs() -> None:
    algorithm = MixUp(alpha=1.0)
    torch.manual_seed(1)
    x, y = torch.randn(8, 4, 1, 1), torch.randint(0, 3, (8,))
    state = run(algorithm, "before_loss", batch=(x, y))
    m, p = algorithm.mixing, algorithm.indices
    assert p is not None

    torch.testing.assert_close((1 - m) * x + m * x[p], state.inputs)
    torch.testing.assert_close((1 - m) * one_hot(y, 3) + m * one_hot(y[p], 3), state.targets)
    assert torch.equal(y[p], algorithm.permuted_target)  # type: ignore[arg-type]


def test_mixed_targets_are_mixed_again() -> None:
    """Another method may have mixed the inputs first, and their targets with them."""
    algorithm = MixUp(alpha=1.0)
    x, first = torch.randn(8, 4, 1, 1), torch.rand(8, 3).softmax(1)
    state = State(
        model=SimpleModel(num_features=4, num_classes=3), max_duration="1ep", dataloader=[0], algorithms=algorithm
    )
    engine = Engine(state)
    state.batch = x, torch.randint(0, 3, (8,))
    engine.run_event("before_forward")
    state.outputs, state.targets = state.model(state.batch), first
    engine.run_event("before_loss")
    m, p = algorithm.mixing, algorithm.indices
    assert p is not None

    torch.testing.assert_close((1 - m) * first + m * first[p], state.targets)


def test_both_modes_give_the_same_loss() -> None:
    """Cross-entropy is linear in the targets."""
    torch.manual_seed(1)
    batch = torch.randn(8, 4, 1, 1), torch.randint(0, 3, (8,))
    targets = run(MixUp(alpha=1.0), "before_loss", batch=batch)
    losses = run(MixUp(alpha=1.0, interpolate_loss=True), "before_backward", batch=batch)

    torch.testing.assert_close(soft_cross_entropy(targets.outputs, targets.targets), losses.loss)
    assert torch.equal(batch[1], losses.targets)


def test_the_interpolated_loss_is_that_of_the_paper() -> None:
    algorithm = MixUp(alpha=1.0, interpolate_loss=True)
    state = run(algorithm, "before_backward")
    m, (_, y) = algorithm.mixing, state.batch
    assert algorithm.permuted_target is not None

    expected = (1 - m) * cross_entropy(state.outputs, y) + m * cross_entropy(state.outputs, algorithm.permuted_target)
    torch.testing.assert_close(expected, state.loss)


@pytest.mark.parametrize("state_has_precision", [True, False])
def test_both_losses_have_the_precision_of_the_run(state_has_precision: bool) -> None:
    """Autocast computes a float32 loss of bfloat16 outputs; the state may have another precision than autocast."""
    algorithm = MixUp(alpha=1.0, interpolate_loss=True)
    precision = "amp_bf16" if state_has_precision else "fp32"
    model: Any = SimpleModel(num_features=4, num_classes=3)
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithm, precision=precision)
    engine = Engine(state)
    state.batch = torch.randn(8, 4, 1, 1), torch.randint(0, 3, (8,))
    engine.run_event("before_forward")
    with torch.autocast("cpu", torch.bfloat16):
        state.outputs = model(state.batch)
        state.loss = model.loss(state.outputs, state.batch)
    engine.run_event("before_backward")
    m, p = algorithm.mixing, algorithm.indices
    assert p is not None
    outputs, y = state.outputs.float(), state.targets  # type: ignore[union-attr]
    expected = (1 - m) * cross_entropy(outputs, y) + m * cross_entropy(outputs, y[p])

    assert state.outputs.dtype is torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(expected, state.loss, rtol=1e-6 if state_has_precision else 1e-2, atol=0)


def test_two_interpolated_losses_are_discouraged() -> None:
    with pytest.warns(NotIntendedUseWarning, match=r"`MixUp` should not be used together with `MixUp`"):
        Engine(State(model=torch.nn.Linear(1, 1), algorithms=[MixUp(interpolate_loss=True) for _ in range(2)]))


def test_the_targets_are_the_examples_own_after_the_loss_is_mixed() -> None:
    """A mapping is changed in place, so what is put back must be the targets, not the mapping."""
    algorithm, labels = MixUp(alpha=1.0, interpolate_loss=True, input_key="x", target_key="y"), torch.arange(8) % 3

    class Dictionary(torch.nn.Module):
        def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return cross_entropy(outputs, batch["y"])

    state = State(model=Dictionary(), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = {"x": torch.randn(8, 3), "y": labels}
    engine.run_event("before_forward")
    state.outputs = state.batch["x"]
    state.loss = cross_entropy(state.outputs, labels)
    engine.run_event("before_backward")

    assert torch.equal(labels, state.batch["y"])


def test_keys_select_inputs_and_targets() -> None:
    algorithm = MixUp(alpha=1.0, input_key="image", target_key="label")
    batch = {"image": torch.randn(8, 4), "label": torch.randint(0, 3, (8,)), "id": torch.arange(8)}
    state = run(algorithm, "before_loss", batch=batch, outputs=torch.zeros(8, 3))

    assert state.batch["label"].shape == (8, 3)
    assert torch.equal(torch.arange(8), state.batch["id"])


def test_a_negative_alpha_is_refused_at_construction() -> None:
    with pytest.raises(
        ValueError, match=r"`alpha` must not be negative or infinite, got -0.5. Use for example `alpha=0.2`"
    ):
        MixUp(alpha=-0.5)


def test_inputs_that_cannot_be_mixed_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"a tensor of inputs and a tensor of targets, got list and Tensor"):
        run(MixUp(), batch=([1, 2], torch.arange(2)))
    with pytest.raises(NotImplementedError, match=r"outputs to be one tensor.*got dict"):
        run(MixUp(), "before_loss", outputs={"logits": torch.zeros(8, 3)})


def test_only_a_loss_that_is_a_tensor_is_interpolated() -> None:
    state = run(MixUp(interpolate_loss=True))
    state.loss = {"total": torch.zeros(())}
    with pytest.raises(NotImplementedError, match=r"a loss that is one tensor, got dict"):
        Engine(state).run_event("before_backward")


def test_a_model_without_a_loss_is_refused() -> None:
    algorithm = MixUp(interpolate_loss=True)
    state = State(model=torch.nn.Linear(4, 3), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    engine.run_event("before_forward")
    state.outputs, state.loss = state.model(state.inputs), torch.zeros(())
    with pytest.raises(AttributeError, match=r"the model has no such method"):
        engine.run_event("before_backward")


@pytest.mark.parametrize(
    ("loss", "ignored"), [(cross_entropy, -100), (torch.nn.CrossEntropyLoss(ignore_index=255), 255)]
)
@pytest.mark.parametrize("is_map", [False, True])
def test_with_ignored_labels_the_loss_is_the_mean_over_the_others(loss: Any, ignored: int, is_map: bool) -> None:
    """So both modes agree, though torch averages dense targets over all positions."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 2, 2), torch.randint(0, 3, (8, 2, 2) if is_map else (8,))
    y.flatten()[::2] = ignored
    model = ModuleWithLoss(torch.nn.Identity(), loss)
    algorithm = MixUp(alpha=1.0)
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = x, y
    engine.run_event("before_forward")
    state.outputs = state.inputs if is_map else state.inputs.mean(dim=(2, 3))
    engine.run_event("before_loss")
    m, p = algorithm.mixing, algorithm.indices
    assert p is not None
    first, second = loss(state.outputs, y), loss(state.outputs, y[p])

    torch.testing.assert_close((1 - m) * first + m * second, model.loss(state.outputs, state.batch))
