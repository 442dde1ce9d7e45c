"""`CutOut` at its event, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.cutout import CutOut, cutout_batch
from composer.core import CHANGES_RESOLUTION, DROPS_PIXELS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import SimpleConvModel


def run(algorithms: Any, batch: Any) -> State:
    state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=[0], algorithms=algorithms)
    engine = Engine(state)
    state.batch = batch
    torch.manual_seed(3)
    engine.run_event("after_dataloader")
    return state


@pytest.mark.parametrize("uniform_sampling", [False, True])
@pytest.mark.parametrize("size", [(16, 16), (16, 24), (15, 9)])
def test_the_inputs_get_the_holes_that_the_function_draws(uniform_sampling: bool, size: tuple[int, int]) -> None:
    x, y = torch.rand(4, 3, *size) + 1, torch.arange(4)
    state = run(CutOut(2, 0.4, uniform_sampling), (x, y))
    torch.manual_seed(3)

    assert torch.equal(cutout_batch(x, 2, 0.4, uniform_sampling), state.inputs)
    assert state.targets is y


def test_inputs_of_other_batches_are_found_by_key() -> None:
    x = torch.ones(4, 3, 8, 8)
    state = run(CutOut(input_key="image"), {"image": x, "id": torch.arange(4)})

    assert (state.batch["image"] == 0).any()
    assert torch.equal(torch.ones(4, 3, 8, 8), x)


class Shrinks(Algorithm):
    """A method that makes images smaller."""

    events = frozenset({Event.AFTER_DATALOADER})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch = tuple(part[..., ::2, ::2] for part in state.batch)


@pytest.mark.parametrize("effect", [CHANGES_RESOLUTION, DROPS_PIXELS])
@pytest.mark.parametrize("reverse", [False, True])
def test_holes_are_cut_in_the_final_size_in_any_order_of_the_list(effect: str, reverse: bool) -> None:
    """One hole of exactly 4 by 4 pixels, where the whole image is hole and image."""
    algorithms = [CutOut(length=1.0), Shrinks(effect)]
    x = torch.ones(2, 3, 8, 8)
    state = run(algorithms[::-1] if reverse else algorithms, (x, x))
    torch.manual_seed(3)

    assert torch.equal(cutout_batch(x[..., ::2, ::2], length=1.0), state.inputs)


def test_numbers_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`num_holes` must not be negative, got -1"):
        CutOut(num_holes=-1)
    with pytest.raises(ValueError, match=r"`length` must be in \[0, 1\], got 16"):
        CutOut(length=16)


def test_inputs_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"`CutOut` cuts holes into a tensor of images, got list"):
        run(CutOut(), ([1, 2], torch.arange(2)))


@pytest.mark.parametrize("shape", [(4, 16), (4,)])
def test_a_batch_that_holds_no_images_is_refused(shape: tuple[int, ...]) -> None:
    """A hole in token ids or rows of features would cross examples."""
    with pytest.raises(ValueError, match=r"batch of images of shape .* Point `input_key` at the images"):
        run(CutOut(input_key="input_ids"), {"input_ids": torch.ones(shape, dtype=torch.int64)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_bytes_and_memory_format_are_kept(dtype: torch.dtype) -> None:
    x = torch.full((4, 3, 8, 8), 7, dtype=dtype).contiguous(memory_format=torch.channels_last)
    state = run(CutOut(), [x, torch.arange(4)])

    assert dtype is state.inputs.dtype
    assert state.inputs.is_contiguous(memory_format=torch.channels_last)
    assert {0, 7} == set(state.inputs.flatten().tolist())
